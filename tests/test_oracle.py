"""The oracle against cases worked by hand, then the package against the oracle.

Axes: B batch, T query time, S key time, D model, H heads, K head size, V vocabulary.
"""

import math

import numpy as np
import oracle
import pytest

ATTENTION_MIXERS = [mixer for mixer in oracle.MIXERS if mixer != "mlp"]
VOCAB, DIM, HEADS, FEED_FORWARD, MAX_LEN = 11, 8, 2, 6, 9
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def build(
    mixers, seed=0, dim=DIM, vocab=VOCAB, feed_forward=FEED_FORWARD, max_len=MAX_LEN, **model
):
    """A random oracle model: (model, params, fixed). `mixers` is a list, one a layer."""
    layers = tuple(enumerate(mixers, start=1))
    model = {"num_heads": HEADS, "num_kv_heads": HEADS, "norm_eps": 0.0, **model}
    model = oracle.OracleModel(vocab_size=vocab, layers=layers, **model)
    random = np.random.default_rng(seed)
    kv_dim = dim // model.num_heads * model.num_kv_heads
    columns = {"query": dim, "key": kv_dim, "value": kv_dim, "output": dim}

    def shape(name):
        *_, part, leaf = name.split("/")
        inner = 2 * dim if "/mixer/" in name else feed_forward
        if leaf == "scale":
            return (dim // model.num_heads,) if part in ("query_norm", "key_norm") else (dim,)
        if leaf == "bias":
            return (columns[part],)
        if leaf == "table":
            return (vocab, dim)
        return {"gate": (dim, inner), "up": (dim, inner), "down": (inner, dim)}.get(
            part, (dim, columns.get(part))
        )

    params = {}
    for name in sorted(oracle.parameter_names(model)):
        *path, leaf = name.split("/")
        node = params
        for key in path:
            node = node.setdefault(key, {})
        node[leaf] = random.normal(size=shape(name)) * 0.5 + (leaf == "scale")
    fixed = {
        "rnd_emb_qk": random.normal(size=(max_len, dim)),
        "fixed_seq_qk": random.integers(vocab, size=max_len),
    }
    return model, params, fixed


def two_positions(mixer, **model):
    """Tokens 0, 1 embedded as (1, 1) and (1, -1), which RMSNorm leaves alone; Q = K = V = H."""
    model, params, fixed = build(
        [mixer], dim=2, vocab=2, num_heads=1, num_kv_heads=1, qkv_bias=False, **model
    )
    params["embedding"]["table"] = np.array([[1.0, 1.0], [1.0, -1.0]])
    layer = params["layer_01"]
    layer["mixer_norm"]["scale"] = np.ones(2)
    for part in ("query", "key", "value", "output"):
        layer["mixer"][part]["kernel"] = np.eye(2)
    fixed = {"rnd_emb_qk": np.array([[1.0, 1.0], [1.0, -1.0]]), "fixed_seq_qk": np.array([0, 1])}
    return model, params, fixed


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


# Unnormalised weights of the second query over both keys. Turning (1, -1) by one radian and
# multiplying with (1, 1) gives 2 sin 1; with itself, 2. SiLU(1) = sigmoid(1), SiLU(-1) =
# -sigmoid(-1), so the second key's own score is sigmoid(1) + sigmoid(-1) = 1 before the root.
ROOT = math.sqrt(2)
SOFTMAX_BY_HAND = [math.exp(ROOT * math.sin(1)), math.exp(ROOT)]
BY_HAND = {
    "standard": SOFTMAX_BY_HAND,
    "static_emb_qk": SOFTMAX_BY_HAND,
    "rnd_emb_qk": SOFTMAX_BY_HAND,
    "fixed_seq_qk": SOFTMAX_BY_HAND,
    "approximate": [1 + x + x * x / 2 for x in (ROOT * math.sin(1), ROOT)],
    "non_approximate": [math.exp(ROOT * sigmoid(1)), math.exp(1 / ROOT)],
}


@pytest.mark.parametrize("mixer", ATTENTION_MIXERS)
def test_map_of_two_positions_by_hand(mixer):
    map_HTS = oracle.attention_maps(*two_positions(mixer), [[0, 1]])[1][0]
    expected = np.array(BY_HAND[mixer]) / sum(BY_HAND[mixer])
    np.testing.assert_allclose(map_HTS, [[[1, 0], expected]], **EXACT)


def test_non_approximate_applies_silu_before_the_query_norm():
    model, params, fixed = two_positions("non_approximate", qk_norm=True)
    for part in ("query_norm", "key_norm"):
        params["layer_01"]["mixer"][part]["scale"] = np.ones(2)
    map_HTS = oracle.attention_maps(model, params, fixed, [[0, 1]])[1][0]
    # First position: SiLU gives equal parts, the norm makes (1, 1), the score is 2 / sqrt 2.
    # Second: (sigmoid 1, -sigmoid -1) over its root mean square, times (1, -1).
    root_mean_square = math.sqrt((sigmoid(1) ** 2 + sigmoid(-1) ** 2) / 2)
    weights = np.exp([2 / ROOT, 1 / root_mean_square / ROOT])
    np.testing.assert_allclose(map_HTS[0, 1], weights / weights.sum(), **EXACT)


@pytest.mark.parametrize("mixer", ATTENTION_MIXERS)
def test_zero_queries_average_the_values_so_far(mixer):
    model, params, fixed = build([mixer])
    for leaf in ("kernel", "bias"):
        params["layer_01"]["mixer"]["query"][leaf][:] = 0
    map_BHTS = oracle.attention_maps(model, params, fixed, [[3, 1, 4, 1, 5]])[1]
    running_mean_TS = np.tril(np.ones((5, 5))) / np.arange(1, 6)[:, None]
    np.testing.assert_allclose(map_BHTS[0], np.stack([running_mean_TS] * HEADS), **EXACT)


def test_non_approximate_with_equal_scores_averages_the_values_so_far():
    model, params, fixed = build(["non_approximate"])
    for part in ("query", "key"):
        params["layer_01"]["mixer"][part]["kernel"][:] = 0
    map_BHTS = oracle.attention_maps(model, params, fixed, [[3, 1, 4, 1, 5]])[1]
    running_mean_TS = np.tril(np.ones((5, 5))) / np.arange(1, 6)[:, None]
    np.testing.assert_allclose(map_BHTS[0], np.stack([running_mean_TS] * HEADS), **EXACT)


def test_without_layers_the_logits_are_the_normed_embedding_times_the_head():
    model, params, fixed = build([], dim=2, vocab=2, tied_embeddings=True)
    params["embedding"]["table"] = np.array([[3.0, 4.0], [0.0, 2.0], [99.0, 99.0]])
    params["final_norm"]["scale"] = np.array([1.0, 10.0])
    # (3, 4) over sqrt(12.5), then (1, 10): row 0 scores 9 + 160, row 1 scores 80; row 2 is padding.
    expected = np.array([[[169, 80]]]) / math.sqrt(12.5)
    np.testing.assert_allclose(oracle.logits(model, params, fixed, [[0]]), expected, **EXACT)
    untied, params["head"] = build([], dim=2, vocab=2)[0], {"table": np.array([[1, 0], [0, 1]])}
    expected = np.array([[[3, 40]]]) / math.sqrt(12.5)
    np.testing.assert_allclose(oracle.logits(untied, params, fixed, [[0]]), expected, **EXACT)


def test_gated_parts_by_hand():
    model, params, fixed = build(["mlp"], dim=2, vocab=1, feed_forward=2)
    params["embedding"]["table"] = np.array([[1.0, -1.0]])
    layer = params["layer_01"]
    for norm in ("mixer_norm", "feed_forward_norm"):
        layer[norm]["scale"] = np.ones(2)
    for part in (layer["mixer"], layer["feed_forward"]):
        for name in ("gate", "up"):
            part[name]["kernel"] = np.eye(2)
        part["down"]["kernel"] = np.array([[1.0, 0.0], [0.0, 0.0]])
    params["final_norm"]["scale"] = np.ones(2)
    params["head"]["table"] = np.array([[1.0, 0.0]])
    # The second coordinate is never written: -1. The first: 1, plus SiLU(1), then the same again
    # with the vector's root mean square taken out before the gate.
    first = 1 + sigmoid(1)
    normed = first / math.sqrt((first**2 + 1) / 2)
    first += normed * sigmoid(normed) * normed
    expected = first / math.sqrt((first**2 + 1) / 2)
    scores = oracle.logits(model, params, fixed, [[0]])
    np.testing.assert_allclose(scores, [[[expected]]], **EXACT)


@pytest.mark.parametrize("mixer", ATTENTION_MIXERS)
def test_constant_values_pass_whatever_the_map(mixer):
    model, params, fixed = build([mixer])
    layer = params["layer_01"]
    layer["mixer"]["value"]["kernel"][:] = 0
    layer["feed_forward"]["down"]["kernel"][:] = 0
    mixed_D = layer["mixer"]["value"]["bias"] @ layer["mixer"]["output"]["kernel"]
    x_TD = params["embedding"]["table"][[3, 1, 4, 1, 5]] + mixed_D
    normed_TD = x_TD / np.sqrt((x_TD**2).mean(axis=-1, keepdims=True))
    expected = (normed_TD * params["final_norm"]["scale"]) @ params["head"]["table"].T
    scores = oracle.logits(model, params, fixed, [[3, 1, 4, 1, 5]])
    np.testing.assert_allclose(scores[0], expected, **EXACT)


@pytest.mark.parametrize("mixer", oracle.MIXERS)
def test_no_position_sees_a_later_one(mixer):
    model, params, fixed = build([mixer, mixer])
    before = oracle.logits(model, params, fixed, [[3, 1, 4, 1, 5]])
    after = oracle.logits(model, params, fixed, [[3, 1, 4, 2, 5]])
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert np.abs(before[:, 3] - after[:, 3]).max() > 1e-3
    seen_later = np.abs(before[:, 4] - after[:, 4]).max() > 1e-6
    assert seen_later == (mixer != "mlp")


@pytest.mark.parametrize("mixer", oracle.MIXERS)
def test_a_document_in_a_row_reads_as_it_does_alone(mixer):
    model, params, fixed = build([mixer, "standard", mixer])
    row = [[3, 1, 4, 1, 5, 9, 2]]
    together = oracle.logits(model, params, fixed, row, segments_BT=[[1, 1, 1, 2, 2, 3, 3]])
    for start, stop in ((0, 3), (3, 5), (5, 7)):
        alone = oracle.logits(model, params, fixed, [row[0][start:stop]])
        np.testing.assert_allclose(together[:, start:stop], alone, **EXACT)


def test_query_heads_read_their_group():
    grouped, params, fixed = build(["standard"], dim=16, num_heads=4, num_kv_heads=2)
    expected = oracle.logits(grouped, params, fixed, [[3, 1, 4, 1, 5]])
    for part in ("key", "value"):
        weights = params["layer_01"]["mixer"][part]
        for leaf, array in weights.items():
            first, second = np.split(array, 2, axis=-1)
            weights[leaf] = np.concatenate([first, first, second, second], axis=-1)
    full, _, _ = build(["standard"], dim=16, num_heads=4, num_kv_heads=4)
    actual = oracle.logits(full, params, fixed, [[3, 1, 4, 1, 5]])
    np.testing.assert_allclose(actual, expected, **EXACT)


def test_query_and_key_norm_take_out_the_scale():
    model, params, fixed = build(["standard"], qk_norm=True, qkv_bias=False)
    before = oracle.attention_maps(model, params, fixed, [[3, 1, 4, 1, 5]])[1]
    for part in ("query", "key"):
        params["layer_01"]["mixer"][part]["kernel"] *= 7
    after = oracle.attention_maps(model, params, fixed, [[3, 1, 4, 1, 5]])[1]
    np.testing.assert_allclose(after, before, **EXACT)


# Models that must agree when each stream starts from the embeddings of the input itself.
SELF_STREAM_PAIRS = [
    (["rnd_emb_qk"] * 3, ["standard"] * 3),
    (["fixed_seq_qk"] * 3, ["standard"] * 3),
    (["rnd_emb_qk", "mlp", "fixed_seq_qk"], ["standard", "mlp", "standard"]),
    (["mlp", "static_emb_qk", "rnd_emb_qk"], ["mlp", "static_emb_qk", "standard"]),
    (["static_emb_qk"], ["standard"]),
]


@pytest.mark.parametrize(("streamed", "plain"), SELF_STREAM_PAIRS)
def test_a_stream_of_the_input_itself_is_standard_attention(streamed, plain):
    tokens = [3, 1, 4, 1, 5]
    model, params, fixed = build(streamed)
    fixed = {"rnd_emb_qk": params["embedding"]["table"][tokens], "fixed_seq_qk": tokens}
    expected = oracle.logits(build(plain)[0], params, {}, [tokens])
    np.testing.assert_allclose(oracle.logits(model, params, fixed, [tokens]), expected, **EXACT)


def test_a_stream_takes_queries_and_keys_of_another_kind_from_that_kind():
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    model, params, fixed = build(["fixed_seq_qk", "rnd_emb_qk"])
    fixed["rnd_emb_qk"] = params["embedding"]["table"][tokens]
    # The random stream now walks beside the input, if it meets layer 1 with the other's map.
    expected = oracle.logits(build(["fixed_seq_qk", "standard"])[0], params, fixed, [tokens])
    np.testing.assert_allclose(oracle.logits(model, params, fixed, [tokens]), expected, **EXACT)


@pytest.mark.parametrize("mixer", oracle.STREAM_MIXERS)
def test_a_fixed_map_is_the_same_for_every_input(mixer):
    model, params, fixed = build(["standard", mixer, mixer])
    maps = oracle.attention_maps(model, params, fixed, [[3, 1, 4, 1], [2, 7, 1, 8]])
    for number in (2, 3):
        np.testing.assert_array_equal(maps[number][0], maps[number][1])
    assert np.abs(maps[2] - maps[3]).max() > 1e-3


def test_a_static_map_does_not_see_the_layers_below():
    model, params, fixed = build(["static_emb_qk", "static_emb_qk"])
    params["layer_02"]["mixer_norm"] = params["layer_01"]["mixer_norm"]
    params["layer_02"]["mixer"] = params["layer_01"]["mixer"]
    maps = oracle.attention_maps(model, params, fixed, [[3, 1, 4, 1, 5]])
    np.testing.assert_array_equal(maps[1], maps[2])


def test_mlp_has_no_map():
    assert oracle.attention_maps(*build(["mlp"]), [[3, 1]]) == {1: None}


def test_a_mixer_without_equations_is_refused():
    with pytest.raises(ValueError, match="no equations for mixer 'eighth'"):
        build(["eighth"])
