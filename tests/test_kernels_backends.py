"""The table of backends: which one runs, what is refused, and that shapes are checked first."""

import dataclasses
import itertools
import logging
import subprocess
import sys

import devices
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from kernel_cases import OPS, Case, bind, inputs

from deconstruct import kernels
from deconstruct.kernels import backends, quadratic

CASE = Case(6, 4, 2, 8)


def call(op, backend="auto", **changed):
    """The op on small inputs, its arrays named q, k, v or s, v, with some of them replaced."""
    names = "sv" if op == "prefix_softmax" else "qkv"
    arrays = dict(zip(names, inputs(op, CASE)[0], strict=True)) | changed
    options = {"segments_BT": arrays.pop("segments")} if "segments" in arrays else {}
    return getattr(kernels, op)(*arrays.values(), backend=backend, **options)


@pytest.mark.parametrize("op", OPS)
def test_unknown_backend_names_the_nearest(op):
    with pytest.raises(ValueError, match=rf"unknown backend of {op} 'referense'.*'reference'"):
        call(op, "referense")


def table(monkeypatch, *entries):
    """An op's table of made-up backends: (name, refuses, advises against)."""
    made = tuple(
        backends.Backend(
            name,
            lambda *arrays, name=name: jnp.full((1,), len(name)),
            refuses=lambda call, refuses=refuses: refuses,
            advises_against=lambda call, against=against: against,
        )
        for name, refuses, against in entries
    )
    monkeypatch.setitem(kernels.BACKENDS, "causal_attention", made)


def test_auto_takes_the_first_that_has_no_reason_against(monkeypatch, caplog):
    table(
        monkeypatch, ("a", "no such chip", None), ("bb", None, "slower here"), ("ccc", None, None)
    )
    with caplog.at_level(logging.DEBUG, logger=backends.__name__):
        assert call("causal_attention") == 3
        assert call("causal_attention") == 3
    (line,) = caplog.messages  # once for this kind of call
    assert "a (no such chip)" in line and "bb (slower here)" in line


def test_choices_are_told_to_who_watches(monkeypatch):
    table(monkeypatch, ("a", "no such chip", None), ("bb", None, None))
    call("causal_attention")
    with kernels.watch_choices() as chosen:
        assert call("causal_attention") == 2 and chosen == {"causal_attention": {"bb"}}
    call("causal_attention")


def test_a_backend_is_asked_about_one_devices_share(monkeypatch):
    """What fits into a device's memory depends on its own heads, not on those of the mesh."""
    asked = []

    def refuses(call):
        asked.append((call.batch_size, call.num_heads, call.num_groups))

    made = backends.Backend("a", lambda q, k, v: v, refuses=refuses)
    monkeypatch.setitem(kernels.BACKENDS, "causal_attention", (made,))
    mesh = AbstractMesh((2, 2, 2), ("data", "fsdp", "tensor"))
    with jax.sharding.use_abstract_mesh(mesh):
        for batch, groups in ((8, 2), (6, 2), (8, 1)):
            shape = batch, 4, groups, 8
            keys = jax.ShapeDtypeStruct(shape, jnp.float32)
            queries = jax.ShapeDtypeStruct((batch, 4, 4, 8), jnp.float32)
            jax.eval_shape(kernels.causal_attention, queries, keys, keys)
    assert asked == [(2, 2, 1), (6, 2, 1), (2, 4, 1)]


def test_named_backend_runs_against_advice_but_not_when_it_cannot(monkeypatch):
    table(monkeypatch, ("a", "no such chip", None), ("bb", None, "slower here"))
    assert call("causal_attention", "bb") == 2
    with pytest.raises(ValueError, match="causal_attention cannot run with backend 'a': no such"):
        call("causal_attention", "a")
    table(monkeypatch, ("a", "no such chip", None))
    with pytest.raises(ValueError, match=r"no backend of causal_attention.*a \(no such chip\)"):
        call("causal_attention")


