"""Standard attention: A = softmax(Q K^T / sqrt(K)) under the causal mask, O = A V (eq. 1-3).

Axes: B batch, T query time, S key time, H heads, G key/value groups, R heads of a group, K key
size, W value size.
"""

import jax
import jax.numpy as jnp

from deconstruct.kernels.quadratic import Rule, attend
from deconstruct.kernels.reference import attention_scores, visible, weigh


def reference(q_BTHK, k_BTGK, v_BTGW, runs_BT=None):
    """From the equation, in float32, with the whole map in memory."""
    scores_BHTS = attention_scores(q_BTHK, k_BTGK)
    mask_BHTS = visible(scores_BHTS.shape[-1], runs_BT)
    return weigh(jax.nn.softmax(jnp.where(mask_BHTS, scores_BHTS, -jnp.inf), axis=-1), v_BTGW)


def _forward(scores_RTS, mask):
    scores_RTS = jnp.where(mask, scores_RTS, -jnp.inf)
    peak_RT1 = jnp.max(scores_RTS, axis=-1, keepdims=True)
    w_RTS = jnp.exp(scores_RTS - peak_RT1)
    return w_RTS, (peak_RT1, jnp.sum(w_RTS, axis=-1, keepdims=True))


def _backward(scores_SRT, mask, statistics):
    """The peak and the sum stay apart: their log-sum-exp would lose the sum beside a large peak."""
    peak_1RT, sum_1RT = statistics
    p_SRT = jnp.where(mask, jnp.exp(scores_SRT - peak_1RT), 0.0) * (1 / sum_1RT)
    return p_SRT, p_SRT


SOFTMAX = Rule(_forward, _backward)


def xla(q_BTHK, k_BTGK, v_BTGW, runs_BT=None):
    """By blocks of rows, see `quadratic`."""
    return attend(SOFTMAX, q_BTHK, k_BTGK, v_BTGW, runs_BT)
