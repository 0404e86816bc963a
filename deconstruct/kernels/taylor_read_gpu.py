"""What the state of `taylor_chunks_gpu` gives its readers, and how fast that changes with them, in
Pallas for NVIDIA GPUs.

What a side reads of the other's state S with its vectors y, and how fast its own columns g make
that change with y, are

    r_x = S_x + sum_i y_i S_ix + 1/2 sum_ij y_i y_j S_ijx,
    s_j = sum_x g_x S_jx + sum_i y_i sum_x g_x S_ijx.

For r the pairs of an entry i with a tile of entries j are multiplied with their part of the state:
each pair once, and the halves of those of one tile twice. For s all of i's pairs are put together
from where they lie and multiplied with g, twice the products of the least: to hand on each pair's
change to both its entries took more registers than there are, by the compiler. The tensor cores
round what goes into a product; sums stay float32.

Axes: see `taylor_state_gpu`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas.triton import load

from deconstruct.kernels import gpu
from deconstruct.kernels.precision import block_product
from deconstruct.kernels.taylor_state_gpu import AXES, Pairs, Plan, Side, State, plan_of, sizes

# Bytes of a number -> for heads up to 64 and larger ones: positions, warps and stages of a program.
# By what the compiler says, as `taylor_state_gpu.SUMS`; float32's products hold their operands in
# registers, and spill some.
READS = {2: ((128, 8, 3), (64, 8, 3)), 4: ((16, 4, 2), (16, 8, 2))}

# That are multiplied without a branch between. By what the compiler says: with 4, and heads of 64,
# no two programs of `read` would fit a multiprocessor any more.
ENTRIES_A_STEP = 2


def read_weighed(side: Side, state: State, chunk: int, o_BTHW, sum_BHT):
    """(o, sum) of the queries' own chunks and of the state before them."""
    made = [(o_BTHW.shape, o_BTHW.dtype, "BTHW"), (sum_BHT.shape, jnp.float32, "BHT")]
    given = [(side.y_BTHK, "BTHK"), (o_BTHW, "BTHW"), (sum_BHT, "BHT")]
    return _read(_read_weighed_kernel, side, state, chunk, 1, given, made)


def read(side: Side, state: State, chunk: int, own_BTHW) -> jax.Array:
    """What keys read of the gradient of the state after their chunk, added to their own."""
    made = [(own_BTHW.shape, own_BTHW.dtype, "BTHW")]
    given = [(side.y_BTHK, "BTHK"), (own_BTHW, "BTHW")]
    return _read(_read_kernel, side, state, chunk, 0, given, made)[0]


def slope(side: Side, state: State, chunk: int, own_BTHK, first: int) -> jax.Array:
    """How fast what a side reads changes with it, added to its own; from chunk `first` on, or of
    all chunks but the last.
    """
    made = [(own_BTHK.shape, own_BTHK.dtype, "BTHK")]
    given = [
        (side.y_BTHK, "BTHK"), (own_BTHK, "BTHK"), (side.g_BTHW, "BTHW"), (side.weight_BHT, "BHT")
    ]  # fmt: skip
    return _read(_slope_kernel, side, state, chunk, first, given, made)[0]


