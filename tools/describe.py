"""What a config's model is and costs: `python -m tools.describe --config=FILE.py[:ARGUMENT]`.

Prints the layers with all their options, parameters, FLOPs, memory, and for each mixer what the
paper prints beside our own counts. Nothing is computed or compiled; see `deconstruct/flops.py` for
what is counted.
"""

import dataclasses
import pathlib
from collections.abc import Iterator

import jax.numpy as jnp
from absl import flags

from deconstruct import config as config_lib
from deconstruct import decoder, entry, flops, metrics, mixers, paper
from deconstruct.data import prepared
from deconstruct.spec import STANDARD, LayerSpec, ModelSpec

DEVICE, ASSUMED_MFU = "NVIDIA H200", 0.4
GIB = 2**30


def describe(config: config_lib.Config) -> str:
    """The whole text.

    Raises:
      ValueError: a model that cannot be; a vocabulary that is nowhere to be found.
    """
    spec = mixers.resolve(config.model.build(config.max_len, vocab_size_of(config)))
    parts = (model_lines(spec), flops_lines(config, spec), memory_lines(config, spec))
    return "\n".join([*(line for part in parts for line in part), *mixer_table(spec)])


def vocab_size_of(config: config_lib.Config) -> int:
    """The config's vocabulary, or that of its prepared data."""
    if config.model.vocab_size is not None:
        return config.model.vocab_size
    try:
        return prepared.read_info(pathlib.Path(config.data.path or "").expanduser()).vocab_size
    except ValueError as error:
        raise ValueError(
            f"model.vocab_size is left to the tokenizer of the data, and {error}; or give "
            "--config.model.vocab_size=N"
        ) from error


def model_lines(spec: ModelSpec) -> Iterator[str]:
    """Sizes, layers with their options and parameters, totals."""
    standard = flops.mixer_params(spec, LayerSpec(1, STANDARD))
    yield (
        f"{spec.num_layers} layers of width {spec.model_dim}: {spec.num_heads} heads of "
        f"{spec.head_dim} in {spec.num_kv_heads} key/value groups, feed-forward "
        f"{spec.feed_forward_dim}, up to {spec.max_len} tokens, vocabulary {spec.vocab_size:,} "
        f"(tables padded to {spec.padded_vocab_size:,} rows)"
    )
    yield "\nlayer  mixer           parameters of the mixer, options"
    for layer, line in zip(spec.layers, spec.table().splitlines(), strict=True):
        params = flops.mixer_params(spec, layer)
        beside = f" ({params - standard:+,} beside standard)" if params != standard else ""
        options = line.split(maxsplit=2)[2:]
        yield " ".join([f"{layer.number:>5}  {layer.mixer:<16}{params:,}{beside}", *options])
    total, drift = flops.num_params(spec), _drift(spec, standard)
    yield f"\nparameters {total:,}: {drift:+,} ({drift / (total - drift):+.3%}) beside all standard"


def _drift(spec: ModelSpec, standard: int) -> int:
    return sum(flops.mixer_params(spec, layer) - standard for layer in spec.layers)


def flops_lines(config: config_lib.Config, spec: ModelSpec) -> Iterator[str]:
    """A token, a step, the run."""
    forward = flops.forward_flops(spec, config.batch_size)
    step = flops.train_flops(spec, config.batch_size)
    tokens = config.batch_size * spec.max_len
    hours = step * config.num_steps / (metrics.PEAK_FLOPS[DEVICE] * ASSUMED_MFU) / 3600
    yield "FLOPs of matrix products (causal attention as full squares; train = 3 x forward)"
    yield f"  a token     forward {forward.total / tokens:.3e}, train {step / tokens:.3e}"
    yield f"  a step      {step:.3e} for {config.batch_size} x {spec.max_len} tokens: " + ", ".join(
        f"{name} {getattr(forward, field) / forward.total:.1%}"
        for name, field in (
            ("mixers", "mixers"), ("feed-forward", "feed_forward"),
            ("fixed streams", "streams"), ("head", "head"),
        )
    )  # fmt: skip
    yield (
        f"  the run     {step * config.num_steps:.3e} for {config.num_steps:,} steps: "
        f"{hours:.3g} hours of one {DEVICE} at {ASSUMED_MFU:.0%} of its bfloat16 peak"
    )


