"""Causal attention by blocks of query rows: what softmax, Taylor and fixed-map attention share.

A block of rows is scored against the keys up to its own end, so most of the half above the diagonal
is never computed, and only blocks of scores exist. The backward scores a block again instead of
keeping it. How scores become weights is a `Rule`.

The backward keeps its scores transposed, keys first, so that only one of its five matrix products
reads them across their rows.

Axes: B batch, T query time, S key time, H heads, G key/value groups, R heads of a group, K key
size, W value size, C one or more columns. B and G lead every array inside; names leave them out.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from deconstruct import tuning
from deconstruct.kernels.backends import platform
from deconstruct.kernels.precision import product

MAX_SPANS = 8  # for each is compiled by itself


class Rule(NamedTuple):
    """How scores become weights; what is masked weighs 0.

    Attributes:
      forward: (scores_RTS, mask) -> (weights_RTS not yet normalised, statistics of the rows, each
        RT1); the last statistic is the row's sum of weights.
      backward: (scores_SRT, mask, statistics, each 1RT) -> (normalised weights p_SRT, slope_SRT),
        where d loss / d score = slope * (dp - sum of p * dp over the row).
    """

    forward: Callable
    backward: Callable


class Inputs(NamedTuple):
    """The arrays of one call with B and G leading: runs (documents) may be None."""

    q_RTK: jax.Array
    k_SK: jax.Array
    v_SW: jax.Array
    runs_S1: jax.Array | None


class Span(NamedTuple):
    """Query rows [start, stop), `rows` at a time, against the keys before `stop`."""

    start: int
    stop: int
    rows: int


def attend(
    rule: Rule,
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGW: jax.Array,
    runs_BT: jax.Array | None,
) -> jax.Array:
    """o_BTHW, in v's dtype: each row's weights by `rule` from q.k / sqrt(K), normalised, times v.

    Args:
      rule: how scores become weights.
      q_BTHK, k_BTGK, v_BTGW: queries, keys and values; G divides H.
      runs_BT: the number of each position's document, or None.
    """
    return _attend(rule, q_BTHK, k_BTGK, v_BTGW, runs_BT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(rule, q_BTHK, k_BTGK, v_BTGW, runs_BT):
    return _attend_forward(rule, q_BTHK, k_BTGK, v_BTGW, runs_BT)[0]


def _attend_forward(rule, q_BTHK, k_BTGK, v_BTGW, runs_BT):
    runs = None if runs_BT is None else runs_BT[:, None, :, None]
    inputs = Inputs(
        lead_heads(q_BTHK, k_BTGK.shape[2]), lead_groups(k_BTGK), lead_groups(v_BTGW), runs
    )
    o_RTW, statistics = forward(rule, inputs)
    o_BTHW = unlead_heads(o_RTW)
    return o_BTHW, (inputs, o_BTHW, statistics)


def _attend_backward(rule, residuals, do_BTHW):
    inputs, o_BTHW, statistics = residuals
    groups = inputs.k_SK.shape[1]
    products_BTHW = do_BTHW.astype(jnp.float32) * o_BTHW.astype(jnp.float32)
    delta = lead_heads(jnp.sum(products_BTHW, axis=-1, keepdims=True), groups)
    dq, dk, dv = backward(rule, inputs, lead_heads(do_BTHW, groups), delta, statistics)
    return (
        unlead_heads(dq).astype(inputs.q_RTK.dtype),
        jnp.swapaxes(dk, 1, 2).astype(inputs.k_SK.dtype),
        jnp.swapaxes(dv, 1, 2).astype(inputs.v_SW.dtype),
        None,
    )


_attend.defvjp(_attend_forward, _attend_backward)


def forward(rule: Rule, inputs: Inputs):
    """(o_RTW in v's dtype, statistics of the rows)."""
    spanned = [_forward_span(rule, span, inputs) for span in spans(inputs.k_SK.shape[-2])]
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=-2), *spanned)


def backward(rule: Rule, inputs: Inputs, do_RTW, delta_RT1, statistics):
    """(dq_RTK, dk_SK, dv_SW), float32; delta is the row's sum of do * o."""
    dk = jnp.zeros(inputs.k_SK.shape, jnp.float32)
    dv = jnp.zeros(inputs.v_SW.shape, jnp.float32)
    queries = []
    for span in spans(inputs.k_SK.shape[-2]):
        rows = (inputs.q_RTK, inputs.runs_S1, do_RTW, delta_RT1, statistics)
        dq, dk_part, dv_part = _backward_span(rule, span, inputs, rows)
        queries.append(dq)
        dk = dk.at[..., : span.stop, :].add(dk_part)
        dv = dv.at[..., : span.stop, :].add(dv_part)
    return jnp.concatenate(queries, axis=-2), dk, dv


def spans(length: int) -> tuple[Span, ...]:
    """Spans over `length`: few enough to unroll, short enough to skip most of the upper half."""
    choices = tuning.of(platform()).attention_rows
    rows = next(rows for most, rows in choices if most is None or length <= most)
    size = rows * math.ceil(length / (rows * MAX_SPANS))
    found = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        whole = start + (stop - start) // rows * rows
        if whole > start:
            found.append(Span(start, whole, rows))
        if stop > whole:
            found.append(Span(whole, stop, stop - whole))
    return tuple(found)


