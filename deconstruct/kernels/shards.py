"""Kernels that the compiler cannot divide run on each device's own rows and heads."""

import math
from collections.abc import Callable, Sequence

import jax
from jax.sharding import PartitionSpec as P

from deconstruct import sharding

_HEADS = ("tensor",)


def per_shard(function: Callable, given: Sequence[str], found: Sequence[str], v_BTGW) -> Callable:
    """`function` on each device's share of arrays whose axes are named by letters.

    B lies over the mesh's batch axes and H and G over its tensor axis; what they do not divide,
    and every other axis, lies whole on every device.

    Args:
      function: takes arrays, or None, with the axes `given`; returns a tuple with the axes `found`.
      given: such as ("BTHK", "BT").
      found: of the results.
      v_BTGW: the values, which tell how many rows and groups there are.
    """
    mesh = sharding.active_mesh()
    if mesh is None:
        return function
    axes = _axes(mesh, v_BTGW.shape[0], v_BTGW.shape[2])

    def specs(names: Sequence[str]):
        return tuple(P(*(axes.get(letter, ()) or None for letter in name)) for name in names)

    return jax.shard_map(
        function, mesh=mesh, in_specs=specs(given), out_specs=specs(found), check_vma=False
    )


def sizes_of_one(batch: int, heads: int, groups: int) -> tuple[int, int, int]:
    """How many rows, heads and groups of so many `per_shard` gives to each device."""
    mesh = sharding.active_mesh()
    if mesh is None:
        return batch, heads, groups
    axes = _axes(mesh, batch, groups)
    over_rows, over_heads = (math.prod(mesh.shape[axis] for axis in axes[x]) for x in "BH")
    return batch // over_rows, heads // over_heads, groups // over_heads


def _axes(mesh, batch: int, groups: int) -> dict[str, tuple[str, ...]]:
    """Letter of an array's axis -> the mesh axes that it lies over."""
    heads = _HEADS if groups % math.prod(mesh.shape[axis] for axis in _HEADS) == 0 else ()
    rows = sharding.BATCH_AXES if batch % sharding.batch_shards(mesh) == 0 else ()
    return {"B": rows, "H": heads, "G": heads}
