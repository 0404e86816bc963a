"""How one function of JAX is timed, and a kernel against its floor and its peers."""

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
from absl import logging

from tools import hlo
from tools.bench import compare, floors
from tools.kernel_calls import KernelCall


def timed(function: Callable, *arguments) -> compare.Contender:
    """Runs the function, compiled if it is not yet, waits for it, and tells how long that took."""
    compiled = function if isinstance(function, jax.stages.Compiled) else jax.jit(function)

    def run(number: int) -> list[float]:
        found = []
        for _ in range(number):
            start = time.perf_counter()
            jax.block_until_ready(compiled(*arguments))
            found.append((time.perf_counter() - start) * 1e3)
        return found

    return run


def measure(call: KernelCall, backends: list[str], direction: str, rounds: int) -> list[dict]:
    """What the lines say, one a backend, but for where they were measured."""
    arguments = call.arguments()
    moved, flops = call.least_bytes(direction), call.least_flops(direction)
    programs = {
        name: jax.jit(call.function(name, direction)).lower(*arguments).compile()
        for name in backends
    }
    sides = {name: timed(program, *arguments) for name, program in programs.items()}
    sides["a copy"] = timed(*floors.copy(moved))
    if flops:
        sides["a product"] = timed(*floors.product())
    peers = {
        name: timed(function, *arguments)
        for name, function in floors.peers(call, direction).items()
    }
    peers = {name: side for name, side in peers.items() if _runs(name, side)}
    sides |= peers
    times = {
        side: statistics.median(milliseconds)
        for side, milliseconds in compare.alternate(sides, rounds=rounds, runs=1).items()
    }
    products = times.get("a product", 0) * flops / floors.PRODUCT_FLOPS
    floor = max(times["a copy"], products)
    return [
        {
            **dataclasses.asdict(call),
            "backend": name,
            "direction": direction,
            "ms": round(times[name], 2),
            "floor_ms": round(floor, 2),
            "ratio": round(times[name] / floor, 2),
            "least_bytes": moved,
            "least_flops": flops,
            **_counted(programs[name]),
            "peers": {peer: round(times[peer] / times[name], 2) for peer in peers},
        }
        for name in backends
    ]


def _counted(program: jax.stages.Compiled) -> dict:
    """Bytes and FLOPs as the compiler counts them; a kernel of ours it does not look into."""
    moved = (program.cost_analysis() or {}).get("bytes accessed")
    return {"bytes": moved and int(moved), "flops": hlo.costs(program.as_text()).flops}


def _runs(name: str, side: compare.Contender) -> bool:
    """A peer may want more memory than there is; the others are measured all the same."""
    try:
        side(1)
    except RuntimeError as error:  # of XLA
        logging.warning("%s is left out: %s", name, str(error).splitlines()[0])
        return False
    return True
