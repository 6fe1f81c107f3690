"""A short demo: the fit of a simulated log, with true values."""

import subprocess
import sys
from pathlib import Path

import pytest

import recpo

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_whole_road_in_a_hurry(tmp_path):
    out = tmp_path / "demo"
    size = ["--users", "150", "--items", "60", "--events", "9000", "--minutes", "0.2"]
    command = [sys.executable, "-m", "recpo.cli.main", "demo", "--out", str(out), *size]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for verb in ("simulate", "fit", "prepare", "factorize", "train", "evaluate", "export"):
        assert f"recpo {verb} " in done.stdout
    decision = recpo.load(out / "fit")
    assert f"ship {decision.chosen}" in done.stdout
    assert "recommendations" in done.stdout
    values = {row["name"]: row["test"] for row in decision.facts["leaderboard"]}
    oracle = decision.facts["oracle"]["true_reward@10"]["mean"]
    assert values["popularity"]["true_reward@10"]["mean"] < oracle
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 1
    assert "exists already" in again.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--overwrite", "true"], "files that recpo did not write"),
        ([], "exists already"),
        (["--events", "0", "--overwrite", "true"], "events: expected a number >0, got 0"),
    ],
)
def test_a_demo_takes_the_place_of_nothing_but_a_demo(tmp_path, capsys, options, message):
    from recpo.cli.main import main

    (tmp_path / "precious").write_text("mine", encoding="utf-8")
    assert main(["demo", "--out", str(tmp_path), *options]) in (1, 2)
    assert message in capsys.readouterr().err
    assert (tmp_path / "precious").read_text(encoding="utf-8") == "mine"
