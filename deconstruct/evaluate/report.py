"""Results as JSON in lm-evaluation-harness's shape, and as the paper's tables."""

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from deconstruct.evaluate.run import TaskResult
from deconstruct.evaluate.tasks import TASKS
from deconstruct.spec import STANDARD, ModelSpec, plan_layers

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
            "tokens_scored": {r.task: r.tokens_scored for r in results},
            "token_perplexity": {
                r.task: r.token_perplexity for r in results if r.token_perplexity is not None
            },
            "denominators": {r.task: r.denominators for r in results},
        },
    }


def _directions(task: str) -> dict[str, bool]:
    return {metric: metric.startswith("acc") for metric in TASKS[task].metrics}


class Table(NamedTuple):
    """Columns, and rows by label; None where a cell stays empty."""

    columns: Sequence[str]
    rows: Mapping[str, Sequence[float | None]]


def table(results: Sequence[TaskResult], name: str, spec: ModelSpec | None = None) -> Table:
    """The paper's table 1: chance, majority, its models like that of `spec`, and `name` below."""
    paper = json.loads(PAPER_FILE.read_text())
    columns = paper["columns"]
    figures = {r.task: r.figures for r in results}
    ours: dict[str, float | None] = {}
    for column, (task, metric, factor) in COLUMNS.items():
        ours[column] = factor * figures[task][metric] if task in figures else None
    accuracies = [ours[column] for column in _AVERAGED]
    ours["avg"] = None if None in accuracies else sum(accuracies) / len(accuracies)
    size = "500m" if spec is None else _paper_size(spec)
    rows = {f"paper: {row}": paper["500m"][row] for row in ("random", "majority")}
    rows[f"paper {size}: standard"] = paper[size]["standard"]
    if spec is not None and (same := _paper_plan(spec)) is not None:
        plan, mixer = same
        if (printed := paper[size][plan].get(mixer)) is not None:
            rows[f"paper {size}: {plan} {mixer}"] = printed
    return Table(columns, rows | {name: [ours[column] for column in columns]})


def _paper_size(spec: ModelSpec) -> str:
    """The paper's model that is the most alike; of those smaller than 1.7B it prints one."""
    if spec.model_dim >= 2048:
        return "1700m"
    return "500m" if spec.num_kv_heads == spec.num_heads else "500m_gqa"


def _paper_plan(spec: ModelSpec) -> tuple[str, str] | None:
    """(plan, mixer) where the paper has one of the two, and that mixer beside the standard one."""
    mixers = [layer.mixer for layer in spec.layers]
    others = set(mixers) - {STANDARD}
    if len(others) != 1:
        return None
    (mixer,) = others
    for plan, name in (("uniform", "uniform"), ("even", "hybrid_even")):
        if mixers == [layer.mixer for layer in plan_layers(len(mixers), mixer, plan)]:
            return name, mixer
    return None


def context_table(perplexities: Mapping[int, float], name: str) -> Table:
    """The paper's table 4, WikiText's perplexity by context, and `name` below."""
    paper = json.loads(PAPER_FILE.read_text())["wikitext_by_context"]
    printed = {"standard": paper["standard"]}
    for plan in ("uniform", "hybrid_even"):
        printed |= {f"{plan} {mixer}": values for mixer, values in paper[plan].items()}
    rows = {}
    for row, values in printed.items():
        by_length = dict(zip(paper["lengths"], values, strict=True))
        rows[f"paper 500m: {row}"] = [by_length.get(length) for length in perplexities]
    rows[name] = list(perplexities.values())
    return Table([str(length) for length in perplexities], rows)


def markdown(table: Table) -> str:
    lines = [["model", *table.columns], ["---", *("---:" for _ in table.columns)]]
    lines += [[label, *map(cell, values)] for label, values in table.rows.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def cell(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if math.isfinite(value) and value < 1e5 else f"{value:.1e}"
