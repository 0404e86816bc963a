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


LIMITS = batching.Limits(max_len=256, batch_tokens=1024, shards=1, compilation_tokens=40_000)


@pytest.mark.parametrize("count", [1, 7, 300])
@pytest.mark.parametrize("shards", [1, 8])
def test_every_row_is_in_one_batch_that_holds_it(count, shards):
    rows = make_rows(count)
    limits = dataclasses.replace(LIMITS, shards=shards)
    batches = batching.plan(rows, limits, ())
    placed = [row for batch in batches for row in batch.rows]
    assert sorted(map(id, placed)) == sorted(map(id, rows))
    for batch in batches:
        assert batch.shape.num_rows % shards == 0 and len(batch.rows) <= batch.shape.num_rows
        assert batch.shape.context <= 256
        for row in batch.rows:
            assert len(row.context) <= batch.shape.context and len(row.new) <= batch.shape.new
            assert len(row.targets) <= batch.shape.targets
        tokens = batch.shape.num_rows * batch.shape.row_tokens
        assert tokens <= max(1024, shards * batch.shape.row_tokens)
    sizes = [batch.shape.row_tokens for batch in batches]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("tokens", [0, 2_000, 10**9])
@pytest.mark.parametrize("batch_tokens", [256, 1024])
def test_no_row_is_lost_to_a_shape_that_is_compiled(tokens, batch_tokens):
    """Whatever was scored before, and whether or not it filled the batches of those shapes."""
    limits = dataclasses.replace(LIMITS, compilation_tokens=tokens, batch_tokens=batch_tokens)
    compiled = {}
    for seed, count in enumerate([40, 3, 300, 40, 40, 1, 120, 40]):
        rows = make_rows(count, seed % 3)
        batches = batching.plan(rows, limits, compiled)
        placed = [row for batch in batches for row in batch.rows]
        assert sorted(map(id, placed)) == sorted(map(id, rows))
        compiled.update((batch.shape, None) for batch in batches)


def test_a_shape_must_save_more_than_it_costs():
    rows = make_rows(300)

    def shapes_and_cost(tokens, compiled=()):
        limits = dataclasses.replace(LIMITS, compilation_tokens=tokens)
        batches = batching.plan(rows, limits, compiled)
        cost = sum(batch.shape.cost(len(batch.rows)) for batch in batches)
        return {batch.shape for batch in batches}, cost

    (many, least), (some, more), (few, most) = map(shapes_and_cost, (0, 2_000, 10**9))
    assert len(many) > len(some) > len(few) >= 1 and least < more < most
    assert more - least <= 2_000 * (len(many) - len(some))
    free, cost = shapes_and_cost(10**9, compiled=many)
    assert free <= many | few and cost < most


def test_rows_that_join_a_larger_shape_fill_its_batches():
    """Also where that shape alone had few rows, or was compiled for few."""
    rows = [Row([1] * 100), *[Row([1] * 60) for _ in range(32)]]
    batches = batching.plan(rows, LIMITS, ())
    assert {batch.shape[:2] for batch in batches} == {(9, 112)} and len(batches) == 4
    narrow = batching.Shape(1, 64, 0, 0)
    many = [Row([1] * 60) for _ in range(1000)]
    assert {batch.shape[:2] for batch in batching.plan(many, LIMITS, [narrow])} == {(16, 64)}
    assert batching.plan(many[:1], LIMITS, [narrow]) == [batching.Batch(narrow, many[:1])]


def test_what_the_device_is_given():
    row = Row([5, 6, 7], new=[8, 9, 8], branches=[0, 0, 2])
    row.targets = [
        Target((0,), 2, 8),
        Target((0,), 3, 9),
        Target((1,), 2, 1),
        Target((2,), 2, 8),
        Target((2,), 5, 3),
    ]
    (batch,) = batching.plan([row], LIMITS, ())
    arrays = batching.fill(batch)
    assert batch.shape == batching.Shape(1, 8, 8, 0)
    assert arrays.context_BS[0].tolist() == [5, 6, 7] + [0] * 5
    assert arrays.lengths_B.tolist() == [3]
    assert arrays.new_BT[0].tolist() == [8, 9, 8] + [0] * 5
    assert arrays.branches_BT[0].tolist() == [0, 0, 2] + [3] * 5
    assert arrays.places_BN[0, :5].tolist() == [2, 8, 2, 2, 10]
    assert arrays.targets_BN[0, :5].tolist() == [8, 9, 1, 8, 3]


def test_rows_left_over_read_one_token():
    rows = [Row([1], targets=[Target((i,), 0, 1)]) for i in range(3)]
    (batch,) = batching.plan(rows, dataclasses.replace(LIMITS, shards=4), ())
    assert batch.shape.num_rows == 4
    assert batching.fill(batch).lengths_B.tolist() == [1, 1, 1, 1]
