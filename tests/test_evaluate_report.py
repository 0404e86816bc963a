"""The paper's tables beside our figures, and the table as a picture."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import models
import pytest

from deconstruct.evaluate import report, run

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_context_table_has_the_papers_figures_where_it_has_the_length():
    table = report.context_table({100: 9.0, 128: 8.0, 2048: 7.5}, "ours")
    assert table.columns == ["100", "128", "2048"]
    assert len(table.rows) == 1 + 6 + 6 + 1  # standard, two plans of every mixer, ours
    assert table.rows["paper 500m: standard"] == [None, 69.9, 38.1]
    assert table.rows["paper 500m: hybrid_even rnd_emb_qk"] == [None, 72.4, 39.3]
    assert list(table.rows.items())[-1] == ("ours", [9.0, 8.0, 7.5])
    assert report.markdown(table).splitlines()[:3] == [
        "| model | 100 | 128 | 2048 |",
        "| --- | ---: | ---: | ---: |",
        "| paper 500m: standard |  | 69.9 | 38.1 |",
    ]


def test_the_papers_figures_are_those_it_printed(shared_dir):
    ours = json.loads(report.PAPER_FILE.read_text())
    printed = json.loads((shared_dir / "paper_results.json").read_text())
    names = {"1.7b": "1700m", "source": "source"}
    assert {names.get(key, key) for key in printed} == ours.keys()
    for key in printed.keys() - {"source"}:
        assert ours[names.get(key, key)] == printed[key]


def test_the_papers_models_like_ours_are_in_the_table():
    def rows(mixer, plan, num_kv_heads=4):
        spec = models.make_spec(mixer, plan, 4, num_kv_heads=num_kv_heads)
        return list(report.table([], "ours", spec).rows)

    beside = ["paper: random", "paper: majority"]
    assert rows("standard", "uniform") == [*beside, "paper 500m: standard", "ours"]
    assert rows("mlp", "uniform") == [
        *beside, "paper 500m: standard", "paper 500m: uniform mlp", "ours",
    ]  # fmt: skip
    assert rows("mlp", "even")[3] == "paper 500m: hybrid_even mlp"
    assert len(rows("mlp", "odd")) == len(rows("mlp+approximate", "even")) == 4
    shared = rows("rnd_emb_qk", "even", num_kv_heads=2)
    assert shared[2:4] == ["paper 500m_gqa: standard", "paper 500m_gqa: hybrid_even rnd_emb_qk"]


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_a_picture_has_a_row_for_each_model(tmp_path):
    from matplotlib import image

    from deconstruct.evaluate import picture

    results = [run.TaskResult("copa", {"acc,none": 0.5}, 1, 1, 0, 0, 0, None, {}, [])]
    heights, widths = [], []
    for name in ("ours", "a model of a much longer name"):
        table = report.table(results, name)
        picture.write(tmp_path / "table.png", table)
        height, width, _ = image.imread(tmp_path / "table.png").shape
        heights.append(height)
        widths.append(width)
    assert heights == [150, 150] and widths[0] < widths[1]
    fewer = report.Table(table.columns, {"ours": table.rows["paper 500m: standard"]})
    picture.write(tmp_path / "table.png", fewer)
    pixels = image.imread(tmp_path / "table.png")
    assert pixels.shape[0] == 60
    assert pixels[:30, :, 0].min() < 0.1 and pixels[30:, :, 0].min() < 0.1  # dark letters


def test_a_picture_without_its_library_is_an_error_with_the_install_line(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError('none here')")
    given = ["--png", "--checkpoint=none", "--data_dir=none", f"--output={tmp_path / 'out.json'}"]
    done = subprocess.run(
        [sys.executable, "-m", "deconstruct.evaluate", *given],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stderr == (
        "error: --png needs the package matplotlib: pip install -r requirements-evaluate.txt\n"
    )
