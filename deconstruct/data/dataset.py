"""A prepared directory opened for reading: its rows by split and number."""

import bisect
import functools
import itertools
import os
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from deconstruct import tokenizer as tokenizer_lib
from deconstruct.data import packing, prepared, shards


class PreparedDataset:
    """The rows of a prepared directory, by split and number; cheap to copy to a worker."""

    def __init__(self, info: prepared.PreparedInfo):
        self.info = info

    def __getstate__(self):
        return {"info": self.info}

    @property
    def path(self) -> str:
        return self.info.path

    @property
    def max_len(self) -> int:
        return self.info.max_len

    @property
    def vocab_size(self) -> int:
        return self.info.vocab_size

    @property
    def token_bytes(self) -> np.ndarray:
        """Bytes of text that each id stands for, (vocab_size,) int32."""
        return self.info.token_bytes

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.info.shards)

    @functools.cached_property
    def tokenizer(self) -> tokenizer_lib.Tokenizer:
        path = pathlib.Path(self.path, prepared.TOKENIZER_FILE)
        tokenizer = tokenizer_lib.load_tokenizer(str(path))
        if tokenizer.sha256 != self.info.tokenizer_sha256:
            raise ValueError(f"{path} is not the tokenizer that the rows were made with")
        return tokenizer

    def num_rows(self, split: str) -> int:
        """Rows of a split. ValueError when there is no such split."""
        if split not in self.info.shards:
            raise ValueError(f"{self.path} has no split {split!r}, only {', '.join(self.splits)}")
        return self.info.counts[split]["rows"]

    def rows(self, split: str, numbers: Sequence[int]) -> list[packing.Row]:
        """Rows by number, from 0 in the order of the source.

        Raises:
          ValueError: a shard that is damaged or cannot be read, or an id outside the vocabulary;
            names the shard.
        """
        rows: list[packing.Row | None] = [None] * len(numbers)
        by_shard: dict[int, list[int]] = {}  # shard -> places in `numbers`
        for place, number in enumerate(numbers):
            by_shard.setdefault(bisect.bisect_right(self._ends[split], number), []).append(place)
        for index, places in by_shard.items():
            found = self._rows_of_shard(split, index, [numbers[place] for place in places])
            for place, row in zip(places, found, strict=True):
                rows[place] = row
        return rows

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ValueError, naming the shard, if a model of `vocab_size` cannot embed all ids."""
        for shard in itertools.chain.from_iterable(self.info.shards.values()):
            if shard.max_token_id >= vocab_size:
                raise ValueError(
                    f"{pathlib.Path(self.path, shard.file)} holds token id {shard.max_token_id}, "
                    f"outside the model's vocabulary of {vocab_size}; the tokenizer of this data "
                    f"has {self.vocab_size} ids"
                )

    def _rows_of_shard(self, split: str, index: int, numbers: list[int]) -> list[packing.Row]:
        shard = self.info.shards[split][index]
        first = self._ends[split][index] - shard.rows
        path = pathlib.Path(self.path, shard.file)
        records = shards.read_records(path, [int(number) - first for number in numbers])
        rows = [self._parse(record) for record in records]
        lowest = min(int(row.ids.min()) for row in rows)
        highest = max(int(row.ids.max()) for row in rows)
        if lowest < 0 or highest >= self.vocab_size:
            raise ValueError(
                f"{path} holds token ids from {lowest} to {highest}, outside the vocabulary of "
                f"{self.vocab_size}"
            )
        return rows

    @functools.cached_property
    def _parse(self) -> Callable[[bytes], packing.Row]:
        return prepared.parser(self.max_len, self.vocab_size)

    @functools.cached_property
    def _ends(self) -> dict[str, list[int]]:
        """Split -> for each shard, the number of rows up to its end."""
        return {
            split: list(itertools.accumulate(shard.rows for shard in own))
            for split, own in self.info.shards.items()
        }


def open_dataset(path: str | os.PathLike) -> PreparedDataset:
    """Opens prepared data.

    Raises:
      ValueError: it is not whole, its shards hold ids outside its own vocabulary, or `path` is a
        URL.
    """
    dataset = PreparedDataset(prepared.read_info(path))
    dataset.check_vocabulary(dataset.vocab_size)
    return dataset


def first_tokens(dataset: PreparedDataset, count: int) -> np.ndarray:
    """The first `count` ids (count,) int32 of the training split, in the order of the source.

    Raises:
      ValueError: it holds fewer.
    """
    parts, found = [], 0
    for number in range(dataset.num_rows("train")):
        if found >= count:
            break
        (row,) = dataset.rows("train", [number])
        parts.append(row.ids[: row.num_tokens].astype(np.int32))
        found += row.num_tokens
    if found < count:
        raise ValueError(f"{dataset.path}: the training split has only {found} tokens, not {count}")
    return np.concatenate(parts)[:count]
