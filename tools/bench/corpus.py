"""The texts of `tools.bench data`, as files that `prepare` reads."""

import base64
import json
import pathlib
import random
from collections.abc import Sequence

import zstandard

from deconstruct import tokenizer as tokenizer_lib
from deconstruct.data import prepared, sources


def read_texts(source: str, max_bytes: int) -> list[str]:
    """The first documents of a source that hold any text, up to `max_bytes` of UTF-8.

    Args:
      source: see `deconstruct.data.sources`.
      max_bytes: where to stop.

    Raises:
      ValueError: it is not there, or a row is bad.
    """
    texts, found = [], 0
    for file in sources.list_files(prepared.local_path(source, "source")):
        for document in sources.read_documents(file):
            if found >= max_bytes:
                return texts
            if document.text.strip():
                texts.append(document.text)
                found += num_bytes([document.text])
    return texts


def num_bytes(texts: Sequence[str]) -> int:
    """UTF-8 bytes of all texts."""
    return sum(len(text.encode()) for text in texts)


def load_tokenizer(name: str, texts: Sequence[str]) -> tokenizer_lib.Tokenizer:
    """The tokenizer called `name`, as `prepare` understands it; bpe:SIZE is trained on `texts`."""
    size = tokenizer_lib.bpe_size(name)
    if size is None:
        return tokenizer_lib.load_tokenizer(name)
    return tokenizer_lib.train_bpe(texts, size)


def write_files(folder: pathlib.Path, texts: Sequence[str], number: int) -> list[str]:
    """Writes `texts` as so many .jsonl.zst files of about equal size; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[list[str]] = [[] for _ in range(number)]
    sizes = [0] * number
    for text in texts:
        smallest = sizes.index(min(sizes))
        parts[smallest].append(json.dumps({"text": text}) + "\n")
        sizes[smallest] += len(text)
    paths = []
    for i, lines in enumerate(parts):
        path = folder / f"part_{i}.jsonl.zst"
        path.write_bytes(zstandard.compress("".join(lines).encode()))
        paths.append(str(path))
    return paths


def of_size(texts: Sequence[str], size: int) -> list[str]:
    """Documents of `texts`, in turn and again, with `size` characters together."""
    chosen, found = [], 0
    while found < size:
        text = texts[len(chosen) % len(texts)][: size - found]
        chosen.append(text)
        found += len(text)
    return chosen


def awkward(texts: Sequence[str], large: int, small: int) -> dict[str, list[str]]:
    """Name -> documents: ordinary ones, and one enormous document of the same size.

    Args:
      texts: ordinary documents.
      large: characters of the ordinary documents, and of the one document that has spaces.
      small: characters of those without a space.
    """
    random_bytes = random.Random(0).randbytes(small)
    return {
        "ordinary documents": of_size(texts, large),
        "one document with spaces": [" ".join(of_size(texts, large))[:large]],
        "ordinary documents, small": of_size(texts, small),
        "base64 without a space": [base64.b64encode(random_bytes).decode()[:small]],
        "one repeated letter": ["a" * small],
    }
