"""Settings that every test shares: strict JAX, CPU, and the optional corpus beside the checkout."""

import os
import pathlib
import shutil
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests compile far longer than they compute: half the time goes without LLVM's costly passes. In
# the environment, so that the processes that tests start compile the very same code.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import pytest

try:
    import jax
except ImportError:  # in the environment of requirements-beam.txt, which prepares data alone
    pass
else:
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_threefry_partitionable", True)

# Commands that tests start compile the same few programs again and again: half of a tiny run. Those
# of one worker share what they compiled (JAX writes without a lock); JAX, which was imported above,
# reads this for them alone.
_COMPILED = "DECONSTRUCT_TESTS_COMPILED"
_begins = _COMPILED not in os.environ  # a worker finds the folder that its parent made
if _begins:
    os.environ[_COMPILED] = tempfile.mkdtemp(prefix="deconstruct-compiled-")
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(
    os.environ[_COMPILED], os.environ.get("PYTEST_XDIST_WORKER", "main")
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"


def pytest_unconfigure():
    if _begins:
        shutil.rmtree(os.environ[_COMPILED], ignore_errors=True)


@pytest.fixture(scope="session")
def shared_dir() -> pathlib.Path:
    """The folder of corpora and evaluation data that some machines have; skips without it."""
    default = pathlib.Path(__file__).resolve().parents[2] / "shared"
    path = pathlib.Path(os.environ.get("DECONSTRUCT_SHARED", default))
    if not (path / "corpus").is_dir():
        pytest.skip(f"{path}/corpus is absent; set DECONSTRUCT_SHARED to run this test")
    return path


@pytest.fixture(scope="session")
def evaldata(shared_dir) -> pathlib.Path:
    """The benchmarks' documents; skips without them."""
    path = shared_dir / "evaldata"
    if not path.is_dir():
        pytest.skip(f"{path} is absent; set DECONSTRUCT_SHARED to run this test")
    return path


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory) -> pathlib.Path:
    """A run's directory: two steps of a tiny hybrid, `non_approximate` before `standard`."""
    import tiny_run

    from deconstruct import run

    folder = tmp_path_factory.mktemp("trained")
    config = tiny_run.write_config(folder, tiny_run.prepare_data(folder))
    run.train(tiny_run.load_config(config, num_steps=2), str(folder / "run"))
    return folder / "run"
