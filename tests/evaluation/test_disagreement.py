"""NDCG and value may rank differently: when a warning appears, and which value it uses."""

from __future__ import annotations

import pytest

from recpo.evaluation.document import with_holm
from recpo.evaluation.reading import best_by_value, disagreement


def estimate(mean, half_width=0.01):
    return {"mean": mean, "half_width": half_width, "n": 200}


ENDS = {"bootstrap": {"low": None, "high": None}}


def document_of(ndcg, values=(), *, metric="true_reward@10", half_width=0.01, off_policy=(), deep=(), flagged=()):
    """Contenders a, b, ... with these means; SNIPS values of their lists of 10, and of their deep lists."""
    estimated = [(target, of) for target, of in (("top_10", off_policy), ("discounted_10", deep)) if of]
    names = [chr(ord("a") + index) for index in range(len(ndcg))]
    metrics = {"NDCG@10": ndcg} | ({metric: values} if values else {})
    contenders = [
        {
            "name": name,
            "kind": "run",
            "metrics": {m: estimate(means[i]) for m, means in metrics.items()},
            "off_policy": [
                {
                    "target": target,
                    "estimator": "SNIPS",
                    "value": of[i],
                    "warnings": ["x"] * (name in flagged),
                    "intervals": ENDS,
                }
                for target, of in estimated
            ],
        }
        for i, name in enumerate(names)
    ]
    differences = [
        {
            "contender": names[j],
            "against": names[i],
            "metrics": {
                m: {**estimate(means[j] - means[i], half_width), "differing": 200} for m, means in metrics.items()
            },
            "off_policy": [
                {
                    "target": target,
                    "estimator": "SNIPS",
                    "value": of[j] - of[i],
                    "intervals": ENDS,
                    "standard_error": half_width / 2,
                    "users": 200,
                }
                for target, of in estimated
            ],
        }
        for i in range(len(names))
        for j in range(i + 1, len(names))
    ]
    return {"setting": {"ks": [10]}, "contenders": contenders, "differences": with_holm(differences)}


def test_the_best_by_ndcg_that_is_surely_not_the_best_by_value_is_named():
    (said,) = disagreement(document_of([0.3, 0.2, 0.1], [0.5, 0.6, 0.8]))
    assert "a has the best NDCG@10, but c has the best true_reward@10 (0.8000 against 0.5000" in said
    assert "Believe true_reward@10: it is what users get" in said
    assert "agreement with the logging policy" in said


def test_the_best_by_value_among_some_contenders():
    assert best_by_value(document_of([0.3, 0.2, 0.1], [0.5, 0.6, 0.8]), ["a", "b"]) == "b"
    without_value = document_of([0.3, 0.2, 0.1], [0.5, 0.6, 0.8])
    for contender in without_value["contenders"]:
        del contender["metrics"]["true_reward@10"]
    assert best_by_value(without_value, ["b", "a"]) == "a"
    assert best_by_value(without_value, ["x"]) is None


@pytest.mark.parametrize(
    "document",
    [
        document_of([0.3, 0.2], [0.8, 0.5]),
        document_of([0.3, 0.2], [0.5, 0.505], half_width=0.1),
        document_of([0.3, 0.2]),
        document_of([0.3], [0.8]),
        document_of([0.3, 0.2, 0.1], off_policy=[0.5, 0.6, 0.9], flagged="c", half_width=0.5),
    ],
    ids=["agree", "cannot be told apart", "no value", "one contender", "the best value carries a warning"],
)
def test_there_is_no_warning_without_need(document):
    assert disagreement(document) == []


def test_off_policy_value_is_taken_before_auc_and_the_truth_before_both():
    (said,) = disagreement(document_of([0.3, 0.2], [0.9, 0.1], metric="AUC_mixed", off_policy=[0.5, 0.7]))
    assert "b has the best off-policy value (SNIPS, top_10) (0.7000 against 0.5000" in said
    (said,) = disagreement(document_of([0.3, 0.2], off_policy=[0.7, 0.5], deep=[0.5, 0.7]))
    assert "b has the best off-policy value (SNIPS, discounted_10) (0.7000 against 0.5000" in said
    (said,) = disagreement(document_of([0.3, 0.2], [0.5, 0.6], metric="AUC_mixed"))
    assert "b has the best AUC_mixed" in said
    assert "exposure cancels out" in said
    assert disagreement(document_of([0.3, 0.2], [0.9, 0.1], off_policy=[0.5, 0.7])) == []
