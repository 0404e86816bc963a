"""One process at a time writes to a directory."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import devices
import pytest

from deconstruct import lock

HOLDER = """
import pathlib, sys, time
from deconstruct import lock

with lock.held(pathlib.Path(sys.argv[1]), busy="busy", wait=False):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def file(tmp_path):
    return tmp_path / ".lock"


@pytest.fixture
def holder(file):
    """Another process that holds the lock."""
    command = [sys.executable, "-c", HOLDER, str(file)]
    env = devices.environment(1)
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_refused_while_it_is_held_and_free_once_its_holder_is_killed(file, holder):
    with (
        pytest.raises(ValueError, match=r"^another one$"),
        lock.held(file, busy="another one", wait=False),
    ):
        raise AssertionError("two at a time")
    holder.kill()
    holder.wait()
    with lock.held(file, busy="another one", wait=False):
        pass


def test_who_waits_says_so(file, holder, monkeypatch, caplog):
    """Only then: it is the holder's end that is waited for."""
    flock = fcntl.flock

    def locked(descriptor, operation):
        if not operation & fcntl.LOCK_NB:
            assert "waiting for it" in caplog.text
            os.kill(holder.pid, signal.SIGTERM)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", locked)
    with lock.held(file, busy="waiting for it", wait=True):
        assert holder.wait() == -signal.SIGTERM
    caplog.clear()
    with lock.held(file, busy="waiting for it", wait=True):
        assert not caplog.records


@pytest.mark.parametrize("wait", [False, True])
def test_a_disk_without_locks_is_a_warning(file, monkeypatch, caplog, wait):
    def unknown(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unknown)
    with lock.held(file, busy="busy", wait=wait):
        assert f"{file} cannot be locked" in caplog.text


def test_the_file_is_open_for_writing(file, monkeypatch):
    """Over NFS a lock of a file that is open for reading alone is refused."""
    modes = []

    def noted(opened, _):
        modes.append(fcntl.fcntl(opened, fcntl.F_GETFL) & os.O_ACCMODE)

    monkeypatch.setattr(fcntl, "flock", noted)
    with lock.held(file, busy="busy", wait=False):
        assert modes == [os.O_WRONLY]
