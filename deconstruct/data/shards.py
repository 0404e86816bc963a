"""Records of shards by number, with a bounded number of files open.

Rows are read in random order, so that a large corpus would soon have every shard open. An open one
holds its index in memory, 8 bytes a row.
"""

import errno
import functools
import os
import pathlib
from collections.abc import Sequence

from deconstruct.data import prepared

MOST_OPEN = 512  # of a process; below the limit of 1,024 files that many systems set
_OPTIONS = "readahead_buffer_size:0"  # records are read in no order
_BUFFER_BYTES = 1 << 15


def read_records(path: pathlib.Path, numbers: Sequence[int]) -> list[bytes]:
    """Records of a shard by number; many at once take little longer than one.

    Raises:
      ValueError: the shard is damaged, or cannot be read for now; says which.
    """
    try:
        return _open(path).read(numbers)
    except RuntimeError as error:  # ArrayRecord raises nothing else, whatever failed
        raise _explained(path, error) from error


@functools.lru_cache(maxsize=MOST_OPEN)
def _open(path: pathlib.Path):
    from array_record.python import array_record_module

    options = {"options": _OPTIONS, "file_reader_buffer_size": _BUFFER_BYTES}
    reader = array_record_module.ArrayRecordReader(os.fspath(path), **options)
    if not reader.ok():
        reader.read([0])  # raises what failed; what is raised here is not kept
    return reader


def _explained(path: pathlib.Path, error: RuntimeError) -> ValueError:
    """What failed: the disk, if the file does not even read as bytes, or else the file."""
    try:
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 20):
                pass
    except OSError as failure:
        remedy = f"see that its disk answers and run the same command again ({error})"
        if failure.errno in (errno.ENOENT, errno.ENOTDIR):
            remedy = f"run {prepared.COMMAND} again, it makes what is missing"
        elif failure.errno in (errno.EMFILE, errno.ENFILE):
            remedy = "raise the limit of open files (ulimit -n)"
        return ValueError(f"{path} cannot be read ({failure.strerror}); {remedy}")
    return ValueError(f"{path} is damaged ({error}); remove it and run {prepared.COMMAND} again")
