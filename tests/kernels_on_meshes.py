"""Run by test_kernels_meshes.py in a process with 8 CPU devices: meshes against one device."""

import itertools
import re

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from kernel_cases import FORMS, Case, assert_near, bind, inputs, with_gradients

from deconstruct import sharding, tuning
from deconstruct.kernels.reference import TOLERANCE

COLLECTIVE = r" = (.*?) (?:all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)\("
MESHES = {"float32": [(8, 1, 1), (2, 2, 2)], "bfloat16": [(2, 2, 2)]}


def batch_of_8(op, case):
    arrays, do = inputs(op, case)
    shared = 2 if op == "fixed_map_attention" else 0
    given = (*arrays[shared:], do)
    rows = [np.tile(x, (4, *(1,) * (x.ndim - 1))) for x in given]
    rows = [x * np.linspace(0.5, 1.5, 8).reshape(8, *(1,) * (x.ndim - 1)) for x in rows]
    rows = [x.astype(like.dtype) for x, like in zip(rows, given, strict=True)]
    return (*arrays[:shared], *rows[:-1]), rows[-1]


def place(mesh, x):
    axes = (sharding.BATCH_AXES,) * (x.shape[0] == 8) + (None, "tensor")
    return jax.device_put(x, NamedSharding(mesh, P(*axes)))


tuning.CPU = tuning.CPU._replace(recurrence_chunk=16)  # so that the cases have several
for (op, backend), dtype in itertools.product(FORMS, MESHES):
    case, tolerance = Case(40, 4, 2, 8, dtype=dtype), TOLERANCE[dtype]
    arrays, do = batch_of_8(op, case)
    one_device = with_gradients(bind(op, case, backend))
    wanted = one_device(arrays, do)
    for sizes in MESHES[dtype]:
        mesh = sharding.make_mesh(*sizes)
        with jax.set_mesh(mesh):
            run = with_gradients(bind(op, case, backend))
            placed = jax.tree.map(lambda x, mesh=mesh: place(mesh, x), (arrays, do))
            text = run.lower(*placed).compile().as_text()
            assert_near(run(*placed), wanted, tolerance)
            if op == "fixed_map_attention":  # the streams' own row, which no mesh divides
                row = (*arrays[:2], arrays[2][:1]), do[:1]
                assert_near(run(*row), one_device(*row), tolerance)
        sums = re.findall(COLLECTIVE, text)
        if op != "fixed_map_attention":
            assert not sums, (op, backend, dtype, sizes, sums)
            continue
        assert sums, "the gradients of queries and keys were not summed over the devices"
        shapes = {s for found in sums for s in re.findall(r"\w+\[[\d,]*\]", found)}
        heads, groups = case.heads // sizes[2], case.groups // sizes[2]
        whole = {f"f32[40,{heads},8]", f"f32[40,{groups},8]"}
        assert shapes <= whole, (backend, dtype, sizes, shapes)
print("equal")
