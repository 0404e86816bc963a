"""Text files to rows of token ids that training can read: a command and a function.

    python -m deconstruct.data.prepare --source=PATH|wiki_leads --tokenizer=PATH|bpe:8192 \\
        --max_len=2048 --output=DIR

Run again after any interruption: finished units are kept, and when all are, nothing is done.
An output directory that was made with other settings is refused, with the differences. Finished
data stays in use when its source is gone, if the other settings are its own.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import flags, logging

from deconstruct import entry, stopping
from deconstruct import tokenizer as tokenizer_lib
from deconstruct.data import (
    beam_runner,
    check,
    estimate,
    pool,
    prepared,
    readers,
    report,
    sets,
    sources,
    units,
)
from deconstruct.data import output as output_lib

RUNNERS = ("processes", "beam")
UNIT_BYTES = 64_000_000
BPE_TRAINING_BYTES = 64_000_000  # text that a BPE is trained on, from the first training document


@dataclasses.dataclass(frozen=True)
class PrepareSettings:
    """What to prepare; a leading `~` is expanded in all paths.

    Attributes:
      source: a file, folder, glob, or packaged corpus; see `sources`.
      tokenizer: see `tokenizer.load_tokenizer`; or `bpe:SIZE`, trained on the training split.
      max_len: tokens a row trains on.
      output: directory to write.
      validation_share: share of documents held out where the source has no validation split.
      unit_bytes: size of a unit of work in input bytes.
      sets: the sets of SlimPajama that are taken, see `sets`; None takes every document.
      skip_faults: whether bad rows, and the rest of files that cannot be read further, are skipped,
        counted and logged; else the first is an error.
      num_processes: processes at a time; None is one per core.
      runner: what runs the units, one of RUNNERS. Like the number of processes, it does not change
        the result.
      beam_options: Apache Beam's own pipeline options, as on a command line.
    """

    source: str
    tokenizer: str
    max_len: int
    output: str
    validation_share: float = 0.02
    unit_bytes: int = UNIT_BYTES
    sets: tuple[str, ...] | None = None
    skip_faults: bool = False
    num_processes: int | None = None
    runner: str = "processes"
    beam_options: str = ""

    def __post_init__(self):
        for name in ("source", "output"):
            object.__setattr__(self, name, prepared.local_path(getattr(self, name), name))
        object.__setattr__(self, "tokenizer", os.path.expanduser(self.tokenizer))
        if self.max_len < 1:
            raise ValueError(f"max_len must be at least 1, not {self.max_len}")
        if not 0 <= self.validation_share < 1:
            raise ValueError(f"validation_share must be in [0, 1), not {self.validation_share}")
        if self.num_processes is not None and self.num_processes < 1:
            raise ValueError(f"num_processes must be at least 1, not {self.num_processes}")
        if self.sets is not None:
            object.__setattr__(self, "sets", sets.checked(self.sets))
        if self.runner not in RUNNERS:
            raise ValueError(f"runner must be one of {', '.join(RUNNERS)}, not {self.runner!r}")
        if self.runner != "beam" and self.beam_options:
            raise ValueError("beam_options are for runner beam alone; set that, or leave them out")
        if self.runner == "beam" and self.num_processes is not None:
            raise ValueError(
                "num_processes is not for runner beam; beam_options say how many workers it has, "
                "such as --direct_num_workers=2"
            )


def prepare(settings: PrepareSettings, *, progress: bool = True) -> prepared.PreparedInfo:
    """Prepares what is not prepared yet, and returns what is there.

    Safe to call from several processes at once: the second waits for the first. Finished data is
    returned without writing anything, and without its source (with a warning) if that is gone.

    Args:
      settings: what to prepare.
      progress: whether to show progress on stderr.

    Raises:
      ValueError: for anything wrong with source, tokenizer or output, or a worker process that was
        killed, with its remedy.
    """
    pool.refuse_inside_import()
    output = pathlib.Path(settings.output)
    finished = _read_finished(output)
    try:
        files = sources.list_files(settings.source, progress)
    except sources.MissingSourceError as error:
        if finished is None:
            raise
        return _reuse_without_source(settings, finished, error)
    config = builder_config(settings, files, progress)
    if finished is not None:
        return _reuse(settings, finished, config)
    output_lib.refuse_foreign(output)
    if settings.runner == "beam":
        beam_runner.require()
    with output_lib.sole_writer(output):
        finished = _read_finished(output)
        if finished is not None:  # by another process, while this one waited
            return _reuse(settings, finished, config)
        output_lib.claim(output, config)
        return _make(settings, files, config, progress)


def builder_config(
    settings: PrepareSettings, files: Sequence[sources.SourceFile], progress: bool = False
) -> dict[str, Any]:
    """What the rows depend on; equal wherever source, tokenizer and output lie.

    Input files count by name, size and what `sources.ends_sha256` reads of them, tokenizer files by
    content.
    """
    listing = json.dumps([(file.name, file.num_bytes, file.split) for file in files])
    return _config_without_source(settings) | {
        "source_version": sources.version_of(settings.source),
        "source_files": len(files),
        "source_bytes": sum(file.num_bytes for file in files),
        "source_names_and_sizes_sha256": hashlib.sha256(listing.encode()).hexdigest(),
        "source_ends_sha256": sources.ends_sha256(files, progress),
    }


def _config_without_source(settings: PrepareSettings) -> dict[str, Any]:
    tokenizer = settings.tokenizer
    if pathlib.Path(tokenizer).exists():
        tokenizer = "sha256:" + tokenizer_lib.load_tokenizer(tokenizer).sha256
    config = {
        "format_version": prepared.FORMAT_VERSION,
        "tokenizer": tokenizer,
        "max_len": settings.max_len,
        "validation_share": settings.validation_share,
        "unit_bytes": settings.unit_bytes,
    }
    # Only what is asked for is recorded, so that data made before one could is still what it was.
    if settings.sets is not None:
        config["sets"] = list(settings.sets)
    if settings.skip_faults:
        config["skip_faults"] = True
    return config


def _read_finished(output: pathlib.Path) -> prepared.PreparedInfo | None:
    """The finished data in `output`; None where it is not whole, which preparing mends."""
    try:
        return prepared.read_info(output)
    except ValueError:
        return None


def _reuse(
    settings: PrepareSettings, finished: prepared.PreparedInfo, config: Mapping[str, Any]
) -> prepared.PreparedInfo:
    """`finished`, if it is what preparing with `config` would make."""
    there, now = finished.builder_config.get("source_version"), config["source_version"]
    if finished.source == sources.name_of(settings.source) and there != now:
        other = sources.MissingSourceError(
            f"source {settings.source} of version {there} is not there, only that of {now}"
        )
        return _reuse_without_source(settings, finished, other)
    output_lib.refuse_other_settings(finished.path, finished.builder_config, config)
    return finished


def _reuse_without_source(
    settings: PrepareSettings,
    finished: prepared.PreparedInfo,
    missing: sources.MissingSourceError,
) -> prepared.PreparedInfo:
    """`finished`, with a warning, if it agrees in all that can be known without the source."""
    now = _config_without_source(settings)
    there = {key: finished.builder_config.get(key) for key in {*now, "sets", "skip_faults"}}
    different = output_lib.differences(
        there | {"source": finished.source}, now | {"source": sources.name_of(settings.source)}
    )
    if different:
        raise ValueError(
            f"{missing}; the finished data in {finished.path} was made with other settings: "
            f"{different}"
        ) from missing
    logging.warning(
        "source %s is not there any more; using the finished data in %s",
        settings.source,
        finished.path,
    )
    return finished


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
    prepared.rename(partial, path)
    return tokenizer


def _training_texts(
    settings: PrepareSettings, files: Sequence[sources.SourceFile]
) -> Iterator[str]:
    """Texts of the training split from the first on, until BPE_TRAINING_BYTES are reached."""
    on_fault = readers.skip if settings.skip_faults else readers.stop
    num_bytes = 0
    for file in files:
        if file.split not in (None, "train"):
            continue
        for document in sources.read_documents(file, on_fault=on_fault):
            if not sets.is_chosen(file.path, document, settings.sets):
                continue
            if sources.split_of(file, document, settings.validation_share) != "train":
                continue
            yield document.text
            num_bytes += len(document.text.encode())
            if num_bytes >= BPE_TRAINING_BYTES:
                return


def _make(
    settings: PrepareSettings,
    files: Sequence[sources.SourceFile],
    config: Mapping[str, Any],
    progress: bool,
) -> prepared.PreparedInfo:
    """Makes what is missing in the output directory, which is this process's own."""
    plan = units.plan_units(
        files,
        unit_bytes=settings.unit_bytes,
        output=settings.output,
        max_len=settings.max_len,
        validation_share=settings.validation_share,
        sets=settings.sets,
        skip_faults=settings.skip_faults,
    )
    done = {unit.index: units.finished(unit) for unit in plan}
    pending = [unit for unit in plan if done[unit.index] is None]
    tokenizer = _ensure_tokenizer(settings, files, pathlib.Path(settings.output), progress)
    if progress and sum(unit.num_bytes for unit in pending) >= estimate.SMALLEST_BYTES:
        found = estimate.measure(pending, tokenizer)
        print(found.text(_processes(settings)), file=sys.stderr, flush=True)
        estimate.warn_of_a_full_disk(found, settings.output)
    done |= _run(settings, pending, progress)
    shards = [shard for unit in plan for shard in done[unit.index].items()]
    return _finish(settings, config, tokenizer, shards)


