"""Scores against the model's own logits, whatever they are batched with (E2)."""

import dataclasses
import functools
import json
import pathlib
import random
import socket
import subprocess
import sys

import devices
import jax
import numpy as np
import pytest
from models import make_fixed, make_params, make_spec

from deconstruct import decoder, sharding
from deconstruct.evaluate import scorer as scorer_lib
from deconstruct.evaluate.tasks import Pair, Whole
from deconstruct.mixers import MIXERS
from deconstruct.tokenizer import train_bpe
from deconstruct.trained import TrainedModel

# Between one log-likelihood summed in other orders, over other padding or on other devices.
SCORE_TOLERANCE = 1e-5
MAX_LEN = 24
TEXT = "the cat sat on a mat and the dog ran to an old red house by sea in winter mornings"
WORDS = TEXT.split()


def make_model(mixer="non_approximate", plan="even", num_layers=2, seed=0):
    """Untrained; its table has more rows than its tokenizer has ids."""
    tokenizer = train_bpe([TEXT] * 30, 300)
    spec = make_spec(mixer, plan, num_layers, max_len=MAX_LEN)
    assert spec.vocab_size == tokenizer.vocab_size < spec.padded_vocab_size
    return TrainedModel(spec, make_params(spec, seed), make_fixed(spec), tokenizer, None)


def make_requests(seed=0):
    """17 of mixed lengths, some sharing a context, one twice, one cut, and texts."""
    rng = random.Random(seed)

    def text(count):
        return "".join(" " + rng.choice(WORDS) for _ in range(count))

    requests = [Pair(text(4), text(2))]
    for size in (1, 2, 7):
        context = text(size)
        requests += [Pair(context, text(rng.choice([1, 1, 3, 5]))) for _ in range(4)]
    requests += [requests[3], Pair(text(60), text(2)), Whole(text(1)), Whole(text(70))]
    return requests


@pytest.fixture(scope="module")
def model():
    return make_model()


def make_scorer(model, **options):
    return scorer_lib.Scorer(model, sharding.make_mesh(devices=jax.devices()[:1]), **options)


def assert_same(actual, expected):
    assert [a.is_greedy for a in actual] == [e.is_greedy for e in expected]
    np.testing.assert_allclose(
        [a.log_likelihood for a in actual],
        [e.log_likelihood for e in expected],
        rtol=SCORE_TOLERANCE,
    )


def log_probabilities(model, ids):
    """(T, V) float64 of the next token after each of `ids`, by the model's logits."""
    padded = np.zeros((1, MAX_LEN), np.int32)
    padded[0, : len(ids)] = ids
    found = _all_log_probabilities(model.spec, model.params, model.fixed, padded)
    return np.asarray(found[0, : len(ids)], np.float64)


@functools.partial(jax.jit, static_argnums=0)
def _all_log_probabilities(spec, params, fixed, tokens_BT):
    return jax.nn.log_softmax(decoder.logits(spec, params, fixed, tokens_BT))


def by_hand(model, request):
    """(log-likelihood, is_greedy), each token after at most MAX_LEN others."""
    encode, start = model.tokenizer.encode, model.tokenizer.eot_id
    if isinstance(request, Whole):
        led = [start, *encode(request.text).tolist()]
        total = 0.0
        for begin in range(0, len(led) - 1, MAX_LEN):
            end = min(begin + MAX_LEN, len(led) - 1)
            first = end - MAX_LEN if begin else 0
            found = log_probabilities(model, led[first:end])
            total += sum(found[place - first, led[place + 1]] for place in range(begin, end))
        return total, False
    context = encode(request.context).tolist()
    target = encode(request.context + request.continuation).tolist()[len(context) :]
    ids = (context + target)[-(MAX_LEN + 1) :]
    found = log_probabilities(model, ids[:-1])[-len(target) :]
    greedy = found.argmax(axis=1).tolist() == target
    return sum(found[place, id] for place, id in enumerate(target)), greedy


