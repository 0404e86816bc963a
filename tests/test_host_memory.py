"""Page faults of memory that is taken, freed and taken again."""

import ctypes
import subprocess
import sys

import pytest

from deconstruct import host_memory

FAULTS = """
import resource, sys
from deconstruct import host_memory
if "keep" in sys.argv:
    assert host_memory.keep_pages()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        bytearray(b"1") * (64 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_memory_that_was_freed_is_not_faulted_in_again():
    def run(*args):
        command = [sys.executable, "-c", FAULTS, *args]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("this C library has no mallopt")
    assert run() > 4 * (64 << 20) // 4096 // 2  # else this machine shows nothing
    assert run("keep") < 100


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert host_memory.keep_pages() is False
    monkeypatch.setattr(sys, "platform", "darwin")
    assert host_memory.keep_pages() is False
