"""The variants of a served log: what is counted, and through the command line."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import recpo
from recpo.cli.main import main
from recpo.evaluation.evaluation import VariantEvaluation
from recpo.evaluation.variants import PerUser, read_log, slates, variants_document
from tests.refusals import refused

K = 3


def served(users=300, seed=0, gain=0.2, experiment="1", interleaved=False):
    """Rows as the server publishes them: users of B watch a longer share."""
    generator, rows = np.random.default_rng(seed), []
    for user in range(users):
        variant = None if interleaved else "AAB"[user % 3]
        for visit in range(1 + generator.poisson(1.0)):
            for place in range(K):
                credit = 2.0 * (place % 2) - 1
                better = variant == "B" or (interleaved and credit > 0)
                reported = generator.random() < 0.8
                row = {
                    "user_id": user,
                    "item_id": place,
                    "timestamp": 1_700_000_000_000 + visit,
                    "watch_time": generator.random() * 10 * (1 + gain * better) if reported else None,
                    "duration": 10.0 if reported else None,
                    "dislike": bool(generator.random() < 0.05) if reported else None,
                    "request_id": f"{experiment}-{user}-{visit}",
                    "experiment": experiment,
                    "variant": variant,
                }
                rows.append(row | ({"team": "AB"[place % 2], "credit": credit} if interleaved else {}))
    return pd.DataFrame(rows)


@pytest.fixture
def log(tmp_path):
    frame = served()
    half = len(frame) // 2
    for name, part in (("a", frame[:half]), ("b", frame[half:])):
        pq.write_table(pa.Table.from_pandas(part, preserve_index=False), tmp_path / f"{name}.parquet")
    return tmp_path


def test_the_numbers_are_those_of_a_frame(log):
    frame = served()
    grade = (frame.watch_time / frame.duration).clip(upper=1).fillna(0)
    frame["value"] = grade - 2 * frame.dislike.eq(True)
    frame["disliked"] = frame.dislike.eq(True).astype(float)
    keys = ["request_id", "user_id", "variant"]
    one = frame.groupby(keys).agg(value=("value", "sum"), disliked=("disliked", "max")).reset_index()
    document = variants_document(log, dislike_cost=2.0)
    assert (document["control"], document["preference"], document["warnings"]) == ("A", None, [])
    errors = {}
    for row in document["variants"]:
        own = one[one.variant == row["variant"]]
        assert (row["users"], row["impressions"]) == (own.user_id.nunique(), len(own))
        assert row["value"]["mean"] == pytest.approx(own.value.mean())
        assert row["dislikes"]["mean"] == pytest.approx(own.disliked.mean())
        residual = (own.value - own.value.mean()).groupby(own.user_id).sum()
        users = len(residual)
        errors[row["variant"]] = math.sqrt(users / (users - 1) * (residual**2).sum()) / len(own)
        assert row["value"]["half_width"] == pytest.approx(1.96 * errors[row["variant"]], rel=1e-4)
        low, high = row["dislikes"]["sequence"]
        assert 0 <= low < row["dislikes"]["mean"] < high < 1
    difference = document["variants"][1]["difference"]
    assert difference["half_width"] == pytest.approx(1.96 * math.hypot(*errors.values()), rel=1e-4)
    low, high = difference["sequence"]
    assert low < difference["mean"] - difference["half_width"] < difference["mean"] + difference["half_width"] < high


def test_labels_are_grades_and_nothing_reported_is_nothing():
    frame = served(30).drop(columns=["watch_time", "duration"])
    frame["label"] = np.where(frame.item_id == 0, 0.5, np.nan)
    frame["dislike"] = None
    found = slates(pa.Table.from_pandas(frame.assign(dislike=frame.dislike.astype("boolean"))))
    assert set(found) == {"A", "B"}
    assert all((one.value == 0.5).all() and not one.disliked.any() for one in found.values())


def test_sums_of_users_can_be_added_piece_by_piece():
    generator = np.random.default_rng(0)
    users, values = generator.integers(0, 50, 400), generator.random(400)
    whole, pieces = PerUser(), PerUser()
    whole.add(users, values)
    for part in np.split(np.arange(400), [1, 100, 399]):
        pieces.add([f"{user}" for user in users[part]], values[part])
    assert pieces.mean() == pytest.approx(whole.mean())
    assert math.isnan(PerUser().mean().mean)


def test_the_preference_of_interleaved_lists(tmp_path):
    frame = served(interleaved=True, gain=1.0)
    pq.write_table(
        pa.Table.from_pandas(frame.astype({"variant": "string"}), preserve_index=False), tmp_path / "a.parquet"
    )
    found = variants_document(tmp_path)["preference"]
    value = (frame.watch_time / frame.duration).clip(upper=1).fillna(0) - frame.dislike.eq(True)
    credits = (frame.credit * value).groupby(frame.request_id).sum()
    assert (found["of"], found["over"], found["impressions"]) == ("B", "A", len(credits))
    assert found["mean"] == pytest.approx(credits.mean())
    assert (found["wins"], found["losses"]) == pytest.approx(((credits > 0).mean(), (credits < 0).mean()))


def test_evaluate_by_variant_prints_and_returns_the_document(log, capsys):
    result = recpo.evaluate(log=log, by="variant")
    assert isinstance(result, VariantEvaluation)
    frame = result.to_pandas()
    assert set(frame.metric) == {"value", "dislikes", "difference", "dislikes_difference"}
    assert "difference" in result.html()
    with refused("unknown_name", "rows"):
        result.to_pandas("off_policy")
    assert main(["evaluate", "--log", str(log), "--by", "variant", "--control", "B", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["control"] == "B"
    assert printed["variants"][0]["difference"]["mean"] == pytest.approx(
        -result.document["variants"][1]["difference"]["mean"]
    )
    assert main(["evaluate", "--log", str(log), "--by", "variant"]) == 0
    assert "control A" in capsys.readouterr().out


def test_an_evaluation_of_variants_has_a_directory_and_a_report(log, tmp_path, capsys):
    flags = ["evaluate", "--log", str(log), "--by", "variant", "--out", str(tmp_path / "found")]
    assert main([*flags, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["wrote"] == [str(tmp_path / "found"), str(tmp_path / "found" / "report.html")]
    opened = recpo.load(tmp_path / "found")
    assert isinstance(opened, VariantEvaluation)
    assert opened.document == variants_document(log)
    assert opened.options["by"] == "variant"
    page = opened.report.read_text()
    assert f"{opened.document['variants'][1]['difference']['mean']:+.4f}" in page
    assert page == opened.html()
    assert main(flags) == 1  # it exists
    assert recpo.evaluate(log=log, by="variant", out=tmp_path / "found", overwrite=True).path == tmp_path / "found"
    with refused("wrong_file", "metrics.json"):
        recpo.Evaluation.open(tmp_path / "found")


def test_the_report_names_what_interleaved_lists_prefer(tmp_path):
    frame = served(interleaved=True, gain=1.0).astype({"variant": "string"})
    pq.write_table(pa.Table.from_pandas(frame, preserve_index=False), tmp_path / "a.parquet")
    result = recpo.evaluate(log=tmp_path, by="variant")
    preferred = "B" if result.document["preference"]["mean"] > 0 else "A"
    assert f"prefer <strong>{preferred}</strong>" in result.html()


def test_the_latest_experiment_counts(log):
    later = served(30, experiment="2")
    later["timestamp"] += 1000
    pq.write_table(pa.Table.from_pandas(later, preserve_index=False), log / "c.parquet")
    document = variants_document(log)
    assert (document["experiment"], len(document["warnings"])) == ("2", 1)
    assert sum(row["users"] for row in document["variants"]) == 30
    with refused("unknown_name", "control"):
        variants_document(log, control="C")


def test_what_is_no_log_of_variants_is_refused(tmp_path, log):
    with refused("missing_option", "prepared"):
        recpo.evaluate()
    with refused("missing_option", "by"):
        recpo.evaluate(log=log)
    with refused("missing_option", "log"):
        recpo.evaluate(by="variant")
    with refused("conflicting_options", "prepared"):
        recpo.evaluate("prepared", log=log, by="variant")
    with refused("missing_file", "log"):
        read_log(tmp_path / "none")
    (tmp_path / "plain").mkdir()
    served(3).drop(columns="variant").to_parquet(tmp_path / "plain" / "a.parquet")
    with refused("missing_column", "variant"):
        read_log(tmp_path / "plain")