def memory_lines(config: config_lib.Config, spec: ModelSpec) -> Iterator[str]:
    """GiB over all devices together; activations in the dtype that an accelerator would take."""
    dtype = jnp.float32 if config.compute.dtype == "float32" else jnp.bfloat16
    compute = decoder.Compute(dtype, config.compute.remat)
    rows = config.batch_size // config.compute.micro_batches
    params = 4 * flops.num_params(spec)
    kept = flops.activation_bytes(spec, rows, compute)
    cache = flops.cache_bytes(spec, 1, spec.max_len, dtype)
    yield "memory in GiB, all devices together"
    yield (
        f"  state       parameters {params / GIB:.3f}, moments {2 * params / GIB:.3f}, "
        f"gradients {params / GIB:.3f} (float32)"
    )
    yield (
        f"  activations {kept / GIB:.3f} kept by the layers for {rows} rows at a time "
        f"({jnp.dtype(dtype).name}, remat {config.compute.remat}; before fusion)"
    )
    yield f"  decoding    {cache / GIB:.4f} of caches for one row of {spec.max_len} tokens"


def mixer_table(spec: ModelSpec) -> Iterator[str]:
    """Each kind of layer once: our counts, and the paper's formulas with their values."""
    yield (
        f"\none mixer on one row of {spec.max_len} tokens, bfloat16; the paper's formulas as "
        "printed (tables 5 to 8), which count otherwise"
    )
    first_of_kind: dict[str, LayerSpec] = {}
    for layer in spec.layers:
        first_of_kind.setdefault(layer.mixer, layer)
    for layer in first_of_kind.values():
        yield from _mixer_lines(spec, layer, paper.PRINTED_COSTS.get(layer.mixer))


def _mixer_lines(
    spec: ModelSpec, layer: LayerSpec, printed: paper.PrintedCost | None
) -> Iterator[str]:
    length = spec.max_len
    sizes = {"B": 1, "L": length, "d": spec.model_dim, "h": spec.num_heads, "t": 1}

    def line(what: str, ours: int | None, formula: str | None) -> str:
        ours_value = "-" if ours is None else f"{ours:.3e}"
        paper_value = "-" if formula is None else f"{paper.evaluate(formula, **sizes):.3e}"
        text = f"    {what:<18} ours {ours_value:<10}  paper {paper_value:<10} {formula or ''}"
        return text.rstrip()

    def by_paper(field: str) -> str | None:
        return printed and getattr(printed, field)

    precomputed = paper.PRINTED_FLOPS_OF_PRECOMPUTED_MAPS.get(layer.mixer, {})
    yield f"  {layer.mixer}" + (f": time of order {printed.time}" if printed else "")
    prefill = flops.mixer_flops(spec, layer, 1, length), None
    decode = flops.mixer_decode_flops(spec, layer, length)
    reads_map = mixers.MIXERS[layer.mixer].keeps_map(spec, length)
    for what, field, (ours, by_map) in (
        ("prefill FLOPs", "prefill_flops", prefill),
        ("decode FLOPs", "decode_flops", (None, decode) if reads_map else (decode, None)),
    ):
        yield line(what, ours, by_paper(field))
        if field in precomputed:
            yield line("  maps precomputed", by_map, precomputed[field])
    kept = flops.mixer_activation_bytes(spec, layer, 1, jnp.bfloat16)
    yield line("activation bytes", kept, by_paper("activation_bytes"))
    shared = flops.cache_bytes(dataclasses.replace(spec, layers=(layer,)), 0, length, jnp.bfloat16)
    in_row = flops.mixer_cache_bytes(spec, layer, length, itemsize=2)
    yield line("cache bytes", in_row + shared, by_paper("cache_bytes"))
    if shared:
        yield f"      of these {in_row:.3e} for each row, {shared:.3e} once for all rows"


def main(argv) -> None:
    del argv
    if flags.FLAGS.config is None:
        raise ValueError("--config is missing; for example --config=configs/quickstart.py")
    print(describe(config_lib.parse(flags.FLAGS.config)))


if __name__ == "__main__":
    entry.define_config_flag()
    entry.run(main)
