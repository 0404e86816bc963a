"""Where a run starts: what a checkpoint must agree with, and the state that it gives back."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp

from deconstruct import checkpoint, layouts, step
from deconstruct import config as config_lib
from deconstruct.setup import Run
from deconstruct.spec import ModelSpec
from deconstruct.step import TrainState

# Config keys whose change cannot move a loss beyond rounding: where and how the run computes, what
# it reports and when. All others are compared with the checkpoint's.
FREE_KEYS = frozenset(
    {
        "config.num_steps",
        "config.checkpoint_every",
        "config.validate_every",
        "config.log_every",
        "config.log",
        "config.benchmarks",
        "config.mesh",
        "config.non_finite",
        "config.compute.platform",
        "config.compute.layout",
        "config.compute.remat",
        "config.compute.micro_batches",
        "config.data.path",
        "config.data.mixture",  # shares and contents are in the data fingerprint
        "config.data.repeat",
        "config.data.num_workers",
        "config.data.prepare_source",
        "config.data.prepare_tokenizer",
        "config.data.validation",
        "config.data.validation_rows",
    }
)


# What a change of a key needs to be understood.
HINTS = {
    "config.optimizer.schedule_steps": (
        "follows num_steps unless it is set; set it to the old value to keep the schedule"
    )
}


def resolved_config(run: Run) -> config_lib.Config:
    """The config with those defaults written out that follow other keys or the platform."""
    config = run.config
    optimizer = config.optimizer
    if optimizer.schedule_steps is None:
        optimizer = dataclasses.replace(optimizer, schedule_steps=config.num_steps)
    compute = dataclasses.replace(config.compute, dtype=jnp.dtype(run.program.compute.dtype).name)
    return dataclasses.replace(config, optimizer=optimizer, compute=compute)


def identity_of(run: Run) -> checkpoint.Identity:
    """What a checkpoint must agree with."""
    return checkpoint.Identity(
        seed=run.config.seed,
        spec=json.loads(run.spec.to_json()),
        config=config_lib.to_dict(resolved_config(run)),
        tokenizer_fingerprint=run.data.tokenizer.fingerprint,
        data_fingerprint=run.data.fingerprint,
    )


def starting_state(run: Run, saved: checkpoint.Checkpointer) -> tuple[TrainState, int]:
    """(the state to go on from, tokens trained so far), by the first case that applies.

    1. No checkpoint: initial values from the seed.
    2. The newest checkpoint that loads, of this very run: its step, weights and moments.
    3. A checkpoint past num_steps, of another run, or none that loads: a ValueError.
    """
    program, mesh = run.program, run.mesh
    per_layer = dataclasses.replace(program, scan_layers=False)
    abstract = step.abstract_state(per_layer, mesh)
    found = saved.restore(*stored_form(per_layer, abstract))
    if found is None:
        print("starting from step 0: no checkpoint is here")
        return step.init_state(program, mesh, run.config.seed, run.text_ids), 0
    at = found.metadata.step
    if at > run.config.num_steps:
        raise ValueError(
            f"{run.workdir} is at step {at}, past num_steps={run.config.num_steps}: raise num_steps"
        )
    print(f"resuming from step {at}")
    return _memory_form(program, found, mesh), found.metadata.tokens


def _is_params(tree) -> bool:
    return isinstance(tree, dict) and "final_norm" in tree


def _map_params(function, tree):
    """`function` on every subtree that has the form of the parameters (the moments have it too)."""
    return jax.tree.map(
        lambda sub: function(sub) if _is_params(sub) else sub, tree, is_leaf=_is_params
    )


def stored_form(program: step.Program, state: TrainState):
    """(weights, optimizer) as checkpoints hold them: always per layer."""
    weights = {"params": state.params, "fixed": state.fixed}
    optimizer = {"state": state.opt_state, "skipped": state.skipped}
    if not program.scan_layers:
        return weights, optimizer
    return _unstack(program.spec, weights), _unstack(program.spec, optimizer)


@functools.partial(jax.jit, static_argnums=0)  # compiled for the first save alone
def _unstack(spec: ModelSpec, tree):
    return _map_params(functools.partial(layouts.unstack_layers, spec), tree)


def _memory_form(program: step.Program, found: checkpoint.Restored, mesh) -> TrainState:
    """The inverse of `stored_form`, placed as the step wants it."""
    abstract = step.abstract_state(program, mesh)
    stack = functools.partial(layouts.stack_layers, program.spec)

    def build(weights, optimizer):
        if program.scan_layers:
            weights, optimizer = _map_params(stack, weights), _map_params(stack, optimizer)
        return TrainState(
            step=jnp.int32(found.metadata.step),
            skipped=optimizer["skipped"],
            params=weights["params"],
            opt_state=optimizer["state"],
            fixed=weights["fixed"],
        )

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    with jax.set_mesh(mesh):
        return jax.jit(build, out_shardings=shardings)(found.weights, found.optimizer)
