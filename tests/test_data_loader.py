"""The loader: order from the step alone (D1), hosts (D2), entry points (D7), vocabulary (T2)."""

import collections
import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import data_corpus
import devices
import numpy as np
import pytest

from deconstruct.data import loader, packing, prepare, prepared, readers, shards, sources
from deconstruct.data.dataset import PreparedDataset, first_tokens, open_dataset
from deconstruct.data.mixture import alone

BATCH = 4
FILE = sources.SourceFile("a", "a", ".jsonl", 1)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loader")
    data_corpus.write_source(folder / "source", documents=30)
    prepare.prepare(data_corpus.settings(folder / "source", folder / "data"), progress=False)
    return open_dataset(folder / "data")


def batches(data, count, **options):
    """The first batches of a mixture, or of a dataset alone."""
    options = {"batch_size": BATCH, "seed": 7, "start_step": 0, "num_workers": 0} | options
    if isinstance(data, PreparedDataset):
        data = alone(data)
    iterator = loader.training_batches(data, **options)
    try:
        return list(itertools.islice(iterator, count))
    finally:
        iterator.close()


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        for name, x, y in zip(packing.Batch._fields, a, b, strict=True):
            np.testing.assert_array_equal(x, y, err_msg=name)


@pytest.fixture(scope="module")
def unbroken(dataset):
    return batches(dataset, 50)


def test_resumed_at_every_step(dataset, unbroken):
    for step in range(1, 31):
        assert_same(batches(dataset, 20, start_step=step), unbroken[step : step + 20])


@pytest.mark.parametrize("step", [0, 13])
def test_order_does_not_depend_on_workers(dataset, unbroken, step):
    assert_same(batches(dataset, 20, start_step=step, num_workers=2), unbroken[step : step + 20])


def row_numbers(dataset):
    """The first ids of a row -> its number; all rows differ in the test's data."""
    rows = dataset.rows("train", range(dataset.num_rows("train")))
    numbers = {row.ids[:-1].tobytes(): i for i, row in enumerate(rows)}
    assert len(numbers) == len(rows)
    return numbers


def rows_seen(dataset, seen):
    """The number of each row of some batches, in their order."""
    numbers = row_numbers(dataset)
    return [numbers[row.astype(np.uint16).tobytes()] for b in seen for row in b.tokens_BT]


def test_each_row_once_per_epoch_in_an_order_of_its_own(dataset):
    num_rows = dataset.num_rows("train")

    def order(seed):
        return rows_seen(dataset, batches(dataset, math.ceil(2.5 * num_rows / BATCH), seed=seed))

    first, again, other = order(0), order(0), order(1)
    epochs = [first[:num_rows], first[num_rows : 2 * num_rows], other[:num_rows]]
    assert all(sorted(epoch) == list(range(num_rows)) for epoch in epochs)
    assert first == again
    assert max(collections.Counter(map(tuple, [*epochs, range(num_rows)])).values()) == 1
    assert first[num_rows : 2 * num_rows] != other[:num_rows]  # near seeds share no epoch


@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_share_each_batch(dataset, unbroken, hosts):
    shares = [
        batches(dataset, 8, process_index=i, process_count=hosts, start_step=3)
        for i in range(hosts)
    ]
    joined = [
        packing.Batch(*(np.concatenate(parts) for parts in zip(*step, strict=True)))
        for step in zip(*shares, strict=True)
    ]
    assert_same(joined, unbroken[3:11])


@pytest.fixture(scope="module")
def of_files(tmp_path_factory):
    """A function from a number of files to the data made of them, a shard each."""
    folder = tmp_path_factory.mktemp("files")

    def make(num_files):
        source = data_corpus.write_source(folder / f"source_{num_files}", num_files, documents=6)
        settings = data_corpus.settings(source, folder / f"{num_files}", validation_share=0.0)
        prepare.prepare(settings, progress=False)
        return open_dataset(folder / f"{num_files}")

    return make


