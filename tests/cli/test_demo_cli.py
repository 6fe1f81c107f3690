"""The demo, in a hurry: every verb of the road in one process."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_whole_road_in_a_hurry(tmp_path):
    out = tmp_path / "demo"
    size = ["--users", "150", "--items", "60", "--events", "9000", "--seeds", "2", "--epochs", "2"]
    command = [sys.executable, "-m", "recpo.cli.main", "demo", "--out", str(out), *size]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for verb in ("simulate", "prepare", "train", "evaluate", "export", "recommend"):
        assert f"$ recpo {verb} " in done.stdout
    summary = json.loads((out / "summary.json").read_text())
    assert list(summary) == ["GBPO-aligned", "aligned - pre-trained", "popularity", "pre-trained"]
    for row in summary.values():
        assert row.keys() == {"NDCG@10", "disliked@10", "true_reward@10"}
    lists = pq.read_table(out / "recommendations.parquet")
    assert lists.column_names == ["user_id", "rank", "item_id", "score"]
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 1
    assert "exists already" in again.stderr


def test_an_interval_needs_two_seeds(capsys):
    from recpo.cli.main import main

    assert main(["demo", "--out", "never", "--seeds", "1"]) == 1
    assert "at least 2" in capsys.readouterr().err
    assert not Path("never").exists()
