"""The prefix softmax in one pass over scores and values, in Pallas for NVIDIA GPUs.

A program takes one head of a row through `prefix_fused`'s walk, with what it carries in registers.

Where rows and heads are too few to fill the device, time is cut into spans. What each of them adds
is made first, and a program joins what those before, or after, its own add: a scan in between would
take more launches than the whole has work for. Values, or o and do, are then read twice.

Axes: B batch, T time, H heads, G value groups, W value size, N spans, I and J positions of a tile.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from deconstruct.kernels import gpu, prefix_fused
from deconstruct.kernels import prefix_gpu_carry as carry
from deconstruct.kernels.backends import Call
from deconstruct.kernels.documents import where
from deconstruct.kernels.precision import block_product
from deconstruct.kernels.prefix_gpu_carry import Carry

LARGEST_HEAD = 256  # of which a tile fits the registers

# By what the compiler says of a Hopper chip, not by a clock. A tile of I positions costs I weights
# a position: of 32 in bfloat16, and 16 in float32, whose products take no tensor cores, a position
# still takes fewer instructions than the chip issues while its bytes arrive. A warp for 32 numbers
# of a head spills nothing and lets a multiprocessor hold four programs or more, of which some
# compute while others wait.
TILE = {2: 32, 4: 16}  # by bytes of a value
PROGRAMS = 512  # that fill a device
PIECE = 4  # tiles that totals are made of at a time, by so many more warps
MAX_SPANS = 64  # whose totals a program holds in registers


class Plan(NamedTuple):
    """The static side of a call on one device.

    Attributes:
      length, num_heads, num_groups, width: of the arrays.
      tile: positions of a tile.
      tiles: of a span.
      spans: of a row.
    """

    length: int
    num_heads: int
    num_groups: int
    width: int
    tile: int
    tiles: int
    spans: int

    def span(self) -> tuple[jax.Array, jax.Array | int, jax.Array | None]:
        """(number, tiles, end or None where its tiles are full) of a program's span."""
        number = pl.program_id(1)
        if self.spans * self.tiles * self.tile == self.length:
            return number, self.tiles, None
        end = self.length - number * self.tiles * self.tile
        return number, jnp.minimum(pl.cdiv(end, self.tile), self.tiles), end


def refuses(call: Call) -> str | None:
    """Why it cannot run a call."""
    return gpu.too_large(LARGEST_HEAD, call.value_size)


