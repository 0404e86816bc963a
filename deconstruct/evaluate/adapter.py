"""Our checkpoints as a model of lm-evaluation-harness, for all its other tasks.

    python -m deconstruct.evaluate.adapter --model deconstruct --model_args checkpoint=DIR \\
        --tasks winogrande

takes the arguments of `lm_eval`, which knows the model by the name `deconstruct` once this module
is imported. `--model_args` are those of `DeconstructLM`.
"""

import sys
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from deconstruct import generate, sharding, trained
from deconstruct.decoder import Compute
from deconstruct.evaluate.scorer import BATCH_TOKENS, Scorer
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


@register_model("deconstruct")
class DeconstructLM(LM):
    """Scores and continues text with a checkpoint."""

    def __init__(
        self,
        checkpoint: str = "",
        step: int | None = None,
        max_len: int | None = None,
        dtype: str = "float32",
        batch_tokens: int = BATCH_TOKENS,
        start_token: bool = False,
        scorer: Scorer | None = None,
        **ignored,
    ):
        """Args:
        checkpoint: a run's or a step's directory.
        step: which step; the newest when left out.
        max_len: tokens read at once; the model's when left out.
        dtype: of the arithmetic.
        batch_tokens: about how many tokens a batch holds.
        start_token: whether the start token leads every context.
        scorer: in place of all these, one that is there already.
        ignored: lm-eval's own `batch_size`, `max_batch_size` and `device`.
        """
        super().__init__()
        unknown = ignored.keys() - {"batch_size", "max_batch_size", "device"}
        if unknown:
            raise ValueError(f"unknown model_args {', '.join(sorted(unknown))} for deconstruct")
        if scorer is None:
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

    def _generate(self, context: str, options: dict) -> str:
        until = options.get("until") or []
        stops: Sequence[str] = [until] if isinstance(until, str) else until
        if options.get("do_sample") or options.get("temperature"):
            raise ValueError("deconstruct continues greedily: leave do_sample and temperature out")
        max_new = options.get("max_gen_toks", MAX_NEW_TOKENS)
        model, room = self.scorer.model, self.scorer.max_len - max_new
        if room < 1:
            raise ValueError(
                f"max_gen_toks={max_new} leaves no room for a prompt in {self.scorer.max_len} "
                "tokens: give fewer"
            )
        ids = model.tokenizer.encode(context)
        if len(ids) == 0 or self.scorer.lead:
            ids = model.tokenizer.with_start(ids)
        new = generate.continue_ids(
            model.spec,
            model.params,
            model.fixed,
            np.asarray(ids[-room:]),
            max_new_tokens=max_new,
            end_id=model.tokenizer.eot_id,
            num_ids=model.tokenizer.vocab_size,
        )
        text = model.tokenizer.decode(new)
        return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
