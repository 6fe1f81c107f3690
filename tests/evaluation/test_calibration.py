"""Platt scaling, AUC, log loss and calibration error against scikit-learn and SciPy, and their intervals."""

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.stats import spearmanr
from sklearn.calibration import calibration_curve
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss as sklearn_log_loss, roc_auc_score

from recpo.evaluation.calibration import (
    Platt,
    assess,
    assess_grades,
    calibration_error as error_of_bins,
    fit_line,
    fit_platt,
    log_loss,
    probability_bins,
    ranks,
    roc_auc,
)
from tests.refusals import refused


def drawn(n=4000, scale=0.6, shift=-1.0, seed=0, ties=False):
    rng = np.random.default_rng(seed)
    score = rng.normal(1.0, 2.0, n)
    score = score.round() if ties else score
    return score, rng.random(n) < Platt(scale, shift).probability(score)


def calibration_error(probability, happened):
    return error_of_bins(probability_bins(probability), probability, happened)


def test_platt_is_the_logistic_regression():
    score, happened = drawn()
    fitted = fit_platt(score, happened)
    theirs = LogisticRegression(C=np.inf, tol=1e-10).fit(score[:, None], happened)
    # Platt's targets differ from 0 and 1 by about 1 / n
    assert fitted.scale == pytest.approx(theirs.coef_[0, 0], abs=2e-3)
    assert fitted.shift == pytest.approx(theirs.intercept_[0], abs=2e-3)
    assert fitted.scale == pytest.approx(0.6, abs=0.06)


@pytest.mark.parametrize("case", ["drawn", "separable", "nothing", "everything", "constant", "far", "one"])
def test_platt_finds_the_minimum(case):
    score, happened = drawn(300)
    if case == "separable":
        happened = score > 1
    elif case in ("nothing", "everything"):
        happened = np.full(len(score), case == "everything")
    elif case == "constant":
        score = np.full(len(score), 3.0)
    elif case == "far":
        score = 1e5 + 1e3 * score
    elif case == "one":
        score, happened = score[:1], happened[:1]
    positives, negatives = happened.sum(), (~happened).sum()
    target = np.where(happened, (positives + 1) / (positives + 2), 1 / (negatives + 2))

    def loss(platt):
        logit = platt.scale * score + platt.shift
        return np.mean(np.logaddexp(0, logit) - target * logit)

    fitted = fit_platt(score, happened)
    assert np.isfinite(fitted).all()
    center, spread = score.mean(), score.std() or 1.0
    best = minimize(lambda w: loss(Platt(w[0] / spread, w[1] - w[0] / spread * center)), [0.0, 0.0], tol=1e-12)
    assert loss(fitted) <= best.fun + 1e-9


def test_hostile_scores_are_refused():
    for score in ([], [np.nan, 1.0], [np.inf, 1.0]):
        with refused("bad_value", "score"):
            fit_platt(np.array(score), np.zeros(len(score), bool))


@pytest.mark.parametrize("ties", [False, True])
def test_auc_is_that_of_scikit_learn(ties):
    score, happened = drawn(ties=ties)
    weight = np.random.default_rng(1).integers(0, 4, len(score)).astype(float)
    assert roc_auc(ranks(score), happened) == pytest.approx(roc_auc_score(happened, score), abs=1e-12)
    theirs = roc_auc_score(happened, score, sample_weight=weight)
    assert roc_auc(ranks(score), happened, weight) == pytest.approx(theirs, abs=1e-12)
    assert np.isnan(roc_auc(ranks(score), np.zeros(len(score), bool)))


def test_log_loss_is_that_of_scikit_learn():
    score, happened = drawn()
    probability = Platt(1.0, 0.0).probability(score)
    assert log_loss(probability, happened) == pytest.approx(sklearn_log_loss(happened, probability))
    assert np.isfinite(log_loss(np.array([0.0, 1.0]), np.array([True, False])))


def test_calibration_error_is_that_of_scikit_learns_bins():
    score, happened = drawn()
    probability = Platt(1.0, 0.0).probability(score)
    share, mean = calibration_curve(happened, probability, n_bins=10, strategy="quantile")
    expected = np.abs(share - mean).mean()  # equally many events in each of the bins
    assert calibration_error(probability, happened) == pytest.approx(expected, abs=1e-6)
    assert calibration_error(np.full(100, 0.3), np.arange(100) < 30) == pytest.approx(0.0, abs=1e-12)


