"""What a model is: one value that names every layer's token mixer, and nothing else decides.

A `ModelSpec` is printed at start, stored as JSON in each checkpoint, and is what training,
evaluation, analysis and generation build the model from. Layers count from 1, as in the paper
(section 4.2, table 11). This file imports no JAX: a spec can be read and checked anywhere.
"""

import ast
import dataclasses
import difflib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

STANDARD = "standard"
VOCAB_MULTIPLE = 128


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """The one line that refuses `name`: the nearest known name first, then all of them."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {what} {name!r}: {hint}known: {', '.join(known)}"


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One layer: its original number, its mixer, and that mixer's options as sorted pairs.

    `options` may be given as a mapping. Numbers survive `keep_layers`, so a layer keeps the name
    of its parameters when others are removed.
    """

    number: int
    mixer: str
    options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self):
        pairs = self.options.items() if isinstance(self.options, Mapping) else self.options
        object.__setattr__(self, "options", tuple(sorted((key, value) for key, value in pairs)))

    @property
    def kind(self) -> tuple[str, tuple[tuple[str, Any], ...]]:
        """What layers of equal computation share: all but the number."""
        return self.mixer, self.options

    @property
    def name(self) -> str:
        """The layer's key in the parameter tree, such as `layer_07`."""
        return f"layer_{self.number:02d}"


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A decoder in full. Sizes are counts of elements; `max_len` counts tokens.

    Raises:
      ValueError: sizes that cannot be (heads that do not divide, an odd head size, no layers).
    """

    vocab_size: int
    max_len: int
    model_dim: int
    feed_forward_dim: int
    num_heads: int
    num_kv_heads: int
    layers: tuple[LayerSpec, ...]
    qkv_bias: bool = True
    qk_norm: bool = False
    tied_embeddings: bool = False
    rope_base: float = 10000.0
    norm_eps: float = 1e-6
    init_std: float = 0.02

    def __post_init__(self):
        object.__setattr__(self, "layers", tuple(self.layers))
        for field in ("vocab_size", "max_len", "model_dim", "feed_forward_dim", "num_heads",
                      "num_kv_heads"):  # fmt: skip
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field} must be a positive integer, not {value!r}")
        for field in ("rope_base", "norm_eps", "init_std"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} must be positive, not {getattr(self, field)!r}")
        _check_heads(self)
        numbers = [layer.number for layer in self.layers]
        if not numbers:
            raise ValueError("a model needs at least one layer; this one names none")
        if numbers[0] < 1 or any(b <= a for a, b in itertools.pairwise(numbers)):
            raise ValueError(f"layer numbers must rise from 1 without repeats, not {numbers}")

    @property
    def head_dim(self) -> int:
        return self.model_dim // self.num_heads

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and head tables; those past `vocab_size` are zero for ever."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def to_json(self) -> str:
        """The spec as JSON text: one object, layers with all their options."""
        record = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        record["layers"] = [
            {"number": layer.number, "mixer": layer.mixer, "options": dict(layer.options)}
            for layer in self.layers
        ]
        return json.dumps(record, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "ModelSpec":
        """The inverse of `to_json`; ValueError for a key that is missing or unknown."""
        record = json.loads(text)
        _check_keys("model spec key", record, [f.name for f in dataclasses.fields(cls)])
        layer_keys = [f.name for f in dataclasses.fields(LayerSpec)]
        for layer in record["layers"]:
            _check_keys("layer key", layer, layer_keys)
        layers = tuple(LayerSpec(**layer) for layer in record["layers"])
        return cls(**{**record, "layers": layers})

    def resolve(self, option_types: Mapping[str, type]) -> "ModelSpec":
        """The same spec with every layer's options checked and written out in full.

        Args:
          option_types: the registry's facts, mixer name to its frozen options dataclass.

        Raises:
          ValueError: an unknown mixer, an option that the mixer lacks, or a value that it refuses.
        """
        layers = tuple(_resolve_layer(layer, option_types) for layer in self.layers)
        return dataclasses.replace(self, layers=layers)

    def table(self) -> str:
        """One line a layer: number, mixer, every option."""
        lines = []
        for layer in self.layers:
            options = " ".join(f"{key}={value}" for key, value in layer.options)
            lines.append(f"{layer.number:>4}  {layer.mixer:<16}{options}".rstrip())
        return "\n".join(lines)


def _check_heads(spec: ModelSpec) -> None:
    if spec.model_dim % spec.num_heads:
        raise ValueError(
            f"num_heads={spec.num_heads} does not divide model_dim={spec.model_dim}; "
            f"choose one of {_divisors(spec.model_dim)}"
        )
    if spec.num_heads % spec.num_kv_heads:
        raise ValueError(
            f"num_kv_heads={spec.num_kv_heads} does not divide num_heads={spec.num_heads}; "
            f"choose one of {_divisors(spec.num_heads)}"
        )
    if spec.head_dim % 2:
        raise ValueError(
            f"the head size model_dim / num_heads = {spec.head_dim} is odd; rotary positions "
            "rotate pairs: change model_dim or num_heads"
        )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _check_keys(what: str, record: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in record:
        if key not in known:
            raise ValueError(unknown_name(what, key, known))
    if missing := [key for key in known if key not in record]:
        raise ValueError(f"missing {what} {missing[0]!r}")


def _resolve_layer(layer: LayerSpec, option_types: Mapping[str, type]) -> LayerSpec:
    where = f"layer {layer.number}"
    if layer.mixer not in option_types:
        raise ValueError(f"{where}: {unknown_name('mixer', layer.mixer, option_types)}")
    option_type = option_types[layer.mixer]
    known = [field.name for field in dataclasses.fields(option_type)]
    for key, _ in layer.options:
        if not known:
            raise ValueError(f"{where}: mixer {layer.mixer!r} takes no options, {key!r} is given")
        if key not in known:
            raise ValueError(f"{where}: {unknown_name(f'option of {layer.mixer}', key, known)}")
    try:
        options = option_type(**dict(layer.options))
    except ValueError as error:
        raise ValueError(f"{where}: {layer.mixer}: {error}") from None
    return dataclasses.replace(layer, options=dataclasses.asdict(options))


# Layer plans (table 11): the layers that stay standard in a model of `n` layers.
PLANS: dict[str, Callable[[int], set[int]]] = {
    "uniform": lambda n: set(),
    "even": lambda n: set(range(2, n + 1, 2)),
    "odd": lambda n: set(range(1, n + 1, 2)),
    "top": lambda n: set(range(1, n // 2 + 1)),
    "middle": lambda n: {*range(1, n // 4 + 1), *range(n - n // 4 + 1, n + 1)},
    "bottom": lambda n: set(range(n // 2 + 1, n + 1)),
    "quarter": lambda n: set(range(4, n + 1, 4)),
    "first": lambda n: {1},
    "last": lambda n: {n},
    "bilateral": lambda n: {1, n},
}


def plan_layers(num_layers: int, mixer: str, plan: str) -> tuple[LayerSpec, ...]:
    """The layers of a named plan.

    Args:
      num_layers: layers in the model.
      mixer: the simple mixer, or several joined by `+`, which then take turns over the layers
        that are not standard; each may carry options: `rnd_emb_qk[sigma=0.05]+approximate`.
      plan: a key of `PLANS`.

    Raises:
      ValueError: an unknown plan, or one that does not fit the mixer or the number of layers.
    """
    if plan not in PLANS:
        raise ValueError(unknown_name("layer plan", plan, PLANS))
    if num_layers < 1:
        raise ValueError(f"num_layers must be at least 1, not {num_layers}")
    simple = [_parse_mixer(word) for word in mixer.split("+")]
    standard = PLANS[plan](num_layers)
    if plan != "uniform":
        if STANDARD in dict(simple):
            raise ValueError(
                f"plan {plan!r} already says which layers are {STANDARD!r}; name a simple mixer, "
                f"or use plan 'uniform' for a model of standard layers"
            )
        if not standard or len(standard) == num_layers:
            raise ValueError(
                f"plan {plan!r} needs more than {num_layers} layers: it would make "
                f"{'all' if standard else 'none'} of them standard"
            )
    if len(simple) > num_layers - len(standard):
        raise ValueError(
            f"plan {plan!r} leaves {num_layers - len(standard)} of {num_layers} layers to the "
            f"{len(simple)} mixers of {mixer!r}; use more layers or fewer mixers"
        )
    turns = iter(range(num_layers))
    return tuple(
        LayerSpec(number, STANDARD)
        if number in standard
        else LayerSpec(number, *simple[next(turns) % len(simple)])
        for number in range(1, num_layers + 1)
    )


def parse_layers(num_layers: int, text: str) -> tuple[LayerSpec, ...]:
    """The layers of an explicit list, written as words with spaces between them.

    Either one word a layer in order (`standard mlp standard`), or each mixer with the numbers of
    its layers (`standard@1,3-5 mlp@2,6`). A word may carry options: `mlp[width=96]@2,6`.

    Raises:
      ValueError: a layer named twice, none at all, or outside 1..num_layers; a malformed word.
    """
    words = text.split()
    if torn := next((word for word in words if word.count("[") != word.count("]")), None):
        raise ValueError(f"layers {text!r}: no space may stand between the brackets of {torn!r}")
    located = [word for word in words if "@" in word]
    if located and len(located) != len(words):
        raise ValueError(f"layers {text!r}: give numbers (mixer@1,2) to every word or to none")
    chosen: dict[int, LayerSpec] = {}
    for position, word in enumerate(words, start=1):
        head, _, numbers = word.partition("@")
        mixer, options = _parse_mixer(head)
        for number in parse_numbers(numbers) if located else [position]:
            if not 1 <= number <= num_layers:
                raise ValueError(f"{word!r} names layer {number} of a model of {num_layers}")
            if number in chosen:
                raise ValueError(
                    f"layers: layer {number} is both {chosen[number].mixer!r} and {mixer!r}"
                )
            chosen[number] = LayerSpec(number, mixer, dict(options))
    if missing := [n for n in range(1, num_layers + 1) if n not in chosen]:
        raise ValueError(f"layers: {text!r} leaves out layer {missing[0]} of {num_layers}")
    return tuple(chosen[number] for number in range(1, num_layers + 1))


def _parse_mixer(word: str) -> tuple[str, dict[str, Any]]:
    mixer, bracket, rest = word.partition("[")
    if bracket and not rest.endswith("]"):
        raise ValueError(f"{word!r} opens '[' and does not close it")
    options = {}
    for pair in rest.removesuffix("]").split(",") if bracket else []:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"option {pair!r} of {word!r} is not of the form name=value")
        if key in options:
            raise ValueError(f"{word!r} gives option {key!r} twice")
        try:
            options[key] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            raise ValueError(f"the value of {pair!r} in {word!r} is no number") from None
    return mixer, options


def parse_numbers(text: str) -> list[int]:
    numbers = []
    for part in text.split(","):
        low, dash, high = part.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise ValueError(f"layers: {part!r} is neither a layer number nor a range such as 3-5")
        first, last = int(low), int(high if dash else low)
        if last < first:
            raise ValueError(f"layers: range {part!r} ends before it begins")
        numbers.extend(range(first, last + 1))
    return numbers


def keep_layers(spec: ModelSpec, params: Mapping[str, Any], numbers: Iterable[int]):
    """A smaller model of the named layers, which keep their numbers and their parameters.

    Args:
      spec: the model.
      params: its parameters in the per-layer layout (`layer_01`, ...), as checkpoints store them.
      numbers: the original numbers of the layers to keep.

    Returns:
      (spec, params) of the smaller model; neither argument is changed.

    Raises:
      ValueError: a number that the model lacks, or none at all.
    """
    keep = set(numbers)
    have = {layer.number for layer in spec.layers}
    if unknown := sorted(keep - have):
        raise ValueError(f"layer {unknown[0]} is not in this model; it has {sorted(have)}")
    if not keep:
        raise ValueError("no layer would remain")
    assert {layer.name for layer in spec.layers} <= params.keys(), "parameters must be per layer"
    layers = tuple(layer for layer in spec.layers if layer.number in keep)
    dropped = {layer.name for layer in spec.layers if layer.number not in keep}
    kept = {name: value for name, value in params.items() if name not in dropped}
    return dataclasses.replace(spec, layers=layers), kept


def skip(spec: ModelSpec, params: Mapping[str, Any]):
    """The model with its non-standard layers removed whole (section 4.2); see `keep_layers`."""
    standard = [layer.number for layer in spec.layers if layer.mixer == STANDARD]
    if not standard:
        raise ValueError("skip removes all layers that are not standard, and no other is here")
    return keep_layers(spec, params, standard)


@dataclasses.dataclass(frozen=True)
class Segment:
    """`repeats` consecutive runs of the same `unit_len` layers, from index `start` on (from 0)."""

    start: int
    unit_len: int
    repeats: int


def segments(spec: ModelSpec) -> tuple[Segment, ...]:
    """The layers cut into repeats for scanning: fewest traced bodies, ties by fewest segments."""
    kinds = [layer.kind for layer in spec.layers]
    total = len(kinds)
    best: list[tuple[int, int, tuple[Segment, ...]]] = [(0, 0, ())] * (total + 1)
    for start in reversed(range(total)):
        choices = []
        for unit_len in range(1, total - start + 1):
            unit = kinds[start : start + unit_len]
            repeats = 1
            while kinds[start + repeats * unit_len :][:unit_len] == unit:
                repeats += 1
            for count in range(1, repeats + 1):
                bodies, pieces, rest = best[start + count * unit_len]
                here = Segment(start, unit_len, count)
                choices.append((bodies + unit_len, pieces + 1, (here, *rest)))
        best[start] = min(choices, key=lambda choice: choice[:2])
    return best[0][2]
