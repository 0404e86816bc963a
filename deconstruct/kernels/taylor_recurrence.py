"""Taylor attention as a linear recurrence over chunks, and its one-token step.

1 + x + x^2/2 is the product of the features of q and of k: 1, the entries of y = x / K^(1/4), and
y_i y_j for i <= j, the diagonal over sqrt(2): F = 1 + K + K(K+1)/2. The sums over the keys so far
of features times values (and times 1, for the denominator) are the state; a chunk's queries read
the state before it, and meet the chunk's own keys in the quadratic form. Cost is linear in length.

The backward keeps no states. One walk forward builds them again for the gradient of the queries,
one walk backward carries the state's gradient for keys and values.

Documents: a query reads the state only if its document is the one alive at the chunk's start; the
state takes only keys of the chunk's last document, and starts from zero if that is another one.

Features of q and k that are far larger than the weight cancel, which scores do not. What is left
of that in an output or a gradient, relative to the largest, is about 2^-26 c^2 over the row's mean
weight, where c^2 is the mean of |q|^2 |k|^2 / K over its keys. Where q and k spread over all
directions the mean weight is about c^2 / 2K, and no c is too large. Where queries are at right
angles to all keys it is 1: then the error is 1e-5 at c = 26 and 1e-3 at 260, five times that if the
keys are thousands of equal ones or if one is far longer than the others, and from c = 8,000 on
nothing is right. One token at a time it is 8 times as much, and grows with the number of tokens.

The sum of a state's weights is then no sum of weights. As w = ((1 + x)^2 + 1) / 2, it is at least
half the number of keys, and is never read as less: a division by what is left of it would have no
bound.

Axes: B batch, T time, H heads, G key/value groups, R heads of a group, K key size, W value size,
X = W + 1 columns (values and a one), F features, S keys of a chunk, Q = R * S queries of a chunk.
B and G lead every array inside, or nothing does (see `_walk`); names leave them out.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from deconstruct import sharding, tuning
from deconstruct.kernels import backends
from deconstruct.kernels.precision import product


class TaylorState(NamedTuple):
    """Sums over the keys so far of values and ones times features, float32."""

    sums_BGXF: jax.Array


class Inputs(NamedTuple):
    """One call's arrays, time last and whole chunks long, float32; y = x / K^(1/4)."""

    q_KRT: jax.Array
    k_KT: jax.Array
    v_XT: jax.Array
    runs_T: jax.Array | None


class Chunk(NamedTuple):
    """One chunk of them; `before` is the document alive at its start."""

    q_KQ: jax.Array
    k_KS: jax.Array
    v_XS: jax.Array
    runs_S: jax.Array | None
    before: jax.Array | None


def num_features(key_size: int) -> int:
    """F: 1, the entries, and the products of two entries, each pair once."""
    return 1 + key_size + key_size * (key_size + 1) // 2


def features(y_KS: jax.Array) -> jax.Array:
    """(.., F, S) of (.., K, S): features(y) . features(y') = 1 + y.y' + (y.y')^2 / 2."""
    first, second = np.triu_indices(y_KS.shape[-2])
    weight_P = np.where(first == second, np.sqrt(0.5), 1.0).astype(np.float32)
    weight_P1 = weight_P.reshape((1,) * (y_KS.ndim - 2) + (-1, 1))
    pairs_PS = y_KS[..., first, :] * y_KS[..., second, :] * weight_P1
    return jnp.concatenate([jnp.ones_like(y_KS[..., :1, :]), y_KS, pairs_PS], axis=-2)


def taylor_state_init(
    batch_size: int, num_groups: int, key_size: int, value_size: int | None = None
) -> TaylorState:
    """The state before the first token; `value_size` defaults to `key_size`."""
    columns = (key_size if value_size is None else value_size) + 1
    return TaylorState(
        jnp.zeros((batch_size, num_groups, columns, num_features(key_size)), jnp.float32)
    )


def taylor_step(
    state: TaylorState, q_BHK: jax.Array, k_BGK: jax.Array, v_BGW: jax.Array
) -> tuple[jax.Array, TaylorState]:
    """One token a row: (o_BHW in v's dtype, the state after it)."""
    inputs = _lead(1, q_BHK[:, None], k_BGK[:, None], v_BGW[:, None], None)
    added = product("...XS,...FS->...XF", inputs.v_XT, features(inputs.k_KT))
    sums_BGXF = state.sums_BGXF + added
    sums_BGXR = _read(sums_BGXF, inputs.q_KRT[..., 0])
    o_BGWR = sums_BGXR[..., :-1, :] / sums_BGXR[..., -1:, :]
    o_BHW = jnp.swapaxes(o_BGWR, -1, -2).reshape(*q_BHK.shape[:2], -1)
    return o_BHW.astype(v_BGW.dtype), TaylorState(sums_BGXF)


