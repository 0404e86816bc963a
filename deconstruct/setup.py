"""From a config to all that a run needs: devices, workdir, data, model, mesh."""

import contextlib
import dataclasses
import pathlib
import uuid
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from deconstruct import decoder, lock, mixers, optim, sharding, step, tuning
from deconstruct.config import Config
from deconstruct.data import loader, prepare
from deconstruct.data.dataset import first_tokens
from deconstruct.data.mixture import Mixture, open_mixture
from deconstruct.spec import ModelSpec

CONFIG_FILE, SPEC_FILE = "config.json", "spec.json"


@dataclasses.dataclass(frozen=True)
class Run:
    """What stays the same from the first step to the last.

    Attributes:
      text_ids: the `fixed_seq_qk` text (max_len,); None for plans without it.
    """

    config: Config
    workdir: pathlib.Path
    data: Mixture
    program: step.Program
    mesh: Mesh
    text_ids: np.ndarray | None

    @property
    def spec(self) -> ModelSpec:
        return self.program.spec


def choose_devices(platform: str) -> list[jax.Device]:
    """The devices of the asked-for platform, announced in the first line of a run.

    Raises:
      ValueError: the platform has none here; the message gives the install command.
    """
    try:
        devices = jax.devices(None if platform == "auto" else platform)
    except RuntimeError as error:
        extra = {"gpu": "requirements-gpu.txt", "tpu": "requirements-tpu.txt"}.get(platform)
        remedy = f"pip install -r {extra} on a machine that has one, or " if extra else ""
        raise ValueError(
            f"no {platform} device is here ({str(error).splitlines()[0]}); {remedy}set "
            "--config.compute.platform=auto"
        ) from error
    print(f"platform {devices[0].platform}: {len(devices)} x {devices[0].device_kind}")
    return devices


@contextlib.contextmanager
def open_workdir(workdir: str) -> Iterator[pathlib.Path]:
    """The run's directory, made, proven writable, and this run's alone until it is left.

    Raises:
      ValueError: a bucket, a place inside another run, one that cannot be written, or one that
        another run writes to.
    """
    if "://" in workdir:
        raise ValueError(
            f"--workdir={workdir} is no local path; mount the bucket and name a folder"
        )
    folder = pathlib.Path(workdir).expanduser().resolve()
    if outer := next((path for path in folder.parents if _is_run(path)), None):
        raise ValueError(f"--workdir={workdir} lies inside a run; its run is {outer}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable.{uuid.uuid4().hex[:12]}"  # several hosts may probe at once
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"--workdir={workdir} cannot be written: {error}") from error
    if jax.process_index() != 0:
        yield folder
        return
    busy = f"another run writes to --workdir={folder}: wait for its end, or give another"
    # A second trainer would delete the unfinished save of the first.
    with lock.held(folder / ".lock", busy=busy, wait=False):
        yield folder


def _is_run(folder: pathlib.Path) -> bool:
    return all((folder / name).is_file() for name in (CONFIG_FILE, SPEC_FILE))


def set_up(config: Config, folder: pathlib.Path, devices: list[jax.Device]) -> Run:
    """Data, model and mesh of a run. What needs no data is refused before any is prepared."""
    schedule = optim.make_schedule(config.learning_rate, config.num_steps, config.optimizer)
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor, devices)
    data = open_data(config)
    spec = mixers.resolve(config.model.build(config.max_len, data.vocab_size))
    data.check_vocabulary(spec.vocab_size)
    check_rows(config, data)
    program = make_program(config, spec, schedule, devices[0].platform)
    check_mesh(config, program, mesh)
    text_ids = fixed_text(config, data) if "fixed_seq_qk" in decoder.stream_names(spec) else None
    return Run(config, folder, data, program, mesh, text_ids)


def open_data(config: Config) -> Mixture:
    """The prepared data, made first where the config says from what."""
    data = config.data
    if not data.weights:
        raise ValueError(
            "data.path is missing and data.mixture empty: name a directory made by python -m "
            "deconstruct.data.prepare"
        )
    if data.prepare_source is not None:
        settings = prepare.PrepareSettings(
            data.prepare_source, data.prepare_tokenizer, config.max_len, data.path
        )
        prepare.prepare(settings)
    mixture = open_mixture(data.weights)
    if mixture.max_len != config.max_len:
        raise ValueError(
            f"{data.weights[0][0]} holds rows of max_len={mixture.max_len}, the config asks for "
            f"{config.max_len}: set max_len, or prepare the data with it"
        )
    return mixture


def check_rows(config: Config, data: Mixture) -> None:
    """Refuses splits and numbers of rows that the data does not have, before anything compiles."""
    data.check_batch(config.batch_size)
    if not config.data.repeat:
        steps = data.last_step_without_repeats(config.batch_size)
        if steps < config.num_steps:
            raise ValueError(
                f"the data is read whole after step {steps}, before num_steps={config.num_steps}, "
                f"and data.repeat is off: set num_steps={steps}, or data.repeat=True"
            )
    for held_out in data.held_out(config.data.validation):
        loader.rows_asked(held_out.dataset, held_out.split, config.data.validation_rows)


def make_program(
    config: Config, spec: ModelSpec, schedule: optax.Schedule, platform: str
) -> step.Program:
    """What the config says of computing; "auto" is decided by the platform (`tuning`)."""
    compute, choice = config.compute, tuning.of(platform)
    dtype = jnp.dtype(choice.dtype if compute.dtype == "auto" else compute.dtype)
    scan = choice.scan_layers if compute.layout == "auto" else compute.layout == "scan"
    return step.Program(
        spec=spec,
        optimizer=optim.make_optimizer(schedule, config.optimizer),
        schedule=schedule,
        compute=decoder.Compute(dtype, compute.remat),
        scan_layers=scan,
        isolate_documents=config.data.isolate_documents,
        micro_batches=compute.micro_batches,
        z_loss=config.optimizer.z_loss,
    )


def check_mesh(config: Config, program: step.Program, mesh: Mesh) -> None:
    """Refuses sizes that the mesh does not divide: the config's by name, then any parameter's."""
    spec = program.spec
    rows = config.batch_size // config.compute.micro_batches
    sharding.check_sizes(
        mesh,
        {
            "batch_size / compute.micro_batches": (rows, "batch"),
            "model.model_dim": (spec.model_dim, "embed"),
            "model.feed_forward_dim": (spec.feed_forward_dim, "feed_forward"),
            "model.num_heads": (spec.num_heads, "heads"),
            "model.num_kv_heads": (spec.num_kv_heads, "kv_heads"),
        },
    )
    step.check_mesh(program, mesh)


def fixed_text(config: Config, data: Mixture) -> np.ndarray:
    """The ids of the fixed_seq_qk text: the configured file's, or the training split's first."""
    if config.data.fixed_text is None:
        return first_tokens(data.sources[0].dataset, config.max_len)
    path = pathlib.Path(config.data.fixed_text).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"data.fixed_text={path} does not read as UTF-8 text: {error}") from error
    ids = data.tokenizer.with_start(data.tokenizer.encode(text))
    if len(ids) < config.max_len:
        raise ValueError(
            f"data.fixed_text={path} has {len(ids)} tokens and max_len={config.max_len} are needed"
        )
    return ids[: config.max_len]
