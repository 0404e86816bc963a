"""The `standard` model against Hugging Face transformers' Qwen2 and Qwen3: logits and gradients.

Axes: B batch, T time, V vocabulary.
"""

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from models import make_spec
from test_against_oracle import oracle_model

from deconstruct import decoder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# Of the largest value of the logits, or of one parameter's gradient.
TOLERANCE = 1e-4

CASES = {
    "qwen2": {"num_kv_heads": 4},
    "qwen2_grouped_tied": {"num_kv_heads": 2, "tied_embeddings": True},
    "qwen3_tied": {
        "qk_norm": True, "qkv_bias": False, "num_kv_heads": 4, "tied_embeddings": True,
    },
    "qwen3_grouped": {"qk_norm": True, "qkv_bias": False, "num_kv_heads": 2},
}  # fmt: skip
# Their module under a layer -> ours.
MODULES = {
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
TABLES = {
    "model.embed_tokens.weight": "embedding/table",
    "lm_head.weight": "head/table",
    "model.norm.weight": "final_norm/scale",
}


def reference_model(spec):
    """The same model in PyTorch, float32, its parameters drawn far larger than initial ones."""
    sizes = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.model_dim,
        "intermediate_size": spec.feed_forward_dim,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_len,
        "tie_word_embeddings": spec.tied_embeddings,
        "rms_norm_eps": spec.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_base},
        "attn_implementation": "eager",
    }
    family = "Qwen3" if spec.qk_norm else "Qwen2"
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.25, generator=generator)
            if "norm" in name:
                parameter.add_(1.0)
            if name in ("model.embed_tokens.weight", "lm_head.weight"):
                parameter.mul_(4.0)
    return model


def our_name(name: str) -> str:
    """Their parameter's path -> ours, joined by slashes."""
    if name in TABLES:
        return TABLES[name]
    _, _, index, rest = name.split(".", 3)
    module, leaf = rest.rsplit(".", 1)
    if module.endswith("norm"):
        leaf = "scale"
    elif leaf == "weight":
        leaf = "kernel"
    return f"layer_{int(index) + 1:02d}/{MODULES[module]}/{leaf}"


def in_our_layout(spec, named_tensors):
    """{our path: float32 array}: kernels (in, out) where theirs are (out, in), tables padded."""
    leaves = {}
    for name, tensor in named_tensors:
        path, array = our_name(name), tensor.detach().numpy()
        if path.endswith("/kernel"):
            array = array.T
        elif path.endswith("/table"):
            array = np.pad(array, ((0, spec.padded_vocab_size - spec.vocab_size), (0, 0)))
        leaves[path] = array
    return leaves


def assert_near(actual, expected, what):
    largest = np.abs(expected).max()
    assert largest > 0.1, f"{what}: too small to compare ({largest})"
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * largest, err_msg=what)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients(case):
    spec = make_spec("standard", **CASES[case])
    random = np.random.default_rng(3)
    tokens_BT = random.integers(spec.vocab_size, size=(2, 13))
    weights_BTV = random.normal(size=(2, 13, spec.vocab_size)).astype(np.float32)

    model = reference_model(spec)
    expected_BTV = model(torch.from_numpy(tokens_BT), use_cache=False).logits
    (expected_BTV * torch.from_numpy(weights_BTV)).sum().backward()
    expected = in_our_layout(spec, ((n, p.grad) for n, p in model.named_parameters()))
    expected_BTV = expected_BTV.detach().numpy()

    flat = in_our_layout(spec, model.named_parameters())
    params = flax.traverse_util.unflatten_dict(flat, sep="/")

    def weighted_sum(params):
        logits_BTV = decoder.logits(spec, params, {}, jnp.asarray(tokens_BT))
        return jnp.sum(logits_BTV * weights_BTV), logits_BTV

    gradients, logits_BTV = jax.grad(weighted_sum, has_aux=True)(jax.tree.map(jnp.asarray, params))
    assert_near(logits_BTV, expected_BTV, "logits")
    assert_near(oracle.logits(oracle_model(spec), params, {}, tokens_BT), expected_BTV, "oracle")
    actual = flax.traverse_util.flatten_dict(gradients, sep="/")
    assert set(actual) == set(expected)
    for path in expected:
        assert_near(actual[path], expected[path], path)
