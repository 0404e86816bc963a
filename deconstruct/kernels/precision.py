"""Matrix products that accumulate in float32."""

import jax
import jax.numpy as jnp


def product(subscripts: str, *operands: jax.Array) -> jax.Array:
    """The einsum in float32; float32 operands are not rounded on their way in, on any platform."""
    return jnp.einsum(
        subscripts,
        *operands,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
