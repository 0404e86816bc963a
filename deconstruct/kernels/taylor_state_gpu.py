"""The state of `taylor_chunks_gpu`: sums over the positions of a chunk, in Pallas for NVIDIA GPUs.

Of a side, queries or keys, y are its vectors and g its columns: values, or what comes from the
output's gradient; beside them stands one more column, the weight, of ones for values. The sums over
a chunk of 1, y_i and y_i y_j times the columns are its share of the state, which the other side
reads (`taylor_read_gpu`). A product sums the pairs of a few entries i with a tile of entries j over
the chunk; (i, j) and (j, i) are one pair, but where i and j are in one tile (`Pairs`).

Axes: N chunks (but one), B batch, G groups, T time, H heads, K and L key size, W value size, E
entries of a vector, filled up to a power of two in arrays that lie time last, I and J entries of
one tile, F pairs of entries.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas.triton import load

from deconstruct.kernels import gpu
from deconstruct.kernels.precision import block_product

# Bytes of a number -> for heads up to 64 and larger ones: pairs, positions at a time and warps of a
# program. By what the compiler says of Hopper and Ampere chips, not by a clock: of bfloat16 nothing
# spills, and what a program fetches from the cache takes less time than its products.
SUMS = {2: ((256, 64, 4), (256, 64, 8)), 4: ((256, 32, 8), (128, 32, 8))}
PAIRS_A_PRODUCT = 64  # the rows that Hopper's tensor cores multiply


class Pairs(NamedTuple):
    """Which pairs of entries a state holds, and where.

    Entries are cut into tiles. Of two tiles each pair stands once, of one tile both (i, j) and
    (j, i) do: 2,560 for the 2,080 pairs of 64 entries, 9,216 for the 8,256 of 128. They are ordered
    by the tile of j, then by i, up to that tile's last, then by j.

    Attributes:
      key_size: the number of entries.
    """

    key_size: int

    TILE = gpu.SMALLEST_SIDE

    @property
    def tiles(self) -> int:
        return pl.cdiv(self.key_size, self.TILE)

    @property
    def count(self) -> int:
        """F."""
        return self.start(self.tiles)

    def start(self, tile):
        """The first row of the pairs whose j is in a tile."""
        return tile * (tile + 1) * (self.TILE**2 // 2)

    def rows(self, i) -> jax.Array:
        """Where entry i's pairs with all others are: (K,), filled up."""
        j_K = jax.lax.iota(jnp.int32, gpu.side(self.key_size))
        first_K, last_K = jnp.minimum(i, j_K), jnp.maximum(i, j_K)
        start_K = self.start(jax.lax.div(last_K, self.TILE))
        return start_K + first_K * self.TILE + jax.lax.rem(last_K, self.TILE)

    def of(self, row):
        """(i, the tile of j) of the pair in a row."""
        tile = sum((row >= self.start(later)).astype(jnp.int32) for later in range(1, self.tiles))
        return jax.lax.div(row - self.start(tile), self.TILE), tile


class Side(NamedTuple):
    """Queries or keys, in whole chunks.

    Attributes:
      y_BTHK: the vectors.
      y_BHET: the same, with zeros where they do not count.
      g_BTHW: the columns.
      weight_BHT: their further column, float32; None for ones.
      counts_BT: 1.0 where a position reads the state, or is held by it, else 0.0; None for all.
    """

    y_BTHK: jax.Array
    y_BHET: jax.Array
    g_BTHW: jax.Array
    weight_BHT: jax.Array | None
    counts_BT: jax.Array | None


class State(NamedTuple):
    """Sums of columns, and of their weight, times 1, entries, and pairs of entries."""

    ones_W: jax.Array
    entries_KW: jax.Array
    pairs_FW: jax.Array
    weight: jax.Array
    weight_K: jax.Array
    weight_KL: jax.Array


AXES = State("NBGW", "NBGKW", "NBGFW", "NBG", "NBGK", "NBGKL")


class Plan(NamedTuple):
    """The static side of a call on one device.

    Attributes:
      chunk, chunks: positions of one, and how many there are.
      heads, groups: of the side, and of the state.
      key_size, width: of y and of g.
      first: the chunk that the first sums are of, or that first reads a state: 0 or 1.
      pairs_a_program: that it makes or reads.
      positions: that a program goes through at a time, or that it reads for.
    """

    chunk: int
    chunks: int
    heads: int
    groups: int
    key_size: int
    width: int
    first: int
    pairs_a_program: int
    positions: int

    @property
    def pairs(self) -> Pairs:
        return Pairs(self.key_size)

    @property
    def heads_of_group(self) -> int:
        return self.heads // self.groups

    @property
    def keys(self) -> gpu.Rows:
        """Rows of a matrix of the state."""
        filled = gpu.side(self.key_size)
        return gpu.Rows(0, filled, None if filled == self.key_size else self.key_size)

    @property
    def blocks(self) -> dict[str, int]:
        key_side = gpu.side(self.key_size)
        return {"E": key_side, "K": key_side, "L": key_side, "W": gpu.side(self.width)}


