"""The parts of a block that have a derivative of their own."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deconstruct.layers import gated

TOLERANCE = {"float32": 1e-6, "bfloat16": 2e-2}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gated_has_the_gradients_of_its_definition(dtype):
    rng = np.random.default_rng(0)
    gate, up, d_out = (jnp.asarray(rng.normal(0, 3, (5, 64)), dtype) for _ in range(3))
    out, vjp = jax.vjp(gated, gate, up)
    wide = [x.astype(jnp.float32) for x in (gate, up, d_out)]
    wanted, wanted_vjp = jax.vjp(lambda g, u: nn.silu(g) * u, *wide[:2])
    for got, want in zip((out, *vjp(d_out)), (wanted, *wanted_vjp(wide[2])), strict=True):
        assert got.dtype == dtype
        scale = np.abs(want).max()
        np.testing.assert_allclose(
            got.astype(jnp.float32), want, rtol=0, atol=TOLERANCE[dtype] * scale
        )
