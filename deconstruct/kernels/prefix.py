"""A causal softmax over time of scores that belong to the key position alone (eq. 7-8).

o_i = sum_{j<=i} exp(s_j) v_j / sum_{j<=i} exp(s_j), so running sums do: m_i the largest score so
far, z_i and n_i the sums of exp(s_j - m_i) and of exp(s_j - m_i) v_j. Never a log-sum-exp, which
would lose z beside a large m. With p_i = exp(s_i - m_i) / z_i, and the decay between two positions

    decay(j, i) = (z_j / z_i) exp(m_j - m_i) <= 1,   0 across documents,

o_i = sum_{j<=i} decay(j, i) p_j v_j, and backwards G_j = sum_{i>=j} decay(j, i) do_i gives
dv_j = p_j G_j and ds_j = p_j (v_j.G_j - E_j), E_j being the same sum over do_i.o_i.

`scan` makes both sums by an associative scan over neighbours' decays. `blocked` sums inside blocks
of `BLOCK` positions and carries only the sums at their ends across: it reads the values twice and
writes the output once, about the least that memory allows.

Axes: B batch, T time, H heads, G value groups, W value size, N blocks, I and J positions of a block
(J the earlier one).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from deconstruct.kernels.backends import platform
from deconstruct.kernels.reference import per_head, visible, weigh

BLOCK = 8


class PrefixState(NamedTuple):
    """The running maximum, denominator and numerator of each head, float32."""

    m_BH: jax.Array
    z_BH: jax.Array
    n_BHW: jax.Array


class Running(NamedTuple):
    """The running maximum and denominator at each position, and the number of its document.

    The last is None where documents are not isolated.
    """

    m_BTH: jax.Array
    z_BTH: jax.Array
    runs_BT1: jax.Array | None


class Form(NamedTuple):
    """One way to make the running sums and the two sums over decays, all float32.

    Attributes:
      running: (s_BTH, runs_BT1 or None) -> Running.
      before: (running, p_BTH, x_BTHW) -> out_i = sum over j <= i of decay(j, i) p_j x_j.
      after: (running, p_BTH, x_BTHW) -> out_j = p_j times the sum over i >= j of decay(j, i) x_i.
    """

    running: Callable
    before: Callable
    after: Callable


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
    return _softmax(SCAN, s_BTH, v_BTGW, runs_BT)


def blocked(s_BTH, v_BTGW, runs_BT=None) -> jax.Array:
    """o_BTHW by sums inside blocks of `BLOCK` positions and across their ends.

    Across the ends go one by one on a CPU, where a loop costs little, and in parallel elsewhere.
    """
    across = _in_turn if platform() == "cpu" else _in_parallel
    return _softmax(_blocked_form(across), s_BTH, v_BTGW, runs_BT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _softmax(form, s_BTH, v_BTGW, runs_BT):
    return _softmax_forward(form, s_BTH, v_BTGW, runs_BT)[0]


def _softmax_forward(form, s_BTH, v_BTGW, runs_BT):
    s_BTH = s_BTH.astype(jnp.float32)
    running = form.running(s_BTH, None if runs_BT is None else runs_BT[:, :, None])
    p_BTH = jnp.exp(s_BTH - running.m_BTH) / running.z_BTH
    v_BTHW = per_head(v_BTGW.astype(jnp.float32), s_BTH.shape[2])
    o_BTHW = form.before(running, p_BTH, v_BTHW).astype(v_BTGW.dtype)
    return o_BTHW, (v_BTGW, o_BTHW, running, p_BTH)


def _softmax_backward(form, residuals, do_BTHW):
    v_BTGW, o_BTHW, running, p_BTH = residuals
    do_BTHW = do_BTHW.astype(jnp.float32)
    do_o_BTH1 = jnp.sum(do_BTHW * o_BTHW.astype(jnp.float32), axis=-1, keepdims=True)
    dv_BTHW = form.after(running, p_BTH, do_BTHW)
    p_e_BTH = form.after(running, p_BTH, do_o_BTH1)[..., 0]
    v_BTHW = per_head(v_BTGW.astype(jnp.float32), p_BTH.shape[2])
    ds_BTH = jnp.sum(v_BTHW * dv_BTHW, axis=-1) - p_e_BTH
    dv_BTGRW = dv_BTHW.reshape(*v_BTGW.shape[:3], -1, v_BTGW.shape[3])
    return ds_BTH, jnp.sum(dv_BTGRW, axis=3).astype(v_BTGW.dtype), None


_softmax.defvjp(_softmax_forward, _softmax_backward)


def _decay(earlier: Running, later: Running):
    """What is left of the earlier position's sum in the later one's, at most 1."""
    share = jnp.exp(earlier.m_BTH - later.m_BTH) * (earlier.z_BTH / later.z_BTH)
    if later.runs_BT1 is None:
        return share
    return jnp.where(earlier.runs_BT1 == later.runs_BT1, share, 0.0)


def _decay_between_neighbours(running: Running, *, reverse: bool):
    """From the position before to each, or in reverse from each to the one after: (B, T, H)."""
    earlier = jax.tree.map(lambda x: x[:, :-1], running)
    decay_BTH = _decay(earlier, jax.tree.map(lambda x: x[:, 1:], running))
    return jnp.pad(decay_BTH, ((0, 0), (0, 1) if reverse else (1, 0), (0, 0)))


def _join(left: Running, right: Running) -> Running:
    """The running sums over both spans, where the right one ends."""
    m = jnp.maximum(left.m_BTH, right.m_BTH)
    past = left.z_BTH * jnp.exp(left.m_BTH - m)
    if right.runs_BT1 is not None:
        same = left.runs_BT1 == right.runs_BT1
        m, past = jnp.where(same, m, right.m_BTH), jnp.where(same, past, 0.0)
    return Running(m, past + right.z_BTH * jnp.exp(right.m_BTH - m), right.runs_BT1)


def _add(left, right):
    """Sums with their decay from before: (decay_BTH, x_BTHW)."""
    (decay_left, x_left), (decay_right, x_right) = left, right
    return decay_left * decay_right, x_left * decay_right[..., None] + x_right


def _scan_running(s_BTH, runs_BT1) -> Running:
    singles = Running(s_BTH, jnp.ones_like(s_BTH), runs_BT1)
    return jax.lax.associative_scan(_join, singles, axis=1)


def _scan_before(running: Running, p_BTH, x_BTHW):
    parts = (_decay_between_neighbours(running, reverse=False), p_BTH[..., None] * x_BTHW)
    return jax.lax.associative_scan(_add, parts, axis=1)[1]


def _scan_after(running: Running, p_BTH, x_BTHW):
    parts = (_decay_between_neighbours(running, reverse=True), x_BTHW)
    return p_BTH[..., None] * jax.lax.associative_scan(_add, parts, axis=1, reverse=True)[1]


SCAN = Form(_scan_running, _scan_before, _scan_after)


def _blocks_running(accumulate: Callable, s_BTH, runs_BT1) -> Running:
    """The running sums inside each block from its start, joined with those at that start."""
    s_BNJH, runs_BNI1 = _in_blocks((s_BTH, runs_BT1), mode="edge")
    size = s_BNJH.shape[2]
    counts = (jnp.arange(size)[:, None] >= jnp.arange(size)[None, :])[None, None, :, :, None]
    if runs_BT1 is not None:
        counts &= runs_BNI1[:, :, :, None] == runs_BNI1[:, :, None]
    s_BNIJH = jnp.where(counts, s_BNJH[:, :, None], -jnp.inf)
    m_BNIH = jnp.max(s_BNIJH, axis=3)
    z_BNIH = jnp.sum(jnp.exp(s_BNIJH - m_BNIH[:, :, :, None]), axis=3)
    inside = Running(m_BNIH, z_BNIH, runs_BNI1)
    ends = jax.tree.map(lambda x: x[:, :, -1], inside)
    before = jax.tree.map(lambda x: x[:, :, None], _exclusive(accumulate, ends))
    return jax.tree.map(lambda x: _out_of_blocks(x, s_BTH), _join(before, inside))


def _blocks_before(accumulate: Callable, running: Running, p_BTH, x_BTHW):
    """What a position's own block adds, and what the block's start carries in.

    The sums at the blocks' ends come first and from x alone, so that the output is written once.
    """
    x_BNJHW = _in_blocks(x_BTHW, mode="constant")
    weights_BNIJH = _weights(running, p_BTH)
    own_BNHW = jnp.sum(weights_BNIJH[:, :, -1, 1:, :, None] * x_BNJHW, axis=2)
    carried_BNHW = _shift(_across(accumulate, running, own_BNHW, reverse=False), 1)
    out_BNIHW = weights_BNIJH[:, :, :, 0, :, None] * carried_BNHW[:, :, None]
    for j in range(x_BNJHW.shape[2]):
        out_BNIHW += weights_BNIJH[:, :, :, 1 + j, :, None] * x_BNJHW[:, :, j, None]
    return _out_of_blocks(out_BNIHW, x_BTHW)


def _blocks_after(accumulate: Callable, running: Running, p_BTH, x_BTHW):
    """The mirror image: a position receives from its own block and from the block's end."""
    x_BNIHW = _in_blocks(x_BTHW, mode="constant")
    weights_BNIJH = _weights(running, p_BTH)
    own_BNHW = jnp.sum(weights_BNIJH[:, :, :, 0, :, None] * x_BNIHW, axis=2)
    carried_BNHW = _across(accumulate, running, _shift(own_BNHW, -1), reverse=True)
    out_BNJHW = weights_BNIJH[:, :, -1, 1:, :, None] * carried_BNHW[:, :, None]
    for i in range(x_BNIHW.shape[2]):
        out_BNJHW += weights_BNIJH[:, :, i, 1:, :, None] * x_BNIHW[:, :, i, None]
    return _out_of_blocks(out_BNJHW, x_BTHW)


