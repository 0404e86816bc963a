"""The mixers' inner operations: for each a float32 reference and faster forms behind one table.

`backend="auto"` takes the first of an op's backends that supports the call and is not known to be
slower than a later one; naming one runs it, or raises ValueError with the reason why it cannot.
All compute in float32 inside, whatever the inputs' dtype, and return v's dtype. `segments_BT`
isolates documents; a document is a run of equal ids.

Axes: B batch, T time, L stream length, H heads, G key/value groups (head h uses group
h // (H // G)), K key size, W value size (usually K).
"""

import math

import jax
import jax.numpy as jnp

from deconstruct import tuning
from deconstruct.kernels import causal, fixed_map, prefix, shards, taylor, taylor_recurrence
from deconstruct.kernels.backends import (
    AUTO,
    Backend,
    Call,
    choose,
    platform,
    target_platform,
    watch_choices,
)
from deconstruct.kernels.documents import document_runs
from deconstruct.kernels.prefix import PrefixState, own_scores, prefix_state_init, prefix_step
from deconstruct.kernels.taylor import crossover, recurrence_flops, taylor_flops
from deconstruct.kernels.taylor_recurrence import TaylorState, taylor_state_init, taylor_step

__all__ = [
    "AUTO",
    "BACKENDS",
    "PrefixState",
    "TaylorState",
    "causal_attention",
    "crossover",
    "fixed_map_attention",
    "own_scores",
    "prefix_softmax",
    "prefix_state_init",
    "prefix_step",
    "recurrence_flops",
    "target_platform",
    "taylor_attention",
    "taylor_flops",
    "taylor_state_init",
    "taylor_step",
    "watch_choices",
]


def _recurrence_start(call: Call) -> int:
    """The length from which Taylor attention's recurrence takes less time than its scores."""
    of_flops = crossover(call.num_heads, call.num_groups, call.key_size, call.value_size)
    return math.ceil(of_flops * tuning.of(call.platform).recurrence_cost)


def _scores_cost_more(call: Call) -> str | None:
    start = _recurrence_start(call)
    return f"from {start} positions on the recurrence is faster" if call.length >= start else None


def _recurrence_costs_more(call: Call) -> str | None:
    start = _recurrence_start(call)
    return f"below {start} positions the scores are faster" if call.length < start else None


def _unconfirmed(call: Call) -> str:
    return "no GPU has confirmed it yet"


def _costs_more_or_unconfirmed(call: Call) -> str | None:
    return _scores_cost_more(call) or _unconfirmed(call)


def _recurrence_costs_more_or_unconfirmed(call: Call) -> str | None:
    return _recurrence_costs_more(call) or _unconfirmed(call)


# In order of preference.
BACKENDS: dict[str, tuple[Backend, ...]] = {
    "causal_attention": (
        Backend("splash", module="causal_splash", platform="tpu", interpreted=True),
        Backend("cudnn", module="causal_cudnn", platform="gpu", advises_against=_unconfirmed),
        Backend("xla", causal.xla),
        Backend("reference", causal.reference),
    ),
    "taylor_attention": (
        Backend(
            "tpu",
            module="taylor_tpu",
            platform="tpu",
            interpreted=True,
            advises_against=_scores_cost_more,
        ),
        Backend(
            "tpu_chunked",
            module="taylor_chunks_tpu",
            platform="tpu",
            interpreted=True,
            advises_against=_recurrence_costs_more,
        ),
        Backend(
            "gpu",
            module="taylor_gpu",
            platform="gpu",
            interpreted=True,
            advises_against=_costs_more_or_unconfirmed,
        ),
        Backend(
            "gpu_chunked",
            module="taylor_chunks_gpu",
            platform="gpu",
            interpreted=True,
            advises_against=_recurrence_costs_more_or_unconfirmed,
        ),
        Backend("quadratic", taylor.quadratic, advises_against=_scores_cost_more),
        Backend("chunked", taylor_recurrence.chunked),
        Backend("reference", taylor.reference),
    ),
    "prefix_softmax": (
        Backend("tpu", module="prefix_tpu", platform="tpu", interpreted=True),
        Backend(
            "gpu",
            module="prefix_gpu",
            platform="gpu",
            interpreted=True,
            advises_against=_unconfirmed,
        ),
        Backend(
            "triton",
            module="prefix_triton",
            requirements="requirements-gpu.txt",
            platform="gpu",
            advises_against=_unconfirmed,
        ),
        Backend("blocked", prefix.blocked),
        Backend("scan", prefix.scan),
        Backend("reference", prefix.reference),
    ),
    "fixed_map_attention": (
        Backend("splash", module="fixed_map_splash", platform="tpu", interpreted=True),
        Backend("blocked", fixed_map.blocked),
        Backend("reference", fixed_map.reference),
    ),
}


def causal_attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGW: jax.Array,
    *,
    segments_BT: jax.Array | None = None,
    backend: str = AUTO,
) -> jax.Array:
    """softmax(q k^T / sqrt(K)) v under the causal mask (eq. 1-3): o_BTHW.

    Raises:
      ValueError: shapes that do not fit, or a backend that is unknown or cannot run the call.
    """
    op = "causal_attention"
    _check_keys(op, q_BTHK, k_BTGK, v_BTGW)
    return _run(op, backend, (q_BTHK, k_BTGK, v_BTGW), q_BTHK.shape[2:], segments_BT)


