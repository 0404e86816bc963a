"""The schedule by hand, and AdamW against optax's and against NumPy float64."""

import dataclasses
import subprocess
import sys

import devices
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from deconstruct import optim
from deconstruct.config import OptimizerConfig

RELATIVE_TO_OPTAX = 1e-6
RELATIVE_TO_FLOAT64 = 2e-6


def config(**changes) -> OptimizerConfig:
    return dataclasses.replace(OptimizerConfig(warmup_steps=4), **changes)


def make_params(seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return {
        "embedding": {"table": normal(12, 8)},
        "layer_01": {
            "mixer_norm": {"scale": normal(8)},
            "mixer": {"query": {"kernel": normal(8, 8), "bias": normal(8)}},
        },
        # As a scan stacks them: decay must not follow the number of axes.
        "segment_00": {"block_00": {"key": {"kernel": normal(3, 8, 8), "bias": normal(3, 8)}}},
    }


def make_grads(step, scale=1.0):
    return jax.tree.map(lambda x: scale * x, make_params(seed=100 + step))


def assert_trees_near(got, wanted, relative):
    jax.tree.map(
        lambda g, w: np.testing.assert_allclose(g, w, rtol=relative, atol=relative), got, wanted
    )


def assert_trees_equal(got, wanted):
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def run(optimizer, params, num_steps, scale=1.0, **extra):
    """(params, state) after some steps on made-up gradients."""

    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for i in range(num_steps):
        params, state = step(params, state, make_grads(i, scale))
    return params, state


@pytest.mark.parametrize(
    "step, rate",
    [
        (0, 0.0),
        (1, 0.5),
        (3, 1.5),
        (4, 2.0),  # the peak, then cosine over 16 steps
        (8, 0.2 + 1.8 * (1 + np.sqrt(0.5)) / 2),
        (12, 1.1),
        (16, 0.2 + 1.8 * (1 - np.sqrt(0.5)) / 2),
        (20, 0.2),
        (1000, 0.2),
    ],
)
def test_schedule_by_hand(step, rate):
    schedule = optim.make_schedule(2.0, 20, config(final_fraction=0.1))
    assert float(schedule(jnp.int32(step))) == pytest.approx(rate, abs=1e-6)


def test_schedule_may_end_elsewhere_than_the_run():
    schedule = optim.make_schedule(2.0, 8, config(schedule_steps=20, final_fraction=0.1))
    assert float(schedule(12)) == pytest.approx(1.1)


def test_schedule_without_warm_up_starts_at_the_peak():
    assert float(optim.make_schedule(2.0, 20, config(warmup_steps=0))(0)) == 2.0


def test_constant_schedule():
    schedule = optim.make_schedule(2.0, 20, config(schedule="constant"))
    assert [float(schedule(i)) for i in (0, 2, 4, 100)] == [0.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"warmup_steps": 20}, "warmup_steps=20 leaves nothing of a schedule of 20 steps"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0, not -1"),
        ({"final_fraction": 1.5}, "final_fraction must be between 0 and 1, not 1.5"),
        ({"schedule": "constant", "final_fraction": 0.1}, "constant has no end"),
        ({"schedule": "constant", "schedule_steps": 9}, "constant has no end"),
        ({"schedule": "linear"}, "'linear' is neither cosine nor constant"),
    ],
)
def test_schedules_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        optim.make_schedule(2.0, 20, config(**changes))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"beta1": 1.0}, "beta1 must be at least 0 and below 1"),
        ({"beta2": -0.1}, "beta2 must be at least 0 and below 1"),
        ({"eps": 0.0}, "eps must be positive"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0"),
        ({"clip_norm": 0.0}, "clip_norm must be positive, or None to not clip, not 0.0"),
    ],
)
def test_optimizers_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        optim.make_optimizer(optax.constant_schedule(1.0), config(**changes))


