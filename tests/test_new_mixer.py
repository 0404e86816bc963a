"""A mixer that joins the registry brings the whole property suite with it."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).resolve().parent


def run_suite(behaviour: str, *selected: str) -> str:
    """Output of the tests that are selected, with the eighth mixer beside the others."""
    env = {**os.environ, "PYTHONPATH": str(TESTS), "EIGHTH_MIXER": behaviour, "COLUMNS": "400"}
    options = ["-p", "eighth_mixer", "-k", "softplus", "-p", "no:cacheprovider", "-rfs", "--tb=no"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(str(TESTS / name) for name in selected)],
        env=env, cwd=TESTS.parent, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout


def count(output: str, outcome: str) -> int:
    found = re.search(rf"(\d+) {outcome}", output)
    return int(found[1]) if found else 0


@pytest.mark.slow
def test_an_eighth_mixer_brings_the_suite_with_it():
    """Its properties, eight devices against one, and its FLOPs against the compiler's."""
    output = run_suite("as it should", "test_mixer_properties.py", "test_step.py", "test_flops.py")
    by_name = sum(
        (TESTS / file).read_text().count(line)
        for file, line in (
            ("test_mixer_properties.py", "@BY_NAME\n"),
            ("test_step.py", '@pytest.mark.parametrize("name", sorted(MIXERS))\n'),
            ("test_flops.py", '@pytest.mark.parametrize("name", MIXERS)\n'),
        )
    )
    assert by_name > 8 + 1 + 3
    assert count(output, "passed") >= by_name and not count(output, "failed"), output


@pytest.mark.slow
@pytest.mark.parametrize(
    "behaviour, selected",
    [
        (
            "looks ahead",
            "test_mixer_properties.py::test_no_gradient_from_the_future_or_another_document",
        ),
        ("grows with the devices", "test_step.py::test_eight_devices_equal_one"),
        ("counts half its FLOPs", "test_flops.py::test_flops_agree_with_the_compiler"),
    ],
)
def test_the_suite_catches_a_mixer_that(behaviour, selected):
    output = run_suite(behaviour, selected)
    assert count(output, "failed"), output


@pytest.mark.slow
def test_what_only_its_author_can_add_is_said_in_one_line():
    """Equations that do not come from its own definition, and losses to be kept."""
    output = run_suite("as it should", "test_against_oracle.py", "test_losses.py")
    failures = [line for line in output.splitlines() if line.startswith("FAILED")]
    assert [re.search(r"::(\w+)", line)[1] for line in failures] == ["test_first_losses"], output
    assert "run DECONSTRUCT_WRITE_GOLDENS=1 python -m pytest tests/test_losses.py" in output
    assert "see test_the_oracle_has_every_mixer" in output
