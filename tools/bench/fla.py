"""flash-linear-attention's kernels on a GPU, at our kernels' sizes: `python -m tools.bench fla`.

A line a kernel and direction, to be read beside those of `tools.bench kernels` of the same sizes:
`parallel_based` computes what our `taylor_attention` does, in scores; `fused_recurrent_rwkv4` walks
along time with a running maximum as our `prefix_softmax` does, but with one score a channel where
ours has one a head. Needs PyTorch for CUDA and flash-linear-attention beside requirements.txt.
"""

import importlib
import json
import statistics
from collections.abc import Callable

from absl import flags

from tools import kernel_flags
from tools.kernel_calls import BOTH, DIRECTIONS, FORWARD, KernelCall

flags.adopt_module_key_flags(kernel_flags)  # so that --help lists them
_LARGEST_HEAD = 128  # of `parallel_based`
_ROUNDS = flags.DEFINE_integer("rounds", 20, "runs of each that count", lower_bound=1)


def main(argv) -> None:
    del argv
    for name in ("groups", "document", "makes_scores"):
        if flags.FLAGS[name].present:
            raise ValueError(f"--{name}: these kernels know nothing of it; leave it out")
    if flags.FLAGS.head_size > _LARGEST_HEAD:
        raise ValueError(f"--head_size: these kernels take up to {_LARGEST_HEAD}")
    torch, ops = _packages()
    for op, peer in (("taylor_attention", _based), ("prefix_softmax", _rwkv4)):
        call = kernel_flags.from_flags(op)
        for direction in DIRECTIONS:
            name, run = peer(torch, ops, call, direction)
            line = {
                "op": op,
                "peer": name,
                "direction": direction,
                "rows": call.rows,
                "length": call.length,
                "heads": call.heads,
                "head_size": call.head_size,
                "dtype": call.dtype,
                "ms": round(_milliseconds(torch, run, _ROUNDS.value), 3),
                "device": torch.cuda.get_device_name(),
            }
            print(json.dumps({"benchmark": "fla", **line}), flush=True)


def _packages():
    """(torch, flash-linear-attention's ops).

    Raises:
      ValueError: one is missing, or no GPU is here.
    """
    try:
        torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            raise ValueError("tools.bench fla: PyTorch finds no GPU here")
        return torch, importlib.import_module("fla.ops")
    except ImportError as error:
        raise ValueError(
            f"tools.bench fla: {error}; in an environment of its own: "
            "pip install torch flash-linear-attention"
        ) from error


def _based(torch, ops, call: KernelCall, direction: str) -> tuple[str, Callable]:
    shape = call.rows, call.length, call.heads, call.head_size
    q_BTHK, k_BTHK, v_BTHK = (_normal(torch, shape, call.dtype) for _ in range(3))
    return "parallel_based", _run(
        torch,
        lambda: ops.parallel_based(q_BTHK, k_BTHK, v_BTHK, head_first=False),
        (q_BTHK, k_BTHK, v_BTHK),
        _normal(torch, shape, call.dtype),
        direction,
    )


def _rwkv4(torch, ops, call: KernelCall, direction: str) -> tuple[str, Callable]:
    channels = call.heads * call.head_size
    shape = call.rows, call.length, channels
    k_BTC, v_BTC = (_normal(torch, shape, call.dtype) for _ in range(2))
    decay_C, bonus_C = (_normal(torch, (channels,), "float32") for _ in range(2))
    state_B31C = torch.zeros((call.rows, 3, 1, channels), device="cuda")
    state_B31C[:, 2] = -1e38  # the running maximum before the first token
    return "fused_recurrent_rwkv4", _run(
        torch,
        lambda: ops.fused_recurrent_rwkv4(decay_C, bonus_C, k_BTC, v_BTC, state_B31C)[0],
        (decay_C, bonus_C, k_BTC, v_BTC),
        _normal(torch, shape, call.dtype),
        direction,
    )


def _normal(torch, shape, dtype: str):
    return torch.randn(shape, device="cuda", dtype=getattr(torch, dtype)).requires_grad_()


def _run(torch, forward: Callable, inputs, gradient, direction: str) -> Callable:
    assert direction in (FORWARD, BOTH)
    if direction == FORWARD:
        return forward
    return lambda: torch.autograd.grad(forward(), inputs, gradient)


def _milliseconds(torch, run: Callable, rounds: int) -> float:
    """Median, after a few runs in which kernels are compiled and tuned."""
    times = []
    for number in range(rounds + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if number >= 5:
            times.append(start.elapsed_time(end))
    return statistics.median(times)
