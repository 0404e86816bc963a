"""The benchmarks' texts and figures (E4, E6), by a model whose numbers are known beforehand."""

import gzip
import json
import math
import pathlib
import random
import statistics
import subprocess
import sys

import pytest

from deconstruct.evaluate import data, metrics, tasks

SHARED = pathlib.Path(__file__).resolve().parents[2] / "shared" / "evaldata"
official = pytest.mark.skipif(not SHARED.is_dir(), reason="needs the benchmarks' documents")

# Of a model that knows how often characters occur and nothing else, as lm-eval 0.4.13 gives them.
LETTERS = " etaoinshrdlcumwfgypbvkjxqz"
WEIGHTS = {letter: 40 - place for place, letter in enumerate(LETTERS)}
TOTAL = float(sum(WEIGHTS.values()) + 4096)
UNIGRAM = {
    "arc_easy": {"acc": 0.25126262626262624, "acc_norm": 0.2588383838383838},
    "boolq": {"acc": 0.3782874617737003},
    "copa": {"acc": 0.57},
    "piqa": {"acc": 0.5233949945593036, "acc_norm": 0.4842219804134929},
    "sciq": {"acc": 0.209, "acc_norm": 0.269},
    "rte": {"acc": 0.5270758122743683},
    "sglue_rte": {"acc": 0.5270758122743683},
    "hellaswag": {"acc": 0.2539334793865764, "acc_norm": 0.23770165305715993},
    "lambada_openai": {"perplexity": 1637976149677246.8, "acc": 0.0},
    "wikitext": {
        "word_perplexity": 586475566206.8503,
        "byte_perplexity": 158.75286144317985,
        "bits_per_byte": 7.310638785770903,
    },
}

# A document of each task, with what is asked of it.
EXAMPLES = {
    "arc_easy": (
        {"question": "Q?", "choices": {"text": ["a", "b"], "label": ["1", "2"]}, "answerKey": "2"},
        ("Question: Q?\nAnswer:", [" a", " b"], 1),
    ),
    "boolq": (
        {"question": "is it", "passage": "It -- is.", "label": 1},
        ("It -- is.\nQuestion: is it?\nAnswer:", [" no", " yes"], 1),
    ),
    "copa": (
        {"premise": "It fell. ", "choice1": "It broke.", "choice2": "A b.", "question": "cause",
         "label": 0},
        ("It fell because", ["  it broke.", "  a b."], 0),
    ),
    "piqa": (
        {"goal": "g", "sol1": " one", "sol2": "two ", "label": 1},
        ("Question: g\nAnswer:", ["  one", " two "], 1),
    ),
    "sciq": (
        {"question": "Q", "support": "", "distractor1": "a", "distractor2": "b", "distractor3": "c",
         "correct_answer": "d"},
        ("\nQuestion: Q\nAnswer:", [" a", " b", " c", " d"], 3),
    ),
    "rte": (
        {"sentence1": "A.", "sentence2": "B.", "label": 0},
        ("A.\nQuestion: B. True or False?\nAnswer:", [" True", " False"], 0),
    ),
    "sglue_rte": (
        {"premise": "A.", "hypothesis": "B.", "label": 1},
        ("A.\nQuestion: B. True or False?\nAnswer:", [" True", " False"], 1),
    ),
    "hellaswag": (
        {"activity_label": "Roofs", "ctx_a": "[header] A [title] b.", "ctx_b": "he RAN",
         "label": "1", "endings": ["[step]  fell    down", " x"]},
        ("Roofs: A. b. He ran", ["  fell  down", " x"], 1),
    ),
    "lambada_openai": ({"text": "one two,\nthree"}, ("one", [" two,\nthree"], None)),
    "wikitext": (
        {"page": " = A = \n It @-@ 3 @.@ 5 ( x ) ; \" y \" s ' b 's N z \n"},
        (None, [" = A =\nIt-3.5 (x); \"y\" s'b's 1 z\n"], None),
    ),
}  # fmt: skip


def log_likelihood(text):
    return math.fsum(math.log(WEIGHTS.get(letter, 1) / TOTAL) for letter in text)


def answer(request):
    if isinstance(request, tasks.Whole):
        return tasks.Answer(log_likelihood(request.text), False)
    greedy = all(letter == LETTERS[0] for letter in request.continuation)
    return tasks.Answer(log_likelihood(request.continuation), greedy)


def values_of(task, documents):
    return [task.values(d, [answer(request) for request in task.requests(d)]) for d in documents]


