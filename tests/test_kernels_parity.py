"""Every form of every op equals its reference, in outputs and all gradients (K1, K2, K3)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from kernel_cases import (
    DTYPES,
    FORMS,
    LIGHTLY_OPTIMISED,
    OPS,
    QUICKLY,
    Case,
    assert_near,
    bind,
    covering_cases,
    every_case,
    inputs,
    with_gradients,
)

from deconstruct import kernels, tuning
from deconstruct.kernels import prefix_gpu, quadratic, taylor_chunks_gpu
from deconstruct.kernels.backends import Backend
from deconstruct.kernels.documents import document_runs
from deconstruct.kernels.reference import TOLERANCE
from tools.kernel_calls import takes_documents


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """A GPU's recurrence goes through several chunks of the longest cases; see `LONGEST` there."""
    of_512 = functools.partial(taylor_chunks_gpu.run, longest=512)
    monkeypatch.setattr(taylor_chunks_gpu, "run", of_512)


@pytest.fixture(scope="module")
def wanted():
    """References, each made once."""
    made = {}

    def get(op, case):
        if (op, case) not in made:
            made[op, case] = with_gradients(bind(op, case, "reference"))(*inputs(op, case))
        return made[op, case]

    return get


def forms_and(cases):
    """(op, backend, case), each once; an op that knows no documents takes whole rows alone."""
    return [
        (op, backend, case)
        for op, backend in FORMS
        for case in (
            cases
            if takes_documents(op)
            else dict.fromkeys(dataclasses.replace(case, documents=None) for case in cases)
        )
    ]


@pytest.mark.parametrize("op, backend, case", forms_and(covering_cases()), ids=str)
def test_form_equals_reference(op, backend, case, wanted):
    has_chunks = backend == "gpu_chunked" and case.length > 512
    options = LIGHTLY_OPTIMISED if has_chunks else QUICKLY
    got = with_gradients(bind(op, case, backend), options)(*inputs(op, case))
    assert_near(got, wanted(op, case), TOLERANCE[case.dtype])


@pytest.mark.every_case
@pytest.mark.parametrize("op, backend, case", forms_and(every_case()), ids=str)
def test_form_equals_reference_in_every_case(op, backend, case):
    """The product of which the cases above are a covering part; hours."""
    arrays = inputs(op, case)
    got, wanted = (with_gradients(bind(op, case, name))(*arrays) for name in (backend, "reference"))
    assert_near(got, wanted, TOLERANCE[case.dtype])


def test_what_hangs_over_the_end_is_nan_where_kernels_are_interpreted():
    """So the cases above, whose last blocks hang over, see what their slack would do."""

    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.full_like(o_ref, jnp.isnan(x_ref[...]).sum())

    block = pl.BlockSpec((8,), lambda i: (i,))
    shape = jax.ShapeDtypeStruct((13,), jnp.float32)
    counts = pl.pallas_call(
        kernel, grid=(2,), in_specs=[block], out_specs=block, out_shape=shape, interpret=True
    )(jnp.zeros(13))
    assert counts.tolist() == [0] * 8 + [3] * 5


@pytest.mark.parametrize("op, backend", FORMS)
def test_form_takes_another_path_than_the_reference(op, backend):
    """A form has its own backward; the reference holds all scores and leaves it to JAX."""
    case = Case(40, 2, 2, 16)
    arrays, _ = inputs(op, case)
    form = str(jax.make_jaxpr(bind(op, case, backend))(*arrays))
    reference = str(jax.make_jaxpr(bind(op, case, "reference"))(*arrays))
    assert "custom_vjp_call" in form and "custom_vjp_call" not in reference


@pytest.mark.parametrize("op", OPS)
def test_forms_of_one_op_take_different_paths(op):
    case = Case(40, 2, 2, 16)
    arrays, _ = inputs(op, case)
    names = [backend for of, backend in FORMS if of == op]
    programs = {str(jax.make_jaxpr(bind(op, case, name))(*arrays)) for name in names}
    assert len(programs) == len(names) > 1


# These forms are traced otherwise for accelerators; a CPU can run that too. The recurrence's chunks
# hold 512 positions there, the prefix softmax's blocks 128.
FOR_ACCELERATORS = [
    ("taylor_attention", "chunked", Case(1100, 2, 1, 16, documents=(511, 1, 1, 587))),
    ("taylor_attention", "chunked", Case(1100, 4, 2, 32, dtype="bfloat16", value_size=24)),
    *(("prefix_softmax", "blocked", case) for case in covering_cases()),
]


