"""Layer plans, explicit lists, refusals, JSON, smaller models, segments (F3)."""

import dataclasses
import itertools
import re

import pytest

from deconstruct import spec as spec_lib
from deconstruct.spec import LayerSpec, ModelSpec, Segment, parse_layers, plan_layers


@dataclasses.dataclass(frozen=True)
class NoOptions:
    pass


@dataclasses.dataclass(frozen=True)
class Width:
    width: int = 8
    scale: float = 0.5

    def __post_init__(self):
        if self.width < 1:
            raise ValueError(f"width must be positive, not {self.width}")


OPTION_TYPES = {"standard": NoOptions, "mlp": Width, "approximate": NoOptions}


def model(layers, **changes) -> ModelSpec:
    sizes = {
        "vocab_size": 300, "max_len": 64, "model_dim": 32, "feed_forward_dim": 48, "num_heads": 4,
        "num_kv_heads": 2,
    }  # fmt: skip
    return ModelSpec(layers=layers, **{**sizes, **changes})


def letters(layers) -> str:
    """One letter a layer, such as `sasa`, in order; the numbers must run from 1."""
    assert [layer.number for layer in layers] == list(range(1, len(layers) + 1))
    return "".join(layer.mixer[0] for layer in layers)


# Table 11 of the paper, 24 layers; s standard, m the simple mixer.
TABLE_11 = {
    "uniform": "mmmmmmmmmmmmmmmmmmmmmmmm",
    "even": "msmsmsmsmsmsmsmsmsmsmsms",
    "odd": "smsmsmsmsmsmsmsmsmsmsmsm",
    "top": "ssssssssssssmmmmmmmmmmmm",
    "middle": "ssssssmmmmmmmmmmmmssssss",
    "bottom": "mmmmmmmmmmmmssssssssssss",
    "quarter": "mmmsmmmsmmmsmmmsmmmsmmms",
    "first": "smmmmmmmmmmmmmmmmmmmmmmm",
    "last": "mmmmmmmmmmmmmmmmmmmmmmms",
    "bilateral": "smmmmmmmmmmmmmmmmmmmmmms",
}


def test_every_plan_is_written_down_here():
    assert TABLE_11.keys() == spec_lib.PLANS.keys()


@pytest.mark.parametrize("plan", TABLE_11)
def test_plan_of_24_layers(plan):
    assert letters(plan_layers(24, "mlp", plan)) == TABLE_11[plan]


@pytest.mark.parametrize(
    "num_layers, plan, expected",
    [
        (7, "even", "msmsmsm"),
        (7, "odd", "smsmsms"),
        (7, "top", "sssmmmm"),
        (7, "middle", "smmmmms"),
        (7, "bottom", "mmmssss"),
        (7, "quarter", "mmmsmmm"),
        (28, "middle", "s" * 7 + "m" * 14 + "s" * 7),
        (2, "bilateral", None),
        (3, "bilateral", "sms"),
        (1, "uniform", "m"),
    ],
)
def test_plan_of_other_depths(num_layers, plan, expected):
    if expected is None:
        with pytest.raises(ValueError, match="more than 2 layers: it would make all of them"):
            plan_layers(num_layers, "mlp", plan)
    else:
        assert letters(plan_layers(num_layers, "mlp", plan)) == expected


@pytest.mark.parametrize("plan", spec_lib.PLANS)
def test_a_plan_that_stands_has_both_kinds(plan):
    """Any depth: refused, or a model in which both kinds occur (uniform: one)."""
    for num_layers in range(1, 30):
        try:
            found = letters(plan_layers(num_layers, "mlp", plan))
        except ValueError as error:
            assert "needs more than" in str(error)
            assert num_layers < 4 and plan != "uniform"
        else:
            assert set(found) == ({"m"} if plan == "uniform" else {"s", "m"})


def test_mixed_plans_take_turns():
    layers = plan_layers(8, "rnd_emb_qk+approximate", "even")
    assert letters(layers) == "rsasrsas"
    assert letters(plan_layers(5, "mlp+standard+approximate", "uniform")) == "msams"


