"""`tools.bench kernels` and `mixers`: what a call costs at least, what a line says, a red op."""

import json
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import pytest

from deconstruct import kernels
from deconstruct.kernels.backends import Backend
from tools import kernel_calls
from tools.bench import floors, timing
from tools.kernel_calls import BOTH, FORWARD, KernelCall

ROOT = pathlib.Path(__file__).resolve().parents[1]
SIZES = {"rows": 2, "length": 6, "heads": 4, "groups": 2, "head_size": 8, "dtype": "bfloat16"}
PAIRS = 6 * 7 // 2


def test_least_bytes_by_hand():
    """Scores are float32; a group's values are 2 * 6 * 8 numbers."""
    q, k = 2 * 6 * 4 * 8 * 2, 2 * 6 * 2 * 8 * 2
    attention = KernelCall("causal_attention", **SIZES)
    assert attention.least_bytes(FORWARD) == q + 2 * k + q
    assert attention.least_bytes(BOTH) == 3 * (q + 2 * k) + 3 * q
    assert KernelCall("prefix_softmax", **SIZES).least_bytes(FORWARD) == 2 * 6 * 4 * 4 + k + q
    scored = KernelCall("prefix_softmax", **SIZES, makes_scores=True)
    assert scored.least_bytes(FORWARD) == attention.least_bytes(FORWARD)
    fixed = KernelCall("fixed_map_attention", **SIZES)
    assert fixed.least_bytes(FORWARD) == q // 2 + k // 2 + k + q


def test_least_flops_by_hand():
    """A product of the seen pairs takes 2 * 21 * 32 a row; backwards there are five."""
    product = 2 * PAIRS * 4 * 8
    for op in ("causal_attention", "taylor_attention"):
        call = KernelCall(op, **SIZES)
        assert call.least_flops(FORWARD) == 2 * 2 * product
        assert call.least_flops(BOTH) == 2 * 7 * product
    fixed = KernelCall("fixed_map_attention", **SIZES)
    assert fixed.least_flops(FORWARD) == (1 + 2) * product
    assert fixed.least_flops(BOTH) == (4 + 3 * 2) * product
    assert KernelCall("prefix_softmax", **SIZES).least_flops(BOTH) == 0


def test_long_rows_count_the_recurrence():
    """Its cost is linear, from the crossover on below that of the pairs."""
    short, long = (
        KernelCall("taylor_attention", **{**SIZES, "length": length, "head_size": 64}).least_flops(
            FORWARD
        )
        for length in (32_768, 65_536)
    )
    assert long == pytest.approx(2 * short)


def test_arguments_are_as_described():
    call = KernelCall("taylor_attention", **SIZES, document=4)
    arrays, gradient, segments = call.arguments()
    assert [(x.shape, str(x.dtype)) for x in (*arrays, gradient)] == [*call.shapes, call.output]
    assert segments[1].tolist() == [0, 0, 0, 0, 1, 1]
    assert [x.shape for x in call.abstract()[0]] == [x.shape for x in arrays]
    assert not kernel_calls.takes_documents("fixed_map_attention")


def test_backends_are_those_that_run_here():
    assert kernel_calls.backends_for(KernelCall("prefix_softmax", **SIZES)) == ["blocked", "scan"]


def test_scores_made_of_queries_and_keys():
    """As the mixer makes them: the weights of q.k / sqrt(K), each at its own position."""
    call = KernelCall("prefix_softmax", **{**SIZES, "dtype": "float32"}, makes_scores=True)
    kernel_calls.check(call, "blocked")
    (q, k, v), gradient, _ = call.arguments()
    s = jnp.einsum("bthk,bthk->bth", q, jnp.repeat(k, 2, axis=2)) / 8**0.5
    o = call.function("blocked", FORWARD)([q, k, v], gradient, None)
    assert jnp.allclose(o, kernels.prefix_softmax(s, v, backend="reference"), atol=1e-5)


@pytest.mark.parametrize("op", kernels.BACKENDS)
def test_a_wrong_backend_is_not_measured(op, monkeypatch):
    right = next(b for b in kernels.BACKENDS[op] if b.name == "reference")
    wrong = Backend("wrong", lambda *arrays: 1.01 * right.run(*arrays))
    monkeypatch.setitem(kernels.BACKENDS, op, (wrong, right))
    call = KernelCall(op, **{**SIZES, "dtype": "float32"})
    kernel_calls.check(call, "reference")
    with pytest.raises(ValueError, match=f"{op}: backend 'wrong' is wrong: result 0 is .* more"):
        kernel_calls.check(call, "wrong")


