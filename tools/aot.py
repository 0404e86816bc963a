"""Compiles a config's train step for devices that are not here: their compiler is all it takes.

    python -m tools.aot --config=FILE.py[:ARGUMENT] --topology=v5e:4x4 [--config.KEY=VALUE]
    python -m tools.aot --all
    python -m tools.aot --kernel=OP --backend=NAME --topology=v5e:2x2 [--length=2048 --heads=8 ...]

Prints one JSON object: seconds of tracing and compiling; bytes of one device's memory against what
the chip has, and whether the step fits (status 1 if not); FLOPs of one device as compiled
(`tools/hlo.py`) beside the formula's (`deconstruct/flops.py`), which counts nothing twice; the time
that they and the state's memory traffic take at least; bytes that one device sends and receives by
kind of collective. `--all` runs the command that each config names in its docstring, a line each.

A kernel is compiled for one device of the slice, forward and backward. Its `bytes` are those that
the compiler counts beside the least possible (each array read or written once); in code that is
not XLA's own it sees arguments and results alone. For a GPU `code` says what each kernel takes:
registers, spills, shared memory, widths of loads (`tools/gpu_code.py`).
"""

import ast
import contextlib
import dataclasses
import functools
import json
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time

import jax
from absl import flags
from ml_collections import config_flags

from deconstruct import config as config_lib
from deconstruct import entry, flops, kernels, lock, mixers, optim, setup, sharding, step
from tools import gpu_code, hlo, kernel_calls, kernel_flags, slices
from tools.describe import vocab_size_of

ROOT = pathlib.Path(__file__).resolve().parents[1]

flags.adopt_module_key_flags(kernel_flags)  # so that --help lists them
TOPOLOGY = flags.DEFINE_string(
    "topology", None, "TPU slice or number of GPUs to compile for, such as v5e:4x4 or h200:8"
)
ALL = flags.DEFINE_bool("all", False, "compile every config in configs/ as it says of itself")
KERNEL = flags.DEFINE_enum("kernel", None, list(kernels.BACKENDS), "one kernel in a config's place")
BACKEND = flags.DEFINE_string("backend", kernels.AUTO, "which of the kernel's backends")


def compile_kernel(call: kernel_calls.KernelCall, backend: str, wanted: slices.Slice) -> dict:
    """What `main` prints of a kernel, without its name and the topology.

    Raises:
      ValueError: a backend that is unknown, cannot run the call or is refused by the compiler.
    """
    chip = wanted.chip
    mesh = sharding.make_mesh(1, 1, 1, slices.devices(wanted)[:1])
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with contextlib.ExitStack() as stack:
        stack.enter_context(_refused_in_one_line(f"{call.op} by {backend!r}"))
        dumped = stack.enter_context(gpu_code.dump()) if chip.gpu else None
        begun = time.perf_counter()
        stack.enter_context(kernels.target_platform(chip.platform, chip.capability))
        stack.enter_context(jax.set_mesh(mesh))
        chosen = stack.enter_context(kernels.watch_choices())
        function = jax.jit(call.function(backend, kernel_calls.BOTH))
        lowered = function.lower(*call.abstract(whole))
        traced = time.perf_counter()
        compiled, needed = _compile(lowered, dumped and dumped.compiler_options)
        seconds = {"trace": traced - begun, "compile": time.perf_counter() - traced}
        code = gpu_code.kernels(dumped, chip.capability) if dumped else None
    least_flops = call.least_flops(kernel_calls.BOTH)
    least_bytes = call.least_bytes(kernel_calls.BOTH)
    products = endless = moved = None
    if compiled is not None:
        found = hlo.costs(compiled.as_text())
        products, endless = found.flops, found.endless_loops
        moved = (compiled.cost_analysis() or {}).get("bytes accessed")
    report = {
        "memory": _memory(compiled, needed, chip),
        "flops": {"compiled": products, "least": least_flops},
        "bytes": {"compiled": moved, "least": least_bytes},
        "at_least_seconds": {
            "products": least_flops / chip.peak_flops, "bytes": least_bytes / chip.bandwidth,
        },
        "loops_of_unknown_length": endless,
    }  # fmt: skip
    return {
        "device": chip.device_kind,
        "backend": ", ".join(sorted(chosen[call.op])),
        **dataclasses.asdict(call),
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        **report,
        **({"code": code} if code is not None else {}),
    }


