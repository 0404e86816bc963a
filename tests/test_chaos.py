"""A run that is killed, or whose data fails, again and again ends as one that nothing touched.

It reads a mixture of three sources, the smallest of them several times.

DECONSTRUCT_CHAOS_KILLS says how many kills (4 without it) and DECONSTRUCT_CHAOS_SEED which ones:

    DECONSTRUCT_CHAOS_KILLS=20 python -m pytest tests/test_chaos.py -s
"""

import dataclasses
import hashlib
import itertools
import os
import pathlib
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable

import data_corpus
import devices
import jax
import numpy as np
import pytest
import tiny_run

from deconstruct import checkpoint
from deconstruct.checkpoint import reading
from deconstruct.data import prepare, prepared

SOURCES = {"long": (60, 1), "middle": (20, 1), "short": (6, 6)}  # documents, weight
KILLS = int(os.environ.get("DECONSTRUCT_CHAOS_KILLS", "4"))
SEED = int(os.environ.get("DECONSTRUCT_CHAOS_SEED", "0"))
FAILURES = max(1, KILLS // 2)  # of the data

MOMENTS = ("before the first step", "in a step", "in a validation", "in a save")
SIGNALS = (signal.SIGKILL, signal.SIGTERM)
SAVE_EVERY, VALIDATE_EVERY = 4, 3
# A kill comes at most two saves after its start, so that no run is over before the last kill.
NUM_STEPS = 4 + KILLS * (2 * SAVE_EVERY + 1)
LONGEST_WAIT = 120  # seconds until a moment is reached


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The folder of the prepared sources, which share a tokenizer."""
    folder = tmp_path_factory.mktemp("sources")
    tokenizer = "bpe:300"
    for name, (documents, _) in SOURCES.items():
        source = data_corpus.write_source(folder / f"texts_{name}", documents=documents)
        changes = {"max_len": tiny_run.MAX_LEN, "tokenizer": tokenizer, "validation_share": 0.4}
        prepare.prepare(data_corpus.settings(source, folder / name, **changes), progress=False)
        tokenizer = str(folder / name / prepared.TOKENIZER_FILE)
    return folder


@pytest.fixture(scope="module")
def config_file(data):
    path = tiny_run.write_config(data, data)
    mixture = tuple(f"{data / name}={weight}" for name, (_, weight) in SOURCES.items())
    single = f"config.data.path = {str(data)!r}"
    text = path.read_text()
    assert single in text
    path.write_text(
        text.replace(single, f"config.data.path, config.data.mixture = None, {mixture}")
    )
    return path


@dataclasses.dataclass
class Trainer:
    """A process that trains, and what it has said so far."""

    process: subprocess.Popen
    workdir: pathlib.Path
    output: pathlib.Path
    errors: pathlib.Path
    begun: float

    def steps(self) -> list[int]:
        """The steps that it has reported."""
        return [int(n) for n in re.findall(r"^step (\d+)/", self.errors.read_text(), re.M)]

    def validated(self) -> list[int]:
        found = re.findall(r"^step (\d+)  short/validation: ", self.errors.read_text(), re.M)
        return [int(number) for number in found]

    def unfinished(self) -> list[int]:
        """Steps whose save has begun and has not ended."""
        names = (path.name for path in (self.workdir / "checkpoints").glob("*.orbax*"))
        return [int(name.partition(".")[0]) for name in names]


def start(command: list[str], workdir: pathlib.Path, log: pathlib.Path) -> Trainer:
    log.mkdir()
    output, errors = log / "stdout", log / "stderr"
    with output.open("w") as out, errors.open("w") as err:
        process = subprocess.Popen(
            command,
            cwd=tiny_run.ROOT,
            env=devices.environment(1) | {"PYTHONUNBUFFERED": "1"},
            stdout=out,
            stderr=err,
        )
    return Trainer(process, workdir, output, errors, time.monotonic())


def moment_of(
    kind: str, rng: random.Random, startup: float
) -> tuple[str, Callable[[Trainer], bool]]:
    """(its description, whether it has come), for one drawn from its kind."""
    if kind == "before the first step":
        seconds = rng.uniform(0.05, 0.9) * startup

        def starts(trainer: Trainer) -> bool:
            """A start may be faster than the one that was measured."""
            return time.monotonic() - trainer.begun > seconds or bool(trainer.steps())

        return f"{seconds:.2f} s after the start", starts
    if kind == "in a step":
        count = rng.randint(1, 2 * SAVE_EVERY - 1)
        return f"new step {count}", lambda t: len(t.steps()) >= count
    count = rng.randint(1, 2)

    def validates(trainer: Trainer) -> bool:
        due = [step for step in trainer.steps() if step % VALIDATE_EVERY == 0]
        return len(due) >= count and due[-1] not in trainer.validated()

    def saves(trainer: Trainer) -> bool:
        due = [step for step in trainer.steps() if step % SAVE_EVERY == 0]
        return len(due) >= count and due[-1] in trainer.unfinished()

    reached = validates if kind == "in a validation" else saves
    return f"new {'validation' if reached is validates else 'save'} {count}", reached


def wait_for(trainer: Trainer, reached: Callable[[Trainer], bool]) -> None:
    while not reached(trainer):
        assert trainer.process.poll() is None, trainer.errors.read_text()[-2000:]
        assert time.monotonic() - trainer.begun < LONGEST_WAIT, trainer.errors.read_text()[-2000:]
        time.sleep(0.001)


def assert_ended_by(number: signal.Signals, trainer: Trainer) -> None:
    """SIGKILL ends it without a word; SIGTERM with one line, once the program is loaded."""
    status = trainer.process.wait(LONGEST_WAIT)
    loaded = "platform" in trainer.output.read_text()
    if number == signal.SIGKILL or (status == -signal.SIGTERM and not loaded):
        assert status == -number
        return
    assert status == 1, (status, trainer.errors.read_text()[-2000:])
    last = trainer.errors.read_text().splitlines()[-1]
    assert last.startswith("error: stopped by SIGTERM")
    if "which is saved" in last:
        step = int(re.search(r"after step (\d+)", last)[1])
        assert checkpoint.stored_steps(trainer.workdir / "checkpoints")[0] == step


def run_to_the_end(command: list[str]) -> None:
    done = tiny_run.run_command(command)
    assert done.returncode == 0, done.stderr[-3000:]


def contents(workdir: pathlib.Path) -> tuple[str, dict]:
    """(hash of all weights and moments, metadata) of the newest step."""
    directory = checkpoint.find_step(workdir)
    digest = hashlib.sha256()
    for item in (reading.WEIGHTS, reading.OPTIMIZER):
        arrays = reading.read_arrays(directory / item, reading.stored_arrays(directory / item))
        for path, leaf in jax.tree_util.tree_leaves_with_path(arrays):
            digest.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}".encode())
            digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest(), reading.read_metadata(directory).to_json()


def assert_same_end(workdir: pathlib.Path, unbroken: pathlib.Path) -> None:
    assert tiny_run.facts(workdir) == tiny_run.facts(unbroken)
    assert contents(workdir) == contents(unbroken)
    for file in ("config.json", "spec.json", "tokenizer.json"):
        assert (workdir / file).read_bytes() == (unbroken / file).read_bytes()


def command_of(config_file: pathlib.Path, workdir: pathlib.Path) -> list[str]:
    settings = {
        "num_steps": NUM_STEPS,
        "checkpoint_every": SAVE_EVERY,
        "validate_every": VALIDATE_EVERY,
        "optimizer.schedule_steps": 2 * NUM_STEPS,
    }
    flags = [f"--config.{key}={value}" for key, value in settings.items()]
    return tiny_run.command(config_file, workdir, *flags)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, config_file):
    """(its workdir, seconds from its start to its first step)."""
    folder = tmp_path_factory.mktemp("unbroken")
    trainer = start(command_of(config_file, folder / "run"), folder / "run", folder / "log")
    wait_for(trainer, lambda t: bool(t.steps()))
    startup = time.monotonic() - trainer.begun
    assert trainer.process.wait(600) == 0, trainer.errors.read_text()[-3000:]
    return folder / "run", startup


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_as_the_unbroken_run(tmp_path, config_file, unbroken):
    """Every kind of moment in turn, its time and the signal drawn; the same command each time."""
    whole, startup = unbroken
    rng = random.Random(SEED)
    workdir = tmp_path / "run"
    command = command_of(config_file, workdir)
    kinds = list(itertools.islice(itertools.cycle(MOMENTS), KILLS))
    numbers = [SIGNALS[(i + i // len(MOMENTS)) % 2] for i in range(KILLS)]
    rng.shuffle(numbers)
    rng.shuffle(kinds)
    begin = time.monotonic()
    for place, (kind, number) in enumerate(zip(kinds, numbers, strict=True), 1):
        moment, reached = moment_of(kind, rng, startup)
        trainer = start(command, workdir, tmp_path / f"log_{place}")
        try:
            wait_for(trainer, reached)
            time.sleep(rng.uniform(0, 0.03))
            trainer.process.send_signal(number)
            assert_ended_by(number, trainer)
        finally:
            trainer.process.kill()
            trainer.process.wait()
        last = max(trainer.steps(), default=0)
        stored = checkpoint.stored_steps(workdir / "checkpoints")
        print(f"kill {place}: {number.name} {kind} ({moment}); last step {last}, stored {stored}")
    run_to_the_end(command)
    print(f"{KILLS} kills of a run of {NUM_STEPS} steps: {time.monotonic() - begin:.0f} s")
    assert_same_end(workdir, whole)
    assert tiny_run.records(workdir, "epoch")


@pytest.mark.slow
def test_data_that_fails_at_random_ends_the_run_with_its_name(
    tmp_path, data, config_file, unbroken
):
    """A shard, half of it overwritten; once it is whole again the same command goes on."""
    rng = random.Random(SEED)
    shards = sorted(path for path in data.rglob("*train*array_record*") if path.is_file())
    assert len(shards) > 1
    workdir = tmp_path / "run"
    command = command_of(config_file, workdir)
    for _ in range(FAILURES):
        shard = rng.choice(shards)
        whole = shard.read_bytes()
        first = rng.randint(len(whole) // 8, len(whole) // 4)
        hole = bytes(len(whole) // 2)
        shard.write_bytes(whole[:first] + hole + whole[first + len(hole) :])
        try:
            done = tiny_run.run_command(command)
        finally:
            shard.write_bytes(whole)
        last = done.stderr.splitlines()[-1]
        assert done.returncode == 1, done.stderr[-3000:]
        assert last.startswith("error: ") and shard.name in last, done.stderr[-3000:]
    run_to_the_end(command)
    assert_same_end(workdir, unbroken[0])
