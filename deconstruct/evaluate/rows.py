"""From requests to the rows of ids that a model reads, by lm-evaluation-harness's token rules.

A pair's tokens are the context's own encoding followed by what the encoding of context and
continuation together has beyond its length: where a token spans the join the two differ, and the
number of the context's tokens alone decides the cut. The start token (end-of-text) leads an empty
context and a whole text; any other context has none, as the harness does with tokenizers of this
kind, unless `lead` asks for it as in training.

A context that is too long loses its left end. A continuation that is longer than all a model reads
at once, which the harness refuses, is scored in windows after the context's last token.

What several continuations share, their context and how they begin, a row reads once.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from deconstruct.evaluate.tasks import Pair, Whole
from deconstruct.tokenizer import Tokenizer

Request = Pair | Whole


class Target(NamedTuple):
    """A token that is scored.

    Attributes:
      requests: those that it counts for.
      place: the input that predicts it: of the context, or the context's length and on for `new`.
      id: the token.
    """

    requests: tuple[int, ...]
    place: int
    id: int


@dataclasses.dataclass
class Row:
    """What a model reads at once, and what is scored of it.

    Attributes:
      context: ids, at least one.
      new: ids of continuations that follow the context, one behind the other.
      branches: which continuation each of `new` belongs to.
      targets: what is scored.
    """

    context: Sequence[int]
    new: list[int] = dataclasses.field(default_factory=list)
    branches: list[int] = dataclasses.field(default_factory=list)
    targets: list[Target] = dataclasses.field(default_factory=list)


class Encoded(NamedTuple):
    """The rows of some requests, and how many requests lost the left end of their context."""

    rows: list[Row]
    num_truncated: int


def encode(
    tokenizer: Tokenizer, requests: Sequence[Request], max_len: int, lead: bool = False
) -> Encoded:
    """The rows that answer `requests`.

    Args:
      tokenizer: the model's.
      requests: what is asked; a `Target` names one by its place.
      max_len: the most tokens that the model reads at once.
      lead: whether the start token leads every context, as it led each document in training.

    Raises:
      ValueError: a continuation without tokens.
    """
    rows = [
        row
        for place, request in enumerate(requests)
        if isinstance(request, Whole)
        for row in _windows(place, tokenizer.encode(request.text), tokenizer.eot_id, max_len)
    ]
    pairs = {place: pair for place, pair in enumerate(requests) if isinstance(pair, Pair)}
    shared: dict[bytes, list[tuple[int, np.ndarray]]] = {}
    num_truncated = 0
    for place, (context, continuation) in zip(
        pairs, _pairs_of_ids(tokenizer, list(pairs.values()), lead), strict=True
    ):
        if len(continuation) == 0:
            raise ValueError(f"the continuation {pairs[place].continuation!r} adds no token")
        if len(continuation) > max_len:
            num_truncated += 1
            rows += _windows(place, continuation, int(context[-1]), max_len)
            continue
        room = max_len + 1 - len(continuation)
        num_truncated += len(context) > room
        shared.setdefault(context[-room:].tobytes(), []).append((place, continuation))
    for context, continuations in shared.items():
        rows += _pair_rows(np.frombuffer(context, np.int32).tolist(), continuations, max_len)
    return Encoded(rows, num_truncated)


def _pairs_of_ids(
    tokenizer: Tokenizer, pairs: Sequence[Pair], lead: bool
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(context, continuation) ids of each; white space at the context's end goes over."""
    start = np.array([tokenizer.eot_id], np.int32)
    texts = []
    for context, continuation in pairs:
        kept = context.rstrip()
        texts += [kept, kept + context[len(kept) :] + continuation]
    encoded = iter(tokenizer.encode_batch(texts))
    for context, both in zip(encoded, encoded, strict=True):
        continuation = both[len(context) :]
        if len(context) == 0 and len(continuation) and continuation[0] == start[0]:
            continuation = continuation[1:]
        if len(context) == 0 or (lead and context[0] != start[0]):
            context = np.concatenate([start, context])
        yield context, continuation


def _pair_rows(
    context: list[int], continuations: Sequence[tuple[int, np.ndarray]], max_len: int
) -> Iterator[Row]:
    """What all begin with is read behind the context; where they part, each is a branch of it.

    More branches than max_len tokens, or targets, are in rows of their own.
    """
    beginning = _common_beginning([ids for _, ids in continuations])
    first = len(context) - 1
    everyone = tuple(request for request, _ in continuations)
    shared = [Target(everyone, first + i, id) for i, id in enumerate(beginning)]
    rests = [(r, ids[len(beginning) :].tolist()) for r, ids in continuations]
    for some in _of_few_tokens([rest for rest in rests if rest[1]], max_len):
        yield _branching_row(context + beginning, some, shared)
        shared = []
    if shared:  # no continuation goes on: the last token is scored, and read by none
        yield Row((context + beginning)[:-1], targets=shared)


def _of_few_tokens(rests: Sequence[tuple[int, list[int]]], most: int):
    """Parts of the rests, in order, each of so many tokens or of one rest."""
    part, size = [], 0
    for rest in rests:
        if part and size + len(rest[1]) > most:
            yield part
            part, size = [], 0
        part.append(rest)
        size += len(rest[1])
    if part:
        yield part


def _branching_row(context: list[int], rests: Sequence[tuple[int, list[int]]], targets) -> Row:
    """The row of some continuations, by request, and of targets that the context predicts."""
    row = Row(list(context), targets=list(targets))
    last = len(context) - 1
    for branch, (request, rest) in enumerate(rests):
        places = [last, *range(last + 1 + len(row.new), last + len(row.new) + len(rest))]
        row.targets += [
            Target((request,), place, id) for place, id in zip(places, rest, strict=True)
        ]
        row.new += rest[:-1]
        row.branches += [branch] * (len(rest) - 1)
    if len(rests) == 1:  # it goes on where the context ends
        row.context, row.new, row.branches = row.context + row.new, [], []
    return row


def _common_beginning(continuations: Sequence[np.ndarray]) -> list[int]:
    shortest = min(map(len, continuations))
    alike = np.all([ids[:shortest] == continuations[0][:shortest] for ids in continuations], axis=0)
    return continuations[0][: shortest if alike.all() else int(np.argmin(alike))].tolist()


def _windows(request: int, ids: np.ndarray, before: int, max_len: int) -> Iterator[Row]:
    """Windows that score each token once: the first after the token `before`, then full ones.

    A later window reads the max_len tokens before its last target, so that its first target has
    little context only where the text is read in strides of max_len.
    """
    led = [before, *ids.tolist()]
    for begin in range(0, len(ids), max_len):
        end = min(begin + max_len, len(ids))
        first = 0 if begin == 0 else end - max_len
        targets = [Target((request,), place - first, led[place + 1]) for place in range(begin, end)]
        yield Row(led[first:end], targets=targets)
