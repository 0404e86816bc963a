"""The mesh, and the one table from logical axis names to mesh axes.

Parameters carry logical names ("embed", "heads", ...), set where they are made in `layers.py`.
Only this file knows which mesh axis a name lands on. Axes of size 1 are normal: one device is
the mesh (1, 1, 1). Everything that trains or evaluates runs under `with jax.set_mesh(mesh)`.
"""

import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")

# Logical axis of a parameter -> mesh axis. None keeps the axis whole on every device.
RULES: tuple[tuple[str, str | None], ...] = (
    ("vocab", "tensor"),
    ("embed", "fsdp"),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("feed_forward", "tensor"),
    ("layers", None),
    ("norm", None),
)


def make_mesh(data: int | None = None, fsdp: int = 1, tensor: int = 1, devices=None) -> Mesh:
    """A mesh over `devices` (default: all); `data=None` takes the devices that are left.

    Raises:
      ValueError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    rest, remainder = divmod(len(devices), fsdp * tensor)
    data = rest if data is None else data
    if remainder or data != rest:
        given = f"fsdp={fsdp} x tensor={tensor}"
        given = given if remainder else f"data={data} x {given}"
        raise ValueError(
            f"mesh {given} does not fit {len(devices)} device(s): the product of mesh.data, "
            f"mesh.fsdp and mesh.tensor must be {len(devices)}"
        )
    return jax.make_mesh(
        (data, fsdp, tensor), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices
    )


def active_mesh() -> jax.sharding.AbstractMesh | None:
    """The mesh of the surrounding `jax.set_mesh`; None without one or when all its axes are 1."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 else mesh


def batch_shards(mesh: Mesh | jax.sharding.AbstractMesh) -> int:
    """In how many parts the rows of a batch lie."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Leading axis over the batch axes, everything else whole."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def constrain_batch(x: jax.Array) -> jax.Array:
    """Pins the leading axis of an activation to the batch axes; a no-op on one device.

    A leading axis that they do not divide (the fixed streams' rows) is kept whole instead.
    """
    mesh = active_mesh()
    if mesh is None:
        return x
    fits = x.shape[0] % batch_shards(mesh) == 0
    return jax.lax.with_sharding_constraint(
        x, PartitionSpec(BATCH_AXES) if fits else PartitionSpec()
    )


def constrain_param(x: jax.Array, *names: str | None) -> jax.Array:
    """Pins a parameter's axes by their logical names, None for whole; a no-op on one device."""
    if active_mesh() is None:
        return x
    rules = dict(RULES)
    axes = (None if name is None else rules[name] for name in names)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))


def param_shardings(boxed_params: Any, mesh: Mesh) -> Any:
    """The NamedSharding of each leaf of a parameter tree whose leaves carry logical names."""
    specs = nn.get_partition_spec(boxed_params)
    return nn.logical_to_mesh_sharding(specs, mesh, RULES)


def check_params(boxed_params: Any, mesh: Mesh) -> None:
    """Refuses parameters with an axis that does not divide over its mesh axis.

    Raises:
      ValueError: naming the parameter, the mesh axis and the nearest sizes that fit.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(boxed_params, is_leaf=_is_boxed):
        if not _is_boxed(leaf):
            continue
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        for size, logical in zip(leaf.value.shape, leaf.names, strict=True):
            if logical is not None:
                check_sizes(mesh, {f"{logical} of {name}": (size, logical)})


def _is_boxed(x: Any) -> bool:
    return isinstance(x, nn.Partitioned)


def place_batch(batch: Any, mesh: Mesh) -> Any:
    """A host's rows (a tree of NumPy arrays) as global arrays over the batch axes."""
    sharding = batch_sharding(mesh)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), batch)


def place_whole_batch(batch: Any, mesh: Mesh) -> Any:
    """The same, of arrays that every host has whole."""
    sharding = batch_sharding(mesh)

    def place(x):
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(place, batch)


def constrain_whole(x: jax.Array) -> jax.Array:
    """Gives every device the whole array, so that every host can read it."""
    return x if active_mesh() is None else jax.lax.with_sharding_constraint(x, PartitionSpec())


def check_sizes(mesh: Mesh, sizes: Mapping[str, tuple[int, str]]) -> None:
    """Refuses sizes that the mesh axis under their logical name does not divide.

    Args:
      mesh: the mesh.
      sizes: name of the config value -> (its size, logical axis; "batch" for rows).

    Raises:
      ValueError: naming the value, the mesh axis and the nearest sizes that fit.
    """
    rules = dict(RULES)
    for name, (size, logical) in sizes.items():
        if logical == "batch":
            parts, axis = batch_shards(mesh), "data x fsdp"
        else:
            axis = rules[logical]
            parts = 1 if axis is None else mesh.shape[axis]
        if size % parts:
            below, above = size // parts * parts, -(-size // parts) * parts
            nearest = f"{below} or {above}" if below else f"{above}"
            raise ValueError(
                f"{name}={size} does not divide over mesh axis {axis} of size {parts}; "
                f"nearest sizes that do: {nearest}"
            )
