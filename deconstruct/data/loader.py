"""Prepared rows to batches, with Grain.

Step s of batch size B reads samples s*B ... s*B + B - 1 of the run, counted from 0 through all
steps. Sample n is row `permutation(seed, source, epoch)[position]` of the source that the mixture
names for n, where `epoch, position = divmod(rows that the source gave before, its rows)`. So what a
step reads follows from the step alone: not from the number of workers or hosts, nor from where a
run was resumed. An iterator is built at its step, and Grain's own state is never saved: restored
with another number of workers it would silently give other rows.
"""

import itertools
from collections.abc import Callable, Iterator

import grain
import numpy as np
from absl import flags

from deconstruct.data import packing, read_ahead, workers
from deconstruct.data.dataset import PreparedDataset
from deconstruct.data.mixture import TRAIN, Mixture

_ENDLESS = 1 << 40  # batches; Grain wants a length


def training_batches(
    mixture: Mixture,
    *,
    batch_size: int,
    seed: int,
    start_step: int,
    num_workers: int,
    process_index: int = 0,
    process_count: int = 1,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[packing.Batch]:
    """The batches of steps start_step, start_step + 1, ...; close() stops the workers.

    They have no end, but for one that is still waited for when `stopped`.

    Args:
      mixture: what to read; the training splits of its sources.
      batch_size: rows of a step, over all hosts.
      seed: of the order of rows, 0 to 2**32 - 1; each epoch has an order of its own.
      start_step: the first step to yield.
      num_workers: processes that read ahead; 0 reads ahead in a thread.
      process_index: which contiguous share of each batch this host takes.
      process_count: in how many shares the batch is cut.
      stopped: whether nobody wants a further batch; asked while one is waited for.

    Raises:
      ValueError: fewer rows than a batch takes, a batch that hosts cannot share, a seed out of
        range.
    """
    share = _host_share(batch_size, process_index, process_count)
    mixture.check_batch(batch_size)
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # Grain reads its flags whoever called us, absl.app or not
    if num_workers:
        workers.start_resource_tracker()
    batches = _TrainingBatches(mixture, batch_size, share, seed, start_step)
    # Without workers it is the thread of `read_ahead` that reads.
    threads = min(num_workers, 1)
    pipeline = (
        grain.MapDataset.source(batches)
        .to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads))
        .mp_prefetch(
            grain.MultiprocessingOptions(num_workers=num_workers, per_worker_buffer_size=2),
            worker_init_fn=_begin_worker,
        )
    )
    where = ", ".join(source.dataset.path for source in mixture.sources)
    return _iterate(pipeline, num_workers, where, start_step, stopped)


def validation_batches(
    dataset: PreparedDataset,
    *,
    split: str = "validation",
    batch_size: int,
    num_rows: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[packing.Batch]:
    """The first `num_rows` rows (None: all) in order; padding rows of weight 0 fill the last batch.

    Raises:
      ValueError: more rows than there are, a batch that hosts cannot share.
    """
    share = _host_share(batch_size, process_index, process_count)
    num_rows = rows_asked(dataset, split, num_rows)

    def batches() -> Iterator[packing.Batch]:
        for first in range(0, num_rows, batch_size):
            numbers = [first + i for i in share]
            rows = dataset.rows(split, [number for number in numbers if number < num_rows])
            padding = packing.padding_row(dataset.max_len + 1)
            yield packing.make_batch(rows + [padding] * (len(numbers) - len(rows)))

    return batches()


def unigram_entropy(
    dataset: PreparedDataset, split: str = "validation", num_rows: int | None = None
) -> float:
    """Entropy, in nats per token, of the targets of a split's first rows taken one by one.

    It is the least loss there of any model that ignores context.
    """
    counts = np.zeros(dataset.vocab_size, np.int64)
    for batch in validation_batches(dataset, split=split, batch_size=64, num_rows=num_rows):
        targets = batch.targets_BT[batch.weights_BT > 0]
        counts += np.bincount(targets, minlength=dataset.vocab_size)
    shares = counts[counts > 0] / counts.sum()
    return float(-np.sum(shares * np.log(shares)))


class _TrainingBatches:
    """Random access to the batches from `start_step` on, as Grain's sources want it."""

    def __init__(self, mixture: Mixture, batch_size: int, share: range, seed: int, start_step: int):
        if start_step < 0:
            raise ValueError(f"start_step must be at least 0, not {start_step}")
        if not 0 <= seed < 1 << 32:
            raise ValueError(f"the data seed must be in [0, 2**32), not {seed}")
        self._mixture = mixture
        self._batch_size = batch_size
        self._share = share
        self._start_step = start_step
        self._orders = [
            _order(source.dataset.num_rows(TRAIN), seed, place)
            for place, source in enumerate(mixture.sources)
        ]

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: int) -> packing.Batch:
        first = (self._start_step + index) * self._batch_size
        rows: list[packing.Row | None] = [None] * len(self._share)
        by_source: dict[int, dict[int, int]] = {}  # source -> place in the share -> row's number
        for place, i in enumerate(self._share):
            sample = self._mixture.locate(first + i)
            number = int(self._orders[sample.source][sample.number])
            by_source.setdefault(sample.source, {})[place] = number
        for k, numbers in by_source.items():
            dataset = self._mixture.sources[k].dataset
            for place, row in zip(
                numbers, dataset.rows(TRAIN, list(numbers.values())), strict=True
            ):
                rows[place] = row
        return packing.make_batch(rows)


def _order(num_rows: int, seed: int, place: int) -> grain.MapDataset:
    """The rows' numbers in the order that the source at `place` is read in, epoch after epoch.

    Grain's shuffle is a permutation per epoch computed index by index, in no memory. It seeds epoch
    e with seed + e; hashing the seed keeps the epochs of near seeds, and of other sources, apart.
    """
    (hashed,) = np.random.SeedSequence([seed, place]).generate_state(1)
    return grain.MapDataset.range(num_rows).shuffle(seed=int(hashed))


def _iterate(
    pipeline: grain.IterDataset,
    num_workers: int,
    path: str,
    start_step: int,
    stopped: Callable[[], bool],
) -> Iterator[packing.Batch]:
    with read_ahead.ReadAhead(pipeline, num_workers=num_workers, path=path) as batches:
        for step in itertools.count(start_step + 1):
            batch = batches.next(step, stopped)
            if batch is None:
                return
            yield batch


def _begin_worker(worker_index: int, worker_count: int) -> None:
    del worker_index, worker_count
    workers.exit_with_parent()


def _host_share(batch_size: int, process_index: int, process_count: int) -> range:
    """The places of a global batch that one host reads."""
    assert 0 <= process_index < process_count, (process_index, process_count)
    if batch_size < 1 or batch_size % process_count:
        raise ValueError(
            f"batch_size {batch_size} must be a positive multiple of the {process_count} hosts"
        )
    local = batch_size // process_count
    return range(process_index * local, (process_index + 1) * local)


def rows_asked(dataset: PreparedDataset, split: str, num_rows: int | None) -> int:
    """`num_rows`, or where it is None all rows of the split; ValueError where it has fewer."""
    there = dataset.num_rows(split)
    if num_rows is None:
        return there
    if not 1 <= num_rows <= there:
        raise ValueError(
            f"{dataset.path}: split {split!r} has {there} rows, {num_rows} were asked for; "
            "data.validation_rows must be within them, or None for all"
        )
    return num_rows
