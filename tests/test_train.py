"""Whole runs: resume bit for bit, kills, refusals, non-finite steps, the command line."""

import dataclasses
import importlib.util
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
import pytest
import tiny_run

from deconstruct import checkpoint, run, setup
from deconstruct.data import loader, prepare, sources

HELP = ["-m", "deconstruct.train", "--help"]

# Losses of one run on other device counts: sums in another order, through Adam's first steps.
MESH_TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny_run.prepare_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def config_file(tmp_path_factory, data):
    return tiny_run.write_config(tmp_path_factory.mktemp("config"), data)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, config_file):
    """The workdir of a run of 12 steps that nothing stopped."""
    workdir = tmp_path_factory.mktemp("unbroken") / "run"
    run.train(tiny_run.load_config(config_file), str(workdir))
    return workdir


def test_a_run_leaves_what_others_read(unbroken):
    names = {path.name for path in unbroken.iterdir()}
    assert {"config.json", "spec.json", "tokenizer.json", "metrics.jsonl", "checkpoints"} <= names
    train = tiny_run.records(unbroken, "train")
    assert [record["step"] for record in train] == list(range(1, 13))
    assert train[-1]["loss"] < train[0]["loss"]
    assert {"tokens", "learning_rate", "grad_norm", "tokens_per_second"} <= train[-1].keys()
    assert "mfu" not in train[-1]  # the peak of this machine is not known
    validation = tiny_run.records(unbroken, "validation")
    assert [(r["step"], r["name"]) for r in validation] == [
        (4, "validation"), (8, "validation"), (12, "validation"),
    ]  # fmt: skip
    assert validation[-1]["bits_per_byte"] > 0
    diagnostics = tiny_run.records(unbroken, "diagnostics")
    assert [record["step"] for record in diagnostics] == [6, 12]
    assert set(diagnostics[0]) == {"kind", "step", "largest_score", "residual_rms", "grad_norm"}
    assert list(diagnostics[0]["largest_score"]) == ["layer_01", "layer_02"]


@pytest.mark.parametrize(
    "stops, changes",
    [
        ((8,), {}),
        ((3, 5), {"compute__layout": "scan"}),
    ],
    ids=["loop", "scan"],
)
def test_resuming_equals_the_unbroken_run(tmp_path, config_file, unbroken, stops, changes):
    """C5: losses, rates, norms, validation; in several parts, and once in the other layout."""
    expected = tiny_run.facts(unbroken)
    if changes:
        run.train(tiny_run.load_config(config_file, **changes), str(tmp_path / "whole"))
        expected = tiny_run.facts(tmp_path / "whole")
    for stop in (*stops, 12):
        config = tiny_run.load_config(config_file, num_steps=stop, **changes)
        run.train(config, str(tmp_path / "parts"))
    parts = tiny_run.facts(tmp_path / "parts")
    by_key = {(r["kind"], r["step"], r.get("name")): r for r in parts}
    for record in expected:
        assert by_key[record["kind"], record["step"], record.get("name")] == record


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before the first save", "during a save", "between saves"])
def test_killed_at_any_moment_ends_the_same(tmp_path, config_file, unbroken, when):
    """SIGKILL, the same command again, the same record bit for bit."""
    workdir = tmp_path / "run"
    command = tiny_run.command(config_file, workdir)
    moments = {
        "before the first save": lambda: tiny_run.last_step(workdir) >= 2,
        "during a save": lambda: any((workdir / "checkpoints").glob("*tmp*")),
        "between saves": lambda: tiny_run.last_step(workdir) >= 7,
    }
    kill_when(command, moments[when])
    done = tiny_run.run_command(command)
    assert done.returncode == 0, done.stderr[-3000:]
    assert tiny_run.facts(workdir) == tiny_run.facts(unbroken)


