"""The unit of preparation: a run of input files in, one shard per split out.

Units do not depend on each other or on who runs them, so one core, a pool and any other scheduler
give the same shards, and a run that was stopped goes on with the units that are not finished.
"""

import contextlib
import dataclasses
import itertools
import json
import pathlib
from collections.abc import Generator, Iterator, Mapping, Sequence

import numpy as np
from absl import logging
from array_record.python.array_record_module import ArrayRecordWriter

from deconstruct import tokenizer as tokenizer_lib
from deconstruct.data import overlap, packing, prepared, readers, sets, sources

_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1024


@dataclasses.dataclass(frozen=True)
class Unit:
    """A piece of work, independent of all others.

    Attributes:
      index: its place among all units.
      files: what it reads, in order.
      shards: split -> name of the shard that it writes.
      output: directory of the prepared data, which holds the tokenizer.
      max_len: tokens a row trains on.
      validation_share: share of documents held out of files without a split of their own.
      sets: the sets whose documents are taken; None takes all.
      skip_faults: whether bad rows, and the rest of files that cannot be read further, are left out
        and counted; else the first is an error.
    """

    index: int
    files: tuple[sources.SourceFile, ...]
    shards: tuple[tuple[str, str], ...]
    output: str
    max_len: int
    validation_share: float
    sets: tuple[str, ...] | None = None
    skip_faults: bool = False

    @property
    def on_fault(self) -> readers.OnFault:
        """For those who read some of its documents, but do not count."""
        return readers.skip if self.skip_faults else readers.stop

    @property
    def counts_path(self) -> pathlib.Path:
        return pathlib.Path(self.output, prepared.UNITS_FOLDER, f"{self.index:05d}.json")

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def plan_units(
    files: Sequence[sources.SourceFile],
    *,
    unit_bytes: int,
    output: str,
    max_len: int,
    validation_share: float,
    sets: tuple[str, ...] | None = None,
    skip_faults: bool = False,
) -> list[Unit]:
    """Consecutive files of one split, up to `unit_bytes` together; a larger file is one unit."""
    groups: list[list[sources.SourceFile]] = []
    filled = 0
    for file in files:
        if not groups or groups[-1][-1].split != file.split or filled + file.num_bytes > unit_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(file)
        filled += file.num_bytes
    splits = [sources.file_splits(group[0], validation_share) for group in groups]
    totals = {split: sum(split in own for own in splits) for split in sources.SPLITS}
    used = dict.fromkeys(sources.SPLITS, 0)
    units = []
    for index, (group, own) in enumerate(zip(groups, splits, strict=True)):
        shards = []
        for split in own:
            shards.append((split, prepared.shard_file(split, used[split], totals[split])))
            used[split] += 1
        unit = Unit(
            index,
            tuple(group),
            tuple(shards),
            output,
            max_len,
            validation_share,
            sets,
            skip_faults,
        )
        units.append(unit)
    return units


