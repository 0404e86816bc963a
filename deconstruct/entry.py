"""How a command begins and ends: flags and config at the door, errors on one line.

A user's mistake is one line and a non-zero exit; only a bug of ours shows a traceback. Nothing here
imports JAX, so that a wrong key is refused before the slow imports.
"""

import functools
import os
import pathlib
import re
import sys
from collections.abc import Callable

from absl import app, flags, logging
from ml_collections import config_flags

from deconstruct import config as config_lib

_CONFIG_FLAG = "config"
_OVERRIDE = re.compile(r"--?config\.([\w.]+)(?:=(.*))?", re.DOTALL)
_MISSING_KEY = re.compile(r'Key "(\w+)" does not exist')
_MISSING_GROUP = re.compile(r"""["'\\]+(\w+)["'\\]+($|\s|\\n)""")
HELP = ("--help", "-help", "--helpshort", "--helpfull", "-h", "-?")


def one_line_errors(main: Callable) -> Callable:
    """`main` with its ValueErrors printed as one line; `-v=1` shows the traceback as well."""

    @functools.wraps(main)
    def wrapped(argv):
        if argv[1:]:
            return _fail(f"unknown argument {argv[1]!r}; flags begin with --")
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)  # libraries narrate their reads and writes
        try:
            return main(argv)
        except KeyboardInterrupt:
            return _fail("stopped by Ctrl-C")
        except ValueError as error:
            logging.vlog(1, "traceback of the error below", exc_info=True)
            return _fail(str(error))

    return wrapped


def define_config_flag():
    """The `--config=FILE.py[:ARGUMENT]` flag with its `--config.KEY=VALUE` overrides."""
    return config_flags.DEFINE_config_file(
        _CONFIG_FLAG, None, "config file, its argument after a colon; --config.KEY=VALUE overrides"
    )


def run(main: Callable) -> None:
    """`absl.app.run` with every error of flags and config file as one line."""
    app.run(one_line_errors(main), flags_parser=parse_flags)


def parse_flags(args: list[str]) -> list[str]:
    """absl's flag parser. `None` is a value of any optional config key.

    Exits with status 1 and one line for an unknown flag or key, a value that does not parse, or a
    config file that does not load.
    """
    if any(arg in HELP for arg in args):
        app.usage(shorthelp="--helpfull" not in args, writeto_stdout=True, exitcode=0)
    args, unset, seen, file = list(args), [], set(), None
    try:
        for place, arg in enumerate(args[1:], start=1):
            override = _OVERRIDE.fullmatch(arg)
            if override is None:
                if found := _config_file(arg):
                    args[place], file = found
                continue
            key, value = override.groups()
            hint = config_lib.key_type(key)
            if key in seen:
                raise ValueError(f"config key {key!r} is given twice; give it once")
            seen.add(key)
            if value == "None" or (value == "none" and hint is not str):
                config_lib.check_optional(key, hint)
                unset.append((arg, key))
        remaining = flags.FLAGS([arg for arg in args if arg not in dict(unset)])
        if _CONFIG_FLAG in flags.FLAGS:
            _touch_config(flags.FLAGS.config, [key for _, key in unset])
        return remaining
    except (flags.Error, ValueError, AttributeError, TypeError, OSError, SyntaxError) as error:
        sys.exit(_fail(_explain(error, file)))


def _touch_config(config, unset: list[str]) -> None:
    """Sets keys to None; a file that did not load raises only here, when it is touched."""
    if isinstance(config, str | None):  # a command that hands the file on, or none given
        return
    config.keys()
    for key in unset:
        config.update_from_flattened_dict({key: None})


def _config_file(arg: str) -> tuple[str, pathlib.Path] | None:
    """(the argument with `~` resolved, its file) where `arg` names a config file.

    Raises:
      ValueError: there is no such file.
    """
    name, given, value = arg.lstrip("-").partition("=")
    if name != _CONFIG_FLAG or not given:
        return None
    text, colon, argument = value.partition(":")
    path = pathlib.Path(text).expanduser()
    if not path.is_file():
        beside = sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        found = f"; {path.parent} holds {', '.join(beside)}" if beside else ""
        raise ValueError(f"config file {path} does not exist{found}")
    return f"--{_CONFIG_FLAG}={path}{colon}{argument}", path


def _explain(error: Exception, file: pathlib.Path | None) -> str:
    """One sentence for what config files and their flags raise."""
    text = str(error)
    if missing := _MISSING_KEY.search(text):
        return f"{file}: {config_lib.unknown_key(missing[1])}"
    if isinstance(error, AttributeError) and (missing := _MISSING_GROUP.match(text)):
        return f"{file}: {config_lib.unknown_key(missing[1])}"
    if "Error whilst parsing config file" in text:
        lines = [line for line in text.strip().splitlines() if line.strip()]
        return f"{file}: {lines[-1].partition(': ')[2] or lines[-1]}"
    return text


def _fail(text: str) -> int:
    """Prints the line and closes stderr behind it, so that it is the last thing said.

    The threads of a failed save would go on with warnings of their own while the process ends.
    """
    sys.stderr.flush()
    terminal = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.write(terminal, f"error: {' '.join(text.split())}\n".encode())
    return 1
