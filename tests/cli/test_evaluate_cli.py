"""recpo evaluate on a small simulated log: its directory, its output, and its errors."""

from __future__ import annotations

import io
import json
import re
import shutil
from contextlib import redirect_stdout
from html.parser import HTMLParser

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

import recpo
from recpo.batches.slates import evaluation_batches
from recpo.cli.main import main
from recpo.evaluation.contenders import Lists
from recpo.log.id_map import IdMap
from recpo.log.prepared import Prepared
from recpo.training.run import Run
from tests.conftest import resealed

SECTIONS = (
    "answer",
    "metrics",
    "warnings",
    "headroom",
    "differences",
    "plots",
    "segments",
    "beyond-accuracy",
    "off-policy",
    "labels",
    "training",
    "data",
    "conventions",
)
ESTIMATE = {"mean", "half_width", "n"}


class Page(HTMLParser):
    """Sections, references to elsewhere, and whether every element is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.sections, self.outside, self.scripts, self.charts = [], [], [], 0, 0
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.sections += [found["id"]] if tag == "section" else []
        self.scripts += tag in ("script", "iframe", "object", "link")
        self.charts += tag == "svg"
        self.outside += [v for k, v in attributes if k in ("src", "href") and not v.startswith("#")]
        if tag not in ("meta", "link", "br", "img", "input", "hr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def lists_of(road, run, k):
    """What a run recommends to the held-out users, as another system would write it."""
    data, policy = Prepared.open(road / "prepared"), Run.open(road / run).policy("best")
    users = data.table("users.parquet", ["user_id"]).column(0).to_numpy()
    rows = []
    for batch in evaluation_batches(data.root, "test", policy.max_history, 512):
        with torch.inference_mode():
            listed = policy.recommend(batch.feedback.histories, k, batch.exclude).item_ids
        items = data.item_ids().to_external(listed.numpy()).to_numpy()
        rank = np.tile(np.arange(1, k + 1), len(listed))
        rows.append(pa.table({"user_id": np.repeat(users[batch.user_ids.numpy()], k), "item_id": items, "rank": rank}))
    return pa.concat_tables(rows)


@pytest.fixture(scope="module")
def evaluated(road, tmp_path_factory):
    """Everybody at once: the directory and what was printed."""
    out = tmp_path_factory.mktemp("evaluated") / "evaluation"
    pq.write_table(lists_of(road, "run-0", 10).slice(10), out.parent / "other.parquet")
    compared = ["popularity", "positives", "recency", "sequential_rules", "factorization", "random"]
    compared += [
        str(road / "run-0"),
        str(road / "run-1"),
        str(road / "bundle"),
        f"other={out.parent / 'other.parquet'}",
    ]
    options = ["--prepared", str(road / "prepared"), "--contenders", *compared, "--ks", "5", "10"]
    options += ["--truth", str(road / "log"), "--out", str(out)]
    options += ["--baseline_options.factorization.ranks", "[2]", "--baseline_options.factorization.ridges", "[4.0]"]
    features = str(road / "log" / "truth" / "items.parquet")
    options += ["--item_features.file", features, "--item_features.tags", "topic", "--item_features.vectors", "latent"]
    with redirect_stdout(io.StringIO()) as printed:
        assert main(["evaluate", *options]) == 0
    return out, printed.getvalue()


def document_in(out):
    return json.loads((out / "metrics.json").read_text(encoding="utf-8"))


def test_the_directory_holds_the_document_the_report_and_the_options(evaluated):
    out, printed = evaluated
    files = {"metrics.json", "recpo.json", "report.html", "resolved.yaml"}
    assert {file.name for file in out.iterdir()} == files | {"baselines"}
    assert yaml.safe_load((out / "resolved.yaml").read_text())["ks"] == [5, 10]
    for expected in ("NDCG", "popularity", "run-1", "past: excluded", "paired differences", "warning:", "coverage@5"):
        assert expected in printed


def test_the_document_has_the_keys_of_its_format(evaluated):
    document = document_in(evaluated[0])
    assert document["format_version"] == 8
    expected = {"setting", "conventions", "warnings", "contenders", "differences", "labels", "training", "provenance"}
    expected |= {"same_weights", "headroom", "candidates", "new_items"}
    assert document.keys() == expected | {"format_version", "files", "sha256"}
    names = [contender["name"] for contender in document["contenders"]]
    baselines = ["popularity", "positives", "recency", "sequential_rules", "factorization", "random"]
    assert names == [*baselines, "run-0", "run-1", "bundle", "other", "oracle", "logging policy"]
    kinds = [contender["kind"] for contender in document["contenders"]]
    assert kinds == ["baseline"] * 6 + ["run"] * 2 + ["bundle", "lists", "oracle", "baseline"]
    keys = {"name", "kind", "counts", "metrics", "totals", "segments", "off_policy"}
    for contender in document["contenders"]:
        assert contender.keys() == keys
        assert all(value.keys() == ESTIMATE for value in contender["metrics"].values())
        for entry in contender["off_policy"]:
            assert entry.keys() >= {"target", "estimator", "value", "intervals", "effective_sample_size", "warnings"}
    metrics = document["contenders"][6]["metrics"]
    wanted = {"NDCG@5", "Recall@10", "disliked@10", "true_reward@10", "true_dislike@5", "AUC_other", "diversity@5"}
    assert wanted | {"tag_diversity@10", "miscalibration@10"} <= metrics.keys()
    assert all(-2 <= metrics[f"true_reward@{k}"]["mean"] <= 1 for k in (5, 10))
    assert document["contenders"][6]["segments"].keys() == set(document["setting"]["segments"])
    assert document["training"].keys() == {"run-0", "run-1"}
    assert document["training"]["run-0"]["val/NDCG@10"]
    assert document["provenance"]["runs"].keys() == {"run-0", "run-1", "bundle", "other"}
    assert document["provenance"]["runs"]["run-0"]["max_history"] == 20


def test_only_policies_with_probabilities_have_the_target_policy(evaluated):
    contenders = {contender["name"]: contender for contender in document_in(evaluated[0])["contenders"]}
    targets = {name: {e["target"] for e in contender["off_policy"]} for name, contender in contenders.items()}
    assert targets["run-0"] == {"policy", "top_5", "top_10"}
    assert targets["bundle"] == targets["popularity"] == {"top_5", "top_10"}
    assert targets["logging policy"] == {"logging policy"}
    assert contenders["logging policy"]["metrics"].keys() == {"true_reward@5", "true_reward@10"}


def test_a_bundle_ranks_as_its_run_does(evaluated):
    document = document_in(evaluated[0])
    contenders = {contender["name"]: contender for contender in document["contenders"]}
    for name, value in contenders["bundle"]["metrics"].items():
        assert value["mean"] == pytest.approx(contenders["run-0"]["metrics"][name]["mean"], rel=1e-5)
    assert any("bundle is run-0, exported" in warning for warning in document["warnings"])
    assert not any("bundle and run-0" in warning for warning in document["warnings"])
    pairs = [{difference["contender"], difference["against"]} for difference in document["differences"]]
    assert {"run-0", "bundle"} not in pairs
    assert {"run-1", "bundle"} in pairs
    assert "AUC_other" not in contenders["bundle"]["metrics"]


def test_given_lists_are_judged_as_the_run_that_made_them(evaluated, road):
    """One user's list is left out, so that it is counted, printed and missing from the means over filled places."""
    out, printed = evaluated
    contenders = {contender["name"]: contender for contender in document_in(out)["contenders"]}
    other, run = contenders["other"], contenders["run-0"]
    assert other["counts"]["users_without_list"] == 1
    assert "warning: other: 1 of " in printed
    assert other["metrics"]["true_reward@10"]["n"] == run["metrics"]["true_reward@10"]["n"] - 1
    whole = Lists("other", lists_of(road, "run-0", 10))
    compared, options = [road / "run-0", whole], {"ks": [5, 10], "truth": road / "log", "baselines": False}
    document = recpo.evaluate(road / "prepared", compared, **options).document
    run, other = document["contenders"][:2]
    metrics = {name: value for name, value in run["metrics"].items() if not name.startswith("AUC")}
    assert (other["metrics"], other["totals"]) == (metrics, run["totals"])
    assert other["off_policy"] == [entry for entry in run["off_policy"] if entry["target"] != "policy"]


