"""Configs: keys, types and values at the door, in files and from the command line (F1)."""

import dataclasses
import re
import sys
import textwrap

import ml_collections
import pytest
from absl import flags
from ml_collections import config_flags

from deconstruct import config as config_lib
from deconstruct.config import Config, ModelConfig, OptimizerConfig
from deconstruct.spec import LayerSpec

# ml_collections loads the config file in a way that Python wants given up.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module.. method:DeprecationWarning")


def config_file(folder, *lines: str):
    """A config file whose `get_config` runs the lines on the default."""
    body = textwrap.indent("\n".join(lines), " " * 4)
    path = folder / "run.py"
    path.write_text(
        "from deconstruct import config as config_lib\n"
        "def get_config(argument=''):\n"
        "    config = config_lib.default()\n"
        f"{body}\n"
        "    return config\n"
    )
    return path


@pytest.fixture
def from_flags(tmp_path, monkeypatch):
    """Parses `--config=FILE` with overrides as a command does."""

    def parse(*overrides: str, lines=()) -> Config:
        values = flags.FlagValues()
        holder = config_flags.DEFINE_config_file("config", flag_values=values)
        args = ["train", f"--config={config_file(tmp_path, *lines)}", *overrides]
        monkeypatch.setattr(sys, "argv", args)  # where config_flags looks for overrides
        values(args)
        return config_lib.parse(holder.value)

    return parse


def changed(**overrides) -> Config:
    """The default with dotted keys changed, dots written as `__`."""
    record = config_lib.default()
    values = {key.replace("__", "."): value for key, value in overrides.items()}
    record.update_from_flattened_dict(values)
    return config_lib.parse(record)


def test_the_default_passes_unchanged():
    assert config_lib.parse(config_lib.default()) == Config()


def test_the_optimizers_defaults_are_the_papers():
    """Section 4.2 of the paper."""
    expected = {
        "warmup_steps": 2000, "schedule": "cosine", "schedule_steps": None, "final_fraction": 0.0,
        "beta1": 0.9, "beta2": 0.9999, "eps": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0,
        "z_loss": 0.0,
    }  # fmt: skip
    assert dataclasses.asdict(OptimizerConfig()) == expected


def test_a_file_is_read(from_flags):
    config = from_flags(lines=["config.model.mixer = 'mlp'", "config.model.plan = 'even'"])
    assert config == changed(model__mixer="mlp", model__plan="even")


@pytest.mark.parametrize(
    "override, key, expected",
    [
        ("num_steps=5", "num_steps", 5),
        ("learning_rate=1", "learning_rate", 1.0),
        ("learning_rate=1e-3", "learning_rate", 1e-3),
        ("log.tensorboard=false", "log.tensorboard", False),
        ("model.num_kv_heads=2", "model.num_kv_heads", 2),
        ("optimizer.clip_norm=2", "optimizer.clip_norm", 2.0),
        ("data.path=/a b/c", "data.path", "/a b/c"),
        ("data.validation=('a','b')", "data.validation", ("a", "b")),
        ("data.validation=('a',)", "data.validation", ("a",)),
        ("data.validation=()", "data.validation", ()),
        ("model.layers=mlp@1,3 standard@2,4", "model.layers", "mlp@1,3 standard@2,4"),
    ],
)
def test_overrides_are_typed(from_flags, override, key, expected):
    config = from_flags(f"--config.{override}")
    value = config
    for part in key.split("."):
        value = getattr(value, part)
    assert value == expected and type(value) is type(expected)


def test_optional_values_go_back_to_none():
    """What `--config.KEY=None` becomes once the entry has read it."""
    assert changed(optimizer__clip_norm=None).optimizer.clip_norm is None
    config_lib.check_optional("optimizer.clip_norm", config_lib.key_type("optimizer.clip_norm"))
    with pytest.raises(ValueError, match="config key 'num_steps' must have a value, not None"):
        config_lib.check_optional("num_steps", config_lib.key_type("num_steps"))


