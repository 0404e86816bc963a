"""Kernels for other chips go through Pallas' own lowering, and stay inside their arrays (K4).

Interpreting forgives both: what a chip's lowering does not know, and a block that lies outside.
"""

import itertools
import math

import jax
import jax.extend
import numpy as np
import pytest
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


def traced(op, backend, platform, case):
    """(forward and backward for a platform that is not here, its arguments)."""
    if not takes_documents(op):
        case = Case(case.length, case.heads, case.groups, case.key_size, dtype=case.dtype)
    arrays, do = inputs(op, case)

    def both(arrays, do):
        o, pull = jax.vjp(bind(op, case, backend), *arrays)
        return o, *pull(do)

    with kernels.target_platform(platform):
        return jax.jit(both).trace(arrays, do)


def calls_of(jaxpr):
    """Every Pallas call in a program, however deep."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation.params["grid_mapping"]
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from calls_of(inner)


@pytest.mark.parametrize("op, backend, platform", KERNELS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_lowers_without_the_chip(op, backend, platform, case):
    named = {"gpu": "cuda"}.get(platform, platform)
    text = traced(op, backend, platform, case).lower(lowering_platforms=(named,)).as_text()
    assert "tpu_custom_call" in text if platform == "tpu" else "triton" in text


@pytest.mark.parametrize("op, backend, platform", [k for k in KERNELS if k[1] != "splash"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_blocks_lie_inside_their_arrays(op, backend, platform, case):
    """The last block may hang over the end; none begins there."""
    found = list(calls_of(traced(op, backend, platform, case).jaxpr.jaxpr))
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
