"""Evaluates a model on tasks, one after another, so that what is done survives a kill."""

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from deconstruct.evaluate import metrics
from deconstruct.evaluate.batching import Shape
from deconstruct.evaluate.scorer import Scorer, Scores
from deconstruct.evaluate.tasks import TASKS, Document, Pages, Task


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """A task's figures.

    Attributes:
      task: its name.
      figures: `acc,none` and the like, and their `_stderr` ("N/A" where there is none), as lm-eval
        names them.
      num_documents: documents scored.
      num_original: documents of the split.
      num_truncated: requests whose context lost its left end.
      tokens_read: by the model, without padding.
      tokens_scored: what the log-likelihoods are sums over.
      token_perplexity: of whole texts, over the model's own tokens; None for other tasks.
      denominators: of each metric: documents, words or bytes that its figure is over.
      shapes: of the batches of this task and those before it, which the next task's depend on.
      samples: a record a document, where they were asked for.
    """

    task: str
    figures: Mapping[str, float | str]
    num_documents: int
    num_original: int
    num_truncated: int
    tokens_read: int
    tokens_scored: int
    token_perplexity: float | None
    denominators: Mapping[str, float]
    shapes: Sequence[Sequence[int]]
    samples: Sequence[Mapping[str, Any]] | None = None


class _StoppedError(Exception):
    """The rest of a task is not wanted any more."""


def evaluate(
    scorer: Scorer,
    documents: Mapping[str, Sequence[Document]],
    *,
    limit: int | None = None,
    bootstrap_iterations: int = metrics.BOOTSTRAP_ITERATIONS,
    log_samples: bool = False,
    progress_file: pathlib.Path | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: bool = True,
    stopped: Callable[[], bool] = lambda: False,
) -> list[TaskResult]:
    """The results of each task of `documents`, in their order; of those before it was `stopped`.

    Args:
      scorer: the model.
      documents: task -> its documents.
      limit: how many of the first documents count; None takes all.
      bootstrap_iterations: resamples behind the error of a perplexity; 0 gives no errors at all.
      log_samples: whether a record of each document is kept.
      progress_file: where finished tasks are kept until the end; those in it are not done again.
      settings: all that the results depend on, as JSON; a file of other settings is begun anew.
      progress: whether a bar is shown.
      stopped: asked after each batch whether to leave the rest.
    """
    done = _Finished(progress_file, settings or {})
    results = []
    for name, all_documents in documents.items():
        score = functools.partial(
            _evaluate_task,
            name,
            all_documents[:limit],
            scorer,
            bootstrap_iterations=bootstrap_iterations,
            log_samples=log_samples,
            progress=progress,
            stopped=stopped,
        )
        try:
            result = done.get(name, scorer, score)
        except _StoppedError:
            break
        results.append(dataclasses.replace(result, num_original=len(all_documents)))
    return results


def perplexity_by_context(
    scorer: Scorer,
    pages: Sequence[Document],
    lengths: Sequence[int],
    *,
    progress_file: pathlib.Path | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> dict[int, float]:
    """Length -> perplexity a word of WikiText where so many tokens are read at once (table 4).

    Args:
      scorer, progress_file, settings, progress: as for `evaluate`, which may share the file.
      pages: of the task `wikitext`.
      lengths: none above the model's own.
    """
    done = _Finished(progress_file, settings or {})
    perplexities = {}
    for length in lengths:
        score = functools.partial(
            _evaluate_task, "wikitext", pages, scorer, progress=progress, max_len=length
        )
        result = done.get(f"wikitext@{length}", scorer, score)
        perplexities[length] = result.figures["word_perplexity,none"]
    return perplexities


def _evaluate_task(
    name: str,
    documents: Sequence[Document],
    scorer: Scorer,
    *,
    bootstrap_iterations: int = 0,
    log_samples: bool = False,
    progress: bool,
    max_len: int | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> TaskResult:
    task = TASKS[name]
    requests = [task.requests(document) for document in documents]
    label = name if max_len is None else f"{name}, {max_len} tokens"
    with tqdm(desc=label, unit=" rows", disable=not progress) as bar:

        def on_rows(num_done: int, num_all: int) -> None:
            bar.total = num_all
            bar.update(num_done)
            if stopped():
                raise _StoppedError

        scores = scorer.score([r for own in requests for r in own], on_rows, max_len)
    answers = iter(scores.answers)
    by_document = [[next(answers) for _ in own] for own in requests]
    values = [task.values(d, own) for d, own in zip(documents, by_document, strict=True)]
    samples = None
    if log_samples:
        parts = zip(documents, requests, by_document, values, strict=True)
        samples = [_sample(number, *part) for number, part in enumerate(parts)]
    return TaskResult(
        task=name,
        figures=figures_of(task, values, bootstrap_iterations),
        num_documents=len(documents),
        num_original=len(documents),
        num_truncated=scores.num_truncated,
        tokens_read=scores.tokens_read,
        tokens_scored=scores.tokens_scored,
        token_perplexity=_token_perplexity(scores) if isinstance(task, Pages) else None,
        denominators={
            name: metric.over([value[name] for value in values])
            for name, metric in task.metrics.items()
        },
        shapes=list(scorer.shapes),
        samples=samples,
    )


def _token_perplexity(scores: Scores) -> float:
    total = sum(answer.log_likelihood for answer in scores.answers)
    return float(np.exp(-total / scores.tokens_scored))


def figures_of(
    task: Task, values: Sequence[Mapping[str, Any]], bootstrap_iterations: int
) -> dict[str, float | str]:
    """lm-eval's keys: `acc,none` and `acc_stderr,none` for each metric."""
    figures: dict[str, float | str] = {}
    for name, metric in task.metrics.items():
        own = [value[name] for value in values]
        has_error = metric.error is not None and bootstrap_iterations > 0 and len(own) > 1
        figures[f"{name},none"] = metric.total(own)
        figures[f"{name}_stderr,none"] = (
            metric.error(own, bootstrap_iterations) if has_error else "N/A"
        )
    return figures


def _sample(number: int, document: Document, requests, answers, values) -> dict[str, Any]:
    return {
        "doc_id": number,
        "doc": document,
        "arguments": [list(request) for request in requests],
        "resps": [list(answer) for answer in answers],
        "values": values,
    }


class _Finished:
    """The finished tasks of an evaluation, in a file that the next one of its settings reads."""

    def __init__(self, path: pathlib.Path | None, settings: Mapping[str, Any]):
        self._results: dict[str, TaskResult] = {}
        self._path = path
        forms = Shape._fields, [field.name for field in dataclasses.fields(TaskResult)]
        text = json.dumps([settings, *forms], sort_keys=True)
        self._head = json.dumps({"settings": hashlib.sha256(text.encode()).hexdigest()}) + "\n"
        if path is None:
            return
        lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
        if not lines or lines[0] != self._head:
            path.write_text(self._head)
            return
        whole = [line for line in lines[1:] if line.endswith("\n")]  # a kill may cut the last
        for line in whole:
            name, content = json.loads(line)
            self._results[name] = TaskResult(**content)
        path.write_text(self._head + "".join(whole))

    def get(self, name: str, scorer: Scorer, score: Callable[[], TaskResult]) -> TaskResult:
        """The result called `name`; where it is not there, what `score` gives.

        Then the scorer knows its shapes, so that what follows is, bit for bit, as if nothing had
        been interrupted.
        """
        if name not in self._results:
            result = self._results[name] = score()
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps([name, dataclasses.asdict(result)]) + "\n")
        result = self._results[name]
        scorer.shapes.update((Shape(*sizes), None) for sizes in result.shapes)
        return result
