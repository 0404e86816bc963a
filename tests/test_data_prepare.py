"""Preparation: rows hold the documents, units resume, settings bind, any process count."""

import dataclasses
import importlib.util
import json
import os
import pathlib
import platform
import shutil
import signal
import subprocess
import sys
import time

import data_corpus
import devices
import numpy as np
import processes
import pytest
import tensorflow_datasets as tfds
from tensorflow_datasets.core import example_serializer

from deconstruct.data import packing, prepare, prepared, readers, sources, units
from deconstruct.data.dataset import open_dataset


def shards(folder):
    """Name -> bytes of all shards."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.array_record*"))}


def times(folder):
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return data_corpus.write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def output(source, tmp_path_factory):
    output = tmp_path_factory.mktemp("prepared") / "data"
    prepare.prepare(data_corpus.settings(source, output), progress=False)
    return output


def test_rows_hold_all_documents_in_order(source, output):
    dataset = open_dataset(output)
    ids = {split: [] for split in dataset.splits}
    for split in dataset.splits:
        rows = dataset.rows(split, range(dataset.num_rows(split)))
        for row in rows:
            assert row.ids.shape == (33,) and row.ids.dtype == np.uint16
            ids[split] += row.ids[: row.num_tokens].tolist()
            assert (row.ids[row.starts] == dataset.tokenizer.eot_id).all()
        assert sum(len(row.starts) for row in rows) == dataset.info.counts[split]["documents"]
    expected = {split: [] for split in dataset.splits}
    for file in sources.list_files(str(source)):
        for document in sources.read_documents(file):
            encoded = dataset.tokenizer.encode(document.text).tolist()
            expected[sources.split_of(file, document, 0.1)] += [dataset.tokenizer.eot_id, *encoded]
    assert ids == expected and set(expected) == {"train", "validation"}
    assert {split: counts["tokens"] for split, counts in dataset.info.counts.items()} == {
        split: len(values) for split, values in expected.items()
    }


def test_readable_by_tfds_without_tensorflow(output):
    builder = tfds.builder_from_directory(str(output))
    rows = builder.as_data_source("train")
    info = prepared.read_info(output)
    assert len(rows) == info.counts["train"]["rows"]
    assert rows[0]["ids"][0] == info.eot_id and rows[0]["num_tokens"] == 33
    assert "tensorflow" not in sys.modules


@pytest.mark.parametrize(("vocab_size", "starts"), [(300, [0, 3]), (70_000, [])])
def test_records_are_the_bytes_that_tfds_would_write(vocab_size, starts):
    features = prepared.features(8, vocab_size)
    ids = np.arange(vocab_size - 9, vocab_size).astype(prepared.token_dtype(vocab_size))
    row = packing.Row(ids, np.array(starts, np.int32), 9)
    record = prepared.serializer(8, vocab_size)(row)
    example = example_serializer.ExampleSerializer(features.get_serialized_info()).get_tf_example(
        features.encode_example(row._asdict())
    )
    assert record == example.SerializeToString(deterministic=True)


def test_what_is_stored_beside_the_rows(source, output):
    info = prepared.read_info(output)
    dataset = open_dataset(output)
    assert info.tokenizer_sha256 == dataset.tokenizer.sha256
    np.testing.assert_array_equal(info.token_bytes, dataset.tokenizer.token_bytes())
    counts = info.counts
    assert sum(counts[split]["documents"] for split in counts) == 120
    texts = [text for i in range(3) for text in data_corpus.texts(40, seed=i)]
    assert sum(c["text_bytes"] for c in counts.values()) == sum(len(t.encode()) for t in texts)
    assert [shard.file for shard in info.shards["train"]] == [
        f"deconstruct-train.array_record-0000{i}-of-00003" for i in range(3)
    ]
    for change in ({"tokenizer_sha256": "0"}, {"builder_config": {}}, {"shards": {}}):
        assert dataclasses.replace(info, **change).data_fingerprint != info.data_fingerprint


def test_pool_gives_identical_shards(source, output, tmp_path):
    settings = data_corpus.settings(source, tmp_path / "pool", num_processes=2)
    info = prepare.prepare(settings, progress=False)
    assert shards(tmp_path / "pool") == shards(output)
    assert info.data_fingerprint == prepared.read_info(output).data_fingerprint


def test_second_run_does_nothing(source, output, monkeypatch):
    before = times(output)
    monkeypatch.setattr(units, "prepare_unit", None)
    prepare.prepare(data_corpus.settings(source, output), progress=False)
    changed = {path.name for path, when in times(output).items() if before.get(path) != when}
    assert changed <= {".lock"}


@pytest.fixture
def finished(source, output, tmp_path):
    """Settings of finished data whose source can be taken away."""
    shutil.copytree(source, tmp_path / "texts")
    settings = data_corpus.settings(tmp_path / "texts", tmp_path / "data")
    prepare.prepare(settings, progress=False)
    return settings


def test_finished_data_outlives_its_source(finished, caplog):
    info = prepared.read_info(finished.output)
    shutil.rmtree(finished.source)
    again = prepare.prepare(finished, progress=False)
    assert again.data_fingerprint == info.data_fingerprint
    (record,) = caplog.records
    assert record.levelname == "WARNING" and record.getMessage() == (
        f"source {finished.source} is not there any more; using the finished data in "
        f"{finished.output}"
    )
    pathlib.Path(finished.source).mkdir()  # as where a disk is not mounted
    prepare.prepare(finished, progress=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_len": 64}, "max_len 32 there, 64 now"),
        ({"validation_share": 0.2}, "validation_share 0.1 there, 0.2 now"),
        ({"unit_bytes": 2}, "unit_bytes 1 there, 2 now"),
        ({"tokenizer": "bpe:301"}, "tokenizer bpe:300 there, bpe:301 now"),
        ({"source": "misspelt"}, "source texts there, misspelt now"),
    ],
)
def test_without_the_source_the_rest_must_agree(finished, changes, message):
    shutil.rmtree(finished.source)
    with pytest.raises(ValueError, match=f"no such file or folder.*; the finished .*{message}"):
        prepare.prepare(dataclasses.replace(finished, **changes), progress=False)


def test_without_the_source_unfinished_data_is_of_no_use(finished):
    shutil.rmtree(finished.source)
    min(pathlib.Path(finished.output).glob("*.array_record*")).unlink()
    with pytest.raises(ValueError, match=r"^source '.*texts': no such file or folder"):
        prepare.prepare(finished, progress=False)


def test_packaged_corpora_that_are_gone(tmp_path, monkeypatch, caplog):
    (tmp_path / "wiki.jsonl").write_text("")
    data_corpus.write_jsonl(tmp_path / "wiki.jsonl", data_corpus.texts(30))
    file = sources.SourceFile(str(tmp_path / "wiki.jsonl"), "wiki_leads", ".jsonl", 1)
    monkeypatch.setitem(sources.PACKAGED, "wiki_leads", lambda: file)
    settings = data_corpus.settings("wiki_leads", tmp_path / "data", tokenizer="bpe:257")
    prepare.prepare(settings, progress=False)
    monkeypatch.undo()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    prepare.prepare(settings, progress=False)
    assert "source wiki_leads is not there any more" in caplog.text


def test_other_python_uses_the_finished_docs(tmp_path, monkeypatch, caplog):
    topics = [readers.Row("topic 'a'", text) for text in data_corpus.texts(30)]
    monkeypatch.setitem(readers.READERS, "python_docs", lambda path, on_read: iter(topics))
    settings = data_corpus.settings("python_docs", tmp_path / "data", tokenizer="bpe:257")
    prepare.prepare(settings, progress=False)
    assert not caplog.records
    monkeypatch.setattr(platform, "python_version", lambda: "3.99.0")
    prepare.prepare(settings, progress=False)
    assert "source python_docs is not there any more" in caplog.text
    with pytest.raises(ValueError, match="max_len 32 there, 64 now"):
        prepare.prepare(dataclasses.replace(settings, max_len=64), progress=False)


def test_finished_data_needs_no_lock(finished):
    """As in a folder that cannot be written: root could, so a folder in the file's place it is."""
    lock = pathlib.Path(finished.output, ".lock")
    lock.unlink()
    lock.mkdir()
    before = times(lock.parent)
    prepare.prepare(finished, progress=False)
    assert times(lock.parent) == before
    with pytest.raises(ValueError, match="max_len 32 there, 64 now"):
        prepare.prepare(dataclasses.replace(finished, max_len=64), progress=False)
    (lock.parent / prepared.INFO_FILE).unlink()
    with pytest.raises(ValueError, match="cannot be written"):
        prepare.prepare(finished, progress=False)


