"""metrics.jsonl, its views, the clock and the progress line. Every test here runs without JAX."""

import concurrent.futures
import io
import json
import math
import pathlib
import signal
import struct
import subprocess
import sys
import time
import types

import numpy as np
import pytest

from deconstruct import metrics

SLEEP_TOLERANCE = 0.05


def strict_json(text: str):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def write_steps(workdir, steps, restored_step=None, **kwargs):
    with metrics.MetricsWriter(workdir, restored_step=restored_step, **kwargs) as writer:
        for step in steps:
            writer.write("train", step, {"loss": 10.0 - step})


def steps_in(workdir):
    return [record["step"] for record in metrics.read_metrics(workdir / metrics.METRICS_FILE)]


def events_in(workdir):
    """(step, tag or "start", value) of all TensorBoard events, file by file as they were made."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    found = []
    files = (workdir / "tensorboard").iterdir()
    for path in sorted(files, key=lambda path: path.stat().st_ctime_ns):
        data = path.read_bytes()
        while data:
            size = struct.unpack("<Q", data[:8])[0]
            event = Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            if event.session_log.status == SessionLog.START:
                found.append((event.step, "start", None))
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return found


class TestRecord:
    def test_lines_are_plain_json_and_give_the_numbers_back(self, tmp_path):
        loss = np.float32(1) / np.float32(3)
        values = {
            "loss": loss,
            "tokens": np.int64(2**40),
            "bad": [np.float32("nan"), math.inf, -math.inf],
            "layers": {"layer_01": np.array([1.5, np.inf], np.float32)},
            "sample": "text",
        }
        with metrics.MetricsWriter(tmp_path, restored_step=None) as writer:
            writer.write("validation", 7, values, name="holdout")
        line = strict_json((tmp_path / "metrics.jsonl").read_text())
        assert (line["kind"], line["step"], line["name"]) == ("validation", 7, "holdout")
        assert np.float32(line["loss"]) == loss and line["tokens"] == 2**40
        assert line["bad"] == ["NaN", "Infinity", "-Infinity"]
        assert [float(text) for text in line["bad"][1:]] == [math.inf, -math.inf]
        assert line["layers"] == {"layer_01": [1.5, "Infinity"]} and line["sample"] == "text"

    def test_resume_cuts_back_to_the_restored_step(self, tmp_path):
        write_steps(tmp_path, range(1, 8))
        write_steps(tmp_path, [5, 6], restored_step=4)
        assert steps_in(tmp_path) == [1, 2, 3, 4, 5, 6]

    def test_a_run_that_begins_sets_older_records_aside(self, tmp_path):
        written = []
        for last in (2, 3, 4):
            write_steps(tmp_path, range(1, last), restored_step=None)
            written.append((tmp_path / "metrics.jsonl").read_bytes())
        assert steps_in(tmp_path) == [1, 2, 3]
        assert [(tmp_path / f"metrics.jsonl.{n}").read_bytes() for n in (1, 2)] == written[:2]

    def test_a_line_cut_short_by_a_kill_is_dropped_wherever_it_was_cut(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        write_steps(tmp_path, [1, 2, 3])
        whole = path.read_bytes()
        for cut in range(whole.rindex(b"\n", 0, -1) + 2, len(whole)):
            path.write_bytes(whole[:cut])
            kept = [1, 2, 3] if cut == len(whole) - 1 else [1, 2]
            assert steps_in(tmp_path) == kept
            metrics.cut_back(path, 9)
            assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[: kept[-1]])
            write_steps(tmp_path, [kept[-1] + 1], restored_step=9)
            assert steps_in(tmp_path) == [*kept, kept[-1] + 1]

    def test_a_broken_line_in_the_middle_is_refused_with_its_number(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
        with pytest.raises(ValueError, match="line 2 is not a metrics record"):
            metrics.MetricsWriter(tmp_path, restored_step=3)
        assert path.read_text().count("\n") == 3

    def test_nothing_to_cut_leaves_the_file_alone(self, tmp_path):
        write_steps(tmp_path, [1, 2])
        before = (tmp_path / "metrics.jsonl").stat()
        metrics.cut_back(tmp_path / "metrics.jsonl", 2)
        after = (tmp_path / "metrics.jsonl").stat()
        assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)

    def test_a_cut_that_fails_midway_leaves_the_old_file(self, tmp_path, monkeypatch):
        write_steps(tmp_path, [1, 2, 3])
        before = (tmp_path / "metrics.jsonl").read_bytes()

        def fail(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fsync", fail)
        with pytest.raises(OSError, match="No space left"):
            metrics.cut_back(tmp_path / "metrics.jsonl", 1)
        assert (tmp_path / "metrics.jsonl").read_bytes() == before

    def test_a_killed_process_loses_nothing_that_it_wrote(self, tmp_path):
        program = f"""