def test_options_in_a_plan():
    layers = plan_layers(4, "mlp[width=96,scale=1e-2]+approximate", "even")
    assert layers[0] == LayerSpec(1, "mlp", {"width": 96, "scale": 0.01})
    assert layers[1:] == (
        LayerSpec(2, "standard"), LayerSpec(3, "approximate"), LayerSpec(4, "standard"),
    )  # fmt: skip


@pytest.mark.parametrize(
    "num_layers, mixer, plan, message",
    [
        (4, "mlp", "evne", "unknown layer plan 'evne': did you mean 'even'?"),
        (4, "standard", "even", "plan 'even' already says which layers are 'standard'"),
        (4, "mlp+standard", "odd", "plan 'odd' already says"),
        (3, "mlp", "quarter", "needs more than 3 layers: it would make none of them standard"),
        (1, "mlp", "first", "needs more than 1 layers: it would make all of them standard"),
        (0, "mlp", "uniform", "num_layers must be at least 1, not 0"),
        (-1, "mlp", "uniform", "num_layers must be at least 1, not -1"),
        (3, "mlp+approximate", "odd", "leaves 1 of 3 layers to the 2 mixers"),
        (4, "mlp[width=96", "even", "'mlp[width=96' opens '[' and does not close it"),
        (4, "mlp[width]", "even", "option 'width' of 'mlp[width]' is not of the form name=value"),
        (4, "mlp[]", "even", "is not of the form name=value"),
        (4, "mlp[width=wide]", "even", "the value of 'width=wide' in 'mlp[width=wide]'"),
        (4, "mlp[width=8,width=9]", "even", "'mlp[width=8,width=9]' gives option 'width' twice"),
    ],
)
def test_plans_that_cannot_be(num_layers, mixer, plan, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        plan_layers(num_layers, mixer, plan)


def test_explicit_lists():
    in_order = parse_layers(4, "standard mlp[width=96] standard approximate")
    located = parse_layers(4, "standard@1,3 approximate@4 mlp[width=96]@2")
    assert in_order == located
    assert letters(in_order) == "smsa"
    assert in_order[1].options == (("width", 96),)
    assert letters(parse_layers(7, "mlp@1-3,6 standard@4-5,7")) == "mmmssms"


@pytest.mark.parametrize(
    "num_layers, text, message",
    [
        (12, "mlp standard mlp standard mlp", "leaves out layer 6 of 12"),  # a pattern of 5
        (3, "mlp mlp mlp mlp", "'mlp' names layer 4 of a model of 3"),
        (12, "standard@1-12 mlp@13", "'mlp@13' names layer 13 of a model of 12"),
        (3, "standard@0-3", "'standard@0-3' names layer 0 of a model of 3"),
        (3, "standard@1-3 mlp@2", "layer 2 is both 'standard' and 'mlp'"),
        (3, "standard@1-3 standard@3", "layer 3 is both 'standard' and 'standard'"),
        (3, "standard@-1", "'-1' is neither a layer number nor a range"),
        (3, "standard@1,,2", "'' is neither a layer number nor a range"),
        (3, "standard@1-3 mlp@3-1", "range '3-1' ends before it begins"),
        (3, "standard@1-x", "'1-x' is neither a layer number nor a range"),
        (3, "standard mlp@2", "give numbers (mixer@1,2) to every word or to none"),
        (3, "", "'' leaves out layer 1 of 3"),
        (3, "standard@1,3", "leaves out layer 2 of 3"),
    ],
)
def test_lists_that_cannot_be(num_layers, text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_layers(num_layers, text)


def test_resolve_writes_every_option_out():
    spec = model(parse_layers(3, "standard mlp[width=96] mlp")).resolve(OPTION_TYPES)
    assert [dict(layer.options) for layer in spec.layers] == [
        {}, {"width": 96, "scale": 0.5}, {"width": 8, "scale": 0.5},
    ]  # fmt: skip
    assert spec.resolve(OPTION_TYPES) == spec
    assert spec.table().splitlines() == [
        "   1  standard",
        "   2  mlp             scale=0.5 width=96",
        "   3  mlp             scale=0.5 width=8",
    ]


@pytest.mark.parametrize(
    "text, message",
    [
        ("standard mpl", "layer 2: unknown mixer 'mpl': did you mean 'mlp'?"),
        ("standard mlp[widht=3]", "layer 2: unknown option of mlp 'widht': did you mean 'width'?"),
        (
            "mlp approximate[width=3]",
            "layer 2: mixer 'approximate' takes no options, 'width' is given",
        ),
        ("standard mlp[width=0]", "layer 2: mlp: width must be positive, not 0"),
    ],
)
def test_resolve_names_the_layer(text, message):
    spec = model(parse_layers(2, text))
    with pytest.raises(ValueError, match=re.escape(message)):
        spec.resolve(OPTION_TYPES)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"layers": ()}, "at least one layer"),
        ({"layers": (LayerSpec(1, "mlp"), LayerSpec(1, "mlp"))}, "without repeats, not [1, 1]"),
        ({"layers": (LayerSpec(2, "mlp"), LayerSpec(1, "mlp"))}, "must rise from 1"),
        ({"layers": (LayerSpec(0, "mlp"),)}, "must rise from 1 without repeats, not [0]"),
        ({"num_heads": 5}, "num_heads=5 does not divide model_dim=32; choose one of [1, 2, 4, 8"),
        (
            {"num_kv_heads": 3},
            "num_kv_heads=3 does not divide num_heads=4; choose one of [1, 2, 4]",
        ),
        ({"num_heads": 32}, "model_dim / num_heads = 1 is odd"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer, not 0"),
        ({"max_len": 2.0}, "max_len must be a positive integer, not 2.0"),
        ({"model_dim": True}, "model_dim must be a positive integer, not True"),
        ({"rope_base": 0.0}, "rope_base must be positive, not 0.0"),
        ({"norm_eps": float("nan")}, "norm_eps must be positive, not nan"),
    ],
)
def test_models_that_cannot_be(changes, message):
    layers = changes.pop("layers", plan_layers(2, "mlp", "uniform"))
    with pytest.raises(ValueError, match=re.escape(message)):
        model(layers, **changes)


