"""Rows to batches of few shapes: padding costs time, and so does compiling another shape.

A line of a batch holds several rows side by side, of which none sees another: as many as there is
room for.

Axes: B lines, S context, T new tokens, N targets.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from deconstruct.evaluate.rows import Row

_SHORTEST = 64  # tokens of context in the narrowest lines
_FULL = 0.95  # about so much of the scarcer room is taken up where a line holds many rows
_OPEN = 256  # lines that are looked through for room


class Shape(NamedTuple):
    """Sizes of a batch: lines, and for each the room for contexts, new tokens and targets.

    `packed` says whether a line may hold new tokens, or more than one row.
    """

    num_lines: int
    context: int
    new: int
    targets: int
    packed: bool

    @property
    def line_tokens(self) -> int:
        return self.context + self.new


class Batch(NamedTuple):
    shape: Shape
    lines: Sequence[Sequence[Row]]

    @property
    def rows(self) -> list[Row]:
        return [row for line in self.lines for row in line]


class Arrays(NamedTuple):
    """A batch as the device takes it; what is left over at the right holds zeros.

    Attributes:
      documents_BS: which row of its line a token belongs to, from 1; None where lines are not
        packed.
      branches_BT: which continuation of its line a new token belongs to; -1 for none.
      follows_BT: the row whose context a new token follows.
      places_BN: which input predicts a target: of S, then of T.
      wanted_BN: whether there is one.
    """

    context_BS: np.ndarray
    documents_BS: np.ndarray | None
    new_BT: np.ndarray
    branches_BT: np.ndarray
    follows_BT: np.ndarray
    places_BN: np.ndarray
    targets_BN: np.ndarray
    wanted_BN: np.ndarray


@dataclasses.dataclass(frozen=True)
class Limits:
    """Attributes:
    max_len: the largest context.
    batch_tokens: about how many tokens a batch holds at most.
    shards: what the number of lines must be a multiple of.
    line_flops: what a line of so many tokens takes.
    compilation_flops: what compiling a shape takes.
    """

    max_len: int
    batch_tokens: int
    shards: int
    line_flops: Callable[[int], float]
    compilation_flops: float


def plan(rows: Sequence[Row], limits: Limits, compiled: Collection[Shape]) -> list[Batch]:
    """All rows in batches, the largest shapes first, so that memory fails at once or never.

    Rows of different sizes share a shape unless one more saves more than its compilation takes;
    those of `compiled` take none.
    """
    sizes_R3 = np.array([(len(r.context), len(r.new), len(r.targets)) for r in rows]).reshape(-1, 3)
    lines_of: dict[Shape, list[list[Row]]] = {}
    for shape, own in _groups(sizes_R3, limits, compiled):
        lines = _pack(sizes_R3[own], shape)
        lines_of.setdefault(shape, []).extend([[rows[own[r]] for r in line] for line in lines])
    return [
        Batch(shape, lines_of[shape][first : first + shape.num_lines])
        for shape in sorted(lines_of, key=lambda shape: (shape.line_tokens, shape), reverse=True)
        for first in range(0, len(lines_of[shape]), shape.num_lines)
    ]


def fill(batch: Batch) -> Arrays:
    shape = batch.shape
    assert shape.packed or (shape.new == 0 and all(len(line) == 1 for line in batch.lines))
    lines = [_join(line, shape.context) for line in batch.lines]

    def padded(name: str, size: int, padding: int = 0) -> np.ndarray:
        array = np.full((shape.num_lines, size), padding, np.int32)
        for b, line in enumerate(lines):
            values = getattr(line, name)
            array[b, : len(values)] = values
        return array

    return Arrays(
        padded("context", shape.context),
        padded("documents", shape.context) if shape.packed else None,
        padded("new", shape.new),
        padded("branches", shape.new, padding=-1),
        padded("follows", shape.new),
        padded("places", shape.targets),
        padded("targets", shape.targets),
        padded("wanted", shape.targets).astype(bool),
    )


@dataclasses.dataclass
class _Line:
    """The rows of a line, joined, as `Arrays` has them."""

    context: list[int] = dataclasses.field(default_factory=list)
    documents: list[int] = dataclasses.field(default_factory=list)
    new: list[int] = dataclasses.field(default_factory=list)
    branches: list[int] = dataclasses.field(default_factory=list)
    follows: list[int] = dataclasses.field(default_factory=list)
    places: list[int] = dataclasses.field(default_factory=list)
    targets: list[int] = dataclasses.field(default_factory=list)
    wanted: list[bool] = dataclasses.field(default_factory=list)


def _join(rows: Iterable[Row], room: int) -> _Line:
    line = _Line()
    for document, row in enumerate(rows, start=1):
        branch = max(line.branches, default=-1) + 1
        to_context, to_new = len(line.context), room + len(line.new) - len(row.context)
        for target in row.targets:
            is_in_context = target.place < len(row.context)
            line.places.append(target.place + (to_context if is_in_context else to_new))
            line.targets.append(target.id)
            line.wanted.append(True)
        line.context += row.context
        line.documents += [document] * len(row.context)
        line.new += row.new
        line.branches += [branch + own for own in row.branches]
        line.follows += [document] * len(row.new)
    return line


def _groups(
    sizes_R3: np.ndarray, limits: Limits, compiled: Collection[Shape]
) -> Iterator[tuple[Shape, np.ndarray]]:
    """The cheapest way to give rows of like sizes a shape: (shape, numbers of its rows)."""
    widths = [_SHORTEST << i for i in range(20) if _SHORTEST << i < limits.max_len]
    widths.append(limits.max_len)
    longest_R = np.minimum(np.max(sizes_R3[:, :2], axis=1, initial=1), limits.max_len)
    class_R = np.searchsorted(widths, longest_R)
    least_costs, ways = [0.0], [[]]  # of the classes before a number
    for end in range(1, len(widths) + 1):
        choices = []
        for begin in reversed(range(end)):  # the narrowest first: of equal costs it is taken
            own = np.flatnonzero((begin <= class_R) & (class_R < end))
            if len(own) == 0:
                choices.append((least_costs[begin], ways[begin]))
                continue
            cost, shape = _best(sizes_R3[own], widths[end - 1], limits, compiled)
            choices.append((least_costs[begin] + cost, [*ways[begin], (shape, own)]))
        cost, way = min(choices, key=lambda choice: choice[0])
        least_costs.append(cost)
        ways.append(way)
    return iter(ways[-1])


def _best(
    sizes_R3: np.ndarray, width: int, limits: Limits, compiled: Collection[Shape]
) -> tuple[float, Shape]:
    """(FLOPs, shape) of the cheapest shape for rows whose contexts are `width` long at most."""
    most_3 = sizes_R3.max(axis=0)
    choices = [shape for shape in compiled if _holds(shape, sizes_R3)]
    for new in _rooms_for_new(width, int(most_3[1])):
        targets = max(width + new, -(-int(most_3[2]) // 64) * 64)
        shape = Shape(0, width, new, targets, packed=True)
        num_lines = _lines_of_batch(shape, _least_lines(sizes_R3, shape), limits)
        shape = shape._replace(num_lines=num_lines)
        alone = shape._replace(packed=False)
        choices.append(alone if _holds(alone, sizes_R3) else shape)

    def cost(shape: Shape) -> float:
        num_batches = -(-_least_lines(sizes_R3, shape) // shape.num_lines)
        reading = num_batches * shape.num_lines * limits.line_flops(shape.line_tokens)
        return reading + (0 if shape in compiled else limits.compilation_flops)

    return min((cost(shape), shape) for shape in choices)


def _holds(shape: Shape, sizes_R3: np.ndarray) -> bool:
    """Whether each row has room; without packing, each as the only one of its line as well."""
    if not np.all(sizes_R3.max(axis=0) <= shape[1:4]):
        return False
    return shape.packed or (shape.new == 0 and bool(np.all(2 * sizes_R3[:, 0] > shape.context)))


def _rooms_for_new(width: int, most: int) -> list[int]:
    """Few sizes, so that tasks share them: 0, 8, 16, ..., a quarter of the context's, two, ..."""
    quarter = -(-width // 4)
    small = [8 << i for i in range(quarter.bit_length()) if 8 << i < quarter]
    rooms = [0, *small, *(quarter * i for i in range(1, 9))]
    return [room for room in rooms if room >= most] or [-(-most // quarter) * quarter]


def _least_lines(sizes_R3: np.ndarray, shape: Shape) -> int:
    """About how many lines the rows need."""
    room_3 = np.maximum(shape[1:4], 1)
    alone = int(np.sum(np.any(2 * sizes_R3 > room_3, axis=1)))
    full = int(np.ceil(np.max(sizes_R3.sum(axis=0) / room_3) / _FULL))
    return min(max(full, alone), len(sizes_R3))


def _lines_of_batch(shape: Shape, num_lines: int, limits: Limits) -> int:
    """A multiple of the shards: as many as `batch_tokens` allow, or a power of two that is enough.

    Fewer sizes than there are numbers of lines: what remains of a batch costs less than compiling.
    """
    most = max(limits.batch_tokens // shape.line_tokens // limits.shards, 1)
    needed = 1 << (-(-num_lines // limits.shards) - 1).bit_length()
    return limits.shards * min(most, needed)


def _pack(sizes_R3: np.ndarray, shape: Shape) -> list[list[int]]:
    """Lines of row numbers: each into the first line with room for it, the largest rows first."""
    if not shape.packed:
        return [[r] for r in range(len(sizes_R3))]
    room_3 = np.array(shape[1:4])
    order = np.argsort(-np.max(sizes_R3 / np.maximum(room_3, 1), axis=1), kind="stable")
    left_L3 = np.tile(room_3, (len(sizes_R3), 1))
    lines: list[list[int]] = []
    for r in order:
        first = max(len(lines) - _OPEN, 0)  # those before have little room, and rows get smaller
        fits = np.all(left_L3[first : len(lines) + 1] >= sizes_R3[r], axis=1)
        line = first + int(np.argmax(fits))
        if line == len(lines):
            lines.append([])
        left_L3[line] -= sizes_R3[r]
        lines[line].append(int(r))
    return lines
