"""What a walk along time carries in `prefix_gpu`, and how one span of time hands it to another.

Sums of exp(key - top) x over positions of one document, `top` being their largest key. Forward, the
key is the score s, and (top, total, head) are the running maximum m, denominator z and numerator n.
The walk back is its mirror image with the key -m: of what positions from f on are owed by earlier
ones, top = -m_f, and head and total are the sums of exp(m_f - m_i) / z_i times do_i and do_i . o_i.
The numbers of documents are taken negative there, so that they do not fall on the way either.

Axes: W value size, N spans, I positions.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from deconstruct.kernels import gpu
from deconstruct.kernels.documents import where

NO_RUN = -(2**31) + 1  # below the number of any document, and below its negative


class Carry(NamedTuple):
    """`run` is the document's number, `total` of one number a position, `head_W` of a head's."""

    top: jax.Array
    total: jax.Array
    head_W: jax.Array
    run: jax.Array


def nothing(width: int) -> Carry:
    """Before the first position, of heads in blocks of `width`."""
    return Carry(
        jnp.full((), -jnp.inf, jnp.float32),
        jnp.zeros((), jnp.float32),
        jnp.zeros(width, jnp.float32),
        jnp.full((), NO_RUN, jnp.int32),
    )


def pass_on(carry: Carry, runs_I, keys_I, scale_I, totals_I, heads_IW) -> Carry:
    """The sums after some more positions, of which at least one exists.

    Args:
      carry: before them.
      runs_I: documents, or None where they are not isolated; NO_RUN where there is no position.
      keys_I: -inf where there is no position.
      scale_I: a further factor.
      totals_I, heads_IW: what is summed.
    """
    run = carry.run if runs_I is None else jnp.max(runs_I)
    counts_I = None if runs_I is None else runs_I == run
    goes_on = None if runs_I is None else run == carry.run
    top = jnp.max(where(counts_I, keys_I, -jnp.inf))
    top = where(goes_on, jnp.maximum(top, carry.top), top)
    w_I = where(counts_I, gpu.exp(keys_I - top) * scale_I, 0.0)
    kept = where(goes_on, gpu.exp(carry.top - top), 0.0)
    head_W = kept * carry.head_W + jnp.sum(w_I[:, None] * heads_IW.astype(jnp.float32), axis=0)
    return Carry(top, kept * carry.total + jnp.sum(w_I * totals_I), head_W, run)


def write(refs, carry: Carry, width: int) -> None:
    """What a span adds, for `join`."""
    top_ref, total_ref, head_ref, run_ref = refs
    top_ref[...], total_ref[...] = carry.top, carry.total
    gpu.write_head(head_ref, carry.head_W, width)
    if run_ref is not None:
        run_ref[...] = carry.run


def join(refs, start, end, width: int) -> Carry:
    """The sums after the spans from `start` to `end`, in whatever order, from what each adds."""
    top_ref, total_ref, head_ref, run_ref = refs
    spans = gpu.Rows(start, top_ref.shape[0], end)
    counts_N, run = spans.exists(), jnp.full((), NO_RUN, jnp.int32)
    if run_ref is not None:
        runs_N = spans.read(run_ref, fill=NO_RUN)
        run = jnp.max(runs_N)
        counts_N &= runs_N == run
    tops_N = jnp.where(counts_N, spans.read(top_ref), -jnp.inf)
    top = jnp.max(tops_N)
    w_N = jnp.where(counts_N, gpu.exp(tops_N - top), 0.0)
    head_W = jnp.sum(w_N[:, None] * spans.read(head_ref, width), axis=0)
    return Carry(top, jnp.sum(w_N * spans.read(total_ref)), head_W, run)
