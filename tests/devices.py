"""Processes that see several CPU devices."""

import os
import pathlib

TESTS = pathlib.Path(__file__).resolve().parent
FAST = "JAX_DISABLE_MOST_OPTIMIZATIONS"  # set in conftest.py


def environment(num_devices: int, optimised: bool = False) -> dict[str, str]:
    """The environment of a process with so many devices, which can import the package and tests.

    Optimised, it compiles all that a user's process does; else the same as this one, which tests
    keep from the compiler's costly passes. The two round differently: where results must be equal
    bit for bit, both sides take the same.

    Devices share the cores, so one may wait long for the others: the limits after which XLA takes
    a collective for hung are raised.
    """
    flags = (
        f"--xla_force_host_platform_device_count={num_devices}",
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
        "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    )
    ours = {key: value for key, value in os.environ.items() if not (optimised and key == FAST)}
    return ours | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(flags),
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
    }
