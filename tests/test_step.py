"""The training step against plain gradients, one micro-batch and one device."""

import dataclasses
import functools
import hashlib
import json
import os
import subprocess
import sys

import devices
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import make_documents, make_fixed, make_params, make_spec, make_tokens

from deconstruct import decoder, layouts, objective, optim, sharding, step
from deconstruct.config import Config, OptimizerConfig
from deconstruct.data.packing import Batch
from deconstruct.mixers import MIXERS, Mixer

# Two float32 evaluations of the same gradients by different orders of summation, relative to the
# largest entry; after Adam's first steps, which divide by the gradient's own size, of the loss.
GRADIENT_TOLERANCE = 5e-5
LOSS_TOLERANCE = 2e-4
# One document's losses, in nats, behind other documents that it does not see.
DOCUMENT_TOLERANCE = 1e-5


def make_program(mixer="standard", plan="uniform", num_layers=2, max_len=16, **changes):
    spec = make_spec(mixer, plan, num_layers, max_len)
    options = OptimizerConfig(warmup_steps=2, schedule_steps=20)
    schedule = optim.make_schedule(1e-2, 20, options)
    optimizer = optim.make_optimizer(schedule, options)
    return step.Program(spec=spec, optimizer=optimizer, schedule=schedule, **changes)


def make_batch(program, batch_size=8, seed=0) -> Batch:
    """Rows with uneven weights, some of them 0, in several documents."""
    length = program.spec.max_len
    rows = make_tokens(batch_size, length + 1, seed)
    weights = np.random.default_rng(seed).choice([0.0, 1.0, 2.5], (batch_size, length))
    segments, positions = make_documents(batch_size, length)
    return Batch(rows[:, :-1], rows[:, 1:], weights.astype(np.float32), positions, segments)


def text_of(program):
    return make_tokens(1, program.spec.max_len, seed=9)[0]


def new_state(program, seed=0):
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    return step.init_state(program, mesh, seed, text_of(program))


def assert_trees_close(actual, expected, tolerance=GRADIENT_TOLERANCE):
    def check(a, b):
        scale = max(np.abs(b).max(), 1e-6)
        assert np.abs(np.asarray(a, np.float64) - b).max() <= tolerance * scale

    jax.tree.map(check, dict(actual), dict(expected))


def plain_gradients(program, state, batch):
    """Gradients of the mean loss written out over all logits, streams inside."""

    def loss(params):
        logits_BTV = decoder.logits(
            program.spec,
            params,
            state.fixed,
            batch.tokens_BT,
            positions_BT=batch.positions_BT if program.isolate_documents else None,
            segments_BT=batch.segments_BT if program.isolate_documents else None,
        )
        log_probs = jax.nn.log_softmax(logits_BTV)
        nll_BT = -jnp.take_along_axis(log_probs, batch.targets_BT[:, :, None], axis=-1)[:, :, 0]
        return jnp.sum(nll_BT * batch.weights_BT) / jnp.sum(batch.weights_BT)

    return jax.value_and_grad(loss)(state.params)


@pytest.mark.parametrize("isolate", [False, True], ids=["whole", "isolated"])
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("mixer", ["standard", "fixed_seq_qk+rnd_emb_qk"])
def test_gradients_equal_the_plain_ones(mixer, micro_batches, isolate):
    """Whatever the number of micro-batches, with unequal weights, and through the streams."""
    program = make_program(
        mixer, num_layers=2, isolate_documents=isolate, micro_batches=micro_batches
    )
    state = new_state(program)
    batch = make_batch(program)
    grads, sums = jax.jit(lambda s, b: step._gradients(program, s, b))(state, batch)
    loss, expected = plain_gradients(program, state, batch)
    np.testing.assert_allclose(sums.nll / sums.weight, loss, rtol=1e-5)
    assert_trees_close(grads, expected)


def test_padded_vocabulary_never_moves():
    program = make_program()
    assert program.spec.padded_vocab_size > program.spec.vocab_size
    state = new_state(program)
    train_step = jax.jit(lambda s, b: step.train_step(program, s, b))
    for seed in range(3):
        state, _ = train_step(state, make_batch(program, seed=seed))
    for table in ("embedding", "head"):
        padding = np.asarray(state.params[table]["table"])[program.spec.vocab_size :]
        assert (padding == 0).all()
        assert (state.params[table]["table"][: program.spec.vocab_size] != 0).any()


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_documents_are_kept_apart_only_where_asked(name):
    """D9: losses of one document behind two others; by default tokens see what lies before."""
    mixed = make_program(name)
    apart = dataclasses.replace(mixed, isolate_documents=True)
    assert not mixed.isolate_documents and not Config().data.isolate_documents
    params, fixed = make_params(mixed.spec), make_fixed(mixed.spec)
    first, second = make_tokens(2, 7, seed=1), make_tokens(1, 9, seed=2)
    tokens_BT = np.concatenate([first, np.repeat(second, 2, axis=0)], axis=1)
    order = np.arange(16)[None, :].repeat(2, axis=0)
    behind = order >= 7
    batch = Batch(
        tokens_BT, tokens_BT, np.ones((2, 16), np.float32), order - 7 * behind, 1 + behind
    )

    def difference(program):
        nll_BT, _, _ = step.validation_step(program, params, fixed, batch)
        return np.abs(nll_BT[0, 7:] - nll_BT[1, 7:]).max()

    assert difference(apart) <= DOCUMENT_TOLERANCE
    sees_before = MIXERS[name].attention_map is not Mixer.attention_map
    assert (difference(mixed) > 100 * DOCUMENT_TOLERANCE) == sees_before


