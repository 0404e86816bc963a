"""Whole runs whose checkpoints, disk or data fail: what is said, the exit status, what is left."""

import pathlib
import resource
import shutil
import subprocess
import time

import devices
import jax
import numpy as np
import pytest
import test_checkpoint
import test_train
import tiny_run

from deconstruct import checkpoint, flops, metrics, run, setup, step
from deconstruct.checkpoint import manager
from deconstruct.data import loader
from deconstruct.spec import ModelSpec

data, config_file = test_train.data, test_train.config_file  # fixtures
unbroken = test_train.unbroken


@pytest.mark.slow
def test_a_torn_newest_step_costs_no_more_than_its_own_steps(config_file, unbroken, tmp_path):
    """C1: said aloud, status 0, the same record, and the torn step set aside whole."""
    workdir = tmp_path / "run"
    shutil.copytree(unbroken, workdir)
    torn = workdir / "checkpoints" / "12"
    test_checkpoint.lose_arrays(torn)
    before = test_checkpoint.snapshot(torn)
    done = tiny_run.run_command(tiny_run.command(config_file, workdir))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "checkpoint step 12 in " in done.stderr and "refused: its file " in done.stderr
    assert "resuming from step 8" in done.stdout
    assert tiny_run.facts(workdir) == tiny_run.facts(unbroken)
    assert test_checkpoint.snapshot(torn.with_name("12.refused")) == before
    assert checkpoint.restore_weights(workdir).metadata.step == 12


def test_a_run_without_a_whole_step_does_not_begin_anew(config_file, unbroken, tmp_path):
    """C1: status 1, one line with the reason for each step, nothing written."""
    workdir = tmp_path / "run"
    shutil.copytree(unbroken, workdir)
    for stored in (workdir / "checkpoints").iterdir():
        test_checkpoint.lose_optimizer(stored)
    before = test_checkpoint.snapshot(workdir)
    done = tiny_run.run_command(tiny_run.command(config_file, workdir))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ") and "none of them loads" in last
    assert "12: its file optimizer/" in last and "8: its file optimizer/" in last
    assert test_checkpoint.snapshot(workdir) == before
    assert checkpoint.restore_weights(workdir).metadata.step == 12


@pytest.mark.slow
def test_a_disk_that_fills_up_ends_the_run_and_the_same_command_goes_on(config_file, tmp_path):
    """The kernel refuses to let files grow from the first stored step on."""
    workdir = tmp_path / "run"
    settings = ["num_steps=60", "checkpoint_every=20", "validate_every=20"]
    flags = [f"--config.{setting}" for setting in settings]
    command = tiny_run.command(config_file, workdir, *flags)
    process = subprocess.Popen(
        command,
        cwd=tiny_run.ROOT,
        env=devices.environment(1),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not checkpoint.stored_steps(workdir / "checkpoints") and process.poll() is None:
        time.sleep(0.001)
    hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (60_000, hard))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1, errors[-3000:]
    last = errors.splitlines()[-1]
    assert last.startswith("error: a checkpoint in ") and "was not written" in last, errors
    assert "Event loop is closed" not in errors
    assert "File too large" in last
    assert checkpoint.stored_steps(workdir / "checkpoints") == [20]
    done = tiny_run.run_command(command)
    assert done.returncode == 0, done.stderr[-3000:]
    whole = tmp_path / "whole"
    changes = {"num_steps": 60, "checkpoint_every": 20, "validate_every": 20}
    run.train(tiny_run.load_config(config_file, **changes), str(whole))
    assert tiny_run.facts(workdir) == tiny_run.facts(whole)


