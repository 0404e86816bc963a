"""The sums of `prefix` by blocks of positions, and across the blocks' ends.

The sums at the ends come first, from a block's own positions and the end before; then each position
adds up its block and what its start carries in. So the values are read twice and the output written
once, about the least that memory allows, and only the ends depend on each other.

Scores and weights keep the blocks on their last axis, the longest, which is what vector units want;
values stay as they come.

Axes: B batch, T time, H heads, W value size, N blocks, I positions of a block, J earlier positions
of it.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from deconstruct import tuning
from deconstruct.kernels.precision import product
from deconstruct.kernels.running import Running, decay, join


class Plan(NamedTuple):
    """How a platform does it.

    Attributes:
      size: positions of a block.
      weigh: (w_BHIJN, x by J or I, "J" or "I") -> sum over that axis of w x: (B, N, other, H, W).
      accumulate: (join, nothing, parts) -> the running join of the parts along axis 0.
      carry: (decays_NBH, x, reverse) -> y with y_n = decay_n y_(n-1) + x_n, or y_(n+1) in reverse,
        for each x_BNHW of a tuple.
    """

    size: int
    weigh: Callable
    accumulate: Callable
    carry: Callable


def forward(plan: Plan, s_BTH, v_BTHW, runs_BT):
    """(o_BTHW, what the backward needs), float32."""
    s_BHIN = _scores_by_block(plan, s_BTH, mode="edge")
    runs_B1IN = None
    if runs_BT is not None:
        runs_B1IN = _scores_by_block(plan, runs_BT[:, :, None], mode="edge")
    at_BHIN = _running(plan, s_BHIN, runs_B1IN)
    from_start_BHIN, inside_BHIJN = _weights(at_BHIN, s_BHIN)
    v_BNJHW = _values_by_block(plan, v_BTHW)

    own_BNHW = plan.weigh(inside_BHIJN[:, :, -1:], v_BNJHW, "J")[:, :, 0]
    (ends_BNHW,) = _across(plan, at_BHIN, (own_BNHW,), reverse=False)
    starts_BNHW = jnp.pad(ends_BNHW[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0)))
    o_BNIHW = plan.weigh(inside_BHIJN, v_BNJHW, "J")
    o_BNIHW += _at_positions(from_start_BHIN) * starts_BNHW[:, :, None]
    return _values_by_time(o_BNIHW, s_BTH.shape[1]), (at_BHIN, s_BHIN)


def backward(plan: Plan, kept, do_BTHW, do_o_BTH):
    """(p_j G_j, p_j E_j) of `prefix`: the mirror image, over later positions."""
    at_BHIN, s_BHIN = kept
    from_start_BHIN, inside_BHIJN = _weights(at_BHIN, s_BHIN)
    do_BNIHW = _values_by_block(plan, do_BTHW)
    do_o_BHIN = _scores_by_block(plan, do_o_BTH, mode="constant")

    own_BNHW = plan.weigh(from_start_BHIN[:, :, :, None], do_BNIHW, "I")[:, :, 0]
    own_BNH = jnp.swapaxes(jnp.sum(from_start_BHIN * do_o_BHIN, axis=2), 1, 2)
    after = tuple(
        jnp.pad(x[:, 1:], ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (own_BNHW, own_BNH[..., None])
    )
    ends_BNHW, ends_BNH1 = _across(plan, at_BHIN, after, reverse=True)
    to_end_BHJN = inside_BHIJN[:, :, -1]
    pg_BNJHW = plan.weigh(inside_BHIJN, do_BNIHW, "I")
    pg_BNJHW += _at_positions(to_end_BHJN) * ends_BNHW[:, :, None]
    pe_BHJN = jnp.sum(inside_BHIJN * do_o_BHIN[:, :, :, None], axis=2)
    pe_BHJN += to_end_BHJN * jnp.swapaxes(ends_BNH1[..., 0], 1, 2)[:, :, None]
    length = do_BTHW.shape[1]
    return _values_by_time(pg_BNJHW, length), _scores_by_time(pe_BHJN, length)


def _weigh_by_term(w_BHIJN, x, axis: str):
    """Written out, one fused loop: a CPU's products of so few rows are slower."""
    terms = zip(jnp.unstack(w_BHIJN, axis="BHIJN".index(axis)), jnp.unstack(x, axis=2), strict=True)
    return sum(_at_positions(w_BHIN) * x_BNHW[:, :, None] for w_BHIN, x_BNHW in terms)


def _weigh_by_product(w_BHIJN, x, axis: str):
    other = "I" if axis == "J" else "J"
    return product(f"BHIJN,BN{axis}HW->BN{other}HW", w_BHIJN, x)


def _accumulate_in_turn(join: Callable, nothing, parts):
    def step(left, right):
        joined = join(left, right)
        return joined, joined

    return jax.lax.scan(step, nothing, parts)[1]


def _accumulate_in_parallel(join: Callable, nothing, parts):
    return jax.lax.associative_scan(join, parts, axis=0)


def _carry_in_turn(decays_NBH, x, *, reverse: bool):
    """In place, y over x: a `jax.lax.scan` would have the values copied to its order and back."""
    blocks = decays_NBH.shape[0]

    def step(i, carried):
        array, last = carried  # y up to the last block and x from there on; y there
        n = blocks - 1 - i if reverse else i
        decay_BH1 = decays_NBH[n][..., None]
        here = jax.tree.map(lambda y_BHW, x: decay_BH1 * y_BHW + x[:, n], last, array)
        return jax.tree.map(lambda x, y_BHW: x.at[:, n].set(y_BHW), array, here), here

    nothing = jax.tree.map(lambda x: jnp.zeros_like(x[:, 0]), x)
    return jax.lax.fori_loop(0, blocks, step, (x, nothing))[0]


