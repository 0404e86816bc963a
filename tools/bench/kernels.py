"""Each kernel against what the machine allows: `python -m tools.bench kernels`.

A line a backend and direction (`forward`, or `both` with all gradients). `floor_ms` is the time of
one read and one write of the bytes that the op must move, by a copy of so many in the same run, or
of the products that it must make, at the speed of a large one, whichever is longer; `ratio` is the
kernel's median time over it. `peers` are other ways to the same function, as ratios of their
medians to the kernel's: above 1 we are faster. An op's backends, its peers and its floor take
turns. A backend that differs from the reference, or that does not run, is an error in place of its
lines, and the others are measured all the same; one that "auto" is advised against here is passed
over unless it is named.
"""

import functools
import json
from collections.abc import Callable

import jax
from absl import flags

from deconstruct import kernels
from deconstruct.spec import unknown_name
from tools import kernel_calls, kernel_flags
from tools.bench import machine
from tools.bench.timing import measure
from tools.kernel_calls import DIRECTIONS, KernelCall

flags.adopt_module_key_flags(kernel_flags)  # so that --help lists them
_OPS = flags.DEFINE_multi_enum("op", list(kernels.BACKENDS), list(kernels.BACKENDS), "which")
_BACKENDS = flags.DEFINE_multi_string(
    "backend", [], 'which; of an op that has none of them, those that "auto" may take here'
)
_DIRECTIONS = flags.DEFINE_multi_enum("direction", list(DIRECTIONS), list(DIRECTIONS), "which")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "turns of each side that count", lower_bound=1)


def main(argv) -> None:
    del argv
    failures = []
    for call in [kernel_flags.from_flags(op) for op in _OPS.value]:
        named = _named(call.op) or kernel_calls.backends_for(call)
        right = [name for name in named if _succeeds(failures, call, name, kernel_calls.check)]
        for direction in _DIRECTIONS.value if right else ():
            act = functools.partial(_print, direction)
            if not _succeeds([], call, right, act):
                for name in right:  # which of them was it?
                    _succeeds(failures, call, [name], act)
    if failures:
        raise ValueError("; ".join(failures))


def _print(direction: str, call: KernelCall, backends: list[str]) -> None:
    setting = {"device": jax.devices()[0].device_kind, **machine.setting()}
    for line in measure(call, backends, direction, _ROUNDS.value):
        print(json.dumps({"benchmark": "kernels", **line, **setting}), flush=True)


def _succeeds(failures: list[str], call: KernelCall, backends, act: Callable) -> bool:
    """Whether `act` does; if not, notes why. Each compiler has exceptions of its own."""
    try:
        act(call, backends)
    except ValueError as error:
        failures.append(str(error))
    except Exception as error:
        names = backends if isinstance(backends, str) else ", ".join(backends)
        first = (str(error).splitlines() or [""])[0]
        failures.append(f"{call.op} by {names}: {type(error).__name__}: {first}")
    else:
        return True
    return False


def _named(op: str) -> list[str]:
    """The backends of an op that are asked for by name.

    Raises:
      ValueError: a name that none of the ops has.
    """
    for name in _BACKENDS.value:
        known = [b.name for op in _OPS.value for b in kernels.BACKENDS[op]]
        if name not in known:
            raise ValueError(unknown_name("--backend", name, sorted(set(known))))
    of_op = [backend.name for backend in kernels.BACKENDS[op]]
    return [name for name in dict.fromkeys(_BACKENDS.value) if name in of_op]
