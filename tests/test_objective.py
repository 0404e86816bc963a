"""The chunked head against NumPy float64 and a plain JAX form, on one device and on meshes.

Axes: B batch, T time, N tokens, D model, V vocabulary rows.
"""

import pathlib
import subprocess
import sys

import devices
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deconstruct import objective

VOCAB, ROWS, DIM = 300, 384, 32
RELATIVE_TO_FLOAT64 = 1e-4
RELATIVE_TO_PLAIN = 2e-5


def make(batch_size, length, *, vocab=VOCAB, rows=ROWS, dim=DIM, scale=1.0, seed=0):
    """(x_BTD, table_VD with zero padding rows, targets_BT, weights_BT with some zeros)."""
    rng = np.random.default_rng(seed)
    x_BTD = rng.normal(0, scale, (batch_size, length, dim))
    table_VD = np.where(np.arange(rows)[:, None] < vocab, rng.normal(0, scale, (rows, dim)), 0)
    targets_BT = rng.integers(0, vocab, (batch_size, length))
    weights_BT = rng.random((batch_size, length)) * (rng.random((batch_size, length)) < 0.8)
    floats = [jnp.asarray(a, jnp.float32) for a in (x_BTD, table_VD, weights_BT)]
    return floats[0], floats[1], jnp.asarray(targets_BT, jnp.int32), floats[2]


def plain(x_BTD, table_VD, targets_BT, weights_BT, *, vocab_size, z_loss):
    """The same loss with all logits in memory, differentiated by JAX."""
    logits_BTV = x_BTD @ table_VD[:vocab_size].T
    lse_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    target_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    return jnp.sum(weights_BT * (lse_BT - target_BT + z_loss * lse_BT**2))


def assert_near(got, wanted, relative):
    largest = np.abs(np.asarray(wanted, np.float64)).max()
    np.testing.assert_allclose(
        np.asarray(got, np.float64), np.asarray(wanted, np.float64), rtol=0, atol=relative * largest
    )


@pytest.mark.parametrize(
    "shape, rows, chunk, z_loss",
    [
        ((2, 64), ROWS, 128, 0.0),
        ((2, 64), ROWS, 32, 1e-2),
        ((3, 37), ROWS, 20, 0.0),
        ((3, 37), VOCAB, 20, 1e-2),  # a table without padding
        ((1, 1), ROWS, 8, 1e-2),
        ((1, 500), ROWS, 127, 0.0),
    ],
)
def test_chunked_equals_plain_in_value_and_gradients(shape, rows, chunk, z_loss):
    x, table, targets, weights = make(*shape, rows=rows)

    def whole(x, table):
        return plain(x, table, targets, weights, vocab_size=VOCAB, z_loss=z_loss)

    wanted = jax.jit(jax.value_and_grad(whole, (0, 1)))(x, table)

    def chunked(x, table):
        return objective.weighted_loss(
            x, table, targets, weights, vocab_size=VOCAB, z_loss=z_loss, chunk_tokens=chunk
        )[0]

    got = jax.jit(jax.value_and_grad(chunked, (0, 1)))(x, table)
    jax.tree.map(lambda g, w: assert_near(g, w, RELATIVE_TO_PLAIN), got, wanted)
    # The path without gradients is another program, and the tokens' own losses a third.
    assert_near(jax.jit(chunked)(x, table), wanted[0], RELATIVE_TO_PLAIN)
    if z_loss == 0:
        tile = objective.Tile(chunk, 16)
        nll = objective.token_losses(x, table, targets, vocab_size=VOCAB, tile=tile)
        assert nll.shape == shape and nll.dtype == jnp.float32
        assert_near(jnp.sum(nll * weights), wanted[0], RELATIVE_TO_PLAIN)


def test_sums_are_those_of_their_names():
    x, table, targets, weights = make(2, 37)
    logits = np.asarray(x, np.float64) @ np.asarray(table, np.float64)[:VOCAB].T
    lse = np.log(np.exp(logits).sum(-1))
    nll = lse - np.take_along_axis(logits, np.asarray(targets)[..., None], -1)[..., 0]
    w = np.asarray(weights, np.float64)
    loss, sums = objective.weighted_loss(x, table, targets, weights, vocab_size=VOCAB, z_loss=0.5)
    assert_near(sums.nll, (w * nll).sum(), RELATIVE_TO_FLOAT64)
    assert_near(sums.z, (w * lse**2).sum(), RELATIVE_TO_FLOAT64)
    assert_near(sums.weight, w.sum(), RELATIVE_TO_FLOAT64)
    assert_near(loss, (w * (nll + 0.5 * lse**2)).sum(), RELATIVE_TO_FLOAT64)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("tile", [(5, 7), (5, 250), (5, 10**6), (128, 1)])
