"""Each mixer's hybrid against the standard model: `python -m tools.bench hybrids`.

The real train step of models in which a plan leaves some layers to a simple mixer, on the same
random rows, in float32 on a CPU. `ratio` is the hybrid's median step time over the standard
model's, `flops_ratio` the same of the formulas (`deconstruct/flops.py`), which count causal
attention as full squares: `ratio` at most `flops_ratio` is the speed that the FLOPs promise. All
take turns.
"""

import json
import os
import statistics

from absl import flags

from deconstruct.mixers import MIXERS
from deconstruct.spec import PLANS, STANDARD
from tools.bench import compare, train_flags
from tools.bench.ours import Ours
from tools.bench.shapes import SHAPES

flags.adopt_module_key_flags(train_flags)  # so that --help lists them
_SIMPLE = sorted(set(MIXERS) - {STANDARD})
_MIXERS = flags.DEFINE_multi_enum("mixer", _SIMPLE, _SIMPLE, "which")
_PLAN = flags.DEFINE_enum("plan", "even", list(PLANS), "which layers stay standard")


def main(argv) -> None:
    del argv
    turns = train_flags.ROUNDS.value, train_flags.STEPS.value
    for name in train_flags.SHAPE.value:
        for line in measure(name, _MIXERS.value, _PLAN.value, *turns):
            setting = {"cores": os.cpu_count(), "load_average": round(os.getloadavg()[0], 2)}
            print(json.dumps({"benchmark": "hybrids", **line, **setting}), flush=True)


def measure(name: str, mixers: list[str], plan: str, rounds: int, steps: int) -> list[dict]:
    """A line a mixer, the standard model first."""
    shape = SHAPES[name]
    models = {STANDARD: Ours(shape)} | {mixer: Ours(shape, mixer, plan) for mixer in mixers}
    sides = {mixer: model.steps for mixer, model in models.items()}
    medians = {
        mixer: statistics.median(milliseconds)
        for mixer, milliseconds in compare.alternate(sides, rounds=rounds, runs=steps).items()
    }
    return [
        {
            "shape": name,
            "mixer": mixer,
            "plan": "uniform" if mixer == STANDARD else plan,
            "ms": round(medians[mixer], 1),
            "ratio": round(medians[mixer] / medians[STANDARD], 3),
            "flops_ratio": round(model.flops / models[STANDARD].flops, 3),
        }
        for mixer, model in models.items()
    ]
