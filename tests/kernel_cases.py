"""Inputs and comparisons that the kernel tests share."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from deconstruct import kernels

BATCH = 2
OPS = tuple(kernels.BACKENDS)


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of one call; `documents` are the lengths of the first row's documents, or None."""

    length: int
    heads: int
    groups: int
    key_size: int
    documents: tuple[int, ...] | None = None
    dtype: str = "float32"
    value_size: int | None = None

    def __str__(self):
        documents = "whole" if self.documents is None else f"{len(self.documents)}documents"
        sizes = f"{self.key_size}x{self.value_size or self.key_size}"
        return f"T{self.length}-H{self.heads}over{self.groups}-{sizes}-{documents}-{self.dtype}"


def segments(case: Case) -> jax.Array | None:
    """Ids that fall and come back, as any may; the second row's documents are the reverse."""
    if case.documents is None:
        return None
    assert sum(case.documents) == case.length
    ids = itertools.cycle([7, 3, 9])
    row = np.concatenate([np.full(n, next(ids)) for n in case.documents])
    return jnp.asarray(np.stack([row, row[::-1]]), jnp.int32)


def inputs(op: str, case: Case, seed: int = 0) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """(the op's array arguments, the output's gradient), unit normal."""
    rng = np.random.default_rng(seed)
    value_size = case.value_size or case.key_size

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), case.dtype)

    q = normal(BATCH, case.length, case.heads, case.key_size)
    k = normal(BATCH, case.length, case.groups, case.key_size)
    v = normal(BATCH, case.length, case.groups, value_size)
    do = normal(BATCH, case.length, case.heads, value_size)
    if op == "prefix_softmax":
        return (q[..., 0].astype(jnp.float32), v), do
    return ((q[0], k[0], v) if op == "fixed_map_attention" else (q, k, v)), do


def bind(op: str, case: Case, backend: str):
    """The op as a function of its arrays alone."""
    options = {"backend": backend}
    if case.documents is not None:
        options["segments_BT"] = segments(case)
    return lambda *arrays: getattr(kernels, op)(*arrays, **options)


def with_gradients(function):
    """(arrays, output gradient) -> (output, gradients of all arrays), compiled."""

    @jax.jit
    def run(arrays, do):
        o, pull = jax.vjp(function, *arrays)
        return o, *pull(do.astype(o.dtype))

    return run


def assert_near(got, wanted, tolerance: float) -> None:
    """Each array within `tolerance` of the wanted one, relative to its largest entry or 1."""
    assert len(got) == len(wanted)
    for index, (g, w) in enumerate(zip(got, wanted, strict=True)):
        assert g.shape == w.shape and g.dtype == w.dtype, index
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        scale = max(1.0, np.abs(w).max())
        error = np.abs(g - w).max() / scale
        assert error <= tolerance, f"array {index}: {error:.2e} > {tolerance:.0e}"
