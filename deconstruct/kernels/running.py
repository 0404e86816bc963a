"""Running maximum and denominator of a prefix softmax, in any layout.

Carried as (m, z): the largest score so far and the sum of exp(s - m). Never as one log-sum-exp,
which would lose z beside a large m.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Running(NamedTuple):
    """Where each of some positions stands.

    Attributes:
      m: the largest score of its document so far.
      z: the sum of exp(score - m) over its document so far.
      runs: the number of its document, broadcastable to the others; None where documents are not
        isolated.
    """

    m: jax.Array
    z: jax.Array
    runs: jax.Array | None


def join(left: Running, right: Running) -> Running:
    """The running sums over two spans that follow each other, at the right one's position."""
    m = jnp.maximum(left.m, right.m)
    past = left.z * jnp.exp(left.m - m)
    if right.runs is not None:
        same = left.runs == right.runs
        m, past = jnp.where(same, m, right.m), jnp.where(same, past, 0.0)
    return Running(m, past + right.z * jnp.exp(right.m - m), right.runs)


def decay(earlier: Running, later: Running) -> jax.Array:
    """What is left of the earlier position's sums in the later one's: at most 1."""
    left = jnp.exp(earlier.m - later.m) * (earlier.z / later.z)
    if later.runs is None:
        return left
    return jnp.where(earlier.runs == later.runs, left, 0.0)
