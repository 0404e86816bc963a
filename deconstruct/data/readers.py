"""One file to its documents, per format, and what is wrong in it, by file and line.

Policy. Unless told otherwise `read` skips nothing: JSON that does not parse, a row without `text`,
a `text` that is null or not a string, bytes that are not UTF-8, a compressed file that ends too
early, a file without any row, and one that is no data at all (a pointer, a web page, another
encoding) are each a ValueError. `survey` goes on after a bad row and yields what is wrong among the
documents. Lines are separated by newlines alone (a text may hold U+2028); blank lines between JSON
rows are not rows. A .txt file is one document. Documents without anything but white space are
yielded like others; `units` counts and leaves them out.
"""

import ast
import io
import json
import os
import pathlib
import pydoc_data.topics
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

TEXT = "text"
META = "meta"  # of a row, where SlimPajama keeps the name of the set that it is from
SET_NAME = "redpajama_set_name"
_CHUNK_BYTES = 1 << 20

OnRead = Callable[[int], None]  # told the number of input bytes just read


class Document(NamedTuple):
    """A text, the string whose hash decides whether it is held out, its set and its place."""

    text: str
    key: str
    set_name: str | None = None
    where: str = ""


class Fault(NamedTuple):
    """Something wrong in a file.

    Attributes:
      what: in words that all faults of the kind share.
      remedy: what to do about it.
      where: the row (`line 3`) or frame; empty for the file as a whole.
      detail: what the library said.
      ends_file: whether nothing of the file can be read after it.
    """

    what: str
    remedy: str
    where: str = ""
    detail: str = ""
    ends_file: bool = False

    def message(self, path: str) -> str:
        """One line that names the file."""
        detail = ", ".join(filter(None, [self.where if self.ends_file else "", self.detail]))
        place = f"{path}" if self.ends_file else f"{path}, {self.where}:"
        return f"{place} {self.what}{f' ({detail})' if detail else ''}; {self.remedy}"


OnFault = Callable[[str, Fault], None]  # given the file; raises, or lets reading go on


class Row(NamedTuple):
    """A row as it was read: `text` may be anything. A key of None stands for the text."""

    where: str
    text: object
    key: str | None = None
    set_name: str | None = None


class _UnreadableError(Exception):
    """A fault that ends its file."""

    def __init__(self, what: str, remedy: str, where: str = "", detail: object = ""):
        super().__init__(what)
        self.fault = Fault(what, remedy, where, " ".join(str(detail).split()), ends_file=True)


_AGAIN = "fetch it again"
_MEND = "mend or remove the row"
_TO_UTF8 = "convert the file to UTF-8 (iconv), or remove the row"