def sums(side: Side, groups: int, chunk: int, first: int) -> State:
    """Of all chunks but the last, or from `first` = 1 on, float32."""
    pairs_a_program, positions, warps = sizes(SUMS, side)
    plan = plan_of(side, groups, chunk, first, pairs_a_program, positions)
    batch, chunks = len(side.y_BTHK), plan.chunks - 1
    lead, size, width = (chunks, batch, groups), plan.key_size, plan.width
    shapes = (width,), (size, width), (plan.pairs.count, width), (), (size,), (size, size)
    made = [((*lead, *shape), jnp.float32, axes) for shape, axes in zip(shapes, AXES, strict=True)]
    pairs = made.pop(2)

    def place(block, number, row):
        n, group = number // groups, jax.lax.rem(number, groups)
        return {"N": n, "T": n + first, "B": row, "G": group, "H": group, "F": block}

    given = [(side.y_BHET, "BHET"), (side.g_BTHW, "BTHW")]
    weights = [(side.weight_BHT, "BHT"), (side.counts_BT, "BT")]
    blocks = {**plan.blocks, "T": chunk, "H": plan.heads_of_group, "F": pairs_a_program}
    grid = plan.pairs.count // pairs_a_program, chunks * groups, batch
    tiling = gpu.Tiling(grid, blocks, place, warps, num_stages=2)
    (pairs_FW,) = gpu.call(functools.partial(_pairs_kernel, plan), tiling, given, [pairs])
    few = tiling._replace(grid=(1, *tiling.grid[1:]))
    others = gpu.call(functools.partial(_sums_kernel, plan), few, [*given, *weights], made)
    return State(*others[:2], pairs_FW, *others[2:])


def sizes(table, side: Side) -> tuple[int, ...]:
    """Of a table by bytes and heads."""
    wide = max(side.y_BTHK.shape[-1], side.g_BTHW.shape[-1]) > 64
    return table[side.y_BTHK.dtype.itemsize][wide]


def plan_of(
    side: Side, groups: int, chunk: int, first: int, pairs_a_program: int | None, positions: int
) -> Plan:
    """`pairs_a_program` None: all."""
    _, length, heads, key_size = side.y_BTHK.shape
    width = side.g_BTHW.shape[-1]
    chunks, positions = length // chunk, min(positions, chunk)
    pairs_a_program = pairs_a_program or Pairs(key_size).count
    return Plan(chunk, chunks, heads, groups, key_size, width, first, pairs_a_program, positions)


def _along_chunk(plan: Plan, step, nothing):
    """`step` of (head of the group, positions, sums so far), over the group's part of a chunk."""
    steps = plan.chunk // plan.positions

    def numbered(number, so_far):
        start = jax.lax.rem(number, steps) * plan.positions
        return step(number // steps, gpu.Rows(start, plan.positions, None), so_far)

    return jax.lax.fori_loop(0, plan.heads_of_group * steps, numbered, nothing)


def _pairs_kernel(plan: Plan, y_ref, g_ref, pairs_ref):
    tile_size = Pairs.TILE
    entries = PAIRS_A_PRODUCT // tile_size
    first, tile = plan.pairs.of(pl.program_id(0) * plan.pairs_a_program)

    def step(head, rows: gpu.Rows, sums):
        at = pl.ds(rows.start, rows.size)
        y_JT = load(y_ref.at[head, pl.ds(tile * tile_size, tile_size), at])
        g_TW = rows.read(g_ref, plan.width, between=(head,))

        def add(product: int, sum_FW):
            y_IT = load(y_ref.at[head, pl.ds(first + product * entries, entries), at])
            pairs_FT = (y_IT[:, None] * y_JT[None]).reshape(PAIRS_A_PRODUCT, rows.size)
            return sum_FW + block_product(pairs_FT, g_TW)

        return tuple(add(*numbered) for numbered in enumerate(sums))

    products = plan.pairs_a_program // PAIRS_A_PRODUCT
    nothing = jnp.zeros((PAIRS_A_PRODUCT, pairs_ref.shape[-1]), jnp.float32)
    for product, sum_FW in enumerate(_along_chunk(plan, step, (nothing,) * products)):
        made = gpu.Rows(product * PAIRS_A_PRODUCT, PAIRS_A_PRODUCT, None)
        made.write(pairs_ref, sum_FW, plan.width)


def _sums_kernel(plan: Plan, y_ref, g_ref, weight_ref, counts_ref, *refs):
    """All but the pairs; first of the columns, then of their weight, for want of registers."""
    ones_ref, entries_ref, *weight_refs = refs

    def counted(rows: gpu.Rows, x_T):
        return x_T if counts_ref is None else x_T * rows.read(counts_ref)

    def of_columns(head, rows: gpu.Rows, sums):
        ones_W, entries_KW = sums
        y_KT = load(y_ref.at[head, :, pl.ds(rows.start, rows.size)])
        g_TW = rows.read(g_ref, plan.width, between=(head,))
        counts_T = counted(rows, jnp.ones(rows.size, jnp.float32))
        ones_W += jnp.sum(g_TW * counts_T[:, None], axis=0)
        return ones_W, entries_KW + block_product(y_KT, g_TW)

    def of_weight(head, rows: gpu.Rows, sums):
        one, one_K, one_KL = sums
        y_KT = load(y_ref.at[head, :, pl.ds(rows.start, rows.size)])
        weight_T = jnp.ones(rows.size, jnp.float32)
        if weight_ref is not None:
            weight_T = rows.read(weight_ref, before=(head,))
        weighed_KT = y_KT * weight_T[None]
        one += jnp.sum(counted(rows, weight_T))
        one_K += jnp.sum(weighed_KT, axis=1)
        return one, one_K, one_KL + block_product(weighed_KT, y_KT, (1, 1))

    def nothing(refs):
        return tuple(jnp.zeros(ref.shape, jnp.float32) for ref in refs)

    ones_W, entries_KW = _along_chunk(plan, of_columns, nothing(refs[:2]))
    gpu.write_head(ones_ref, ones_W, plan.width)
    plan.keys.write(entries_ref, entries_KW, plan.width)
    one, one_K, one_KL = _along_chunk(plan, of_weight, nothing(weight_refs))
    weight_refs[0][...] = one
    gpu.write_head(weight_refs[1], one_K, plan.key_size)
    plan.keys.write(weight_refs[2], one_KL, plan.key_size)
