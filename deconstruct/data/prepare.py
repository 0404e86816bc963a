"""Text files to rows of token ids that training can read: a command and a function.

    python -m deconstruct.data.prepare --source=PATH|wiki_leads --tokenizer=PATH|bpe:8192 \\
        --max_len=2048 --output=DIR

Run again after any interruption: finished units are kept, and when all are, nothing is done.
An output directory that was made with other settings is refused, with the differences.
"""

import concurrent.futures
import concurrent.futures.process
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import multiprocessing
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tqdm

from deconstruct import tokenizer as tokenizer_lib
from deconstruct.data import prepared, sources, units, workers

UNIT_BYTES = 64_000_000
BPE_TRAINING_BYTES = 64_000_000  # text that a BPE is trained on, from the first training document


@dataclasses.dataclass(frozen=True)
class PrepareSettings:
    """What to prepare.

    Attributes:
      source: a file, folder, glob, or packaged corpus; see `sources`.
      tokenizer: see `tokenizer.load_tokenizer`; or `bpe:SIZE`, trained on the training split.
      max_len: tokens a row trains on.
      output: directory to write.
      validation_share: share of documents held out where the source has no validation split.
      unit_bytes: size of a unit of work in input bytes.
      num_processes: processes at a time; None is one per core. Does not change the result.
    """

    source: str
    tokenizer: str
    max_len: int
    output: str
    validation_share: float = 0.02
    unit_bytes: int = UNIT_BYTES
    num_processes: int | None = None

    def __post_init__(self):
        if self.max_len < 1:
            raise ValueError(f"max_len must be at least 1, not {self.max_len}")
        if not 0 <= self.validation_share < 1:
            raise ValueError(f"validation_share must be in [0, 1), not {self.validation_share}")
        if self.num_processes is not None and self.num_processes < 1:
            raise ValueError(f"num_processes must be at least 1, not {self.num_processes}")


def prepare(settings: PrepareSettings, *, progress: bool = True) -> prepared.PreparedInfo:
    """Prepares what is not prepared yet, and returns what is there.

    Safe to call from several processes at once: the second waits for the first.

    Args:
      settings: what to prepare.
      progress: whether to show progress on stderr.

    Raises:
      ValueError: for anything wrong with source, tokenizer or output, with its remedy.
      RuntimeError: a worker process was killed.
    """
    files = sources.list_files(settings.source)
    output = pathlib.Path(settings.output)
    _refuse_foreign(output)
    with _sole_writer(output):
        config = builder_config(settings, files)
        _claim(output, config)
        plan = units.plan_units(
            files,
            unit_bytes=settings.unit_bytes,
            output=str(output),
            max_len=settings.max_len,
            validation_share=settings.validation_share,
        )
        done = {unit.index: units.finished(unit) for unit in plan}
        pending = [unit for unit in plan if done[unit.index] is None]
        if not pending and (output / prepared.INFO_FILE).is_file():
            return prepared.read_info(output)
        tokenizer = _ensure_tokenizer(settings, files, output, progress)
        done |= _run(pending, settings.num_processes, progress)
        shards = [shard for unit in plan for shard in done[unit.index].items()]
        return _finish(settings, config, tokenizer, shards)


def builder_config(
    settings: PrepareSettings, files: Sequence[sources.SourceFile]
) -> dict[str, Any]:
    """What the rows depend on; equal wherever source, tokenizer and output lie.

    Input files count by name and size, tokenizer files by content.
    """
    listing = json.dumps([(file.name, file.num_bytes, file.split) for file in files])
    tokenizer = settings.tokenizer
    if pathlib.Path(tokenizer).exists():
        tokenizer = "sha256:" + tokenizer_lib.load_tokenizer(tokenizer).sha256
    return {
        "format_version": prepared.FORMAT_VERSION,
        "source_files": len(files),
        "source_bytes": sum(file.num_bytes for file in files),
        "source_names_and_sizes_sha256": hashlib.sha256(listing.encode()).hexdigest(),
        "tokenizer": tokenizer,
        "max_len": settings.max_len,
        "validation_share": settings.validation_share,
        "unit_bytes": settings.unit_bytes,
    }


