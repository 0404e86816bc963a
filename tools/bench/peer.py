"""Peer programs from our side of the pipe."""

import dataclasses
import json
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Sequence

from deconstruct.evaluate.tasks import Pair
from tools.bench.compare import Contender
from tools.bench.shapes import Shape

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Peer:
    """A running program that answers each line with one of JSON; a context manager.

    Attributes:
      about: its first line, which it gives unasked.
    """

    def __init__(self, python: str, program: str, request: dict, requirements: tuple[str, ...]):
        """Starts it.

        Args:
          python: a Python that has what the program imports.
          program: a module of `tools.bench`.
          request: its argument.
          requirements: the files that name what it imports.

        Raises:
          ValueError: it did not start; the message gives the install line.
        """
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        # A pipe that nobody reads would fill up.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in __exit__)
        try:
            self._process = subprocess.Popen(
                [python, "-m", f"tools.bench.{program}", json.dumps(request)],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
        except OSError as error:
            self._errors.close()
            raise ValueError(f"--peer_python={python} does not run: {error}") from error
        first = self._process.stdout.readline()
        if not first:
            last_error = self._last_error()
            self.__exit__()
            install = " ".join(f"-r {name}" for name in requirements)
            raise ValueError(
                f"the peer did not start ({last_error}); pip install {install}, or give "
                "--peer_python=PATH of a Python that has them"
            )
        self.about = json.loads(first)

    def ask(self, line: str) -> dict:
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the peer ended: {self._last_error()}"
        return json.loads(answer)

    def _last_error(self) -> str:
        """Of a process that has ended."""
        self._process.wait()
        self._errors.seek(0)
        return (self._errors.read().strip().splitlines() or ["no output"])[-1]

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self._process.communicate()  # the end of its input ends it
        self._errors.close()


class TrainPeer(Peer):
    """`peer_qwen2`.

    Attributes:
      loss: of its last step.
    """

    def __init__(
        self, python: str, shape: Shape, *, keep_pages: bool = False, compiled: bool = False
    ):
        """Args:
        python: a Python that has torch and transformers.
        shape: what it runs.
        keep_pages: whether it gets `host_memory.keep_pages`, as ours does.
        compiled: whether it gets torch.compile.
        """
        request = {
            "shape": dataclasses.asdict(shape),
            "keep_pages": keep_pages,
            "compiled": compiled,
        }
        super().__init__(python, "peer_qwen2", request, ("requirements-peers.txt",))
        self.loss: float | None = None

    def steps(self, number: int) -> list[float]:
        """Milliseconds of each of so many train steps."""
        answer = self.ask(str(number))
        self.loss = answer["loss"]
        return answer["milliseconds"]


class EvaluatePeer(Peer):
    """`peer_lm_eval`.

    Attributes:
      log_likelihoods: of its last run's requests.
    """

    def __init__(self, python: str, shape: Shape, tokenizer: pathlib.Path, weights: pathlib.Path):
        """Args:
        python: a Python that has torch, transformers and lm-eval.
        shape: its model's.
        tokenizer: a tokenizer.json.
        weights: file to write its weights to, .npz.
        """
        request = {
            "shape": dataclasses.asdict(shape),
            "tokenizer": str(tokenizer),
            "weights": str(weights),
        }
        requirements = ("requirements-peers.txt", "requirements-evaluate.txt")
        super().__init__(python, "peer_lm_eval", request, requirements)
        self.log_likelihoods: list[float] = []

    def scoring(self, requests: Sequence[Pair], batch_size: int) -> Contender:
        """What scores them so many times, in batches of that many requests."""

        def run(runs: int) -> list[float]:
            question = {"requests": requests, "batch_size": batch_size, "runs": runs}
            answer = self.ask(json.dumps(question))
            self.log_likelihoods = answer["log_likelihoods"]
            return answer["milliseconds"]

        return run
