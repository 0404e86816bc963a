"""The peer program from our side of the pipe."""

import dataclasses
import json
import os
import pathlib
import subprocess

from tools.bench.shapes import Shape

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Peer:
    """A running `peer_qwen2` process; a context manager.

    Attributes:
      about: what it says of itself: peer, parameters, threads.
      loss: of its last step.
    """

    def __init__(self, python: str, shape: Shape, *, keep_pages: bool = False):
        """Starts it.

        Args:
          python: a Python that has torch and transformers.
          shape: what it runs.
          keep_pages: whether it gets `host_memory.keep_pages`, as ours does.

        Raises:
          ValueError: it did not start; the message gives the install line.
        """
        request = json.dumps({**dataclasses.asdict(shape), "keep_pages": keep_pages})
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        try:
            self._process = subprocess.Popen(
                [python, "-m", "tools.bench.peer_qwen2", request],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise ValueError(f"--peer_python={python} does not run: {error}") from error
        first = self._process.stdout.readline()
        if not first:
            lines = self._process.communicate()[1].strip().splitlines()
            raise ValueError(
                f"the peer did not start ({lines[-1] if lines else 'no output'}); pip install -r "
                "requirements-peers.txt, or give --peer_python=PATH of a Python that has them"
            )
        self.about = json.loads(first)
        self.loss: float | None = None

    def steps(self, number: int) -> list[float]:
        """Milliseconds of each of so many train steps."""
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        self.loss = answer["loss"]
        return answer["milliseconds"]

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_) -> None:
        self._process.communicate()  # the end of its input ends it
