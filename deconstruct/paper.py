"""What the paper prints and we repeat: its model sizes, its training recipe, its cost formulas.

H. Xue, N. S. Moosavi, N. Aletras, "Deconstructing Attention: Investigating Design Principles for
Effective Language Modeling", arXiv 2510.11602v1. Config files build on the first half; nothing here
imports JAX.
"""

import dataclasses
import math
import re

import ml_collections

from deconstruct import config as config_lib

# Tables 9 and 10. The 1.7B model is a Qwen3: q/k norm, no bias on Q, K, V.
SIZES = {
    "70m": {"num_layers": 6, "model_dim": 512, "feed_forward_dim": 2048, "num_heads": 8},
    "160m": {"num_layers": 12, "model_dim": 768, "feed_forward_dim": 3072, "num_heads": 12},
    "500m": {"num_layers": 24, "model_dim": 896, "feed_forward_dim": 4864, "num_heads": 14},
    "1700m": {
        "num_layers": 28, "model_dim": 2048, "feed_forward_dim": 6144, "num_heads": 16,
        "qkv_bias": False, "qk_norm": True,
    },
}  # fmt: skip

VOCAB_SIZE = 50_277  # of Pythia's tokenizer; the paper rounds it to 50K
STEPS_OF_15B_TOKENS = 28_610  # of 256 x 2048 tokens; the paper prints no count of such steps

# Parts of a step's batch: what the layers keep for one stays under 60 GiB (see `tools.describe`).
MICRO_BATCHES = {"70m": 4, "160m": 8, "500m": 32, "1700m": 64}


def run_config(size: str, mixer: str, plan: str) -> ml_collections.ConfigDict:
    """The paper's run of one size (section 4.2): AdamW, warm-up, half a cosine, SlimPajama.

    The optimizer's values are the defaults of `config.OptimizerConfig`.

    Args:
      size: a key of `SIZES`.
      mixer: as `config.ModelConfig.mixer`.
      plan: a key of `spec.PLANS`.
    """
    config = config_lib.default()
    config.max_len = 2048
    config.batch_size = 256
    config.num_steps = STEPS_OF_15B_TOKENS
    config.learning_rate = 4e-4
    if size == "1700m":
        config.num_steps = 3 * STEPS_OF_15B_TOKENS
        config.learning_rate = 3e-4
    config.data.path = "data/slimpajama"
    config.data.validation_rows = 2048
    config.model.vocab_size = VOCAB_SIZE
    config.model.mixer, config.model.plan = mixer, plan
    config.model.update(SIZES[size])
    config.compute.micro_batches = MICRO_BATCHES[size]
    config.log.diagnose_every = 1000
    return config


def uniform(size: str, argument: str) -> ml_collections.ConfigDict:
    """One mixer in every layer; the argument is its name.

    Raises:
      ValueError: the argument names a plan as well.
    """
    mixer, plan = _split(argument)
    if plan is not None:
        raise ValueError(
            f"this config takes a mixer alone, not {argument!r}; a plan is for the hybrid config"
        )
    return run_config(size, mixer, "uniform")


def hybrid(size: str, argument: str) -> ml_collections.ConfigDict:
    """The layers that a plan names stay standard; the argument is `mixer,plan`."""
    return run_config(size, *mixer_and_plan(argument))


def mixer_and_plan(argument: str) -> tuple[str, str]:
    """Of a config's argument `mixer,plan`, or a mixer alone, which takes plan even."""
    mixer, plan = _split(argument)
    return mixer, "even" if plan is None else plan


def _split(argument: str) -> tuple[str, str | None]:
    """The plan is None where there is none; commas in the brackets of a mixer's options stay."""
    mixer, plan = re.fullmatch(r"(.*?)(?:,([^\[\],]*))?", argument).groups()
    return mixer, plan


