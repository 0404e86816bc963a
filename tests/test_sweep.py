"""`tools.sweep`: runs, the table, what a second call leaves and resumes, what is refused."""

import re
import shutil
import subprocess
import sys

import pytest
import tiny_run


def sweep(config, workdir, *flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tools.sweep", f"--config={config}", f"--workdir={workdir}"]
    return tiny_run.run_command([*command, *flags])


@pytest.mark.slow
def test_a_sweep_and_the_same_again(tmp_path):
    """Two runs; then one of them is finished, one lost its last step, and a third is new."""
    config = tiny_run.write_config(tmp_path, tiny_run.prepare_data(tmp_path))
    workdir, output = tmp_path / "runs", tmp_path / "not" / "there" / "losses.md"
    settings = ["num_steps=2", "checkpoint_every=1", "validate_every=1"]
    flags = [f"--set={setting}" for setting in settings] + [f"--output={output}"]
    done = sweep(config, workdir, "--mixers=mlp", "--plans=uniform", *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    first = output.read_text()
    number = r" \| (\d\.\d{3})"
    assert re.fullmatch(
        r"\| mixer \| plan \| step 1 \| step 2 \|\n\|---\|---\|---:\|---:\|\n"
        rf"\| standard \| uniform{number}{number} \|\n\| mlp \| uniform{number}{number} \|\n",
        first,
    )
    assert done.stdout.endswith(first)
    names = ["standard-uniform", "mlp-uniform"]
    facts = {name: tiny_run.facts(workdir / name) for name in names}
    finished = (workdir / "standard-uniform" / "metrics.jsonl").stat().st_mtime_ns
    shutil.rmtree(workdir / "mlp-uniform" / "checkpoints" / "2")
    done = sweep(config, workdir, "--mixers=mlp,approximate", "--plans=uniform", *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    standard, mlp, approximate = done.stdout.split("== ")[1:]
    assert "nothing is left to train" in standard
    assert "resuming from step 1" in mlp
    assert "starting from step 0" in approximate
    assert (workdir / "standard-uniform" / "metrics.jsonl").stat().st_mtime_ns == finished
    assert {name: tiny_run.facts(workdir / name) for name in names} == facts
    assert output.read_text().startswith(first) and "| approximate | uniform |" in approximate


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--mixers=mpl"], "did you mean 'mlp'?"),
        (["--plans=uniform,evne"], "did you mean 'even'?"),
        (["--output={folder}"], "cannot be written: Is a directory"),
        (["--output={folder}/file/losses.md"], "cannot be written: "),
    ],
)
def test_what_cannot_be_is_refused_before_any_run(tmp_path, flags, said):
    (tmp_path / "file").touch()
    flags = [flag.format(folder=tmp_path) for flag in flags]
    config = tmp_path / "config.py"
    config.write_text("def get_config(): raise ValueError('a run began')\n")
    done = sweep(config, tmp_path / "runs", *flags)
    assert done.returncode == 1 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and said in line
    assert not (tmp_path / "runs").exists()
