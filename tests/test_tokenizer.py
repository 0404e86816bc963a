"""The tokenizer: control tokens in text (T1), one start token (T3), long texts, loading."""

import json
import os
import pickle
import random
import subprocess
import sys
import time

import data_corpus
import huggingface_hub.constants
import numpy as np
import pytest
import tokenizers
from tokenizers import processors

from deconstruct import tokenizer as tokenizer_lib

MARKER = tokenizer_lib.END_OF_TEXT
AWKWARD = f"né 東京 🙂\u2028 a{MARKER}b\r\n\tdone  {MARKER}"


@pytest.fixture(scope="module")
def trained():
    return tokenizer_lib.train_bpe(data_corpus.texts(30), 300)


@pytest.fixture
def neox(shared_dir):
    return tokenizer_lib.load_tokenizer(
        str(shared_dir / "corpus" / "tokenizers" / "20B_tokenizer.json")
    )


def edited(tokenizer, **changes):
    """The tokenizer with top-level entries of its JSON replaced."""
    return tokenizer_lib.Tokenizer(json.dumps(json.loads(tokenizer.json) | changes))


def adding_its_own_start(tokenizer):
    library = tokenizers.Tokenizer.from_str(tokenizer.json)
    library.post_processor = processors.TemplateProcessing(
        single=f"{MARKER} $A", special_tokens=[(MARKER, tokenizer.eot_id)]
    )
    assert library.encode("water").ids[0] == tokenizer.eot_id  # it really does
    return tokenizer_lib.Tokenizer(library.to_str())


def check_spelled_marker(tokenizer):
    ids = tokenizer.encode(AWKWARD)
    assert tokenizer.eot_id not in ids
    assert tokenizer.decode(ids) == AWKWARD


def test_spelled_control_token_is_text(trained, tmp_path):
    check_spelled_marker(trained)
    trained.save(tmp_path / "tokenizer.json")
    check_spelled_marker(tokenizer_lib.load_tokenizer(str(tmp_path / "tokenizer.json")))
    check_spelled_marker(tokenizer_lib.load_tokenizer(str(tmp_path)))
    check_spelled_marker(pickle.loads(pickle.dumps(trained)))


def test_spelled_control_token_is_text_neox(neox):
    check_spelled_marker(neox)
    assert (neox.eot_id, neox.vocab_size) == (0, 50277)


def test_control_token_that_text_can_produce_is_refused(trained):
    content = json.loads(trained.json)
    content["pre_tokenizer"] = None
    content["model"] = {"type": "WordLevel", "vocab": {MARKER: 0, "a": 1}, "unk_token": "a"}
    with pytest.raises(ValueError, match=r"turns the text '<\|endoftext\|>' into control id 0"):
        tokenizer_lib.Tokenizer(json.dumps(content))


@pytest.mark.parametrize("own_start", [False, True])
@pytest.mark.parametrize("context", ["", "water stone", MARKER + "water"])
def test_exactly_one_start_token(trained, own_start, context):
    tokenizer = adding_its_own_start(trained) if own_start else trained
    assert tokenizer.eot_id not in tokenizer.encode(context)
    ids = tokenizer.with_start(tokenizer.encode(context))
    assert ids[0] == tokenizer.eot_id
    assert np.count_nonzero(ids == tokenizer.eot_id) == 1
    np.testing.assert_array_equal(ids[1:], trained.encode(context))
    np.testing.assert_array_equal(tokenizer.with_start(ids), ids)  # never two


def test_truncation_and_padding_of_the_file_are_off(trained):
    library = tokenizers.Tokenizer.from_str(trained.json)
    library.enable_truncation(4)
    library.enable_padding(length=9)
    tokenizer = tokenizer_lib.Tokenizer(library.to_str())
    for text in ("water", data_corpus.text(50)):
        np.testing.assert_array_equal(tokenizer.encode(text), trained.encode(text))


def check_token_bytes(tokenizer, texts):
    lengths = tokenizer.token_bytes()
    assert lengths.shape == (tokenizer.vocab_size,) and lengths[tokenizer.eot_id] == 0
    for text in texts:
        assert lengths[tokenizer.encode(text)].sum() == len(text.encode())


def test_token_bytes(trained):
    check_token_bytes(trained, [AWKWARD, *data_corpus.texts(5)])


def test_token_bytes_neox(neox):
    check_token_bytes(neox, [AWKWARD, "a" + " " * 30 + "b", *data_corpus.texts(5)])