def kill_when(command, reached, optimised=False):
    """Starts a command and kills it as soon as `reached()`."""
    process = subprocess.Popen(
        command,
        cwd=tiny_run.ROOT,
        env=devices.environment(1, optimised),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not reached() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"


@pytest.mark.slow
def test_a_run_moves_to_another_mesh(tmp_path, config_file, unbroken):
    """C3: begun on eight devices under a scan, ended on one without, the same losses."""
    workdir = tmp_path / "run"
    flags = ["--config.num_steps=8", "--config.compute.layout=scan"]
    flags += ["--config.mesh.data=2", "--config.mesh.fsdp=2", "--config.mesh.tensor=2"]
    done = tiny_run.run_command(tiny_run.command(config_file, workdir, *flags), num_devices=8)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "platform cpu: 8 x cpu" in done.stdout
    flags[0] = "--config.num_steps=9"
    done = tiny_run.run_command(tiny_run.command(config_file, workdir, *flags), num_devices=8)
    assert done.returncode == 0 and "resuming from step 8" in done.stdout, done.stderr[-3000:]
    run.train(tiny_run.load_config(config_file), str(workdir))
    for kind in ("train", "validation"):
        losses = [[r["loss"] for r in tiny_run.records(w, kind)] for w in (workdir, unbroken)]
        # The run that stopped at step 9 validated there too.
        np.testing.assert_allclose(losses[0][-1], losses[1][-1], rtol=MESH_TOLERANCE)
    np.testing.assert_allclose(losses[0][:2], losses[1][:2], rtol=MESH_TOLERANCE)


def test_a_finished_run_does_nothing_again(unbroken, config_file, tmp_path, capsys):
    shutil.copytree(unbroken, tmp_path / "run")
    run.train(tiny_run.load_config(config_file), str(tmp_path / "run"))
    assert "nothing is left to train" in capsys.readouterr().out
    assert tiny_run.facts(tmp_path / "run") == tiny_run.facts(unbroken)


@pytest.mark.parametrize(
    "arg, changes, named",
    [
        ("non_approximate,even", {"learning_rate": 1e-3}, "config.learning_rate"),
        ("non_approximate,even", {"optimizer__schedule_steps": None}, "follows num_steps unless"),
        ("non_approximate,even", {"seed": 1}, "config.seed"),
        ("rnd_emb_qk,even", {}, "spec.layers.1.mixer"),
        ("non_approximate,even", {"model__num_layers": 4}, "config.model.num_layers"),
        ("non_approximate,even", {"model__num_heads": 2}, "config.model.num_heads"),
    ],
)
def test_another_run_is_refused(unbroken, config_file, tmp_path, arg, changes, named):
    """C4, C5: also where all shapes agree (`rnd_emb_qk` for `non_approximate`, other heads)."""
    shutil.copytree(unbroken, tmp_path / "run")
    before = snapshot(tmp_path / "run")
    with pytest.raises(ValueError, match=named):
        run.train(tiny_run.load_config(config_file, arg, **changes), str(tmp_path / "run"))
    assert snapshot(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"documents": 61}, r"data_fingerprint\.1\.counts\.train\.documents: \d+ -> \d+"),
        ({"tokenizer": "bpe:280"}, r'data_fingerprint\.1\.builder_config\.tokenizer: "bpe:300" ->'),
        ({"max_len": 16}, r"config\.max_len: 32 -> 16"),
        ({"validation_share": 0.2}, r"\.validation_share: 0\.1 -> 0\.2"),
    ],
    ids=["corpus", "tokenizer", "row length", "held-out share"],
)
def test_other_data_is_refused(unbroken, config_file, tmp_path, changes, named):
    """With the field, its old and its new value; how the rows were prepared does not count."""
    settings = {"max_len": tiny_run.MAX_LEN, "tokenizer": "bpe:300", "num_processes": 2}
    settings |= {name: value for name, value in changes.items() if name != "documents"}
    source = data_corpus.write_source(tmp_path / "source", documents=changes.get("documents", 60))
    prepare.prepare(data_corpus.settings(source, tmp_path / "data", **settings), progress=False)
    before = snapshot(unbroken)
    config = tiny_run.load_config(
        config_file, data__path=str(tmp_path / "data"), max_len=settings["max_len"]
    )
    with pytest.raises(ValueError, match=named):
        run.train(config, str(unbroken))
    assert snapshot(unbroken) == before


