"""How one function of JAX is timed, and a kernel against its floor and its peers."""

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax

from tools.bench import compare, floors
from tools.kernel_calls import KernelCall


def timed(function: Callable, *arguments) -> compare.Contender:
    """Runs the compiled function, waits for it, and tells how long that took."""
    compiled = jax.jit(function)

    def run(number: int) -> list[float]:
        found = []
        for _ in range(number):
            start = time.perf_counter()
            jax.block_until_ready(compiled(*arguments))
            found.append((time.perf_counter() - start) * 1e3)
        return found

    return run


def measure(call: KernelCall, backend: str, direction: str, rounds: int) -> dict:
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
