"""What surrounds the code: requirements, the README's commands, the script that CI runs (I1)."""

import ast
import importlib.metadata
import os
import pathlib
import re
import resource
import subprocess
import sys

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Imported only where a setting or a command asks for it.
OPTIONAL = {"apache_beam", "datasets", "jax_triton", "lm_eval", "matplotlib", "triton", "wandb"}


def requirements(name: str) -> dict[str, Requirement]:
    """Canonical name -> requirement, of one file without those that it includes."""
    lines = (ROOT / f"{name}.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith(("#", "-r "))]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


def imported_packages(folder: pathlib.Path) -> set[str]:
    """Top-level names of all imports below `folder`, at any depth of the code."""
    names = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names - {"deconstruct"}


def test_every_import_is_required():
    distributions = importlib.metadata.packages_distributions()
    needed = imported_packages(ROOT / "deconstruct") - OPTIONAL
    assert {"jax", "orbax", "absl"} <= needed
    required = requirements("requirements").keys()
    missing = {
        name
        for name in needed
        if not required & {canonicalize_name(d) for d in distributions.get(name, [name])}
    }
    assert not missing


def test_the_base_has_no_second_framework():
    assert not requirements("requirements").keys() & {
        "tensorflow",
        "torch",
        "transformers",
        "wandb",
    }


@pytest.mark.parametrize("name", ["requirements-dev", "requirements-gpu", "requirements-tpu"])
def test_other_sets_build_on_the_base(name):
    assert "-r requirements.txt" in (ROOT / f"{name}.txt").read_text().splitlines()
    if name != "requirements-dev":
        jax, base = requirements(name)["jax"], requirements("requirements")["jax"]
        assert jax.specifier == base.specifier and jax.extras


def test_every_exact_version_or_cap_has_its_reason():
    """A line above it says why; all else is a lower bound."""
    for path in ROOT.glob("requirements*.txt"):
        lines = path.read_text().splitlines()
        for before, line in zip(["", *lines], lines, strict=False):
            if re.search(r"==|<|~=|!=", line) and not line.startswith("#"):
                assert before.startswith("#") or re.search(r"==", before), f"{path.name}: {line}"


def test_constraints_fit_the_requirements():
    versions = {name: r.specifier for name, r in requirements("constraints").items()}
    for name in ("requirements", "requirements-dev"):
        for package, requirement in requirements(name).items():
            (pin,) = versions[package]
            assert pin.operator == "==" and requirement.specifier.contains(pin.version)


def readme_commands() -> list[str]:
    text = (ROOT / "README.md").read_text()
    return [line.strip() for line in text.splitlines() if line.startswith("    ")]


def test_the_readme_begins_with_two_commands():
    train, test = readme_commands()[:2]
    fresh = "python3 -m venv .venv && . .venv/bin/activate && pip install -r requirements"
    assert train == (
        f"{fresh}.txt && python -m deconstruct.train --config=configs/quickstart.py "
        "--workdir=runs/quickstart"
    )
    assert test.startswith(f"{fresh}-dev.txt && python -m pytest")


def test_ci_runs_the_readmes_tests():
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert readme_commands()[1].rpartition(" && ")[2] in script
    assert script[0] == "#!/usr/bin/env bash" and "set -euo pipefail" in script
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_readme_names_files_that_are_there():
    text = (ROOT / "README.md").read_text()
    paths = re.findall(r"\b(?:configs|deconstruct|tools)/[\w./]+\.(?:py|md)", text)
    paths += re.findall(r"requirements(?:-\w+)?\.txt|constraints\.txt", text)
    assert len(paths) > 8
    for path in set(paths):
        assert (ROOT / path).is_file(), path
    for module in set(re.findall(r"python -m ((?:deconstruct|tools)\.[\w.]+)", text)):
        place = ROOT / module.replace(".", "/")
        assert any(path.is_file() for path in (place.with_suffix(".py"), place / "__main__.py"))


def test_import_is_quick_and_starts_no_backend():
    """4 s of processor time, most of it the libraries' (ml_dtypes alone takes 0.7).

    A platform that does not exist would fail any use of a device.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", "import deconstruct.run"],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "absent"},
        capture_output=True,
        text=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_utime - before.ru_utime < 4