@pytest.mark.parametrize("mixer", ["standard", "approximate", "rnd_emb_qk"])
def test_initial_values_do_not_depend_on_layout(mixer):
    loop = make_program(mixer, "uniform", 4)
    scan = dataclasses.replace(loop, scan_layers=True)
    expected = new_state(loop, 3).params
    stacked = new_state(scan, 3).params
    assert "segment_00" in stacked
    actual = layouts.unstack_layers(loop.spec, stacked)
    jax.tree.map(np.testing.assert_array_equal, dict(actual), dict(expected))


def test_layers_have_their_own_initial_values():
    params = new_state(make_program()).params
    kernels = [params[name]["mixer"]["query"]["kernel"] for name in ("layer_01", "layer_02")]
    assert not np.array_equal(*kernels)
    assert not np.array_equal(params["embedding"]["table"], params["head"]["table"])


@pytest.mark.parametrize("which", ["gradient", "loss"])
def test_a_step_that_is_not_finite_changes_nothing(monkeypatch, which):
    """N2: neither parameters nor moments move, also where only the gradient is infinite."""
    program = make_program()
    state = new_state(program)
    state, _ = jax.jit(lambda s, b: step.train_step(program, s, b))(state, make_batch(program))
    weighted_loss = objective.weighted_loss

    def poisoned(x_BTD, *args, **kwargs):
        loss_sum, sums = weighted_loss(x_BTD, *args, **kwargs)
        if which == "loss":
            return loss_sum * jnp.nan, sums._replace(nll=sums.nll * jnp.nan)
        return loss_sum + jnp.sqrt(jnp.sum(x_BTD) * 0.0), sums

    monkeypatch.setattr(objective, "weighted_loss", poisoned)
    after, metrics = jax.jit(lambda s, b: step.train_step(program, s, b))(
        state, make_batch(program, seed=1)
    )
    assert not metrics["finite"]
    assert np.isfinite(metrics["loss"]) == (which == "gradient")
    assert (int(after.step), int(after.skipped)) == (int(state.step) + 1, 1)
    for before, now in ((state.params, after.params), (state.opt_state, after.opt_state)):
        jax.tree.map(np.testing.assert_array_equal, now, before)


def test_the_reported_learning_rate_is_the_one_used():
    """At rate r the first step of Adam moves every entry that has a gradient by r."""
    rate = optax.constant_schedule(3e-3)
    optimizer = optim.make_optimizer(rate, OptimizerConfig(weight_decay=0.0, clip_norm=None))
    program = dataclasses.replace(make_program(), optimizer=optimizer, schedule=rate)
    state = new_state(program)
    after, metrics = jax.jit(lambda s, b: step.train_step(program, s, b))(
        state, make_batch(program)
    )
    moved = np.abs(after.params["final_norm"]["scale"] - state.params["final_norm"]["scale"])
    np.testing.assert_allclose(metrics["learning_rate"], 3e-3)
    np.testing.assert_allclose(moved, 3e-3, rtol=1e-3)


def test_diagnostics_have_one_value_a_layer():
    program = make_program("mlp", "even", 4)
    state = new_state(program)
    found = jax.jit(functools.partial(step.diagnose, program))(
        state.params, state.fixed, make_batch(program)
    )
    assert np.isnan(found["largest_score"]).tolist() == [True, False, True, False]
    assert (found["residual_rms"] > 0).all()
    assert found["residual_rms"].shape == (4,)


def test_diagnostics_see_the_documents_that_training_sees():
    program = make_program("approximate", "uniform", 2)
    state, batch = new_state(program), make_batch(program)
    found = []
    for isolate in (False, True):
        program = dataclasses.replace(program, isolate_documents=isolate)
        diagnose = jax.jit(functools.partial(step.diagnose, program))
        found.append(float(diagnose(state.params, state.fixed, batch)["residual_rms"][1]))
    assert found[0] != found[1]


