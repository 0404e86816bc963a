"""How one function of JAX is timed."""

import time
from collections.abc import Callable

import jax

from tools.bench import compare


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
