"""Speed and memory of the unit of preparation, measured in processes of their own."""

import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Sequence

from tools.bench import compare, corpus
from tools.bench.data_worker import Request

ROOT = pathlib.Path(__file__).resolve().parents[2]
MEGABYTE = 1e6


class Workers:
    """Processes of `data_worker` that work at the same time; a context manager.

    Attributes:
      answers: of each round of work, what each process said.
    """

    def __init__(self, requests: Sequence[Request], threads: int):
        """Starts them.

        Args:
          requests: one a process.
          threads: that the tokenizer has in each; 1 is as the processes of `prepare` have it.
        """
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false",
            "RAYON_NUM_THREADS": str(threads),
        }
        self._processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tools.bench.data_worker",
                    json.dumps(dataclasses.asdict(request)),
                ],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for request in requests
        ]
        self.ready = self._hear()
        self.answers: list[list[dict]] = []

    def work(self, number: int) -> list[float]:
        """Milliseconds of each of so many rounds, until the last process is done."""
        for _ in range(number):
            for process in self._processes:
                process.stdin.write("go\n")
                process.stdin.flush()
            self.answers.append(self._hear())
        return [
            1e3 * max(answer["seconds"] for answer in answers) for answers in self.answers[-number:]
        ]

    def cpu_seconds(self) -> list[float]:
        """Processor seconds of each round, of all processes."""
        return [sum(answer["cpu_seconds"] for answer in answers) for answers in self.answers]

    def _hear(self) -> list[dict]:
        lines = [process.stdout.readline() for process in self._processes]
        assert all(lines), "a process of tools.bench.data_worker ended; its error is above"
        return [json.loads(line) for line in lines]

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_) -> None:
        for process in self._processes:
            process.communicate()  # the end of its input ends it


def speed(
    files: Sequence[str], tokenizer: str, *, max_len: int, cores: int, one_unit: bool, rounds: int
) -> dict:
    """`prepare`'s units against the bare library on the same cores: what a line says of them.

    Args:
      files: .jsonl.zst files.
      tokenizer: path of a tokenizer.json.
      max_len: of the rows.
      cores: how many cores each side may use.
      one_unit: ours is one process with the tokenizer's threads, as for a source of one file; else
        it is a process a core, which share the files.
      rounds: that count.
    """
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    common = {"tokenizer": tokenizer, "max_len": max_len, "cores": tuple(usable[:cores])}
    processes = 1 if one_unit else min(cores, len(files))
    shares = [tuple(files[i::processes]) for i in range(processes)]
    requests = [Request("units", share, **common) for share in shares]
    with (
        Workers(requests, cores // processes) as own,
        Workers([Request("bare", tuple(files), **common)], cores) as bare,
        Workers([Request("bare_fast", tuple(files), **common)], cores) as fast,
    ):
        sides = {"ours": own, "bare": bare, "bare_fast": fast}
        times = compare.alternate(
            {name: side.work for name, side in sides.items()}, rounds=rounds, runs=1
        )
        cpu = {name: side.cpu_seconds()[1:] for name, side in sides.items()}
    return {
        "processes": processes,
        "ratio": round(compare.ratio_of_medians(times, "ours", "bare"), 3),
        "cpu_ratio": round(compare.ratio_of_medians(cpu, "ours", "bare"), 3),
        "ratio_to_fast": round(compare.ratio_of_medians(times, "ours", "bare_fast"), 3),
        **{f"{name}_seconds": round(statistics.median(ms) / 1e3, 3) for name, ms in times.items()},
        "rounds": rounds,
    }


def memory(texts: Sequence[str], folder: pathlib.Path, tokenizer: str, *, max_len: int) -> dict:
    """Peak resident memory and processor seconds of one unit of `texts`, in a process of its own.

    `added_mb` is above what the process had after its imports and a unit of one short document.
    """
    (file,) = corpus.write_files(folder / "texts", texts, 1)
    (small,) = corpus.write_files(folder / "small", ["a short document"], 1)
    cores = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    request = Request("units", (file,), tokenizer, max_len, cores, warm_up=small)
    with Workers([request], threads=1) as worker:
        worker.work(1)
    ((answer,),) = worker.answers
    before, peak = worker.ready[0]["peak_mb"], answer["peak_mb"]
    return {
        "text_mb": round(corpus.num_bytes(texts) / MEGABYTE, 3),
        "cpu_seconds": round(answer["cpu_seconds"], 3),
        "peak_mb": peak and round(peak),
        "added_mb": peak and round(peak - before),
    }
