"""Log-likelihoods of requests under a model.

All padding is on the right, where causal mixers never look, so a request's score does not depend on
what it is batched with (beyond rounding).

Axes: B rows, S context, T new tokens, N targets, D model.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from deconstruct import decoder, flops, objective, sharding, tuning
from deconstruct.decoder import Compute
from deconstruct.evaluate import batching
from deconstruct.evaluate import rows as rows_lib
from deconstruct.evaluate.batching import Arrays, Shape
from deconstruct.evaluate.rows import Request
from deconstruct.evaluate.tasks import Answer, Whole
from deconstruct.trained import TrainedModel

FLOAT32 = Compute(jnp.float32)


# The time of a FLOP of attention's maps, in that of a FLOP of a projection: on two cores, with the
# 70M model, 1.3 to 2 where lines hold contexts alone, up to 5 where they hold new tokens as well.
_MAP_SLOWNESS = 3


class Scores(NamedTuple):
    """What a list of requests came to.

    Attributes:
      answers: one a request.
      num_truncated: requests whose context lost its left end.
      tokens_read: tokens that the model read, without padding.
      tokens_scored: tokens that the log-likelihoods are sums over.
    """

    answers: list[Answer]
    num_truncated: int
    tokens_read: int
    tokens_scored: int


class Scorer:
    """Scores with one model on one mesh.

    Attributes:
      shapes: the shapes that were compiled so far.
    """

    def __init__(
        self,
        model: TrainedModel,
        mesh: Mesh,
        *,
        max_len: int | None = None,
        compute: Compute = FLOAT32,
        batch_tokens: int | None = None,
        lead: bool = False,
    ):
        """Args:
        model: its parameters already lie on the mesh.
        mesh: rows are spread over its batch axes.
        max_len: the most tokens read at once; None takes the model's own.
        compute: the dtype of the arithmetic; softmax and sums are float32 whatever it is.
        batch_tokens: how many tokens a batch holds, about; None takes the platform's.
        lead: see `rows.encode`.

        Raises:
          ValueError: a max_len that is not of the model's.
        """
        self.model, self.mesh, self.compute, self.lead = model, mesh, compute, lead
        self.max_len = model.spec.max_len if max_len is None else max_len
        if not 1 <= self.max_len <= model.spec.max_len:
            raise ValueError(
                f"max_len={max_len}: the model was trained on {model.spec.max_len}; give 1 to that"
            )
        shards = sharding.batch_shards(mesh)
        defaults = tuning.of(mesh.devices.flat[0].platform)
        self._limits = batching.Limits(
            self.max_len,
            defaults.batch_tokens * shards if batch_tokens is None else batch_tokens,
            shards,
            self._line_flops,
            defaults.compilation_flops,
        )
        self.shapes: dict[Shape, None] = {}
        self._score = jax.jit(functools.partial(_score, model.spec, compute))
        self._streams = jax.jit(functools.partial(_streams, model.spec, compute))
        self._stream_states = None

    def of(self, params: Mapping[str, Any], fixed: Mapping[str, Any]) -> "Scorer":
        """The same with other weights, as if it were new; what was compiled is shared."""
        other = copy.copy(self)
        other.model = dataclasses.replace(self.model, params=params, fixed=fixed)
        other.shapes, other._stream_states = {}, None
        return other

    def score(
        self,
        requests: Sequence[Request],
        on_rows: Callable[[int, int], None] = lambda *_: None,
        max_len: int | None = None,
    ) -> Scores:
        """The answers to `requests`, in their order; equal requests are answered once.

        Args:
          requests: what is asked.
          on_rows: called with (rows that were just scored, all rows).
          max_len: the most tokens read at once; None takes the scorer's own.

        Raises:
          ValueError: a continuation that has no tokens; weights that give no number.
        """
        unique = list(dict.fromkeys(requests))
        max_len = self.max_len if max_len is None else max_len
        encoded = rows_lib.encode(self.model.tokenizer, unique, max_len, self.lead)
        limits = dataclasses.replace(self._limits, max_len=max_len)
        sums, greedy = np.zeros(len(unique)), np.ones(len(unique), bool)
        counts = np.zeros(len(unique), np.int64)
        batches = batching.plan(encoded.rows, limits, self.shapes)
        if sum(len(batch.rows) for batch in batches) != len(encoded.rows):
            raise RuntimeError("the batches do not hold every row once; please report this")
        for batch, scores in self._run_ahead(batches):
            nll_BN, best_BN = jax.device_get(scores)
            for line, nll_N, best_N in zip(batch.lines, nll_BN, best_BN, strict=False):
                targets = [target for row in line for target in row.targets]
                for target, nll, best in zip(targets, nll_N, best_N, strict=False):
                    for request in target.requests:
                        sums[request] -= nll
                        greedy[request] &= best
                        counts[request] += 1
            on_rows(len(batch.rows), len(encoded.rows))
        if not np.all(np.isfinite(sums)):
            raise ValueError(
                "a log-likelihood is no finite number: the weights are broken, or too large for "
                f"{jnp.dtype(self.compute.dtype)}; score in float32, or an earlier checkpoint"
            )
        answers = {
            request: Answer(float(total), bool(best) and not isinstance(request, Whole))
            for request, total, best in zip(unique, sums, greedy, strict=True)
        }
        tokens_read = sum(len(row.context) + len(row.new) for row in encoded.rows)
        scored = dict(zip(unique, counts.tolist(), strict=True))
        return Scores(
            [answers[r] for r in requests],
            encoded.num_truncated,
            tokens_read,
            sum(scored[r] for r in requests),
        )

    def _line_flops(self, length: int) -> int:
        """Of the layers on a line of so many tokens, in time; the head sees targets alone."""
        a_token, line = (flops.forward_flops(self.model.spec, 1, n) for n in (1, length))
        projections = length * (a_token.mixers + a_token.feed_forward)
        maps = line.mixers + line.feed_forward - projections
        return projections + _MAP_SLOWNESS * maps

    def _run_ahead(self, batches: Sequence[batching.Batch]):
        """(batch, its scores on their way), the next batch being under way as well."""
        before = None
        for batch in batches:
            now = batch, self._run(batch)
            if before is not None:
                yield before
            before = now
        if before is not None:
            yield before

    def _run(self, batch: batching.Batch) -> tuple[jax.Array, jax.Array]:
        """(negative log-likelihoods, whether each was the likeliest), (B, N), of the targets."""
        self.shapes[batch.shape] = None
        with jax.set_mesh(self.mesh):
            weights = self.model.params, self.model.fixed
            if self._stream_states is None:
                self._stream_states = self._streams(*weights)
            placed = sharding.place_whole_batch(batching.fill(batch), self.mesh)
            return self._score(*weights, self._stream_states, placed)


def _streams(spec, compute: Compute, params, fixed):
    """The fixed streams, which no request changes, on every device."""
    states = decoder.streams(spec, params, fixed, spec.max_len, compute)
    return jax.tree.map(sharding.constrain_whole, states)


def _score(spec, compute: Compute, params, fixed, stream_states, arrays: Arrays):
    """(negative log-likelihood, whether it is the likeliest id) of each target, (B, N)."""
    if arrays.new_BT.shape[1]:
        x_BSD, new_BTD = decoder.branches(
            spec, params, fixed, *arrays[:5], compute=compute, stream_states=stream_states
        )
        x_BSD = jnp.concatenate([x_BSD, new_BTD], axis=1)
    else:
        x_BSD = decoder.hidden(
            spec,
            params,
            fixed,
            arrays.context_BS,
            segments_BT=arrays.documents_BS,
            compute=compute,
            stream_states=stream_states,
        )
    x_BND = jnp.take_along_axis(x_BSD, arrays.places_BN[:, :, None], axis=1)
    scores = objective.token_scores(
        sharding.constrain_batch(x_BND),
        decoder.head_table(spec, params),
        arrays.targets_BN,
        arrays.wanted_BN,
        vocab_size=spec.vocab_size,
    )
    return tuple(map(sharding.constrain_whole, scores))
