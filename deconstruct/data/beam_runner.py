"""Units run by Apache Beam: on this machine, or on a Dataflow, Flink or Spark cluster.

Beam needs older versions of packages than the rest does, and so an environment of its own, with
requirements-beam.txt alone. Its workers read the source and write the output directory themselves:
both must lie at the same path on every one of them, such as on a shared disk or a mounted bucket.
"""

import dataclasses
import importlib.util
import os
import re
from collections.abc import Sequence

from deconstruct.data import prepared, units

_REASON = re.compile(r"(?:ValueError|OSError): ([^\n]*)")  # in a worker's traceback
_WHERE_IN_BEAM = re.compile(r" \[while running [^\]]*\].*", re.DOTALL)


def require() -> None:
    """Raises ValueError, with the remedy, where Beam is not installed."""
    if importlib.util.find_spec("apache_beam") is None:
        raise ValueError(
            "runner beam needs Apache Beam, which is not installed; in an environment of its own, "
            "pip install -r requirements-beam.txt"
        )


def run(
    pending: Sequence[units.Unit], options: Sequence[str]
) -> dict[int, dict[str, prepared.ShardInfo]]:
    """Prepares units: index -> counts by split.

    Args:
      pending: what to do; a unit that Beam runs twice, even at the same time, does no harm.
      options: Beam's own pipeline options, such as `--runner=DataflowRunner`.

    Raises:
      ValueError: its pipeline failed, or its workers wrote elsewhere.
    """
    if not pending:  # only the record of the whole was lost: nothing for a cluster to do
        return {}
    import apache_beam as beam
    from apache_beam.options import pipeline_options

    try:
        with beam.Pipeline(options=pipeline_options.PipelineOptions(list(options))) as pipeline:
            _ = (
                pipeline
                | beam.Create([_anywhere(u) for u in pending])
                | beam.Map(units.prepare_unit)
            )
    except Exception as error:  # each of Beam's runners has errors of its own
        reason = _WHERE_IN_BEAM.sub("", (_REASON.findall(str(error)) or [str(error)])[-1])
        raise ValueError(f"the Beam pipeline failed: {reason}; finished units are kept") from error
    done = {unit.index: units.finished(unit) for unit in pending}
    missing = [unit for unit in pending if done[unit.index] is None]
    if missing:
        raise ValueError(
            f"Beam's workers are done, but {missing[0].counts_path} and {len(missing) - 1} more "
            "are not there; the output must be one directory that all workers and this process see"
        )
    return done


def _anywhere(unit: units.Unit) -> units.Unit:
    """`unit` for a process in another working directory."""
    files = tuple(dataclasses.replace(f, path=os.path.abspath(f.path)) for f in unit.files)
    return dataclasses.replace(unit, files=files, output=os.path.abspath(unit.output))
