"""What kernels are held against: copies, large products, and other ways to the same function."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from tools.kernel_calls import FORWARD, KernelCall

_SIDE = 2048
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
    """Name -> a function of the kernel's own arguments; for rows without isolated documents."""
    if call.document or call.makes_scores:
        return {}
    forms = {
        "causal_attention": {"jax.nn.dot_product_attention": _attention},
        "prefix_softmax": {"jnp.cumsum, which overflows": _sums},
    }.get(call.op, {})

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


def _sums(s_BTH, v_BTGW):
    e_BTH1 = jnp.exp(s_BTH)[..., None]
    v_BTHW = jnp.repeat(v_BTGW.astype(jnp.float32), s_BTH.shape[2] // v_BTGW.shape[2], axis=2)
    sums_BTHW = jnp.cumsum(e_BTH1 * v_BTHW, axis=1) / jnp.cumsum(e_BTH1, axis=1)
    return sums_BTHW.astype(v_BTGW.dtype)
