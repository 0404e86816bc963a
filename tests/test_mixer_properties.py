"""What every mixer must hold, run over the registry: a new mixer is tested by being in it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import make_fixed, make_inputs, make_mixer, make_params, make_spec, make_tokens

from deconstruct import decoder, layouts
from deconstruct.mixers import MIXERS, fixed_qk, options_of

# Largest difference, relative to the largest value, between two float32 evaluations of one
# function by different orders of summation.
FLOAT32_TOLERANCE = 2e-5
# The same for bfloat16 arithmetic (8 bits of mantissa) against float32 over a whole small model.
BFLOAT16_TOLERANCE = 0.1

LENGTHS = (1, 63, 127, 500)
BY_NAME = pytest.mark.parametrize("name", sorted(MIXERS))
ISOLATED = pytest.mark.parametrize("isolate", [False, True], ids=["whole", "isolated"])


def assert_close(actual, expected, tolerance=FLOAT32_TOLERANCE, least_scale=1e-3):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    scale = max(np.abs(expected).max(), least_scale)
    assert np.abs(actual - expected).max() <= tolerance * scale


def assert_grads_close(actual, expected):
    """Leaf by leaf; one that is 0 but for rounding is measured by the largest leaf's size."""
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    jax.tree.map(lambda a, b: assert_close(a, b, least_scale=1e-2 * largest), actual, expected)


def mixes_tokens(mixer, params, h_BTD, ctx) -> bool:
    return mixer.apply({"params": params}, h_BTD, ctx, method="attention_map") is not None


@BY_NAME
@ISOLATED
def test_fast_path_equals_definition(name, isolate):
    """Outputs and gradients of `__call__` and of A V projected, at awkward lengths."""
    mixer, params = make_mixer(name, max_len=max(LENGTHS))
    if not mixes_tokens(mixer, params, *make_inputs(mixer, length=4)):
        pytest.skip("mixes no tokens: there is no map to define it")
    for length in LENGTHS:
        h_BTD, ctx = make_inputs(mixer, length=length, isolate=isolate)
        weight = jnp.asarray(np.random.default_rng(0).normal(size=h_BTD.shape), jnp.float32)

        def value(params, h_BTD, ctx, method, weight=weight):
            out = mixer.apply({"params": params}, h_BTD, ctx, method=method)
            return jnp.sum(out * weight), out

        sides = [
            jax.jit(jax.value_and_grad(value, (0, 1), has_aux=True), static_argnums=3)(
                params, h_BTD, ctx, method
            )
            for method in ("__call__", "defined_output")
        ]
        ((_, fast), fast_grads), ((_, defined), defined_grads) = sides
        assert_close(fast, defined)
        assert_grads_close(fast_grads, defined_grads)


@BY_NAME
@ISOLATED
def test_maps_are_causal_and_sum_to_one(name, isolate):
    mixer, params = make_mixer(name)
    h_BTD, ctx = make_inputs(mixer, isolate=isolate)
    a_BHTS = mixer.apply({"params": params}, h_BTD, ctx, method="attention_map")
    if a_BHTS is None:
        pytest.skip("mixes no tokens")
    assert a_BHTS.dtype == jnp.float32
    assert a_BHTS.shape == (2, mixer.spec.num_heads, 64, 64)
    np.testing.assert_allclose(jnp.sum(a_BHTS, axis=-1), 1.0, rtol=1e-5)
    assert (np.triu(a_BHTS, 1) == 0).all()
    if isolate:
        other = ctx.segments_BT[:, None, :, None] != ctx.segments_BT[:, None, None, :]
        assert (np.where(other, a_BHTS, 0) == 0).all()


