"""Pairs, mutual information and vectors against loops and dense linear algebra."""

import numpy as np
import pytest

from recpo.items.sources import VectorsFromCooccurrence
from tests.reference.code_loops import near_pairs, positive_information
from tests.refusals import refused


def log(users=40, items=15, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, items, rng.integers(1, 12)).tolist() for _ in range(users)]  # item V never occurs


def shards(sequences, number=1):
    parts = [sequences[start::number] for start in range(number)]
    return [
        {"user_index": np.repeat(np.arange(len(part)), list(map(len, part))), "item_index": np.concatenate(part)}
        for part in parts
    ]


def dense(pairs, items):
    matrix = np.zeros((items, items))
    for (one, other), value in pairs.items():
        matrix[one - 1, other - 1] = matrix[other - 1, one - 1] = value
    return matrix


@pytest.mark.parametrize("window", [1, 3, 20])
def test_pairs_agree_with_loops_however_the_log_is_cut(window):
    sequences = log()
    expected = dense(near_pairs(sequences, window), 15)
    for number in (1, 4):
        pairs = VectorsFromCooccurrence(window=window).count(shards(sequences, number), 15)
        assert pairs.dropped == 0
        assert np.allclose(pairs.weights.toarray(), expected, atol=1e-5)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_information_agrees_with_loops(shift):
    sequences = log()
    model = VectorsFromCooccurrence(window=3, shift=shift)
    information = model.information(model.count(shards(sequences), 15).weights)
    assert np.allclose(
        information.toarray(), dense(positive_information(near_pairs(sequences, 3), shift), 15), atol=1e-5
    )


def test_vectors_span_the_best_approximation_of_low_rank():
    sequences = log(200, 30)
    model = VectorsFromCooccurrence(dim=6)
    pairs = model.count(shards(sequences), 30)
    vectors = model.vectors(pairs, seed=0)
    left, singular, _ = np.linalg.svd(model.information(pairs.weights).toarray())
    gram = (left[:, :6] * singular[:6]) @ left[:, :6].T
    assert np.allclose(vectors @ vectors.T, gram, atol=1e-2 * singular[0])
    assert np.array_equal(vectors, model.vectors(pairs, seed=0))
    assert not vectors[29].any()
    assert vectors[:29].any(1).all()
    assert VectorsFromCooccurrence(dim=99).vectors(pairs, 0).shape == (30, 29)


def test_beyond_the_memory_the_weakest_pairs_are_forgotten_and_counted():
    strong = [[1, 2]] * 9 + [[3, 4]] * 8
    weak = [[1, 3], [2, 4], [5, 6]]
    pairs = VectorsFromCooccurrence(window=1, max_pairs=2).count(shards(strong + weak), 6)
    assert pairs.dropped == 3
    kept = pairs.weights.toarray()
    assert kept[0, 1] == 9
    assert kept[2, 3] == 8
    assert np.count_nonzero(kept) == 4


def test_items_of_the_same_neighborhood_get_close_vectors():
    rng = np.random.default_rng(0)
    sequences = [(rng.choice(10, 6, replace=False) + 1 + 10 * (user % 2)).tolist() for user in range(200)]
    model = VectorsFromCooccurrence(dim=4)
    vectors = model.vectors(model.count(shards(sequences), 20), 0)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cosine = vectors @ vectors.T
    assert cosine[:10, :10].mean() > cosine[:10, 10:].mean() + 0.5


def test_new_items_get_the_mean_of_what_they_stand_near():
    sequences = [[1, 2]] * 4 + [[3, 4]] * 4 + [[1, 5], [3, 5], [6, 7]]
    model = VectorsFromCooccurrence(window=1)
    pairs = model.count(shards(sequences), 8)
    points = np.eye(8, 3, dtype=np.float32)
    is_new = np.arange(8) >= 4
    folded = model.fold_in(pairs, points, is_new)
    assert np.array_equal(folded[:4], points[:4])
    information = model.information(pairs.weights).toarray()
    assert np.allclose(folded[4], [information[4, 0], 0, information[4, 2]] / information[4].sum())
    assert not folded[5:].any()  # 6 and 7 stand near each other only, 8 near nobody


def test_a_log_without_neighbors_is_refused():
    model = VectorsFromCooccurrence()
    with refused("empty", "shift"):
        model.vectors(model.count(shards([[1], [2], [3, 3]]), 3), 0)


@pytest.mark.parametrize("options", [{"dim": 0}, {"window": 0}, {"max_pairs": 0}, {"shift": 0.0}])
def test_options_without_a_meaning_are_refused(options):
    with refused("out_of_range", next(iter(options))):
        VectorsFromCooccurrence(**options)
