"""`tools.bench`: how two sides are timed, what a line says, refusals; data's parts; scoring."""

import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import data_corpus
import devices
import flax.traverse_util
import jax
import models
import numpy as np
import pytest

from deconstruct import config as config_lib
from deconstruct import sharding
from deconstruct.data import prepare
from deconstruct.data.dataset import open_dataset
from deconstruct.evaluate import scorer
from deconstruct.evaluate.tasks import Pair
from deconstruct.trained import TrainedModel
from tools.bench import (
    compare,
    corpus,
    data_worker,
    hybrids,
    loading,
    ours,
    peer,
    preparing,
    qwen2_weights,
    scoring,
    shapes,
    train,
)

ROOT = pathlib.Path(__file__).resolve().parents[1]
TINY = shapes.Shape(
    num_layers=2,
    model_dim=32,
    num_heads=4,
    feed_forward_dim=48,
    vocab_size=300,
    batch_size=2,
    length=16,
)


def test_sides_take_turns_and_the_first_is_not_counted():
    calls = []

    def side(name, milliseconds):
        def run(number):
            calls.append((name, number))
            return [next(milliseconds) for _ in range(number)]

        return run

    sides = {
        "ours": side("ours", iter([900.0, 900.0, 1.0, 3.0, 2.0, 90.0])),
        "peer": side("peer", iter([900.0, 900.0, 5.0, 6.0, 4.0, 70.0])),
    }
    times = compare.alternate(sides, rounds=2, runs=2)
    assert calls == [("ours", 2), ("peer", 2)] * 3
    assert times == {"ours": [1.0, 3.0, 2.0, 90.0], "peer": [5.0, 6.0, 4.0, 70.0]}
    assert compare.ratio_of_medians(times, "ours", "peer") == 5.5 / 2.5


class FakePeer:
    """Says what it is told to."""

    def __init__(self, parameters):
        self.about = {"peer": "fake", "parameters": parameters, "threads": 1}
        self.loss = None

    def steps(self, number):
        self.loss = 5.0
        return [50.0] * number


def test_a_line_holds_both_sides_and_the_real_step_trains():
    side = ours.Ours(TINY)
    first = side.steps(1)
    assert len(first) == 1 and first[0] > 0
    loss = side.loss
    line = json.loads(json.dumps(train.measure(side, FakePeer(side.parameters), 2, 3)))
    assert side.loss < loss
    assert line["peer_ms"] == 50.0 and line["steps"] == 6 and line["peer"] == "fake"
    assert line["ratio"] == pytest.approx(50.0 / line["ours_ms"], rel=0.05)
    assert len(line["ours_ms_quartiles"]) == 2


def test_a_hybrid_is_held_against_its_flops(monkeypatch):
    monkeypatch.setitem(hybrids.SHAPES, "tiny", TINY)
    standard, fixed, again = hybrids.measure("tiny", ["fixed_seq_qk"], "even", 1, 1)
    assert (standard["plan"], standard["ratio"], standard["flops_ratio"]) == ("uniform", 1, 1)
    assert (again["mixer"], again["flops_ratio"]) == ("standard", 1) and again["ratio"] > 0
    assert (fixed["mixer"], fixed["plan"]) == ("fixed_seq_qk", "even") and fixed["ms"] > 0
    assert fixed["flops_ratio"] != 1


def test_models_that_differ_are_not_compared():
    with pytest.raises(AssertionError, match="the two models differ"):
        train.measure(ours.Ours(TINY), FakePeer(1), 1, 1)


