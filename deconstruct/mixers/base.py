"""The contract of a token mixer, and what all mixers with queries, keys and values share.

A mixer is a Linen module `(h_BTD, ctx) -> out_BTD` over one layer's normalised input. It is causal,
and with `ctx.segments_BT` it keeps documents apart. `attention_map` is its definition, in float32
from the paper's equation; the fast path in `__call__` must equal `defined_output`. To add a mixer,
write one file with such a class and one line in the registry of `mixers/__init__.py`.

Axes: B batch, T query time, S key time, D model, H heads, K head size, G key/value groups, L stream
length.
"""

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from deconstruct.layers import Projection, RMSNorm, rotary_tables, rotate
from deconstruct.spec import ModelSpec


@flax.struct.dataclass
class MixerContext:
    """What a mixer may know beside its layer's input.

    Attributes:
      positions_BT: position of each token in its document, (B, T), or (1, T) shared by all rows.
      segments_BT: id of the document of each token, or None where documents are not isolated.
      embeddings_BTD: the layer-0 embeddings after this layer's input norm (`static_emb_qk`).
      stream_LD: the mixer's own fixed stream as it enters this layer, after the input norm.
      past_BTS: for `extend`, which remembered tokens each token follows: (B, T, S) of bool.
    """

    positions_BT: jax.Array
    segments_BT: jax.Array | None = None
    embeddings_BTD: jax.Array | None = None
    stream_LD: jax.Array | None = None
    past_BTS: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """Of a mixer that has nothing to choose."""


class Mixer(nn.Module):
    """The contract. `options` is an instance of the class's own `Options`."""

    spec: ModelSpec
    options: Any
    dtype: jnp.dtype

    Options: ClassVar[type] = NoOptions
    stream: ClassVar[str | None] = None  # the fixed stream that it reads, by registry name
    uses_embeddings: ClassVar[bool] = False

    def __call__(self, h_BTD: jax.Array, ctx: MixerContext) -> jax.Array:
        """The layer's output (B, T, D) by the fast path."""
        raise NotImplementedError

    def scores(self, h_BTD: jax.Array, ctx: MixerContext) -> jax.Array | None:
        """What the normalisation is applied to, float32, broadcastable to (B, H, T, S)."""
        return None

    def attention_map(self, h_BTD: jax.Array, ctx: MixerContext) -> jax.Array | None:
        """A_BHTS in float32 from the equation; None where the mixer mixes no tokens."""
        return None

    def remember(self, h_BSD: jax.Array, ctx: MixerContext) -> Any:
        """What tokens to come need of these, for `extend`."""
        raise NotImplementedError

    def extend(self, h_BTD: jax.Array, past: Any, ctx: MixerContext) -> jax.Array:
        """The output (B, T, D) for tokens that follow a remembered past.

        `ctx.segments_BT` tells apart the branches, of which each follows its share of the past,
        `ctx.past_BTS`, and no other branch; `ctx.positions_BT` count on from there.
        """
        raise NotImplementedError

    def init_cache(self, batch_size: int, length: int, ctx: MixerContext) -> Any:
        """An empty decode cache for `length` tokens a row; `ctx` gives the fixed stream."""
        raise NotImplementedError

    def decode(self, h_B1D: jax.Array, cache: Any, ctx: MixerContext) -> tuple[jax.Array, Any]:
        """One token a row at `ctx.positions_BT` (B, 1): (out_B1D, the cache after it)."""
        raise NotImplementedError

    @classmethod
    def complete_options(cls, spec: ModelSpec, options: Any) -> Any:
        """The options with what follows from the model's sizes written out, so that it stays."""
        return options

    @classmethod
    def flops(cls, spec: ModelSpec, options: Any, batch_size: int, length: int) -> int:
        """FLOPs of the forward on a batch: matrix products, causal ones as full squares."""
        raise NotImplementedError

    @classmethod
    def cache_bytes(cls, spec: ModelSpec, options: Any, length: int, itemsize: int) -> int:
        """Bytes of the decode cache of one row, `itemsize` bytes a value of the compute dtype."""
        raise NotImplementedError

    @classmethod
    def shared_cache_bytes(cls, spec: ModelSpec, options: Any, length: int, itemsize: int) -> int:
        """Bytes of what the decode cache holds once, whatever the number of rows."""
        return 0

    @classmethod
    def keeps_map(cls, spec: ModelSpec, length: int) -> bool:
        """Whether a decode cache for `length` tokens holds the attention map, made beforehand."""
        return False


def visible(ctx: MixerContext, length: int) -> jax.Array:
    """Which keys each query may see: (B or 1, 1, T, S), by causality and document."""
    order = jnp.arange(length)
    mask = (order[:, None] >= order[None, :])[None, None, :, :]
    if ctx.segments_BT is None:
        return mask
    same = ctx.segments_BT[:, None, :, None] == ctx.segments_BT[:, None, None, :]
    return mask & same