# How files begin that are no data, or not in the form that their names say.
_FOREIGN = (
    (b"version https://git-lfs", "is a Git LFS pointer, not data", "run `git lfs pull`"),
    (b"\x1f\x8b", "is gzip data", "unpack it (gunzip), and compress it with zstd if at all"),
    (b"BZh", "is bzip2 data", "unpack it (bunzip2), and compress it with zstd if at all"),
    (b"\xfd7zXZ\0", "is xz data", "unpack it (unxz), and compress it with zstd if at all"),
    (b"PK\x03\x04", "is a zip archive", "unpack it"),
    (b"\xff\xfe", "is UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "is UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8"),
)
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def stop(path: str, fault: Fault) -> None:
    """Raises the ValueError that `fault` of the file at `path` is."""
    raise ValueError(fault.message(path))


def skip(path: str, fault: Fault) -> None:
    """Goes on, and says nothing: for those who read what another reads, too."""


def read(path: str, format: str, on_read: OnRead, on_fault: OnFault = stop) -> Iterator[Document]:
    """The documents of the file (or folder) at `path`, in order. `format` is a key of READERS.

    Raises:
      ValueError: unless `on_fault` does something else, the first bad row, with file and line, or a
        file that is empty or cut short.
    """
    for found in survey(path, format, on_read):
        if isinstance(found, Fault):
            on_fault(path, found)
        else:
            yield found


def survey(path: str, format: str, on_read: OnRead) -> Iterator[Document | Fault]:
    """Like `read`, but goes on after a bad row: documents and faults in the order of the file."""
    empty = True
    try:
        for row in READERS[format](path, on_read):
            empty = False
            yield row if isinstance(row, Fault) else _document(row)
        if empty:
            raise _UnreadableError("holds no row", "fetch it again or remove it")
    except _UnreadableError as error:
        yield error.fault
    except OSError as error:
        yield Fault("cannot be read", "see to its disk or rights", "", str(error), ends_file=True)


def _document(row: Row) -> Document | Fault:
    if not isinstance(row.text, str):
        found = "null" if row.text is None else f"a {type(row.text).__name__}"
        return Fault(f"'{TEXT}' is {found}, not a string", _MEND, row.where)
    try:
        row.text.encode()
    except UnicodeEncodeError:
        what = f"'{TEXT}' holds half a surrogate pair, which is no character"
        return Fault(what, _MEND, row.where)
    return Document(row.text, row.text if row.key is None else row.key, row.set_name, row.where)


def _set_name(meta: object) -> str | None:
    """The set that a row's `meta` names, an object or the JSON of one; None where it names none."""
    if isinstance(meta, str):
        try:
            meta = json.loads(meta)
        except ValueError:
            return None
    name = meta.get(SET_NAME) if isinstance(meta, dict) else None
    return name if isinstance(name, str) else None


class _ObservedFile(io.FileIO):
    """A file that tells how many bytes were read from it."""

    def __init__(self, path: str, on_read: OnRead):
        super().__init__(path, "rb")
        self._on_read = on_read

    def readinto(self, buffer) -> int:
        count = super().readinto(buffer)
        self._on_read(count)
        return count


def _open(path: str, on_read: OnRead) -> io.BufferedReader:
    file = io.BufferedReader(_ObservedFile(path, on_read), _CHUNK_BYTES)
    try:
        _refuse_foreign(path, file.peek(len(_FOREIGN[0][0]))[:256])
    except _UnreadableError:
        file.close()
        raise
    return file


def _refuse_foreign(path: str, start: bytes) -> None:
    """Raises for a file whose first bytes `start` say that it is not what its name says."""
    if not start:
        raise _UnreadableError("is empty (0 bytes)", "fetch it again or remove it")
    for signature, what, remedy in _FOREIGN:
        if start.startswith(signature):
            raise _UnreadableError(what, remedy)
    plain = path.endswith((".jsonl", ".txt"))
    if plain and start.startswith(_ZSTD_MAGIC):
        raise _UnreadableError("is zstd data", "unpack it, or let the name of JSON end in .zst")
    if plain and start.count(0) * 4 >= len(start):
        raise _UnreadableError("is UTF-16 or UTF-32 text", "convert it to UTF-8 (iconv)")
    if start.lstrip().startswith(b"<") and not path.endswith(".txt"):
        raise _UnreadableError("is a web page or XML, not data", "fetch it again, logged in")


def _read_whole(path: str, on_read: OnRead) -> bytes:
    with _open(path, on_read) as file:
        return b"".join(iter(lambda: file.read(_CHUNK_BYTES), b""))


class _ZstdReader(io.RawIOBase):
    """Decompresses frames one after another; a last frame that does not end is an error.

    The library's own reader takes a file that is cut short for a short file.
    """

    def __init__(self, file: io.BufferedReader):
        import zstandard

        self._file = file
        self._error = zstandard.ZstdError
        self._new_frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
        self._frame = self._new_frame()
        self._inside_frame = False
        self._compressed = b""
        self._plain = memoryview(b"")
        self._number = 1  # of the frame

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._plain:
            if not self._compressed:
                self._compressed = self._file.read(_CHUNK_BYTES)
            if not self._compressed:
                if self._inside_frame:
                    what = "is cut short: its last zstd frame does not end"
                    raise _UnreadableError(what, _AGAIN, f"frame {self._number}")
                return 0
            self._decompress()
        count = min(len(buffer), len(self._plain))
        buffer[:count] = self._plain[:count]
        self._plain = self._plain[count:]
        return count

    def _decompress(self) -> None:
        self._inside_frame = True
        try:
            self._plain = memoryview(self._frame.decompress(self._compressed))
        except self._error as error:
            what = "is broken or not zstd data"
            raise _UnreadableError(what, _AGAIN, f"frame {self._number}", error) from error
        self._compressed = b""
        if self._frame.eof:
            self._compressed = self._frame.unused_data
            self._frame = self._new_frame()
            self._inside_frame = False
            self._number += 1


def _read_jsonl(path: str, on_read: OnRead) -> Iterator[Row | Fault]:
    with _open(path, on_read) as file:
        yield from _json_rows(file)


def _read_jsonl_zst(path: str, on_read: OnRead) -> Iterator[Row | Fault]:
    with _open(path, on_read) as file:
        yield from _json_rows(io.BufferedReader(_ZstdReader(file), _CHUNK_BYTES))


def _json_rows(lines: Iterator[bytes]) -> Iterator[Row | Fault]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _json_row(f"line {number}", line, "utf-8-sig" if number == 1 else "utf-8")


def _json_row(where: str, line: bytes, encoding: str) -> Row | Fault:
    try:
        row = json.loads(line.decode(encoding))
    except UnicodeDecodeError as error:
        return Fault("not UTF-8", _TO_UTF8, where, error.reason)
    except (ValueError, RecursionError) as error:
        return Fault("not a whole JSON value", _MEND, where, str(error))
    if not isinstance(row, dict) or TEXT not in row:
        return Fault(f"not a JSON object with a '{TEXT}'", _MEND, where)
    return Row(where, row[TEXT], None, _set_name(row.get(META)))


def _read_parquet(path: str, on_read: OnRead) -> Iterator[Row | Fault]:
    import pyarrow
    from pyarrow import parquet

    with _open(path, lambda num_bytes: None):
        pass  # says what is wrong with a file that is none
    size, row, told = os.path.getsize(path), 0, 0
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if TEXT not in names:
                raise _UnreadableError(f"has no column '{TEXT}', only {names}", "rename the column")
            columns = [name for name in (TEXT, META) if name in names]
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                if not batch.num_rows:
                    continue
                part = size * (row + batch.num_rows) // file.metadata.num_rows
                on_read(part - told)
                told = part
                for cells in zip(*(_cells(column) for column in batch.columns), strict=True):
                    row += 1
                    yield _parquet_row(f"row {row}", dict(zip(columns, cells, strict=True)))
    except pyarrow.ArrowException as error:
        what = "is broken or not Parquet"
        raise _UnreadableError(what, _AGAIN, f"after row {row}", error) from error


def _cells(column) -> list:
    """The values of a column; the error in place of one that is not UTF-8."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [_cell(scalar) for scalar in column]


def _cell(scalar) -> object:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return error


def _parquet_row(where: str, cells: dict[str, object]) -> Row | Fault:
    if isinstance(cells[TEXT], UnicodeDecodeError):
        return Fault("not UTF-8", _TO_UTF8, where, cells[TEXT].reason)
    return Row(where, cells[TEXT], None, _set_name(cells.get(META)))


def _read_txt(path: str, on_read: OnRead) -> Iterator[Row | Fault]:
    data = _read_whole(path, on_read)
    try:
        yield Row("line 1", data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        yield Fault("not UTF-8", "convert the file to UTF-8 (iconv)", f"line {line}", error.reason)


def _read_wiki_leads(path: str, on_read: OnRead) -> Iterator[Row]:
    """Lead sections of Wikipedia articles, in the file's order; the title decides the split."""
    articles = json.loads(_read_whole(path, on_read))
    for title, article in articles.items():
        yield Row(f"article {title!r}", article["extract"], title)


def _read_python_docs(path: str, on_read: OnRead) -> Iterator[Row]:
    """The topics of `pydoc`, then the docstrings of each module under the library at `path`."""
    for topic, text in sorted(pydoc_data.topics.topics.items()):
        yield Row(f"topic {topic!r}", text, topic)
    library = pathlib.Path(path)
    for name in sorted(sys.stdlib_module_names):
        files = [library / f"{name}.py", *sorted((library / name).rglob("*.py"))]
        for file in files:
            if file.is_file() and not {"test", "tests"} & set(file.relative_to(library).parts):
                module = file.relative_to(library).as_posix()
                docstrings = _docstrings(file)
                if docstrings:
                    yield Row(f"module {module}", "\n\n".join(docstrings), module)


def _docstrings(file: pathlib.Path) -> list[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [n for n in ast.walk(ast.parse(file.read_bytes())) if isinstance(n, documented)]
    return [docstring for docstring in map(ast.get_docstring, nodes) if docstring]


READERS: dict[str, Callable[[str, OnRead], Iterator[Row | Fault]]] = {
    ".jsonl": _read_jsonl,
    ".jsonl.zst": _read_jsonl_zst,
    ".parquet": _read_parquet,
    ".txt": _read_txt,
    "wiki_leads": _read_wiki_leads,
    "python_docs": _read_python_docs,
}
