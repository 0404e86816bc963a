"""The record of a run: metrics.jsonl first, TensorBoard, Weights & Biases if asked for.

`metrics.jsonl` holds one JSON object a line and is the record; the others are views of it. A number
that JSON lacks is written as the string "NaN", "Infinity" or "-Infinity", so every line is plain
JSON and `float(value)` gives the number back.

A run that begins sets an older metrics.jsonl aside as metrics.jsonl.1 (.2, ...). One that resumes
from step N continues these records as if steps after N had never been:
- metrics.jsonl is rewritten without them (under a temporary name, then renamed); a last line that
  a kill cut short is dropped;
- TensorBoard events of each start lie in a file of their own, which opens with the mark that makes
  TensorBoard drop what earlier files hold after step N (its own means for restarts);
- in Weights & Biases each start is a run of its own in a group named after the workdir; what an
  earlier one logged after step N stays visible there.

So everything of step N must be written before the checkpoint of step N is saved.
"""

import itertools
import json
import logging
import math
import os
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
_log = logging.getLogger(__name__)


class MetricsWriter:
    """Writes one run's metrics; made by one host only, after it is known where the run resumes.

    Args:
      workdir: the run's directory, which exists.
      restored_step: the step the run resumes from; None for a run that begins. Older records are
        cut back or set aside as the top of this file says.
      tensorboard: whether TensorBoard events are written.
      wandb_project: project of Weights & Biases, whose other settings come from its own environment
        variables; None leaves it out.

    Raises:
      ValueError: Weights & Biases was asked for and is not installed, or a line of metrics.jsonl
        other than the last is not JSON.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        *,
        restored_step: int | None,
        tensorboard: bool = True,
        wandb_project: str | None = None,
    ):
        workdir = pathlib.Path(workdir)
        self._wandb = self._events = None
        if wandb_project is not None:
            self._wandb = _start_wandb(workdir, restored_step, wandb_project)
        self._path = workdir / METRICS_FILE
        if restored_step is None:
            set_aside(self._path)
        else:
            cut_back(self._path, restored_step)
        self._file = self._path.open("a", encoding="utf-8")
        if tensorboard:
            self._events = _open_events(workdir / TENSORBOARD_FOLDER, restored_step)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def write(
        self, kind: str, step: int, values: Mapping[str, Any], name: str | None = None
    ) -> None:
        """Appends one line and flushes it, so that a killed process loses nothing it wrote.

        Args:
          kind: "train", "validation", "benchmark", "diagnostics" or "epoch".
          step: finished optimizer steps.
          values: numbers on the host (Python's, NumPy scalars or arrays), mappings and sequences
            of them, or text. A sequence's places count from 1 in TensorBoard, as layers do.
          name: of the validation set, the task or the source.

        Raises:
          ValueError: the line cannot be written (a full disk).
        """
        head = {"kind": kind, "step": int(step), **({} if name is None else {"name": name})}
        assert not head.keys() & values.keys(), f"{kind} values hide {head.keys() & values.keys()}"
        record = {**head, **_plain(values)}
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise ValueError(f"cannot write {self._path}: {error.strerror}") from error
        scalars = dict(_numbers(values, kind if name is None else f"{kind}/{name}"))
        if self._events is not None:
            _write_events(self._events, step, scalars)
        if self._wandb is not None:
            self._wandb.log({**scalars, "step": step})

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """All records of a metrics.jsonl; a last line that a kill cut short is left out.

    Raises:
      ValueError: another line is not a JSON object; its number is named.
    """
    return [record for record, _ in _lines(pathlib.Path(path))]


def set_aside(path: pathlib.Path) -> None:
    """Renames a record that no checkpoint goes on from, to the first free of PATH.1, PATH.2, ..."""
    if not path.exists() or path.stat().st_size == 0:
        return
    aside = next(
        p for n in itertools.count(1) if not (p := path.with_name(f"{path.name}.{n}")).exists()
    )
    _log.warning("%s is of a run without a checkpoint; it is kept as %s", path, aside.name)
    path.rename(aside)


def cut_back(path: pathlib.Path, restored_step: int) -> None:
    """Removes the records after `restored_step` and a torn last line, atomically.

    The file is left alone where there is nothing to remove.
    """
    if not path.exists():
        return
    kept = b"".join(line for record, line in _lines(path) if record["step"] <= restored_step)
    before = path.read_bytes()
    if kept == before:
        return
    removed = before.count(b"\n") - kept.count(b"\n")
    if removed > 0:
        _log.warning("%s: %d lines of steps that will be trained again removed", path, removed)
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _lines(path: pathlib.Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Each record with its line, newline included even where a kill took it from the last."""
    lines = path.read_bytes().split(b"\n")
    last = max((number for number, line in enumerate(lines) if line), default=-1)
    for number, line in enumerate(lines[: last + 1]):
        try:
            record = json.loads(line)
            record["step"]
        except (ValueError, KeyError, TypeError) as error:
            if number == last:
                _log.warning("%s: its last line is cut short and left out", path)
                return
            raise ValueError(
                f"{path} line {number + 1} is not a metrics record: mend or delete that line"
            ) from error
        yield record, line + b"\n"


def _plain(value: Any) -> Any:
    """The value as JSON can hold it: NumPy's as Python's, non-finite floats as strings."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """The numbers in nested mappings and sequences, under names joined with slashes; no text."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        value = {str(place): inner for place, inner in enumerate(value, 1)}
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(inner, f"{name}/{key}")
    elif isinstance(value, int | float):
        yield name, float(value)


def _open_events(folder: pathlib.Path, restored_step: int | None) -> Any:
    """A new event file that voids all events of earlier files after `restored_step`.

    tensorboardX's plain writer is used rather than its SummaryWriter: that one queues events in a
    thread, and a kill would lose steps that the checkpoint holds.
    """
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    folder.mkdir(parents=True, exist_ok=True)
    first = 0 if restored_step is None else restored_step + 1
    events = EventsWriter(str(folder / "events"), filename_suffix=f".{first:09d}.{os.getpid()}")
    start = SessionLog(status=SessionLog.START)
    events.write_event(Event(wall_time=time.time(), step=first, session_log=start))
    events.flush()
    return events


def _write_events(events: Any, step: int, scalars: Mapping[str, float]) -> None:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
    events.write_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
    events.flush()


def _start_wandb(workdir: pathlib.Path, restored_step: int | None, project: str) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ValueError(
            "Weights & Biases was asked for and is not installed: pip install wandb, or turn it off"
        ) from error
    run = wandb.init(
        project=project,
        group=workdir.resolve().name,
        dir=str(workdir),
        config={"restored_step": restored_step},
    )
    run.define_metric("*", step_metric="step")
    return run
