"""Batches read ahead by a thread, and an end to waiting for them.

Grain waits for ever for a read that never returns, as of a network disk that is gone, and nothing
ends a thread inside such a read. So the thread that reads is one that may be left behind, and who
waits for it looks at the time.
"""

import contextlib
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable

import grain
import numpy as np
from absl import logging

from deconstruct.data import packing, workers

SAY_AFTER = 60.0  # seconds without a batch until a warning says what is waited for
GIVE_UP_AFTER = 600.0  # seconds without a batch until the run ends
LOOK_EVERY = 0.2  # seconds between looks at whether it is still to be waited
CLOSE_WITHIN = 10.0  # seconds in which workers may end by themselves
_WORKER_NAME = "grain-process-prefetch"  # as Grain calls its processes
_KILLED = "Worker process was terminated unexpectedly"  # as Grain says it


class ReadAhead:
    """The batches of a pipeline without end, between entering this context and leaving it.

    Args:
      pipeline: gives batches; iterated, and its workers started, by a thread of its own.
      num_workers: processes that the pipeline starts.
      path: what it reads, for messages.
    """

    def __init__(self, pipeline: grain.IterDataset, *, num_workers: int, path: str):
        self._pipeline, self._num_workers, self._path = pipeline, num_workers, path
        # Workers have buffers of their own.
        self._ready: queue.Queue = queue.Queue(maxsize=1 if num_workers else 2)
        self._leaving = threading.Event()
        self._patience = CLOSE_WITHIN
        self._thread = threading.Thread(target=self._read, name="read-ahead", daemon=True)

    def __enter__(self) -> "ReadAhead":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._leaving.set()
        while not self._ready.empty():
            self._ready.get_nowait()  # makes room for the batch that the thread may hold
        self._thread.join(self._patience)
        if self._thread.is_alive():
            self._kill_workers()
            self._thread.join(1)

    def next(self, step: int, stopped: Callable[[], bool]) -> packing.Batch | None:
        """The next batch, which messages call that of `step`; None once `stopped` while waiting.

        Raises:
          ValueError: it did not come within GIVE_UP_AFTER seconds, a worker was killed, or what
            reading raised.
        """
        begin, said = time.monotonic(), False
        missing = f"the batch of step {step} has not come"
        while True:
            with contextlib.suppress(queue.Empty):
                found = self._ready.get(timeout=LOOK_EVERY)
                break
            if stopped():
                return None
            waited = time.monotonic() - begin
            if waited > GIVE_UP_AFTER:
                stage = self._stage()
                self._kill_workers()
                self._patience = 1.0
                raise ValueError(
                    f"{missing} for {GIVE_UP_AFTER:.0f} s: waited for {stage}; see that its disk "
                    "answers and run the same command again to go on"
                )
            if waited > SAY_AFTER and not said:
                said = True
                logging.warning(
                    "%s for %.0f s: waiting for %s; this run ends if it takes %.0f s",
                    missing,
                    SAY_AFTER,
                    self._stage(),
                    GIVE_UP_AFTER,
                )
        if isinstance(found, Exception):
            raise found
        return found

    def _read(self) -> None:
        """Hands over batches, or the error that ends them."""
        with workers.signals_unheard():
            iterator = iter(self._pipeline)
            try:
                for batch in iterator:
                    # A worker's arrays live in memory shared with it; these are the caller's own.
                    self._ready.put(packing.Batch(*(np.array(array) for array in batch)))
                    if self._leaving.is_set():
                        break
            except Exception as error:
                self._ready.put(_explained(error))
            finally:
                iterator.close()

    def _stage(self) -> str:
        if not self._num_workers:
            return f"the thread that reads {self._path}"
        pids = sorted(worker.pid for worker in _living_workers())
        return f"the loader processes {', '.join(map(str, pids))}, which read {self._path}"

    def _kill_workers(self) -> None:
        """Ends processes that do not end when told: they are inside a read."""
        for worker in _living_workers() if self._num_workers else ():
            worker.kill()


def _living_workers() -> list[multiprocessing.Process]:
    """The loader processes of this process."""
    children = multiprocessing.active_children()
    return [child for child in children if child.name.startswith(_WORKER_NAME)]


def _explained(error: Exception) -> Exception:
    """The error, or a ValueError in its place where it is no bug of ours."""
    if not (isinstance(error, RuntimeError) and str(error).startswith(_KILLED)):
        return error
    killed = ValueError(
        "a loader process was killed (out of memory?); run the same command again to go on, with a "
        "smaller data.num_workers"
    )
    killed.__cause__ = error
    return killed
