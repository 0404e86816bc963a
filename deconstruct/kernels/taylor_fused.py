"""How kernels of Taylor attention for accelerators become an op.

Axes: B batch, T time, H heads, G key/value groups, K key size, W value size.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from deconstruct.kernels.shards import per_shard


def op(forward: Callable, backward: Callable) -> Callable:
    """(q_BTHK, k_BTGK, v_BTGW, runs_BT or None) -> o_BTHW in v's dtype, from kernels of one device.

    Args:
      forward: the op's arguments -> (o_BTHW, sum_BHT: of each row's weights).
      backward: those, sum_BHT, delta_BHT = do . o and do_BTHW in v's dtype -> (dq, dk, dv).
    """
    given = ("BTHK", "BTGK", "BTGW", "BT")

    @jax.custom_vjp
    def attend(*arrays):
        return attend_forward(*arrays)[0]

    def attend_forward(*arrays):
        o_BTHW, sum_BHT = per_shard(forward, given, ("BTHW", "BHT"), arrays[2])(*arrays)
        return o_BTHW, (*arrays, o_BTHW, sum_BHT)

    def attend_backward(residuals, do_BTHW):
        *arrays, o_BTHW, sum_BHT = residuals
        products_BTHW = do_BTHW.astype(jnp.float32) * o_BTHW.astype(jnp.float32)
        delta_BHT = jnp.swapaxes(jnp.sum(products_BTHW, axis=-1), 1, 2)
        axes = (*given, "BHT", "BHT", "BTHW")
        run = per_shard(backward, axes, ("BTHK", "BTGK", "BTGW"), arrays[2])
        return *run(*arrays, sum_BHT, delta_BHT, do_BTHW.astype(arrays[2].dtype)), None

    attend.defvjp(attend_forward, attend_backward)
    return lambda q_BTHK, k_BTGK, v_BTGW, runs_BT=None: attend(q_BTHK, k_BTGK, v_BTGW, runs_BT)
