"""`standard`: causal softmax attention (eq. 1-3), the layer that all others are compared with."""

import jax
import jax.numpy as jnp

from deconstruct import kernels
from deconstruct.mixers.base import QKVMixer, projection_flops, store


class Standard(QKVMixer):
    """A = softmax(Q K^T / sqrt(K)), O = A V; grouped queries where num_kv_heads < num_heads."""

    def __call__(self, h_BTD, ctx):
        q_BTHK, k_BTGK = self.queries_keys(self.qk_source(h_BTD, ctx), ctx.positions_BT)
        v_BTGK = self.values(h_BTD)
        o_BTHK = kernels.causal_attention(q_BTHK, k_BTGK, v_BTGK, segments_BT=ctx.segments_BT)
        return self.merge(o_BTHK)

    def init_cache(self, batch_size, length, ctx):
        shape = (batch_size, length, self.spec.num_kv_heads, self.spec.head_dim)
        return {"key": jnp.zeros(shape, self.dtype), "value": jnp.zeros(shape, self.dtype)}

    def decode(self, h_B1D, cache, ctx):
        q_B1HK, k_B1GK = self.queries_keys(self.qk_source(h_B1D, ctx), ctx.positions_BT)
        cache = {
            "key": store(cache["key"], k_B1GK, ctx.positions_BT),
            "value": store(cache["value"], self.values(h_B1D), ctx.positions_BT),
        }
        scores_BH1S = self.dot_scores(q_B1HK, cache["key"])
        return self.merge(self.read_cache(scores_BH1S, cache["value"], ctx)), cache

    def read_cache(self, scores_BH1S: jax.Array, v_BSGK: jax.Array, ctx) -> jax.Array:
        """Softmax over the positions written so far, applied to the cached values: o_B1HK."""
        written = (
            jnp.arange(v_BSGK.shape[1])[None, None, None, :] <= ctx.positions_BT[:, None, :, None]
        )
        return self.weigh_cache(self.normalise(scores_BH1S, written), v_BSGK)

    def weigh_cache(self, a_BH1S: jax.Array, v_BSGK: jax.Array) -> jax.Array:
        """Weights applied to the cached values, in float32: o_B1HK."""
        v_BSHK = self.per_head(v_BSGK).astype(jnp.float32)
        return jnp.einsum("BHTS,BSHK->BTHK", a_BH1S, v_BSHK).astype(self.dtype)

    @classmethod
    def flops(cls, spec, options, batch_size, length):
        square = 4 * batch_size * length**2 * spec.num_heads * spec.head_dim
        return projection_flops(spec, batch_size * length) + square

    @classmethod
    def cache_bytes(cls, spec, options, length, itemsize):
        return 2 * length * spec.num_kv_heads * spec.head_dim * itemsize
