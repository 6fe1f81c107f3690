from __future__ import annotations

import subprocess
import sys

import pyarrow.parquet as pq


def recpo(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "recpo.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_simulate_writes_a_log_and_says_what_it_is_worth(tmp_path):
    done = recpo("simulate", "--out", tmp_path / "out", "--users", 50, "--items", 40, "--events", 600)
    assert done.returncode == 0, done.stderr
    assert "600 events of 50 users" in done.stdout
    assert "true expected reward" in done.stdout
    assert pq.read_table(tmp_path / "out" / "log").num_rows == 600


def test_an_impossible_argument_is_one_line_without_a_traceback(tmp_path):
    done = recpo("simulate", "--out", tmp_path / "out", "--random_share", 1.5)
    assert done.returncode == 1
    assert "random_share is 1.5, expected a probability" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
