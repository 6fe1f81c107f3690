"""Fitted baselines: their recommendations and scores, and that they are fitted once."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

import recpo
from recpo.batches.slates import evaluation_batches
from recpo.evaluation import contenders
from recpo.evaluation.contenders import DEFAULT_BASELINES, BaselineOptions, default_baselines
from recpo.log.prepared import Prepared
from recpo.ops.exposures import exposure_auc, held_out_targets
from recpo.rewards.factors import posterior_variance
from recpo.rewards.graded import FactorOptions
from recpo.rewards.implicit import AllRankOptions, EaseOptions, ImplicitOptions, fit_ease, fit_implicit
from recpo.rewards.selection import fit_factors
from tests.refusals import refused

SMALL = BaselineOptions(
    factorization=FactorOptions(method="als", ranks=(2,), ridges=(2.0,), sweeps=2),
    implicit_als=ImplicitOptions(ranks=(2,), unobserved=(0.1,), ridges=(0.01,), sweeps=2),
    allrank=AllRankOptions(ranks=(2,), unobserved=(0.1,), ridges=(0.01,), sweeps=2),
    ease=EaseOptions(ridges=(100.0,)),
)
QUICK = {"baselines": False, "ks": [5], "off_policy": None, "segments": False, "baseline_options": SMALL}


@pytest.fixture(scope="module")
def data(prepared):
    return Prepared.open(prepared)


@pytest.fixture
def fits(monkeypatch):
    """The number of fits so far."""
    found = []

    def counting(*arguments, **options):
        found.append(1)
        return fit_factors(*arguments, **options)

    monkeypatch.setattr(contenders, "fit_factors", counting)
    return found


def metrics_of(evaluation):
    return evaluation.document["contenders"][0]["metrics"]


def test_the_baseline_is_the_model_that_factorize_fits(data, tmp_path):
    baseline = recpo.evaluate(data, ["factorization"], **QUICK)
    assert baseline.document["contenders"][0]["kind"] == "baseline"
    options = {"method": "als", "ranks": [2], "ridges": [2.0], "sweeps": 2}
    model = recpo.factorize(data, tmp_path / "mine", **options)
    directory = recpo.evaluate(data, [tmp_path / "mine"], **QUICK)
    assert [(c["name"], c["kind"]) for c in directory.document["contenders"]] == [("mine", "factors")]
    assert directory.options["contenders"] == [str(tmp_path / "mine")]
    assert directory.document["provenance"]["runs"]["mine"]["max_history"] == model.max_history
    memory = recpo.evaluate(data, [model], **QUICK)
    assert metrics_of(baseline) == metrics_of(directory) == metrics_of(memory)


@pytest.mark.parametrize("bound", [0.0, 2.0])
def test_it_scores_what_was_shown_by_what_it_ranks_by(data, bound):
    options = replace(SMALL.factorization, lower_bound=bound)
    model = fit_factors(data, options)
    every, sums = torch.arange(1, data.num_items + 1), []
    for batch in evaluation_batches(data.root, "test", model.max_history, 512):
        users, covariance = model.fold_in_with_covariance(batch.feedback.histories)
        variance = posterior_variance(model, users, covariance, every.expand(len(users), -1))
        grades = model.scores(users) - bound * variance.sqrt()
        scores = grades.gather(1, (batch.feedback.slates.item_ids - 1).clamp_min(0))
        sums.append(exposure_auc(scores, held_out_targets(batch).without(batch.exclude))["AUC_other"])
    expected = torch.cat(sums).nanmean().item()
    found = recpo.evaluate(
        data, ["factorization"], **QUICK | {"baseline_options": BaselineOptions(factorization=options)}
    )
    assert metrics_of(found)["AUC_other"]["mean"] == pytest.approx(expected)


@pytest.mark.parametrize("name", ["implicit_als", "allrank", "ease"])
def test_als_and_ease_list_and_score_as_their_models_do_and_are_kept(data, tmp_path, name):
    model = (fit_ease if name == "ease" else fit_implicit)(data, getattr(SMALL, name))
    hits, sums = [], []
    for batch in evaluation_batches(data.root, "test", model.max_history, 512):
        histories, slates = batch.feedback.histories, batch.feedback.slates
        targets = held_out_targets(batch).without(batch.exclude)
        lists = model.recommend(histories, 5, batch.exclude).item_ids
        positives = [set(i[p].tolist()) for i, p in zip(targets.item_ids, targets.positive, strict=True)]
        hits += [bool(liked & set(row)) for row, liked in zip(lists.tolist(), positives, strict=True) if liked]
        every = model.scores(histories)
        sums.append(exposure_auc(every.gather(1, (slates.item_ids - 1).clamp_min(0)), targets)["AUC_other"])
    options = QUICK | {"out": tmp_path / "evaluation", "overwrite": True}
    for _ in range(2):
        found = recpo.evaluate(data, [name], **options)
        assert found.document["contenders"][0]["kind"] == ("factors" if name == "allrank" else "baseline")
        metrics = metrics_of(found)
        assert metrics["HitRate@5"]["mean"] == pytest.approx(sum(hits) / len(hits))
        assert metrics["AUC_other"]["mean"] == pytest.approx(torch.cat(sums).nanmean().item())
    (kept,) = (tmp_path / "evaluation" / "baselines").iterdir()
    assert kept.name.startswith(f"{name}-")
    kept.write_bytes(kept.read_bytes()[:-1])
    with refused("damaged", kept.name):
        recpo.evaluate(data, [name], **options)


def test_it_is_fitted_once_for_the_same_data_and_options(data, tmp_path, fits, prepared):
    out = tmp_path / "evaluation"
    first = recpo.evaluate(data, ["factorization"], out=out, **QUICK)
    kept = next((out / "baselines").iterdir())
    content = {file.name: file.read_bytes() for file in kept.iterdir()}
    again = recpo.evaluate(data, ["random", "factorization"], out=out, overwrite=True, **QUICK)
    assert len(fits) == 1
    assert metrics_of(first) == again.document["contenders"][1]["metrics"]
    assert content == {file.name: file.read_bytes() for file in next((out / "baselines").iterdir()).iterdir()}
    for count, change in enumerate(({"ranks": (3,)}, {"lower_bound": 0.5}), 2):
        other = BaselineOptions(factorization=replace(SMALL.factorization, **change))
        recpo.evaluate(data, ["factorization"], out=out, overwrite=True, **QUICK | {"baseline_options": other})
        assert len(fits) == count
    recpo.evaluate(data, ["random"], out=out, overwrite=True, **QUICK)
    assert not (out / "baselines").exists()


def test_evaluations_may_share_a_directory_of_baselines(data, tmp_path, fits):
    cache = tmp_path / "cache"
    for name in "ab":
        found = recpo.evaluate(data, ["factorization"], out=tmp_path / name, baseline_cache=cache, **QUICK)
        assert found.options["baseline_cache"] == str(cache)
        assert not (tmp_path / name / "baselines").exists()
    recpo.evaluate(data, ["factorization"], baseline_cache=cache, **QUICK)
    assert len(fits) == 1
    with refused("conflicting_options"):
        recpo.evaluate(data, ["random"], out=tmp_path / "a", baseline_cache=tmp_path / "a" / "cache", overwrite=True)


def test_a_damaged_model_is_refused_and_nothing_is_lost(data, tmp_path, fits):
    out = tmp_path / "evaluation"
    recpo.evaluate(data, ["factorization"], out=out, **QUICK)
    kept = next((out / "baselines").iterdir())
    file = kept / "factors.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    with refused("damaged", kept.name):
        recpo.evaluate(data, ["factorization"], out=out, overwrite=True, **QUICK)
    assert (out / "metrics.json").is_file()
    shutil.rmtree(kept)
    recpo.evaluate(data, ["factorization"], out=out, overwrite=True, **QUICK)
    assert len(fits) == 2


def test_factors_of_other_items_are_refused(data, tmp_path):
    model = fit_factors(data, SMALL.factorization)
    stranger = model.__class__(**{**vars(model), "catalog_checksum": "0"})
    with refused("mismatch", "items.parquet"):
        recpo.evaluate(data, [stranger], **QUICK)


@pytest.mark.parametrize("period", ["train", "valid", None])
def test_factorization_is_a_default_where_both_periods_have_grades(data, monkeypatch, period):
    """A log without watch times, labels and dislikes has only unknown levels."""
    whole = Prepared.columns

    def columns(self, split, shard, names):
        found = whole(self, split, shard, names)
        return found | {"feedback": 0 * found["feedback"]} if split == period else found

    monkeypatch.setattr(Prepared, "columns", columns)
    assert ("factorization" in default_baselines(data)) == (period is None)
    assert [name for name in default_baselines(data) if name != "factorization"] == [
        name for name in DEFAULT_BASELINES if name != "factorization"
    ]
