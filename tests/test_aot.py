"""`tools.aot`: what is read off compiled programs, slices and their errors, a TPU's compiler."""

import importlib.util
import json
import os
import pathlib
import runpy
import shlex
import subprocess
import sys
import types

import devices
import jax
import jax.numpy as jnp
import pytest

from deconstruct import config as config_lib
from deconstruct import kernels, mixers, optim, setup, sharding
from tools import aot, hlo, slices

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.py"))


def load(path: pathlib.Path, *overrides: str) -> config_lib.Config:
    """The config with flags `--config.KEY=VALUE`, read as a command reads them."""
    record = runpy.run_path(str(path))["get_config"]()
    for override in overrides:
        key, _, value = override.removeprefix("--config.").partition("=")
        text = config_lib.key_type(key) is str
        record.update_from_flattened_dict({key: value if text else json.loads(value)})
    return config_lib.parse(record)


@pytest.mark.parametrize("optimised", [True, False])
def test_collectives_and_products_known_by_hand(optimised):
    """5 turns; 8 devices with 4 of 32 rows each, of 64 float32 values."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "hlo_on_meshes.py")],
        env=devices.environment(8, optimised),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    rows = 4 * 64 * 4
    assert json.loads(done.stdout) == {
        "flops": 5 * 2 * 4 * 64 * 64,
        "collective_bytes": {
            "all-gather": 5 * 64 * 64 * 4,
            "all-reduce": 5 * 64 * 4,
            "all-to-all": rows,
            "collective-permute": rows,
            "reduce-scatter": rows,
        },
        "endless_loops": 0,
    }


# As a TPU's compiler prints: layouts with brackets of their own, loops without their trip count,
# batched products as dilated convolutions, collectives that start in one place and go on in others.
TPU_PROGRAM = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%product (p.0: f32[4,4,64,32], p.1: f32[4,4,128,32]) -> f32[4,4,64,128] {
  %p.0 = f32[4,4,64,32]{3,2,1,0:T(8,128)} parameter(0)
  %p.1 = f32[4,4,128,32]{3,2,1,0:T(8,128)S(1)} parameter(1)
  ROOT %c = f32[4,4,64,128]{3,2,1,0:T(8,128)} convolution(%p.0, %p.1), window={size=4x4 stride=3x3 \
lhs_dilate=4x4}, dim_labels=01bf_01oi->01bf, operand_precision={highest,highest}
}

%body (p: (s32[], f32[4,4,64,32], f32[4,4,128,32])) -> (s32[], f32[4,4,64,32], f32[4,4,128,32]) {
  %one = s32[]{:T(128)} constant(STEP)
  %p = (s32[]{:T(128)}, f32[4,4,64,32]{3,2,1,0:T(8,128)}, /*index=2*/f32[4,4,128,32]{3,2,1,0}) \
parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = f32[4,4,64,32]{3,2,1,0:T(8,128)} get-tuple-element(%p), index=1
  %w = f32[4,4,128,32]{3,2,1,0} get-tuple-element(%p), index=2
  %i.2 = s32[]{:T(128)S(6)} copy(%i)
  %next = s32[]{:T(128)} add(%i.2, %one)
  %g.2 = f32[4,4,128,32]{3,2,1,0} all-gather(%w), channel_id=3, dimensions={0}, \
backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}
  %y = f32[4,4,64,128]{3,2,1,0:T(8,128)} fusion(%x, %w), kind=kOutput, calls=%product
  ROOT %t = (s32[]{:T(128)}, f32[4,4,64,32]{3,2,1,0}, f32[4,4,128,32]{3,2,1,0}) tuple(%next, %x, %w)
}

%condition (p.2: (s32[], f32[4,4,64,32], f32[4,4,128,32])) -> pred[] {
  %p.2 = (s32[]{:T(128)}, f32[4,4,64,32]{3,2,1,0}, f32[4,4,128,32]{3,2,1,0}) parameter(0)
  %end = s32[]{:T(128)} constant(7)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.2), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i.1, %end), direction=LT
}

ENTRY %main (x: f32[4,4,64,32], w: f32[1,4,128,32]) -> f32[4,4,64,32] {
  %x.1 = f32[4,4,64,32]{3,2,1,0:T(8,128)} parameter(0)
  %w.1 = f32[1,4,128,32]{3,2,1,0} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %start = s32[]{:T(128)S(6)} copy(%zero)
  %g = (f32[1,4,128,32]{3,2,1,0}, f32[4,4,128,32]{3,2,1,0}) all-gather-start(%w.1), dimensions={0}
  %g.1 = f32[4,4,128,32]{3,2,1,0} all-gather-done(%g)
  %r = bf16[4,4,64,32]{3,2,1,0:T(8,128)(2,1)} all-reduce(%x.1), channel_id=3, to_apply=%sum, \
backend_config={"async_collective_fusion_config":{"flag_start":"-1","flag_end":"-1"}}
  %t.1 = (s32[]{:T(128)}, f32[4,4,64,32]{3,2,1,0}, f32[4,4,128,32]{3,2,1,0}) \
tuple(%start, %x.1, %g.1)
  %l = (s32[]{:T(128)}, f32[4,4,64,32]{3,2,1,0}, f32[4,4,128,32]{3,2,1,0}) while(%t.1), \
condition=%condition, body=%body
  ROOT %out = f32[4,4,64,32]{3,2,1,0} get-tuple-element(%l), index=1
}
"""


