"""The approximate index of a bundle: exact scores, no excluded item, lists independent of other users in the batch."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings, strategies as st

from recpo.lists.exploration import Exploration
from recpo.log.id_map import IdMap
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.serving.bundle import Bundle
from recpo.serving.export import BundleOptions, PolicyFacts, export_bundle
from recpo.serving.program import overlap, random_inputs, validate_indexable
from recpo.serving.runtimes import IndexOptions, ItemIndex
from recpo.serving.saved_policy import PolicyRuntime
from tests.refusals import refused

faiss = pytest.importorskip("faiss", reason="faiss is not installed (pip install recpo[index])")
ITEMS, DIM, K = 600, 8, 15


@pytest.fixture(scope="module")
def vectors():
    """Items in clusters, row 0 no item."""
    rng = np.random.default_rng(0)
    made = rng.standard_normal((20, DIM))[rng.integers(0, 20, ITEMS + 1)] + 0.3 * rng.standard_normal((ITEMS + 1, DIM))
    made[0] = 0
    return made.astype(np.float32)


@pytest.fixture(scope="module")
def index(vectors):
    made = faiss.IndexIVFScalarQuantizer(
        faiss.IndexFlatIP(DIM), DIM, 10, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT
    )
    made.train(vectors[1:])
    made.add(vectors[1:])
    return made


def exact(vectors, state, exclude, k):
    scores = vectors.astype(np.float64) @ state
    left = [i for i in range(1, len(vectors)) if i not in set(exclude.tolist())]
    return sorted(left, key=lambda i: (-scores[i], i))[:k], scores


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999), users=st.integers(1, 40), k=st.integers(1, 20), width=st.integers(1, 9))
def test_all_lists_probed_is_the_exact_search(index, vectors, seed, users, k, width):
    rng = np.random.default_rng(seed)
    states = rng.standard_normal((users, DIM)).astype(np.float32)
    exclude = rng.integers(0, ITEMS + 1, (users, width))
    ids, scores = ItemIndex(index, vectors, index.nlist, 4 * 20).search(states, exclude, k)
    for row, state in enumerate(states):
        expected, own = exact(vectors, state, exclude[row], k)
        np.testing.assert_allclose(scores[row], own[expected], atol=1e-5)
        np.testing.assert_allclose(own[ids[row]], scores[row], atol=1e-5)
        assert not set(ids[row].tolist()) & {0, *exclude[row].tolist()}


def test_who_else_is_asked_for_and_the_length_change_nothing(index, vectors):
    rng = np.random.default_rng(1)
    states = rng.standard_normal((37, DIM)).astype(np.float32)
    exclude = rng.integers(0, ITEMS + 1, (37, 50)) * (np.arange(37)[:, None] % 3 > 0)
    few = ItemIndex(index, vectors, 2, 4 * K)
    together = few.search(states, exclude, K)
    for row in range(37):
        for k in (3, K):
            alone = few.search(states[row : row + 1], exclude[row : row + 1], k)
            np.testing.assert_array_equal(alone[0][0], together[0][row, :k])
            np.testing.assert_array_equal(alone[1][0], together[1][row, :k])


def test_where_too_little_is_found_the_whole_catalog_is_scored(index, vectors):
    one = ItemIndex(index, vectors, 1, 20)
    state = np.ones((1, DIM), np.float32)
    barred = np.setdiff1d(np.arange(1, ITEMS + 1), [3, 77, 500])[None]
    ids, scores = one.search(state, barred, 5)
    assert set(ids[0].tolist()) == {3, 77, 500, 0}
    assert np.isneginf(scores[0, 3:]).all()
    most = one.search(state, np.zeros((1, 1), np.int64), 400)
    expected, own = exact(vectors, state[0], np.zeros(1, int), 400)
    np.testing.assert_allclose(most[1][0], own[expected], atol=1e-5)


@pytest.fixture(scope="module")
def indexed(tmp_path_factory):
    """A policy over clusters and its bundle with an index."""
    torch.manual_seed(0)
    options = {"dim": DIM, "heads": 1, "layers": 1, "max_history": 6}
    policy = CatalogSoftmaxPolicy(ITEMS, **options).eval()
    with torch.no_grad():
        centers = torch.randn(20, DIM)
        policy.item_table.weight[1:] = centers[torch.randint(20, (ITEMS,))] + 0.3 * torch.randn(ITEMS, DIM)
    out = tmp_path_factory.mktemp("indexed") / "bundle"
    items = IdMap(pa.array(range(1000, 1000 + ITEMS)))
    parts = SimpleNamespace(items=items, feedback=None)
    from recpo.base.feedback import FeedbackDefinition

    wanted = IndexOptions(recall=0.9, lists=12)
    export_bundle(
        policy, parts.items, PolicyFacts(FeedbackDefinition(), options=options), out, BundleOptions(k=K, index=wanted)
    )
    return policy, out


def test_a_bundle_with_an_index_has_the_policys_scores_but_for_a_constant(indexed):
    policy, path = indexed
    bundle = Bundle.open(path)
    facts = bundle.manifest.index
    assert facts["lists"] == 12
    assert facts["target"] == 0.9
    assert facts["probes"] <= 3
    assert not bundle.scores_are_log_probabilities
    assert list(json.loads((path / "manifest.json").read_text())["program"]["outputs"]) == ["states"]
    inputs = random_inputs(PolicyRuntime(policy), 50, np.random.default_rng(9))
    ids, scores = bundle.runtime.recommend(inputs, K)
    exact_engine = Bundle.open(path, "torch")
    assert exact_engine.scores_are_log_probabilities
    listed, _ = exact_engine.runtime.recommend(inputs, K)
    assert overlap(ids[:, :10], listed[:, :10]) == pytest.approx(facts["recall_10"], abs=0.08)
    logp = PolicyRuntime(policy).score(inputs, ids)
    offset = scores - logp
    np.testing.assert_allclose(offset - offset[:, :1], 0.0, atol=1e-4)
    with refused("unsupported", "engine"):
        bundle.runtime.score(inputs, ids)


def test_propensities_of_exploration_depend_on_differences_of_scores_only(indexed):
    """So they are exact on the shortlist that the index gives, though its scores have no normalizer."""
    policy, path = indexed
    inputs = random_inputs(PolicyRuntime(policy), 8, np.random.default_rng(2))
    ids, scores = Bundle.open(path).runtime.recommend(inputs, K)
    logp = PolicyRuntime(policy).score(inputs, ids)
    explore = Exploration(temperature=1.0, epsilon=0.1, shortlist=K, uniform_over="shortlist")
    by_score, by_logp = (explore.sample_batch(ids, values, 5, np.random.default_rng(3)) for values in (scores, logp))
    np.testing.assert_array_equal(by_score.items, by_logp.items)
    np.testing.assert_allclose(by_score.propensity, by_logp.propensity, rtol=1e-3)


def test_a_damaged_index_and_unsuitable_options_are_refused(indexed, parts, tmp_path, monkeypatch):
    policy, path = indexed
    content = bytearray((path / "index.faiss").read_bytes())
    content[100] ^= 1
    (tmp_path / "b").mkdir()
    for file in path.iterdir():
        (tmp_path / "b" / file.name).write_bytes(content if file.name == "index.faiss" else file.read_bytes())
    with refused("damaged", "index.faiss"):
        Bundle.open(tmp_path / "b")
    for wrong in ({"recall": 0.0}, {"recall": 1.5}, {"lists": 0}, {"oversampling": 0}):
        with refused("out_of_range", ...):
            IndexOptions(**wrong)
    arguments = (policy, IdMap(pa.array(range(ITEMS))), PolicyFacts(parts.feedback), tmp_path / "c")
    with refused("conflicting_options", "item_precision"):
        export_bundle(*arguments, BundleOptions(k=5, index=IndexOptions(), item_precision="int8"))
    with refused("out_of_range", "recall"):
        export_bundle(*arguments, BundleOptions(k=5, index=IndexOptions(recall=1.0, lists=2)))
    bounded = SimpleNamespace()
    monkeypatch.setattr("recpo.serving.program.has_item_matrix", lambda _: True)
    monkeypatch.setattr("recpo.serving.program.item_matrix", lambda _: (torch.zeros(2, 2), 6))
    with refused("unsupported", "lower_bound"):
        validate_indexable(bounded)
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    with refused("not_installed", "faiss"):
        Bundle.open(path)


@pytest.mark.parametrize("fault", ["an item twice", "an item beyond the catalog", "a billion dimensions", "cut short"])
def test_a_damaged_index_is_refused_without_its_checksum(indexed, tmp_path, fault):
    bundle, root = Bundle.open(indexed[1]), tmp_path / "bundle"
    shutil.copytree(indexed[1], root)
    content = bytearray((root / "index.faiss").read_bytes())
    ids = content.index(first_ids(root)[:2].tobytes())
    if fault.startswith("an item"):
        content[ids : ids + 8] = np.int64(ITEMS + 5 if "beyond" in fault else first_ids(root)[1]).tobytes()
    elif fault == "cut short":
        del content[-100:]
    else:
        content[4:8] = np.int32(1 << 30).tobytes()  # the number of dimensions
    (root / "index.faiss").write_bytes(content)
    with refused("damaged", ...):
        ItemIndex.load(root, bundle.manifest)


def first_ids(root):
    """The ids in the first list of an index."""
    index = faiss.read_index(str(root / "index.faiss"))
    return faiss.rev_swig_ptr(index.invlists.get_ids(0), index.invlists.list_size(0)).copy()
