"""The prefix softmax in one pass over scores and values, in Pallas for NVIDIA GPUs.

A program takes one head and walks along time, tile by tile, with the head's running maximum m,
denominator z and numerator n in registers: scores and values are read once and the output is
written once. Inside a tile the weights w_ij = exp(s_j - m_i), j <= i, are formed outright (m_i the
running maximum), so that no range of scores is too wide, and meet the values in a matrix product.

Backwards the walk begins at the end. With A_ji = exp(s_j - m_i) / z_i, i >= j,

    dv_j = sum_i A_ji do_i,   ds_j = v_j . dv_j - sum_i A_ji (do_i . o_i).

What a tile owes to later ones goes through K = sum_{i >= f} exp(m_f - m_i) / z_i do_i, f being the
first of the later positions: exp(s_j - m_f) K, and the same, E, for do_i . o_i. All exponents are
at most 0. A document's end cuts what is carried.

Where rows and heads are too few for the device, time is cut into spans. What each adds, (m, z, n)
or (m_f, E, K), is made first, and a program joins what the spans before, or after, its own add.

Axes: B batch, T time, H heads, G value groups, W value size, N spans, I and J positions of a tile.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from deconstruct.kernels import gpu
from deconstruct.kernels.backends import Call
from deconstruct.kernels.precision import block_product
from deconstruct.kernels.shards import per_shard

PROGRAMS = 512  # about four a multiprocessor, so that some compute while others wait for memory
MIN_TILES = 4  # of a span
MAX_SPANS = 64  # whose totals a program holds in registers
_NO_RUN = jnp.iinfo(jnp.int32).max


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


class Before(NamedTuple):
    """What earlier positions bring: m, z and n of the last one's document, and its number."""

    m: jax.Array
    z: jax.Array
    n_W: jax.Array
    run: jax.Array


class After(NamedTuple):
    """What later positions bring: m_f, E and K of the first one's document, and its number."""

    m: jax.Array
    e: jax.Array
    k_W: jax.Array
    run: jax.Array


def refuses(call: Call) -> str | None:
    """Why it cannot run a call."""
    return gpu.too_large(call.value_size)


def run(s_BTH: jax.Array, v_BTGW: jax.Array, runs_BT: jax.Array | None = None) -> jax.Array:
    """o_BTHW in v's dtype."""
    return _softmax(s_BTH, v_BTGW, runs_BT)


@jax.custom_vjp
def _softmax(s_BTH, v_BTGW, runs_BT):
    return _softmax_forward(s_BTH, v_BTGW, runs_BT)[0]


def _softmax_forward(s_BTH, v_BTGW, runs_BT):
    run = per_shard(_forward, ("BTH", "BTGW", "BT"), ("BTHW", "BHT", "BHT"), v_BTGW)
    o_BTHW, m_BHT, z_BHT = run(s_BTH, v_BTGW, runs_BT)
    return o_BTHW, (s_BTH, v_BTGW, runs_BT, o_BTHW, m_BHT, z_BHT)


def _softmax_backward(residuals, do_BTHW):
    s_BTH, v_BTGW, *rest = residuals
    given = ("BTH", "BTGW", "BT", "BTHW", "BHT", "BHT", "BTHW")
    run = per_shard(_backward, given, ("BTH", "BTGW"), v_BTGW)
    ds_BTH, dv_BTGW = run(s_BTH, v_BTGW, *rest, do_BTHW.astype(v_BTGW.dtype))
    return ds_BTH.astype(s_BTH.dtype), dv_BTGW, None


_softmax.defvjp(_softmax_forward, _softmax_backward)


