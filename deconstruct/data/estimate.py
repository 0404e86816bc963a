"""How long preparing will take and how much it will write, measured on the first documents.

Of up to SAMPLE_FILES files, spread evenly over what is to be done, the first documents are read,
and the first SAMPLE_TEXT_BYTES of their texts tokenized, packed and written to a temporary
directory. Tokens, size and processor time are scaled up to all input bytes. Files that differ much
from their own beginnings, or from the files between, make it wrong; SlimPajama's are alike.
"""

import dataclasses
import pathlib
import shutil
import tempfile
import time
from collections.abc import Sequence

from absl import logging

from deconstruct import tokenizer as tokenizer_lib
from deconstruct.data import readers, sets, sources, units

SMALLEST_BYTES = 8_000_000  # of input, from which on an estimate is worth its second
SAMPLE_FILES = 8
SAMPLE_TEXT_BYTES = 1 << 18  # of each file

# What ArrayRecord adds to a shard: a header of 64 kB, and half of a last block of 64 kB on average.
_SHARD_BYTES = 96 << 10


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What is to come.

    Attributes:
      sample_documents: documents that were tokenized to know it.
      sample_files: files that they are from.
      input_bytes: bytes to read, known exactly.
      tokens: tokens in rows.
      output_bytes: bytes of the shards.
      core_seconds: processor time, over all processes.
      largest_share: share of the input in the largest unit, which one process does alone.
    """

    sample_documents: int
    sample_files: int
    input_bytes: int
    tokens: float
    output_bytes: float
    core_seconds: float
    largest_share: float

    def text(self, num_processes: int | None) -> str:
        """One line, with the time that `num_processes` at once need; None leaves that out."""
        several = ""
        if num_processes is not None:
            seconds = self.core_seconds * max(1 / num_processes, self.largest_share)
            several = f", so {_duration(seconds)} in {num_processes} process(es)"
        return (
            f"estimate from the first {self.sample_documents:,} documents of {self.sample_files} "
            f"files, for {_size(self.input_bytes)} of input: {self.tokens / 1e6:,.1f}M tokens, "
            f"{_size(self.output_bytes)} to write, {_duration(self.core_seconds)} of one core"
            f"{several}"
        )


def measure(pending: Sequence[units.Unit], tokenizer: tokenizer_lib.Tokenizer) -> Estimate:
    """The estimate for preparing `pending`, which is not empty.

    Raises:
      ValueError: a bad row among the first documents.
    """
    files = [(unit, file) for unit in pending for file in unit.files]
    chosen = files[:: -(-len(files) // SAMPLE_FILES)]
    begin = time.process_time()
    samples = [_first_documents(file, unit) for unit, file in chosen]
    read_seconds = time.process_time() - begin
    read_bytes = sum(num_bytes for _, num_bytes in samples)
    text_bytes = sum(_num_bytes(document) for documents, _ in samples for document in documents)
    shortened = [document for documents, _ in samples for document in _shortened(documents)]
    with tempfile.TemporaryDirectory() as folder:
        path, max_len = pathlib.Path(folder, "sample"), pending[0].max_len
        begin = time.process_time()
        writer = units.ShardWriter(path, tokenizer, max_len)
        encoded = tokenizer.encode_batch([document.text for document in shortened])
        for document, ids in zip(shortened, encoded, strict=True):
            writer.add(document, ids)
        shard = writer.finish()
        write_seconds = time.process_time() - begin
    input_bytes = sum(unit.num_bytes for unit in pending)
    times_input = input_bytes / max(read_bytes, 1)
    num_shards = sum(len(unit.shards) for unit in pending)
    times_text = times_input * text_bytes / max(shard.text_bytes, 1)
    return Estimate(
        sample_documents=shard.documents,
        sample_files=len(chosen),
        input_bytes=input_bytes,
        tokens=times_text * shard.tokens,
        output_bytes=times_text * (shard.num_bytes - _SHARD_BYTES) + num_shards * _SHARD_BYTES,
        core_seconds=times_input * read_seconds + times_text * write_seconds,
        largest_share=max(unit.num_bytes for unit in pending) / input_bytes,
    )


def warn_of_a_full_disk(estimate: Estimate, output: str) -> None:
    """Logs a warning where `output` has not the room."""
    free = shutil.disk_usage(output).free
    if estimate.output_bytes > free:
        logging.warning(
            "%s has %s free, less than the estimated %s; units that are finished when it is full "
            "are kept",
            output,
            _size(free),
            _size(estimate.output_bytes),
        )


def _first_documents(
    file: sources.SourceFile, unit: units.Unit
) -> tuple[list[readers.Document], int]:
    """The documents of a file's first reads, about a MB or more, and the input bytes of these."""
    num_read = before = found = 0

    def on_read(num_bytes: int) -> None:
        nonlocal num_read
        num_read += num_bytes

    documents = []
    for document in sources.read_documents(file, on_read, unit.on_fault):
        if num_read > before and found >= SAMPLE_TEXT_BYTES:
            return documents, before
        before = num_read
        found += _num_bytes(document)
        if sets.is_chosen(file.path, document, unit.sets):
            documents.append(document)
    return documents, file.num_bytes


def _shortened(documents: Sequence[readers.Document]) -> list[readers.Document]:
    """The first documents, until they hold SAMPLE_TEXT_BYTES."""
    first, found = [], 0
    for document in documents:
        if found >= SAMPLE_TEXT_BYTES:
            break
        first.append(document)
        found += _num_bytes(document)
    return first


def _num_bytes(document: readers.Document) -> int:
    return len(document.text.encode())


def _size(num_bytes: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
