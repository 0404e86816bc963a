"""Next-token loss from the final hidden state, without ever holding all logits.

The head and the loss are one function: tokens go through it in chunks, and where a gradient is
wanted each chunk's d loss / d logits is formed right behind its logits, in the forward, so that a
chunk's logits die with the chunk. Under a mesh all of it runs inside `jax.shard_map`: with
shardings alone the table's gradient, which the loop carries, would be summed over the devices once
a chunk.

Targets must lie in [0, vocab_size). The data room refuses others on the host, naming their shard;
one that comes here all the same, whatever its weight, makes its loss NaN, never a plausible number.

Where nothing is differentiated a chunk goes through the vocabulary in blocks, too.

Axes: B batch, T time, N = B * T tokens (of one device), C tokens of a chunk, D model,
V vocabulary rows of the table, padding included, K rows of a block.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from deconstruct import kernels, sharding, tuning


class Tile(NamedTuple):
    """Logits that exist at once where nothing is differentiated.

    Attributes:
      tokens: of a device; where some are not wanted, half of so many are computed for nothing.
      ids: rows of the table.
    """

    tokens: int
    ids: int


VOCABULARY_AXIS = "tensor"
TOKENS = P(sharding.BATCH_AXES, None)
HIDDEN = P(sharding.BATCH_AXES, None, None)
TABLE = P(VOCABULARY_AXIS, None)


class LossSums(NamedTuple):
    """Sums over tokens, float32 scalars without gradient.

    Attributes:
      nll: weight * negative log-likelihood, nats.
      z: weight * lse^2, with lse the log of the softmax's denominator; not yet times z_loss.
      weight: weight.
    """

    nll: jax.Array
    z: jax.Array
    weight: jax.Array


class _Head(NamedTuple):
    """The static side of the computation, equal on all devices.

    Attributes:
      vocab_size: rows of the table that are tokens; the others never take part.
      z_loss: weight of lse^2.
      chunk_tokens: upper bound of C.
      block_ids: upper bound of K.
      sharded: whether this runs on each device's share of the arrays.
    """

    vocab_size: int
    z_loss: float
    chunk_tokens: int
    block_ids: int | None = None
    sharded: bool = False


def token_losses(
    x_BTD: jax.Array,
    table_VD: jax.Array,
    targets_BT: jax.Array,
    *,
    vocab_size: int,
    tile: Tile | None = None,
) -> jax.Array:
    """Negative log-likelihood of each target in nats, (B, T) float32, without gradient.

    Args:
      x_BTD: hidden state after the final norm.
      table_VD: output table; it is cast to x's dtype for the product, which is summed in float32.
      targets_BT: ids below vocab_size; any other gives NaN at its place.
      vocab_size: rows of the table that are tokens.
      tile: None takes the platform's.

    Raises:
      ValueError: a vocabulary larger than the table.
    """
    head, arrays = _tiled_head(table_VD, vocab_size, tile), (HIDDEN, TABLE, TOKENS)
    run = _on_mesh(_local_token_losses, head, arrays, TOKENS)
    return run(jax.lax.stop_gradient(x_BTD), jax.lax.stop_gradient(table_VD), targets_BT)


def token_scores(
    x_BTD: jax.Array,
    table_VD: jax.Array,
    targets_BT: jax.Array,
    wanted_BT: jax.Array,
    *,
    vocab_size: int,
    tile: Tile | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`token_losses` where wanted, and whether the target is the likeliest id (the first of equal
    ones) there; 0 and False elsewhere, where nothing is computed but what fills a last chunk.
    """
    head, arrays = _tiled_head(table_VD, vocab_size, tile), (HIDDEN, TABLE, TOKENS, TOKENS)
    run = _on_mesh(_local_token_scores, head, arrays, (TOKENS, TOKENS))
    x_BTD, table_VD = jax.lax.stop_gradient((x_BTD, table_VD))
    return run(x_BTD, table_VD, targets_BT, wanted_BT)


