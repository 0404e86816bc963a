"""Checkpoints under fire: disks that fill up or vanish, clocks that lie, copies broken off.

Every fault here also bites a process that runs as root.
"""

import datetime
import itertools
import os
import shutil
import subprocess
import sys
import time
import types

import devices
import orbax.checkpoint as ocp
import pytest
import test_checkpoint
from test_checkpoint import (
    abstract,
    assert_restores,
    assert_same,
    lose_arrays,
    make_identity,
    make_trees,
    restore,
    save_steps,
    snapshot,
    stored,
)

from deconstruct import checkpoint
from deconstruct.checkpoint import integrity, manager

three_steps, run = test_checkpoint.three_steps, test_checkpoint.run  # fixtures


def full(*_):
    raise OSError(28, "No space left on device")


FULL_DISK_PROGRAM = """
import resource
import test_checkpoint as t
from deconstruct import checkpoint

if __name__ == "__main__":
    saver = checkpoint.Checkpointer({workdir!r}, t.make_identity())
    saver.save(40, *t.make_trees(40), data_position=320, tokens=4000)
    saver.wait()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, before[1]))
    try:
        saver.save(50, *t.make_trees(50), data_position=400, tokens=5000)
        saver.wait()
    except ValueError as error:
        print(error)
    assert saver.latest_step == 40
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    saver.save(60, *t.make_trees(60), data_position=480, tokens=6000)
    saver.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 2000])
def test_a_file_that_cannot_grow_fails_the_save_and_no_other(run, limit):
    """The kernel itself refuses to write: the arrays, or only what is large among them."""
    program = FULL_DISK_PROGRAM.format(workdir=str(run), limit=limit)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=devices.environment(1),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = done.stdout.splitlines()
    assert "was not written" in line and "too large" in line.lower()
    assert stored(run) == [60, 40, 20]  # 20 is the best
    assert_restores(run, 60)


def take_the_step(checkpoints):
    (unfinished,) = checkpoints.glob("40.orbax*")
    shutil.rmtree(unfinished)


def take_an_item(checkpoints):
    (unfinished,) = checkpoints.glob("40.orbax*")
    shutil.rmtree(unfinished / "weights")


def unmount(checkpoints):
    checkpoints.rename(checkpoints.with_name("elsewhere"))
    checkpoints.write_text("no directory")


@pytest.mark.parametrize("when", ["before the list", "before the commit"])
@pytest.mark.parametrize("damage", [take_the_step, unmount])
def test_what_happens_to_the_disk_before_the_commit_is_no_saved_step(
    run, monkeypatch, damage, when
):
    write_file_list = manager.write_file_list

    def damaged(directory):
        if when == "before the list":
            damage(run / "checkpoints")
            write_file_list(directory)
        else:
            write_file_list(directory)
            damage(run / "checkpoints")

    saver = checkpoint.Checkpointer(run, make_identity())
    with monkeypatch.context() as patch:
        patch.setattr(manager, "write_file_list", damaged)
        saver.save(40, *make_trees(40), data_position=320, tokens=4000)
        with pytest.raises(ValueError, match="was not written"):
            saver.wait()
    if damage is unmount:
        with pytest.raises(ValueError, match="checkpoints is no directory"):
            restore(run)
        (run / "checkpoints").unlink()
        (run / "elsewhere").rename(run / "checkpoints")
    assert stored(run) == [30, 20, 10]
    assert_restores(run, 30)
    saver.save(50, *make_trees(50), data_position=400, tokens=5000)
    saver.close()
    assert_restores(run, 50)


def test_an_item_lost_before_the_commit_is_found_at_restore(run, monkeypatch):
    write_file_list = manager.write_file_list

    def damaged(directory):
        write_file_list(directory)
        take_an_item(run / "checkpoints")

    monkeypatch.setattr(manager, "write_file_list", damaged)
    save_steps(run, [40])
    assert_restores(run, 30)


class TestLeaving:
    """A `with` block that is left while its last save fails."""

    def leave(self, run, monkeypatch, error):
        monkeypatch.setattr(manager, "write_file_list", full)
        with checkpoint.Checkpointer(run, make_identity()) as saver:
            saver.save(40, *make_trees(40), data_position=320, tokens=4000)
            if error is not None:
                raise error

    def test_at_its_end(self, run, monkeypatch):
        with pytest.raises(ValueError, match=r"^a checkpoint .* not written: .*No space left"):
            self.leave(run, monkeypatch, None)
        assert_restores(run, 30)

    def test_by_a_mistake_of_the_users(self, run, monkeypatch):
        with pytest.raises(ValueError, match=r"^shard 3 is damaged; besides, .*No space left"):
            self.leave(run, monkeypatch, ValueError("shard 3 is damaged"))

    def test_by_a_bug(self, run, monkeypatch, caplog):
        with pytest.raises(ZeroDivisionError):
            self.leave(run, monkeypatch, ZeroDivisionError())
        assert "No space left" in caplog.text


class TestTime:
    """Clocks of a cluster differ, and copies have times of their own: only numbers count."""

    def test_modification_times_order_nothing(self, run):
        for age, step in enumerate((10, 20, 30), 1):
            for path in [*(run / "checkpoints" / str(step)).rglob("*")]:
                os.utime(path, (10**9 - 10**8 * age,) * 2)
            os.utime(run / "checkpoints" / str(step), (4 * 10**9 - 10**8 * age,) * 2)
        assert_restores(run, 30)
        assert checkpoint.restore_weights(run).metadata.step == 30
        save_steps(run, [40, 50])
        assert stored(run) == [50, 40, 20]  # 20 is the best

    def test_a_clock_that_goes_back_loses_no_step(self, tmp_path, monkeypatch):
        seconds = itertools.count(2 * 10**9, -3600)

        class Backwards(datetime.datetime):
            @classmethod
            def now(cls, tz=None):
                return cls.fromtimestamp(next(seconds), tz)

        monkeypatch.setattr(time, "time", lambda: float(next(seconds)))
        monkeypatch.setattr(time, "time_ns", lambda: 10**9 * next(seconds))
        clock = types.SimpleNamespace(**vars(datetime) | {"datetime": Backwards})
        monkeypatch.setattr(ocp.checkpoint_manager, "datetime", clock)
        save_steps(tmp_path, [1, 2, 3, 4, 5], losses={s: float(s) for s in range(1, 6)})
        assert stored(tmp_path) == [5, 4, 1]
        assert_restores(tmp_path, 5)


class TestHalfCopies:
    @pytest.mark.parametrize("order", ["forwards", "backwards"])
    def test_a_copy_broken_off_after_any_file_is_no_step(self, run, order, caplog):
        whole = run.parent / "whole"
        shutil.move(run / "checkpoints" / "30", whole)
        # Orbax's own marks beside the items are not needed: without them a copy is whole.
        marks = {whole / "commit_success.txt", whole / "_CHECKPOINT_METADATA"}
        files = sorted(p for p in whole.rglob("*") if p.is_file() and p not in marks)
        assert len(files) > 15
        copy = run / "checkpoints" / "30"
        for path in files if order == "forwards" else reversed(files):
            copy.mkdir(exist_ok=True)
            assert_restores(run, 20)
            target = copy / path.relative_to(whole)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes()[:-1])
            assert_restores(run, 20)
            shutil.copyfile(path, target)
        assert caplog.text.count("checkpoint step 30 in ") == 2 * len(files)
        assert_restores(run, 30)

    def test_names_that_copying_tools_use_meanwhile_are_no_steps(self, run):
        for name in (".40.Xa81Qd", "40.partial", "40~", "40.tmp"):
            shutil.copytree(run / "checkpoints" / "30", run / "checkpoints" / name)
        before = snapshot(run)
        assert_restores(run, 30)
        assert snapshot(run) == before
        save_steps(run, [40])
        assert stored(run) == [40, 30, 20]

    def test_a_torn_older_step_hinders_nothing(self, run):
        lose_arrays(run / "checkpoints" / "20")
        assert_restores(run, 30)
        save_steps(run, [40])
        assert_restores(run, 40)

    def test_what_the_disk_does_not_give_back_is_a_refused_step(self, run, monkeypatch, caplog):
        crc = integrity._crc

        def broken(path):
            if "/30/weights/" in str(path):
                raise OSError(5, "Input/output error")
            return crc(path)

        monkeypatch.setattr(integrity, "_crc", broken)
        assert_restores(run, 20)
        assert "does not read: [Errno 5] Input/output error" in caplog.text

    def test_a_link_to_a_disk_that_is_not_mounted_is_no_empty_directory(self, tmp_path):
        (tmp_path / "checkpoints").symlink_to(tmp_path / "not mounted")
        with pytest.raises(ValueError, match="checkpoints is no directory, or a link"):
            restore(tmp_path)


def test_weights_are_read_after_the_optimizers_files_are_gone(run):
    """To save space, say: training refuses that step, aloud, and weights by path need nothing."""
    for step in ("10", "20", "30"):
        shutil.rmtree(run / "checkpoints" / step / "optimizer")
    assert_same(checkpoint.restore_weights(run).weights, make_trees(30)[0])
    assert_same(checkpoint.restore_weights(run, best=True).weights, make_trees(20)[0])
    before = snapshot(run)
    weights, optimizer = make_trees()
    with (
        checkpoint.Checkpointer(run, make_identity()) as saver,
        pytest.raises(ValueError, match=r"none of them loads.*30: its file optimizer/.* missing"),
    ):
        saver.restore(abstract(weights), abstract(optimizer))
    assert snapshot(run) == before