@official
@pytest.mark.parametrize("name", tasks.TASKS)
def test_the_official_documents_give_the_known_figures(name, caplog):
    """To the last digit; and nothing is said of other documents than the official ones."""
    task = tasks.TASKS[name]
    documents = data.read(str(SHARED), [name])[name]
    assert len(documents) == task.source.count and not caplog.records
    values = values_of(task, documents)
    totals = {m: metric.total([v[m] for v in values]) for m, metric in task.metrics.items()}
    assert totals == UNIGRAM[name]


@pytest.mark.parametrize("name", tasks.TASKS)
def test_what_is_asked_of_a_document(name):
    task = tasks.TASKS[name]
    document, (context, continuations, gold) = EXAMPLES[name]
    requests = task.requests(document)
    if context is None:
        assert requests == [tasks.Whole(text) for text in continuations]
    else:
        assert requests == [tasks.Pair(context, text) for text in continuations]
    if gold is not None:
        assert task.gold(document) == gold


def test_of_equal_choices_the_first_counts():
    document, _ = EXAMPLES["sciq"]
    answers = [tasks.Answer(-1.0, False)] * 4
    assert tasks.TASKS["sciq"].values(document, answers) == {"acc": 0.0, "acc_norm": 0.0}
    answers[3] = tasks.Answer(-0.5, False)
    assert tasks.TASKS["sciq"].values(document, answers) == {"acc": 1.0, "acc_norm": 1.0}


def test_accuracy_by_length_counts_characters_of_the_choice_alone():
    """The choice's own spaces count, the space before it does not."""
    document = {"goal": "g", "sol1": " abc", "sol2": "é", "label": 0}
    answers = [tasks.Answer(-3.9, False), tasks.Answer(-1.0, False)]
    assert tasks.TASKS["piqa"].values(document, answers) == {"acc": 0.0, "acc_norm": 1.0}
    assert tasks.TASKS["piqa"].values(document, [tasks.Answer(-4.1, False), answers[1]]) == {
        "acc": 0.0,
        "acc_norm": 0.0,
    }


def test_perplexities_by_word_and_by_byte():
    """E4: words and bytes of the page as it is, not of what is scored; pages that end in space."""
    task = tasks.TASKS["wikitext"]
    pages = [{"page": " é  b \n"}, {"page": "a @-@ b"}]
    vocabulary, tokens = 7, (5, 3)
    values = [
        task.values(page, [tasks.Answer(-n * math.log(vocabulary), False)])
        for page, n in zip(pages, tokens, strict=True)
    ]
    assert [v["word_perplexity"][1] for v in values] == [4, 3]
    assert [v["byte_perplexity"][1] for v in values] == [8, 7]
    totals = {m: metric.total([v[m] for v in values]) for m, metric in task.metrics.items()}
    assert totals["word_perplexity"] == pytest.approx(vocabulary ** (8 / 7), rel=1e-14)
    assert totals["byte_perplexity"] == pytest.approx(vocabulary ** (8 / 15), rel=1e-14)
    assert totals["bits_per_byte"] == pytest.approx(8 / 15 * math.log2(vocabulary), rel=1e-14)


def test_the_error_of_a_mean():
    values = [0.0, 1.0, 1.0, 0.0, 1.0]
    expected = statistics.stdev(values) / math.sqrt(5)
    assert metrics.mean_error(values) == pytest.approx(expected, rel=1e-15)
    assert math.isnan(metrics.mean_error([1.0]))


def test_the_error_of_a_perplexity_is_that_of_the_seeded_resamples():
    values = [-random.Random(7).random() * 9 for _ in range(40)] + [-2.5, -0.1]
    perplexities = []
    for chunk in range(2):
        draw = random.Random(chunk)
        for _ in range(1000):
            drawn = draw.choices(values, k=len(values))
            total = 0.0
            for value in drawn:
                total += value
            perplexities.append(math.exp(-(total / len(drawn))))
    expected = statistics.stdev(perplexities)
    assert metrics.perplexity_error(values, 2000) == pytest.approx(expected, rel=1e-13)
    assert metrics.perplexity_error(values, 2999) == metrics.perplexity_error(values, 2000)
    few = statistics.stdev(perplexities[:100])
    assert metrics.perplexity_error(values, 100) == pytest.approx(few, rel=1e-13)


def test_a_perplexity_beyond_floats_is_infinite():
    assert metrics.perplexity([-1e6]) == math.inf


def write(path, documents):
    text = "".join(json.dumps(document) + "\n" for document in documents)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def fixtures(folder):
    """Two documents a task."""
    for name, (document, _) in EXAMPLES.items():
        suffix = ".jsonl.gz" if name == "hellaswag" else ".jsonl"
        write(folder / name / f"{tasks.TASKS[name].source.split}{suffix}", [document] * 2)
    return folder


