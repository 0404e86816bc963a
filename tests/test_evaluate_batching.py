"""Rows to batches: every row once, in a shape that holds it, and few shapes."""

import dataclasses

import numpy as np
import pytest

from deconstruct.evaluate import batching
from deconstruct.evaluate.rows import Row, Target


def make_rows(count, seed=0, max_len=256):
    rng = np.random.default_rng(seed)
    found = []
    for request in range(count):
        row = Row(rng.integers(1, 99, rng.integers(1, max_len + 1)).tolist())
        first = len(row.context) - 1
        if request % 3:
            for branch in range(rng.integers(1, 12)):
                size = int(rng.integers(0, 9))
                row.new += rng.integers(1, 99, size).tolist()
                row.branches += [branch] * size
                row.targets.append(Target((request,), first, branch))
            row.targets += [Target((request,), first + 1 + i, i) for i in range(len(row.new))]
        else:
            scored = rng.integers(1, len(row.context) + 1)
            row.targets = [Target((request,), first - i, i) for i in range(scored)]
        found.append(row)
    return found


LIMITS = batching.Limits(
    max_len=256,
    batch_tokens=1024,
    shards=1,
    line_flops=lambda length: 1e6 * length * (1 + length / 256),
    compilation_flops=4e10,
)
# A compilation that costs nothing, as much as a few thousand tokens, and more than all else.
COMPILATIONS = 0, 2e9, 1e15


def assert_placed_once(rows, batches):
    placed = [row for batch in batches for row in batch.rows]
    assert sorted(map(id, placed)) == sorted(map(id, rows))


@pytest.mark.parametrize("count", [1, 7, 300])
@pytest.mark.parametrize("shards", [1, 8])
def test_every_row_is_in_one_batch_that_holds_it(count, shards):
    rows = make_rows(count)
    limits = dataclasses.replace(LIMITS, shards=shards)
    batches = batching.plan(rows, limits, ())
    assert_placed_once(rows, batches)
    for batch in batches:
        shape = batch.shape
        assert shape.num_lines % shards == 0 and len(batch.lines) <= shape.num_lines
        assert shape.context <= 256
        for line in batch.lines:
            assert sum(len(row.context) for row in line) <= shape.context
            assert sum(len(row.new) for row in line) <= shape.new
            assert sum(len(row.targets) for row in line) <= shape.targets
            assert shape.packed or (len(line) == 1 and shape.new == 0)
        assert shape.num_lines * shape.line_tokens <= max(1024, shards * shape.line_tokens)
    sizes = [batch.shape.line_tokens for batch in batches]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("flops", COMPILATIONS)
@pytest.mark.parametrize("batch_tokens", [256, 1024])
def test_no_row_is_lost_to_a_shape_that_is_compiled(flops, batch_tokens):
    """Whatever was scored before, and whether or not it filled the batches of those shapes."""
    limits = dataclasses.replace(LIMITS, compilation_flops=flops, batch_tokens=batch_tokens)
    compiled = {}
    for seed, count in enumerate([40, 3, 300, 40, 40, 1, 120, 40]):
        rows = make_rows(count, seed % 3)
        batches = batching.plan(rows, limits, compiled)
        assert_placed_once(rows, batches)
        compiled.update((batch.shape, None) for batch in batches)


def test_a_shape_must_save_more_than_it_costs():
    """Where pairs of tokens cost more than tokens, short rows want narrow lines."""
    rows = [Row([1] * size) for size in 40 * [10, 30, 120, 250]]

    def shapes_and_cost(flops, compiled=()):
        limits = dataclasses.replace(LIMITS, compilation_flops=flops, line_flops=lambda n: n**2)
        batches = batching.plan(rows, limits, compiled)
        shapes = [batch.shape for batch in batches]
        return {*shapes}, sum(s.num_lines * limits.line_flops(s.line_tokens) for s in shapes)

    (many, least), (one, most) = shapes_and_cost(0), shapes_and_cost(1e15)
    assert len(many) > len(one) == 1 and least < most
    assert shapes_and_cost((most - least) / 10)[0] != one == shapes_and_cost(most)[0]
    assert shapes_and_cost(1e15, compiled=many)[0] <= many | one


