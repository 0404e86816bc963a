"""lm-evaluation-harness on documents that are here, without a network."""

import functools
import json
import operator
import os
import pathlib
from collections.abc import Iterable
from unittest import mock

import pytest
import yaml

from deconstruct.evaluate import tasks

INSTALL = "needs lm-eval: pip install -r requirements-evaluate.txt"
evaluator = pytest.importorskip("lm_eval.evaluator", reason=INSTALL)
harness_metrics = pytest.importorskip("lm_eval.api.metrics", reason=INSTALL)
harness_tasks = pytest.importorskip("lm_eval.tasks", reason=INSTALL)


def write_tasks(folder: pathlib.Path, evaldata: pathlib.Path) -> None:
    """Its own definitions of our tasks, but for where their documents lie."""
    packaged = str(pathlib.Path(harness_tasks.__file__).parent)
    for name in tasks.TASKS:
        config = yaml.safe_load((evaldata / "lm_eval_tasks" / f"{name}.yaml").read_text())
        files = config["dataset_kwargs"]["data_files"]
        config["include"] = config["include"].replace("_packaged", packaged)
        write_task(folder, config, {split: evaldata / path for split, path in files.items()})


def write_task(folder: pathlib.Path, config: dict, files: dict[str, pathlib.Path]) -> None:
    """One task; `files` are its documents by split."""
    places = {split: str(path) for split, path in files.items()}
    settings = {"data_files": places, "cache_dir": str(folder / "cache")}
    text = json.dumps({**config, "dataset_path": "json", "dataset_kwargs": settings})
    (folder / f"{config['task']}.yaml").write_text(text)  # all JSON is YAML


def run(model, folder: pathlib.Path, names: Iterable[str], **options) -> dict:
    """Its evaluation of a model on tasks that were written to a folder.

    In this process alone, and with sums as they were before Python 3.12, whose `sum` rounds in
    another way: ours do not depend on the version.
    """
    manager = harness_tasks.TaskManager(include_path=str(folder), include_defaults=False)
    sequential = functools.partial(functools.reduce, operator.add)
    with (
        mock.patch.dict(os.environ, DISABLE_MULTIPROC="1"),
        mock.patch.object(harness_metrics, "sum", sequential, create=True),
    ):
        return evaluator.evaluate(model, manager.load(list(names)), **options)


def answers(evaluation: dict, name: str) -> list[list]:
    """[log-likelihood, greedy] of each request; of a whole text it keeps the first alone."""
    samples = sorted(evaluation["samples"][name], key=lambda sample: sample["doc_id"])
    answers = [answer for sample in samples for answer in sample["filtered_resps"]]
    return [list(a) if isinstance(a, tuple) else [a, False] for a in answers]