@contextlib.contextmanager
def _refused_in_one_line(what: str):
    """What a compiler or its libraries refuse, or what is not written, is a ValueError."""
    try:
        yield
    except RuntimeError as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise ValueError(f"{what} cannot be compiled for it: {lines[0]}") from error


def compile_for(config: config_lib.Config, wanted: slices.Slice) -> dict:
    """What `main` prints, without the names of config and topology.

    Raises:
      ValueError: a mesh that the slice does not divide.
    """
    chip = wanted.chip
    spec = mixers.resolve(config.model.build(config.max_len, vocab_size_of(config)))
    schedule = optim.make_schedule(config.learning_rate, config.num_steps, config.optimizer)
    program = setup.make_program(config, spec, schedule, chip.platform)
    sizes = config.mesh.data, config.mesh.fsdp, config.mesh.tensor
    mesh = sharding.make_mesh(*sizes, slices.devices(wanted))
    setup.check_mesh(config, program, mesh)

    begun = time.perf_counter()
    with kernels.target_platform(chip.platform, chip.capability), kernels.watch_choices() as chosen:
        batch = step.abstract_batch(spec, config.batch_size, mesh)
        lowered = step.lower_train_step(program, mesh, batch)
    traced = time.perf_counter()
    compiled, needed = _compile(lowered)
    seconds = {"trace": traced - begun, "compile": time.perf_counter() - traced}
    formula = flops.train_flops(spec, config.batch_size) / mesh.size
    return {
        "device": chip.device_kind,
        "mesh": dict(mesh.shape),
        "rows": config.batch_size // config.compute.micro_batches,
        "micro_batches": config.compute.micro_batches,
        "remat": config.compute.remat,
        "kernels": {op: sorted(names) for op, names in sorted(chosen.items())},
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        **_report(compiled, needed, chip, formula),
    }


_TOO_LARGE = re.compile(
    r"Used ([\d.]+)([KMG]) of \S+ hbm|memory required for HLO temporaries \(([\d.]+)([KMG])\)"
)


def _compile(lowered, options=None) -> tuple[jax.stages.Compiled | None, int | None]:
    """(the program, None), or (None, bytes at least) where the compiler says that it is too large.

    Some compilers name the bytes of temporaries alone.
    """
    try:
        return lowered.compile(compiler_options=options), None
    except jax.errors.JaxRuntimeError as error:
        found = _TOO_LARGE.search(str(error))
        if found is None:
            raise
        number, unit = (text for text in found.groups() if text is not None)
        return None, int(float(number) * 2 ** {"K": 10, "M": 20, "G": 30}[unit])


def _report(compiled, needed: int | None, chip: slices.Chip, formula: float) -> dict:
    """Of a step."""
    memory = _memory(compiled, needed, chip)
    if compiled is None:
        return {"memory": memory, "flops": {"formula": formula}}
    found, state = hlo.costs(compiled.as_text()), memory["arguments"] + memory["output"]
    return {
        "memory": memory,
        "flops": {"compiled": found.flops, "formula": formula, "ratio": found.flops / formula},
        "at_least_seconds": {
            "products": found.flops / chip.peak_flops, "state": state / chip.bandwidth,
        },
        "collective_bytes": found.collective_bytes,
        "loops_of_unknown_length": found.endless_loops,
    }  # fmt: skip