def _processes(settings: PrepareSettings) -> int | None:
    """How many units are made at a time; None where Beam decides."""
    return None if settings.runner == "beam" else settings.num_processes or os.cpu_count() or 1


def _run(
    settings: PrepareSettings, pending: Sequence[units.Unit], progress: bool
) -> dict[int, dict[str, prepared.ShardInfo]]:
    """Makes the units: index -> counts by split."""
    if settings.runner == "beam":
        return beam_runner.run(pending, shlex.split(settings.beam_options))
    what = f"preparing {len(pending)} unit(s)"
    done = pool.run(units.prepare_unit, pending, _processes(settings), what if progress else None)
    return {unit.index: counts for unit, counts in zip(pending, done, strict=True)}


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
        source=sources.name_of(settings.source),
    )
    for split, counts in info.counts.items():
        if not counts["rows"]:
            raise ValueError(
                f"source {settings.source!r}: no document falls to {split}; validation_share is "
                f"{settings.validation_share}, 0 makes no held-out split; sets are "
                f"{', '.join(settings.sets or ['all'])}"
            )
    for leftover in pathlib.Path(settings.output).rglob("*.partial"):
        leftover.unlink()  # of runs that were killed
    prepared.write_tfds_metadata(info)
    info.write()
    return info


def _define_flags() -> None:
    """Only as a command: training imports this file, and its flags are others."""
    flags.DEFINE_string("source", None, "File, folder, glob, wiki_leads or python_docs.")
    flags.DEFINE_string("tokenizer", None, "tokenizer.json, its folder, Hub name, or bpe:8192.")
    flags.DEFINE_integer("max_len", None, "Tokens a row trains on.")
    flags.DEFINE_string("output", None, "Directory to write.")
    flags.DEFINE_float(
        "validation_share", 0.02, "Share of documents held out where the source has no validation/."
    )
    flags.DEFINE_list("sets", None, f"Sets of SlimPajama to take, of {', '.join(sets.NAMES)}.")
    flags.DEFINE_boolean("skip_faults", False, "Skip, count and log what is wrong; do not stop.")
    flags.DEFINE_integer("num_processes", None, "Processes at a time; default one per core.")
    flags.DEFINE_string("runner", "processes", f"What runs the units: {', '.join(RUNNERS)}.")
    flags.DEFINE_string("beam_options", "", "Apache Beam's pipeline options, in one string.")
    flags.DEFINE_boolean(
        "check", False, "Read all of the source, print what is wrong with it, write nothing."
    )


def main(argv: Sequence[str]) -> int:
    del argv
    fields = [field for field in dataclasses.fields(PrepareSettings) if field.name != "unit_bytes"]
    values = {field.name: flags.FLAGS[field.name].value for field in fields}
    checks_only = flags.FLAGS["check"].value
    for field in fields:
        needed = field.default is dataclasses.MISSING and not (
            checks_only and field.name != "source"
        )
        if needed and values[field.name] is None:
            raise ValueError(f"--{field.name} is missing; --help says what it may be")
    left = "nothing is written" if checks_only else "finished units are kept"
    # The progress bar stands at the end of its own line.
    line = f"\nerror: stopped by {{signal}}: {left}; run the same command again to go on"
    with stopping.Stop(line):
        if checks_only:
            reports = check.run(values["source"], values["sets"], values["num_processes"])
            print(check.summary(reports))
            return int(any(file.faults for file in reports))
        print(report.summary(prepare(PrepareSettings(**values))))
        return 0


if __name__ == "__main__":
    _define_flags()
    entry.run(main)
