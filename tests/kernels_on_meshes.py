"""Run by test_kernels_meshes.py in a process with 8 CPU devices: meshes against one device."""

import re

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from kernel_cases import OPS, Case, assert_near, bind, inputs, with_gradients

from deconstruct import sharding
from deconstruct.kernels.reference import TOLERANCE

COLLECTIVE = r" = (.*?) (?:all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)\("
CASE = Case(40, 4, 2, 8)


def batch_of_8(op):
    arrays, do = inputs(op, CASE)
    shared = 2 if op == "fixed_map_attention" else 0
    rows = [np.tile(x, (4, *(1,) * (x.ndim - 1))) for x in (*arrays[shared:], do)]
    rows = [x * np.linspace(0.5, 1.5, 8).reshape(8, *(1,) * (x.ndim - 1)) for x in rows]
    rows = [x.astype(np.float32) for x in rows]
    return (*arrays[:shared], *rows[:-1]), rows[-1]


OTHERS = [
    ("taylor_attention", "chunked"),
    ("taylor_attention", "tpu"),
    ("taylor_attention", "gpu"),
    ("taylor_attention", "tpu_chunked"),
    ("taylor_attention", "gpu_chunked"),
    ("prefix_softmax", "tpu"),
    ("prefix_softmax", "gpu"),
    ("causal_attention", "splash"),
    ("fixed_map_attention", "splash"),
]
for op, backend in [*((op, "auto") for op in OPS), *OTHERS]:
    arrays, do = batch_of_8(op)
    wanted = with_gradients(bind(op, CASE, backend))(arrays, do)
    one_row = with_gradients(bind(op, CASE, backend))
    for sizes in [(8, 1, 1), (2, 2, 2)]:
        mesh = sharding.make_mesh(*sizes)

        def place(x, mesh=mesh):
            axes = (sharding.BATCH_AXES,) * (x.shape[0] == 8) + (None, "tensor")
            return jax.device_put(x, NamedSharding(mesh, P(*axes)))

        with jax.set_mesh(mesh):
            run = with_gradients(bind(op, CASE, backend))
            placed = jax.tree.map(place, (arrays, do))
            text = run.lower(*placed).compile().as_text()
            assert_near(run(*placed), wanted, TOLERANCE["float32"])
            if op == "fixed_map_attention":  # the streams' own row, which no mesh divides
                row = (*arrays[:2], arrays[2][:1]), do[:1]
                assert_near(run(*row), one_row(*row), TOLERANCE["float32"])
        sums = re.findall(COLLECTIVE, text)
        if op != "fixed_map_attention":
            assert not sums, (op, backend, sizes, sums)
            continue
        assert sums, "the gradients of queries and keys were not summed over the devices"
        shapes = {s for found in sums for s in re.findall(r"f32\[([\d,]*)\]", found)}
        heads, groups = CASE.heads // sizes[2], CASE.groups // sizes[2]
        assert shapes <= {f"40,{heads},8", f"40,{groups},8"}, (sizes, shapes)
print("equal")