def _memory(compiled, needed: int | None, chip: slices.Chip) -> dict:
    """Bytes of one device.

    The peak is all that lies there side by side: arguments, what the output does not put in their
    place, temporaries, code; of a program that is too large, the bytes that its compiler named.
    """
    if compiled is None:
        return {"peak": needed, "of_chip": chip.memory, "fits": False}
    found = compiled.memory_analysis()
    arguments, output = found.argument_size_in_bytes, found.output_size_in_bytes
    beside = output - found.alias_size_in_bytes
    peak = arguments + beside + found.temp_size_in_bytes + found.generated_code_size_in_bytes
    return {
        "arguments": arguments,
        "temporaries": found.temp_size_in_bytes,
        "output": output,
        "peak": peak,
        "of_chip": chip.memory,
        "fits": peak <= chip.memory,
    }


def documented(config: pathlib.Path) -> list[str]:
    """Arguments of the `tools.aot` command in a config's docstring.

    Raises:
      ValueError: it names none.
    """
    text = ast.get_docstring(ast.parse(config.read_text()), clean=False) or ""
    found = re.search(r"^ +python -m tools\.aot ((?:.*\\\n)*.*)", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"{config}: its docstring names no command python -m tools.aot")
    return shlex.split(found[1].replace("\\\n", " "))


def _compile_all() -> int:
    """Each in a process of its own, so that one that fails leaves the others."""
    failed = 0
    for path in sorted((ROOT / "configs").glob("*.py")):
        command = [sys.executable, "-m", "tools.aot", *documented(path)]
        failed += subprocess.run(command, cwd=ROOT, check=False).returncode != 0
    return failed


def _alone(chip: slices.Chip) -> contextlib.AbstractContextManager:
    """libtpu serves one process at a time."""
    if chip.platform != "tpu":
        return contextlib.nullcontext()
    path = pathlib.Path(tempfile.gettempdir()) / "deconstruct.libtpu.lock"
    return lock.held(path, busy="another process compiles with libtpu: waiting", wait=True)


def main(argv) -> int:
    del argv
    given = [name for name in (*kernel_flags.NAMES, "backend") if flags.FLAGS[name].present]
    if ALL.value:
        if given or (TOPOLOGY.value or KERNEL.value or flags.FLAGS.config) is not None:
            raise ValueError(
                "--all takes neither --config, --topology nor a kernel's flags: "
                "each config says its own"
            )
        return int(_compile_all() > 0)
    if KERNEL.value is not None and flags.FLAGS.config is not None:
        raise ValueError("--kernel and --config are two different things to compile: name one")
    if (KERNEL.value or flags.FLAGS.config) is None or TOPOLOGY.value is None:
        raise ValueError(
            "--config and --topology are both needed; for example "
            "--config=configs/tiny.py --topology=v5e:2x2, or --kernel in --config's place"
        )
    if KERNEL.value is None and given:
        raise ValueError(f"--{given[0]} is of a --kernel; a config's sizes are --config.KEY=VALUE")
    wanted = slices.parse(TOPOLOGY.value)
    if KERNEL.value is not None:
        call = kernel_flags.from_flags(KERNEL.value)
        named = {"kernel": KERNEL.value}
        compile_it = functools.partial(compile_kernel, call, BACKEND.value)
    else:
        compile_it = functools.partial(compile_for, config_lib.parse(flags.FLAGS.config))
        named = {"config": config_flags.get_config_filename(flags.FLAGS["config"])}
    slices.check_compiler(wanted)
    jax.config.update("jax_platforms", "cpu")  # what traces; a TPU or GPU here stays untouched
    with _alone(wanted.chip):
        report = compile_it(wanted)
    print(json.dumps({**named, "topology": wanted.name, **report}))
    if not report["memory"]["fits"]:
        if KERNEL.value is not None:
            raise ValueError(f"this call of {KERNEL.value} does not fit the device: fewer --rows")
        needed, there = (report["memory"][key] / slices.GIB for key in ("peak", "of_chip"))
        raise ValueError(
            f"{needed:.1f} GiB or more a device do not fit {there:.0f} GiB: more micro-batches "
            "(--config.compute.micro_batches), --config.compute.remat=full, or more devices"
        )
    return 0


if __name__ == "__main__":
    entry.define_config_flag()
    entry.run(main)
