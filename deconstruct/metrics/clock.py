"""How fast a run trains, how far it is, and the line that tells people so."""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

# Peak dense bfloat16 FLOP/s of one JAX device, by `jax.Device.device_kind`, as the makers' data
# sheets print them (Google Cloud's TPU version pages; NVIDIA's product data sheets, figures without
# sparsity). A TPU v3 chip (123e12) is two JAX devices; from v4 on a chip is one.
PEAK_FLOPS = {
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA GH200 480GB": 989e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
}


@dataclasses.dataclass(frozen=True)
class Window:
    """Speed over the steps since the last window.

    `tokens_per_second` counts trained tokens (weight above 0), `positions_per_second` padding too;
    `mfu` is a share of 1, None where the device's peak is unknown.
    """

    steps: int
    seconds: float
    tokens_per_second: float
    positions_per_second: float
    mfu: float | None


class Clock:
    """Times training steps by when their results are at hand: dispatch never passes for work.

    Call `start` before the first step, `steps_done` each time fetched values prove that steps have
    ended (one step late is fine), `window` at each log. The first step, which compiles, is reported
    apart and belongs to no window; time inside `pause` (validation, saving) belongs to none either,
    provided that all steps dispatched before it have been fetched.

    Model FLOPs utilisation (PaLM, arXiv 2204.02311, appendix B):

        mfu = flops_per_token * trained tokens per second / peak_flops

    Args:
      flops_per_token: model FLOPs of one token, forward and backward, at the training length and
        without recomputation. Padding earns nothing.
      peak_flops: FLOP/s of all devices together at bfloat16; None where unknown.
      now: seconds of a monotonic clock.
    """

    def __init__(
        self,
        *,
        flops_per_token: float,
        peak_flops: float | None,
        now: Callable[[], float] = time.perf_counter,
    ):
        self._flops_per_token, self._peak_flops, self._now = flops_per_token, peak_flops, now
        self.first_step_seconds: float | None = None
        self._started = self._mark = self._first_done = now()
        self._paused = self._busy = self._all_busy = 0.0
        self._steps = self._all_steps = self._tokens = self._positions = 0

    def start(self) -> None:
        """The moment before the first step."""
        self._started = self._mark = self._now()

    def steps_done(self, trained_tokens: float, positions: int, steps: int = 1) -> None:
        """The values of these steps have been fetched.

        Args:
          trained_tokens: targets of weight above 0 in them.
          positions: rows times length in them, padding included.
          steps: how many steps.
        """
        now = self._now()
        busy = now - self._mark - self._paused
        self._mark, self._paused = now, 0.0
        if self.first_step_seconds is None:
            self.first_step_seconds, self._first_done = busy, now
            return
        self._busy += busy
        self._all_busy += busy
        self._steps += steps
        self._all_steps += steps
        self._tokens += trained_tokens
        self._positions += positions

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time inside is not training time."""
        begin = self._now()
        try:
            yield
        finally:
            self._paused += self._now() - begin

    def window(self) -> Window | None:
        """Closes the window at the last fetched step; None when it holds no step."""
        if not self._steps:
            return None
        tokens_per_second = self._tokens / self._busy
        achieved = self._flops_per_token * tokens_per_second
        window = Window(
            steps=self._steps,
            seconds=self._busy,
            tokens_per_second=tokens_per_second,
            positions_per_second=self._positions / self._busy,
            mfu=None if self._peak_flops is None else achieved / self._peak_flops,
        )
        self._busy, self._steps, self._tokens, self._positions = 0.0, 0, 0, 0
        return window

    def goodput(self) -> float:
        """The share of the time since `start` in which steps after the first were trained."""
        return self._all_busy / max(self._now() - self._started, 1e-9)

    def seconds_left(self, steps_left: int) -> float | None:
        """At the pace since the first step, pauses included; None before a second step is done."""
        if not self._all_steps:
            return None
        return (self._now() - self._first_done) / self._all_steps * steps_left


class Progress:
    """A line for people: a bar on a terminal, else one line per update."""

    def __init__(self, total_steps: int, first_step: int = 0, stream: TextIO | None = None):
        self._total = total_steps
        self._stream = stream if stream is not None else sys.stderr
        self._bar = None
        if self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total_steps,
                initial=first_step,
                file=self._stream,
                dynamic_ncols=True,
                bar_format="step {n_fmt}/{total_fmt} |{bar}|{postfix}",
            )

    def update(
        self,
        step: int,
        loss: float,
        tokens_per_second: float | None = None,
        seconds_left: float | None = None,
    ) -> None:
        """Shows the state after `step`; what is not known yet is left out."""
        parts = [f"loss {loss:.4f}"]
        if tokens_per_second is not None:
            parts.append(f"{tokens_per_second:,.0f} tokens/s")
        if seconds_left is not None:
            parts.append(f"{_duration(seconds_left)} left")
        if self._bar is None:
            print(f"step {step}/{self._total}", *parts, sep="  ", file=self._stream, flush=True)
            return
        self._bar.set_postfix_str("  ".join(parts), refresh=False)
        self._bar.update(step - self._bar.n)
        self._bar.refresh()

    def say(self, text: str) -> None:
        """Prints a line of its own, above the bar where there is one."""
        if self._bar is None:
            print(text, file=self._stream, flush=True)
        else:
            self._bar.write(text, file=self._stream)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _duration(seconds: float) -> str:
    """Hours, minutes and seconds such as 1:02:03 or 4:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