def weighted_loss(
    x_BTD: jax.Array,
    table_VD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    vocab_size: int,
    z_loss: float = 0.0,
    chunk_tokens: int | None = None,
) -> tuple[jax.Array, LossSums]:
    """Sum over tokens of weight * (nll + z_loss * lse^2), and the sums behind it.

    Divide by a weight total to get a mean; dividing outside lets micro-batches of unequal weight
    add up to the full batch. The float32 scalar sum is the only output with a gradient, and x and
    the table the only inputs; the table's padding rows get exactly 0. Not for use under
    `jax.checkpoint`, which would run the products twice, nor for forward-mode derivatives.

    Args:
      x_BTD: hidden state after the final norm.
      table_VD: output table; it is cast to x's dtype for the products, which are summed in float32.
      targets_BT: ids below vocab_size; any other makes the sum NaN, also at weight 0.
      weights_BT: float32 weight of each token.
      vocab_size: rows of the table that are tokens.
      z_loss: weight of the squared log-denominator.
      chunk_tokens: tokens of a device whose logits exist at once; None takes the platform's.

    Raises:
      ValueError: a vocabulary larger than the table.
    """
    if chunk_tokens is None:
        chunk_tokens = tuning.of(kernels.platform()).loss_chunk
    head = _head(table_VD, vocab_size, chunk_tokens, z_loss)
    weights_BT = weights_BT.astype(jnp.float32)
    loss, sums = _loss(head, x_BTD, table_VD, targets_BT, weights_BT)
    return loss, jax.lax.stop_gradient(sums)


def bits_per_byte(nll_sum: float, bytes_sum: float) -> float:
    """Bits that the model needs for one byte of the text that its targets spell.

    Args:
      nll_sum: sum of negative log-likelihoods, nats.
      bytes_sum: sum of the targets' byte lengths.

    Raises:
      ValueError: no bytes.
    """
    if not bytes_sum > 0:
        raise ValueError(f"bits per byte of {bytes_sum} bytes; score at least one target with text")
    return nll_sum / (bytes_sum * math.log(2))


def _head(table_VD: jax.Array, vocab_size: int, chunk_tokens: int, z_loss: float = 0.0) -> _Head:
    """The static side, once its vocabulary is known to fit the table."""
    if not 0 < vocab_size <= table_VD.shape[0]:
        raise ValueError(
            f"vocab_size={vocab_size} does not fit an output table of {table_VD.shape[0]} rows"
        )
    return _Head(vocab_size, z_loss, chunk_tokens)


def _tiled_head(table_VD: jax.Array, vocab_size: int, tile: Tile | None) -> _Head:
    if tile is None:
        choice = tuning.of(kernels.platform())
        tile = Tile(choice.score_tokens, choice.score_ids)
    return _head(table_VD, vocab_size, tile.tokens)._replace(block_ids=tile.ids)


def _on_mesh(local, head: _Head, in_specs, out_specs):
    """`local(head, ...)` on the whole arrays, or on each device's share of them under a mesh."""
    mesh = sharding.active_mesh()
    if mesh is None:
        return functools.partial(local, head)
    local = functools.partial(local, head._replace(sharded=True))
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(head: _Head, x_BTD, table_VD, targets_BT, weights_BT) -> tuple[jax.Array, LossSums]:
    """What runs when nobody asks for a gradient: nothing is kept."""
    run = _on_mesh(_local_sums, head, (HIDDEN, TABLE, TOKENS, TOKENS), P())
    sums = run(x_BTD, table_VD, targets_BT, weights_BT)
    return sums.nll + head.z_loss * sums.z, sums


def _loss_forward(head: _Head, x_BTD, table_VD, targets_BT, weights_BT):
    run = _on_mesh(_local_gradients, head, (HIDDEN, TABLE, TOKENS, TOKENS), (P(), HIDDEN, TABLE))
    sums, dx_BTD, dtable_VD = run(x_BTD, table_VD, targets_BT, weights_BT)
    return (sums.nll + head.z_loss * sums.z, sums), (dx_BTD, dtable_VD)


