"""The preflight: everything wrong in a source is found, counted and named; nothing is written."""

import bz2
import dataclasses
import io
import json
import lzma

import data_corpus
import numpy as np
import pyarrow
import pytest
import zstandard
from pyarrow import parquet
from test_data_prepare import run_command, shards, times

from deconstruct.data import check, prepare, report, sources, units
from deconstruct.data.dataset import open_dataset


def jsonl(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def faults(folder, **arguments):
    """File -> [(where, what, count)] of a check by one process."""
    reports = check.run(str(folder), num_processes=1, progress=False, **arguments)
    return {
        report.name: [(kind.places, kind.first.what, kind.count) for kind in report.faults]
        for report in reports
    }


def parquet_bytes(columns):
    sink = io.BytesIO()
    parquet.write_table(pyarrow.table(columns, pyarrow.schema([("text", pyarrow.string())])), sink)
    return sink.getvalue()


def whole_file_cases():
    zst = zstandard.ZstdCompressor(write_checksum=True).compress(jsonl(data_corpus.texts(400)))
    flipped = bytearray(zst)
    flipped[len(zst) // 2] ^= 0x40
    plain = jsonl(data_corpus.texts(3))
    return {
        "half.jsonl.zst": (zst[: len(zst) // 2], "frame 1", "is cut short: its last zstd frame"),
        "checksum.jsonl.zst": (zst[:-3], "frame 1", "is cut short"),
        "second_frame.jsonl.zst": (zst + zst[:-3], "frame 2", "is cut short"),
        "flipped.jsonl.zst": (bytes(flipped), "frame 1", "is broken or not zstd data"),
        "tail.jsonl.zst": (zst + b"tail", "frame 2", "is broken or not zstd data"),
        "zero.jsonl.zst": (b"", "", "is empty (0 bytes)"),
        "zero.parquet": (b"", "", "is empty (0 bytes)"),
        "blank.jsonl": (b"\n \n\n", "", "holds no row"),
        "frame_of_nothing.jsonl.zst": (zstandard.compress(b""), "", "holds no row"),
        "no_row.parquet": (parquet_bytes({"text": []}), "", "holds no row"),
        "pointer.jsonl": (b"version https://git-lfs.github.com/spec/v1\n", "", "is a Git LFS"),
        "pointer.parquet": (b"version https://git-lfs.github.com/spec/v1\n", "", "is a Git LFS"),
        "page.jsonl.zst": (b"<!DOCTYPE html><html>", "", "is a web page or XML, not data"),
        "denied.jsonl": (b"\n<?xml version='1.0'?><Error>", "", "is a web page or XML"),
        "gzip.jsonl": (b"\x1f\x8b\x08\x00", "", "is gzip data"),
        "gzip.jsonl.zst": (b"\x1f\x8b\x08\x00", "", "is gzip data"),
        "bzip2.jsonl": (bz2.compress(plain), "", "is bzip2 data"),
        "xz.jsonl.zst": (lzma.compress(plain), "", "is xz data"),
        "zip.txt": (b"PK\x03\x04\x14", "", "is a zip archive"),
        "zstd.jsonl": (zst, "", "is zstd data"),
        "utf16.jsonl": (plain.decode().encode("utf-16"), "", "is UTF-16 text"),
        "utf16_unmarked.txt": ("some text".encode("utf-16-le"), "", "is UTF-16 or UTF-32 text"),
        "cut.parquet": (b"PAR1 but no more", "after row 0", "is broken or not Parquet"),
    }


@pytest.mark.parametrize("name", list(whole_file_cases()))
def test_file_that_cannot_be_read_is_named_and_the_next_is_read(tmp_path, name):
    data, where, what = whole_file_cases()[name]
    (tmp_path / name).write_bytes(data)
    (tmp_path / "zz.jsonl").write_bytes(jsonl(["good"]))
    found = faults(tmp_path)
    ((places, text, count),) = found[name]
    assert text.startswith(what) and places == (where,) and count == 1
    assert found["zz.jsonl"] == []
    (file, _) = sources.list_files(str(tmp_path))
    with pytest.raises(ValueError, match=name) as error:  # preparing refuses the same, and why
        list(sources.read_documents(file))
    assert text in str(error.value)


def test_good_files_are_good(tmp_path):
    """Several frames, skippable frames between them, a byte order mark, CRLF, blank lines."""
    frame = zstandard.compress(jsonl(data_corpus.texts(20)))
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00size"
    (tmp_path / "frames.jsonl.zst").write_bytes(frame + skippable + frame + frame)
    (tmp_path / "marked.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": ""}')
    (tmp_path / "page.txt").write_text("<html> as a text")
    table = pyarrow.table({"text": ["a", "b"], "meta": [None, "{"]})
    parquet.write_table(table, tmp_path / "t.parquet")
    reports = check.run(str(tmp_path), num_processes=1, progress=False)
    assert [report.faults for report in reports] == [()] * 4
    assert [report.documents for report in reports] == [60, 2, 1, 2]
    assert sum(report.empty_documents for report in reports) == 1


def test_bad_rows_are_all_counted_and_the_first_named(tmp_path):
    lines = [b'{"text": "a \xfb"}'] * 5 + [b'{"text": null}', b'{"text": "cut', b'{"meta": 1}']
    lines = [line for bad in lines for line in (bad, b'{"text": "good"}')]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines))
    assert faults(tmp_path)["rows.jsonl"] == [
        (("line 1", "line 3", "line 5"), "not UTF-8", 5),
        (("line 11",), "'text' is null, not a string", 1),
        (("line 13",), "not a whole JSON value", 1),
        (("line 15",), "not a JSON object with a 'text'", 1),
    ]
    (report,) = check.run(str(tmp_path), num_processes=1, progress=False)
    assert report.documents == 8 and report.text_bytes == 8 * len("good")


def test_bad_parquet_rows(tmp_path):
    text = pyarrow.array([b"good", b"\xfb", None, b"good"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": text}), tmp_path / "a.parquet")
    assert faults(tmp_path)["a.parquet"] == [
        (("row 2",), "not UTF-8", 1),
        (("row 3",), "'text' is null, not a string", 1),
    ]


def test_rows_without_a_set_are_faults_where_sets_are_chosen(tmp_path):
    rows = [*data_corpus.slimpajama_rows(["a", "b"]), {"text": "c"}, {"text": "d", "meta": {}}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert faults(tmp_path)["a.jsonl"] == []
    (fault,) = faults(tmp_path, choice=["RedPajamaC4"])["a.jsonl"]
    assert fault[0] == ("line 3", "line 4") and fault[2] == 2


def test_processes_find_the_same(tmp_path):
    for name, (data, _, _) in whole_file_cases().items():
        (tmp_path / name).write_bytes(data)
    alone = check.run(str(tmp_path), num_processes=1, progress=False)
    assert check.run(str(tmp_path), num_processes=2, progress=False) == alone


def test_command(tmp_path):
    source = data_corpus.write_slimpajama(tmp_path / "source")
    before = times(tmp_path)
    fine = run_command(f"--source={source}", "--check", "--num_processes=1")
    assert fine.returncode == 0, fine.stderr
    assert fine.stdout.startswith("nothing is wrong with 6 file(s), which hold 72 good documents")
    bad = source / "train/chunk2/example_train_1.jsonl.zst"
    bad.write_bytes(bad.read_bytes()[:-9])
    before = times(tmp_path)
    failed = run_command(f"--source={source}", "--check", "--num_processes=1")
    assert failed.returncode == 1
    header, row, counts = failed.stdout.splitlines()
    assert header.split() == ["file", "where", "what", "remedy"]
    assert [cell.strip() for cell in row.split("  ") if cell] == [
        "train/chunk2/example_train_1.jsonl.zst",
        "frame 1",
        "is cut short: its last zstd frame does not end",
        "fetch it again",
    ]
    assert counts.startswith("1 fault(s) in 1 of 6 file(s), which hold 60 good documents")
    assert times(tmp_path) == before


def test_places_in_the_table(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"x\n" * 1234)
    text = check.summary(check.run(str(tmp_path), num_processes=1, progress=False))
    assert "line 1, 2, 3 and 1,231 more  not a whole JSON value (Expecting value: " in text


def test_skipped_faults_are_counted_and_logged_once_a_file(tmp_path, caplog):
    """Two files that cannot be read on, one with bad rows, two good ones; the tokenizer's too."""
    source = data_corpus.write_source(tmp_path / "source")
    with open(source / "part_1.jsonl", "ab") as file:
        file.write(b'{"text": null}\n{"text": "\xfb"}\n' + jsonl(["after the bad rows"]))
    zst = zstandard.compress(jsonl(data_corpus.texts(9, seed=7)))
    (source / "a_page.jsonl.zst").write_bytes(b"<html>")
    (source / "b_second_frame.jsonl.zst").write_bytes(zst + zst[:-3])
    settings = data_corpus.settings(
        source,
        tmp_path / "data",
        skip_faults=True,
        unit_bytes=1 << 30,
        validation_share=0.0,
    )
    info = prepare.prepare(settings, progress=False)
    (shard,) = info.shards["train"]
    assert (shard.bad_rows, shard.cut_files) == (2, 2)
    assert shard.documents >= 3 * 40 + 1 + 9
    assert "    skipped: 2 bad rows, 2 files or ends of files" in report.summary(info).splitlines()
    messages = [record.getMessage() for record in caplog.records]
    assert [message.partition(" ")[0].rpartition("/")[2] for message in messages] == [
        "a_page.jsonl.zst",
        "b_second_frame.jsonl.zst",
        "part_1.jsonl,",
    ]
    assert "line 41: 'text' is null, not a string; mend" in messages[2]
    dataset = open_dataset(settings.output)
    rows = dataset.rows("train", range(dataset.num_rows("train")))
    assert sum(row.num_tokens for row in rows) == shard.document_tokens
    assert info.builder_config["skip_faults"] is True


def test_what_is_left_of_broken_shards_is_taken_and_the_rest_counted(tmp_path, caplog):
    """D3, tolerant: five broken shards beside a good one; each says once that it is not whole."""
    source = tmp_path / "source"
    source.mkdir()
    good, texts = data_corpus.texts(30), data_corpus.texts(2000, seed=1)  # of several blocks
    whole = zstandard.ZstdCompressor(write_checksum=True).compress(jsonl(texts))
    flipped = bytearray(whole)
    flipped[len(whole) * 3 // 4] ^= 0x40
    broken = {
        "checksum": whole[:-3],
        "flipped": bytes(flipped),
        "half": whole[: len(whole) // 2],
        "pointer": b"version https://git-lfs.github.com/spec/v1\n",
        "zero": b"",
    }
    (source / "a.jsonl").write_bytes(jsonl(good))
    for kind, data in broken.items():
        (source / f"{kind}.jsonl.zst").write_bytes(data)
    settings = data_corpus.settings(
        source, tmp_path / "data", skip_faults=True, validation_share=0.0
    )
    info = prepare.prepare(settings, progress=False)
    found = info.shards["train"]
    assert [shard.cut_files for shard in found] == [0, 1, 1, 1, 1, 1]
    assert sum(shard.bad_rows for shard in found) == 0 and len(caplog.records) == 5
    documents = dict(zip(["a", *broken], [shard.documents for shard in found], strict=True))
    assert 0 < documents["half"] < documents["checksum"] <= 2000
    assert (documents["a"], documents["pointer"], documents["zero"]) == (30, 0, 0)
    taken = [*good, *(text for kind in broken for text in texts[: documents[kind]])]
    dataset = open_dataset(settings.output)
    wanted = map(dataset.tokenizer.with_start, dataset.tokenizer.encode_batch(taken))
    rows = dataset.rows("train", range(dataset.num_rows("train")))
    ids = np.concatenate([row.ids[: row.num_tokens] for row in rows])
    np.testing.assert_array_equal(ids, np.concatenate(list(wanted)))


BAD_ROWS = [
    b'{"text": "first good row"}',
    b'{"text": null}',
    b'{"meta": 1}',
    b'{"text": ""}',
    b'{"text": "   "}',
    b'{"text": "a \xfb b"}',
    b'{"text": "cut',
    b'{"text": 7}',
    '{"text": "line\u2028separator"}'.encode(),
    b'{"text": "windows"}\r',
    b'{"text": "last good row"}',
]


def test_bad_rows_are_skipped_by_kind_and_shift_nothing(tmp_path, monkeypatch):
    """D4: exact counts, no segment of a boundary alone; stopped among them, it ends the same."""
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(BAD_ROWS))
    settings = data_corpus.settings(
        tmp_path / "a.jsonl",
        tmp_path / "data",
        tokenizer="bpe:257",
        max_len=16,
        skip_faults=True,
        validation_share=0.0,
    )
    counting, seen = units._counting, []

    def stopped(writer):
        count = counting(writer)

        def on_fault(*args):
            count(*args)
            seen.append(args)
            if len(seen) == 3:
                raise OSError("stopped among the bad rows")

        return on_fault

    with monkeypatch.context() as patch:
        patch.setattr(units, "_counting", stopped)
        with pytest.raises(ValueError, match="stopped among the bad rows"):
            prepare.prepare(settings, progress=False)
    (shard,) = prepare.prepare(settings, progress=False).shards["train"]
    assert (shard.documents, shard.bad_rows, shard.empty_documents) == (4, 5, 2)
    dataset = open_dataset(settings.output)
    rows = dataset.rows("train", range(dataset.num_rows("train")))
    texts = ["first good row", "line\u2028separator", "windows", "last good row"]
    documents = [dataset.tokenizer.with_start(dataset.tokenizer.encode(text)) for text in texts]
    ids = np.concatenate([row.ids[: row.num_tokens] for row in rows])
    np.testing.assert_array_equal(ids, np.concatenate(documents))
    starts = np.concatenate([17 * i + row.starts for i, row in enumerate(rows)])
    np.testing.assert_array_equal(starts, np.cumsum([0, *map(len, documents[:-1])]))
    again = dataclasses.replace(settings, output=str(tmp_path / "unbroken"))
    prepare.prepare(again, progress=False)
    assert shards(tmp_path / "unbroken") == shards(tmp_path / "data")


def test_faults_that_are_not_to_be_skipped_stop(tmp_path):
    source = data_corpus.write_source(tmp_path / "source")
    (source / "z.jsonl").write_bytes(b'{"text": null}')
    settings = data_corpus.settings(source, tmp_path / "data", skip_faults=True)
    prepare.prepare(settings, progress=False)
    pool = data_corpus.settings(source, tmp_path / "pool", skip_faults=True, num_processes=2)
    prepare.prepare(pool, progress=False)
    assert shards(tmp_path / "pool") == shards(tmp_path / "data")
    with pytest.raises(ValueError, match="skip_faults True there, None now"):
        prepare.prepare(data_corpus.settings(source, tmp_path / "data"), progress=False)