def test_sizes_that_follow():
    spec = model(plan_layers(3, "mlp", "even"), vocab_size=50_277, model_dim=896, num_heads=14)
    assert (spec.head_dim, spec.num_layers, spec.padded_vocab_size) == (64, 3, 50_304)
    assert model(spec.layers, vocab_size=256).padded_vocab_size == 256
    assert [layer.name for layer in spec.layers] == ["layer_01", "layer_02", "layer_03"]
    assert LayerSpec(100, "mlp").name == "layer_100"


def test_json_round_trip():
    spec = model(plan_layers(4, "mlp[width=96]", "even"), qk_norm=True, rope_base=5e5)
    spec = spec.resolve(OPTION_TYPES)
    again = ModelSpec.from_json(spec.to_json())
    assert again == spec
    assert hash(again) == hash(spec)
    assert again.layers[0].options == (("scale", 0.5), ("width", 96))


@pytest.mark.parametrize(
    "old, new, message",
    [
        (
            '"max_len"',
            '"max_length"',
            "unknown model spec key 'max_length': did you mean 'max_len'",
        ),
        ('"number"', '"nmuber"', "unknown layer key 'nmuber': did you mean 'number'?"),
        ('"norm_eps": 1e-06,', "", "missing model spec key 'norm_eps'"),
    ],
)
def test_json_of_another_shape_is_refused(old, new, message):
    text = model(plan_layers(2, "mlp", "even")).to_json()
    assert old in text
    with pytest.raises(ValueError, match=re.escape(message)):
        ModelSpec.from_json(text.replace(old, new))


