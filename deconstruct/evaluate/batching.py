"""Rows to batches of few shapes: padding costs time, and so does compiling another shape.

Axes: B rows, S context, T new tokens, N targets.
"""

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from deconstruct.evaluate.rows import Row

# What a batch costs beside its tokens: all weights are read, however few rows there are.
BATCH_TOKENS = 128
_CHOICES = 8  # continuations of one token each add a target without a token


class Shape(NamedTuple):
    """Sizes of a batch: rows, and for each row its context, new tokens and further targets.

    Each token may predict a target; `further` are those that a token predicts beside its first.
    """

    num_rows: int
    context: int
    new: int
    further: int

    @property
    def row_tokens(self) -> int:
        return self.context + self.new

    @property
    def targets(self) -> int:
        return self.row_tokens + self.further

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

    Rows of different sizes share a shape unless one more saves more than its compilation costs;
    those of `compiled` cost none.
    """
    sizes: dict[Shape, list[Row]] = {}
    for row in rows:
        sizes.setdefault(_size(row, limits.max_len), []).append(row)
    shapes: dict[Shape, list[Row]] = {}
    for size, own in _join(sizes, limits, compiled).items():
        shapes.setdefault(_best(size, len(own), limits, compiled).shape, []).extend(own)
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


class _Choice(NamedTuple):
    cost: int
    shape: Shape


def _best(size: Shape, num_rows: int, limits: Limits, compiled: Collection[Shape]) -> _Choice:
    """The cheapest shape for so many rows of a size, and its cost with its compilation."""
    own = _with_rows(size, num_rows, limits)
    new = _Choice(own.cost(num_rows) + limits.compilation_tokens, own)
    ready = [_Choice(s.cost(num_rows), s) for s in compiled if s.holds(size)]
    return min([new, *ready])


def _join(
    sizes: Mapping[Shape, list[Row]], limits: Limits, compiled: Collection[Shape]
) -> dict[Shape, list[Row]]:
    """Puts two sizes together as long as that saves something, the most saving pair first."""
    groups = dict(sizes)
    costs = {s: _best(s, len(own), limits, compiled).cost for s, own in groups.items()}

    def saving(a: Shape, b: Shape) -> int:
        joint = _best(_holding(a, b), len(groups[a]) + len(groups[b]), limits, compiled)
        return costs[a] + costs[b] - joint.cost

    savings = {pair: saving(*pair) for pair in itertools.combinations(groups, 2)}
    while savings:
        a, b = pair = max(savings, key=savings.get)
        if savings[pair] <= 0:
            break
        joint = _holding(a, b)
        own = [row for size in dict.fromkeys((joint, a, b)) for row in groups.pop(size, ())]
        savings = {p: saved for p, saved in savings.items() if not {a, b, joint} & {*p}}
        groups[joint] = own
        costs[joint] = _best(joint, len(own), limits, compiled).cost
        savings |= {(s, joint): saving(s, joint) for s in groups if s != joint}
    return groups


def _holding(a: Shape, b: Shape) -> Shape:
    return Shape(*map(max, a, b))


def _size(row: Row, max_len: int) -> Shape:
    """The least shape that holds the row, its number of rows still open (0)."""
    context, new = min(_round_up(len(row.context)), max_len), _round_up(len(row.new))
    further = max(len(row.targets) - context - new, 0)
    return Shape(0, context, new, -(-further // _CHOICES) * _CHOICES)


def _with_rows(size: Shape, num_rows: int, limits: Limits) -> Shape:
    """With a batch's number of rows: a multiple of the shards that leaves few rows over."""
    most = max(limits.batch_tokens // size.row_tokens // limits.shards, 1)
    needed = -(-num_rows // limits.shards)
    num_batches = -(-needed // most)
    return size._replace(num_rows=limits.shards * -(-needed // num_batches))


def _round_up(size: int) -> int:
    """The next of 0, 8, 16, ..., 64, 80, 96, 112, 128, 160, ...: a quarter more at most, or 8."""
    step = max(8, 1 << max(size - 1, 1).bit_length() >> 3)
    return -(-size // step) * step
