"""A run's configuration: frozen dataclasses, checked once at the door.

Config files are Python functions that fill an `ml_collections.ConfigDict` made from these
dataclasses (`default()`), so a key exists here or nowhere. `parse` turns it back into a `Config`.
Nothing here imports JAX: a wrong key is refused before the slow imports.
"""

import dataclasses
import difflib
import math
import operator
import types
import typing
from fractions import Fraction
from typing import Any

import ml_collections
from ml_collections import config_dict

from deconstruct import spec as spec_lib


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is read.

    Attributes:
      path: directory of prepared data, made by `deconstruct.data.prepare`.
      mixture: in place of `path`, several such directories with their weights, `DIR=WEIGHT` each:
        `data/web=0.7`. A weight is a share of the rows read, once it is divided by the sum of all.
      repeat: whether a source that has been read whole begins again, in a new order; without it, a
        run that would need more rows than there are is refused before it starts.
      prepare_source: with a `path` that does not exist yet, prepare it from this source first.
      prepare_tokenizer: the tokenizer for that, as `--tokenizer` of `prepare`.
      isolate_documents: whether mixers see only the token's own document.
      num_workers: loader processes; 0 reads in the trainer's own process.
      validation: names of the held-out splits to validate on; of a mixture each source's, or with
        `NAME/SPLIT` that of the source whose directory is called NAME.
      validation_rows: rows of each that are read, from the first; None reads all.
      fixed_text: file whose first max_len tokens are the `fixed_seq_qk` text; None takes the
        first tokens of the training split (of the first source).
    """

    path: str | None = None
    mixture: tuple[str, ...] = ()
    repeat: bool = True
    prepare_source: str | None = None
    prepare_tokenizer: str | None = None
    isolate_documents: bool = False
    num_workers: int = 0
    validation: tuple[str, ...] = ("validation",)
    validation_rows: int | None = None
    fixed_text: str | None = None

    @property
    def weights(self) -> list[tuple[str, Fraction]]:
        """The directories to train on with their weights; none where none is named.

        Raises:
          ValueError: an entry of `mixture` that is not DIR=WEIGHT with a positive weight.
        """
        if self.path is not None:
            return [(self.path, Fraction(1))]
        return [_directory_and_weight(entry) for entry in self.mixture]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """What the model is; `build` makes the spec. Sizes are those of `ModelSpec`.

    Attributes:
      mixer: the simple mixer of `plan`, or several joined by `+`, each perhaps with options:
        `mlp[width=96]`.
      plan: a name of `spec.PLANS`.
      layers: an explicit list in the grammar of `spec.parse_layers`; in place of mixer and plan.
      vocab_size: token ids; None takes the tokenizer's.
    """

    num_layers: int = 4
    model_dim: int = 256
    feed_forward_dim: int = 1024
    num_heads: int = 4
    num_kv_heads: int | None = None
    mixer: str = "standard"
    plan: str = "uniform"
    layers: str | None = None
    vocab_size: int | None = None
    qkv_bias: bool = True
    qk_norm: bool = False
    tied_embeddings: bool = False
    rope_base: float = 10000.0
    norm_eps: float = 1e-6
    init_std: float = 0.02

    def build(self, max_len: int, vocab_size: int) -> spec_lib.ModelSpec:
        """The spec, its layers not yet resolved against the mixers.

        Args:
          max_len: tokens a row.
          vocab_size: used where the config leaves it to the tokenizer.

        Raises:
          ValueError: a plan and an explicit list together; whatever the spec refuses.
        """
        if self.layers is not None:
            if (self.mixer, self.plan) != (ModelConfig.mixer, ModelConfig.plan):
                raise ValueError(
                    f"model.layers names every layer by itself, yet model.mixer={self.mixer} and "
                    f"model.plan={self.plan} are set beside it: give the config file the argument "
                    "standard,uniform (FILE.py:standard,uniform), or leave model.layers out"
                )
            layers = spec_lib.parse_layers(self.num_layers, self.layers)
        else:
            layers = spec_lib.plan_layers(self.num_layers, self.mixer, self.plan)
        shared = {f.name for f in dataclasses.fields(spec_lib.ModelSpec)} - {"layers"}
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        sizes = {name: value for name, value in own.items() if name in shared}
        sizes["num_kv_heads"] = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        sizes["vocab_size"] = vocab_size if self.vocab_size is None else self.vocab_size
        return spec_lib.ModelSpec(max_len=max_len, layers=layers, **sizes)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule; the peak rate is the run's `learning_rate`.

    Attributes:
      warmup_steps: steps of linear warm-up from 0.
      schedule: "cosine" (half a cosine down to final_fraction of the peak) or "constant".
      schedule_steps: the step at which the schedule ends; None takes num_steps.
      clip_norm: largest global gradient norm; None does not clip.
      z_loss: weight of log(Z)^2 in the loss.
    """

    warmup_steps: int = 2000
    schedule: str = "cosine"
    schedule_steps: int | None = None
    final_fraction: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.9999
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    z_loss: float = 0.0


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; `data=None` takes all devices that are left."""

    data: int | None = None
    fsdp: int = 1
    tensor: int = 1


@dataclasses.dataclass(frozen=True)
class ComputeConfig:
    """How the model runs, which changes no result beyond rounding.

    Attributes:
      platform: "cpu", "gpu", "tpu" must be there; "auto" takes the best one.
      dtype: "float32" or "bfloat16"; "auto" is bfloat16 on accelerators, float32 on CPU.
      layout: "loop" or "scan" over the layers; "auto" scans on accelerators.
      remat: "none", "dots" or "full": what the backward recomputes.
      micro_batches: parts of a step's batch whose gradients are accumulated.
    """

    platform: str = "auto"
    dtype: str = "auto"
    layout: str = "auto"
    remat: str = "none"
    micro_batches: int = 1


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """Attributes:
    tensorboard: whether TensorBoard events are written.
    wandb_project: Weights & Biases project; None does not use it.
    diagnose_every: steps between per-layer diagnostics; None never.
    sample_prompt: prompt of the sample that is printed at the end; None prints none.
    """

    tensorboard: bool = True
    wandb_project: str | None = None
    diagnose_every: int | None = None
    sample_prompt: str | None = None


@dataclasses.dataclass(frozen=True)
class BenchmarksConfig:
    """Benchmarks of the model while it trains.

    Attributes:
      every: steps between them, and after the last; None never.
      tasks: names of `evaluate`'s tasks; all means the paper's nine.
      data_dir: folder of their documents, as `python -m deconstruct.evaluate.data` writes it.
      limit: the first documents of each task; None takes all.
    """

    every: int | None = None
    tasks: tuple[str, ...] = ("all",)
    data_dir: str | None = None
    limit: int | None = 100


@dataclasses.dataclass(frozen=True)
class NonFiniteConfig:
    """What happens at a step whose loss or gradient is not finite; its update is never applied.

    Attributes:
      policy: "stop" ends the run with an error; "skip" counts the step and goes on.
      max_skips: with "skip", how many in all before the run stops.
    """

    policy: str = "stop"
    max_skips: int = 10


def _directory_and_weight(entry: str) -> tuple[str, Fraction]:
    path, _, text = entry.rpartition("=")
    try:
        weight = Fraction(text)
    except (ValueError, ZeroDivisionError):
        weight = Fraction(0)
    if not path or weight <= 0:
        raise ValueError(
            f"data.mixture entry {entry!r} must be DIR=WEIGHT with a positive weight, such as "
            "data/web=0.7"
        )
    return path, weight


def _positive(value) -> bool:
    return 0 < value < math.inf


def _not_negative(value) -> bool:
    return 0 <= value < math.inf


# Numbers that no run can have are refused at the door; None, where a key allows it, passes.
_RANGES = {
    **dict.fromkeys(
        (
            "num_steps", "batch_size", "max_len", "learning_rate", "checkpoint_every",
            "validate_every", "log_every", "data.validation_rows", "optimizer.schedule_steps",
            "optimizer.eps", "optimizer.clip_norm", "mesh.data", "mesh.fsdp", "mesh.tensor",
            "compute.micro_batches", "log.diagnose_every", "benchmarks.every", "benchmarks.limit",
        ),
        (_positive, "positive"),
    ),
    **dict.fromkeys(
        (
            "data.num_workers", "optimizer.warmup_steps", "optimizer.weight_decay",
            "optimizer.z_loss", "non_finite.max_skips",
        ),
        (_not_negative, "0 or more"),
    ),
    **dict.fromkeys(
        ("optimizer.beta1", "optimizer.beta2"),
        (lambda value: 0 <= value < 1, "at least 0 and below 1"),
    ),
    "seed": (lambda value: 0 <= value < 2**32, "at least 0 and below 2**32"),
    "optimizer.final_fraction": (lambda value: 0 <= value <= 1, "between 0 and 1"),
}  # fmt: skip
_CHOICES = {
    "compute.platform": ("auto", "cpu", "gpu", "tpu"),
    "compute.dtype": ("auto", "float32", "bfloat16"),
    "compute.layout": ("auto", "loop", "scan"),
    "compute.remat": ("none", "dots", "full"),
    "optimizer.schedule": ("cosine", "constant"),
    "non_finite.policy": ("stop", "skip"),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """One run. `batch_size` counts sequences a step; the `*_every` values count steps."""

    num_steps: int = 28_610
    batch_size: int = 256
    max_len: int = 2048
    seed: int = 0
    learning_rate: float = 4e-4
    checkpoint_every: int = 1000
    validate_every: int = 1000
    log_every: int = 10
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    compute: ComputeConfig = dataclasses.field(default_factory=ComputeConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)
    benchmarks: BenchmarksConfig = dataclasses.field(default_factory=BenchmarksConfig)
    non_finite: NonFiniteConfig = dataclasses.field(default_factory=NonFiniteConfig)

    def __post_init__(self):
        for key, (fits, what) in _RANGES.items():
            value = operator.attrgetter(key)(self)
            if value is not None and not fits(value):
                raise ValueError(f"{key} must be {what}, not {value!r}")
        if self.batch_size % self.compute.micro_batches:
            raise ValueError(
                f"compute.micro_batches={self.compute.micro_batches} does not divide "
                f"batch_size={self.batch_size}"
            )
        for key, known in _CHOICES.items():
            value = operator.attrgetter(key)(self)
            if value not in known:
                raise ValueError(spec_lib.unknown_name(f"value of {key}", value, known))
        if self.data.prepare_source is not None and self.data.prepare_tokenizer is None:
            raise ValueError(
                "data.prepare_source needs data.prepare_tokenizer beside it: the path of a "
                "tokenizer.json, a Hugging Face name, or bpe:8192"
            )
        if self.data.mixture and self.data.path is not None:
            raise ValueError(
                f"data.path={self.data.path} and data.mixture are both set: set one of them to "
                "None or ()"
            )
        if self.data.mixture and self.data.prepare_source is not None:
            raise ValueError(
                "data.prepare_source makes data.path alone: prepare the sources of data.mixture "
                "first, and set data.prepare_source to None"
            )
        if self.benchmarks.every is not None and self.benchmarks.data_dir is None:
            raise ValueError(
                "benchmarks.every needs benchmarks.data_dir beside it: a folder that python -m "
                "deconstruct.evaluate.data --output=DIR has written"
            )
        _ = self.data.weights  # refuses what does not parse
        self.model.build(self.max_len, vocab_size=1)  # refuses what no vocabulary would mend


def default() -> ml_collections.ConfigDict:
    """A ConfigDict with every key at its default, for config files to fill in."""
    return _to_config_dict(Config())


def key_type(key: str) -> Any:
    """The annotation of a dotted key; ValueError with the nearest name for one that is unknown."""
    hint: Any = Config
    for part in key.split("."):
        hints = typing.get_type_hints(hint) if dataclasses.is_dataclass(hint) else {}
        if part not in hints:
            raise ValueError(unknown_key(key))
        hint = hints[part]
    return hint


def check_optional(key: str, hint: Any) -> None:
    """Refuses None for a key whose annotation has no None."""
    if types.NoneType not in typing.get_args(hint):
        raise ValueError(f"config key {key!r} must have a value, not None")


def unknown_key(key: str) -> str:
    """The line that refuses a key, dotted or bare, with the nearest that exist."""
    known = _dotted_keys(Config, "")
    by_name = {name.rpartition(".")[2]: name for name in reversed(known)}
    name = key.rpartition(".")[2]
    near = [name] if name in by_name else difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    near = near or difflib.get_close_matches(name, by_name, n=1, cutoff=0.5)
    hint = f"; did you mean {by_name.get(near[0], near[0])!r}?" if near else ""
    return f"unknown config key {key!r}{hint} (all keys and their meaning: deconstruct/config.py)"


def _dotted_keys(cls, prefix: str) -> list[str]:
    keys = []
    for name, hint in typing.get_type_hints(cls).items():
        keys.append(prefix + name)
        if dataclasses.is_dataclass(hint):
            keys += _dotted_keys(hint, f"{prefix}{name}.")
    return keys


def _to_config_dict(instance) -> ml_collections.ConfigDict:
    record = ml_collections.ConfigDict()
    hints = typing.get_type_hints(type(instance))
    for field in dataclasses.fields(instance):
        value, hint = getattr(instance, field.name), hints[field.name]
        if dataclasses.is_dataclass(value):
            record[field.name] = _to_config_dict(value)
        elif types.NoneType in typing.get_args(hint):
            record[field.name] = config_dict.placeholder(_optional(hint))
            record[field.name] = value
        else:
            record[field.name] = value
    return record.lock()


def _optional(hint) -> type:
    """The type T of a `T | None` annotation."""
    return next(arg for arg in typing.get_args(hint) if arg is not types.NoneType)


def parse(record: ml_collections.ConfigDict) -> Config:
    """The run that a filled-in ConfigDict describes.

    Raises:
      ValueError: an unknown key (with the nearest name), a missing one, a value of the wrong type,
        a value that no run can have.
    """
    return _parse(Config, record, "")


def _parse(cls, record, prefix: str):
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    values = {}
    for key in record:
        if key not in fields:
            raise ValueError(unknown_key(prefix + key))
        value = record[key]
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            values[key] = _parse(hint, value, f"{prefix}{key}.")
        else:
            values[key] = _checked(prefix + key, value, hint)
    if missing := [name for name in fields if name not in values]:
        raise ValueError(
            f"config key {prefix + missing[0]!r} is missing; start from config.default() and set "
            "single keys rather than whole groups"
        )
    return cls(**values)


def _checked(name: str, value, hint):
    """The value as `hint` has it: lists become tuples, nothing else changes."""
    if value is None and types.NoneType in typing.get_args(hint):
        return None
    wanted = _optional(hint) if types.NoneType in typing.get_args(hint) else hint
    origin = typing.get_origin(wanted) or wanted
    if origin is tuple and isinstance(value, list | tuple):
        element = typing.get_args(wanted)[0]
        return tuple(_checked(f"{name}[{i}]", item, element) for i, item in enumerate(value))
    if not isinstance(value, origin) or (isinstance(value, bool) and origin is not bool):
        raise ValueError(
            f"{name} must be of type {getattr(origin, '__name__', origin)}, not {value!r}"
        )
    return value


def summary(config: Config) -> str:
    """All keys and values: a line for the run's own, a line for each group."""
    own, groups = [], []
    for key, value in to_dict(config).items():
        if isinstance(value, dict):
            groups.append(f"{key}: " + ", ".join(f"{k}={v}" for k, v in value.items()))
        else:
            own.append(f"{key}={value}")
    return "\n".join([", ".join(own), *groups])


def to_dict(config: Config) -> dict[str, Any]:
    """The run as plain nested dicts, as `config.json` holds it."""
    return dataclasses.asdict(config)