def test_edited_input_of_equal_size_is_refused(finished):
    path = pathlib.Path(finished.source, "part_1.jsonl")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"river", b"lakes", 1))
    with pytest.raises(ValueError, match=r"settings: source_ends_sha256 \w+ there, \w+ now\."):
        prepare.prepare(finished, progress=False)


def test_data_of_another_format_still_trains(finished, monkeypatch):
    monkeypatch.setattr(prepared, "FORMAT_VERSION", 99)
    with pytest.raises(ValueError, match=r"is of format \d, this version makes 99; .*data.path"):
        prepare.prepare(finished, progress=False)
    assert open_dataset(finished.output).num_rows("train")


@pytest.mark.parametrize("field", ["source", "output"])
@pytest.mark.parametrize("path", ["gs://bucket/data", "gs:/bucket/data", "file:///data"])
def test_urls_are_refused(finished, field, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"{field} {path} is no local path; mount the bucket"):
        prepare.prepare(dataclasses.replace(finished, **{field: path}))
    with pytest.raises(ValueError, match=f"{path} is no local path; mount the bucket"):
        open_dataset(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "texts"]


def test_home_is_expanded(finished, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    info = prepare.prepare(
        data_corpus.settings("~/texts", "~/again", tokenizer="~/data/tokenizer.json"),
        progress=False,
    )
    assert info.path == str(tmp_path / "again")
    assert shards(tmp_path / "again") == shards(tmp_path / "data")
    assert open_dataset("~/again").path == str(tmp_path / "again")


def test_damaged_info_is_named_and_made_again(finished):
    path = pathlib.Path(finished.output, prepared.INFO_FILE)
    whole = path.read_text()
    for damaged in (whole[:-9], "", "{}", "[]"):
        path.write_text(damaged)
        with pytest.raises(ValueError, match=r"prepared.json is damaged .*data.prepare again"):
            open_dataset(finished.output)
        prepare.prepare(finished, progress=False)
        assert path.read_text() == whole


def test_damaged_settings_are_named(finished):
    folder = pathlib.Path(finished.output)
    (folder / prepared.INFO_FILE).unlink()
    for damaged in ((folder / prepared.SETTINGS_FILE).read_text()[:-9], "null"):
        (folder / prepared.SETTINGS_FILE).write_text(damaged)
        with pytest.raises(ValueError, match=r"settings.json is damaged .*remove"):
            prepare.prepare(finished, progress=False)


@pytest.mark.parametrize("damaged", ["", '{"train": {"file"', "[]", "{}", '{"train": {}}'])
def test_damaged_counts_make_a_unit_unfinished(finished, damaged, output):
    folder = pathlib.Path(finished.output)
    (folder / prepared.INFO_FILE).unlink()
    (folder / prepared.UNITS_FOLDER / "00001.json").write_text(damaged)
    prepare.prepare(finished, progress=False)
    assert shards(folder) == shards(output)
    assert json.loads((folder / prepared.UNITS_FOLDER / "00001.json").read_text())


KILLED_IN_THE_THIRD_UNIT = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import data_corpus
from deconstruct.data import prepare, units

finish, finished = units.ShardWriter.finish, []

def finish_or_die(writer):
    finished.append(writer)
    if len(finished) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return finish(writer)

units.ShardWriter.finish = finish_or_die
prepare.prepare(data_corpus.settings({source!r}, {output!r}), progress=False)
"""


def test_killed_run_goes_on_where_it_was(source, output, tmp_path):
    killed = tmp_path / "killed"
    program = KILLED_IN_THE_THIRD_UNIT.format(
        tests=str(pathlib.Path(__file__).parent), source=str(source), output=str(killed)
    )
    process = subprocess.run([sys.executable, "-c", program])
    assert process.returncode == -signal.SIGKILL
    kept = {path.name: when for path, when in times(killed).items() if path.suffix != ".partial"}
    assert "00001.json" in kept and "00002.json" not in kept
    assert list(killed.glob("*.partial"))
    with pytest.raises(ValueError, match="unfinished"):
        open_dataset(killed)
    prepare.prepare(data_corpus.settings(source, killed), progress=False)
    now = {path.name: when for path, when in times(killed).items()}
    assert {name: now[name] for name in kept if name != ".lock"} == {
        name: when for name, when in kept.items() if name != ".lock"
    }
    assert shards(killed) == shards(output)
    assert not list(killed.glob("*.partial"))


def test_lost_or_short_shard_is_noticed_and_made_again(source, output, tmp_path):
    settings = data_corpus.settings(source, tmp_path / "data")
    prepare.prepare(settings, progress=False)
    lost, short, *_ = sorted((tmp_path / "data").glob("*.array_record*"))
    lost.unlink()
    short.write_bytes(short.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{lost.name} is missing or not"):
        open_dataset(tmp_path / "data")
    prepare.prepare(settings, progress=False)
    assert shards(tmp_path / "data") == shards(output)


def test_other_settings_are_refused_with_the_differences(source, output):
    with pytest.raises(ValueError) as error:
        prepare.prepare(data_corpus.settings(source, output, max_len=64, validation_share=0.2))
    assert "max_len 32 there, 64 now; validation_share 0.1 there, 0.2 now" in str(error.value)
    with pytest.raises(ValueError, match="tokenizer bpe:300 there, bpe:301 now"):
        prepare.prepare(data_corpus.settings(source, output, tokenizer="bpe:301"))


def test_other_input_is_refused(source, output, tmp_path):
    other = data_corpus.write_source(tmp_path / "other", num_files=2)
    with pytest.raises(ValueError, match="source_files 3 there, 2 now"):
        prepare.prepare(data_corpus.settings(other, output))


def test_moved_source_and_tokenizer_are_the_same(source, output, tmp_path):
    """What counts is the content: data made with a tokenizer file takes that file anywhere."""
    one = data_corpus.settings(source, tmp_path / "a", tokenizer=str(output))
    prepare.prepare(one, progress=False)
    (tmp_path / "t.json").write_bytes((output / "tokenizer.json").read_bytes())
    moved = data_corpus.write_source(tmp_path / "moved")
    again = data_corpus.settings(moved, tmp_path / "a", tokenizer=str(tmp_path / "t.json"))
    prepare.prepare(again, progress=False)
    assert shards(tmp_path / "a") == shards(output)


def test_directory_of_something_else_is_refused(source, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds other files, such as notes.txt"):
        prepare.prepare(data_corpus.settings(source, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(ValueError, match="cannot be written"):
        prepare.prepare(data_corpus.settings(source, tmp_path / "notes.txt" / "data"))


def test_failed_start_can_be_corrected(source, tmp_path):
    """A wrong tokenizer leaves no claim on the directory."""
    with pytest.raises(ValueError, match="does not exist"):
        prepare.prepare(data_corpus.settings(source, tmp_path / "data", tokenizer="none.json"))
    with pytest.raises(ValueError, match="yields only"):
        prepare.prepare(
            data_corpus.settings(source, tmp_path / "data", tokenizer="bpe:60000"), progress=False
        )
    (tmp_path / "data" / "shard_of_the_first_try.partial").write_text("killed while writing")
    prepare.prepare(data_corpus.settings(source, tmp_path / "data"), progress=False)
    assert not list((tmp_path / "data").glob("*.partial"))


def test_bad_row_stops_and_keeps_finished_units(tmp_path):
    source = data_corpus.write_source(tmp_path / "source")
    with open(source / "part_2.jsonl", "a") as file:
        file.write('{"text": null}\n')
    settings = data_corpus.settings(source, tmp_path / "data", tokenizer="bpe:257")
    with pytest.raises(ValueError, match=r"part_2.jsonl, line 41: 'text' is null"):
        prepare.prepare(settings, progress=False)
    with pytest.raises(ValueError, match=r"part_2.jsonl, line 41: 'text' is null"):
        prepare.prepare(dataclasses.replace(settings, num_processes=2), progress=False)


def test_empty_documents_are_counted_and_give_no_tokens(tmp_path):
    texts = ["first text", "", " \n\t", "second text"]
    data_corpus.write_jsonl(tmp_path / "a.jsonl", texts)
    settings = data_corpus.settings(
        tmp_path / "a.jsonl", tmp_path / "data", tokenizer="bpe:257", validation_share=0.0
    )
    info = prepare.prepare(settings, progress=False)
    assert info.counts["train"]["documents"] == 2
    assert info.counts["train"]["empty_documents"] == 2
    (row,) = open_dataset(tmp_path / "data").rows("train", [0])
    assert row.num_tokens == 2 + len("first text") + len("second text")
    np.testing.assert_array_equal(row.starts, [0, 1 + len("first text")])


def test_enormous_documents_take_bounded_time(tmp_path):
    """5 MB with spaces and 1 MB without any; the tokenizer is trained on both, too."""
    spaced = (data_corpus.text(20_000) * 50)[:5_000_000]
    data_corpus.write_jsonl(tmp_path / "source" / "a.jsonl", data_corpus.texts(30))
    data_corpus.write_jsonl(tmp_path / "source" / "b.jsonl", [spaced, "a" * 1_000_000])
    settings = data_corpus.settings(
        tmp_path / "source", tmp_path / "data", validation_share=0.0, max_len=512
    )
    begin = time.process_time()
    info = prepare.prepare(settings, progress=False)
    assert time.process_time() - begin < 20  # seconds of CPU, over all threads
    assert info.shards["train"][1].text_bytes == 6_000_000
    assert info.shards["train"][1].inexact_cuts == 3  # of the letters, none of the words


def test_split_without_documents_is_an_error(tmp_path):
    data_corpus.write_jsonl(tmp_path / "a.jsonl", ["only text"])
    settings = data_corpus.settings(
        tmp_path / "a.jsonl", tmp_path / "data", tokenizer="bpe:257", validation_share=1e-9
    )
    with pytest.raises(ValueError, match="no document falls to validation"):
        prepare.prepare(settings, progress=False)


def test_token_dtype():
    assert prepared.token_dtype(65536) == np.uint16
    assert prepared.token_dtype(65537) == np.int32


def test_units_keep_splits_apart_and_near_their_size():
    def file(name, num_bytes, split):
        return sources.SourceFile(name, name, ".txt", num_bytes, split)

    files = [file(f"t{i}", 30, "train") for i in range(4)]
    files += [file("big", 500, "train"), file("t5", 10, "train"), file("v", 5, "validation")]
    plan = units.plan_units(files, unit_bytes=64, output="", max_len=8, validation_share=0.1)
    assert [[f.name for f in unit.files] for unit in plan] == [
        ["t0", "t1"],
        ["t2", "t3"],
        ["big"],
        ["t5"],
        ["v"],
    ]
    assert plan[3].shards == (("train", "deconstruct-train.array_record-00003-of-00004"),)
    assert plan[4].shards == (("validation", "deconstruct-validation.array_record-00000-of-00001"),)


KILLED_WORKER = """
import os, signal
import data_corpus
from deconstruct import entry
from deconstruct.data import prepare, units

def die(unit):
    os.kill(os.getpid(), signal.SIGKILL)

units.prepare_unit = die  # pickled by name, of this file, for the workers

def main(argv):
    settings = data_corpus.settings({source!r}, {output!r}, num_processes=2)
    prepare.prepare(settings, progress=False)

if __name__ == "__main__":
    entry.run(main)
"""


def run_command(*arguments):
    return run_python("-m", "deconstruct.data.prepare", *arguments)


def run_python(*arguments):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=devices.environment(1), capture_output=True, text=True)


def test_command(tmp_path):
    data_corpus.write_jsonl(tmp_path / "a.jsonl", data_corpus.texts(40))
    arguments = ["--tokenizer=bpe:300", "--max_len=32", f"--output={tmp_path / 'data'}"]
    done = run_command(f"--source={tmp_path / 'a.jsonl'}", *arguments, "--validation_share=0.2")
    assert done.returncode == 0, done.stderr
    assert "train: " in done.stdout and "validation: " in done.stdout
    assert json.loads((tmp_path / "data" / "prepared.json").read_text())["max_len"] == 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source=none"], "error: source 'none': no such file"),
        (["--source=none", "--sorce=none"], "error: Unknown command line flag 'sorce'. Did you"),
        (["--source=none", "--max_len=many"], "error: flag --max_len=many: "),
        (["--source=none", "more"], "error: unknown argument 'more'; flags begin with --"),
        ([], "error: --source is missing; "),
    ],
)
def test_errors_of_the_command_are_one_line(tmp_path, arguments, message):
    required = ["--tokenizer=bpe:300", "--max_len=32", f"--output={tmp_path / 'data'}"]
    failed = run_command(*required, *arguments)
    assert failed.returncode == 1
    assert failed.stderr.startswith(message) and failed.stderr.count("\n") == 1, failed.stderr
    assert not failed.stdout


FULL_DISK = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, ({num_bytes}, {num_bytes}))
runpy.run_module("deconstruct.data.prepare", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("num_bytes", [1_000, 30_000])  # too few for the tokenizer, for a shard
def test_full_disk_is_one_line(source, tmp_path, num_bytes):
    """Limited in the size of a file; nothing else in the way of writing can be had everywhere."""
    arguments = ["--tokenizer=bpe:257", "--max_len=32", f"--output={tmp_path / 'data'}"]
    program = FULL_DISK.format(num_bytes=num_bytes)
    failed = run_python("-c", program, f"--source={source}", *arguments)
    assert failed.returncode == 1 and "Traceback" not in failed.stderr, failed.stderr
    last = failed.stderr.splitlines()[-1]
    assert last.startswith(f"error: preparing {tmp_path / 'data'} stopped (")
    assert "File too large" in last and last.endswith("run the same command again to go on")


def test_command_of_a_killed_worker_is_one_line(tmp_path):
    program = KILLED_WORKER.format(
        source=str(data_corpus.write_source(tmp_path / "source")),
        output=str(tmp_path / "data"),
    )
    script = tmp_path / "killed_worker.py"
    script.write_text(program)
    failed = run_python(script)
    assert failed.returncode == 1 and "Traceback" not in failed.stderr, failed.stderr
    assert failed.stderr.splitlines()[-1].startswith("error: a preparation process was killed")


SLOW_COMMAND = """
import dataclasses, time
from deconstruct import entry
from deconstruct.data import packing, prepare

@dataclasses.dataclass(frozen=True)
class SmallUnits(prepare.PrepareSettings):
    unit_bytes: int = 1

prepare.PrepareSettings = SmallUnits
add = packing.Packer.add

def slow(*args):
    time.sleep(0.02)
    return add(*args)

packing.Packer.add = slow  # in the processes too: they import this file

if __name__ == "__main__":
    prepare._define_flags()
    entry.run(prepare.main)
"""


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc").is_dir(), reason="looks at processes in /proc")
@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_signals_to_all_processes_end_the_command_at_once(
    source, output, tmp_path, number, num_processes
):
    """As from a scheduler and a terminal: one line, what is finished stays, the rest is made."""
    program, folder = tmp_path / "slow.py", tmp_path / "data"
    program.write_text(SLOW_COMMAND)
    settings = data_corpus.settings(source, folder, tokenizer=str(output / "tokenizer.json"))
    names = ("source", "tokenizer", "max_len", "output", "validation_share")
    command = [sys.executable, program, f"--num_processes={num_processes}"]
    command += [f"--{name}={getattr(settings, name)}" for name in names]
    with processes.Session(command, tmp_path / "log") as session:
        session.wait_until(lambda: list(folder.glob("units/*.json")))
        session.signal(number)
        status, lines = session.ends(10)
    assert status == 1
    assert lines[-1] == (
        f"error: stopped by {number.name}: finished units are kept; run the same command again to "
        "go on"
    )
    assert not any("Traceback" in line for line in lines), lines
    kept = {path: when for path, when in times(folder).items() if path.match("units/*.json")}
    assert 1 <= len(kept) < 3
    prepare.prepare(settings, progress=False)
    assert shards(folder) == shards(output)
    assert {path: times(folder)[path] for path in kept} == kept


def test_ctrl_c_in_a_program_does_not_wait_for_the_processes(source, output, tmp_path):
    """They do not hear it, and what they were doing could take hours."""
    folder = tmp_path / "data"
    program = tmp_path / "program.py"
    program.write_text(
        SLOW_COMMAND.partition("if __name__")[0].replace("0.02", "60")
        + PREPARING_PROGRAM.format(source=str(source), output=str(folder), tokenizer=str(output))
    )
    with processes.Session([sys.executable, program], tmp_path / "log") as session:
        session.wait_until(lambda: len(list(folder.glob("*.partial"))) >= 4)
        session.signal(signal.SIGINT)
        status, lines = session.ends(10)
    assert status != 0 and lines[-1] == "KeyboardInterrupt"
    assert sum("Traceback" in line for line in lines) == 1, lines


PREPARING_PROGRAM = """
import signal
import data_corpus

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has none
    settings = data_corpus.settings({source!r}, {output!r}, tokenizer={tokenizer!r})
    prepare.prepare(dataclasses.replace(settings, num_processes=2), progress=False)
"""


def test_what_is_finished_is_on_the_disk(tmp_path, monkeypatch):
    """A power cut must not leave a file of the right length and name without its content."""
    synced, rename = set(), pathlib.Path.rename
    fsync = os.fsync

    def noted(descriptor):
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def checked(self, target):
        assert str(self) in synced, self
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(pathlib.Path, "rename", checked)
    source = data_corpus.write_source(tmp_path / "source")
    prepare.prepare(data_corpus.settings(source, tmp_path / "data"), progress=False)
    assert any(name.endswith(".partial") and "array_record" in name for name in synced)
