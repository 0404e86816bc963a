"""How an op's backend is chosen: an ordered table, a reason for each one passed over.

A backend may refuse a call, because it cannot run it, or advise against it, because another is
faster there. "auto" takes the first that does neither; a backend that is named runs unless it
refuses.
"""

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from deconstruct.spec import unknown_name

AUTO = "auto"

log = logging.getLogger(__name__)
_target = contextvars.ContextVar("target", default=None)
_watched = contextvars.ContextVar("watched", default=None)


class Target(NamedTuple):
    """What programs are traced for, whatever traces them.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      capability: an NVIDIA GPU's compute capability, such as 90; None for what JAX finds here.
    """

    platform: str
    capability: int | None = None


@contextlib.contextmanager
def target_platform(platform: str, capability: int | None = None) -> Iterator[None]:
    """Within it ops are traced for such a `Target`: compiling without the hardware."""
    token = _target.set(Target(platform, capability))
    try:
        yield
    finally:
        _target.reset(token)


def target() -> Target:
    """What ops are traced for."""
    return _target.get() or Target(jax.default_backend())


def platform() -> str:
    """The platform that ops are traced for."""
    return target().platform


class Call(NamedTuple):
    """The static facts of one call of an op, all that a choice may depend on.

    Rows, heads and groups are those of one device.
    """

    op: str
    platform: str
    batch_size: int
    length: int
    num_heads: int
    num_groups: int
    key_size: int
    value_size: int
    dtype: jnp.dtype
    isolates_documents: bool


def _nothing(call: Call) -> str | None:
    return None


@dataclasses.dataclass(frozen=True)
class Backend:
    """One way to run an op.

    Attributes:
      name: what a caller names it by.
      run: the function, with the op's array arguments.
      module: in place of `run`, a module of this package with functions `run` and `refuses`, a
        Call -> the reason why it cannot run it, or None. It is imported when it is first asked:
        what it is written with costs time to import and changes between versions of JAX.
      requirements: the file that installs what the module needs beside JAX, or None.
      platform: the one that it is written for; None for all.
      interpreted: whether a CPU can run it all the same.
      refuses: the reason why it cannot run a call, or None; a module's own is asked instead.
      advises_against: the reason why "auto" should look further, or None.
    """

    name: str
    run: Callable[..., jax.Array] | None = None
    module: str | None = None
    requirements: str | None = None
    platform: str | None = None
    interpreted: bool = False
    refuses: Callable[[Call], str | None] = _nothing
    advises_against: Callable[[Call], str | None] = _nothing

    def refusal(self, call: Call) -> str | None:
        """Why it cannot run a call."""
        if self._is_foreign(call) and not (self.interpreted and call.platform == "cpu"):
            return f"it is written for a {self.platform}"
        if self.module is None:
            return self.refuses(call)
        try:
            return self._loaded().refuses(call)
        except ImportError as error:
            remedy = f"; pip install -r {self.requirements}" if self.requirements else ""
            return f"JAX {jax.__version__} has not all that it is written with: {error}{remedy}"

    def reservation(self, call: Call) -> str | None:
        """Why "auto" should look further, though it may run."""
        if self._is_foreign(call):
            return "it would be interpreted, which is slow"
        return self.advises_against(call)

    def function(self) -> Callable[..., jax.Array]:
        return self._loaded().run if self.module else self.run

    def _is_foreign(self, call: Call) -> bool:
        return self.platform not in (None, call.platform)

    def _loaded(self):
        return importlib.import_module(f"{__package__}.{self.module}")


@contextlib.contextmanager
def watch_choices() -> Iterator[dict[str, set[str]]]:
    """Fills a table, op -> names of backends, with what is chosen for programs traced within it."""
    chosen: dict[str, set[str]] = {}
    token = _watched.set(chosen)
    try:
        yield chosen
    finally:
        _watched.reset(token)


def choose(backends: tuple[Backend, ...], call: Call, name: str) -> Backend:
    """The backend called `name`, or with "auto" the first that takes the call gladly.

    Raises:
      ValueError: the name is unknown, or that backend cannot run the call.
    """
    found = _find(backends, call, name)
    watched = _watched.get()
    if watched is not None:
        watched.setdefault(call.op, set()).add(found.name)
    return found


def _find(backends: tuple[Backend, ...], call: Call, name: str) -> Backend:
    if name == AUTO:
        return _first(backends, call)
    by_name = {backend.name: backend for backend in backends}
    if name not in by_name:
        raise ValueError(unknown_name(f"backend of {call.op}", name, [AUTO, *by_name]))
    reason = by_name[name].refusal(call)
    if reason:
        raise ValueError(
            f"{call.op} cannot run with backend {name!r}: {reason} ({AUTO!r} takes one that can)"
        )
    return by_name[name]


@functools.lru_cache(maxsize=1024)
def _first(backends: tuple[Backend, ...], call: Call) -> Backend:
    """Cached, so that each kind of call is logged once."""
    passed_over = []
    for backend in backends:
        reason = backend.reservation(call) or backend.refusal(call)
        if reason is None:
            log.debug("%s runs %s; passed over: %s", backend.name, call, passed_over or "none")
            return backend
        passed_over.append(f"{backend.name} ({reason})")
    raise ValueError(f"no backend of {call.op} takes this call: {'; '.join(passed_over)}")