def test_a_peer_that_is_missing_is_an_error_with_the_install_line(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch here')")
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench", "train", "--shape=small"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "no torch here" in done.stderr
    assert "pip install -r requirements-peers.txt" in done.stderr
    with pytest.raises(ValueError, match="--peer_python=/nowhere/python does not run"):
        peer.TrainPeer("/nowhere/python", TINY)


class FakeSide:
    """Takes as long for a request as its size tells."""

    def __init__(self, milliseconds):
        self.milliseconds, self.programs_compiled, self.calls = milliseconds, 5, []
        self.about, self.log_likelihoods = {"peer": "fake"}, []

    def scoring(self, requests, size):
        def run(runs):
            self.calls.append((len(requests), size, runs))
            self.programs_compiled += len(self.calls) in (2, 3)
            self.log_likelihoods = [-float(size) for _ in requests]
            return [self.milliseconds[size] * len(requests)] * runs

        return run


def test_scoring_takes_the_best_size_of_each_side():
    by_document = [[Pair("a", " b")] * 2] * 3
    ours, theirs = FakeSide({64: 4.0, 128: 2.0}), FakeSide({2: 5.0, 4: 10.0})
    trials = scoring.Trials(1, [64, 128], [2, 4])
    line = scoring.measure(ours, theirs, by_document, trials, rounds=2)
    assert theirs.calls == [(2, 2, 2), (2, 4, 2)] + [(6, 2, 1)] * 3
    assert ours.calls == [(2, 64, 2), (2, 128, 2)] + [(6, 128, 1)] * 4
    assert (line["batch_tokens"], line["peer_batch_size"]) == (128, 2)
    assert line["batch_tokens_tried"] == {64: 250.0, 128: 500.0}
    assert line["requests"] == 6 and line["ratio"] == 2.5
    assert (line["ours_requests_per_second"], line["peer_requests_per_second"]) == (500.0, 200.0)
    assert line["programs_compiled"] == 1 and line["programs_compiled_later"] == 0
    assert line["largest_difference"] == 63.0


def their_weights(path, spec, params):
    """Our parameters in a file under the names of transformers' Qwen2."""
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    leaves = [f"self_attn.{kind}_proj.weight" for kind in "qkvo"]
    leaves += [f"self_attn.{kind}_proj.bias" for kind in "qkv"]
    leaves += [f"mlp.{kind}_proj.weight" for kind in ("gate", "up", "down")]
    leaves += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    names = ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"]
    names += [f"model.layers.{n}.{leaf}" for n in range(spec.num_layers) for leaf in leaves]
    arrays = {}
    for name in names:
        if (ours := qwen2_weights.our_name(name)) in flat:
            array = np.asarray(flat[ours])
            array = array[: spec.vocab_size] if ours.endswith("/table") else array
            arrays[name] = array.T if ours.endswith("/kernel") else array
    assert len(arrays) == len(flat)
    np.savez(path, **arrays)


def test_our_scoring_has_the_peers_weights_and_compiles_once(tmp_path):
    tokenizer = corpus.load_tokenizer("bpe:300", data_corpus.texts(30))
    tokenizer.save(tmp_path / "tokenizer.json")
    shape = dataclasses.replace(TINY, vocab_size=tokenizer.vocab_size)
    spec = ours.make_spec(shape)
    params = models.make_params(spec)
    their_weights(tmp_path / "weights.npz", spec, params)
    side = scoring.Ours(shape, tmp_path / "tokenizer.json", tmp_path / "weights.npz")
    pairs = [Pair("a few", " words"), Pair("a few", " other words")]
    before = side.programs_compiled
    run = side.scoring(pairs, 64)
    assert len(run(1)) == 1 and side.programs_compiled > before
    compiled = side.programs_compiled
    assert len(run(2)) == 2 and side.programs_compiled == compiled
    model = TrainedModel(spec, params, {}, tokenizer, None)
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    expected = scorer.Scorer(model, mesh, batch_tokens=64).score(pairs).answers
    assert side.log_likelihoods == [answer.log_likelihood for answer in expected]


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "lm_eval", "accelerate")),
    reason="the peer is not installed",
)
@pytest.mark.slow
def test_the_harness_gives_the_same_scores(tmp_path):
    tokenizer = corpus.load_tokenizer("bpe:300", data_corpus.texts(30))
    tokenizer.save(tmp_path / "tokenizer.json")
    shape = dataclasses.replace(TINY, vocab_size=tokenizer.vocab_size)
    files = (tmp_path / "tokenizer.json", tmp_path / "weights.npz")
    pairs = [Pair("a few", " words"), Pair("a few", " other"), Pair("the", " city is")]
    with peer.EvaluatePeer(sys.executable, shape, *files) as other:
        assert len(other.scoring(pairs, 2)(2)) == 2
        side = scoring.Ours(shape, *files)
        side.scoring(pairs, 64)(1)
        assert side.log_likelihoods == pytest.approx(other.log_likelihoods, rel=2e-4)


def test_scoring_without_its_peer_is_an_error_with_the_install_line(tmp_path):
    for name in ("torch", "lm_eval"):
        (tmp_path / f"{name}.py").write_text("raise ModuleNotFoundError('none here')")
    data = tmp_path / "data" / "copa" / "validation.jsonl"
    data.parent.mkdir(parents=True)
    fields = {"premise": "It was.", "question": "cause", "label": 0}
    data.write_text(json.dumps(fields | {"choice1": "A", "choice2": "B"}) + "\n")
    corpus.load_tokenizer("bpe:300", data_corpus.texts(30)).save(tmp_path / "tokenizer.json")
    files = [f"--data_dir={tmp_path / 'data'}", f"--tokenizer={tmp_path / 'tokenizer.json'}"]
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench", "evaluate", "--task=copa", *files],
        cwd=ROOT,
        env=devices.environment(1) | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert "the peer did not start (ModuleNotFoundError: none here); pip install" in done.stderr
    assert "-r requirements-peers.txt -r requirements-evaluate.txt" in done.stderr


def test_an_unknown_benchmark_is_an_error_with_the_names():
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench", "trian"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    known = "train, hybrids, data, evaluate, kernels, mixers, fla"
    assert done.stderr == f"error: no benchmark 'trian'; there are: {known}\n"


