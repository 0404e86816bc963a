"""`tools.describe`: what it prints, from any directory, and what it refuses."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from deconstruct import config as config_lib
from deconstruct import paper
from tools import describe

ROOT = pathlib.Path(__file__).resolve().parents[1]


def run_command(*args: str, cwd=ROOT) -> subprocess.CompletedProcess:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tools.describe", *args]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def describe_paper(size: str, mixer: str, plan: str, **changes) -> str:
    record = paper.run_config(size, mixer, plan)
    record.update_from_flattened_dict(changes)
    return describe.describe(config_lib.parse(record))


def test_layers_options_and_parameters():
    text = describe_paper("70m", "mlp[width=344]+rnd_emb_qk", "even")
    assert "6 layers of width 512: 8 heads of 64 in 8 key/value groups" in text
    rows = re.findall(r"^ +(\d+)  (\w+) +([\d,]+)(.*)$", text, re.MULTILINE)
    assert rows == [
        ("1", "mlp", "528,384", " (-521,728 beside standard) width=344"),
        ("2", "standard", "1,050,112", ""),
        ("3", "rnd_emb_qk", "1,050,112", " seed=0 sigma=0.02"),
        ("4", "standard", "1,050,112", ""),
        ("5", "mlp", "528,384", " (-521,728 beside standard) width=344"),
        ("6", "standard", "1,050,112", ""),
    ]
    assert "parameters 75,621,888: -1,043,456 (-1.361%) beside all standard" in text


def test_matched_mlp_shows_its_width_and_difference():
    text = describe_paper("70m", "mlp", "uniform")
    assert text.count(" 1,044,480 (-5,632 beside standard) width=680") == 6
    assert "parameters 76,631,552: -33,792 (-0.044%) beside all standard" in text


def test_flops_and_memory_by_hand():
    text = describe_paper("70m", "standard", "uniform", **{"compute.remat": "full"})
    layer = 8 * 512**2 + 4 * 2048 * 512 + 6 * 512 * 2048
    forward = 6 * layer + 2 * 512 * 50_277
    assert f"a token     forward {forward:.3e}, train {3 * forward:.3e}" in text
    assert f"{3 * forward * 2**19:.3e} for 256 x 2048 tokens" in text
    assert f"the run     {3 * forward * 2**19 * 28_610:.3e} for 28,610 steps" in text
    bytes_of_parameters = 4 * 76_665_344 / 2**30
    assert f"parameters {bytes_of_parameters:.3f}, moments {2 * bytes_of_parameters:.3f}, " in text
    kept = 6 * 64 * 2048 * 512 * 2 / 2**30
    assert f"activations {kept:.3f} kept by the layers for 64 rows at a time (bfloat16" in text
    assert f"decoding    {6 * 2 * 2048 * 512 * 2 / 2**30:.4f} of caches" in text


def test_the_papers_formulas_stand_beside_ours():
    text = describe_paper("500m", "approximate", "even")
    table = text.partition("one mixer on one row")[2].splitlines()[1:]
    assert [line.strip() for line in table if line[2] != " "] == [
        "approximate: time of order BLd^2", "standard: time of order BL^2d + BLd^2",
    ]  # fmt: skip
    fields = ["prefill FLOPs", "decode FLOPs", "activation bytes", "cache bytes"]
    assert [" ".join(line.split()[:2]) for line in table[1:5]] == fields
    sizes = {"B": 1, "L": 2048, "d": 896, "h": 14, "t": 1}
    printed = f"{paper.evaluate('14BLd^2', **sizes):.3e}"
    assert table[1].split()[-3:] == ["paper", printed, "14BLd^2"]


def test_a_mixer_that_the_paper_lacks(monkeypatch):
    monkeypatch.delitem(paper.PRINTED_COSTS, "mlp")
    text = describe_paper("70m", "mlp", "uniform")
    assert re.search(
        r"  mlp\n(.*\n){3} +cache bytes +ours 0.000e\+00 +paper -$", text, re.MULTILINE
    )


def test_vocabulary_left_to_data_that_is_not_there(tmp_path):
    record = paper.run_config("70m", "mlp", "uniform")
    record.model.vocab_size = None
    record.data.path = str(tmp_path / "nowhere")
    with pytest.raises(
        ValueError, match=r"nowhere is not prepared data.*--config.model.vocab_size"
    ):
        describe.describe(config_lib.parse(record))


def test_fixed_maps_and_what_the_rows_share():
    """Per layer 2048 x 896 values a row in bfloat16, and for all rows 14 maps in float32."""
    text = describe_paper("500m", "rnd_emb_qk", "uniform")
    lines = [
        " ".join(line.split()) for line in text.partition("one mixer on one row")[2].split("\n")
    ]
    decode = 2 * 2048 * 896 + 2 * (2 * 896**2)  # one row of the maps; values and output
    for before, ours, printed in (
        ("prefill", "-", "2L^2d + 2BLd^2"),
        ("decode", f"{decode:.3e}", "2BLd + 2d^2"),
    ):
        value = paper.evaluate(printed, B=1, L=2048, d=896, h=14, t=1)
        (at,) = [i for i, line in enumerate(lines) if line.startswith(f"{before} FLOPs")]
        assert lines[at + 1] == f"maps precomputed ours {ours} paper {value:.3e} {printed}"
    row, maps, paper_cache = 2 * 2048 * 896, 4 * 14 * 2048**2, 2 * (1 + 1) * 2048 * 896
    assert lines[-2:] == [
        f"cache bytes ours {row + maps:.3e} paper {paper_cache:.3e} 2(B+1)Ld",
        f"of these {row:.3e} for each row, {maps:.3e} once for all rows",
    ]
    assert "once for all rows" not in describe_paper("500m", "approximate", "even")


@pytest.mark.parametrize(
    "formula, value",
    [
        ("0", 0),
        ("6Bd^2 + 4BLd", 6 * 2 * 5**2 + 4 * 2 * 3 * 5),
        ("2(B+1)Ld", 2 * (2 + 1) * 3 * 5),
        ("6Bd + 4Bd^2/h", 6 * 2 * 5 + 4 * 2 * 5**2 / 7),
        ("11BLd/t + 3Bdht^-2", 11 * 2 * 3 * 5 / 11 + 3 * 2 * 5 * 7 / 11**2),
    ],
)
def test_printed_formulas_are_read_as_written(formula, value):
    assert paper.evaluate(formula, B=2, L=3, d=5, h=7, t=11) == pytest.approx(value)


@pytest.mark.parametrize("how", ["absolute", "relative"])
def test_from_any_directory(tmp_path, how):
    """A config file by its path, from a directory that has a configs/ of its own."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "__init__.py").touch()
    path = ROOT / "configs" / "70m_hybrid.py"
    if how == "relative":
        path = os.path.relpath(path, tmp_path)
    done = run_command(f"--config={path}:approximate,even", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ +1  approximate ", done.stdout, re.MULTILINE)


def test_none_on_the_command_line():
    """No value where a key allows that; of `remat` it is a value like others."""
    for none in ("None", "none"):
        flags = [f"--config.model.num_kv_heads={none}", "--config.compute.remat=none"]
        flags.append("--config.data.validation=('a','b')")
        done = run_command("--config=configs/500m_gqa.py:mlp,even", *flags)
        assert "14 heads of 64 in 14 key/value groups" in done.stdout, done.stderr
        assert "remat none" in done.stdout


@pytest.mark.parametrize(
    "args, message",
    [
        ([], "--config is missing"),
        (["--config=configs/70m_hybrid.py:aproximate,even"], "did you mean 'approximate'?"),
        (["--config=configs/70m_hybrid.py:mlp,evne"], "did you mean 'even'?"),
    ],
)
def test_errors_are_one_line(args, message):
    done = run_command(*args)
    assert done.returncode != 0 and not done.stdout
    assert done.stderr.startswith("error: ") and message in done.stderr
    assert len(done.stderr.splitlines()) == 1