def _read(kernel, side: Side, state: State, chunk: int, first: int, given, made):
    positions, *warps_and_stages = sizes(READS, side)
    groups = state.weight.shape[-1]
    plan = plan_of(side, groups, chunk, first, None, positions)
    steps = plan.chunk // plan.positions

    def place(step, head, row):
        n = jnp.clip(step // steps - first, 0, plan.chunks - 2)
        return {"N": n, "T": step, "B": row, "G": head // plan.heads_of_group, "H": head}

    blocks = {**plan.blocks, "T": plan.positions, "F": plan.pairs_a_program}
    grid = plan.chunks * steps, plan.heads, len(side.y_BTHK)
    tiling = gpu.Tiling(grid, blocks, place, *warps_and_stages)
    shared = [(side.y_BHET, "BHET"), (side.counts_BT, "BT"), *zip(state, AXES, strict=True)]
    return gpu.call(functools.partial(kernel, plan), tiling, [*shared, *given], made)


class _Reader(NamedTuple):
    """A program's positions and the state that they read.

    Attributes:
      there: 1 where there is a state, else 0: what loops over it are multiplied with.
      counts_T: 1.0 where a position reads it, else 0.0.
    """

    plan: Plan
    rows: gpu.Rows
    there: jax.Array
    counts_T: jax.Array
    entries_ref: jax.Ref
    state: State

    def pairs(self) -> jax.Array:
        """1/2 sum_ij y_i y_j S_ij: (T, W)."""
        size = Pairs.TILE

        def step(tile, so_far):
            y_TJ = load(self.entries_ref.at[pl.ds(tile * size, size), :]).T
            so_far = self._add_pairs(so_far, y_TJ, tile, 0, tile)
            return self._add_pairs(so_far, 0.5 * y_TJ, tile, tile, tile + 1)  # they stand twice

        nothing = jnp.zeros((self.plan.positions, self.state.pairs_FW.shape[-1]), jnp.float32)
        return jax.lax.fori_loop(0, self.there * self.plan.pairs.tiles, step, nothing)

    def _add_pairs(self, so_far, y_TJ, tile, first, end):
        """A tile's with the entries i of tiles from `first` up to `end`."""
        start, size = self.plan.pairs.start(tile), Pairs.TILE

        def step(number, so_far):
            for offset in range(ENTRIES_A_STEP):
                i = number * ENTRIES_A_STEP + offset
                y_T = load(self.entries_ref.at[i, :])
                at = gpu.Rows(start + i * size, size, None)
                pairs_JW = at.read(self.state.pairs_FW, self.plan.width)
                so_far += block_product(y_TJ * y_T[:, None], pairs_JW)
            return so_far

        steps = size // ENTRIES_A_STEP
        return jax.lax.fori_loop(first * steps, end * steps, step, so_far)

    def pairs_slope(self, g_TW) -> jax.Array:
        """sum_i y_i sum_x g_x S_ijx: (T, K)."""
        keys, pairs = self.plan.keys, self.plan.pairs
        slope_TK = jnp.zeros((self.plan.positions, keys.size), jnp.float32)

        def step(i, so_far):
            y_T = load(self.entries_ref.at[i, :]).astype(jnp.float32)
            pairs_KW = keys.read_at(self.state.pairs_FW, pairs.rows(i), self.plan.width)
            return so_far + y_T[:, None] * block_product(g_TW, pairs_KW, (1, 1))

        return jax.lax.fori_loop(0, self.there * self.plan.key_size, step, slope_TK)

    def once(self, x, contract: tuple[int, int]) -> jax.Array:
        """x S, S being the matrix of entries."""
        entries_KW = self.plan.keys.read(self.state.entries_KW, self.plan.width)
        return block_product(x, entries_KW, contract)

    def weight(self, y_TK, half: float) -> jax.Array:
        """z + half (y Z), z and Z being the weight's sums: (T, K)."""
        weight_K = _vector(self.state.weight_K, self.plan.key_size)
        weight_KL = self.plan.keys.read(self.state.weight_KL, self.plan.key_size)
        return weight_K[None] + half * block_product(y_TK, weight_KL)

    def read(self, y_TK) -> jax.Array:
        """r, but for its weight: (T, W)."""
        once_TW = self.once(y_TK, (1, 0)) + _vector(self.state.ones_W, self.plan.width)[None]
        return once_TW * self.counts_T[:, None] + self.pairs()


def _vector(ref, size: int) -> jax.Array:
    filled = ref.shape[0]
    return gpu.Rows(0, filled, None if filled == size else size).read(ref)


def _reader(plan: Plan, y_ref, counts_ref, state: State) -> _Reader:
    """Where there is no state, before the first chunk or after the last, nothing counts."""
    n = pl.program_id(0) // (plan.chunk // plan.positions) - plan.first
    there = (n >= 0) & (n < plan.chunks - 1)
    rows = gpu.Rows(0, plan.positions, None)
    counts_T = jnp.broadcast_to(there.astype(jnp.float32), (plan.positions,))
    if counts_ref is not None:
        counts_T *= rows.read(counts_ref)
    return _Reader(plan, rows, there.astype(jnp.int32), counts_T, y_ref, state)


def _read_weighed_kernel(plan: Plan, entries_ref, counts_ref, *refs):
    *state, y_ref, own_ref, own_sum_ref, o_ref, sum_ref = refs
    reader = _reader(plan, entries_ref, counts_ref, State(*state))
    rows = reader.rows
    y_TK, own_TW = rows.read(y_ref, plan.key_size), rows.read(own_ref, plan.width)
    own_T = rows.read(own_sum_ref)
    keys = reader.state.weight[...]
    past_T = keys + jnp.sum(y_TK.astype(jnp.float32) * reader.weight(y_TK, 0.5), axis=1)
    sum_T = own_T + jnp.maximum(past_T, keys / 2) * reader.counts_T
    total_TW = own_TW.astype(jnp.float32) * own_T[:, None] + reader.read(y_TK)
    rows.write(o_ref, total_TW * (1 / sum_T)[:, None], plan.width)
    rows.write(sum_ref, sum_T)


def _read_kernel(plan: Plan, entries_ref, counts_ref, *refs):
    *state, y_ref, own_ref, out_ref = refs
    reader = _reader(plan, entries_ref, counts_ref, State(*state))
    rows = reader.rows
    read_TW = reader.read(rows.read(y_ref, plan.key_size))
    rows.write(out_ref, rows.read(own_ref, plan.width).astype(jnp.float32) + read_TW, plan.width)


def _slope_kernel(plan: Plan, entries_ref, counts_ref, *refs):
    *state, y_ref, own_ref, g_ref, weight_ref, out_ref = refs
    reader = _reader(plan, entries_ref, counts_ref, State(*state))
    rows = reader.rows
    y_TK, g_TW = rows.read(y_ref, plan.key_size), rows.read(g_ref, plan.width)
    of_weight_TK = reader.weight(y_TK, 1.0)
    if weight_ref is not None:
        of_weight_TK *= rows.read(weight_ref)[:, None]
    once_TK = (reader.once(g_TW, (1, 1)) + of_weight_TK) * reader.counts_T[:, None]
    own_TK = rows.read(own_ref, plan.key_size).astype(jnp.float32)
    total_TK = own_TK + once_TK + reader.pairs_slope(g_TW)
    rows.write(out_ref, total_TK, plan.key_size)
