"""One call of a kernel, for what compiles or times it: its arrays, and what it must cost."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from deconstruct import kernels
from deconstruct.kernels import backends
from deconstruct.kernels.backends import Call
from deconstruct.kernels.reference import TOLERANCE

FORWARD, BOTH = "forward", "both"
DIRECTIONS = (FORWARD, BOTH)


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """Sizes of one call.

    Attributes:
      document: the length of isolated documents, or 0.
      makes_scores: whether the prefix softmax is called as its mixer does, with queries and keys
        of which the scores are made first.
    """

    op: str
    rows: int
    length: int
    heads: int
    groups: int
    head_size: int
    dtype: str
    document: int = 0
    makes_scores: bool = False

    @property
    def shapes(self) -> list[tuple[tuple[int, ...], str]]:
        """(shape, dtype) of the op's arrays, the values last."""
        queries = self.rows, self.length, self.heads, self.head_size
        keys = *queries[:2], self.groups, self.head_size
        if self.op == "prefix_softmax" and not self.makes_scores:
            return [(queries[:3], "float32"), (keys, self.dtype)]
        if self.op == "fixed_map_attention":
            return [(x, self.dtype) for x in (queries[1:], keys[1:], keys)]
        return [(x, self.dtype) for x in (queries, keys, keys)]

    @property
    def output(self) -> tuple[tuple[int, ...], str]:
        return (self.rows, self.length, self.heads, self.head_size), self.dtype

    @property
    def segments(self) -> tuple[tuple[int, ...], str] | None:
        return ((self.rows, self.length), "int32") if self.document else None

    def facts(self, platform: str) -> Call:
        """What the table of backends is asked about."""
        return Call(
            op=self.op,
            platform=platform,
            batch_size=self.rows,
            length=self.length,
            num_heads=self.heads,
            num_groups=self.groups,
            key_size=1 if self.op == "prefix_softmax" else self.head_size,
            value_size=self.head_size,
            dtype=jnp.dtype(self.dtype),
            isolates_documents=self.document > 0,
        )

    def least_bytes(self, direction: str) -> int:
        """With each array read or written once: backwards the inputs, the output and its gradient
        are read, and a gradient of each input is written.
        """
        given, made = sum(map(_bytes, self.shapes)), _bytes(self.output)
        forward = given + made
        return forward if direction == FORWARD else forward + 2 * given + 2 * made

    def least_flops(self, direction: str) -> int:
        """Of matrix products, what causality masks left out; backwards scores are made again.

        Where two forms are the same function, those of the one with fewer.
        """
        pairs = self.length * (self.length + 1) // 2
        width = self.heads * self.head_size
        products = 2 if direction == FORWARD else 2 + 5
        if self.op == "prefix_softmax":
            return 0
        if self.op == "fixed_map_attention":  # of the map: one product forward, three backward
            of_map = 1 if direction == FORWARD else 1 + 3
            return 2 * pairs * width * (of_map + (products - of_map) * self.rows)
        whole = 2 * pairs * width * products * self.rows
        if self.op == "causal_attention":
            return whole
        sizes = self.length, self.heads, self.groups, self.head_size
        times = 1 if direction == FORWARD else 3
        return min(whole, times * kernels.recurrence_flops(*sizes) * self.rows)

    def function(self, backend: str, direction: str) -> Callable:
        """(arrays, output's gradient, segments or None) -> output, or that and all gradients."""
        op = getattr(kernels, self.op)

        def forward(segments, *arrays):
            options = {} if segments is None else {"segments_BT": segments}
            if self.makes_scores:
                arrays = kernels.own_scores(*arrays[:2]), arrays[2]
            return op(*arrays, backend=backend, **options)

        def both(arrays, gradient, segments):
            o, pull = jax.vjp(functools.partial(forward, segments), *arrays)
            return o, *pull(gradient)

        if direction == FORWARD:
            return lambda arrays, gradient, segments: forward(segments, *arrays)
        return both

    def abstract(self, sharding: jax.sharding.Sharding | None = None):
        """The function's arguments as shapes."""

        def make(described):
            return described and jax.ShapeDtypeStruct(*described, sharding=sharding)

        return [make(x) for x in self.shapes], make(self.output), make(self.segments)

    def arguments(self, seed: int = 0):
        """The function's arguments, unit normal."""
        keys = jax.random.split(jax.random.key(seed), len(self.shapes) + 1)

        def normal(key, described):
            shape, dtype = described
            return jax.random.normal(key, shape, jnp.float32).astype(dtype)

        arrays = [normal(key, x) for key, x in zip(keys, self.shapes, strict=False)]
        segments = None
        if self.document:
            ids = jnp.arange(self.length, dtype=jnp.int32) // self.document
            segments = jnp.broadcast_to(ids, (self.rows, self.length))
        return arrays, normal(keys[-1], self.output), segments


# Positions that `check` needs at most: of several blocks, and of several chunks of the recurrence.
_MANY = dict.fromkeys(kernels.BACKENDS, 1100) | {"taylor_attention": 2200}


def takes_documents(op: str) -> bool:
    return op != "fixed_map_attention"


def backends_for(call: KernelCall) -> list[str]:
    """Those that run it here and that "auto" is not advised against, but the reference."""
    facts = call.facts(backends.platform())
    return [
        backend.name
        for backend in kernels.BACKENDS[call.op]
        if backend.name != "reference"
        and not (backend.reservation(facts) or backend.refusal(facts))
    ]


def check(call: KernelCall, backend: str) -> None:
    """On few rows, heads and positions (of which every recurrence takes several chunks).

    Groups are of as many heads, up to 3, and all else is of the call's kind.

    Raises:
      ValueError: the backend's output or a gradient is not the reference's.
    """
    groups = min(call.groups, 2)
    small = dataclasses.replace(
        call,
        rows=2,
        length=min(call.length, _MANY[call.op]),
        heads=min(call.heads // call.groups, 3) * groups,
        groups=groups,
        document=min(call.document, 70),
    )
    arguments = small.arguments()
    found, wanted = (
        jax.jit(small.function(name, BOTH))(*arguments) for name in (backend, "reference")
    )
    for number, (x, y) in enumerate(zip(found, wanted, strict=True)):
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        error = np.abs(x - y).max() / max(1.0, np.abs(y).max())
        if not error <= TOLERANCE[call.dtype]:
            raise ValueError(
                f"{call.op}: backend {backend!r} is wrong: result {number} is {error:.1e} from "
                f"the reference's, more than {TOLERANCE[call.dtype]}; it is not measured"
            )


def _bytes(described: tuple[tuple[int, ...], str]) -> int:
    shape, dtype = described
    return math.prod(shape) * jnp.dtype(dtype).itemsize
