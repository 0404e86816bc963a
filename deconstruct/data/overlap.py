"""An iterator that works in a thread while its items are used."""

import concurrent.futures
import contextlib
from collections.abc import Generator
from typing import Any, TypeVar

Item = TypeVar("Item")
_END: Any = object()


def ahead(items: Generator[Item, None, None]) -> Generator[Item, None, None]:
    """`items`, the next of which is made in a thread while the caller has the one before.

    What `items` raises is raised here, in its place. Never more than two of them are in memory: the
    caller's, and the next. `close()` waits for the one that is being made, and closes `items`.
    """
    with (
        contextlib.closing(items),
        concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="ahead") as thread,
    ):
        following = thread.submit(next, items, _END)
        while (item := following.result()) is not _END:
            following = thread.submit(next, items, _END)
            yield item
