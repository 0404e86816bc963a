"""Parameters, FLOPs and bytes against formulas, the traced program and the compiler's own count.

Axes: B batch, T time.
"""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from models import make_spec

from deconstruct import decoder, flops, kernels, mixers
from deconstruct.decoder import Compute
from deconstruct.mixers import MIXERS, options_of
from deconstruct.mixers.mlp import matched_width, standard_mixer_params
from deconstruct.spec import ModelSpec, parse_layers, plan_layers

# Share of the compiler's count by which ours may differ: it counts element-wise work as well.
FLOPS_TOLERANCE = 0.10


def abstract_params(spec):
    return nn.meta.unbox(jax.eval_shape(lambda: decoder.init(spec, jax.random.key(0))))


def abstract_fixed(spec):
    return jax.eval_shape(lambda: decoder.init_fixed(spec, jnp.zeros(spec.max_len, jnp.int32)))


def trained_values(spec) -> int:
    """Counted from all parameters of the model, less the padding rows of its tables."""
    count = sum(leaf.size for leaf in jax.tree.leaves(abstract_params(spec)))
    tables = 1 if spec.tied_embeddings else 2
    return count - tables * (spec.padded_vocab_size - spec.vocab_size) * spec.model_dim


def mixer_formula(spec: ModelSpec, name: str, options) -> int:
    """Parameters of one mixer, written from its definition."""
    heads, groups = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    if name == "mlp":
        return 3 * spec.model_dim * options["width"]
    weights = spec.model_dim * (heads + groups + groups) + heads * spec.model_dim
    biases = heads + groups + groups if spec.qkv_bias else 0
    return weights + biases + (2 * spec.head_dim if spec.qk_norm else 0)


@pytest.mark.parametrize("changes", [{}, {"qk_norm": True, "qkv_bias": False, "num_kv_heads": 4}])
@pytest.mark.parametrize("name", MIXERS)
def test_parameters_of_each_layer_kind(name, changes):
    """F3: the count of a layer by formula; the mixer's options are those of the expanded plan."""
    spec = make_spec(name, num_layers=1, **changes)
    (layer,) = spec.layers
    mixer = mixer_formula(spec, name, dict(layer.options))
    feed_forward = 3 * spec.model_dim * spec.feed_forward_dim
    assert flops.mixer_params(spec, layer) == mixer, f"write {name}'s count in mixer_formula"
    assert flops.layer_params(spec, layer) == mixer + feed_forward + 2 * spec.model_dim


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_of_a_model_leave_padding_out(tied):
    spec = make_spec("mlp+rnd_emb_qk", "even", num_layers=4, tied_embeddings=tied)
    assert spec.padded_vocab_size > spec.vocab_size
    assert flops.num_params(spec) == trained_values(spec)


@pytest.mark.parametrize("model_dim, num_heads", [(32, 4), (48, 4), (64, 2), (72, 6), (256, 4)])
def test_mlp_width_matches_the_standard_mixer(model_dim, num_heads):
    """The nearest integer at most on toy widths, and within 0.1% of the model where it is 8's."""
    spec = make_spec("mlp", num_layers=6, model_dim=model_dim, num_heads=num_heads, num_kv_heads=2)
    width = dict(spec.layers[0].options)["width"]
    target = standard_mixer_params(spec)
    drift = abs(3 * width * model_dim - target)
    assert drift <= 12 * model_dim
    if width % 8:
        assert drift <= 1.5 * model_dim
    else:
        everywhere = dataclasses.replace(spec, layers=plan_layers(6, "standard", "uniform"))
        assert 6 * drift <= 1e-3 * flops.num_params(everywhere) or drift <= 1.5 * model_dim


def test_mlp_width_stays_when_layers_go():
    """It is written into the plan, so that a smaller model still fits its parameters."""
    layers = plan_layers(24, "mlp", "uniform")
    spec = mixers.resolve(
        dataclasses.replace(measured_spec("mlp"), vocab_size=20_000, layers=layers)
    )
    alone = dataclasses.replace(spec, layers=spec.layers[:1])
    assert matched_width(alone) == 168 and matched_width(spec) == 172
    assert mixers.resolve(alone).layers == spec.layers[:1]
    given = dataclasses.replace(spec, layers=parse_layers(2, "mlp[width=5] mlp"))
    assert dict(mixers.resolve(given).layers[0].options) == {"width": 5}