@BY_NAME
@ISOLATED
def test_no_gradient_from_the_future_or_another_document(name, isolate):
    """The Jacobian of the outputs in the inputs and embeddings, one query at a time."""
    mixer, params = make_mixer(name)
    length = 40
    h_BTD, ctx = make_inputs(mixer, length=length, isolate=isolate)

    def outputs(h_BTD, embeddings_BTD):
        return mixer.apply({"params": params}, h_BTD, ctx.replace(embeddings_BTD=embeddings_BTD))

    out, pullback = jax.vjp(outputs, h_BTD, ctx.embeddings_BTD)
    pull = jax.jit(lambda query: pullback(jnp.zeros_like(out).at[:, query].set(1.0)))
    order = np.arange(length)
    for query in (0, 1, 17, 39):
        grads = [g for g in pull(query) if g is not None]
        for row in range(h_BTD.shape[0]):
            hidden = order > query
            if isolate:
                segments = np.asarray(ctx.segments_BT[row])
                hidden |= segments != segments[query]
            for grad in grads:
                assert (np.asarray(grad[row])[hidden] == 0).all()
            reached = max(np.abs(grad[row][query]).max() for grad in grads)
            assert reached > 0


@BY_NAME
@pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "qk_norm"])
def test_decoding_token_by_token_equals_the_forward(name, qk_norm):
    spec = make_spec(name, "uniform", num_layers=2, max_len=16, qk_norm=qk_norm)
    assert_decodes(spec)


@pytest.mark.parametrize("plan", ["even", "bottom"])
def test_decoding_of_mixed_plans_equals_the_forward(plan):
    assert_decodes(make_spec("rnd_emb_qk+static_emb_qk+approximate", plan, 6, max_len=12))


@pytest.mark.parametrize("name", [name for name in sorted(MIXERS) if MIXERS[name].stream])
def test_decoding_with_and_without_the_map_in_memory(name, monkeypatch):
    spec = make_spec(name, "uniform", num_layers=2, max_len=16)
    most = MIXERS[name].shared_cache_bytes(spec, options_of(spec.layers[0]), 16, itemsize=4)
    for limit in (most, most - 1):
        monkeypatch.setattr(fixed_qk, "LARGEST_MAP", limit)
        cache = decoder.init_cache(spec, make_params(spec), make_fixed(spec), 3, 16)
        assert ("map" in cache["layer_01"]) == (limit == most)
        assert_decodes(spec)


def assert_decodes(spec):
    params, fixed, tokens = make_params(spec), make_fixed(spec), make_tokens(3, spec.max_len)
    expected = decoder.logits(spec, params, fixed, tokens)
    cache = decoder.init_cache(spec, params, fixed, 3, spec.max_len)
    step = jax.jit(lambda cache, tokens, t: decoder.decode_step(spec, params, cache, tokens, t))
    steps = []
    for t in range(spec.max_len):
        logits_BV, cache = step(cache, tokens[:, t], jnp.full((3,), t))
        steps.append(logits_BV)
    assert_close(jnp.stack(steps, axis=1), expected)


@BY_NAME
def test_scan_and_remat_change_nothing(name):
    """Loss and gradients of the loop, of the scan over whole repeats, and under remat."""
    spec = make_spec(name, "even" if name != "standard" else "uniform", num_layers=4, max_len=32)
    params, fixed, tokens = make_params(spec), make_fixed(spec), make_tokens(2, 32)
    assert any(segment.repeats > 1 for segment in decoder.spec_lib.segments(spec))

    def loss(params, compute):
        return jnp.mean(jnp.square(decoder.logits(spec, params, fixed, tokens, compute=compute)))

    run = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    expected, expected_grads = run(params, decoder.Compute())
    stacked = layouts.stack_layers(spec, params)
    assert "segment_00" in stacked
    for tree, compute in [
        (stacked, decoder.Compute()),
        (stacked, decoder.Compute(remat="full")),
        (params, decoder.Compute(remat="dots")),
    ]:
        value, grads = run(tree, compute)
        assert_close(value, expected)
        assert_grads_close(layouts.unstack_layers(spec, grads), dict(expected_grads))


@BY_NAME
def test_bfloat16_stays_near_float32(name):
    spec = make_spec(name, "uniform", num_layers=2, max_len=32)
    params, fixed, tokens = make_params(spec, std=0.05), make_fixed(spec), make_tokens(2, 32)
    exact = decoder.logits(spec, params, fixed, tokens)
    rough = decoder.logits(spec, params, fixed, tokens, compute=decoder.Compute(jnp.bfloat16))
    assert rough.dtype == jnp.float32
    assert_close(rough, exact, BFLOAT16_TOLERANCE)


