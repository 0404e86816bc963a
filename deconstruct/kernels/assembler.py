"""NVIDIA's assembler, `ptxas`, as XLA's packages bring it."""

import importlib.util
import os
import pathlib
import shutil


def path() -> str | None:
    """Where it lies: in the package of CUDA's compiler, or on the PATH; None if nowhere."""
    package = importlib.util.find_spec("nvidia")
    for folder in package.submodule_search_locations if package else ():
        found = pathlib.Path(folder) / "cuda_nvcc" / "bin" / "ptxas"
        if found.exists():
            return str(found)
    return shutil.which("ptxas")


def use_for_triton() -> None:
    """Lets Triton write code for XLA's assembler, which is the one that must read it.

    Triton writes for its own, often a newer one, whose code XLA's refuses. What the environment
    says already is kept.
    """
    found = path()
    if found is not None:
        for variable in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
            os.environ.setdefault(variable, found)