def chunked(q_BTHK, k_BTGK, v_BTGW, runs_BT=None, *, chunk_length: int | None = None) -> jax.Array:
    """o_BTHW by the recurrence over chunks of `chunk_length` positions (padded to whole ones).

    None takes the platform's.
    """
    if chunk_length is None:
        chunk_length = tuning.of(backends.platform()).recurrence_chunk
    return _chunked(min(chunk_length, k_BTGK.shape[1]), q_BTHK, k_BTGK, v_BTGW, runs_BT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(size, q_BTHK, k_BTGK, v_BTGW, runs_BT):
    return _chunked_forward(size, q_BTHK, k_BTGK, v_BTGW, runs_BT)[0]


def _chunked_forward(size, q_BTHK, k_BTGK, v_BTGW, runs_BT):
    inputs = _lead(size, q_BTHK, k_BTGK, v_BTGW, runs_BT)
    o_WRT, sum_1RT = _walk(functools.partial(_forward, size), inputs)
    length = k_BTGK.shape[1]
    o_BTHW = _unlead_heads(o_WRT, length).astype(v_BTGW.dtype)
    sum_BTH1 = _unlead_heads(sum_1RT, length)
    return o_BTHW, (q_BTHK, k_BTGK, v_BTGW, runs_BT, o_BTHW, sum_BTH1)


def _chunked_backward(size, residuals, do_BTHW):
    q_BTHK, k_BTGK, v_BTGW, runs_BT, o_BTHW, sum_BTH1 = residuals
    inputs = _lead(size, q_BTHK, k_BTGK, v_BTGW, runs_BT)
    do_BTHW = do_BTHW.astype(jnp.float32) / sum_BTH1
    delta_BTH1 = jnp.sum(do_BTHW * o_BTHW.astype(jnp.float32), axis=-1, keepdims=True)
    d_BTHX = jnp.concatenate([do_BTHW, -delta_BTH1], axis=-1)
    d_XRT = _lead_heads(size, d_BTHX, k_BTGK.shape[2])
    length, _, key_size = k_BTGK.shape[1:]
    dq_KRT, dk_KT, dv_XT = _walk(functools.partial(_backward, size), (inputs, d_XRT))
    scale = key_size**-0.25
    dq_BTHK = _unlead_heads(dq_KRT * scale, length)
    dk_BTGK = jnp.moveaxis(dk_KT * scale, -1, 1)[:, :length]
    dv_BTGW = jnp.moveaxis(dv_XT[..., :-1, :], -1, 1)[:, :length]
    return (
        dq_BTHK.astype(q_BTHK.dtype),
        dk_BTGK.astype(k_BTGK.dtype),
        dv_BTGW.astype(v_BTGW.dtype),
        None,
    )


_chunked.defvjp(_chunked_forward, _chunked_backward)


def _walk(function: Callable, arrays):
    """`function` of arrays led by B and G; on one CPU device row by row of both, for its caches.

    Under a mesh a walk would gather what lies on the devices.
    """
    if backends.platform() != "cpu" or sharding.active_mesh() is not None:
        return function(arrays)
    lead = jax.tree.leaves(arrays)[0].shape[:2]
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), arrays)
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), jax.lax.map(function, rows))


def _forward(size: int, inputs: Inputs):
    """(o_WRT, the sum of weights 1RT), float32."""

    def step(sums_XF, chunk):
        x_SQ, mask_SQ = _scores(chunk)
        w_SQ = jnp.where(mask_SQ, 1 + x_SQ + x_SQ**2 / 2, 0.0)
        own_XQ = product("...XS,...SQ->...XQ", chunk.v_XS, w_SQ)
        past_XQ = _read(sums_XF, chunk.q_KQ) * _reads(chunk)
        return _advance(sums_XF, chunk), own_XQ + past_XQ

    _, out_XQ = jax.lax.scan(step, _no_sums(inputs), _chunks(size, inputs))
    sums_XRT = _join_queries(out_XQ, size)
    weight_1RT = sums_XRT[..., -1:, :, :]
    return sums_XRT[..., :-1, :, :] / weight_1RT, weight_1RT


