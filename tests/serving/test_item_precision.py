"""Bundles whose program searches the catalog in blocks, and those whose item matrix is rounded."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import onnx
import pytest
import torch

from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.serving import export
from recpo.serving.bundle import Bundle
from recpo.serving.export import BundleOptions, PolicyFacts
from recpo.serving.manifest import ProgramReads
from recpo.serving.program import (
    CatalogSearch,
    ServingProgram,
    TorchProgramRuntime,
    overlap,
    random_inputs,
    ranker_of,
    verify_rounded,
)
from recpo.serving.saved_policy import PolicyRuntime
from tests.refusals import refused

NUM_ITEMS = 120  # of conftest


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(export, "ranker_of", partial(ranker_of, block_rows=50))


def tables_of(path):
    """Elements of the largest initializers, by their type."""
    tensors = onnx.load(path / "model.onnx").graph.initializer
    return {onnx.TensorProto.DataType.Name(t.data_type): int(np.prod(t.dims)) for t in tensors if np.prod(t.dims) > 600}


@pytest.mark.slow
def test_ties_of_a_search_in_blocks_go_to_the_smaller_id(parts, tmp_path):
    policy, options = parts.policy("sasrec")
    with torch.no_grad():  # every item twice: in another group, and in another block
        policy.item_table.weight[NUM_ITEMS // 2 + 1 :] = policy.item_table.weight[1 : NUM_ITEMS // 2 + 1]
    export.export_bundle(
        policy, parts.items, PolicyFacts(parts.feedback, options=options), tmp_path / "b", BundleOptions(k=25)
    )
    inputs = random_inputs(PolicyRuntime(policy), 20, np.random.default_rng(5))
    found, listed = (r.recommend(inputs, 25) for r in (Bundle.open(tmp_path / "b").runtime, PolicyRuntime(policy)))
    np.testing.assert_array_equal(found[0], listed[0])
    assert (np.diff(listed[1], axis=1) == 0).any(1).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "kind", "similarity"),
    [("float16", "hstu", "cosine"), ("int8", "sasrec", "dot")],
)
def test_a_bundle_in_blocks_is_its_policy(precision, kind, similarity, parts, tmp_path):
    policy, options = parts.policy(kind)
    policy.similarity, policy.item_table.cosine = similarity, similarity == "cosine"
    options |= {"similarity": similarity}
    export.export_bundle(
        policy,
        parts.items,
        PolicyFacts(parts.feedback, options=options),
        tmp_path / "b",
        BundleOptions(k=60, item_precision=precision),
    )
    named = [one for one in CatalogSoftmaxPolicy.__base__.__subclasses__() if one.__name__ == "CatalogSoftmaxPolicy"]
    assert named == [CatalogSoftmaxPolicy], "a configuration that names the class is not ambiguous after an export"
    bundle = Bundle.open(tmp_path / "b")
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    assert manifest["item_precision"] == precision
    inputs = random_inputs(PolicyRuntime(policy), 20, np.random.default_rng(5))
    (found, scores), (listed, own) = (r.recommend(inputs, 60) for r in (bundle.runtime, PolicyRuntime(policy)))
    if precision == "float32":
        assert manifest["agreement"] is None
        np.testing.assert_array_equal(found, listed)
        np.testing.assert_allclose(scores, own, atol=1e-4)
    else:
        agreement = manifest["agreement"]
        assert agreement["largest_difference"] <= agreement["tolerance"]
        assert agreement["overlap_10"] > 0.9
        assert overlap(found, listed) > 0.95
        # the torch engine has the vectors as they are
        exact = Bundle.open(tmp_path / "b", "torch").runtime.recommend(inputs, 60)
        np.testing.assert_allclose(exact[1], own, atol=1e-4)
    graph = onnx.load(tmp_path / "b" / "model.onnx").graph
    assert "Scan" in {node.op_type for node in graph.node}
    rows = 144  # 3 blocks of 3 groups of 16
    assert {"float32": "FLOAT", "float16": "FLOAT16", "int8": "INT8"}[precision] in tables_of(tmp_path / "b")
    assert max(tables_of(tmp_path / "b").values()) <= rows * 16 + 32


def test_what_rounding_may_cost_is_checked(parts):
    policy, _ = parts.policy("sasrec")
    with torch.no_grad():
        policy.item_table.weight.mul_(20)
    program = ServingProgram(CatalogSearch(policy, "int8", 50), 20, ProgramReads(policy.reads_timestamps))
    with refused("mismatch", "item_precision"):
        verify_rounded(TorchProgramRuntime(program, program), program, PolicyRuntime(policy), "int8")


def test_a_policy_without_an_item_matrix_is_not_rounded(parts):
    class Own(CatalogSoftmaxPolicy):
        pass

    policy = Own(7, dim=4, heads=1, layers=1, max_history=3)
    assert ranker_of(policy, "float32", 4) is policy
    with refused("unsupported", "item_precision"):
        ranker_of(policy, "int8")
    with refused("unknown_name", "item_precision"):
        ranker_of(policy, "int4")


def test_overlap_counts_items_wherever_they_stand():
    assert overlap(np.array([[3, 1, 2], [4, 5, 6]]), np.array([[1, 2, 9], [6, 0, 0]])) == (2 / 3 + 1) / 2