def test_every_pair_is_compared_and_corrected(evaluated):
    differences = document_in(evaluated[0])["differences"]
    assert len(differences) == 11 * 10 / 2 - 1, "a run and its bundle are one policy"
    between_runs = next(d for d in differences if (d["contender"], d["against"]) == ("run-1", "run-0"))
    for value in between_runs["metrics"].values():
        assert value.keys() == ESTIMATE | {"differing", "p_value", "p_holm", "survives_holm"}
        assert value["p_value"] is None or value["p_value"] <= value["p_holm"] <= 1
    targets = {entry["target"] for entry in between_runs["off_policy"]}
    assert targets <= {"policy", "top_5", "top_10"}
    assert "policy" in targets
    with_logging = next(d for d in differences if d["contender"] == "logging policy" and d["against"] == "run-0")
    assert with_logging["metrics"].keys() == {"true_reward@5", "true_reward@10"}
    assert with_logging["off_policy"]


def test_the_share_of_the_headroom_is_in_the_document_and_printed(evaluated):
    """Two pre-trained runs are not one start: it is the logging policy."""
    document, printed = document_in(evaluated[0]), evaluated[1]
    shares = document["headroom"]["metrics"]["true_reward@5"]["contenders"]
    assert document["headroom"]["start"] == "logging policy"
    assert shares.keys() == {one["name"] for one in document["contenders"]} - {"oracle", "logging policy"}
    assert all(value.keys() == ESTIMATE for value in shares.values())
    assert "share of the headroom in true reward" in printed