import os, signal
from deconstruct import metrics
writer = metrics.MetricsWriter({str(tmp_path)!r}, restored_step=None)
for step in range(1, 51):
    writer.write("train", step, {{"loss": 1 / step}})
os.kill(os.getpid(), signal.SIGKILL)
"""
        root = pathlib.Path(__file__).parents[1]
        done = subprocess.run([sys.executable, "-c", program], cwd=root, timeout=60)
        assert done.returncode == -signal.SIGKILL
        assert steps_in(tmp_path) == list(range(1, 51))
        assert [step for step, tag, _ in events_in(tmp_path) if tag == "train/loss"] == list(
            range(1, 51)
        )

    def test_full_disk_is_one_clear_error(self, tmp_path):
        writer = metrics.MetricsWriter(tmp_path, restored_step=None, tensorboard=False)
        writer._file.close()
        writer._file = open("/dev/full", "w")  # noqa: SIM115
        with pytest.raises(ValueError, match=r"cannot write .*metrics.jsonl: No space left"):
            writer.write("train", 1, {"loss": 1.0})
        with pytest.raises(OSError, match="No space left"):
            writer._file.close()


class TestViews:
    def test_tensorboard_voids_what_lies_after_the_restored_step(self, tmp_path):
        write_steps(tmp_path, [1, 2, 3])
        write_steps(tmp_path, [3, 4], restored_step=2)
        assert events_in(tmp_path) == [
            (0, "start", None),
            *[(step, "train/loss", 10.0 - step) for step in (1, 2, 3)],
            (3, "start", None),
            *[(step, "train/loss", 10.0 - step) for step in (3, 4)],
        ]

    def test_tensorboard_tags(self, tmp_path):
        with metrics.MetricsWriter(tmp_path, restored_step=None) as writer:
            values = {"loss": np.float32(2), "norms": np.array([3.0, 4.0]), "sample": "x"}
            writer.write("validation", 5, values, name="books")
        assert events_in(tmp_path)[1:] == [
            (5, "validation/books/loss", 2.0),
            (5, "validation/books/norms/1", 3.0),
            (5, "validation/books/norms/2", 4.0),
        ]

    def test_tensorboard_can_be_left_out(self, tmp_path):
        write_steps(tmp_path, [1], tensorboard=False)
        assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]

    def test_wandb_that_is_not_installed_is_refused_before_anything_is_written(
        self, tmp_path, monkeypatch
    ):
        monkeypatch.setitem(sys.modules, "wandb", None)
        with pytest.raises(ValueError, match="pip install wandb"):
            metrics.MetricsWriter(tmp_path, restored_step=None, wandb_project="p")
        assert not list(tmp_path.iterdir())

    def test_wandb_gets_the_same_numbers_when_asked_for(self, tmp_path, monkeypatch):
        calls = []

        class Run:
            def define_metric(self, *args, **kwargs):
                calls.append(("define_metric", args, kwargs))

            def log(self, values):
                calls.append(("log", values))

            def finish(self):
                calls.append(("finish",))

        def init(**kwargs):
            calls.append(("init", kwargs))
            return Run()

        monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
        write_steps(tmp_path, [4], restored_step=3, wandb_project="p")
        (_, options), _, logged, finished = calls
        assert options["project"] == "p" and options["config"] == {"restored_step": 3}
        assert options["group"] == tmp_path.name
        assert logged == ("log", {"train/loss": 6.0, "step": 4}) and finished == ("finish",)

    def test_importing_brings_in_neither_wandb_nor_jax(self):
        program = (
            "import sys, deconstruct.metrics\n"
            "print([m for m in ('wandb', 'jax', 'tensorflow', 'torch') if m in sys.modules])"
        )
        root = pathlib.Path(__file__).parents[1]
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=60
        )
        assert done.stdout.strip() == "[]", done.stderr


class FakeTime:
    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds


def make_clock(fake, flops_per_token=2.0, peak_flops=1000.0):
    return metrics.Clock(flops_per_token=flops_per_token, peak_flops=peak_flops, now=fake)


class TestClock:
    def test_first_step_is_apart_and_padding_counts_for_nothing(self):
        fake = FakeTime()
        clock = make_clock(fake)
        fake.seconds += 50  # set-up before the first step
        clock.start()
        fake.seconds += 30  # compilation
        clock.steps_done(70, 100)
        assert clock.first_step_seconds == 30 and clock.window() is None
        for _ in range(4):
            fake.seconds += 2
            clock.steps_done(70, 100)
        assert clock.window() == metrics.Window(
            steps=4, seconds=8.0, tokens_per_second=35.0, positions_per_second=50.0, mfu=0.07
        )
        assert clock.window() is None

    def test_window_ends_with_the_last_fetched_step_not_with_the_log(self):
        fake = FakeTime()
        clock = make_clock(fake)
        clock.start()
        clock.steps_done(10, 10)
        fake.seconds += 1
        clock.steps_done(10, 10)
        fake.seconds += 5  # work on the host while the next step runs
        assert clock.window().seconds == 1
        fake.seconds += 1
        clock.steps_done(10, 10)
        assert clock.window().seconds == 6

    def test_pauses_belong_to_no_window_but_to_the_time_left(self):
        fake = FakeTime()
        clock = make_clock(fake)
        clock.start()
        assert clock.seconds_left(3) is None
        clock.steps_done(10, 10)
        for _ in range(2):
            fake.seconds += 1
            clock.steps_done(10, 10)
            with clock.pause():
                fake.seconds += 3
        assert clock.window().seconds == 2
        fake.seconds += 1
        clock.steps_done(10, 10)
        assert clock.window().seconds == 1
        assert clock.goodput() == pytest.approx(3 / 9)
        assert clock.seconds_left(3) == pytest.approx(9)

    def test_several_steps_at_once(self):
        fake = FakeTime()
        clock = make_clock(fake)
        clock.start()
        clock.steps_done(10, 10)
        fake.seconds += 4
        clock.steps_done(30, 40, steps=4)
        window = clock.window()
        assert (window.steps, window.tokens_per_second) == (4, 7.5)
        assert clock.seconds_left(2) == 2

    def test_unknown_peak_gives_no_mfu(self):
        fake = FakeTime()
        clock = make_clock(fake, peak_flops=metrics.PEAK_FLOPS.get("Some new chip"))
        clock.start()
        clock.steps_done(10, 10)
        fake.seconds += 1
        clock.steps_done(10, 10)
        assert clock.window().mfu is None

    def test_peaks_of_the_data_sheets(self):
        assert metrics.PEAK_FLOPS["TPU v4"] == 275e12
        assert metrics.PEAK_FLOPS["TPU v5 lite"] == 197e12
        assert metrics.PEAK_FLOPS["TPU v5p"] == metrics.PEAK_FLOPS["TPU v5"] == 459e12
        assert metrics.PEAK_FLOPS["TPU v6 lite"] == 918e12
        assert metrics.PEAK_FLOPS["NVIDIA A100-SXM4-80GB"] == 312e12
        assert metrics.PEAK_FLOPS["NVIDIA H100 80GB HBM3"] == 989e12
        assert metrics.PEAK_FLOPS["NVIDIA H200"] == 989e12
        assert "cpu" not in metrics.PEAK_FLOPS

    def test_work_that_runs_in_the_background_is_timed_not_its_dispatch(self):
        """Steps are dispatched at once and fetched one step late, as a training loop does."""
        clock = metrics.Clock(flops_per_token=1.0, peak_flops=None)
        ended = []

        def work():
            time.sleep(0.06)
            ended.append(time.perf_counter())

        with concurrent.futures.ThreadPoolExecutor(1) as device:
            clock.start()
            pending = device.submit(work)
            for _ in range(8):
                following = device.submit(work)
                pending.result()
                clock.steps_done(100, 100)
                pending = following
            window = clock.window()
        truth = ended[7] - ended[0]
        assert window.steps == 7
        assert window.seconds == pytest.approx(truth, rel=SLEEP_TOLERANCE)
        assert window.tokens_per_second == pytest.approx(700 / truth, rel=SLEEP_TOLERANCE)


class Terminal(io.StringIO):
    def isatty(self):
        return True


class TestProgress:
    def test_plain_lines_where_there_is_no_terminal(self):
        stream = io.StringIO()
        progress = metrics.Progress(400, stream=stream)
        progress.update(10, 3.14159)
        progress.update(20, 3.0, tokens_per_second=12345.6, seconds_left=3723.4)
        progress.say("validation  loss 3.2")
        progress.close()
        assert stream.getvalue().splitlines() == [
            "step 10/400  loss 3.1416",
            "step 20/400  loss 3.0000  12,346 tokens/s  1:02:03 left",
            "validation  loss 3.2",
        ]

    def test_a_bar_on_a_terminal(self):
        stream = Terminal()
        progress = metrics.Progress(400, first_step=100, stream=stream)
        progress.update(120, 2.5, tokens_per_second=9.0, seconds_left=65)
        progress.say("a line above")
        progress.close()
        text = stream.getvalue()
        assert "step 100/400" in text and "a line above" in text
        assert "step 120/400" in text and "loss 2.5000  9 tokens/s  1:05 left" in text

    def test_a_loss_that_is_not_finite_is_shown(self):
        stream = io.StringIO()
        metrics.Progress(4, stream=stream).update(1, math.nan)
        assert "loss nan" in stream.getvalue()
