"""Rows to batches of few shapes: padding costs time, and so does compiling another shape.

Axes: B rows, S context, T new tokens, N targets.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from deconstruct.evaluate.rows import Row

# What a batch costs beside its tokens: all weights are read, however few rows there are.
BATCH_TOKENS = 128
_CHOICES = 8  # targets beside one for each new token: the first of each continuation


class Shape(NamedTuple):
    """Sizes of a batch: rows, and for each row its context, new tokens and targets."""

    num_rows: int
    context: int
    new: int
    targets: int

    @property
    def row_tokens(self) -> int:
        return self.context + self.new

    def holds(self, row: "Shape") -> bool:
        return all(size <= most for size, most in zip(row[1:], self[1:], strict=True))

    def cost(self, num_rows: int) -> int:
        """What so many rows take, in tokens, padding included."""
        num_batches = -(-num_rows // self.num_rows)
        return num_batches * (self.num_rows * self.row_tokens + BATCH_TOKENS)


class Batch(NamedTuple):
    shape: Shape
    rows: Sequence[Row]


class Arrays(NamedTuple):
    """A batch as the device takes it; rows and places that are left over hold zeros.

    Attributes:
      lengths_B: tokens of each context.
      branches_BT: which continuation a new token belongs to.
      places_BN: which input predicts a target: of S, then of T.
      wanted_BN: whether there is one.
    """

    context_BS: np.ndarray
    lengths_B: np.ndarray
    new_BT: np.ndarray
    branches_BT: np.ndarray
    places_BN: np.ndarray
    targets_BN: np.ndarray
    wanted_BN: np.ndarray


@dataclasses.dataclass(frozen=True)
class Limits:
    """Attributes:
    max_len: the largest context.
    batch_tokens: about how many tokens a batch holds at most.
    shards: what the number of rows must be a multiple of.
    compilation_tokens: what compiling a shape costs, in tokens that could be read instead.
    """

    max_len: int
    batch_tokens: int
    shards: int
    compilation_tokens: int


def plan(rows: Sequence[Row], limits: Limits, compiled: Collection[Shape]) -> list[Batch]:
    """All rows in batches, the largest shapes first, so that memory fails at once or never.

    A shape of its own is made for some rows only where it saves more than its compilation costs;
    those of `compiled` cost none.
    """
    sizes: dict[Shape, list[Row]] = {}
    for row in rows:
        sizes.setdefault(_size(row, limits.max_len), []).append(row)
    groups = {**{shape: [] for shape in compiled}, **sizes}

    def cost(shape: Shape, num_rows: int) -> int:
        return _with_rows(shape, num_rows, limits).cost(num_rows)

    for size in sorted(sizes, key=lambda s: (s.row_tokens, s)):
        own, others = groups[size], [s for s in groups if s != size and s.holds(size)]
        if not others:
            continue
        added = {s: cost(s, len(groups[s]) + len(own)) - cost(s, len(groups[s])) for s in others}
        best = min(others, key=lambda s: (added[s], s))
        saved = added[best] - cost(size, len(own))
        if saved < (
            0 if _with_rows(size, len(own), limits) in compiled else limits.compilation_tokens
        ):
            groups[best] = groups[best] + groups.pop(size)
    shapes = {_with_rows(size, len(own), limits): own for size, own in groups.items() if own}
    return [
        Batch(shape, shapes[shape][first : first + shape.num_rows])
        for shape in sorted(shapes, key=lambda s: (s.row_tokens, s), reverse=True)
        for first in range(0, len(shapes[shape]), shape.num_rows)
    ]


def fill(batch: Batch) -> Arrays:
    shape = batch.shape

    def zeros(*sizes: int) -> np.ndarray:
        return np.zeros((shape.num_rows, *sizes), np.int32)

    new, targets = (shape.new,), (shape.targets,)
    arrays = Arrays(
        zeros(shape.context),
        zeros() + 1,
        zeros(*new),
        zeros(*new),
        zeros(*targets),
        zeros(*targets),
        zeros(*targets).astype(bool),
    )
    for b, row in enumerate(batch.rows):
        length = len(row.context)
        arrays.context_BS[b, :length] = row.context
        arrays.lengths_B[b] = length
        arrays.new_BT[b, : len(row.new)] = row.new
        arrays.branches_BT[b] = len(row.new)  # left-over places are a branch of their own
        arrays.branches_BT[b, : len(row.new)] = row.branches
        for n, target in enumerate(row.targets):
            beyond = target.place - length  # new tokens come behind the context's padding
            arrays.places_BN[b, n] = target.place if beyond < 0 else shape.context + beyond
            arrays.targets_BN[b, n] = target.id
            arrays.wanted_BN[b, n] = True
    return arrays


def _size(row: Row, max_len: int) -> Shape:
    """The least shape that holds the row, its number of rows still open (0)."""
    context, new = min(_round_up(len(row.context)), max_len), _round_up(len(row.new))
    targets = len(row.targets)
    if new:
        targets = new + _CHOICES * -(-max(targets - len(row.new), 1) // _CHOICES)
    else:
        targets = _CHOICES if targets <= _CHOICES else max(context, _round_up(targets))
    return Shape(0, context, new, targets)


def _with_rows(size: Shape, num_rows: int, limits: Limits) -> Shape:
    """With a batch's number of rows: a power of 2 times the shards, no more than needed.

    One that has been compiled has its number.
    """
    if size.num_rows:
        return size
    most = max(limits.batch_tokens // size.row_tokens // limits.shards, 1)
    needed = -(-num_rows // limits.shards)
    rows = min(1 << (most.bit_length() - 1), 1 << (needed - 1).bit_length())
    return size._replace(num_rows=limits.shards * rows)


def _round_up(size: int) -> int:
    """The next of 0, 16, 24, 32, 48, 64, 96, 128, ...: at most half as much again."""
    if size == 0:
        return 0
    power = 1 << max((size - 1).bit_length(), 4)
    return power * 3 // 4 if power > 16 and size <= power * 3 // 4 else power
