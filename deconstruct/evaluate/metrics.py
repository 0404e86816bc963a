"""From a value a document to a task's figure and its standard error, as lm-eval computes them."""

import dataclasses
import functools
import math
import operator
import random
from collections.abc import Callable, Sequence

import numpy as np

BOOTSTRAP_ITERATIONS = 100_000
_CHUNK = 1000  # resamples that share a seed


@dataclasses.dataclass(frozen=True)
class Metric:
    """How documents add up.

    Attributes:
      total: the figure of all documents' values.
      over: how many documents, words or bytes that figure is over.
      error: (values, bootstrap iterations) -> its standard error; None where it has none.
    """

    total: Callable[[Sequence], float]
    over: Callable[[Sequence], float]
    error: Callable[[Sequence, int], float] | None = None


def mean(values: Sequence[float]) -> float:
    return _sum(values) / len(values)


def mean_error(values: Sequence[float], iterations: int = BOOTSTRAP_ITERATIONS) -> float:
    """The sample standard deviation over the root of the number; NaN of a single value."""
    del iterations
    return _deviation(values) / math.sqrt(len(values))


def perplexity(log_likelihoods: Sequence[float]) -> float:
    """exp of the mean negative log-likelihood; a document counts once, however many tokens."""
    return _exp(-mean(log_likelihoods))


def perplexity_error(log_likelihoods: Sequence[float], iterations: int) -> float:
    """The sample standard deviation of the perplexities of `iterations` resamples.

    The resamples are those that `random.Random(i).choices` draws for the i-th thousand; as in
    lm-eval, what is beyond the last whole thousand is left out. The generator's state is handed to
    NumPy, whose Mersenne Twister gives the same numbers faster, and sums run from the first value
    to the last, as `_sum` does.
    """
    values = np.array(log_likelihoods)
    perplexities: list[float] = []
    size = min(_CHUNK, iterations)
    for chunk in range(iterations // size):
        words = random.Random(chunk).getstate()[1]
        generator = np.random.RandomState()
        generator.set_state(("MT19937", words[:-1], words[-1]))
        for _ in range(size):
            drawn = values[(generator.random_sample(len(values)) * len(values)).astype(np.int64)]
            perplexities.append(_exp(-float(np.add.accumulate(drawn)[-1] / len(values))))
    return _deviation(perplexities)


def weighted_perplexity(pairs: Sequence[tuple[float, float]]) -> float:
    """exp of minus all log-likelihoods over all weights; pairs of (log-likelihood, weight)."""
    return _exp(-_ratio(pairs))


def bits(pairs: Sequence[tuple[float, float]]) -> float:
    """Bits a unit of weight; pairs as for `weighted_perplexity`."""
    return -_ratio(pairs) / math.log(2)


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return _sum([log_likelihood for log_likelihood, _ in pairs]) / _weight(pairs)


def _weight(pairs: Sequence[tuple[float, float]]) -> float:
    return _sum([weight for _, weight in pairs])


def _sum(values: Sequence[float]) -> float:
    """From the first to the last, as Python's `sum` before 3.12: figures must not depend on it."""
    return functools.reduce(operator.add, values)


def _deviation(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.nan
    center = mean(values)
    squares = [(value - center) ** 2 for value in values]
    return math.sqrt(_sum(squares) / (len(values) - 1))


def _exp(x: float) -> float:
    """exp, infinite where a float ends: an untrained model's perplexity may be that large."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


MEAN = Metric(mean, len, mean_error)
PERPLEXITY = Metric(perplexity, len, perplexity_error)
WEIGHTED_PERPLEXITY = Metric(weighted_perplexity, _weight)
BITS = Metric(bits, _weight)