@pytest.mark.parametrize("clip_norm, scale", [(1.0, 1.0), (1.0, 1e-3), (None, 1.0)])
def test_parity_with_optax(clip_norm, scale):
    """With gradients above the clip, below it, and with no clip; beta2 where float32 has room."""
    settings = config(beta2=0.95, clip_norm=clip_norm)
    schedule = optim.make_schedule(0.1, 20, settings)
    theirs = optax.chain(
        optax.identity() if clip_norm is None else optax.clip_by_global_norm(clip_norm),
        optax.adamw(schedule, 0.9, 0.95, 1e-8, weight_decay=0.1, mask=optim.decay_mask),
    )
    params, state = run(optim.make_optimizer(schedule, settings), make_params(), 8, scale)
    wanted_params, wanted_state = run(theirs, make_params(), 8, scale)
    assert_trees_near(params, wanted_params, RELATIVE_TO_OPTAX)
    wanted_adam = wanted_state[1][0]
    assert isinstance(state, optax.ScaleByAdamState)
    assert_trees_near((state.mu, state.nu), (wanted_adam.mu, wanted_adam.nu), RELATIVE_TO_OPTAX)
    assert int(state.count) == int(wanted_adam.count) == 8


def test_the_papers_beta2_against_float64():
    """At beta2 = 0.9999 a bias correction in naive float32 is off by 1e-4 at the first step."""
    settings = config(clip_norm=None)
    optimizer = optim.make_optimizer(optax.constant_schedule(0.1), settings)
    params, _ = run(optimizer, make_params(), 3)

    def reference(p, *grads, decay):
        p, m, v = np.asarray(p, np.float64), 0.0, 0.0
        for t, g in enumerate(grads, start=1):
            g = np.asarray(g, np.float64)
            m, v = 0.9 * m + 0.1 * g, 0.9999 * v + 0.0001 * g**2
            step = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.9999**t)) + 1e-8)
            p = p - 0.1 * (step + decay * p)
        return p

    start, grads = make_params(), [make_grads(i) for i in range(3)]
    wanted = jax.tree_util.tree_map_with_path(
        lambda path, *leaves: reference(
            *leaves, decay=0.1 if path[-1].key in ("kernel", "table") else 0.0
        ),
        start,
        *grads,
    )
    assert_trees_near(params, wanted, RELATIVE_TO_FLOAT64)


def test_decay_follows_the_name():
    mask = optim.decay_mask(make_params())
    assert mask == {
        "embedding": {"table": True},
        "layer_01": {
            "mixer_norm": {"scale": False},
            "mixer": {"query": {"kernel": True, "bias": False}},
        },
        "segment_00": {"block_00": {"key": {"kernel": True, "bias": False}}},
    }


def test_a_parameter_of_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"\['gain'\] is named neither kernel, table, scale, bias"):
        optim.decay_mask({"layer_01": {"gain": jnp.ones(3)}})


def test_zero_rows_stay_zero():
    """A table's padding rows: no gradient, no decay, no drift."""
    params, grads = make_params(), make_grads(0)
    params["embedding"]["table"] = params["embedding"]["table"].at[9:].set(0.0)
    grads["embedding"]["table"] = grads["embedding"]["table"].at[9:].set(0.0)
    optimizer = optim.make_optimizer(optax.constant_schedule(0.1), config())
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    assert not np.any(optax.apply_updates(params, updates)["embedding"]["table"][9:])


@pytest.mark.parametrize("poison", [np.inf, np.nan])
def test_a_skipped_step_changes_nothing(poison):
    optimizer = optim.make_optimizer(optax.constant_schedule(0.1), config())
    params, state = run(optimizer, make_params(), 3)
    grads = make_grads(3)
    grads["embedding"]["table"] = grads["embedding"]["table"].at[2, 3].set(poison)

    @jax.jit
    def step(params, state):
        finite = jnp.isfinite(optim.global_norm(grads))
        updates, state = optimizer.update(grads, state, params, finite=finite)
        return optax.apply_updates(params, updates), state

    assert_trees_equal(step(params, state), (params, state))