def _forward_span(rule: Rule, span: Span, inputs: Inputs):
    k_SK, v_SW = inputs.k_SK[..., : span.stop, :], inputs.v_SW[..., : span.stop, :]

    def block(_, offset_and_rows):
        offset, (q_RTK, runs_T1) = offset_and_rows
        scores_RTS = product("...RTK,...SK->...RTS", q_RTK, k_SK) * k_SK.shape[-1] ** -0.5
        mask_TS = _mask(span, offset, runs_T1, inputs.runs_S1, scores_RTS.ndim - 1)
        w_RTS, statistics = rule.forward(scores_RTS, mask_TS[..., None, :, :])
        o_RTW = product("...RTS,...SW->...RTW", w_RTS.astype(v_SW.dtype), v_SW)
        return None, ((o_RTW / statistics[-1]).astype(v_SW.dtype), statistics)

    return _walk_rows(block, span, None, (inputs.q_RTK, inputs.runs_S1))[1]


def _backward_span(rule: Rule, span: Span, inputs: Inputs, rows):
    """(dq_RTK of the span's rows, dk_SK and dv_SW of the keys before its end), float32."""
    k_SK, v_SW = inputs.k_SK[..., : span.stop, :], inputs.v_SW[..., : span.stop, :]
    scale = k_SK.shape[-1] ** -0.5

    def block(gradients, offset_and_rows):
        dk_SK, dv_SW = gradients
        offset, (q_RTK, runs_T1, do_RTW, delta_RT1, statistics) = offset_and_rows
        scores_SRT = product("...SK,...RTK->...SRT", k_SK, q_RTK) * scale
        mask_TS = _mask(span, offset, runs_T1, inputs.runs_S1, scores_SRT.ndim - 1)
        mask_S1T = jnp.swapaxes(mask_TS, -1, -2)[..., :, None, :]
        p_SRT, slope_SRT = rule.backward(
            scores_SRT, mask_S1T, jax.tree.map(_keys_first, statistics)
        )
        dp_SRT = product("...SW,...RTW->...SRT", v_SW, do_RTW)
        ds_SRT = slope_SRT * (dp_SRT - _keys_first(delta_RT1)) * scale
        p_SRT, ds_SRT = p_SRT.astype(v_SW.dtype), ds_SRT.astype(q_RTK.dtype)
        dq_RTK = product("...SK,...SRT->...KRT", k_SK, ds_SRT)
        dk_SK += product("...SRT,...RTK->...SK", ds_SRT, q_RTK)
        dv_SW += product("...SRT,...RTW->...SW", p_SRT, do_RTW)
        return (dk_SK, dv_SW), jnp.moveaxis(dq_RTK, -3, -1)

    zeros = (jnp.zeros(k_SK.shape, jnp.float32), jnp.zeros(v_SW.shape, jnp.float32))
    (dk_SK, dv_SW), dq_RTK = _walk_rows(block, span, zeros, rows)
    return dq_RTK, dk_SK, dv_SW


def _keys_first(x_RT1):
    return jnp.moveaxis(x_RT1, -1, -3)


def _mask(span: Span, offset, runs_T1, runs_S1, rank: int):
    """Which keys before the span's end each row from `offset` on may see, of `rank` axes."""
    t_T = offset + jnp.arange(span.rows)
    mask_TS = t_T[:, None] >= jnp.arange(span.stop)[None, :]
    mask_TS = jnp.expand_dims(mask_TS, tuple(range(rank - 2)))
    if runs_T1 is None:
        return mask_TS
    return mask_TS & (runs_T1 == jnp.swapaxes(runs_S1[..., : span.stop, :], -1, -2))


def _walk_rows(block: Callable, span: Span, carry, rows):
    """Scans `block(carry, (offset, rows)) -> (carry, out)` over the span; time is axis -2."""
    taken = jax.tree.map(lambda x: x[..., span.start : span.stop, :], rows)
    count = (span.stop - span.start) // span.rows
    if count == 1:
        return block(carry, (span.start, taken))

    def split(x_TC):
        shape = (*x_TC.shape[:-2], count, span.rows, x_TC.shape[-1])
        return jnp.moveaxis(x_TC.reshape(shape), -3, 0)

    def join(x):
        x_TC = jnp.moveaxis(x, 0, -3)
        return x_TC.reshape(*x_TC.shape[:-3], count * span.rows, x_TC.shape[-1])

    offsets = span.start + span.rows * jnp.arange(count)
    carry, out = jax.lax.scan(block, carry, (offsets, jax.tree.map(split, taken)))
    return carry, jax.tree.map(join, out)


def lead_heads(x_BTHC: jax.Array, groups: int) -> jax.Array:
    """(B, T, H, C) -> (B, G, R, T, C)."""
    batch, length, heads, columns = x_BTHC.shape
    x = x_BTHC.reshape(batch, length, groups, heads // groups, columns)
    return jnp.moveaxis(x, 1, 3)


def lead_groups(x_BTGC: jax.Array) -> jax.Array:
    """(B, T, G, C) -> (B, G, T, C)."""
    return jnp.swapaxes(x_BTGC, 1, 2)


def unlead_heads(x_BGRTC: jax.Array) -> jax.Array:
    """(B, G, R, T, C) -> (B, T, H, C)."""
    batch, groups, heads, length, columns = x_BGRTC.shape
    return jnp.moveaxis(x_BGRTC, 3, 1).reshape(batch, length, groups * heads, columns)
