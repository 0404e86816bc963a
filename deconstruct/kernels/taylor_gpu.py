"""Taylor attention by blocks of scores that stay in registers, in Pallas for NVIDIA GPUs.

A program takes one head and a block of queries, goes through the blocks of keys up to its own, and
gathers the sums of weights w = 1 + x + x^2/2 and of weights times values: polynomial weights need
no running maximum. Backwards, with p = w / sum, g = (1 + x) / sum, dp_ij = do_i . v_j and
ds_ij = g_ij (dp_ij - do_i . o_i) / sqrt(K),

    dv_j = sum_i p_ij do_i,   dq_i = sum_j ds_ij k_j,   dk_j = sum_i ds_ij q_i,

in two kernels that score a block again: along the keys for dq, along the queries for dk and dv.
Where documents are whole rows, only blocks that the diagonal crosses need a mask.

Axes: B batch, T query time, S key time, H heads, G key/value groups, K key size, W value size, I
queries of a block, J keys of a block.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from deconstruct.kernels import gpu, taylor_fused
from deconstruct.kernels.backends import Call
from deconstruct.kernels.documents import where
from deconstruct.kernels.precision import block_product

LARGEST_HEAD = 128  # of which blocks fit the shared memory

# Bytes of a number -> axis along which programs lie -> (queries, keys, warps) of a block, for heads
# up to 64 and larger ones. By what the compiler says of a Hopper chip, not by a clock: nothing
# spills. Blocks of 128 queries read keys and values half as often as of 64; dk and dv hold twice as
# much, and with 64 keys two programs still fit a multiprocessor. Products of float32 take no tensor
# cores, and hold their operands in registers.
BLOCKS = {
    2: {"T": ((128, 64, 8), (128, 64, 8)), "S": ((64, 64, 4), (64, 64, 8))},
    4: {"T": ((32, 32, 4), (32, 16, 8)), "S": ((32, 32, 4), (32, 16, 4))},
}


class Plan(NamedTuple):
    """The static side of a call on one device.

    Attributes:
      length, num_heads, num_groups, key_size, width: of the arrays.
      queries, keys: positions of a block.
      num_warps: of a program.
    """

    length: int
    num_heads: int
    num_groups: int
    key_size: int
    width: int
    queries: int
    keys: int
    num_warps: int

    def own(self, first, size: int) -> gpu.Rows:
        """Those of a program's own block, whose first position is `first`."""
        return gpu.Rows(0, size, None if self.length % size == 0 else self.length - first)

    def walked(self, start, size: int) -> gpu.Rows:
        """Those of a block that a program comes to."""
        return gpu.Rows(start, size, None if self.length % size == 0 else self.length)


def refuses(call: Call) -> str | None:
    """Why it cannot run a call."""
    return gpu.too_large(LARGEST_HEAD, call.key_size, call.value_size)


def _plan(q_BTHK, v_BTGW, along: str) -> Plan:
    """Of a kernel whose programs lie along T or S."""
    _, length, heads, key_size = q_BTHK.shape
    groups, width = v_BTGW.shape[2:]
    blocks = BLOCKS[v_BTGW.dtype.itemsize][along][max(key_size, width) > 64]
    return Plan(length, heads, groups, key_size, width, *blocks)


def _tiling(plan: Plan, batch: int, along: str) -> gpu.Tiling:
    """Programs of blocks along one axis of time, T or S, that see all of the other."""
    rows = {"T": plan.queries, "S": plan.keys}
    steps = {axis: pl.cdiv(plan.length, size) for axis, size in rows.items()}
    whole = {axis: steps[axis] * size for axis, size in rows.items()}
    heads = {"K": gpu.side(plan.key_size), "W": gpu.side(plan.width)}

    def place(step, head, row):
        group = head // (plan.num_heads // plan.num_groups)
        number = _query_block(step, steps["T"]) if along == "T" else step
        return {"B": row, "H": head, "G": group, along: number}

    grid = steps[along], plan.num_heads, batch
    return gpu.Tiling(
        grid, {**whole, **heads, along: rows[along]}, place, plan.num_warps, num_stages=2
    )


def _query_block(step, steps):
    """The last comes first: it meets the most keys."""
    return steps - 1 - step


