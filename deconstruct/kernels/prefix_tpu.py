"""The prefix softmax in one pass over scores and values, in Pallas for TPUs.

A kernel walks along time, tile by tile of 128 positions, and carries each head's running maximum,
denominator and numerator in fast memory: scores and values are read once and the output is written
once. Inside a tile the weights w_ij = exp(s_j - m_i), j <= i, are formed outright (m_i the running
maximum), so that no range of scores is too wide, and meet the values in a matrix product.

Backwards the walk begins at the end. With A_ji = exp(s_j - m_i) / z_i, i >= j,

    dv_j = sum_i A_ji do_i,   ds_j = v_j . dv_j - sum_i A_ji (do_i . o_i).

What a tile owes to later ones goes through K = sum_{i >= f} exp(m_f - m_i) / z_i do_i, f being the
first of the later positions: exp(s_j - m_f) K, and the same for do_i . o_i. All exponents are at
most 0. A document's end cuts what is carried.

Scores, maxima and denominators lie heads by time, values time by heads and width, which are dense
on a TPU's lanes.

Axes: B batch, T time, H heads (P with those that fill up a multiple of 8), G value groups, W value
size, C all heads' or groups' values side by side, R positions of a grid step, I and J positions of
a tile.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from deconstruct.kernels.backends import Call, platform
from deconstruct.kernels.shards import per_shard

TILE = 128
MAX_TILES = 4  # of a grid step: more hide no more of its cost
BUFFER_BYTES = 10 << 20  # of 16 MiB that the compiler grants a kernel; the rest is for the tile


class Plan(NamedTuple):
    """The static side of a call on one device.

    Attributes:
      length, num_heads, num_groups, width: of the arrays.
      rows: positions of a grid step.
      interpret: whether Pallas runs it with XLA, for want of a TPU.
    """

    length: int
    num_heads: int
    num_groups: int
    width: int
    rows: int
    interpret: bool

    @property
    def heads(self) -> int:
        """With those that fill up whole registers."""
        return -(-self.num_heads // 8) * 8


def refuses(call: Call) -> str | None:
    """Why it cannot run a call."""
    needed = _tile_bytes(call.num_heads, call.num_groups, call.value_size, call.dtype.itemsize)
    if needed > BUFFER_BYTES:
        return f"{TILE} positions of all heads take {needed} bytes, more than {BUFFER_BYTES}"
    return None


def run(s_BTH: jax.Array, v_BTGW: jax.Array, runs_BT: jax.Array | None = None) -> jax.Array:
    """o_BTHW in v's dtype."""
    return _softmax(s_BTH, v_BTGW, runs_BT)


@jax.custom_vjp
def _softmax(s_BTH, v_BTGW, runs_BT):
    return _softmax_forward(s_BTH, v_BTGW, runs_BT)[0]


def _softmax_forward(s_BTH, v_BTGW, runs_BT):
    run = per_shard(_forward, ("BTH", "BTGW", "BT"), ("BTHW", "BHT", "BHT"), v_BTGW)
    o_BTHW, m_BHT, z_BHT = run(s_BTH, v_BTGW, runs_BT)
    return o_BTHW, (s_BTH, v_BTGW, runs_BT, o_BTHW, m_BHT, z_BHT)


def _softmax_backward(residuals, do_BTHW):
    s_BTH, v_BTGW, *rest = residuals
    given = ("BTH", "BTGW", "BT", "BTHW", "BHT", "BHT", "BTHW")
    run = per_shard(_backward, given, ("BTH", "BTGW"), v_BTGW)
    ds_BTH, dv_BTGW = run(s_BTH, v_BTGW, *rest, do_BTHW)
    return ds_BTH.astype(s_BTH.dtype), dv_BTGW, None


_softmax.defvjp(_softmax_forward, _softmax_backward)


