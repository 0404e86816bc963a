"""What compilers say of a GPU program's kernels, without the GPU: registers, spills, shared memory.

XLA and Triton leave a kernel's PTX in a folder where they are asked to; NVIDIA's assembler makes
machine code of it and tells what that takes.
"""

import collections
import contextlib
import os
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

from deconstruct.kernels import assembler


class Dump(NamedTuple):
    """Where compilers write down what they made."""

    folder: pathlib.Path

    @property
    def compiler_options(self) -> dict[str, str]:
        """For XLA."""
        return {"xla_dump_to": str(self.folder)}


@contextlib.contextmanager
def dump() -> Iterator[Dump]:
    """A folder for the kernels of one program, which is traced and compiled inside."""
    with tempfile.TemporaryDirectory() as folder, _triton_dumps_to(folder):
        yield Dump(pathlib.Path(folder))


@contextlib.contextmanager
def _triton_dumps_to(folder: str) -> Iterator[None]:
    """jax_triton takes the folder's name when it is imported, and writes what it makes anew."""
    try:
        import jax_triton
    except ImportError:
        yield
        return
    library = jax_triton.triton_lib
    before = library._JAX_TRITON_DUMP_DIR
    library._COMPILED_KERNEL_CACHE.clear()
    library._JAX_TRITON_DUMP_DIR = folder
    try:
        yield
    finally:
        library._JAX_TRITON_DUMP_DIR = before


def kernels(dumped: Dump, capability: int) -> list[dict] | None:
    """Of each kernel: its name, `registers` of a thread, `spill_bytes`, `threads`, `shared_bytes`,
    and `loads` and `stores` of global memory by their width in bytes; None without an assembler.

    `threads` and `shared_bytes` are None where the compiler does not say.
    """
    ptxas = assembler.path()
    if ptxas is None:
        return None
    launches = _launches(dumped.folder)
    found = []
    for path in sorted(dumped.folder.rglob("*.ptx")):
        text = path.read_text()
        for name in re.findall(r"\.entry (\w+)\(", text):
            threads, shared = launches.get(name, (None, None))
            found.append(
                {
                    "name": name,
                    **_resources(ptxas, path, capability)[name],
                    "threads": threads,
                    "shared_bytes": shared,
                    "loads": widths(text, "ld"),
                    "stores": widths(text, "st"),
                }
            )
    return found


def widths(ptx: str, instruction: str) -> dict[int, int]:
    """Bytes that one `ld` or `st` of global memory moves -> how many there are in the text.

    Copies to shared memory that nobody waits for are loads, too.
    """
    found = re.findall(rf"\b{instruction}\.global[\w.:]*?(?:\.v(\d))?\.[bfus](\d+)\b", ptx)
    moved = [int(v or 1) * int(b) // 8 for v, b in found]
    if instruction == "ld":
        copies = re.findall(r"\bcp\.async\.\w+\.shared\.global[^;]*?\], (\w+)", ptx)
        moved += [int(size, 0) for size in copies]
    return dict(sorted(collections.Counter(moved).items()))


def parse_resources(told: str) -> dict[str, dict[str, int]]:
    """Kernel -> registers and spill_bytes, of what `ptxas -v` prints."""
    pattern = (
        r"Function properties for (\w+)\n"
        r".*?(\d+) bytes spill stores, (\d+) bytes spill loads\n"
        r".*?Used (\d+) registers"
    )
    return {
        name: {"registers": int(registers), "spill_bytes": int(stored) + int(loaded)}
        for name, stored, loaded, registers in re.findall(pattern, told)
    }


def _resources(ptxas: str, path: pathlib.Path, capability: int) -> dict[str, dict[str, int]]:
    target = re.search(r"\.target (sm_\w+)", path.read_text())
    architecture = target[1] if target else f"sm_{capability}"
    command = [ptxas, "-v", "-arch", architecture, str(path), "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return parse_resources(done.stdout + done.stderr)


def _launches(folder: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Kernel -> (threads, bytes of shared memory), as XLA and jax_triton write them down."""
    found = {}
    line = r"kCustomKernel.*\] (\w+) grid: .* threads: \[(\d+), 1, 1\]\s+shared_memory: (\d+) bytes"
    for path in folder.rglob("*thunk_sequence.txt"):
        for name, threads, shared in re.findall(line, path.read_text()):
            found[name] = int(threads), int(shared)
    for path in folder.rglob("*.compile_info"):
        shared = re.search(r"shared_mem_bytes: (\d+)", path.read_text())
        warps = re.search(r"num_warps=(\d+)", (path.parent / "config").read_text())
        if warps and shared:
            found[path.stem] = 32 * int(warps[1]), int(shared[1])
    return found
