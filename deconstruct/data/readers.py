"""One file to its documents, per format; whatever is wrong stops with the file and the line.

Policy. Nothing is skipped here: JSON that does not parse, a row without `text`, a `text` that is
null or not a string, bytes that are not UTF-8, a compressed file that ends too early and an empty
file are each a ValueError. Lines are separated by newlines alone (a text may hold U+2028); blank
lines between JSON rows are not rows. A .txt file is one document. Documents without anything but
white space are yielded like others; `units` counts and leaves them out.
"""

import ast
import io
import json
import pathlib
import pydoc_data.topics
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

TEXT = "text"
_CHUNK_BYTES = 1 << 20
_LFS_POINTER = b"version https://git-lfs"

OnRead = Callable[[int], None]  # told the number of input bytes just read


class Document(NamedTuple):
    """A text, and the string whose hash decides whether it is held out."""

    text: str
    key: str


def read(path: str, format: str, on_read: OnRead) -> Iterator[Document]:
    """The documents of the file (or folder) at `path`, in order. `format` is a key of READERS.

    Raises:
      ValueError: the first bad row, with file and line; a file that is empty or cut short.
    """
    try:
        for where, text, key in READERS[format](path, on_read):
            if not isinstance(text, str):
                found = "null" if text is None else f"a {type(text).__name__}"
                raise ValueError(f"{path}, {where}: '{TEXT}' is {found}, not a string")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"{path}, {where}: '{TEXT}' holds half a surrogate pair, which is no character"
                ) from error
            yield Document(text, text if key is None else key)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error})") from error


_Row = tuple[str, object, str | None]  # where, text, key (None: the text itself)


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
    start = file.peek(len(_LFS_POINTER))
    if not start:
        file.close()
        raise ValueError(f"{path} is empty (0 bytes); fetch it again or remove it")
    if start.startswith(_LFS_POINTER):
        file.close()
        raise ValueError(f"{path} is a Git LFS pointer, not data; run `git lfs pull`")
    return file


def _read_whole(path: str, on_read: OnRead) -> bytes:
    with _open(path, on_read) as file:
        return b"".join(iter(lambda: file.read(_CHUNK_BYTES), b""))


class _ZstdReader(io.RawIOBase):
    """Decompresses frames one after another; a last frame that does not end is an error.

    The library's own reader takes a file that is cut short for a short file.
    """

    def __init__(self, file: io.BufferedReader, path: str):
        import zstandard

        self._file = file
        self._path = path
        self._error = zstandard.ZstdError
        self._new_frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
        self._frame = self._new_frame()
        self._inside_frame = False
        self._compressed = b""
        self._plain = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._plain:
            if not self._compressed:
                self._compressed = self._file.read(_CHUNK_BYTES)
            if not self._compressed:
                if self._inside_frame:
                    raise ValueError(f"{self._path} is cut short: its last zstd frame does not end")
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
            raise ValueError(f"{self._path} is broken or not zstd data ({error})") from error
        self._compressed = b""
        if self._frame.eof:
            self._compressed = self._frame.unused_data
            self._frame = self._new_frame()
            self._inside_frame = False


def _read_jsonl(path: str, on_read: OnRead) -> Iterator[_Row]:
    with _open(path, on_read) as file:
        yield from _json_rows(file, path)


def _read_jsonl_zst(path: str, on_read: OnRead) -> Iterator[_Row]:
    with _open(path, on_read) as file:
        yield from _json_rows(io.BufferedReader(_ZstdReader(file, path), _CHUNK_BYTES), path)


def _json_rows(lines: Iterator[bytes], path: str) -> Iterator[_Row]:
    for number, line in enumerate(lines, 1):
        where = f"line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, {where}: not UTF-8 ({error.reason})") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, {where}: not a whole JSON value ({error})") from error
        if not isinstance(row, dict) or TEXT not in row:
            raise ValueError(f"{path}, {where}: not a JSON object with a '{TEXT}'")
        yield where, row[TEXT], None


def _read_parquet(path: str, on_read: OnRead) -> Iterator[_Row]:
    import pyarrow
    from pyarrow import parquet

    with _open(path, on_read):
        pass  # says what is wrong with an empty file or a pointer
    try:
        with parquet.ParquetFile(path) as file:
            if TEXT not in file.schema_arrow.names:
                raise ValueError(f"{path}: no column '{TEXT}' (has {file.schema_arrow.names})")
            row = 0
            for batch in file.iter_batches(batch_size=1024, columns=[TEXT]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    yield f"row {row}", text, None
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is broken or not Parquet ({error})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: a '{TEXT}' after row {row} is not UTF-8") from error


def _read_txt(path: str, on_read: OnRead) -> Iterator[_Row]:
    data = _read_whole(path, on_read)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: not UTF-8 ({error.reason})") from error
    yield "line 1", text, None


def _read_wiki_leads(path: str, on_read: OnRead) -> Iterator[_Row]:
    """Lead sections of Wikipedia articles, in the file's order; the title decides the split."""
    articles = json.loads(_read_whole(path, on_read))
    for title, article in articles.items():
        yield f"article {title!r}", article["extract"], title


def _read_python_docs(path: str, on_read: OnRead) -> Iterator[_Row]:
    """The topics of `pydoc`, then the docstrings of each module under the library at `path`."""
    for topic, text in sorted(pydoc_data.topics.topics.items()):
        yield f"topic {topic!r}", text, topic
    library = pathlib.Path(path)
    for name in sorted(sys.stdlib_module_names):
        files = [library / f"{name}.py", *sorted((library / name).rglob("*.py"))]
        for file in files:
            if file.is_file() and not {"test", "tests"} & set(file.relative_to(library).parts):
                module = file.relative_to(library).as_posix()
                docstrings = _docstrings(file)
                if docstrings:
                    yield f"module {module}", "\n\n".join(docstrings), module


def _docstrings(file: pathlib.Path) -> list[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [n for n in ast.walk(ast.parse(file.read_bytes())) if isinstance(n, documented)]
    return [docstring for docstring in map(ast.get_docstring, nodes) if docstring]


READERS: dict[str, Callable[[str, OnRead], Iterator[_Row]]] = {
    ".jsonl": _read_jsonl,
    ".jsonl.zst": _read_jsonl_zst,
    ".parquet": _read_parquet,
    ".txt": _read_txt,
    "wiki_leads": _read_wiki_leads,
    "python_docs": _read_python_docs,
}