def _carry_in_parallel(decays_NBH, x, *, reverse: bool):
    def add(left, right):
        (decay_left, y_left), (decay_right, y_right) = left, right
        sums = jax.tree.map(lambda before, own: before * decay_right + own, y_left, y_right)
        return decay_left * decay_right, sums

    parts = (jnp.moveaxis(decays_NBH, 0, 1)[..., None], x)
    return jax.lax.associative_scan(add, parts, axis=1, reverse=reverse)[1]


# On a CPU the whole takes twice as long with associative scans across the blocks (measured). On a
# TPU v5e a scan over all positions would move 6.0 GB where blocks of 128 move 1.0 (see `tuning`);
# written out, blocks of 16 take a gigabyte of temporaries.
ON_CPU = Plan(tuning.CPU.prefix_block, _weigh_by_term, _accumulate_in_turn, _carry_in_turn)
ON_ACCELERATORS = Plan(
    tuning.ACCELERATOR.prefix_block, _weigh_by_product, _accumulate_in_parallel, _carry_in_parallel
)


def _running(plan: Plan, s_BHIN, runs_B1IN) -> Running:
    """Running sums inside each block from its start, joined with those where it starts."""
    batch, heads = s_BHIN.shape[:2]
    s_BHIJN = _seen(s_BHIN, runs_B1IN)
    m_BHIN = jnp.max(s_BHIJN, axis=3)
    z_BHIN = jnp.sum(jnp.exp(s_BHIJN - m_BHIN[:, :, :, None]), axis=3)
    inside = Running(m_BHIN, z_BHIN, runs_B1IN)

    runs_B1 = None if runs_B1IN is None else jnp.full((batch, 1), -1, runs_B1IN.dtype)
    nothing = Running(jnp.full((batch, heads), -jnp.inf), jnp.zeros((batch, heads)), runs_B1)
    ends = jax.tree.map(lambda x: jnp.moveaxis(x[:, :, -1], -1, 0), inside)
    ends = plan.accumulate(join, nothing, ends)
    starts = jax.tree.map(lambda none, x: jnp.concatenate([none[None], x[:-1]]), nothing, ends)
    starts = jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1)[:, :, None], starts)
    return join(starts, inside)


def _seen(s_BHIN, runs_B1IN):
    """The scores that each position of a block counts, (B, H, I, J, N); -inf for the others."""
    size = s_BHIN.shape[2]
    counts_IJ = jnp.tril(jnp.ones((size, size), bool))[None, None, :, :, None]
    if runs_B1IN is not None:
        counts_IJ &= runs_B1IN[:, :, :, None] == runs_B1IN[:, :, None]
    return jnp.where(counts_IJ, s_BHIN[:, :, None], -jnp.inf)


def _weights(at_BHIN: Running, s_BHIN):
    """(decay from the end of the block before, 0 in the first block; decay(j, i) p_j, 0 for j > i).

    The first is (B, H, I, N), the second (B, H, I, J, N), which is exp(s_j - m_i) / z_i.
    """
    s_BHIJN = _seen(s_BHIN, at_BHIN.runs)
    inside = jnp.exp(s_BHIJN - at_BHIN.m[:, :, :, None]) * (1 / at_BHIN.z)[:, :, :, None]

    before = jax.tree.map(lambda x: jnp.roll(x[:, :, -1:], 1, axis=-1), at_BHIN)
    from_start = decay(before, at_BHIN)
    first = jnp.arange(s_BHIN.shape[3]) == 0
    return jnp.where(first[None, None, None], 0.0, from_start), inside


def _across(plan: Plan, at_BHIN: Running, parts, *, reverse: bool):
    """The sums at the blocks' ends from what is added there, a tuple of x_BNHW."""
    ends = jax.tree.map(lambda x: jnp.moveaxis(x[:, :, -1], -1, 0), at_BHIN)
    earlier, later = jax.tree.map(lambda x: x[:-1], ends), jax.tree.map(lambda x: x[1:], ends)
    before_after = (0, 1) if reverse else (1, 0)
    decays_NBH = jnp.pad(decay(earlier, later), (before_after, (0, 0), (0, 0)))
    return plan.carry(decays_NBH, parts, reverse=reverse)


def _scores_by_block(plan: Plan, x_BTH, mode: str):
    """(B, T, H) -> (B, H, I, N), the last block filled up by `jnp.pad`'s `mode`."""
    batch, length, heads = x_BTH.shape
    size = min(plan.size, length)
    padded = jnp.pad(x_BTH, ((0, 0), (0, -length % size), (0, 0)), mode)
    return jnp.transpose(padded.reshape(batch, -1, size, heads), (0, 3, 2, 1))


def _scores_by_time(x_BHIN, length: int):
    batch, heads = x_BHIN.shape[:2]
    return jnp.transpose(x_BHIN, (0, 3, 2, 1)).reshape(batch, -1, heads)[:, :length]


def _values_by_block(plan: Plan, x_BTHW):
    """(B, T, H, W) -> (B, N, I, H, W), the last block filled up with zeros."""
    batch, length, heads, width = x_BTHW.shape
    size = min(plan.size, length)
    padded = jnp.pad(x_BTHW, ((0, 0), (0, -length % size), (0, 0), (0, 0)))
    return padded.reshape(batch, -1, size, heads, width)


def _values_by_time(x_BNIHW, length: int):
    return x_BNIHW.reshape(x_BNIHW.shape[0], -1, *x_BNIHW.shape[3:])[:, :length]


def _at_positions(w_BHIN):
    """Weights of positions, to multiply values: (B, N, I, H, 1)."""
    return jnp.transpose(w_BHIN, (0, 3, 2, 1))[..., None]
