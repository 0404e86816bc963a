"""The loss on held-out rows while a run trains."""

from collections.abc import Callable, Mapping

import jax
import numpy as np

from deconstruct import objective, sharding, step
from deconstruct.config import Config
from deconstruct.data import loader
from deconstruct.data.mixture import HeldOut
from deconstruct.setup import Run
from deconstruct.step import TrainState


def compiled(run: Run) -> Callable:
    """The step of `validation_loss`, compiled ahead of time."""
    return step.compile_look(step.validation_step, run.program, run.mesh, num_rows(run.config))


def num_rows(config: Config) -> int:
    """Rows of a validation batch: a micro-batch, which fits wherever a training step does."""
    return config.batch_size // config.compute.micro_batches


def validation_loss(
    run: Run,
    validate_rows: Callable,
    state: TrainState,
    held_out: HeldOut,
    hosts: Mapping[str, int],
    stopped: Callable[[], bool],
) -> tuple[float, float] | None:
    """(mean nats per token, bits per byte) of a held-out set's fixed rows, summed in float64.

    Args:
      run, state: what is validated.
      validate_rows: what `compiled` gave.
      held_out: the set.
      hosts: `process_index` and `process_count`.
      stopped: asked before each batch; where it is so, there is None.
    """
    nll_sum = weight_sum = bytes_sum = 0.0
    token_bytes = np.zeros(run.spec.vocab_size, np.int64)
    token_bytes[: run.data.vocab_size] = run.data.token_bytes
    for batch in loader.validation_batches(
        held_out.dataset,
        split=held_out.split,
        batch_size=num_rows(run.config),
        num_rows=run.config.data.validation_rows,
        **hosts,
    ):
        if stopped():
            return None
        placed = sharding.place_batch(batch, run.mesh)
        with jax.set_mesh(run.mesh):
            found = jax.device_get(validate_rows(state.params, state.fixed, placed))
        nll_BT, weights_BT, targets_BT = (np.asarray(x, np.float64) for x in found)
        nll_sum += np.sum(nll_BT * weights_BT)
        weight_sum += np.sum(weights_BT)
        bytes_sum += np.sum(token_bytes[targets_BT.astype(np.int64)] * weights_BT)
    return nll_sum / weight_sum, objective.bits_per_byte(nll_sum, bytes_sum)
