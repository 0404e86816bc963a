"""The benchmarks' documents: from a folder, or from the Hugging Face hub into one.

    python -m deconstruct.evaluate.data --output=DIR [--tasks=arc_easy,piqa]

A folder holds DIR/TASK/SPLIT.jsonl or .jsonl.gz, one JSON object a line as the hub has it, such as

    {"goal": "...", "sol1": "...", "sol2": "...", "label": 0}

in DIR/piqa/validation.jsonl; which fields a task reads stands in `tasks.py` (`Source`), others are
not read. The number of documents and a hash of those fields say
whether they are the official ones. No code of a data set is ever run.
"""

import gzip
import hashlib
import json
import logging
import pathlib
from collections.abc import Iterable, Iterator, Sequence

from absl import flags

from deconstruct import entry
from deconstruct import spec as spec_lib
from deconstruct.evaluate.tasks import ALL, TASKS, Document, Source, Task, check

FETCH = "python -m deconstruct.evaluate.data --output=DIR"
_SUFFIXES = (".jsonl", ".jsonl.gz")
_log = logging.getLogger(__name__)

if __name__ == "__main__":  # the evaluation's own command has a --tasks and an --output as well
    _OUTPUT = flags.DEFINE_string("output", None, "folder to write; what is there stays")
    _TASKS = flags.DEFINE_list("tasks", list(TASKS), "which")
    _REVISION = flags.DEFINE_string("revision", "main", "branch, tag or commit of the data sets")


def names_of(asked: Sequence[str]) -> tuple[str, ...]:
    """The tasks asked for, `all` spelled out, each once; ValueError with the nearest name."""
    names = [name for ask in asked for name in (ALL if ask == "all" else [ask])]
    if not names:
        raise ValueError("--tasks is empty: name some, or all")
    for name in names:
        if name not in TASKS:
            raise ValueError(spec_lib.unknown_name("task", name, [*TASKS, "all"]))
    return tuple(dict.fromkeys(names))


def read(data_dir: str, names: Iterable[str]) -> dict[str, list[Document]]:
    """Task -> its documents, in order; warns of those that are not the official ones.

    Raises:
      ValueError: files that are missing (all are named at once), or a line that is no document.
    """
    folder = pathlib.Path(data_dir).expanduser()
    paths = {name: _find(folder, name) for name in names}
    missing = [name for name, path in paths.items() if path is None]
    if missing:
        wanted = ", ".join(f"{name}/{TASKS[name].source.split}.jsonl" for name in missing)
        raise ValueError(
            f"--data_dir={data_dir} lacks {wanted} (or .jsonl.gz): put them there, or fetch them "
            f"with {FETCH} --tasks={','.join(missing)}"
        )
    found = {name: list(_documents(path, TASKS[name])) for name, path in paths.items()}
    for name, documents in found.items():
        source = TASKS[name].source
        if sha256_of(documents, source) != source.sha256:
            _log.warning(
                "%s holds %d documents that are not the %d official ones: its figures compare with "
                "no others",
                paths[name],
                len(documents),
                source.count,
            )
    return found


def sha256_of(documents: Iterable[Document], source: Source) -> str:
    """A hash of the documents' fields, in order, whatever file they came from."""
    digest = hashlib.sha256()
    for document in documents:
        values = [document[field] for field in source.fields]
        digest.update(json.dumps(values, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def _find(folder: pathlib.Path, name: str) -> pathlib.Path | None:
    paths = [folder / name / f"{TASKS[name].source.split}{suffix}" for suffix in _SUFFIXES]
    return next((path for path in paths if path.is_file()), None)


def _documents(path: pathlib.Path, task: Task) -> Iterator[Document]:
    fields, done = task.source.fields, 0
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        try:
            for line in file:
                content = json.loads(line)
                document = {field: content[field] for field in fields}
                check(task, document)
                yield document
                done += 1
        except (OSError, EOFError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}, line {done + 1}: no document with the fields {', '.join(fields)}, whole "
                f"and with its answer ({error!r})"
            ) from error
    if done == 0:
        raise ValueError(f"{path} is empty; fetch it again with {FETCH}")


def fetch(output: str, names: Sequence[str], revision: str = "main") -> None:
    """Writes the tasks' documents below `output`, from the Hugging Face hub; skips those there.

    Raises:
      ValueError: the hub does not give them, or gives others than the official ones.
    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            "fetching needs the package datasets: pip install -r requirements-evaluate.txt"
        ) from error
    folder = pathlib.Path(output).expanduser()
    for name in names:
        if _find(folder, name) is not None:
            continue
        source = TASKS[name].source
        dataset, _, configuration = source.dataset.partition(":")
        try:
            rows = datasets.load_dataset(
                dataset, configuration or None, split=source.split, revision=revision
            )
        except Exception as error:  # whatever the network, the hub and Arrow raise
            raise ValueError(
                f"the hub did not give {source.dataset} at {revision}: {error}. Where there is no "
                f"network, put {name}/{source.split}.jsonl into --data_dir by hand"
            ) from error
        documents = [{field: row[field] for field in source.fields} for row in rows]
        if sha256_of(documents, source) != source.sha256:
            raise ValueError(
                f"{source.dataset} at {revision} gives {len(documents)} documents that are not the "
                f"official {source.count}: name another --revision"
            )
        path = folder / name / f"{source.split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        lines = (json.dumps(document, ensure_ascii=False) + "\n" for document in documents)
        partial.write_text("".join(lines), encoding="utf-8")
        partial.rename(path)
        print(f"{path}: {len(documents)} documents")


def main(argv) -> None:
    del argv
    if _OUTPUT.value is None:
        raise ValueError("--output is missing: name the folder to write")
    fetch(_OUTPUT.value, names_of(_TASKS.value), _REVISION.value)


if __name__ == "__main__":
    entry.run(main)
