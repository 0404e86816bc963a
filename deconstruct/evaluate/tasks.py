"""The benchmarks as data: where documents come from, what is asked of a model, what counts.

A task turns a document into requests, and the model's answers to them into the document's values,
one a metric. The texts are those of lm-evaluation-harness 0.4.13 without examples (0-shot), to the
character. To add a multiple-choice task, add an entry to `TASKS`.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from deconstruct.evaluate import metrics

Document = Mapping[str, Any]


class Pair(NamedTuple):
    """Asks for the log-likelihood of `continuation` after `context`."""

    context: str
    continuation: str


class Whole(NamedTuple):
    """Asks for the log-likelihood of a text from its start, however long."""

    text: str


class Answer(NamedTuple):
    """A log-likelihood in nats, and whether each token was the likeliest (False for a `Whole`)."""

    log_likelihood: float
    is_greedy: bool


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a task's documents are read.

    Attributes:
      dataset: the name on the Hugging Face hub, and its configuration after a colon.
      split: of the data set.
      count: documents in the official split.
      sha256: of the official documents, see `data.sha256_of`.
      fields: what each document must hold.
    """

    dataset: str
    split: str
    count: int
    sha256: str
    fields: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class MultipleChoice:
    """The likeliest of a few continuations of one context.

    Attributes:
      context: a document's context.
      choices: its choices, without the space that comes before each.
      gold: the place of the right one, from 0.
      by_length: whether accuracy is reported by log-likelihood a character as well.
    """

    source: Source
    context: Callable[[Document], str]
    choices: Callable[[Document], Sequence[str]]
    gold: Callable[[Document], int]
    by_length: bool = False

    @property
    def metrics(self) -> dict[str, metrics.Metric]:
        return dict.fromkeys(("acc", "acc_norm")[: 1 + self.by_length], metrics.MEAN)

    def requests(self, document: Document) -> list[Pair]:
        context = self.context(document)
        return [Pair(context, f" {choice}") for choice in self.choices(document)]

    def values(self, document: Document, answers: Sequence[Answer]) -> dict[str, float]:
        """Whether the gold choice is the likeliest; of equal ones the first counts."""
        gold, sums = self.gold(document), [answer.log_likelihood for answer in answers]
        values = {"acc": float(_largest(sums) == gold)}
        if self.by_length:
            choices = self.choices(document)
            each = [s / len(choice) for s, choice in zip(sums, choices, strict=True)]
            values["acc_norm"] = float(_largest(each) == gold)
        return values


@dataclasses.dataclass(frozen=True)
class LastWord:
    """The last word of a text after all that comes before it; `text` gives the whole."""

    source: Source
    text: Callable[[Document], str]
    metrics: ClassVar = {"perplexity": metrics.PERPLEXITY, "acc": metrics.MEAN}

    def requests(self, document: Document) -> list[Pair]:
        context, _, word = self.text(document).rpartition(" ")
        return [Pair(context, f" {word}")]

    def values(self, document: Document, answers: Sequence[Answer]) -> dict[str, float]:
        del document
        (answer,) = answers
        return {"perplexity": answer.log_likelihood, "acc": float(answer.is_greedy)}


@dataclasses.dataclass(frozen=True)
class Pages:
    """Whole texts, each scored from its start.

    Attributes:
      original: a document's text, whose words and bytes are counted.
      scored: what is scored of it.
    """

    source: Source
    original: Callable[[Document], str]
    scored: Callable[[str], str]
    metrics: ClassVar = {
        "word_perplexity": metrics.WEIGHTED_PERPLEXITY,
        "byte_perplexity": metrics.WEIGHTED_PERPLEXITY,
        "bits_per_byte": metrics.BITS,
    }

    def requests(self, document: Document) -> list[Whole]:
        return [Whole(self.scored(self.original(document)))]

    def values(
        self, document: Document, answers: Sequence[Answer]
    ) -> dict[str, tuple[float, float]]:
        """(log-likelihood, how many words or bytes it is over)."""
        ((log_likelihood, _),), text = answers, self.original(document)
        words, num_bytes = len(re.split(r"\s+", text)), len(text.encode())
        return {
            "word_perplexity": (log_likelihood, words),
            "byte_perplexity": (log_likelihood, num_bytes),
            "bits_per_byte": (log_likelihood, num_bytes),
        }


