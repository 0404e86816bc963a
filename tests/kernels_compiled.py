"""Run by test_aot.py where a compiler is: every Pallas kernel for each kind of "tpu" or "gpu"."""

import json
import sys

import jax

from deconstruct import kernels
from tools import aot, kernel_calls, slices

jax.config.update("jax_platforms", "cpu")
CALLS = [
    {"length": 2048, "heads": 14, "groups": 2, "head_size": 64, "dtype": "bfloat16"},
    {"length": 500, "heads": 3, "groups": 3, "head_size": 80, "dtype": "float32", "document": 50},
]
LONG = {"length": 16384, "heads": 4, "groups": 4, "head_size": 128, "dtype": "bfloat16"}
TOPOLOGIES = {
    "tpu": ("v5e:2x2", "v5p:2x2x1", "v6e:2x2"),
    "gpu": ("a100:1", "h100:1", "h200:1"),
}
platform = sys.argv[1]
for topology in TOPOLOGIES[platform]:
    wanted = slices.parse(topology)
    for op in kernels.BACKENDS:
        for sizes in [*CALLS, LONG] if op == "taylor_attention" else CALLS:
            call = kernel_calls.KernelCall(op, rows=2, **sizes)
            facts = call.facts(platform)
            for backend in kernels.BACKENDS[op]:
                is_pallas = backend.platform == platform and backend.interpreted
                if is_pallas and not backend.refusal(facts):
                    found = aot.compile_kernel(call, backend.name, wanted)
                    print(json.dumps({"topology": topology, **found}))
