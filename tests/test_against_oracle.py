"""The package's decoder against the float64 oracle: every mixer of the registry in every plan.

Parameters are far larger than initial ones, so that maps are far from uniform and every bias and
scale counts. The decoder runs op by op: equal shapes then share their compilations.

Axes: B batch, T time, D model, V vocabulary, H heads, S key time.
"""

import dataclasses

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from models import make_documents, make_fixed, make_spec, make_tokens

from deconstruct import decoder, mixers
from deconstruct import spec as spec_lib

MAX_LEN = 16
LENGTH = 13  # shorter than the fixed streams
# Of a case's largest logit (about 25); float32 rounding through the layers was at most 3e-6 of it.
LOGITS_TOLERANCE = 1e-5
MAP_TOLERANCE = 1e-5

SIMPLE = [mixer for mixer in mixers.MIXERS if mixer != spec_lib.STANDARD]
ISOLATED = [
    *((mixer, "uniform") for mixer in mixers.MIXERS),
    *((mixer, "even") for mixer in SIMPLE),
    ("rnd_emb_qk+fixed_seq_qk+static_emb_qk", "uniform"),
    ("fixed_seq_qk+approximate", "even"),
]
PLANS = [
    (spec_lib.STANDARD, "uniform"),
    *((mixer, plan) for mixer in SIMPLE for plan in spec_lib.PLANS),
    ("rnd_emb_qk+approximate", "even"),
    ("fixed_seq_qk+rnd_emb_qk", "uniform"),
    ("rnd_emb_qk+fixed_seq_qk", "first"),
    ("rnd_emb_qk+static_emb_qk+fixed_seq_qk+mlp+non_approximate", "uniform"),
]
VARIANTS = {
    "multi_head": {"num_kv_heads": 4},
    "like_qwen3": {"qk_norm": True, "qkv_bias": False, "tied_embeddings": True},
    "other_constants": {"qk_norm": True, "rope_base": 50.0, "norm_eps": 0.1},
}


def oracle_model(spec) -> oracle.OracleModel:
    """The same model for the oracle; skips a mixer that it has no equations for."""
    if lacking := {layer.mixer for layer in spec.layers} - set(oracle.MIXERS):
        pytest.skip(f"the oracle lacks {lacking}; see test_the_oracle_has_every_mixer")
    fields = {f.name for f in dataclasses.fields(oracle.OracleModel)} - {"layers"}
    layers = tuple((layer.number, layer.mixer) for layer in spec.layers)
    return oracle.OracleModel(layers=layers, **{name: getattr(spec, name) for name in fields})


def test_the_oracle_has_every_mixer():
    """A mixer's own definition must not judge itself."""
    lacking = [name for name in mixers.MIXERS if name not in oracle.MIXERS]
    assert not lacking, (
        f"add {lacking} to MIXERS of tests/oracle.py and write the equations there, in NumPy: "
        "parameter_names for its parameters, _attention_map for its weights (_block, where it has "
        "no map); the comparisons of this file, skipped until then, run by themselves"
    )


def strong_params(spec, seed=0):
    """The package's parameter tree filled with values that make every one of them matter.

    Rows of the tables past the vocabulary are large: they must not take part in any logit.
    """
    shapes = jax.eval_shape(lambda key: nn.meta.unbox(decoder.init(spec, key)), jax.random.key(0))
    random = np.random.default_rng(seed)

    def fill(path, leaf):
        name = path[-1].key
        values = random.normal(size=leaf.shape) * 0.25 + (name == "scale")
        if name == "table":
            values = values * 4
            values[spec.vocab_size :] = 1e3
        return jnp.asarray(values, jnp.float32)

    return jax.tree_util.tree_map_with_path(fill, shapes)


def assert_logits_agree(spec, params, tokens_BT, **documents):
    names = flax.traverse_util.flatten_dict(params, sep="/")
    assert set(names) == oracle.parameter_names(oracle_model(spec))
    fixed = make_fixed(spec)
    actual_BTV = decoder.logits(spec, params, fixed, jnp.asarray(tokens_BT), **documents)
    expected_BTV = oracle.logits(oracle_model(spec), params, fixed, tokens_BT, **documents)
    assert actual_BTV.shape == (*tokens_BT.shape, spec.vocab_size)
    assert actual_BTV.dtype == jnp.float32
    largest = np.abs(expected_BTV).max()
    np.testing.assert_allclose(actual_BTV, expected_BTV, rtol=0, atol=LOGITS_TOLERANCE * largest)


@pytest.mark.parametrize(("mixer", "plan"), PLANS)
def test_every_plan(mixer, plan):
    # With fewer layers than 8 the middle plan is the bilateral one.
    spec = make_spec(mixer, plan, num_layers=8 if plan == "middle" else 5, max_len=MAX_LEN)
    assert_logits_agree(spec, strong_params(spec), make_tokens(length=LENGTH))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mixer", mixers.MIXERS)
def test_every_mixer_in_other_models(mixer, variant):
    spec = make_spec(mixer, max_len=MAX_LEN, **VARIANTS[variant])
    assert_logits_agree(spec, strong_params(spec), make_tokens(length=LENGTH))


@pytest.mark.parametrize(("mixer", "plan"), ISOLATED)
def test_every_mixer_isolates_documents(mixer, plan):
    spec = make_spec(mixer, plan, num_layers=3, max_len=MAX_LEN)
    segments_BT, positions_BT = make_documents(2, LENGTH, seed=6)
    assert segments_BT.max(axis=1).min() > 1
    assert_logits_agree(
        spec,
        strong_params(spec),
        make_tokens(length=LENGTH),
        segments_BT=segments_BT,
        positions_BT=positions_BT,
    )


@pytest.mark.parametrize("mixer", mixers.MIXERS)
def test_every_attention_map(mixer):
    spec = make_spec(mixer, max_len=MAX_LEN)
    params, fixed, tokens_BT = strong_params(spec), make_fixed(spec), make_tokens(length=LENGTH)
    expected = oracle.attention_maps(oracle_model(spec), params, fixed, tokens_BT)
    uniform_TS = np.tril(np.ones((LENGTH, LENGTH))) / np.arange(1, LENGTH + 1)[:, None]
    for layer, _, answers in decoder.each_layer(
        spec, params, fixed, jnp.asarray(tokens_BT), ["attention_map"]
    ):
        map_BHTS = answers["attention_map"]
        if expected[layer.number] is None:
            assert map_BHTS is None
            continue
        np.testing.assert_allclose(map_BHTS, expected[layer.number], rtol=0, atol=MAP_TOLERANCE)
        assert np.abs(expected[layer.number] - uniform_TS).max() > 0.3


def test_rows_as_long_as_the_fixed_streams():
    spec = make_spec("rnd_emb_qk+fixed_seq_qk", max_len=LENGTH)
    assert_logits_agree(spec, strong_params(spec), make_tokens(length=LENGTH))


def test_a_model_with_layers_skipped():
    spec = make_spec("rnd_emb_qk", "even", num_layers=5)
    spec, params = spec_lib.skip(spec, strong_params(spec))
    assert [layer.number for layer in spec.layers] == [2, 4]
    assert_logits_agree(spec, params, make_tokens(length=LENGTH))
