"""SlimPajama's layout: sets counted and chosen, estimates, and the TFDS builder."""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys

import data_corpus
import pyarrow
import pytest
import tensorflow_datasets as tfds
import test_data_prepare
from pyarrow import parquet
from test_data_prepare import run_command, run_python, shards, times

from deconstruct import tokenizer as tokenizer_lib
from deconstruct.data import (
    estimate,
    prepare,
    prepared,
    readers,
    report,
    slimpajama,
    sources,
    units,
)
from deconstruct.data.dataset import open_dataset


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return data_corpus.write_slimpajama(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def output(source, tmp_path_factory):
    output = tmp_path_factory.mktemp("prepared") / "data"
    prepare.prepare(data_corpus.settings(source, output), progress=False)
    return output


def counted(source, split):
    """Set -> (documents, bytes) of a split, from the files themselves."""
    found = {}
    for file in sources.list_files(str(source)):
        for document in sources.read_documents(file) if file.split == split else ():
            documents, num_bytes = found.get(document.set_name, (0, 0))
            found[document.set_name] = (documents + 1, num_bytes + len(document.text.encode()))
    return found


def test_each_set_is_counted_and_nothing_is_lost(source, output):
    info = prepared.read_info(output)
    assert set(info.counts) == {"train", "validation", "test"}
    for split, totals in info.counts.items():
        sets = info.sets[split]
        assert set(sets) == set(data_corpus.SETS)
        assert {n: (c.documents, c.text_bytes) for n, c in sets.items()} == counted(source, split)
        assert sum(shard.document_tokens for shard in info.shards[split]) == totals["tokens"]
        for name in ("documents", "text_bytes", "tokens"):
            assert sum(getattr(counts, name) for counts in sets.values()) == totals[name]
    assert info.counts["train"]["documents"] == 48  # of 4 small files
    lines = report.summary(info).splitlines()
    tokens = info.counts["train"]["tokens"]
    assert f"    no token is lost: {tokens:,} of documents, {tokens:,} in rows" in lines
    book = info.sets["train"]["RedPajamaBook"]
    assert (
        f"    RedPajamaBook: {book.documents:,} documents, {book.text_bytes:,} bytes, "
        f"{book.tokens:,} tokens" in lines
    )


def test_small_files_share_a_unit_and_lose_nothing(source, tmp_path):
    settings = data_corpus.settings(source, tmp_path / "data", unit_bytes=1 << 20)
    info = prepare.prepare(settings, progress=False)
    assert {split: len(own) for split, own in info.shards.items()} == dict.fromkeys(info.shards, 1)
    assert sum(counts["documents"] for counts in info.counts.values()) == 72


def test_chosen_sets_alone_are_taken(source, output, tmp_path):
    chosen = ("RedPajamaC4", "RedPajamaBook", "RedPajamaC4")
    settings = data_corpus.settings(source, tmp_path / "data", sets=chosen, tokenizer=str(output))
    info = prepare.prepare(settings, progress=False)
    everything = prepared.read_info(output)
    assert info.builder_config["sets"] == ["RedPajamaBook", "RedPajamaC4"]
    for split, sets in info.sets.items():
        assert sets == {name: everything.sets[split][name] for name in chosen}
        others = sum(shard.other_documents for shard in info.shards[split])
        assert others == everything.sets[split]["RedPajamaWikipedia"].documents
        dataset = open_dataset(settings.output)
        rows = dataset.rows(split, range(dataset.num_rows(split)))
        assert sum(row.num_tokens for row in rows) == sum(c.tokens for c in sets.values())
    assert info.data_fingerprint != everything.data_fingerprint
    assert "16 documents of other sets left out" in report.summary(info)
    with pytest.raises(ValueError, match=r"sets \['RedPajamaBook', .*\] there, None now"):
        prepare.prepare(dataclasses.replace(settings, sets=None), progress=False)


def test_bpe_is_trained_on_the_chosen_sets(source, tmp_path):
    def texts(sets):
        settings = data_corpus.settings(source, tmp_path / "data", sets=sets)
        return list(prepare._training_texts(settings, sources.list_files(str(source))))

    assert len(texts(None)) == 48 and len(texts(["RedPajamaC4"])) == 16


def test_data_without_a_choice_is_what_it_was(output):
    """The record of settings and the fingerprint know no sets: data made before them is the same.

    A record as it was written then, without the counts of sets, still opens.
    """
    info = prepared.read_info(output)
    assert "sets" not in info.builder_config
    path = output / prepared.INFO_FILE
    content = json.loads(path.read_text())
    for shard in (shard for own in content["shards"].values() for shard in own):
        for name in ("sets", "other_documents", "document_tokens", "bad_rows", "cut_files"):
            del shard[name]
    whole = path.read_text()
    path.write_text(json.dumps(content))
    try:
        old = prepared.read_info(output)
    finally:
        path.write_text(whole)
    assert old.data_fingerprint == info.data_fingerprint and not any(old.sets.values())
    assert "no token is lost" not in report.summary(old)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["redpajamac4"], "there is no set 'redpajamac4'; the nearest is RedPajamaC4, all are "),
        (["RedPajamaWikpedia"], "the nearest is RedPajamaWikipedia,"),
        (["books"], "the nearest is RedPajamaBook,"),
        ([], "sets is empty; leave it out, or name some of RedPajamaArXiv, "),
    ],
)
def test_unknown_sets_are_refused_with_the_nearest(source, tmp_path, sets, message):
    with pytest.raises(ValueError, match=message):
        data_corpus.settings(source, tmp_path, sets=sets)


