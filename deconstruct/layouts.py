"""The two layouts of a model's parameters, and the one way between them.

Per layer (`layer_01`, `layer_02`, ...): how they are initialised, stored in checkpoints and read by
tools. By segment (`segment_00`, ...): the leaves of layers that repeat stacked on a leading axis,
so that a scan compiles one repeat of the plan.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from deconstruct.spec import LayerSpec, ModelSpec, Segment, segments

Params = Mapping[str, Any]


def segment_name(index: int) -> str:
    return f"segment_{index:02d}"


def block_name(position: int) -> str:
    """Of the layers at one place in the unit that a segment repeats."""
    return f"block_{position:02d}"


def _unit_layers(spec: ModelSpec, segment: Segment, position: int) -> list[LayerSpec]:
    """The layers that share one traced body: the same place in each repeat of the segment."""
    end = segment.start + segment.unit_len * segment.repeats
    return list(spec.layers[segment.start + position : end : segment.unit_len])


def stack_layers(spec: ModelSpec, params: Params) -> Params:
    """Per-layer to segments. Leaves of repeated layers gain a leading axis named "layers"."""
    stacked = {name: value for name, value in params.items() if not name.startswith("layer_")}
    for index, segment in enumerate(segments(spec)):
        if segment.repeats == 1:
            for layer in spec.layers[segment.start : segment.start + segment.unit_len]:
                stacked[layer.name] = params[layer.name]
            continue
        blocks = stacked[segment_name(index)] = {}
        for position in range(segment.unit_len):
            alike = [params[layer.name] for layer in _unit_layers(spec, segment, position)]
            stack = jax.tree.map(_stack_leaves, *alike, is_leaf=_is_box)
            blocks[block_name(position)] = stack
    return stacked


def unstack_layers(spec: ModelSpec, params: Params) -> Params:
    """The inverse of `stack_layers`; per-layer parameters pass unchanged."""
    flat = {name: value for name, value in params.items() if not name.startswith("segment_")}
    for index, segment in enumerate(segments(spec)):
        if segment_name(index) not in params:
            continue
        for position in range(segment.unit_len):
            stacked = params[segment_name(index)][block_name(position)]
            for repeat, layer in enumerate(_unit_layers(spec, segment, position)):
                flat[layer.name] = jax.tree.map(
                    lambda leaf, repeat=repeat: _unstack_leaf(leaf, repeat),
                    stacked,
                    is_leaf=_is_box,
                )
    return flat


def _is_box(leaf) -> bool:
    return isinstance(leaf, nn.meta.AxisMetadata)


def _stack_leaves(*leaves):
    if _is_box(leaves[0]):
        values = jnp.stack([leaf.unbox() for leaf in leaves])
        return leaves[0].replace(value=values, names=("layers", *leaves[0].names))
    return jnp.stack(leaves)


def _unstack_leaf(leaf, repeat: int):
    if _is_box(leaf):
        return leaf.replace(value=leaf.unbox()[repeat], names=leaf.names[1:])
    return leaf[repeat]