@dataclasses.dataclass(frozen=True)
class PrintedCost:
    """What the paper prints for one mixer (tables 5 to 8, appendices D to H), never asserted.

    B batch, L length, d width, h heads, t tensor-parallel size. Matrix products only, without the
    output projection and without halving for causality; bytes in half precision. Some entries do
    not add up: an `mlp` of matched parameters takes 8BLd^2, only the values of the fixed-QK mixers
    depend on B and their cache leaves out the stream's own values, running sums need float32, and
    the second term of `approximate`'s activations can be read in more than one way.

    Attributes:
      time: order of one forward without a cache.
      prefill_flops: FLOPs of that forward.
      decode_flops: FLOPs of one token with a cache of L.
      activation_bytes: of training.
      cache_bytes: of decoding.
    """

    time: str
    prefill_flops: str
    decode_flops: str
    activation_bytes: str
    cache_bytes: str


_DOT_PRODUCT = PrintedCost(
    time="BL^2d + BLd^2",
    prefill_flops="4BL^2d + 6BLd^2",
    decode_flops="6Bd^2 + 4BLd",
    activation_bytes="8BLd/t + 2BL^2h/t",
    cache_bytes="4BLd",
)
_FIXED_QK = PrintedCost(
    time="BL^2d + BLd^2",
    prefill_flops="2L^2d + 2BL^2d + 6BLd^2",
    decode_flops="2Ld + 2BLd + 6Bd^2",
    activation_bytes="4BLd/t + 8Ld/t + 2L^2h/t",
    cache_bytes="2(B+1)Ld",
)
PRINTED_COSTS = {
    "standard": _DOT_PRODUCT,
    "mlp": PrintedCost(
        time="BLd^2",
        prefill_flops="6BLd^2",
        decode_flops="6Bd^2",
        activation_bytes="8BLd/t",
        cache_bytes="0",
    ),
    "approximate": PrintedCost(
        time="BLd^2",
        prefill_flops="14BLd^2",
        decode_flops="10Bd^2",
        activation_bytes="11BLd/t + 3Bdht^-2",
        cache_bytes="6Bd + 4Bd^2/h",
    ),
    "non_approximate": PrintedCost(
        time="BLd^2",
        prefill_flops="6BLd^2",
        decode_flops="6Bd^2",
        activation_bytes="8BLd/t + 4BLh/t",
        cache_bytes="2Bd + 4Bh",
    ),
    "rnd_emb_qk": _FIXED_QK,
    "fixed_seq_qk": _FIXED_QK,
    "static_emb_qk": _DOT_PRODUCT,
}

# FLOPs of the mixers whose maps no input changes, with those maps precomputed; the first term of
# the prefill lacks a B.
_PRECOMPUTED = {"prefill_flops": "2L^2d + 2BLd^2", "decode_flops": "2BLd + 2d^2"}
PRINTED_FLOPS_OF_PRECOMPUTED_MAPS = {"rnd_emb_qk": _PRECOMPUTED, "fixed_seq_qk": _PRECOMPUTED}


def evaluate(formula: str, **sizes: int) -> float:
    """The value of a printed formula, `evaluate("6Bd + 4Bd^2/h", B=1, d=896, h=14)`."""
    return sum(_evaluate_term(term, sizes) for term in formula.split(" + "))


def _evaluate_term(term: str, sizes: dict[str, int]) -> float:
    """Of a number, letters with powers and sums in brackets, all over others: `2(B+1)Ld^2/h`."""
    coefficient, above, below = re.fullmatch(r"(\d+)([^/]*)/?(.*)", term).groups()

    def product(factors: str) -> float:
        found = re.findall(r"([A-Za-z]|\([A-Za-z]\+\d+\))(?:\^(-?\d))?", factors)
        assert "".join(f"{base}^{power}" if power else base for base, power in found) == factors
        return math.prod(value(base) ** int(power or 1) for base, power in found)

    def value(base: str) -> int:
        letter, _, added = base.strip("()").partition("+")
        return sizes[letter] + int(added or 0)

    return int(coefficient) * product(above) / product(below)