SCRIPT = """
import importlib, json, sys, jax
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_threefry_partitionable", True)
import test_step
function, modules, args = json.loads(sys.argv[1])
for module in modules:
    importlib.import_module(module)
print(json.dumps(getattr(test_step, function)(*args)))
"""


def run_on_devices(num_devices, function, *args, mixers=(), optimised=False):
    """What a function of this file gives in a process with so many devices.

    The modules of `mixers` are imported there too: one of them may be no part of the package.
    """
    modules = [MIXERS[name].__module__ for name in mixers]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([function, modules, args])],
        env=devices.environment(num_devices, optimised),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def losses_on_meshes(name, *meshes):
    """Of (sizes, scan): three losses and a gradient norm of a mixer's `even` hybrid on each."""
    plan = "uniform" if name == "standard" else "even"
    # The matched width of so small a model, 33, does not divide over the tensor axis.
    word = "mlp[width=32]" if name == "mlp" else name
    found = []
    for sizes, scan_layers in meshes:
        mesh = sharding.make_mesh(*sizes)
        program = make_program(word, plan, 4, scan_layers=scan_layers, micro_batches=2)
        state = step.init_state(program, mesh, 0, text_of(program))
        shapes = step.abstract_batch(program.spec, 16, mesh)
        train_step = step.compile_train_step(program, mesh, shapes)
        losses = []
        for seed in range(3):
            batch = sharding.place_batch(make_batch(program, 16, seed), mesh)
            state, metrics = train_step(state, batch)
            losses.append(float(metrics["loss"]))
        if mesh.shape["fsdp"] > 1:
            assert_sharded(state)
        found.append([*losses, float(metrics["grad_norm"])])
    return found


def assert_sharded(state):
    """S3: no matrix and none of its moments lies whole on every device."""
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        if leaf.ndim >= 2 and leaf.shape[-1] > 4 and leaf.shape[-2] > 4:
            assert not leaf.sharding.is_fully_replicated, leaf.shape


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MIXERS))
def test_eight_devices_equal_one(name):
    """Every mixer's hybrid: data, fsdp and tensor at once, and data alone; the first losses."""
    (expected,) = losses_on_meshes(name, ((1, 1, 1), False))
    meshes = ((2, 2, 2), False), ((8, 1, 1), True)
    for found in run_on_devices(8, "losses_on_meshes", name, *meshes, mixers=[name]):
        np.testing.assert_allclose(found, expected, rtol=LOSS_TOLERANCE)


def initial_values(*meshes):
    """Of (sizes, scan): a hash of the state before the first step, as one model in one layout."""
    assert devices.FAST not in os.environ, "not what users run"
    hashes = []
    for sizes, scan_layers in meshes:
        program = make_program("rnd_emb_qk", "even", 4, scan_layers=scan_layers)
        # Shards narrower than a CPU's vectors JAX 0.12 rounds otherwise, one value in hundreds.
        wider = make_spec("rnd_emb_qk", "even", 4, 16, model_dim=128)
        program = dataclasses.replace(program, spec=wider)
        mesh = sharding.make_mesh(*sizes, devices=jax.devices()[: np.prod(sizes)])
        state = step.init_state(program, mesh, 5, text_of(program))
        if mesh.shape["fsdp"] > 1:
            assert_sharded(state)
        params = jax.device_get(state.params)
        if scan_layers:
            params = layouts.unstack_layers(program.spec, params)
        leaves = jax.tree_util.tree_leaves_with_path((dict(params), jax.device_get(state.fixed)))
        assert len(leaves) > 40
        digest = hashlib.sha256()
        for path, leaf in leaves:
            digest.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}".encode())
            digest.update(np.asarray(leaf).tobytes())
        hashes.append(digest.hexdigest())
    return hashes


@pytest.mark.slow
def test_initial_values_do_not_depend_on_the_mesh():
    """C3: bit for bit, on 1 and on 8 devices, under a loop and under a scan."""
    one = run_on_devices(1, "initial_values", ((1, 1, 1), False), optimised=True)
    meshes = [(sizes, scan) for sizes in ((2, 2, 2), (1, 8, 1)) for scan in (False, True)]
    eight = run_on_devices(8, "initial_values", *meshes, optimised=True)
    assert eight == one * len(meshes)


def test_boxed_parameters_name_every_axis():
    program = make_program("mlp", "even", 2)
    boxed = decoder.init(program.spec, jax.random.key(0))
    for leaf in jax.tree.leaves(boxed, is_leaf=lambda x: isinstance(x, nn.meta.AxisMetadata)):
        assert len(leaf.names) == leaf.unbox().ndim
        assert set(leaf.names) <= {name for name, _ in sharding.RULES}
