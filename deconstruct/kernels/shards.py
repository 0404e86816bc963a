"""Kernels that the compiler cannot divide run on each device's own rows and heads."""

from collections.abc import Callable, Sequence

import jax
from jax.sharding import PartitionSpec as P

from deconstruct import sharding

_HEADS = "tensor"


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
    batch, _, groups, _ = v_BTGW.shape
    heads = _HEADS if groups % mesh.shape[_HEADS] == 0 else None
    axes = {
        "B": sharding.BATCH_AXES if batch % sharding.batch_shards(mesh) == 0 else None,
        "H": heads,
        "G": heads,
    }

    def specs(names: Sequence[str]):
        return tuple(P(*(axes.get(letter) for letter in name)) for name in names)

    return jax.shard_map(
        function, mesh=mesh, in_specs=specs(given), out_specs=specs(found), check_vma=False
    )
