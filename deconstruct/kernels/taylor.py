"""Attention with exp(x) replaced by 1 + x + x^2/2 (eq. 6), jointly normalised.

Rows of A are w_ij / sum of w over the visible keys, w = 1 + x + x^2/2, x = q.k / sqrt(K). As w is
at least 1/2, the sum never vanishes. Two forms of the one function: by blocks of scores, and by the
recurrence of `taylor_recurrence`, which costs less from `crossover` on.

Axes: B batch, T query time, S key time, H heads, G key/value groups, R heads of a group, K key
size, W value size.
"""

import jax
import jax.numpy as jnp

from deconstruct.kernels.quadratic import Rule, attend
from deconstruct.kernels.reference import attention_scores, visible, weigh
from deconstruct.kernels.taylor_recurrence import num_features


def reference(q_BTHK, k_BTGK, v_BTGW, runs_BT=None) -> jax.Array:
    """From the equation, in float32, with the whole map in memory."""
    x_BHTS = attention_scores(q_BTHK, k_BTGK)
    mask_BHTS = visible(x_BHTS.shape[-1], runs_BT)
    w_BHTS = jnp.where(mask_BHTS, 1 + x_BHTS + x_BHTS**2 / 2, 0.0)
    return weigh(w_BHTS / jnp.sum(w_BHTS, axis=-1, keepdims=True), v_BTGW)


def _forward(x_RTS, mask):
    w_RTS = jnp.where(mask, 1 + x_RTS + x_RTS**2 / 2, 0.0)
    return w_RTS, (jnp.sum(w_RTS, axis=-1, keepdims=True),)


def _backward(x_SRT, mask, statistics):
    inverse_1RT = 1 / statistics[0]
    p_SRT = jnp.where(mask, (1 + x_SRT + x_SRT**2 / 2) * inverse_1RT, 0.0)
    return p_SRT, jnp.where(mask, (1 + x_SRT) * inverse_1RT, 0.0)


TAYLOR = Rule(_forward, _backward)


def quadratic(q_BTHK, k_BTGK, v_BTGW, runs_BT=None) -> jax.Array:
    """By blocks of scores, see `quadratic`."""
    return attend(TAYLOR, q_BTHK, k_BTGK, v_BTGW, runs_BT)


def crossover(num_heads: int, num_groups: int, key_size: int, value_size: int) -> int:
    """The length from which the recurrence takes fewer FLOPs than the causal half of the scores.

    A position reads the state for each head and writes it for each group, F features by W + 1
    columns; in the quadratic form it meets T / 2 keys a head, with K + W products each. At one
    head a group and K = W = 64 that is 4,358, at 128 it is 16,902.
    """
    state = num_features(key_size) * (value_size + 1) * (num_heads + num_groups)
    return -(-2 * state // ((key_size + value_size) * num_heads))


def taylor_flops(length: int, num_heads: int, num_groups: int, head_size: int) -> int:
    """FLOPs of the matrix products of one row's forward in the form of fewer FLOPs.

    Scores count as full squares, as in all our cost tables.
    """
    if length < crossover(num_heads, num_groups, head_size, head_size):
        return 4 * length**2 * num_heads * head_size
    return recurrence_flops(length, num_heads, num_groups, head_size)


def recurrence_flops(length: int, num_heads: int, num_groups: int, head_size: int) -> int:
    """FLOPs of one row's forward by the recurrence."""
    state = num_features(head_size) * (head_size + 1)
    return 2 * length * state * (num_heads + num_groups)