@pytest.mark.parametrize("step, turns", [(1, 7), (2, 4)])
def test_a_tpus_program_known_by_hand(step, turns):
    found = hlo.costs(TPU_PROGRAM.replace("STEP", str(step)))
    assert found.flops == turns * 2 * (4 * 4) * 64 * 128 * 32
    assert found.collective_bytes == {
        "all-gather": 4 * 4 * 128 * 32 * 4,
        "all-reduce": 4 * 4 * 64 * 32 * 4,
    }
    assert found.endless_loops == 0


def test_a_loop_of_unknown_length_counts_once_and_is_told():
    def steps(number, x_DD):
        return jax.lax.fori_loop(0, number, lambda _, y_DD: y_DD @ y_DD, x_DD)

    x_DD = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    compiled = jax.jit(steps).lower(jax.ShapeDtypeStruct((), jnp.int32), x_DD).compile()
    found = hlo.costs(compiled.as_text())
    assert (found.flops, found.endless_loops) == (2 * 32**3, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"window_strides": (1, 2), "padding": ((2, 1), (0, 3))},
        {"window_strides": (1, 1), "padding": ((1, 1), (2, 2)), "lhs_dilation": (3, 2)},
        {"window_strides": (2, 1), "padding": "SAME", "rhs_dilation": (2, 3)},
    ],
)
def test_convolutions_count_as_xla_counts_them(options):
    def convolve(x, w):
        return jax.lax.conv_general_dilated(x, w, **options)

    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 3, 9, 11), (5, 3, 3, 4)))
    compiled = jax.jit(convolve).lower(x, w).compile()
    assert hlo.costs(compiled.as_text()).flops == compiled.cost_analysis()["flops"]


@pytest.mark.parametrize(
    "name, devices, platform",
    [
        ("v5e:4x4", 16, "tpu"), ("v6e:1x1", 1, "tpu"), ("v4:2x2x4", 16, "tpu"),
        ("v5p:4x4x4", 64, "tpu"), ("h200:8", 8, "gpu"), ("a100:16", 16, "gpu"),
    ],
)  # fmt: skip
def test_slices(name, devices, platform):
    found = slices.parse(name)
    assert (found.num_devices, found.chip.platform) == (devices, platform)


def test_every_chip_has_a_peak():
    assert all(1e14 < chip.peak_flops < 1e15 for chip in slices.CHIPS.values())


@pytest.mark.parametrize(
    "name, message",
    [
        ("v5:4x4", "unknown chip 'v5': did you mean 'v5p'? known: a100, h100, h200, v4, v5e, v5p"),
        ("v5e", "has no shape of a v5e: write v5e:4x4"),
        ("v5e:4x4x4", "write v5e:4x4"),
        ("v5p:4x4", "write v5p:2x2x4"),
        ("v5e:0x4", "write v5e:4x4"),
        ("h200:2x4", "write h200:8"),
        ("h200:12", "whole nodes"),
    ],
)
def test_slices_that_are_none(name, message):
    with pytest.raises(ValueError) as error:
        slices.parse(name)
    assert message in str(error.value)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_names_a_slice_that_its_mesh_divides(path):
    ours, topology, *overrides = aot.documented(path)
    assert ours == f"--config=configs/{path.name}"
    wanted = slices.parse(topology.removeprefix("--topology="))
    config = load(path, *overrides)
    sizes = config.mesh.fsdp, config.mesh.tensor
    data, rest = divmod(wanted.num_devices, sizes[0] * sizes[1])
    assert not rest
    mesh = jax.sharding.AbstractMesh((data, *sizes), sharding.AXES)
    spec = mixers.resolve(config.model.build(config.max_len, vocab_size=1))
    schedule = optim.make_schedule(config.learning_rate, config.num_steps, config.optimizer)
    setup.check_mesh(config, setup.make_program(config, spec, schedule, "tpu"), mesh)


