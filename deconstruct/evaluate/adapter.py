"""Our checkpoints as a model of lm-evaluation-harness, for all its other tasks.

    python -m deconstruct.evaluate.adapter --model deconstruct --model_args checkpoint=DIR \\
        --tasks winogrande

takes the arguments of `lm_eval`, which knows the model by the name `deconstruct` once this module
is imported. `--model_args` are those of `DeconstructLM`.
"""

import sys
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from tqdm import tqdm

from deconstruct import generate, sharding, trained
from deconstruct.decoder import Compute
from deconstruct.evaluate.scorer import Scorer
from deconstruct.evaluate.tasks import Pair, Whole

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as error:
    sys.exit(
        f"error: lm-evaluation-harness is not here ({error}): pip install -r "
        "requirements-evaluate.txt"
    )

MAX_NEW_TOKENS = 256  # where a task does not say
BLOCK = 16  # tokens between two looks for a stop string


@register_model("deconstruct")
class DeconstructLM(LM):
    """Scores and continues text with a checkpoint."""

    def __init__(
        self,
        checkpoint: str = "",
        step: int | None = None,
        max_len: int | None = None,
        dtype: str = "float32",
        batch_tokens: int | None = None,
        start_token: bool = False,
        scorer: Scorer | None = None,
        **ignored,
    ):
        """Args:
        checkpoint: a run's or a step's directory.
        step: which step; the newest when left out.
        max_len: tokens read at once; the model's when left out.
        dtype: of the arithmetic.
        batch_tokens: about how many tokens a batch holds; None takes the platform's.
        start_token: whether the start token leads every context.
        scorer: in place of all these, one that is there already.
        ignored: lm-eval's own `batch_size`, `max_batch_size` and `device`.
        """
        super().__init__()
        unknown = ignored.keys() - {"batch_size", "max_batch_size", "device"}
        if unknown:
            raise ValueError(f"unknown model_args {', '.join(sorted(unknown))} for deconstruct")
        if scorer is None:
            if not checkpoint:
                raise ValueError("model_args lack checkpoint=DIR")
            mesh = sharding.make_mesh()
            scorer = Scorer(
                trained.load(checkpoint, step, mesh=mesh),
                mesh,
                max_len=max_len,
                compute=Compute(jnp.dtype(dtype)),
                batch_tokens=batch_tokens,
                lead=start_token,
            )
        self.scorer = scorer

    def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return [tuple(a) for a in self._score([Pair(*r.args) for r in requests], disable_tqdm)]

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        answers = self._score([Whole(*r.args) for r in requests], disable_tqdm)
        return [answer.log_likelihood for answer in answers]

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Greedy continuations, each cut before the first of its stop strings."""
        bar = tqdm(requests, desc="generating", disable=disable_tqdm)
        return [self._generate(*request.args) for request in bar]

    def _score(self, requests, disable_tqdm: bool):
        with tqdm(desc="scoring", unit=" rows", disable=disable_tqdm) as bar:

            def on_rows(num_done: int, num_all: int) -> None:
                bar.total = num_all
                bar.update(num_done)

            return self.scorer.score(requests, on_rows).answers

    def _generate(self, context: str, options: Mapping[str, Any]) -> str:
        until = options.get("until") or []
        stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        max_new, scorer = _max_new_tokens(options), self.scorer
        room = scorer.max_len - max_new
        if room < 1:
            raise ValueError(
                f"max_gen_toks={max_new} leaves no room for a prompt in {scorer.max_len} tokens: "
                "give fewer"
            )
        tokenizer = scorer.model.tokenizer
        ids = tokenizer.encode(context)
        if len(ids) == 0 or scorer.lead:
            ids = tokenizer.with_start(ids)
        blocks = generate.blocks_of_ids(
            scorer.model.spec,
            scorer.model.params,
            scorer.model.fixed,
            ids[-room:],
            max_new_tokens=max_new,
            block=BLOCK,
            room=scorer.max_len,
            end_id=tokenizer.eot_id,
            num_ids=tokenizer.vocab_size,
            compute=scorer.compute,
        )
        new: list[int] = []
        for block in blocks:
            new += block
            text = tokenizer.decode(new)  # a stop string may begin in an earlier block
            found = [text.index(stop) for stop in stops if stop in text]
            if found:
                return text[: min(found)]
        return tokenizer.decode(new)


def _max_new_tokens(options: Mapping[str, Any]) -> int:
    """ValueError for sampling, as lm-eval understands it: `do_sample` alone can switch it off."""
    if options.get("do_sample", bool(options.get("temperature"))):
        raise ValueError("deconstruct continues greedily: leave do_sample and temperature out")
    names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    given = [options[name] for name in names if options.get(name) is not None]
    return int(given[0]) if given else MAX_NEW_TOKENS


def main() -> None:
    """lm-eval's own command; what it and we refuse is one line."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except ValueError as error:
        sys.exit(f"error: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
