"""The prefix softmax in one pass over scores and values, in Triton for NVIDIA GPUs.

A program takes one head of a row through `prefix_fused`'s walk, with what it carries in registers.
However few they are, it takes a whole row: `prefix_gpu` cuts time into spans.

Kernels take pointers to arrays that lie whole in memory: s (B, T, H), v (B, T, G, W), runs (B, T),
o and do (B, T, H, W), m, z and ds (B, H, T), dv (B, T, H, W).

Axes: B batch, T time, H heads, G value groups, W value size, I and J positions of a tile.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from deconstruct.kernels import assembler, backends, gpu, prefix_fused
from deconstruct.kernels.backends import Call

# Positions of a tile; no GPU has timed it. For an H200 the compiler takes 80 registers a thread
# forward and 155 backward, and spills none; of 64 it takes 253 backward, which leaves two programs
# a multiprocessor, and in float32 it spills.
TILE = 32
_LARGEST_HEAD = 128


def refuses(call: Call) -> str | None:
    """Why it cannot run a call."""
    import jax_triton  # noqa: F401  fails without a JAX for GPUs

    return gpu.too_large(_LARGEST_HEAD, call.value_size)


def sizes(heads: int, v_BTGW, isolates: bool) -> dict[str, int | bool]:
    """What the kernels are compiled for."""
    _, length, groups, width = v_BTGW.shape
    return {
        "LENGTH": length,
        "HEADS": heads,
        "GROUPS": groups,
        "WIDTH": width,
        "COLUMNS": gpu.side(width),
        "TILE": TILE,
        "ISOLATES": isolates,
    }


def _forward(s_BTH, v_BTGW, runs_BT):
    """(o_BTHW, m_BHT, z_BHT) of one device."""
    batch, length, heads = s_BTH.shape
    statistics = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    o = jax.ShapeDtypeStruct((*s_BTH.shape, v_BTGW.shape[3]), v_BTGW.dtype)
    arrays = s_BTH, v_BTGW, s_BTH if runs_BT is None else runs_BT
    return _call(forward_kernel, arrays, (o, statistics, statistics), runs_BT is not None)


def _backward(s_BTH, v_BTGW, runs_BT, o_BTHW, m_BHT, z_BHT, do_BTHW):
    """(ds_BTH, dv_BTGW) of one device."""
    ds = jax.ShapeDtypeStruct(m_BHT.shape, jnp.float32)
    dv = jax.ShapeDtypeStruct(o_BTHW.shape, gpu.dtype_of_heads(v_BTGW, s_BTH.shape[2]))
    runs = s_BTH if runs_BT is None else runs_BT
    arrays = s_BTH, v_BTGW, runs, o_BTHW, m_BHT, z_BHT, do_BTHW
    ds_BHT, dv_BTHW = _call(backward_kernel, arrays, (ds, dv), runs_BT is not None)
    return jnp.swapaxes(ds_BHT, 1, 2), gpu.sum_of_heads(dv_BTHW, v_BTGW)


def _call(kernel, arrays, outputs, isolates: bool):
    import jax_triton

    assembler.use_for_triton()
    s_BTH, v_BTGW = arrays[:2]
    return jax_triton.triton_call(
        *arrays,
        kernel=kernel,
        out_shape=outputs,
        grid=(s_BTH.shape[0] * s_BTH.shape[2],),
        num_warps=4 if v_BTGW.shape[3] <= 64 else 8,  # of 128 columns four would spill
        compute_capability=backends.target().capability,
        **sizes(s_BTH.shape[2], v_BTGW, isolates),
    )


@triton.jit
def positions(t, LENGTH: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr):
    """Of a program's positions t: which exist, and their places in (B, T), (B, H, T), (B, T, H) and
    (B, T, G).
    """
    row, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    of_row = row * LENGTH + t
    of_head = (row * HEADS + head) * LENGTH + t
    group = head // (HEADS // GROUPS)
    return t < LENGTH, of_row, of_head, of_row * HEADS + head, of_row * GROUPS + group


@triton.jit
def forward_kernel(
    s, v, runs, o, m, z,
    LENGTH: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, TILE: tl.constexpr, ISOLATES: tl.constexpr,
):  # fmt: skip
    i, w = tl.arange(0, TILE), tl.arange(0, COLUMNS)
    last = i == TILE - 1
    n_W = tl.zeros((COLUMNS,), tl.float32)
    m_before, z_before, run_before = -float("inf"), 0.0, -1
    for start in range(0, LENGTH, TILE):
        t = start + i
        exists, of_row, of_head, at, of_group = positions(t, LENGTH, HEADS, GROUPS)
        values = exists[:, None] & (w < WIDTH)[None, :]
        s_I = tl.load(s + at, mask=exists, other=0.0).to(tl.float32)
        v_JW = tl.load(v + of_group[:, None] * WIDTH + w[None, :], mask=values, other=0.0)

        sees_IJ = i[:, None] >= i[None, :]
        if ISOLATES:
            run_I = tl.load(runs + of_row, mask=exists, other=-2)
            sees_IJ = sees_IJ & (run_I[:, None] == run_I[None, :])
        m_I = tl.max(tl.where(sees_IJ, s_I[None, :], -float("inf")), axis=1)
        m_both_I = tl.maximum(m_I, m_before)
        if ISOLATES:
            m_I = tl.where(run_I == run_before, m_both_I, m_I)
            kept_I = tl.where(run_I == run_before, tl.exp(m_before - m_I), 0.0)
        else:
            m_I = m_both_I
            kept_I = tl.exp(m_before - m_I)
        w_IJ = tl.where(sees_IJ, tl.exp(s_I[None, :] - m_I[:, None]), 0.0)
        z_I = tl.sum(w_IJ, axis=1) + kept_I * z_before
        n_IW = tl.dot(w_IJ.to(v_JW.dtype), v_JW, input_precision="ieee")
        n_IW += kept_I[:, None] * n_W[None, :]

        o_IW = (n_IW / z_I[:, None]).to(v_JW.dtype)
        tl.store(o + at[:, None] * WIDTH + w[None, :], o_IW, mask=values)
        tl.store(m + of_head, m_I, mask=exists)
        tl.store(z + of_head, z_I, mask=exists)
        n_W = tl.sum(tl.where(last[:, None], n_IW, 0.0), axis=0)
        m_before = tl.sum(tl.where(last, m_I, 0.0))
        z_before = tl.sum(tl.where(last, z_I, 0.0))
        if ISOLATES:
            run_before = tl.sum(tl.where(last, run_I, 0))


@triton.jit
def backward_kernel(
    s, v, runs, o, m, z, do, ds, dv,
    LENGTH: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, TILE: tl.constexpr, ISOLATES: tl.constexpr,
):  # fmt: skip
    i, w = tl.arange(0, TILE), tl.arange(0, COLUMNS)
    first = i == 0
    k_W = tl.zeros((COLUMNS,), tl.float32)
    e_after, m_after, run_after = 0.0, float("inf"), -1
    tiles: tl.constexpr = (LENGTH + TILE - 1) // TILE
    for number in range(tiles):
        t = (tiles - 1 - number) * TILE + i
        exists, of_row, of_head, at, of_group = positions(t, LENGTH, HEADS, GROUPS)
        values = exists[:, None] & (w < WIDTH)[None, :]
        s_J = tl.load(s + at, mask=exists, other=0.0).to(tl.float32)
        m_I = tl.load(m + of_head, mask=exists, other=float("inf"))  # no weight is left there
        inverse_I = 1 / tl.load(z + of_head, mask=exists, other=1.0)
        places = at[:, None] * WIDTH + w[None, :]
        do_IW = tl.load(do + places, mask=values, other=0.0)
        o_IW = tl.load(o + places, mask=values, other=0.0)
        do_o_I = tl.sum(do_IW.to(tl.float32) * o_IW.to(tl.float32), axis=1)

        seen_JI = i[:, None] <= i[None, :]
        to_later_J = tl.exp(s_J - m_after)
        m_first = tl.min(tl.where(first, m_I, float("inf")))
        from_first_I = tl.exp(m_first - m_I) * inverse_I
        kept = tl.exp(m_first - m_after)
        if ISOLATES:
            run_I = tl.load(runs + of_row, mask=exists, other=-2)
            seen_JI = seen_JI & (run_I[:, None] == run_I[None, :])
            run_first = tl.sum(tl.where(first, run_I, 0))
            to_later_J = tl.where(run_I == run_after, to_later_J, 0.0)
            from_first_I = tl.where(run_I == run_first, from_first_I, 0.0)
            kept = tl.where(run_first == run_after, kept, 0.0)
            run_after = run_first
        a_JI = tl.where(seen_JI, tl.exp(s_J[:, None] - m_I[None, :]) * inverse_I[None, :], 0.0)
        a_JI = a_JI.to(do_IW.dtype)
        dv_JW = tl.dot(a_JI, do_IW, input_precision="ieee")
        dv_JW += to_later_J[:, None] * k_W[None, :]
        e_J = tl.sum(a_JI.to(tl.float32) * do_o_I[None, :], axis=1) + to_later_J * e_after

        v_JW = tl.load(v + of_group[:, None] * WIDTH + w[None, :], mask=values, other=0.0)
        ds_J = tl.sum(dv_JW * v_JW.to(tl.float32), axis=1) - e_J
        tl.store(ds + of_head, ds_J, mask=exists)
        tl.store(dv + places, dv_JW.to(dv.dtype.element_ty), mask=values)
        k_W = kept * k_W + tl.sum(from_first_I[:, None] * do_IW.to(tl.float32), axis=0)
        e_after = kept * e_after + tl.sum(from_first_I * do_o_I)
        m_after = m_first


run = prefix_fused.op(_forward, _backward)