def _plan(s_BTH, v_BTGW) -> Plan:
    batch, length, heads = s_BTH.shape
    groups, width = v_BTGW.shape[2:]
    tile = TILE[v_BTGW.dtype.itemsize]
    pieces = pl.cdiv(length, tile * PIECE)
    spans = max(min(PROGRAMS // (batch * heads), pieces, MAX_SPANS), 1)
    pieces_of_span = pl.cdiv(pieces, spans)
    spans = pl.cdiv(pieces, pieces_of_span)
    return Plan(length, heads, groups, width, tile, pieces_of_span * PIECE, spans)


def _tiling(plan: Plan, batch: int) -> gpu.Tiling:
    """Heads come first: programs that run side by side share what the cache holds of the scores."""
    blocks = {"T": plan.tiles * plan.tile, "W": gpu.side(plan.width)}

    def place(head, span, row):
        group = head // (plan.num_heads // plan.num_groups)
        return {"B": row, "H": head, "G": group, "T": span, "N": span}

    return gpu.Tiling(
        (plan.num_heads, plan.spans, batch),
        blocks,
        place,
        num_warps=max(blocks["W"] // 32, 1),
        num_stages=3,
    )


def _among_spans(tiling: gpu.Tiling, plan: Plan) -> gpu.Tiling:
    """A program sees the totals of all its row's spans."""

    def place(*program):
        return tiling.place(*program) | {"N": 0}

    blocks = dict(tiling.blocks) | {"N": gpu.side(plan.spans)}
    return tiling._replace(blocks=blocks, place=place)


def _totals(kernel, tiling: gpu.Tiling, plan: Plan, given):
    """(three arrays, runs or None) of what spans add, with their axes; Nones for a single span."""
    runs_BT, axes = given[0][0], ("BHN", "BHN", "BHNW", "BHN")
    if plan.spans == 1:
        return [(None, name) for name in axes]
    shape = tiling.grid[2], plan.num_heads, plan.spans
    run_dtype = None if runs_BT is None else jnp.int32
    made = [
        (shape, jnp.float32, "BHN"),
        (shape, jnp.float32, "BHN"),
        ((*shape, plan.width), jnp.float32, "BHNW"),
        (shape, run_dtype, "BHN"),
    ]
    by_piece = plan._replace(tile=plan.tile * PIECE, tiles=plan.tiles // PIECE)
    tiling = tiling._replace(num_warps=tiling.num_warps * PIECE)
    arrays = gpu.call(functools.partial(kernel, by_piece), tiling, given, made)
    return list(zip(arrays, axes, strict=True))


def _forward(s_BTH, v_BTGW, runs_BT):
    """(o_BTHW, m_BHT, z_BHT) of one device."""
    plan, batch = _plan(s_BTH, v_BTGW), len(s_BTH)
    tiling = _tiling(plan, batch)
    given = [(runs_BT, "BT"), (s_BTH, "BTH"), (v_BTGW, "BTGW")]
    totals = _totals(_forward_totals, tiling, plan, given)
    statistics = (batch, plan.num_heads, plan.length), jnp.float32, "BHT"
    return gpu.call(
        functools.partial(_forward_kernel, plan),
        _among_spans(tiling, plan),
        [*given, *totals],
        [((*s_BTH.shape, plan.width), v_BTGW.dtype, "BTHW"), statistics, statistics],
    )


def _backward(s_BTH, v_BTGW, runs_BT, o_BTHW, m_BHT, z_BHT, do_BTHW):
    """(ds_BTH, dv_BTGW) of one device."""
    plan, batch = _plan(s_BTH, v_BTGW), len(s_BTH)
    tiling = _tiling(plan, batch)
    outputs = [
        (runs_BT, "BT"), (m_BHT, "BHT"), (z_BHT, "BHT"), (o_BTHW, "BTHW"), (do_BTHW, "BTHW")
    ]  # fmt: skip
    totals = _totals(_backward_totals, tiling, plan, outputs)
    ds_BTH, dv_BTHW = gpu.call(
        functools.partial(_backward_kernel, plan),
        _among_spans(tiling, plan),
        [*outputs, (s_BTH, "BTH"), (v_BTGW, "BTGW"), *totals],
        [
            (s_BTH.shape, jnp.float32, "BTH"),
            (o_BTHW.shape, gpu.dtype_of_heads(v_BTGW, plan.num_heads), "BTHW"),
        ],
    )
    return ds_BTH, gpu.sum_of_heads(dv_BTHW, v_BTGW)


def _forward_totals(plan: Plan, runs_ref, s_ref, v_ref, *refs):
    _, tiles, end = plan.span()

    def tile(number, before: Carry):
        rows = gpu.Rows(number * plan.tile, plan.tile, end)
        s_J, v_JW = _read_scores(plan, rows, s_ref, v_ref)
        return carry.pass_on(before, _read_runs(rows, runs_ref), s_J, 1.0, 1.0, v_JW)

    total = jax.lax.fori_loop(0, tiles, tile, carry.nothing(v_ref.shape[-1]))
    carry.write(refs, total, plan.width)


def _forward_kernel(plan: Plan, runs_ref, s_ref, v_ref, *refs):
    *totals, o_ref, m_ref, z_ref = refs
    span, tiles, end = plan.span()

    def tile(number, before: Carry):
        rows = gpu.Rows(number * plan.tile, plan.tile, end)
        s_J, v_JW = _read_scores(plan, rows, s_ref, v_ref)
        runs_J = _read_runs(rows, runs_ref)
        seen_JI = _seen(runs_J, plan.tile)
        goes_on_I = None if runs_J is None else runs_J == before.run
        m_I = jnp.max(jnp.where(seen_JI, s_J[:, None], -jnp.inf), axis=0)
        m_I = where(goes_on_I, jnp.maximum(m_I, before.top), m_I)
        kept_I = where(goes_on_I, gpu.exp(before.top - m_I), 0.0)
        w_JI = jnp.where(seen_JI, gpu.exp(s_J[:, None] - m_I[None]), 0.0)
        z_I = kept_I * before.total + jnp.sum(w_JI, axis=0)
        n_IW = block_product(w_JI, v_JW, (0, 0)) + kept_I[:, None] * before.head_W[None]
        rows.write(o_ref, n_IW * (1 / z_I)[:, None], plan.width)
        rows.write(m_ref, m_I)
        rows.write(z_ref, z_I)
        return carry.pass_on(before, runs_J, s_J, 1.0, 1.0, v_JW)

    before = carry.nothing(v_ref.shape[-1])
    if plan.spans > 1:
        before = carry.join(totals, 0, span, plan.width)
    jax.lax.fori_loop(0, tiles, tile, before)


def _backward_totals(plan: Plan, runs_ref, m_ref, z_ref, o_ref, do_ref, *refs):
    _, tiles, end = plan.span()

    def tile(count, after: Carry):
        rows = gpu.Rows((tiles - 1 - count) * plan.tile, plan.tile, end)
        m_I, inverse_I, do_o_I, do_IW = _read_outputs(plan, rows, m_ref, z_ref, o_ref, do_ref)
        runs_I = _read_runs(rows, runs_ref, sign=-1)
        return carry.pass_on(after, runs_I, -m_I, inverse_I, do_o_I, do_IW)

    total = jax.lax.fori_loop(0, tiles, tile, carry.nothing(do_ref.shape[-1]))
    carry.write(refs, total, plan.width)


def _backward_kernel(plan: Plan, runs_ref, m_ref, z_ref, o_ref, do_ref, s_ref, v_ref, *refs):
    *totals, ds_ref, dv_ref = refs
    span, tiles, end = plan.span()

    def tile(count, after: Carry):
        rows = gpu.Rows((tiles - 1 - count) * plan.tile, plan.tile, end)
        m_I, inverse_I, do_o_I, do_IW = _read_outputs(plan, rows, m_ref, z_ref, o_ref, do_ref)
        s_J, v_JW = _read_scores(plan, rows, s_ref, v_ref)
        runs_I = _read_runs(rows, runs_ref, sign=-1)
        a_JI = gpu.exp(s_J[:, None] - m_I[None]) * inverse_I[None]
        a_JI = jnp.where(_seen(runs_I, plan.tile), a_JI, 0.0).astype(do_IW.dtype)
        goes_on_J = None if runs_I is None else runs_I == after.run
        to_later_J = where(goes_on_J, gpu.exp(s_J + after.top), 0.0)
        dv_JW = block_product(a_JI, do_IW) + to_later_J[:, None] * after.head_W[None]
        own_J = jnp.sum(a_JI.astype(jnp.float32) * do_o_I[None], axis=1)
        e_J = own_J + to_later_J * after.total
        rows.write(ds_ref, jnp.sum(dv_JW * v_JW.astype(jnp.float32), axis=1) - e_J)
        rows.write(dv_ref, dv_JW, plan.width)
        return carry.pass_on(after, runs_I, -m_I, inverse_I, do_o_I, do_IW)

    after = carry.nothing(do_ref.shape[-1])
    if plan.spans > 1:
        after = carry.join(totals, span + 1, plan.spans, plan.width)
    jax.lax.fori_loop(0, tiles, tile, after)


def _read_runs(rows: gpu.Rows, runs_ref, sign: int = 1):
    return None if runs_ref is None else sign * rows.read(runs_ref, fill=sign * carry.NO_RUN)


def _read_scores(plan: Plan, rows: gpu.Rows, s_ref, v_ref):
    """(s_J, v_JW); what does not exist has no weight."""
    return rows.read(s_ref, fill=-jnp.inf).astype(jnp.float32), rows.read(v_ref, plan.width)


def _read_outputs(plan: Plan, rows: gpu.Rows, m_ref, z_ref, o_ref, do_ref):
    """(m_I, 1 / z_I, do.o_I, do_IW); what does not exist has no weight."""
    m_I, z_I = rows.read(m_ref, fill=jnp.inf), rows.read(z_ref, fill=1)
    o_IW, do_IW = rows.read(o_ref, plan.width), rows.read(do_ref, plan.width)
    do_o_I = jnp.sum(o_IW.astype(jnp.float32) * do_IW.astype(jnp.float32), axis=1)
    return m_I, 1 / z_I, do_o_I, do_IW


def _seen(runs_I, size: int) -> jax.Array:
    """Whether key j is seen by query i of the same tile: (J, I)."""
    j = jax.lax.broadcasted_iota(jnp.int32, (size, size), 0)
    seen = j <= jax.lax.broadcasted_iota(jnp.int32, (size, size), 1)
    return seen if runs_I is None else seen & (runs_I[:, None] == runs_I[None])


run = prefix_fused.op(_forward, _backward)