class QKVMixer(Mixer):
    """Queries, keys, values and an output projection, with the standard layer's parameters.

    A subclass gives the fast path and the caches; it may override where queries and keys come from
    (`qk_source`), how they are prepared (`queries_keys`) and how scores become weights
    (`normalise`).
    """

    def setup(self):
        spec = self.spec
        heads, groups = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim

        def project(features, axes, use_bias):
            return Projection(features, axes, spec.init_std, self.dtype, use_bias)

        self.query = project(heads, ("embed", "heads"), spec.qkv_bias)
        self.key = project(groups, ("embed", "kv_heads"), spec.qkv_bias)
        self.value = project(groups, ("embed", "kv_heads"), spec.qkv_bias)
        self.output = project(spec.model_dim, ("heads", "embed"), False)
        if spec.qk_norm:
            self.query_norm = RMSNorm(spec.norm_eps, self.dtype)
            self.key_norm = RMSNorm(spec.norm_eps, self.dtype)

    def qk_source(self, h_BTD: jax.Array, ctx: MixerContext) -> jax.Array:
        """Where queries and keys are read from, (B, T, D): the layer's own input."""
        return h_BTD

    def queries_keys(self, x_BTD: jax.Array, positions_BT: jax.Array):
        """(q_BTHK, k_BTGK): projected, normalised where the spec asks, and rotated."""
        q_BTHK, k_BTGK = self._heads(self.query(x_BTD)), self._heads(self.key(x_BTD))
        if self.spec.qk_norm:
            q_BTHK, k_BTGK = self.query_norm(q_BTHK), self.key_norm(k_BTGK)
        tables = rotary_tables(positions_BT, self.spec.head_dim, self.spec.rope_base)
        return rotate(q_BTHK, tables), rotate(k_BTGK, tables)

    def values(self, h_BTD: jax.Array) -> jax.Array:
        """v_BTGK."""
        return self._heads(self.value(h_BTD))

    def merge(self, o_BTHK: jax.Array) -> jax.Array:
        """The heads joined and projected: (B, T, D)."""
        return self.output(o_BTHK.reshape(*o_BTHK.shape[:2], -1))

    def scores(self, h_BTD, ctx):
        q_BTHK, k_BSGK = self.queries_keys(self.qk_source(h_BTD, ctx), ctx.positions_BT)
        return self.dot_scores(q_BTHK, k_BSGK)

    def dot_scores(self, q_BTHK: jax.Array, k_BSGK: jax.Array) -> jax.Array:
        """q.k / sqrt(K) in float32: (B, H, T, S)."""
        k_BSHK = self.per_head(k_BSGK)
        s_BHTS = jnp.einsum("BTHK,BSHK->BHTS", q_BTHK, k_BSHK, preferred_element_type=jnp.float32)
        return s_BHTS / jnp.sqrt(jnp.float32(self.spec.head_dim))

    def per_head(self, x_BTGK: jax.Array) -> jax.Array:
        """Each group's slice repeated for the heads that share it: (B, T, H, K)."""
        return jnp.repeat(x_BTGK, self.spec.num_heads // self.spec.num_kv_heads, axis=2)

    def normalise(self, scores: jax.Array, mask: jax.Array) -> jax.Array:
        """Scores to weights that sum to 1 over the visible keys: softmax (eq. 2)."""
        return jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)

    def attention_map(self, h_BTD, ctx):
        scores = self.scores(h_BTD, ctx)
        a = self.normalise(scores, visible(ctx, h_BTD.shape[1]))
        return jnp.broadcast_to(a, (h_BTD.shape[0], *a.shape[1:]))

    def defined_output(self, h_BTD: jax.Array, ctx: MixerContext) -> jax.Array:
        """The output by the definition: merge(A V), with A in float32."""
        a_BHTS = self.attention_map(h_BTD, ctx)
        v_BSHK = self.per_head(self.values(h_BTD)).astype(jnp.float32)
        return self.merge(jnp.einsum("BHTS,BSHK->BTHK", a_BHTS, v_BSHK).astype(self.dtype))

    def remember(self, h_BSD, ctx):
        _, k_BSGK = self.queries_keys(self.qk_source(h_BSD, ctx), ctx.positions_BT)
        return {"key": k_BSGK, "value": self.values(h_BSD)}

    def extend(self, h_BTD, past, ctx):
        q_BTHK, k_BTGK = self.queries_keys(self.qk_source(h_BTD, ctx), ctx.positions_BT)
        scores = self.dot_scores(q_BTHK, jnp.concatenate([past["key"], k_BTGK], axis=1))
        return self.read_past(scores, past["value"], h_BTD, ctx)

    def read_past(self, scores, v_BSGK: jax.Array, h_BTD: jax.Array, ctx: MixerContext):
        """The output from scores, broadcastable to (B, H, T, S + T), of the past and the branch."""
        seen = jnp.concatenate([ctx.past_BTS[:, None], visible(ctx, h_BTD.shape[1])], axis=-1)
        a = self.normalise(scores, seen)
        v_BSHK = self.per_head(jnp.concatenate([v_BSGK, self.values(h_BTD)], axis=1))
        return self.merge(
            jnp.einsum("BHTS,BSHK->BTHK", a, v_BSHK.astype(a.dtype)).astype(self.dtype)
        )

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], -1, self.spec.head_dim)


def projection_flops(spec: ModelSpec, num_tokens: int) -> int:
    """FLOPs of the four projections: Q and output over all heads, K and V over the groups."""
    heads, groups = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return 4 * num_tokens * spec.model_dim * (heads + groups)


def store(cache_BSGK: jax.Array, new_B1GK: jax.Array, positions_B1: jax.Array) -> jax.Array:
    """The cache with each row's new entry written at that row's position."""
    rows = jnp.arange(cache_BSGK.shape[0])
    return cache_BSGK.at[rows, positions_B1[:, 0]].set(new_B1GK[:, 0].astype(cache_BSGK.dtype))
