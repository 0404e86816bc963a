"""Our evaluation against lm-evaluation-harness's Hugging Face backend, of the same weights."""

import flax.traverse_util
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import make_spec
from test_transformers import in_our_layout, reference_model

from deconstruct import sharding
from deconstruct.evaluate import data, run, tasks
from deconstruct.evaluate.scorer import Scorer
from deconstruct.tokenizer import END_OF_TEXT, load_tokenizer
from deconstruct.trained import TrainedModel

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers")
huggingface = pytest.importorskip(
    "lm_eval.models.huggingface", reason="needs accelerate: pip install -r requirements-peers.txt"
)

# Of a log-likelihood.
TOLERANCE = 2e-4
MAX_LEN = 128
LIMITS = dict.fromkeys(tasks.TASKS, 25) | {"wikitext": 2}


@pytest.fixture(scope="module")
def models(shared_dir):
    """(our scorer, their backend) of one Qwen2 without padded rows of the vocabulary."""
    file = str(shared_dir / "corpus" / "tokenizers" / "20B_tokenizer.json")
    tokenizer = load_tokenizer(file)
    spec = make_spec("standard", max_len=MAX_LEN, vocab_size=tokenizer.vocab_size)
    model = reference_model(spec).eval()
    assert len(model.get_output_embeddings().weight) == spec.vocab_size < spec.padded_vocab_size
    flat = in_our_layout(spec, ((name, p.detach()) for name, p in model.named_parameters()))
    params = jax.tree.map(jnp.asarray, flax.traverse_util.unflatten_dict(flat, sep="/"))
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    backend = huggingface.HFLM(
        model,
        backend="causal",
        tokenizer=transformers.PreTrainedTokenizerFast(tokenizer_file=file, eos_token=END_OF_TEXT),
        batch_size=16,
    )
    assert backend.max_length == MAX_LEN
    return Scorer(TrainedModel(spec, params, {}, tokenizer, None), mesh), backend


@pytest.fixture(scope="module")
def folder(tmp_path_factory, evaldata):
    path = tmp_path_factory.mktemp("harness")
    harness.write_tasks(path, evaldata)
    return path


@pytest.mark.parametrize("name", tasks.TASKS)
def test_accuracies_are_equal_and_log_likelihoods_near(models, folder, evaldata, name):
    scorer, backend = models
    (result,) = run.evaluate(
        scorer, data.read(str(evaldata), [name]), limit=LIMITS[name], log_samples=True,
        bootstrap_iterations=0, progress=False,
    )  # fmt: skip
    evaluation = harness.run(backend, folder, [name], limit=LIMITS[name], bootstrap_iters=0)
    expected = harness.answers(evaluation, name)
    actual = [answer for sample in result.samples for answer in sample["resps"]]
    assert [greedy for _, greedy in actual] == [greedy for _, greedy in expected]
    np.testing.assert_allclose(
        [total for total, _ in actual], [total for total, _ in expected], rtol=TOLERANCE
    )
    accuracies = {key: figure for key, figure in result.figures.items() if key.startswith("acc")}
    assert accuracies.items() <= evaluation["results"][name].items()
