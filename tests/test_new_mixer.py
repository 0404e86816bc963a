"""A mixer that joins the registry brings the whole property suite with it."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
from test_mixer_properties import BY_NAME

TESTS = pathlib.Path(__file__).resolve().parent


def run_suite(behaviour: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(TESTS), "EIGHTH_MIXER": behaviour}
    options = ["-p", "eighth_mixer", "-k", "softplus", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(TESTS / "test_mixer_properties.py")],
        env=env, cwd=TESTS.parent, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout


@pytest.mark.slow
def test_an_eighth_mixer_brings_the_suite_with_it():
    text = (TESTS / "test_mixer_properties.py").read_text()
    by_name = text.count("@BY_NAME")
    assert BY_NAME.args[0] == "name" and by_name > 8
    passed = re.search(r"(\d+) passed", run_suite("as it should"))
    assert passed and int(passed[1]) >= by_name


@pytest.mark.slow
def test_the_suite_catches_a_mixer_that_looks_ahead():
    assert re.search(r"\d+ failed", run_suite("looks ahead"))
