"""`rnd_emb_qk` and `fixed_seq_qk`: queries and keys from a stream that no input changes (eq. 9-12).

The stream X is one row that starts as noise, or as the embedding of one fixed text, and passes
through every block. Its maps are the same for all inputs, so they are computed once for a batch.
"""

import dataclasses

import jax
import jax.numpy as jnp

from deconstruct import kernels
from deconstruct.mixers.base import projection_flops, store, visible
from deconstruct.mixers.standard import Standard

# Bytes of one layer's map that a decode cache holds at most: 16 heads on 2,048 positions, more than
# the 500M model has. With 8, on two cores, a step of the 70M model on 8 rows takes 0.38 of its time
# without; on one row, 0.9.
LARGEST_MAP = 2**28


class FixedQK(Standard):
    """Attention with queries and keys of the fixed stream, read at each token's own position."""

    def stream_queries_keys(self, ctx):
        """(q_1LHK, k_1LGK) of the whole stream."""
        x_1LD = ctx.stream_LD[None]
        return self.queries_keys(x_1LD, jnp.arange(x_1LD.shape[1])[None, :])

    def __call__(self, h_BTD, ctx):
        self._check_length(h_BTD.shape[1], ctx)
        q_1LHK, k_1LGK = self.stream_queries_keys(ctx)
        v_BTGK = self.values(h_BTD)
        if ctx.segments_BT is None:
            o_BTHK = kernels.fixed_map_attention(q_1LHK[0], k_1LGK[0], v_BTGK)
        else:
            q_BTHK, k_BTGK = q_1LHK[0][ctx.positions_BT], k_1LGK[0][ctx.positions_BT]
            o_BTHK = kernels.causal_attention(q_BTHK, k_BTGK, v_BTGK, segments_BT=ctx.segments_BT)
        return self.merge(o_BTHK)

    def scores(self, h_BTD, ctx):
        self._check_length(h_BTD.shape[1], ctx)
        q_1LHK, k_1LGK = self.stream_queries_keys(ctx)
        return self.dot_scores(q_1LHK[0][ctx.positions_BT], k_1LGK[0][ctx.positions_BT])

    def remember(self, h_BSD, ctx):
        self._check_length(h_BSD.shape[1], ctx)
        _, k_1LGK = self.stream_queries_keys(ctx)
        k_BSGK = k_1LGK[0][ctx.positions_BT]
        return {
            "key": jnp.broadcast_to(k_BSGK, (len(h_BSD), *k_BSGK.shape[1:])),
            "value": self.values(h_BSD),
        }

    def extend(self, h_BTD, past, ctx):
        q_1LHK, k_1LGK = self.stream_queries_keys(ctx)
        q_BTHK, k_BTGK = q_1LHK[0][ctx.positions_BT], k_1LGK[0][ctx.positions_BT]
        scores = self.dot_scores(q_BTHK, jnp.concatenate([past["key"], k_BTGK], axis=1))
        return self.read_past(scores, past["value"], h_BTD, ctx)

    def init_cache(self, batch_size, length, ctx):
        """Beside the values the map itself, or its queries and keys where it is too large."""
        self._check_length(length, ctx)
        q_1SHK, k_1SGK = (x[:, :length] for x in self.stream_queries_keys(ctx))
        shape = (batch_size, length, self.spec.num_kv_heads, self.spec.head_dim)
        cache = {"value": jnp.zeros(shape, self.dtype)}
        if not self.keeps_map(self.spec, length):
            return {**cache, "query": q_1SHK, "key": k_1SGK}
        a_1HTS = self.normalise(self.dot_scores(q_1SHK, k_1SGK), visible(ctx, length))
        return {**cache, "map": jnp.swapaxes(a_1HTS, 1, 2)}

    def decode(self, h_B1D, cache, ctx):
        cache = {**cache, "value": store(cache["value"], self.values(h_B1D), ctx.positions_BT)}
        if "map" in cache:
            a_BHS = cache["map"][0][ctx.positions_BT[:, 0]]
            return self.merge(self.weigh_cache(a_BHS[:, :, None], cache["value"])), cache
        q_B1HK = cache["query"][0][ctx.positions_BT]
        k_BSGK = jnp.broadcast_to(cache["key"], (q_B1HK.shape[0], *cache["key"].shape[1:]))
        scores_BH1S = self.dot_scores(q_B1HK, k_BSGK)
        return self.merge(self.read_cache(scores_BH1S, cache["value"], ctx)), cache

    def _check_length(self, length: int, ctx) -> None:
        if length > ctx.stream_LD.shape[0]:
            raise ValueError(
                f"{self.stream} holds {ctx.stream_LD.shape[0]} positions and cannot read "
                f"{length} tokens; use at most max_len={self.spec.max_len}"
            )

    @classmethod
    def flops(cls, spec, options, batch_size, length):
        """Values and output for every row; queries, keys and the map once for the batch."""
        half = 2 * length**2 * spec.num_heads * spec.head_dim
        return projection_flops(spec, (batch_size + 1) * length) // 2 + (batch_size + 1) * half

    @classmethod
    def cache_bytes(cls, spec, options, length, itemsize):
        return length * spec.num_kv_heads * spec.head_dim * itemsize

    @classmethod
    def shared_cache_bytes(cls, spec, options, length, itemsize):
        """The map in float32, or the stream's queries and keys."""
        if cls.keeps_map(spec, length):
            return _map_bytes(spec, length)
        return length * (spec.num_heads + spec.num_kv_heads) * spec.head_dim * itemsize

    @classmethod
    def keeps_map(cls, spec, length):
        return _map_bytes(spec, length) <= LARGEST_MAP


