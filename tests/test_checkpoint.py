"""Checkpoints: retention, torn steps, other runs, other meshes, copies, kills, donated state."""

import hashlib
import itertools
import json
import logging
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import data_corpus
import devices
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from deconstruct import checkpoint
from deconstruct.checkpoint import manager, reading
from deconstruct.data import loader, prepare
from deconstruct.data.dataset import open_dataset
from deconstruct.data.mixture import alone

ROOT = pathlib.Path(__file__).parents[1]
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def make_identity(**changes) -> checkpoint.Identity:
    fields = {
        "seed": 0,
        "spec": {
            "model_dim": 16,
            "layers": [
                {"number": 1, "mixer": "standard", "options": {}},
                {"number": 2, "mixer": "rnd_emb_qk", "options": {"sigma": 0.02}},
            ],
        },
        "config": {
            "log_every": 10,
            "learning_rate": 3e-4,
            "optimizer": {"schedule_steps": 100, "beta2": 0.9999},
        },
        "tokenizer_fingerprint": "abc",
        "data_fingerprint": {"tokens": 1000, "rows": 10},
    }
    return checkpoint.Identity(**{**fields, **changes})


def make_trees(seed=0, scale=1.0):
    """(weights, optimizer state) of two layers, every leaf with its own random values."""
    shapes = {
        "embedding": {"table": (128, 16)},
        "layer_01": {"mixer": {"query": {"kernel": (16, 16), "bias": (16,)}}},
        "layer_02": {"mixer": {"query": {"kernel": (16, 16), "bias": (16,)}}},
        "final_norm": {"scale": (16,)},
    }
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    params = tree.unflatten(
        [scale * jax.random.normal(key, shape) for key, shape in zip(keys, leaves, strict=True)]
    )
    weights = {"params": params, "fixed": {"fixed_seq_qk": jnp.arange(8, dtype=jnp.int32)}}
    _, state = OPTIMIZER.update(params, OPTIMIZER.init(params), params)
    return weights, state


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


def save_steps(workdir, steps, keep_latest=2, losses=None):
    """Saves trees whose seed is the step, and returns when all are complete."""
    with checkpoint.Checkpointer(workdir, make_identity(), keep_latest=keep_latest) as saver:
        for step in steps:
            loss = losses and losses.get(step)
            saver.save(
                step,
                *make_trees(step),
                data_position=8 * step,
                tokens=100 * step,
                validation_loss=loss,
            )


def restore(workdir, identity=None, **kwargs):
    weights, optimizer = make_trees()
    with checkpoint.Checkpointer(workdir, identity or make_identity(), **kwargs) as saver:
        return saver.restore(abstract(weights), abstract(optimizer))


def assert_restores(workdir, step):
    restored = restore(workdir)
    weights, optimizer = make_trees(step)
    metadata = restored.metadata
    assert (metadata.step, metadata.data_position, metadata.tokens) == (step, 8 * step, 100 * step)
    assert_same(restored.weights, weights)
    assert_same(restored.optimizer, optimizer)


def stored(workdir):
    return checkpoint.stored_steps(reading.resolve(workdir) / "checkpoints")


def snapshot(directory):
    """Names, contents and modification times of all that lies in a directory."""
    return {
        str(path.relative_to(directory)): (
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None,
        )
        for path in sorted(pathlib.Path(directory).rglob("*"))
    }


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    """A run with whole steps 10, 20 and 30; tests copy it."""
    workdir = tmp_path_factory.mktemp("three") / "run"
    save_steps(workdir, [10, 20, 30], keep_latest=3, losses={10: 2.0, 20: 1.0, 30: 3.0})
    return workdir


@pytest.fixture
def run(three_steps, tmp_path):
    shutil.copytree(three_steps, tmp_path / "run")
    return tmp_path / "run"


