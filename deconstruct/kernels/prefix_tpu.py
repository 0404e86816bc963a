"""The prefix softmax in one pass over scores and values, in Pallas for TPUs.

A kernel takes all heads of a row through `prefix_fused`'s walk, in tiles of 128 positions.

Axes: B batch, T time, H heads (P with those that fill up a multiple of 8), G value groups, W value
size, C all heads' or groups' values side by side, R positions of a grid step, I and J positions of
a tile.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas.tpu import roll

from deconstruct.kernels import prefix_fused, tpu
from deconstruct.kernels.backends import Call
from deconstruct.kernels.documents import where
from deconstruct.kernels.tpu import TILE

MAX_TILES = 4  # of a grid step, whose own cost they share (not measured)


class Plan(NamedTuple):
    """The static side of a call on one device.

    Attributes:
      length, num_heads, num_groups, width: of the arrays.
      rows: positions of a grid step.
    """

    length: int
    num_heads: int
    num_groups: int
    width: int
    rows: int

    def columns(self, h: int) -> slice:
        """Where the values of a head, or of a group, lie."""
        return slice(h * self.width, (h + 1) * self.width)

    def group(self, h: int) -> int:
        """Whose values head h weighs."""
        return h * self.num_groups // self.num_heads


def refuses(call: Call) -> str | None:
    """Why it cannot run a call."""
    sizes = call.num_heads, call.num_groups, call.value_size
    return tpu.too_large(_tile_bytes(*sizes, call.dtype.itemsize))


def _plan(s_BTH, v_BTGW) -> Plan:
    _, length, groups, width = v_BTGW.shape
    heads = s_BTH.shape[2]
    tile_bytes = _tile_bytes(heads, groups, width, v_BTGW.dtype.itemsize)
    tiles = min(MAX_TILES, -(-length // TILE), max(tpu.BUFFER_BYTES // tile_bytes, 1))
    return Plan(length, heads, groups, width, tiles * TILE)


def _tile_bytes(num_heads: int, num_groups: int, width: int, itemsize: int) -> int:
    """Of the backward, which holds the most: v, dv, o and do, each of this step and the next."""
    return 2 * 2 * TILE * (num_heads + num_groups) * width * itemsize


def _forward(s_BTH, v_BTGW, runs_BT):
    """(o_BTHW, m_BHT, z_BHT) of one device."""
    plan = _plan(s_BTH, v_BTGW)
    shape = (*s_BTH.shape, plan.width)
    statistics = _like(s_BTH, plan.num_heads)
    m_BPT, z_BPT, o_BTC = _call(
        plan,
        functools.partial(_forward_kernel, plan, runs_BT is not None),
        [tpu.by_head(jnp.swapaxes(s_BTH, 1, 2)), *_runs(runs_BT)],
        [tpu.by_time(v_BTGW)],
        [statistics, statistics],
        [jax.eval_shape(tpu.by_time, jax.ShapeDtypeStruct(shape, v_BTGW.dtype))],
        reverse=False,
    )
    m_BHT, z_BHT = (x[:, : plan.num_heads, : plan.length] for x in (m_BPT, z_BPT))
    return tpu.apart(o_BTC, shape), m_BHT, z_BHT


def _backward(s_BTH, v_BTGW, runs_BT, o_BTHW, m_BHT, z_BHT, do_BTHW):
    """(ds_BTH, dv_BTGW) of one device."""
    plan = _plan(s_BTH, v_BTGW)
    by_time = [tpu.by_time(x) for x in (v_BTGW, o_BTHW, do_BTHW.astype(v_BTGW.dtype))]
    ds_BPT, dv_BTC = _call(
        plan,
        functools.partial(_backward_kernel, plan, runs_BT is not None),
        [
            tpu.by_head(jnp.swapaxes(s_BTH, 1, 2)),
            *_runs(runs_BT),
            tpu.by_head(m_BHT),
            tpu.by_head(z_BHT),
        ],
        by_time,
        [_like(s_BTH, plan.num_heads)],
        [jax.ShapeDtypeStruct(by_time[0].shape, v_BTGW.dtype)],
        reverse=True,
    )
    ds_BTH = jnp.swapaxes(ds_BPT[:, : plan.num_heads, : plan.length], 1, 2)
    return ds_BTH, tpu.apart(dv_BTC, v_BTGW.shape)


def _like(s_BTH, num_heads: int) -> jax.ShapeDtypeStruct:
    """One float32 number a head and position."""
    shape = len(s_BTH), num_heads, s_BTH.shape[1]
    return jax.eval_shape(tpu.by_head, jax.ShapeDtypeStruct(shape, jnp.float32))


def _runs(runs_BT):
    return [] if runs_BT is None else [tpu.by_run(runs_BT)]


def _call(plan: Plan, kernel, by_head, by_time, heads_out, values_out, *, reverse: bool):
    """The kernel over rows and, in turn, steps of time, from the end where `reverse`.

    Its refs are `by_head`, `by_time`, the outputs `heads_out` and `values_out`, and four that carry
    a numerator, two numbers a head and a document on.
    """
    steps = -(-max(plan.length, TILE) // plan.rows)

    def number(n):
        return steps - 1 - n if reverse else n

    heads = tpu.fill_rows(plan.num_heads)
    return tpu.call(
        kernel,
        (len(by_time[0]), steps),
        [(x, 2, plan.rows, number) for x in by_head] + [(x, 1, plan.rows, number) for x in by_time],
        [(x, 2, plan.rows, number) for x in heads_out]
        + [(x, 1, plan.rows, number) for x in values_out],
        [
            ((heads, plan.width), jnp.float32),
            ((heads, 1), jnp.float32),
            ((heads, 1), jnp.float32),
            ((1, 1), jnp.int32),
        ],
        walk=1,
    )


def _forward_kernel(plan: Plan, has_runs: bool, s_ref, *refs):
    runs_ref, *refs = refs if has_runs else (None, *refs)
    v_ref, m_ref, z_ref, o_ref, n_carry, m_carry, z_carry, run_carry = refs
    start = pl.program_id(1) * plan.rows

    @pl.when(pl.program_id(1) == 0)
    def _():
        n_carry[...] = jnp.zeros_like(n_carry)
        m_carry[...] = jnp.full_like(m_carry, -jnp.inf)
        z_carry[...] = jnp.zeros_like(z_carry)
        run_carry[...] = jnp.full_like(run_carry, -1)

    def tile(number, _):
        at = pl.ds(pl.multiple_of(number * TILE, TILE), TILE)
        exists_1I, exists_I1 = tpu.exists(plan.length, start + number * TILE, TILE)
        s_PI = jnp.where(exists_1I, s_ref[:, at], 0.0)
        runs_1I = runs_ref[:, at] if has_runs else None
        v_IC = jnp.where(exists_I1, v_ref[at, :], 0)
        goes_on_1I = None if runs_1I is None else runs_1I == run_carry[...]

        m_PI = _running_max(s_PI, runs_1I)
        m_PI = where(goes_on_1I, jnp.maximum(m_PI, m_carry[...]), m_PI)
        kept_PI = where(goes_on_1I, jnp.exp(m_carry[...] - m_PI), 0.0)
        m_IP, kept_IP, z_IP = m_PI.T, kept_PI.T, (kept_PI * z_carry[...]).T
        sees_IJ = tpu.sees(runs_1I, runs_1I, 0, TILE)
        sums_I1 = []
        for h in range(plan.num_heads):
            w_IJ = jnp.where(sees_IJ, jnp.exp(s_PI[h : h + 1] - m_IP[:, h : h + 1]), 0.0)
            z_I1 = z_IP[:, h : h + 1] + _total(w_IJ)
            n_IW = tpu.product(w_IJ, v_IC[:, plan.columns(plan.group(h))])
            n_IW += kept_IP[:, h : h + 1] * n_carry[h : h + 1]
            o_ref[at, plan.columns(h)] = (n_IW / z_I1).astype(o_ref.dtype)
            n_carry[h : h + 1] = n_IW[-1:]
            sums_I1.append(z_I1)
        z_PI = tpu.stack(sums_I1, fill=1.0)
        m_ref[:, at], z_ref[:, at] = m_PI, z_PI
        m_carry[...], z_carry[...] = m_PI[:, -1:], z_PI[:, -1:]
        if has_runs:
            run_carry[...] = runs_1I[:, -1:]

    jax.lax.fori_loop(0, plan.rows // TILE, tile, None)


def _backward_kernel(plan: Plan, has_runs: bool, s_ref, *refs):
    runs_ref, *refs = refs if has_runs else (None, *refs)
    m_ref, z_ref, v_ref, o_ref, do_ref, ds_ref, dv_ref, *carries = refs
    k_carry, m_carry, e_carry, run_carry = carries
    start = (pl.num_programs(1) - 1 - pl.program_id(1)) * plan.rows

    @pl.when(pl.program_id(1) == 0)
    def _():
        k_carry[...] = jnp.zeros_like(k_carry)
        m_carry[...] = jnp.full_like(m_carry, jnp.inf)
        e_carry[...] = jnp.zeros_like(e_carry)
        run_carry[...] = jnp.full_like(run_carry, -1)

    def tile(count, _):
        number = plan.rows // TILE - 1 - count
        at = pl.ds(pl.multiple_of(number * TILE, TILE), TILE)
        exists_1I, exists_I1 = tpu.exists(plan.length, start + number * TILE, TILE)
        s_PJ = jnp.where(exists_1I, s_ref[:, at], 0.0)
        m_PI = jnp.where(exists_1I, m_ref[:, at], jnp.inf)  # so that no weight is left there
        inverse_PI = 1 / jnp.where(exists_1I, z_ref[:, at], 1.0)
        runs_1I = runs_ref[:, at] if has_runs else None
        v_JC, o_IC, do_IC = (jnp.where(exists_I1, x[at, :], 0) for x in (v_ref, o_ref, do_ref))

        goes_on_1J = None if runs_1I is None else runs_1I == run_carry[...]
        to_later_PJ = where(goes_on_1J, jnp.exp(s_PJ - m_carry[...]), 0.0)
        s_JP, to_later_JP = s_PJ.T, to_later_PJ.T
        do_o_IC = jnp.float32(do_IC) * jnp.float32(o_IC)
        heads = range(plan.num_heads)
        do_o_PI = tpu.stack([_total(do_o_IC[:, plan.columns(h)]) for h in heads], fill=0.0)
        first_P1 = jnp.where(jnp.isinf(m_PI[:, :1]), 0.0, m_PI[:, :1])
        starts_1I = None if runs_1I is None else runs_1I == runs_1I[:, :1]
        from_first_PI = where(starts_1I, jnp.exp(first_P1 - m_PI) * inverse_PI, 0.0)
        from_first_PI = jnp.float32(from_first_PI.astype(do_IC.dtype))
        passes_on = None if runs_1I is None else runs_1I[:, :1] == run_carry[...]
        kept_P1 = where(passes_on, jnp.exp(first_P1 - m_carry[...]), 0.0)
        seen_JI = tpu.sees(runs_1I, runs_1I, 0, TILE, keys_first=True)
        dv_JW: dict[int, jax.Array] = {}
        ds_J1 = []
        for h in heads:
            row, columns, group = slice(h, h + 1), plan.columns(h), plan.group(h)
            a_JI = jnp.where(seen_JI, jnp.exp(s_JP[:, row] - m_PI[row]) * inverse_PI[row], 0.0)
            a_JI = a_JI.astype(do_IC.dtype)
            own_JW = tpu.product(a_JI, do_IC[:, columns]) + to_later_JP[:, row] * k_carry[row]
            e_J1 = _total(jnp.float32(a_JI) * do_o_PI[row]) + to_later_JP[:, row] * e_carry[row]
            v_JW = jnp.float32(v_JC[:, plan.columns(group)])
            ds_J1.append(_total(own_JW * v_JW) - e_J1)
            dv_JW[group] = own_JW + dv_JW[group] if group in dv_JW else own_JW
            k_carry[row] = kept_P1[row] * k_carry[row] + tpu.product(
                from_first_PI[row], do_IC[:, columns]
            )
        for group, own_JW in dv_JW.items():
            dv_ref[at, plan.columns(group)] = own_JW.astype(dv_ref.dtype)
        ds_ref[:, at] = tpu.stack(ds_J1, fill=0.0)
        e_carry[...] = kept_P1 * e_carry[...] + _total(from_first_PI * do_o_PI)
        m_carry[...] = m_PI[:, :1]
        if has_runs:
            run_carry[...] = runs_1I[:, :1]

    jax.lax.fori_loop(0, plan.rows // TILE, tile, None)


def _total(x):
    return jnp.sum(x, axis=1, keepdims=True)


def _running_max(s_PI, runs_1I):
    """The largest score so far in the tile, of its document: each step looks twice as far."""
    place_1I = jax.lax.broadcasted_iota(jnp.int32, (1, TILE), 1)
    shift = 1
    while shift < TILE:
        reaches = place_1I >= shift
        if runs_1I is not None:
            reaches &= roll(runs_1I, shift, 1) == runs_1I
        s_PI = jnp.where(reaches, jnp.maximum(s_PI, roll(s_PI, shift, 1)), s_PI)
        shift *= 2
    return s_PI


run = prefix_fused.op(_forward, _backward)