def test_a_config_without_a_command(tmp_path):
    path = tmp_path / "bare.py"
    path.write_text('"""No command."""\n')
    with pytest.raises(ValueError, match=r"bare.py: its docstring names no command"):
        aot.documented(path)


def test_all_runs_each_command_and_counts_what_failed(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    for name in ("a", "b"):
        text = (
            f'"""Words.\n\n    python -m tools.aot --config={name}.py \\\\\n        --more\n"""\n'
        )
        (tmp_path / "configs" / f"{name}.py").write_text(text)
    ran = []

    def run(command, **_):
        ran.append(shlex.join(command[1:]))
        return types.SimpleNamespace(returncode=len(ran) - 1)

    monkeypatch.setattr(aot, "ROOT", tmp_path)
    monkeypatch.setattr(aot.subprocess, "run", run)
    assert aot._compile_all() == 1
    assert ran == [f"-m tools.aot --config={name}.py --more" for name in ("a", "b")]


@pytest.fixture
def one_device(monkeypatch) -> slices.Slice:
    """A slice whose only device is the CPU that is here."""
    monkeypatch.setattr(slices, "devices", lambda wanted: jax.devices()[:1])
    return slices.parse("v5e:1x1")


def tiny(*overrides: str) -> config_lib.Config:
    """In float32: a CPU has no bfloat16 products with sums in float32."""
    return load(ROOT / "configs" / "tiny.py", "--config.compute.dtype=float32", *overrides)


def test_report(one_device):
    """The new state takes the old one's place; full remat runs each block's forward twice."""
    found = aot.compile_for(tiny("--config.compute.remat=full"), one_device)
    assert found["mesh"] == {"data": 1, "fsdp": 1, "tensor": 1}
    memory = found["memory"]
    state = 12 * (2 * 4096 * 128 + 4 * (4 * 128**2 + 3 * 128 * 384))
    assert state < memory["arguments"] < 1.01 * state + 5 * 4 * 16 * 128
    assert memory["peak"] == pytest.approx(memory["arguments"] + memory["temporaries"], rel=0.01)
    assert memory["fits"] and memory["of_chip"] == 16 * 2**30
    products = found["flops"]
    assert products["ratio"] == products["compiled"] / products["formula"]
    assert 1.1 < products["ratio"] < 4 / 3
    assert found["loops_of_unknown_length"] == 0 and found["collective_bytes"] == {}
    least = found["at_least_seconds"]
    assert least["products"] == products["compiled"] / 197e12
    assert least["state"] == (memory["arguments"] + memory["output"]) / 819e9


def test_a_mesh_that_the_slice_does_not_divide(one_device):
    with pytest.raises(ValueError, match="mesh fsdp=3 x tensor=1 does not fit 1 device"):
        aot.compile_for(tiny("--config.mesh.fsdp=3"), one_device)


@pytest.mark.parametrize(
    "words",
    [
        "XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 21.50G of "
        "15.75G hbm. Exceeded hbm capacity by 5.75G.",
        "Ran out of memory on HBM, the total memory required for HLO temporaries (21.50G) exceeds "
        "available HBM (15.75G).",
    ],
)
def test_what_does_not_fit_is_a_report(one_device, monkeypatch, words):
    class Lowered:
        def compile(self, compiler_options=None):
            raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {words}")

    monkeypatch.setattr(aot.step, "lower_train_step", lambda *_: Lowered())
    memory = aot.compile_for(tiny(), one_device)["memory"]
    assert memory == {"peak": int(21.5 * 2**30), "of_chip": 16 * 2**30, "fits": False}


def run_command(*args: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tools.aot", *args]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(
    "args, message",
    [
        (["--config=configs/tiny.py"], "--config and --topology are both needed"),
        (["--all", "--topology=v5e:2x2"], "--all takes neither"),
        (["--all", "--kernel=prefix_softmax"], "--all takes neither"),
        (["--all", "--rows=2"], "--all takes neither"),
        (["--config=configs/tiny.py", "--topology=v5e:2x2", "--rows=2"], "--rows is of a --kernel"),
        (["--config=configs/tiny.py", "--kernel=prefix_softmax"], "two different things"),
        (["--config=configs/tiny.py", "--topology=v3:8"], "known: a100, h100, h200, v4, v5e,"),
        pytest.param(
            ["--config=configs/tiny.py", "--topology=v5e:2x2"],
            "pip install -r requirements-tpu.txt",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("libtpu") is not None, reason="libtpu is here"
            ),
        ),
        pytest.param(
            [
                "--kernel=causal_attention", "--dtype=bfloat16", "--topology=v5e:2x2",
                "--heads=1", "--head_size=2048",
            ],
            "causal_attention by 'auto' cannot be compiled for it: ",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("libtpu") is None, reason="libtpu is not here"
            ),
        ),
    ],
)  # fmt: skip
def test_errors_are_one_line(args, message):
    done = run_command(*args)
    assert done.returncode != 0 and not done.stdout
    *before, said = done.stderr.splitlines()
    assert said.startswith("error: ") and message in said
    assert not any("Traceback" in line for line in before)  # CUDA's plugin misses its driver aloud


