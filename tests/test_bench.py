"""`tools.bench`: how two sides are timed, what a line says, and the peer's refusal."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from tools.bench import compare, ours, peer, shapes, train

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
        peer.Peer("/nowhere/python", TINY)


def test_an_unknown_benchmark_is_an_error_with_the_names():
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench", "trian"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == "error: no benchmark 'trian'; there are: train\n"


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the peer is not installed")
@pytest.mark.slow
def test_the_peer_is_the_same_model():
    side = ours.Ours(TINY)
    with peer.Peer(sys.executable, TINY) as other:
        assert other.about["parameters"] == side.parameters
        assert len(other.steps(2)) == len(side.steps(2)) == 2
        # Initial weights are drawn alike, and a step of the same size was taken.
        assert other.loss == pytest.approx(side.loss, rel=0.02)
