"""A function over many pieces of work, in processes of this machine."""

import concurrent.futures
import concurrent.futures.process
import multiprocessing
import os
from collections.abc import Callable, Sequence
from typing import Any

import tqdm

from deconstruct.data import workers

_GUARD = "under `if __name__ == '__main__':`"


def run(
    function: Callable[..., Any],
    items: Sequence[Any],
    num_processes: int | None,
    description: str | None,
) -> list[Any]:
    """`function` of each item, in their order. A single item, or one process, runs right here.

    Args:
      function: of an item, and of what it tells how many input bytes it has just read; a worker
        process finds it by its name.
      items: what to do; `item.num_bytes` is its size.
      num_processes: processes at a time; None is one per core.
      description: of the progress shown on stderr; None shows none.

    Raises:
      ValueError: what `function` raises first; a process that was killed.
    """
    num_processes = min(num_processes or os.cpu_count() or 1, len(items))
    workers.start_resource_tracker()
    with tqdm.tqdm(
        total=sum(item.num_bytes for item in items),
        desc=description,
        unit="B",
        unit_scale=True,
        disable=description is None,
    ) as bar:
        if num_processes <= 1:
            return [function(item, bar.update) for item in items]
        return _run_in_pool(function, items, num_processes, bar)


def refuse_inside_import() -> None:
    """Raises ValueError in a worker process that is only importing its parent's script.

    A script whose preparing is not guarded prepares in each worker again, which would wait for ever
    for the directory that the parent holds.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ValueError(f"a script that prepares must do so {_GUARD}")


def _run_in_pool(
    function: Callable[..., Any], items: Sequence[Any], num_processes: int, bar: tqdm.tqdm
) -> list[Any]:
    others = set(multiprocessing.active_children())
    with concurrent.futures.ProcessPoolExecutor(
        num_processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin_worker,
    ) as pool:
        with workers.signals_unheard():
            futures = {pool.submit(function, item): item for item in items}
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
                bar.update(futures[future].num_bytes)
        except concurrent.futures.process.BrokenProcessPool as error:
            raise ValueError(
                "a preparation process was killed (out of memory?); run the same command again to "
                "go on, with a smaller --num_processes (of a script of your own: the processes "
                f"import it, so it must prepare {_GUARD})"
            ) from error
        except KeyboardInterrupt:  # they do not hear it, and nobody wants to wait for them
            for worker in set(multiprocessing.active_children()) - others:
                worker.kill()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return [future.result() for future in futures]


def _begin_worker() -> None:
    workers.exit_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
