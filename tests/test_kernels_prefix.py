"""The prefix softmax at its edges: large scores, late maxima, long rows, one token at a time."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import Case, bind, inputs, with_gradients

from deconstruct import kernels
from deconstruct.kernels.reference import TOLERANCE

FORMS = ("tpu", "gpu", "blocked", "scan")
T, H, K = 100, 2, 8


def float64_gradients(s_TH, v_THK, do_THK):
    """(o, ds, dv) by loops over positions, from the equation."""
    s, v, do = (np.asarray(x, np.float64) for x in (s_TH, v_THK, do_THK))
    o, ds, dv = np.zeros_like(v), np.zeros_like(s), np.zeros_like(v)
    for h in range(s.shape[1]):
        for i in range(s.shape[0]):
            e = np.exp(s[: i + 1, h] - s[: i + 1, h].max())
            a = e / e.sum()
            o[i, h] = a @ v[: i + 1, h]
            da = v[: i + 1, h] @ do[i, h]
            ds[: i + 1, h] += a * (da - a @ da)
            dv[: i + 1, h] += a[:, None] * do[i, h]
    return o, ds, dv


def scores(kind):
    s = np.random.default_rng(1).normal(size=(T, H))
    return {
        "large": 1e4 * np.tanh(s),
        "all at the bound": 1e4 * np.sign(s),
        "rising late": np.where(np.arange(T)[:, None] == T - 3, 1e4, s),
        "rising": np.linspace(-1e4, 1e4, T)[:, None] + s,
        "falling": np.linspace(1e4, -1e4, T)[:, None] + s,
        "small steps far out": 1e4 + s,
        "scale 1": s,
        "scale 10": 10 * s,
        "scale 100": 100 * s,
        "scale 1000": 1000 * s,
    }[kind].astype(np.float32)


KINDS = (
    "large", "all at the bound", "rising late", "rising", "falling", "small steps far out",
    "scale 1", "scale 10", "scale 100", "scale 1000",
)  # fmt: skip


# A form, and whom it is traced for: `blocked` is another on accelerators.
TRACED = [*((backend, "cpu") for backend in FORMS), ("blocked", "gpu")]


@pytest.fixture(scope="module", params=itertools.product(TRACED, ("float32", "bfloat16")), ids=str)
def compiled(request):
    """(a form with its gradients, dtype of the values), compiled once for all scores."""
    (backend, platform), dtype = request.param
    run = with_gradients(bind("prefix_softmax", Case(T, H, H, K), backend))

    def traced(*arrays):
        with kernels.target_platform(platform):
            return run(*arrays)

    return traced, dtype


@pytest.mark.parametrize("kind", KINDS)
def test_given_scores_up_to_ten_thousand_against_float64(compiled, kind):
    """A log-sum-exp in place of (m, z) would be off by 4e-3 where scores lie close, far out.

    The score's gradient is a small difference of sums over the row: twice the usual tolerance.
    """
    run, dtype = compiled
    s = scores(kind)
    rng = np.random.default_rng(2)
    v, do = (jnp.asarray(rng.normal(size=(1, T, H, K)), dtype) for _ in range(2))
    got = run((jnp.asarray(s[None]), v), do)
    for g, w in zip(got, float64_gradients(s, v[0], do[0]), strict=True):
        assert np.all(np.isfinite(np.asarray(g, np.float32)))
        error = np.abs(np.asarray(g[0], np.float64) - w).max() / max(1, np.abs(w).max())
        assert error <= 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("backend", FORMS)
def test_long_row_of_ones_stays_one(backend):
    """A mean of ones is 1 at every one of 4,096 positions, whatever the scores."""
    s = jnp.asarray(np.random.default_rng(3).normal(size=(1, 4096, 1)) * 20, jnp.float32)
    o = jax.jit(lambda s, v: kernels.prefix_softmax(s, v, backend=backend))(
        s, jnp.ones((1, 4096, 1, 4))
    )
    assert np.abs(np.asarray(o) - 1).max() <= TOLERANCE["float32"]


@pytest.mark.parametrize("backend", FORMS)
def test_memory_is_linear_in_length(backend):
    """At 16,384 positions one map would take 1 GiB; a form takes a few times its values."""
    length, size = 16384, 64
    scores = jax.ShapeDtypeStruct((1, length, 1), jnp.float32)
    values = jax.ShapeDtypeStruct((1, length, 1, size), jnp.float32)
    run = with_gradients(bind("prefix_softmax", Case(length, 1, 1, size), backend))
    compiled = run.lower((scores, values), values).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * 4 * length * size


def test_steps_equal_the_whole():
    """One token at a time, two heads a group, from the state that a fresh row has."""
    case = Case(11, 4, 2, 8)
    (s, v), _ = inputs("prefix_softmax", case)
    state = kernels.prefix_state_init(s.shape[0], case.heads, case.key_size)
    step, steps = jax.jit(kernels.prefix_step), []
    for t in range(case.length):
        o, state = step(state, s[:, t], v[:, t])
        steps.append(o)
    whole = kernels.prefix_softmax(s, v, backend="reference")
    assert np.abs(np.stack(steps, 1) - np.asarray(whole)).max() <= TOLERANCE["float32"]