@pytest.mark.parametrize(
    "override",
    ["num_steps=1.5", "num_steps=true", "learning_rate=high", "log.tensorboard=maybe", "model=3"],
)
def test_overrides_of_the_wrong_type_are_refused(from_flags, override):
    with pytest.raises(flags.IllegalFlagValueError, match=re.escape(override.split("=")[0])):
        from_flags(f"--config.{override}")


@pytest.mark.parametrize(
    "line",
    [
        "config.lerning_rate = 1",
        "config.model.mixr = 'mlp'",
        "config.model.learning_rate = 1.0",
        "config.extra = dict(a=1)",
    ],
)
def test_unknown_keys_in_a_file_are_refused_where_they_stand(from_flags, line):
    with pytest.raises(AttributeError, match="does not exist and cannot be added"):
        from_flags(lines=[line])


@pytest.mark.parametrize(
    "line",
    ["config.num_steps = 1.5", "config.data.path = 3", "config.model = 3", "config.seed = 'x'"],
)
def test_wrong_types_in_a_file_are_refused(from_flags, line):
    with pytest.raises(flags.IllegalFlagValueError, match="TypeError: Could not override field"):
        from_flags(lines=[line])


@pytest.mark.parametrize(
    "lines, message",
    [
        (["config.num_steps = True"], "num_steps must be of type int, not True"),
        (["config.data.validation = ('a', 3)"], "data.validation[1] must be of type str, not 3"),
        (
            ["config.optimizer = dict(beta1=0.5)"],
            "config key 'optimizer.warmup_steps' is missing; start from config.default()",
        ),
        (
            ["config.unlock()", "config.lerning_rate = 1"],
            "unknown config key 'lerning_rate'; did you mean 'learning_rate'?",
        ),
        (
            ["config.model.unlock()", "config.model.beta1 = 1"],
            "unknown config key 'model.beta1'; did you mean 'optimizer.beta1'?",
        ),
        (
            ["config.unlock()", "config.warmup_steps = 1"],
            "unknown config key 'warmup_steps'; did you mean 'optimizer.warmup_steps'?",
        ),
    ],
)
def test_what_a_file_slips_past_the_lock(from_flags, lines, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        from_flags(lines=lines)


@pytest.mark.parametrize(
    "key, message",
    [
        ("lerning_rate", "'lerning_rate'; did you mean 'learning_rate'?"),
        ("warmup_steps", "'warmup_steps'; did you mean 'optimizer.warmup_steps'?"),
        ("model.mixr", "'model.mixr'; did you mean 'model.mixer'?"),
        ("optimizer.mixer", "did you mean 'model.mixer'?"),
        ("num_steps.more", "unknown config key 'num_steps.more'"),
        ("zzzzzz", "unknown config key 'zzzzzz' (all keys"),
    ],
)
def test_unknown_keys_get_the_nearest_name(key, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        config_lib.key_type(key)


def test_every_key_has_a_type():
    keys = dict(_flat_keys(config_lib.default()))
    assert len(keys) > 50
    for key in keys:
        config_lib.key_type(key)


def _flat_keys(record: ml_collections.ConfigDict, prefix=""):
    for key in record:
        if isinstance(record[key], ml_collections.ConfigDict):
            yield from _flat_keys(record[key], f"{prefix}{key}.")
        else:
            yield prefix + key, record[key]


POSITIVE = [
    "num_steps", "batch_size", "max_len", "learning_rate", "checkpoint_every", "validate_every",
    "log_every", "compute.micro_batches", "data.validation_rows", "log.diagnose_every",
    "optimizer.schedule_steps", "optimizer.eps", "optimizer.clip_norm", "mesh.data", "mesh.fsdp",
    "mesh.tensor", "model.num_layers", "model.model_dim", "model.vocab_size", "model.norm_eps",
]  # fmt: skip
NOT_NEGATIVE = [
    "seed", "data.num_workers", "optimizer.warmup_steps", "optimizer.weight_decay",
    "optimizer.z_loss", "non_finite.max_skips",
]  # fmt: skip


@pytest.mark.parametrize("key", POSITIVE + NOT_NEGATIVE)
def test_numbers_out_of_range_are_refused(key):
    kind = type(dict(_flat_keys(config_lib.default()))[key])
    value = -1.0 if kind is float or key == "optimizer.clip_norm" else -1
    with pytest.raises(ValueError, match=key.rpartition(".")[2]):
        changed(**{key.replace(".", "__"): value})
    if key in POSITIVE:
        with pytest.raises(ValueError, match=key.rpartition(".")[2]):
            changed(**{key.replace(".", "__"): 0 * value})
    else:
        changed(**{key.replace(".", "__"): 0 * value})


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"learning_rate": float("nan")}, "learning_rate must be positive, not nan"),
        ({"optimizer__beta1": 1.0}, "optimizer.beta1 must be at least 0 and below 1, not 1.0"),
        ({"optimizer__beta2": -0.1}, "optimizer.beta2 must be at least 0 and below 1"),
        ({"optimizer__final_fraction": 1.5}, "optimizer.final_fraction must be between 0 and 1"),
        ({"compute__micro_batches": 3}, "compute.micro_batches=3 does not divide batch_size=256"),
        ({"compute__dtype": "bf16"}, "unknown value of compute.dtype 'bf16'"),
        ({"compute__platform": "gpus"}, "did you mean 'gpu'?"),
        ({"compute__layout": "lop"}, "did you mean 'loop'?"),
        ({"compute__remat": "ful"}, "did you mean 'full'?"),
        ({"optimizer__schedule": "cosin"}, "did you mean 'cosine'?"),
        ({"non_finite__policy": "skp"}, "did you mean 'skip'?"),
        ({"data__prepare_source": "wiki_leads"}, "needs data.prepare_tokenizer beside it"),
        ({"model__num_heads": 3}, "num_heads=3 does not divide model_dim=256"),
        ({"model__plan": "evn"}, "did you mean 'even'?"),
        ({"model__layers": "mlp mlp"}, "leaves out layer 3 of 4"),
        ({"model__layers": "mlp@1-4", "model__mixer": "mlp"}, "names every layer by itself, yet"),
        ({"model__layers": "mlp@1-4", "model__plan": "even"}, "names every layer by itself, yet"),
    ],
)
def test_runs_that_cannot_be(overrides, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        changed(**overrides)


def test_build_takes_the_sizes_over():
    model = changed(
        model__mixer="mlp[width=96]", model__plan="even", model__qk_norm=True,
        model__rope_base=5e5, model__num_heads=8,
    ).model  # fmt: skip
    spec = model.build(max_len=128, vocab_size=300)
    assert (spec.max_len, spec.vocab_size, spec.num_kv_heads) == (128, 300, 8)
    assert (spec.qk_norm, spec.rope_base, spec.head_dim) == (True, 5e5, 32)
    assert spec.layers[0] == LayerSpec(1, "mlp", {"width": 96})
    grouped = dataclasses.replace(model, num_kv_heads=2, vocab_size=500)
    assert grouped.build(128, 300).num_kv_heads == 2
    assert grouped.build(128, 300).vocab_size == 500


def test_build_of_an_explicit_list():
    spec = ModelConfig(layers="standard@1-3 mlp@4").build(64, 300)
    assert [layer.mixer for layer in spec.layers] == ["standard"] * 3 + ["mlp"]


def test_to_dict_is_the_whole_run():
    record = config_lib.to_dict(changed(model__mixer="mlp"))
    assert record["model"]["mixer"] == "mlp"
    assert record["data"]["validation"] == ("validation",)
    assert record.keys() == {field.name for field in dataclasses.fields(Config)}
