"""A causal softmax over time of scores that belong to the key position alone (eq. 7-8).

o_i = sum_{j<=i} exp(s_j) v_j / sum_{j<=i} exp(s_j), so running sums do: m_i the largest score so
far, z_i and n_i the sums of exp(s_j - m_i) and of exp(s_j - m_i) v_j. Never a log-sum-exp, which
would lose z beside a large m. With p_i = exp(s_i - m_i) / z_i, and the decay between two positions

    decay(j, i) = (z_j / z_i) exp(m_j - m_i) <= 1,   0 across documents,

o_i = sum_{j<=i} decay(j, i) p_j v_j, and backwards G_j = sum_{i>=j} decay(j, i) do_i gives
dv_j = p_j G_j and ds_j = p_j (v_j.G_j - E_j), E_j being the same sum over do_i.o_i.

`scan` carries (m, z, n) through an associative scan. `blocked` sums inside blocks of `BLOCK`
positions and hands the sums at the blocks' ends to itself, a problem `BLOCK` times shorter: it
reads the values twice and writes the output once, about the least that memory allows.

Axes: B batch, T time, H heads, G value groups, R heads of a group, W value size, N blocks, I and J
positions of a block (J the earlier one).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from deconstruct.kernels.reference import visible, weigh

# Largest error against `reference`, relative to the largest entry, of outputs and of gradients,
# and what a score's own rounding adds: 4 float32 epsilons of the largest score.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
SCORE_EPSILONS = 4

BLOCK = 16


class PrefixState(NamedTuple):
    """The running maximum, denominator and numerator of each head, float32."""

    m_BH: jax.Array
    z_BH: jax.Array
    n_BHW: jax.Array


class Running(NamedTuple):
    """The running maximum and denominator at each position, and the number of its document."""

    m_BTGR: jax.Array
    z_BTGR: jax.Array
    runs_BT11: jax.Array


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
    """o_BTHW by an associative scan over (m, z, n), and another one for the backward."""
    return _softmax(SCAN, s_BTH, v_BTGW, runs_BT)


def blocked(s_BTH, v_BTGW, runs_BT=None) -> jax.Array:
    """o_BTHW by sums inside blocks of `BLOCK` positions and across their ends."""
    return _softmax(BLOCKED, s_BTH, v_BTGW, runs_BT)


class Sums(NamedTuple):
    """The two sums over decays: (running, x_BTGRW) -> out_BTGRW in float32.

    Attributes:
      before: out_i = sum over j <= i of decay(j, i) x_j.
      after: out_j = sum over i >= j of decay(j, i) x_i.
    """

    before: Callable
    after: Callable


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _softmax(sums, s_BTH, v_BTGW, runs_BT):
    return _softmax_forward(sums, s_BTH, v_BTGW, runs_BT)[0]


def _softmax_forward(sums, s_BTH, v_BTGW, runs_BT):
    s_BTGR = _by_group(s_BTH.astype(jnp.float32), v_BTGW.shape[2])
    running = _running(s_BTGR, runs_BT)
    p_BTGR = jnp.exp(s_BTGR - running.m_BTGR) / running.z_BTGR
    v_BTG1W = v_BTGW[:, :, :, None].astype(jnp.float32)
    o_BTGRW = sums.before(running, p_BTGR[..., None] * v_BTG1W)
    o_BTHW = o_BTGRW.reshape(*s_BTH.shape, -1).astype(v_BTGW.dtype)
    return o_BTHW, (s_BTH, v_BTGW, o_BTHW, running, p_BTGR)


def _softmax_backward(sums, residuals, do_BTHW):
    s_BTH, v_BTGW, o_BTHW, running, p_BTGR = residuals
    do_BTHW = do_BTHW.astype(jnp.float32)
    do_o_BTH1 = jnp.sum(do_BTHW * o_BTHW.astype(jnp.float32), axis=-1, keepdims=True)
    groups = v_BTGW.shape[2]
    dv_BTGRW = p_BTGR[..., None] * sums.after(running, _by_group(do_BTHW, groups))
    e_BTGR = sums.after(running, _by_group(do_o_BTH1, groups))[..., 0]
    v_dv_BTGR = jnp.sum(v_BTGW[:, :, :, None].astype(jnp.float32) * dv_BTGRW, axis=-1)
    ds_BTH = (v_dv_BTGR - p_BTGR * e_BTGR).reshape(s_BTH.shape)
    return ds_BTH.astype(s_BTH.dtype), jnp.sum(dv_BTGRW, axis=3).astype(v_BTGW.dtype), None


_softmax.defvjp(_softmax_forward, _softmax_backward)


def _by_group(x_BTH, groups: int):
    """(B, T, H, ..) -> (B, T, G, R, ..)."""
    return x_BTH.reshape(*x_BTH.shape[:2], groups, -1, *x_BTH.shape[3:])


def _running(s_BTGR, runs_BT) -> Running:
    """Running maximum and denominator by an associative scan, from the start of each document."""

    def join(left: Running, right: Running) -> Running:
        same = left.runs_BT11 == right.runs_BT11
        m = jnp.where(same, jnp.maximum(left.m_BTGR, right.m_BTGR), right.m_BTGR)
        past = jnp.where(same, left.z_BTGR * jnp.exp(left.m_BTGR - m), 0.0)
        return Running(m, past + right.z_BTGR * jnp.exp(right.m_BTGR - m), right.runs_BT11)

    if runs_BT is None:
        runs_BT = jnp.zeros(s_BTGR.shape[:2], jnp.int32)
    singles = Running(s_BTGR, jnp.ones_like(s_BTGR), runs_BT[:, :, None, None])
    return jax.lax.associative_scan(join, singles, axis=1)


def _decay(earlier: Running, later: Running):
    """What is left of the earlier position's sum in the later one's, at most 1."""
    share = jnp.exp(earlier.m_BTGR - later.m_BTGR) * (earlier.z_BTGR / later.z_BTGR)
    return jnp.where(earlier.runs_BT11 == later.runs_BT11, share, 0.0)


def _scanned(running: Running, x_BTGRW, reverse: bool):
    """out_i = x_i + decay(i-1, i) out_{i-1}; in reverse out_j = x_j + decay(j, j+1) out_{j+1}."""
    earlier = jax.tree.map(lambda x: x[:, :-1], running)
    steps = _decay(earlier, jax.tree.map(lambda x: x[:, 1:], running))
    pad = ((0, 0), (0, 1) if reverse else (1, 0), (0, 0), (0, 0))

    def join(left, right):
        (r_left, x_left), (r_right, x_right) = left, right
        return r_left * r_right, x_left * r_right[..., None] + x_right

    return jax.lax.associative_scan(join, (jnp.pad(steps, pad), x_BTGRW), axis=1, reverse=reverse)[
        1
    ]


SCAN = Sums(functools.partial(_scanned, reverse=False), functools.partial(_scanned, reverse=True))


def _blocks_before(running: Running, x_BTGRW):
    """`Sums.before` by blocks: what a block's own positions add, and what its start carries in.

    The sums at the blocks' ends come first and from x alone, so that the output is written once.
    """
    at_BNI, x_BNJGRW = _in_blocks(running, mode="edge"), _in_blocks(x_BTGRW, mode="constant")
    inside_BNIJGR = _decays_inside(at_BNI)
    out_BNIGRW = _combine(inside_BNIJGR, x_BNJGRW)
    if x_BNJGRW.shape[1] > 1:
        ends_BN = jax.tree.map(lambda x: x[:, :, -1], at_BNI)
        own_BNGRW = jnp.sum(inside_BNIJGR[:, :, -1, ..., None] * x_BNJGRW, axis=2)
        carried_BNGRW = _shift(_blocks_before(ends_BN, own_BNGRW), 1)
        out_BNIGRW += _decay_from_start(at_BNI, ends_BN)[..., None] * carried_BNGRW[:, :, None]
    return _out_of_blocks(out_BNIGRW, x_BTGRW)


def _blocks_after(running: Running, x_BTGRW):
    """`Sums.after` by blocks, the mirror image: positions receive from their block and its end."""
    at_BNI, x_BNIGRW = _in_blocks(running, mode="edge"), _in_blocks(x_BTGRW, mode="constant")
    inside_BNIJGR = _decays_inside(at_BNI)
    out_BNJGRW = _combine(jnp.swapaxes(inside_BNIJGR, 2, 3), x_BNIGRW)
    if x_BNIGRW.shape[1] > 1:
        ends_BN = jax.tree.map(lambda x: x[:, :, -1], at_BNI)
        to_start_BNGRW = jnp.sum(_decay_from_start(at_BNI, ends_BN)[..., None] * x_BNIGRW, axis=2)
        carried_BNGRW = _blocks_after(ends_BN, _shift(to_start_BNGRW, -1))
        out_BNJGRW += inside_BNIJGR[:, :, -1, ..., None] * carried_BNGRW[:, :, None]
    return _out_of_blocks(out_BNJGRW, x_BTGRW)


BLOCKED = Sums(_blocks_before, _blocks_after)


def _in_blocks(tree, mode: str):
    """(B, T, ..) -> (B, N, I, ..), the last block filled up by `jnp.pad`'s `mode`."""

    def split(x_BT):
        length = x_BT.shape[1]
        size = min(BLOCK, length)
        padded = jnp.pad(x_BT, ((0, 0), (0, -length % size)) + ((0, 0),) * (x_BT.ndim - 2), mode)
        return padded.reshape(x_BT.shape[0], -1, size, *x_BT.shape[2:])

    return jax.tree.map(split, tree)