Task = MultipleChoice | LastWord | Pages


def check(task: Task, document: Document) -> None:
    """Raises an error of any kind for a document that cannot be asked or has no right answer."""
    for request in task.requests(document):
        if isinstance(request, Pair) and not request.continuation.strip():
            raise ValueError("nothing is asked: a choice or the last word is empty")
    if isinstance(task, MultipleChoice):
        gold, count = task.gold(document), len(task.choices(document))
        if gold not in range(count):
            raise ValueError(f"its answer is {gold}, of {count} choices counted from 0")


def _largest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _copa_context(document: Document) -> str:
    """The premise without its last character, whatever it is, and the connective."""
    connective = {"cause": "because", "effect": "therefore"}[document["question"]]
    return f"{document['premise'].strip()[:-1]} {connective}"


def _copa_choices(document: Document) -> list[str]:
    """Each led by a space of its own, so that two come before it."""
    choices = (document["choice1"], document["choice2"])
    return [f" {choice[0].lower()}{choice[1:]}" for choice in choices]


def _hellaswag_clean(text: str) -> str:
    """Without WikiHow's marks; two spaces become one in a single pass, ends stay as they are."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _hellaswag_context(document: Document) -> str:
    context = f"{document['ctx_a']} {document['ctx_b'].capitalize()}"
    return _hellaswag_clean(f"{document['activity_label']}: {context}")


def _entailment(dataset: str, sha256: str, premise: str, hypothesis: str) -> MultipleChoice:
    """Recognising entailment, of fields that are called so."""
    return MultipleChoice(
        Source(dataset, "validation", 277, sha256, (premise, hypothesis, "label")),
        context=lambda d: f"{d[premise]}\nQuestion: {d[hypothesis]} True or False?\nAnswer:",
        choices=lambda d: ("True", "False"),
        gold=lambda d: d["label"],
    )


_SPACED_PUNCTUATION = {" @-@ ": "-", " @,@ ": ",", " @.@ ": "."} | {
    f" {mark} ": f"{mark} " for mark in ":;.!?,"
}
_PAIRS = ("()", "[]", "{}", '""', "''")
_HEADINGS_AND_REST = {
    "= = = =": "====",
    "= = =": "===",
    "= =": "==",
    f" {chr(176)} ": chr(176),
    " \n": "\n",
    "\n ": "\n",
    " N ": " 1 ",
    " 's": "'s",
}


def _detokenised(page: str) -> str:
    """A page of WikiText as plain text.

    One of the harness's replacements, of a digit between literal slashes, is left out: it fits
    nothing in the data.
    """
    text = page.replace("s '", "s'")
    for old, new in _SPACED_PUNCTUATION.items():
        text = text.replace(old, new)
    for opening, closing in _PAIRS:
        inside = rf"{re.escape(opening)}\s*([^{re.escape(closing)}]*?)\s*{re.escape(closing)}"
        text = re.sub(inside, rf"{opening}\1{closing}", text)
    for old, new in _HEADINGS_AND_REST.items():
        text = text.replace(old, new)
    return text


TASKS: dict[str, Task] = {
    "arc_easy": MultipleChoice(
        Source(
            "allenai/ai2_arc:ARC-Easy",
            "test",
            2376,
            "39678f1850704d0d1bbbc7987bcbff9fbd30f49fcff817d3f0e0c582b04cf119",
            ("question", "choices", "answerKey"),
        ),
        context=lambda d: f"Question: {d['question']}\nAnswer:",
        choices=lambda d: d["choices"]["text"],
        gold=lambda d: d["choices"]["label"].index(d["answerKey"]),
        by_length=True,
    ),
    "boolq": MultipleChoice(
        Source(
            "aps/super_glue:boolq",
            "validation",
            3270,
            "fb6d36121f829795f6ead873a32b5a5db7324673cb46c71ad493a7a8fbd8984d",
            ("question", "passage", "label"),
        ),
        context=lambda d: f"{d['passage']}\nQuestion: {d['question']}?\nAnswer:",
        choices=lambda d: ("no", "yes"),
        gold=lambda d: d["label"],
    ),
    "copa": MultipleChoice(
        Source(
            "aps/super_glue:copa",
            "validation",
            100,
            "a58a1394209a5ada210679a2170bf651a3393a48c07dcb6ef98c3a4b4fd8fe51",
            ("premise", "choice1", "choice2", "question", "label"),
        ),
        context=_copa_context,
        choices=_copa_choices,
        gold=lambda d: d["label"],
    ),
    "piqa": MultipleChoice(
        Source(
            "baber/piqa",
            "validation",
            1838,
            "c562a3490ecdbe8dfe1745f86c34900605141e2b039983be5d04073c7642cff9",
            ("goal", "sol1", "sol2", "label"),
        ),
        context=lambda d: f"Question: {d['goal']}\nAnswer:",
        choices=lambda d: (d["sol1"], d["sol2"]),
        gold=lambda d: d["label"],
        by_length=True,
    ),
    "sciq": MultipleChoice(
        Source(
            "allenai/sciq",
            "test",
            1000,
            "9e910db3e301f349d5093e41bb86ddf41f9abcc87042946843c1cbe57e0cf6e9",
            ("question", "support", "distractor1", "distractor2", "distractor3", "correct_answer"),
        ),
        context=lambda d: f"{d['support'].lstrip()}\nQuestion: {d['question']}\nAnswer:",
        choices=lambda d: (
            d["distractor1"],
            d["distractor2"],
            d["distractor3"],
            d["correct_answer"],
        ),
        gold=lambda d: 3,
        by_length=True,
    ),
    "rte": _entailment(
        "nyu-mll/glue:rte",
        "5b4a0fdcb50dcf2e16d91eda0a18934161f02de6e1769697b268f9b3d4387923",
        premise="sentence1",
        hypothesis="sentence2",
    ),
    "sglue_rte": _entailment(
        "aps/super_glue:rte",
        "8fb373c9e9b06c67b4ef55655a3252b8d3ab1446464254cb6b0ffb6285073c26",
        premise="premise",
        hypothesis="hypothesis",
    ),
    "hellaswag": MultipleChoice(
        Source(
            "Rowan/hellaswag",
            "validation",
            10042,
            "441a1daa9a08c6fb07da0a3c53fc63bd9b76068838532e0f42bd0e2295999513",
            ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
        ),
        context=_hellaswag_context,
        choices=lambda d: [_hellaswag_clean(ending) for ending in d["endings"]],
        gold=lambda d: int(d["label"]),
        by_length=True,
    ),
    "lambada_openai": LastWord(
        Source(
            "EleutherAI/lambada_openai:default",
            "test",
            5153,
            "f779489ccd1d14b2209fd2b8d9246bcc679965d9887f28520f8896b97574191c",
            ("text",),
        ),
        text=lambda d: d["text"],
    ),
    "wikitext": Pages(
        Source(
            "EleutherAI/wikitext_document_level:wikitext-2-raw-v1",
            "test",
            62,
            "17f7182d154321095d76f45ce3cc3e1e2de2ef4a2115c6baeca7dedfa4f3317a",
            ("page",),
        ),
        original=lambda d: d["page"],
        scored=_detokenised,
    ),
}
ALL = tuple(name for name in TASKS if name != "sglue_rte")  # the paper's nine
