"""Taylor attention as a recurrence over chunks, in Pallas for NVIDIA GPUs: the function of
`taylor_recurrence.chunked`.

A chunk's queries meet its own keys by scores, in the kernels of `taylor_gpu`, and all keys before
it by a state, the sums over those keys of 1, entries and pairs of entries times values and ones
(`taylor_state_gpu`, `taylor_read_gpu`). Backwards the gradient of the state after a chunk is the
same sums over later queries, times what comes from the output's gradient; queries and keys stand in
one another's place. With the whole row's sums of weights the kernels of a chunk give its own share
of all gradients.

Chunks are summed side by side, then passed on from one to the next. So the states of all chunks lie
in memory: for each chunk and group (K + 16) K W / 2 numbers, K filled up to a multiple of 16
(`taylor_state_gpu.Pairs`), in float32 before they are passed on and in the inputs' dtype after it,
linear in the length.

Of float32 inputs nothing is rounded. Of bfloat16 ones states are rounded on their way into a
product, and so are products of two entries of a vector, but for the gradients of queries and keys;
sums stay float32. What that does to a weight is told in `taylor_chunks_tpu`.

Documents: as in `taylor_recurrence`.

Axes: B batch, T time (in whole chunks), N chunks, S positions of one, H heads, G key/value groups,
K key size, W value size, E entries of a vector, filled up to a power of two.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from deconstruct.kernels import gpu, taylor_fused, taylor_gpu, taylor_read_gpu, taylor_state_gpu
from deconstruct.kernels.taylor_state_gpu import Side, State

# By arithmetic, for heads of 64: a state is written, passed on and read in the time in which an
# H200's tensor cores take 600 positions through it, and a chunk's own scores take two fifths of the
# time of its state's products.
LONGEST = 2048
TILE = 128  # positions; chunks are whole ones

refuses = taylor_gpu.refuses


def run(q_BTHK, k_BTGK, v_BTGW, runs_BT=None, *, longest: int = LONGEST) -> jax.Array:
    """o_BTHW in v's dtype, by chunks of up to `longest` positions."""
    forward, backward = (functools.partial(kernel, longest) for kernel in (_forward, _backward))
    return taylor_fused.op(forward, backward)(q_BTHK, k_BTGK, v_BTGW, runs_BT)


class Cut(NamedTuple):
    """Of a row of `length` positions into `chunks` of `size`, the last filled up."""

    length: int
    size: int
    chunks: int

    def fill(self, x_BT, **options):
        """(B, T, ..) with zeros, or what `options` of jnp.pad say, up to whole chunks."""
        padding = [(0, 0)] * x_BT.ndim
        padding[1] = 0, self.chunks * self.size - self.length
        return jnp.pad(x_BT, padding, **options) if padding[1][1] else x_BT

    def fill_rows(self, x_BHT, **options):
        return jnp.swapaxes(self.fill(jnp.swapaxes(x_BHT, 1, 2), **options), 1, 2)

    def split(self, x_BT):
        """(B, T, ..) -> (B * N, S, ..)."""
        return None if x_BT is None else x_BT.reshape(-1, self.size, *x_BT.shape[2:])

    def join(self, x_BS):
        """(B * N, S, ..) -> (B, T, ..)."""
        return x_BS.reshape(-1, self.chunks * self.size, *x_BS.shape[2:])

    def split_rows(self, x_BHT):
        """(B, H, T) -> (B * N, H, S)."""
        return jnp.swapaxes(self.split(jnp.swapaxes(x_BHT, 1, 2)), 1, 2)

    def join_rows(self, x_BHS):
        """(B * N, H, S) -> (B, H, T)."""
        return jnp.swapaxes(self.join(jnp.swapaxes(x_BHS, 1, 2)), 1, 2)


class Documents(NamedTuple):
    """All None where they are not isolated.

    Attributes:
      reads_BT: 1.0 where a query is of the document alive at its chunk's start, else 0.0.
      writes_BT: 1.0 where a key is of the document alive at its chunk's end, else 0.0.
      survives_NB: 1.0 where these two are one, else 0.0; from the second chunk on.
    """

    reads_BT: jax.Array | None = None
    writes_BT: jax.Array | None = None
    survives_NB: jax.Array | None = None


