"""Every file in configs/: builds, has the paper's size, says of itself what is true."""

import dataclasses
import json
import os
import pathlib
import re
import runpy

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from deconstruct import config as config_lib
from deconstruct import decoder, flops, metrics, mixers, paper
from deconstruct import spec as spec_lib
from deconstruct.mixers import MIXERS

ROOT = pathlib.Path(__file__).resolve().parents[1]
GOLDENS = ROOT / "tests" / "goldens"
FILES = sorted((ROOT / "configs").glob("*.py"))
BY_NAME = {path.stem: path for path in FILES}
PAPER_FILES = [name for name in BY_NAME if name not in ("quickstart", "tiny")]

# Of all standard layers, with the tokenizer's true vocabulary of 50,277 and untied tables.
PARAMETERS = {
    "70m": 76_665_344,
    "160m": 190_518_528,
    "500m": 481_061_504,
    "1700m": 1_732_785_152,
    "500m_gqa": 447_994_496,
}


def load(name: str, argument: str | None = None) -> config_lib.Config:
    """The config by file name and argument, parsed."""
    get_config = runpy.run_path(str(BY_NAME[name]))["get_config"]
    return config_lib.parse(get_config() if argument is None else get_config(argument))


def build(config: config_lib.Config) -> spec_lib.ModelSpec:
    """The model; every config names its own vocabulary."""
    return mixers.resolve(config.model.build(config.max_len, vocab_size=1))


def parameters_of(name: str) -> int:
    return PARAMETERS.get(name) or PARAMETERS[name.partition("_")[0]]


def test_the_configs_are_these():
    sizes = [f"{size}_{kind}" for size in paper.SIZES for kind in ("uniform", "hybrid")]
    assert sorted(BY_NAME) == sorted([*sizes, "500m_gqa", "quickstart", "tiny"])


@pytest.mark.parametrize("name", PAPER_FILES)
def test_parameters_are_the_papers(name):
    config = load(name)
    spec = build(config)
    assert spec.vocab_size == 50_277 and spec.max_len == 2048
    assert flops.num_params(spec) == parameters_of(name)
    size = paper.SIZES[name.partition("_")[0]]
    assert spec.feed_forward_dim == size["feed_forward_dim"]
    assert spec.num_layers == size["num_layers"]


@pytest.mark.parametrize("name", PAPER_FILES)
def test_recipe_is_the_papers(name):
    """Section 4.2, and our reading of its schedule."""
    config = load(name)
    large = name.startswith("1700m")
    tokens = config.num_steps * config.batch_size * config.max_len
    assert tokens == pytest.approx(45e9 if large else 15e9, rel=1e-3)
    assert config.learning_rate == (3e-4 if large else 4e-4)
    assert config.optimizer == config_lib.OptimizerConfig()


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer_has_the_parameters_of_standard(name, mixer):
    """Exact; mlp within 0.1% (paper configs), its width a multiple of 8."""
    plan = "uniform" if mixer == "standard" else "even"
    argument = mixer if name.endswith("uniform") else f"{mixer},{plan}"
    spec = build(load(name, argument))
    assert mixer in {layer.mixer for layer in spec.layers}
    layers = spec_lib.plan_layers(spec.num_layers, "standard", "uniform")
    standard = flops.num_params(dataclasses.replace(spec, layers=layers))
    if mixer == "mlp":
        assert flops.num_params(spec) == pytest.approx(standard, rel=1e-3)
        assert spec.layers[0].options[0][1] % 8 == 0 or name == "tiny"  # too coarse there
    else:
        assert flops.num_params(spec) == standard


@pytest.mark.parametrize("size", paper.SIZES)
def test_a_micro_batch_fits_one_accelerator(size):
    config = load(f"{size}_uniform")
    rows = config.batch_size // config.compute.micro_batches
    kept = flops.activation_bytes(build(config), rows, decoder.Compute(jnp.bfloat16))
    assert 25 * 2**30 < kept < 60 * 2**30