@BY_NAME
def test_parameters_match_the_standard_mixer(name):
    def count(name):
        spec = make_spec(name, num_layers=1)
        return sum(x.size for x in jax.tree.leaves(make_params(spec)["layer_01"]["mixer"]))

    difference = abs(count(name) - count("standard"))
    mixer = MIXERS[name]
    if mixer.scores is MIXERS["mlp"].scores:
        assert difference <= 12 * 32  # the width is a whole number: section 9
    else:
        assert difference == 0, f"{name} must have the standard mixer's number of parameters"


@BY_NAME
def test_rows_do_not_depend_on_each_other(name):
    spec = make_spec(name, num_layers=2, max_len=32)
    params, fixed, tokens = make_params(spec), make_fixed(spec), make_tokens(3, 32)
    together = decoder.logits(spec, params, fixed, tokens)
    alone = decoder.logits(spec, params, fixed, tokens[1:2])
    assert_close(together[1:2], alone)


@BY_NAME
def test_cache_bytes_are_those_of_the_cache(name):
    """Per row: the cache of a batch of 3 less that of 2, so what rows share does not count."""
    spec = make_spec(name, num_layers=1, max_len=16)
    params, fixed = make_params(spec), make_fixed(spec)

    def size(batch_size):
        cache = decoder.init_cache(spec, params, fixed, batch_size, 16)
        return sum(x.nbytes for x in jax.tree.leaves(cache))

    layer = spec.layers[0]
    stated = MIXERS[name].cache_bytes(spec, options_of(layer), 16, itemsize=4)
    assert size(3) - size(2) == stated


@BY_NAME
@pytest.mark.parametrize("scan", [False, True], ids=["loop", "scan"])
def test_branches_equal_each_continuation_by_itself(name, scan):
    """Contexts of several lengths, some side by side, each with continuations of several."""
    plan = "uniform" if name == "standard" else "even"
    spec = make_spec(name, plan, num_layers=4, max_len=40)
    params, fixed = make_params(spec), make_fixed(spec)
    in_memory = layouts.stack_layers(spec, params) if scan else params
    rows = [[(1, (3, 1, 7))], [(9, (11,))], [(12, (4,)), (3, (2, 2)), (8, (1, 3))]]
    rng = np.random.default_rng(0)
    context_BS = rng.integers(0, spec.vocab_size, (3, 24)).astype(np.int32)
    tokens_BT = rng.integers(0, spec.vocab_size, (3, 13)).astype(np.int32)
    documents_BS, follows_BT = np.zeros((3, 24), np.int32), np.zeros((3, 13), np.int32)
    branches_BT = np.full((3, 13), 9, np.int32)  # what is left over is one more branch
    cases = []
    for b, row in enumerate(rows):
        s = t = branch = 0
        for document, (length, continuations) in enumerate(row, start=1):
            documents_BS[b, s : s + length] = document
            for size in continuations:
                branches_BT[b, t : t + size], follows_BT[b, t : t + size] = branch, document
                cases.append((b, slice(s, s + length), slice(t, t + size)))
                t, branch = t + size, branch + 1
            s += length
    contexts_BSD, new_BTD = jax.jit(
        lambda params, *given: decoder.branches(spec, params, fixed, *given)
    )(in_memory, context_BS, documents_BS, tokens_BT, branches_BT, follows_BT)
    alone = jax.jit(lambda tokens_BT: decoder.hidden(spec, params, fixed, tokens_BT))
    for b, context, new in cases:
        tokens, length = np.zeros((1, 40), np.int32), context.stop - context.start
        end = length + new.stop - new.start
        tokens[0, :length], tokens[0, length:end] = context_BS[b, context], tokens_BT[b, new]
        expected = alone(tokens)[0]
        assert_close(contexts_BSD[b, context], expected[:length])
        assert_close(new_BTD[b, new], expected[length:end])