def test_scores_where_they_are_wanted(share, tile):
    """In any tiles, of which the last overlaps at 250; what is not wanted may be anything."""
    x, table, targets, _ = make(3, 37)
    wanted = jnp.asarray(np.random.default_rng(1).random((3, 37)) < share)
    logits = np.asarray(x, np.float64) @ np.asarray(table, np.float64)[:VOCAB].T
    likeliest = logits.argmax(-1)
    targets = jnp.where(jnp.arange(37) % 2, targets, likeliest)
    expected = objective.token_losses(x, table, targets, vocab_size=VOCAB)
    nll, best = jax.jit(objective.token_scores, static_argnames=("vocab_size", "tile"))(
        jnp.where(wanted[..., None], x, jnp.nan),
        table,
        jnp.where(wanted, targets, -1),
        wanted,
        vocab_size=VOCAB,
        tile=objective.Tile(*tile),
    )
    np.testing.assert_array_equal(best, wanted & (targets == likeliest))
    assert_near(nll, jnp.where(wanted, expected, 0), RELATIVE_TO_PLAIN)


@pytest.mark.parametrize("ids", [1, 7, 16, 10**6])
def test_of_equal_logits_the_first_id_is_the_likeliest(ids):
    """Also where a block lies between them, and where logits are large."""
    x, table, _, _ = make(1, 1)
    x, table = jnp.ones_like(x), jnp.zeros_like(table)
    likeliest = (3, 9, VOCAB - 1)
    table = table.at[jnp.array(likeliest)].set(1e4).at[VOCAB:].set(1e6)
    targets = jnp.arange(VOCAB)[None]
    nll, best = objective.token_scores(
        jnp.broadcast_to(x, (1, VOCAB, x.shape[-1])),
        table,
        targets,
        jnp.ones_like(targets, bool),
        vocab_size=VOCAB,
        tile=objective.Tile(8, ids),
    )
    assert np.flatnonzero(best[0]).tolist() == [likeliest[0]]
    np.testing.assert_allclose(nll[0, jnp.array(likeliest)], np.log(3), rtol=1e-6)


def test_only_the_loss_has_a_gradient():
    x, table, targets, weights = make(2, 7)

    def sums(x, weights):
        _, sums = objective.weighted_loss(x, table, targets, weights, vocab_size=VOCAB)
        return sum(sums)

    dx, dweights = jax.grad(sums, (0, 1))(x, weights)
    assert not np.any(dx) and not np.any(dweights)


def test_bfloat16_inputs_are_summed_in_float32():
    """10,000 tokens, vocabulary 1,000, z-loss on; against float64 of the same bfloat16 values."""
    x, table, targets, weights = make(10, 1000, vocab=1000, rows=1024, seed=1)
    x, table = x.astype(jnp.bfloat16), table.astype(jnp.bfloat16)
    logits = np.asarray(x, np.float64) @ np.asarray(table, np.float64)[:1000].T
    lse = np.log(np.exp(logits).sum(-1))
    nll = lse - np.take_along_axis(logits, np.asarray(targets)[..., None], -1)[..., 0]
    w = np.asarray(weights, np.float64)
    wanted = (w * (nll + 1e-4 * lse**2)).sum()

    def loss(x, table):
        return objective.weighted_loss(x, table, targets, weights, vocab_size=1000, z_loss=1e-4)

    for run in (loss, lambda *a: jax.value_and_grad(loss, (0, 1), has_aux=True)(*a)[0]):
        got, sums = jax.jit(run)(x, table)
        assert got.dtype == jnp.float32 and all(s.dtype == jnp.float32 for s in sums)
        assert_near(got, wanted, RELATIVE_TO_FLOAT64)
        assert_near(sums.weight, w.sum(), RELATIVE_TO_FLOAT64)
    # Rounded logits average out in the sum, not token by token.
    each = jax.jit(objective.token_losses, static_argnames="vocab_size")
    np.testing.assert_allclose(
        each(x, table, targets, vocab_size=1000), nll, rtol=0, atol=RELATIVE_TO_FLOAT64
    )


def test_bfloat16_gradients():
    """Near those of float64; dx in x's dtype, the gradient of a float32 table in float32."""
    x, table, targets, weights = make(2, 64, scale=0.5)
    x16, table16 = x.astype(jnp.bfloat16), table.astype(jnp.bfloat16).astype(jnp.float32)

    def loss(x, table):
        return objective.weighted_loss(x, table, targets, weights, vocab_size=VOCAB)[0]

    got = jax.grad(loss, (0, 1))(x16, table16)
    wanted = jax.grad(loss, (0, 1))(x16.astype(jnp.float32), table16)
    assert got[0].dtype == jnp.bfloat16 and got[1].dtype == jnp.float32
    jax.tree.map(lambda g, w: assert_near(g, w, 1e-2), got, wanted)