@pytest.mark.parametrize(
    ("num_files", "hosts"), [(1, 4), (2, 4), (3, 4), (5, 4), (2, 3)], ids=lambda n: str(n)
)
def test_every_host_has_as_much_and_together_they_have_all(of_files, num_files, hosts):
    """D2: rows are shared, not files, so few files do no harm. No row is left over at an epoch's
    end: the batch that begins there goes on into the next epoch."""
    dataset = of_files(num_files)
    num_rows = dataset.num_rows("train")
    assert len(dataset.info.shards["train"]) == num_files
    local = next(n for n in (2, 3, 5) if num_rows % (n * hosts))
    batch_size = local * hosts
    shares = [
        batches(dataset, num_rows, batch_size=batch_size, process_index=host, process_count=hosts)
        for host in range(hosts)
    ]
    assert {batch.tokens_BT.shape[0] for share in shares for batch in share} == {local}
    by_host = [np.reshape(rows_seen(dataset, share), (num_rows, local)) for share in shares]
    whole = np.concatenate(by_host, axis=1).ravel()  # as one host would read them
    epochs = whole.reshape(batch_size, num_rows)
    assert (np.sort(epochs) == np.arange(num_rows)).all()
    one = batches(dataset, num_rows, batch_size=batch_size)
    np.testing.assert_array_equal(whole, rows_seen(dataset, one))


def test_more_workers_than_files(of_files):
    dataset = of_files(2)
    assert_same(batches(dataset, 9, num_workers=3), batches(dataset, 9))


ONE_HOST = """
import itertools, json, sys
from deconstruct.data import loader
from deconstruct.data.dataset import open_dataset
from deconstruct.data.mixture import alone

if __name__ == "__main__":
    path, index, count, num_workers = sys.argv[1], *map(int, sys.argv[2:])
    batches = loader.training_batches(
        alone(open_dataset(path)), batch_size=4, seed=7, start_step=0, num_workers=num_workers,
        process_index=index, process_count=count,
    )
    print(json.dumps([batch.tokens_BT.tolist() for batch in itertools.islice(batches, 40)]))
    batches.close()
"""


def test_two_real_processes_share_each_batch(dataset, unbroken, tmp_path):
    """D2: at the same time, one with worker processes and one without."""
    program = tmp_path / "one_host.py"
    program.write_text(ONE_HOST)
    hosts = [
        subprocess.Popen(
            [sys.executable, program, dataset.path, str(index), "2", str(num_workers)],
            env=devices.environment(1),
            stdout=subprocess.PIPE,
        )
        for index, num_workers in enumerate((0, 2))
    ]
    shares = [json.loads(host.communicate(timeout=60)[0]) for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0]
    joined = [[*first, *second] for first, second in zip(*shares, strict=True)]
    assert joined == [batch.tokens_BT.tolist() for batch in unbroken[:40]]


def test_batch_that_hosts_cannot_share(dataset):
    with pytest.raises(ValueError, match="batch_size 4 must be a positive multiple of the 3 hosts"):
        batches(dataset, 1, process_count=3)


def test_fewer_rows_than_a_batch(dataset):
    with pytest.raises(
        ValueError, match=r"has \d+ rows of 33 tokens, fewer than one batch of 9999"
    ):
        batches(dataset, 1, batch_size=9999)
    with pytest.raises(ValueError, match="seed must be in"):
        batches(dataset, 1, seed=-1)


WITHOUT_ABSL = """
from deconstruct.data import loader
from deconstruct.data.dataset import open_dataset
from deconstruct.data.mixture import alone
batches = loader.training_batches(
    alone(open_dataset({path!r})), batch_size=4, seed=7, start_step=0, num_workers=2)
print(next(batches).tokens_BT.tolist())
{then}
"""


def test_workers_start_from_a_program_without_absl(dataset, unbroken):
    program = WITHOUT_ABSL.format(path=dataset.path, then="batches.close()")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == unbroken[0].tokens_BT.tolist()


PRINT_WORKERS = """
import multiprocessing, time
print(*[child.pid for child in multiprocessing.active_children()], flush=True)
time.sleep(60)
"""


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks at processes in /proc")
def test_workers_end_with_a_killed_trainer(dataset):
    program = WITHOUT_ABSL.format(path=dataset.path, then=PRINT_WORKERS)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2 and all(map(is_running, pids))
        time.sleep(1.5)  # they stay while the trainer lives
        assert all(map(is_running, pids))
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, pids))