def test_token_bytes_of_other_decoders(trained):
    content = json.loads(trained.json)
    vocab = {MARKER: 0, "▁": 1, "▁é": 2, "b": 3, "<0x0A>": 4, "ab": 5}
    content["model"] = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": True}
    content["pre_tokenizer"] = None
    content["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}
    tokenizer = tokenizer_lib.Tokenizer(json.dumps(content))
    np.testing.assert_array_equal(tokenizer.token_bytes(), [0, 1, 3, 1, 1, 2])
    content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(ValueError, match=r"unknown for a tokenizer with decoder \['WordPiece'\]"):
        tokenizer_lib.Tokenizer(json.dumps(content)).token_bytes()


def test_training_is_deterministic_and_exact(trained):
    again = tokenizer_lib.train_bpe(iter(data_corpus.texts(30)), 300)
    assert again.json == trained.json and again.sha256 == trained.sha256
    assert (trained.vocab_size, trained.eot_id) == (300, 0)
    other = tokenizer_lib.train_bpe(data_corpus.texts(30, seed=1), 300)
    assert other.sha256 != trained.sha256


def test_too_little_text_to_train_on():
    with pytest.raises(ValueError, match=r"only 2\d\d tokens; ask for bpe:2\d\d"):
        tokenizer_lib.train_bpe(["water water"], 1000)


@pytest.mark.parametrize("pieces_of", [200, 333, 1000])
def test_cut_text_gives_the_ids_of_the_uncut_text(trained, monkeypatch, pieces_of):
    texts = [data_corpus.text(400), "x", "", data_corpus.text(30, seed=1)]
    uncut = trained.encode_batch(texts)
    monkeypatch.setattr(tokenizer_lib, "PIECE_CHARACTERS", pieces_of)
    monkeypatch.setattr(tokenizer_lib, "GROUP_CHARACTERS", 2 * pieces_of)
    assert sum(1 for _ in tokenizer_lib._pieces(texts[0])) > 1
    for ids, expected in zip(trained.encode_batch(texts), uncut, strict=True):
        np.testing.assert_array_equal(ids, expected)
    assert trained.inexact_cuts(texts[0]) == 0


def test_cut_text_gives_the_ids_of_the_uncut_text_neox(neox, monkeypatch):
    text = data_corpus.text(3000) + " " * 40 + "end\n\n\n  x" + data_corpus.text(3000, seed=1)
    uncut = neox.encode(text)
    monkeypatch.setattr(tokenizer_lib, "PIECE_CHARACTERS", 500)
    np.testing.assert_array_equal(neox.encode(text), uncut)
    assert neox.inexact_cuts(text) == 0


def test_cuts_that_change_ids_are_counted(trained, monkeypatch):
    monkeypatch.setattr(tokenizer_lib, "PIECE_CHARACTERS", 50)
    text = "water" * 40  # 200 letters without a place to cut
    assert trained.inexact_cuts(text) == 3
    assert trained.decode(trained.encode(text)) == text
    prefixed = json.loads(trained.json)["pre_tokenizer"] | {"add_prefix_space": True}
    spaced = data_corpus.text(40)
    assert trained.inexact_cuts(spaced) == 0
    assert edited(trained, pre_tokenizer=prefixed).inexact_cuts(spaced) > 0


def test_time_grows_with_length_not_its_square(trained):
    def seconds(text):
        begin = time.process_time()
        trained.encode(text)
        return time.process_time() - begin

    letters = random.Random(0).choices("abcdefgh", k=1 << 20)
    spaced = data_corpus.text(20_000) * 40
    seconds(spaced[:100_000])
    assert seconds(spaced[:4_000_000]) < 24 * seconds(spaced[:500_000])  # 8 is even, 64 the square
    assert seconds("".join(letters)) < 24 * seconds("".join(letters[: 1 << 17]))


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="reads a process's peak memory in /proc")
def test_memory_of_a_huge_document_is_bounded(trained, tmp_path):
    """From /proc: what `resource` tells begins with the peak of this process, its parent."""
    trained.save(tmp_path / "tokenizer.json")
    program = f"""
from deconstruct import tokenizer
from tools.bench.data_worker import peak_mb
loaded = tokenizer.load_tokenizer({str(tmp_path)!r})
text = "some words of a long book " * 160_000
before = peak_mb()
assert len(loaded.encode(text)) > 300_000
print(peak_mb() - before)
"""
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert float(output.stdout) < 600  # MB, for 4 MB of text


def test_decode_refuses_ids_out_of_range(trained):
    for id in (-1, 300):
        with pytest.raises(ValueError, match=f"token id {id} is outside the vocabulary of 300"):
            trained.decode([5, id])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a tokenizer.json"),
        ({"added_tokens": []}, "no end-of-text control token"),
    ],
)
def test_unusable_file_is_named(trained, tmp_path, content, message):
    path = tmp_path / "mine.json"
    if isinstance(content, dict):
        content = json.dumps(json.loads(trained.json) | content)
    path.write_text(content)
    with pytest.raises(ValueError, match=f"tokenizer .*mine.json: .*{message}"):
        tokenizer_lib.load_tokenizer(str(path))


def test_bpe_dropout_is_refused(trained):
    model = json.loads(trained.json)["model"] | {"dropout": 0.1}
    with pytest.raises(ValueError, match="dropout makes token ids random"):
        edited(trained, model=model)


def test_missing_tokenizers_are_one_clear_line(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"tokenizer file .*none.json does not exist"):
        tokenizer_lib.load_tokenizer(str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match=r"holds no tokenizer.json"):
        tokenizer_lib.load_tokenizer(str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"'some/name' is neither a file.*or bpe:8192") as error:
        tokenizer_lib.load_tokenizer("some/name")
    assert "\n" not in str(error.value)


def test_bpe_size():
    assert tokenizer_lib.bpe_size("bpe:8192") == 8192
    assert tokenizer_lib.bpe_size("some/name") is None
    for name in ("bpe:", "bpe:12", "bpe:x"):
        with pytest.raises(ValueError, match="bpe:SIZE"):
            tokenizer_lib.bpe_size(name)
