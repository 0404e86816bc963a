"""What a finished run says of itself."""

import jax

from deconstruct import checkpoint, generate, metrics
from deconstruct.data import loader
from deconstruct.setup import Run
from deconstruct.step import TrainState

_SAMPLE_TOKENS = 48


def conclude(run: Run, state: TrainState) -> None:
    """The last lines: validation loss against the unigram entropy, and a sample."""
    path = run.workdir / metrics.METRICS_FILE
    records = [r for r in metrics.read_metrics(path) if r["kind"] == "validation"]
    for name, dataset, split in run.data.held_out(run.config.data.validation):
        loss = next((r["loss"] for r in reversed(records) if r["name"] == name), None)
        if loss is None:
            continue
        entropy = loader.unigram_entropy(dataset, split, run.config.data.validation_rows)
        print(
            f"{name}: loss {float(loss):.4f} nats per token; "
            f"without any context (unigram entropy) it would be {entropy:.4f}"
        )
    if run.config.log.sample_prompt is not None:
        print_sample(run, state, run.config.log.sample_prompt)
    print(f"done: step {int(state.step)}; checkpoints in {run.workdir / checkpoint.FOLDER}")


def print_sample(run: Run, state: TrainState, prompt: str) -> None:
    """A continuation of `prompt`, as long as fits in max_len."""
    tokenizer = run.data.tokenizer
    room = run.spec.max_len - len(tokenizer.with_start(tokenizer.encode(prompt)))
    if room < 1:
        print(f"no sample: log.sample_prompt alone fills max_len={run.spec.max_len}")
        return
    with jax.set_mesh(run.mesh):
        text = generate.continue_text(
            run.spec,
            state.params,
            state.fixed,
            tokenizer,
            prompt,
            max_new_tokens=min(_SAMPLE_TOKENS, room),
            temperature=0.7,
        )
    print(f"sample: {prompt}[{text}]")
