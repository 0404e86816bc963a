"""The door to training: `python -m deconstruct.train --config=FILE.py[:ARGUMENT] --workdir=DIR`.

Run the same command again to resume. The config is parsed and checked here, before anything slow
is imported; what a run does is in `run.py`.
"""

import importlib.util

from absl import flags

from deconstruct import config as config_lib
from deconstruct import entry, host_memory

_CONFIG = entry.define_config_flag()
flags.declare_key_flag("config")
_WORKDIR = flags.DEFINE_string("workdir", None, "directory of the run; made when it is not there")
_ALLOW_CHANGE = flags.DEFINE_multi_string(
    "allow_change",
    [],
    "dotted key that may differ from the checkpoint's, such as config.learning_rate or "
    "data_fingerprint; repeat the flag for several",
)


def main(argv) -> None:
    del argv
    for name, value in (("config", _CONFIG.value), ("workdir", _WORKDIR.value)):
        if not value:
            raise ValueError(
                f"--{name} is missing; for example: python -m deconstruct.train "
                "--config=configs/quickstart.py --workdir=runs/quickstart"
            )
    config = config_lib.parse(_CONFIG.value)
    if runs_on_cpu(config.compute.platform):
        host_memory.keep_pages()
    from deconstruct import mixers  # JAX, once every key has passed

    mixers.resolve(config.model.build(config.max_len, vocab_size=1))
    from deconstruct import run  # all else, once the model has passed

    run.train(config, _WORKDIR.value, allow_change=_ALLOW_CHANGE.value)


def runs_on_cpu(platform: str) -> bool:
    """Whether JAX will compute on CPU, as far as can be told before it is imported."""
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm7_plugin", "libtpu")
    accelerated = any(importlib.util.find_spec(plugin) for plugin in plugins)
    return platform == "cpu" or (platform == "auto" and not accelerated)


if __name__ == "__main__":
    entry.run(main)
