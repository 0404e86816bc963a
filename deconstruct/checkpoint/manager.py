"""The trainer's side: saving in the background, keeping the newest and the best, resuming."""

import contextlib
import dataclasses
import functools
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from deconstruct.checkpoint import reading
from deconstruct.checkpoint.identity import Identity, Metadata, covered, differences, listed
from deconstruct.checkpoint.integrity import check_files, write_file_list

_UNFINISHED_NAME = re.compile(r"\d+\.orbax-checkpoint-tmp.*")
_REFUSED_SUFFIX = ".refused"
_ITEMS = (reading.WEIGHTS, reading.OPTIMIZER, reading.METADATA)
_NEVER_RETRIEVED = "exception was never retrieved"
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Restored:
    """A step as it was found, its arrays placed as the abstract leaves say."""

    weights: Any
    optimizer: Any
    metadata: Metadata


class Checkpointer:
    """Saves and resumes one run in `workdir`/checkpoints.

    Use as a context manager, or call `close`: leaving without it may abandon the last save.
    Not thread-safe. With several hosts every host makes the same calls at the same steps.

    Args:
      workdir: the run's directory; relative paths and `~` are resolved.
      identity: this run's facts; a stored step with others is refused at `restore`.
      keep_latest: how many of the newest steps stay; the one with the lowest validation loss stays
        besides. Older ones are deleted once a newer step is complete.
      free: dotted keys (`config.log_every`; a key covers all below it) that may differ from the
        stored identity, because no loss depends on them (logged as information).
      allowed: dotted keys whose change the user asked for (logged as a warning).
      hints: dotted key -> what a refusal should say besides.
    """

    def __init__(
        self,
        workdir: str | epath.PathLike,
        identity: Identity,
        *,
        keep_latest: int = 2,
        free: Collection[str] = (),
        allowed: Collection[str] = (),
        hints: Mapping[str, str] | None = None,
    ):
        self.directory = reading.resolve(workdir) / reading.FOLDER
        self._identity = identity
        self._hints = hints or {}
        self._policy = _NewestAndBest(keep_latest)
        self._free, self._allowed = frozenset(free), frozenset(allowed)
        self._manager: ocp.CheckpointManager | None = None
        self._refused: set[str] = set()
        self._saving: int | None = None

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, _, error: BaseException | None, __) -> None:
        """Closes. A save that fails now never hides why the block was left."""
        try:
            self.close()
        except ValueError as failure:
            if error is None:
                raise
            if isinstance(error, ValueError):
                raise ValueError(f"{error}; besides, {failure}") from error
            _log.error("%s", failure)

    def restore(self, abstract_weights: Any, abstract_optimizer: Any) -> Restored | None:
        """The newest step that loads, or None when the directory holds none at all.

        Identities are compared before any array is read. Steps that do not load are logged, left
        as they are, and set aside (renamed, never deleted) only when this run next saves.

        Args:
          abstract_weights: ShapeDtypeStructs (with shardings) of {"params": ..., "fixed": ...}.
          abstract_optimizer: the same of the optimizer's state.

        Raises:
          ValueError: the newest readable step belongs to another run (the differences are listed),
            steps exist and none of them loads, or something that is no directory is in the way.
        """
        if os.path.lexists(self.directory) and not self.directory.is_dir():
            raise ValueError(
                f"{self.directory} is no directory, or a link to one that is not there (is its "
                "disk mounted?): mend it, or give another --workdir"
            )
        refusals = dict.fromkeys(self._strangers(), "is not a step's name")
        for step in reading.stored_steps(self.directory):
            restored, reason = self._try(step, abstract_weights, abstract_optimizer)
            if restored is not None:
                return restored
            _log.warning("checkpoint step %d in %s refused: %s", step, self.directory, reason)
            refusals[str(step)] = reason
            self._refused.add(str(step))
        if not refusals:
            return None
        reasons = listed(f"{name}: {reason}" for name, reason in refusals.items())
        raise ValueError(
            f"{self.directory} holds checkpoints but none of them loads, and training must not "
            f"start again over them: {reasons}. Repair one, or give another --workdir"
        )

    def save(
        self,
        step: int,
        weights: Any,
        optimizer: Any,
        *,
        data_position: int,
        tokens: int,
        validation_loss: float | None = None,
    ) -> None:
        """Starts to store a step and returns once its arrays are safe from the next train step.

        The arrays may be donated as soon as this returns: accelerators have copied them to the
        host, and on CPU the runtime does not reuse a buffer that a save still reads. Waits for the
        save before it.

        Args:
          step: finished optimizer steps; higher than any stored one.
          weights: {"params": ..., "fixed": ...}, per layer.
          optimizer: the optimizer's state, per layer.
          data_position: rows consumed so far.
          tokens: tokens trained so far.
          validation_loss: the loss at this step; a non-finite one counts as none.

        Raises:
          ValueError: a value is NaN or infinite (nothing is stored), the step is not a new one, or
            the save before this one failed.
        """
        _require_finite(step, {reading.WEIGHTS: weights, reading.OPTIMIZER: optimizer})
        if validation_loss is not None and not math.isfinite(validation_loss):
            _log.warning("validation loss %s at step %d: never the best", validation_loss, step)
            validation_loss = None
        manager = self._writer()
        self.wait()
        if (latest := manager.latest_step()) is not None and step <= latest:
            raise ValueError(f"step {step} is not after the stored step {latest}: not saved")
        metadata = Metadata(step, data_position, tokens, validation_loss, self._identity)
        self._policy.losses[step] = validation_loss
        self._saving = step
        with self._abandoned_on_failure():
            saved = manager.save(
                step,
                args=ocp.args.Composite(
                    **{
                        reading.WEIGHTS: ocp.args.StandardSave(weights),
                        reading.OPTIMIZER: ocp.args.StandardSave(optimizer),
                        reading.METADATA: ocp.args.JsonSave(metadata.to_json()),
                    }
                ),
                force=True,
            )
        assert saved, f"Orbax declined to save step {step}"

    @property
    def latest_step(self) -> int | None:
        """The newest step that is stored, or on its way; None before any."""
        if self._manager is not None:
            return self._manager.latest_step()
        steps = reading.stored_steps(self.directory)
        return next((step for step in steps if str(step) not in self._refused), None)

    def check(self) -> None:
        """Raises the ValueError of a background save that has failed; never waits for one."""
        if self._manager is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Returns when the save in progress is complete; ValueError when it failed."""
        if self._manager is None:
            return
        with self._abandoned_on_failure():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for the save in progress and ends the background threads; raises as `wait`."""
        if self._manager is not None:
            manager, self._manager = self._manager, None
            with _failure_explained(self.directory):
                manager.close()

    def _try(
        self, step: int, abstract_weights: Any, abstract_optimizer: Any
    ) -> tuple[Restored | None, str]:
        """The step's contents, or None and why it was refused; all hosts agree on which."""
        directory = self.directory / str(step)
        metadata, reason = _attempt(reading.read_metadata, directory)
        if metadata is None:
            return None, reason
        self._compare(step, metadata.identity)
        _, reason = _attempt(check_files, directory, _ITEMS)
        if reason:
            return None, reason
        trees = []
        for item, abstract in (
            (reading.WEIGHTS, abstract_weights),
            (reading.OPTIMIZER, abstract_optimizer),
        ):
            tree, reason = _attempt(reading.read_arrays, directory / item, abstract)
            if tree is None:
                return None, reason
            trees.append(tree)
        return Restored(*trees, metadata), ""

    def _compare(self, step: int, stored: Identity) -> None:
        """Refuses an identity that differs in a key that is neither free nor allowed."""
        changed = differences(stored, self._identity)
        refused = []
        for key, change in changed.items():
            if covered(key, self._allowed):
                _log.warning("resuming from step %d with %s: %s, as asked", step, key, change)
            elif covered(key, self._free):
                _log.info("resuming from step %d with %s: %s", step, key, change)
            else:
                hint = f" ({self._hints[key]})" if key in self._hints else ""
                refused.append(f"{key}: {change}{hint}")
        if refused:
            raise ValueError(
                f"checkpoint step {step} in {self.directory} belongs to another run "
                f"(stored -> this run): {listed(refused)}. Put the old values back, give "
                "another --workdir, or allow a change by --allow_change=KEY"
            )

    def _strangers(self) -> Iterator[str]:
        """Names of directories that are neither steps nor unfinished: of refused steps, too."""
        if not self.directory.is_dir():
            return
        steps = {str(step) for step in reading.stored_steps(self.directory)}
        for entry in sorted(self.directory.iterdir()):
            unfinished = _UNFINISHED_NAME.fullmatch(entry.name)
            if entry.is_dir() and not unfinished and entry.name not in steps:
                yield entry.name

    def _writer(self) -> ocp.CheckpointManager:
        """Orbax's manager, opened at the first save: only then may the directory change."""
        if self._manager is None:
            if jax.process_index() == 0:
                with _failure_explained(self.directory):
                    self.directory.mkdir(parents=True, exist_ok=True)
                    self._tidy()
            if jax.process_count() > 1:
                multihost_utils.sync_global_devices("deconstruct_checkpoint_tidy")
            _silence_abandoned_writes()
            steps = reading.stored_steps(self.directory)
            self._policy.losses.update(reading.validation_losses(self.directory, steps))
            self._manager = ocp.CheckpointManager(
                self.directory,
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=self._policy,
                    async_options=ocp.AsyncOptions(post_finalization_callback=self._list_files),
                    create=False,
                    lightweight_initialize=True,
                ),
            )
        return self._manager

    @contextlib.contextmanager
    def _abandoned_on_failure(self) -> Iterator[None]:
        """What fails inside is explained, and the next save opens the directory anew.

        Orbax has already forgotten the steps that the failed one would have replaced.
        """
        try:
            with _failure_explained(self.directory):
                yield
        except ValueError:
            manager, self._manager = self._manager, None
            with contextlib.suppress(OSError, ValueError):  # the same failure, of another item
                manager.close()
            raise

    def _list_files(self) -> None:
        """Called by Orbax on one host when all of a step is written and not yet committed."""
        step = str(self._saving)
        unfinished = (
            entry
            for entry in self.directory.iterdir()
            if _UNFINISHED_NAME.fullmatch(entry.name) and entry.name.split(".")[0] == step
        )
        write_file_list(next(unfinished, self.directory / step))

    def _tidy(self) -> None:
        """Deletes what killed saves left under temporary names, sets refused steps aside."""
        for entry in list(self.directory.iterdir()):
            if _UNFINISHED_NAME.fullmatch(entry.name):
                _log.warning("deleting %s, which a killed save left unfinished", entry)
                entry.rmtree()
            elif entry.name in self._refused:
                aside = _unused(entry.with_name(entry.name + _REFUSED_SUFFIX))
                _log.warning("setting aside the refused step %s as %s", entry, aside.name)
                entry.rename(aside)


