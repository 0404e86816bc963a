"""What a run trains on: prepared sources with weights; a single source is a mixture of one.

Sample n of a run is the next row of one of the sources. Which one is arithmetic on n and the
weights alone, spread evenly: of any first n samples a source gives its share of n, within as many
rows as there are sources. Weights count rows, and rows hold equally many tokens but for padding. A
source that has been read whole begins again, in a new order, so the weights hold to the end of the
run.
"""

import bisect
import math
import os
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from deconstruct import tokenizer as tokenizer_lib
from deconstruct.data.dataset import PreparedDataset, open_dataset

TRAIN = "train"


class Source(NamedTuple):
    """A prepared directory, what it is called, and its share of all samples (0 to 1)."""

    name: str
    dataset: PreparedDataset
    share: Fraction


class Sample(NamedTuple):
    """Where a sample comes from: the source's place in the mixture, and the rows it gave before."""

    source: int
    number: int


class Turn(NamedTuple):
    """A source that begins an epoch, counted from 1."""

    source: str
    epoch: int


class HeldOut(NamedTuple):
    """A named set of rows to validate on."""

    name: str
    dataset: PreparedDataset
    split: str


class Mixture:
    """Sources that one model can read: of one tokenizer and one row length."""

    def __init__(self, sources: Sequence[Source]):
        assert sources and sum(source.share for source in sources) == 1, sources
        self.sources = tuple(sources)
        denominator = math.lcm(*(source.share.denominator for source in sources))
        self._weights = [int(source.share * denominator) for source in sources]

    @property
    def max_len(self) -> int:
        return self._first.max_len

    @property
    def vocab_size(self) -> int:
        return self._first.vocab_size

    @property
    def token_bytes(self):
        """Bytes of text that each id stands for, (vocab_size,) int32."""
        return self._first.token_bytes

    @property
    def tokenizer(self) -> tokenizer_lib.Tokenizer:
        return self._first.tokenizer

    @property
    def fingerprint(self) -> list[dict[str, Any]]:
        """What decides the rows that are read, as JSON: each source's share, and what it holds."""
        return [
            {"number": place, "share": str(source.share), **source.dataset.info.content}
            for place, source in enumerate(self.sources, 1)
        ]

    @property
    def _first(self) -> PreparedDataset:
        return self.sources[0].dataset

    def counts(self, num_samples: int) -> list[int]:
        """How many of the first `num_samples` samples each source gives."""
        counts, left, weight_left = [], num_samples, sum(self._weights)
        for weight in self._weights:  # each takes its part of what those before it have left over
            counts.append(-(-left * weight // weight_left))
            left -= counts[-1]
            weight_left -= weight
        return counts

    def locate(self, sample: int) -> Sample:
        """Where sample `sample`, counted from 0, comes from."""
        before, after = self.counts(sample), self.counts(sample + 1)
        (source,) = [k for k, count in enumerate(after) if count > before[k]]
        return Sample(source, before[source])

    def passes(self, num_samples: int) -> list[float]:
        """How often each source is read whole, in part too, by the first `num_samples` samples."""
        counts = zip(self.counts(num_samples), self.sources, strict=True)
        return [count / source.dataset.num_rows(TRAIN) for count, source in counts]

    def turns(self, first: int, last: int) -> list[Turn]:
        """The epochs after the first that begin with one of the samples `first` to `last` - 1."""
        turns = []
        both = zip(self.counts(first), self.counts(last), strict=True)
        for source, (before, after) in zip(self.sources, both, strict=True):
            rows = source.dataset.num_rows(TRAIN)
            begun = range(max(1, -(-before // rows)), -(-after // rows))
            turns += [Turn(source.name, epoch + 1) for epoch in begun]
        return turns

    def last_step_without_repeats(self, batch_size: int) -> int:
        """How many steps of `batch_size` samples read no row twice."""
        rows = [source.dataset.num_rows(TRAIN) for source in self.sources]

        def repeats(step: int) -> bool:
            counts = self.counts(step * batch_size)
            return any(count > there for count, there in zip(counts, rows, strict=True))

        return bisect.bisect_left(range(sum(rows) + 1), True, key=repeats) - 1

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ValueError, naming the shard, if a model of `vocab_size` cannot embed all ids."""
        for source in self.sources:
            source.dataset.check_vocabulary(vocab_size)

    def check_batch(self, batch_size: int) -> None:
        """Raises ValueError for a source with fewer rows than a batch takes of it on average."""
        for source in self.sources:
            rows = source.dataset.num_rows(TRAIN)
            if rows < math.ceil(batch_size * source.share):
                share = "" if source.share == 1 else f", a share of {source.share},"
                raise ValueError(
                    f"{source.dataset.path}: split {TRAIN!r} has {rows} rows of "
                    f"{self.max_len + 1} tokens, fewer than one batch of {batch_size}{share} takes "
                    "of it; lower batch_size, or prepare more data"
                )

    def held_out(self, names: Sequence[str]) -> list[HeldOut]:
        """The sets of rows to validate on: SPLIT is that of every source, NAME/SPLIT of one.

        Raises:
          ValueError: a source, or a split of it, that is not there.
        """
        found = []
        for name in names:
            asked, _, split = name.rpartition("/")
            sources = [source for source in self.sources if asked in ("", source.name)]
            if not sources:
                known = ", ".join(source.name for source in self.sources)
                raise ValueError(f"data.validation names {name}; the sources are {known}")
            for source in sources:
                source.dataset.num_rows(split)
                own = split if len(self.sources) == 1 else f"{source.name}/{split}"
                found.append(HeldOut(own, source.dataset, split))
        return found


def open_mixture(weights: Sequence[tuple[str, Fraction]]) -> Mixture:
    """Opens prepared directories, each with its positive weight.

    A source is called by the last part of its path, or by all of it where two would be called the
    same.

    Raises:
      ValueError: one is not whole or is named twice, or they differ in tokenizer or row length.
    """
    datasets = [open_dataset(path) for path, _ in weights]
    places = [os.path.realpath(dataset.path) for dataset in datasets]
    last_parts = [os.path.basename(os.path.abspath(dataset.path)) for dataset in datasets]
    first, total = datasets[0], sum(weight for _, weight in weights)
    sources = []
    for (path, weight), dataset, place, name in zip(
        weights, datasets, places, last_parts, strict=True
    ):
        if places.count(place) > 1:
            raise ValueError(f"data.mixture names {path} twice: give it once, with one weight")
        for what in ("max_len", "tokenizer_sha256"):
            ours, theirs = getattr(dataset.info, what), getattr(first.info, what)
            if ours != theirs:
                raise ValueError(
                    f"{path} was prepared with {what} {ours}, {first.path} with {theirs}: prepare "
                    "one of them again, with the tokenizer.json in the other and its max_len"
                )
        unique = name if last_parts.count(name) == 1 else path
        sources.append(Source(unique, dataset, Fraction(weight) / total))
    return Mixture(sources)


def alone(dataset: PreparedDataset) -> Mixture:
    """The mixture of one source."""
    name = os.path.basename(os.path.abspath(dataset.path))
    return Mixture([Source(name, dataset, Fraction(1))])