def test_lines_are_full():
    """Of rows that are short, and where a few are long."""
    rng = np.random.default_rng(0)
    rows = [Row([1] * int(size)) for size in rng.integers(5, 60, 400)]
    rows += [Row([1] * 250) for _ in range(3)]
    batches = batching.plan(rows, LIMITS, ())
    read = sum(batch.shape.num_lines * batch.shape.line_tokens for batch in batches)
    assert read < 1.1 * sum(len(row.context) for row in rows)


def test_rows_as_long_as_a_line_are_not_isolated():
    """Whole windows need no masks of documents, and leave none over."""
    rows = [Row([1] * 256) for _ in range(9)] + [Row([1] * 200)]
    batches = batching.plan(rows, LIMITS, ())
    assert {batch.shape for batch in batches} == {batching.Shape(4, 256, 0, 256, False)}
    assert batching.fill(batches[0]).documents_BS is None
    (short,) = batching.plan([Row([1] * 9)], LIMITS, {batches[0].shape})
    assert short.shape.packed  # the compiled one would read 4 lines of 256
    compiled = {batching.Shape(1, 64, 0, 64, True)}
    assert batching.plan([Row([1] * 9)], LIMITS, compiled)[0].shape in compiled


@pytest.mark.parametrize("size", [62, 64, 250, 256])
@pytest.mark.parametrize("shards", [1, 8])
def test_any_number_of_rows_that_fill_a_line(size, shards):
    """One line each, in a shape that may hold no new tokens, whatever their number."""
    limits = dataclasses.replace(LIMITS, shards=shards)
    for count in range(1, 40):
        rows = [Row([1] * size, targets=[Target((0,), 0, 1)]) for _ in range(count)]
        batches = batching.plan(rows, limits, ())
        assert_placed_once(rows, batches)
        assert sum(len(batch.lines) for batch in batches) == count
        for batch in batches:
            arrays = batching.fill(batch)
            assert (arrays.documents_BS is None) == (not batch.shape.packed)
            assert batch.shape.packed or batch.shape.new == 0
    (batch,) = batching.plan([Row([1] * size)], LIMITS, ())
    assert batch.shape.num_lines == 1


def test_few_new_tokens_need_little_room():
    rows = [Row([1] * 150, [1] * (i % 3), [0] * (i % 3)) for i in range(100)]
    batches = batching.plan(rows, LIMITS, ())
    assert {batch.shape.new for batch in batches} <= {8, 16}


def test_few_rows_make_a_small_batch():
    (batch,) = batching.plan([Row([1] * 60)], LIMITS, ())
    assert batch.shape[:3] == (1, 64, 0)
    batches = batching.plan([Row([1] * 60) for _ in range(40)], LIMITS, ())
    assert {batch.shape[:3] for batch in batches} == {(16, 64, 0)}


def test_what_the_device_is_given():
    first = Row([5, 6, 7], new=[8, 9, 8], branches=[0, 0, 2])
    first.targets = [
        Target((0,), 2, 8),
        Target((0,), 3, 9),
        Target((1,), 2, 1),
        Target((2,), 2, 8),
        Target((2,), 5, 3),
    ]
    second = Row([3, 4], new=[1], branches=[1], targets=[Target((3,), 2, 6), Target((3,), 0, 4)])
    shape = batching.Shape(2, 8, 6, 8, True)
    arrays = batching.fill(batching.Batch(shape, [[first, second]]))
    assert arrays.context_BS.tolist() == [[5, 6, 7, 3, 4, 0, 0, 0], [0] * 8]
    assert arrays.documents_BS.tolist() == [[1, 1, 1, 2, 2, 0, 0, 0], [0] * 8]
    assert arrays.new_BT.tolist() == [[8, 9, 8, 1, 0, 0], [0] * 6]
    assert arrays.branches_BT.tolist() == [[0, 0, 2, 4, -1, -1], [-1] * 6]
    assert arrays.follows_BT.tolist() == [[1, 1, 1, 2, 0, 0], [0] * 6]
    assert arrays.places_BN.tolist() == [[2, 8, 2, 2, 10, 11, 3, 0], [0] * 8]
    assert arrays.targets_BN.tolist() == [[8, 9, 1, 8, 3, 6, 4, 0], [0] * 8]
    assert arrays.wanted_BN.tolist() == [[True] * 7 + [False], [False] * 8]
