"""Run by test_kernels_triton.py with TRITON_INTERPRET=1: the kernels by Triton's own interpreter.

It runs on PyTorch's tensors; what is compared with comes from the references, on JAX's. Its
products would read bfloat16 as integers: float16 takes the part of 16-bit values.
"""

import dataclasses
import sys

import jax.numpy as jnp
import numpy as np
import torch
from kernel_cases import (
    Case,
    assert_near,
    bind,
    covering_cases,
    inputs,
    segments,
    with_gradients,
)

from deconstruct.kernels import prefix_triton
from deconstruct.kernels.documents import document_runs
from deconstruct.kernels.reference import TOLERANCE

# Documents end just before, at and just after the edges of its tiles of 32 positions.
AT_EDGES = Case(163, 4, 2, 24, documents=(31, 1, 1, 31, 32, 32, 35))
COVERING = [
    dataclasses.replace(case, dtype=case.dtype.replace("bfloat16", "float16"))
    for case in covering_cases()
]


def as_torch(x) -> torch.Tensor:
    return torch.from_numpy(np.array(x))


def interpret(case: Case, s_BTH, v_BTGW, do_BTHW):
    """(o, ds, dv) as the op returns them."""
    ids = segments(case)
    given = prefix_triton.sizes(case.heads, v_BTGW, ids is not None)
    s, v, do = (as_torch(x) for x in (s_BTH, v_BTGW, do_BTHW))
    runs = s if ids is None else as_torch(document_runs(ids))
    nan = float("nan")
    o, m = torch.full_like(do, nan), torch.full((len(s), case.heads, case.length), nan)
    z, ds, dv = torch.clone(m), torch.clone(m), torch.full(do.shape, nan)
    grid = (len(s) * case.heads,)
    prefix_triton.forward_kernel[grid](s, v, runs, o, m, z, **given)
    prefix_triton.backward_kernel[grid](s, v, runs, o, m, z, do, ds, dv, **given)
    dv_BTGW = dv.reshape(*v.shape[:3], -1, v.shape[3]).sum(3).to(v.dtype)
    return o.numpy(), ds.numpy().swapaxes(1, 2), dv_BTGW.numpy()


def check(case: Case, scale: float) -> None:
    """Against the reference, of scores as large as `scale`."""
    (s_BTH, v_BTGW), do_BTHW = inputs("prefix_softmax", case)
    given = jnp.clip(s_BTH, -1, 1) * scale if scale > 1 else s_BTH, v_BTGW
    exact = [x.astype(jnp.float32) for x in (*given, do_BTHW)]
    wanted = with_gradients(bind("prefix_softmax", case, "reference"))(exact[:2], exact[2])
    dtypes = (do_BTHW.dtype, *(x.dtype for x in given))
    wanted = [x.astype(dtype) for x, dtype in zip(wanted, dtypes, strict=True)]
    tolerance = TOLERANCE.get(case.dtype, TOLERANCE["bfloat16"])
    assert_near(interpret(case, *given, do_BTHW), wanted, tolerance)


for case in (AT_EDGES, *COVERING):
    check(case, 1)
for scale in (100, 1e4):
    check(AT_EDGES, scale)
sys.stdout.write("equal\n")
