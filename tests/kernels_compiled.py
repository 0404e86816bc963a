"""Run by test_aot.py where a compiler is: every kernel of ours for kinds of "tpu" or of "gpu"."""

import json
import sys

import jax

from deconstruct import kernels
from tools import aot, kernel_calls, slices

jax.config.update("jax_platforms", "cpu")
GROUPED = {"length": 2048, "heads": 14, "groups": 2, "head_size": 64, "dtype": "bfloat16"}
DOCUMENTS = {
    "length": 500, "heads": 3, "groups": 3, "head_size": 80, "dtype": "float32", "document": 50
}  # fmt: skip
# Of several of a GPU's chunks.
SEVERAL = {
    "length": 4500, "heads": 4, "groups": 2, "head_size": 64, "dtype": "bfloat16", "document": 90
}  # fmt: skip
ODD = {**DOCUMENTS, "dtype": "bfloat16"}
PACKED = {**GROUPED, "document": 100}
LONG = {"length": 16384, "heads": 4, "groups": 4, "head_size": 128, "dtype": "bfloat16"}
# One of each family sees them all; a relative, what is most likely to differ.
CALLS = {
    "tpu": {
        "v5e:2x2": [GROUPED, PACKED, DOCUMENTS, ODD, LONG],
        "v5p:2x2x1": [GROUPED, DOCUMENTS],
        "v6e:2x2": [GROUPED, DOCUMENTS],
    },
    "gpu": {"a100:1": [DOCUMENTS, SEVERAL], "h200:1": [GROUPED, PACKED, DOCUMENTS, SEVERAL]},
}
NOT_OURS = "cudnn"  # its compiler wants the library

platform = sys.argv[1]
for topology, calls in CALLS[platform].items():
    wanted = slices.parse(topology)
    for op in kernels.BACKENDS:
        for sizes in calls:
            if sizes in (LONG, SEVERAL) and op != "taylor_attention":
                continue
            call = kernel_calls.KernelCall(op, rows=2, **sizes)
            if call.document and not kernel_calls.takes_documents(op):
                continue
            facts = call.facts(platform)
            for backend in kernels.BACKENDS[op]:
                is_ours = backend.platform == platform and backend.name != NOT_OURS
                if is_ours and not backend.refusal(facts):
                    found = aot.compile_kernel(call, backend.name, wanted)
                    print(json.dumps({"topology": topology, **found}))