def _out_of_blocks(x_BNI, like_BT):
    return x_BNI.reshape(x_BNI.shape[0], -1, *x_BNI.shape[3:])[:, : like_BT.shape[1]]


def _decays_inside(at_BNI: Running):
    """decay(j, i) inside each block, 0 for j > i: (B, N, I, J, G, R)."""
    earlier = jax.tree.map(lambda x: x[:, :, None, :], at_BNI)
    later = jax.tree.map(lambda x: x[:, :, :, None], at_BNI)
    size = at_BNI.m_BTGR.shape[2]
    order_IJ = jnp.tril(jnp.ones((size, size), bool))
    return jnp.where(order_IJ[None, None, :, :, None, None], _decay(earlier, later), 0.0)


def _decay_from_start(at_BNI: Running, ends_BN: Running):
    """decay from the end of the block before to each position, 0 in the first block."""
    before = jax.tree.map(lambda x: _shift(x, 1, fill=-1)[:, :, None], ends_BN)
    return _decay(before, at_BNI)


def _shift(x_BN, by: int, fill=0):
    """x of the block before (`by` 1) or after (-1), `fill` where there is none.

    No document has the number -1, so `fill=-1` of a `Running` decays to nothing.
    """
    edge = jnp.full_like(x_BN[:, :1], fill)
    return jnp.concatenate([edge, x_BN[:, :-1]] if by == 1 else [x_BN[:, 1:], edge], axis=1)


def _combine(weights_BNIJGR, x_BNJGRW):
    """sum over j of weights times x, written out: a matrix product this small is slower."""
    return sum(
        weights_BNIJGR[:, :, :, j, :, :, None] * x_BNJGRW[:, :, None, j]
        for j in range(x_BNJGRW.shape[2])
    )
