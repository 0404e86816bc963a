"""A trained model by the path of its checkpoint: spec, weights and tokenizer, ready to use."""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
from jax.sharding import Mesh

from deconstruct import checkpoint, decoder, mixers, sharding
from deconstruct import tokenizer as tokenizer_lib
from deconstruct.spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """What evaluation, analysis and generation start from.

    Attributes:
      params: per layer, float32.
      fixed: start values of the fixed streams.
      metadata: of its step; None while it trains.
      files_sha256: of the list of its step's files and their contents; None while it trains.
    """

    spec: ModelSpec
    params: dict[str, Any]
    fixed: dict[str, Any]
    tokenizer: tokenizer_lib.Tokenizer
    metadata: checkpoint.Metadata | None
    files_sha256: str | None = None


def load(
    path: str, step: int | None = None, best: bool = False, mesh: Mesh | None = None
) -> TrainedModel:
    """Reads weights only, and the tokenizer.json that lies in the step's or its run's directory.

    Args:
      path, step, best: as for `checkpoint.restore_weights`.
      mesh: what the weights are spread over, as in training; None puts them on one device.

    Raises:
      ValueError: as there; a mesh over which they do not divide; no tokenizer.json, or not the one
        that the model was trained with.
    """
    placement = None if mesh is None else functools.partial(_place, mesh)
    stored = checkpoint.restore_weights(path, step, best, placement)
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
        spec,
        weights["params"],
        weights.get("fixed") or {},
        tokenizer,
        stored.metadata,
        checkpoint.files_sha256(stored.directory),
    )


def _place(mesh: Mesh, spec_json: str, weights: Any) -> Any:
    """Where each of the stored weights goes."""
    spec = mixers.resolve(ModelSpec.from_json(spec_json))
    boxed = jax.eval_shape(functools.partial(decoder.init, spec), jax.random.key(0))
    sharding.check_params(boxed, mesh)
    whole = jax.tree.map(lambda _: sharding.replicated(mesh), weights)
    return {**whole, "params": sharding.param_shardings(boxed, mesh)}


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
