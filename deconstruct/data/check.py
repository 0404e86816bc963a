"""Reads every file of a source to its end and says all that is wrong with it; writes nothing.

Where preparing stops at the first fault, this goes on: after a bad row with the next one, after a
file that cannot be read further with the next file.
"""

import dataclasses
import functools
from collections.abc import Sequence

from deconstruct.data import pool, prepared, readers, sets, sources

NAMED_PLACES = 3  # of each kind of fault in a file; the others are counted


@dataclasses.dataclass(frozen=True)
class FaultKind:
    """Faults of one kind in one file.

    Attributes:
      first: the first of them, with its detail.
      places: where the first NAMED_PLACES of them are.
      count: how many there are.
    """

    first: readers.Fault
    places: tuple[str, ...]
    count: int

    def add(self, fault: readers.Fault) -> "FaultKind":
        places = (*self.places, fault.where)[:NAMED_PLACES]
        return FaultKind(self.first, places, self.count + 1)


@dataclasses.dataclass(frozen=True)
class FileReport:
    """What one file holds, up to where it can be read.

    Attributes:
      name: of the file, within the source.
      documents: good documents.
      empty_documents: of these, those of white space alone, which preparing leaves out.
      text_bytes: UTF-8 bytes of the good documents.
      faults: what is wrong, by kind, in the order of their first.
    """

    name: str
    documents: int
    empty_documents: int
    text_bytes: int
    faults: tuple[FaultKind, ...]


def run(
    source: str,
    choice: Sequence[str] | None = None,
    num_processes: int | None = None,
    *,
    progress: bool = True,
) -> list[FileReport]:
    """Checks all files of `source`.

    Args:
      source: see `sources`.
      choice: the sets that are going to be chosen; then each row must name its own.
      num_processes: processes at a time; None is one per core.
      progress: whether to show progress on stderr.

    Raises:
      ValueError: there is nothing to check, or no such set.
    """
    files = sources.list_files(prepared.local_path(source, "source"), progress)
    choice = None if choice is None else sets.checked(choice)
    description = f"checking {len(files)} file(s)" if progress else None
    return pool.run(functools.partial(check_file, choice=choice), files, num_processes, description)


def check_file(
    file: sources.SourceFile,
    on_read: readers.OnRead = lambda num_bytes: None,
    *,
    choice: Sequence[str] | None = None,
) -> FileReport:
    """Reads one file to its end, or as far as it can be read."""
    documents = empty = text_bytes = 0
    kinds: dict[str, FaultKind] = {}
    for found in readers.survey(file.path, file.format, on_read):
        fault = found if isinstance(found, readers.Fault) else sets.fault(found, choice)
        if fault is not None:
            kinds[fault.what] = kinds.get(fault.what, FaultKind(fault, (), 0)).add(fault)
            continue
        documents += 1
        empty += not found.text.strip()
        text_bytes += len(found.text.encode())
    return FileReport(file.name, documents, empty, text_bytes, tuple(kinds.values()))


def summary(reports: Sequence[FileReport]) -> str:
    """A table of what is wrong, if anything is, and a line of counts."""
    bad = [report for report in reports if report.faults]
    num_faults = sum(kind.count for report in bad for kind in report.faults)
    verdict = f"{num_faults:,} fault(s) in {len(bad):,} of" if bad else "nothing is wrong with"
    counts = (
        f"{verdict} {len(reports):,} file(s), which hold "
        f"{sum(report.documents for report in reports):,} good documents "
        f"({sum(report.empty_documents for report in reports):,} of them empty), "
        f"{sum(report.text_bytes for report in reports):,} bytes of text"
    )
    rows = [
        (report.name, _place(kind), _what(kind.first), kind.first.remedy)
        for report in bad
        for kind in report.faults
    ]
    return "\n".join(
        [*_table([("file", "where", "what", "remedy"), *rows]), counts] if bad else [counts]
    )


def _place(kind: FaultKind) -> str:
    """Such as `line 3, 7, 9 and 41 more`."""
    first, *others = kind.places
    numbers = [place.rpartition(" ")[2] for place in others]
    more = kind.count - len(kind.places)
    return ", ".join([first, *numbers]) + (f" and {more:,} more" if more else "")


def _what(fault: readers.Fault) -> str:
    return f"{fault.what} ({fault.detail})" if fault.detail else fault.what


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
