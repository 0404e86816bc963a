"""What kernels are held against: copies, large products, and other ways to the same function."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from deconstruct import kernels
from tools.kernel_calls import FORWARD, KernelCall

_SIDE = 2048
_LARGEST_MAP = 2**31  # bytes, for peers that hold all scores in memory, several times over
PRODUCT_FLOPS = 2 * _SIDE**3


def copy(num_bytes: int) -> tuple[Callable, jax.Array]:
    """A function and its argument that read and write so many bytes together."""
    x = jnp.ones(num_bytes // 8, jnp.float32)
    return lambda x: x * 2, x


def product() -> tuple[Callable, jax.Array]:
    """One of PRODUCT_FLOPS: in float32 on a CPU, in bfloat16 elsewhere."""
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    x = jnp.ones((_SIDE, _SIDE), dtype)
    return lambda x: x @ x, x


def peers(call: KernelCall, direction: str) -> dict[str, Callable]:
    """Name -> a function of the kernel's own arguments; for rows without isolated documents.

    None of those whose map would be too large.
    """
    holds_map = call.op != "prefix_softmax"
    if call.document or (holds_map and 4 * call.rows * call.heads * call.length**2 > _LARGEST_MAP):
        return {}
    forms = {
        "causal_attention": {"jax.nn.dot_product_attention": _attention},
        "taylor_attention": {"the whole map": _whole_map},
        "prefix_softmax": {
            "jnp.cumsum, which overflows": _sums_of_scores if call.makes_scores else _sums
        },
        "fixed_map_attention": {"jax.nn.dot_product_attention": _attention_of_all_rows},
    }[call.op]

    def both(forward):
        def run(arrays, gradient, _):
            o, pull = jax.vjp(forward, *arrays)
            return o, *pull(gradient)

        return run

    if direction == FORWARD:
        return {name: lambda arrays, *_, f=f: f(*arrays) for name, f in forms.items()}
    return {name: both(f) for name, f in forms.items()}


def _attention(q_BTHK, k_BTGK, v_BTGK):
    return jax.nn.dot_product_attention(q_BTHK, k_BTGK, v_BTGK, is_causal=True)


def _attention_of_all_rows(q_LHK, k_LGK, v_BTGW):
    """As a model without the op would: each row makes the map anew."""
    batch, length = v_BTGW.shape[:2]
    q_BTHK, k_BTGK = (jnp.broadcast_to(x, (batch, *x.shape)) for x in (q_LHK, k_LGK))
    return _attention(q_BTHK[:, :length], k_BTGK[:, :length], v_BTGW)


def _whole_map(q_BTHK, k_BTGK, v_BTGW):
    """1 + x + x^2/2 of all scores, masked and normalised."""
    groups, length = v_BTGW.shape[2], v_BTGW.shape[1]
    q_BTGRK = q_BTHK.reshape(*q_BTHK.shape[:2], groups, -1, q_BTHK.shape[3])
    x_BGRTS = jnp.einsum("btgrk,bsgk->bgrts", q_BTGRK, k_BTGK) * q_BTHK.shape[3] ** -0.5
    w_BGRTS = jnp.where(jnp.tri(length, dtype=bool), 1 + x_BGRTS + x_BGRTS**2 / 2, 0)
    a_BGRTS = w_BGRTS / jnp.sum(w_BGRTS, axis=-1, keepdims=True)
    o_BTGRW = jnp.einsum("bgrts,bsgw->btgrw", a_BGRTS, v_BTGW)
    return o_BTGRW.reshape(*q_BTHK.shape[:3], -1)


def _sums_of_scores(q_BTHK, k_BTGK, v_BTGW):
    return _sums(kernels.own_scores(q_BTHK, k_BTGK), v_BTGW)


def _sums(s_BTH, v_BTGW):
    e_BTH1 = jnp.exp(s_BTH)[..., None]
    v_BTHW = jnp.repeat(v_BTGW.astype(jnp.float32), s_BTH.shape[2] // v_BTGW.shape[2], axis=2)
    sums_BTHW = jnp.cumsum(e_BTH1 * v_BTHW, axis=1) / jnp.cumsum(e_BTH1, axis=1)
    return sums_BTHW.astype(v_BTGW.dtype)
