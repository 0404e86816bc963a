"""The named sets that a corpus is made of, as SlimPajama's rows name theirs, and a choice of them.

A choice holds for all splits. Rows say their set in `meta.redpajama_set_name`; see `readers`.
"""

import difflib
from collections.abc import Sequence

from deconstruct.data import readers

NAMES = (
    "RedPajamaArXiv",
    "RedPajamaBook",
    "RedPajamaC4",
    "RedPajamaCommonCrawl",
    "RedPajamaGithub",
    "RedPajamaStackExchange",
    "RedPajamaWikipedia",
)
UNNAMED = "(no set)"  # in reports


def checked(names: Sequence[str]) -> tuple[str, ...]:
    """A choice of sets, sorted, each once.

    Raises:
      ValueError: there is none, or one that SlimPajama has not, with the nearest that it has.
    """
    if not names:
        raise ValueError(f"sets is empty; leave it out, or name some of {', '.join(NAMES)}")
    by_lower = {name.lower(): name for name in NAMES}
    for name in names:
        if name not in NAMES:
            near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0)
            raise ValueError(
                f"there is no set {name!r}; the nearest is {by_lower[near[0]]}, all are "
                f"{', '.join(NAMES)}"
            )
    return tuple(sorted(set(names)))


def fault(document: readers.Document, choice: Sequence[str] | None) -> readers.Fault | None:
    """What is wrong with a document where sets are chosen: that it is of none; else None."""
    if choice is None or document.set_name is not None:
        return None
    what = f"no {readers.META}.{readers.SET_NAME}, by which sets are chosen"
    return readers.Fault(what, "leave the choice of sets out", document.where)


def is_chosen(path: str, document: readers.Document, choice: Sequence[str] | None) -> bool:
    """Whether a document of the file at `path` is of a chosen set; a choice of None is all.

    Raises:
      ValueError: there is a choice, and the document is of no set.
    """
    wrong = fault(document, choice)
    if wrong is not None:
        raise ValueError(wrong.message(path))
    return choice is None or document.set_name in choice
