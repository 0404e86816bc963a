"""Matrix products that accumulate in float32."""

import jax
import jax.numpy as jnp

from deconstruct.kernels.backends import platform


def product(subscripts: str, *operands: jax.Array) -> jax.Array:
    """The einsum in float32; float32 operands are not rounded on their way in, on any platform."""
    if platform() == "cpu":
        # XLA's CPU products take no bfloat16 operands with a float32 result. It is the same one.
        operands = tuple(x.astype(jnp.float32) for x in operands)
    return jnp.einsum(
        subscripts,
        *operands,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def block_product(x: jax.Array, y: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """Of two blocks inside a Pallas kernel, summed over axes `contract`, x rounded to y's dtype."""
    return jax.lax.dot_general(
        x.astype(y.dtype),
        y,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if y.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
