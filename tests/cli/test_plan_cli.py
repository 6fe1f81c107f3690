"""`recpo plan`: the needs of a run, printed and as JSON. If a run does not fit, they are printed before the error."""

import json
import subprocess
import sys

import pytest

from recpo.cli.main import main
from recpo.verbs.plan import plan
from tests.forks import Command
from tests.refusals import refused

SEMANTIC = ("--policy=semantic", "--codebooks=[1024, 1024, 1024]", "--id_vectors=false")


@pytest.mark.slow
def test_a_plan_in_a_separate_process(tmp_path):  # pytest would warn for torchrec
    out = tmp_path / "plan.json"
    options = ["--num_items=20000000", "--ranks=2", "--normalizer=sampled", "--device=cpu", f"--out={out}"]
    command = Command(["plan", *options, "--memory_gib=12"], tmp_path)
    assert command.ended() == 0, command.printed
    printed, said = command.printed
    assert said == ""
    (table,) = (line for line in printed.splitlines() if "policy.item_table" in line)
    assert "20,000,001 x 64" in table
    assert "row_wise" in table
    assert "estimated by torchrec's planner" in printed
    assert "not counted: " in printed
    document = json.loads(out.read_text())
    blocks = document["tables"]["policy.item_table"]["blocks"]
    assert [(block["rank"], block["num_rows"]) for block in blocks] == [(0, 10_000_001), (1, 10_000_000)]
    assert document["memory_bytes"]["tables"] == 10_000_001 * 64 * 4
    assert document["memory_total"] == sum(document["memory_bytes"].values())
    assert document["workload"]["table_optimizer"] == "rowwise_adagrad"
    assert "num_items: 20000000" in out.with_name("plan.resolved.yaml").read_text()


def test_the_catalog_of_a_prepared_directory(prepared, tmp_path):
    out = tmp_path / "plan.json"
    assert main(["plan", f"--prepared={prepared}", "--ranks=2", "--batch_size=4", f"--out={out}"]) == 0
    manifest = json.loads((prepared / "manifest.json").read_text())
    document = json.loads(out.read_text())
    assert document["workload"]["num_items"] == manifest["num_items"]


@pytest.mark.slow
def test_semantic_ids_without_item_vectors_do_not_grow_with_the_catalog(tmp_path, capsys):
    plans = []
    for items in (1_000_000, 1_000_000_000):
        out = tmp_path / f"{items}.json"
        arguments = [f"--num_items={items}", "--ranks=16", "--ranks_per_node=8", "--memory_gib=80", f"--out={out}"]
        assert main(["plan", *arguments, *SEMANTIC]) == 0
        plans.append(json.loads(out.read_text()))
    small, large = plans
    assert small["memory_bytes"]["tables"] == large["memory_bytes"]["tables"]
    assert small["memory_bytes"]["trie and codes"] < large["memory_bytes"]["trie and codes"] / 500


def test_what_does_not_fit_is_printed_and_refused(capsys):
    """A rank's share of the tables, or what else there is."""
    big = ["plan", "--num_items=1000000000", "--ranks=8", "--memory_gib=10"]
    assert main([*big, "--normalizer=sampled"]) == 1
    printed = capsys.readouterr()
    assert "29.80 GiB" in printed.out  # the tables of a rank
    assert "do not fit into 9." in printed.err
    assert "Take more ranks" in printed.err
    assert main(["plan", "--num_items=1000000", "--memory_gib=0.5", "--ranks=4"]) == 1
    assert "a rank needs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code", "field"),
    [
        ({}, "missing_option", "num_items"),
        ({"num_items": 10, "prepared": "nowhere"}, "conflicting_options", "num_items"),
        ({"num_items": 10, "ranks": 6, "ranks_per_node": 4}, "out_of_range", "ranks_per_node"),
        ({"num_items": 1000, "policy": "semantic", "codebooks": (10, 10)}, "out_of_range", "codebooks"),
        (
            {"num_items": 10, "normalizer": "sampled", "sharding": "column_wise", "ranks": 2},
            "conflicting_options",
            "policy.item_table",
        ),
        ({"num_items": 10, "tie_weights": False, "sharding": {"item_table": "row_wise"}}, "unknown_name", "sharding"),
    ],
)
def test_mistakes(options, code, field):
    with refused(code, field):
        plan(**options)


def test_the_table_of_the_softmax_may_be_whole_on_every_rank(tmp_path):
    out = tmp_path / "plan.json"
    arguments = ["--num_items=1000", "--ranks=2", f"--out={out}", '--sharding={"policy.item_table": "data_parallel"}']
    assert main(["plan", *arguments]) == 0
    document = json.loads(out.read_text())
    assert document["tables"]["policy.item_table"]["sharding"] == "data_parallel"
    assert document["memory_bytes"]["tables"] == 1001 * 64 * 4


@pytest.mark.slow
def test_without_torchrec_it_says_how_to_mend_it():
    blocked = "import sys; sys.modules['torchrec'] = sys.modules['fbgemm_gpu'] = None; from recpo.cli.main import main"
    command = [sys.executable, "-c", f"{blocked}; sys.exit(main(['plan', '--num_items=10', '--normalizer=sampled']))"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: recpo plan uses the planner of torchrec, which does not load")
    assert "recpo doctor" in done.stderr