def forward(q_BTHK, k_BTGK, v_BTGW, runs_BT):
    """(o_BTHW, sum_BHT: of each query's weights) of one device."""
    plan, batch = _plan(q_BTHK, v_BTGW, "T"), len(q_BTHK)
    return gpu.call(
        functools.partial(_forward_kernel, plan),
        _tiling(plan, batch, "T"),
        _given(q_BTHK, k_BTGK, v_BTGW, runs_BT),
        [
            ((*q_BTHK.shape[:3], plan.width), v_BTGW.dtype, "BTHW"),
            ((batch, plan.num_heads, plan.length), jnp.float32, "BHT"),
        ],
    )


def backward(q_BTHK, k_BTGK, v_BTGW, runs_BT, sum_BHT, delta_BHT, do_BTHW):
    """(dq_BTHK, dk_BTGK, dv_BTGW) of one device."""
    heads = q_BTHK.shape[2]
    given = [
        *_given(q_BTHK, k_BTGK, v_BTGW, runs_BT),
        (do_BTHW, "BTHW"), (sum_BHT, "BHT"), (delta_BHT, "BHT"),
    ]  # fmt: skip

    def call(kernel, along: str, made):
        plan = _plan(q_BTHK, v_BTGW, along)
        tiling = _tiling(plan, len(q_BTHK), along)
        return gpu.call(functools.partial(kernel, plan), tiling, given, made)

    (dq_BTHK,) = call(_queries_kernel, "T", [(q_BTHK.shape, q_BTHK.dtype, "BTHK")])
    dk_BTHK, dv_BTHW = call(
        _keys_kernel,
        "S",
        [
            (q_BTHK.shape, gpu.dtype_of_heads(k_BTGK, heads), "BSHK"),
            (do_BTHW.shape, gpu.dtype_of_heads(v_BTGW, heads), "BSHW"),
        ],
    )
    return dq_BTHK, gpu.sum_of_heads(dk_BTHK, k_BTGK), gpu.sum_of_heads(dv_BTHW, v_BTGW)


def _given(q_BTHK, k_BTGK, v_BTGW, runs_BT):
    """What all kernels read; the keys' axis of time is S."""
    return [
        (runs_BT, "BT"), (runs_BT, "BS"), (q_BTHK, "BTHK"), (k_BTGK, "BSGK"), (v_BTGW, "BSGW")
    ]  # fmt: skip


def _forward_kernel(plan: Plan, runs_ref, key_runs_ref, q_ref, k_ref, v_ref, o_ref, sum_ref):
    first = _query_block(pl.program_id(0), pl.num_programs(0)) * plan.queries
    own = plan.own(first, plan.queries)
    q_IK, runs_I = own.read(q_ref, plan.key_size), _read_runs(own, runs_ref)

    def step(key, masked: bool, sums):
        o_IW, sum_I = sums
        keys = plan.walked(key, plan.keys)
        x_IJ = _scores(plan, q_IK, keys.read(k_ref, plan.key_size))
        seen_IJ = _sees(plan, first, key, runs_I, _read_runs(keys, key_runs_ref), masked)
        w_IJ = where(seen_IJ, 1 + x_IJ * (1 + x_IJ / 2), 0.0)
        o_IW += block_product(w_IJ, keys.read(v_ref, plan.width))
        return o_IW, sum_I + jnp.sum(w_IJ, axis=1)

    nothing = jnp.zeros(o_ref.shape, jnp.float32), jnp.zeros(plan.queries, jnp.float32)
    o_IW, sum_I = _along_keys(plan, first, step, nothing)
    own.write(o_ref, o_IW * (1 / sum_I)[:, None], plan.width)
    own.write(sum_ref, sum_I)


def _queries_kernel(plan: Plan, runs_ref, key_runs_ref, q_ref, k_ref, v_ref, *refs):
    do_ref, sum_ref, delta_ref, dq_ref = refs
    first = _query_block(pl.program_id(0), pl.num_programs(0)) * plan.queries
    own = plan.own(first, plan.queries)
    runs_I, inverse_I, delta_I = _read_runs(own, runs_ref), *_read_rows(own, sum_ref, delta_ref)
    q_IK, do_IW = own.read(q_ref, plan.key_size), own.read(do_ref, plan.width)

    def step(key, masked: bool, dq_IK):
        keys = plan.walked(key, plan.keys)
        k_JK = keys.read(k_ref, plan.key_size)
        x_IJ = _scores(plan, q_IK, k_JK)
        dp_IJ = block_product(do_IW, keys.read(v_ref, plan.width), (1, 1))
        ds_IJ = (1 + x_IJ) * inverse_I[:, None] * (dp_IJ - delta_I[:, None])
        seen_IJ = _sees(plan, first, key, runs_I, _read_runs(keys, key_runs_ref), masked)
        return dq_IK + block_product(where(seen_IJ, ds_IJ, 0.0), k_JK)

    dq_IK = _along_keys(plan, first, step, jnp.zeros(dq_ref.shape, jnp.float32))
    own.write(dq_ref, dq_IK * plan.key_size**-0.5, plan.key_size)


