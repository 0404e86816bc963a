"""The peer of `tools.bench train`: `Qwen2ForCausalLM` of transformers on PyTorch, fused AdamW.

A program of its own, started by `peer.py` with a Python that has torch. Its argument is JSON, what
`peer.TrainPeer` asks; it answers one JSON line about itself and then, for each line N, the
milliseconds of each of N train steps (float32, gradients clipped) and the last loss.
"""

import json
import sys
import time

import numpy as np
import torch
import transformers

from deconstruct import host_memory
from tools.bench import shapes


def main() -> None:
    request = json.loads(sys.argv[1])
    if request["keep_pages"]:
        host_memory.keep_pages()
    torch.manual_seed(0)
    shape = shapes.Shape(**request["shape"])
    model = build(shape).train()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=shapes.LEARNING_RATE,
        betas=(shapes.BETA1, shapes.BETA2),
        eps=shapes.EPS,
        weight_decay=shapes.WEIGHT_DECAY,
        fused=True,
    )
    ids = np.random.default_rng(0).integers(
        0, shape.vocab_size, (shape.batch_size, shape.length + 1)
    )
    tokens_BT = torch.from_numpy(ids[:, :-1])
    way = "compiled" if request["compiled"] else "eager"
    about = {
        "peer": f"transformers {transformers.__version__} Qwen2ForCausalLM, torch "
        f"{torch.__version__} {way}, {model.config._attn_implementation} attention, fused AdamW",
        "parameters": sum(p.numel() for p in model.parameters()),
        "threads": torch.get_num_threads(),
    }
    if request["compiled"]:
        model = torch.compile(model)
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        times = [step(model, optimizer, tokens_BT) for _ in range(int(line))]
        milliseconds, losses = zip(*times, strict=True)
        print(json.dumps({"milliseconds": milliseconds, "loss": losses[-1]}), flush=True)


def build(shape: shapes.Shape) -> torch.nn.Module:
    config = transformers.Qwen2Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.model_dim,
        intermediate_size=shape.feed_forward_dim,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads,
        max_position_embeddings=shape.length,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return transformers.Qwen2ForCausalLM(config)


def step(model, optimizer, tokens_BT) -> tuple[float, float]:
    """(milliseconds of one step, its loss)."""
    start = time.perf_counter()
    optimizer.zero_grad()
    loss = model(input_ids=tokens_BT, labels=tokens_BT).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), shapes.CLIP_NORM)
    optimizer.step()
    return (time.perf_counter() - start) * 1e3, loss.item()


if __name__ == "__main__":
    main()