def test_the_same_data_made_anew_elsewhere_is_no_other(unbroken, config_file, tmp_path, capsys):
    source = data_corpus.write_source(tmp_path / "moved", documents=60)
    settings = data_corpus.settings(source, tmp_path / "data", num_processes=2)
    prepare.prepare(settings, progress=False)
    shutil.copytree(unbroken, tmp_path / "run")
    changes = {"data__path": str(tmp_path / "data"), "data__num_workers": 1, "num_steps": 13}
    run.train(tiny_run.load_config(config_file, **changes), str(tmp_path / "run"))
    assert "resuming from step 12" in capsys.readouterr().out


def test_an_allowed_change_resumes(unbroken, config_file, tmp_path):
    shutil.copytree(unbroken, tmp_path / "run")
    config = tiny_run.load_config(config_file, num_steps=13, learning_rate=1e-3)
    run.train(config, str(tmp_path / "run"), allow_change=["config.learning_rate"])
    assert tiny_run.records(tmp_path / "run", "train")[-1]["step"] == 13


def snapshot(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def poison_from(monkeypatch, step):
    """Makes the loss of one step NaN: its batch gets a NaN weight."""
    training_batches = loader.training_batches

    def poisoned(*args, start_step, **kwargs):
        batches = training_batches(*args, start_step=start_step, **kwargs)
        try:
            for number, batch in enumerate(batches, start=start_step + 1):
                weights = batch.weights_BT * (np.float32(np.nan) if number == step else 1)
                yield batch._replace(weights_BT=weights.astype(np.float32))
        finally:
            batches.close()

    monkeypatch.setattr(loader, "training_batches", poisoned)


def test_a_non_finite_step_stops_the_run(monkeypatch, config_file, tmp_path):
    """N2: the newest checkpoint is earlier, finite, and named; step and rows are named."""
    poison_from(monkeypatch, 7)
    workdir = tmp_path / "run"
    config = tiny_run.load_config(config_file, checkpoint_every=2)
    with pytest.raises(ValueError, match=r"step 7 is not finite.*rows 24 to 27.*checkpoint 6"):
        run.train(config, str(workdir))
    stored = checkpoint.restore_weights(workdir)
    assert stored.metadata.step == 6
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(stored.weights))


def test_non_finite_steps_are_skipped_up_to_a_limit(monkeypatch, config_file, tmp_path):
    poison_from(monkeypatch, 7)
    config = tiny_run.load_config(config_file, non_finite__policy="skip", non_finite__max_skips=1)
    run.train(config, str(tmp_path / "run"))
    train = tiny_run.records(tmp_path / "run", "train")
    assert train[6]["loss"] == "NaN"
    assert [record["skipped"] for record in train] == [0] * 6 + [1] * 6
    assert np.isfinite(train[-1]["loss"])
    config = tiny_run.load_config(config_file, non_finite__policy="skip", non_finite__max_skips=0)
    with pytest.raises(ValueError, match="step 7 is not finite"):
        run.train(config, str(tmp_path / "other"))