def test_calibration_repairs_what_a_weight_has_done():
    score, happened = drawn(20_000)
    later_score, later = drawn(20_000, seed=9)
    odds = Platt(0.6, -1.0 + np.log(5.0)).probability(later_score)  # as if positives had weighed five times as much
    fitted = fit_platt(Platt(0.6, -1.0 + np.log(5.0)).scale * score, happened)
    repaired = fitted.probability(0.6 * later_score)
    assert calibration_error(odds, later) > 0.2
    assert calibration_error(repaired, later) < 0.02


def test_intervals_hold_the_truth_and_know_that_a_users_events_are_alike():
    rng = np.random.default_rng(1)
    user = np.repeat(np.arange(200), 20)
    taste = rng.random(200)[user]  # the same for all events of a user
    happened = rng.random(len(user)) < taste
    report = assess(taste, happened, user, resamples=300)
    assert report["base_rate"].low < 0.5 < report["base_rate"].high
    assert report["auc"].value == pytest.approx(roc_auc_score(happened, taste))
    assert report["auc"].low < report["auc"].value < report["auc"].high
    independent = assess(taste, happened, np.arange(len(user)), resamples=300)
    width = [r["base_rate"].high - r["base_rate"].low for r in (report, independent)]
    assert width[0] > 2 * width[1]
    assert report == assess(taste, happened, user, resamples=300)


def graded(n=3000, seed=0):
    rng = np.random.default_rng(seed)
    user = rng.integers(0, 60, n)
    predicted = np.clip(0.5 + 0.2 * rng.normal(size=n), 0, 1).round(2)
    grade = np.array([0.0, 0.125, 0.375, 0.625, 0.875])[
        np.digitize(predicted + 0.3 * rng.normal(size=n), [0, 0.3, 0.5, 0.7])
    ]
    return predicted, grade, user


def test_platt_of_grades_is_the_logistic_regression_of_fractional_events():
    predicted, grade, _ = graded()
    fitted = fit_platt(4 * predicted, grade)
    score = np.concatenate([predicted, predicted])[:, None] * 4
    kind = np.repeat([1, 0], len(grade))
    theirs = LogisticRegression(C=np.inf, tol=1e-10).fit(score, kind, np.concatenate([grade, 1 - grade]))
    assert fitted.scale == pytest.approx(theirs.coef_[0, 0], abs=2e-3)
    assert fitted.shift == pytest.approx(theirs.intercept_[0], abs=4e-3)
    assert fitted.probability(4 * predicted).mean() == pytest.approx(grade.mean(), abs=1e-3)


def test_errors_of_grades_are_those_of_scipy():
    predicted, grade, user = graded()
    report = assess_grades(predicted, grade, user, resamples=100)
    assert report["rmse"].value == pytest.approx(np.sqrt(np.mean((predicted - grade) ** 2)))
    assert report["rank_correlation"].value == pytest.approx(spearmanr(predicted, grade).statistic)
    within = [spearmanr(predicted[user == one], grade[user == one]).statistic for one in np.unique(user)]
    assert report["rank_correlation_per_user"].value == pytest.approx(np.mean(within))
    for interval in report.values():
        assert interval.low < interval.value < interval.high


def test_users_without_an_order_have_no_rank_correlation():
    predicted, grade = np.array([0.1, 0.2, 0.3, 0.4, 0.4]), np.array([0.5, 0.5, 0.125, 0.875, 0.125])
    report = assess_grades(predicted, grade, np.array([0, 0, 1, 1, 2]))
    assert report["rank_correlation_per_user"].value == pytest.approx(1.0)  # of user 1 alone
    assert np.isnan(assess_grades(np.full(5, 0.3), grade, np.arange(5))["rank_correlation"].value)


def test_a_line_makes_units_comparable():
    predicted, grade, _ = graded()
    expected = np.polyfit(predicted, grade, 1)
    assert fit_line(predicted, grade) == pytest.approx(expected)
    scale, shift = fit_line(1000 * predicted - 7, grade)
    np.testing.assert_allclose(scale * (1000 * predicted - 7) + shift, np.polyval(expected, predicted))
    assert fit_line(np.full(4, 2.0), np.array([0.0, 0.5, 1.0, 0.5])) == (0.0, 0.5)
