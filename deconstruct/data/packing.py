"""Documents to rows, rows to batches, in numpy.

A row is `max_len + 1` ids; rows do not overlap and leave nothing out, and a document that does not
fit goes on in the next row. Where a document starts is recorded beside the ids, so an end-of-text
id inside a document is a token like any other. All targets are learned with weight 1, the one
across a boundary (the next document's leading end-of-text) too; padding has weight 0.

B batch, T tokens of a row that are read (max_len).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

PADDING_ID = 0  # in every vocabulary; rows know their padding by number, never by id


class Row(NamedTuple):
    """A row of ids.

    Attributes:
      ids: (max_len + 1,) integers.
      starts: (n,) int32, increasing: where in the row a document starts.
      num_tokens: how many ids are real; the rest is padding.
    """

    ids: np.ndarray
    starts: np.ndarray
    num_tokens: int


class Batch(NamedTuple):
    """What a step reads, (B, T) each, numpy or jax.

    Attributes:
      tokens_BT: int32, a row without its last id.
      targets_BT: int32, a row without its first id.
      weights_BT: float32, 1 where the target is a real token, else 0.
      positions_BT: int32, from 0 at each start of a document and of the row.
      segments_BT: int32, documents counted within the row from 1; padding is one more segment.
    """

    tokens_BT: np.ndarray
    targets_BT: np.ndarray
    weights_BT: np.ndarray
    positions_BT: np.ndarray
    segments_BT: np.ndarray


class Packer:
    """Documents in, rows of `row_length` ids out, all ids in order; the last row is padded."""

    def __init__(self, row_length: int):
        self._row_length = row_length
        self._begin_row()

    def add(self, ids: np.ndarray) -> list[Row]:
        """Appends a document (n,) and returns the rows that are now full.

        Raises:
          ValueError: a document without ids.
        """
        if not len(ids):
            raise ValueError("a document without ids cannot be packed")
        rows = []
        self._starts.append(self._filled)
        taken = 0
        while taken < len(ids):
            count = min(self._row_length - self._filled, len(ids) - taken)
            self._ids[self._filled : self._filled + count] = ids[taken : taken + count]
            self._filled += count
            taken += count
            if self._filled == self._row_length:
                rows += self.finish()
        return rows

    def finish(self) -> list[Row]:
        """Returns the row begun, padded, if there is one."""
        if not self._filled:
            return []
        row = Row(self._ids, np.array(self._starts, np.int32), self._filled)
        self._begin_row()
        return [row]

    def _begin_row(self) -> None:
        self._ids = _empty_row(self._row_length)
        self._starts: list[int] = []
        self._filled = 0


def padding_row(row_length: int) -> Row:
    """A row of padding alone: it fills a batch and weighs nothing."""
    return Row(_empty_row(row_length), np.zeros(0, np.int32), 0)


def make_batch(rows: Sequence[Row]) -> Batch:
    """The batch of `rows`, one each."""
    ids = np.stack([row.ids for row in rows]).astype(np.int32)
    begins = np.zeros(ids.shape, bool)  # where positions restart and a segment begins
    begins[:, 0] = True
    weights = np.zeros(ids.shape, np.float32)
    for i, row in enumerate(rows):
        begins[i, row.starts] = True
        begins[i, row.num_tokens : row.num_tokens + 1] = True
        weights[i, : row.num_tokens] = 1.0
    index = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    begun_at = np.maximum.accumulate(np.where(begins, index, 0), axis=1)
    batch = Batch(
        tokens_BT=ids[:, :-1],
        targets_BT=ids[:, 1:],
        weights_BT=weights[:, 1:],
        positions_BT=(index - begun_at)[:, :-1],
        segments_BT=np.cumsum(begins, axis=1, dtype=np.int32)[:, :-1],
    )
    return Batch(*(np.ascontiguousarray(array) for array in batch))


def _empty_row(row_length: int) -> np.ndarray:
    return np.full(row_length, PADDING_ID, np.int32)
