"""Attention with one map a head for every row, by JAX's splash attention for TPUs.

The rows are folded into the width of the values, as in `fixed_map`: a block of the map is made once
and meets all rows, and its gradient is summed over them inside. Only the gradients of queries and
keys are summed over the devices.

Axes: B batch, L stream length, T time, H heads, G key/value groups, K key size, W value size, C = B
* W columns and those that fill up the lanes.
"""

import jax
import jax.numpy as jnp

from deconstruct.kernels import causal_splash
from deconstruct.kernels.backends import Call
from deconstruct.kernels.shards import per_shard

_LANES = 128
# So many columns of a block of values, its output and their gradients fit into fast memory.
_MOST_COLUMNS = 1024


def refuses(call: Call) -> str | None:
    return causal_splash.refuses(call)


def run(q_LHK, k_LGK, v_BTGW) -> jax.Array:
    """o_BTHW."""
    length = v_BTGW.shape[1]
    attend = per_shard(_attend, ("THK", "TGK", "BTGW"), ("BTHW",), v_BTGW)
    # So that what parts and devices add to their gradients is summed in float32.
    q_THK, k_TGK = (x[:length].astype(jnp.float32) for x in (q_LHK, k_LGK))
    return attend(q_THK, k_TGK, v_BTGW)[0]


def _attend(q_THK, k_TGK, v_BTGW):
    batch, _, _, width = v_BTGW.shape
    rows = max(_MOST_COLUMNS // width, 1)
    parts = []
    for first in range(0, batch, rows):
        part_BTGW = v_BTGW[first : first + rows]
        columns = len(part_BTGW) * width
        v_1TGC = jnp.moveaxis(part_BTGW, 0, 2).reshape(1, *k_TGK.shape[:2], columns)
        v_1TGC = jnp.pad(v_1TGC, ((0, 0), (0, 0), (0, 0), (0, -columns % _LANES)))
        q_1THK, k_1TGK = (x[None].astype(v_BTGW.dtype) for x in (q_THK, k_TGK))
        (o_1THC,) = causal_splash.attend(q_1THK, k_1TGK, v_1TGC, None)
        o_THBW = o_1THC[0, ..., :columns].reshape(*q_THK.shape[:2], -1, width)
        parts.append(jnp.moveaxis(o_THBW, 2, 0))
    return (jnp.concatenate(parts),)
