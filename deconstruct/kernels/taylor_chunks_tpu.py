"""Taylor attention as a recurrence over chunks whose state stays in fast memory, in Pallas for
TPUs: what `taylor_recurrence.chunked` computes, with neither features nor states in HBM.

A program takes one group of heads and walks over chunks of positions. The sums over the keys before
a chunk, of features times values (and times 1, for the denominator), are read by the chunk's
queries, which meet the chunk's own keys by scores; then the chunk's keys are added. Backwards there
are two walks: forward, with the sums built again, for dq, and in reverse, with the sums' gradient,
for dk and dv.

Of float32 inputs nothing is rounded. Of bfloat16 ones features and sums are rounded on their way
into a product, as queries, keys and values are; the sums themselves stay float32. What
`taylor_recurrence` says of features that cancel is then 2^-13 c^2 in place of 2^-26 c^2 over the
mean weight. In a trained model (`configs/quickstart.py:approximate,uniform`) c had grown to 58
after 500 steps and mean weights to 20, and outputs were wrong by 3e-3 of the largest value, where
scores leave 2e-3, their rounding. But one key of 60 thirty times longer than the others costs 0.03
and at worst 0.1, where queries are at right angles to it; a hundred times longer, 0.2 and at worst
1. Features and sums in two halves each would bring all of that to 0.005 and at worst 0.02, with 1.8
times as many instructions (a v5e's compiler, forward and backward, heads of 64); the backend `tpu`,
by scores, has no such error.

Axes: B batch, T time, H heads, G key/value groups, C channels of a head, K key size and W value
size (filled up to a multiple of 8 inside), X columns (values, two ones, and zeros up to a multiple
of 8).
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from deconstruct.kernels import taylor_fused, taylor_walks_tpu, tpu
from deconstruct.kernels.backends import Call
from deconstruct.kernels.taylor_walks_tpu import Plan

CHUNKS = (512, 256, 128)  # positions; the first that fits


def refuses(call: Call) -> str | None:
    """Why it cannot run a call."""
    heads = call.num_heads // call.num_groups
    sizes = call.length, heads, call.key_size, call.value_size
    plan = _plan(CHUNKS, *sizes, call.dtype, call.isolates_documents)
    return tpu.too_large(plan.bytes, f"the sums of a group and {plan.chunk} of its positions")


def run(q_BTHK, k_BTGK, v_BTGW, runs_BT=None, *, chunks: tuple[int, ...] = CHUNKS) -> jax.Array:
    """o_BTHW in v's dtype; by the first of `chunks`, in positions, that fits."""
    forward, backward = (functools.partial(kernel, chunks) for kernel in (_forward, _backward))
    return taylor_fused.op(forward, backward)(q_BTHK, k_BTGK, v_BTGW, runs_BT)


def _plan(chunks, length: int, heads: int, key_size: int, width: int, dtype, isolates) -> Plan:
    """With the longest chunk that fits and is not for the most part beyond the end."""
    plans = [
        Plan(length, heads, key_size, width, chunk, jnp.dtype(dtype), isolates)
        for chunk in chunks
        if chunk < 2 * length or chunk == chunks[-1]
    ]
    return next((plan for plan in plans if plan.bytes <= tpu.BUFFER_BYTES), plans[-1])


def _plan_of(chunks, q_BTHK, v_BTGW, runs_BT) -> Plan:
    _, length, heads, key_size = q_BTHK.shape
    groups, width = v_BTGW.shape[2:]
    sizes = length, heads // groups, key_size, width
    return _plan(chunks, *sizes, v_BTGW.dtype, runs_BT is not None)


def _forward(chunks, q_BTHK, k_BTGK, v_BTGW, runs_BT):
    """(o_BTHW, sum_BHT: of each row's weights) of one device."""
    plan = _plan_of(chunks, q_BTHK, v_BTGW, runs_BT)
    batch, _, heads, _ = q_BTHK.shape
    o_BHWT, sum_BH1T = _call(
        plan,
        taylor_walks_tpu.forward,
        runs_BT,
        _arrays(plan, q_BTHK, k_BTGK, v_BTGW),
        [(batch, heads, plan.width, v_BTGW.dtype), (batch, heads, 1, jnp.float32)],
        [plan.features.parts],
    )
    return _time_second(plan, o_BHWT), sum_BH1T[:, :, 0, : plan.length]