def needs(package: str, file: str):
    absent = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(absent, reason=f"{package} is absent: pip install -r {file}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "topology, device",
    [
        pytest.param(
            "v5e:2x2", "TPU v5 lite", marks=needs("libtpu", "requirements-tpu.txt"), id="tpu"
        ),
        pytest.param(
            "h200:4", "NVIDIA H200",
            marks=needs("jax_cuda12_plugin", "requirements-gpu-compiler.txt"), id="gpu",
        ),
    ],
)  # fmt: skip
def test_the_real_compilers(topology, device):
    """4 devices share 16 rows; each sums the gradients of all parameters, at least in bfloat16."""
    done = run_command("--config=configs/tiny.py", f"--topology={topology}")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert found["config"] == "configs/tiny.py" and found["topology"] == topology
    assert found["device"] == device and found["mesh"] == {"data": 4, "fsdp": 1, "tensor": 1}
    assert found["loops_of_unknown_length"] == 0
    assert 0.9 < found["flops"]["ratio"] < 1.1
    assert found["collective_bytes"].keys() == {"all-reduce"}
    assert 2 * 1_900_000 < found["collective_bytes"]["all-reduce"] < 4 * 2_000_000
    assert found["memory"]["fits"] and found["memory"]["peak"] < 2**26
    refused = run_command(
        "--config=configs/tiny.py", f"--topology={topology}", "--config.mesh.fsdp=3"
    )
    assert refused.returncode == 1 and refused.stderr.splitlines()[-1].startswith(
        "error: mesh fsdp=3 x tensor=1 does not fit 4 device(s)"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "platform, devices",
    [
        pytest.param(
            "tpu", ("TPU v5 lite", "TPU v5", "TPU v6 lite"),
            marks=needs("libtpu", "requirements-tpu.txt"), id="tpu",
        ),
        pytest.param(
            "gpu", ("NVIDIA A100-SXM4-80GB", "NVIDIA H200"),
            marks=needs("jax_cuda12_plugin", "requirements-gpu-compiler.txt"), id="gpu",
        ),
    ],
)  # fmt: skip
def test_kernels_compile_without_the_device(platform, devices):
    """Forward and backward; nothing is moved often, or spilled, where the compiler says so."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    env.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)  # kernels spill without what it leaves out
    command = [sys.executable, str(ROOT / "tests" / "kernels_compiled.py"), platform]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    ours = {
        (op, backend.name)
        for op, backends in kernels.BACKENDS.items()
        for backend in backends
        if backend.platform == platform and backend.name != "cudnn"
    }
    compiled = {(line["device"], line["op"], line["backend"]) for line in found}
    assert {(op, backend) for _, op, backend in compiled} == ours
    assert {device for device, *_ in compiled} == set(devices)
    assert all(line["memory"]["fits"] for line in found)
    if platform == "gpu":
        # What takes most of a training's time; float32's wide heads may spill.
        training = [line for line in found if line["dtype"] == "bfloat16"]
        spilled = [(line["op"], k) for line in training for k in line["code"] if k["spill_bytes"]]
        assert training
        assert not spilled
        for line in found:
            names = {code["name"].strip("_") for code in line["code"]}
            assert any(name.startswith(("forward", "keys")) for name in names), (line["op"], names)
        return
    own = [line["bytes"] for line in found if line["op"] == "prefix_softmax"]
    assert own and all(moved["compiled"] <= 4 * moved["least"] for moved in own)
    long = [line["memory"] for line in found if line["length"] == 16384]
    assert long and all(m["temporaries"] <= m["arguments"] + m["output"] for m in long)
