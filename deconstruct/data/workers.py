"""Manners of worker processes, the loader's and those of `prepare`."""

import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import signal
import threading

SIGNALS = (signal.SIGTERM, signal.SIGINT)  # that may reach all processes of a job


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


def start_resource_tracker() -> None:
    """Starts the process by which `multiprocessing` frees what processes leave behind, if need be.

    By itself it would start with the first worker, and tell of shared memory that a killed worker
    left, or that Grain's thread had no time to free, on stderr behind the last line of a run. What
    it finds it frees, so nobody needs to know.
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


def hear_no_signals() -> None:
    """Keeps SIGTERM and SIGINT from this thread, and from processes that are started from it.

    Schedulers send SIGTERM, and a terminal Ctrl-C, to all processes of a job. The one that started
    the others decides what follows, and they end with it. A handler inside a worker would come too
    late: before it is set, a worker imports for seconds.

    Call `start_resource_tracker` before: its start lets a thread hear signals again.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
