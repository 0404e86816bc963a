"""One process at a time, by a lock that the kernel frees when its holder ends, however hard."""

import contextlib
import fcntl
import pathlib
from collections.abc import Iterator

from absl import logging


@contextlib.contextmanager
def held(path: pathlib.Path, *, busy: str, wait: bool) -> Iterator[None]:
    """Holds the lock of a file, which is made and stays.

    Where the disk knows no locks there is a warning, and none is held; some network disks keep
    them for each machine alone.

    Args:
      path: the file.
      busy: what is said where another process holds it.
      wait: whether to say so in a warning and wait, or in a ValueError.

    Raises:
      ValueError: `busy`.
      OSError: the file cannot be written.
    """
    with open(path, "a") as file:  # over NFS only a file open for writing can be locked
        try:
            _lock(file, busy, wait)
        except OSError as error:
            logging.warning("%s cannot be locked (%s): use it by one process alone", path, error)
        yield


def _lock(file, busy: str, wait: bool) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        if not wait:
            raise ValueError(busy) from error
        logging.warning("%s", busy)
        fcntl.flock(file, fcntl.LOCK_EX)
