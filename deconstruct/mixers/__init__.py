"""The registry: mixer name -> class. A new mixer is one file and one line here."""

import dataclasses

from deconstruct.mixers.approximate import Approximate
from deconstruct.mixers.base import Mixer, MixerContext
from deconstruct.mixers.fixed_qk import FixedSeqQK, RndEmbQK
from deconstruct.mixers.mlp import MLP
from deconstruct.mixers.non_approximate import NonApproximate
from deconstruct.mixers.standard import Standard
from deconstruct.mixers.static_emb_qk import StaticEmbQK
from deconstruct.spec import LayerSpec, ModelSpec

MIXERS: dict[str, type[Mixer]] = {
    "standard": Standard,
    "mlp": MLP,
    "approximate": Approximate,
    "non_approximate": NonApproximate,
    "rnd_emb_qk": RndEmbQK,
    "fixed_seq_qk": FixedSeqQK,
    "static_emb_qk": StaticEmbQK,
}


def resolve(spec: ModelSpec) -> ModelSpec:
    """The spec with every layer's mixer and options checked and written out in full.

    Raises:
      ValueError: an unknown mixer or option, or layers that read one fixed stream with
        different options.
    """
    spec = spec.resolve({name: mixer.Options for name, mixer in MIXERS.items()})
    spec = dataclasses.replace(spec, layers=tuple(_complete(spec, layer) for layer in spec.layers))
    streams: dict[str, LayerSpec] = {}
    for layer in spec.layers:
        stream = MIXERS[layer.mixer].stream
        first = streams.setdefault(stream, layer) if stream else layer
        if first.options != layer.options:
            raise ValueError(
                f"layers {first.number} and {layer.number} read the one stream {stream!r} with "
                f"different options: {dict(first.options)} and {dict(layer.options)}"
            )
    return spec


def _complete(spec: ModelSpec, layer: LayerSpec) -> LayerSpec:
    options = MIXERS[layer.mixer].complete_options(spec, options_of(layer))
    return dataclasses.replace(layer, options=dataclasses.asdict(options))


def options_of(layer: LayerSpec):
    """The layer's options as its mixer's own dataclass."""
    return MIXERS[layer.mixer].Options(**dict(layer.options))


__all__ = ["MIXERS", "Mixer", "MixerContext", "options_of", "resolve"]
