"""Which document a position belongs to, the same for every op, and what counts because of it.

A document is a run of equal segment ids. Ids that come back later name another document, so
ids (1, 2, 1) are three documents: every form isolates the same runs, whatever the ids.

Axes: B batch, T time.
"""

import jax
import jax.numpy as jnp


def document_runs(segments_BT: jax.Array) -> jax.Array:
    """Number of each position's document in its row, from 0, never falling: (B, T) int32."""
    changes = segments_BT[:, 1:] != segments_BT[:, :-1]
    return jnp.cumsum(jnp.pad(changes, ((0, 0), (1, 0))), axis=1, dtype=jnp.int32)


def where(counts: jax.Array | None, x: jax.Array, other) -> jax.Array:
    """x where a position counts, `other` elsewhere; None says that all do, and costs nothing."""
    return x if counts is None else jnp.where(counts, x, other)