class TestSaveAndRestore:
    def test_all_items_come_back_bit_for_bit(self, run):
        assert_restores(run, 30)

    def test_an_empty_directory_has_no_checkpoint_and_stays_empty(self, tmp_path):
        assert restore(tmp_path / "run") is None
        assert not (tmp_path / "run").exists()

    def test_metadata_is_readable_json_and_leaves_are_named_by_layer(self, run):
        step = run / "checkpoints" / "30"
        record = json.loads((step / "metadata" / "metadata").read_text())
        assert (record["step"], record["data_position"], record["tokens"]) == (30, 240, 3000)
        assert record["validation_loss"] == 3.0
        assert record["spec"] == make_identity().spec
        assert record["config"]["optimizer"]["beta2"] == 0.9999
        names = jax.tree_util.tree_leaves_with_path(reading.stored_arrays(step / "weights"))
        names = {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in names}
        assert "params/layer_02/mixer/query/kernel" in names and "fixed/fixed_seq_qk" in names

    def test_a_step_is_stored_once_and_in_order(self, run):
        with checkpoint.Checkpointer(run, make_identity()) as saver:
            for step in (30, 29):
                with pytest.raises(ValueError, match=f"step {step} is not after .* 30"):
                    saver.save(step, *make_trees(), data_position=0, tokens=0)
        assert stored(run) == [30, 20, 10]

    def test_latest_step(self, run):
        with checkpoint.Checkpointer(run, make_identity()) as saver:
            assert saver.latest_step == 30
            saver.save(40, *make_trees(), data_position=0, tokens=0)
            assert saver.latest_step == 40
        assert checkpoint.Checkpointer(run / "new", make_identity()).latest_step is None

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    @pytest.mark.parametrize("item", ["weights", "optimizer"])
    def test_what_is_not_finite_is_never_stored(self, run, item, value):
        trees = dict(zip(("weights", "optimizer"), make_trees(), strict=True))
        leaves, tree = jax.tree.flatten(trees[item])
        place = next(i for i, leaf in enumerate(leaves) if leaf.shape == (16, 16))
        leaves[place] = leaves[place].at[3, 4].set(value)
        trees[item] = tree.unflatten(leaves)
        saver = checkpoint.Checkpointer(run, make_identity())
        with pytest.raises(ValueError, match=rf"step 40 holds NaN or infinity.*{item}\..*kern"):
            saver.save(40, trees["weights"], trees["optimizer"], data_position=0, tokens=0)
        assert stored(run) == [30, 20, 10]


class TestRetention:
    def test_newest_and_best_stay_when_the_loss_rises(self, tmp_path):
        save_steps(tmp_path, [1, 2, 3, 4, 5], losses={s: float(s) for s in range(1, 6)})
        assert stored(tmp_path) == [5, 4, 1]
        assert checkpoint.restore_weights(tmp_path).metadata.step == 5
        assert checkpoint.restore_weights(tmp_path, best=True).metadata.step == 1
        assert_restores(tmp_path, 5)

    def test_steps_without_a_loss_or_with_nan_are_kept_as_newest_but_never_as_best(self, tmp_path):
        losses = {1: float("nan"), 2: 2.0, 3: float("-inf"), 4: float("nan")}
        save_steps(tmp_path, [1, 2, 3, 4, 5], losses=losses)
        assert stored(tmp_path) == [5, 4, 2]
        best = checkpoint.restore_weights(tmp_path, best=True)
        assert best.metadata.step == 2 and best.metadata.validation_loss == 2.0

    def test_no_loss_at_all(self, tmp_path):
        save_steps(tmp_path, [1, 2, 3])
        assert stored(tmp_path) == [3, 2]
        with pytest.raises(ValueError, match=r"no step in .* has a validation loss"):
            checkpoint.restore_weights(tmp_path, best=True)

    def test_the_best_of_an_earlier_start_is_remembered(self, tmp_path):
        save_steps(tmp_path, [1, 2, 3], losses={1: 1.0, 2: 2.0, 3: 3.0})
        save_steps(tmp_path, [4, 5], losses={4: 4.0, 5: 5.0})
        assert stored(tmp_path) == [5, 4, 1]


def lose_arrays(step):
    for item in ("weights", "optimizer"):
        for folder in (step / item).glob("ocdbt.process_*/d"):
            shutil.rmtree(folder)


def empty_metadata(step):
    (step / "metadata" / "metadata").write_bytes(b"")


def lose_optimizer(step):
    shutil.rmtree(step / "optimizer")