@pytest.mark.parametrize("mixer", sorted(MIXERS))
def test_scores_are_the_models_own(mixer):
    model = make_model(mixer, "uniform")
    requests = make_requests()
    scores = make_scorer(model).score(requests)
    expected = [scorer_lib.Answer(*by_hand(model, request)) for request in requests]
    assert_same(scores.answers, expected)
    assert scores.num_truncated == 1


def test_fixed_streams_are_computed_once(monkeypatch):
    """Whatever the batches, of whatever shape; other weights have streams of their own."""
    lengths = []

    def counted(spec, params, fixed, length, compute, before=decoder.streams):
        lengths.append(length)
        return before(spec, params, fixed, length, compute)

    monkeypatch.setattr(decoder, "streams", counted)
    model = make_model("fixed_seq_qk", "uniform")
    scorer = make_scorer(model)
    scorer.score(make_requests()[:1])
    answers = scorer.score(make_requests()).answers
    assert len(scorer.shapes) > 1 and lengths == [MAX_LEN]
    other = make_model("fixed_seq_qk", "uniform", seed=5)
    again = scorer.of(other.params, other.fixed).score(make_requests()).answers
    assert_same(again, make_scorer(other).score(make_requests()).answers)
    assert again != answers


def test_a_scorer_of_short_rows_reads_longer_ones_where_asked():
    model = make_model("fixed_seq_qk", "uniform")
    requests = make_requests()
    short = make_scorer(model, max_len=MAX_LEN // 2)
    assert short.score(requests).num_truncated > 1
    found = short.score(requests, max_len=MAX_LEN).answers
    assert_same(found, make_scorer(model).score(requests).answers)


def test_a_greedy_continuation_is_known(model):
    prompt = "the cat sat"
    ids = model.tokenizer.encode(prompt).tolist()
    for _ in range(3):
        ids.append(int(log_probabilities(model, ids)[-1].argmax()))
    text = model.tokenizer.decode(ids)
    assert model.tokenizer.encode(text).tolist() == ids
    greedy = Pair(prompt, text[len(prompt) :])
    other = Pair(prompt, greedy.continuation + " sea")
    answers = make_scorer(model).score([greedy, other, Pair(prompt, " sea")]).answers
    assert [answer.is_greedy for answer in answers] == [True, False, False]


@pytest.mark.parametrize("batch_tokens", [1, 4096])
def test_what_it_is_batched_with_does_not_matter(model, batch_tokens):
    requests = make_requests()
    alone = [make_scorer(model).score([request]).answers[0] for request in requests]
    order = list(range(len(requests)))
    random.Random(batch_tokens).shuffle(order)
    scores = make_scorer(model, batch_tokens=batch_tokens).score([requests[i] for i in order])
    assert_same(scores.answers, [alone[i] for i in order])


def test_hundreds_of_continuations_of_one_context(model):
    """More than a row may hold: they are in several, and what they share is scored once."""
    words = [f" {a} {b} sea" for a in WORDS for b in WORDS]
    requests = [Pair("the cat", f" sat{end}") for end in words]
    scores = make_scorer(model).score(requests)
    some = [0, 7, 150, len(requests) - 1]
    alone = [make_scorer(model).score([requests[i]]).answers[0] for i in some]
    assert_same([scores.answers[i] for i in some], alone)
    scorer = make_scorer(model)
    scorer.score(requests)
    assert max(shape.new for shape in scorer.shapes) <= MAX_LEN + 8


def test_weights_that_are_no_numbers_are_told(model):
    broken = jax.tree.map(lambda x: x * np.nan, model.params)
    scorer = make_scorer(dataclasses.replace(model, params=broken))
    with pytest.raises(ValueError, match="no finite number: the weights are broken"):
        scorer.score(make_requests())


def test_equal_requests_are_read_once_and_tie(model):
    request = make_requests()[1]
    once, twice = make_scorer(model).score([request]), make_scorer(model).score([request] * 2)
    assert twice.tokens_read == once.tokens_read and twice.answers == once.answers * 2
    assert twice.tokens_scored == 2 * once.tokens_scored > 0


def test_tokens_scored_are_those_of_the_texts(model):
    text = make_requests()[-1].text
    scores = make_scorer(model).score([Whole(text), Pair("the cat", " sat")])
    ids = [model.tokenizer.encode(t) for t in (text, "the cat", "the cat sat")]
    assert scores.tokens_scored == len(ids[0]) + len(ids[2]) - len(ids[1])


def test_shapes_are_compiled_once(model):
    """The second list of requests of like lengths compiles nothing."""
    scorer = make_scorer(model)
    scorer.score(make_requests(0))
    assert scorer._score._cache_size() == len(scorer.shapes) <= 3
    scorer.score(make_requests(0)[::-1])
    assert scorer._score._cache_size() == len(scorer.shapes) <= 3


def test_progress_counts_rows(model):
    seen = []
    make_scorer(model, batch_tokens=64).score(make_requests(), lambda *rows: seen.append(rows))
    (total,) = {rows for _, rows in seen}
    assert sum(done for done, _ in seen) == total and len(seen) > 1


MESH_PROGRAM = """
import json
import jax
from test_evaluate_scorer import make_model, make_requests
from deconstruct import decoder, sharding
from deconstruct.evaluate.scorer import Scorer
import dataclasses, functools

found = {}
for sizes in ((8, 1, 1), (2, 2, 2), (1, 4, 2)):
    mesh = sharding.make_mesh(*sizes)
    model = make_model()
    boxed = jax.eval_shape(functools.partial(decoder.init, model.spec), jax.random.key(0))
    params = jax.device_put(model.params, sharding.param_shardings(boxed, mesh))
    answers = Scorer(dataclasses.replace(model, params=params), mesh).score(make_requests()).answers
    found[str(sizes)] = answers
print(json.dumps(found))
"""


@pytest.mark.slow
def test_devices_do_not_matter(model):
    done = subprocess.run(
        [sys.executable, "-c", MESH_PROGRAM],
        cwd=pathlib.Path(__file__).parent,
        env=devices.environment(8),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected = make_scorer(model).score(make_requests()).answers
    for answers in json.loads(done.stdout).values():
        assert_same([scorer_lib.Answer(*answer) for answer in answers], expected)


HOST_PROGRAM = """
import json, sys
import jax
jax.distributed.initialize("127.0.0.1:" + sys.argv[1], 2, int(sys.argv[2]))
from test_evaluate_scorer import make_model, make_requests
from deconstruct import decoder, sharding
from deconstruct.evaluate.scorer import Scorer
import dataclasses, functools, numpy as np

mesh = sharding.make_mesh(2, 2, 1)
model = make_model()
boxed = jax.eval_shape(functools.partial(decoder.init, model.spec), jax.random.key(0))
def place(x, where):
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, where, lambda i: x[i])
params = jax.tree.map(place, model.params, sharding.param_shardings(boxed, mesh))
fixed = jax.tree.map(lambda x: place(x, sharding.replicated(mesh)), model.fixed)
scorer = Scorer(dataclasses.replace(model, params=params, fixed=fixed), mesh)
run, sizes = scorer._run, []
def noted(batch):
    scores = run(batch)
    sizes.append((scores[0].shape[0], batch.shape.num_lines))
    return scores
scorer._run = noted
answers = scorer.score(make_requests()).answers
assert all(rows == lines for rows, lines in sizes), sizes
print(json.dumps(answers))
"""


@pytest.mark.slow
def test_hosts_do_not_matter(model):
    """Two processes of two devices each: both know all answers, and no row is read by both."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", HOST_PROGRAM, port, str(number)],
            cwd=pathlib.Path(__file__).parent,
            env=devices.environment(2),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    expected = make_scorer(model).score(make_requests()).answers
    for process in processes:
        printed, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]
        answers = json.loads(printed.splitlines()[-1])
        assert_same([scorer_lib.Answer(*answer) for answer in answers], expected)
