"""Small texts, and data prepared from them, for the tests of the tokenizer and the data."""

import json
import pathlib
import random

import zstandard

from deconstruct.data import prepare

VOCABULARY = (
    "water stone river bright follow garden winter people number letter window morning paper "
    "machine silver quiet simple answer question ocean market village history animal"
)
WORDS = VOCABULARY.split()


def text(num_words: int, seed: int = 0) -> str:
    """Words with commas, digits and newlines between them; the same for the same seed."""
    rng = random.Random(seed)
    words = [
        rng.choice(WORDS) + rng.choice(["", "", "", "", ",", ".\n", " 12", "\n\n", "  "])
        for _ in range(num_words)
    ]
    return " ".join(words)


def texts(count: int, seed: int = 0) -> list[str]:
    """Documents of 1 to 300 words, all different."""
    rng = random.Random(seed)
    return [
        f"{i} " + text(rng.choice([1, 5, 20, 60, 300]), seed=1000 * seed + i) for i in range(count)
    ]


def write_jsonl(path: pathlib.Path, documents: list[str]) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return path


def write_source(folder: pathlib.Path, num_files: int = 3, documents: int = 40) -> pathlib.Path:
    """A folder of .jsonl files without splits."""
    for i in range(num_files):
        write_jsonl(folder / f"part_{i}.jsonl", texts(documents, seed=i))
    return folder


SETS = ("RedPajamaBook", "RedPajamaC4", "RedPajamaWikipedia")


def slimpajama_rows(documents: list[str]) -> list[dict]:
    """Rows as SlimPajama has them, of each set in turn."""
    return [
        {"text": text, "meta": {"redpajama_set_name": SETS[i % len(SETS)]}}
        for i, text in enumerate(documents)
    ]


def write_slimpajama(folder: pathlib.Path, documents: int = 12) -> pathlib.Path:
    """A folder in SlimPajama's layout: 2 chunks of 2 small files, and one file held out twice."""
    names = [f"train/chunk{chunk}/example_train_{i}" for chunk in (1, 2) for i in (0, 1)]
    names += [f"{split}/chunk1/example_holdout_0" for split in ("validation", "test")]
    for seed, name in enumerate(names):
        rows = slimpajama_rows(texts(documents, seed=seed))
        path = folder / f"{name}.jsonl.zst"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_bytes(zstandard.compress(lines.encode()))
    return folder


def settings(source: pathlib.Path, output: pathlib.Path, **changes) -> prepare.PrepareSettings:
    """Units of one file each, rows of 33 ids, a tenth held out, one process."""
    values = {
        "source": str(source),
        "tokenizer": "bpe:300",
        "max_len": 32,
        "output": str(output),
        "validation_share": 0.1,
        "unit_bytes": 1,
        "num_processes": 1,
    }
    return prepare.PrepareSettings(**values | changes)