def measured_spec(name: str, num_layers=2) -> ModelSpec:
    """Wide enough that matrix products dominate, long enough that the maps are much of them."""
    layers = plan_layers(num_layers, name, "uniform")
    return mixers.resolve(
        ModelSpec(
            vocab_size=300, max_len=256, model_dim=128, feed_forward_dim=64, num_heads=2,
            num_kv_heads=2, layers=layers,
        )
    )  # fmt: skip


@pytest.fixture
def plain_forms(monkeypatch):
    """Every attention as the reference writes it: full squares, no blocks to skip or to scan."""
    for op in ("causal_attention", "taylor_attention", "fixed_map_attention"):
        plain = functools.partial(getattr(kernels, op), backend="reference")
        monkeypatch.setattr(kernels, op, plain)


def compiler_flops(spec: ModelSpec, batch_size: int) -> float:
    """The compiler's count of the forward with logits, layers unrolled."""

    def forward(params, fixed, tokens_BT):
        return decoder.logits(spec, params, fixed, tokens_BT)

    tokens_BT = jax.ShapeDtypeStruct((batch_size, spec.max_len), jnp.int32)
    lowered = jax.jit(forward).lower(abstract_params(spec), abstract_fixed(spec), tokens_BT)
    return lowered.compile().cost_analysis()["flops"]


@pytest.mark.parametrize("name", MIXERS)
def test_flops_agree_with_the_compiler(plain_forms, name):
    """L1, under the full-square convention."""
    spec = measured_spec(name)
    ours, theirs = flops.forward_flops(spec, 2).total, compiler_flops(spec, 2)
    assert abs(ours - theirs) <= FLOPS_TOLERANCE * theirs


def test_flops_of_a_model_are_its_parts():
    spec = make_spec("rnd_emb_qk+mlp", "even", num_layers=6)
    found = flops.forward_flops(spec, 4)
    tokens = 4 * spec.max_len

    def layers(numbers, rows):
        mixer = sum(
            flops.mixer_flops(spec, spec.layers[n - 1], rows, spec.max_len) for n in numbers
        )
        return mixer, len(numbers) * 6 * rows * spec.max_len * 32 * 48

    assert (found.mixers, found.feed_forward) == layers(range(1, 7), 4)
    assert found.streams == sum(layers(range(1, 5), 1))  # layer 5 is the last that reads it
    assert found.head == 2 * tokens * 32 * spec.vocab_size
    assert found.total == found.mixers + found.feed_forward + found.streams + found.head
    assert flops.train_flops(spec, 4) == 3 * found.total
    assert flops.train_flops_per_token(spec, 4) == 3 * found.total / tokens
    assert flops.forward_flops(spec, 4, length=32).head == found.head / 2


def test_the_prepass_is_shared_by_the_batch():
    spec = make_spec("rnd_emb_qk")
    assert flops.train_flops_per_token(spec, 64) < flops.train_flops_per_token(spec, 1)
    plain = make_spec("standard")
    assert flops.forward_flops(plain, 4).streams == 0
    assert flops.train_flops_per_token(plain, 64) == flops.train_flops_per_token(plain, 1)


def test_two_streams_both_travel():
    one = flops.forward_flops(make_spec("rnd_emb_qk", num_layers=4), 4)
    two = flops.forward_flops(make_spec("rnd_emb_qk+fixed_seq_qk", num_layers=4), 4)
    assert one.streams < two.streams < 2 * one.streams  # a mixer's own stream is there once


@pytest.mark.parametrize(
    "name, mixing",
    [
        ("standard", 4 * 16 * 32),
        ("static_emb_qk", 4 * 16 * 32),
        ("non_approximate", 0),
        ("rnd_emb_qk", 2 * 16 * 32 - 2 * 32 * (32 + 16)),  # the map is in the cache
    ],
)
def test_decode_flops_by_hand(name, mixing):
    """Width 32 in 4 heads and 2 groups, a cache of 16."""
    spec = make_spec(name, num_layers=1)
    projections = 2 * 32 * (32 + 16 + 16 + 32)
    assert flops.mixer_decode_flops(spec, spec.layers[0], 16) == projections + mixing


