"""A trained model by the path of its checkpoint: spec, weights and tokenizer, ready to use."""

import dataclasses
import pathlib
from typing import Any

from deconstruct import checkpoint, mixers
from deconstruct import tokenizer as tokenizer_lib
from deconstruct.spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """What evaluation, analysis and generation start from.

    Attributes:
      params: per layer, float32.
      fixed: start values of the fixed streams.
    """

    spec: ModelSpec
    params: dict[str, Any]
    fixed: dict[str, Any]
    tokenizer: tokenizer_lib.Tokenizer
    metadata: checkpoint.Metadata


def load(path: str, step: int | None = None, best: bool = False, sharding=None) -> TrainedModel:
    """Reads weights only, and the tokenizer.json that lies in the step's or its run's directory.

    Args:
      path, step, best, sharding: as for `checkpoint.restore_weights`.

    Raises:
      ValueError: as there; no tokenizer.json, or not the one that the model was trained with.
    """
    stored = checkpoint.restore_weights(path, step, best, sharding)
    spec = mixers.resolve(ModelSpec.from_json(stored.spec_json))
    tokenizer = _tokenizer_near(pathlib.Path(stored.directory))
    if tokenizer.fingerprint != stored.metadata.identity.tokenizer_fingerprint:
        raise ValueError(
            f"the {tokenizer_lib.FILE_NAME} near {stored.directory} is not the one that its model "
            "was trained with; put that one beside the step"
        )
    weights = stored.weights
    # A plan without fixed streams stores an empty collection, which Orbax leaves out.
    return TrainedModel(
        spec, weights["params"], weights.get("fixed") or {}, tokenizer, stored.metadata
    )


def _tokenizer_near(step_directory: pathlib.Path) -> tokenizer_lib.Tokenizer:
    """The tokenizer in a step's directory, else in its run's."""
    places = [step_directory, step_directory.parent.parent]
    for place in places:
        if (place / tokenizer_lib.FILE_NAME).is_file():
            return tokenizer_lib.load_tokenizer(str(place / tokenizer_lib.FILE_NAME))
    raise ValueError(
        f"no {tokenizer_lib.FILE_NAME} in {' or '.join(map(str, places))}: copy the run's beside "
        "the step"
    )
