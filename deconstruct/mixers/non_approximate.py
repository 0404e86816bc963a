"""`non_approximate`: a causal softmax over time of scores of the keys alone (eq. 7-8)."""

import flax.linen as nn
import jax.numpy as jnp

from deconstruct import kernels
from deconstruct.mixers.base import QKVMixer, projection_flops


class NonApproximate(QKVMixer):
    """A_ij = exp(s_j) / sum_{m<=i} exp(s_m), s_j = q_j.k_j / sqrt(K), Q = SiLU(H W_Q).

    Query and key share their position, so rotary positions would cancel and are left out. With
    q/k norm, SiLU comes first.
    """

    def queries_keys(self, x_BTD, positions_BT):
        q_BTHK, k_BTGK = nn.silu(self._heads(self.query(x_BTD))), self._heads(self.key(x_BTD))
        if self.spec.qk_norm:
            q_BTHK, k_BTGK = self.query_norm(q_BTHK), self.key_norm(k_BTGK)
        return q_BTHK, k_BTGK

    def key_scores(self, h_BTD, ctx):
        """s_BTH, float32."""
        return kernels.own_scores(*self.queries_keys(h_BTD, ctx.positions_BT))

    def __call__(self, h_BTD, ctx):
        o_BTHK = kernels.prefix_softmax(
            self.key_scores(h_BTD, ctx), self.values(h_BTD), segments_BT=ctx.segments_BT
        )
        return self.merge(o_BTHK)

    def scores(self, h_BTD, ctx):
        return jnp.transpose(self.key_scores(h_BTD, ctx), (0, 2, 1))[:, :, None, :]

    def remember(self, h_BSD, ctx):
        return {"score": self.key_scores(h_BSD, ctx), "value": self.values(h_BSD)}

    def extend(self, h_BTD, past, ctx):
        s_BSH = jnp.concatenate([past["score"], self.key_scores(h_BTD, ctx)], axis=1)
        scores_BH1S = jnp.transpose(s_BSH, (0, 2, 1))[:, :, None, :]
        return self.read_past(scores_BH1S, past["value"], h_BTD, ctx)

    def init_cache(self, batch_size, length, ctx):
        return kernels.prefix_state_init(batch_size, self.spec.num_heads, self.spec.head_dim)

    def decode(self, h_B1D, cache, ctx):
        s_BH, v_BGK = self.key_scores(h_B1D, ctx)[:, 0], self.values(h_B1D)[:, 0]
        o_BHK, cache = kernels.prefix_step(cache, s_BH, v_BGK)
        return self.merge(o_BHK[:, None]), cache

    @classmethod
    def flops(cls, spec, options, batch_size, length):
        return projection_flops(spec, batch_size * length)

    @classmethod
    def cache_bytes(cls, spec, options, length, itemsize):
        """Float32 running maximum, denominator and numerator whatever the compute dtype."""
        return 4 * spec.num_heads * (spec.head_dim + 2)
