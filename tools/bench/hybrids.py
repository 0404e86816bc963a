"""Each mixer's hybrid against the standard model: `python -m tools.bench hybrids`.

The real train step of models in which a plan leaves some layers to a simple mixer, on the same
random rows, in float32 on a CPU. `ratio` is the hybrid's median step time over the standard
model's, `flops_ratio` the same of the formulas (`deconstruct/flops.py`), which count causal
attention as full squares: `ratio` at most `flops_ratio` is the speed that the FLOPs promise. All
take turns.
"""

import json
import statistics

from absl import flags

from deconstruct.mixers import MIXERS
from deconstruct.spec import PLANS, STANDARD
from tools.bench import compare, machine, train_flags
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
            print(json.dumps({"benchmark": "hybrids", **line, **machine.setting()}), flush=True)


def measure(name: str, mixers: list[str], plan: str, rounds: int, steps: int) -> list[dict]:
    """A line a mixer, the standard model first and again last."""
    shape = SHAPES[name]
    sides = [(STANDARD, "uniform"), *((mixer, plan) for mixer in mixers), (STANDARD, "uniform")]
    models = [Ours(shape, *side) for side in sides]
    contenders = {str(number): model.steps for number, model in enumerate(models)}
    times = compare.alternate(contenders, rounds=rounds, runs=steps)
    medians = [statistics.median(milliseconds) for milliseconds in times.values()]
    return [
        {
            "shape": name,
            "mixer": mixer,
            "plan": plan,
            "ms": round(median, 1),
            "ratio": round(median / medians[0], 3),
            "flops_ratio": round(model.flops / models[0].flops, 3),
        }
        for (mixer, plan), model, median in zip(sides, models, medians, strict=True)
    ]
