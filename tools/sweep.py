"""Trains one config with many mixers and plans, and tables their losses at equal steps.

    python -m tools.sweep --config=configs/quickstart.py --workdir=runs/sweep \\
        --mixers=approximate,mlp --plans=uniform,even --output=losses.md

Each run is a process of its own in WORKDIR/MIXER-PLAN. Run again, it resumes what was stopped and
leaves what is finished; `standard` is trained once, uniform.
"""

import json
import pathlib
import subprocess
import sys

from absl import flags

from deconstruct import entry
from deconstruct import spec as spec_lib

_CONFIG = flags.DEFINE_string("config", None, "config file, as for training")
_WORKDIR = flags.DEFINE_string("workdir", None, "directory that holds the runs")
_MIXERS = flags.DEFINE_list("mixers", None, "simple mixers; all when left out")
_PLANS = flags.DEFINE_list("plans", ["uniform", "even"], "plans for each of them")
_SET = flags.DEFINE_multi_string("set", [], "KEY=VALUE of the config, for all runs; repeatable")
_OUTPUT = flags.DEFINE_string(
    "output", None, "Markdown file for the table, which is printed in any case"
)


def main(argv) -> None:
    del argv
    for name, flag in (("config", _CONFIG), ("workdir", _WORKDIR)):
        if flag.value is None:
            raise ValueError(f"--{name} is missing")
    from deconstruct.mixers import MIXERS

    simple = [name for name in MIXERS if name != spec_lib.STANDARD]
    chosen = simple if _MIXERS.value is None else _MIXERS.value
    for name in chosen:
        for part in name.split("+"):
            if part not in simple:
                raise ValueError(spec_lib.unknown_name("mixer", part, simple))
    for plan in _PLANS.value:
        if plan not in spec_lib.PLANS:
            raise ValueError(spec_lib.unknown_name("plan", plan, spec_lib.PLANS))
    output = None if _OUTPUT.value is None else pathlib.Path(_OUTPUT.value).expanduser()
    if output is not None:
        _check_writable(output)
    cases = [(spec_lib.STANDARD, "uniform")]
    cases += [(mixer, plan) for plan in _PLANS.value for mixer in chosen]
    folder = pathlib.Path(_WORKDIR.value)
    for mixer, plan in cases:
        _train(mixer, plan, folder / f"{mixer}-{plan}")
    table = _table(cases, folder)
    print(table)
    if output is not None:
        output.write_text(table + "\n")


def _check_writable(path: pathlib.Path) -> None:
    """Makes the file's folder, and an empty file where none is, before the runs and not after."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise ValueError(f"--output={path} cannot be written: {error.strerror}") from error


def _train(mixer: str, plan: str, workdir: pathlib.Path) -> None:
    print(f"== {mixer}, {plan}", flush=True)
    settings = [f"model.mixer={mixer}", f"model.plan={plan}", *_SET.value]
    command = [sys.executable, "-m", "deconstruct.train"]
    command += [f"--config={_CONFIG.value}", f"--workdir={workdir}"]
    command += [f"--config.{setting}" for setting in settings]
    done = subprocess.run(command)
    if done.returncode:
        raise ValueError(f"the run of {mixer}, {plan} failed; its message is above")


def _table(cases, folder: pathlib.Path) -> str:
    """A Markdown table: validation loss of each case at every step at which all have one."""
    losses = {}
    for mixer, plan in cases:
        lines = (folder / f"{mixer}-{plan}" / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        losses[mixer, plan] = {
            r["step"]: float(r["loss"]) for r in records if r["kind"] == "validation"
        }
    steps = sorted(set.intersection(*(set(by_step) for by_step in losses.values())))
    rows = [
        f"| {mixer} | {plan} | " + " | ".join(f"{by_step[step]:.3f}" for step in steps) + " |"
        for (mixer, plan), by_step in losses.items()
    ]
    head = "| mixer | plan | " + " | ".join(f"step {step}" for step in steps) + " |"
    return "\n".join([head, "|---|---|" + "---:|" * len(steps), *rows])


if __name__ == "__main__":
    entry.run(main)
