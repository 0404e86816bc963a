"""Each mixer with its projections against standard attention: `python -m tools.bench mixers`.

Forward and backward of one layer's mixer on rows that are one document each, with the gradients of
its parameters, its input and what else it reads; the pre-pass that makes a fixed stream is not in
it. `ratio` is the mixer's median time over the standard one's, `flops_ratio` the same of the
formulas (`deconstruct/flops.py`), which count causal attention as full squares. All take turns.
"""

import json
import statistics

import jax
import jax.numpy as jnp
from absl import flags

from deconstruct import flops
from deconstruct.mixers import MIXERS, MixerContext, options_of, resolve
from deconstruct.spec import STANDARD, ModelSpec, plan_layers
from tools.bench import compare, machine
from tools.bench.timing import timed

_MIXERS = flags.DEFINE_multi_enum("mixer", sorted(MIXERS), sorted(MIXERS), "which")
_ROWS = flags.DEFINE_integer("rows", 8, "rows of a batch", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 2048, "positions of a row", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 512, "of the model", lower_bound=1)
_HEADS = flags.DEFINE_integer("heads", 8, "heads, of keys and values as well", lower_bound=1)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "of the arithmetic")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "turns of each mixer that count", lower_bound=1)


def main(argv) -> None:
    del argv
    try:
        lines = measure(dict.fromkeys([STANDARD, *_MIXERS.value]), _ROUNDS.value)
    except RuntimeError as error:  # of XLA
        first = str(error).splitlines()[0]
        raise ValueError(f"not all mixers run with these sizes here: {first}") from error
    for line in lines:
        setting = {"device": jax.devices()[0].device_kind, **machine.setting()}
        print(json.dumps({"benchmark": "mixers", **line, **setting}), flush=True)


def measure(names, rounds: int) -> list[dict]:
    """A line a mixer, the standard one first."""
    sizes = {
        "rows": _ROWS.value, "length": _LENGTH.value, "width": _WIDTH.value,
        "heads": _HEADS.value, "dtype": _DTYPE.value,
    }  # fmt: skip
    specs = {name: make_spec(name) for name in names}
    sides = {name: timed(*layer(spec)) for name, spec in specs.items()}
    medians = {
        name: statistics.median(milliseconds)
        for name, milliseconds in compare.alternate(sides, rounds=rounds, runs=1).items()
    }
    formulas = {
        name: flops.mixer_flops(spec, spec.layers[0], _ROWS.value, _LENGTH.value)
        for name, spec in specs.items()
    }
    return [
        {
            "mixer": name,
            **sizes,
            "ms": round(milliseconds, 1),
            "ratio": round(milliseconds / medians[STANDARD], 3),
            "flops_ratio": round(formulas[name] / formulas[STANDARD], 3),
        }
        for name, milliseconds in medians.items()
    ]


def make_spec(name: str) -> ModelSpec:
    """A model of one such layer."""
    return resolve(
        ModelSpec(
            vocab_size=128,
            max_len=_LENGTH.value,
            model_dim=_WIDTH.value,
            num_heads=_HEADS.value,
            num_kv_heads=_HEADS.value,
            feed_forward_dim=4 * _WIDTH.value,
            layers=plan_layers(1, name, "uniform"),
        )
    )


def layer(spec: ModelSpec):
    """(forward and backward of the layer's mixer, its arguments)."""
    dtype = jnp.dtype(_DTYPE.value)
    kind = MIXERS[spec.layers[0].mixer]
    mixer = kind(spec, options_of(spec.layers[0]), dtype)
    keys = jax.random.split(jax.random.key(0), 4)
    h_BTD, do_BTD = (
        jax.random.normal(key, (_ROWS.value, _LENGTH.value, _WIDTH.value)).astype(dtype)
        for key in keys[:2]
    )
    read = {
        "embeddings_BTD": h_BTD[::-1] if kind.uses_embeddings else None,
        "stream_LD": h_BTD[0] if kind.stream else None,
    }
    positions_BT = jnp.arange(_LENGTH.value, dtype=jnp.int32)[None]

    def forward(params, h_BTD, read):
        return mixer.apply(params, h_BTD, MixerContext(positions_BT=positions_BT, **read))

    params = jax.jit(mixer.init)(keys[3], h_BTD, MixerContext(positions_BT=positions_BT, **read))

    def both(params, h_BTD, read, do_BTD):
        o_BTD, pull = jax.vjp(forward, params, h_BTD, read)
        return o_BTD, *pull(do_BTD)

    return both, params, h_BTD, read, do_BTD
