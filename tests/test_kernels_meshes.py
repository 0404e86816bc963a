"""The ops under a mesh of 8 devices equal one device, and send no more than they must."""

import os
import pathlib
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_meshes_equal_one_device_and_sum_no_maps():
    """Left to the compiler, the gradient of fixed maps, (H, T, T), would be summed over devices."""
    script = pathlib.Path(__file__).with_name("kernels_on_meshes.py")
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    environment = os.environ | flags | {"PYTHONPATH": str(script.parents[1])}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0 and done.stdout == "equal\n", done.stderr[-3000:]
