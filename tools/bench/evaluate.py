"""Scoring against lm-evaluation-harness's Hugging Face backend: `python -m tools.bench evaluate`.

Both score the same requests with the same untrained Qwen2 in float32 on CPU, each with the batch
size that is its best on the first documents, taking turns; `ratio` is the peer's median time over
ours, so above 1 we are faster. Tokenizing counts on both sides; our first run, which compiles, does
not (`first_seconds`, `programs_compiled`; `programs_compiled_later` is what all others compiled).
`largest_difference` between the log-likelihoods is relative. Read a ratio
beside its `load_average`.
"""

import dataclasses
import json
import pathlib
import sys
import tempfile

from absl import flags

from deconstruct.evaluate import data
from deconstruct.evaluate.tasks import TASKS
from deconstruct.tokenizer import load_tokenizer
from tools.bench import machine
from tools.bench.peer import EvaluatePeer
from tools.bench.shapes import SHAPES

_SHAPE = flags.DEFINE_enum("shape", "70m", list(SHAPES), "which model")
_TASKS = flags.DEFINE_multi_string("task", ["piqa", "hellaswag"], "whose requests")
_DATA_DIR = flags.DEFINE_string("data_dir", None, f"the documents, as {data.FETCH} writes them")
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "a tokenizer.json")
_LIMIT = flags.DEFINE_integer("limit", 500, "the first documents of each task", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "turns of each side that count", lower_bound=1)
_TRIAL = flags.DEFINE_integer("trial_limit", 100, "documents that choose a size", lower_bound=1)
_OURS = flags.DEFINE_multi_integer("batch_tokens", [512, 1024, 2048, 4096], "ours to try")
_THEIRS = flags.DEFINE_multi_integer("peer_batch_size", [1, 4, 8, 16, 32], "the peer's to try")
_PEER_PYTHON = flags.DEFINE_string(
    "peer_python", sys.executable,
    "a Python that has what requirements-peers.txt and requirements-evaluate.txt name",
)  # fmt: skip


def main(argv) -> None:
    del argv
    for name, value in (("data_dir", _DATA_DIR.value), ("tokenizer", _TOKENIZER.value)):
        if not value:
            raise ValueError(f"--{name} is missing; see --help")
    documents = data.read(_DATA_DIR.value, data.names_of(_TASKS.value))
    tokenizer = pathlib.Path(_TOKENIZER.value)
    shape = dataclasses.replace(
        SHAPES[_SHAPE.value], vocab_size=load_tokenizer(str(tokenizer)).vocab_size
    )
    with tempfile.TemporaryDirectory() as folder:
        weights = pathlib.Path(folder) / "weights.npz"
        with EvaluatePeer(_PEER_PYTHON.value, shape, tokenizer, weights) as peer:
            from tools.bench import scoring  # JAX, once the peer is there

            trials = scoring.Trials(_TRIAL.value, _OURS.value, _THEIRS.value)
            ours = scoring.Ours(shape, tokenizer, weights)
            for name, own in documents.items():
                requests = [TASKS[name].requests(document) for document in own[: _LIMIT.value]]
                about = {"benchmark": "evaluate", "task": name, "documents": len(requests)}
                setting = about | machine.setting()
                result = scoring.measure(ours, peer, requests, trials, _ROUNDS.value)
                print(json.dumps(setting | result), flush=True)