def test_a_backend_blind_to_documents_is_not_measured(monkeypatch):
    """However short the rows."""
    right = next(b for b in kernels.BACKENDS["prefix_softmax"] if b.name == "reference")
    blind = Backend("blind", lambda s_BTH, v_BTGW, runs_BT: right.run(s_BTH, v_BTGW, None))
    monkeypatch.setitem(kernels.BACKENDS, "prefix_softmax", (blind, right))
    call = KernelCall("prefix_softmax", **{**SIZES, "length": 16, "document": 5})
    with pytest.raises(ValueError, match="backend 'blind' is wrong"):
        kernel_calls.check(call, "blind")


@pytest.mark.parametrize("op", [*kernels.BACKENDS, "prefix_softmax of q, k and v"])
@pytest.mark.parametrize("direction", [FORWARD, BOTH])
def test_peers_are_the_same_function(op, direction):
    op, _, makes_scores = op.partition(" of ")
    sizes = {**SIZES, "dtype": "float32"}
    call = KernelCall(op, **sizes, makes_scores=bool(makes_scores))
    wanted = call.function("reference", direction)(*call.arguments())
    (peer,) = floors.peers(call, direction).values()
    found = peer(*call.arguments())
    for x, y in zip(*(v if direction == BOTH else [v] for v in (found, wanted)), strict=True):
        assert jnp.allclose(x, y, atol=1e-5)


def test_a_line():
    call, names = KernelCall("prefix_softmax", **SIZES), ["blocked", "scan"]
    lines = timing.measure(call, names, FORWARD, rounds=1)
    assert [line["backend"] for line in lines] == names
    assert len({line["floor_ms"] for line in lines}) == 1  # they took turns
    for line in lines:
        assert line["op"] == "prefix_softmax" and len(line["peers"]) == 1
        assert line["ms"] >= 0 and line["ratio"] > 0
        assert line["bytes"] >= line["least_bytes"] and line["flops"] == 0


def test_what_the_kernel_itself_multiplies():
    """Forms that mask the half above the diagonal in blocks multiply a part of it."""
    call = KernelCall("causal_attention", **{**SIZES, "length": 200, "dtype": "float32"})
    (line,) = timing.measure(call, ["xla"], BOTH, rounds=1)
    assert line["least_flops"] < line["flops"] <= 2 * line["least_flops"]


def run_kernels(*args):
    sizes = ["--rows=1", "--length=16", "--heads=2", "--rounds=1", "--direction=forward"]
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench", "kernels", *sizes, *args],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_what_runs_is_measured_beside_what_does_not():
    status, lines, told = run_kernels("--op=causal_attention", "--backend=cudnn", "--backend=xla")
    assert status == 1 and [line["backend"] for line in lines] == ["xla"]
    assert told == (
        "error: causal_attention cannot run with backend 'cudnn': it is written for a gpu "
        "('auto' takes one that can)\n"
    )


def test_a_named_backend_that_one_of_the_ops_has():
    status, lines, told = run_kernels(
        "--op=causal_attention", "--op=prefix_softmax", "--backend=scan"
    )
    assert status == 0 and told == ""
    assert [(line["op"], line["backend"]) for line in lines] == [
        ("causal_attention", "xla"), ("prefix_softmax", "scan")
    ]  # fmt: skip
    status, lines, told = run_kernels("--op=prefix_softmax", *["--backend=scan"] * 2)
    assert status == 0 and len(lines) == 1
    status, lines, told = run_kernels("--op=prefix_softmax", "--document=17")
    assert (
        status == 1 and told == "error: --document=17 is more than --length=16; 0 is whole rows\n"
    )
    status, lines, told = run_kernels("--op=causal_attention", "--backend=scan")
    assert status == 1 and not lines and told.startswith("error: unknown --backend 'scan'")


@pytest.mark.slow
def test_mixers_lines():
    args = ["--rows=1", "--length=16", "--width=16", "--heads=2", "--rounds=1", "--mixer=mlp"]
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench", "mixers", *args],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    standard, mlp = map(json.loads, done.stdout.splitlines())
    assert standard["mixer"] == "standard" and standard["ratio"] == standard["flops_ratio"] == 1
    assert mlp["mixer"] == "mlp" and mlp["ms"] > 0


def test_flash_linear_attention_needs_a_gpu():
    """Its packages are no requirement of ours."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench", "fla"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stderr.startswith("error: tools.bench fla: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "args, status, message",
    [([], 2, "usage: "), (["out"], 1, "error: JAX finds no GPU here: pip install")],
)
def test_the_check_of_a_gpu_needs_one(args, status, message, tmp_path):
    done = subprocess.run(
        [ROOT / "tools" / "gpu_check.sh", *args],
        cwd=tmp_path,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == status and done.stderr.startswith(message)
    assert len(done.stderr.splitlines()) == 1
