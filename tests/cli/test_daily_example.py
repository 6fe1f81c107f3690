"""examples/daily: the shell file on two simulated days, and the DAG and the graph in their own libraries."""

import json
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import recpo
from tests.conftest import example_program
from tests.forks import program
from tests.server.conftest import post, process

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "examples" / "daily"
STEPS = ["extend", "warm_start", "evaluate", "export", "compare", "swap"]
KEY = "the-key-of-an-operator"
DAYS = ("2026-11-23", "2026-11-24", "2026-11-25")


def run_day(where, *steps, programs=Path(sys.executable).parent, **variables):
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    given = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "EPOCHS": "1"} | variables
    return subprocess.run(
        ["bash", PLACE / "day.sh", *steps], cwd=where, env=given, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_a_day_that_the_gate_refuses_and_then_lets_pass(road, tmp_path):
    for folder, source in (("data", "prepared"), ("runs", "run-0"), ("bundles", "bundle")):
        shutil.copytree(road / source, tmp_path / folder / DAYS[0])
    (tmp_path / "admin.keys").write_text(f"{KEY}\n")
    explored = recpo.Exploration(temperature=1.0, epsilon=0.1, shortlist=20)
    worlds = [road / "log"]
    for day in DAYS[1:]:
        policy = tmp_path / "bundles" / DAYS[0]
        recpo.simulate(tmp_path / "worlds" / day, policy=policy, after=worlds, exploration=explored)
        worlds.append(tmp_path / "worlds" / day)
    asked = {"user_id": 1, "k": 3, "history": []}
    with process(tmp_path / "bundles", "--admin_keys", tmp_path / "admin.keys") as server, program() as programs:

        def serving():
            return post(f"{server.url}/v1/recommend", json=asked).json()["version"]

        def day_of(day, *steps, **limits):
            log = str(tmp_path / "worlds" / day / "log")
            return run_day(tmp_path, *steps, programs=programs, DAY=day, LOG=log, SERVER=server.url, **limits)

        assert serving() == DAYS[0]
        refused = day_of(DAYS[1], MAX_LOSS="100", MIN_OVERLAP="1")
        assert refused.returncode == 3, refused.stdout + refused.stderr
        ran = re.findall(r"^== 2026-11-24: (\w+)$", refused.stderr, re.MULTILINE)
        assert ran == STEPS[: STEPS.index("swap")], "the step that swaps did not run"
        (tmp_path / "other.keys").write_text("a-key-that-the-server-does-not-have\n")
        assert day_of(DAYS[1], "swap", ADMIN_KEYS="other.keys").returncode == 22, "the server refused"
        assert (tmp_path / "candidates" / DAYS[1]).is_dir()
        assert serving() == DAYS[0]
        extended = day_of(DAYS[2], "extend")
        assert extended.returncode == 0, extended.stdout + extended.stderr
        passed = day_of(DAYS[1], "compare", "swap", MAX_LOSS="100", MIN_OVERLAP="0")
        assert passed.returncode == 0, "a step may run again: " + passed.stdout + passed.stderr
        assert serving() == DAYS[1]
    assert sorted(path.name for path in (tmp_path / "bundles").glob("20*")) == list(DAYS[:2])
    segments = [len(recpo.Prepared.open(tmp_path / "data" / day).segments) for day in DAYS]
    assert segments == [1, 2, 3], "a day that is refused extends the data too"
    compared = json.loads((tmp_path / "comparisons" / DAYS[1] / "compare.json").read_text())
    assert Path(compared["bundles"]["old"]["path"]).name == DAYS[0]


def test_a_step_that_does_not_exist_is_refused(tmp_path):
    done = run_day(tmp_path, "deploy", DAY=DAYS[0])
    assert done.returncode == 2
    assert " ".join(STEPS) in done.stderr


@pytest.mark.slow
def test_the_shell_file_passes_shellcheck():
    program = shutil.which("shellcheck", path=Path(sys.executable).parent)
    if program is None:
        pytest.skip("shellcheck is not installed (pip install recpo[dev])")
    done = subprocess.run([program, PLACE / "day.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


#: What the schedulers call instead of recpo: it notes the day and the verb, and its gate refuses.
STUB = """#!/bin/sh
echo "$DAY $1" >> "$CALLED"
[ "$1" != compare ] || exit 3
"""
DAGSTER = """
import json, sys
sys.path.insert(0, sys.argv[1])
import dagster, dagster_graph
dagster.Definitions.validate_loadable(dagster_graph.definitions)
done = dagster_graph.job.execute_in_process(partition_key="2025-01-02", raise_on_error=False)
print(json.dumps([event.step_key for event in done.all_events if event.is_step_success]))
"""
#: In one process: an import of Airflow takes four seconds.
AIRFLOW = """
import sys
folder = sys.argv[1]
from airflow.__main__ import main
def airflow(*words):
    sys.argv = ["airflow", *words]
    main()
airflow("db", "migrate")
airflow("dags", "reserialize")
from airflow.dag_processing.dagbag import DagBag
bag = DagBag(folder)
print("import errors:", bag.import_errors)
print([(task.task_id, *task.downstream_task_ids) for task in bag.dags["recpo_day"].topological_sort()])
airflow("dags", "test", "recpo_day", "2025-01-02T01:00:00")
"""


def scheduled(where, environment, *words, **variables):
    """Runs a program of the environment of a scheduler; ``recpo`` is the stub. What it printed, and what it called."""
    program = example_program(environment, words[0])
    for folder in ("data", "runs", "bundles"):
        (where / folder / "2025-01-01").mkdir(parents=True, exist_ok=True)
    stub, called = where / "bin" / "recpo", where / "called"
    stub.parent.mkdir(exist_ok=True)
    stub.write_text(STUB)
    stub.chmod(0o755)
    given = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | variables
    given |= {"PATH": f"{stub.parent}{os.pathsep}{os.environ['PATH']}", "CALLED": str(called)}
    given |= {"RECPO_DAILY": str(where)}
    done = subprocess.run([program, *words[1:]], cwd=where, env=given, capture_output=True, text=True, check=False)
    calls = called.read_text().splitlines() if called.is_file() else []
    return done, calls


CALLS = [f"2025-01-02 {verb}" for verb in ("prepare", "train", "evaluate", "export", "compare")]


@pytest.mark.slow
def test_the_dagster_graph_stops_at_the_gate(tmp_path):
    done, calls = scheduled(tmp_path, "dagster", "python", "-c", DAGSTER, PLACE)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == STEPS[: STEPS.index("compare")]
    assert calls == CALLS


@pytest.mark.slow
def test_the_airflow_dag_stops_at_the_gate(tmp_path):
    home = {"AIRFLOW_HOME": str(tmp_path / "airflow"), "AIRFLOW__CORE__DAGS_FOLDER": str(PLACE)}
    home["AIRFLOW__CORE__LOAD_EXAMPLES"] = "False"
    done, calls = scheduled(tmp_path, "airflow", "python", "-c", AIRFLOW, PLACE, **home)
    assert "import errors: {}\n" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    assert str([*pairwise(STEPS), (STEPS[-1],)]) in done.stdout, done.stderr[-2000:]
    assert calls == CALLS
