"""`python -m deconstruct.evaluate`: what it writes, what it refuses, and going on after a kill."""

import dataclasses
import json
import signal
import sys
import types

import pytest
import tiny_run
from processes import Session
from test_evaluate_tasks import EXAMPLES, write

from deconstruct.evaluate import run, tasks
from deconstruct.evaluate.scorer import Answer, Scores

NAMES = ("copa", "piqa", "lambada_openai", "wikitext", "rte")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """Five documents of each of some tasks: not the official ones."""
    folder = tmp_path_factory.mktemp("documents")
    for name in NAMES:
        document, _ = EXAMPLES[name]
        field, text = next((f, v) for f, v in document.items() if isinstance(v, str))
        documents = [{**document, field: f"{'so ' * number}{text}"} for number in range(5)]
        for number, own in enumerate(documents):
            if "label" in own:
                own["label"] = number % 2
        write(folder / name / f"{tasks.TASKS[name].source.split}.jsonl", documents)
    return folder


@pytest.fixture(scope="module")
def command(trained_run, data_dir):
    def of(output, *flags):
        return [
            sys.executable, "-m", "deconstruct.evaluate", f"--checkpoint={trained_run}",
            f"--data_dir={data_dir}", f"--tasks={','.join(NAMES)}", f"--output={output}", *flags,
        ]  # fmt: skip

    return of


@pytest.fixture(scope="module")
def unbroken(command, tmp_path_factory):
    """(its folder, what it printed) of an evaluation that nothing disturbed."""
    folder = tmp_path_factory.mktemp("unbroken")
    done = tiny_run.run_command(command(folder / "scores.json", "--log_samples"))
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, done.stdout


def load(path):
    return json.loads(path.read_text())


def test_the_json_has_lm_evals_shape(unbroken, trained_run):
    folder, printed = unbroken
    found = load(folder / "scores.json")
    assert set(found["results"]) == set(found["samples"]) == set(NAMES)
    assert found["results"]["piqa"].keys() == {
        "name", "alias", "sample_len",
        "acc,none", "acc_stderr,none", "acc_norm,none", "acc_norm_stderr,none",
    }  # fmt: skip
    wikitext = found["results"]["wikitext"]
    assert wikitext["word_perplexity,none"] > 1 and wikitext["bits_per_byte_stderr,none"] == "N/A"
    assert found["n-samples"]["copa"] == {"original": 5, "effective": 5}
    assert found["n-shot"] == dict.fromkeys(NAMES, 0)
    assert found["higher_is_better"]["lambada_openai"] == {"perplexity": False, "acc": True}
    ours = found["deconstruct"]
    assert ours["checkpoint"] == str(trained_run) and ours["step"] == 2
    assert [layer["mixer"] for layer in ours["spec"]["layers"]] == ["non_approximate", "standard"]
    assert ours["documents"]["rte"]["count"] == 5
    assert ours["denominators"]["copa"] == {"acc": 5}
    pages = [EXAMPLES["wikitext"][0]["page"]] * 5
    over = ours["denominators"]["wikitext"]
    assert over["byte_perplexity"] == over["bits_per_byte"]
    assert over["byte_perplexity"] == sum(
        len(page.encode()) + 3 * n for n, page in enumerate(pages)
    )
    assert set(ours["truncated_requests"]) == set(ours["tokens_read"]) == set(NAMES)
    assert set(ours["tokens_scored"]) == set(NAMES) and set(ours["token_perplexity"]) == {
        "wikitext"
    }
    bits = wikitext["bits_per_byte,none"] * over["bits_per_byte"]
    per_token = 2 ** (bits / ours["tokens_scored"]["wikitext"])
    assert ours["token_perplexity"]["wikitext"] == pytest.approx(per_token)
    assert f"({ours['compiled_shapes']} shapes compiled)" in printed


