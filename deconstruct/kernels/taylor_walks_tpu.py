"""The walks over chunks of `taylor_chunks_tpu`: of a group, from chunk to chunk, in fast memory.

Refs are the documents of the chunk and of the one before it, where documents are isolated; arrays
of the group's heads or the group; outputs; the state but for the feature 1, the state of the
feature 1; and what `Features` makes features from.

Axes: K key size (filled up to a multiple of 8), W value size, X columns (values, two ones, and
zeros up to a multiple of 8), F features of a step, S positions of a chunk, keys or queries.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from deconstruct.kernels import tpu
from deconstruct.kernels.documents import where
from deconstruct.kernels.taylor_features_tpu import Features


class Plan(NamedTuple):
    """The static side of a call on one device.

    Attributes:
      length, key_size, width: of the arrays.
      heads: of a group.
      chunk: positions of a grid step.
      dtype: of what products take.
      isolates: whether documents are isolated.
    """

    length: int
    heads: int
    key_size: int
    width: int
    chunk: int
    dtype: jnp.dtype
    isolates: bool

    @property
    def features(self) -> Features:
        return Features(self.key_size, self.chunk, self.dtype)

    @property
    def columns(self) -> int:
        """X."""
        return tpu.fill_rows(self.width + 2)

    @property
    def sums(self) -> tuple[int, int, int]:
        """The shape of the state, but for the feature 1."""
        return self.features.steps, self.columns, self.features.size

    @property
    def bytes(self) -> int:
        """Of the walk for dk and dv, which holds the most: the chunk's q and d, k, v and their
        gradients, each of this step and the next; parts and their gradient; features and what they
        come from; scores; and the state.
        """
        steps, columns, size = self.sums
        both = self.features.rows + columns
        blocks = 2 * (self.heads + 2) * both * self.dtype.itemsize
        inside = 4 * (2 * self.features.parts[1] + 3 * size + 4 * self.chunk + both)
        state = 4 * steps * columns * -(-size // tpu.TILE) * tpu.TILE
        return state + self.chunk * (blocks + inside)


class Documents(NamedTuple):
    """Of a chunk; all None where they are not isolated.

    Attributes:
      runs_1S: whose each position is.
      reads_1S: whether it is of the document alive at the chunk's start, the one that the state
        before the chunk is of.
      writes_1S: whether it is of the document alive at the chunk's end.
      change_11: 0 where these two documents are one.
    """

    runs_1S: jax.Array | None = None
    reads_1S: jax.Array | None = None
    writes_1S: jax.Array | None = None
    change_11: jax.Array | None = None


def _documents(plan: Plan, refs):
    """(Documents, the other refs). The state before the first chunk is zero, whose it may be."""
    if not plan.isolates:
        return Documents(), refs
    runs_ref, before_ref, *refs = refs
    runs_1S, before_11 = runs_ref[...], before_ref[:, -1:]
    last_11 = runs_1S[:, -1:]
    return Documents(runs_1S, runs_1S == before_11, runs_1S == last_11, last_11 - before_11), refs


def forward(plan: Plan, *refs):
    documents, refs = _documents(plan, refs)
    q_ref, k_ref, v_ref, o_ref, sum_ref, *state, parts = refs
    features, (sums, ones_sums) = plan.features, state
    _begin(state)
    number_X1 = jax.lax.broadcasted_iota(jnp.int32, (plan.columns, 1), 0)
    least_X1 = jnp.where(number_X1 == plan.width, ones_sums[...] / 2, -jnp.inf)

    def head(r, _):
        features.lay(parts, q_ref[r])

        def step(n, past_XS):
            return past_XS + tpu.product(sums[n], features.make(parts, n))

        past_XS = jnp.broadcast_to(ones_sums[...], (plan.columns, plan.chunk))
        past_XS = features.walk(step, past_XS)
        w_SS, _ = _weights(plan, documents, k_ref[0], q_ref[r])
        sums_XS = tpu.product(v_ref[0], w_SS.astype(plan.dtype))
        sums_XS += where(documents.reads_1S, jnp.maximum(past_XS, least_X1), 0)
        sum_1S = sums_XS[plan.width : plan.width + 1]
        o_ref[r] = (sums_XS[: plan.width] / sum_1S).astype(o_ref.dtype)
        sum_ref[r] = sum_1S

    jax.lax.fori_loop(0, plan.heads, head, None)
    _write_keys(plan, documents, k_ref, v_ref, state, parts)


def gradient_of_queries(plan: Plan, *refs):
    documents, refs = _documents(plan, refs)
    q_ref, k_ref, v_ref, d_ref, dq_ref, *state, parts, pulls = refs
    features, (sums, _) = plan.features, state
    _begin(state)

    def head(r, _):
        features.lay(parts, q_ref[r])
        pulls[...] = jnp.zeros_like(pulls)
        read_XS = where(documents.reads_1S, d_ref[r], 0)

        def step(n, dy_KS):
            dphi_FS = tpu.product(sums[n], read_XS, (0, 0))
            return dy_KS + features.pull(parts, pulls, n, dphi_FS)

        dy_KS = features.walk(step, jnp.zeros((features.rows, plan.chunk), jnp.float32))
        dx_SS, _ = _score_gradients(plan, documents, k_ref[0], q_ref[r], v_ref[0], d_ref[r])
        own_KS = tpu.product(k_ref[0], dx_SS.astype(plan.dtype))
        dq_KS = features.pulled(pulls, dy_KS) + own_KS * plan.key_size**-0.5
        dq_ref[r] = dq_KS.astype(dq_ref.dtype)

    jax.lax.fori_loop(0, plan.heads, head, None)
    _write_keys(plan, documents, k_ref, v_ref, state, parts)


def gradient_of_keys(plan: Plan, *refs):
    """The state here is the gradient of that after the chunk, then of that before it."""
    documents, refs = _documents(plan, refs)
    q_ref, k_ref, v_ref, d_ref, dk_ref, dv_ref, *state, parts, pulls = refs
    features, (sums, ones_sums) = plan.features, state
    _begin(state)
    features.lay(parts, k_ref[0])
    pulls[...] = jnp.zeros_like(pulls)
    written_XS = where(documents.writes_1S, v_ref[0], 0)

    def step(n, gradients):
        dy_KS, dv_XS = gradients
        dphi_FS = tpu.product(sums[n], written_XS, (0, 0))
        dv_XS += tpu.product(sums[n], features.make(parts, n))
        return dy_KS + features.pull(parts, pulls, n, dphi_FS), dv_XS

    dy_KS = jnp.zeros((features.rows, plan.chunk), jnp.float32)
    dv_XS = jnp.broadcast_to(ones_sums[...], (plan.columns, plan.chunk))
    dy_KS, dv_XS = features.walk(step, (dy_KS, dv_XS))
    _forget(documents, state)

    def head(r, gradients):
        dk_KS, dv_XS = gradients
        d_XS = d_ref[r]
        dx_SS, w_SS = _score_gradients(plan, documents, k_ref[0], q_ref[r], v_ref[0], d_XS)
        own_KS = tpu.product(q_ref[r], dx_SS.astype(plan.dtype), (1, 1))
        own_XS = tpu.product(d_XS, w_SS.astype(plan.dtype), (1, 1))
        _add(plan, q_ref[r], where(documents.reads_1S, d_XS, 0), state, parts)
        return dk_KS + own_KS * plan.key_size**-0.5, dv_XS + own_XS

    gradients = features.pulled(pulls, dy_KS), where(documents.writes_1S, dv_XS, 0)
    dk_KS, dv_XS = jax.lax.fori_loop(0, plan.heads, head, gradients)
    dk_ref[0] = dk_KS.astype(dk_ref.dtype)
    dv_ref[0] = dv_XS[: plan.width].astype(dv_ref.dtype)


def _clear(state) -> None:
    for ref in state:
        ref[...] = jnp.zeros_like(ref)


def _begin(state) -> None:
    pl.when(pl.program_id(2) == 0)(functools.partial(_clear, state))


def _forget(documents: Documents, state) -> None:
    """What is of another document than the one on the chunk's other side."""
    if documents.change_11 is not None:
        pl.when(documents.change_11[0, 0] != 0)(functools.partial(_clear, state))


