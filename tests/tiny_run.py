"""A training run small enough for tests: made-up text, width 32, three seconds to compile."""

import json
import pathlib
import subprocess
import sys

import data_corpus
import devices

from deconstruct import config as config_lib
from deconstruct.data import prepare

ROOT = pathlib.Path(__file__).resolve().parents[1]
MAX_LEN = 32

CONFIG_FILE = '''
"""A tiny run for tests; the argument is `mixer,plan`."""

from deconstruct import config as config_lib


def get_config(arg="non_approximate,even"):
    config = config_lib.default()
    mixer, plan = arg.split(",")
    config.num_steps, config.batch_size, config.max_len = 12, 4, {max_len}
    config.learning_rate = 3e-3
    config.checkpoint_every, config.validate_every, config.log_every = 4, 4, 1
    config.data.path = {data!r}
    config.data.validation_rows = 4
    config.model.num_layers, config.model.model_dim = 2, 32
    config.model.feed_forward_dim, config.model.num_heads = 48, 4
    config.model.mixer, config.model.plan = mixer, plan
    config.optimizer.warmup_steps, config.optimizer.schedule_steps = 5, 20
    config.log.diagnose_every = 6
    return config
'''


def prepare_data(folder: pathlib.Path) -> pathlib.Path:
    """Prepared rows of `MAX_LEN` tokens below `folder`."""
    source = data_corpus.write_source(folder / "source", documents=60)
    settings = data_corpus.settings(source, folder / "data", max_len=MAX_LEN)
    prepare.prepare(settings, progress=False)
    return folder / "data"


def write_config(folder: pathlib.Path, data: pathlib.Path) -> pathlib.Path:
    path = folder / "tiny.py"
    path.write_text(CONFIG_FILE.format(data=str(data), max_len=MAX_LEN))
    return path


def load_config(path: pathlib.Path, arg="non_approximate,even", **overrides) -> config_lib.Config:
    """The config of `write_config`; overrides by dotted key, dots written as `__`."""
    namespace: dict = {}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    record = namespace["get_config"](arg)
    changes = {key.replace("__", "."): value for key, value in overrides.items()}
    record.update_from_flattened_dict(changes)
    return config_lib.parse(record)


def command(config: pathlib.Path | str, workdir: pathlib.Path | str, *flags: str) -> list[str]:
    given = [f"--config={config}", f"--workdir={workdir}", *flags]
    return [sys.executable, "-m", "deconstruct.train", *given]


def run_command(
    args: list[str], num_devices: int = 1, optimised: bool = False
) -> subprocess.CompletedProcess:
    """A command on so many CPU devices; optimised, the code that users run."""
    env = devices.environment(num_devices, optimised)
    return subprocess.run(args, cwd=ROOT, env=env, capture_output=True, text=True)


def records(workdir: pathlib.Path, kind: str | None = None) -> list[dict]:
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [record for record in found if kind is None or record["kind"] == kind]


def last_step(workdir: pathlib.Path) -> int:
    """The newest train step on record; 0 before any."""
    try:
        lines = (workdir / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return 0
    return max((json.loads(line)["step"] for line in lines), default=0)


# What depends on the machine's speed, not on the run.
TIMES = {"tokens_per_second", "positions_per_second", "mfu"}


def facts(workdir: pathlib.Path) -> list[dict]:
    """All records without their times: equal bit for bit between equal runs."""
    return [
        {key: value for key, value in record.items() if key not in TIMES}
        for record in records(workdir)
    ]
