"""A causal softmax over time of scores that belong to the key position alone (eq. 7-8).

o_i = sum_{j<=i} exp(s_j) v_j / sum_{j<=i} exp(s_j), so running sums do: m_i the largest score so
far, z_i and n_i the sums of exp(s_j - m_i) and of exp(s_j - m_i) v_j. Never a log-sum-exp, which
would lose z beside a large m. With p_i = exp(s_i - m_i) / z_i, and the decay between two positions

    decay(j, i) = (z_j / z_i) exp(m_j - m_i) <= 1,   0 across documents,

o_i = sum_{j<=i} decay(j, i) p_j v_j, and backwards G_j = sum_{i>=j} decay(j, i) do_i gives
dv_j = p_j G_j and ds_j = p_j (v_j.G_j - E_j), E_j being the same sum over do_i.o_i.

`scan` makes these sums by associative scans over all positions, `blocked` as `prefix_blocks` says.

Axes: B batch, T time, H heads, G value groups, R heads of a group, W value size.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from deconstruct.kernels import prefix_blocks
from deconstruct.kernels.backends import platform
from deconstruct.kernels.reference import per_head, visible, weigh
from deconstruct.kernels.running import Running, decay, join


class PrefixState(NamedTuple):
    """The running maximum, denominator and numerator of each head, float32."""

    m_BH: jax.Array
    z_BH: jax.Array
    n_BHW: jax.Array


class Form(NamedTuple):
    """One way to make the sums, in float32.

    Attributes:
      forward: (s_BTH, v_BTHW, runs_BT or None) -> (o_BTHW, what the backward needs).
      backward: (that, do_BTHW, do.o_BTH) -> (p_j G_j, p_j E_j), BTHW and BTH.
    """

    forward: Callable
    backward: Callable


def own_scores(q_BTHK: jax.Array, k_BTGK: jax.Array) -> jax.Array:
    """s_BTH, float32: of each position's query with the key at the same position, over sqrt(K)."""
    k_BTHK = per_head(k_BTGK.astype(jnp.float32), q_BTHK.shape[2])
    return jnp.sum(q_BTHK.astype(jnp.float32) * k_BTHK, axis=-1) * q_BTHK.shape[3] ** -0.5


def reference(s_BTH, v_BTGW, runs_BT=None) -> jax.Array:
    """From the equation, in float32, with the whole map in memory."""
    s_BH1S = jnp.swapaxes(s_BTH.astype(jnp.float32), 1, 2)[:, :, None, :]
    mask_BHTS = visible(s_BTH.shape[1], runs_BT)
    return weigh(jax.nn.softmax(jnp.where(mask_BHTS, s_BH1S, -jnp.inf), axis=-1), v_BTGW)


def prefix_state_init(batch_size: int, num_heads: int, value_size: int) -> PrefixState:
    """The state before the first token."""
    return PrefixState(
        jnp.full((batch_size, num_heads), -jnp.inf, jnp.float32),
        jnp.zeros((batch_size, num_heads), jnp.float32),
        jnp.zeros((batch_size, num_heads, value_size), jnp.float32),
    )


