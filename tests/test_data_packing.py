"""Rows and batches by value: boundaries (D10), and no token lost or repeated (D11)."""

import itertools

import numpy as np
import pytest

from deconstruct.data import packing

EOT = 9


def pack(documents, row_length):
    packer = packing.Packer(row_length)
    rows = [row for ids in documents for row in packer.add(np.array(ids, np.int32))]
    return rows + packer.finish()


def test_batch_by_value():
    """Ids that equal end-of-text inside a document cut nothing, and are learned like others."""
    documents = [[EOT, 1, EOT, 2], [EOT], [EOT, 3, 4, 5, 6, EOT]]
    batch = packing.make_batch(pack(documents, row_length=6))
    expected = {
        "tokens_BT": [[EOT, 1, EOT, 2, EOT], [3, 4, 5, 6, EOT]],
        "targets_BT": [[1, EOT, 2, EOT, EOT], [4, 5, 6, EOT, 0]],
        "weights_BT": [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]],
        "positions_BT": [[0, 1, 2, 3, 0], [0, 1, 2, 3, 4]],
        "segments_BT": [[1, 1, 1, 1, 2], [1, 1, 1, 1, 1]],
    }
    for name, values in expected.items():
        array = getattr(batch, name)
        np.testing.assert_array_equal(array, values, err_msg=name)
        assert array.dtype == (np.float32 if name == "weights_BT" else np.int32)


def test_short_row_by_value():
    """Padding weighs nothing, even where its id is the end-of-text id, and is one more segment."""
    (row,) = pack([[EOT, 1], [EOT, 2, EOT]], row_length=9)
    np.testing.assert_array_equal(row.starts, [0, 2])
    assert row.num_tokens == 5
    row.ids[row.num_tokens :] = EOT
    batch = packing.make_batch([row, packing.padding_row(9)])
    np.testing.assert_array_equal(batch.tokens_BT[0], [EOT, 1, EOT, 2, EOT, EOT, EOT, EOT])
    np.testing.assert_array_equal(batch.targets_BT[0], [1, EOT, 2, EOT, EOT, EOT, EOT, EOT])
    np.testing.assert_array_equal(batch.weights_BT, [[1, 1, 1, 1, 0, 0, 0, 0], [0] * 8])
    np.testing.assert_array_equal(batch.positions_BT[0], [0, 1, 0, 1, 2, 0, 1, 2])
    np.testing.assert_array_equal(batch.segments_BT[0], [1, 1, 2, 2, 2, 3, 3, 3])


def check_conservation(lengths, row_length):
    ends = np.cumsum([0, *lengths])
    documents = [np.arange(a, b) for a, b in itertools.pairwise(ends)]
    rows = pack(documents, row_length)
    ids = np.concatenate([row.ids[: row.num_tokens] for row in rows])
    np.testing.assert_array_equal(ids, np.arange(sum(lengths)))
    assert all(row.num_tokens == row_length for row in rows[:-1])
    starts = np.concatenate([i * row_length + row.starts for i, row in enumerate(rows)])
    np.testing.assert_array_equal(starts, ends[:-1])


@pytest.mark.parametrize("row_length", [2, 7])
def test_every_order_of_awkward_lengths(row_length):
    n = row_length
    for lengths in itertools.permutations([1, n - 1, n, n + 1, 2 * n, 3 * n + 2], 5):
        check_conservation(lengths, row_length)


def test_random_lengths():
    rng = np.random.default_rng(0)
    for _ in range(200):
        check_conservation(rng.integers(1, 60, size=rng.integers(1, 20)), int(rng.integers(2, 30)))


def test_document_without_ids_is_refused():
    with pytest.raises(ValueError, match="without ids"):
        packing.Packer(5).add(np.zeros(0, np.int32))
