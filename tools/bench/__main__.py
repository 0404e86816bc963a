"""`python -m tools.bench NAME [--flags]`: runs one benchmark; `--help` after a name lists flags."""

import importlib
import sys

from absl import flags

from deconstruct import entry, host_memory

BENCHMARKS = {
    name: f"tools.bench.{name}"
    for name in ("train", "hybrids", "data", "evaluate", "kernels", "mixers", "fla")
}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in BENCHMARKS:
        known = ", ".join(BENCHMARKS)
        if name in entry.HELP:
            print(f"{__doc__} Benchmarks: {known}.")
            return
        sys.exit(f"error: no benchmark {name!r}; there are: {known}")
    del sys.argv[1]
    host_memory.keep_pages()  # as in training, before any module imports JAX
    module = importlib.import_module(BENCHMARKS[name])
    flags.adopt_module_key_flags(module)  # so that --help lists them
    entry.run(module.main)


if __name__ == "__main__":
    main()
