"""The list of a step's files, by which a torn or altered step is known before it is read.

Orbax itself reads a flipped byte of array data without a word, and meets a missing data file in
the midst of a restore. So each step carries `files.json`, written just before its commit: every
file of its items with its size in bytes and, on a disk, its CRC-32. A bucket checks contents by
itself and would have to be downloaded again, so there the CRC is null and only sizes are compared.
"""

import concurrent.futures
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator

from etils import epath

FILE_LIST = "files.json"
_READ_BYTES = 1 << 22


def write_file_list(step_directory: epath.Path) -> None:
    """Writes `files.json`: {path inside the step: [bytes, CRC-32 or null]} for all its items."""
    items = (entry for entry in step_directory.iterdir() if entry.is_dir())
    files = sorted(path for item in items for path in _walk(item))
    names = [str(path.relative_to(step_directory)) for path in files]
    with concurrent.futures.ThreadPoolExecutor() as threads:
        facts = threads.map(lambda path: [path.stat().length, _crc(path)], files)
        record = dict(zip(names, facts, strict=True))
    (step_directory / FILE_LIST).write_text(json.dumps(record, indent=0))


def check_files(step_directory: epath.Path, items: Iterable[str]) -> None:
    """ValueError unless the files of these items are all there, with their sizes and contents."""
    try:
        listed = json.loads((step_directory / FILE_LIST).read_text())
        files = {name: fact for name, fact in listed.items() if name.split("/")[0] in set(items)}
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"its {FILE_LIST} does not read: {error}") from error
    with concurrent.futures.ThreadPoolExecutor() as threads:
        faults = threads.map(lambda name: _fault(step_directory / name, *files[name]), files)
        for name, fault in zip(files, faults, strict=True):
            if fault:
                raise ValueError(f"its file {name} {fault}")


def files_sha256(step_directory: epath.Path) -> str:
    """A hash of `files.json`: another one where a file of the step has other contents."""
    return hashlib.sha256((step_directory / FILE_LIST).read_bytes()).hexdigest()


def _walk(directory: epath.Path) -> Iterator[epath.Path]:
    for entry in directory.iterdir():
        if entry.is_dir():
            yield from _walk(entry)
        else:
            yield entry


def _fault(path: epath.Path, size: int, crc: int | None) -> str | None:
    """What is wrong with a file, None when nothing is."""
    try:
        if not path.exists():
            return "is missing"
        if (found := path.stat().length) != size:
            return f"has {found} bytes instead of {size}"
        if crc is not None and _crc(path) != crc:
            return f"has other contents than were written (CRC-32 is not {crc})"
    except OSError as error:
        return f"does not read: {error}"
    return None


def _crc(path: epath.Path) -> int | None:
    if "://" in str(path):
        return None
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            crc = zlib.crc32(block, crc)
    return crc
