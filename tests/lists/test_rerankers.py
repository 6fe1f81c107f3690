"""Re-ranking against loops over the definitions, all orderings of a few items, and closed forms."""

from itertools import combinations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st

from recpo.lists.reranking import (
    AttributeCap,
    Calibration,
    Determinantal,
    ItemAttributes,
    MaximalMarginalRelevance,
    RerankOptions,
    Tags,
    reranked,
)
from recpo.log.id_map import IdMap
from tests.refusals import refused

V = 30
ALL = [MaximalMarginalRelevance(0.6), Determinantal(0.6), AttributeCap("tag", 2), Calibration("tag", 0.4)]


def catalog(seed=0, dim=4, tags=5, most=2):
    """Vectors, and up to ``most`` tags per item; a fifth of the items has none of either."""
    generator = np.random.default_rng(seed)
    vectors = generator.normal(size=(V + 1, dim)) * (generator.random((V + 1, 1)) > 0.2)
    count = generator.integers(0, most + 1, V + 1)
    items = np.repeat(np.arange(V + 1), count)
    return ItemAttributes({"tag": Tags.from_pairs(items, generator.integers(0, tags, len(items)), V)}).with_vectors(
        vectors
    )


def request(seed, size=12):
    generator = np.random.default_rng([seed, 1])
    items = generator.permutation(V)[:size] + 1
    return items, np.sort(generator.normal(size=size))[::-1], generator.integers(0, V + 1, 15)


def tags_of(known, item):
    return known.tags["tag"].of(np.array([item]))[1].tolist()


def scaled(scores):
    return (scores - scores.min()) / (scores.max() - scores.min())


def similarity(known, items):
    vectors = known.vectors[items]
    return vectors @ vectors.T


def mmr_by_loops(known, items, scores, k, weight):
    relevant, cos, chosen = scaled(scores), similarity(known, items), []
    for _ in range(k):
        best, best_value = None, -np.inf
        for i in range(len(items)):
            if i in chosen:
                continue
            value = weight * relevant[i]
            value -= (1 - weight) * max((cos[i, j] for j in chosen), default=0)
            if value > best_value + 1e-12:
                best, best_value = i, value
        chosen.append(best)
    return chosen


def dpp_objective(known, items, scores, chosen, weight):
    kernel = (1 + similarity(known, items)) / 2
    np.fill_diagonal(kernel, 1.0)
    chosen = list(chosen)
    sign, logdet = np.linalg.slogdet(kernel[np.ix_(chosen, chosen)])
    if sign <= 0:
        return -np.inf
    return weight * scaled(scores)[chosen].sum() + (1 - weight) * logdet


def calibration_objective(known, items, scores, chosen, history, weight):
    def shares(listed):
        found = np.zeros(5)
        for item in listed:
            own = tags_of(known, item)
            for tag in own:
                found[tag] += 1 / len(own)
        return found / found.sum() if found.sum() else found

    p, q = shares([h for h in history if h]), shares(items[list(chosen)])
    smoothed = 0.99 * q + 0.01 * p
    divergence = sum(p[g] * np.log(p[g] / smoothed[g]) for g in range(5) if p[g] > 0)
    return weight * scaled(scores)[list(chosen)].sum() - (1 - weight) * divergence


def greedily(objective, size, k):
    chosen = []
    for _ in range(k):
        left = [i for i in range(size) if i not in chosen]
        values = [objective([*chosen, i]) for i in left]
        chosen.append(left[int(np.argmax(values))])
    return chosen


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("weight", [0.0, 0.3, 0.7, 1.0])
def test_maximal_marginal_relevance_is_its_definition(seed, weight):
    known, (items, scores, _) = catalog(seed), request(seed)
    found = MaximalMarginalRelevance(weight).order(items, scores, 6, known)
    if weight:
        assert found.tolist() == mmr_by_loops(known, items, scores, 6, weight)
    else:
        assert found.tolist() == [0, *mmr_by_loops(known, items, scores, 6, 1e-9)[1:]]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("weight", [0.2, 0.7])
def test_determinantal_adds_the_item_with_the_largest_determinant(seed, weight):
    known, (items, scores, _) = catalog(seed, dim=12), request(seed)
    found = Determinantal(weight).order(items, scores, 6, known)
    assert found.tolist() == greedily(lambda c: dpp_objective(known, items, scores, c, weight), len(items), 6)


