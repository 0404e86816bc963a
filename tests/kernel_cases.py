"""Inputs and comparisons that the kernel tests share."""

import collections
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from deconstruct import kernels

BATCH = 2
OPS = tuple(kernels.BACKENDS)
# (op, backend) of all that a CPU runs, but references.
FORMS = [
    (op, backend.name)
    for op in OPS
    for backend in kernels.BACKENDS[op]
    if backend.name != "reference" and (backend.platform is None or backend.interpreted)
]


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


LENGTHS = (1, 63, 127, 500, 2048)
KEY_SIZES = (32, 64, 80, 128)
HEADS_OVER_GROUPS = ((2, 2), (4, 2), (3, 1))
DTYPES = ("float32", "bfloat16")


def whole(length: int) -> None:
    """One document a row, without ids."""


def short(length: int) -> tuple[int, ...]:
    """Documents of length 1 at the row's start and end, and of a few positions between."""
    return _cut(length, [*range(1, 9), 11, 16, 17, 24, length - 2, length - 1])


def at_edges(length: int) -> tuple[int, ...]:
    """Documents that end just before, at and just after the edges of blocks, and one that spans."""
    edges = (n for size in (8, 64, 128, 256) for n in (size - 1, size, size + 1))
    return _cut(length, [*edges, 512, 1024, 1920])


DOCUMENTS = (whole, short, at_edges)
# What of a call may interact: a case is a choice of each.
FACTORS = (LENGTHS, KEY_SIZES, HEADS_OVER_GROUPS, DOCUMENTS, DTYPES, (False, True))
DTYPE = FACTORS.index(DTYPES)


def make_case(length, key_size, heads_over_groups, documents, dtype, other_values) -> Case:
    value_size = key_size - 8 if other_values else None
    return Case(length, *heads_over_groups, key_size, documents(length), dtype, value_size)


def every_case() -> list[Case]:
    """The whole product of the factors."""
    return [make_case(*choice) for choice in itertools.product(*FACTORS)]


def covering_cases() -> list[Case]:
    """Few cases in which any two choices of two factors meet at least once, half of each dtype."""
    choices = list(itertools.product(*FACTORS))
    missing = set().union(*map(_pairs, choices))
    found, of_dtype = [], collections.Counter()
    while missing:
        best = max(choices, key=lambda c: (len(_pairs(c) & missing), -of_dtype[c[DTYPE]]))
        missing -= _pairs(best)
        of_dtype[best[DTYPE]] += 1
        found.append(make_case(*best))
    return found


def _pairs(choice) -> frozenset:
    return frozenset(itertools.combinations(enumerate(choice), 2))


def _cut(length: int, stops) -> tuple[int, ...]:
    inside = sorted({n for n in stops if 0 < n < length})
    return tuple(b - a for a, b in itertools.pairwise([0, *inside, length]))


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


# Most of these tests' time is the compiler's; what it leaves out changes no number that is meant.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# For what computes longer than it compiles; at level 0 it takes four times as long.
LIGHTLY_OPTIMISED = QUICKLY | {"xla_backend_optimization_level": 1}


def with_gradients(function, compiler_options=QUICKLY):
    """(arrays, output gradient) -> (output, gradients of all arrays), compiled."""

    @functools.partial(jax.jit, compiler_options=compiler_options)
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