def prefix_step(
    state: PrefixState, s_BH: jax.Array, v_BGW: jax.Array
) -> tuple[jax.Array, PrefixState]:
    """One token a row: (o_BHW in v's dtype, the state after it)."""
    s_BH = s_BH.astype(jnp.float32)
    v_BHW = jnp.repeat(v_BGW.astype(jnp.float32), s_BH.shape[1] // v_BGW.shape[1], axis=1)
    m_BH = jnp.maximum(state.m_BH, s_BH)
    kept_BH, new_BH = jnp.exp(state.m_BH - m_BH), jnp.exp(s_BH - m_BH)
    z_BH = state.z_BH * kept_BH + new_BH
    n_BHW = state.n_BHW * kept_BH[..., None] + new_BH[..., None] * v_BHW
    return (n_BHW / z_BH[..., None]).astype(v_BGW.dtype), PrefixState(m_BH, z_BH, n_BHW)


def scan(s_BTH, v_BTGW, runs_BT=None) -> jax.Array:
    """o_BTHW by associative scans over all positions."""
    return _softmax(SCAN, s_BTH.astype(jnp.float32), v_BTGW, runs_BT)


def blocked(s_BTH, v_BTGW, runs_BT=None) -> jax.Array:
    """o_BTHW by sums inside blocks of positions and across their ends."""
    form = BLOCKS_ON_CPU if platform() == "cpu" else BLOCKS_ON_ACCELERATORS
    return _softmax(form, s_BTH.astype(jnp.float32), v_BTGW, runs_BT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _softmax(form, s_BTH, v_BTGW, runs_BT):
    return _softmax_forward(form, s_BTH, v_BTGW, runs_BT)[0]


def _softmax_forward(form, s_BTH, v_BTGW, runs_BT):
    v_BTHW = per_head(v_BTGW.astype(jnp.float32), s_BTH.shape[2])
    o_BTHW, kept = form.forward(s_BTH, v_BTHW, runs_BT)
    o_BTHW = o_BTHW.astype(v_BTGW.dtype)
    return o_BTHW, (v_BTGW, o_BTHW, kept)


def _softmax_backward(form, residuals, do_BTHW):
    v_BTGW, o_BTHW, kept = residuals
    do_BTHW = do_BTHW.astype(jnp.float32)
    do_o_BTH = jnp.sum(do_BTHW * o_BTHW.astype(jnp.float32), axis=-1)
    dv_BTHW, p_e_BTH = form.backward(kept, do_BTHW, do_o_BTH)
    v_BTHW = per_head(v_BTGW.astype(jnp.float32), do_BTHW.shape[2])
    ds_BTH = _apart(jnp.sum(v_BTHW * dv_BTHW, axis=-1) - p_e_BTH)
    dv_BTGRW = dv_BTHW.reshape(*v_BTGW.shape[:3], -1, v_BTGW.shape[3])
    return ds_BTH, jnp.sum(dv_BTGRW, axis=3).astype(v_BTGW.dtype), None


def _apart(x_BTH):
    """Itself, float32, which whoever multiplies it with q and k reads as it is.

    On a CPU XLA's sum would write it out once for each number of a head, as large as q, and looks
    through an optimization barrier.
    """
    return jax.lax.reduce_precision(x_BTH, exponent_bits=8, mantissa_bits=23)


_softmax.defvjp(_softmax_forward, _softmax_backward)


def _scan_forward(s_BTH, v_BTHW, runs_BT):
    runs_BT1 = None if runs_BT is None else runs_BT[:, :, None]
    singles = Running(s_BTH, jnp.ones_like(s_BTH), runs_BT1)
    running = jax.lax.associative_scan(join, singles, axis=1)
    p_BTH = jnp.exp(s_BTH - running.m) / running.z
    steps_BTH = jnp.pad(_decays_between_neighbours(running), ((0, 0), (1, 0), (0, 0)))
    parts = (steps_BTH, p_BTH[..., None] * v_BTHW)
    return jax.lax.associative_scan(_add, parts, axis=1)[1], (running, p_BTH)


def _scan_backward(kept, do_BTHW, do_o_BTH):
    running, p_BTH = kept
    steps_BTH = jnp.pad(_decays_between_neighbours(running), ((0, 0), (0, 1), (0, 0)))
    together = jnp.concatenate([do_BTHW, do_o_BTH[..., None]], axis=-1)
    sums = jax.lax.associative_scan(_add, (steps_BTH, together), axis=1, reverse=True)[1]
    sums = p_BTH[..., None] * sums
    return sums[..., :-1], sums[..., -1]


def _decays_between_neighbours(running: Running):
    """(B, T - 1, H)."""
    earlier = jax.tree.map(lambda x: x[:, :-1], running)
    return decay(earlier, jax.tree.map(lambda x: x[:, 1:], running))


def _add(left, right):
    """Sums over two spans, each with the decay from its start to its end."""
    (decay_left, x_left), (decay_right, x_right) = left, right
    return decay_left * decay_right, x_left * decay_right[..., None] + x_right


def _blocks(plan: prefix_blocks.Plan) -> Form:
    return Form(
        functools.partial(prefix_blocks.forward, plan),
        functools.partial(prefix_blocks.backward, plan),
    )


SCAN = Form(_scan_forward, _scan_backward)
BLOCKS_ON_CPU = _blocks(prefix_blocks.ON_CPU)
BLOCKS_ON_ACCELERATORS = _blocks(prefix_blocks.ON_ACCELERATORS)