def _backward(chunks, q_BTHK, k_BTGK, v_BTGW, runs_BT, sum_BHT, delta_BHT, do_BTHW):
    """(dq_BTHK, dk_BTGK, dv_BTGW) of one device."""
    plan = _plan_of(chunks, q_BTHK, v_BTGW, runs_BT)
    delta_BTH1, sum_BTH1 = (jnp.swapaxes(x, 1, 2)[..., None] for x in (delta_BHT, sum_BHT))
    d_BTHW = (do_BTHW.astype(jnp.float32) / sum_BTH1).astype(plan.dtype)
    # A sum over W numbers is larger than each of them: rounded once, it would be off by the most.
    of_sum_BTH1 = -delta_BTH1 / sum_BTH1
    rounded_BTH1 = jax.lax.reduce_precision(of_sum_BTH1, exponent_bits=8, mantissa_bits=7)
    both = [x.astype(plan.dtype) for x in (rounded_BTH1, of_sum_BTH1 - rounded_BTH1)]
    d_BTHX = jnp.concatenate([d_BTHW, *both], axis=-1)
    arrays = [
        *_arrays(plan, q_BTHK, k_BTGK, v_BTGW),
        _time_last(plan, d_BTHX, plan.columns),
    ]
    q, k, v, _ = arrays
    parts = [plan.features.parts] * 2
    (dq,) = _call(
        plan,
        taylor_walks_tpu.gradient_of_queries,
        runs_BT,
        arrays,
        [(*q.shape[:3], q.dtype)],
        parts,
    )
    outputs = [(*k.shape[:3], k.dtype), (*v.shape[:2], plan.width, v.dtype)]
    dk, dv = _call(
        plan, taylor_walks_tpu.gradient_of_keys, runs_BT, arrays, outputs, parts, reverse=True
    )
    dq_BTHK, dk_BTGK = (_time_second(plan, x)[..., : plan.key_size] for x in (dq, dk))
    return dq_BTHK, dk_BTGK, _time_second(plan, dv)


def _arrays(plan: Plan, q_BTHK, k_BTGK, v_BTGW):
    """(q_BHKT, k_BGKT, v_BGXT)."""
    ones_BTG2 = jnp.ones((*v_BTGW.shape[:3], 2), v_BTGW.dtype)
    v_BTGX = jnp.concatenate([v_BTGW, ones_BTG2], axis=-1)
    rows = plan.features.rows
    return (
        _time_last(plan, q_BTHK, rows),
        _time_last(plan, k_BTGK, rows),
        _time_last(plan, v_BTGX, plan.columns),
    )


def _time_last(plan: Plan, x_BTHC, channels: int):
    """(B, H, C, T), with zeros up to so many channels and to whole chunks: without a one among its
    values a key counts nowhere.
    """
    padding = (0, -plan.length % plan.chunk), (0, 0), (0, channels - x_BTHC.shape[-1])
    return jnp.transpose(jnp.pad(x_BTHC, ((0, 0), *padding)), (0, 2, 3, 1))


def _time_second(plan: Plan, x_BHCT):
    return jnp.transpose(x_BHCT[..., : plan.length], (0, 3, 1, 2))


def _call(plan: Plan, kernel, runs_BT, arrays, outputs, parts, *, reverse: bool = False):
    """The kernel over rows, groups and, in turn, chunks, from the last where `reverse`.

    Args:
      plan: of the call.
      kernel: takes the plan and refs.
      runs_BT: documents, or None.
      arrays: time last; the second axis is of groups, or of heads.
      outputs: (B, G or H, C, dtype).
      parts: shapes.
      reverse: whether to begin at the end.
    """
    batch, groups = arrays[1].shape[:2]
    steps = -(-plan.length // plan.chunk)

    def number(n):
        return steps - 1 - n if reverse else n

    def block(x):
        shape = None, x.shape[1] // groups, x.shape[2], plan.chunk
        return x, pl.BlockSpec(shape, lambda b, g, n: (b, g, 0, number(n)))

    documents = []
    if plan.isolates:
        padding = (0, 0), (0, -plan.length % plan.chunk)
        runs_B1T = jnp.pad(runs_BT, padding, mode="edge")[:, None]
        shape = None, 1, plan.chunk
        documents = [
            (runs_B1T, pl.BlockSpec(shape, lambda b, g, n: (b, 0, number(n)))),
            (runs_B1T, pl.BlockSpec(shape, lambda b, g, n: (b, 0, jnp.maximum(number(n) - 1, 0)))),
        ]
    made = [jax.ShapeDtypeStruct((*x, steps * plan.chunk), dtype) for *x, dtype in outputs]
    return tpu.call_blocks(
        functools.partial(kernel, plan),
        (batch, groups, steps),
        [*documents, *(block(x) for x in arrays)],
        [block(x) for x in made],
        [(shape, jnp.float32) for shape in (plan.sums, (plan.columns, 1), *parts)],
        walk=1,
    )
