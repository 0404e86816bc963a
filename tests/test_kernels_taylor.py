"""Taylor attention: one function in all its forms, at any scale, and which form is taken when."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import Case, assert_near, bind, inputs, segments, with_gradients

from deconstruct import kernels, tuning
from deconstruct.kernels import (
    backends,
    taylor,
    taylor_chunks_gpu,
    taylor_chunks_tpu,
    taylor_recurrence,
    taylor_state_gpu,
)
from deconstruct.kernels.documents import document_runs
from deconstruct.kernels.reference import CANCELLATION, TOLERANCE

OP = "taylor_attention"
BACKENDS = ("tpu", "tpu_chunked", "gpu", "gpu_chunked", "quadratic", "chunked")
SMALL = Case(50, 4, 2, 16)


def chunked(size):
    return functools.partial(taylor_recurrence.chunked, chunk_length=size)


def tpu_chunked(size):
    return functools.partial(taylor_chunks_tpu.run, chunks=(size,))


def gpu_chunked(size):
    return functools.partial(taylor_chunks_gpu.run, longest=size)


def stepwise(q, k, v):
    """The recurrence with its state carried from token to token."""
    batch, _, groups, key_size = k.shape
    state = kernels.taylor_state_init(batch, groups, key_size, v.shape[-1])

    def step(state, qkv):
        o, state = kernels.taylor_step(state, *qkv)
        return state, o

    _, o = jax.lax.scan(step, state, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (q, k, v)))
    return jnp.swapaxes(o, 0, 1)


FORMS = {
    "reference": taylor.reference,
    "quadratic": taylor.quadratic,
    "steps": stepwise,
    **{f"chunks of {size}": chunked(size) for size in (1, 7, 16, 64)},
    "a TPU's chunks of 16": tpu_chunked(16),
    "a GPU's chunks of 16": gpu_chunked(16),
}


@pytest.fixture(scope="module")
def results():
    return {name: with_gradients(form)(*inputs(OP, SMALL)) for name, form in FORMS.items()}


@pytest.mark.parametrize("first, second", list(itertools.combinations(FORMS, 2)))
def test_all_pairs_of_forms_agree(first, second, results):
    """The step's gradient is JAX's own, the chunks' and the quadratic form's are ours."""
    assert_near(results[first], results[second], TOLERANCE["float32"])


@pytest.mark.parametrize("form", [chunked(7), chunked(16), tpu_chunked(16), gpu_chunked(16)])
def test_documents_that_end_in_any_chunk(form):
    """Documents within a chunk, over several, and that begin or end where a chunk does."""
    case = Case(50, 4, 2, 16, documents=(3, 4, 7, 2, 20, 1, 13))
    arrays, do = inputs(OP, case)
    run = functools.partial(form, runs_BT=document_runs(segments(case)))
    reference = with_gradients(bind(OP, case, "reference"))(arrays, do)
    assert_near(with_gradients(run)(arrays, do), reference, TOLERANCE["float32"])


def test_a_tpus_chunks_of_several_tiles_pass_their_state_on():
    """A chunk of 256 lies in two tiles of 128; its state serves heads of 20 by values of 12."""
    case = Case(500, 4, 2, 20, documents=(250, 7, 120, 123), value_size=12)
    arrays, do = inputs(OP, case)
    run = functools.partial(tpu_chunked(256), runs_BT=document_runs(segments(case)))
    reference = with_gradients(bind(OP, case, "reference"))(arrays, do)
    assert_near(with_gradients(run)(arrays, do), reference, TOLERANCE["float32"])


@pytest.mark.parametrize(
    "key_size, most", [(16, 1.9), (20, 3.7), (64, 1.24), (80, 1.2), (128, 1.12)]
)
def test_a_gpus_state_holds_a_pair_of_entries_once(key_size, most):
    """But for those of one tile; in times K (K + 1) / 2."""
    pairs = taylor_state_gpu.Pairs(key_size)
    rows = np.stack([np.asarray(pairs.rows(i))[:key_size] for i in range(key_size)])
    np.testing.assert_array_equal(rows, rows.T)
    assert len(np.unique(rows)) == key_size * (key_size + 1) // 2
    assert rows.max() < pairs.count < most * key_size * (key_size + 1) / 2
    first, tile = pairs.of(rows)
    i, j = np.indices(rows.shape)
    np.testing.assert_array_equal(first, np.minimum(i, j))
    np.testing.assert_array_equal(tile, np.maximum(i, j) // pairs.TILE)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_gpus_chunks_of_several_blocks_pass_their_state_on(dtype):
    """A program goes through a chunk of 128 in several blocks; heads of 20 by values of 12 fill
    theirs in part, and the last chunk is not full."""
    documents = (100, 7, 140, 43)
    case = Case(290, 2, 1, 20, documents=documents, dtype=dtype, value_size=12)
    arrays, do = inputs(OP, case)
    run = functools.partial(gpu_chunked(128), runs_BT=document_runs(segments(case)))
    reference = with_gradients(bind(OP, case, "reference"))(arrays, do)
    assert_near(with_gradients(run)(arrays, do), reference, TOLERANCE[dtype])


def test_a_gpus_chunks_are_whole_blocks():
    def cut(length, longest=2048):
        _, size, chunks = taylor_chunks_gpu._cut(longest, length)
        assert size * (chunks - 1) < length <= size * chunks
        return size, chunks

    assert [cut(n) for n in (1, 40, 2048)] == [(16, 1), (64, 1), (2048, 1)]
    assert [cut(n) for n in (2049, 5000, 16384)] == [(1152, 2), (1792, 3), (2048, 8)]
    assert cut(50, 16) == (16, 4)


def test_forms_are_different_programs():
    arrays, _ = inputs(OP, SMALL)
    texts = {str(jax.make_jaxpr(form)(*arrays)) for form in FORMS.values()}
    assert len(texts) == len(FORMS)


def test_features_make_the_weight():
    x = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32)
    phi = taylor_recurrence.features(jnp.asarray(x))
    assert phi.shape == (2, taylor_recurrence.num_features(5), 3) == (2, 21, 3)
    dot = np.einsum("bks,bkt->bst", x, x)
    assert np.allclose(np.einsum("bfs,bft->bst", phi, phi), 1 + dot + dot**2 / 2, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scale_may_sit_on_either_side(backend):
    """Only q.k counts: a factor on q equals the same on k, and the square root on both."""
    (q, k, v), _ = inputs(OP, SMALL)
    run = jax.jit(bind(OP, SMALL, backend))
    wanted = run(9.0 * q, k, v)
    for other in (run(q, 9.0 * k, v), run(3.0 * q, 3.0 * k, v)):
        assert_near([other], [wanted], 4 * TOLERANCE["float32"])


def float64_gradients(q, k, v, do):
    """(o, dq, dk, dv) of one row and head, by loops over positions, from the equation."""
    q, k, v, do = (np.asarray(x, np.float64) for x in (q, k, v, do))
    o, dq, dk, dv = np.zeros_like(v), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    scale = q.shape[-1] ** -0.5
    for i in range(len(q)):
        x = k[: i + 1] @ q[i] * scale
        w = 1 + x + x**2 / 2
        a = w / w.sum()
        o[i] = a @ v[: i + 1]
        da = v[: i + 1] @ do[i]
        dx = (da - a @ da) / w.sum() * (1 + x) * scale
        dq[i] = dx @ k[: i + 1]
        dk[: i + 1] += dx[:, None] * q[i]
        dv[: i + 1] += a[:, None] * do[i]
    return o, dq, dk, dv


RECURRENCES = {
    "chunked": chunked(16),
    "tpu_chunked": tpu_chunked(16),
    "gpu_chunked": gpu_chunked(16),
}
# Of float32, where one key is far larger.
CANCELLED = {"chunked": 2e-3, "tpu_chunked": 1e-2, "gpu_chunked": 1e-2}
ROUNDED = ("tpu_chunked", "gpu_chunked")  # their products' operands, of bfloat16


@pytest.fixture(
    scope="module",
    params=[(b, d) for b in BACKENDS for d in TOLERANCE],
    ids="-".join,
)
def compiled(request):
    backend, dtype = request.param
    form = RECURRENCES.get(backend) or bind(OP, Case(60, 1, 1, 16), backend)
    return with_gradients(form), backend, dtype


@pytest.mark.parametrize("scale", [1, 10, 100, 1000, "outlier"])
def test_any_scale_against_float64(compiled, scale):
    """x^2 at scale 1000 is 10^13. Where one key is far larger than the others, the features of a
    recurrence cancel, and what is left of its error is stated with each of them."""
    run, backend, dtype = compiled
    rng = np.random.default_rng(4)
    q, k, v, do = (rng.normal(size=(60, 16)) for _ in range(4))
    if scale == "outlier":
        # In bfloat16 the output's own rounding is a part of d loss / d score, which such a key
        # multiplies; and recurrences round their features.
        k[20] *= 10 if dtype == "bfloat16" else 1000
    else:
        q, k = scale * q, scale * k
    q, k, v, do = (jnp.asarray(x[None, :, None], dtype) for x in (q, k, v, do))
    got = run((q, k, v), do)
    cancels = backend in CANCELLED and (scale, dtype) == ("outlier", "float32")
    tolerance = CANCELLED[backend] if cancels else TOLERANCE[dtype]
    wanted = float64_gradients(*(x[0, :, 0] for x in (q, k, v, do)))
    for g, w in zip(got, wanted, strict=True):
        g = np.asarray(g[0, :, 0], np.float64)
        assert np.all(np.isfinite(g))
        assert np.abs(g - w).max() / np.abs(w).max() <= tolerance


def orthogonal(rng, scale):
    """q, k, v and do of a row whose queries are at right angles to all of its keys."""
    q, k, v, do = (rng.normal(size=(60, 16)) for _ in range(4))
    q[:, :8] = k[:, 8:] = 0
    turn = np.linalg.qr(rng.normal(size=(16, 16)))[0]
    return scale * q @ turn, scale * k @ turn, v, do


def with_a_long_key(rng, scale):
    q, k, v, do = (rng.normal(size=(60, 16)) for _ in range(4))
    k[20] *= scale
    return q, k, v, do


def assert_as_near_as_cancellation_lets(form, rows, dtype, factor):
    """Each row within `factor` times its largest mean of |q|^2 |k|^2 / K over a query's keys."""
    arrays = [jnp.asarray(np.stack(x)[:, :, None], dtype) for x in zip(*rows, strict=True)]
    got = with_gradients(form)(tuple(arrays[:3]), arrays[3])
    for row in range(len(rows)):
        q, k, v, do = (np.asarray(x[row, :, 0], np.float64) for x in arrays)
        of_q, of_k = (np.sum(x**2, axis=1) for x in (q, k))
        means = of_q * np.cumsum(of_k) / np.arange(1, len(k) + 1) / k.shape[1]
        tolerance = max(TOLERANCE[dtype], factor * means.max())
        for index, wanted in enumerate(float64_gradients(q, k, v, do)):
            found = np.asarray(got[index][row, :, 0], np.float64)
            error = np.abs(found - wanted).max() / np.abs(wanted).max()
            assert error <= tolerance, f"row {row}, array {index}: {error:.2e} > {tolerance:.0e}"


