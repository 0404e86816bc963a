"""A command in a session of its own, whose processes can all be found: none may outlive it."""

import os
import pathlib
import subprocess
import time
from collections.abc import Callable

import devices
import tiny_run


class Session:
    """A started command, what it says, and the processes that it starts."""

    def __init__(self, command: list, log: pathlib.Path):
        log.mkdir()
        self.output, self.errors = log / "stdout", log / "stderr"
        with self.output.open("w") as output, self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                list(map(str, command)),
                cwd=tiny_run.ROOT,
                env=devices.environment(1) | {"PYTHONUNBUFFERED": "1"},
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_) -> None:
        for pid in self.members():
            os.kill(pid, 9)
        self.process.wait()

    def members(self) -> list[int]:
        """The ids of its processes that have not ended; also of those whose parent has."""
        found = [
            int(entry.name) for entry in pathlib.Path("/proc").iterdir() if entry.name.isdigit()
        ]
        return [pid for pid in found if self._is_member(pid)]

    def workers(self) -> list[int]:
        """Those that multiprocessing started to work."""
        return [pid for pid in self.members() if b"spawn_main" in self._command(pid)]

    def wait_until(self, reached: Callable[[], bool], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not reached():
            assert self.process.poll() is None, self.errors.read_text()[-2000:]
            assert time.monotonic() < deadline, self.errors.read_text()[-2000:]
            time.sleep(0.005)

    def signal(self, number: int) -> None:
        """To all of its processes, as schedulers and terminals do."""
        os.killpg(self.process.pid, number)

    def ends(self, seconds: float) -> tuple[int, list[str]]:
        """(exit status, lines of stderr), once it has ended in time and left no process behind."""
        status = self.process.wait(seconds)
        deadline = time.monotonic() + 10
        while self.members() and time.monotonic() < deadline:
            time.sleep(0.05)
        commands = [self._command(pid) for pid in self.members()]
        assert not commands, commands
        return status, self.errors.read_text().splitlines()

    def _is_member(self, pid: int) -> bool:
        try:
            stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False
        state, _, _, session = stat.rpartition(")")[2].split()[:4]
        return int(session) == self.process.pid and state != "Z"

    @staticmethod
    def _command(pid: int) -> bytes:
        try:
            return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return b""