def test_a_width_that_the_mesh_does_not_divide_is_refused_by_name(config_file, tmp_path):
    """S1: also one that only a mixer's options know."""
    command = tiny_run.command(
        f"{config_file}:mlp[width=33],uniform", tmp_path / "run", "--config.mesh.tensor=2"
    )
    done = tiny_run.run_command(command, num_devices=2)
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert "feed_forward of layer_01.mixer.down.kernel" in message
    assert "=33 does not divide over mesh axis tensor of size 2" in message
    assert "nearest sizes that do: 32 or 34" in message


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"model__vocab_size": 100}, "outside the model's vocabulary of 100"),
        ({"data__validation": ("valid",)}, "has no split 'valid', only train, validation"),
        ({"data__validation_rows": 10_000}, "10000 were asked for"),
        ({"batch_size": 10_000}, "fewer than one batch of 10000"),
        ({"data__path": "gs://bucket/rows"}, "gs://bucket/rows is no local path"),
    ],
)
def test_what_the_data_lacks_is_refused_before_compiling(config_file, tmp_path, changes, said):
    """T2, F2: and an older record in the workdir stays."""
    workdir = tmp_path / "run"
    workdir.mkdir()
    (workdir / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n')
    before = snapshot(workdir)
    with pytest.raises(ValueError, match=said):
        run.train(tiny_run.load_config(config_file, **changes), str(workdir))
    (workdir / ".lock").unlink()
    assert snapshot(workdir) == before


def test_a_sample_is_as_long_as_fits(config_file, tmp_path, capsys):
    """Fixed streams end at max_len; ids that only the model has are never chosen. The run has said
    which kernels it took."""
    config = tiny_run.load_config(
        config_file, "rnd_emb_qk,even", num_steps=1, model__vocab_size=2000, log__sample_prompt="a"
    )
    run.train(config, str(tmp_path / "run"))
    told = capsys.readouterr().out
    assert "sample: a[" in told
    assert "kernels: causal_attention by xla; fixed_map_attention by blocked\n" in told
    config = dataclasses.replace(
        config, log=dataclasses.replace(config.log, sample_prompt="a b " * 40)
    )
    run.train(config, str(tmp_path / "run"))
    assert "log.sample_prompt alone fills max_len=32" in capsys.readouterr().out


@pytest.mark.parametrize(
    "workdir, said",
    [
        ("{run}/checkpoints", "inside a run"),
        ("{run}/checkpoints/12", "inside a run"),
        ("{run}/checkpoints/12/weights/run", "inside a run"),
        ("{run}/tensorboard", "inside a run"),
        ("gs://bucket/run", "no local path"),
        ("/dev/null/run", "cannot be written"),
    ],
)
def test_workdirs_that_cannot_be_one(unbroken, config_file, workdir, said):
    """F2: refused before anything is compiled, in one line."""
    before = snapshot(unbroken)
    with pytest.raises(ValueError, match=said):
        run.train(tiny_run.load_config(config_file), workdir.format(run=unbroken))
    assert snapshot(unbroken) == before


def test_a_workdir_may_lie_beside_a_strangers_spec(tmp_path):
    (tmp_path / "spec.json").write_text("{}")
    with setup.open_workdir(str(tmp_path / "runs" / "a")) as folder:
        assert folder.is_dir()


def test_a_workdir_may_be_relative_or_hold_spaces(config_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tiny_run.load_config(config_file, num_steps=1)
    for workdir in ("relative/", str(tmp_path / "with space")):
        run.train(config, workdir)
        assert checkpoint.restore_weights(workdir).metadata.step == 1


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--config.lerning_rate=1"], "did you mean 'learning_rate'?"),
        (["--config.warmup_steps=1"], "did you mean 'optimizer.warmup_steps'?"),
        (["--config.model.mixr=mlp"], "did you mean 'model.mixer'?"),
        (["--config.num_steps=many"], "num_steps"),
        (["--config.num_steps=None"], "must have a value"),
        (["--config.num_steps=-1"], "num_steps must be positive"),
        (["--config.learning_rate=inf"], "learning_rate must be positive"),
        (["--config.seed=4294967296"], "seed must be at least 0 and below 2**32"),
        (["--config.model.layers=standard mlp"], "FILE.py:standard,uniform"),
        (["--workdir="], "--workdir is missing"),
        (["--config.model.plan=evn"], "did you mean 'even'?"),
        (["--config.model.mixer=standrad"], "did you mean 'standard'?"),
        (["--config.model.mixer=mlp[widht=3]"], "did you mean 'width'?"),
        (["--config.model.mixer=mlp[width=True]"], "width must be a positive integer"),
        (["--config.seed=1", "--config.seed=2"], "given twice"),
        (["--workdirr=x"], "workdir"),
        (["stray"], "stray"),
    ],
)
def test_wrong_flags_are_one_line_within_two_seconds(config_file, tmp_path, flags, said):
    """F1: and nothing is made."""
    begin = time.monotonic()
    done = tiny_run.run_command(tiny_run.command(config_file, tmp_path / "run", *flags))
    seconds = time.monotonic() - begin
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ") and said in line
    assert not (tmp_path / "run").exists()
    assert seconds < 5  # two on an idle machine; tests share theirs


