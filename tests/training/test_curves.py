"""Training curves out of the CSV log of a run."""

import pytest

from recpo.training.run import Run, training_curves
from tests.refusals import refused


def test_the_points_of_a_log(tmp_path):
    log = tmp_path / "logs" / "version_0" / "metrics.csv"
    log.parent.mkdir(parents=True)
    log.write_text("step,train/loss,other\n1,2.5,9\n2,,9\n3,1.5,9\n", encoding="utf-8")
    assert training_curves(tmp_path) == {"train/loss": [[1.0, 2.5], [3.0, 1.5]]}


def run_with(tmp_path, **columns):
    """A run directory whose log has these columns, by step."""
    log = tmp_path / "logs" / "version_0" / "metrics.csv"
    log.parent.mkdir(parents=True)
    names = [name.replace("__", "/").replace("_at_", "@") for name in columns]
    rows = zip(range(len(next(iter(columns.values())))), *columns.values(), strict=True)
    log.write_text("\n".join(",".join(map(str, row)) for row in [("step", *names), *rows]) + "\n", encoding="utf-8")
    return tmp_path


def told(root, monitor=None, *, num_items=1000, on_policy=True):
    (root / Run.RESOLVED).write_text("rollout: {group_size: 8}" if on_policy else "rollout: null", encoding="utf-8")
    return Run(root, num_items, "", {}, monitor, {}).advice


GOOD = {
    "train__zero_group_share": [0.9, 0.9, 0.1, 0.1],
    "train__step_skipped": [1.0, 1.0, 0.0, 0.0],
    "train__clip_fraction": [0.5, 0.2, 0.2, 0.1],
    "val__NDCG_at_10": [0.1, 0.2, 0.3, 0.29],
    "val__coverage_at_10": [0.001, 0.1, 0.2, 0.2],
}
BAD = {
    "constant": ({"train__zero_group_share": [0.0, 0.0, 0.9, 0.7]}, "80% of the groups"),
    "skipped": ({"train__step_skipped": [0.0, 0.0, 0.0, 1.0]}, "50% of the late steps"),
    "clipped": ({"train__clip_fraction": [0.0, 0.0, 0.4, 0.4]}, "40% of the late ratios"),
    "first": ({"val__NDCG_at_10": [0.4, 0.2, 0.3, 0.29]}, "best at the first of 4"),
    "last": ({"val__NDCG_at_10": [0.1, 0.2, 0.3, 0.35]}, "still improving at the last of 4"),
    "alike": ({"val__coverage_at_10": [0.1, 0.1, 0.1, 0.015]}, "come from 15 of 1,000 items"),
}


def test_a_training_without_faults_gets_no_advice(tmp_path):
    assert told(tmp_path) == []  # nothing was logged
    assert told(run_with(tmp_path, **GOOD), "val/NDCG@10") == []


@pytest.mark.parametrize("fault", BAD)
def test_advice_names_the_fault(tmp_path, fault):
    columns, expected = BAD[fault]
    (sentence,) = told(run_with(tmp_path, **GOOD | columns), "val/NDCG@10")
    assert expected in sentence


def test_advice_knows_directions_logged_slates_and_small_catalogs(tmp_path):
    loss = {"val__pair_loss": [0.4, 0.2, 0.3, 0.29]}
    run = run_with(tmp_path, **GOOD | loss | BAD["constant"][0] | BAD["alike"][0])
    said = told(run, "val/pair_loss", num_items=90, on_policy=False)
    assert said == []  # .2 is the best of a loss, a logged slate is no group, and ten lists fill a small catalog


BROKEN = [b"step,train/loss\n1,\xff\xfe\n", b"step,train/loss\n1,high\n", b"train/loss\n1\n"]


@pytest.mark.parametrize("content", BROKEN)
def test_a_log_that_is_no_table_of_numbers_is_one_message(tmp_path, content):
    log = tmp_path / "logs" / "version_0" / "metrics.csv"
    log.parent.mkdir(parents=True)
    log.write_bytes(content)
    with refused("damaged", "metrics.csv") as error:
        training_curves(tmp_path)
    assert error.value.field == "metrics.csv"