def test_validation_rows_in_order_with_a_padded_end(dataset):
    num_rows = dataset.num_rows("validation")
    assert num_rows % 4
    rows = dataset.rows("validation", range(num_rows))
    seen = list(loader.validation_batches(dataset, batch_size=4))
    assert len(seen) == math.ceil(num_rows / 4)
    joined = packing.Batch(*(np.concatenate(parts) for parts in zip(*seen, strict=True)))
    assert_same([packing.Batch(*(x[:num_rows] for x in joined))], [packing.make_batch(rows)])
    assert joined.weights_BT[num_rows:].sum() == 0 and len(joined.weights_BT) % 4 == 0
    some = list(loader.validation_batches(dataset, batch_size=4, num_rows=6))
    assert_same(some[:1], seen[:1])
    np.testing.assert_array_equal(some[1].weights_BT[:2], seen[1].weights_BT[:2])
    assert len(some) == 2 and some[1].weights_BT[2:].sum() == 0
    with pytest.raises(ValueError, match=r"has \d+ rows, 9999 were asked for"):
        loader.validation_batches(dataset, batch_size=4, num_rows=9999)


def test_hosts_share_validation_batches(dataset):
    whole = list(loader.validation_batches(dataset, batch_size=4))
    shares = [
        list(loader.validation_batches(dataset, batch_size=4, process_index=i, process_count=2))
        for i in range(2)
    ]
    joined = [
        packing.Batch(*(np.concatenate(parts) for parts in zip(*step, strict=True)))
        for step in zip(*shares, strict=True)
    ]
    assert_same(joined, whole)


def test_first_tokens_are_the_start_of_the_corpus(dataset):
    ids = first_tokens(dataset, 100)
    assert ids.dtype == np.int32 and ids.shape == (100,) and ids[0] == dataset.tokenizer.eot_id
    texts = [
        text
        for text in data_corpus.texts(30, seed=0)
        if sources.split_of(FILE, readers.Document(text, text), 0.1) == "train"
    ]
    documents = [dataset.tokenizer.with_start(dataset.tokenizer.encode(text)) for text in texts]
    np.testing.assert_array_equal(ids, np.concatenate(documents)[:100])
    with pytest.raises(ValueError, match=r"only \d+ tokens, not 10000000"):
        first_tokens(dataset, 10_000_000)


def test_unigram_entropy(dataset):
    counts = collections.Counter()
    for row in dataset.rows("validation", range(dataset.num_rows("validation"))):
        counts.update(row.ids[1 : row.num_tokens].tolist())
    total = sum(counts.values())
    expected = -sum(n / total * math.log(n / total) for n in counts.values())
    assert loader.unigram_entropy(dataset) == pytest.approx(expected, rel=1e-12)
    assert loader.unigram_entropy(dataset, num_rows=1) < expected


def test_ids_outside_the_model_vocabulary_name_the_shard(dataset):
    largest = max(shard.max_token_id for shard in dataset.info.shards["train"])
    dataset.check_vocabulary(largest + 1)
    message = rf"deconstruct-train.array_record-.* holds token id \d+, outside the model's .* {200}"
    with pytest.raises(ValueError, match=message):
        dataset.check_vocabulary(200)


def test_ids_outside_the_vocabulary_of_the_data_name_the_shard(dataset):
    """Rows are looked at too: counts made elsewhere may be wrong."""
    info = dataclasses.replace(dataset.info, vocab_size=50)
    last = dataset.num_rows("train") - 1
    with pytest.raises(ValueError, match=r"array_record-00002-of-00003 holds token ids from"):
        PreparedDataset(info).rows("train", [last])