def test_labels_are_counted_of_both_periods(evaluated):
    document, road_counts = document_in(evaluated[0]), {"train", "test"}
    assert document["labels"]["periods"].keys() == road_counts
    for period, groups in document["labels"]["periods"].items():
        assert groups[0]["name"] == "all"
        assert groups[0]["events"] == document["provenance"]["data"][f"{period} events"]
        assert groups[0]["events"] == sum(group["events"] for group in groups[1:])


def test_the_report_stands_alone(evaluated):
    text = (evaluated[0] / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert tuple(page.sections) == SECTIONS
    assert page.outside == []
    assert page.scripts == 0
    assert page.charts > 20
    assert not re.search(r"https?://|@import|url\(", text)
    assert len(text) < 600_000


@pytest.mark.slow
def test_the_resolved_options_repeat_the_result_and_nothing_is_overwritten_unasked(evaluated, tmp_path, capsys):
    out = evaluated[0]
    again = ["evaluate", "--config", str(out / "resolved.yaml"), "--out", str(tmp_path / "again")]
    assert main(again) == 0
    one, other = (recpo.Evaluation.open(path).document for path in (out, tmp_path / "again"))
    assert one == other
    assert main(again) == 1
    assert "exists already" in capsys.readouterr().err
    assert main([*again, "--overwrite", "true", "--contenders", "[random]", "--off_policy", "null"]) == 0
    assert [c["off_policy"] for c in document_in(tmp_path / "again")["contenders"]] == [[]] * 3


def run_on(road, out, *options):
    return main(["evaluate", "--prepared", str(road / "prepared"), "--out", str(out), *options])


def test_kept_past_items_are_reported_and_change_the_targets(road, tmp_path, capsys):
    out = tmp_path / "evaluation"
    assert run_on(road, out, "--repeats", "true", "--contenders", "[popularity]", "--segments", "false") == 0
    assert "past: kept" in capsys.readouterr().out
    contender = document_in(out)["contenders"][0]
    assert contender["counts"]["positive_events"] > 0
    assert contender["counts"]["positive_events_excluded"] == 0
    assert contender["segments"] == {}


@pytest.mark.slow
def test_gains_and_bootstrap_intervals_are_options(road, tmp_path):
    common = ("--contenders", "[popularity]", "--segments", "false")
    assert run_on(road, tmp_path / "a", *common, "--bootstrap_resamples", "200", "--gain", "exponential") == 0
    assert run_on(road, tmp_path / "b", *common) == 0
    one, other = (document_in(tmp_path / name)["contenders"][0]["metrics"] for name in "ab")
    assert one["NDCG@10"]["low"] < one["NDCG@10"]["mean"] < one["NDCG@10"]["high"]
    assert "low" not in other["NDCG@10"]
    assert one["gNDCG@10"]["mean"] != other["gNDCG@10"]["mean"]
    assert one["NDCG@10"]["mean"] == other["NDCG@10"]["mean"]


def test_the_validation_period_is_called_optimistic(road, tmp_path, capsys):
    assert (
        run_on(road, tmp_path / "e", "--split", "valid", "--contenders", str(road / "run-0"), "--baselines", "false")
        == 0
    )
    assert "chosen by a metric of this very period" in capsys.readouterr().out


def test_lists_longer_than_the_catalog_are_the_whole_catalog(road, tmp_path):
    out = tmp_path / "evaluation"
    options = ["--ks", "[10, 1000]", "--contenders", str(road / "bundle"), "--contenders", "[sequential_rules]"]
    assert run_on(road, out, *options, "--off_policy", "null") == 0
    for contender in document_in(out)["contenders"]:
        assert contender["metrics"]["Recall@1000"]["mean"] == 1
        assert contender["totals"]["coverage@1000"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--baselines", "false"], "nothing to evaluate"),
        (["--ks", "[0]"], "ks: expected a number >0, got 0"),
        (["--ks", "[]"], "ks must be"),
        (["--contenders", '["nowhere"]'], "nowhere is neither a run nor a bundle"),
        (["--truth", "nowhere"], "nowhere"),
        (["--contenders", "[ease]", "--baseline_options.ease.max_items", "5"], "max_items 5"),
        (["--contenders", "nowhere", "random"], "nowhere is neither a run nor a bundle"),
        (["--contenders", "als=nowhere.parquet"], "nowhere.parquet: expected lists in a Parquet file"),
        (["--contenders", '["random","random"]'], "two contenders have the name random"),
        (
            ["--baseline_options.recency_half_life", "0"],
            "baseline_options.recency_half_life: expected a number >0, got 0",
        ),
        (["--item_features.file", "nowhere.parquet"], "name the column of the tags"),
        (
            ["--item_features.file", "nowhere.parquet", "--item_features.tags", "t"],
            "nowhere.parquet: expected a Parquet file",
        ),
        (["--off_policy.clip", "0"], "off_policy.clip: expected a number >0, got 0"),
    ],
)
def test_mistakes_are_told_in_one_message(road, tmp_path, capsys, options, message):
    out = tmp_path / "evaluation"
    assert run_on(road, out, *options) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_same_run_twice_and_contenders_of_other_items_are_refused(road, tmp_path, capsys, rewritten, monkeypatch):
    run, out = str(road / "run-0"), tmp_path / "evaluation"
    assert run_on(road, out, "--contenders", json.dumps([run, run])) == 1
    assert "named twice" in capsys.readouterr().err
    other = shutil.copytree(road / "run-0", tmp_path / "other")
    finished = json.loads((other / "run.json").read_text())
    (other / "run.json").write_text(json.dumps(resealed(finished | {"catalog_checksum": "0"})))
    with monkeypatch.context() as patched:
        patched.setattr(IdMap, "equals", lambda *_: False)
        assert run_on(road, out, "--contenders", str(other)) == 1
    assert "other items" in capsys.readouterr().err
    prepared = shutil.copytree(road / "prepared", tmp_path / "prepared")
    items = pq.read_table(prepared / "items.parquet")
    swapped = items.set_column(1, "item_id", pa.array(items["item_id"].to_numpy()[::-1].copy()))
    pq.write_table(swapped, prepared / "items.parquet")
    command = ["evaluate", "--prepared", str(prepared), "--contenders", str(road / "bundle"), "--out", str(out)]
    assert main(command) == 1
    assert "items.parquet is not as it was written" in capsys.readouterr().err
    rewritten(prepared)
    assert main(command) == 1
    assert "has other items" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.slow