def test_rows_that_name_no_set_cannot_be_chosen(tmp_path):
    data_corpus.write_jsonl(tmp_path / "a.jsonl", ["text"])
    settings = data_corpus.settings(
        tmp_path / "a.jsonl", tmp_path / "data", sets=["RedPajamaC4"], tokenizer="bpe:257"
    )
    with pytest.raises(ValueError, match=r"a.jsonl, line 1: no meta.redpajama_set_name, .*leave"):
        prepare.prepare(settings, progress=False)


def test_absent_set_is_an_error_that_names_it(source, tmp_path):
    settings = data_corpus.settings(
        source, tmp_path / "data", sets=["RedPajamaGithub"], tokenizer="bpe:257"
    )
    with pytest.raises(ValueError, match=r"no document falls to train; .*RedPajamaGithub"):
        prepare.prepare(settings, progress=False)


@pytest.mark.parametrize("kind", ["struct", "json"])
def test_parquet_form(tmp_path, source, output, kind):
    """As exported with `meta` as a struct or as JSON, and named as the hub names it."""
    for split in sources.SPLITS:
        rows = [
            {"text": document.text, "meta": {"redpajama_set_name": document.set_name}}
            for file in sources.list_files(str(source))
            if file.split == split
            for document in sources.read_documents(file)
        ]
        if kind == "json":
            rows = [row | {"meta": json.dumps(row["meta"])} for row in rows]
        name = tmp_path / "source" / "data" / f"{split}-00000-of-00001-ab12.parquet"
        name.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.Table.from_pylist(rows), name)
    settings = data_corpus.settings(tmp_path / "source", tmp_path / "data", tokenizer=str(output))
    info = prepare.prepare(settings, progress=False)
    assert info.sets == prepared.read_info(output).sets


def test_estimate_is_near_the_truth(tmp_path, output, monkeypatch):
    """Of files that are alike, and of which it reads only the beginnings."""
    monkeypatch.setattr(readers, "_CHUNK_BYTES", 1 << 15)
    monkeypatch.setattr(estimate, "SAMPLE_TEXT_BYTES", 1 << 15)
    rows = data_corpus.slimpajama_rows(data_corpus.texts(300))
    for i in range(12):
        (tmp_path / "source").mkdir(exist_ok=True)
        path = tmp_path / "source" / f"{i:02}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows[i:] + rows[:i]))
    settings = data_corpus.settings(
        tmp_path / "source", tmp_path / "data", tokenizer=str(output), unit_bytes=1 << 30
    )
    info = prepare.prepare(settings, progress=False)
    (unit,) = units.plan_units(
        sources.list_files(settings.source),
        unit_bytes=1 << 30,
        output=settings.output,
        max_len=32,
        validation_share=0.1,
    )
    found = estimate.measure([unit], tokenizer_lib.load_tokenizer(str(output)))
    tokens = sum(counts["tokens"] for counts in info.counts.values())
    num_bytes = sum(shard.num_bytes for own in info.shards.values() for shard in own)
    assert found.sample_files == 6 and found.sample_documents < 12 * 300 / 4
    documents, num_bytes_read = estimate._first_documents(unit.files[0], unit)
    assert 0 < len(documents) < 300 and num_bytes_read < unit.files[0].num_bytes / 2
    assert found.tokens == pytest.approx(tokens, rel=0.1)
    assert found.output_bytes == pytest.approx(num_bytes, rel=0.1)
    assert found.core_seconds > 0
    text = dataclasses.replace(found, core_seconds=9000.0).text(4)
    assert re.fullmatch(
        r"estimate from the first [\d,]+ documents of 6 files, for \d+\.\d MB of input: "
        r"\d+\.\dM tokens, \d+\.\d MB to write, 2\.5 hours of one core, so 2\.5 hours in 4 "
        r"process\(es\)",
        text,
    ), text
    assert found.text(None).endswith("of one core")
    shared = dataclasses.replace(found, core_seconds=9000.0, largest_share=0.1)
    assert shared.text(4).endswith("of one core, so 37.5 minutes in 4 process(es)")