def _loss_backward(head: _Head, gradients, cotangents):
    dx_BTD, dtable_VD = gradients
    scale, _ = cotangents
    return (
        (dx_BTD * scale).astype(dx_BTD.dtype),
        (dtable_VD * scale).astype(dtable_VD.dtype),
        None,
        None,
    )


_loss.defvjp(_loss_forward, _loss_backward)


def _local_token_losses(head: _Head, x_BTD, table_VD, targets_BT):
    table = table_VD.astype(x_BTD.dtype)

    def step(carry, chunk):
        nll_C, _ = _scores(head, table, *chunk)
        return carry, nll_C

    _, nll = jax.lax.scan(step, (), _chunks(head, x_BTD, targets_BT))
    return nll.reshape(-1)[: targets_BT.size].reshape(targets_BT.shape)


def _local_token_scores(head: _Head, x_BTD, table_VD, targets_BT, wanted_BT):
    """Brings what is wanted to the front and goes through it alone."""
    table = table_VD.astype(x_BTD.dtype)
    order_N = jnp.argsort(~wanted_BT.reshape(-1), stable=True)
    x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])[order_N]
    chunks = _chunks(head, x_ND, targets_BT.reshape(-1)[order_N])
    num_chunks = -(-jnp.sum(wanted_BT) // chunks[0].shape[1])

    def step(n, scores):
        found = _scores(head, table, *(chunk[n] for chunk in chunks))
        return tuple(a.at[n].set(b) for a, b in zip(scores, found, strict=True))

    like = chunks[1]
    zeros = jnp.zeros_like(like, jnp.float32), jnp.zeros_like(like, bool)
    scores = jax.lax.fori_loop(0, num_chunks, step, zeros)
    wanted_N = wanted_BT.reshape(-1)[order_N]

    def put_back(scores_NC):
        found_N = jnp.where(wanted_N, scores_NC.reshape(-1)[: order_N.size], 0)
        return jnp.zeros_like(found_N).at[order_N].set(found_N).reshape(targets_BT.shape)

    return tuple(put_back(x) for x in scores)


class _Running(NamedTuple):
    """What the blocks so far came to.

    Attributes:
      max_C: the largest logit.
      norm_C: sum of exp(logit - max).
      target_C: the target's logit; 0 until its block is reached.
      best_C: whether the target is the first id of the largest logit.
    """

    max_C: jax.Array
    norm_C: jax.Array
    target_C: jax.Array
    best_C: jax.Array


def _scores(head: _Head, table_VD, x_CD, targets_C) -> tuple[jax.Array, jax.Array]:
    """(negative log-likelihood, whether the target is the first id of the largest logit), (C,)."""
    ids_V = _row_ids(head, table_VD)
    size = min(head.block_ids, len(table_VD))

    def step(n, running: _Running) -> _Running:
        begin = jnp.minimum(n * size, len(table_VD) - size)  # the last block may overlap
        ids_K = jax.lax.dynamic_slice_in_dim(ids_V, begin, size)
        rows_KD = jax.lax.dynamic_slice_in_dim(table_VD, begin, size)
        logits_CK = jnp.einsum("CD,KD->CK", x_CD, rows_KD, preferred_element_type=jnp.float32)
        own_K = (ids_K >= ids_V[0] + n * size) & (ids_K < head.vocab_size)
        logits_CK = jnp.where(own_K[None, :], logits_CK, -jnp.inf)
        target_C, is_here_C = _local_target(logits_CK, targets_C - ids_K[0])
        is_here_C = is_here_C & (targets_C >= ids_V[0] + n * size)
        earlier_CK = jnp.where(ids_K[None, :] < targets_C[:, None], logits_CK, -jnp.inf)
        largest_C = jnp.max(logits_CK, axis=-1)
        best_C = is_here_C & (target_C == largest_C) & (target_C > jnp.max(earlier_CK, axis=-1))
        max_C = jnp.maximum(running.max_C, largest_C)
        norm_C = jnp.sum(jnp.exp(logits_CK - max_C[:, None]), axis=-1)
        return _Running(
            max_C,
            running.norm_C * jnp.exp(running.max_C - max_C) + norm_C,
            running.target_C + jnp.where(is_here_C, target_C, 0),
            jnp.where(largest_C > running.max_C, best_C, running.best_C),
        )

    zeros_C = jnp.zeros(targets_C.shape, jnp.float32)
    least_C = zeros_C + jnp.finfo(jnp.float32).min  # finite: a block may hold padding alone
    start = _Running(least_C, zeros_C, zeros_C, zeros_C.astype(bool))
    running = jax.lax.fori_loop(
        0, -(-len(table_VD) // size), step, _varying(head, start, over_vocabulary=True)
    )
    max_C, norm_C, target_C, best_C = running
    if head.sharded:
        max_C = jax.lax.pmax(max_C, VOCABULARY_AXIS)
        largest_C = running.max_C == max_C
        norm_C = norm_C * jnp.exp(running.max_C - max_C)
        norm_C, target_C = jax.lax.psum((norm_C, target_C), VOCABULARY_AXIS)
        first_C = jax.lax.pmin(jnp.where(largest_C, ids_V[0], head.vocab_size), VOCABULARY_AXIS)
        best_C = best_C & largest_C & (first_C == ids_V[0])
        best_C = jax.lax.pmax(best_C.astype(jnp.int32), VOCABULARY_AXIS) > 0
    return jnp.log(norm_C) + (max_C - _of_tokens(head, target_C, targets_C)), best_C


def _local_sums(head: _Head, x_BTD, table_VD, targets_BT, weights_BT) -> LossSums:
    table = table_VD.astype(x_BTD.dtype)

    def step(sums, chunk):
        x_CD, targets_C, weights_C = chunk
        return _add(sums, _likelihood(head, table, x_CD, targets_C), weights_C), None

    start = _varying(head, _zero_sums())
    sums, _ = jax.lax.scan(step, start, _chunks(head, x_BTD, targets_BT, weights_BT))
    return _over_batch(head, sums)


def _local_gradients(head: _Head, x_BTD, table_VD, targets_BT, weights_BT):
    """(sums, d loss / dx in x's dtype, d loss / dtable in the table's)."""
    table = table_VD.astype(x_BTD.dtype)

    def step(carry, chunk):
        sums, dtable_VD = carry
        x_CD, targets_C, weights_C = chunk
        likelihood = _likelihood(head, table, x_CD, targets_C)
        scale_C = weights_C * (1 + 2 * head.z_loss * likelihood.lse_C) / likelihood.norm_C
        is_target = _row_ids(head, table)[None, :] == targets_C[:, None]
        dlogits_CV = likelihood.e_CV * scale_C[:, None]
        dlogits_CV = (dlogits_CV - jnp.where(is_target, weights_C[:, None], 0)).astype(x_CD.dtype)
        dtable_VD += jnp.einsum("CV,CD->VD", dlogits_CV, x_CD, preferred_element_type=jnp.float32)
        dx_CD = jnp.einsum("CV,VD->CD", dlogits_CV, table, preferred_element_type=jnp.float32)
        return (_add(sums, likelihood, weights_C), dtable_VD), dx_CD

    dtable_VD = jnp.zeros(table_VD.shape, jnp.float32)
    start = _varying(head, _zero_sums()), _varying(head, dtable_VD, over_vocabulary=True)
    chunks = _chunks(head, x_BTD, targets_BT, weights_BT)
    (sums, dtable_VD), dx = jax.lax.scan(step, start, chunks)
    dx_BTD = dx.reshape(-1, dx.shape[-1])[: targets_BT.size].reshape(x_BTD.shape)
    if head.sharded:
        dx_BTD = jax.lax.psum(dx_BTD, VOCABULARY_AXIS)
    sums, dtable_VD = _over_batch(head, (sums, dtable_VD))
    return sums, dx_BTD.astype(x_BTD.dtype), dtable_VD.astype(table_VD.dtype)


class _Likelihood(NamedTuple):
    """Of one chunk, float32.

    Attributes:
      lse_C: log of the softmax's denominator.
      target_C: the target's logit; NaN for an id that is no token.
      e_CV: exp(logit - largest logit), of this device's rows.
      norm_C: sum of e over all rows.
    """

    lse_C: jax.Array
    target_C: jax.Array
    e_CV: jax.Array
    norm_C: jax.Array


def _likelihood(head: _Head, table_VD, x_CD, targets_C) -> _Likelihood:
    ids_V = _row_ids(head, table_VD)
    logits_CV = jnp.einsum("CD,VD->CV", x_CD, table_VD, preferred_element_type=jnp.float32)
    if head.sharded or head.vocab_size < len(table_VD):  # else it would be a pass for nothing
        logits_CV = jnp.where((ids_V < head.vocab_size)[None, :], logits_CV, -jnp.inf)
    max_C = jnp.max(logits_CV, axis=-1)
    if head.sharded:
        max_C = jax.lax.pmax(max_C, VOCABULARY_AXIS)
    e_CV = jnp.exp(logits_CV - max_C[:, None])
    norm_C = jnp.sum(e_CV, axis=-1)
    target_C, is_here_C = _local_target(logits_CV, targets_C - ids_V[0])
    target_C = jnp.where(is_here_C, target_C, 0)
    if head.sharded:
        norm_C, target_C = jax.lax.psum((norm_C, target_C), VOCABULARY_AXIS)
    target_C = _of_tokens(head, target_C, targets_C)
    return _Likelihood(jnp.log(norm_C) + max_C, target_C, e_CV, norm_C)


def _local_target(logits_CV, index_C):
    """(the logit at `index_C`, whether that is one of these rows)."""
    num_rows = logits_CV.shape[1]
    clipped_C = jnp.clip(index_C, 0, num_rows - 1)
    logit_C = jnp.take_along_axis(logits_CV, clipped_C[:, None], axis=1)[:, 0]
    return logit_C, clipped_C == index_C


def _of_tokens(head: _Head, target_C, targets_C):
    """The target's logit; NaN where the id is no token."""
    is_token = (targets_C >= 0) & (targets_C < head.vocab_size)
    return jnp.where(is_token, target_C, jnp.nan)


def _row_ids(head: _Head, table_VD) -> jax.Array:
    """The token id of each of this device's rows."""
    ids_V = jnp.arange(table_VD.shape[0])
    if head.sharded:
        ids_V += jax.lax.axis_index(VOCABULARY_AXIS) * table_VD.shape[0]
    return ids_V


def _chunks(head: _Head, x_BTD, *per_token):
    """Tokens in equal chunks of at most `chunk_tokens`; zeros (of weight 0) fill the last."""
    arrays = x_BTD.reshape(-1, x_BTD.shape[-1]), *(a.reshape(-1) for a in per_token)
    num_tokens = len(arrays[0])
    num_chunks = -(-num_tokens // head.chunk_tokens)
    size = -(-num_tokens // num_chunks)
    fill = num_chunks * size - num_tokens

    def split(a):
        padded = jnp.pad(a, [(0, fill)] + [(0, 0)] * (a.ndim - 1))
        return padded.reshape(num_chunks, size, *a.shape[1:])

    return tuple(split(a) for a in arrays)


def _zero_sums() -> LossSums:
    return LossSums(*(jnp.zeros((), jnp.float32) for _ in LossSums._fields))


def _add(sums: LossSums, likelihood: _Likelihood, weights_C) -> LossSums:
    return LossSums(
        nll=sums.nll + jnp.sum(weights_C * (likelihood.lse_C - likelihood.target_C)),
        z=sums.z + jnp.sum(weights_C * jnp.square(likelihood.lse_C)),
        weight=sums.weight + jnp.sum(weights_C),
    )


def _varying(head: _Head, start, over_vocabulary: bool = False):
    """Marks a loop's start value as one that will differ between devices."""
    if not head.sharded:
        return start
    axes = (*sharding.BATCH_AXES, VOCABULARY_AXIS) if over_vocabulary else sharding.BATCH_AXES
    return jax.lax.pcast(start, axes, to="varying")


def _over_batch(head: _Head, value):
    """The sum over the devices that hold other rows of the batch."""
    return jax.lax.psum(value, sharding.BATCH_AXES) if head.sharded else value
