"""Prepared data on disk: the contract between `prepare`, which writes it, and `loader`.

    DIR/settings.json       what the data is made from; written first
    DIR/tokenizer.json
    DIR/deconstruct-SPLIT.array_record-00000-of-00001
                            rows; one shard per unit and split
    DIR/units/00000.json    counts of a finished unit
    DIR/dataset_info.json, features.json
                            for `tfds.builder_from_directory(DIR)`
    DIR/prepared.json       `PreparedInfo`; written last, so that it means whole

A record is a TFDS example with the fields of `packing.Row`. TFDS needs no TensorFlow for it.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from deconstruct.data import packing

FORMAT_VERSION = 2  # of what the settings record; the rows are those of 1
DATASET = "deconstruct"
INFO_FILE = "prepared.json"
SETTINGS_FILE = "settings.json"
TOKENIZER_FILE = "tokenizer.json"
UNITS_FOLDER = "units"
FILE_FORMAT = "array_record"
COMMAND = "python -m deconstruct.data.prepare"

_URL = re.compile(r"[A-Za-z][\w+.-]+:/|.*://")  # pathlib makes gs:/ of gs://


@dataclasses.dataclass(frozen=True)
class SetCounts:
    """What one set of a corpus gave: documents, UTF-8 bytes of their texts, tokens in rows."""

    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0

    def __add__(self, other: "SetCounts") -> "SetCounts":
        return SetCounts(
            self.documents + other.documents,
            self.text_bytes + other.text_bytes,
            self.tokens + other.tokens,
        )


@dataclasses.dataclass(frozen=True)
class ShardInfo:
    """Counts of one shard.

    Attributes:
      file: its name.
      num_bytes: its size on disk.
      rows: rows in it.
      tokens: real tokens in its rows, the leading end-of-text of each document included.
      documents: documents in it.
      text_bytes: UTF-8 bytes of their texts.
      empty_documents: documents left out because they hold white space alone.
      inexact_cuts: cuts of very long texts that may have changed ids, see `tokenizer`.
      max_token_id: the largest id in it; -1 without rows.
      document_tokens: tokens of its documents, counted before they were packed, which `tokens` must
        be; 0 in data made before it was stored.
      other_documents: documents left out because their sets were not chosen.
      bad_rows: rows that were skipped because something is wrong with them.
      cut_files: files that were not read, or not to their ends, for the same reason.
      sets: name -> counts of each set that rows of the source name.
    """

    file: str
    num_bytes: int
    rows: int
    tokens: int
    documents: int
    text_bytes: int
    empty_documents: int
    inexact_cuts: int
    max_token_id: int
    document_tokens: int = 0
    other_documents: int = 0
    bad_rows: int = 0
    cut_files: int = 0
    sets: Mapping[str, SetCounts] = dataclasses.field(default_factory=dict)


def parse_shard(content: Mapping[str, Any]) -> ShardInfo:
    """The `ShardInfo` that `dataclasses.asdict` made `content` of; TypeError for other fields."""
    sets = {name: SetCounts(**counts) for name, counts in content.get("sets", {}).items()}
    return ShardInfo(**{**content, "sets": sets})


# Of the fingerprint too: another name here would make finished data look edited.
_TOTALS = ("rows", "tokens", "documents", "text_bytes", "empty_documents", "inexact_cuts")


@dataclasses.dataclass(frozen=True)
class PreparedInfo:
    """Everything about a prepared directory but its rows.

    Attributes:
      path: the directory; not stored, it may be moved.
      builder_config: what the data was made from, see `prepare.builder_config`.
      tokenizer_sha256: hash of its tokenizer.json.
      vocab_size: one more than the tokenizer's largest id.
      eot_id: the id that leads each document.
      max_len: tokens a row trains on; a row holds one more id.
      token_bytes: (vocab_size,) int32, bytes of text that each id stands for.
      shards: split -> its shards, in order.
      source: what its source was called, see `sources.name_of`; None where format 1 left it out.
    """

    path: str
    builder_config: Mapping[str, Any]
    tokenizer_sha256: str
    vocab_size: int
    eot_id: int
    max_len: int
    token_bytes: np.ndarray
    shards: Mapping[str, Sequence[ShardInfo]]
    source: str | None = None

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """Split -> rows, tokens, documents, text bytes, documents left out, inexact cuts."""
        return {
            split: {name: sum(getattr(shard, name) for shard in shards) for name in _TOTALS}
            for split, shards in self.shards.items()
        }

    @property
    def sets(self) -> dict[str, dict[str, SetCounts]]:
        """Split -> set -> its counts; empty where the rows of the source name no set."""
        by_split: dict[str, dict[str, SetCounts]] = {split: {} for split in self.shards}
        for split, totals in by_split.items():
            for shard in self.shards[split]:
                for name, counts in shard.sets.items():
                    totals[name] = totals.get(name, SetCounts()) + counts
        return by_split

    @property
    def content(self) -> dict[str, Any]:
        """All that decides the rows, as JSON: builder config, tokenizer, counts."""
        return {
            "builder_config": self.builder_config,
            "tokenizer_sha256": self.tokenizer_sha256,
            "counts": self.counts,
        }

    @property
    def data_fingerprint(self) -> str:
        """32 hexadecimal digits that change with any part of `content`."""
        return hashlib.sha256(json.dumps(self.content, sort_keys=True).encode()).hexdigest()[:32]

    def write(self) -> None:
        """Writes DIR/prepared.json."""
        content = dataclasses.asdict(self) | {
            "counts": self.counts,
            "data_fingerprint": self.data_fingerprint,
            "token_bytes": self.token_bytes.tolist(),
        }
        del content["path"]
        write_json(pathlib.Path(self.path) / INFO_FILE, content)


def local_path(path: str | os.PathLike, what: str) -> str:
    """`path` with a leading `~` expanded.

    Args:
      path: as a user gave it.
      what: its name in the error.

    Raises:
      ValueError: it is a URL.
    """
    path = os.fspath(path)
    if _URL.match(path):
        raise ValueError(f"{what} {path} is no local path; mount the bucket and name a folder")
    return os.path.expanduser(path)


def read_info(path: str | os.PathLike) -> PreparedInfo:
    """The `PreparedInfo` of a directory.

    Raises:
      ValueError: it is not prepared data, not finished, damaged, or a shard is missing or not
        whole; or `path` is a URL.
    """
    folder = pathlib.Path(local_path(path, "data"))
    if not (folder / INFO_FILE).is_file():
        state = "unfinished" if (folder / SETTINGS_FILE).is_file() else "not prepared data"
        raise ValueError(f"{folder} is {state} (no {INFO_FILE}); make it with {COMMAND}")
    info = _parse_info(folder)
    for shard in (shard for split in info.shards.values() for shard in split):
        if not is_whole(folder, shard):
            raise ValueError(
                f"{folder / shard.file} is missing or not {shard.num_bytes} bytes long; run "
                f"{COMMAND} again, it makes what is missing"
            )
    return info


def _parse_info(folder: pathlib.Path) -> PreparedInfo:
    path, remedy = folder / INFO_FILE, f"run {COMMAND} again"
    content = read_json(path, remedy)
    fields = {field.name for field in dataclasses.fields(PreparedInfo)}
    own = {name: value for name, value in content.items() if name in fields}
    try:
        own["token_bytes"] = np.array(own["token_bytes"], np.int32)
        own["shards"] = {
            split: tuple(parse_shard(shard) for shard in shards)
            for split, shards in own["shards"].items()
        }
        info = PreparedInfo(**own | {"path": str(folder)})
        fingerprint = content["data_fingerprint"]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error!r}); {remedy}") from error
    if info.data_fingerprint != fingerprint:
        raise ValueError(f"{path} was edited: its data_fingerprint does not fit; {remedy}")
    return info


def is_whole(folder: pathlib.Path, shard: ShardInfo) -> bool:
    """Whether the shard lies in `folder` at its full length."""
    path = folder / shard.file
    return path.is_file() and path.stat().st_size == shard.num_bytes


def shard_file(split: str, index: int, count: int) -> str:
    """The name of a shard, in TFDS's default template."""
    return f"{DATASET}-{split}.{FILE_FORMAT}-{index:05d}-of-{count:05d}"