def test_moved_data_and_changed_data(dataset, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(dataset.path, moved)
    copy = open_dataset(moved)
    assert copy.info.data_fingerprint == dataset.info.data_fingerprint
    assert_same(batches(copy, 3), batches(dataset, 3))
    content = json.loads((moved / prepared.INFO_FILE).read_text())
    content["builder_config"]["validation_share"] = 0.5
    (moved / prepared.INFO_FILE).write_text(json.dumps(content))
    with pytest.raises(ValueError, match="was edited"):
        open_dataset(moved)
    (moved / prepared.TOKENIZER_FILE).write_text(dataset.tokenizer.json + " ")
    with pytest.raises(ValueError, match="is not the tokenizer that the rows were made with"):
        _ = PreparedDataset(dataclasses.replace(dataset.info, path=str(moved))).tokenizer


def test_directory_without_data(tmp_path):
    with pytest.raises(ValueError, match=r"is not prepared data .* deconstruct.data.prepare"):
        open_dataset(tmp_path)


def test_damaged_shard_is_named(dataset, tmp_path):
    """Of its full length, with one bit turned over; the other shards still read."""
    copy = tmp_path / "copy"
    shutil.copytree(dataset.path, copy)
    first, second, *_ = dataset.info.shards["train"]
    data = bytearray((copy / second.file).read_bytes())
    written = [place for place, byte in enumerate(data) if byte]  # the rest is padding
    data[written[len(written) // 2]] ^= 1
    (copy / second.file).write_bytes(data)
    damaged = open_dataset(copy)
    assert len(damaged.rows("train", range(first.rows))) == first.rows
    message = rf"copy/{second.file} is damaged .*remove it and run .*data.prepare again"
    with pytest.raises(ValueError, match=message):
        damaged.rows("train", range(first.rows, first.rows + second.rows))
    for num_workers in (0, 1):
        with pytest.raises(ValueError, match=message):
            batches(damaged, math.ceil(damaged.num_rows("train") / BATCH), num_workers=num_workers)


@pytest.fixture
def many_shards(tmp_path):
    """90 shards of one row each, numbered as the files are that they were made from."""
    for i in range(90):
        data_corpus.write_jsonl(tmp_path / f"source/{i:02d}.jsonl", [f"{i} a b c"])
    settings = data_corpus.settings(tmp_path / "source", tmp_path / "data", validation_share=0.0)
    return open_dataset(prepare.prepare(settings, progress=False).path)


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_more_shards_than_may_be_open(many_shards, monkeypatch):
    """A full corpus has thousands, and each open one has a file and an index in memory."""
    assert shards._open.cache_parameters()["maxsize"] == shards.MOST_OPEN < 1024 - 256
    opened = []
    monkeypatch.setattr(shards, "_open", functools.lru_cache(8)(shards._open.__wrapped__))
    before = open_files()
    for number in np.random.default_rng(0).permutation(90):
        (row,) = many_shards.rows("train", [number])
        text = many_shards.tokenizer.decode(row.ids[1 : row.num_tokens])
        assert text == f"{number} a b c"
        opened.append(open_files() - before)
    assert max(opened) == 8


FEW_FILES = """
import os, resource, sys
from deconstruct.data.dataset import open_dataset

dataset = open_dataset(sys.argv[1])
print(len(dataset.rows("train", [0])))
limit = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
try:
    dataset.rows("train", range(90))
except ValueError as error:
    print(error)
"""


def test_a_disk_that_fails_is_not_called_damage(many_shards):
    """No user shall remove a good shard because a disk does not answer or files are too many."""
    _, second, third, *_ = (
        pathlib.Path(many_shards.path, shard.file) for shard in many_shards.info.shards["train"]
    )
    env = devices.environment(1)
    command = [sys.executable, "-c", FEW_FILES, many_shards.path]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"1\n.* cannot be read \(Too many .*\); raise .*ulimit -n.*\n", done.stdout)

    second.unlink()
    second.symlink_to("/proc/self/mem")  # opens, and does not read at its start
    third.unlink()
    many_shards.rows("train", [0])
    with pytest.raises(ValueError, match=f"{second.name} cannot be read .Input/output .*answers"):
        many_shards.rows("train", [1])
    with pytest.raises(ValueError, match=f"{third.name} cannot be read .No such .*prepare again"):
        many_shards.rows("train", [2])
