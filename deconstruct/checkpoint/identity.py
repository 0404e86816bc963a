"""What makes a run this run, and how two of them differ. No JAX."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_MAX_LISTED = 12


@dataclasses.dataclass(frozen=True)
class Identity:
    """The facts that decide a run's numbers, as JSON values; another identity is another run.

    Give the config as resolved: a key whose default follows another key (a schedule's length that
    follows the number of steps) must appear with its value, or a change of it is not seen.
    """

    seed: int
    spec: Mapping[str, Any]
    config: Mapping[str, Any]
    tokenizer_fingerprint: Any
    data_fingerprint: Any

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = json.loads(json.dumps(getattr(self, field.name), allow_nan=False))
            object.__setattr__(self, field.name, value)


@dataclasses.dataclass(frozen=True)
class Metadata:
    """What is stored beside the arrays of a step.

    `step` counts finished optimizer steps, `data_position` the rows they consumed and `tokens` the
    tokens of positive weight in those; `validation_loss` is the finite loss at this step, None
    where there was none.
    """

    step: int
    data_position: int
    tokens: int
    validation_loss: float | None
    identity: Identity

    def to_json(self) -> dict[str, Any]:
        """One flat JSON object: the fields, the identity's among them."""
        record = dataclasses.asdict(self)
        identity = record.pop("identity")
        return {**record, **identity}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Metadata":
        """The inverse of `to_json`; KeyError for a missing field."""
        own = [field.name for field in dataclasses.fields(cls) if field.name != "identity"]
        identity = Identity(**{f.name: record[f.name] for f in dataclasses.fields(Identity)})
        return cls(**{name: record[name] for name in own}, identity=identity)


def differences(stored: Identity, wanted: Identity) -> dict[str, str]:
    """Dotted keys whose values differ, each with its old and new value as one text.

    Keys start with the identity's field: `config.optimizer.learning_rate`, `spec.layers.2.mixer`
    (a layer by its own number), `data_fingerprint.tokens`; they come in order, numbers by value.
    """
    old, new = (dict(_flatten(dataclasses.asdict(identity))) for identity in (stored, wanted))
    changed = {}
    for key in sorted(old.keys() | new.keys(), key=_reading_order):
        before, after = _show(old, key), _show(new, key)
        if before != after:
            changed[key] = f"{before} -> {after}"
    return changed


def covered(key: str, keys: Iterable[str]) -> bool:
    """Whether the dotted `key` is one of `keys` or lies below one of them."""
    return any(key == name or key.startswith(f"{name}.") for name in keys)


def listed(items: Iterable[str]) -> str:
    """The items on one line, the first dozen of them spelt out."""
    items = list(items)
    more = len(items) - _MAX_LISTED
    return "; ".join(items[:_MAX_LISTED]) + (f"; and {more} more" if more > 0 else "")


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested JSON under dotted keys; an empty container is a leaf.

    A list of objects is keyed by their `number` where they have one (layers), else from 1; any
    other list is one leaf.
    """
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        value = {str(item.get("number", place)): item for place, item in enumerate(value, 1)}
    if not isinstance(value, dict) or not value:
        yield prefix, value
        return
    for key, inner in value.items():
        yield from _flatten(inner, f"{prefix}.{key}" if prefix else key)


def _reading_order(key: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in key.split(".")]


def _show(leaves: Mapping[str, Any], key: str) -> str:
    return json.dumps(leaves[key], sort_keys=True) if key in leaves else "(absent)"
