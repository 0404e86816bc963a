"""How two programs are timed against each other on a machine that others use as well."""

import statistics
from collections.abc import Callable, Mapping

Contender = Callable[[int], list[float]]  # number of runs -> milliseconds of each


def alternate(
    contenders: Mapping[str, Contender], *, rounds: int, runs: int
) -> dict[str, list[float]]:
    """Milliseconds of each run, the contenders taking turns so that a busy spell meets them all.

    Args:
      contenders: name -> what runs it and tells the times.
      rounds: turns of each, after one that is not counted.
      runs: runs a turn.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, run in contenders.items():
            measured = run(runs)
            if turn > 0:
                times[name] += measured
    return times


def ratio_of_medians(times: Mapping[str, list[float]], ours: str, theirs: str) -> float:
    """How many times as fast as theirs ours is."""
    return statistics.median(times[theirs]) / statistics.median(times[ours])