def _backward(size: int, given):
    """(dq_KRT, dk_KT, dv_XT) before the scale K^(-1/4); d is of the sums XRT."""
    inputs, d_XRT = given
    chunks = _chunks(size, inputs)
    d_XQ = _split_queries(d_XRT, size)
    _, past_KQ = jax.lax.scan(_query_step, _no_sums(inputs), (chunks, d_XQ))
    _, own = jax.lax.scan(_key_step, _no_sums(inputs), (chunks, d_XQ), reverse=True)
    own_KQ, dk_KS, dv_XS = own
    return _join_queries(past_KQ + own_KQ, size), _join(dk_KS), _join(dv_XS)


def _query_step(sums_XF, chunk_and_gradient):
    """(the state after the chunk, dq_KQ through the state before it)."""
    chunk, d_XQ = chunk_and_gradient
    dphi_FQ = product("...XF,...XQ->...FQ", sums_XF, d_XQ * _reads(chunk))
    _, gradient_of_query = jax.vjp(features, chunk.q_KQ)
    return _advance(sums_XF, chunk), gradient_of_query(dphi_FQ)[0]


def _key_step(dsums_XF, chunk_and_gradient):
    """(gradient of the state before the chunk, (dq_KQ inside the chunk, dk_KS, dv_XS))."""
    chunk, d_XQ = chunk_and_gradient
    x_SQ, mask_SQ = _scores(chunk)
    w_SQ = jnp.where(mask_SQ, 1 + x_SQ + x_SQ**2 / 2, 0.0)
    dw_SQ = product("...XS,...XQ->...SQ", chunk.v_XS, d_XQ)
    dx_SQ = jnp.where(mask_SQ, dw_SQ * (1 + x_SQ), 0.0)
    own_KQ = product("...KS,...SQ->...KQ", chunk.k_KS, dx_SQ)
    dk_KS = product("...KQ,...SQ->...KS", chunk.q_KQ, dx_SQ)
    dv_XS = product("...XQ,...SQ->...XS", d_XQ, w_SQ)

    phi_FS, gradient_of_key = jax.vjp(features, chunk.k_KS)
    written_1S = _writes(chunk)
    dphi_FS = product("...XF,...XS->...FS", dsums_XF, chunk.v_XS * written_1S)
    dk_KS += gradient_of_key(dphi_FS)[0]
    dv_XS += product("...XF,...FS->...XS", dsums_XF, phi_FS) * written_1S

    d_XQ = d_XQ * _reads(chunk)
    before_XF = product("...XQ,...FQ->...XF", d_XQ, features(chunk.q_KQ))
    return dsums_XF * _survives(chunk) + before_XF, (own_KQ, dk_KS, dv_XS)


def _read(sums_XF, q_KQ):
    """What queries read of a state (XQ): the weights' sum no less than half the number of keys."""
    read_XQ = product("...XF,...FQ->...XQ", sums_XF, features(q_KQ))
    column_XQ = jax.lax.broadcasted_iota(jnp.int32, read_XQ.shape, read_XQ.ndim - 2)
    half_11 = sums_XF[..., -1:, :1] / 2
    last = read_XQ.shape[-2] - 1
    return _at_least(read_XQ, jnp.where(column_XQ == last, half_11, -jnp.inf))


@jax.custom_jvp
def _at_least(x, least):
    """The larger one, with x's gradient: it is x that has a rounding error."""
    return jnp.maximum(x, least)


@_at_least.defjvp
def _at_least_jvp(given, tangents):
    return _at_least(*given), tangents[0]


def _advance(sums_XF, chunk: Chunk):
    """The state after the chunk."""
    written_XS = chunk.v_XS * _writes(chunk)
    added_XF = product("...XS,...FS->...XF", written_XS, features(chunk.k_KS))
    return sums_XF * _survives(chunk) + added_XF


def _no_sums(inputs: Inputs) -> jax.Array:
    *lead, key_size, _ = inputs.k_KT.shape
    return jnp.zeros((*lead, inputs.v_XT.shape[-2], num_features(key_size)), jnp.float32)


def _scores(chunk: Chunk):
    """(x_SQ, which keys each query sees) inside the chunk."""
    x_SQ = product("...KS,...KQ->...SQ", chunk.k_KS, chunk.q_KQ)
    size, queries = x_SQ.shape[-2:]
    t_Q = jnp.arange(queries) % size
    mask_SQ = jnp.arange(size)[:, None] <= t_Q[None, :]
    mask_SQ = jnp.expand_dims(mask_SQ, tuple(range(x_SQ.ndim - 2)))
    if chunk.runs_S is None:
        return x_SQ, mask_SQ
    return x_SQ, mask_SQ & (chunk.runs_S[..., :, None] == _runs_of_queries(chunk)[..., None, :])


