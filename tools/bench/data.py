"""The way of text to the train step: `python -m tools.bench data`, in four parts.

`prepare`: the unit of preparation (read .jsonl.zst, tokenize, pack, write ArrayRecord) against bare
`tokenizers` on the same texts and cores, taking turns; `ratio` is the library's median time over
ours, so 1 is as fast. Bare is `encode_batch` of 1,024 documents at a time that lie in memory, and
keeps the lists of ids. `ratio_to_fast` compares with its `encode_batch_fast`. Ours loads the
tokenizer in each turn. Starting processes and imports are not measured on either side.
`memory`: peak resident memory of a unit that is one enormous document.
`load`: the loader alone, from one source and from a mixture of as many as SlimPajama has sets.
`wait`: how long the training loop of the quickstart waits for batches.
"""

import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from fractions import Fraction

from absl import flags

from configs import quickstart
from deconstruct import config as config_lib
from deconstruct.data import prepare, sets
from deconstruct.data.dataset import PreparedDataset, open_dataset
from deconstruct.data.mixture import alone, open_mixture
from tools.bench import corpus, machine, preparing

PARTS = ("prepare", "memory", "load", "wait")
LARGE, SMALL = 5_000_000, 1_000_000  # characters of enormous documents

_PARTS = flags.DEFINE_multi_enum("part", list(PARTS), PARTS, "what to measure")
_SOURCE = flags.DEFINE_string("source", "wiki_leads", "texts, as `prepare` takes them")
_TOKENIZER = flags.DEFINE_string("tokenizer", "bpe:8192", "as `prepare` takes it")
_TEXT_BYTES = flags.DEFINE_integer("text_bytes", 16_000_000, "of the source, used at most")
_MAX_LEN = flags.DEFINE_integer("max_len", 2048, "tokens of a row, but in part wait")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "rows of a batch, but in part wait")
_CORES = flags.DEFINE_multi_integer(
    "num_cores", sorted({1, os.cpu_count() or 1}), "cores of each side in part prepare"
)
_WORKERS = flags.DEFINE_multi_integer("num_workers", [0, 1, 2], "of the loader")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "turns of each side that count", lower_bound=1)
_BATCHES = flags.DEFINE_integer("batches", 1000, "batches a turn of part load", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 50, "train steps of part wait", lower_bound=1)


def main(argv) -> None:
    del argv
    texts = corpus.read_texts(_SOURCE.value, _TEXT_BYTES.value)
    with tempfile.TemporaryDirectory() as folder:
        for line in measure(texts, pathlib.Path(folder)):
            print(json.dumps({"benchmark": "data", **line, **machine.setting()}), flush=True)


def measure(texts: list[str], folder: pathlib.Path) -> Iterator[dict]:
    """The lines of all parts that are asked for."""
    tokenizer = corpus.load_tokenizer(_TOKENIZER.value, texts)
    path = folder / "tokenizer.json"
    tokenizer.save(path)
    common = {
        "source": _SOURCE.value,
        "tokenizer": _TOKENIZER.value,
        "text_mb": round(corpus.num_bytes(texts) / preparing.MEGABYTE, 2),
    }
    parts = {
        "prepare": lambda: _prepare_lines(texts, folder, str(path)),
        "memory": lambda: _memory_lines(texts, folder, str(path)),
        "load": lambda: _load_lines(texts, folder, path),
        "wait": lambda: _wait_lines(texts, folder, path),
    }
    for part in dict.fromkeys(_PARTS.value):
        for line in parts[part]():
            yield {"part": part, **common, **line}


def _prepare_lines(texts: list[str], folder: pathlib.Path, tokenizer: str) -> Iterator[dict]:
    megabytes = corpus.num_bytes(texts) / preparing.MEGABYTE
    for num_cores in _CORES.value:
        files = corpus.write_files(folder / f"for_{num_cores}", texts, num_cores)
        whole = corpus.write_files(folder / "whole", texts, 1)
        for one_unit in (False, True) if num_cores > 1 else (False,):
            found = preparing.speed(
                whole if one_unit else files,
                tokenizer,
                max_len=_MAX_LEN.value,
                cores=num_cores,
                one_unit=one_unit,
                rounds=_ROUNDS.value,
            )
            speeds = {
                f"{side}_mb_per_second": round(megabytes / found.pop(f"{side}_seconds"), 2)
                for side in ("ours", "bare", "bare_fast")
            }
            yield {"num_cores": num_cores, **found, **speeds}


def _memory_lines(texts: list[str], folder: pathlib.Path, tokenizer: str) -> Iterator[dict]:
    for name, documents in corpus.awkward(texts, LARGE, SMALL).items():
        yield {
            "case": name,
            **preparing.memory(documents, folder / name, tokenizer, max_len=_MAX_LEN.value),
        }


def _load_lines(texts: list[str], folder: pathlib.Path, tokenizer: pathlib.Path) -> list[dict]:
    from tools.bench import loading  # JAX, once processes that need none are done

    dataset = _prepared(texts, folder, tokenizer, _MAX_LEN.value)
    copies = [folder / f"set_{number}" for number in range(len(sets.NAMES))]
    for copy in copies:
        shutil.copytree(dataset.path, copy)
    mixed = open_mixture([(str(copy), Fraction(k + 1)) for k, copy in enumerate(copies)])
    return loading.speed(
        [alone(dataset), mixed],
        batch_size=_BATCH_SIZE.value,
        num_workers=_WORKERS.value,
        rounds=_ROUNDS.value,
        batches=_BATCHES.value,
    )


def _wait_lines(texts: list[str], folder: pathlib.Path, tokenizer: pathlib.Path) -> Iterator[dict]:
    from tools.bench import loading

    config = config_lib.parse(quickstart.get_config())
    dataset = _prepared(texts, folder, tokenizer, config.max_len)
    for num_workers in _WORKERS.value:
        yield loading.waiting(dataset, config, num_workers=num_workers, steps=_STEPS.value)


def _prepared(
    texts: list[str], folder: pathlib.Path, tokenizer: pathlib.Path, max_len: int
) -> PreparedDataset:
    source, output = folder / f"source_{max_len}", folder / f"prepared_{max_len}"
    corpus.write_files(source, texts, 1)
    prepare.prepare(
        prepare.PrepareSettings(str(source), str(tokenizer), max_len, str(output)), progress=False
    )
    return open_dataset(output)