def test_the_best_of_two_runs_of_one_name_is_exported_next(road, tmp_path, capsys):
    runs = [tmp_path / part / "run" for part in "ab"]
    for number, run in enumerate(runs):
        shutil.copytree(road / f"run-{number}", run)
    out, proposed = tmp_path / "evaluation", []
    for order in (runs, runs[::-1]):
        options = ["--contenders", *map(str, order), "--baselines", "false", "--segments", "false"]
        assert run_on(road, out, *options, "--off_policy", "null", "--overwrite", "true") == 0
        proposed.append(capsys.readouterr().out.strip().splitlines()[-1])
    document = document_in(out)
    aucs = {one["name"]: one["metrics"]["AUC_other"]["mean"] for one in document["contenders"] if one["kind"] == "run"}
    best = max(aucs, key=aucs.get)
    assert best in map(str, runs)
    assert proposed == [f"next: recpo export --run {best} --out runs/bundle"] * 2


def test_a_log_without_propensities_is_evaluated_without_off_policy_values(road, tmp_path, capsys, rewritten):
    prepared = shutil.copytree(road / "prepared", tmp_path / "prepared")
    for file in (prepared / "test").iterdir():
        table = pq.read_table(file)
        empty = pa.array(np.full(len(table), np.nan, np.float32))
        place = table.column_names.index("propensity")
        pq.write_table(table.set_column(place, "propensity", empty), file)
    rewritten(prepared)
    common = ["evaluate", "--prepared", str(prepared), "--contenders", "[popularity]"]
    assert main([*common, "--out", str(tmp_path / "without")]) == 0
    assert "has no propensities" in capsys.readouterr().out
    document = document_in(tmp_path / "without")
    assert [c["name"] for c in document["contenders"]] == ["popularity"]
    assert "off-policy" not in Page((tmp_path / "without" / "report.html").read_text()).sections
    assert main([*common, "--out", str(tmp_path / "guessed"), "--off_policy.propensity", "estimated"]) == 0
    assert document_in(tmp_path / "guessed")["contenders"][0]["off_policy"][0]["propensity"] == "estimated"


def test_hostile_names_are_escaped(road, tmp_path):
    run = tmp_path / "<script src=x>&'\""
    shutil.copytree(road / "run-0", run)
    out = tmp_path / "evaluation"
    assert run_on(road, out, "--contenders", json.dumps([str(run)]), "--baselines", "false") == 0
    text = (out / "report.html").read_text(encoding="utf-8")
    assert "<script src" not in text
    assert "&lt;script src" in text
    assert Page(text).open == []
