"""What the prefix softmax's kernels for accelerators share: the sums of a tile, and how a pair of
kernels becomes an op.

A kernel walks along time, tile by tile, and carries each head's running maximum m, denominator z
and numerator n in fast memory: scores and values are read once and the output is written once.
Inside a tile the weights w_ij = exp(s_j - m_i), j <= i, are formed outright (m_i the running
maximum), so that no range of scores is too wide, and meet the values in a matrix product.

Backwards the walk begins at the end. With A_ji = exp(s_j - m_i) / z_i, i >= j,

    dv_j = sum_i A_ji do_i,   ds_j = v_j . dv_j - sum_i A_ji (do_i . o_i).

What a tile owes to later ones goes through K = sum_{i >= f} exp(m_f - m_i) / z_i do_i, f being the
first of the later positions: exp(s_j - m_f) K, and the same, E, for do_i . o_i. All exponents are
at most 0. A document's end cuts what is carried. Where most weight is on one value, the two parts
of ds nearly cancel: weights that a product rounds are taken rounded in both.

Axes: B batch, T time, H heads, G value groups, W value size.
"""

from collections.abc import Callable

import jax

from deconstruct.kernels.shards import per_shard


def op(forward: Callable, backward: Callable) -> Callable:
    """(s_BTH, v_BTGW, runs_BT or None) -> o_BTHW in v's dtype, from kernels of one device.

    Args:
      forward: the op's arguments -> (o_BTHW, m_BHT, z_BHT).
      backward: those, o, m, z and do_BTHW in v's dtype -> (ds_BTH, dv_BTGW).
    """

    @jax.custom_vjp
    def softmax(s_BTH, v_BTGW, runs_BT):
        return softmax_forward(s_BTH, v_BTGW, runs_BT)[0]

    def softmax_forward(s_BTH, v_BTGW, runs_BT):
        run = per_shard(forward, ("BTH", "BTGW", "BT"), ("BTHW", "BHT", "BHT"), v_BTGW)
        o_BTHW, m_BHT, z_BHT = run(s_BTH, v_BTGW, runs_BT)
        return o_BTHW, (s_BTH, v_BTGW, runs_BT, o_BTHW, m_BHT, z_BHT)

    def softmax_backward(residuals, do_BTHW):
        s_BTH, v_BTGW, *rest = residuals
        given = ("BTH", "BTGW", "BT", "BTHW", "BHT", "BHT", "BTHW")
        run = per_shard(backward, given, ("BTH", "BTGW"), v_BTGW)
        ds_BTH, dv_BTGW = run(s_BTH, v_BTGW, *rest, do_BTHW.astype(v_BTGW.dtype))
        return ds_BTH.astype(s_BTH.dtype), dv_BTGW, None

    softmax.defvjp(softmax_forward, softmax_backward)
    return lambda s_BTH, v_BTGW, runs_BT=None: softmax(s_BTH, v_BTGW, runs_BT)
