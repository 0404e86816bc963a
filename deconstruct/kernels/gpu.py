"""What Pallas kernels for NVIDIA GPUs share: how a program's arrays are cut, and read and written.

A program takes one head, or a group. Triton's blocks have sides of powers of two; where a head or a
row does not fill its block, what is missing is neither read nor written, so that nothing is padded
in memory and what lies there never counts.

JAX 0.12 announces the end of this way to write for GPUs. A CPU can interpret it, so that it proves
a kernel's numbers before any GPU does; where it will be gone, what is written with it is refused
and the other backends stay (`prefix_triton` goes through Triton itself).

Axes: B batch, T time, H heads, W size of a head, I positions of a block.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas.triton import CompilerParams, load, store

from deconstruct.kernels.backends import platform

SMALLEST_SIDE = 16  # of a matrix that a tensor core multiplies


def too_large(limit: int, *sizes: int) -> str | None:
    """The reason why heads of these sizes are not taken, or None."""
    if max(sizes) <= limit:
        return None
    return f"it takes heads of up to {limit} numbers, not {max(sizes)}"


def side(size: int) -> int:
    """Of the block that holds `size` numbers."""
    return max(pl.next_power_of_2(size), SMALLEST_SIDE)


class Tiling(NamedTuple):
    """How a kernel is cut into programs and run.

    Attributes:
      grid: the programs, by up to three numbers.
      blocks: letter of an axis -> size of a program's block along it; of an axis that is not here
        a program takes one place.
      place: a program's numbers -> letter -> number of its block; 0 for an axis that is not here.
      num_warps: of 32 threads each, for one program.
      num_stages: blocks of a loop in flight or in use at a time.
    """

    grid: tuple[int, ...]
    blocks: Mapping[str, int]
    place: Callable[..., Mapping[str, jax.Array]]
    num_warps: int
    num_stages: int


def call(kernel: Callable, tiling: Tiling, given: Sequence, made: Sequence) -> tuple:
    """A Pallas call on arrays whose axes are named by letters.

    Args:
      kernel: takes a ref for each of `given` and `made`, None for what is None.
      tiling: see there.
      given: (array or None, its axes, such as "BTHW").
      made: (shape, dtype or None, axes).

    Returns:
      The arrays made, or None for those of dtype None.
    """

    def spec(axes: str) -> pl.BlockSpec:
        def index(*program):
            place = tiling.place(*program)
            return tuple(place.get(axis, 0) for axis in axes)

        return pl.BlockSpec([tiling.blocks.get(axis) for axis in axes], index)

    there = [x is not None for x, _ in given] + [dtype is not None for _, dtype, _ in made]

    @functools.wraps(getattr(kernel, "func", kernel))
    def with_absent(*refs):
        refs = iter(refs)
        kernel(*(next(refs) if is_there else None for is_there in there))

    wanted = [(shape, dtype, axes) for shape, dtype, axes in made if dtype is not None]
    results = pl.pallas_call(
        with_absent,
        grid=tiling.grid,
        in_specs=[spec(axes) for x, axes in given if x is not None],
        out_specs=[spec(axes) for _, _, axes in wanted],
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in wanted],
        compiler_params=CompilerParams(num_warps=tiling.num_warps, num_stages=tiling.num_stages),
        interpret=platform() == "cpu",
    )(*(x for x, _ in given if x is not None))
    results = iter(results)
    return tuple(None if dtype is None else next(results) for _, dtype, _ in made)


class Rows(NamedTuple):
    """Positions of a program's arrays, one number or one head's numbers each.

    Attributes:
      start: the first.
      size: how many, a power of two.
      end: where the arrays end, or None where that is beyond all blocks.
    """

    start: jax.Array | int
    size: int
    end: jax.Array | int | None

    def exists(self) -> jax.Array | None:
        """(I,), or None for all."""
        if self.end is None:
            return None
        return self.start + jax.lax.iota(jnp.int32, self.size) < self.end

    def read(self, ref, width: int | None = None, fill=0, *, before=(), between=()) -> jax.Array:
        """(I,), or (I, side(width)); `fill` in places that do not exist.

        `before` and `between` are places along further axes: before that of positions, and between
        it and the columns.
        """
        mask = self._mask(ref, width)
        at = self._at(ref, width, before, between)
        return load(at, mask=mask, other=None if mask is None else fill)

    def read_at(self, ref, places_I: jax.Array, width: int) -> jax.Array:
        """(I, side(width)): in place of each position, what lies in one of `places_I`; 0 for those
        that do not exist."""
        mask = self._mask(ref, width)
        shape = self.size, ref.shape[-1]
        columns_IW = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        at = ref.at[jnp.broadcast_to(places_I[:, None], shape), columns_IW]
        return load(at, mask=mask, other=None if mask is None else 0)

    def write(self, ref, x: jax.Array, width: int | None = None, *, before=()) -> None:
        """What exists of (I,), or of (I, side(width))."""
        store(self._at(ref, width, before), x.astype(ref.dtype), mask=self._mask(ref, width))

    def _at(self, ref, width: int | None, before=(), between=()):
        columns_of_all = () if width is None else (slice(None),)
        return ref.at[(*before, pl.ds(self.start, self.size), *between, *columns_of_all)]

    def _mask(self, ref, width: int | None):
        exists_I = self.exists()
        if width is None:
            return exists_I
        masks = [exists_I[:, None]] if exists_I is not None else []
        if (columns_W := columns(ref, width)) is not None:
            masks.append(columns_W[None])
        if not masks:
            return None
        shape = self.size, ref.shape[-1]
        return functools.reduce(jnp.logical_and, (jnp.broadcast_to(x, shape) for x in masks))


def columns(ref, width: int) -> jax.Array | None:
    """Which of a block's columns a head of `width` numbers has, or None for all."""
    padded = ref.shape[-1]
    return None if padded == width else jax.lax.iota(jnp.int32, padded) < width


def exp(x: jax.Array) -> jax.Array:
    """By powers of 2, for which a GPU has an instruction."""
    return jnp.exp2(x * math.log2(math.e))


def write_head(ref, x_W: jax.Array, width: int) -> None:
    """One head's numbers."""
    store(ref, x_W.astype(ref.dtype), mask=columns(ref, width))


def dtype_of_heads(x_BTGW: jax.Array, num_heads: int) -> jnp.dtype:
    """Of a gradient that each head writes of its group's x."""
    return x_BTGW.dtype if x_BTGW.shape[2] == num_heads else jnp.dtype(jnp.float32)


def sum_of_heads(dx_BTHW: jax.Array, x_BTGW: jax.Array) -> jax.Array:
    """The gradient of x, of which each head gives a part."""
    if dx_BTHW.shape == x_BTGW.shape:
        return dx_BTHW
    dx_BTGRW = dx_BTHW.reshape(*x_BTGW.shape[:3], -1, x_BTGW.shape[3])
    return jnp.sum(dx_BTGRW, axis=3).astype(x_BTGW.dtype)
