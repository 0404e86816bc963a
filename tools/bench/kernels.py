"""Each kernel against what the machine allows: `python -m tools.bench kernels`.

A line a backend and direction (`forward`, or `both` with all gradients). `floor_ms` is the time of
one read and one write of the bytes that the op must move, by a copy of so many in the same run, or
of the products that it must make, at the speed of a large one, whichever is longer; `ratio` is the
kernel's median time over it. `peers` are other ways to the same function, as ratios of their
medians to the kernel's: above 1 we are faster. All take turns. A backend that differs from the
reference is an error, not a line; one that "auto" is advised against here is passed over unless it
is named.
"""

import dataclasses
import json
import os
import statistics

import jax
from absl import flags

from deconstruct import kernels
from tools import kernel_calls
from tools.bench import compare, floors
from tools.bench.timing import timed
from tools.kernel_calls import DIRECTIONS

_OPS = flags.DEFINE_multi_enum("op", list(kernels.BACKENDS), list(kernels.BACKENDS), "which")
_BACKENDS = flags.DEFINE_multi_string("backend", [], "which; without it all but the reference")
_DIRECTIONS = flags.DEFINE_multi_enum("direction", list(DIRECTIONS), list(DIRECTIONS), "which")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "turns of each side that count", lower_bound=1)


def main(argv) -> None:
    del argv
    for op in _OPS.value:
        call = kernel_calls.from_flags(op)
        for backend in _BACKENDS.value or kernel_calls.backends_for(call):
            kernel_calls.check(call, backend)
            for direction in _DIRECTIONS.value:
                setting = {
                    "device": jax.devices()[0].device_kind,
                    "cores": os.cpu_count(),
                    "load_average": round(os.getloadavg()[0], 2),
                }
                line = measure(call, backend, direction, _ROUNDS.value)
                print(json.dumps({"benchmark": "kernels", **line, **setting}), flush=True)


def measure(call: kernel_calls.KernelCall, backend: str, direction: str, rounds: int) -> dict:
    """What a line says, but for where it was measured."""
    arguments = call.arguments()
    moved, flops = call.least_bytes(direction), call.least_flops(direction)
    sides = {
        "kernel": timed(call.function(backend, direction), *arguments),
        "copy": timed(*floors.copy(moved)),
    }
    if flops:
        sides["product"] = timed(*floors.product())
    peers = floors.peers(call, direction)
    sides |= {name: timed(function, *arguments) for name, function in peers.items()}
    times = {
        side: statistics.median(milliseconds)
        for side, milliseconds in compare.alternate(sides, rounds=rounds, runs=1).items()
    }
    products = times.get("product", 0) * flops / floors.PRODUCT_FLOPS
    floor = max(times["copy"], products)
    return {
        **dataclasses.asdict(call),
        "backend": backend,
        "direction": direction,
        "ms": round(times["kernel"], 2),
        "floor_ms": round(floor, 2),
        "ratio": round(times["kernel"] / floor, 2),
        "least_bytes": moved,
        "least_flops": flops,
        "peers": {name: round(times[name] / times["kernel"], 2) for name in peers},
    }
