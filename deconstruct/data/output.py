"""The output directory while it is written: whose it is, and what it is made with."""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from deconstruct import lock
from deconstruct.data import prepared

_LOCK_FILE = ".lock"


def differences(there: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The keys at which two configs differ, with both values; empty where there are none."""
    return "; ".join(
        f"{key} {there.get(key)} there, {now.get(key)} now"
        for key in sorted(there.keys() | now.keys())
        if there.get(key) != now.get(key)
    )


def refuse_other_settings(
    output: str | pathlib.Path, there: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
    """Raises ValueError, with the differences, for data made with other settings than `now`."""
    if there.get("format_version") != now["format_version"]:
        raise ValueError(
            f"output {output} is of format {there.get('format_version')}, this version makes "
            f"{now['format_version']}; name another directory, or remove this one. Training still "
            "reads finished data of any format: name it as data.path, without data.prepare_source"
        )
    different = differences(there, now)
    if different:
        raise ValueError(
            f"output {output} was made with other settings: {different}. Name another directory, "
            "or remove this one"
        )


def refuse_foreign(output: pathlib.Path) -> None:
    """Refuses a directory with files in it that no preparation put there, before touching it."""
    if not output.is_dir() or (output / prepared.SETTINGS_FILE).is_file():
        return
    own = {prepared.UNITS_FOLDER, _LOCK_FILE}
    own |= {path.name for path in output.glob(f"{prepared.SETTINGS_FILE}.*.partial")}
    foreign = {path.name for path in output.iterdir()} - own
    if foreign:
        raise ValueError(
            f"output {output} holds other files, such as {min(foreign)}; name a new directory"
        )


@contextlib.contextmanager
def sole_writer(output: pathlib.Path) -> Iterator[None]:
    """Holds the output directory for this process; waits while another one does."""
    try:
        (output / prepared.UNITS_FOLDER).mkdir(parents=True, exist_ok=True)
        open(output / _LOCK_FILE, "a").close()
    except OSError as error:
        raise ValueError(f"output {output} cannot be written ({error})") from error
    busy = f"another process prepares {output}: waiting for its end"
    try:
        with lock.held(output / _LOCK_FILE, busy=busy, wait=True):
            yield
    except OSError as error:  # a full disk, most often
        raise ValueError(
            f"preparing {output} stopped ({error}); run the same command again to go on"
        ) from error


def claim(output: pathlib.Path, config: Mapping[str, Any]) -> None:
    """Marks the output directory as made with `config`, or refuses one made with another."""
    settings_path = output / prepared.SETTINGS_FILE
    if not settings_path.is_file():
        prepared.write_json(settings_path, config)
    existing = prepared.read_json(settings_path, f"remove {output} and prepare it again")
    if existing == config:
        return
    if any((output / prepared.UNITS_FOLDER).iterdir()):
        refuse_other_settings(output, existing, config)
    (output / prepared.TOKENIZER_FILE).unlink(missing_ok=True)
    prepared.write_json(settings_path, config)  # nothing was finished with the others