def test_large_logits_stay_finite():
    x, table, targets, weights = make(2, 16, scale=30.0)
    loss, grads = jax.value_and_grad(
        lambda x: objective.weighted_loss(x, table, targets, weights, vocab_size=VOCAB)[0]
    )(x)
    assert np.isfinite(loss) and np.all(np.isfinite(grads))


def test_padding_rows_never_take_part():
    x, table, targets, weights = make(2, 37)
    garbage = table.at[VOCAB:].set(100.0)

    def loss(table):
        return objective.weighted_loss(x, table, targets, weights, vocab_size=VOCAB, z_loss=0.1)[0]

    clean, dirty = jax.value_and_grad(loss)(table), jax.value_and_grad(loss)(garbage)
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    assert not np.any(dirty[1][VOCAB:])
    np.testing.assert_array_equal(
        objective.token_losses(x, garbage, targets, vocab_size=VOCAB),
        objective.token_losses(x, table, targets, vocab_size=VOCAB),
    )


def test_tokens_of_weight_zero_count_for_nothing():
    x, table, targets, weights = make(2, 37)
    weights = weights.at[1].set(0.0)

    def loss(x, targets):
        return objective.weighted_loss(x, table, targets, weights, vocab_size=VOCAB)[0]

    value, dx = jax.value_and_grad(loss)(x, targets)
    other = loss(x.at[1].set(3.0), targets.at[1].set(0))
    np.testing.assert_array_equal(value, other)
    assert not np.any(dx[1]) and np.all(np.any(dx[0] != 0, axis=-1) == (weights[0] > 0))


@pytest.mark.parametrize("target", [-1, -100, VOCAB, ROWS, ROWS + 7])
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_a_target_that_is_no_token_makes_the_loss_nan(target, weight):
    """T2: never a plausible number; the loader refuses such a batch before it comes here."""
    x, table, targets, weights = make(1, 5)
    targets, weights = targets.at[0, 2].set(target), weights.at[0, 2].set(weight)
    nll = objective.token_losses(x, table, targets, vocab_size=VOCAB)
    assert np.isnan(nll[0, 2]) and np.isnan(nll).sum() == 1

    def loss(x):
        return objective.weighted_loss(x, table, targets, weights, vocab_size=VOCAB)[0]

    assert np.isnan(loss(x)) and np.isnan(jax.value_and_grad(loss)(x)[0])


def test_all_logits_are_never_in_memory():
    """The largest array of the compiled programs is a chunk's, and validation keeps no table."""
    x, table, targets, weights = make(4, 256)

    def loss(x, table):
        return objective.weighted_loss(
            x, table, targets, weights, vocab_size=VOCAB, chunk_tokens=64
        )[0]

    chunk_bytes = 64 * ROWS * 4
    all_bytes = x.shape[0] * x.shape[1] * ROWS * 4
    forward = jax.jit(loss).lower(x, table).compile().memory_analysis().temp_size_in_bytes
    both = jax.jit(jax.grad(loss, (0, 1))).lower(x, table).compile().memory_analysis()
    assert chunk_bytes <= forward < 3 * chunk_bytes + x.nbytes < all_bytes
    assert both.temp_size_in_bytes < all_bytes


def test_a_vocabulary_larger_than_the_table_is_refused():
    x, table, targets, weights = make(1, 4)
    for call in (
        lambda: objective.weighted_loss(x, table, targets, weights, vocab_size=ROWS + 1),
        lambda: objective.token_losses(x, table, targets, vocab_size=0),
    ):
        with pytest.raises(ValueError, match="does not fit an output table of 384 rows"):
            call()


def test_bits_per_byte():
    assert objective.bits_per_byte(np.log(2) * 12, 4) == pytest.approx(3.0)
    with pytest.raises(ValueError, match="bits per byte of 0 bytes"):
        objective.bits_per_byte(1.0, 0)


@pytest.mark.slow
def test_meshes_equal_one_device_and_sum_the_table_gradient_once():
    """Trap: with shardings alone the loop would all-reduce a [V, D] float32 in every chunk."""
    script = pathlib.Path(__file__).with_name("objective_on_meshes.py")
    done = subprocess.run(
        [sys.executable, script], env=devices.environment(8), capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout == "equal\n", done.stderr[-3000:]
