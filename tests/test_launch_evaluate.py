"""`launch/evaluate.sh`: each checkpoint of a run once, whatever ends it in between."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import tiny_run
from processes import Session

from deconstruct.evaluate import report

SCRIPT = tiny_run.ROOT / "launch" / "evaluate.sh"
STANDS_IN = """#!/bin/bash
# For python: notes which step it is to evaluate, waits while it is held, fails where it should.
if [[ $1 == -c ]]; then exec {python} "$@"; fi
for given; do
  case $given in --output=*) output=${{given#*=}} ;; --step=*) step=${{given#*=}} ;; esac
done
echo "$step" >> {notes}/begun
while [[ -e {notes}/hold ]]; do sleep 0.02; done
[[ ! -e {notes}/fail.$step ]] || exit 1
echo "$*" > "$output"
"""


class Watched:
    """A run of four steps with empty checkpoints, and what its evaluations noted."""

    def __init__(self, folder: pathlib.Path, *steps: int):
        self.folder, self.run, self.notes = folder, folder / "the run", folder / "notes"
        self.bin = folder / "bin"
        for made in (self.run / "checkpoints", self.notes, self.bin):
            made.mkdir(parents=True)
        (self.run / "config.json").write_text('{"num_steps": 4}')
        (self.notes / "begun").touch()
        for step in steps:
            self.save(step)
        python = self.bin / "python"
        python.write_text(STANDS_IN.format(python=sys.executable, notes=self.notes))
        python.chmod(0o755)

    def save(self, step: int) -> None:
        (self.run / "checkpoints" / str(step)).mkdir()

    def start(self, name: str = "log") -> Session:
        return Session(command(self.run, self.bin, "--tasks=copa"), self.folder / name)

    def begun(self) -> list[int]:
        return [int(step) for step in (self.notes / "begun").read_text().split()]

    def results(self) -> list[int]:
        found = (self.run / "evaluations").glob("*.json")
        return sorted(int(path.stem) for path in found)


def command(run: pathlib.Path, bin: pathlib.Path, *flags: str) -> list:
    path = f"PATH={bin}{os.pathsep}{os.environ['PATH']}"
    return ["env", path, "POLL_SECONDS=0.1", SCRIPT, run, *flags]


def test_each_step_once_until_the_last(tmp_path):
    watched = Watched(tmp_path, 2, 10)  # in order of number, not of name
    (watched.run / "checkpoints" / "3.orbax-checkpoint-tmp").mkdir()
    with watched.start() as session:
        session.wait_until(lambda: watched.results() == [2, 10])
        watched.save(4)
        assert session.ends(60) == (0, [])
    assert watched.begun() == [2, 10, 4] and watched.results() == [2, 4, 10]
    arguments = (watched.run / "evaluations" / "4.json").read_text()
    assert f"--tasks=copa --checkpoint={watched.run} --step=4" in arguments
    with watched.start("again") as session:
        assert session.ends(60) == (0, [])
    assert len(watched.begun()) == 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_one_goes_on_where_it_was(tmp_path, number):
    watched = Watched(tmp_path, 1, 4)
    (watched.notes / "hold").touch()
    with watched.start() as session:
        session.wait_until(lambda: watched.begun() == [1])
        session.signal(number)
        session.process.wait(60)
    (watched.notes / "hold").unlink()
    with watched.start("again") as session:
        assert session.ends(60) == (0, [])
    assert watched.begun() == [1, 1, 4] and watched.results() == [1, 4]


def test_a_signal_to_the_shell_alone_ends_the_evaluation(tmp_path):
    watched = Watched(tmp_path, 1)
    (watched.notes / "hold").touch()
    with watched.start() as session:
        session.wait_until(lambda: watched.begun() == [1])
        os.kill(session.process.pid, signal.SIGTERM)
        status, _ = session.ends(60)
    assert status == 143 and watched.results() == []


def test_two_do_not_do_the_same_step(tmp_path):
    watched = Watched(tmp_path, 1, 2)
    (watched.notes / "hold").touch()
    with watched.start("one") as one, watched.start("two") as two:
        one.wait_until(lambda: sorted(watched.begun()) == [1, 2])
        watched.save(4)
        one.wait_until(lambda: len(watched.begun()) == 2)
        (watched.notes / "hold").unlink()
        assert one.ends(60)[0] == two.ends(60)[0] == 0
    assert sorted(watched.begun()) == [1, 2, 4]


def test_an_evaluation_that_outlives_its_launcher_keeps_its_step(tmp_path):
    watched = Watched(tmp_path, 1, 4)
    (watched.notes / "hold").touch()
    with watched.start("one") as one:
        one.wait_until(lambda: watched.begun() == [1])
        os.kill(one.process.pid, signal.SIGKILL)
        one.process.wait()
        with watched.start("two") as two:
            two.wait_until(lambda: watched.begun() == [1, 4])
            (watched.notes / "hold").unlink()
            assert two.ends(60)[0] == 0
    assert watched.begun() == [1, 4]


def test_steps_that_fail(tmp_path):
    """The others are evaluated; where none ever was, the launcher ends at once."""
    watched = Watched(tmp_path, 1, 2)
    (watched.notes / "fail.1").touch()
    (watched.notes / "fail.2").touch()
    with watched.start("all") as session:
        status, lines = session.ends(60)
    assert (status, lines) == (1, ["error: step 1 failed", "error: step 2 failed"])
    (watched.notes / "fail.2").unlink()
    watched.save(4)
    with watched.start("one") as session:
        assert session.ends(60) == (1, ["error: step 1 failed"])
    assert watched.begun() == [1, 2, 1, 2, 4] and watched.results() == [2, 4]


def test_a_step_that_training_deletes_is_no_failure(tmp_path):
    watched = Watched(tmp_path, 1)
    (watched.notes / "fail.1").touch()
    (watched.notes / "hold").touch()
    with watched.start() as session:
        session.wait_until(lambda: watched.begun() == [1])
        (watched.run / "checkpoints" / "1").rmdir()
        watched.save(4)
        (watched.notes / "hold").unlink()
        assert session.ends(60) == (0, [])
    assert watched.results() == [4]


def test_it_ends_on_request_and_starts_anew(tmp_path):
    watched = Watched(tmp_path, 1)
    with watched.start("one") as session:
        session.wait_until(lambda: watched.results() == [1])
        (watched.run / "evaluations" / "stop").touch()
        assert session.ends(60) == (0, [])
    watched.save(4)
    with watched.start("two") as session:
        assert session.ends(60) == (0, [])
    assert watched.begun() == [1, 4]


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [([], 2, "usage: "), (["--help"], 2, "usage: "), (["/nowhere"], 1, "no config.json")],
)
def test_what_is_no_run_is_refused(arguments, status, says):
    done = subprocess.run([SCRIPT, *arguments], capture_output=True, text=True)
    assert done.returncode == status and done.stderr.count("\n") == 1 and says in done.stderr


@pytest.mark.slow
def test_a_real_run(tmp_path):
    """With context lengths, of which one that is too long is refused."""
    config = tiny_run.write_config(tmp_path, tiny_run.prepare_data(tmp_path))
    trained = tiny_run.run_command(tiny_run.command(config, tmp_path / "run"))
    assert trained.returncode == 0, trained.stderr
    documents = {
        "copa/validation": {
            "premise": "It was.", "choice1": "A", "choice2": "B", "question": "cause", "label": 0,
        },
        "wikitext/test": {"page": "A page of some words, and some more of them.\n" * 4},
    }  # fmt: skip
    for name, document in documents.items():
        path = tmp_path / "documents" / f"{name}.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(document) + "\n")
    bin = pathlib.Path(sys.executable).parent
    given = ["--tasks=copa", f"--data_dir={tmp_path / 'documents'}"]
    refused = command(tmp_path / "run", bin, *given, "--context_lengths=8,64")
    with Session(refused, tmp_path / "refused") as session:
        status, lines = session.ends(300)
    assert status == 1
    assert "error: --context_lengths=64: the model was trained on 32; give at most that" in lines
    watching = command(tmp_path / "run", bin, *given, "--context_lengths=8,16")
    with Session(watching, tmp_path / "log") as session:
        assert session.ends(300)[0] == 0
    steps = sorted(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert steps[-2:] == [8, 12]
    for step in steps:
        path = tmp_path / "run" / "evaluations" / f"{step}.json"
        found = json.loads(path.read_text())
        assert found["results"].keys() == {"copa"} and found["deconstruct"]["step"] == step
        by_length = found["deconstruct"]["wikitext_by_context"]
        assert by_length.keys() == {"8", "16"} and by_length["8"] != by_length["16"]
        assert f"| {report.cell(by_length['16'])} |" in path.with_suffix(".md").read_text()
