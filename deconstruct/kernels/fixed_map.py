"""One attention map a head, softmax(Q K^T / sqrt(K)) of a fixed stream, for every row (eq. 9-12).

The batch is folded into the width of the values: a head's map meets all rows in one matrix product,
and the map's gradient is summed over the batch inside another. Under a mesh both run inside
`jax.shard_map` over the batch axes, and only dQ and dK are summed over the devices, after the
softmax's backward; left to the compiler, the sum would be over the maps, T / K times larger.

Axes: B batch, L stream length, T and S time (at most L), H heads, G key/value groups, R heads of a
group, K key size, W value size, C = B * W columns.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from deconstruct import sharding
from deconstruct.kernels import quadratic
from deconstruct.kernels.causal import SOFTMAX
from deconstruct.kernels.reference import attention_scores, visible, weigh

WHOLE = P()
ROWS = P(sharding.BATCH_AXES)


def reference(q_LHK, k_LGK, v_BTGW) -> jax.Array:
    """From the equation, in float32, with the maps in memory."""
    length = v_BTGW.shape[1]
    scores_1HTS = attention_scores(q_LHK[None, :length], k_LGK[None, :length])
    a_1HTS = jax.nn.softmax(jnp.where(visible(length, None), scores_1HTS, -jnp.inf), axis=-1)
    return weigh(jnp.broadcast_to(a_1HTS, (v_BTGW.shape[0], *a_1HTS.shape[1:])), v_BTGW)


def blocked(q_LHK, k_LGK, v_BTGW) -> jax.Array:
    """o_BTHW by blocks of rows, see `quadratic`."""
    batch, length = v_BTGW.shape[:2]
    return _attend(_shard_axes(batch), q_LHK[:length], k_LGK[:length], v_BTGW)


def _shard_axes(batch: int) -> tuple[str, ...]:
    """The mesh axes over which the rows lie.

    Rows that they do not divide, such as the streams' own, lie whole on every device.
    """
    mesh = sharding.active_mesh()
    if mesh is None or batch % sharding.batch_shards(mesh):
        return ()
    return sharding.BATCH_AXES


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(axes, q_THK, k_TGK, v_BTGW):
    return _attend_forward(axes, q_THK, k_TGK, v_BTGW)[0]


def _attend_forward(axes, q_THK, k_TGK, v_BTGW):
    forward = _per_shard(_forward, axes, (WHOLE, WHOLE, ROWS), (ROWS, WHOLE))
    o_BTHW, statistics = forward(q_THK, k_TGK, v_BTGW)
    return o_BTHW, (q_THK, k_TGK, v_BTGW, o_BTHW, statistics)


def _attend_backward(axes, residuals, do_BTHW):
    given = (WHOLE, WHOLE, ROWS, ROWS, WHOLE, ROWS)
    backward = functools.partial(_backward, axes)
    return _per_shard(backward, axes, given, (WHOLE, WHOLE, ROWS))(*residuals, do_BTHW)


_attend.defvjp(_attend_forward, _attend_backward)


def _per_shard(function: Callable, axes: tuple[str, ...], in_specs, out_specs) -> Callable:
    if not axes:
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes))


def _forward(q_THK, k_TGK, v_BTGW):
    """(o_BTHW, the softmax's statistics of each head's rows)."""
    inputs = _inputs(q_THK, k_TGK, v_BTGW)
    o_1GRTC, statistics = quadratic.forward(SOFTMAX, inputs)
    o_1THC = quadratic.unlead_heads(o_1GRTC)
    o_THBW = o_1THC.reshape(*q_THK.shape[:2], v_BTGW.shape[0], -1)
    return jnp.moveaxis(o_THBW, 2, 0), statistics


def _backward(axes, q_THK, k_TGK, v_BTGW, o_BTHW, statistics, do_BTHW):
    """(dq_THK, dk_TGK, dv_BTGW), the first two summed over the batch of all devices."""
    groups = k_TGK.shape[1]
    products_BTHW = do_BTHW.astype(jnp.float32) * o_BTHW.astype(jnp.float32)
    delta_1TH1 = jnp.sum(products_BTHW, axis=(0, 3))[None, :, :, None]
    dq, dk, dv = quadratic.backward(
        SOFTMAX,
        _inputs(q_THK, k_TGK, v_BTGW),
        quadratic.lead_heads(_fold(do_BTHW), groups),
        quadratic.lead_heads(delta_1TH1, groups),
        statistics,
    )
    dv_TGBW = jnp.swapaxes(dv, 1, 2).reshape(*k_TGK.shape[:2], v_BTGW.shape[0], -1)
    dq, dk = quadratic.unlead_heads(dq)[0], jnp.swapaxes(dk, 1, 2)[0]
    dq_THK, dk_TGK = jax.lax.psum((dq, dk), axes)  # in float32, before they are rounded
    return (
        dq_THK.astype(q_THK.dtype),
        dk_TGK.astype(k_TGK.dtype),
        jnp.moveaxis(dv_TGBW, 2, 0).astype(v_BTGW.dtype),
    )


def _inputs(q_THK, k_TGK, v_BTGW) -> quadratic.Inputs:
    return quadratic.Inputs(
        quadratic.lead_heads(q_THK[None], k_TGK.shape[1]),
        quadratic.lead_groups(k_TGK[None]),
        quadratic.lead_groups(_fold(v_BTGW)),
        None,
    )


def _fold(x_BTHW):
    """The batch folded into the width: (1, T, H, C)."""
    return jnp.moveaxis(x_BTHW, 0, 2).reshape(1, *x_BTHW.shape[1:3], -1)
