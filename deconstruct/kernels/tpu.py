"""What Pallas kernels for TPUs share: how arrays lie, and what is done with a block of them.

All heads of a position lie side by side, (B, T, C), as a projection leaves them, so that nothing is
turned round in memory; a kernel takes all heads of a block of positions and goes through them one
by one. One number a head and position lies heads by time, (B, P, T), which is dense on the lanes.

Axes: B batch, T time, H heads (P with those that fill up a multiple of 8), W size of a head, C all
heads side by side, I and J positions of a block.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas.tpu import VMEM, CompilerParams

from deconstruct.kernels.backends import platform
from deconstruct.kernels.precision import block_product

TILE = 128  # positions that lie on the lanes of a register
BUFFER_BYTES = 10 << 20  # of 16 MiB that the compiler grants a kernel; the rest is for its blocks

product = block_product


def too_large(num_bytes: int, what: str = f"{TILE} positions of all heads") -> str | None:
    """The reason why what a grid step needs cannot be held, or None."""
    if num_bytes <= BUFFER_BYTES:
        return None
    return f"{what} take {num_bytes} bytes, more than {BUFFER_BYTES}"


def fill_rows(count: int) -> int:
    """So many that registers are full; P, of heads."""
    return -(-count // 8) * 8


def by_head(x_BHT: jax.Array) -> jax.Array:
    """(B, P, T) in float32, at least a tile long."""
    heads, length = x_BHT.shape[1:]
    padding = (0, fill_rows(heads) - heads), (0, max(TILE - length, 0))
    return jnp.pad(x_BHT.astype(jnp.float32), ((0, 0), *padding))


def by_run(runs_BT: jax.Array) -> jax.Array:
    """(B, 1, T), at least a tile long."""
    return jnp.pad(runs_BT, ((0, 0), (0, max(TILE - runs_BT.shape[1], 0))))[:, None]


def by_time(x_BTHW: jax.Array) -> jax.Array:
    """(B, T, C), at least a tile long."""
    x_BTC = x_BTHW.reshape(*x_BTHW.shape[:2], -1)
    return jnp.pad(x_BTC, ((0, 0), (0, max(TILE - x_BTC.shape[1], 0)), (0, 0)))


def apart(x_BTC: jax.Array, shape: Sequence[int]) -> jax.Array:
    """(B, T, H, W) again."""
    return x_BTC[:, : shape[1]].reshape(shape)


def call(kernel: Callable, grid, inputs, outputs, scratch, *, walk: int) -> list[jax.Array]:
    """A Pallas call over blocks of (B, .., T) and (B, T, C).

    Args:
      kernel: takes refs of the inputs, the outputs and the scratch.
      grid: steps an axis; the first is B.
      inputs: (array, axis of time, rows of a block, grid indices -> number of the block).
      outputs: the same, with a ShapeDtypeStruct for the array.
      scratch: (shape, dtype).
      walk: how many of the grid's last axes are walked in turn.
    """

    def spec(x, axis: int, rows: int, number: Callable):
        block = (None, rows, x.shape[2]) if axis == 1 else (None, x.shape[1], rows)

        def place(b, *at):
            return (b, number(*at), 0) if axis == 1 else (b, 0, number(*at))

        return x, pl.BlockSpec(block, place)

    placed = ([spec(*x) for x in arrays] for arrays in (inputs, outputs))
    return call_blocks(kernel, grid, *placed, scratch, walk=walk)


def call_blocks(kernel: Callable, grid, inputs, outputs, scratch, *, walk: int) -> list[jax.Array]:
    """The same over blocks of any kind: `inputs` and `outputs` are (array, its BlockSpec)."""
    semantics = ("parallel",) * (len(grid) - walk) + ("arbitrary",) * walk
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[spec for _, spec in inputs],
        out_specs=[spec for _, spec in outputs],
        out_shape=[x for x, _ in outputs],
        scratch_shapes=[VMEM(*x) for x in scratch],
        compiler_params=CompilerParams(dimension_semantics=semantics),
        interpret=platform() == "cpu",
    )(*(x for x, _ in inputs))


def exists(length: int, start, size: int) -> tuple[jax.Array, jax.Array]:
    """Which positions of a block there are: (1, I) and (I, 1)."""
    left = length - start
    row = jax.lax.broadcasted_iota(jnp.int32, (1, size), 1) < left
    return row, jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0) < left


def sees(runs_1I, runs_1J, ahead, size: int, *, keys_first: bool = False) -> jax.Array:
    """Whether query i sees key j, of blocks whose first positions are `ahead` apart.

    (I, J), or (J, I); `runs` are None where documents are not isolated.
    """
    down = jax.lax.broadcasted_iota(jnp.int32, (size, size), 0)
    along = jax.lax.broadcasted_iota(jnp.int32, (size, size), 1)
    seen = down <= along + ahead if keys_first else down + ahead >= along
    if runs_1I is None:
        return seen
    first, second = (runs_1J, runs_1I) if keys_first else (runs_1I, runs_1J)
    turned = jnp.broadcast_to(first.astype(jnp.float32), (size, size)).T  # exact below 2^24
    return seen & (turned == second.astype(jnp.float32))


def stack(columns: Sequence[jax.Array], fill: float) -> jax.Array:
    """(I, 1) of each head to (P, I)."""
    size, missing = len(columns[0]), fill_rows(len(columns)) - len(columns)
    rest = [jnp.full((size, missing), fill, jnp.float32)] if missing else []
    return jnp.concatenate([*columns, *rest], axis=1).T
