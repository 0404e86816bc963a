"""The house's rooms: which may import which. An edge that is not in the table fails."""

import ast
import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "deconstruct"

# Room -> the rooms that it may import.
EDGES = {
    "spec": set(),
    "config": {"spec"},
    "entry": {"config"},
    "tokenizer": set(),
    "sharding": set(),
    "tuning": set(),
    "host_memory": set(),
    "stopping": set(),
    "lock": set(),
    "layers": {"spec", "sharding"},
    "kernels": {"sharding", "spec", "tuning"},
    "mixers": {"spec", "layers", "kernels", "sharding"},
    "layouts": {"spec"},
    "decoder": {"spec", "layers", "layouts", "mixers", "sharding"},
    "flops": {"spec", "mixers", "decoder"},
    "paper": {"config", "spec"},
    "objective": {"kernels", "sharding", "tuning"},
    "optim": {"config"},
    "data": {"tokenizer", "entry", "lock", "stopping"},
    "checkpoint": set(),
    "metrics": set(),
    "step": {
        "data", "decoder", "layouts", "mixers", "objective", "optim", "sharding", "spec",
    },
    "trained": {"checkpoint", "decoder", "mixers", "sharding", "spec", "tokenizer"},
    "evaluate": {
        "decoder", "entry", "flops", "generate", "host_memory", "objective", "sharding", "spec",
        "tokenizer", "trained", "tuning",
    },
    "generate": {"decoder", "entry", "trained"},
    "setup": {
        "checkpoint", "config", "data", "decoder", "lock", "mixers", "optim", "sharding", "spec",
        "step", "tuning",
    },
    "benchmarks": {"evaluate", "setup", "step", "trained"},
    "resume": {"checkpoint", "config", "layouts", "setup", "spec", "step"},
    "account": {
        "checkpoint", "config", "data", "flops", "generate", "metrics", "resume", "setup", "step",
    },
    "validation": {"config", "data", "objective", "setup", "sharding", "step"},
    "run": {
        "account", "benchmarks", "checkpoint", "config", "data", "flops", "kernels", "metrics",
        "resume", "setup", "sharding", "step", "stopping", "tokenizer", "validation",
    },
    "train": {"config", "entry", "host_memory", "mixers", "run"},
}  # fmt: skip


def room_of(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: pathlib.Path) -> set[str]:
    """First name below `deconstruct` of every import in the file, at any depth of the code."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        parts = [name.split(".") for name in names]
        rooms |= {p[1] for p in parts if p[0] == "deconstruct" and len(p) > 1}
    return rooms


def test_every_import_is_an_edge_of_the_table():
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {room}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "__init__.py" or path.parent != PACKAGE
        for room in sorted(imported_rooms(path) - {room_of(path)} - EDGES[room_of(path)])
    ]
    assert not wrong


def test_the_table_has_no_cycle():
    done: set[str] = set()
    while len(done) < len(EDGES):
        ready = {room for room, needs in EDGES.items() if room not in done and needs <= done}
        assert ready, f"a cycle among {sorted(set(EDGES) - done)}"
        done |= ready


@pytest.mark.parametrize("room", ["spec", "config", "entry", "train", "data.prepare"])
def test_no_jax_before_it_is_needed(room):
    code = f"import sys, deconstruct.{room}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent).returncode == 0


def test_no_heavy_framework_is_imported():
    code = (
        "import sys, deconstruct.run, deconstruct.generate\n"
        "print([m for m in ('tensorflow', 'torch', 'wandb', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True
    )
    assert out.stdout.strip() == "[]", out.stderr