@pytest.mark.parametrize("name", [*RECURRENCES, "steps"])
def test_long_queries_at_right_angles_to_long_keys(name):
    """At scale 100 what a form reads as a sum of weights, all of them 1, may be near 0 or below: in
    each form it is in one of these rows, and there the floor holds it."""
    rng = np.random.default_rng(2)
    rows = [orthogonal(rng, scale) for scale in (10, 30, *[100] * 8)]
    form, kind = (stepwise, "steps") if name == "steps" else (RECURRENCES[name], "float32")
    assert_as_near_as_cancellation_lets(form, rows, "float32", CANCELLATION[kind])


@pytest.mark.parametrize("name", ROUNDED)
def test_cancellation_where_products_are_of_bfloat16(name):
    rng = np.random.default_rng(4)
    rows = [with_a_long_key(rng, scale) for scale in (10, 20, 30)]
    rows += [orthogonal(rng, scale) for scale in (1, 2, 3)]
    form = RECURRENCES[name]
    assert_as_near_as_cancellation_lets(form, rows, "bfloat16", CANCELLATION["bfloat16"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_row_of_ones_stays_one(backend):
    """Sums over 4,096 keys; the whole row is one document."""
    rng = np.random.default_rng(5)
    q, k = (jnp.asarray(rng.normal(size=(1, 4096, 1, 16)), jnp.float32) for _ in range(2))
    o = jax.jit(bind(OP, SMALL, backend))(q, k, jnp.ones((1, 4096, 1, 4)))
    assert np.abs(np.asarray(o) - 1).max() <= TOLERANCE["float32"]


@pytest.mark.parametrize("backend", RECURRENCES)
def test_memory_of_the_recurrence_is_linear_in_length(backend):
    """At 16,384 positions one map would take 1 GiB; a GPU's recurrence keeps 7 states of 16 KiB,
    the others none."""
    length, size = 16384, 16
    array = jax.ShapeDtypeStruct((1, length, 1, size), jnp.float32)
    run = with_gradients(bind(OP, Case(length, 1, 1, size), backend))
    compiled = run.lower((array,) * 3, array).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 48 * 4 * length * size


def test_crossover_is_where_flops_meet():
    assert kernels.crossover(8, 8, 64, 64) == 4358
    assert kernels.crossover(8, 8, 128, 128) == 16902
    assert kernels.crossover(8, 2, 64, 64) < 4358  # the state is written once a group
    below, above = (kernels.taylor_flops(n, 8, 8, 64) for n in (4357, 4358))
    assert below == 4 * 4357**2 * 8 * 64 and above == 2 * 4358 * 2145 * 65 * 16


FORMS_OF = {"cpu": ("quadratic", "chunked"), "tpu": ("tpu", "tpu_chunked")}


@pytest.mark.parametrize("platform", FORMS_OF)
@pytest.mark.parametrize("beyond", [0, -1])
def test_auto_takes_the_form_of_fewer_flops(platform, beyond):
    cost = tuning.of(platform).recurrence_cost
    start = math.ceil(kernels.crossover(1, 1, 16, 16) * cost)
    case = Case(start + beyond, 1, 1, 16)
    arrays, _ = inputs(OP, case)
    scores, recurrence = FORMS_OF[platform]
    form, another = (scores, recurrence) if beyond else (recurrence, scores)
    with kernels.target_platform(platform):
        auto, named, other = (
            str(jax.make_jaxpr(bind(OP, case, backend))(*arrays))
            for backend in ("auto", form, another)
        )
    assert auto == named != other


@pytest.mark.parametrize(
    "heads, size, beyond, form",
    [
        (256, 64, -1, "quadratic"),  # of so many heads a tile is too large; not of one group
        (256, 64, 0, "tpu_chunked"),
        (8, 256, -1, "tpu"),
        (8, 256, 0, "chunked"),  # the state is too large
    ],
)
def test_auto_where_a_tpus_kernel_is_too_large(heads, size, beyond, form):
    length = kernels.crossover(heads, heads, size, size) + beyond
    call = backends.Call(
        OP, "tpu", 1, length, heads, heads, size, size, jnp.dtype("bfloat16"), False
    )
    assert backends.choose(kernels.BACKENDS[OP], call, "auto").name == form
