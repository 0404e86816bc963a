"""Softmax attention, causal and of fixed maps, at scores of any size (N3)."""

import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import Case, bind, with_gradients

from deconstruct import kernels
from deconstruct.kernels.reference import TOLERANCE

T, H, G, K = 60, 2, 1, 16
BATCH = 2
OPS = ("causal_attention", "fixed_map_attention")
# Float32 scores of 10^4 are themselves rounded by up to 5e-4, and so is the weight of either of two
# keys that lie close; the seed's closest pair leaves 5e-5.
ROUNDED_SCORES_TOLERANCE = 2e-4
FORMS = [
    (op, backend.name)
    for op in OPS
    for backend in kernels.BACKENDS[op]
    if backend.platform is None or backend.interpreted
]


def float64_gradients(q, k, v, do):
    """(o, dq, dk, dv) of one row and head, by loops over positions, from the equation."""
    o, dq, dk, dv = np.zeros_like(v), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    scale = q.shape[-1] ** -0.5
    for i in range(len(q)):
        x = k[: i + 1] @ q[i] * scale
        e = np.exp(x - x.max())
        a = e / e.sum()
        o[i] = a @ v[: i + 1]
        da = v[: i + 1] @ do[i]
        dx = a * (da - a @ da) * scale
        dq[i] = dx @ k[: i + 1]
        dk[: i + 1] += dx[:, None] * q[i]
        dv[: i + 1] += a[:, None] * do[i]
    return o, dq, dk, dv


def whole_gradients(q_BTHK, k_BTGK, v_BTGK, do_BTHK):
    """The same of all rows; both heads share the one group."""
    found = [np.zeros_like(x) for x in (do_BTHK, q_BTHK, k_BTGK, v_BTGK)]
    for b in range(BATCH):
        for h in range(H):
            o, dq, dk, dv = float64_gradients(
                q_BTHK[b, :, h], k_BTGK[b, :, 0], v_BTGK[b, :, 0], do_BTHK[b, :, h]
            )
            found[0][b, :, h], found[1][b, :, h] = o, dq
            found[2][b, :, 0] += dk
            found[3][b, :, 0] += dv
    return found


# Splash attention scales its queries, not their products, and takes no float32 on a TPU.
KINDS_OF_FORMS = [
    (*form, dtype)
    for form in FORMS
    for dtype in TOLERANCE
    if (form[1], dtype) != ("splash", "float32")
]


@pytest.fixture(scope="module", params=KINDS_OF_FORMS)
def compiled(request):
    """(a form with its gradients, op, dtype), compiled once for all scales."""
    op, backend, dtype = request.param
    return with_gradients(bind(op, Case(T, H, G, K), backend)), op, dtype


@pytest.mark.parametrize("scale", [1, 10, 100, 1000, "outlier"])
def test_any_scale_against_float64(compiled, scale):
    """Scores reach 10^6 at scale 1000, where a row's weight is all on one key.

    What is left of a score's gradient there is rounding, which the other side's size multiplies:
    gradients of queries and keys are measured by that size.
    """
    run, op, dtype = compiled
    rng = np.random.default_rng(4)
    q, k = rng.normal(size=(BATCH, T, H, K)), rng.normal(size=(BATCH, T, G, K))
    v, do = rng.normal(size=(BATCH, T, G, K)), rng.normal(size=(BATCH, T, H, K))
    if scale == "outlier":
        k[:, 20] *= 1000
    else:
        q, k = scale * q, scale * k
    if op == "fixed_map_attention":
        q, k = q[:1], k[:1]
    q, k, v, do = (jnp.asarray(x, dtype) for x in (q, k, v, do))
    exact = [np.asarray(x, np.float64) for x in (q, k, v, do)]
    if op == "fixed_map_attention":
        got = run((q[0], k[0], v), do)
        wanted = whole_gradients(*(np.repeat(x, BATCH, 0) for x in exact[:2]), *exact[2:])
        wanted[1:3] = [x.sum(axis=0) for x in wanted[1:3]]
    else:
        got = run((q, k, v), do)
        wanted = whole_gradients(*exact)
    rounded = dtype == "float32" and scale in (100, 1000)
    tolerance = ROUNDED_SCORES_TOLERANCE if rounded else TOLERANCE[dtype]
    sizes = [1, np.abs(exact[1]).max(), np.abs(exact[0]).max(), 1]
    for g, w, size in zip(got, wanted, sizes, strict=True):
        g = np.asarray(g, np.float64)
        assert g.shape == w.shape and np.all(np.isfinite(g))
        assert np.abs(g - w).max() / max(size, np.abs(w).max()) <= tolerance
