"""Our evaluation against lm-evaluation-harness's, of one model, through the adapter.

DECONSTRUCT_HARNESS_DOCUMENTS says how many documents of each task (200 without it), or `all`:

    DECONSTRUCT_HARNESS_DOCUMENTS=all python -m pytest tests/test_evaluate_harness.py
"""

import os

import harness
import jax
import numpy as np
import pytest
from models import make_fixed, make_params, make_spec

from deconstruct import sharding
from deconstruct.evaluate import adapter, data, report, run, tasks
from deconstruct.evaluate.scorer import Scorer
from deconstruct.tokenizer import train_bpe
from deconstruct.trained import TrainedModel

pytestmark = pytest.mark.slow

DOCUMENTS = os.environ.get("DECONSTRUCT_HARNESS_DOCUMENTS", "200")
LIMIT = None if DOCUMENTS == "all" else int(DOCUMENTS)
BOOTSTRAP = 1000
# Between log-likelihoods of one request in batches of other shapes.
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def documents(evaldata):
    return data.read(str(evaldata), tasks.TASKS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, evaldata):
    path = tmp_path_factory.mktemp("harness")
    harness.write_tasks(path, evaldata)
    return path


@pytest.fixture(scope="module")
def scorer(documents):
    """Of a hybrid of three mixers, whose tokenizer knows something of every task's text."""
    asked = [r for name, task in tasks.TASKS.items() for d in documents[name][:60]
             for r in task.requests(d)]  # fmt: skip
    tokenizer = train_bpe([request[-1] for request in asked], 2048)
    spec = make_spec(
        "rnd_emb_qk+approximate", "even", 4, max_len=256, vocab_size=tokenizer.vocab_size
    )
    assert len({layer.mixer for layer in spec.layers}) == 3
    model = TrainedModel(spec, make_params(spec), make_fixed(spec), tokenizer, None)
    return Scorer(model, sharding.make_mesh(devices=jax.devices()[:1]))


def ours(scorer, documents, **options):
    options = {"bootstrap_iterations": BOOTSTRAP, "log_samples": True, **options}
    return run.evaluate(scorer, documents, progress=False, **options)


def theirs(scorer, folder, names, **options):
    model = adapter.DeconstructLM(scorer=scorer)
    return harness.run(model, folder, names, bootstrap_iters=BOOTSTRAP, **options)


def our_answers(result):
    return [answer for sample in result.samples for answer in sample["resps"]]


@pytest.mark.parametrize("name", tasks.TASKS)
def test_figures_and_log_likelihoods_are_equal(scorer, documents, folder, name):
    """Bit for bit, standard errors too: the same requests in batches of the same shapes."""
    scorer.shapes.clear()
    (result,) = ours(scorer, {name: documents[name]}, limit=LIMIT)
    scorer.shapes.clear()
    evaluation = theirs(scorer, folder, [name], limit=LIMIT)
    assert our_answers(result) == harness.answers(evaluation, name)
    assert [s["arguments"] for s in result.samples] == [
        list(map(list, s["arguments"])) for s in evaluation["samples"][name]
    ]
    assert result.num_documents == len(documents[name][:LIMIT])
    found = report.to_json([result], {})
    for key in ("results", "higher_is_better", "n-shot", "n-samples"):
        assert found[key] == {name: evaluation[key][name]}


def test_tasks_together_are_equal_to_rounding(scorer, documents, folder):
    """They score the requests of all tasks in one list, ours one task after another."""
    names, limit = ["arc_easy", "copa", "lambada_openai", "wikitext"], 10
    scorer.shapes.clear()
    results = ours(scorer, {name: documents[name] for name in names}, limit=limit)
    our_shapes = list(scorer.shapes)
    scorer.shapes.clear()
    evaluation = theirs(scorer, folder, names, limit=limit)
    assert list(scorer.shapes) != our_shapes
    for name, result in zip(names, results, strict=True):
        actual, expected = our_answers(result), harness.answers(evaluation, name)
        assert [greedy for _, greedy in actual] == [greedy for _, greedy in expected]
        np.testing.assert_allclose(
            [total for total, _ in actual], [total for total, _ in expected], rtol=TOLERANCE
        )
        accuracies = {key for key in result.figures if key.startswith("acc")}
        assert all(result.figures[k] == evaluation["results"][name][k] for k in accuracies)
