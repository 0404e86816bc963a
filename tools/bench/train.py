"""A train step against PyTorch's: `python -m tools.bench train`.

Both train the same Qwen2 shape on the same random rows in float32 on CPU, taking turns in one run;
`ratio` is the peer's median step time over ours, so above 1 we are faster. The peer runs eagerly
with PyTorch's own allocator settings unless `--peer_compile` and `--peer_keep_pages`. Read a ratio
beside its `processor`, whose maker decides how fast PyTorch's products are, and its `load_average`:
where other programs want the cores, PyTorch's threads wait for each other, which flatters us.
"""

import dataclasses
import json
import statistics
import sys

from absl import flags

from tools.bench import compare, machine, train_flags
from tools.bench.peer import TrainPeer
from tools.bench.shapes import SHAPES

flags.adopt_module_key_flags(train_flags)  # so that --help lists them
_PEER_PYTHON = flags.DEFINE_string(
    "peer_python", sys.executable, "a Python that has what requirements-peers.txt names"
)
_PEER_KEEP_PAGES = flags.DEFINE_bool(
    "peer_keep_pages", False, "give the peer deconstruct.host_memory.keep_pages, as ours has"
)
_PEER_COMPILE = flags.DEFINE_bool("peer_compile", False, "give the peer torch.compile (needs g++)")


def main(argv) -> None:
    del argv
    for name in train_flags.SHAPE.value:
        shape, setting = SHAPES[name], machine.setting()
        with TrainPeer(
            _PEER_PYTHON.value,
            shape,
            keep_pages=_PEER_KEEP_PAGES.value,
            compiled=_PEER_COMPILE.value,
        ) as peer:
            from tools.bench.ours import Ours  # JAX, after keep_pages and a peer that is there

            result = measure(Ours(shape), peer, train_flags.ROUNDS.value, train_flags.STEPS.value)
        about = {"benchmark": "train", "shape": name, **dataclasses.asdict(shape)}
        asked = {"peer_keeps_pages": _PEER_KEEP_PAGES.value}
        print(json.dumps(about | result | asked | setting), flush=True)


def measure(ours, peer, rounds: int, steps: int) -> dict:
    """What a line says of the two sides: medians, quartiles, their ratio, and that both trained."""
    assert ours.parameters == peer.about["parameters"], "the two models differ"
    sides = {"ours": ours.steps, "peer": peer.steps}
    times = compare.alternate(sides, rounds=rounds, runs=steps)
    result = {"ratio": round(compare.ratio_of_medians(times, "ours", "peer"), 3)}
    for name, milliseconds in times.items():
        result[f"{name}_ms"] = round(statistics.median(milliseconds), 1)
        if len(milliseconds) > 1:
            low, _, high = statistics.quantiles(milliseconds, n=4)
            result[f"{name}_ms_quartiles"] = [round(low, 1), round(high, 1)]
    losses = {"ours_loss": round(ours.loss, 3), "peer_loss": round(peer.loss, 3)}
    return result | losses | {"steps": rounds * steps, **peer.about}