def test_a_second_trainer_in_one_workdir_is_refused(config_file, tmp_path):
    """It would delete the first one's unfinished save; a killed one holds nothing."""
    workdir = tmp_path / "run"
    command = tiny_run.command(config_file, workdir, "--config.num_steps=5000")
    with subprocess.Popen(
        command, cwd=tiny_run.ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as first:
        while tiny_run.last_step(workdir) < 1 and first.poll() is None:
            time.sleep(0.01)
        with pytest.raises(ValueError, match=r"another run writes to --workdir=.*run: wait for"):
            run.train(tiny_run.load_config(config_file), str(workdir))
        first.kill()
    with setup.open_workdir(str(workdir)):
        pass


def test_a_last_save_that_fails_is_no_finished_run(
    config_file, unbroken, tmp_path, monkeypatch, capsys
):
    """Nothing is said of being done; the same command trains the lost steps again."""
    workdir, write_file_list = tmp_path / "run", manager.write_file_list

    def full(directory):
        if directory.name.startswith("12"):
            raise OSError(28, "No space left on device")
        write_file_list(directory)

    with monkeypatch.context() as patch:
        patch.setattr(manager, "write_file_list", full)
        with pytest.raises(ValueError, match=r"was not written: .*No space left on device"):
            run.train(tiny_run.load_config(config_file), str(workdir))
    assert "done:" not in capsys.readouterr().out
    assert checkpoint.stored_steps(workdir / "checkpoints")[0] == 8
    run.train(tiny_run.load_config(config_file), str(workdir))
    assert "resuming from step 8" in capsys.readouterr().out
    assert tiny_run.facts(workdir) == tiny_run.facts(unbroken)


def test_a_disk_that_is_full_at_the_start_is_one_clear_error(config_file, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_text", full)
    with pytest.raises(ValueError, match=r"No space left on device\. Checkpoints in .*/run are"):
        run.train(tiny_run.load_config(config_file), str(tmp_path / "run"))


def test_throughput_leaves_padding_and_the_first_step_out(config_file, tmp_path, monkeypatch):
    """L1: a quarter of each batch is padding; the step that compiles has no throughput."""
    training_batches = loader.training_batches

    def padded(*args, **kwargs):
        for batch in training_batches(*args, **kwargs):
            weights = np.ones_like(batch.weights_BT)
            weights[:, : weights.shape[1] // 4] = 0
            yield batch._replace(weights_BT=weights)

    monkeypatch.setattr(loader, "training_batches", padded)
    run.train(tiny_run.load_config(config_file, num_steps=4), str(tmp_path / "run"))
    first, *others = tiny_run.records(tmp_path / "run", "train")
    assert "tokens_per_second" not in first and "positions_per_second" not in first
    for record in others:
        ratio = record["tokens_per_second"] / record["positions_per_second"]
        assert ratio == pytest.approx(3 / 4)
    assert [record["tokens"] for record in (first, *others)] == [96, 192, 288, 384]


def test_throughput_is_that_of_slow_steps(config_file, tmp_path, monkeypatch):
    """L1: work that goes on after its dispatch; not the compilation and validation, slow too."""
    compile_train_step, validate = step.compile_train_step, run.Loop.validate
    ended, paused = [], []

    def work(loss):
        time.sleep(0.15)
        ended.append(time.perf_counter())
        return loss

    def slow_compilation(*args):
        time.sleep(1)
        train_step = compile_train_step(*args)
        slow_loss = jax.jit(lambda loss: jax.pure_callback(work, loss, loss))

        def slow_step(state, batch):
            state, values = train_step(state, batch)
            return state, values | {"loss": slow_loss(values["loss"])}

        return slow_step

    def slow_validation(*args):
        begin = time.perf_counter()
        time.sleep(1)
        loss = validate(*args)
        paused.append(time.perf_counter() - begin)
        return loss

    monkeypatch.setattr(step, "compile_train_step", slow_compilation)
    monkeypatch.setattr(run.Loop, "validate", slow_validation)
    monkeypatch.setitem(metrics.PEAK_FLOPS, jax.devices()[0].device_kind, 1e12)
    config = tiny_run.load_config(
        config_file, log_every=100, validate_every=6, checkpoint_every=100, log__diagnose_every=None
    )
    run.train(config, str(tmp_path / "run"))
    first, last = tiny_run.records(tmp_path / "run", "train")
    assert (first["step"], last["step"]) == (1, 12) and "tokens_per_second" not in first
    speed = (last["tokens"] - first["tokens"]) / (ended[11] - ended[0] - paused[0])
    assert last["tokens_per_second"] == pytest.approx(speed, rel=0.05)
    stored = checkpoint.restore_weights(tmp_path / "run")
    per_token = flops.train_flops_per_token(ModelSpec.from_json(stored.spec_json), batch_size=4)
    assert last["mfu"] == pytest.approx(per_token * last["tokens_per_second"] / 1e12)