def _write_keys(plan: Plan, documents: Documents, k_ref, v_ref, state, parts) -> None:
    """The state after the chunk in place of the one before it."""
    _forget(documents, state)
    _add(plan, k_ref[0], where(documents.writes_1S, v_ref[0], 0), state, parts)


def _add(plan: Plan, x_KS, columns_XS, state, parts) -> None:
    """Adds columns times the features of x."""
    sums, ones_sums = state
    plan.features.lay(parts, x_KS)

    def step(n, _):
        sums[n] += tpu.product(columns_XS, plan.features.make(parts, n), (1, 1))

    plan.features.walk(step)
    ones_sums[...] += jnp.sum(columns_XS.astype(jnp.float32), axis=1, keepdims=True)


def _weights(plan: Plan, documents: Documents, k_KS, q_KS):
    """(w, dw/dx) of a chunk's keys by its queries, 0 where a key is not seen."""
    x_SS = tpu.product(k_KS, q_KS, (0, 0)) * plan.key_size**-0.5
    runs_1S = documents.runs_1S
    seen_SS = tpu.sees(runs_1S, runs_1S, 0, plan.chunk, keys_first=True)
    return jnp.where(seen_SS, 1 + x_SS + x_SS * x_SS / 2, 0.0), jnp.where(seen_SS, 1 + x_SS, 0.0)


def _score_gradients(plan: Plan, documents: Documents, k_KS, q_KS, v_XS, d_XS):
    """(dx_SS, w_SS)."""
    w_SS, slope_SS = _weights(plan, documents, k_KS, q_KS)
    return tpu.product(v_XS, d_XS, (0, 0)) * slope_SS, w_SS
