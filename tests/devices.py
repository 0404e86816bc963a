"""Processes that see several CPU devices."""

import os
import pathlib

TESTS = pathlib.Path(__file__).resolve().parent


def environment(num_devices: int) -> dict[str, str]:
    """The environment of a process with so many devices, which can import the package and tests.

    Devices share the cores, so one may wait long for the others: the limits after which XLA takes
    a collective for hung are raised.
    """
    flags = (
        f"--xla_force_host_platform_device_count={num_devices}",
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
        "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    )
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(flags),
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
    }