def token_dtype(vocab_size: int) -> np.dtype:
    """How ids are stored: uint16 where the vocabulary allows."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32)


def features(max_len: int, vocab_size: int):
    """The TFDS features of a record."""
    import tensorflow_datasets as tfds

    return tfds.features.FeaturesDict(
        {
            "ids": tfds.features.Tensor(
                shape=(max_len + 1,), dtype=token_dtype(vocab_size), encoding="bytes"
            ),
            "starts": tfds.features.Tensor(shape=(None,), dtype=np.int32, encoding="bytes"),
            "num_tokens": tfds.features.Scalar(np.int32),
        }
    )


def serializer(max_len: int, vocab_size: int) -> Callable[[packing.Row], bytes]:
    """The function from a row to its record; equal rows give equal bytes in every process.

    It is TFDS's encoding of `features`, written here: TFDS's own `serialize_example` gives a
    protobuf map in no fixed order, and takes several times as long.
    """
    from tensorflow_datasets.proto import tf_example_pb2

    dtype = token_dtype(vocab_size)

    def serialize(row: packing.Row) -> bytes:
        assert row.ids.shape == (max_len + 1,), (row.ids.shape, max_len)
        example = tf_example_pb2.Example()
        fields = example.features.feature
        fields["ids"].bytes_list.value.append(row.ids.astype(dtype).tobytes())
        fields["starts"].bytes_list.value.append(row.starts.astype(np.int32).tobytes())
        fields["num_tokens"].int64_list.value.append(row.num_tokens)
        return example.SerializeToString(deterministic=True)

    return serialize


def parser(max_len: int, vocab_size: int) -> Callable[[bytes], packing.Row]:
    """The inverse of `serializer`; the arrays are views of the record.

    TFDS's own `deserialize_example_np` takes many times as long.
    """
    from tensorflow_datasets.proto import tf_example_pb2

    dtype = token_dtype(vocab_size)

    def parse(record: bytes) -> packing.Row:
        fields = tf_example_pb2.Example.FromString(record).features.feature
        ids = np.frombuffer(fields["ids"].bytes_list.value[0], dtype)
        assert ids.shape == (max_len + 1,), (ids.shape, max_len)
        starts = np.frombuffer(fields["starts"].bytes_list.value[0], np.int32)
        return packing.Row(ids, starts, fields["num_tokens"].int64_list.value[0])

    return parse


def write_tfds_metadata(info: PreparedInfo) -> None:
    """Writes what `tfds.builder_from_directory` reads."""
    import tensorflow_datasets as tfds

    template = tfds.core.ShardedFileTemplate(
        data_dir=info.path,
        template="{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
        dataset_name=DATASET,
        filetype_suffix=FILE_FORMAT,
    )
    splits = [
        tfds.core.SplitInfo(
            name=split,
            shard_lengths=[shard.rows for shard in shards],
            num_bytes=sum(shard.num_bytes for shard in shards),
            filename_template=template.replace(split=split),
        )
        for split, shards in info.shards.items()
    ]
    tfds.folder_dataset.write_metadata(
        data_dir=info.path,
        features=features(info.max_len, info.vocab_size),
        split_infos=splits,
        filename_template=template,
        description="Rows of token ids with the starts of their documents.",
        check_data=False,  # it would read with TensorFlow
    )


def read_json(path: pathlib.Path, remedy: str) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      ValueError: it cannot be read or is no whole JSON object; ends in `remedy`.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}); {remedy}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged (no JSON object); {remedy}")
    return content


def partial_path(path: pathlib.Path) -> pathlib.Path:
    """A new temporary name beside `path`: schedulers may run one unit twice at a time."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.partial")


def write_json(path: pathlib.Path, content: Any) -> None:
    """Writes `content` as JSON under a temporary name and renames."""
    partial = partial_path(path)
    partial.write_text(json.dumps(content, indent=1, sort_keys=True))
    rename(partial, path)


def rename(partial: pathlib.Path, path: pathlib.Path) -> None:
    """Gives a finished file its name once it is on the disk: a power cut leaves all or nothing."""
    file = os.open(partial, os.O_RDWR)
    try:
        os.fsync(file)
    finally:
        os.close(file)
    partial.rename(path)