def test_other_documents_are_read_with_a_warning(tmp_path, caplog):
    found = data.read(str(fixtures(tmp_path)), tasks.TASKS)
    assert found == {name: [document] * 2 for name, (document, _) in EXAMPLES.items()}
    assert len(caplog.records) == len(tasks.TASKS)
    assert "2 documents that are not the 2376 official ones" in caplog.text


def test_all_missing_files_are_named_at_once(tmp_path):
    fixtures(tmp_path)
    (tmp_path / "copa" / "validation.jsonl").unlink()
    (tmp_path / "hellaswag" / "validation.jsonl.gz").unlink()
    message = (
        r"lacks copa/validation\.jsonl, hellaswag/validation\.jsonl \(or .* fetch .*evaluate\.data"
    )
    with pytest.raises(ValueError, match=message):
        data.read(str(tmp_path), tasks.ALL)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "is empty"),
        (b'{"text": "a b"}\n{"page": 1}\n', "line 2: no document with the fields text"),
        (b'{"text": "a b"}\n{"te', "line 2: no document"),
        (b"[1]\n", "line 1: no document"),
        (b'{"text": "a b"}\n\xff\xfe\n', r"line \d: no document"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(tmp_path, content, line):
    path = tmp_path / "lambada_openai" / "test.jsonl"
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(ValueError, match=line) as error:
        data.read(str(tmp_path), ["lambada_openai"])
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("copa", {"label": -1}, "its answer is -1, of 2 choices"),  # as a test split has it
        ("copa", {"premise": None}, "NoneType"),
        ("piqa", {"label": 2}, "its answer is 2, of 2 choices"),
        ("arc_easy", {"choices": ["a", "b"]}, "TypeError"),
        ("wikitext", {"page": None}, "AttributeError"),
    ],
)
def test_a_document_that_cannot_be_asked_is_named_before_a_model_is_loaded(
    tmp_path, name, changes, why
):
    document, _ = EXAMPLES[name]
    path = tmp_path / name / f"{tasks.TASKS[name].source.split}.jsonl"
    write(path, [document, {**document, **changes}])
    with pytest.raises(ValueError, match=rf"{path}, line 2: no document .*answer .*{why}"):
        data.read(str(tmp_path), [name])


def test_a_cut_gzip_file_is_named(tmp_path):
    path = tmp_path / "lambada_openai" / "test.jsonl.gz"
    write(path, [{"text": f"a b {n}"} for n in range(1000)])
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"test\.jsonl\.gz, line \d+: no document"):
        data.read(str(tmp_path), ["lambada_openai"])


def test_names_of_tasks():
    assert data.names_of(["all"]) == tasks.ALL and len(tasks.ALL) == 9
    assert data.names_of(["sglue_rte", "piqa", "piqa"]) == ("sglue_rte", "piqa")
    with pytest.raises(ValueError, match="unknown task 'hellaswg': did you mean 'hellaswag'"):
        data.names_of(["hellaswg"])


def test_fetching_needs_a_package_and_a_folder(tmp_path):
    command = [sys.executable, "-m", "deconstruct.evaluate.data"]
    root = pathlib.Path(__file__).resolve().parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: --output is missing")


class FakeHub:
    """Stands in for the package `datasets`."""

    def __init__(self, rows):
        self.rows, self.asked = rows, []

    def load_dataset(self, name, configuration, **kwargs):
        self.asked.append((name, configuration, kwargs))
        if self.rows is None:
            raise ConnectionError("no route")
        return self.rows


def test_fetched_documents_are_the_official_ones_or_refused(tmp_path, monkeypatch):
    rows = [{**EXAMPLES["copa"][0], "idx": 3}]
    hub = FakeHub(rows)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    with pytest.raises(ValueError, match="gives 1 documents that are not the official 100"):
        data.fetch(str(tmp_path), ["copa"])
    assert not list(tmp_path.rglob("*.jsonl*"))
    source = tasks.TASKS["copa"].source
    monkeypatch.setattr(data, "sha256_of", lambda documents, _: source.sha256)
    data.fetch(str(tmp_path), ["copa"], "v1")
    assert hub.asked[-1] == (
        "aps/super_glue",
        "copa",
        {"split": "validation", "revision": "v1"},
    )
    assert data.read(str(tmp_path), ["copa"]) == {"copa": [EXAMPLES["copa"][0]]}
    hub.rows = None
    data.fetch(str(tmp_path), ["copa"])  # it is there
    with pytest.raises(ValueError, match=r"did not give .*:rte at main: no route.*by hand"):
        data.fetch(str(tmp_path), ["rte"])
