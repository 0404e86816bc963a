"""Loader processes that are killed, stuck or signalled (D6): one line, in time, no orphan."""

import itertools
import logging
import os
import pathlib
import shutil
import signal
import sys
import time

import processes
import pytest
import test_train
import tiny_run

from deconstruct import checkpoint, run
from deconstruct.data import loader, read_ahead
from deconstruct.data.dataset import open_dataset
from deconstruct.data.mixture import alone

data, config_file = test_train.data, test_train.config_file  # fixtures

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks at processes in /proc")

TWO = "--config.data.num_workers=2"


def trainer(config_file, tmp_path, *flags):
    """A run with two loader processes, which goes on until it is ended."""
    settings = (TWO, "--config.num_steps=100000", "--config.validate_every=100000", *flags)
    command = tiny_run.command(config_file, tmp_path / "run", *settings)
    return processes.Session(command, tmp_path / "log")


def test_a_killed_worker_ends_the_run_within_seconds(config_file, tmp_path):
    """As by the kernel when memory runs out."""
    with trainer(config_file, tmp_path) as session:
        session.wait_until(lambda: tiny_run.last_step(tmp_path / "run") >= 3)
        assert len(session.workers()) == 2
        os.kill(session.workers()[0], signal.SIGKILL)
        status, lines = session.ends(30)
    assert status == 1
    assert lines[-1] == (
        "error: a loader process was killed (out of memory?); run the same command again to go on, "
        "with a smaller data.num_workers"
    )
    assert not any("Traceback" in line for line in lines), lines


@pytest.fixture
def stuck(data, tmp_path, monkeypatch):
    """Data whose shards never answer, once it is open; and little patience."""
    copy = tmp_path / "copy"
    shutil.copytree(data, copy)
    dataset = open_dataset(copy)
    stick(copy)
    monkeypatch.setattr(read_ahead, "SAY_AFTER", 1.0)
    monkeypatch.setattr(read_ahead, "GIVE_UP_AFTER", 4.0)
    return dataset


def stick(folder):
    """Pipes without a writer in the place of the training shards: whoever opens one waits."""
    for shard in sorted(pathlib.Path(folder).glob("*train*array_record*")):
        shard.unlink()
        os.mkfifo(shard)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_read_that_never_returns_is_named_and_given_up(stuck, num_workers, caplog):
    batches = loader.training_batches(
        alone(stuck), batch_size=4, seed=0, start_step=5, num_workers=num_workers
    )
    begin = time.monotonic()
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError) as found:
        next(batches)
    batches.close()
    assert 4 <= time.monotonic() - begin < 12
    stage = r"the loader processes \d+, \d+, which read" if num_workers else "the thread that reads"
    found.match(rf"^the batch of step 6 has not come for 4 s: waited for {stage} {stuck.path}; see")
    (record,) = caplog.records
    assert record.getMessage().startswith("the batch of step 6 has not come for 1 s: waiting for ")
    assert not read_ahead._living_workers()


def test_a_slow_read_is_waited_for(data, monkeypatch, caplog):
    dataset = open_dataset(data)
    rows = dataset.rows

    def slow(*args):
        time.sleep(1.5)
        return rows(*args)

    monkeypatch.setattr(read_ahead, "SAY_AFTER", 0.5)
    monkeypatch.setattr(dataset, "rows", slow)
    batches = loader.training_batches(
        alone(dataset), batch_size=4, seed=0, start_step=0, num_workers=0
    )
    assert len(list(itertools.islice(batches, 2))) == 2
    batches.close()
    assert len(caplog.records) == 2


STUCK_PROGRAM = """
import pathlib, sys
sys.path.insert(0, {tests!r})
import test_data_workers
from deconstruct import entry, setup, train
from deconstruct.data import read_ahead

if __name__ == "__main__":
    read_ahead.SAY_AFTER, read_ahead.GIVE_UP_AFTER = 1.0, 4.0
    check_rows = setup.check_rows

    def check_and_stick(config, data):
        check_rows(config, data)
        test_data_workers.stick(data.sources[0].dataset.path)

    setup.check_rows = check_and_stick
    entry.run(train.main)
"""


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_whose_data_never_answers_ends(config_file, data, tmp_path, num_workers):
    shutil.copytree(data, tmp_path / "copy")
    program = tmp_path / "stuck.py"
    program.write_text(STUCK_PROGRAM.format(tests=str(pathlib.Path(__file__).parent)))
    flags = [f"--config.data.path={tmp_path / 'copy'}", f"--config.data.num_workers={num_workers}"]
    command = tiny_run.command(config_file, tmp_path / "run", *flags)[3:]
    with processes.Session([sys.executable, program, *command], tmp_path / "log") as session:
        status, lines = session.ends(90)
    assert status == 1
    warning, error = lines[-2:]
    assert "the batch of step 1 has not come for 1 s: waiting for" in warning
    assert error.startswith("error: the batch of step 1 has not come for 4 s: waited for the ")
    assert not any("Traceback" in line for line in lines), lines


SLOW_PROGRAM = """
import time
from deconstruct import entry, train
from deconstruct.data.dataset import PreparedDataset

rows = PreparedDataset.rows

def slow(*args):
    time.sleep(1)
    return rows(*args)

PreparedDataset.rows = slow  # in loader processes too: they import this file

if __name__ == "__main__":
    entry.run(train.main)
"""


@pytest.mark.slow
def test_sigterm_to_all_processes_of_a_run_saves_its_newest_step(config_file, tmp_path):
    """As schedulers send it, here while the run waits for data; the same command goes on."""
    workdir = tmp_path / "run"
    program = tmp_path / "slow.py"
    program.write_text(SLOW_PROGRAM)
    settings = {"num_steps": 24, "validate_every": 1000, "checkpoint_every": 1000}
    flags = [f"--config.{key}={value}" for key, value in settings.items()]
    command = tiny_run.command(config_file, workdir, TWO, *flags)[3:]
    with processes.Session([sys.executable, program, *command], tmp_path / "log") as session:
        session.wait_until(lambda: tiny_run.last_step(workdir) >= 12)  # nothing is read ahead
        record = workdir / "metrics.jsonl"
        session.wait_until(lambda: time.time() - record.stat().st_mtime > 0.4)
        assert len(session.workers()) == 2
        session.signal(signal.SIGTERM)
        status, lines = session.ends(30)
    assert status == 1
    step = tiny_run.last_step(workdir)
    assert lines[-1] == (
        f"error: stopped by SIGTERM after step {step}, which is saved: run the same command again "
        "to go on"
    )
    assert not any("Traceback" in line for line in lines), lines
    assert checkpoint.restore_weights(workdir).metadata.step == step < 24
    for folder in (workdir, tmp_path / "whole"):
        run.train(tiny_run.load_config(config_file, **settings), str(folder))
    assert tiny_run.facts(workdir) == tiny_run.facts(tmp_path / "whole")