@pytest.mark.parametrize("flag", ["--groups=2", "--document=0", "--makes_scores"])
def test_what_the_gpus_peer_knows_nothing_of_is_refused(flag):
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench", "fla", flag], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    name = flag.partition("=")[0]
    assert done.stderr == f"error: {name}: these kernels know nothing of it; leave it out\n"


def run_data_benchmark(source, *arguments):
    """Its lines, of tiny texts."""
    sizes = ["--tokenizer=bpe:300", "--text_bytes=40000", "--max_len=32", "--rounds=1"]
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench", "data", f"--source={source}", *sizes, *arguments],
        cwd=ROOT,
        env=devices.environment(1),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_data_against_the_bare_library_and_the_loader(tmp_path):
    source = data_corpus.write_source(tmp_path / "source")
    parts = ["--part=prepare", "--part=load", "--num_cores=1", "--num_cores=2"]
    loader = ["--num_workers=0", "--num_workers=1", "--batch_size=2", "--batches=3"]
    lines = run_data_benchmark(source, *parts, *loader)
    speeds, loads = lines[:3], lines[3:]
    assert [(line["num_cores"], line["processes"]) for line in speeds] == [(1, 1), (2, 2), (2, 1)]
    for line in speeds:
        assert line["part"] == "prepare" and 0.03 < line["text_mb"] < 0.05
        ours, bare, fast = (line[f"{k}_mb_per_second"] for k in ("ours", "bare", "bare_fast"))
        assert line["ratio"] > 0 and ours > 0 and bare > ours  # so little text is all overhead
        assert line["ratio_to_fast"] == pytest.approx(ours / fast, rel=0.1)
    assert [(line["sources"], line["num_workers"]) for line in loads] == [
        (1, 0), (1, 1), (7, 0), (7, 1),
    ]  # fmt: skip
    for line in loads:
        assert line["part"] == "load" and line["batch_size"] == 2 and line["max_len"] == 32
        per_second = 2 * 32 / line["ms_per_batch"] * 1e3
        assert line["tokens_per_second"] == pytest.approx(per_second, rel=0.05)


def test_the_sides_of_data_make_the_same_tokens(tmp_path):
    """What `tools.bench data` calls bare does the whole of the work that ours adds to."""
    texts = data_corpus.texts(30)
    (path,) = corpus.write_files(tmp_path, texts, 1)
    tokenizer = corpus.load_tokenizer("bpe:300", texts)
    tokenizer.save(tmp_path / "tokenizer.json")
    request = data_worker.Request("bare", (path,), str(tmp_path / "tokenizer.json"), 32, ())
    for fast in (False, True):
        ids = data_worker.bare_side(request, fast)()
        assert ids == [own.tolist() for own in tokenizer.encode_batch(texts)]


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="reads a process's peak memory in /proc")
def test_memory_of_a_unit_is_its_own(tmp_path):
    texts = {"some": data_corpus.texts(5), "more": [data_corpus.text(100_000)]}
    corpus.load_tokenizer("bpe:300", texts["some"]).save(tmp_path / "tokenizer.json")
    ballast = bytearray(b"x") * 300_000_000  # of this process, which starts the measured one
    added = {
        name: preparing.memory(
            documents, tmp_path / name, str(tmp_path / "tokenizer.json"), max_len=32
        )["added_mb"]
        for name, documents in texts.items()
    }
    del ballast
    assert 0 <= added["some"] < 20 < added["more"] < 200


def test_waiting_in_a_training_loop(tmp_path):
    source = data_corpus.write_source(tmp_path / "source")
    prepare.prepare(data_corpus.settings(source, tmp_path / "data"), progress=False)
    config = config_lib.default()
    config.max_len, config.batch_size, config.num_steps = 32, 2, 100
    config.model.num_layers, config.model.model_dim = 1, 32
    config.model.feed_forward_dim, config.model.num_heads = 48, 4
    config.optimizer.warmup_steps = 1
    dataset = open_dataset(tmp_path / "data")
    line = loading.waiting(dataset, config_lib.parse(config), num_workers=0, steps=3)
    assert 0 < line["wait_ms_per_step"] < line["ms_per_step"]
    share = line["wait_ms_per_step"] / line["ms_per_step"]
    assert line["wait_share"] == pytest.approx(share, rel=0.1, abs=1e-4)
    per_second = 2 * 32 / line["ms_per_step"] * 1e3
    assert line["tokens_per_second"] == pytest.approx(per_second, rel=0.05)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the peer is not installed")
@pytest.mark.slow
def test_the_peer_is_the_same_model():
    side = ours.Ours(TINY)
    with peer.TrainPeer(sys.executable, TINY) as other:
        assert other.about["parameters"] == side.parameters
        assert len(other.steps(2)) == len(side.steps(2)) == 2
        # Initial weights are drawn alike, and a step of the same size was taken.
        assert other.loss == pytest.approx(side.loss, rel=0.02)