def test_estimate_warns_of_a_full_disk(tmp_path, caplog):
    found = estimate.Estimate(1, 1, 10, 1.0, 1e18, 1.0, 1.0)
    estimate.warn_of_a_full_disk(found, str(tmp_path))
    assert "less than the estimated 1000000.0 TB" in caplog.text


def test_command_prints_estimate_and_sets(source, output, tmp_path):
    program = (
        "import runpy\nfrom deconstruct.data import estimate\nestimate.SMALLEST_BYTES = 1\n"
        "runpy.run_module('deconstruct.data.prepare', run_name='__main__', alter_sys=True)"
    )
    done = run_python(
        "-c",
        program,
        f"--source={source}",
        f"--tokenizer={output}",
        "--max_len=32",
        f"--output={tmp_path / 'data'}",
        "--sets=RedPajamaC4,RedPajamaBook",
        "--num_processes=1",
    )
    assert done.returncode == 0, done.stderr
    assert "estimate from the first " in done.stderr
    assert re.search(r"\n    RedPajamaBook: 16 documents, [\d,]+ bytes, [\d,]+ tokens", done.stdout)
    failed = run_command(f"--source={source}", "--check", "--sets=c4")
    assert failed.returncode == 1 and failed.stderr.startswith("error: there is no set 'c4'; ")


def config(source, **changes):
    values = {
        "name": "small",
        "source": str(source),
        "tokenizer": "bpe:300",
        "max_len": 32,
        "num_processes": 1,
    }
    return slimpajama.Config(**values | changes)


def test_tfds_builder(source, output, tmp_path):
    def open_rows():
        return tfds.data_source(
            "slimpajama", data_dir=tmp_path, builder_kwargs={"config": config(source)}
        )

    rows = open_rows()
    folder = tmp_path / "slimpajama" / "small" / "1.0.0"
    dataset = open_dataset(folder)
    assert {split: len(own) for split, own in rows.items()} == {
        split: dataset.num_rows(split) for split in sources.SPLITS
    }
    assert rows["train"][0]["num_tokens"] == 33
    assert dataset.info.sets == prepared.read_info(output).sets
    before = times(folder)
    assert len(open_rows()["test"]) == len(rows["test"])
    assert times(folder) == before
    by_directory = tfds.builder_from_directory(folder).as_data_source("train")
    assert (by_directory[0]["ids"] == rows["train"][0]["ids"]).all()
    by_name = tfds.data_source("slimpajama/small", split="train", data_dir=tmp_path, download=False)
    assert len(by_name) == len(rows["train"])
    with pytest.raises(ValueError, match="max_len 32 there, 64 now"):
        slimpajama.SlimPajama(
            config=config(source, max_len=64), data_dir=tmp_path
        ).download_and_prepare()
    assert "tensorflow" not in sys.modules


def test_tfds_builder_goes_on_after_a_failure(source, tmp_path, monkeypatch):
    """TFDS's own `download_and_prepare` would remove what is done."""
    builder = slimpajama.SlimPajama(config=config(source), data_dir=tmp_path)
    real = units.prepare_unit

    def fails_in_the_second(unit, on_read):
        if unit.index == 1:
            raise ValueError("lost connection")
        return real(unit, on_read)

    monkeypatch.setattr(slimpajama.Config, "settings", one_file_units)
    monkeypatch.setattr(units, "prepare_unit", fails_in_the_second)
    with pytest.raises(ValueError, match="lost connection"):
        builder.download_and_prepare()
    kept = times(pathlib.Path(builder.data_dir, prepared.UNITS_FOLDER))
    assert len(kept) == 1
    monkeypatch.setattr(units, "prepare_unit", real)
    builder.download_and_prepare()
    assert kept.items() <= times(pathlib.Path(builder.data_dir, prepared.UNITS_FOLDER)).items()
    assert len(builder.as_data_source("train")) == builder.info.splits["train"].num_examples


