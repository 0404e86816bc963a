"""`approximate`: softmax's exp(x) replaced by 1 + x + x^2/2 (eq. 6), a linear recurrence."""

import jax.numpy as jnp

from deconstruct import kernels
from deconstruct.mixers.base import QKVMixer, projection_flops


class Approximate(QKVMixer):
    """A_ij = w_ij / sum_{m<=i} w_im with w = 1 + x + x^2/2 and x = q.k / sqrt(K).

    w is at least 1/2, so the one joint denominator never vanishes. Long rows and decoding go by the
    recurrence, whose accuracy depends on |q| |k|: see `kernels.taylor_recurrence`.
    """

    def __call__(self, h_BTD, ctx):
        q_BTHK, k_BTGK = self.queries_keys(h_BTD, ctx.positions_BT)
        v_BTGK = self.values(h_BTD)
        o_BTHK = kernels.taylor_attention(q_BTHK, k_BTGK, v_BTGK, segments_BT=ctx.segments_BT)
        return self.merge(o_BTHK)

    def normalise(self, scores, mask):
        weights = jnp.where(mask, 1 + scores + jnp.square(scores) / 2, 0.0)
        return weights / jnp.sum(weights, axis=-1, keepdims=True)

    def init_cache(self, batch_size, length, ctx):
        spec = self.spec
        return kernels.taylor_state_init(batch_size, spec.num_kv_heads, spec.head_dim)

    def decode(self, h_B1D, cache, ctx):
        q_B1HK, k_B1GK = self.queries_keys(h_B1D, ctx.positions_BT)
        v_B1GK = self.values(h_B1D)
        o_BHK, cache = kernels.taylor_step(cache, q_B1HK[:, 0], k_B1GK[:, 0], v_B1GK[:, 0])
        return self.merge(o_BHK[:, None]), cache

    @classmethod
    def flops(cls, spec, options, batch_size, length):
        mixing = kernels.taylor_flops(length, spec.num_heads, spec.num_kv_heads, spec.head_dim)
        return projection_flops(spec, batch_size * length) + batch_size * mixing

    @classmethod
    def cache_bytes(cls, spec, options, length, itemsize):
        """Float32 sums whatever the compute dtype: (1 + K + K(K+1)/2) features by (K + 1)."""
        features = 1 + spec.head_dim + spec.head_dim * (spec.head_dim + 1) // 2
        return 4 * spec.num_kv_heads * features * (spec.head_dim + 1)
