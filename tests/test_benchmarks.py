"""Benchmarks while a run trains: the figures that its checkpoints have, logged beside the loss."""

import os
import signal

import jax
import pytest
import test_evaluate_command
import test_train
import tiny_run

from deconstruct import run, sharding, step, trained
from deconstruct.evaluate import data as documents_lib
from deconstruct.evaluate import run as evaluation
from deconstruct.evaluate.scorer import Scorer

data, config_file = test_train.data, test_train.config_file  # fixtures
data_dir = test_evaluate_command.data_dir

TASKS = ("copa", "lambada_openai")


def load_config(config_file, data_dir, **changes):
    chosen = {
        "benchmarks__every": 6,
        "benchmarks__tasks": TASKS,
        "benchmarks__data_dir": str(data_dir),
        "benchmarks__limit": 4,
    }
    return tiny_run.load_config(config_file, **chosen | changes)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, config_file, data_dir):
    workdir = tmp_path_factory.mktemp("unbroken") / "run"
    run.train(load_config(config_file, data_dir), str(workdir))
    return workdir


@pytest.mark.parametrize("layout", ["loop", "scan"])
def test_the_figures_are_those_of_the_checkpoint(config_file, data_dir, tmp_path, layout):
    """In whatever layout the weights lie while they train."""
    workdir = tmp_path / "run"
    changes = {"num_steps": 6, "compute__layout": layout, "model__num_layers": 4}
    run.train(load_config(config_file, data_dir, **changes), str(workdir))
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    results = evaluation.evaluate(
        Scorer(trained.load(str(workdir), mesh=mesh), mesh),
        documents_lib.read(data_dir, TASKS),
        limit=4,
        bootstrap_iterations=0,
        progress=False,
    )
    found = tiny_run.records(workdir, "benchmark")
    assert [(record["step"], record["name"]) for record in found] == [(6, name) for name in TASKS]
    assert found[0].keys() == {"kind", "step", "name", "acc"}
    for record, result in zip(found, results, strict=True):
        assert result.num_documents == 4
        for metric in record.keys() - {"kind", "step", "name"}:
            assert record[metric] == pytest.approx(result.figures[f"{metric},none"], rel=1e-6)


def test_every_so_many_steps_and_said(unbroken, config_file, data_dir, tmp_path, capsys):
    """What was scored before changes nothing, nor does a start in between."""
    found = tiny_run.records(unbroken, "benchmark")
    assert [(r["step"], r["name"]) for r in found] == [(n, task) for n in (6, 12) for task in TASKS]
    run.train(load_config(config_file, data_dir, num_steps=8), str(tmp_path / "run"))
    run.train(load_config(config_file, data_dir, num_steps=12), str(tmp_path / "run"))
    last = tiny_run.records(tmp_path / "run", "benchmark")[-2:]
    assert last == found[-2:]
    assert (
        f"step 12  lambada_openai: perplexity {last[1]['perplexity']:.5g}"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("stopped_at", [6, 12])
def test_a_signal_breaks_them_off_and_they_are_made_up(
    config_file, data_dir, unbroken, tmp_path, monkeypatch, stopped_at
):
    workdir, run_batch = tmp_path / "run", Scorer._run
    scored = []

    def terminated(self, batch):
        if tiny_run.last_step(workdir) == stopped_at:
            scored.append(batch)
            os.kill(os.getpid(), signal.SIGTERM)
        return run_batch(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Scorer, "_run", terminated)
        with pytest.raises(ValueError, match=f"after step {stopped_at}, which is saved"):
            run.train(load_config(config_file, data_dir), str(workdir))
    assert len(scored) == 1
    assert len(tiny_run.records(workdir, "benchmark")) == (0 if stopped_at == 6 else len(TASKS))
    run.train(load_config(config_file, data_dir), str(workdir))
    assert tiny_run.facts(workdir) == tiny_run.facts(unbroken)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"benchmarks__data_dir": None}, "benchmarks.every needs benchmarks.data_dir"),
        ({"benchmarks__tasks": ("copa", "pica")}, "pica.*piqa"),
        ({"benchmarks__tasks": ("boolq",)}, "lacks boolq/"),
        ({"benchmarks__limit": 0}, "benchmarks.limit must be positive"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_compiles(
    config_file, data_dir, tmp_path, monkeypatch, changes, message
):
    monkeypatch.setattr(step, "compile_train_step", lambda *_: pytest.fail("it compiles"))
    with pytest.raises(ValueError, match=message):
        run.train(load_config(config_file, data_dir, **changes), str(tmp_path / "run"))
