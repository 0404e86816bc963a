"""Mixtures: which source a sample is of, order, epochs (D8), refusals, and a run on one."""

import collections
from fractions import Fraction

import data_corpus
import numpy as np
import pytest
import test_data_loader
import tiny_run

from deconstruct import config as config_lib
from deconstruct import run
from deconstruct.data import prepare
from deconstruct.data.mixture import Mixture, Source, Turn, open_mixture

BATCH = 4
WORDS = {"long": 50, "short": 20}  # of each of two documents


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two prepared sources of one tokenizer, texts that differ, and unequal sizes."""
    root = tmp_path_factory.mktemp("mixture")
    tokenizer = "bpe:270"
    for place, (name, num_words) in enumerate(WORDS.items()):
        source = root / f"{name}-text"
        for split, seed in (("train", 10 * place), ("validation", 10 * place + 5)):
            texts = [data_corpus.text(num_words, seed + i) for i in range(2)]
            data_corpus.write_jsonl(source / split / "a.jsonl", texts)
        settings = data_corpus.settings(source, root / name, tokenizer=tokenizer)
        prepare.prepare(settings, progress=False)
        tokenizer = str(root / name / "tokenizer.json")
    return root


@pytest.fixture(scope="module")
def mixture(folders):
    return open_mixture([(str(folders / "long"), Fraction(7)), (str(folders / "short"), 3)])


def numbered_rows(mixture):
    """First ids of a row -> (source, row number)."""
    found = {}
    for k, source in enumerate(mixture.sources):
        rows = source.dataset.rows("train", range(source.dataset.num_rows("train")))
        found |= {row.ids[:-1].astype(np.int32).tobytes(): (k, i) for i, row in enumerate(rows)}
    assert len(found) == sum(source.dataset.num_rows("train") for source in mixture.sources)
    return found


def samples(mixture, count, **options):
    rows = numbered_rows(mixture)
    batches = test_data_loader.batches(mixture, -(-count // BATCH), **options)
    return [rows[row.tobytes()] for batch in batches for row in batch.tokens_BT][:count]


@pytest.mark.parametrize("weights", [(1,), (1, 1), (7, 3), (1, 2, 3, 5), (997, 2, 1)])
def test_counts_are_the_shares_at_any_number_of_samples(weights):
    total = sum(weights)
    mixture = Mixture([Source(str(w), None, Fraction(w, total)) for w in weights])
    counted = [0] * len(weights)
    for n in range(2 * total):
        assert mixture.counts(n) == counted
        for count, weight in zip(counted, weights, strict=True):
            assert abs(count - Fraction(n * weight, total)) < len(weights)
        source, number = mixture.locate(n)
        assert number == counted[source]
        counted[source] += 1
    assert counted == [2 * weight for weight in weights]


def test_each_source_is_read_row_by_row_in_epochs_of_its_own(mixture):
    seen = samples(mixture, 400)
    taken = collections.Counter(source for source, _ in seen)
    assert taken == {0: 280, 1: 120}
    for k, source in enumerate(mixture.sources):
        rows = source.dataset.num_rows("train")
        numbers = [number for other, number in seen if other == k]
        epochs = [tuple(numbers[i : i + rows]) for i in range(0, len(numbers) - rows + 1, rows)]
        assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
        assert len(set(epochs)) == len(epochs) >= 2
    assert samples(mixture, 40, seed=1) != seen[:40]


def test_sources_of_one_size_are_not_read_in_one_order(mixture):
    long = mixture.sources[0].dataset
    twice = Mixture([Source("a", long, Fraction(1, 2)), Source("b", long, Fraction(1, 2))])
    rows = long.num_rows("train")
    order = {
        k: [twice.locate(n).number for n in range(2 * rows) if twice.locate(n).source == k]
        for k in range(2)
    }
    assert order[0] == order[1] == list(range(rows))
    ids = [row.tobytes() for b in test_data_loader.batches(twice, rows // 2) for row in b.tokens_BT]
    assert ids[::2] != ids[1::2]


def test_a_mixture_of_one_is_the_source(mixture, folders):
    """The same rows as before there were mixtures: the first of them, by number."""
    one = open_mixture([(str(folders / "long"), Fraction(2, 3))])
    assert one.sources[0].share == 1
    assert [one.locate(n) for n in range(9)] == [(0, n) for n in range(9)]


def test_resumed_at_every_step_and_by_any_workers_and_hosts(mixture):
    unbroken = test_data_loader.batches(mixture, 45)
    for step in range(1, 31):
        test_data_loader.assert_same(
            test_data_loader.batches(mixture, 12, start_step=step), unbroken[step : step + 12]
        )
    test_data_loader.assert_same(
        test_data_loader.batches(mixture, 12, start_step=20, num_workers=2), unbroken[20:32]
    )
    shares = [
        test_data_loader.batches(mixture, 5, process_index=i, process_count=2) for i in range(2)
    ]
    for step, parts in enumerate(zip(*shares, strict=True)):
        joined = np.concatenate([part.tokens_BT for part in parts])
        np.testing.assert_array_equal(joined, unbroken[step].tokens_BT)


def test_turns_are_the_samples_that_begin_an_epoch(mixture):
    rows = [source.dataset.num_rows("train") for source in mixture.sources]
    expected, counted = [], [0, 0]
    for n in range(500):
        source = mixture.locate(n).source
        if counted[source] and counted[source] % rows[source] == 0:
            expected.append(
                (n, Turn(mixture.sources[source].name, counted[source] // rows[source] + 1))
            )
        counted[source] += 1
    assert {turn.source for _, turn in expected} == {"long", "short"} and len(expected) > 5
    for width in (1, 4, 7):
        found = [mixture.turns(n, n + width) for n in range(0, 500 - width, width)]
        wanted = [
            [turn for n, turn in expected if i * width <= n < (i + 1) * width]
            for i in range(len(found))
        ]
        assert [sorted(turns) for turns in found] == [sorted(turns) for turns in wanted]


def test_the_last_step_without_a_repeated_row(mixture):
    steps = mixture.last_step_without_repeats(BATCH)
    seen = samples(mixture, (steps + 1) * BATCH)
    assert len(set(seen[: steps * BATCH])) == steps * BATCH
    assert len(set(seen)) < len(seen)
    one = Mixture([mixture.sources[0]._replace(share=Fraction(1))])
    rows = one.sources[0].dataset.num_rows("train")
    assert one.last_step_without_repeats(1) == rows
    assert one.last_step_without_repeats(rows + 1) == 0


def test_a_source_with_fewer_rows_than_a_batch_takes_of_it(mixture):
    long, short = (source.dataset.num_rows("train") for source in mixture.sources)
    fits = short * 10 // 3
    assert fits * 7 // 10 < long
    mixture.check_batch(fits)
    with pytest.raises(ValueError, match=rf"short: .* {short} rows .* a share of 3/10, takes"):
        test_data_loader.batches(mixture, 1, batch_size=fits + 1)


def test_held_out_sets(mixture):
    both = mixture.held_out(["validation"])
    assert [(name, split) for name, _, split in both] == [
        ("long/validation", "validation"),
        ("short/validation", "validation"),
    ]
    assert both[1].dataset is mixture.sources[1].dataset
    assert [h.name for h in mixture.held_out(["short/validation"])] == ["short/validation"]
    alone = Mixture([mixture.sources[0]._replace(share=Fraction(1))])
    assert [h.name for h in alone.held_out(["validation"])] == ["validation"]
    with pytest.raises(ValueError, match="names web/validation; the sources are long, short"):
        mixture.held_out(["web/validation"])
    with pytest.raises(ValueError, match=r"long has no split 'dev', only train, validation"):
        mixture.held_out(["dev"])


def test_sources_that_do_not_go_together(folders, tmp_path):
    long, text = str(folders / "long"), str(folders / "short-text")
    with pytest.raises(ValueError, match=r"names .*/long/?\.? twice: give it once"):
        open_mixture([(long, 1), (f"{long}/.", 1)])
    tokenizer = str(folders / "long" / "tokenizer.json")
    settings = data_corpus.settings(text, tmp_path / "rows", max_len=16, tokenizer=tokenizer)
    prepare.prepare(settings, progress=False)
    with pytest.raises(ValueError, match=r"rows was prepared with max_len 16, .*long with 32"):
        open_mixture([(long, 1), (str(tmp_path / "rows"), 1)])
    prepare.prepare(data_corpus.settings(text, tmp_path / "ids"), progress=False)
    with pytest.raises(ValueError, match=r"ids was prepared with tokenizer_sha256 .*prepare one"):
        open_mixture([(long, 1), (str(tmp_path / "ids"), 1)])


def test_sources_of_one_name_are_called_by_their_paths(folders, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "long").symlink_to(folders / "short")
    weights = [(str(folders / "long"), 1), (str(tmp_path / "a" / "long"), 1)]
    sources = open_mixture(weights).sources
    assert [source.name for source in sources] == [path for path, _ in weights]
    (tmp_path / "web").symlink_to(folders / "short")
    sources = open_mixture([weights[0], (str(tmp_path / "web"), 1)]).sources
    assert [source.name for source in sources] == ["long", "web"]


@pytest.mark.parametrize(
    ("entry", "weights"),
    [("data/web=0.7", Fraction(7, 10)), ("a=b=3", 3), ("x=1/3", Fraction(1, 3)), ("x=1e-3", None)],
)
def test_weights_are_exact(entry, weights):
    data = config_lib.DataConfig(mixture=(entry,))
    expected = Fraction(1, 1000) if weights is None else weights
    assert data.weights == [(entry.rpartition("=")[0], expected)]


@pytest.mark.parametrize("entry", ["data/web", "data/web=", "=1", "x=0", "x=-1", "x=nan", "x=1/0"])
def test_entries_that_say_no_weight(entry):
    with pytest.raises(ValueError, match="must be DIR=WEIGHT with a positive weight"):
        config_lib.Config(data=config_lib.DataConfig(mixture=(entry,)))


def test_path_and_mixture_together():
    with pytest.raises(ValueError, match=r"data\.path=a and data.mixture are both set"):
        config_lib.Config(data=config_lib.DataConfig(path="a", mixture=("b=1",)))
    data = config_lib.DataConfig(
        mixture=("b=1",), prepare_source="wiki_leads", prepare_tokenizer="bpe:512"
    )
    with pytest.raises(ValueError, match=r"prepare the sources of data\.mixture first"):
        config_lib.Config(data=data)


@pytest.fixture(scope="module")
def config_file(folders):
    return tiny_run.write_config(folders, folders / "long")


QUIET = {"log.diagnose_every": None}  # the last step has diagnostics, wherever a run is cut


def flags(folders, weights=(7, 3), **changes):
    entries = [f"{folders / name}={w}" for name, w in zip(WORDS, weights, strict=True)]
    changes = {"data.path": None, "data.mixture": tuple(entries), **QUIET, **changes}
    return [f"--config.{key}={value}" for key, value in changes.items()]


@pytest.fixture(scope="module")
def unbroken(folders, config_file, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("unbroken")
    done = tiny_run.run_command(tiny_run.command(config_file, workdir, *flags(folders)))
    assert done.returncode == 0, done.stderr[-3000:]
    return workdir, done


def test_a_run_says_what_it_reads_and_when_an_epoch_begins(unbroken, mixture):
    workdir, done = unbroken
    begun = tiny_run.records(workdir, "epoch")
    expected = [
        (step, *turn)
        for step in range(1, 13)
        for turn in mixture.turns((step - 1) * BATCH, step * BATCH)
    ]
    assert expected and [(r["step"], r["name"], r["epoch"]) for r in begun] == expected
    step, name, epoch = expected[0]
    assert f"step {step}  data {name}: epoch {epoch} begins, in a new order" in done.stderr
    assert "data long: 0.7 of all rows; " in done.stdout
    assert "times by step 12, each time in a new order" in done.stdout
    names = {record["name"] for record in tiny_run.records(workdir, "validation")}
    assert names == {"long/validation", "short/validation"}
    assert "short/validation: loss " in done.stdout


def test_a_run_that_goes_on_within_an_epoch_is_the_unbroken_one(
    unbroken, folders, config_file, tmp_path
):
    """Stopped between two turns; the weights written in another way, and the data moved."""
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in WORDS:
        (moved / name).symlink_to(folders / name)
    first = tiny_run.load_config(
        config_file,
        num_steps=8,
        data__path=None,
        data__mixture=(f"{folders / 'long'}=7", f"{folders / 'short'}=3"),
        **{key.replace(".", "__"): value for key, value in QUIET.items()},
    )
    run.train(first, str(tmp_path / "run"))
    rest = flags(moved, (0.7, 0.3))
    done = tiny_run.run_command(tiny_run.command(config_file, tmp_path / "run", *rest))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resuming from step 8" in done.stdout
    assert tiny_run.facts(tmp_path / "run") == tiny_run.facts(unbroken[0])


def test_another_mixture_is_another_run(unbroken, folders, config_file):
    command = tiny_run.command(config_file, unbroken[0], *flags(folders, (6, 4), num_steps=16))
    done = tiny_run.run_command(command)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert 'data_fingerprint.1.share: "7/10" -> "3/5"' in last
    assert 'data_fingerprint.2.share: "3/10" -> "2/5"' in last
    alone = tiny_run.load_config(config_file, num_steps=16)
    with pytest.raises(ValueError, match=r'data_fingerprint\.1\.share: "7/10" -> "1"'):
        run.train(alone, str(unbroken[0]))


def test_without_repeats_a_run_that_needs_them_is_refused(folders, mixture, config_file, tmp_path):
    steps = mixture.last_step_without_repeats(BATCH)
    assert 0 < steps < 12
    changes = {"data.repeat": False}
    command = tiny_run.command(config_file, tmp_path / "run", *flags(folders, **changes))
    done = tiny_run.run_command(command)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"error: the data is read whole after step {steps}, before num_steps=12, and data.repeat "
        f"is off: set num_steps={steps}, or data.repeat=True"
    )
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_order_of_a_single_source_stays_what_it_was():
    """The order is part of every run's record: it must not change from one version to the next."""
    order = test_data_loader.loader._order(1000, 7, 0)
    assert [int(order[n]) for n in range(6)] == [661, 759, 214, 871, 246, 525]
