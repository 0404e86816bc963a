"""Reading checkpoints: finding a step by a path, its metadata, its arrays. Nothing here writes.

Items are read through Orbax's handlers, not through its checkpointers: those wait at barriers that
a host with a torn file never reaches, and on a bucket they refuse a step that was copied there
from a disk because it lacks the bucket's commit marker. Whether a step is whole is decided by its
contents alone.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath

from deconstruct.checkpoint.identity import Metadata, listed
from deconstruct.checkpoint.integrity import check_files

FOLDER = "checkpoints"
WEIGHTS, OPTIMIZER, METADATA = "weights", "optimizer", "metadata"
_STEP_NAME = re.compile(r"0|[1-9]\d*")

Placement = jax.sharding.Sharding | Callable[[str, Any], Any] | None


class StoredWeights(NamedTuple):
    """What `restore_weights` read: the spec as JSON text, the arrays, and what lay beside them.

    `weights` is {"params": ..., "fixed": ...} per layer; `directory` is the step's own.
    """

    spec_json: str
    weights: Any
    metadata: Metadata
    directory: epath.Path


def resolve(path: str | epath.PathLike) -> epath.Path:
    """An absolute path: `~` and relative parts resolved, bucket addresses as they are."""
    return epath.Path(path).expanduser().resolve()


def stored_steps(directory: epath.Path) -> list[int]:
    """The numbers of the steps in a `checkpoints` directory, newest first, torn ones included."""
    if not directory.is_dir():
        return []
    names = (entry.name for entry in directory.iterdir() if entry.is_dir())
    return sorted((int(name) for name in names if _STEP_NAME.fullmatch(name)), reverse=True)


def validation_losses(folder: epath.Path, steps: Iterable[int]) -> dict[int, float]:
    """The losses of those steps that have one; a step whose metadata does not read has none."""
    losses = {}
    for step in steps:
        with contextlib.suppress(ValueError):
            losses[step] = read_metadata(folder / str(step)).validation_loss
    return {step: loss for step, loss in losses.items() if loss is not None}


def read_metadata(step_directory: epath.Path) -> Metadata:
    """The metadata of one step; ValueError when it is missing or torn."""
    with _explained(METADATA):
        return Metadata.from_json(ocp.JsonCheckpointHandler().restore(step_directory / METADATA))


def read_arrays(item_directory: epath.Path, abstract: Any) -> Any:
    """An item's arrays as `abstract` asks: its structure, shapes, dtypes and shardings.

    Leaves without a sharding go to this process's first device (else Orbax would look for the
    devices of the machine that saved).

    Raises:
      ValueError: the item is missing, torn, or of another structure, shape or dtype. (Orbax by
        itself would cast another dtype without a word.)
    """
    unlike = _unlike(stored_arrays(item_directory), abstract)
    if unlike:
        raise ValueError(
            f"its {item_directory.name} differs from this program's (stored -> wanted): "
            + listed(unlike)
        )
    with _explained(item_directory.name):
        return ocp.StandardCheckpointHandler().restore(
            item_directory, args=ocp.args.StandardRestore(jax.tree.map(_placed, abstract))
        )


def stored_arrays(item_directory: epath.Path) -> Any:
    """Shapes and dtypes of an item as nested dicts of ShapeDtypeStruct; no array is read."""
    with _explained(item_directory.name):
        tree = ocp.StandardCheckpointHandler().metadata(item_directory).tree
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def restore_weights(
    path: str | epath.PathLike,
    step: int | None = None,
    best: bool = False,
    sharding: Placement = None,
) -> StoredWeights:
    """Reads the weights of one step; no optimizer array is touched and nothing is written.

    Args:
      path: a run's directory, its `checkpoints`, or the directory of one step wherever it was
        copied and whatever its name.
      step: which step; None means the newest.
      best: the step with the lowest validation loss instead.
      sharding: where arrays go: None for this process's first device, a Sharding for all leaves,
        or a function from (spec as JSON text, tree of ShapeDtypeStruct) to a tree of Shardings.

    Raises:
      ValueError: `path` is of another level (the message says which was expected), the step is
        absent, or it does not read. Another step is never taken in its place.
    """
    directory = find_step(path, step, best)
    try:
        check_files(directory, (WEIGHTS, METADATA))
        metadata = read_metadata(directory)
        abstract = stored_arrays(directory / WEIGHTS)
        spec_json = json.dumps(metadata.identity.spec)
        weights = read_arrays(directory / WEIGHTS, _place(sharding, spec_json, abstract))
        return StoredWeights(spec_json, weights, metadata, directory)
    except ValueError as error:
        others = [other for other in stored_steps(directory.parent) if str(other) != directory.name]
        hint = f"; other steps beside it: {others}" if others else ""
        raise ValueError(f"{directory} does not load: {error}{hint}") from error


def find_step(
    path: str | epath.PathLike, step: int | None = None, best: bool = False
) -> epath.Path:
    """The directory of the step that `path`, `step` and `best` mean; see `restore_weights`."""
    if step is not None and best:
        raise ValueError(f"step={step} and best=True name two steps: give one of them")
    directory = resolve(path)
    if (directory / METADATA).is_dir() or (directory / WEIGHTS).is_dir():
        return _one_step(directory, step, best)
    folder = directory / FOLDER if (directory / FOLDER).is_dir() else directory
    steps = stored_steps(folder)
    if not steps:
        raise ValueError(_wrong_level(directory))
    if best:
        return folder / str(_best_step(folder, steps))
    step = steps[0] if step is None else step
    if step not in steps:
        raise ValueError(f"{folder} has no step {step}; it has {steps}")
    return folder / str(step)


def one_line(error: BaseException) -> str:
    """An error's text on one line, its type where it has none.

    A long one loses its middle: what failed stands at its beginning and why at its end. So does
    TensorStore's, before all that it was configured with.
    """
    text = " ".join(str(error).partition("[tensorstore_spec=")[0].split()) or type(error).__name__
    return text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}"


@contextlib.contextmanager
def _explained(item: str):
    """One ValueError for all that Orbax, TensorStore and JSON raise on missing or torn files.

    A device or host that runs out of memory says nothing about the files.
    """
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # Orbax raises this very class for array data that does not read
        raise ValueError(f"its {item} does not read: {one_line(error)}") from error


def _unlike(stored: Any, wanted: Any) -> list[str]:
    """Leaves that are not in both trees, or not of one shape and dtype."""
    old, new = (
        {
            ".".join(_key_text(key) for key in path): f"{leaf.dtype}{list(leaf.shape)}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }
        for tree in (stored, wanted)
    )
    pairs = {key: (old.get(key, "(absent)"), new.get(key, "(absent)")) for key in old | new}
    return [f"{key}: {a} -> {b}" for key, (a, b) in sorted(pairs.items()) if a != b]


def _key_text(key: Any) -> str:
    """A tree key as it is stored: fields of named tuples and indices become plain names."""
    match key:
        case jax.tree_util.DictKey():
            return str(key.key)
        case jax.tree_util.SequenceKey():
            return str(key.idx)
        case jax.tree_util.GetAttrKey():
            return key.name
    raise AssertionError(f"no stored name for the tree key {key!r}")


def _placed(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _place(sharding: Placement, spec: str, abstract: Any) -> Any:
    """The abstract leaves with the shardings that `restore_weights` was given."""
    if sharding is None:
        return abstract
    if isinstance(sharding, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: sharding, abstract)
    else:
        shardings = sharding(spec, abstract)
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        abstract,
        shardings,
    )


def _one_step(directory: epath.Path, step: int | None, best: bool) -> epath.Path:
    """A step's own directory, which must not contradict `step` or `best`."""
    if best:
        raise ValueError(f"{directory} is one step: give {directory.parent} to choose the best")
    if step is not None and (stored := read_metadata(directory).step) != step:
        raise ValueError(f"{directory} is the directory of step {stored}, not of step {step}")
    return directory


def _best_step(folder: epath.Path, steps: list[int]) -> int:
    losses = validation_losses(folder, steps)
    if not losses:
        raise ValueError(f"no step in {folder} has a validation loss, so none is the best")
    return min(losses, key=lambda step: (losses[step], -step))


def _wrong_level(directory: epath.Path) -> str:
    """Why `directory` holds no checkpoint, and which level was expected."""
    expected = (
        f"expected a run's directory (it holds {FOLDER}/), a {FOLDER} directory (it holds numbered"
        f" steps) or a step's directory (it holds {WEIGHTS}/ and {METADATA}/)"
    )
    if not directory.exists():
        return f"{directory} does not exist; {expected}"
    if not directory.is_dir():
        return f"{directory} is a file; {expected}"
    if directory.name in (WEIGHTS, OPTIMIZER, METADATA):
        return f"{directory} is an item inside a step: give {directory.parent}; {expected}"
    runs = sorted(entry.name for entry in directory.iterdir() if (entry / FOLDER).is_dir())
    inside = f" but the runs {', '.join(runs)}: give one of them" if runs else ""
    return f"{directory} holds no checkpoint{inside}; {expected}"
