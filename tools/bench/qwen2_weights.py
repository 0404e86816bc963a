"""The names of transformers' Qwen2 and Qwen3 for our parameters."""

from collections.abc import Iterable

import numpy as np

from deconstruct.spec import ModelSpec

# Their module under a layer -> ours.
_MODULES = {
    "input_layernorm": "mixer_norm",
    "post_attention_layernorm": "feed_forward_norm",
    "self_attn.q_proj": "mixer/query",
    "self_attn.k_proj": "mixer/key",
    "self_attn.v_proj": "mixer/value",
    "self_attn.o_proj": "mixer/output",
    "self_attn.q_norm": "mixer/query_norm",
    "self_attn.k_norm": "mixer/key_norm",
    "mlp.gate_proj": "feed_forward/gate",
    "mlp.up_proj": "feed_forward/up",
    "mlp.down_proj": "feed_forward/down",
}
_TABLES = {
    "model.embed_tokens.weight": "embedding/table",
    "lm_head.weight": "head/table",
    "model.norm.weight": "final_norm/scale",
}


def our_name(name: str) -> str:
    """Their parameter's path -> ours, joined by slashes."""
    if name in _TABLES:
        return _TABLES[name]
    _, _, index, rest = name.split(".", 3)
    module, leaf = rest.rsplit(".", 1)
    if module.endswith("norm"):
        leaf = "scale"
    elif leaf == "weight":
        leaf = "kernel"
    return f"layer_{int(index) + 1:02d}/{_MODULES[module]}/{leaf}"


def in_our_layout(
    spec: ModelSpec, named_arrays: Iterable[tuple[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Our path -> array: kernels (in, out) where theirs are (out, in), tables padded."""
    leaves = {}
    for name, array in named_arrays:
        path = our_name(name)
        if path.endswith("/kernel"):
            array = array.T
        elif path.endswith("/table"):
            array = np.pad(array, ((0, spec.padded_vocab_size - spec.vocab_size), (0, 0)))
        leaves[path] = array
    return leaves
