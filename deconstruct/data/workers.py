"""Manners of worker processes, the loader's and those of `prepare`."""

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import signal
import threading
from collections.abc import Iterator

_SIGNALS = (signal.SIGTERM, signal.SIGINT)  # that may reach all processes of a job


def exit_with_parent() -> None:
    """Ends this process as soon as its parent has ended, however hard; call it in a new worker.

    The kernel's PR_SET_PDEATHSIG would not do: it fires when the *thread* that started the worker
    ends, and Grain starts its workers from threads. The pipe that `multiprocessing` holds open
    between the two closes with the parent's process.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a multiprocessing worker has a parent to follow"

    def follow() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, name="exit-with-parent", daemon=True).start()


@contextlib.contextmanager
def signals_unheard() -> Iterator[None]:
    """Keeps SIGTERM and SIGINT from this thread, and from processes that it starts meanwhile.

    Schedulers send SIGTERM, and a terminal Ctrl-C, to all processes of a job. The one that started
    the others decides what follows, and they end with it. A handler inside a worker would come too
    late: before it is set, a worker imports for seconds.
    """
    start_resource_tracker()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_resource_tracker() -> None:
    """Starts the process by which `multiprocessing` frees what processes leave behind, if need be.

    By itself it would start with the first worker, or lock of tqdm, and let the thread that starts
    it hear signals again; and tell of shared memory and locks that a killed process left, or that
    Grain had no time to free, on stderr behind the last line of a command. It frees what it finds,
    so nobody needs to know.
    """
    before = os.environ.get("PYTHONWARNINGS")
    ignore = "ignore:resource_tracker:UserWarning"
    os.environ["PYTHONWARNINGS"] = ignore if not before else f"{before},{ignore}"
    try:
        multiprocessing.resource_tracker.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before