def _map_bytes(spec, length: int) -> int:
    return 4 * spec.num_heads * length**2


@dataclasses.dataclass(frozen=True)
class RndEmbQKOptions:
    """Of the noise eps ~ N(0, sigma^2) that the stream starts from (eq. 9).

    Attributes:
      sigma: standard deviation; 0.02 is the embedding's own initial one.
      seed: the random key; eps is drawn from it once and stored, never trained.
    """

    sigma: float = 0.02
    seed: int = 0

    def __post_init__(self):
        if not self.sigma > 0:
            raise ValueError(f"sigma must be positive, not {self.sigma!r}")
        if type(self.seed) is not int:
            raise ValueError(f"seed must be an integer, not {self.seed!r}")


class RndEmbQK(FixedQK):
    """The stream starts as noise."""

    stream = "rnd_emb_qk"
    Options = RndEmbQKOptions

    @classmethod
    def init_stream(cls, spec, options, text_ids) -> jax.Array:
        """eps (max_len, D), float32."""
        shape = (spec.max_len, spec.model_dim)
        return options.sigma * jax.random.normal(jax.random.key(options.seed), shape, jnp.float32)

    @classmethod
    def start_stream(cls, start, embed, dtype) -> jax.Array:
        """The state that enters the first layer, (max_len, D)."""
        return start.astype(dtype)


class FixedSeqQK(FixedQK):
    """The stream starts as the embedding of one text."""

    stream = "fixed_seq_qk"

    @classmethod
    def init_stream(cls, spec, options, text_ids) -> jax.Array:
        """The text's first max_len token ids, (max_len,) int32."""
        if text_ids is None or len(text_ids) < spec.max_len:
            have = "none" if text_ids is None else len(text_ids)
            raise ValueError(
                f"fixed_seq_qk needs a text of max_len={spec.max_len} tokens; it was given {have}"
            )
        return jnp.asarray(text_ids[: spec.max_len], jnp.int32)

    @classmethod
    def start_stream(cls, start, embed, dtype) -> jax.Array:
        """The state that enters the first layer, (max_len, D)."""
        return embed(start[None])[0]
