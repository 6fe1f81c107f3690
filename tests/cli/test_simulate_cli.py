from __future__ import annotations

import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from recpo.errors import RecpoError
from recpo.simulation.log import Simulation


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


def test_from_python_a_simulation_is_an_object_and_says_nothing(tmp_path, capfd):
    import recpo as library

    world = library.simulate(tmp_path / "[x]", users=50, items=40, events=600)
    assert capfd.readouterr() == ("", "")
    assert len(world.to_pandas()) == 600
    again = Simulation.open(tmp_path / "[x]")
    assert again.log == world.log
    assert again.values(k=5) == world.values(k=5)
    assert world.values()["uniform"] < world.values()["best 10 items"]
    with pytest.raises(RecpoError, match="is no simulation"):
        Simulation.open(tmp_path)
