"""Standard attention by JAX's splash attention for TPUs.

It takes queries that are scaled already, and a bfloat16 query is rounded once more when it is:
unless K is a power of 4, a score is off by as much as the rounding of the queries themselves costs.

Axes: B batch, T time, H heads, G key/value groups, K key size, W value size.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
)

from deconstruct.kernels.backends import Call, platform
from deconstruct.kernels.shards import per_shard

_LANES = 128
_BLOCK = 512  # positions, of queries and of keys


def refuses(call: Call) -> str | None:
    if call.platform == "tpu" and call.dtype == jnp.float32:
        return "its products would round float32 to bfloat16"
    return None


def run(q_BTHK, k_BTGK, v_BTGW, runs_BT=None) -> jax.Array:
    """o_BTHW by splash attention, on whole blocks of positions."""
    given = ("BTHK", "BTGK", "BTGW", "BT")
    local = per_shard(attend, given, ("BTHW",), v_BTGW)
    return local(q_BTHK, k_BTGK, v_BTGW, runs_BT)[0]


def attend(q_BTHK, k_BTGK, v_BTGW, runs_BT) -> tuple[jax.Array]:
    """(o_BTHW,) of one device; the values' size may be another than the keys'."""
    _, length, heads, key_size = q_BTHK.shape
    block = min(_BLOCK, -(-length // _LANES) * _LANES)
    padding = -length % block
    causal = masks.CausalMask((length + padding, length + padding))
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([causal] * heads),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=splash.BlockSizes(*[block] * 8),
        interpret=platform() == "cpu",
    )

    def heads_first(x_BTHK):
        return jnp.swapaxes(jnp.pad(x_BTHK, ((0, 0), (0, padding), (0, 0), (0, 0))), 1, 2)

    q_BTHK = (q_BTHK.astype(jnp.float32) * key_size**-0.5).astype(q_BTHK.dtype)
    arrays = heads_first(q_BTHK), heads_first(k_BTGK), heads_first(v_BTGW)
    if runs_BT is None:
        o_BHTW = jax.vmap(kernel)(*arrays)
    else:
        runs_BT = jnp.pad(runs_BT, ((0, 0), (0, padding)), mode="edge")
        o_BHTW = jax.vmap(kernel)(*arrays, splash.SegmentIds(runs_BT, runs_BT))
    return (jnp.swapaxes(o_BHTW, 1, 2)[:, :length],)
