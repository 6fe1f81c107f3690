"""Order and warnings follow from the numbers."""

from __future__ import annotations

import copy

import pytest

from recpo.evaluation.cautions import cautions
from recpo.evaluation.document import with_holm
from recpo.evaluation.reading import best_first, paired


def estimate(mean, half_width=0.01):
    return {"mean": mean, "half_width": half_width, "n": 200}


def document_of(means, half_width=0.01, kinds=None):
    """Contenders a, b, ... with these means of NDCG@10; every difference has the same half-width."""
    names = [chr(ord("a") + index) for index in range(len(means))]
    kinds = kinds or ["run"] * len(means)
    counts = {"users": 300, "users_with_positives": 200, "users_with_dislikes": 150, "positive_events": 1000}
    contenders = [
        {
            "name": name,
            "kind": kind,
            "counts": counts | {"positive_events_excluded": 10},
            "metrics": {"NDCG@10": estimate(mean), "disliked@10": estimate(mean)},
            "totals": {"coverage@10": 0.1, "overlap@10": 0.3},
            "off_policy": [],
        }
        for name, mean, kind in zip(names, means, kinds, strict=True)
    ]
    differences = [
        {
            "contender": names[j],
            "against": names[i],
            "metrics": {
                m: {**estimate(means[j] - means[i], half_width), "differing": 200} for m in ("NDCG@10", "disliked@10")
            },
            "off_policy": [],
        }
        for i in range(len(means))
        for j in range(i + 1, len(means))
    ]
    return {
        "setting": {"ks": [10], "split": "test", "checkpoint": "best", "num_items": 2600},
        "contenders": contenders,
        "differences": with_holm(differences),
        "provenance": {"runs": {name: {"max_history": 50} for name in names}},
    }


def entry(name, value, warnings=()):
    ends = {"low": value - 0.1, "high": value + 0.1}
    found = {"target": "policy", "estimator": "SNIPS", "value": value, "intervals": {"normal": ends, "bootstrap": ends}}
    found |= {"standard_error": 0.1 / 1.959963984540054, "users": 200}
    return {**found, "warnings": list(warnings)}


def test_the_least_is_best_of_dislikes():
    document = document_of([0.3, 0.1])
    assert [c["name"] for c in best_first(document, "disliked@10")] == ["b", "a"]


def test_a_difference_is_found_whichever_way_round():
    document = document_of([0.1, 0.3])
    assert paired(document, "a", "b", "NDCG@10")["mean"] == -paired(document, "b", "a", "NDCG@10")["mean"] < 0
    assert paired(document, "a", "nobody", "NDCG@10") is None


def changed(document, **counts):
    document = copy.deepcopy(document)
    for contender in document["contenders"]:
        contender["counts"] |= counts
    return document


def test_without_faults_there_are_no_warnings():
    assert cautions(document_of([0.1, 0.2])) == []


@pytest.mark.parametrize("kind", ["run", "bundle", "factors", "reranked", "baseline", "oracle"])
def test_lists_that_hardly_differ_between_users_have_a_warning_with_the_numbers(kind):
    alike = document_of([0.1, 0.2], kinds=["baseline", kind])
    alike["contenders"][1]["totals"] = {"coverage@10": 59 / 2600, "overlap@10": 0.52}
    said = [sentence for sentence in cautions(alike) if "hardly differ" in sentence]
    assert len(said) == (kind not in ("baseline", "oracle"))
    for sentence in said:
        assert sentence.startswith("b: ")
        assert "The first 10 places of 300 users come from 59 of 2,600 items" in sentence
        assert "share 52% of their lists" in sentence
    for changes in ({"num_items": 100}, {"num_items": 60}):  # lists of a small catalog overlap by chance
        small = {**alike, "setting": alike["setting"] | changes}
        assert not any("hardly differ" in sentence for sentence in cautions(small))
    few = {**alike, "candidates": {"items": 100}}
    assert not any("hardly differ" in sentence for sentence in cautions(few))


def test_each_weakness_has_its_warning():
    sound = document_of([0.1, 0.2])
    assert cautions(changed(sound, users_with_positives=0))[0].startswith("No user has positives")
    assert cautions(changed(sound, users_with_dislikes=7))[0].startswith("Only 7 users have disliked items: too few")
    assert cautions(changed(sound, users_with_positives=70))[0].startswith("Only 70 users have positives: accuracy")
    assert "60% of the positive events" in cautions(changed(sound, positive_events_excluded=600))[0]
    on_valid = {**sound, "setting": sound["setting"] | {"split": "valid"}}
    assert "optimistic" in cautions(on_valid)[0]
    assert cautions({**on_valid, "setting": on_valid["setting"] | {"checkpoint": "last"}}) == []
    unlike = {**sound, "provenance": {"runs": {"a": {"max_history": 10}, "b": {"max_history": 50}}}}
    assert "a 10, b 50 events" in cautions(unlike)[0]
    same = document_of([0.2, 0.2], half_width=0.0)
    assert cautions(same) == ["b and a have exactly the same metrics for every user: are they the same policy?"]
    weak = copy.deepcopy(sound)
    weak["contenders"][0]["off_policy"] = [entry("a", 0.5, ["means nothing: only 3 effective rows"])]
    assert cautions(weak)[0].endswith("a (policy).")