@pytest.mark.parametrize(
    "name, argument",
    [
        ("quickstart", "non_approximate,even"),
        ("70m_hybrid", "rnd_emb_qk+fixed_seq_qk+static_emb_qk,odd"),
        ("70m_hybrid", "mlp+approximate,quarter"),
    ],
)
def test_the_whole_model_builds_abstractly(name, argument):
    """Every layer initialised and run, in shapes alone."""
    spec = build(load(name, argument))

    def run(tokens_BT):
        params = nn.meta.unbox(decoder.init(spec, jax.random.key(0)))
        fixed = decoder.init_fixed(spec, tokens_BT[0])
        return params, decoder.logits(spec, params, fixed, tokens_BT)

    tokens_BT = jax.ShapeDtypeStruct((1, spec.max_len), jnp.int32)
    params, logits_BTV = jax.eval_shape(run, tokens_BT)
    assert logits_BTV.shape == (1, spec.max_len, spec.vocab_size)
    padding = 2 * (spec.padded_vocab_size - spec.vocab_size) * spec.model_dim
    total = sum(leaf.size for leaf in jax.tree.leaves(params)) - padding
    assert total == flops.num_params(spec)


@pytest.mark.parametrize(
    "name, argument, message",
    [
        ("70m_uniform", "aproximate", "layer 1: unknown mixer 'aproximate': did you mean 'approx"),
        ("70m_uniform", "mlp,even", "takes a mixer alone, not 'mlp,even'"),
        ("70m_uniform", "", "layer 1: unknown mixer ''"),
        ("70m_uniform", "mlp[widht=8]", "layer 1: unknown option of mlp 'widht'"),
        ("160m_hybrid", "mlp,evne", "unknown layer plan 'evne': did you mean 'even'?"),
        ("160m_hybrid", "even,mlp", "unknown layer plan 'mlp'"),
        ("160m_hybrid", "standard,even", "plan 'even' already says which layers are 'standard'"),
        ("160m_hybrid", "static_emb,even", "layer 1: unknown mixer 'static_emb': did you mean"),
        ("160m_hybrid", "mlp,even,odd", "layer 2: unknown mixer 'mlp,even'"),
        ("500m_gqa", "mlp,", "unknown layer plan ''"),
        ("500m_gqa", "standard", "plan 'even' already says which layers are 'standard'"),
        ("quickstart", "mlp,evne", "unknown layer plan 'evne': did you mean 'even'?"),
    ],
)
def test_wrong_arguments(name, argument, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(load(name, argument))


@pytest.mark.parametrize(
    "argument, expected",
    [
        ("mlp", ("mlp", "even")),
        ("mlp,odd", ("mlp", "odd")),
        ("mlp[width=96],odd", ("mlp[width=96]", "odd")),
        ("rnd_emb_qk[sigma=0.1,seed=3]", ("rnd_emb_qk[sigma=0.1,seed=3]", "even")),
        ("rnd_emb_qk[sigma=0.1,seed=3]+mlp,last", ("rnd_emb_qk[sigma=0.1,seed=3]+mlp", "last")),
    ],
)
def test_arguments_may_carry_options(argument, expected):
    model = load("70m_hybrid", argument).model
    assert (model.mixer, model.plan) == expected
    build(load("70m_hybrid", argument))


@pytest.mark.parametrize("name", BY_NAME)
def test_docstring_gives_the_command(name):
    text = runpy.run_path(str(BY_NAME[name]))["__doc__"]
    command = f"python -m deconstruct.train --config=configs/{name}.py --workdir=runs/{name}"
    assert f"    {command}" in text.splitlines()


@pytest.mark.parametrize("name", PAPER_FILES)
def test_docstring_gives_the_cost_as_computed(name):
    text = runpy.run_path(str(BY_NAME[name]))["__doc__"]
    found = re.search(
        r"Device hours, as computed: (\S+) of one H200 \((\S+) FLOPs a step, (\S+) steps, 40% MFU",
        text,
    )
    config = load(name)
    step = flops.train_flops(build(config), config.batch_size)
    hours = step * config.num_steps / (0.4 * metrics.PEAK_FLOPS["NVIDIA H200"]) / 3600
    assert found.groups() == (f"{hours:.3g}", f"{step:.2e}", f"{config.num_steps:,}")


def results_of(section: dict) -> set[tuple[str, float, float]]:
    """(mixer, mean accuracy, WikiText perplexity) of all rows of one size."""
    rows = {("standard", *section["standard"])}
    for kind in ("uniform", "hybrid_even"):
        rows |= {(mixer, *values) for mixer, values in section[kind].items()}
    return {(mixer, values[7], values[8]) for mixer, *values in rows}


@pytest.mark.parametrize("name", [n for n in PAPER_FILES if n.startswith(("500m", "1700m"))])
def test_docstring_gives_the_papers_results(shared_dir, name):
    printed = json.loads((shared_dir / "paper_results.json").read_text())
    section = {"500m_gqa": "500m_gqa"}.get(name, "1.7b" if name[0] == "1" else "500m")
    rows = results_of(printed[section])
    text = " ".join(runpy.run_path(str(BY_NAME[name]))["__doc__"].split())
    found = re.findall(r"(\w+) (\d\d\.\d), (\de\d|\d+\.\d)", text)
    assert len(found) >= 3
    for word, accuracy, perplexity in found:
        mixer = "standard" if word == "layers" else word  # "standard in all layers"
        assert (mixer, float(accuracy), float(perplexity)) in rows


def golden(name: str) -> str:
    """The config as parsed, its layers and what they cost: all that a change could move."""
    config = load(name)
    spec = build(config)
    lines = [f"{key} = {value!r}" for key, value in sorted(flat(config_lib.to_dict(config)))]
    segments = " ".join(f"{s.unit_len}x{s.repeats}" for s in spec_lib.segments(spec))
    forward = flops.forward_flops(spec, config.batch_size)
    costs = {"parameters": flops.num_params(spec)}
    costs |= {f"forward FLOPs, {part}": n for part, n in dataclasses.asdict(forward).items()}
    costs |= {"cache of a row, bfloat16": flops.cache_bytes(spec, 1, spec.max_len, jnp.bfloat16)}
    return "\n".join(
        [
            *lines, "", spec.table(), "", f"scanned as {segments}", "",
            *(f"{key}: {value:,}" for key, value in costs.items()), "",
        ]
    )  # fmt: skip


def flat(record: dict, prefix=""):
    for key, value in record.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


@pytest.mark.parametrize("name", BY_NAME)
def test_golden(name):
    """`DECONSTRUCT_WRITE_GOLDENS=1 python -m pytest tests/test_configs.py` writes them anew."""
    path = GOLDENS / f"{name}.txt"
    if os.environ.get("DECONSTRUCT_WRITE_GOLDENS") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(golden(name))
    assert path.read_text() == golden(name)


def test_goldens_have_no_strangers():
    assert {path.stem for path in GOLDENS.glob("*.txt")} == set(BY_NAME)


@pytest.mark.parametrize(
    "formula, sizes, expected",
    [
        ("4BL^2d + 6BLd^2", {"B": 2, "L": 3, "d": 5}, 4 * 2 * 9 * 5 + 6 * 2 * 3 * 25),
        ("11BLd/t + 3Bdh/t^2", {"B": 1, "L": 2, "d": 3, "h": 5, "t": 2}, 11 * 6 / 2 + 3 * 15 / 4),
        ("6Bd + 4Bd^2/h", {"B": 1, "d": 8, "h": 2}, 6 * 8 + 4 * 64 / 2),
        ("0", {}, 0),
    ],
)
def test_printed_formulas_evaluate(formula, sizes, expected):
    assert paper.evaluate(formula, **sizes) == expected


def test_printed_formulas_are_of_our_mixers():
    sizes = {"B": 1, "L": 64, "d": 32, "h": 4, "t": 1}
    assert paper.PRINTED_COSTS.keys() == {
        "standard", "mlp", "approximate", "non_approximate", "rnd_emb_qk", "fixed_seq_qk",
        "static_emb_qk",
    }  # fmt: skip
    for cost in paper.PRINTED_COSTS.values():
        for formula in dataclasses.astuple(cost)[1:]:  # the first is an order
            assert paper.evaluate(formula, **sizes) >= 0