class _NewestAndBest:
    """Orbax's preservation policy: the newest `keep_latest` steps, and the best of all."""

    def __init__(self, keep_latest: int):
        assert keep_latest >= 1, "without the newest step a run cannot resume"
        self.keep_latest = keep_latest
        self.losses: dict[int, float | None] = {}

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        steps = sorted(info.step for info in checkpoints)
        scored = [step for step in steps if self.losses.get(step) is not None]
        best = min(scored, key=lambda step: (self.losses[step], -step), default=None)
        kept = {*steps[-self.keep_latest :], best}
        return [info.step in kept for info in checkpoints]


def _attempt(read: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """(what `read` gives, "") on every host, or (None, why not) when any host gets a ValueError."""
    try:
        result, reason, failed = read(*args), "", False
    except ValueError as error:
        result, reason, failed = None, str(error), True
    if jax.process_count() > 1:
        everywhere = multihost_utils.process_allgather(np.array(not failed)).all()
        if not (failed or everywhere):
            result, reason = None, "it does not read on another host"
    return result, reason


@jax.jit
def _finite(leaves: Sequence[jax.Array]) -> jax.Array:
    """Which leaves are finite, as one program: several at once may block each other on a mesh."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves])


def _require_finite(step: int, items: Mapping[str, Any]) -> None:
    """Refuses NaN and infinity, so that no stored step can poison a resumed run."""
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(items)
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
    }
    verdicts = zip(leaves, jax.device_get(_finite(list(leaves.values()))), strict=True)
    bad = [name for name, finite in verdicts if not finite]
    if bad:
        raise ValueError(f"step {step} holds NaN or infinity and is not stored: {listed(bad)}")


@contextlib.contextmanager
def _failure_explained(directory: epath.Path) -> Iterator[None]:
    """One ValueError for whatever kept a step from being written, then or in the background."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ValueError(
            f"a checkpoint in {directory} was not written: {reading.one_line(error)}. The steps "
            "before it are whole: mend the cause and run the same command again"
        ) from error


@functools.cache
def _silence_abandoned_writes() -> None:
    """A failed save is one error, raised by `save`, `wait` or `close`.

    Orbax leaves the loop of a failed item at its first error. The writes still under way then fail
    on TensorStore's threads, each with a traceback of its own, into and behind that one error.
    """

    def hook(unraisable):
        if str(unraisable.exc_value) != "Event loop is closed":
            others(unraisable)

    others = sys.unraisablehook
    sys.unraisablehook = hook
    logging.getLogger("asyncio").addFilter(
        lambda record: not record.getMessage().partition("\n")[0].endswith(_NEVER_RETRIEVED)
    )


def _unused(path: epath.Path) -> epath.Path:
    """`path`, or the first of `path`-2, `path`-3, ... that does not exist."""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
