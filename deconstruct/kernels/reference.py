"""What the references share: scores, mask and weighted values, in float32, whole in memory.

Axes: B batch, T query time, S key time, H heads, G key/value groups, K key size, W value size.
"""

import jax
import jax.numpy as jnp

from deconstruct.kernels.precision import product

# Largest error of a form against its reference, relative to the largest entry or 1, by the inputs'
# dtype; the same for outputs and gradients.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}

# What a recurrence of Taylor attention may be wrong by instead, times the mean over a query's keys
# of |q|^2 |k|^2 / K: in chunks by the inputs' dtype, and in float32 one token at a time.
CANCELLATION = {"float32": 2**-26, "bfloat16": 2**-13, "steps": 2**-23}


def attention_scores(q_BTHK: jax.Array, k_BSGK: jax.Array) -> jax.Array:
    """q.k / sqrt(K) in float32: (B, H, T, S). What every form scales by is tested against it."""
    heads = q_BTHK.shape[2]
    k_BSHK = per_head(k_BSGK.astype(jnp.float32), heads)
    scores_BHTS = product("BTHK,BSHK->BHTS", q_BTHK.astype(jnp.float32), k_BSHK)
    return scores_BHTS * q_BTHK.shape[-1] ** -0.5


def visible(length: int, runs_BT: jax.Array | None) -> jax.Array:
    """Which keys each query may see, (B or 1, 1, T, S): earlier or own, and of its own document."""
    t_T = jnp.arange(length)
    mask = (t_T[:, None] >= t_T[None, :])[None, None]
    if runs_BT is None:
        return mask
    return mask & (runs_BT[:, None, :, None] == runs_BT[:, None, None, :])


def weigh(weights_BHTS: jax.Array, v_BSGW: jax.Array) -> jax.Array:
    """o_BTHW = weights times values, in v's dtype."""
    v_BSHW = per_head(v_BSGW.astype(jnp.float32), weights_BHTS.shape[1])
    return product("BHTS,BSHW->BTHW", weights_BHTS, v_BSHW).astype(v_BSGW.dtype)


def per_head(x_BTGC: jax.Array, heads: int) -> jax.Array:
    """Each group's slice repeated for the heads that share it: (B, T, H, C)."""
    return jnp.repeat(x_BTGC, heads // x_BTGC.shape[2], axis=2)