def _keys_kernel(plan: Plan, runs_ref, key_runs_ref, q_ref, k_ref, v_ref, *refs):
    do_ref, sum_ref, delta_ref, dk_ref, dv_ref = refs
    first = pl.program_id(0) * plan.keys
    own = plan.own(first, plan.keys)
    runs_J = _read_runs(own, key_runs_ref)
    k_JK, v_JW = own.read(k_ref, plan.key_size), own.read(v_ref, plan.width)

    def step(query, masked: bool, sums):
        dk_JK, dv_JW = sums
        queries = plan.walked(query, plan.queries)
        inverse_I, delta_I = _read_rows(queries, sum_ref, delta_ref)
        q_IK, do_IW = queries.read(q_ref, plan.key_size), queries.read(do_ref, plan.width)
        x_JI = _scores(plan, k_JK, q_IK)
        dp_JI = block_product(v_JW, do_IW, (1, 1))
        p_JI = (1 + x_JI * (1 + x_JI / 2)) * inverse_I[None]
        ds_JI = (1 + x_JI) * inverse_I[None] * (dp_JI - delta_I[None])
        runs_I = _read_runs(queries, runs_ref)
        seen_JI = _sees(plan, query, first, runs_I, runs_J, masked, keys_first=True)
        dv_JW += block_product(where(seen_JI, p_JI, 0.0), do_IW)
        return dk_JK + block_product(where(seen_JI, ds_JI, 0.0), q_IK), dv_JW

    nothing = jnp.zeros(dk_ref.shape, jnp.float32), jnp.zeros(dv_ref.shape, jnp.float32)
    dk_JK, dv_JW = _along_queries(plan, first, step, nothing)
    own.write(dk_ref, dk_JK * plan.key_size**-0.5, plan.key_size)
    own.write(dv_ref, dv_JW, plan.width)


def _along_keys(plan: Plan, first, step: Callable, sums):
    """What queries from `first` on gather of the blocks of keys up to their own.

    `step` takes a block's first position, whether the diagonal may cross it, and the sums so far.
    """
    stop = pl.cdiv(jnp.minimum(first + plan.queries, plan.length), plan.keys)
    diagonal = first // plan.keys
    for start, end, masked in (0, diagonal, False), (diagonal, stop, True):
        sums = jax.lax.fori_loop(start, end, _at(step, plan.keys, masked), sums)
    return sums


def _along_queries(plan: Plan, first, step: Callable, sums):
    """What keys from `first` on gather of the blocks of queries from their own on."""
    stop = pl.cdiv(plan.length, plan.queries)
    below = jnp.minimum(pl.cdiv(first + plan.keys, plan.queries), stop)
    for start, end, masked in (first // plan.queries, below, True), (below, stop, False):
        sums = jax.lax.fori_loop(start, end, _at(step, plan.queries, masked), sums)
    return sums


def _at(step: Callable, size: int, masked: bool):
    return lambda number, sums: step(number * size, masked, sums)


def _read_runs(rows: gpu.Rows, ref):
    return None if ref is None else rows.read(ref, fill=-1)


def _read_rows(rows: gpu.Rows, sum_ref, delta_ref):
    """(1 / sum, delta); a query that does not exist gives no gradient."""
    return 1 / rows.read(sum_ref, fill=jnp.inf), rows.read(delta_ref)


def _scores(plan: Plan, x, y):
    return block_product(x, y, (1, 1)) * plan.key_size**-0.5


def _sees(plan: Plan, query, key, runs_I, runs_J, masked: bool, *, keys_first: bool = False):
    """Whether queries from `query` on see keys from `key` on: (I, J) or (J, I), or None for all."""
    shape = (plan.keys, plan.queries) if keys_first else (plan.queries, plan.keys)
    by_query, by_key = (1, 0) if keys_first else (0, 1)
    seen = None
    if masked:
        i = query + jax.lax.broadcasted_iota(jnp.int32, shape, by_query)
        seen = i >= key + jax.lax.broadcasted_iota(jnp.int32, shape, by_key)
    if runs_I is None:
        return seen
    same = jnp.expand_dims(runs_I, by_key) == jnp.expand_dims(runs_J, by_query)
    return same if seen is None else seen & same


run = taylor_fused.op(forward, backward)