def _plan(s_BTH, v_BTGW) -> Plan:
    batch, length, heads = s_BTH.shape
    groups, width = v_BTGW.shape[2:]
    tile = 32 if v_BTGW.dtype.itemsize == 2 else 16
    tiles = pl.cdiv(length, tile)
    spans = max(min(PROGRAMS // (batch * heads), tiles // MIN_TILES, MAX_SPANS), 1)
    tiles_of_span = pl.cdiv(tiles, spans)
    return Plan(length, heads, groups, width, tile, tiles_of_span, pl.cdiv(tiles, tiles_of_span))


def _tiling(plan: Plan, batch: int) -> gpu.Tiling:
    """Heads come first: programs that run side by side share what the cache holds of the scores."""
    blocks = {"T": plan.tiles * plan.tile, "W": gpu.side(plan.width)}

    def place(head, span, row):
        group = head // (plan.num_heads // plan.num_groups)
        return {"B": row, "H": head, "G": group, "T": span, "N": span}

    return gpu.Tiling(
        (plan.num_heads, plan.spans, batch), blocks, place, num_warps=max(blocks["W"] // 32, 1), num_stages=3
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
    arrays = gpu.call(functools.partial(kernel, plan), tiling, given, made)
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


def _forward_totals(plan: Plan, runs_ref, s_ref, v_ref, m_ref, z_ref, n_ref, run_ref):
    _, tiles, end = plan.span()

    def tile(number, before: Before):
        rows = gpu.Rows(number * plan.tile, plan.tile, end)
        return _pass(before, *_read_scores(plan, rows, runs_ref, s_ref, v_ref))

    total = jax.lax.fori_loop(0, tiles, tile, _nothing_before(v_ref))
    m_ref[...], z_ref[...] = total.m, total.z
    gpu.write_head(n_ref, total.n_W, plan.width)
    if run_ref is not None:
        run_ref[...] = total.run


def _forward_kernel(plan: Plan, runs_ref, s_ref, v_ref, *refs):
    *totals, o_ref, m_ref, z_ref = refs
    span, tiles, end = plan.span()

    def tile(number, before: Before):
        rows = gpu.Rows(number * plan.tile, plan.tile, end)
        runs_J, s_J, v_JW = _read_scores(plan, rows, runs_ref, s_ref, v_ref)
        seen_JI = _sees(runs_J, plan.tile, keys_first=True)
        m_I = jnp.max(jnp.where(seen_JI, s_J[:, None], -jnp.inf), axis=0)
        goes_on_I = None if runs_J is None else runs_J == before.run
        m_I = _where(goes_on_I, jnp.maximum(m_I, before.m), m_I)
        kept_I = _where(goes_on_I, gpu.exp(before.m - m_I), 0.0)
        w_JI = jnp.where(seen_JI, gpu.exp(s_J[:, None] - m_I[None]), 0.0)
        z_I = kept_I * before.z + jnp.sum(w_JI, axis=0)
        n_IW = block_product(w_JI, v_JW, (0, 0)) + kept_I[:, None] * before.n_W[None]
        rows.write(o_ref, n_IW * (1 / z_I)[:, None], plan.width)
        rows.write(m_ref, m_I)
        rows.write(z_ref, z_I)
        return _pass(before, runs_J, s_J, v_JW)

    if plan.spans == 1:
        before = _nothing_before(v_ref)
    else:
        before = _join_before(plan, span, *totals)
    jax.lax.fori_loop(0, tiles, tile, before)


def _read_scores(plan: Plan, rows: gpu.Rows, runs_ref, s_ref, v_ref):
    """(runs_J or None, s_J, v_JW); what does not exist has no weight."""
    runs_J = None if runs_ref is None else rows.read(runs_ref, fill=-1)
    return runs_J, rows.read(s_ref, fill=-jnp.inf), rows.read(v_ref, plan.width)


def _nothing_before(v_ref) -> Before:
    zero = jnp.zeros((), jnp.float32)
    return Before(
        jnp.full((), -jnp.inf, jnp.float32),
        zero,
        jnp.zeros(v_ref.shape[-1], jnp.float32),
        jnp.full((), -1, jnp.int32),
    )


def _pass(before: Before, runs_J, s_J, v_JW) -> Before:
    """What positions after `before` hand on, with what came to them."""
    run = before.run if runs_J is None else jnp.max(runs_J)
    counts_J = None if runs_J is None else runs_J == run
    goes_on = None if runs_J is None else run == before.run
    m = jnp.max(_where(counts_J, s_J, -jnp.inf))
    m = _where(goes_on, jnp.maximum(m, before.m), m)
    w_J = _where(counts_J, gpu.exp(s_J - m), 0.0)
    kept = _where(goes_on, gpu.exp(before.m - m), 0.0)
    n_W = jnp.sum(w_J[:, None] * v_JW.astype(jnp.float32), axis=0)
    return Before(m, kept * before.z + jnp.sum(w_J), kept * before.n_W + n_W, run)


def _join_before(plan: Plan, span, m_ref, z_ref, n_ref, run_ref) -> Before:
    """What the spans before `span` hand on."""
    rows = gpu.Rows(0, m_ref.shape[0], span)
    m_N, z_N, n_NW = rows.read(m_ref, fill=-jnp.inf), rows.read(z_ref), rows.read(n_ref, plan.width)
    counts_N, run = rows.exists(), jnp.full((), -1, jnp.int32)
    if run_ref is not None:
        run_N = rows.read(run_ref, fill=-1)
        run = jnp.max(run_N)
        counts_N &= run_N == run
    m = jnp.max(jnp.where(counts_N, m_N, -jnp.inf))
    w_N = jnp.where(counts_N, gpu.exp(m_N - m), 0.0)
    return Before(m, jnp.sum(w_N * z_N), jnp.sum(w_N[:, None] * n_NW, axis=0), run)


def _backward_totals(plan: Plan, runs_ref, m_ref, z_ref, o_ref, do_ref, *refs):
    first_ref, e_ref, k_ref, run_ref = refs
    _, tiles, end = plan.span()

    def tile(count, after: After):
        rows = gpu.Rows((tiles - 1 - count) * plan.tile, plan.tile, end)
        return _pass_back(after, *_read_outputs(plan, rows, runs_ref, m_ref, z_ref, o_ref, do_ref))

    total = jax.lax.fori_loop(0, tiles, tile, _nothing_after(do_ref))
    first_ref[...], e_ref[...] = total.m, total.e
    gpu.write_head(k_ref, total.k_W, plan.width)
    if run_ref is not None:
        run_ref[...] = total.run


def _backward_kernel(plan: Plan, runs_ref, m_ref, z_ref, o_ref, do_ref, s_ref, v_ref, *refs):
    *totals, ds_ref, dv_ref = refs
    span, tiles, end = plan.span()

    def tile(count, after: After):
        rows = gpu.Rows((tiles - 1 - count) * plan.tile, plan.tile, end)
        outputs = _read_outputs(plan, rows, runs_ref, m_ref, z_ref, o_ref, do_ref)
        runs_I, m_I, inverse_I, do_o_I, do_IW = outputs
        s_J, v_JW = rows.read(s_ref, fill=-jnp.inf), rows.read(v_ref, plan.width)
        a_JI = gpu.exp(s_J[:, None] - m_I[None]) * inverse_I[None]
        a_JI = jnp.where(_sees(runs_I, plan.tile, keys_first=True), a_JI, 0.0)
        goes_on_J = None if runs_I is None else runs_I == after.run
        to_later_J = _where(goes_on_J, gpu.exp(s_J - after.m), 0.0)
        dv_JW = block_product(a_JI, do_IW) + to_later_J[:, None] * after.k_W[None]
        e_J = jnp.sum(a_JI * do_o_I[None], axis=1) + to_later_J * after.e
        rows.write(ds_ref, jnp.sum(dv_JW * v_JW.astype(jnp.float32), axis=1) - e_J)
        rows.write(dv_ref, dv_JW, plan.width)
        return _pass_back(after, *outputs)

    if plan.spans == 1:
        after = _nothing_after(do_ref)
    else:
        after = _join_after(plan, span, *totals)
    jax.lax.fori_loop(0, tiles, tile, after)


def _read_outputs(plan: Plan, rows: gpu.Rows, runs_ref, m_ref, z_ref, o_ref, do_ref):
    """(runs_I or None, m_I, 1 / z_I, do.o_I, do_IW); what does not exist has no weight."""
    runs_I = None if runs_ref is None else rows.read(runs_ref, fill=_NO_RUN)
    m_I, z_I = rows.read(m_ref, fill=jnp.inf), rows.read(z_ref, fill=1)
    o_IW, do_IW = rows.read(o_ref, plan.width), rows.read(do_ref, plan.width)
    do_o_I = jnp.sum(o_IW.astype(jnp.float32) * do_IW.astype(jnp.float32), axis=1)
    return runs_I, m_I, 1 / z_I, do_o_I, do_IW


def _nothing_after(do_ref) -> After:
    return After(
        jnp.full((), jnp.inf, jnp.float32),
        jnp.zeros((), jnp.float32),
        jnp.zeros(do_ref.shape[-1], jnp.float32),
        jnp.full((), _NO_RUN, jnp.int32),
    )


def _pass_back(after: After, runs_I, m_I, inverse_I, do_o_I, do_IW) -> After:
    """What positions before `after` hand back, with what came to them."""
    run = after.run if runs_I is None else jnp.min(runs_I)
    counts_I = None if runs_I is None else runs_I == run
    goes_on = None if runs_I is None else run == after.run
    m = jnp.min(_where(counts_I, m_I, jnp.inf))
    w_I = _where(counts_I, gpu.exp(m - m_I) * inverse_I, 0.0)
    kept = _where(goes_on, gpu.exp(m - after.m), 0.0)
    k_W = jnp.sum(w_I[:, None] * do_IW.astype(jnp.float32), axis=0)
    return After(m, kept * after.e + jnp.sum(w_I * do_o_I), kept * after.k_W + k_W, run)


def _join_after(plan: Plan, span, m_ref, e_ref, k_ref, run_ref) -> After:
    """What the spans after `span` hand back."""
    rows = gpu.Rows(0, m_ref.shape[0], plan.spans)
    m_N, e_N, k_NW = rows.read(m_ref, fill=jnp.inf), rows.read(e_ref), rows.read(k_ref, plan.width)
    counts_N = rows.exists() & (jax.lax.iota(jnp.int32, rows.size) > span)
    run = jnp.full((), _NO_RUN, jnp.int32)
    if run_ref is not None:
        run_N = jnp.where(counts_N, rows.read(run_ref, fill=_NO_RUN), _NO_RUN)
        run = jnp.min(run_N)
        counts_N &= run_N == run
    m = jnp.min(jnp.where(counts_N, m_N, jnp.inf))
    w_N = jnp.where(counts_N, gpu.exp(m - m_N), 0.0)
    return After(m, jnp.sum(w_N * e_N), jnp.sum(w_N[:, None] * k_NW, axis=0), run)


def _sees(runs_I, size: int, *, keys_first: bool = False) -> jax.Array:
    """Whether query i sees key j of the same tile: (I, J), or (J, I)."""
    down = jax.lax.broadcasted_iota(jnp.int32, (size, size), 0)
    along = jax.lax.broadcasted_iota(jnp.int32, (size, size), 1)
    seen = down <= along if keys_first else down >= along
    return seen if runs_I is None else seen & (runs_I[:, None] == runs_I[None])


def _where(condition, x, other):
    return x if condition is None else jnp.where(condition, x, other)
