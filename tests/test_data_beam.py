"""Apache Beam as the runner: the same shards; without it, one line. Most need its environment."""

import importlib.util
import pathlib
import signal
import sys

import data_corpus
import processes
import pytest
import test_data_sets
from test_data_prepare import shards, times

from deconstruct import tokenizer as tokenizer_lib
from deconstruct.data import beam_runner, prepare, prepared, sources, units

MANY = "--runner=DirectRunner --direct_num_workers=2 --direct_running_mode=multi_processing"

needs_beam = pytest.mark.skipif(
    importlib.util.find_spec("apache_beam") is None, reason="pip install -r requirements-beam.txt"
)


source, output = test_data_sets.source, test_data_sets.output  # fixtures


def with_beam(source, output, **changes):
    return data_corpus.settings(source, output, num_processes=None, runner="beam", **changes)


@needs_beam
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("options", ["", MANY], ids=["direct", "two processes"])
def test_beam_gives_identical_shards(source, output, tmp_path, options):
    settings = with_beam(source, tmp_path / "data", beam_options=options)
    info = prepare.prepare(settings, progress=False)
    assert shards(tmp_path / "data") == shards(output)
    assert info.data_fingerprint == prepared.read_info(output).data_fingerprint
    assert info.sets == prepared.read_info(output).sets


@needs_beam
@pytest.mark.filterwarnings("default")
def test_beam_goes_on_where_it_stopped_and_then_does_nothing(source, output, tmp_path):
    settings = with_beam(source, tmp_path / "data")
    prepare.prepare(settings, progress=False)
    (tmp_path / "data" / prepared.INFO_FILE).unlink()
    lost, *kept = sorted((tmp_path / "data").glob("*.array_record*"))
    lost.unlink()
    before = times(tmp_path / "data")
    prepare.prepare(settings, progress=False)
    after = times(tmp_path / "data")
    assert {path: after[path] for path in kept} == {path: before[path] for path in kept}
    assert shards(tmp_path / "data") == shards(output)
    prepare.prepare(settings, progress=False)
    assert times(tmp_path / "data") == after


@needs_beam
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("options", ["", MANY], ids=["direct", "two processes"])
def test_bad_row_in_beam_is_one_line(tmp_path, output, options):
    source = data_corpus.write_source(tmp_path / "source")
    with open(source / "part_2.jsonl", "a") as file:
        file.write('{"text": null}\n')
    settings = with_beam(source, tmp_path / "data", tokenizer=str(output), beam_options=options)
    with pytest.raises(ValueError) as error:
        prepare.prepare(settings, progress=False)
    assert str(error.value) == (
        f"the Beam pipeline failed: {source / 'part_2.jsonl'}, line 41: 'text' is null, not a "
        "string; mend or remove the row; finished units are kept"
    )


@needs_beam
@pytest.mark.filterwarnings("default")
def test_workers_that_write_elsewhere_are_noticed(source, output, tmp_path, monkeypatch):
    monkeypatch.setattr(units, "finished", lambda unit: None)
    settings = with_beam(source, tmp_path / "data", tokenizer=str(output))
    with pytest.raises(ValueError, match=r"00000.json and 5 more are not there; .* all workers"):
        prepare.prepare(settings, progress=False)


@pytest.mark.skipif(importlib.util.find_spec("apache_beam") is not None, reason="Beam is there")
def test_without_beam_the_remedy_is_named_before_anything_is_written(source, tmp_path):
    with pytest.raises(ValueError, match=r"not installed; .* pip install -r requirements-beam.txt"):
        prepare.prepare(with_beam(source, tmp_path / "data"), progress=False)
    assert not (tmp_path / "data").exists()


def test_finished_data_needs_no_beam(source, output, monkeypatch):
    monkeypatch.setattr(beam_runner, "require", None)
    monkeypatch.setattr(beam_runner, "run", None)
    info = prepare.prepare(with_beam(source, output), progress=False)
    assert info.data_fingerprint == prepared.read_info(output).data_fingerprint


def test_no_pipeline_without_units():
    assert beam_runner.run([], ["--runner=NoSuchRunner"]) == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runner": "spark"}, "runner must be one of processes, beam, not 'spark'"),
        ({"beam_options": "--streaming"}, "beam_options are for runner beam alone"),
        ({"runner": "beam", "num_processes": 2}, "num_processes is not for runner beam; .*workers"),
    ],
)
def test_settings_of_runners_that_do_not_fit(source, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        data_corpus.settings(source, tmp_path, **changes)


def test_one_unit_made_twice_at_a_time(source, output, tmp_path):
    """Beam may do so: whichever ends last leaves the same shard."""
    settings = data_corpus.settings(source, tmp_path / "data", tokenizer=str(output))
    info = prepare.prepare(settings, progress=False)
    shard = info.shards["train"][0]
    tokenizer = tokenizer_lib.load_tokenizer(str(output))
    path = tmp_path / "data" / shard.file
    whole = path.read_bytes()
    first, second = (units.ShardWriter(path, tokenizer, 32) for _ in range(2))
    documents = list(sources.read_documents(sources.list_files(str(source))[0]))
    encoded = tokenizer.encode_batch([document.text for document in documents])
    pairs = list(zip(documents, encoded, strict=True))
    for pair in pairs:
        first.add(*pair)
    for pair in pairs[:5]:
        second.add(*pair)
    first.finish()
    assert path.read_bytes() == whole
    for pair in pairs[5:]:
        second.add(*pair)
    second.finish()
    assert path.read_bytes() == whole


KILLED_UNDER_BEAM = """
import sys, time
sys.path.insert(0, {tests!r})
import test_data_beam
from deconstruct.data import prepare

if __name__ == "__main__":
    settings = test_data_beam.with_beam(
        {source!r}, {output!r}, tokenizer={tokenizer!r}, beam_options={options!r}
    )
    prepare.prepare(settings, progress=False)
"""


@needs_beam
@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_killed_under_beam_it_goes_on_and_keeps_what_is_finished(tmp_path, output):
    """SIGKILL of the whole job, as when a machine is lost, between its first unit and its last."""
    source = data_corpus.write_source(tmp_path / "source", num_files=24, documents=400)
    tokenizer, folder = str(output / "tokenizer.json"), tmp_path / "data"
    program = tmp_path / "killed.py"
    program.write_text(
        KILLED_UNDER_BEAM.format(
            tests=str(pathlib.Path(__file__).parent),
            source=str(source),
            output=str(folder),
            tokenizer=tokenizer,
            options=MANY,
        )
    )
    with processes.Session([sys.executable, program], tmp_path / "log") as session:
        session.wait_until(lambda: len(list(folder.glob("units/*.json"))) >= 2)
        session.signal(signal.SIGKILL)
        status, _ = session.ends(10)
    assert status == -signal.SIGKILL
    kept = {path: when for path, when in times(folder).items() if path.suffix == ".json"}
    kept = {path: when for path, when in kept.items() if path.parent.name == "units"}
    assert 2 <= len(kept) < 24
    settings = with_beam(source, folder, tokenizer=tokenizer, beam_options=MANY)
    info = prepare.prepare(settings, progress=False)
    assert {path: times(folder)[path] for path in kept} == kept
    whole = data_corpus.settings(source, tmp_path / "whole", tokenizer=tokenizer)
    assert prepare.prepare(whole, progress=False).data_fingerprint == info.data_fingerprint
    assert shards(folder) == shards(tmp_path / "whole")
    assert not list(folder.rglob("*.partial"))
