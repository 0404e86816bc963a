"""SIGTERM, or Ctrl-C, at every moment of a run: one line, status 1, no new step lost."""

import functools
import hashlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import types

import devices
import pytest
import test_train
import tiny_run

from deconstruct import checkpoint, run, step, stopping
from deconstruct.checkpoint import manager
from deconstruct.data import loader, read_ahead

AT_ONCE = "error: stopped by SIGTERM before a new step was done"


data, config_file = test_train.data, test_train.config_file  # fixtures


def load_config(config_file, **changes):
    """Four batches to a validation."""
    return tiny_run.load_config(config_file, data__validation_rows=16, **changes)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, config_file):
    workdir = tmp_path_factory.mktemp("unbroken") / "run"
    run.train(load_config(config_file), str(workdir))
    return workdir


def terminate_self():
    os.kill(os.getpid(), signal.SIGTERM)


def terminated(function):
    """`function`, at whose end SIGTERM comes."""

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        result = function(*args, **kwargs)
        terminate_self()
        return result

    return wrapped


def blocked_and_terminated(tmp_path, config_file, moment, *flags):
    """What is said by a command that gets SIGTERM where C code never comes back at `moment`."""
    program = tmp_path / "blocked.py"
    program.write_text(BLOCKED_PROGRAM.format(name=moment))
    flags = tiny_run.command(config_file, tmp_path / "run", *flags)[3:]
    with subprocess.Popen(
        [sys.executable, program, *flags],
        cwd=tiny_run.ROOT,
        env=devices.environment(1),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while process.stdout.readline() not in ("here\n", ""):
            pass
        process.terminate()
        try:
            _, errors = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == 1
    return errors


def files(folder):
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


BLOCKED_PROGRAM = """
import hashlib, sys
from deconstruct import entry, run, setup, step, train

def blocked(*_, **__):
    print("here", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # C code, which no signal interrupts

{name} = blocked
entry.run(train.main)
"""


@pytest.mark.slow
@pytest.mark.parametrize("resumed", [False, True], ids=["begun", "resumed"])
@pytest.mark.parametrize("moment", ["setup.open_data", "step.compile_train_step"])
def test_before_a_new_step_the_run_ends_at_once(tmp_path, config_file, moment, resumed):
    """Also where the main thread cannot heed a signal, as in a long compilation."""
    workdir = tmp_path / "run"
    if resumed:
        run.train(load_config(config_file, num_steps=4), str(workdir))
    before = files(workdir / "checkpoints")
    rows = "--config.data.validation_rows=16"
    (line,) = blocked_and_terminated(tmp_path, config_file, moment, rows).splitlines()
    assert line.startswith(AT_ONCE) and "run the same command again" in line
    assert files(workdir / "checkpoints") == before
    assert tiny_run.last_step(workdir) == (4 if resumed else 0)


@pytest.mark.parametrize("number", stopping.SIGNALS)
def test_in_a_step_the_newest_step_is_saved(config_file, tmp_path, number):
    """By the command itself, as a scheduler or a user would."""
    workdir = tmp_path / "run"
    command = tiny_run.command(config_file, workdir, "--config.num_steps=5000")
    process = subprocess.Popen(
        command, cwd=tiny_run.ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    while tiny_run.last_step(workdir) < 5 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"stopped by {number.name} after step" in errors.splitlines()[-1]
    assert checkpoint.restore_weights(workdir).metadata.step >= 5


def test_a_second_ctrl_c_does_not_wait(config_file, tmp_path, monkeypatch):
    """The first asks to save, the second ends the run where it is."""

    def pressed_twice(*_, **__):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the second signal was not heeded")

    monkeypatch.setattr(checkpoint.Checkpointer, "check", pressed_twice)
    config = load_config(config_file, checkpoint_every=100, validate_every=100)
    with pytest.raises(KeyboardInterrupt):
        run.train(config, str(tmp_path / "run"))
    assert not checkpoint.stored_steps(tmp_path / "run" / "checkpoints")


def test_just_after_the_loop_has_looked(config_file, tmp_path, monkeypatch):
    """The signal comes when the loop has seen that nothing is due at step 1."""
    monkeypatch.setattr(checkpoint.Checkpointer, "check", terminated(checkpoint.Checkpointer.check))
    config = load_config(config_file, checkpoint_every=100, validate_every=100)
    with pytest.raises(ValueError, match="stopped by SIGTERM after step 2, which is saved"):
        run.train(config, str(tmp_path / "run"))
    assert checkpoint.restore_weights(tmp_path / "run").metadata.step == 2


@pytest.mark.parametrize("stopped_at", [4, 12])
def test_in_a_validation_the_step_is_saved_and_the_validation_made_up(
    config_file, unbroken, tmp_path, monkeypatch, stopped_at
):
    """It is broken off at once; the next start validates first, also after the last step."""
    workdir, batches_of = tmp_path / "run", loader.validation_batches
    seen = []

    def batches(*args, **kwargs):
        for batch in batches_of(*args, **kwargs):
            if tiny_run.last_step(workdir) == stopped_at:
                seen.append(batch)
                terminate_self()
            yield batch

    config = load_config(config_file)
    with monkeypatch.context() as patch:
        patch.setattr(loader, "validation_batches", batches)
        with pytest.raises(ValueError, match=f"by SIGTERM after step {stopped_at}, which is sav"):
            run.train(config, str(workdir))
    assert len(seen) == 1
    validated = [record["step"] for record in tiny_run.records(workdir, "validation")]
    assert validated == list(range(4, stopped_at, 4))
    assert checkpoint.restore_weights(workdir).metadata.step == stopped_at
    run.train(config, str(workdir))
    assert tiny_run.facts(workdir) == tiny_run.facts(unbroken)


def test_in_a_save_the_run_ends_with_that_step(config_file, unbroken, tmp_path, monkeypatch):
    workdir = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Checkpointer, "save", terminated(checkpoint.Checkpointer.save))
        with pytest.raises(ValueError, match="stopped by SIGTERM after step 4, which is saved"):
            run.train(load_config(config_file), str(workdir))
    assert tiny_run.last_step(workdir) == 4
    assert checkpoint.stored_steps(workdir / "checkpoints") == [4]
    run.train(load_config(config_file), str(workdir))
    assert tiny_run.facts(workdir) == tiny_run.facts(unbroken)


def test_a_stop_whose_save_fails_never_says_that_it_was_saved(config_file, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.Checkpointer, "check", terminated(checkpoint.Checkpointer.check))
    monkeypatch.setattr(manager, "write_file_list", full)
    with pytest.raises(ValueError, match=r"was not written: .*No space left") as found:
        run.train(load_config(config_file), str(tmp_path / "run"))
    assert "saved" not in str(found.value)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_while_data_is_waited_for_the_step_before_is_saved(
    config_file, unbroken, tmp_path, monkeypatch, num_workers
):
    """Of a disk that does not answer: no new step comes after which the run could look."""
    workdir = tmp_path / "run"

    class Silent(queue.Queue):
        def get(self, block=True, timeout=None):
            if not block or tiny_run.last_step(workdir) < 5:
                return super().get(block, timeout)
            terminate_self()
            raise queue.Empty

    config = load_config(config_file, checkpoint_every=100, data__num_workers=num_workers)
    with monkeypatch.context() as patch:
        patch.setattr(read_ahead, "queue", types.SimpleNamespace(Queue=Silent, Empty=queue.Empty))
        with pytest.raises(ValueError, match=r"stopped by SIGTERM after step \d, which is saved"):
            run.train(config, str(workdir))
    assert checkpoint.stored_steps(workdir / "checkpoints") == [tiny_run.last_step(workdir)]
    run.train(load_config(config_file), str(workdir))
    assert tiny_run.facts(workdir) == tiny_run.facts(unbroken)


def test_nothing_that_takes_long_is_compiled_once_there_is_something_to_lose(
    config_file, tmp_path, monkeypatch
):
    """A compilation cannot be broken off, and may outlast the time that a scheduler grants."""
    order = []

    def noted(function):
        def wrapped(*args):
            order.append(args[0] if args[0] in (step.validation_step, step.diagnose) else "hold")
            return function(*args)

        return wrapped

    monkeypatch.setattr(step, "compile_look", noted(step.compile_look))
    monkeypatch.setattr(stopping.Stop, "hold", noted(stopping.Stop.hold))
    config = load_config(config_file, num_steps=4, log__diagnose_every=4)
    run.train(config, str(tmp_path / "run"))
    assert order == [step.validation_step, step.diagnose, *["hold"] * 4]


@pytest.mark.slow
def test_after_the_last_step_the_run_ends_at_once(config_file, tmp_path):
    errors = blocked_and_terminated(tmp_path, config_file, "run.conclude", "--config.num_steps=4")
    line = "error: stopped by SIGTERM after the last step, which is saved"
    assert errors.splitlines()[-1] == line
    assert checkpoint.restore_weights(tmp_path / "run").metadata.step == 4


def test_a_signal_in_the_last_save_is_heeded_after_it(config_file, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.Checkpointer, "close", terminated(checkpoint.Checkpointer.close))
    with pytest.raises(ValueError, match="stopped by SIGTERM after the last step, which is saved"):
        run.train(load_config(config_file, num_steps=1), str(tmp_path / "run"))
    assert checkpoint.restore_weights(tmp_path / "run").metadata.step == 1


def test_a_signal_that_was_heeded_does_not_end_the_process_as_well(monkeypatch):
    """The watching thread may read of it late, when all is saved and the error is on its way."""
    read, released, ends = os.read, threading.Event(), queue.SimpleQueue()

    def read_late(*args):
        byte = read(*args)
        released.wait()
        ends.put("read")
        return byte

    monkeypatch.setattr(stopping.os, "read", read_late)
    monkeypatch.setattr(stopping.os, "_exit", ends.put)
    with stopping.Stop() as stop:
        stop.hold()
        terminate_self()
        with pytest.raises(ValueError, match="saved after SIGTERM"):
            stop.release("saved after {signal}")
        released.set()
    found = [ends.get(timeout=10), ends.get(timeout=10)]  # the signal's byte, the pipe's end
    assert found == ["read", "read"]


def test_the_handler_before_comes_back_and_other_threads_set_none():
    before = signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)
    with stopping.Stop() as stop:
        stop.hold()
        assert not stop.asked
        terminate_self()
        assert stop.asked
    assert (signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)) == before

    def elsewhere():
        with stopping.Stop() as stop:
            found.extend([stop.asked, signal.getsignal(signal.SIGTERM)])

    found = []
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [None, before[0]]