def test_products_inside_called_functions_count():
    jaxpr = jax.make_jaxpr(jax.jit(lambda a, b: jax.nn.silu(a @ b)))(
        jnp.ones((2, 3)), jnp.ones((3, 5))
    )
    assert flops._product_flops(jaxpr.jaxpr) == 2 * 2 * 3 * 5


def test_decode_flops_of_linear_mixers_do_not_grow():
    for name in ("mlp", "approximate"):
        spec = make_spec(name, num_layers=1)
        short, long = (flops.mixer_decode_flops(spec, spec.layers[0], n) for n in (8, 64))
        assert short == long > 0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", MIXERS)
def test_cache_bytes_are_those_of_the_caches(name, dtype):
    spec = make_spec(name, "even" if name != "standard" else "uniform", num_layers=2)
    compute = Compute(dtype)
    cache = jax.eval_shape(
        lambda params, fixed: decoder.init_cache(spec, params, fixed, 3, 16, compute=compute),
        abstract_params(spec),
        abstract_fixed(spec),
    )
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    assert flops.cache_bytes(spec, 3, 16, dtype) == held


@pytest.mark.parametrize("name", MIXERS)
def test_full_remat_keeps_the_blocks_inputs(name):
    spec = make_spec(name, num_layers=2)
    kept = flops.layer_activation_bytes(spec, spec.layers[1], 3, Compute(jnp.float32, "full"))
    assert kept == 3 * spec.max_len * spec.model_dim * 4


def test_activation_bytes_of_a_feed_forward():
    """At least gate, up, their product and the input; at most what element-wise steps add."""
    spec = make_spec("mlp[width=80]", num_layers=1)
    kept = flops.mixer_activation_bytes(spec, spec.layers[0], 2, jnp.float32)
    num_tokens, model_dim = 2 * spec.max_len, spec.model_dim
    assert (
        4 * num_tokens * (3 * 80 + model_dim) <= kept <= 4 * num_tokens * (6 * 80 + 2 * model_dim)
    )


def test_activation_bytes_are_of_the_measured_kind():
    """What the compiler holds for two more layers, against what we say they keep."""

    def held(num_layers):
        spec = measured_spec("mlp", num_layers)

        def loss(params, tokens_BT):
            return jnp.sum(decoder.hidden(spec, params, {}, tokens_BT))

        tokens_BT = jax.ShapeDtypeStruct((8, spec.max_len), jnp.int32)
        compiled = jax.jit(jax.grad(loss)).lower(abstract_params(spec), tokens_BT).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    ours = flops.activation_bytes(measured_spec("mlp", 2), 8, Compute())
    theirs = held(4) - held(2)
    assert 0.5 * ours <= theirs <= 1.1 * ours


def test_remat_orders_what_is_kept():
    spec = make_spec("standard+mlp+rnd_emb_qk", num_layers=3)
    kept = [
        flops.activation_bytes(spec, 4, Compute(jnp.float32, remat))
        for remat in ("none", "dots", "full")
    ]
    assert kept[0] > kept[1] > kept[2] > 0
    half = flops.activation_bytes(spec, 4, Compute(jnp.bfloat16, "full"))
    assert half == kept[2] / 2


def test_params_are_not_activations():
    """What does not grow with the rows is less than any matrix: reshaped norm scales."""
    spec = make_spec("mlp", num_layers=1)
    one, two = (flops.activation_bytes(spec, rows, Compute()) for rows in (1, 2))
    assert 0 <= 2 * one - two < 4 * spec.model_dim**2


def test_options_reach_the_count():
    narrow, wide = (make_spec(f"mlp[width={width}]", num_layers=1) for width in (8, 16))
    counts = [flops.mixer_flops(spec, spec.layers[0], 1, 64) for spec in (narrow, wide)]
    assert counts[1] == 2 * counts[0] == 6 * 64 * 32 * 16
    assert options_of(wide.layers[0]).width == 16