# What "auto" takes of short rows.
AUTO = {
    "cpu": {
        "causal_attention": "xla",
        "taylor_attention": "quadratic",
        "prefix_softmax": "blocked",
        "fixed_map_attention": "blocked",
    }
}
AUTO["gpu"] = AUTO["cpu"]
AUTO["tpu"] = {**AUTO["cpu"], "prefix_softmax": "tpu", "taylor_attention": "tpu"}  # of float32


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("platform", AUTO)
def test_what_auto_takes(op, platform):
    arrays, _ = inputs(op, CASE)
    with kernels.target_platform(platform):
        auto, named = (
            str(jax.make_jaxpr(bind(op, CASE, backend))(*arrays))
            for backend in ("auto", AUTO[platform][op])
        )
    assert auto == named


def test_a_tpus_kernel_says_what_it_cannot_do():
    (s, v), _ = inputs("prefix_softmax", CASE)
    with kernels.target_platform("gpu"), pytest.raises(ValueError, match=r"'tpu': .* for a tpu"):
        kernels.prefix_softmax(s, v, backend="tpu")
    wide = jnp.zeros((2, 6, 2, 50_000))
    with pytest.raises(ValueError, match=r"128 positions of all heads take .* more than"):
        kernels.prefix_softmax(s, wide, backend="tpu")
    with pytest.raises(ValueError, match=r"sums of a group and 128 of its positions take .* more"):
        call("taylor_attention", "tpu_chunked", v=jnp.zeros((2, 6, 2, 50_000)))


def test_auto_takes_splash_attention_of_bfloat16_on_a_tpu():
    case = dataclasses.replace(CASE, dtype="bfloat16")
    arrays, _ = inputs("causal_attention", case)
    with kernels.target_platform("tpu"):
        auto, named = (
            str(jax.make_jaxpr(bind("causal_attention", case, backend))(*arrays))
            for backend in ("auto", "splash")
        )
        with pytest.raises(ValueError, match=r"'splash': .* round float32 to bfloat16"):
            call("causal_attention", "splash")
    assert auto == named


def test_cudnn_waits_for_a_gpu():
    reason = "no GPU has confirmed it"
    (cudnn,) = (b for b in kernels.BACKENDS["causal_attention"] if b.name == "cudnn")
    on_gpu = backends.Call("causal_attention", "gpu", 2, 6, 4, 2, 64, 64, jnp.bfloat16, False)
    assert cudnn.refusal(on_gpu) is None and reason in cudnn.reservation(on_gpu)
    assert "no float32" in cudnn.refusal(on_gpu._replace(dtype=jnp.dtype("float32")))
    assert "no documents" in cudnn.refusal(on_gpu._replace(isolates_documents=True))
    assert "multiple of 8 up to 128" in cudnn.refusal(on_gpu._replace(key_size=60, value_size=60))
    with pytest.raises(ValueError, match="'cudnn': it is written for a gpu"):
        call("causal_attention", "cudnn")


@pytest.mark.parametrize(
    "op, name",
    [("taylor_attention", "gpu"), ("taylor_attention", "gpu_chunked"), ("prefix_softmax", "gpu")],
)
def test_a_gpus_kernel_waits_for_a_gpu(op, name):
    (gpu,) = (b for b in kernels.BACKENDS[op] if b.name == name)
    on_gpu = backends.Call(op, "gpu", 2, 6, 4, 2, 64, 64, jnp.dtype("float32"), True)
    long = on_gpu._replace(length=1 if name == "gpu" else 100_000)
    assert gpu.refusal(long) is None and "no GPU has confirmed it" in gpu.reservation(long)
    assert "heads of up to" in gpu.refusal(on_gpu._replace(value_size=257))


def test_a_backend_that_jax_cannot_import_is_passed_over(monkeypatch, caplog):
    """The plain form stays; a name that moved is told with the version of JAX."""
    moved = backends.Backend("new", module="no_such_module", platform="cpu")
    plain = backends.Backend("plain", lambda *arrays: jnp.zeros(7))
    monkeypatch.setitem(kernels.BACKENDS, "causal_attention", (moved, plain))
    with caplog.at_level(logging.DEBUG, logger=backends.__name__):
        assert call("causal_attention").shape == (7,)
    assert f"JAX {jax.__version__} has not all" in caplog.text