def _runs_of_queries(chunk: Chunk):
    heads = chunk.q_KQ.shape[-1] // chunk.k_KS.shape[-1]
    return jnp.concatenate([chunk.runs_S] * heads, axis=-1)


def _reads(chunk: Chunk):
    """1 for the queries (1Q) that read the state before the chunk, else 0."""
    if chunk.runs_S is None:
        return 1.0
    return (_runs_of_queries(chunk) == chunk.before[..., None])[..., None, :].astype(jnp.float32)


def _writes(chunk: Chunk):
    """1 for the keys (1S) that the state after the chunk holds, else 0."""
    if chunk.runs_S is None:
        return 1.0
    return (chunk.runs_S == chunk.runs_S[..., -1:])[..., None, :].astype(jnp.float32)


def _survives(chunk: Chunk):
    """1 where the state before the chunk is part of the one after it, else 0."""
    if chunk.runs_S is None:
        return 1.0
    return (chunk.before == chunk.runs_S[..., -1])[..., None, None].astype(jnp.float32)


def _lead(size: int, q_BTHK, k_BTGK, v_BTGW, runs_BT) -> Inputs:
    """The inputs in the layout of this file, padded to whole chunks with a document of its own."""
    batch, length, groups, key_size = k_BTGK.shape
    padding = -length % size
    if padding and runs_BT is None:
        runs_BT = jnp.zeros((batch, length), jnp.int32)
    scale = key_size**-0.25
    v_BTGX = jnp.concatenate(
        [v_BTGW.astype(jnp.float32), jnp.ones((*v_BTGW.shape[:3], 1), jnp.float32)], axis=-1
    )

    def groups_first(x_BTGC):
        return jnp.moveaxis(jnp.pad(x_BTGC, ((0, 0), (0, padding), (0, 0), (0, 0))), 1, -1)

    runs = None
    if runs_BT is not None:
        padded_BT = jnp.pad(runs_BT, ((0, 0), (0, padding)), constant_values=-1)
        runs = jnp.broadcast_to(padded_BT[:, None], (batch, groups, length + padding))
    return Inputs(
        _lead_heads(size, q_BTHK.astype(jnp.float32) * scale, groups),
        groups_first(k_BTGK.astype(jnp.float32) * scale),
        groups_first(v_BTGX),
        runs,
    )


def _lead_heads(size: int, x_BTHC, groups: int):
    """(B, T, H, C) -> (B, G, C, R, T padded to whole chunks)."""
    batch, length, heads, columns = x_BTHC.shape
    padded = jnp.pad(x_BTHC, ((0, 0), (0, -length % size), (0, 0), (0, 0)))
    split = padded.reshape(batch, -1, groups, heads // groups, columns)
    return jnp.transpose(split, (0, 2, 4, 3, 1))


def _unlead_heads(x_BGCRT, length: int):
    """(B, G, C, R, T) -> (B, T, H, C), the padding cut off."""
    batch, groups, columns, heads, _ = x_BGCRT.shape
    x_BTGRC = jnp.transpose(x_BGCRT, (0, 4, 1, 3, 2))[:, :length]
    return x_BTGRC.reshape(batch, length, groups * heads, columns)


def _chunks(size: int, inputs: Inputs) -> Chunk:
    """All chunks, their number leading."""
    runs, before = None, None
    if inputs.runs_T is not None:
        runs = _split(inputs.runs_T, size)
        before = jnp.concatenate([runs[:1, ..., 0], runs[:-1, ..., -1]])
    q_KQ = _split_queries(inputs.q_KRT, size)
    return Chunk(q_KQ, _split(inputs.k_KT, size), _split(inputs.v_XT, size), runs, before)


def _split(x_T, size: int):
    """(.., T) -> (chunks, .., size)."""
    return jnp.moveaxis(x_T.reshape(*x_T.shape[:-1], -1, size), -2, 0)


def _join(x_S):
    """(chunks, .., size) -> (.., T)."""
    x = jnp.moveaxis(x_S, 0, -2)
    return x.reshape(*x.shape[:-2], -1)


def _split_queries(x_RT, size: int):
    """(.., R, T) -> (chunks, .., Q)."""
    x_RS = _split(x_RT, size)
    return x_RS.reshape(*x_RS.shape[:-2], -1)


def _join_queries(x_Q, size: int):
    """(chunks, .., Q) -> (.., R, T)."""
    return _join(x_Q.reshape(*x_Q.shape[:-1], -1, size))
