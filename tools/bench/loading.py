"""Speed of the loader: alone, and as a training loop waits for it."""

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence

import jax

from deconstruct import config as config_lib
from deconstruct import mixers, optim, setup, sharding, step
from deconstruct.data import loader, packing
from deconstruct.data.dataset import PreparedDataset
from deconstruct.data.mixture import Mixture, alone
from tools.bench import compare

WARM_UP = 8  # batches that are not counted: workers start, files open


def open_batches(mixture: Mixture, batch_size: int, num_workers: int):
    """Training batches, from the first step on; close it."""
    return contextlib.closing(
        loader.training_batches(
            mixture, batch_size=batch_size, seed=0, start_step=0, num_workers=num_workers
        )
    )


def speed(
    mixtures: Sequence[Mixture],
    *,
    batch_size: int,
    num_workers: list[int],
    rounds: int,
    batches: int,
) -> list[dict]:
    """Tokens a second of each mixture with each number of workers, taking turns.

    The reader does nothing else.

    Args:
      mixtures: what is read, of rows of one length.
      batch_size: rows of a batch.
      num_workers: of the loader, each in turn.
      rounds: turns that count.
      batches: of a turn.
    """

    def reader(mixture: Mixture, workers: int):
        def read(number: int) -> list[float]:
            with open_batches(mixture, batch_size, workers) as iterator:
                _take(iterator, WARM_UP)
                start = time.perf_counter()
                _take(iterator, number)
                return [(time.perf_counter() - start) * 1e3 / number]

        return read

    sides = {f"{k} {n}": (mixture, n) for k, mixture in enumerate(mixtures) for n in num_workers}
    readers = {name: reader(*side) for name, side in sides.items()}
    times = compare.alternate(readers, rounds=rounds, runs=batches)
    return [
        {
            "sources": len(sides[name][0].sources),
            "num_workers": sides[name][1],
            "batch_size": batch_size,
            "max_len": sides[name][0].max_len,
            "tokens_per_second": round(
                batch_size * sides[name][0].max_len / statistics.median(milliseconds) * 1e3
            ),
            "ms_per_batch": round(statistics.median(milliseconds), 3),
        }
        for name, milliseconds in times.items()
    ]


def _take(iterator: Iterator[packing.Batch], number: int) -> None:
    for _ in range(number):
        next(iterator)


def waiting(
    dataset: PreparedDataset, config: config_lib.Config, *, num_workers: int, steps: int
) -> dict:
    """How long a training loop waits for its batches, the loop being as `run.Loop` has it.

    Args:
      dataset: rows of `config.max_len`.
      config: model, batch and optimizer; the vocabulary is the data's.
      num_workers: of the loader.
      steps: that count.
    """
    spec = mixers.resolve(config.model.build(config.max_len, dataset.vocab_size))
    schedule = optim.make_schedule(config.learning_rate, config.num_steps, config.optimizer)
    program = setup.make_program(config, spec, schedule, "cpu")
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    state = step.init_state(program, mesh, seed=0)
    train_step = step.compile_train_step(
        program, mesh, step.abstract_batch(spec, config.batch_size, mesh)
    )
    waits, ends, pending = [], [], None
    with open_batches(alone(dataset), config.batch_size, num_workers) as batches:
        for _ in range(WARM_UP + steps):
            start = time.perf_counter()
            batch = next(batches)
            waits.append(time.perf_counter() - start)
            state, metrics = train_step(state, sharding.place_batch(batch, mesh))
            if pending is not None:
                jax.device_get(pending)
            pending = metrics
            ends.append(time.perf_counter())
    wait = sum(waits[WARM_UP:])
    total = ends[-1] - ends[WARM_UP - 1]
    tokens = config.batch_size * config.max_len
    return {
        "num_workers": num_workers,
        "batch_size": config.batch_size,
        "max_len": config.max_len,
        "steps": steps,
        "ms_per_step": round(total / steps * 1e3, 2),
        "wait_ms_per_step": round(wait / steps * 1e3, 3),
        "wait_share": round(wait / total, 5),
        "tokens_per_second": round(tokens * steps / total),
    }