def parameters(spec) -> dict:
    names = [*(layer.name for layer in spec.layers), "embedding", "final_norm", "head"]
    return {name: object() for name in names}


def test_keep_layers_keeps_numbers_and_parameters():
    spec = model(plan_layers(6, "mlp", "even"))
    params = parameters(spec)
    before = dict(params)
    smaller, kept = spec_lib.keep_layers(spec, params, [5, 2])
    assert [(layer.number, layer.mixer) for layer in smaller.layers] == [
        (2, "standard"),
        (5, "mlp"),
    ]
    assert kept == {
        name: params[name] for name in ("layer_02", "layer_05", "embedding", "final_norm", "head")
    }
    assert params == before and spec.num_layers == 6
    assert dataclasses.replace(smaller, layers=spec.layers) == spec
    assert ModelSpec.from_json(smaller.to_json()) == smaller


def test_skip_keeps_the_standard_layers():
    spec = model(plan_layers(8, "mlp", "quarter"))
    smaller, kept = spec_lib.skip(spec, parameters(spec))
    assert [(layer.number, layer.mixer) for layer in smaller.layers] == [
        (4, "standard"), (8, "standard"),
    ]  # fmt: skip
    assert sorted(kept) == ["embedding", "final_norm", "head", "layer_04", "layer_08"]


def test_smaller_models_that_cannot_be():
    spec = model(plan_layers(3, "mlp", "uniform"))
    with pytest.raises(ValueError, match=r"layer 4 is not in this model; it has \[1, 2, 3\]"):
        spec_lib.keep_layers(spec, parameters(spec), [1, 4])
    with pytest.raises(ValueError, match="no layer would remain"):
        spec_lib.keep_layers(spec, parameters(spec), [])
    with pytest.raises(ValueError, match="skip removes all layers that are not standard"):
        spec_lib.skip(spec, parameters(spec))


@pytest.mark.parametrize(
    "mixer, num_layers, plan, expected",
    [
        ("mlp", 24, "uniform", (Segment(0, 1, 24),)),
        ("mlp", 24, "even", (Segment(0, 2, 12),)),
        ("mlp", 24, "quarter", (Segment(0, 4, 6),)),
        ("mlp", 6, "top", (Segment(0, 1, 3), Segment(3, 1, 3))),
        ("mlp", 8, "middle", (Segment(0, 1, 2), Segment(2, 1, 4), Segment(6, 1, 2))),
        ("mlp+approximate", 8, "even", (Segment(0, 4, 2),)),
    ],
)
def test_segments_of_plans(mixer, num_layers, plan, expected):
    assert spec_lib.segments(model(plan_layers(num_layers, mixer, plan))) == expected


def all_segmentations(kinds, start=0):
    """Every way to cut `kinds` into whole repeats, by brute force."""
    if start == len(kinds):
        yield ()
    for unit_len in range(1, len(kinds) - start + 1):
        for repeats in range(1, (len(kinds) - start) // unit_len + 1):
            end = start + unit_len * repeats
            if kinds[start:end] == kinds[start : start + unit_len] * repeats:
                for rest in all_segmentations(kinds, end):
                    yield (Segment(start, unit_len, repeats), *rest)


@pytest.mark.parametrize("num_layers", [1, 2, 5, 8])
def test_segments_are_the_best_of_all(num_layers):
    def cost(found):
        return sum(segment.unit_len for segment in found), len(found)

    for kinds in itertools.product(["standard", "mlp"], repeat=num_layers):
        layers = [LayerSpec(i, kind) for i, kind in enumerate(kinds, start=1)]
        found = spec_lib.segments(model(layers))
        possible = list(all_segmentations(kinds))
        assert found in possible
        assert cost(found) == min(map(cost, possible))


def test_layers_with_other_options_do_not_share_a_body():
    layers = parse_layers(4, "mlp[width=1] mlp[width=2] mlp[width=1] mlp[width=2]")
    assert spec_lib.segments(model(layers)) == (Segment(0, 2, 2),)
