"""TPU slices and GPU nodes that a program can be compiled for without having them."""

import dataclasses
import importlib.util
import math
import os
import re

from jax.experimental import topologies

from deconstruct import metrics
from deconstruct.spec import unknown_name

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What XLA's compiler asks of an NVIDIA GPU; bytes, counts are of one multiprocessor.

    From the tuning guides and white papers of the architectures.
    """

    capability: int
    num_multiprocessors: int
    num_fpus: int
    shared_memory: int
    shared_memory_of_a_block: int
    l2_cache: int
    clock_ghz: float


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device, as its maker's data sheet prints it.

    Attributes:
      device_kind: JAX's name, under which `metrics.PEAK_FLOPS` has its speed.
      memory: bytes, of which the runtime keeps some for itself.
      bandwidth: bytes a second from and to that memory.
      gpu: None for a TPU.
    """

    device_kind: str
    memory: int
    bandwidth: float
    gpu: Gpu | None = None

    @property
    def peak_flops(self) -> float:
        return metrics.PEAK_FLOPS[self.device_kind]

    @property
    def platform(self) -> str:
        return "tpu" if self.gpu is None else "gpu"

    @property
    def capability(self) -> int | None:
        return self.gpu and self.gpu.capability


_AMPERE = Gpu(80, 108, 64, 167_936, 166_912, 40 * 2**20, 1.41)
_HOPPER = Gpu(90, 132, 128, 233_472, 232_448, 50 * 2**20, 1.98)
CHIPS = {
    "v4": Chip("TPU v4", 32 * GIB, 1.228e12),
    "v5e": Chip("TPU v5 lite", 16 * GIB, 0.819e12),
    "v5p": Chip("TPU v5", 95 * GIB, 2.765e12),
    "v6e": Chip("TPU v6 lite", 32 * GIB, 1.640e12),
    "a100": Chip("NVIDIA A100-SXM4-80GB", 80 * GIB, 2.039e12, _AMPERE),
    "h100": Chip("NVIDIA H100 80GB HBM3", 80 * GIB, 3.35e12, _HOPPER),
    "h200": Chip("NVIDIA H200", 141 * GIB, 4.8e12, _HOPPER),
}
GPUS_OF_A_NODE = 8


@dataclasses.dataclass(frozen=True)
class Slice:
    """Devices of one kind: `v5e:4x4` is a torus of TPU chips, `h200:8` a number of GPUs."""

    chip: Chip
    name: str
    shape: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape)


def parse(text: str) -> Slice:
    """The slice that `text` names.

    Raises:
      ValueError: a chip that is not in `CHIPS`; a shape that no such slice has.
    """
    name, _, size = text.partition(":")
    if name not in CHIPS:
        raise ValueError(unknown_name("chip", name, CHIPS) + ", such as v5e:4x4 or h200:8")
    chip = CHIPS[name]
    axes = "1" if chip.gpu else "23" if name in ("v5e", "v6e") else "3"
    shape = tuple(map(int, size.split("x"))) if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", size) else ()
    if str(len(shape)) not in axes or (len(shape) == 3 and "2" in axes):
        example = {"1": "8", "23": "4x4", "3": "2x2x4"}[axes]
        raise ValueError(f"topology {text!r} has no shape of a {name}: write {name}:{example}")
    found = Slice(chip, text, shape)
    if chip.gpu and found.num_devices > GPUS_OF_A_NODE and found.num_devices % GPUS_OF_A_NODE:
        raise ValueError(f"topology {text!r}: more than {GPUS_OF_A_NODE} GPUs are whole nodes")
    return found


def check_compiler(wanted: Slice) -> None:
    """Raises:
    ValueError: the compiler for these devices is not installed; the message says how to.
    """
    package, requirements = {
        "tpu": ("libtpu", "requirements-tpu.txt"),
        "gpu": ("jax_cuda12_plugin", "requirements-gpu-compiler.txt"),
    }[wanted.chip.platform]
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"the compiler for {wanted.name} is not installed; in an environment of its own: "
            f"pip install -r {requirements}"
        )


def devices(wanted: Slice) -> list:
    """Devices to compile for; nothing can run on them.

    Raises:
      ValueError: the compiler knows no such slice.
    """
    make = _gpus if wanted.chip.gpu else _tpus
    try:
        found = make(wanted).devices
    except RuntimeError as error:
        raise ValueError(f"topology {wanted.name!r}: {str(error).splitlines()[0]}") from error
    assert len(found) == wanted.num_devices and found[0].device_kind == wanted.chip.device_kind
    return found


def _tpus(wanted: Slice):
    """A host has 2 x 2 chips, or all of a smaller slice; a v4 or v5p chip is one device."""
    for name, value in (
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("TPU_ACCELERATOR_TYPE", "v5litepod-1"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
    ):
        os.environ.setdefault(name, value)  # else libtpu asks the network, and complains
    first, second, *_ = wanted.shape
    options = {"chips_per_host_bounds": (min(2, first), min(2, second), 1)}
    if wanted.chip is CHIPS["v4"]:
        options["chip_config_name"] = "megacore"
    return topologies.get_topology_desc(platform="tpu", topology_name=wanted.name, **options)


def _gpus(wanted: Slice):
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # else it wants all of CUDA
    nodes = -(-wanted.num_devices // GPUS_OF_A_NODE)
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=_target_config(wanted.chip),
        topology=f"1x{nodes}x{wanted.num_devices // nodes}",
    )


def _target_config(chip: Chip) -> str:
    """XLA's GpuTargetConfigProto as text."""
    gpu = chip.gpu
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {gpu.shared_memory_of_a_block}
  shared_memory_per_core: {gpu.shared_memory}
  core_count: {gpu.num_multiprocessors}
  fpus_per_core: {gpu.num_fpus}
  l2_cache_size: {gpu.l2_cache}
  clock_rate_ghz: {gpu.clock_ghz}
  memory_bandwidth: {int(chip.bandwidth)}
  device_memory_size: {chip.memory}
  cuda_compute_capability {{ major: {gpu.capability // 10} minor: {gpu.capability % 10} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{chip.device_kind}"
"""
