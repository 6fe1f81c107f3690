"""A short demo: every verb in one process."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[2]


VERBS = ("simulate", "prepare", "factorize", "train", "tilt", "evaluate", "export", "recommend")
ROWS = ["pre-trained", "GBPO-aligned", "value-aligned", "GBPO-aligned - pre-trained", "value-aligned - factorization"]
ROWS += ["tilted", "tilted - factorization", "tilted - reward model"]
SEMANTIC = ["pre-trained", "GBPO-aligned", "GBPO-aligned - pre-trained", "GBPO-aligned - factorization"]
SEMANTIC = [f"semantic ids, {row}" for row in SEMANTIC]


@pytest.mark.slow
def test_the_whole_road_in_a_hurry(tmp_path):
    """The demo of semantic ids takes the road of the catalog softmax as well."""
    out = tmp_path / "demo"
    size = ["--users", "150", "--items", "60", "--events", "9000", "--seeds", "2", "--epochs", "2"]
    command = [sys.executable, "-m", "recpo.cli.main", "demo", "--out", str(out), "--policy", "SemanticIdPolicy", *size]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for verb in ("tokenize", *VERBS):
        assert f"$ recpo {verb} " in done.stdout
    summary = json.loads((out / "summary.json").read_text())
    assert sorted(summary) == sorted(
        ["popularity", "implicit_als", "factorization", "reward model", "oracle", *ROWS, *SEMANTIC]
    )
    exported = json.loads((out / "bundle" / "manifest.json").read_text())["policy"]["class"]
    assert exported.endswith("SemanticIdPolicy")
    for row in summary.values():
        assert row.keys() == {"NDCG@10", "disliked@10", "true_reward@10", "true_dislike@10"}
    assert summary["popularity"]["true_reward@10"]["mean"] < summary["oracle"]["true_reward@10"]["mean"]
    lists = pq.read_table(out / "recommendations.parquet")
    assert lists.column_names == ["user_id", "rank", "item_id", "score"]
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 1
    assert "exists already" in again.stderr


def test_where_no_temperature_is_better_the_untilted_policy_is_summarized():
    from recpo.verbs import demo

    def contender(name, value):
        return {"name": name, "metrics": {metric: {"mean": value} for metric in demo.METRICS_SHOWN}}

    runs = [contender(f"{step}-{seed}", 0.1 + seed) for step in demo._ROAD for seed in range(2)]
    baselines = [contender(name, 0.0) for name in demo._BASELINES.values()]
    document = {"contenders": [*runs, *baselines, contender("tilted-1", 3.1)]}
    family = demo._Family("", "", tuple(demo._ROAD), ())
    summary = demo.summary_of(document, [family], seeds=2)
    assert summary["tilted"]["NDCG@10"]["mean"] == pytest.approx((0.1 + 3.1) / 2)


def test_an_interval_needs_two_seeds(capsys):
    from recpo.cli.main import main

    assert main(["demo", "--out", "never", "--seeds", "1"]) == 1
    assert "at least 2" in capsys.readouterr().err
    assert not Path("never").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--overwrite", "true"], "files that recpo did not write"),
        ([], "exists already"),
        (["--configs", "nowhere", "--overwrite", "true"], "pretrain.yaml is missing"),
        (["--events", "0", "--overwrite", "true"], "events: expected a number >0, got 0"),
    ],
)
def test_a_demo_takes_the_place_of_nothing_but_a_demo(tmp_path, capsys, options, message):
    from recpo.cli.main import main

    (tmp_path / "precious").write_text("mine", encoding="utf-8")
    options = ["--configs", str(ROOT / "configs"), *options] if "--configs" not in options else options
    assert main(["demo", "--out", str(tmp_path), *options]) in (1, 2)
    assert message in capsys.readouterr().err
    assert (tmp_path / "precious").read_text(encoding="utf-8") == "mine"
