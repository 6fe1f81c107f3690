"""evaluate from Python: objects in, an Evaluation out, in memory or in its directory."""

from __future__ import annotations

import math

import pytest
import yaml

import recpo
from recpo.evaluation.evaluation import Evaluation
from recpo.log.prepared import Prepared
from recpo.verbs.evaluate import evaluate
from tests.refusals import refused


@pytest.fixture(scope="module")
def found(prepared):
    return evaluate(Prepared.open(prepared), ["popularity", "random"], ks=[5, 10])


def test_it_is_in_memory_and_prints_nothing(prepared, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    found = evaluate(prepared, "popularity", ks=[5], off_policy=None)
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []
    assert found.path is found.report is None
    assert "<html" in found.html()


def test_a_row_per_contender_and_metric(found):
    frame = found.to_pandas()
    assert list(frame.columns) == ["contender", "kind", "metric", "mean", "half_width", "n"]
    assert not frame.duplicated(["contender", "metric"]).any()
    entries = {contender["name"]: contender for contender in found.document["contenders"]}
    row = frame.set_index(["contender", "metric"]).loc["popularity", "NDCG@10"]
    assert dict(row[["mean", "half_width", "n"]]) == entries["popularity"]["metrics"]["NDCG@10"]
    coverage = frame.set_index(["contender", "metric"]).loc["random", "coverage@5"]
    assert coverage["mean"] == entries["random"]["totals"]["coverage@5"]
    assert math.isnan(coverage["half_width"])


def test_differences_and_values_as_frames(found):
    pairs = found.to_pandas("differences")
    assert {("random", "popularity")} <= set(zip(pairs["contender"], pairs["against"], strict=True))
    assert (pairs["p_value"].dropna() > 0).all()
    assert (pairs["p_holm"].dropna() >= pairs["p_value"].dropna()).all()
    values = found.to_pandas("off_policy")
    assert {"logging policy", "top_5", "top_10"} == set(values["target"])
    known = values.dropna(subset=["value", "low"])
    assert ((known["low"] <= known["value"]) & (known["value"] <= known["high"])).mean() > 0.9
    with refused("unknown_name", "rows"):
        found.to_pandas("all")


def test_written_opened_and_loaded_it_is_the_same(found, tmp_path):
    written = found.write(tmp_path / "evaluation")
    assert written.report == tmp_path / "evaluation" / "report.html"
    assert written.report.is_file()
    for opened in (Evaluation.open(tmp_path / "evaluation"), recpo.load(tmp_path / "evaluation")):
        assert opened.document == found.document
        assert opened.options == found.options
        assert opened.path == tmp_path / "evaluation"
    with refused("exists"):
        found.write(tmp_path / "evaluation")
    assert found.write(tmp_path / "evaluation", overwrite=True).document == found.document


def test_options_are_plain_yaml(found):
    assert yaml.safe_load(yaml.safe_dump(dict(found.options))) == found.options
    assert found.options["contenders"] == ["popularity", "random"]


def test_the_feedback_is_that_of_the_prepared_data(found, prepared):
    rule = Prepared.open(prepared).feedback.rule
    assert found.document["setting"]["positive_threshold"] == rule.positive_threshold
    assert f">= {rule.positive_threshold:g}" in found.document["conventions"]["positives"]


def test_a_notebook_shows_the_main_table(found):
    shown = found._repr_html_()
    assert shown.count("<tr>") == 3
    assert "popularity" in shown
    assert "NDCG" in shown
