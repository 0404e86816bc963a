"""Kernels for other chips go through Pallas' own lowering, and stay inside their arrays (K4).

Interpreting forgives both: what a chip's lowering does not know, and a block that lies outside.
"""

import contextlib
import itertools
import math

import jax
import jax.extend
import numpy as np
import pytest
from jax.sharding import AxisType
from kernel_cases import OPS, Case, at_edges, bind, inputs

from deconstruct import kernels
from tools.kernel_calls import takes_documents

KERNELS = [
    (op, backend.name, backend.platform)
    for op in OPS
    for backend in kernels.BACKENDS[op]
    if backend.interpreted
]
CASES = [
    Case(63, 2, 1, 64, dtype="bfloat16"),
    Case(500, 3, 3, 80, documents=at_edges(500), dtype="bfloat16"),
    Case(2048, 4, 2, 128, dtype="bfloat16"),
]
CALLS = [(*kernel, case) for kernel in KERNELS for case in CASES]
# Of several chunks.
SEVERAL = Case(5000, 4, 2, 80, documents=at_edges(5000), dtype="bfloat16", value_size=64)
CALLS.append(("taylor_attention", "gpu_chunked", "gpu", SEVERAL))


DEVICES = {"tpu": "TPU v5 lite", "gpu": "NVIDIA H200"}


@contextlib.contextmanager
def as_if_there(platform):
    """With a device in name only, which JAX 0.12 asks for."""
    device = jax.sharding.AbstractDevice(
        device_kind=DEVICES[platform], num_cores=None, platform=platform
    )
    mesh = jax.sharding.AbstractMesh((1,), ("one",), (AxisType.Auto,), abstract_device=device)
    with kernels.target_platform(platform), jax.sharding.use_abstract_mesh(mesh):
        yield


def forward_and_backward(op, backend, case):
    """(the function, shapes of its arguments)."""
    if not takes_documents(op):
        case = Case(case.length, case.heads, case.groups, case.key_size, dtype=case.dtype)
    function, arguments = bind(op, case, backend), inputs(op, case)

    def both(arrays, do):
        o, pull = jax.vjp(function, *arrays)
        return o, *pull(do)

    return both, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)


def calls_of(jaxpr):
    """Every Pallas call in a program, however deep."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation.params["grid_mapping"]
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from calls_of(inner)


@pytest.mark.parametrize("op, backend, platform, case", CALLS, ids=str)
def test_lowers_without_the_chip(op, backend, platform, case):
    both, shapes = forward_and_backward(op, backend, case)
    named = {"gpu": "cuda"}.get(platform, platform)
    with as_if_there(platform):
        text = jax.jit(both).trace(*shapes).lower(lowering_platforms=(named,)).as_text()
    calls = {"tpu": "@tpu_custom_call", "gpu": "@__gpu$xla.gpu.triton"}
    assert text.count(calls[platform]) >= 2


@pytest.mark.parametrize(
    "op, backend, platform, case", [x for x in CALLS if x[1] != "splash"], ids=str
)
def test_blocks_lie_inside_their_arrays(op, backend, platform, case):
    """The last block may hang over the end; none begins there."""
    both, shapes = forward_and_backward(op, backend, case)
    with kernels.target_platform(platform):
        found = list(calls_of(jax.make_jaxpr(both)(*shapes).jaxpr))
    assert found
    for mapping in found:
        steps = list(itertools.product(*map(range, mapping.grid)))
        for block in mapping.block_mappings:
            index_map = jax.extend.core.jaxpr_as_fun(block.index_map_jaxpr)
            for step in (*steps[:: max(len(steps) // 64, 1)], steps[-1]):
                at = index_map(*map(np.int32, step))
                for number, size, length in zip(
                    at, block.block_shape, block.array_aval.shape, strict=True
                ):
                    size = getattr(size, "block_size", size)
                    whole = size if isinstance(size, int) else 1
                    assert 0 <= number < max(math.ceil(length / whole), 1)
