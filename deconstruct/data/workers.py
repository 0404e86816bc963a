"""Manners of worker processes, the loader's and those of `prepare`."""

import multiprocessing
import multiprocessing.connection
import os
import threading


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
