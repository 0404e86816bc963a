"""The corpus beside the checkout, where there is one: any runner gives the same, and loses nothing.

A chunk of its training files, and its held-out ones, unless DECONSTRUCT_WHOLE_CORPUS is 1:

    DECONSTRUCT_WHOLE_CORPUS=1 python -m pytest tests/test_data_shared_corpus.py -s
"""

import hashlib
import io
import json
import os
import pathlib
import re
import shutil
import time

import pytest
import tokenizers
import zstandard
from test_data_beam import MANY, needs_beam
from test_data_prepare import run_command

WHOLE = os.environ.get("DECONSTRUCT_WHOLE_CORPUS") == "1"
SOME = ("train/chunk1/example_train_0.jsonl.zst", "train/chunk2/example_train_3.jsonl.zst")
RUNNERS = {
    "one process": ["--num_processes=1"],
    "all cores": [],
    "beam": ["--runner=beam"],
    "beam of two processes": ["--runner=beam", f"--beam_options={MANY}"],
}


@pytest.fixture(scope="module")
def source(shared_dir, tmp_path_factory):
    """The whole corpus, or links to some of its files."""
    corpus = shared_dir / "corpus"
    if WHOLE:
        return corpus
    folder = tmp_path_factory.mktemp("some") / "corpus"
    for path in [corpus / name for name in SOME] + sorted(corpus.glob("[vt]*/chunk1/*holdout*")):
        link = folder / path.relative_to(corpus)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    return folder


@pytest.fixture(scope="module")
def tokenizer_file(shared_dir):
    return shared_dir / "corpus" / "tokenizers" / "20B_tokenizer.json"


def prepared_by(runner, source, tokenizer_file, output):
    """(what the command prints, SHA-256 of each shard)."""
    begin = time.monotonic()
    done = run_command(
        f"--source={source}",
        f"--tokenizer={tokenizer_file}",
        "--max_len=2048",
        f"--output={output}",
        *RUNNERS[runner],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    print(f"{runner}: {time.monotonic() - begin:.0f} s")
    shards = sorted(pathlib.Path(output).glob("*.array_record*"))
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in shards}
    return done.stdout, hashes


@pytest.fixture(scope="module")
def by_one_process(source, tokenizer_file, tmp_path_factory):
    return prepared_by(
        "one process", source, tokenizer_file, tmp_path_factory.mktemp("one") / "data"
    )


def counted(source, tokenizer_file):
    """Split -> tokens, by nothing of ours: each document, and one end of text before it."""
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    tokenizer.encode_special_tokens = True
    tokens = dict.fromkeys(("train", "validation", "test"), 0)
    for split in tokens:
        for path in sorted((source / split).rglob("*.jsonl.zst")):
            with path.open("rb") as file:
                stream = zstandard.ZstdDecompressor().stream_reader(file)
                lines = io.TextIOWrapper(stream, encoding="utf-8", newline="\n")
                texts = [json.loads(line)["text"] for line in lines]
            encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
            tokens[split] += sum(len(ids.ids) + 1 for ids in encoded)
    return tokens


@pytest.mark.slow
def test_no_token_is_lost(by_one_process, source, tokenizer_file):
    output, hashes = by_one_process
    print(output)
    found = re.findall(
        r"^  (\w+): .* documents, ([\d,]+) tokens in .*\n"
        r"    no token is lost: ([\d,]+) of documents, ([\d,]+) in rows$",
        output,
        re.MULTILINE,
    )
    printed = {
        split: {int(number.replace(",", "")) for number in numbers} for split, *numbers in found
    }
    assert printed == {split: {n} for split, n in counted(source, tokenizer_file).items()}
    assert len(hashes) >= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "runner",
    [
        "all cores",
        pytest.param("beam", marks=needs_beam),
        pytest.param("beam of two processes", marks=needs_beam),
    ],
)
def test_every_runner_gives_the_same_shards(
    by_one_process, source, tokenizer_file, tmp_path, runner
):
    _, hashes = prepared_by(runner, source, tokenizer_file, tmp_path / "data")
    assert hashes == by_one_process[1]
    shutil.rmtree(tmp_path / "data")