@pytest.mark.parametrize(
    "line, said",
    [
        ("config.lerning_rate = 1", "did you mean 'learning_rate'?"),
        ("config.learning_rate = 'high'", "learning_rate"),
        ("raise ValueError('my own reason')", "my own reason"),
        ("config.data.pth = 'x'", "'data.path'"),
        (
            "config.modle.num_layers = 3",
            "wrong.py: unknown config key 'modle'; did you mean 'model'",
        ),
        ("config.xyzzy.num_layers = 3", "wrong.py: unknown config key 'xyzzy'"),
    ],
)
def test_wrong_config_files_are_one_line(config_file, tmp_path, line, said):
    text = config_file.read_text().replace(
        "    return config\n", f"    {line}\n    return config\n"
    )
    (tmp_path / "wrong.py").write_text(text)
    done = tiny_run.run_command(tiny_run.command(tmp_path / "wrong.py", tmp_path / "run"))
    assert done.returncode == 1
    (last,) = done.stderr.strip().splitlines()
    assert said in last


def test_help_needs_no_jax():
    begin = time.monotonic()
    done = tiny_run.run_command([sys.executable, "-X", "importtime", *HELP])
    assert done.returncode == 0
    assert "--workdir" in done.stdout and "--config" in done.stdout
    assert "ml_collections" in done.stderr and " jax" not in done.stderr
    assert time.monotonic() - begin < 3


def test_a_wrong_key_is_refused_before_jax(config_file, tmp_path):
    """F1: no device backend is touched, for JAX is not even imported."""
    python, *command = tiny_run.command(config_file, tmp_path / "run", "--config.sed=1")
    done = tiny_run.run_command([python, "-X", "importtime", *command])
    assert "did you mean 'seed'?" in done.stderr.splitlines()[-1]
    assert " jax" not in done.stderr


@pytest.mark.slow
def test_quickstart_killed_at_three_moments_ends_the_same(tmp_path):
    """The command of the README, shortened: one run, killed and begun again three times."""
    if importlib.util.find_spec(sources.WIKI_MODULE) is None:
        pytest.skip(f"{sources.WIKI_PACKAGE} is not installed")
    settings = {"num_steps": 12, "checkpoint_every": 4, "validate_every": 4, "log_every": 1}
    settings |= {"data.path": tmp_path / "data", "data.validation_rows": 8, "max_len": 64}
    settings["optimizer.warmup_steps"] = 2
    flags = [f"--config.{key}={value}" for key, value in settings.items()]
    whole = tiny_run.command("configs/quickstart.py", tmp_path / "whole", *flags)
    done = tiny_run.run_command(whole, optimised=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "sample: The city of[" in done.stdout and "unigram entropy" in done.stdout
    workdir = tmp_path / "run"
    command = tiny_run.command("configs/quickstart.py", workdir, *flags)
    for moment in (2, 5, 9):
        kill_when(
            command, lambda moment=moment: tiny_run.last_step(workdir) >= moment, optimised=True
        )
    done = tiny_run.run_command(command, optimised=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resuming from step" in done.stdout
    assert tiny_run.facts(workdir) == tiny_run.facts(tmp_path / "whole")


def test_a_platform_that_is_not_here_names_the_install_line(config_file, tmp_path):
    """I2."""
    config = tiny_run.load_config(config_file, compute__platform="tpu")
    with pytest.raises(ValueError, match=r"no tpu device is here.*requirements-tpu.txt"):
        run.train(config, str(tmp_path / "run"))


def test_float32_loss_of_bfloat16_runs(config_file, tmp_path):
    config = tiny_run.load_config(config_file, num_steps=2, compute__dtype="bfloat16")
    run.train(config, str(tmp_path / "run"))
    losses = [record["loss"] for record in tiny_run.records(tmp_path / "run", "train")]
    assert any(loss != float(jnp.bfloat16(loss)) for loss in losses)
