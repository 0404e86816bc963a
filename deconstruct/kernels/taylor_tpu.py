"""Taylor attention by blocks of scores that never leave fast memory, in Pallas for TPUs.

A block of queries meets the blocks of keys up to its own, one after another, and gathers the sums
of weights w = 1 + x + x^2/2 and of weights times values: polynomial weights need no running
maximum. Backwards, with p = w / sum, g = (1 + x) / sum, dp_ij = do_i . v_j and
ds_ij = g_ij (dp_ij - do_i . o_i) / sqrt(K),

    dv_j = sum_i p_ij do_i,   dq_i = sum_j ds_ij k_j,   dk_j = sum_i ds_ij q_i,

in two walks that score a block again: along the keys for dq, along the queries for dk and dv.

Axes: B batch, T time, H heads (P with those that fill up a multiple of 8), G key/value groups, K
key size, W value size, C all heads side by side, I queries of a block, J keys of a block.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from deconstruct.kernels import taylor_fused, tpu
from deconstruct.kernels.backends import Call

LARGEST_BLOCK = 256


class Plan(NamedTuple):
    """The static side of a call on one device.

    Attributes:
      length, num_heads, num_groups, key_size, width: of the arrays.
      rows: positions of a block.
      isolates: whether documents are isolated.
    """

    length: int
    num_heads: int
    num_groups: int
    key_size: int
    width: int
    rows: int
    isolates: bool

    def of_key(self, h: int) -> slice:
        """Where a head's queries, or a group's keys, lie."""
        return slice(h * self.key_size, (h + 1) * self.key_size)

    def of_value(self, h: int) -> slice:
        return slice(h * self.width, (h + 1) * self.width)

    def group(self, h: int) -> int:
        """Whose keys and values head h meets."""
        return h * self.num_groups // self.num_heads


def refuses(call: Call) -> str | None:
    """Why it cannot run a call."""
    sizes = call.num_heads, call.num_groups, call.key_size, call.value_size
    return tpu.too_large(tpu.TILE * _position_bytes(*sizes, call.dtype.itemsize))


def _position_bytes(heads: int, groups: int, key_size: int, width: int, itemsize: int) -> int:
    """Of the walk for dk and dv, which holds the most: q and do, k, v and their gradients, each of
    this step and the next, and the sums in float32.
    """
    queries, keys = heads * (key_size + width), groups * (key_size + width)
    return 2 * (queries + 2 * keys) * itemsize + 4 * keys


def _plan(q_BTHK, v_BTGW, runs_BT) -> Plan:
    _, length, heads, key_size = q_BTHK.shape
    groups, width = v_BTGW.shape[2:]
    rows = min(LARGEST_BLOCK, -(-length // tpu.TILE) * tpu.TILE)
    needed = _position_bytes(heads, groups, key_size, width, v_BTGW.dtype.itemsize)
    if rows * needed > tpu.BUFFER_BYTES:
        rows = tpu.TILE
    return Plan(length, heads, groups, key_size, width, rows, runs_BT is not None)


def _forward(q_BTHK, k_BTGK, v_BTGW, runs_BT):
    """(o_BTHW, sum_BHT: of each row's weights) of one device."""
    plan = _plan(q_BTHK, v_BTGW, runs_BT)
    q, k, v = (tpu.by_time(x) for x in (q_BTHK, k_BTGK, v_BTGW))
    steps = -(-q.shape[1] // plan.rows)
    heads = tpu.fill_rows(plan.num_heads)
    sum_BPT, o_BTC = tpu.call(
        functools.partial(_forward_kernel, plan),
        (len(q), steps, steps),
        [
            *_runs(plan, runs_BT, _first, _second_at_most),
            (q, 1, plan.rows, _first),
            (k, 1, plan.rows, _second_at_most),
            (v, 1, plan.rows, _second_at_most),
        ],
        [
            (jax.ShapeDtypeStruct((len(q), heads, q.shape[1]), jnp.float32), 2, plan.rows, _first),
            (
                jax.ShapeDtypeStruct((*q.shape[:2], plan.num_heads * plan.width), v.dtype),
                1,
                plan.rows,
                _first,
            ),
        ],
        [
            ((plan.rows, plan.num_heads * plan.width), jnp.float32),
            ((plan.rows, plan.num_heads), jnp.float32),
        ],
        walk=1,
    )
    o_BTHW = tpu.apart(o_BTC, (*q_BTHK.shape[:3], plan.width))
    return o_BTHW, sum_BPT[:, : plan.num_heads, : plan.length]


def _backward(q_BTHK, k_BTGK, v_BTGW, runs_BT, sum_BHT, delta_BHT, do_BTHW):
    """(dq_BTHK, dk_BTGK, dv_BTGW) of one device."""
    plan = _plan(q_BTHK, v_BTGW, runs_BT)
    q, k, v, do = (tpu.by_time(x) for x in (q_BTHK, k_BTGK, v_BTGW, do_BTHW))
    statistics = tpu.by_head(sum_BHT), tpu.by_head(delta_BHT)
    steps = -(-q.shape[1] // plan.rows)

    def inputs(queries, keys):
        return [
            *_runs(plan, runs_BT, queries, keys),
            *((x, 2, plan.rows, queries) for x in statistics),
            *((x, 1, plan.rows, queries) for x in (q, do)),
            *((x, 1, plan.rows, keys) for x in (k, v)),
        ]

    def output(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype), 1, plan.rows, _first

    def sums(x):
        return (plan.rows, x.shape[2]), jnp.float32

    grid = len(q), steps, steps
    (dq,) = tpu.call(
        functools.partial(_queries_kernel, plan),
        grid,
        inputs(_first, _second_at_most),
        [output(q)],
        [sums(q)],
        walk=1,
    )
    dk, dv = tpu.call(
        functools.partial(_keys_kernel, plan),
        grid,
        inputs(_second_at_least, _first),
        [output(k), output(v)],
        [sums(k), sums(v)],
        walk=1,
    )
    return tuple(
        tpu.apart(x, like.shape)
        for x, like in zip((dq, dk, dv), (q_BTHK, k_BTGK, v_BTGW), strict=True)
    )


def _first(first, second):
    """The number of the block that stays while the other walks."""
    return first


def _second_at_most(first, second):
    """The other's number; once it has gone too far, that of the last that was read."""
    return jnp.minimum(second, first)


def _second_at_least(first, second):
    return jnp.maximum(second, first)


def _runs(plan: Plan, runs_BT, queries, keys):
    if not plan.isolates:
        return []
    runs_B1T = tpu.by_run(runs_BT)
    return [(runs_B1T, 2, plan.rows, number) for number in (queries, keys)]


def _forward_kernel(plan: Plan, *refs):
    runs, refs = (refs[:2], refs[2:]) if plan.isolates else ((), refs)
    q_ref, k_ref, v_ref, sum_ref, o_ref, sums, weights = refs
    i, j = pl.program_id(1), pl.program_id(2)

    @pl.when(j == 0)
    def _():
        sums[...] = jnp.zeros_like(sums)
        weights[...] = jnp.zeros_like(weights)

    @pl.when(j <= i)
    def _():
        q_IC, (k_JC, v_JC) = q_ref[...], _there(plan, j, k_ref, v_ref)
        seen_IJ = _sees(plan, i, j, runs)
        for h in range(plan.num_heads):
            group = plan.group(h)
            x_IJ = _scores(plan, q_IC[:, plan.of_key(h)], k_JC[:, plan.of_key(group)])
            w_IJ = jnp.where(seen_IJ, 1 + x_IJ + x_IJ * x_IJ / 2, 0.0)
            weights[:, h : h + 1] += jnp.sum(w_IJ, axis=1, keepdims=True)
            sums[:, plan.of_value(h)] += tpu.product(w_IJ, v_JC[:, plan.of_value(group)])

    @pl.when(j == i)
    def _():
        columns = [weights[:, h : h + 1] for h in range(plan.num_heads)]
        for h, sum_I1 in enumerate(columns):
            o_ref[:, plan.of_value(h)] = (sums[:, plan.of_value(h)] / sum_I1).astype(o_ref.dtype)
        sum_ref[...] = tpu.stack(columns, fill=1.0)


def _queries_kernel(plan: Plan, *refs):
    runs, refs = (refs[:2], refs[2:]) if plan.isolates else ((), refs)
    sum_ref, delta_ref, q_ref, do_ref, k_ref, v_ref, dq_ref, dq_sums = refs
    i, j = pl.program_id(1), pl.program_id(2)

    @pl.when(j == 0)
    def _():
        dq_sums[...] = jnp.zeros_like(dq_sums)

    @pl.when(j <= i)
    def _():
        q_IC, do_IC = q_ref[...], do_ref[...]
        k_JC, v_JC = _there(plan, j, k_ref, v_ref)
        inverse_IP, delta_IP = (1 / sum_ref[...]).T, delta_ref[...].T
        seen_IJ = _sees(plan, i, j, runs)
        for h in range(plan.num_heads):
            group, column = plan.group(h), slice(h, h + 1)
            k_JK = k_JC[:, plan.of_key(group)]
            x_IJ = _scores(plan, q_IC[:, plan.of_key(h)], k_JK)
            dp_IJ = tpu.product(do_IC[:, plan.of_value(h)], v_JC[:, plan.of_value(group)], (1, 1))
            ds_IJ = (1 + x_IJ) * inverse_IP[:, column] * (dp_IJ - delta_IP[:, column])
            ds_IJ = jnp.where(seen_IJ, ds_IJ, 0.0)
            dq_sums[:, plan.of_key(h)] += tpu.product(ds_IJ, k_JK)

    @pl.when(j == i)
    def _():
        dq_ref[...] = (dq_sums[...] * plan.key_size**-0.5).astype(dq_ref.dtype)


def _keys_kernel(plan: Plan, *refs):
    runs, refs = (refs[:2], refs[2:]) if plan.isolates else ((), refs)
    sum_ref, delta_ref, q_ref, do_ref, k_ref, v_ref, dk_ref, dv_ref, dk_sums, dv_sums = refs
    j, i = pl.program_id(1), pl.program_id(2)

    @pl.when(i == 0)
    def _():
        dk_sums[...] = jnp.zeros_like(dk_sums)
        dv_sums[...] = jnp.zeros_like(dv_sums)

    @pl.when(i >= j)
    def _():
        q_IC, do_IC = _there(plan, i, q_ref, do_ref)
        k_JC, v_JC = k_ref[...], v_ref[...]
        inverse_PI, delta_PI = 1 / sum_ref[...], delta_ref[...]
        exists_1I, _ = tpu.exists(plan.length, i * plan.rows, plan.rows)
        seen_JI = _sees(plan, i, j, runs, keys_first=True) & exists_1I
        for h in range(plan.num_heads):
            group, row = plan.group(h), slice(h, h + 1)
            q_IK, do_IW = q_IC[:, plan.of_key(h)], do_IC[:, plan.of_value(h)]
            x_JI = _scores(plan, k_JC[:, plan.of_key(group)], q_IK)
            p_JI = (1 + x_JI + x_JI * x_JI / 2) * inverse_PI[row]
            p_JI = jnp.where(seen_JI, p_JI, 0.0)
            dp_JI = tpu.product(v_JC[:, plan.of_value(group)], do_IW, (1, 1))
            ds_JI = (1 + x_JI) * inverse_PI[row] * (dp_JI - delta_PI[row])
            ds_JI = jnp.where(seen_JI, ds_JI, 0.0)
            dv_sums[:, plan.of_value(group)] += tpu.product(p_JI, do_IW)
            dk_sums[:, plan.of_key(group)] += tpu.product(ds_JI, q_IK)

    @pl.when(i == pl.num_programs(2) - 1)
    def _():
        dk_ref[...] = (dk_sums[...] * plan.key_size**-0.5).astype(dk_ref.dtype)
        dv_ref[...] = dv_sums[...].astype(dv_ref.dtype)


def _there(plan: Plan, number, *refs):
    """A block of each, with zeros where there are no positions."""
    _, exists_I1 = tpu.exists(plan.length, number * plan.rows, plan.rows)
    return [jnp.where(exists_I1, ref[...], 0) for ref in refs]


def _sees(plan: Plan, i, j, runs, *, keys_first: bool = False):
    runs_1I, runs_1J = (ref[...] for ref in runs) if runs else (None, None)
    return tpu.sees(runs_1I, runs_1J, (i - j) * plan.rows, plan.rows, keys_first=keys_first)


def _scores(plan: Plan, x, y):
    return tpu.product(x, y, (1, 1)) * plan.key_size**-0.5


run = taylor_fused.op(_forward, _backward)