def finished(unit: Unit) -> dict[str, prepared.ShardInfo] | None:
    """Split -> counts of a unit that is done and whole, else None."""
    try:
        content = json.loads(unit.counts_path.read_text())
        shards = {split: prepared.parse_shard(counts) for split, counts in content.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return None  # not there or damaged: either way the unit is made anew
    if {split: shard.file for split, shard in shards.items()} != dict(unit.shards):
        return None
    folder = pathlib.Path(unit.output)
    return shards if all(prepared.is_whole(folder, s) for s in shards.values()) else None


def prepare_unit(
    unit: Unit, on_read: readers.OnRead = lambda num_bytes: None
) -> dict[str, prepared.ShardInfo]:
    """Tokenizes, packs and writes a unit; returns split -> counts, also written beside the shards.

    Shards and counts are written under temporary names and renamed, the counts last.

    Raises:
      ValueError: the first bad row, with file and line, unless faults are skipped.
      OSError: a shard cannot be written.
    """
    folder = pathlib.Path(unit.output)
    tokenizer = tokenizer_lib.load_tokenizer(str(folder / prepared.TOKENIZER_FILE))
    writers: dict[str, ShardWriter] = {}
    try:
        for split, file in unit.shards:
            writers[split] = ShardWriter(folder / file, tokenizer, unit.max_len)
        # Reading, tokenizing and writing go on at the same time: of the three only tokenizing takes
        # more than one core, and it lets the others run.
        batches = overlap.ahead(_batches(unit, writers, on_read))
        with contextlib.closing(overlap.ahead(_encoded(batches, tokenizer))) as encoded:
            for split, document, ids in itertools.chain.from_iterable(encoded):
                writers[split].add(document, ids)
        shards = {split: writer.finish() for split, writer in writers.items()}
    except BaseException:
        for writer in writers.values():
            writer.discard()  # a scheduler may try again and again
        raise
    prepared.write_json(
        unit.counts_path, {split: dataclasses.asdict(shard) for split, shard in shards.items()}
    )
    return shards


_SplitDocument = tuple[str, readers.Document]


def _batches(
    unit: Unit, writers: Mapping[str, "ShardWriter"], on_read: readers.OnRead
) -> Generator[list[_SplitDocument], None, None]:
    """Documents with their split, in order, in lists that are worth encoding together.

    Documents of other sets than the chosen ones only count, with the writer of their split. So do
    faults that are skipped, with the first writer: their split may be unknown.
    """
    on_fault = _counting(next(iter(writers.values()))) if unit.skip_faults else readers.stop
    batch: list[_SplitDocument] = []
    characters = 0
    for file in unit.files:
        for document in sources.read_documents(file, on_read, on_fault):
            split = sources.split_of(file, document, unit.validation_share)
            if not sets.is_chosen(file.path, document, unit.sets):
                writers[split].other_documents += 1
                continue
            batch.append((split, document))
            characters += len(document.text)
            if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
                yield batch
                batch, characters = [], 0
    yield batch


def _encoded(
    batches: Generator[list[_SplitDocument], None, None], tokenizer: tokenizer_lib.Tokenizer
) -> Generator[list[tuple[str, readers.Document, np.ndarray]], None, None]:
    """The batches with the ids of each document."""
    with contextlib.closing(batches):
        for batch in batches:
            encoded = tokenizer.encode_batch([document.text for _, document in batch])
            yield [(*pair, ids) for pair, ids in zip(batch, encoded, strict=True)]


def _counting(writer: "ShardWriter") -> readers.OnFault:
    """Counts faults with `writer` and logs the first of each file."""
    logged = set()

    def on_fault(path: str, fault: readers.Fault) -> None:
        if fault.ends_file:
            writer.cut_files += 1
        else:
            writer.bad_rows += 1
        if path not in logged:
            logging.warning("%s. Skipped, as all faults of this file", fault.message(path))
            logged.add(path)

    return on_fault


@contextlib.contextmanager
def _write_errors() -> Iterator[None]:
    """ArrayRecord tells of a full disk by a RuntimeError; here it is an OSError."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(str(error)) from error


class ShardWriter:
    """Documents in, one shard file of rows out.

    Attributes:
      other_documents: documents of sets that were not chosen, to be counted by whoever left them
        out.
      bad_rows, cut_files: faults that were skipped, likewise.
    """

    def __init__(self, path: pathlib.Path, tokenizer: tokenizer_lib.Tokenizer, max_len: int):
        self._path = path
        self._tokenizer = tokenizer
        self._serialize = prepared.serializer(max_len, tokenizer.vocab_size)
        self._partial = prepared.partial_path(path)
        self._writer = ArrayRecordWriter(str(self._partial), "group_size:1")
        self._packer = packing.Packer(max_len + 1)
        self._rows = self._tokens_in = self._tokens_in_rows = 0
        self._documents = self._text_bytes = self._empty = self._inexact_cuts = 0
        self._max_token_id = -1
        self._sets: dict[str, prepared.SetCounts] = {}
        self.other_documents = self.bad_rows = self.cut_files = 0

    def add(self, document: readers.Document, ids: np.ndarray) -> None:
        """Writes the rows that a document fills; the rest waits for more.

        Args:
          document: one of white space alone counts, and is left out.
          ids: (n,) int32, what the tokenizer makes of its text.
        """
        if not document.text.strip():
            self._empty += 1
            return
        ids = self._tokenizer.with_start(ids)
        self._count(document, len(ids))
        self._max_token_id = max(self._max_token_id, int(ids.max()))
        self._write(self._packer.add(ids))

    def _count(self, document: readers.Document, num_tokens: int) -> None:
        num_bytes = len(document.text.encode())
        self._documents += 1
        self._text_bytes += num_bytes
        self._tokens_in += num_tokens
        self._inexact_cuts += self._tokenizer.inexact_cuts(document.text)
        if document.set_name is not None:
            counts = self._sets.setdefault(document.set_name, prepared.SetCounts())
            self._sets[document.set_name] = counts + prepared.SetCounts(1, num_bytes, num_tokens)

    def finish(self) -> prepared.ShardInfo:
        """Writes the padded tail, closes and renames the file, checks that no token was lost."""
        self._write(self._packer.finish())
        with _write_errors():
            self._writer.close()
        assert self._tokens_in == self._tokens_in_rows, (self._tokens_in, self._tokens_in_rows)
        prepared.rename(self._partial, self._path)
        return prepared.ShardInfo(
            file=self._path.name,
            num_bytes=self._path.stat().st_size,
            rows=self._rows,
            tokens=self._tokens_in_rows,
            documents=self._documents,
            text_bytes=self._text_bytes,
            empty_documents=self._empty,
            inexact_cuts=self._inexact_cuts,
            max_token_id=self._max_token_id,
            document_tokens=self._tokens_in,
            other_documents=self.other_documents,
            bad_rows=self.bad_rows,
            cut_files=self.cut_files,
            sets=self._sets,
        )

    def discard(self) -> None:
        """Removes what is written of a file that is not finished."""
        self._partial.unlink(missing_ok=True)

    def _write(self, rows: Sequence[packing.Row]) -> None:
        for row in rows:
            record = self._serialize(row)
            with _write_errors():
                self._writer.write(record)
            self._rows += 1
            self._tokens_in_rows += row.num_tokens