def taylor_attention(
    q_BTHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGW: jax.Array,
    *,
    segments_BT: jax.Array | None = None,
    backend: str = AUTO,
) -> jax.Array:
    """Weights 1 + x + x^2/2 of x = q.k / sqrt(K), jointly normalised, times v (eq. 6): o_BTHW.

    Raises:
      ValueError: shapes that do not fit, or a backend that is unknown or cannot run the call.
    """
    op = "taylor_attention"
    _check_keys(op, q_BTHK, k_BTGK, v_BTGW)
    return _run(op, backend, (q_BTHK, k_BTGK, v_BTGW), q_BTHK.shape[2:], segments_BT)


def prefix_softmax(
    scores_BTH: jax.Array,
    v_BTGW: jax.Array,
    *,
    segments_BT: jax.Array | None = None,
    backend: str = AUTO,
) -> jax.Array:
    """Softmax over the positions so far of one score a position, times v (eq. 7-8): o_BTHW.

    Args:
      scores_BTH: already scaled, and finite: after -inf some forms give NaN where others do not.
      v_BTGW: values.
      segments_BT: document ids, or None.
      backend: "auto" or a name of the table.

    Raises:
      ValueError: shapes that do not fit, or a backend that is unknown or cannot run the call.
    """
    op = "prefix_softmax"
    _check_shape(op, "scores", scores_BTH, (None,) * 3)
    _check_shape(op, "v", v_BTGW, (*scores_BTH.shape[:2], None, None))
    return _run(op, backend, (scores_BTH, v_BTGW), (scores_BTH.shape[2], 1), segments_BT)


def fixed_map_attention(
    q_LHK: jax.Array, k_LGK: jax.Array, v_BTGW: jax.Array, *, backend: str = AUTO
) -> jax.Array:
    """softmax(q k^T / sqrt(K)) over the first T positions, once a head, for every row: o_BTHW.

    Raises:
      ValueError: T > L, other shapes that do not fit, or a backend that is unknown or cannot run.
    """
    op = "fixed_map_attention"
    _check_shape(op, "q", q_LHK, (None,) * 3)
    _check_shape(op, "v", v_BTGW, (None,) * 4)
    length, heads, key_size = q_LHK.shape
    _check_shape(op, "k", k_LGK, (length, v_BTGW.shape[2], key_size))
    if v_BTGW.shape[1] > length:
        raise ValueError(
            f"{op}: the stream holds {length} positions and cannot serve {v_BTGW.shape[1]}; "
            f"give at most {length}"
        )
    return _run(op, backend, (q_LHK, k_LGK, v_BTGW), (heads, key_size))


def _run(op: str, backend: str, arrays, heads_and_key_size, segments_BT=None) -> jax.Array:
    """The chosen backend on `arrays`, of which the last is v."""
    v_BTGW = arrays[-1]
    batch, length, groups, value_size = v_BTGW.shape
    heads, key_size = heads_and_key_size
    if 0 in (*v_BTGW.shape, heads, key_size):
        raise ValueError(
            f"{op}: nothing to attend to: v has shape {v_BTGW.shape}, {heads} heads; none may be 0"
        )
    if heads % groups:
        raise ValueError(
            f"{op}: {groups} key/value groups do not divide {heads} heads; give as many, or a "
            "divisor"
        )
    _check_dtypes(op, arrays)
    of_one = shards.sizes_of_one(batch, heads, groups)
    call = Call(
        op=op,
        platform=platform(),
        batch_size=of_one[0],
        length=length,
        num_heads=of_one[1],
        num_groups=of_one[2],
        key_size=key_size,
        value_size=value_size,
        dtype=v_BTGW.dtype,
        isolates_documents=segments_BT is not None,
    )
    runs = ()
    if segments_BT is not None:
        _check_shape(op, "segments", segments_BT, (batch, length))
        if not jnp.issubdtype(segments_BT.dtype, jnp.integer):
            raise ValueError(f"{op}: segments must be integers, not {segments_BT.dtype}")
        runs = (document_runs(segments_BT),)
    return choose(BACKENDS[op], call, backend).function()(*arrays, *runs)


def _check_keys(op: str, q_BTHK, k_BTGK, v_BTGW) -> None:
    _check_shape(op, "q", q_BTHK, (None,) * 4)
    batch, length, _, key_size = q_BTHK.shape
    _check_shape(op, "k", k_BTGK, (batch, length, None, key_size))
    _check_shape(op, "v", v_BTGW, (*k_BTGK.shape[:3], None))


def _check_dtypes(op: str, arrays) -> None:
    """One dtype for all, but scores, which may be float32 beside any."""
    *given, v_BTGW = arrays
    wanted = {v_BTGW.dtype} | ({jnp.dtype("float32")} if op == "prefix_softmax" else set())
    known = v_BTGW.dtype in (jnp.float32, jnp.bfloat16)
    if not known or any(x.dtype not in wanted for x in given):
        found = ", ".join(str(x.dtype) for x in arrays)
        raise ValueError(f"{op}: arrays of {found}; all must be float32, or all bfloat16")


def _check_shape(op: str, name: str, x, shape: tuple[int | None, ...]) -> None:
    """None in `shape` takes any size."""
    fits = len(x.shape) == len(shape) and all(
        want in (None, size) for size, want in zip(x.shape, shape, strict=True)
    )
    if not fits:
        expected = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{op}: {name} has shape {x.shape}; expected ({expected})")
