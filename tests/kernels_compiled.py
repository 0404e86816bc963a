"""Run by test_aot.py where a TPU's compiler is: every kernel of our own, for each kind of TPU."""

import json

import jax

from deconstruct import kernels
from tools import aot, kernel_calls, slices

jax.config.update("jax_platforms", "cpu")
CALLS = [
    {"length": 2048, "heads": 14, "groups": 2, "head_size": 64, "dtype": "bfloat16"},
    {"length": 500, "heads": 3, "groups": 3, "head_size": 80, "dtype": "float32", "document": 50},
]
LONG = {"length": 16384, "heads": 4, "groups": 4, "head_size": 128, "dtype": "bfloat16"}
for topology in ("v5e:2x2", "v5p:2x2x1", "v6e:2x2"):
    wanted = slices.parse(topology)
    for op in kernels.BACKENDS:
        for sizes in [*CALLS, LONG] if op == "taylor_attention" else CALLS:
            call = kernel_calls.KernelCall(op, rows=2, **sizes)
            facts = call.facts("tpu")
            for backend in kernels.BACKENDS[op]:
                if backend.platform == "tpu" and not backend.refusal(facts):
                    found = aot.compile_kernel(call, backend.name, wanted)
                    print(json.dumps({"topology": topology, **found}))
