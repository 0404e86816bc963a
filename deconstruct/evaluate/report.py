"""Results as JSON in lm-evaluation-harness's shape, and as the paper's table 1 in Markdown."""

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from deconstruct.evaluate.run import TaskResult
from deconstruct.evaluate.tasks import TASKS

PAPER_FILE = pathlib.Path(__file__).with_name("paper_results.json")

# Column of the table -> the task and metric that it shows, and what it is multiplied by.
COLUMNS = {
    **{name: (name, "acc,none", 100) for name in ("arc_easy", "boolq", "copa", "piqa", "sciq")},
    "rte": ("rte", "acc,none", 100),
    "hellaswag": ("hellaswag", "acc,none", 100),
    "wikitext_ppl": ("wikitext", "word_perplexity,none", 1),
    "lambada_ppl": ("lambada_openai", "perplexity,none", 1),
    "lambada_acc": ("lambada_openai", "acc,none", 100),
}
_AVERAGED = ("arc_easy", "boolq", "copa", "piqa", "sciq", "rte", "hellaswag")


def to_json(results: Sequence[TaskResult], settings: Mapping[str, Any]) -> dict[str, Any]:
    """lm-eval's shape; what it has no place for is under `deconstruct`."""
    return {
        "results": {
            r.task: {"name": r.task, "alias": r.task, "sample_len": r.num_documents, **r.figures}
            for r in results
        },
        "higher_is_better": {r.task: _directions(r.task) for r in results},
        "n-shot": {r.task: 0 for r in results},
        "n-samples": {
            r.task: {"original": r.num_original, "effective": r.num_documents} for r in results
        },
        "samples": {r.task: r.samples for r in results if r.samples is not None},
        "deconstruct": {
            **settings,
            "truncated_requests": {r.task: r.num_truncated for r in results},
            "tokens_read": {r.task: r.tokens_read for r in results},
        },
    }


def _directions(task: str) -> dict[str, bool]:
    return {metric: metric.startswith("acc") for metric in TASKS[task].metrics}


def table(results: Sequence[TaskResult], name: str, size: str = "500m") -> str:
    """The paper's table 1 in Markdown: chance, majority, its standard model, and `name` below."""
    paper = json.loads(PAPER_FILE.read_text())
    columns = paper["columns"]
    figures = {r.task: r.figures for r in results}
    ours: dict[str, float | None] = {}
    for column, (task, metric, factor) in COLUMNS.items():
        ours[column] = factor * figures[task][metric] if task in figures else None
    accuracies = [ours[column] for column in _AVERAGED]
    ours["avg"] = None if None in accuracies else sum(accuracies) / len(accuracies)
    rows = {f"paper {size}: {row}": paper[size][row] for row in ("random", "majority", "standard")}
    rows[name] = [ours[column] for column in columns]
    lines = [["model", *columns], ["---", *("---:" for _ in columns)]]
    lines += [[label, *map(_cell, values)] for label, values in rows.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if math.isfinite(value) and value < 1e5 else f"{value:.1e}"
