"""Standard attention by cuDNN's fused kernels for NVIDIA GPUs.

Documents are left to others: of packed sequences cuDNN keeps statistics as if each of a row's were
as long as the row, so their greatest number must be known and small, and here it may be T; told as
a mask, they would be an additive one of T x T a row.

Axes: B batch, T time, H heads, G key/value groups, K key size, W value size.
"""

import jax
import jax.numpy as jnp

from deconstruct.kernels.backends import Call
from deconstruct.kernels.shards import per_shard

_LARGEST_HEAD = 128


def refuses(call: Call) -> str | None:
    if call.dtype == jnp.float32:
        return "it knows no float32"
    if call.isolates_documents:
        return "it isolates no documents whose number is not known beforehand"
    if call.key_size != call.value_size or call.key_size > _LARGEST_HEAD or call.key_size % 8:
        return f"it takes heads of a multiple of 8 up to {_LARGEST_HEAD}"
    return None


def run(q_BTHK, k_BTGK, v_BTGW, runs_BT=None) -> jax.Array:
    """o_BTHW."""
    assert runs_BT is None

    def attend(q_BTHK, k_BTGK, v_BTGW):
        cudnn = jax.nn.dot_product_attention
        return (cudnn(q_BTHK, k_BTGK, v_BTGW, is_causal=True, implementation="cudnn"),)

    given = ("BTHK", "BTGK", "BTGW")
    return per_shard(attend, given, ("BTHW",), v_BTGW)(q_BTHK, k_BTGK, v_BTGW)[0]