def test_a_step_that_is_finite_is_the_same_with_and_without_the_guard():
    optimizer = optim.make_optimizer(optax.constant_schedule(0.1), config())
    guarded = run(optimizer, make_params(), 3, finite=jnp.bool_(True))
    assert_trees_equal(guarded, run(optimizer, make_params(), 3))


def test_a_norm_that_is_given_is_used():
    optimizer = optim.make_optimizer(optax.constant_schedule(0.1), config(clip_norm=1.0))
    grads, params = make_grads(0), make_params()
    state = optimizer.init(params)
    own = optimizer.update(grads, state, params)[1]
    given = optimizer.update(grads, state, params, grad_norm=optim.global_norm(grads))[1]
    assert_trees_equal(own, given)
    doubled = optimizer.update(grads, state, params, grad_norm=2 * optim.global_norm(grads))[1]
    assert_trees_near(doubled.mu, jax.tree.map(lambda m: m / 2, own.mu), RELATIVE_TO_OPTAX)


def test_global_norm_of_many_numbers():
    """A running float32 sum of 4 million squares would be off by far more."""
    x = np.random.default_rng(0).normal(size=(2048, 2048)).astype(np.float32)
    tree = {"a": jnp.asarray(x), "b": {"c": jnp.asarray(x[0], jnp.bfloat16)}}
    small = np.asarray(tree["b"]["c"], np.float64)
    wanted = np.sqrt((x.astype(np.float64) ** 2).sum() + (small**2).sum())
    assert float(jax.jit(optim.global_norm)(tree)) == pytest.approx(wanted, rel=1e-6)


def test_donated_buffers_are_reused():
    optimizer = optim.make_optimizer(optax.constant_schedule(0.1), config())
    params = make_params()
    state = optimizer.init(params)
    wanted = run(optimizer, params, 1)

    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, make_grads(0)).compile()
    held = sum(x.nbytes for x in jax.tree.leaves((params, state)))
    assert compiled.memory_analysis().alias_size_in_bytes == held
    assert_trees_near(compiled(params, state, make_grads(0)), wanted, RELATIVE_TO_OPTAX)
    assert all(x.is_deleted() for x in jax.tree.leaves((params, state.mu, state.nu)))


ON_A_MESH = """
import functools, jax, numpy as np, optax
from jax.sharding import NamedSharding, PartitionSpec as P
from deconstruct import optim, sharding
from test_optim import RELATIVE_TO_OPTAX, assert_trees_near, config, make_grads, make_params

optimizer = optim.make_optimizer(optax.constant_schedule(0.1), config())
mesh = sharding.make_mesh(2, 4, 1)
whole = NamedSharding(mesh, P())
def place(x):
    return NamedSharding(mesh, P(*[None] * (x.ndim - 1), "fsdp"))

places = jax.tree.map(place, make_params())
state_places = optax.tree_utils.tree_map_params(
    optimizer, lambda _, place: place, jax.eval_shape(optimizer.init, make_params()), places,
    transform_non_params=lambda _: whole)

@functools.partial(jax.jit, out_shardings=(places, state_places))
def step(params, state, grads):
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state

params, grads = make_params(), make_grads(0)
wanted = jax.jit(step.__wrapped__)(params, optimizer.init(params), grads)
params, grads = jax.device_put((params, grads), (places, places))
state = jax.jit(optimizer.init, out_shardings=state_places)(params)
got = step(params, state, grads)
for leaf in jax.tree.leaves((state.mu, state.nu, got[1].mu, got[1].nu)):
    assert not leaf.sharding.is_fully_replicated
assert_trees_near(got, wanted, RELATIVE_TO_OPTAX)
print("equal")
"""


@pytest.mark.slow
def test_moments_lie_as_their_parameters_do():
    done = subprocess.run(
        [sys.executable, "-c", ON_A_MESH],
        env=devices.environment(8),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout == "equal\n", done.stderr[-3000:]