def half_copy(step):
    files = sorted(path for path in step.rglob("*") if path.is_file())
    for path in files[len(files) // 2 :]:
        path.unlink()


def flip_a_byte(step):
    data = max(
        (step / "weights").rglob("*"), key=lambda path: path.is_file() and path.stat().st_size
    )
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 0x40
    data.write_bytes(content)


def lose_everything(step):
    shutil.rmtree(step)
    step.mkdir()


DAMAGES = {
    lose_arrays: "is missing",
    empty_metadata: "its metadata does not read",
    lose_optimizer: "optimizer/.* is missing",
    half_copy: "",
    flip_a_byte: "has other contents than were written",
    lose_everything: "its metadata does not read",
}


class TestTornSteps:
    @pytest.mark.parametrize("damage", DAMAGES)
    def test_a_torn_newest_step_is_passed_over_aloud(self, run, damage, caplog):
        damage(run / "checkpoints" / "30")
        before = snapshot(run)
        assert_restores(run, 20)
        assert snapshot(run) == before
        (warning,) = [r.getMessage() for r in caplog.records if r.name.startswith("deconstruct")]
        assert warning.startswith("checkpoint step 30 in ") and "refused" in warning
        assert re.search(DAMAGES[damage], warning), warning

    def test_every_file_of_a_step_is_guarded(self, run):
        """Each deleted, cut short or altered in one bit: refused, whatever the file."""
        step = run / "checkpoints" / "30"
        for older in ("10", "20"):
            shutil.rmtree(run / "checkpoints" / older)
        files = [path for path in step.rglob("*") if path.is_file() and path.parent != step]
        assert len(files) > 15
        for path in files:
            content = path.read_bytes()
            flipped = bytes([content[0] ^ 1]) + content[1:]
            cut = content[: len(content) // 2]
            for damaged, fault in ((None, "is missing"), (cut, "bytes in"), (flipped, "other con")):
                path.unlink() if damaged is None else path.write_bytes(damaged)
                fault = "metadata does not read" if path.name == "metadata" else fault
                with pytest.raises(ValueError, match=f"none of them loads.*{fault}"):
                    restore(run)
                path.write_bytes(content)
        assert_restores(run, 30)

    def test_a_left_over_temporary_directory_is_no_step(self, run):
        shutil.copytree(run / "checkpoints" / "30", run / "checkpoints" / "40.orbax-checkpoint-tmp")
        assert_restores(run, 30)

    def test_when_no_step_loads_training_does_not_start_over(self, run):
        for step in (run / "checkpoints").iterdir():
            empty_metadata(step)
        before = snapshot(run)
        with pytest.raises(ValueError, match=r"none of them loads.*30: its.*20: its.*10: its"):
            restore(run)
        assert snapshot(run) == before

    @pytest.mark.parametrize("name", ["step_30", "0030", "30.bak"])
    def test_a_directory_that_only_looks_unlike_a_step_is_no_empty_directory(self, run, name):
        shutil.move(run / "checkpoints" / "30", run / "checkpoints" / name)
        assert_restores(run, 20)
        for step in ("10", "20"):
            shutil.rmtree(run / "checkpoints" / step)
        with pytest.raises(ValueError, match=f"none of them loads.*{name}: is not a step's name"):
            restore(run)

    def test_a_refused_step_is_set_aside_whole_when_its_number_is_saved_again(self, run, caplog):
        torn = run / "checkpoints" / "30"
        lose_arrays(torn)
        before = snapshot(torn)
        weights, optimizer = make_trees(30)
        with checkpoint.Checkpointer(run, make_identity()) as saver:
            assert saver.restore(abstract(weights), abstract(optimizer)).metadata.step == 20
            assert saver.latest_step == 20
            saver.save(30, weights, optimizer, data_position=240, tokens=3000)
        assert snapshot(run / "checkpoints" / "30.refused") == before
        assert "setting aside the refused step" in caplog.text
        assert stored(run) == [30, 20]  # 20 is the best as well
        assert_restores(run, 30)
        with checkpoint.Checkpointer(run, make_identity()) as saver:  # the same once more
            lose_arrays(torn)
            saver.restore(abstract(weights), abstract(optimizer))
            saver.save(30, weights, optimizer, data_position=240, tokens=3000)
        assert (run / "checkpoints" / "30.refused-2").is_dir()

    def test_refused_steps_alone_are_no_reason_to_begin_anew(self, run):
        """As when somebody removed the others: training would write over what can be mended."""
        for step in checkpoint.stored_steps(run / "checkpoints"):
            (run / f"checkpoints/{step}").rename(run / f"checkpoints/{step}.refused")
        with pytest.raises(
            ValueError, match=r"none of them loads.*30\.refused: is not a step's na"
        ):
            restore(run)

    def test_running_out_of_memory_is_not_taken_for_a_torn_step(self, run, monkeypatch):
        def exhausted(*_, **__):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

        monkeypatch.setattr(ocp.StandardCheckpointHandler, "restore", exhausted)
        with pytest.raises(jax.errors.JaxRuntimeError):
            restore(run)


def changed(path, value):
    """The identity with one value inside replaced."""
    fields = {f: getattr(make_identity(), f) for f in ("seed", "spec", "config")}
    fields["data_fingerprint"] = make_identity().data_fingerprint
    fields["tokenizer_fingerprint"] = make_identity().tokenizer_fingerprint
    inner, *keys = [fields, *path]
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    return checkpoint.Identity(**fields)


THIRD_LAYER = {"number": 3, "mixer": "standard", "options": {}}
CHANGES = [
    (("seed",), 1, "seed: 0 -> 1"),
    (("spec", "layers", 1, "mixer"), "standard", r'spec\.layers\.2\.mixer: "rnd_emb_qk" -> "sta'),
    (("spec", "layers", 1, "options"), {"sigma": 0.1}, r"layers\.2\.options\.sigma: 0.02 -> 0.1"),
    (("spec", "model_dim"), 32, r"spec\.model_dim: 16 -> 32"),
    (("spec", "num_heads"), 4, r"spec\.num_heads: \(absent\) -> 4"),
    (("config", "optimizer", "beta2"), 0.99, r"config\.optimizer\.beta2: 0.9999 -> 0.99"),
    (("config", "optimizer", "schedule_steps"), 200, r"schedule_steps: 100 -> 200"),
    (("config", "new"), None, r"config\.new: \(absent\) -> null"),
    (("tokenizer_fingerprint",), "xyz", 'tokenizer_fingerprint: "abc" -> "xyz"'),
    (("data_fingerprint", "tokens"), 1001, r"data_fingerprint\.tokens: 1000 -> 1001"),
]


class TestOtherRuns:
    @pytest.mark.parametrize("path, value, message", CHANGES)
    def test_a_change_is_refused_by_name_before_any_array_is_read(
        self, run, path, value, message, monkeypatch
    ):
        monkeypatch.setattr(reading, "read_arrays", pytest.fail)
        before = snapshot(run)
        with pytest.raises(ValueError, match=f"step 30 .* belongs to another run .*{message}"):
            restore(run, changed(path, value))
        assert snapshot(run) == before

    def test_more_and_fewer_layers(self, run):
        more = changed(("spec", "layers"), [*make_identity().spec["layers"], THIRD_LAYER])
        with pytest.raises(ValueError, match=r'spec\.layers\.3\.mixer: \(absent\) -> "standard"'):
            restore(run, more)
        fewer = changed(("spec", "layers"), make_identity().spec["layers"][:1])
        with pytest.raises(ValueError, match=r'spec\.layers\.2\.mixer: "rnd_emb_qk" -> \(absent\)'):
            restore(run, fewer)

    def test_differences_come_in_order_layers_by_number(self):
        layers = [{"number": number, "mixer": "standard"} for number in range(1, 13)]
        others = [{**layer, "mixer": "mlp"} for layer in layers]
        found = checkpoint.differences(
            make_identity(spec={"layers": layers}),
            make_identity(spec={"layers": others}, seed=3, data_fingerprint=None),
        )
        spec = [f"spec.layers.{number}.mixer" for number in range(1, 13)]
        data = ["data_fingerprint", "data_fingerprint.rows", "data_fingerprint.tokens"]
        assert list(found) == [*data, "seed", *spec]
        assert found["data_fingerprint.rows"] == "10 -> (absent)" and found["seed"] == "0 -> 3"

    def test_equal_identities_do_not_differ_whatever_their_containers(self):
        spec = {"model_dim": 16, "layers": tuple(make_identity().spec["layers"])}
        assert checkpoint.differences(make_identity(), make_identity(spec=spec)) == {}

    def test_free_keys_may_differ_and_cover_what_lies_below(self, run, caplog):
        caplog.set_level(logging.INFO, "deconstruct")
        other = changed(("config", "log_every"), 1)
        assert restore(run, other, free=["config.log_every"]).metadata.step == 30
        assert "resuming from step 30 with config.log_every: 10 -> 1" in caplog.text
        other = changed(("config", "optimizer", "beta2"), 0.9)
        assert restore(run, other, free=["config.optimizer"]).metadata.step == 30
        with pytest.raises(ValueError, match="another run"):
            restore(run, other, free=["config.opt", "config.log_every"])

    def test_allowed_keys_are_logged_as_asked_for_and_stored_with_the_next_step(self, run, caplog):
        other = changed(("config", "learning_rate"), 1e-3)
        weights, optimizer = make_trees()
        with checkpoint.Checkpointer(run, other, allowed=["config.learning_rate"]) as saver:
            saver.restore(abstract(weights), abstract(optimizer))
            saver.save(40, weights, optimizer, data_position=320, tokens=0)
        assert "with config.learning_rate: 0.0003 -> 0.001, as asked" in caplog.text
        assert restore(run, other).metadata.identity == other

    @pytest.mark.parametrize("change", ["dtype", "shape", "extra", "missing"])
    def test_arrays_unlike_the_programs_are_refused_by_name(self, run, change):
        weights, optimizer = map(abstract, make_trees())
        norm = weights["params"]["final_norm"]
        if change == "dtype":
            norm["scale"] = jax.ShapeDtypeStruct((16,), jnp.bfloat16)
        elif change == "shape":
            norm["scale"] = jax.ShapeDtypeStruct((17,), jnp.float32)
        elif change == "extra":
            norm["bias"] = jax.ShapeDtypeStruct((16,), jnp.float32)
        else:
            del norm["scale"]
        name = "bias" if change == "extra" else "scale"
        with pytest.raises(ValueError, match=rf"weights differs .*params\.final_norm\.{name}: "):
            checkpoint.Checkpointer(run, make_identity()).restore(weights, optimizer)


class TestWeightsByPath:
    def test_every_level_of_path(self, run, monkeypatch):
        monkeypatch.chdir(run.parent)
        monkeypatch.setenv("HOME", str(run.parent))
        spaced = run.parent / "with a space"
        shutil.copytree(run / "checkpoints" / "20", spaced)
        for path, step in [
            (run, 30),
            (f"{run}/", 30),
            ("run", 30),
            ("~/run", 30),
            (run / "checkpoints", 30),
            (run / "checkpoints" / "10", 10),
            ("run/checkpoints/10/", 10),
            (spaced, 20),
        ]:
            found = checkpoint.restore_weights(path)
            assert found.metadata.step == step, path
            assert_same(found.weights, make_trees(step)[0])
        assert checkpoint.restore_weights(run, step=10).metadata.step == 10
        assert checkpoint.restore_weights(run, best=True).metadata.step == 20
        assert json.loads(found.spec_json) == make_identity().spec

    def test_wrong_levels_say_what_was_expected(self, run, tmp_path):
        expected = r"expected a run's directory .* checkpoints directory .* step's directory"
        (tmp_path / "file").write_text("")
        (tmp_path / "empty").mkdir()
        for path, message in [
            (tmp_path / "absent", "does not exist"),
            (tmp_path / "file", "is a file"),
            (tmp_path / "empty", "holds no checkpoint;"),
            (tmp_path, "holds no checkpoint but the runs run: give one of them"),
            (run / "checkpoints" / "30" / "weights", "is an item inside a step: give .*/30;"),
            (run / "checkpoints" / "30" / "metadata", "is an item inside a step"),
        ]:
            with pytest.raises(ValueError, match=f"{message}.*{expected}"):
                checkpoint.restore_weights(path)

    def test_contradictions_are_refused(self, run):
        step = run / "checkpoints" / "20"
        with pytest.raises(ValueError, match=r"no step 15; it has \[30, 20, 10\]"):
            checkpoint.restore_weights(run, step=15)
        with pytest.raises(ValueError, match="is the directory of step 20, not of step 10"):
            checkpoint.restore_weights(step, step=10)
        with pytest.raises(ValueError, match="name two steps"):
            checkpoint.restore_weights(run, step=10, best=True)
        with pytest.raises(ValueError, match=r"is one step: give .*/checkpoints"):
            checkpoint.restore_weights(step, best=True)

    def test_the_optimizer_is_neither_needed_nor_read(self, run):
        shutil.rmtree(run / "checkpoints" / "30" / "optimizer")
        assert_same(checkpoint.restore_weights(run).weights, make_trees(30)[0])

    def test_a_torn_step_is_never_replaced_by_another(self, run):
        lose_arrays(run / "checkpoints" / "30")
        with pytest.raises(ValueError, match=r"30 does not load.*is missing.*\[20, 10\]"):
            checkpoint.restore_weights(run)

    def test_reading_changes_nothing(self, run):
        (run / "checkpoints" / "40.orbax-checkpoint-tmp").mkdir()
        before = snapshot(run)
        for kwargs in ({}, {"step": 10}, {"best": True}):
            checkpoint.restore_weights(run, **kwargs)
        with pytest.raises(ValueError, match="another run"):
            restore(run, changed(("seed",), 9))
        assert snapshot(run) == before

    @pytest.mark.parametrize("way", ["cp -r", "cp -a", "read-only"])
    def test_copies_are_as_good_as_the_original(self, run, tmp_path, way):
        copy = tmp_path / "elsewhere" / "checkpoints"
        copy.mkdir(parents=True)
        command = ["cp", "-a" if way == "cp -a" else "-r", run / "checkpoints" / "20", copy]
        subprocess.run(command, check=True)
        if way == "read-only":
            subprocess.run(["chmod", "-R", "a-w", copy], check=True)
        before = snapshot(copy)
        assert_same(checkpoint.restore_weights(copy / "20").weights, make_trees(20)[0])
        assert_restores(copy.parent, 20)
        assert snapshot(copy) == before
        subprocess.run(["chmod", "-R", "u+w", copy], check=True)

    def test_a_copy_without_orbaxs_own_marks_is_readable(self, run):
        step = run / "checkpoints" / "30"
        (step / "commit_success.txt").unlink()
        (step / "_CHECKPOINT_METADATA").unlink()
        assert_restores(run, 30)
        assert checkpoint.restore_weights(run).metadata.step == 30

    def test_shardings_may_depend_on_the_spec(self, run):
        device = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
        seen = []

        def place(spec_json, tree):
            seen.append(json.loads(spec_json)["model_dim"])
            return jax.tree.map(lambda leaf: device, tree)

        for sharding in (device, place):
            leaves = jax.tree.leaves(checkpoint.restore_weights(run, sharding=sharding).weights)
            assert all(leaf.sharding == device for leaf in leaves)
        assert seen == [16]


MESH_PROGRAM = """
import sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import test_checkpoint as t
from deconstruct import checkpoint

def placed(tree, fsdp, tensor):
    mesh = Mesh(np.array(jax.devices()[: fsdp * tensor]).reshape(fsdp, tensor), ("fsdp", "tensor"))
    def place(leaf):
        axes = ("fsdp", "tensor") if leaf.ndim == 2 else ()
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return jax.tree.map(place, tree)

def put(tree):
    return jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), tree, placed(tree, 2, 4))

assert len(jax.devices()) == 8
weights, optimizer = t.make_trees(5)
with checkpoint.Checkpointer({from_mesh!r}, t.make_identity()) as saver:
    saver.save(5, put(weights), put(optimizer), data_position=40, tokens=500)
for workdir in ({from_mesh!r}, {from_one!r}):
    for fsdp, tensor in [(2, 4), (2, 2), (8, 1)]:
        wanted = placed(weights, fsdp, tensor), placed(optimizer, fsdp, tensor)
        with checkpoint.Checkpointer(workdir, t.make_identity()) as saver:
            got = saver.restore(*wanted)
        t.assert_same(got.weights, weights)
        t.assert_same(got.optimizer, optimizer)
        for leaf, want in zip(jax.tree.leaves(got.weights), jax.tree.leaves(wanted[0])):
            assert leaf.sharding == want.sharding
            if leaf.ndim == 2:
                assert len(leaf.addressable_shards) == fsdp * tensor
                assert leaf.addressable_shards[0].data.size * fsdp * tensor == leaf.size
print("done")
"""


def test_saved_on_any_mesh_and_restored_on_any_other(tmp_path):
    """2x4 and one device to 2x4, 2x2, 8x1, one device and, by path, no mesh at all."""
    from_mesh, from_one = tmp_path / "from_mesh", tmp_path / "from_one"
    save_steps(from_one, [5])
    paths = {"from_mesh": str(from_mesh), "from_one": str(from_one)}
    done = subprocess.run(
        [sys.executable, "-c", MESH_PROGRAM.format(root=str(ROOT), **paths)],
        env=devices.environment(8),
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "done", done.stderr
    assert_restores(from_mesh, 5)
    found = checkpoint.restore_weights(from_mesh)
    assert_same(found.weights, make_trees(5)[0])
    assert all(leaf.sharding.num_devices == 1 for leaf in jax.tree.leaves(found.weights))


NEXT_BATCHES_PROGRAM = """
import itertools, sys
import numpy as np
from deconstruct import checkpoint
from deconstruct.data import loader
from deconstruct.data.dataset import open_dataset
from deconstruct.data.mixture import alone

if __name__ == "__main__":
    data, workdir, output, *cuts = sys.argv[1:]
    mixture = alone(open_dataset(data))
    found = {}
    for num_workers, steps in zip((0, 2), cuts):
        for step in map(int, steps.split(",")):
            restored = checkpoint.restore_weights(workdir, step=step).metadata
            batches = loader.training_batches(
                mixture, batch_size=4, seed=7, start_step=restored.step, num_workers=num_workers
            )
            for number, batch in enumerate(itertools.islice(batches, 20), restored.step):
                for name, array in batch._asdict().items():
                    found[f"{num_workers}/{step}/{number}/{name}"] = array
            batches.close()
    np.savez(output, **found)
"""


@pytest.mark.slow
def test_the_next_batches_after_a_restore_are_the_unbroken_ones(tmp_path):
    """D1: 20 after each of the first 30 steps, in a new process; after three with two workers."""
    source = data_corpus.write_source(tmp_path / "source", documents=30)
    data = tmp_path / "data"
    prepare.prepare(data_corpus.settings(source, data, max_len=32), progress=False)
    batches = loader.training_batches(
        alone(open_dataset(data)), batch_size=4, seed=7, start_step=0, num_workers=0
    )
    cuts, unbroken = {0: range(1, 31), 2: (1, 13, 30)}, []
    with checkpoint.Checkpointer(tmp_path / "run", make_identity(), keep_latest=30) as saver:
        for number, batch in enumerate(itertools.islice(batches, 50)):
            if number in cuts[0]:
                saver.save(number, *make_trees(number), data_position=4 * number, tokens=0)
            unbroken.append(batch)
    batches.close()
    program = tmp_path / "next_batches.py"
    program.write_text(NEXT_BATCHES_PROGRAM)
    output = tmp_path / "found.npz"
    done = subprocess.run(
        [sys.executable, program, data, tmp_path / "run", output]
        + [",".join(map(str, steps)) for steps in cuts.values()],
        env=devices.environment(1),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = np.load(output)
    wanted = {
        f"{num_workers}/{cut}/{number}/{name}": array
        for num_workers, steps in cuts.items()
        for cut in steps
        for number in range(cut, cut + 20)
        for name, array in unbroken[number]._asdict().items()
    }
    assert found.keys() == wanted.keys()
    for key, array in wanted.items():
        assert found[key].dtype == array.dtype
        np.testing.assert_array_equal(found[key], array, err_msg=key)


def test_a_step_that_donates_what_is_being_saved_never_reaches_the_files(tmp_path, monkeypatch):
    """Save, then train on with donation while the save still runs, twenty times."""
    params = {f"layer_{i:02d}": jnp.full((256, 256), float(i)) for i in range(4)}
    state = {"weights": {"params": params}, "optimizer": OPTIMIZER.init(params)}
    donating = jax.jit(
        lambda state: jax.tree.map(lambda x: x * 0.5 + 3 if x.ndim else x + 1, state),
        donate_argnums=0,
    )
    old = jax.tree.leaves(state)
    state = donating(state)
    assert all(leaf.is_deleted() for leaf in old), "the step does not donate: nothing is tested"
    write_file_list = manager.write_file_list

    def late(directory):
        time.sleep(0.05)
        write_file_list(directory)

    monkeypatch.setattr(manager, "write_file_list", late)
    kept, overtaken = [], 0
    with checkpoint.Checkpointer(tmp_path, make_identity(), keep_latest=20) as saver:
        for number in range(1, 21):
            kept.append(jax.tree.map(lambda x: np.array(x, copy=True), state))
            saver.save(number, state["weights"], state["optimizer"], data_position=number, tokens=0)
            state = jax.block_until_ready(donating(donating(state)))
            overtaken += saver._manager.is_saving_in_progress()
    assert overtaken > 10, "the saves were over before the steps: nothing is tested"
    for number, want in enumerate(kept, 1):
        directory = reading.resolve(tmp_path) / "checkpoints" / str(number)
        for item in ("weights", "optimizer"):
            assert_same(reading.read_arrays(directory / item, abstract(want[item])), want[item])


KILL_PROGRAM = """
import sys, time
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
import test_checkpoint as t
from deconstruct import checkpoint
from deconstruct.checkpoint import manager

def stuck(directory):
    print("written, not committed", flush=True)
    time.sleep(600)

later = checkpoint.Checkpointer({later!r}, t.make_identity())
later.save(10, *t.make_trees(10), data_position=80, tokens=0)
later.wait()
manager.write_file_list = stuck
later.save(20, *t.make_trees(20), data_position=160, tokens=2000)
first = checkpoint.Checkpointer({first!r}, t.make_identity())
first.save(20, *t.make_trees(20), data_position=160, tokens=2000)
time.sleep(600)
"""


def test_killed_between_save_and_commit(tmp_path, caplog):
    """Once in a run's first save, once in a later one."""
    workdirs = {"first": tmp_path / "first", "later": tmp_path / "later"}
    paths = {name: str(path) for name, path in workdirs.items()}
    program = KILL_PROGRAM.format(root=str(ROOT), **paths)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        for _ in workdirs:
            assert process.stdout.readline() == b"written, not committed\n"
        process.send_signal(signal.SIGKILL)
    for name, workdir in workdirs.items():
        folder = workdir / "checkpoints"
        older = ["10"] if name == "later" else []
        unfinished = "20.orbax-checkpoint-tmp"
        assert sorted(path.name for path in folder.iterdir()) == [*older, unfinished]
        weights, optimizer = make_trees(20)
        with checkpoint.Checkpointer(workdir, make_identity()) as saver:
            restored = saver.restore(abstract(weights), abstract(optimizer))
            assert (restored and restored.metadata.step) == (10 if older else None)
            (folder / f"mine.{unfinished}").mkdir()
            saver.save(20, weights, optimizer, data_position=160, tokens=2000)
        names = sorted(path.name for path in folder.iterdir())
        assert names == [*older, "20", f"mine.{unfinished}"]
        assert f"deleting {folder / unfinished}, which a killed save left" in caplog.text
        assert_restores(workdir, 20)


class TestFailures:
    @pytest.mark.parametrize("learnt_by", ["check", "wait", "save", "close"])
    def test_a_save_that_fails_in_the_background_is_one_clear_error(
        self, run, monkeypatch, learnt_by
    ):
        def full(*_):
            raise OSError(28, "No space left on device")

        saver = checkpoint.Checkpointer(run, make_identity(), keep_latest=1)
        with monkeypatch.context() as patch:
            patch.setattr(manager, "write_file_list", full)
            saver.save(40, *make_trees(40), data_position=320, tokens=0)
            with pytest.raises(ValueError, match=r"was not written: .*No space left on device"):
                if learnt_by == "check":
                    for _ in range(1000):
                        saver.check()
                        time.sleep(0.01)
                elif learnt_by == "save":
                    saver.save(50, *make_trees(50), data_position=400, tokens=5000)
                else:
                    getattr(saver, learnt_by)()
        assert stored(run) == [30, 20, 10], "nothing may be deleted for a step that failed"
        assert_restores(run, 30)
        if learnt_by != "close":
            assert saver.latest_step == 30
            saver.save(50, *make_trees(50), data_position=400, tokens=5000)
            saver.close()
            assert stored(run) == [50, 20]
            assert_restores(run, 50)

    def test_a_directory_that_cannot_be_made_is_one_clear_error(self, tmp_path):
        (tmp_path / "file").write_text("")
        saver = checkpoint.Checkpointer(tmp_path / "file" / "run", make_identity())
        with pytest.raises(ValueError, match="was not written"):
            saver.save(1, *make_trees(), data_position=8, tokens=0)
