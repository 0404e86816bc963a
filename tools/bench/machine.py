"""What a benchmark's line says of the machine that it ran on."""

import os
import pathlib
import platform

_CPUINFO = pathlib.Path("/proc/cpuinfo")


def setting() -> dict:
    """The processor's name, its cores, and how many programs wanted them in the last minute."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def processor() -> str:
    """Linux alone tells its name; elsewhere it is what Python knows."""
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
