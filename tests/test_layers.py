"""Hand-written derivatives and the parts of a block against their plain forms."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deconstruct import layers

# float32 rounding of one expression written in two ways, relative to the largest entry.
TOLERANCE = 1e-6


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(0, 3, shape), jnp.float32)


def test_gated_has_the_derivatives_of_its_formula():
    gate, up, d = (normal(2, 5, 7, seed=seed) for seed in range(3))
    actual, pull = jax.vjp(layers.gated, gate, up)
    expected, plain_pull = jax.vjp(lambda g, u: g * nn.sigmoid(g) * u, gate, up)
    for a, b in zip((actual, *pull(d)), (expected, *plain_pull(d)), strict=True):
        np.testing.assert_allclose(a, b, atol=TOLERANCE * np.abs(b).max())


def test_rotation_turns_half_split_pairs():
    """Component k with k + K/2, by position * base^(-2k/K)."""
    x_BTHK, base = normal(2, 5, 3, 8), 100.0
    positions = np.array([[0, 1, 2, 3, 4], [7, 0, 1, 0, 9]])
    tables = layers.rotary_tables(jnp.asarray(positions), 8, base)
    angles = positions[:, :, None] * base ** (-np.arange(4) / 4)
    pairs = np.asarray(x_BTHK[..., :4]) + 1j * np.asarray(x_BTHK[..., 4:])
    turned = pairs * np.exp(1j * angles)[:, :, None, :]
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(layers.rotate(x_BTHK, tables), expected, atol=1e-5)


@pytest.mark.parametrize("dtype, rounding", [(jnp.float32, 1e-6), (jnp.bfloat16, 2**-8)])
def test_norm_is_computed_in_float32(dtype, rounding):
    """The result is off by its own rounding alone."""
    x_BTD = normal(2, 3, 64).astype(dtype)
    norm = layers.RMSNorm(1e-6, dtype)
    out = norm.apply(norm.init(jax.random.key(0), x_BTD), x_BTD)
    x = np.asarray(x_BTD, np.float64)
    exact = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    assert out.dtype == dtype
    np.testing.assert_allclose(out.astype(jnp.float32), exact, rtol=rounding)


def test_an_id_outside_the_table_reads_nan():
    """T2: it must not pass as some other token."""
    table = layers.Table(vocab_size=5, padded_size=8, dim=4, init_std=1.0)
    ids = jnp.array([[0, 7, 8, 100]])
    params = table.init(jax.random.key(0), ids, jnp.float32)
    rows = np.asarray(table.apply(params, ids, jnp.float32))[0]
    assert np.isfinite(rows[0]).all() and (rows[1] == 0).all() and np.isnan(rows[2:]).all()