def test_each_documents_answers_are_logged(unbroken):
    folder, _ = unbroken
    found = load(folder / "scores.json")
    samples = found["samples"]["copa"]
    assert [sample["doc_id"] for sample in samples] == [0, 1, 2, 3, 4]
    assert samples[1]["arguments"][0][0].startswith("so It fell")
    assert all(len(sample["resps"]) == 2 and sample["resps"][0][0] < 0 for sample in samples)
    mean = sum(sample["values"]["acc"] for sample in samples) / 5
    assert mean == found["results"]["copa"]["acc,none"]


def test_the_table_lies_beside_and_is_printed(unbroken, trained_run):
    folder, printed = unbroken
    text = (folder / "scores.md").read_text()
    assert text in printed and sorted(p.name for p in folder.iterdir()) == [
        "scores.json", "scores.md"
    ]  # fmt: skip
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    ours = dict(zip(rows[0], rows[-1], strict=True))
    assert ours["model"] == f"{trained_run} step 2"
    accuracy = load(folder / "scores.json")["results"]["copa"]["acc,none"]
    assert accuracy > 0 and ours["copa"] == f"{100 * accuracy:.1f}"
    assert ours["boolq"] == ours["avg"] == ""


@pytest.mark.parametrize(
    ("flags", "mixers"),
    [
        (["--skip"], ["standard"]),
        (["--spec_override=1"], ["non_approximate"]),
        (["--limit=2"], ["non_approximate", "standard"]),
    ],
)
def test_layers_and_documents_can_be_left_out(unbroken, command, tmp_path, flags, mixers):
    output = tmp_path / "scores.json"
    done = tiny_run.run_command(command(output, "--tasks=piqa,wikitext", *flags))
    assert done.returncode == 0, done.stderr[-3000:]
    found, whole = load(output), load(unbroken[0] / "scores.json")
    assert [layer["mixer"] for layer in found["deconstruct"]["spec"]["layers"]] == mixers
    size = 2 if "--limit=2" in flags else 5
    assert found["n-samples"]["piqa"] == {"original": 5, "effective": size}
    figure = "word_perplexity,none"
    assert found["results"]["wikitext"][figure] != whole["results"]["wikitext"][figure]
    assert found["samples"] == {}