@functools.cache
def _blocked_form(accumulate: Callable) -> Form:
    parts = (_blocks_running, _blocks_before, _blocks_after)
    return Form(*(functools.partial(part, accumulate) for part in parts))


def _across(accumulate: Callable, running: Running, own_BNHW, *, reverse: bool):
    """The sums over decays at the blocks' ends, from what each block adds."""
    decay_BNH = _decay_between_neighbours(_ends(running), reverse=reverse)
    nothing = (jnp.ones_like(decay_BNH[:, 0]), jnp.zeros_like(own_BNHW[:, 0]))
    return accumulate(_add, nothing, (decay_BNH, own_BNHW), reverse=reverse)[1]


def _exclusive(accumulate: Callable, ends: Running) -> Running:
    """The running sums where each block starts, from those inside each block at its end."""
    batch, _, heads = ends.m_BTH.shape
    runs = None if ends.runs_BT1 is None else jnp.full((batch, 1), -1, ends.runs_BT1.dtype)
    nothing = Running(jnp.full((batch, heads), -jnp.inf), jnp.zeros((batch, heads)), runs)
    total = accumulate(_join, nothing, ends, reverse=False)
    return jax.tree.map(lambda n, x: jnp.concatenate([n[:, None], x[:, :-1]], 1), nothing, total)