def one_file_units(own, output):
    return data_corpus.settings(own.source, output)


@pytest.mark.parametrize(
    "name",
    [
        "train/chunk1/example_holdout_0.jsonl.zst",  # a held-out file must not be trained on
        "validation/chunk1/example_train_0.jsonl.zst",
        "train/example_train_0.jsonl.zst",
        "train/chunk1/notes.jsonl",
    ],
)
def test_other_layouts_are_refused(tmp_path, name):
    folder = data_corpus.write_slimpajama(tmp_path / "source", documents=1)
    slimpajama.check_layout(str(folder))
    (folder / name).write_bytes(b"x")
    with pytest.raises(ValueError, match=f"{name} is not where SlimPajama's files are"):
        slimpajama.check_layout(str(folder))
    builder = slimpajama.SlimPajama(config=config(folder), data_dir=tmp_path / "data")
    with pytest.raises(ValueError, match=f"{name} is not where SlimPajama's files are"):
        builder.download_and_prepare()
    assert not (tmp_path / "data").exists()


def test_any_part_of_the_layout_will_do(tmp_path):
    folder = data_corpus.write_slimpajama(tmp_path / "source", documents=20)
    (folder / "train" / "chunk1").rename(folder / "train" / "chunk10")
    for split in ("validation", "test"):
        (folder / split / "chunk1" / "example_holdout_0.jsonl.zst").unlink()
    slimpajama.check_layout(str(folder))
    info = prepare.prepare(data_corpus.settings(folder, tmp_path / "data"), progress=False)
    assert set(info.counts) == {"train", "validation"}  # held out by hash
    assert sum(counts["documents"] for counts in info.counts.values()) == 80


def test_builder_wants_its_config():
    with pytest.raises(ValueError, match=r"needs a deconstruct.data.slimpajama.Config, not 'x'"):
        slimpajama.SlimPajama(config="x")


UNGUARDED = """
import data_corpus
from deconstruct.data import prepare
prepare.prepare(data_corpus.settings({source!r}, {output!r}, num_processes=2), progress=False)
"""


def test_unguarded_script_does_not_wait_for_itself(source, tmp_path):
    """Its processes import it, and so prepare again, while the directory is the parent's."""
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED.format(source=str(source), output=str(tmp_path / "data")))
    failed = subprocess.run(
        [sys.executable, str(script)],
        env=test_data_prepare.devices.environment(1),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert failed.returncode == 1
    assert "must prepare under `if __name__ == '__main__':`" in failed.stderr.splitlines()[-1]


def test_failed_units_leave_no_partial_files(source, tmp_path, monkeypatch):
    def fails(writer):
        raise ValueError("no")

    monkeypatch.setattr(units.ShardWriter, "finish", fails)
    settings = data_corpus.settings(source, tmp_path / "data", tokenizer="bpe:257")
    with pytest.raises(ValueError, match="no"):
        prepare.prepare(settings, progress=False)
    assert not list((tmp_path / "data").rglob("*.partial"))
    assert not shards(tmp_path / "data")


def test_units_without_any_chosen_document(tmp_path):
    """Folders are often sorted by set: then most shards of a choice are empty, and still read."""
    for i, name in enumerate(data_corpus.SETS):
        rows = [
            {"text": text, "meta": {"redpajama_set_name": name}}
            for text in data_corpus.texts(30, seed=i)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "source").mkdir(exist_ok=True)
        (tmp_path / "source" / f"{i}.jsonl").write_text(lines)
    settings = data_corpus.settings(
        tmp_path / "source", tmp_path / "data", sets=data_corpus.SETS[1:2], tokenizer="bpe:257"
    )
    info = prepare.prepare(settings, progress=False)
    assert [shard.rows > 0 for shard in info.shards["train"]] == [False, True, False]
    dataset = open_dataset(settings.output)
    rows = dataset.rows("train", range(dataset.num_rows("train")))
    assert sum(row.num_tokens for row in rows) == info.counts["train"]["tokens"]
    assert sum(len(row.starts) for row in rows) == info.counts["train"]["documents"]