@pytest.mark.parametrize("op, backend, case", FOR_ACCELERATORS, ids=str)
def test_trace_for_accelerators_equals_reference(op, backend, case, wanted):
    arrays, do = inputs(op, case)
    on_cpu = str(jax.make_jaxpr(bind(op, case, backend))(*arrays))
    with kernels.target_platform("tpu"):
        assert str(jax.make_jaxpr(bind(op, case, backend))(*arrays)) != on_cpu
        got = with_gradients(bind(op, case, backend))(arrays, do)
    assert_near(got, wanted(op, case), TOLERANCE[case.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_a_backend_meets_what_the_op_was_given(op, dtype, monkeypatch):
    """So bfloat16 cases are calls with bfloat16: an op turns nothing to float32."""
    met = []
    made = Backend("a", lambda *arrays: met.extend(x.dtype for x in arrays) or arrays[-1])
    monkeypatch.setitem(kernels.BACKENDS, op, (made,))
    case = Case(6, 2, 2, 8, dtype=dtype)
    arrays, _ = inputs(op, case)
    bind(op, case, "a")(*arrays)
    assert met == [x.dtype for x in arrays] and met[-1] == dtype


def test_every_rounding_is_made():
    """XLA may leave out one whose result is float32 again, as before a CPU's product."""
    x = jnp.float32(1 + 2**-10)
    rounded, _ = with_gradients(lambda x: x.astype("bfloat16").astype("float32"))((x,), x)
    assert rounded == 1


def test_a_gpus_walk_is_cut_into_spans_where_heads_are_few():
    def spans(batch, length, heads):
        s = jax.ShapeDtypeStruct((batch, length, heads), jnp.float32)
        v = jax.ShapeDtypeStruct((batch, length, heads, 64), jnp.bfloat16)
        plan = prefix_gpu._plan(s, v)
        span = plan.tiles * plan.tile
        assert span * (plan.spans - 1) < length <= span * plan.spans
        return plan.spans

    assert [spans(rows, 2048, 8) for rows in (1, 8, 32, 64, 1000)] == [16, 8, 2, 1, 1]
    assert [spans(8, length, 8) for length in (1, 128, 129, 500, 65536)] == [1, 1, 2, 4, 8]
    assert spans(1, 65536, 1) == 64


@pytest.mark.parametrize("op, backend", [form for form in FORMS if form[1] in ("xla", "quadratic")])
def test_long_rows_are_scanned_in_blocks(op, backend, monkeypatch):
    """Past 2048 positions a span takes several blocks and a ragged rest; here with blocks of 4."""
    of_four = tuning.CPU._replace(attention_rows=((None, 4),))
    monkeypatch.setattr(tuning, "of", lambda platform: of_four)
    monkeypatch.setattr(quadratic, "MAX_SPANS", 2)
    assert [s.stop - s.start > s.rows for s in quadratic.spans(45)] == [True, True, False]
    case = Case(45, 4, 2, 16, documents=(3, 1, 4, 13, 24))
    arrays, do = inputs(op, case)
    assert "scan" in str(jax.make_jaxpr(bind(op, case, backend))(*arrays))
    got = with_gradients(bind(op, case, backend))(arrays, do)
    reference = with_gradients(bind(op, case, "reference"))(arrays, do)
    assert_near(got, reference, TOLERANCE[case.dtype])


@pytest.mark.parametrize("op, backend", FORMS)
def test_form_under_remat_and_scan(op, backend):
    """Two layers in a rematerialised scan give the gradients of two calls in a row."""
    case = Case(24, 2, 2, 16)
    arrays, do = inputs(op, case)
    function = bind(op, case, backend)

    def layer(v, _):
        return v + function(*arrays[:-1], v), None

    def looped(v):
        return layer(layer(v, None)[0], None)[0]

    def scanned(v):
        return jax.lax.scan(jax.checkpoint(layer), v, None, length=2)[0]

    got, wanted = (with_gradients(f)((arrays[-1],), do) for f in (scanned, looped))
    assert_near(got, wanted, TOLERANCE[case.dtype])


def test_documents_are_runs_of_equal_ids():
    """Ids that come back, or that are negative or 0, name another document."""
    ids = jnp.asarray([[1, 2, 1, 1, 0, -5, -5]])
    assert document_runs(ids).tolist() == [[0, 1, 2, 2, 3, 4, 4]]


@pytest.mark.parametrize("op, backend", [form for form in FORMS if takes_documents(form[0])])
def test_packed_documents_equal_each_alone(op, backend):
    """Outputs and gradients; documents of length 1 among them."""
    lengths = (1, 1, 9, 1)
    case = Case(sum(lengths), 2, 1, 16, documents=lengths)
    arrays, do = inputs(op, case)
    got = with_gradients(bind(op, case, backend))(arrays, do)
    alone = with_gradients(bind(op, Case(0, 2, 1, 16), "reference"))
    stops = np.cumsum(lengths)
    pieces = [
        alone(tuple(x[:1, b - n : b] for x in arrays), do[:1, b - n : b])
        for n, b in zip(lengths, stops, strict=True)
    ]
    joined = [jnp.concatenate(arrays, axis=1) for arrays in zip(*pieces, strict=True)]
    assert_near([x[:1] for x in got], joined, TOLERANCE[case.dtype])


@pytest.mark.parametrize("op, backend", [form for form in FORMS if takes_documents(form[0])])
def test_documents_of_any_lengths(op, backend):
    """Drawn at random, the same draw every time: no form knows only where blocks end."""
    draw = np.random.default_rng(0)
    length = int(draw.integers(129, 300))
    cuts = np.unique(draw.integers(1, length, draw.integers(2, 12)))
    documents = tuple(int(n) for n in np.diff([0, *cuts, length]))
    case = Case(length, 2, 1, 16, documents=documents)
    arrays, do = inputs(op, case)
    got, wanted = (with_gradients(bind(op, case, x))(arrays, do) for x in (backend, "reference"))
    assert_near(got, wanted, TOLERANCE[case.dtype])
