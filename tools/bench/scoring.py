"""Our side of `tools.bench evaluate`, the real scorer on the first device, and the comparison."""

import dataclasses
import pathlib
import statistics
import time
from collections.abc import Sequence

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from deconstruct import sharding
from deconstruct.evaluate.scorer import Scorer
from deconstruct.evaluate.tasks import Pair
from deconstruct.tokenizer import load_tokenizer
from deconstruct.trained import TrainedModel
from tools.bench import compare, ours, qwen2_weights, shapes
from tools.bench.compare import Contender

_COMPILED = "/jax/core/compile/backend_compile_duration"


class Ours:
    """A model with the peer's weights.

    Attributes:
      programs_compiled: by this process.
      log_likelihoods: of the last run's requests.
    """

    def __init__(self, shape: shapes.Shape, tokenizer: pathlib.Path, weights: pathlib.Path):
        """Args:
        shape: the model's.
        tokenizer: a tokenizer.json.
        weights: what the peer wrote.
        """
        self.programs_compiled = 0
        self.log_likelihoods: list[float] = []
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        spec = ours.make_spec(shape)
        self._mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
        with np.load(weights) as arrays:
            flat = qwen2_weights.in_our_layout(spec, arrays.items())
        params = flax.traverse_util.unflatten_dict(flat, sep="/")
        params = jax.tree.map(jnp.asarray, params)
        self._model = TrainedModel(spec, params, {}, load_tokenizer(str(tokenizer)), None)

    def scoring(self, requests: Sequence[Pair], batch_tokens: int) -> Contender:
        """What scores them so many times, in batches of about so many tokens."""
        scorer = Scorer(self._model, self._mesh, batch_tokens=batch_tokens)

        def run(runs: int) -> list[float]:
            milliseconds = []
            for _ in range(runs):
                start = time.perf_counter()
                answers = scorer.score(requests).answers
                milliseconds.append((time.perf_counter() - start) * 1e3)
                self.log_likelihoods = [answer.log_likelihood for answer in answers]
            return milliseconds

        return run

    def _on_event(self, event: str, seconds: float, **_) -> None:
        del seconds
        self.programs_compiled += event == _COMPILED


@dataclasses.dataclass(frozen=True)
class Trials:
    """How each side's best size is found.

    Attributes:
      limit: how many of the first documents are scored.
      batch_tokens: ours to try.
      peer_batch_sizes: the peer's to try.
    """

    limit: int
    batch_tokens: Sequence[int]
    peer_batch_sizes: Sequence[int]


def measure(ours, peer, by_document: Sequence[Sequence[Pair]], trials: Trials, rounds: int) -> dict:
    """What a line says of a task's requests; a side is `scoring(requests, size) -> Contender`."""
    trial = [request for own in by_document[: trials.limit] for request in own]
    tried = {
        "ours": _speeds(ours, trial, trials.batch_tokens),
        "peer": _speeds(peer, trial, trials.peer_batch_sizes),
    }
    best = {side: max(speeds, key=speeds.get) for side, speeds in tried.items()}
    requests = [request for own in by_document for request in own]
    sides = {
        "ours": ours.scoring(requests, best["ours"]),
        "peer": peer.scoring(requests, best["peer"]),
    }
    compiled_before = ours.programs_compiled
    (first,) = sides["ours"](1)
    compiled = ours.programs_compiled
    times = compare.alternate(sides, rounds=rounds, runs=1)
    result = {"requests": len(requests)}
    result["ratio"] = round(compare.ratio_of_medians(times, "ours", "peer"), 3)
    for side, milliseconds in times.items():
        speed = _per_second(requests, statistics.median(milliseconds))
        result[f"{side}_requests_per_second"] = speed
    for side, milliseconds in times.items():
        result[f"{side}_seconds"] = [round(ms / 1e3, 2) for ms in milliseconds]
    return result | {
        "first_seconds": round(first / 1e3, 2),
        "programs_compiled": compiled - compiled_before,
        "programs_compiled_later": ours.programs_compiled - compiled,
        "largest_difference": float(f"{_difference(ours, peer):.1e}"),
        "batch_tokens": best["ours"],
        "peer_batch_size": best["peer"],
        "batch_tokens_tried": tried["ours"],
        "peer_batch_size_tried": tried["peer"],
        **peer.about,
    }


def _speeds(side, requests: Sequence[Pair], sizes: Sequence[int]) -> dict[int, float]:
    """Size -> requests a second, of a second run."""
    speeds = {}
    for size in dict.fromkeys(sizes):
        _, milliseconds = side.scoring(requests, size)(2)
        speeds[size] = _per_second(requests, milliseconds)
    return speeds


def _per_second(requests: Sequence[Pair], milliseconds: float) -> float:
    return round(len(requests) / milliseconds * 1e3, 1)


def _difference(ours, peer) -> float:
    pairs = zip(ours.log_likelihoods, peer.log_likelihoods, strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)
