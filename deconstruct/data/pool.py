"""Units of preparation, many at a time, in processes of this machine."""

import concurrent.futures
import concurrent.futures.process
import multiprocessing
import os
from collections.abc import Sequence

import tqdm

from deconstruct.data import prepared, units, workers

_Counts = dict[str, prepared.ShardInfo]


def run(
    pending: Sequence[units.Unit], num_processes: int | None, progress: bool
) -> dict[int, _Counts]:
    """Prepares units: index -> counts by split. A single unit, or one process, runs right here.

    Args:
      pending: what to do.
      num_processes: processes at a time; None is one per core.
      progress: whether to show progress on stderr.

    Raises:
      ValueError: the first bad row, with file and line; a process that was killed.
    """
    num_processes = min(num_processes or os.cpu_count() or 1, len(pending))
    with tqdm.tqdm(
        total=sum(unit.num_bytes for unit in pending),
        desc=f"preparing {len(pending)} unit(s)",
        unit="B",
        unit_scale=True,
        disable=not progress,
    ) as bar:
        if num_processes <= 1:
            return {unit.index: units.prepare_unit(unit, bar.update) for unit in pending}
        return _run_in_pool(pending, num_processes, bar)


def _run_in_pool(
    pending: Sequence[units.Unit], num_processes: int, bar: tqdm.tqdm
) -> dict[int, _Counts]:
    done = {}
    with concurrent.futures.ProcessPoolExecutor(
        num_processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin_worker,
    ) as pool:
        futures = {pool.submit(units.prepare_unit, unit): unit for unit in pending}
        try:
            for future in concurrent.futures.as_completed(futures):
                unit = futures[future]
                done[unit.index] = future.result()
                bar.update(unit.num_bytes)
        except concurrent.futures.process.BrokenProcessPool as error:
            raise ValueError(
                "a preparation process was killed (out of memory?); run the same command again to "
                "go on, with a smaller --num_processes"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return done


def _begin_worker() -> None:
    workers.exit_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
