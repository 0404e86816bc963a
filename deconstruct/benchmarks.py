"""Benchmarks of a model while it trains: the one place where training and evaluation meet.

Tasks, documents and scores are `evaluate`'s; when they are asked for, and where the figures go, is
the training loop's.
"""

from collections.abc import Callable, Mapping
from typing import Any

from deconstruct import step
from deconstruct.evaluate import data, run
from deconstruct.evaluate.scorer import Scorer
from deconstruct.setup import Run
from deconstruct.trained import TrainedModel

Figures = dict[str, dict[str, float]]


class Benchmarks:
    """The tasks that a run's config chooses, their documents, and what is compiled for them."""

    def __init__(self, setup: Run):
        """Reads the documents.

        Raises:
          ValueError: a task that is not known, documents that are not there.
        """
        chosen = setup.config.benchmarks
        self._documents = data.read(chosen.data_dir, data.names_of(chosen.tasks))
        self._limit = chosen.limit
        weights = step.abstract_state(setup.program, setup.mesh)
        model = TrainedModel(setup.spec, weights.params, weights.fixed, setup.data.tokenizer, None)
        self._scorer = Scorer(model, setup.mesh, compute=setup.program.compute)

    def figures(
        self, params: Mapping[str, Any], fixed: Mapping[str, Any], stopped: Callable[[], bool]
    ) -> Figures | None:
        """Task -> its figures; None where `stopped`, which is asked after each batch, broke it off.

        The same weights give the same figures, whatever was scored before.
        """
        results = run.evaluate(
            self._scorer.of(params, fixed),
            self._documents,
            limit=self._limit,
            bootstrap_iterations=0,
            progress=False,
            stopped=stopped,
        )
        if len(results) < len(self._documents):
            return None
        return {result.task: _by_metric(result) for result in results}


def _by_metric(result: run.TaskResult) -> dict[str, float]:
    figures = {name.partition(",")[0]: value for name, value in result.figures.items()}
    return {name: value for name, value in figures.items() if not name.endswith("_stderr")}