def _refuse_foreign(output: pathlib.Path) -> None:
    """Refuses a directory with files in it that no preparation put there, before touching it."""
    if not output.is_dir() or (output / prepared.SETTINGS_FILE).is_file():
        return
    own = {prepared.UNITS_FOLDER, ".lock", prepared.SETTINGS_FILE + ".partial"}
    foreign = {path.name for path in output.iterdir()} - own
    if foreign:
        raise ValueError(
            f"output {output} holds other files, such as {min(foreign)}; name a new directory"
        )


@contextlib.contextmanager
def _sole_writer(output: pathlib.Path) -> Iterator[None]:
    """Holds the output directory for this process; waits while another one does."""
    try:
        (output / prepared.UNITS_FOLDER).mkdir(parents=True, exist_ok=True)
        lock = open(output / ".lock", "w")  # noqa: SIM115 (closing it is what unlocks)
    except OSError as error:
        raise ValueError(f"output {output} cannot be written ({error})") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _claim(output: pathlib.Path, config: Mapping[str, Any]) -> None:
    """Marks the output directory as made with `config`, or refuses one made with another."""
    settings_path = output / prepared.SETTINGS_FILE
    if not settings_path.is_file():
        prepared.write_json(settings_path, config)
    existing = json.loads(settings_path.read_text())
    different = [
        f"{key} {existing.get(key)} there, {config.get(key)} now"
        for key in sorted(existing.keys() | config.keys())
        if existing.get(key) != config.get(key)
    ]
    if not different:
        return
    if any((output / prepared.UNITS_FOLDER).iterdir()):
        raise ValueError(
            f"output {output} was made with other settings: {'; '.join(different)}. Name another "
            "directory, or remove this one"
        )
    (output / prepared.TOKENIZER_FILE).unlink(missing_ok=True)
    prepared.write_json(settings_path, config)  # nothing was finished with the others


def _ensure_tokenizer(
    settings: PrepareSettings,
    files: Sequence[sources.SourceFile],
    output: pathlib.Path,
    progress: bool,
) -> tokenizer_lib.Tokenizer:
    """The tokenizer stored in the output directory, put there if it is not yet."""
    path = output / prepared.TOKENIZER_FILE
    if path.is_file():
        return tokenizer_lib.load_tokenizer(str(path))
    size = tokenizer_lib.bpe_size(settings.tokenizer)
    if size is None:
        tokenizer = tokenizer_lib.load_tokenizer(settings.tokenizer)
    else:
        if progress:
            print(f"training a byte-level BPE of {size} tokens", file=sys.stderr, flush=True)
        tokenizer = tokenizer_lib.train_bpe(_training_texts(settings, files), size)
    tokenizer.token_bytes()  # raises here, not after hours, when bytes per token are unknown
    partial = path.with_name(path.name + ".partial")
    tokenizer.save(partial)
    partial.rename(path)
    return tokenizer


def _training_texts(
    settings: PrepareSettings, files: Sequence[sources.SourceFile]
) -> Iterator[str]:
    """Texts of the training split from the first on, until BPE_TRAINING_BYTES are reached."""
    num_bytes = 0
    for file in files:
        if file.split not in (None, "train"):
            continue
        for document in sources.read_documents(file):
            if sources.split_of(file, document, settings.validation_share) != "train":
                continue
            yield document.text
            num_bytes += len(document.text.encode())
            if num_bytes >= BPE_TRAINING_BYTES:
                return


_Counts = dict[str, prepared.ShardInfo]


def _run(
    pending: Sequence[units.Unit], num_processes: int | None, progress: bool
) -> dict[int, _Counts]:
    """Unit index -> its counts. A single unit, or one process, runs right here."""
    num_processes = min(num_processes or os.cpu_count() or 1, len(pending))
    with tqdm.tqdm(
        total=sum(unit.num_bytes for unit in pending),
        desc=f"preparing {len(pending)} unit(s)",
        unit="B",
        unit_scale=True,
        disable=not progress,
    ) as bar:
        if num_processes <= 1:
            return {unit.index: units.prepare_unit(unit, bar.update) for unit in pending}
        return _run_in_pool(pending, num_processes, bar)