def test_greedy_slates_are_close_to_the_best_of_all():
    for seed in range(10):
        known, (items, scores, _) = catalog(seed, dim=12), request(seed, 9)
        found = Determinantal(0.5).order(items, scores, 4, known)
        every = [dpp_objective(known, items, scores, c, 0.5) for c in combinations(range(9), 4)]
        assert np.mean(dpp_objective(known, items, scores, found, 0.5) >= np.array(every) - 1e-12) > 0.98


def test_items_in_the_span_of_those_above_come_last_by_relevance():
    """Three directions, and the mean of the kernel's ones: no more than four items are independent."""
    vectors = np.concatenate([np.zeros((1, 2)), np.tile(np.eye(2), (V // 2, 1))])
    known, (items, scores, _) = ItemAttributes().with_vectors(vectors), request(3)
    found = Determinantal(0.3).order(items, scores, 8, known).tolist()
    other = next(i for i in range(12) if items[i] % 2 != items[0] % 2)
    assert found == [0, other, *[i for i in range(12) if i not in (0, other)][:6]]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("weight", [0.0, 0.4, 0.9])
def test_calibration_adds_the_item_with_the_largest_gain(seed, weight):
    known, (items, scores, history) = catalog(seed), request(seed)
    found = Calibration("tag", weight).order(items, scores, 6, known, history)

    def objective(chosen):
        return calibration_objective(known, items, scores, chosen, history, weight)

    for place in range(6):
        above, rest = found[:place].tolist(), [i for i in range(12) if i not in found[:place]]
        assert objective([*above, found[place]]) == pytest.approx(max(objective([*above, i]) for i in rest), abs=1e-12)


def test_calibration_is_nearly_the_best_of_all_slates_and_better_than_relevance():
    for seed in range(5):
        known, (items, scores, history) = catalog(seed), request(seed, 8)
        values = [calibration_objective(known, items, scores, c, history, 0.2) for c in combinations(range(8), 4)]
        found = Calibration("tag", 0.2).order(items, scores, 4, known, history)
        own = calibration_objective(known, items, scores, found, history, 0.2)
        assert own >= max(values) - 0.1 * (max(values) - min(values))
        assert own >= calibration_objective(known, items, scores, range(4), history, 0.2) - 1e-12


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("at_most", [1, 2, 4])
def test_a_cap_is_kept_and_takes_the_most_relevant_items(seed, at_most):
    known, (items, scores, _) = catalog(seed), request(seed)
    expected, counts = [], dict.fromkeys(range(5), 0)
    for i in range(12):
        own = tags_of(known, items[i])
        if len(expected) < 8 and all(counts[tag] < at_most for tag in own):
            expected.append(i)
            for tag in own:
                counts[tag] += 1
    filled = AttributeCap("tag", at_most).order(items, scores, 8, known).tolist()
    assert filled == (expected + [i for i in range(12) if i not in expected])[:8]


@pytest.mark.parametrize(
    "reranker",
    [MaximalMarginalRelevance(1.0), Determinantal(1.0), AttributeCap("tag", 6), Calibration("tag", 1.0)],
    ids=lambda one: type(one).__name__,
)
def test_relevance_alone_changes_nothing(reranker):
    known, (items, scores, history) = catalog(), request(0)
    assert reranker.order(items, scores, 6, known, history).tolist() == list(range(6))
    ties = np.zeros(12)
    assert reranker.order(items, ties, 6, known, history).tolist() == list(range(6))


def test_without_a_history_calibration_is_relevance():
    known, (items, scores, _) = catalog(), request(0)
    for history in (None, np.zeros(3, np.int64), np.zeros(0, np.int64)):
        assert Calibration("tag").order(items, scores, 4, known, history).tolist() == [0, 1, 2, 3]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(ALL), st.integers(0, 12), st.integers(1, 15), st.integers(0, 50))
def test_a_reranked_shortlist_holds_the_same_items_and_scores(reranker, listed, k, seed):
    known, (items, scores, history) = catalog(seed), request(seed)
    items = np.where(np.arange(12) < listed, items, 0)
    scores = np.where(items > 0, scores, -np.inf)
    (order,) = reranked(reranker, items[None], scores[None], [k], known, history[None], 12)
    slate = reranker.order(items[:listed], scores[:listed], k, known, history)
    assert len(set(slate.tolist())) == len(slate) == min(k, listed)
    assert order[: len(slate)].tolist() == slate.tolist()
    rest = order[len(slate) :].tolist()  # the other items by relevance, then the empty places
    assert rest == sorted(set(range(12)) - set(slate.tolist()))


def test_lists_are_reranked_each_with_its_own_length_and_history_and_no_further_than_the_shortlist():
    known, requests = catalog(), [request(seed) for seed in range(3)]
    items, scores, histories = (np.stack(column) for column in zip(*requests, strict=True))
    order = reranked(Calibration("tag"), items, scores, [2, 5, 8], known, histories, 6)
    for row, (k, (own, logp, history)) in enumerate(zip((2, 5, 8), requests, strict=True)):
        first = max(6, k)
        slate = Calibration("tag").order(own[:first], logp[:first], k, known, history)
        assert order[row, :k].tolist() == slate.tolist()
        assert order[row, first:].tolist() == list(range(first, 12))


def test_shorter_slates_are_prefixes_of_longer_ones():
    """Greedy: a slate of k begins with the slate of k - 1."""
    known, (items, scores, history) = catalog(4), request(4)
    for reranker in ALL[:2] + ALL[3:]:
        longest = reranker.order(items, scores, 8, known, history).tolist()
        assert all(reranker.order(items, scores, k, known, history).tolist() == longest[:k] for k in range(1, 8))


def test_attributes_come_from_any_frame(tmp_path):
    ids = IdMap(pa.array(["a", "b", "c"]))
    frame = pa.table(
        {
            "video": ["c", "z", "a", "b"],
            "author": ["x", "x", None, "y"],
            "topics": [["p", "q", "p"], ["r"], [], None],
            "embedding": [[3.0, 4.0], [1.0, 0.0], [0.0, 0.0], [0.0, -2.0]],
        }
    )
    known = ItemAttributes.read(frame, ids, names=["author", "topics"], vectors="embedding", item_id="video")
    assert known.vectors == pytest.approx(np.array([[0, 0], [0, 0], [0, -1], [0.6, 0.8]]))
    owner, tag = known.attribute("author").of(np.array([3, 0, 1, 2, 3]))
    assert owner.tolist() == [0, 3, 4]
    assert tag[0] == tag[2] != tag[1]
    assert known.attribute("topics").of(np.array([3, 2]))[0].tolist() == [0, 0]
    pq.write_table(frame, tmp_path / "items.parquet")
    options = RerankOptions(attributes=tmp_path / "items.parquet", item_id="video", vectors="embedding")
    assert np.array_equal(options.read(["author"], ids).vectors, known.vectors)


def test_what_is_missing_is_named():
    ids, (items, scores, _) = IdMap(pa.array(range(1, V + 1))), request(0)
    with refused("unknown_name", "author"):
        AttributeCap("author").order(items, scores, 3, catalog())
    with refused("missing_option", "vectors"):
        Determinantal().order(items, scores, 3, ItemAttributes())
    with refused("unknown_name", "author"):
        RerankOptions().read(["author"], ids)
    frame = {"item_id": [900], "author": ["x"]}
    with refused("mismatch", "item_id"):
        ItemAttributes.read(frame, ids, names=["author"])
    with refused("missing_column", "writer"):
        ItemAttributes.read({"item_id": [1]}, ids, names=["writer"])
    for wrong, refusal in (
        (lambda: MaximalMarginalRelevance(1.1), ("out_of_range", "relevance_weight")),
        (lambda: Determinantal(-0.1), ("out_of_range", "relevance_weight")),
        (lambda: Calibration("tag", float("nan")), ("out_of_range", "relevance_weight")),
        (lambda: AttributeCap("tag", 0), ("out_of_range", "at_most")),
        (lambda: RerankOptions(shortlist=0), ("out_of_range", "shortlist")),
        (lambda: RerankOptions(vectors="v"), ("missing_option", "attributes")),
    ):
        with refused(*refusal):
            wrong()
