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
from tools.bench.qwen2_weights import in_our_layout

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
    expected = in_our_layout(spec, ((n, p.grad.numpy()) for n, p in model.named_parameters()))
    expected_BTV = expected_BTV.detach().numpy()

    flat = in_our_layout(spec, ((n, p.detach().numpy()) for n, p in model.named_parameters()))
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