def _cut(longest: int, length: int) -> Cut:
    size = -(-length // -(-length // longest))
    tile = min(gpu.side(size), TILE)
    size = -(-size // tile) * tile
    return Cut(length, size, -(-length // size))


def _documents(cut: Cut, runs_BT) -> Documents:
    if runs_BT is None:
        return Documents()
    runs_BNS = runs_BT.reshape(-1, cut.chunks, cut.size)
    last_BN1 = runs_BNS[..., -1:]
    before_BN1 = jnp.concatenate([last_BN1[:, :1], last_BN1[:, :-1]], axis=1)
    reads, writes = (
        (runs_BNS == x).reshape(runs_BT.shape).astype(jnp.float32) for x in (before_BN1, last_BN1)
    )
    survives_BN = (last_BN1 == before_BN1)[:, 1:, 0]
    return Documents(reads, writes, survives_BN.T.astype(jnp.float32))


def _side(y_BTHK, g_BTHW, weight_BHT, counts_BT) -> Side:
    counted = y_BTHK
    if counts_BT is not None:
        counted = jnp.where(counts_BT[..., None, None] > 0, y_BTHK, 0)
    filling = gpu.side(y_BTHK.shape[-1]) - y_BTHK.shape[-1]
    padded_BTHE = jnp.pad(counted, ((0, 0), (0, 0), (0, 0), (0, filling)))
    return Side(y_BTHK, jnp.transpose(padded_BTHE, (0, 2, 3, 1)), g_BTHW, weight_BHT, counts_BT)


def _pass_on(sums: State, survives_NB, key_size: int, dtype, *, reverse: bool = False) -> State:
    """The state before each chunk but the first, of what chunks add; or with `reverse` its gradient
    after each chunk but the last, of what later chunks add.

    What products take is rounded to `dtype`; scores' scale is in it.
    """
    once, twice = key_size**-0.5, 1 / key_size
    scales = State(1.0, once, twice, 1.0, once, twice)
    dtypes = State(jnp.float32, dtype, dtype, jnp.float32, jnp.float32, dtype)

    def step(before: State, added_and_survives):
        added, survives_B = added_and_survives

        def add(x, more):
            if survives_B is not None:
                x = x * survives_B.reshape(-1, *(1,) * (x.ndim - 1))
            return x + more

        after = jax.tree.map(add, before, added)
        found = (
            (x * scale).astype(kind) for x, scale, kind in zip(after, scales, dtypes, strict=True)
        )
        return after, State(*found)

    nothing = jax.tree.map(lambda x: jnp.zeros_like(x[0]), sums)
    return jax.lax.scan(step, nothing, (sums, survives_NB), reverse=reverse)[1]


def _state(cut: Cut, keys: Side, documents: Documents) -> State:
    """Before each chunk but the first."""
    survives_NB = documents.survives_NB
    if survives_NB is not None:  # the first chunk's sums meet nothing; the last's count nowhere
        survives_NB = jnp.concatenate([survives_NB[:1], survives_NB[:-1]])
    _, _, groups, key_size = keys.y_BTHK.shape
    sums = taylor_state_gpu.sums(keys, groups, cut.size, first=0)
    return _pass_on(sums, survives_NB, key_size, keys.y_BTHK.dtype)


def _fill(cut: Cut, q_BTHK, k_BTGK, v_BTGW, runs_BT):
    runs_BT = None if runs_BT is None else cut.fill(runs_BT, mode="edge")
    return *map(cut.fill, (q_BTHK, k_BTGK, v_BTGW)), runs_BT


def _forward(longest, q_BTHK, k_BTGK, v_BTGW, runs_BT):
    """(o_BTHW, sum_BHT: of each row's weights) of one device."""
    length = q_BTHK.shape[1]
    cut = _cut(longest, length)
    arrays = _fill(cut, q_BTHK, k_BTGK, v_BTGW, runs_BT)
    q_BTHK, k_BTGK, v_BTGW, runs_BT = arrays
    o_BTHW, sum_BHT = taylor_gpu.forward(*map(cut.split, arrays))
    o_BTHW, sum_BHT = cut.join(o_BTHW), cut.join_rows(sum_BHT)
    if cut.chunks > 1:
        documents = _documents(cut, runs_BT)
        state = _state(cut, _side(k_BTGK, v_BTGW, None, documents.writes_BT), documents)
        queries = _side(q_BTHK, o_BTHW, None, documents.reads_BT)
        o_BTHW, sum_BHT = taylor_read_gpu.read_weighed(queries, state, cut.size, o_BTHW, sum_BHT)
    return o_BTHW[:, :length], sum_BHT[..., :length]


def _backward(longest, q_BTHK, k_BTGK, v_BTGW, runs_BT, sum_BHT, delta_BHT, do_BTHW):
    """(dq_BTHK, dk_BTGK, dv_BTGW) of one device."""
    length = q_BTHK.shape[1]
    cut = _cut(longest, length)
    arrays = _fill(cut, q_BTHK, k_BTGK, v_BTGW, runs_BT)
    q_BTHK, k_BTGK, v_BTGW, runs_BT = arrays
    sum_BHT = cut.fill_rows(sum_BHT, constant_values=1)
    delta_BHT, do_BTHW = cut.fill_rows(delta_BHT), cut.fill(do_BTHW)
    own = taylor_gpu.backward(
        *map(cut.split, arrays),
        cut.split_rows(sum_BHT),
        cut.split_rows(delta_BHT),
        cut.split(do_BTHW),
    )
    dq_BTHK, dk_BTGK, dv_BTGW = map(cut.join, own)
    if cut.chunks > 1:
        documents = _documents(cut, runs_BT)
        keys = _side(k_BTGK, v_BTGW, None, documents.writes_BT)
        inverse_BHT = 1 / sum_BHT
        d_BTHW = do_BTHW * jnp.swapaxes(inverse_BHT, 1, 2)[..., None]
        weight_BHT = -delta_BHT * inverse_BHT
        queries = _side(q_BTHK, d_BTHW.astype(v_BTGW.dtype), weight_BHT, documents.reads_BT)
        dq_BTHK = taylor_read_gpu.slope(queries, _state(cut, keys, documents), cut.size, dq_BTHK, 1)
        groups, key_size = k_BTGK.shape[2:]
        later = taylor_state_gpu.sums(queries, groups, cut.size, first=1)
        gradient = _pass_on(later, documents.survives_NB, key_size, k_BTGK.dtype, reverse=True)
        dk_BTGK = taylor_read_gpu.slope(keys, gradient, cut.size, dk_BTGK, 0)
        dv_BTGW = taylor_read_gpu.read(keys, gradient, cut.size, dv_BTGW)
    return dq_BTHK[:, :length], dk_BTGK[:, :length], dv_BTGW[:, :length]
