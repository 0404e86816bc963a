"""Triton's kernels, by its interpreter: what a GPU would compute, and where they are refused."""

import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import pytest

from deconstruct import kernels
from deconstruct.kernels import backends

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_kernels_equal_the_reference():
    """In a process of its own: Triton decides when it is imported whether it compiles."""
    pytest.importorskip("triton")
    pytest.importorskip("torch")
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "triton_interpreted.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and done.stdout == "equal\n", done.stderr[-3000:]


def test_what_is_missing_is_told():
    """Without Triton, or a JAX that knows GPUs, the backend is refused with what to install."""
    (triton,) = (b for b in kernels.BACKENDS["prefix_softmax"] if b.name == "triton")
    call = backends.Call("prefix_softmax", "gpu", 2, 6, 4, 2, 1, 64, jnp.bfloat16, False)
    try:
        import jax_triton  # noqa: F401
    except ImportError:
        assert "pip install -r requirements-gpu.txt" in triton.refusal(call)
    assert "no GPU has confirmed it" in triton.reservation(call)
    assert triton.refusal(call._replace(platform="cpu")) == "it is written for a gpu"