@pytest.mark.slow
def test_a_killed_evaluation_goes_on_to_the_same_bytes(unbroken, command, tmp_path):
    """Killed in the third task: of the first two nothing is scored again."""
    output = tmp_path / "scores.json"
    partial = tmp_path / "scores.json.partial"

    def num_finished():
        return max(partial.read_bytes().count(b"\n") - 1, 0) if partial.is_file() else 0

    again = command(output, "--log_samples")
    with Session(again, tmp_path / "log") as session:
        session.wait_until(lambda: num_finished() >= 2)
        session.signal(signal.SIGKILL)
        session.process.wait()
    finished = NAMES[: num_finished()]
    assert finished == NAMES[:2] and not output.exists()
    done = tiny_run.run_command(again)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [name for name in NAMES if f"{name}:" in done.stderr] == list(NAMES[2:])
    folder, _ = unbroken
    for name in ("scores.json", "scores.md"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    assert not partial.exists()


class CountingScorer:
    """Stands in for a scorer: the answers are the continuations' lengths."""

    def __init__(self):
        self.shapes, self.asked = {}, []

    def score(self, requests, on_rows, max_len=None):
        self.asked.append([request[-1] for request in requests])
        self.shapes[len(self.shapes), 16, 0, 8, True] = None
        return Scores([Answer(-float(len(r[-1])), False) for r in requests], 0, 1, 1)


class TestProgressFile:
    DOCUMENTS = types.MappingProxyType(
        {name: [EXAMPLES[name][0]] * 2 for name in ("copa", "piqa", "rte")}
    )

    def evaluate(self, path, scorer, settings="a", names=("copa", "piqa", "rte")):
        documents = {name: self.DOCUMENTS[name] for name in names}
        return run.evaluate(
            scorer, documents, progress_file=path, settings={"s": settings}, progress=False,
            bootstrap_iterations=0,
        )  # fmt: skip

    def test_finished_tasks_are_not_done_again(self, tmp_path):
        path, first, second = tmp_path / "partial", CountingScorer(), CountingScorer()
        self.evaluate(path, first, names=["copa", "piqa"])
        results = self.evaluate(path, second)
        assert len(first.asked) == 2 and len(second.asked) == 1
        whole = self.evaluate(None, CountingScorer())
        assert self.as_json(results) == self.as_json(whole)
        assert len(second.shapes) == 3  # those of the tasks before, too

    def test_other_settings_begin_anew(self, tmp_path):
        path, scorer = tmp_path / "partial", CountingScorer()
        self.evaluate(path, scorer, "a")
        self.evaluate(path, scorer, "b")
        assert len(scorer.asked) == 6 and len(path.read_text().splitlines()) == 4

    @pytest.mark.parametrize("cut", [1, 40])
    def test_a_line_that_a_kill_cut_is_done_again(self, tmp_path, cut):
        path, scorer = tmp_path / "partial", CountingScorer()
        whole = self.evaluate(path, CountingScorer())
        path.write_bytes(path.read_bytes()[:-cut])
        assert self.as_json(self.evaluate(path, scorer)) == self.as_json(whole)
        assert len(scorer.asked) == 1
        self.evaluate(path, scorer)
        assert len(scorer.asked) == 1

    def as_json(self, results):
        return [json.loads(json.dumps(dataclasses.asdict(result))) for result in results]


# Flags instead of those of a good command -> a part of the only line.
MISTAKES = {
    "no checkpoint": (["--checkpoint="], "--checkpoint is missing"),
    "no data": (["--data_dir="], "--data_dir is missing"),
    "no output": (["--output="], "--output is missing"),
    "unknown task": (["--tasks=wikitxt"], "unknown task 'wikitxt': did you mean 'wikitext'"),
    "no task": (["--tasks="], "--tasks is empty"),
    "task without data": (["--tasks=copa,sciq"], "lacks sciq/test.jsonl"),
    "wrong data": (["--data_dir=/nowhere"], "--data_dir=/nowhere lacks copa/validation.jsonl"),
    "output's folder": (["--output=/nowhere/o.json"], "its folder does not exist"),
    "output that the table would overwrite": (["--output=o.md"], "ends in .json"),
    "unknown flag": (["--task=copa"], "Unknown command line flag 'task'"),
    "no number": (["--limit=few"], "--limit=few"),
    "limit of none": (["--limit=0"], "0 is not a positive integer"),
    "dtype": (["--dtype=float16"], "<float32|bfloat16>"),
    "both": (["--skip", "--spec_override=1"], "both choose layers"),
    "argument": (["copa"], "unknown argument 'copa'"),
}
# After the start of JAX.
LATE_MISTAKES = {
    "wrong checkpoint": (["--checkpoint=/nowhere"], "/nowhere does not exist"),
    "wrong step": (["--step=7"], "has no step 7"),
    "wrong layer": (["--spec_override=3"], "layer 3 is not in this model"),
    "no layer": (["--spec_override=x"], "'x' is neither a layer number nor a range"),
    "too long": (["--max_len=33"], "max_len=33: the model was trained on 32"),
    "mesh": (["--fsdp=3"], "mesh fsdp=3"),
}


@pytest.mark.parametrize("name", [*MISTAKES, *LATE_MISTAKES])
def test_a_mistake_is_one_line(command, tmp_path, name):
    flags, message = (MISTAKES | LATE_MISTAKES)[name]
    done = tiny_run.run_command(command(tmp_path / "scores.json", *flags))
    lines = done.stderr.splitlines()
    if name in LATE_MISTAKES:  # a warning of each task's documents comes before
        lines = [line for line in lines if "official ones" not in line]
    assert done.returncode == 1 and len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ") and message in lines[0]
    assert not list(tmp_path.iterdir())
