"""`mlp`: a gated feed-forward in attention's place; no token sees another (eq. 4-5)."""

import dataclasses

import flax.linen as nn

from deconstruct.layers import GatedFeedForward
from deconstruct.mixers.base import Mixer
from deconstruct.spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class MLPOptions:
    """Attributes:
    width: inner width; None takes `matched_width`, and `resolve` writes it out.
    """

    width: int | None = None

    def __post_init__(self):
        if self.width is not None and (type(self.width) is not int or self.width < 1):
            raise ValueError(f"width must be a positive integer or None, not {self.width!r}")


class MLP(Mixer):
    """O = Down(SiLU(Gate(H)) * Up(H))."""

    Options = MLPOptions

    def setup(self):
        width = self.options.width
        self.feed_forward = GatedFeedForward(width, self.spec.init_std, self.dtype)
        nn.share_scope(self, self.feed_forward)

    def __call__(self, h_BTD, ctx):
        return self.feed_forward(h_BTD)

    def remember(self, h_BSD, ctx):
        return {}

    def extend(self, h_BTD, past, ctx):
        return self.feed_forward(h_BTD)

    def init_cache(self, batch_size, length, ctx):
        return {}

    def decode(self, h_B1D, cache, ctx):
        return self.feed_forward(h_B1D), cache

    @classmethod
    def complete_options(cls, spec, options):
        return options if options.width else MLPOptions(matched_width(spec))

    @classmethod
    def flops(cls, spec, options, batch_size, length):
        return 6 * batch_size * length * spec.model_dim * options.width

    @classmethod
    def cache_bytes(cls, spec, options, length, itemsize):
        return 0


def matched_width(spec: ModelSpec) -> int:
    """The inner width m whose 3 m D parameters match the standard mixer's.

    The nearest multiple of 8 where even a model of such layers alone keeps its total within 0.1%,
    else the nearest integer.
    """
    per_unit = 3 * spec.model_dim
    target = standard_mixer_params(spec)
    rounded = round(target / per_unit / 8) * 8
    drift = abs(rounded * per_unit - target)
    feed_forward = 3 * spec.model_dim * spec.feed_forward_dim
    tables = spec.vocab_size * spec.model_dim * (1 if spec.tied_embeddings else 2)
    total = tables + spec.num_layers * (target + feed_forward)
    fits = rounded > 0 and drift * spec.num_layers <= 1e-3 * total
    return rounded if fits else max(1, round(target / per_unit))


def standard_mixer_params(spec: ModelSpec) -> int:
    """Parameters of the standard mixer: four projections, biases, q/k norms."""
    heads, groups = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    count = 2 * spec.model_dim * (heads + groups)
    if spec.qkv_bias:
        count += heads + 2 * groups
    if spec.qk_norm:
        count += 2 * spec.head_dim
    return count
