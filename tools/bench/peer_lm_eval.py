"""The peer of `tools.bench evaluate`: lm-evaluation-harness's Hugging Face backend.

A program of its own, started by `peer.py` with a Python that has torch and lm-eval. Its argument
is JSON: the shape, the tokenizer.json, and where to write its weights (.npz, by parameter). It
answers one JSON line about itself and then, for each line of JSON with `requests` (pairs of context
and continuation), `batch_size` and `runs`, the milliseconds of each run and the last one's
log-likelihoods.
"""

import contextlib
import json
import sys
import time

import lm_eval
import numpy as np
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from deconstruct.tokenizer import END_OF_TEXT
from tools.bench import peer_qwen2, shapes


def main() -> None:
    request = json.loads(sys.argv[1])
    with contextlib.redirect_stdout(sys.stderr):  # lines on standard output are answers
        torch.manual_seed(0)
        model = peer_qwen2.build(shapes.Shape(**request["shape"])).eval()
        np.savez(request["weights"], **{n: p.detach() for n, p in model.named_parameters()})
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=request["tokenizer"], eos_token=END_OF_TEXT
        )
        harness = HFLM(model, tokenizer=tokenizer, backend="causal")
    about = {
        "peer": f"lm-eval {lm_eval.__version__} HFLM, transformers {transformers.__version__} "
        f"Qwen2ForCausalLM, torch {torch.__version__}, "
        f"{model.config._attn_implementation} attention",
        "parameters": sum(p.numel() for p in model.parameters()),
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        with contextlib.redirect_stdout(sys.stderr):
            answer = score(harness, **json.loads(line))
        print(json.dumps(answer), flush=True)


def score(harness: HFLM, requests: list[list[str]], batch_size: int, runs: int) -> dict:
    harness.batch_size_per_gpu = batch_size
    instances = [
        Instance("loglikelihood", {}, tuple(pair), place) for place, pair in enumerate(requests)
    ]
    milliseconds = []
    for _ in range(runs):
        start = time.perf_counter()
        answers = harness.loglikelihood(instances, disable_tqdm=True)
        milliseconds.append((time.perf_counter() - start) * 1e3)
    return {"milliseconds": milliseconds, "log_likelihoods": [answer[0] for answer in answers]}


if __name__ == "__main__":
    main()
