"""What `tools.bench data` times, in a process of its own, so that its cores and threads can be set.

Its argument is a `Request` as JSON. It answers one line when it is ready and then, for each line of
its input, does the work once and answers with the seconds, the processor seconds of all its
threads, and the peak of its resident memory so far.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

from deconstruct.data import sources, units

BARE_DOCUMENTS = 1024  # that the bare library encodes at a time


@dataclasses.dataclass(frozen=True)
class Request:
    """What to time.

    Attributes:
      side: a key of SIDES.
      files: .jsonl.zst files.
      tokenizer: path of a tokenizer.json.
      max_len: of the rows, where there are any.
      cores: the cores it may use.
      warm_up: a file that is prepared before the rest, so that imports are not measured.
    """

    side: str
    files: tuple[str, ...]
    tokenizer: str
    max_len: int
    cores: tuple[int, ...]
    warm_up: str | None = None


def main() -> None:
    request = Request(**json.loads(sys.argv[1]))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, request.cores)
    if request.warm_up is not None:
        prepare_files([request.warm_up], request)
    work = SIDES[request.side](request)
    print(json.dumps({"peak_mb": peak_mb()}), flush=True)
    for _ in sys.stdin:
        start, used = time.perf_counter(), time.process_time()
        result = work()
        answer = {
            "seconds": time.perf_counter() - start,
            "cpu_seconds": time.process_time() - used,
            "peak_mb": peak_mb(),
        }
        del result
        print(json.dumps(answer), flush=True)


def units_side(request: Request) -> Callable[[], None]:
    """Each file as a unit of `prepare`, one after another, as one of its processes does them."""
    return lambda: prepare_files(request.files, request)


def prepare_files(files: Sequence[str], request: Request) -> None:
    described = [
        sources.SourceFile(path, os.path.basename(path), ".jsonl.zst", os.path.getsize(path))
        for path in files
    ]
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder)
        shutil.copyfile(request.tokenizer, output / units.prepared.TOKENIZER_FILE)
        (output / units.prepared.UNITS_FOLDER).mkdir()
        for unit in units.plan_units(
            described, unit_bytes=1, output=folder, max_len=request.max_len, validation_share=0.02
        ):
            units.prepare_unit(unit)


def bare_side(request: Request, fast: bool = False) -> Callable[[], list[list[int]]]:
    """The library alone: texts that lie in memory, to lists of ids that stay there."""
    import tokenizers

    library = tokenizers.Tokenizer.from_file(request.tokenizer)
    encode = library.encode_batch_fast if fast else library.encode_batch
    texts = [
        document.text
        for path in request.files
        for document in units.readers.read(path, ".jsonl.zst", lambda num_bytes: None)
    ]

    def work() -> list[list[int]]:
        ids = []
        for first in range(0, len(texts), BARE_DOCUMENTS):
            batch = texts[first : first + BARE_DOCUMENTS]
            ids += [encoding.ids for encoding in encode(batch, add_special_tokens=False)]
        return ids

    return work


SIDES = {
    "units": units_side,
    "bare": bare_side,
    "bare_fast": lambda request: bare_side(request, fast=True),
}


def peak_mb() -> float | None:
    """Peak resident memory of this process, MB; None where the system does not tell.

    From /proc: what `resource` tells of a process begins with the peak of the one that started it.
    """
    try:
        with open("/proc/self/status") as status:
            lines = [line for line in status if line.startswith("VmHWM:")]
    except OSError:
        return None
    return int(lines[0].split()[1]) / 1024


if __name__ == "__main__":
    main()