def _in_parallel(join: Callable, nothing, blocks, *, reverse: bool):
    """The running `join` along axis 1."""
    return jax.lax.associative_scan(join, blocks, axis=1, reverse=reverse)


def _in_turn(join: Callable, nothing, blocks, *, reverse: bool):
    """The running `join` along axis 1, from `nothing` on."""

    def step(left, right):
        joined = join(left, right)
        return joined, joined

    blocks_first = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), blocks)
    _, joined = jax.lax.scan(step, nothing, blocks_first, reverse=reverse)
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), joined)


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


def _ends(running: Running) -> Running:
    """The running sums at the last position of each block."""
    return jax.tree.map(lambda x: x[:, :, -1], _in_blocks(running, mode="edge"))


def _weights(running: Running, p_BTH):
    """(B, N, I, 1 + J, H): decay(j, i) p_j inside each block, 0 for j > i.

    The first column is the decay from the end of the block before, 0 in the first block: one array,
    so that the compiler makes it once and does not make it again for each column of the values.
    """
    at_BNI = _in_blocks(running, mode="edge")
    starts_BN = jax.tree.map(lambda x: _shift(x, 1), _ends(running))
    earlier = jax.tree.map(lambda s, x: jnp.concatenate([s[:, :, None], x], 2), starts_BN, at_BNI)
    decay_BNIJH = _decay(
        jax.tree.map(lambda x: x[:, :, None, :], earlier),
        jax.tree.map(lambda x: x[:, :, :, None], at_BNI),
    )
    p_BNJH = _in_blocks(p_BTH, mode="constant")
    p_BNJH = jnp.pad(p_BNJH, ((0, 0), (0, 0), (1, 0), (0, 0)), constant_values=1)
    blocks, size = at_BNI.m_BTH.shape[1:3]
    n, i, j = jnp.ogrid[:blocks, :size, -1:size]
    counts_NIJ = (j <= i) & ((j >= 0) | (n > 0))
    return jnp.where(counts_NIJ[None, ..., None], decay_BNIJH * p_BNJH[:, :, None], 0.0)


def _shift(x_BN, by: int):
    """x of the block before (`by` 1) or after (-1), 0 where there is none."""
    zero = jnp.zeros_like(x_BN[:, :1])
    return jnp.concatenate([zero, x_BN[:, :-1]] if by == 1 else [x_BN[:, 1:], zero], axis=1)