def test_a_cpu_imports_no_pallas():
    program = """
import sys, jax.numpy as jnp
from deconstruct import kernels
x = jnp.ones((1, 4, 2, 8))
kernels.causal_attention(x, x, x), kernels.prefix_softmax(x[..., 0], x)
sys.exit(any(name.startswith("jax.experimental.pallas") for name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], env=devices.environment(1))
    assert done.returncode == 0


def zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


THREE_GROUPS = {"k": zeros(2, 6, 3, 8), "v": zeros(2, 6, 3, 8)}
WRONG = [
    ("causal_attention", {"k": zeros(2, 6, 2, 9)}, r"k has .* expected \(2, 6, any, 8\)"),
    ("causal_attention", {"v": zeros(2, 6, 1, 8)}, r"v has .* expected \(2, 6, 2, any\)"),
    ("causal_attention", THREE_GROUPS, "3 key/value groups do not divide 4 heads"),
    ("causal_attention", {"segments": zeros(2, 6)}, "segments must be integers, not float32"),
    ("taylor_attention", {"k": zeros(2, 6, 2, 9)}, r"k has .* expected \(2, 6, any, 8\)"),
    ("taylor_attention", THREE_GROUPS, "3 key/value groups do not divide 4 heads"),
    ("prefix_softmax", {"v": zeros(2, 5, 2, 8)}, r"v has .* expected \(2, 6, any, any\)"),
    ("prefix_softmax", {"v": zeros(2, 6, 3, 8)}, "3 key/value groups do not divide 4 heads"),
    ("prefix_softmax", {"segments": zeros(2, 5, dtype=jnp.int32)}, "segments has shape"),
    ("fixed_map_attention", {"v": zeros(2, 7, 2, 8)}, "holds 6 positions and cannot serve 7"),
    ("fixed_map_attention", {"v": zeros(6, 2, 8)}, r"v has .* expected \(any, any, any, any\)"),
    ("prefix_softmax", {"s": zeros(2, 6)}, r"scores has .* expected \(any, any, any\)"),
    ("causal_attention", {"q": zeros(6, 4, 8)}, "q has shape"),
    (
        "taylor_attention",
        {"q": zeros(2, 6, 4, 8, dtype=jnp.bfloat16)},
        "arrays of bfloat16, float32",
    ),
    ("prefix_softmax", {"v": zeros(2, 6, 2, 8, dtype=jnp.float16)}, "arrays of float32, float16"),
    ("prefix_softmax", {"s": zeros(0, 6, 4), "v": zeros(0, 6, 2, 8)}, "nothing to attend to"),
    ("fixed_map_attention", {"k": zeros(6, 1, 8)}, r"k has .* expected \(6, 2, 8\)"),
]


@pytest.mark.parametrize("op, changed, message", WRONG)
def test_wrong_shapes_are_refused(op, changed, message):
    with pytest.raises(ValueError, match=f"^{op}: .*{message}"):
        call(op, **changed)


def test_fixed_map_serves_fewer_positions_than_its_stream():
    """The first positions of a longer stream are all that counts."""
    (q, k, v), _ = inputs("fixed_map_attention", CASE)
    short = kernels.fixed_map_attention(q, k, v[:, :4])
    assert jnp.allclose(short, kernels.fixed_map_attention(q, k, v)[:, :4], atol=1e-6)


@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 500, 1024, 1025, 2048, 2049, 5000, 16384])
def test_spans_cover_the_rows_once_and_few_are_unrolled(length):
    spans = quadratic.spans(length)
    assert spans[0].start == 0 and spans[-1].stop == length and len(spans) <= 9
    for span, after in itertools.pairwise(spans):
        assert span.stop == after.start
    assert all((s.stop - s.start) % s.rows == 0 and s.rows <= 256 for s in spans)