def _plan(s_BTH, v_BTGW) -> Plan:
    _, length, groups, width = v_BTGW.shape
    heads = s_BTH.shape[2]
    tile_bytes = _tile_bytes(heads, groups, width, v_BTGW.dtype.itemsize)
    tiles = min(MAX_TILES, -(-length // TILE), max(BUFFER_BYTES // tile_bytes, 1))
    return Plan(length, heads, groups, width, tiles * TILE, platform() == "cpu")


def _tile_bytes(num_heads: int, num_groups: int, width: int, itemsize: int) -> int:
    """Of the backward, which holds the most: v, dv, o and do, each of this step and the next."""
    return 2 * 2 * TILE * (num_heads + num_groups) * width * itemsize


def _forward(s_BTH, v_BTGW, runs_BT):
    """(o_BTHW, m_BHT, z_BHT) of one device."""
    plan = _plan(s_BTH, v_BTGW)
    m_BPT, z_BPT, o_BTC = _call(
        plan,
        functools.partial(_forward_kernel, plan, runs_BT is not None),
        [_heads_first(plan, jnp.swapaxes(s_BTH, 1, 2)), *_runs(plan, runs_BT)],
        [_side_by_side(plan, v_BTGW)],
        [plan.heads, plan.heads],
        [(plan.num_heads, v_BTGW.dtype)],
        reverse=False,
    )
    return _apart(plan, o_BTC), _unpad(plan, m_BPT), _unpad(plan, z_BPT)


def _backward(s_BTH, v_BTGW, runs_BT, o_BTHW, m_BHT, z_BHT, do_BTHW):
    """(ds_BTH, dv_BTGW) of one device."""
    plan = _plan(s_BTH, v_BTGW)
    ds_BPT, dv_BTC = _call(
        plan,
        functools.partial(_backward_kernel, plan, runs_BT is not None),
        [
            _heads_first(plan, jnp.swapaxes(s_BTH, 1, 2)),
            *_runs(plan, runs_BT),
            _heads_first(plan, m_BHT),
            _heads_first(plan, z_BHT),
        ],
        [_side_by_side(plan, x) for x in (v_BTGW, o_BTHW, do_BTHW.astype(v_BTGW.dtype))],
        [plan.heads],
        [(plan.num_groups, v_BTGW.dtype)],
        reverse=True,
    )
    return jnp.swapaxes(_unpad(plan, ds_BPT), 1, 2), _apart(plan, dv_BTC)


def _call(plan: Plan, kernel, by_head, by_time, out_heads, out_values, *, reverse: bool):
    """The kernel over rows and, in turn, steps of time.

    Args:
      plan: the call's.
      kernel: takes refs of all inputs, outputs and what is carried.
      by_head: inputs (B, .., T).
      by_time: inputs (B, T, C).
      out_heads: of float32 outputs (B, .., T), how many heads.
      out_values: of outputs (B, T, C), (how many heads, dtype).
      reverse: whether time is walked from its end.
    """
    batch, _, length = by_head[0].shape
    steps = -(-length // plan.rows)

    def at(n):
        return steps - 1 - n if reverse else n

    def spec_by_head(heads):
        return pl.BlockSpec((None, heads, plan.rows), lambda b, n: (b, 0, at(n)))

    def spec_by_time(columns):
        return pl.BlockSpec((None, plan.rows, columns), lambda b, n: (b, at(n), 0))

    widths = [heads * plan.width for heads, _ in out_values]
    return pl.pallas_call(
        kernel,
        grid=(batch, steps),
        in_specs=[
            *(spec_by_head(x.shape[1]) for x in by_head),
            *(spec_by_time(x.shape[2]) for x in by_time),
        ],
        out_specs=[*map(spec_by_head, out_heads), *map(spec_by_time, widths)],
        out_shape=[
            *(jax.ShapeDtypeStruct((batch, heads, length), jnp.float32) for heads in out_heads),
            *(
                jax.ShapeDtypeStruct((batch, length, width), dtype)
                for width, (_, dtype) in zip(widths, out_values, strict=True)
            ),
        ],
        scratch_shapes=[
            pltpu.VMEM((plan.heads, plan.width), jnp.float32),
            pltpu.VMEM((plan.heads, 1), jnp.float32),
            pltpu.VMEM((plan.heads, 1), jnp.float32),
            pltpu.VMEM((1, 1), jnp.int32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=plan.interpret,
    )(*by_head, *by_time)


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
        exists_1I, exists_I1 = _exists(plan, start + number * TILE)
        s_PI = jnp.where(exists_1I, s_ref[:, at], 0.0)
        runs_1I = runs_ref[:, at] if has_runs else None
        v_IC = jnp.where(exists_I1, v_ref[at, :], 0)
        goes_on_1I = None if runs_1I is None else runs_1I == run_carry[...]

        m_PI = _running_max(s_PI, runs_1I)
        m_PI = _where(goes_on_1I, jnp.maximum(m_PI, m_carry[...]), m_PI)
        kept_PI = _where(goes_on_1I, jnp.exp(m_carry[...] - m_PI), 0.0)
        m_IP, kept_IP, z_IP = m_PI.T, kept_PI.T, (kept_PI * z_carry[...]).T
        sees_IJ = _sees(runs_1I)
        sums_I1 = []
        for h in range(plan.num_heads):
            w_IJ = jnp.where(sees_IJ, jnp.exp(s_PI[h : h + 1] - m_IP[:, h : h + 1]), 0.0)
            z_I1 = z_IP[:, h : h + 1] + jnp.sum(w_IJ, axis=1, keepdims=True)
            n_IW = _product(w_IJ, v_IC[:, _head(plan, _group(plan, h))])
            n_IW += kept_IP[:, h : h + 1] * n_carry[h : h + 1]
            o_ref[at, _head(plan, h)] = (n_IW / z_I1).astype(o_ref.dtype)
            n_carry[h : h + 1] = n_IW[-1:]
            sums_I1.append(z_I1)
        z_PI = _stack(plan, sums_I1, fill=1.0)
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
        exists_1I, exists_I1 = _exists(plan, start + number * TILE)
        s_PJ = jnp.where(exists_1I, s_ref[:, at], 0.0)
        m_PI = jnp.where(exists_1I, m_ref[:, at], jnp.inf)  # so that no weight is left there
        inverse_PI = 1 / jnp.where(exists_1I, z_ref[:, at], 1.0)
        runs_1I = runs_ref[:, at] if has_runs else None
        v_JC, o_IC, do_IC = (jnp.where(exists_I1, x[at, :], 0) for x in (v_ref, o_ref, do_ref))

        goes_on_1J = None if runs_1I is None else runs_1I == run_carry[...]
        to_later_PJ = _where(goes_on_1J, jnp.exp(s_PJ - m_carry[...]), 0.0)
        s_JP, to_later_JP = s_PJ.T, to_later_PJ.T
        do_o_PI = _stack(plan, [
            jnp.sum(_f32(do_IC[:, _head(plan, h)]) * _f32(o_IC[:, _head(plan, h)]), axis=1,
                    keepdims=True)
            for h in range(plan.num_heads)
        ], fill=0.0)  # fmt: skip
        first_P1 = jnp.where(jnp.isinf(m_PI[:, :1]), 0.0, m_PI[:, :1])
        starts_1I = None if runs_1I is None else runs_1I == runs_1I[:, :1]
        from_first_PI = _where(starts_1I, jnp.exp(first_P1 - m_PI) * inverse_PI, 0.0)
        passes_on = None if runs_1I is None else runs_1I[:, :1] == run_carry[...]
        kept_P1 = _where(passes_on, jnp.exp(first_P1 - m_carry[...]), 0.0)
        seen_JI = _sees(runs_1I, keys_first=True)
        dv_JW: dict[int, jax.Array] = {}
        ds_J1 = []
        for h in range(plan.num_heads):
            row, columns, group = slice(h, h + 1), _head(plan, h), _group(plan, h)
            a_JI = jnp.where(seen_JI, jnp.exp(s_JP[:, row] - m_PI[row]) * inverse_PI[row], 0.0)
            own_JW = _product(a_JI, do_IC[:, columns]) + to_later_JP[:, row] * k_carry[row]
            e_J1 = jnp.sum(a_JI * do_o_PI[row], axis=1, keepdims=True)
            e_J1 += to_later_JP[:, row] * e_carry[row]
            v_JW = _f32(v_JC[:, _head(plan, group)])
            ds_J1.append(jnp.sum(own_JW * v_JW, axis=1, keepdims=True) - e_J1)
            dv_JW[group] = own_JW + dv_JW[group] if group in dv_JW else own_JW
            k_carry[row] = kept_P1[row] * k_carry[row] + _product(
                from_first_PI[row], do_IC[:, columns]
            )
        for group, own_JW in dv_JW.items():
            dv_ref[at, _head(plan, group)] = own_JW.astype(dv_ref.dtype)
        ds_ref[:, at] = _stack(plan, ds_J1, fill=0.0)
        added_P1 = jnp.sum(from_first_PI * do_o_PI, axis=1, keepdims=True)
        e_carry[...] = kept_P1 * e_carry[...] + added_P1
        m_carry[...] = m_PI[:, :1]
        if has_runs:
            run_carry[...] = runs_1I[:, :1]

    jax.lax.fori_loop(0, plan.rows // TILE, tile, None)


def _exists(plan: Plan, start):
    """Which positions of a tile there are, as a row and as a column."""
    left = plan.length - start
    row = jax.lax.broadcasted_iota(jnp.int32, (1, TILE), 1) < left
    return row, jax.lax.broadcasted_iota(jnp.int32, (TILE, 1), 0) < left


def _where(condition, x, other):
    return x if condition is None else jnp.where(condition, x, other)


def _running_max(s_PI, runs_1I):
    """The largest score so far in the tile, of its document: each step looks twice as far."""
    place_1I = jax.lax.broadcasted_iota(jnp.int32, (1, TILE), 1)
    shift = 1
    while shift < TILE:
        reaches = place_1I >= shift
        if runs_1I is not None:
            reaches &= pltpu.roll(runs_1I, shift, 1) == runs_1I
        s_PI = jnp.where(reaches, jnp.maximum(s_PI, pltpu.roll(s_PI, shift, 1)), s_PI)
        shift *= 2
    return s_PI


def _sees(runs_1I, keys_first: bool = False):
    """Whether i sees j: (I, J), or (J, I)."""
    down = jax.lax.broadcasted_iota(jnp.int32, (TILE, TILE), 0)
    along = jax.lax.broadcasted_iota(jnp.int32, (TILE, TILE), 1)
    sees = down <= along if keys_first else down >= along
    if runs_1I is None:
        return sees
    runs_II = jnp.broadcast_to(runs_1I.astype(jnp.float32), (TILE, TILE))  # exact below 2^24
    return sees & (runs_II == runs_II.T)


def _product(w, x):
    """In float32 where x is; else of x's dtype, summed in float32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(w.astype(x.dtype), x, precision=precision, preferred_element_type=jnp.float32)


def _stack(plan: Plan, columns, fill: float):
    """(I, 1) of each head to (P, I)."""
    rest = jnp.full((TILE, plan.heads - plan.num_heads), fill, jnp.float32)
    return jnp.concatenate([*columns, rest] if rest.shape[1] else columns, axis=1).T


def _head(plan: Plan, h: int) -> slice:
    return slice(h * plan.width, (h + 1) * plan.width)


def _group(plan: Plan, h: int) -> int:
    """Whose values head h weighs."""
    return h * plan.num_groups // plan.num_heads


def _f32(x):
    return x.astype(jnp.float32)


def _heads_first(plan: Plan, x_BHT):
    """With the heads filled up, and at least a tile long."""
    heads, length = plan.heads - x_BHT.shape[1], max(TILE - plan.length, 0)
    return jnp.pad(x_BHT.astype(jnp.float32), ((0, 0), (0, heads), (0, length)))


def _runs(plan: Plan, runs_BT):
    if runs_BT is None:
        return []
    return [jnp.pad(runs_BT, ((0, 0), (0, max(TILE - plan.length, 0))))[:, None]]


def _side_by_side(plan: Plan, x_BTHW):
    x_BTC = x_BTHW.reshape(*x_BTHW.shape[:2], -1)
    return jnp.pad(x_BTC, ((0, 0), (0, max(TILE - plan.length, 0)), (0, 0)))


def _apart(plan: Plan, x_BTC):
    return x_BTC[:, : plan.length].reshape(len(x_BTC), plan.length, -1, plan.width)


def _unpad(plan: Plan, x_BPT):
    return x_BPT[:, : plan.num_heads, : plan.length]
