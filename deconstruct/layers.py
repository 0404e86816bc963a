"""The parts of a block: norms, projections, rotary positions, feed-forward, tables.

Axes: B batch, T time, N = B * T, D model, H heads, K head size, F feed-forward, V vocabulary,
I and O the input and output width of a projection. Parameters are float32 and carry logical axis
names (see `sharding.RULES`); arithmetic runs in each module's `dtype`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from deconstruct import sharding


def logical(init, *axes: str | None):
    """An initialiser whose parameter carries the names of its axes."""
    return nn.with_logical_partitioning(init, axes)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * scale over the last axis, computed in float32."""

    eps: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", logical(nn.initializers.ones, "norm"), (x.shape[-1],))
        x32 = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        scale = scale.reshape((1,) * (x.ndim - 1) + (-1,))
        return (x32 * jax.lax.rsqrt(mean_square + self.eps) * scale).astype(self.dtype)


class Projection(nn.Module):
    """x_BTI -> y_BTO, a matrix product with an optional bias.

    Batch and time are one axis inside: the backward product over two axes is slow on CPU.
    """

    features: int
    axes: tuple[str, str]
    init_std: float
    dtype: jnp.dtype
    use_bias: bool = False

    @nn.compact
    def __call__(self, x_BTI: jax.Array) -> jax.Array:
        init = logical(nn.initializers.normal(self.init_std), *self.axes)
        kernel_IO = self.param("kernel", init, (x_BTI.shape[-1], self.features))
        x_NI = x_BTI.reshape(-1, x_BTI.shape[-1]).astype(self.dtype)
        y_NO = x_NI @ kernel_IO.astype(self.dtype)
        if self.use_bias:
            bias_O = self.param(
                "bias", logical(nn.initializers.zeros, self.axes[1]), (y_NO.shape[-1],)
            )
            y_NO = y_NO + bias_O.astype(self.dtype)[None, :]
        return y_NO.reshape(*x_BTI.shape[:-1], self.features)


class GatedFeedForward(nn.Module):
    """down(SiLU(gate(x)) * up(x)), eq. 4-5: the block's feed-forward, and the `mlp` mixer."""

    hidden_dim: int
    init_std: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        def project(features, axes, name):
            return Projection(features, axes, self.init_std, self.dtype, name=name)

        gate_BTF = project(self.hidden_dim, ("embed", "feed_forward"), "gate")(x_BTD)
        up_BTF = project(self.hidden_dim, ("embed", "feed_forward"), "up")(x_BTD)
        down = project(x_BTD.shape[-1], ("feed_forward", "embed"), "down")
        return down(gated(gate_BTF, up_BTF))


@jax.custom_vjp
def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """SiLU(gate) * up. Its backward reads the two once, where autodiff makes three passes."""
    return nn.silu(gate) * up


def _gated_forward(gate, up):
    return gated(gate, up), (gate, up)


def _gated_backward(saved, d_out):
    gate, up = saved
    sigmoid = nn.sigmoid(gate)
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    return d_out * up * slope, d_out * gate * sigmoid


gated.defvjp(_gated_forward, _gated_backward)


def rotary_tables(positions_BT: jax.Array, head_dim: int, base: float):
    """(cos, signed sin) of every position's angles, each (B or 1, T, 1, K) float32.

    Half-split: component k turns with component k + K/2, by position * base^(-2k/K) radians.

    Args:
      positions_BT: position of each token, (B, T), or (1, T) where rows share them.
    """
    half = head_dim // 2
    frequency_K = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions_BT.astype(jnp.float32)[:, :, None, None] * frequency_K[None, None, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    tables = jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)
    # Without the barrier the compiler computes them again for every head and row.
    return jax.lax.optimization_barrier(tables)


def rotate(x_BTHK: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Queries or keys turned by `rotary_tables`."""
    cos, sin = tables
    x32 = x_BTHK.astype(jnp.float32)
    turned = x32 * cos + jnp.roll(x32, x32.shape[-1] // 2, axis=-1) * sin
    return turned.astype(x_BTHK.dtype)


def init_table(key: jax.Array, vocab_size: int, padded_size: int, dim: int, std: float):
    """A (V, D) table of normal rows; the rows past the true vocabulary are zero."""
    table_VD = std * jax.random.normal(key, (padded_size, dim), jnp.float32)
    return jnp.where(jnp.arange(padded_size)[:, None] < vocab_size, table_VD, 0.0)


class Table(nn.Module):
    """An embedding or output table (V, D); tokens look rows up, the head multiplies with it.

    A token id outside the table reads NaN, so that it cannot pass as some other token.
    """

    vocab_size: int
    padded_size: int
    dim: int
    init_std: float

    def setup(self):
        def init(key, shape):
            return init_table(key, self.vocab_size, *shape, self.init_std)

        self.table = self.param(
            "table", logical(init, "vocab", "embed"), (self.padded_size, self.dim)
        )

    def __call__(self, tokens_BT: jax.Array, dtype: jnp.dtype) -> jax.Array:
        # Whole rows: looked up in their parts, the result would have to be laid out anew.
        table_VD = sharding.constrain_param(self.table, "vocab", None)
        return jnp.take(table_VD, tokens_BT, axis=0, mode="fill").astype(dtype)
