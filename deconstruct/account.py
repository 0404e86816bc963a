"""What a run says of itself: what it is, before it begins, and what came out, at its end."""

import math

import jax

from deconstruct import checkpoint, flops, generate, metrics
from deconstruct import config as config_lib
from deconstruct.data import loader
from deconstruct.resume import resolved_config
from deconstruct.setup import Run
from deconstruct.step import TrainState

_SAMPLE_TOKENS = 48


def introduce(run: Run, state: TrainState) -> None:
    """The first lines: config, layers, sizes, mesh, data."""
    config, spec = run.config, run.spec
    print(config_lib.summary(resolved_config(run)))
    print(f"layers of the model:\n{spec.table()}")
    held = {"parameters": state.params, "moments": state.opt_state}
    on_device = ", ".join(f"{name} {bytes_per_device(tree):,}" for name, tree in held.items())
    print(f"{flops.num_params(spec):,} parameters; bytes on a device: {on_device}")
    print(f"mesh {dict(run.mesh.shape)}; {config.batch_size} rows of {spec.max_len} tokens a step")
    introduce_data(run)
    every = math.lcm(config.checkpoint_every, config.validate_every)
    if every != config.checkpoint_every and config.data.validation:
        print(
            f"the best checkpoint is chosen every {every} steps, where one is both validated and "
            "saved; a checkpoint_every that validate_every divides chooses among all"
        )


def introduce_data(run: Run) -> None:
    """What is read, and how often by the end of the run."""
    data, num_steps = run.data, run.config.num_steps
    passes = data.passes(num_steps * run.config.batch_size)
    for source, times in zip(data.sources, passes, strict=True):
        share = "" if source.share == 1 else f"{float(source.share):.4g} of all rows; "
        print(
            f"data {source.name}: {share}{source.dataset.num_rows('train'):,} rows in the training "
            f"split, read {times:.2f} times by step {num_steps}"
            + (", each time in a new order" if times > 1 else "")
        )


def bytes_per_device(tree) -> int:
    """Bytes of a tree's arrays on this process's first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


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
