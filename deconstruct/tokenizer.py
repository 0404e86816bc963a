"""One interface over Hugging Face `tokenizers`, and the one rule for where a document starts.

The start rule: end-of-text leads each document, exactly once, and nothing else is added.
`Tokenizer.with_start` is its only home: the tokenizer's own beginning-of-sequence token,
post-processor, truncation and padding are switched off. Control tokens that are spelled in a text
are encoded as ordinary characters, so control ids come from our code alone.
"""

import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
FILE_NAME = "tokenizer.json"

# Texts are encoded in pieces of at most this many characters, and so many characters at a time:
# some tokenizers need time that grows with the square of a text's length, all need memory.
PIECE_CHARACTERS = 1 << 18
GROUP_CHARACTERS = 1 << 22

# Training takes time that grows with the square of a word's length: longer runs are cut.
TRAINING_WORD_CHARACTERS = 256
_LONG_RUN = re.compile(
    rf"\S{{{TRAINING_WORD_CHARACTERS}}}(?=\S)|\s{{{TRAINING_WORD_CHARACTERS}}}(?=\s)"
)

_BYTE_FALLBACK = re.compile(r"<0x[0-9A-F]{2}>")


class Tokenizer:
    """Text to token ids and back.

    Attributes:
      json: the text of its tokenizer.json, which is all that defines it.
      sha256: the hash of `json`, in hexadecimal.
      vocab_size: one more than the largest id.
      eot_id: the id of end-of-text.
    """

    def __init__(self, tokenizer_json: str):
        """Raises ValueError when `tokenizer_json` is not usable; the message lacks the file."""
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"not a tokenizer.json ({_first_line(error)})") from error
        self.json = tokenizer_json
        self.sha256 = hashlib.sha256(tokenizer_json.encode()).hexdigest()
        self._settings = json.loads(tokenizer_json)
        if self._settings["model"].get("dropout"):
            raise ValueError("its BPE dropout makes token ids random; set it to null")
        self._tokenizer.encode_special_tokens = True  # not stored in tokenizer.json
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        self._control_ids = {
            id for id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        }
        named = [name for name in END_OF_TEXT_NAMES if vocab.get(name) in self._control_ids]
        if not named:
            raise ValueError(
                f"it has no end-of-text control token (looked for {', '.join(END_OF_TEXT_NAMES)})"
            )
        self.eot_id = vocab[named[0]]
        self._refuse_spelled_control_tokens()

    @property
    def fingerprint(self) -> dict[str, str | int]:
        """What a model trained on its ids depends on: the file, and the id that starts a text."""
        return {"sha256": self.sha256, "start_id": self.eot_id}

    def _refuse_spelled_control_tokens(self) -> None:
        for control_id in sorted(self._control_ids):
            spelling = self._tokenizer.id_to_token(control_id)
            if control_id in self._tokenizer.encode(spelling, add_special_tokens=False).ids:
                raise ValueError(f"it turns the text {spelling!r} into control id {control_id}")

    def __reduce__(self):
        return Tokenizer, (self.json,)

    def save(self, path: str | pathlib.Path) -> None:
        """Writes tokenizer.json to `path`, byte for byte what was loaded."""
        pathlib.Path(path).write_bytes(self.json.encode())

    def encode(self, text: str) -> np.ndarray:
        """The ids (n,) int32 of a text, without a start token."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids (n,) int32 of each text, without start tokens, in parallel over the cores.

        Texts above PIECE_CHARACTERS are encoded in pieces; see `inexact_cuts`.
        """
        pieces = [list(_pieces(text)) for text in texts]
        encoded = self._encode_pieces([piece for parts in pieces for piece, _ in parts])
        return [np.concatenate([next(encoded) for _ in parts]) for parts in pieces]

    def _encode_pieces(self, pieces: list[str]) -> Iterator[np.ndarray]:
        first = 0
        while first < len(pieces):
            last, characters = first, 0
            while last < len(pieces) and characters < GROUP_CHARACTERS:
                characters += len(pieces[last])
                last += 1
            for encoding in self._tokenizer.encode_batch_fast(
                pieces[first:last], add_special_tokens=False
            ):
                yield np.array(encoding.ids, np.int32)
            first = last

    def inexact_cuts(self, text: str) -> int:
        """Cuts of a long text at which a few ids may differ from those of the uncut text.

        None for a text up to PIECE_CHARACTERS. A longer one is cut before a space or a newline
        that follows a letter, where byte-level tokenizers always end a word, so that their ids are
        those of the uncut text. A piece without such a place is cut at its end, which is inexact,
        and so is every cut for tokenizers that mark words in another way.
        """
        if len(text) <= PIECE_CHARACTERS:
            return 0
        safe = [safe for _, safe in _pieces(text)][:-1]
        return len(safe) - sum(safe) if self._ends_words_at_spaces else len(safe)

    def with_start(self, ids: np.ndarray) -> np.ndarray:
        """`ids` (n,) int32 led by exactly one end-of-text; unchanged where one leads already."""
        if len(ids) and ids[0] == self.eot_id:
            return ids
        return np.concatenate([np.array([self.eot_id], np.int32), ids])

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`; control tokens have none. ValueError for an id out of range."""
        ids = [int(id) for id in ids]
        for id in ids:
            if not 0 <= id < self.vocab_size:
                raise ValueError(f"token id {id} is outside the vocabulary of {self.vocab_size}")
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def token_bytes(self) -> np.ndarray:
        """Bytes of UTF-8 text that each id stands for, (vocab_size,) int32; 0 for control tokens.

        Raises:
          ValueError: for a kind of decoder whose tokens do not say their bytes.
        """
        kinds = _kinds(self._settings.get("decoder"))
        if not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
            raise ValueError(
                f"bytes per token are unknown for a tokenizer with decoder {sorted(kinds)}"
            )
        lengths = np.zeros(self.vocab_size, np.int32)
        added = self._tokenizer.get_added_tokens_decoder()
        for token, id in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if id in self._control_ids:
                continue
            if id in added:
                lengths[id] = len(token.encode())
            elif "ByteLevel" in kinds:
                lengths[id] = len(token)  # one character stands for one byte
            elif _BYTE_FALLBACK.fullmatch(token):
                lengths[id] = 1
            else:
                lengths[id] = len(token.replace("▁", " ").encode())
        return lengths

    @functools.cached_property
    def _ends_words_at_spaces(self) -> bool:
        """Whether words are split at spaces and then spelled in bytes, as in GPT-2 and after."""
        stages = _stages(self._settings.get("pre_tokenizer"))
        byte_level = [stage for stage in stages if stage["type"] == "ByteLevel"]
        splits = any(stage.get("use_regex", True) for stage in byte_level) or any(
            stage["type"] == "Split" for stage in stages
        )
        prefixed = any(stage.get("add_prefix_space") for stage in byte_level)
        harmless = _kinds(self._settings.get("normalizer")) <= {"NFC", "NFD", "NFKC", "NFKD"}
        return bool(byte_level) and splits and not prefixed and harmless


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json, of a directory that holds one, or of a Hugging Face name.

    Raises:
      ValueError: nothing there, nothing to be fetched, or not usable; names the remedy.
    """
    path = pathlib.Path(name)
    if path.is_dir():
        path = path / FILE_NAME
        if not path.is_file():
            raise ValueError(f"tokenizer directory {name} holds no {FILE_NAME}")
    elif not path.is_file():
        if name.endswith(".json") or name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise ValueError(f"tokenizer file {name} does not exist")
        path = _download(name)
    try:
        return Tokenizer(path.read_bytes().decode())
    except ValueError as error:
        raise ValueError(f"tokenizer {path}: {error}") from error


def _download(name: str) -> pathlib.Path:
    import huggingface_hub

    try:
        return pathlib.Path(huggingface_hub.hf_hub_download(name, FILE_NAME))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer {name!r} is neither a file nor a directory, and the Hugging Face hub did "
            f"not give it ({_first_line(error)}); pass the path of a {FILE_NAME}, or bpe:8192"
        ) from error


def bpe_size(name: str) -> int | None:
    """The vocabulary size that `bpe:8192` asks for; None for any other tokenizer name."""
    kind, _, size = name.partition(":")
    if kind != "bpe":
        return None
    if not size.isdecimal() or int(size) < 257:
        raise ValueError(
            f"tokenizer {name!r}: a byte-level BPE is asked for as bpe:SIZE with SIZE of at least "
            "257 (256 bytes and end-of-text), such as bpe:8192"
        )
    return int(size)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE trained on `texts`: the same texts in the same order give the same one.

    Id 0 is end-of-text. No normalizer, so that decoding gives every text back exactly.

    Raises:
      ValueError: the texts are too small for so many tokens.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_without_long_runs(texts), trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        raise ValueError(
            f"the training text yields only {tokenizer.get_vocab_size()} tokens; ask for "
            f"bpe:{tokenizer.get_vocab_size()} or fewer instead of bpe:{vocab_size}"
        )
    return Tokenizer(tokenizer.to_str(pretty=True))


def _without_long_runs(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        first = 0
        for run in _LONG_RUN.finditer(text):
            yield text[first : run.end()]
            first = run.end()
        yield text[first:]


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """The pieces of `text`, at most PIECE_CHARACTERS each, and whether each ends at a safe cut."""
    first = 0
    while len(text) - first > PIECE_CHARACTERS:
        end = first + PIECE_CHARACTERS
        cut = next((i for i in range(end, first, -1) if _is_safe_cut(text, i)), None)
        last = end if cut is None else cut
        yield text[first:last], cut is not None
        first = last
    yield text[first:], False


def _is_safe_cut(text: str, i: int) -> bool:
    return text[i] in " \n" and text[i - 1].isalpha()


def _stages(part: dict | None) -> list[dict]:
    """The members of a (possibly nested) Sequence of a tokenizer.json, or the part itself."""
    if part is None:
        return []
    for members in ("pretokenizers", "normalizers", "decoders"):
        if members in part:
            return [stage for member in part[members] for stage in _stages(member)]
    return [part]


def _kinds(part: dict | None) -> set[str]:
    return {stage["type"] for stage in _stages(part)}


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