def _run_in_pool(
    pending: Sequence[units.Unit], num_processes: int, bar: tqdm.tqdm
) -> dict[int, _Counts]:
    done = {}
    with concurrent.futures.ProcessPoolExecutor(
        num_processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin_worker,
    ) as pool:
        futures = {pool.submit(units.prepare_unit, unit): unit for unit in pending}
        try:
            for future in concurrent.futures.as_completed(futures):
                unit = futures[future]
                done[unit.index] = future.result()
                bar.update(unit.num_bytes)
        except concurrent.futures.process.BrokenProcessPool as error:
            raise RuntimeError(
                "a preparation process was killed (out of memory?); run the same command again to "
                "go on, with a smaller --num_processes"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return done


def _begin_worker() -> None:
    workers.exit_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism


def _finish(
    settings: PrepareSettings,
    config: Mapping[str, Any],
    tokenizer: tokenizer_lib.Tokenizer,
    shards: Sequence[tuple[str, prepared.ShardInfo]],
) -> prepared.PreparedInfo:
    by_split = {
        split: tuple(shard for own, shard in shards if own == split)
        for split in sources.SPLITS
        if any(own == split for own, _ in shards)
    }
    info = prepared.PreparedInfo(
        path=settings.output,
        builder_config=config,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        eot_id=tokenizer.eot_id,
        max_len=settings.max_len,
        token_bytes=tokenizer.token_bytes(),
        shards=by_split,
    )
    for split, counts in info.counts.items():
        if not counts["rows"]:
            raise ValueError(
                f"source {settings.source!r}: no document falls to {split}; "
                f"validation_share is {settings.validation_share}, 0 makes no held-out split"
            )
    for leftover in pathlib.Path(settings.output).glob("*.partial"):
        leftover.unlink()  # of runs that were killed
    prepared.write_tfds_metadata(info)
    info.write()
    return info


def summary(info: prepared.PreparedInfo) -> str:
    """A line per split, and where the data is."""
    lines = [f"{info.path}: vocabulary {info.vocab_size}, fingerprint {info.data_fingerprint}"]
    for split, counts in info.counts.items():
        lines.append(
            f"  {split}: {counts['documents']:,} documents, {counts['tokens']:,} tokens in "
            f"{counts['rows']:,} rows of {info.max_len + 1}; {counts['empty_documents']:,} empty "
            f"documents left out; {counts['inexact_cuts']:,} inexact cuts of long texts"
        )
    return "\n".join(lines)


def _define_flags() -> None:
    from absl import flags

    flags.DEFINE_string("source", None, "File, folder, glob, wiki_leads or python_docs.")
    flags.DEFINE_string("tokenizer", None, "tokenizer.json, its folder, Hub name, or bpe:8192.")
    flags.DEFINE_integer("max_len", None, "Tokens a row trains on.")
    flags.DEFINE_string("output", None, "Directory to write.")
    flags.DEFINE_float(
        "validation_share", 0.02, "Share of documents held out where the source has no validation/."
    )
    flags.DEFINE_integer("num_processes", None, "Processes at a time; default one per core.")
    flags.mark_flags_as_required(["source", "tokenizer", "max_len", "output"])


def main(argv: Sequence[str]) -> int:
    from absl import flags

    if len(argv) > 1:
        print(f"prepare: unknown argument {argv[1]!r}; see --help", file=sys.stderr)
        return 1
    names = {field.name for field in dataclasses.fields(PrepareSettings)} - {"unit_bytes"}
    try:
        settings = PrepareSettings(**{name: flags.FLAGS[name].value for name in names})
        print(summary(prepare(settings)))
    except (ValueError, RuntimeError) as error:
        print(f"prepare: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    from absl import app

    _define_flags()
    app.run(main)
