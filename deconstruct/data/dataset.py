"""A prepared directory opened for reading: its rows by split and number."""

import bisect
import functools
import itertools
import os
import pathlib
import resource
from collections.abc import Sequence

import numpy as np

from deconstruct import tokenizer as tokenizer_lib
from deconstruct.data import packing, prepared

_MOST_OPEN_FILES = 1 << 20
_OTHER_OPEN_FILES = 256  # of the process, beside shards


class PreparedDataset:
    """The rows of a prepared directory, by split and number; cheap to copy to a worker."""

    def __init__(self, info: prepared.PreparedInfo):
        self.info = info
        self._sources: dict[str, Sequence[dict]] = {}

    def __getstate__(self):
        return {"info": self.info, "_sources": {}}  # each process opens its own files

    @property
    def path(self) -> str:
        return self.info.path

    @property
    def max_len(self) -> int:
        return self.info.max_len

    @property
    def vocab_size(self) -> int:
        return self.info.vocab_size

    @property
    def token_bytes(self) -> np.ndarray:
        """Bytes of text that each id stands for, (vocab_size,) int32."""
        return self.info.token_bytes

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.info.shards)

    @functools.cached_property
    def tokenizer(self) -> tokenizer_lib.Tokenizer:
        path = pathlib.Path(self.path, prepared.TOKENIZER_FILE)
        tokenizer = tokenizer_lib.load_tokenizer(str(path))
        if tokenizer.sha256 != self.info.tokenizer_sha256:
            raise ValueError(f"{path} is not the tokenizer that the rows were made with")
        return tokenizer

    def num_rows(self, split: str) -> int:
        """Rows of a split. ValueError when there is no such split."""
        if split not in self.info.shards:
            raise ValueError(f"{self.path} has no split {split!r}, only {', '.join(self.splits)}")
        return self.info.counts[split]["rows"]

    def rows(self, split: str, numbers: Sequence[int]) -> list[packing.Row]:
        """Rows by number, from 0 in the order of the source.

        Raises:
          ValueError: a damaged record, or an id outside the vocabulary; names the shard.
        """
        return [self._row(split, number) for number in numbers]

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ValueError, naming the shard, if a model of `vocab_size` cannot embed all ids."""
        for shard in itertools.chain.from_iterable(self.info.shards.values()):
            if shard.max_token_id >= vocab_size:
                raise ValueError(
                    f"{pathlib.Path(self.path, shard.file)} holds token id {shard.max_token_id}, "
                    f"outside the model's vocabulary of {vocab_size}; the tokenizer of this data "
                    f"has {self.vocab_size} ids"
                )

    def _row(self, split: str, number: int) -> packing.Row:
        source = self._source(split)
        try:
            record = source[number]
        except (OSError, RuntimeError) as error:  # the latter is what ArrayRecord raises
            raise ValueError(
                f"{pathlib.Path(self.path, self._shard_of(split, number))} is damaged "
                f"({error}); remove it and run {prepared.COMMAND} again"
            ) from error
        ids = record["ids"]
        if int(ids.max()) >= self.vocab_size or int(ids.min()) < 0:
            raise ValueError(
                f"{pathlib.Path(self.path, self._shard_of(split, number))} holds token ids from "
                f"{ids.min()} to {ids.max()}, outside the vocabulary of {self.vocab_size}"
            )
        return packing.Row(ids, record["starts"], int(record["num_tokens"]))

    def _source(self, split: str) -> Sequence[dict]:
        if split not in self._sources:
            import tensorflow_datasets as tfds

            _allow_open_files(self.path, len(self.info.shards[split]))
            for file in prepared.TFDS_FILES:  # TFDS's own errors do not name the file
                remedy = f"remove {prepared.INFO_FILE} beside it and run {prepared.COMMAND} again"
                prepared.read_json(pathlib.Path(self.path, file), remedy)
            builder = tfds.builder_from_directory(self.path)
            self._sources[split] = builder.as_data_source(split)
        return self._sources[split]

    def _shard_of(self, split: str, number: int) -> str:
        shards = self.info.shards[split]
        ends = list(itertools.accumulate(shard.rows for shard in shards))
        return shards[bisect.bisect_right(ends, number)].file


def open_dataset(path: str | os.PathLike) -> PreparedDataset:
    """Opens prepared data.

    Raises:
      ValueError: it is not whole, its shards hold ids outside its own vocabulary, or `path` is a
        URL.
    """
    dataset = PreparedDataset(prepared.read_info(path))
    dataset.check_vocabulary(dataset.vocab_size)
    return dataset


def _allow_open_files(path: str, num_shards: int) -> None:
    """Raises this process's limit of open files: rows in random order keep every shard open.

    Raises:
      ValueError: the system does not allow as many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN_FILES)
    if num_shards + _OTHER_OPEN_FILES > most:
        raise ValueError(
            f"{path}: reading {num_shards} shards keeps them all open, and this system allows "
            f"{most} open files a process; raise its hard limit (ulimit -Hn)"
        )
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def first_tokens(dataset: PreparedDataset, count: int) -> np.ndarray:
    """The first `count` ids (count,) int32 of the training split, in the order of the source.

    Raises:
      ValueError: it holds fewer.
    """
    parts, found = [], 0
    for number in range(dataset.num_rows("train")):
        if found >= count:
            break
        (row,) = dataset.rows("train", [number])
        parts.append(row.ids[: row.num_tokens].astype(np.int32))
        found += row.num_tokens
    if found < count:
        raise ValueError(f"{dataset.path}: the training split has only {found} tokens, not {count}")
    return np.concatenate(parts)[:count]
