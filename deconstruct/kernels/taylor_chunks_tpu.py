"""Taylor attention as a recurrence over chunks whose state stays in fast memory, in Pallas for
TPUs: what `taylor_recurrence.chunked` computes, with neither features nor states in HBM.

A program takes one group of heads and walks over chunks of positions. The sums over the keys before
a chunk of features times values (and times 1, for the denominator) are read by the chunk's queries,
which meet the chunk's own keys by scores; then the chunk's keys are added. Backwards there are two
walks: forward, with the sums built again, for dq, and in reverse, with the sums' gradient, for dk
and dv.

Of y = x / K^(1/4) the features are 1, y, and for each shift m from 0 to K/2 the K products of
entries m apart, y_i y_(i+m mod K). Each pair appears once, but for shifts 0 and K/2, which have it
twice or square an entry, and bear sqrt(1/2). All blocks of K features are thus one product of y and
a slice of rows that lie ready in memory, and K (K/2 + 1) of them stand for K (K + 1) / 2 pairs:
3% too many at K = 64.

Of float32 inputs nothing is rounded. Of bfloat16 ones features and sums are rounded on their way
into a product, as queries, keys and values are; the sums themselves stay float32. A weight's error
is then about 1e-3 |q|^2 |k|^2 / K, of the size of what rounding q and k does to it, unless q and k
are both large and at right angles.

Axes: B batch, T time, H heads, G key/value groups, R heads of a group, C channels, K key size
(filled up to a multiple of 8), W value size, X columns (values, a one, and zeros up to a multiple
of 8), F features of a step, S positions of a chunk (keys, queries or either), P rows of parts.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from deconstruct.kernels import tpu
from deconstruct.kernels.backends import Call
from deconstruct.kernels.shards import per_shard

CHUNKS = (256, 128)  # positions, the first that fits
DEPTH = 256  # features that a product sums over, at most
HALF = 0.5**0.5


class Plan(NamedTuple):
    """The static side of a call on one device.

    Attributes:
      length, heads, key_size, width: of the arrays; `heads` are R.
      chunk: positions of a grid step.
      dtype: of the operands of products.
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
    def rows(self) -> int:
        """K."""
        return -(-self.key_size // 8) * 8

    @property
    def columns(self) -> int:
        """X."""
        return -(-(self.width + 1) // 8) * 8

    @property
    def blocks(self) -> int:
        """Of K features each: a shift's, or y itself, the last."""
        return self.rows // 2 + 2

    @property
    def blocks_a_step(self) -> int:
        most = max(DEPTH // self.rows, 1)
        return max(n for n in range(1, most + 1) if self.blocks % n == 0)

    @property
    def steps(self) -> int:
        return self.blocks // self.blocks_a_step

    @property
    def sums(self) -> tuple[int, int, int]:
        """The shape of the state, but for the feature 1."""
        return self.steps, self.columns, self.blocks_a_step * self.rows

    @property
    def tile(self) -> int:
        return min(self.chunk, tpu.TILE)

    @property
    def parts(self) -> tuple[int, int, int]:
        """Rows that a block multiplies y with: y twice, the same times sqrt(1/2), and ones."""
        return self.chunk // self.tile, 5 * self.rows, self.tile

    def bytes(self) -> int:
        """Of the walk for dk and dv, which holds the most: the chunk's q and d, k, v and their
        gradients, each of this step and the next, the state, and what a chunk's scores take.
        """
        steps, columns, features = self.sums
        state = steps * columns * -(-features // tpu.TILE) * tpu.TILE
        both = self.rows + self.columns
        positions = 2 * (self.heads + 2) * both * self.dtype.itemsize
        scratch = 4 * (2 * 5 * self.rows + both + 4 * self.chunk + 3 * features)
        return 4 * state + self.chunk * (positions + scratch)


def _plan(call_sizes, dtype, isolates: bool) -> Plan:
    plans = [Plan(*call_sizes, chunk, jnp.dtype(dtype), isolates) for chunk in CHUNKS]
    return next((plan for plan in plans if plan.bytes() <= tpu.BUFFER_BYTES), plans[-1])


def refuses(call: Call) -> str | None:
    """Why it cannot run a call."""
    sizes = call.length, call.num_heads // call.num_groups, call.key_size, call.value_size
    plan = _plan(sizes, call.dtype, call.isolates_documents)
    if plan.bytes() <= tpu.BUFFER_BYTES:
        return None
    return (
        f"the state of a group and {plan.chunk} positions take {plan.bytes()} bytes, "
        f"more than {tpu.BUFFER_BYTES}"
    )


def run(q_BTHK, k_BTGK, v_BTGW, runs_BT=None) -> jax.Array:
    """o_BTHW in v's dtype."""
    return _attend(q_BTHK, k_BTGK, v_BTGW, runs_BT)


@jax.custom_vjp
def _attend(q_BTHK, k_BTGK, v_BTGW, runs_BT):
    return _attend_forward(q_BTHK, k_BTGK, v_BTGW, runs_BT)[0]


def _attend_forward(q_BTHK, k_BTGK, v_BTGW, runs_BT):
    given = ("BTHK", "BTGK", "BTGW", "BT")
    forward = per_shard(_forward, given, ("BTHW", "BHT"), v_BTGW)
    o_BTHW, sum_BHT = forward(q_BTHK, k_BTGK, v_BTGW, runs_BT)
    return o_BTHW, (q_BTHK, k_BTGK, v_BTGW, runs_BT, o_BTHW, sum_BHT)


def _attend_backward(residuals, do_BTHW):
    given = ("BTHK", "BTGK", "BTGW", "BT", "BTHW", "BHT", "BTHW")
    backward = per_shard(_backward, given, ("BTHK", "BTGK", "BTGW"), residuals[2])
    return *backward(*residuals, do_BTHW), None


_attend.defvjp(_attend_forward, _attend_backward)


def _plan_of(q_BTHK, v_BTGW, runs_BT) -> Plan:
    _, length, heads, key_size = q_BTHK.shape
    groups, width = v_BTGW.shape[2:]
    return _plan((length, heads // groups, key_size, width), v_BTGW.dtype, runs_BT is not None)


def _forward(q_BTHK, k_BTGK, v_BTGW, runs_BT):
    """(o_BTHW, sum_BHT: of each row's weights) of one device."""
    plan = _plan_of(q_BTHK, v_BTGW, runs_BT)
    batch, _, heads, _ = q_BTHK.shape
    o_BHWT, sum_BHT = _call(
        plan,
        _forward_kernel,
        runs_BT,
        _arrays(plan, q_BTHK, k_BTGK, v_BTGW),
        [(batch, heads, plan.width, v_BTGW.dtype), (batch, heads, 1, jnp.float32)],
        [plan.parts],
    )
    return _time_second(plan, o_BHWT), sum_BHT[:, :, 0, : plan.length]


def _backward(q_BTHK, k_BTGK, v_BTGW, runs_BT, o_BTHW, sum_BHT, do_BTHW):
    """(dq_BTHK, dk_BTGK, dv_BTGW) of one device."""
    plan = _plan_of(q_BTHK, v_BTGW, runs_BT)
    do_BTHW = do_BTHW.astype(jnp.float32) / jnp.swapaxes(sum_BHT, 1, 2)[..., None]
    delta_BTH1 = jnp.sum(do_BTHW * o_BTHW.astype(jnp.float32), axis=-1, keepdims=True)
    d_BTHX = jnp.concatenate([do_BTHW, -delta_BTH1], axis=-1).astype(plan.dtype)
    d_BHXT = _time_last(plan, d_BTHX, plan.columns)
    arrays = *_arrays(plan, q_BTHK, k_BTGK, v_BTGW), d_BHXT
    batch, _, heads, _ = q_BTHK.shape
    groups = v_BTGW.shape[2]
    (dq_BHKT,) = _call(
        plan,
        _queries_kernel,
        runs_BT,
        arrays,
        [(batch, heads, plan.rows, q_BTHK.dtype)],
        [plan.parts, plan.parts],
    )
    dk_BGKT, dv_BGWT = _call(
        plan,
        _keys_kernel,
        runs_BT,
        arrays,
        [
            (batch, groups, plan.rows, k_BTGK.dtype),
            (batch, groups, plan.width, v_BTGW.dtype),
        ],
        [plan.parts, plan.parts],
        reverse=True,
    )
    dq_BTHK, dk_BTGK = (_time_second(plan, x)[..., : plan.key_size] for x in (dq_BHKT, dk_BGKT))
    return dq_BTHK, dk_BTGK, _time_second(plan, dv_BGWT)


def _arrays(plan: Plan, q_BTHK, k_BTGK, v_BTGW):
    """(q_BHKT, k_BGKT, v_BGXT)."""
    one_BTG1 = jnp.ones((*v_BTGW.shape[:3], 1), v_BTGW.dtype)
    v_BTGX = jnp.concatenate([v_BTGW, one_BTG1], axis=-1)
    q_BHKT, k_BGKT = (_time_last(plan, x, plan.rows) for x in (q_BTHK, k_BTGK))
    return q_BHKT, k_BGKT, _time_last(plan, v_BTGX, plan.columns)


def _time_last(plan: Plan, x_BTHC, channels: int):
    """(B, H, C, T), zeros up to so many channels and to whole chunks: no key there has a weight."""
    padding = (0, -plan.length % plan.chunk), (0, 0), (0, channels - x_BTHC.shape[-1])
    return jnp.transpose(jnp.pad(x_BTHC, ((0, 0), *padding)), (0, 2, 3, 1))


def _time_second(plan: Plan, x_BHCT):
    return jnp.transpose(x_BHCT[..., : plan.length], (0, 3, 1, 2))


def _call(plan: Plan, kernel, runs_BT, arrays, outputs, parts, *, reverse: bool = False):
    """The kernel over rows, groups and, in turn, chunks, from the last where `reverse`.

    Its refs are the documents of the chunk and of the one before it, `arrays`, `outputs`, the state
    but for the feature 1, the state of the feature 1, and `parts`.

    Args:
      plan: of the call.
      kernel: takes the plan and refs.
      runs_BT: documents, or None.
      arrays: time last; of a group, or of its heads.
      outputs: (B, G or H, C, dtype).
      parts: shapes of scratch in float32.
      reverse: whether to begin at the end.
    """
    batch, groups = arrays[1].shape[:2]
    steps = -(-plan.length // plan.chunk)

    def number(n):
        return steps - 1 - n if reverse else n

    def block(x):
        heads = x.shape[1] // groups
        spec = pl.BlockSpec(
            (None, heads, x.shape[2], plan.chunk), lambda b, g, n: (b, g, 0, number(n))
        )
        return x, spec

    documents = []
    if plan.isolates:
        padding = (0, 0), (0, steps * plan.chunk - plan.length)
        runs_B1T = jnp.pad(runs_BT, padding, mode="edge")[:, None]
        shape = None, 1, plan.chunk
        documents = [
            (runs_B1T, pl.BlockSpec(shape, lambda b, g, n: (b, 0, number(n)))),
            (runs_B1T, pl.BlockSpec(shape, lambda b, g, n: (b, 0, jnp.maximum(number(n) - 1, 0)))),
        ]
    made = [jax.ShapeDtypeStruct((*shape, steps * plan.chunk), dtype) for *shape, dtype in outputs]
    return tpu.call_blocks(
        functools.partial(kernel, plan),
        (batch, groups, steps),
        [*documents, *(block(x) for x in arrays)],
        [block(x) for x in made],
        [(shape, jnp.float32) for shape in (plan.sums, (plan.columns, 1), *parts)],
        walk=1,
    )


class Documents(NamedTuple):
    """Of a chunk, or all None: no document ends.

    Attributes:
      runs_1S: whose each position is.
      reads_1S: whether a query's document is the one alive at the chunk's start, of which alone
        the state before the chunk holds keys.
      writes_1S: whether a key's document is the one alive at the chunk's end.
      change_11: 0 where these two are one.
    """

    runs_1S: jax.Array | None
    reads_1S: jax.Array | None
    writes_1S: jax.Array | None
    change_11: jax.Array | None


def _documents(plan: Plan, refs):
    """(Documents, the other refs). Before the first chunk is a state of zeros, whosoever it is."""
    if not plan.isolates:
        return Documents(None, None, None, None), refs
    runs_ref, before_ref, *refs = refs
    runs_1S, before_11 = runs_ref[...], before_ref[:, -1:]
    last_11 = runs_1S[:, -1:]
    return Documents(runs_1S, runs_1S == before_11, runs_1S == last_11, last_11 - before_11), refs


def _where(condition, x):
    return x if condition is None else jnp.where(condition, x, 0)


def _forward_kernel(plan: Plan, *refs):
    documents, refs = _documents(plan, refs)
    q_ref, k_ref, v_ref, o_ref, sum_ref, sums, ones_sums, parts = refs
    _begin(sums, ones_sums)

    def head(r, _):
        _lay(plan, parts, q_ref[r])

        def step(n, past_XS):
            return past_XS + tpu.product(sums[n], _features(plan, parts, n))

        past_XS = jnp.broadcast_to(ones_sums[...], (plan.columns, plan.chunk))
        past_XS = jax.lax.fori_loop(0, plan.steps, step, past_XS)
        _, w_SS = _weights(plan, documents, k_ref[0], q_ref[r])
        sums_XS = tpu.product(v_ref[0], w_SS.astype(plan.dtype))
        sums_XS += _where(documents.reads_1S, past_XS)
        sum_1S = sums_XS[plan.width : plan.width + 1]
        o_ref[r] = (sums_XS[: plan.width] / sum_1S).astype(o_ref.dtype)
        sum_ref[r] = sum_1S

    jax.lax.fori_loop(0, plan.heads, head, None)
    _write_keys(plan, documents, k_ref[0], v_ref[0], sums, ones_sums, parts)


def _queries_kernel(plan: Plan, *refs):
    documents, refs = _documents(plan, refs)
    q_ref, k_ref, v_ref, d_ref, dq_ref, sums, ones_sums, parts, pulls = refs
    _begin(sums, ones_sums)

    def head(r, _):
        _lay(plan, parts, q_ref[r])
        pulls[...] = jnp.zeros_like(pulls)
        read_XS = _where(documents.reads_1S, d_ref[r])

        def step(n, dy_KS):
            dphi_FS = tpu.product(sums[n], read_XS, (0, 0))
            return dy_KS + _pull(plan, parts, pulls, n, dphi_FS)

        dy_KS = jnp.zeros((plan.rows, plan.chunk), jnp.float32)
        dy_KS = jax.lax.fori_loop(0, plan.steps, step, dy_KS) + _pulled(plan, pulls)
        dx_SS, _ = _score_gradients(plan, documents, k_ref[0], q_ref[r], v_ref[0], d_ref[r])
        own_KS = tpu.product(k_ref[0], dx_SS.astype(plan.dtype))
        dq_KS = dy_KS * plan.key_size**-0.25 + own_KS * plan.key_size**-0.5
        dq_ref[r] = dq_KS.astype(dq_ref.dtype)

    jax.lax.fori_loop(0, plan.heads, head, None)
    _write_keys(plan, documents, k_ref[0], v_ref[0], sums, ones_sums, parts)


def _keys_kernel(plan: Plan, *refs):
    """`sums` are the gradient of the state after the chunk, then of that before it."""
    documents, refs = _documents(plan, refs)
    q_ref, k_ref, v_ref, d_ref, dk_ref, dv_ref, sums, ones_sums, parts, pulls = refs
    _begin(sums, ones_sums)
    _lay(plan, parts, k_ref[0])
    pulls[...] = jnp.zeros_like(pulls)
    written_XS = _where(documents.writes_1S, v_ref[0])

    def step(n, gradients):
        dy_KS, dv_XS = gradients
        dsums_XF = sums[n]
        dphi_FS = tpu.product(dsums_XF, written_XS, (0, 0))
        dv_XS += tpu.product(dsums_XF, _features(plan, parts, n))
        return dy_KS + _pull(plan, parts, pulls, n, dphi_FS), dv_XS

    dy_KS = jnp.zeros((plan.rows, plan.chunk), jnp.float32)
    dv_XS = jnp.broadcast_to(ones_sums[...], (plan.columns, plan.chunk))
    dy_KS, dv_XS = jax.lax.fori_loop(0, plan.steps, step, (dy_KS, dv_XS))
    dk_KS = (dy_KS + _pulled(plan, pulls)) * plan.key_size**-0.25
    dv_XS = _where(documents.writes_1S, dv_XS)
    _keep(plan, documents, sums, ones_sums)

    def head(r, gradients):
        dk_KS, dv_XS = gradients
        d_XS = d_ref[r]
        dx_SS, w_SS = _score_gradients(plan, documents, k_ref[0], q_ref[r], v_ref[0], d_XS)
        own_KS = tpu.product(q_ref[r], dx_SS.astype(plan.dtype), (1, 1))
        own_XS = tpu.product(d_XS, w_SS.astype(plan.dtype), (1, 1))
        _lay(plan, parts, q_ref[r])
        _add(plan, _where(documents.reads_1S, d_XS), sums, ones_sums, parts)
        return dk_KS + own_KS * plan.key_size**-0.5, dv_XS + own_XS

    dk_KS, dv_XS = jax.lax.fori_loop(0, plan.heads, head, (dk_KS, dv_XS))
    dk_ref[0] = dk_KS.astype(dk_ref.dtype)
    dv_ref[0] = dv_XS[: plan.width].astype(dv_ref.dtype)


def _begin(sums, ones_sums):
    @pl.when(pl.program_id(2) == 0)
    def _():
        sums[...] = jnp.zeros_like(sums)
        ones_sums[...] = jnp.zeros_like(ones_sums)


def _write_keys(plan: Plan, documents: Documents, k_KS, v_XS, sums, ones_sums, parts):
    """The state after the chunk in place of the one before it."""
    _keep(plan, documents, sums, ones_sums)
    _lay(plan, parts, k_KS)
    _add(plan, _where(documents.writes_1S, v_XS), sums, ones_sums, parts)


def _keep(plan: Plan, documents: Documents, sums, ones_sums):
    if not plan.isolates:
        return

    @pl.when(documents.change_11[0, 0] != 0)
    def _():
        sums[...] = jnp.zeros_like(sums)
        ones_sums[...] = jnp.zeros_like(ones_sums)


def _add(plan: Plan, x_XS, sums, ones_sums, parts):
    """Columns times the features of what is laid out."""

    def step(n, _):
        sums[n] += tpu.product(x_XS, _features(plan, parts, n), (1, 1))

    jax.lax.fori_loop(0, plan.steps, step, None)
    ones_sums[...] += jnp.sum(x_XS.astype(jnp.float32), axis=1, keepdims=True)


def _lay(plan: Plan, parts, x_KS):
    """Lays out `parts` of y."""
    y_KS = x_KS.astype(jnp.float32) * plan.key_size**-0.25
    half_KS = HALF * y_KS
    for number, rows in enumerate((y_KS, y_KS, half_KS, half_KS, jnp.ones_like(y_KS))):
        at = slice(number * plan.rows, (number + 1) * plan.rows)
        for tile in range(len(parts)):
            parts[tile, at] = rows[:, tile * plan.tile : (tile + 1) * plan.tile]


def _block(plan: Plan, number):
    """Which rows of the parts y meets in a block of features."""
    last = plan.rows // 2
    bears_half = (number == 0) | (number == last)
    start = jnp.where(bears_half, 2 * plan.rows + number, number)
    return pl.ds(jnp.where(number > last, 4 * plan.rows, start), plan.rows)


def _read(parts, at):
    """Rows of all tiles, (K, S)."""
    return jnp.concatenate([parts[tile, at] for tile in range(len(parts))], axis=1)


def _features(plan: Plan, parts, n):
    """phi_FS of a step, of what is laid out."""
    y_KS = _read(parts, slice(0, plan.rows))
    first = n * plan.blocks_a_step
    blocks = [y_KS * _read(parts, _block(plan, first + i)) for i in range(plan.blocks_a_step)]
    return jnp.concatenate(blocks, axis=0).astype(plan.dtype)


def _pull(plan: Plan, parts, pulls, n, dphi_FS):
    """dy_KS of one factor of a step's features; `pulls` gather that of the other, the parts."""
    y_KS = _read(parts, slice(0, plan.rows))
    dy_KS = jnp.zeros_like(y_KS)
    for i in range(plan.blocks_a_step):
        at = _block(plan, n * plan.blocks_a_step + i)
        dblock_KS = dphi_FS[i * plan.rows : (i + 1) * plan.rows]
        dy_KS += dblock_KS * _read(parts, at)
        dparts_KS = dblock_KS * y_KS
        for tile in range(len(parts)):
            columns = slice(tile * plan.tile, (tile + 1) * plan.tile)
            pulls[tile, at] += dparts_KS[:, columns]
    return dy_KS


def _pulled(plan: Plan, pulls):
    """dy_KS through the parts."""
    first, second, half, other_half = (
        _read(pulls, slice(i * plan.rows, (i + 1) * plan.rows)) for i in range(4)
    )
    return first + second + HALF * (half + other_half)


def _weights(plan: Plan, documents: Documents, k_KS, q_KS):
    """(dw/dx, w) of a chunk's keys by its queries, 0 where a key is not seen."""
    x_SS = tpu.product(k_KS, q_KS, (0, 0)) * plan.key_size**-0.5
    runs_1S = documents.runs_1S
    seen_SS = tpu.sees(runs_1S, runs_1S, 0, plan.chunk, keys_first=True)
    return jnp.where(seen_SS, 1 + x_SS, 0.0), jnp.where(seen_SS, 1 + x_SS + x_SS * x_SS / 2, 0.0)


def _score_gradients(plan: Plan, documents: Documents, k_KS, q_KS, v_XS, d_XS):
    """(dx_SS, w_SS)."""
    slope_SS, w_SS = _weights(plan, documents, k_KS, q_KS)
    return tpu.product(v_XS, d_XS, (0, 0)) * slope_SS, w_SS
