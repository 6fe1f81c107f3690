"""Bundles of tilted policies: both engines agree with the policy, and the base is one of recpo's own policies."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

from recpo.errors import RecpoError
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.policies.tilted import RerankedPolicy, TiltedPolicy
from recpo.serving.bundle import Bundle
from recpo.serving.export import export_bundle
from recpo.serving.manifest import BundleManifest
from recpo.serving.saved_policy import describe_policy, load_policy, save_policy

NUM_ITEMS, MAX_HISTORY = 120, 12  # of conftest
RANK, LONGER = 4, MAX_HISTORY + 6
CLASSES = {"sasrec": "CatalogSoftmaxPolicy", "hstu": "CatalogSoftmaxPolicy", "semantic": "SemanticIdPolicy"}


def make_tilted(parts, kind, root, bound=0.0):
    """A policy of that kind, tilted, and the options that a run would have."""
    base, options = parts.policy(kind, root)
    own = RerankedPolicy if kind == "semantic" else TiltedPolicy
    arguments = {"rank": RANK, "mean": 0.4, "ridge": 2.0, "bias_ridge": 3.0, "beta": 0.2}
    arguments |= {"max_history": LONGER, "lower_bound": bound}
    arguments |= {"candidates": 60} if kind == "semantic" else {}
    policy = own(NUM_ITEMS, base=lambda _: base, **arguments).eval()
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(NUM_ITEMS, RANK + 1, RANK + 1, generator=generator)
    covariance = torch.linalg.inv(rows @ rows.mT + torch.eye(RANK + 1))
    factors = torch.randn(NUM_ITEMS, RANK, generator=generator) * 0.4
    variance = torch.rand(NUM_ITEMS, RANK, generator=generator)
    policy.factors.assign(factors, torch.zeros(NUM_ITEMS), variance, covariance, noise=0.1)
    module = {"semantic": "semantic_id"}.get(kind, "catalog_softmax")
    class_path = f"recpo.policies.{module}.{CLASSES[kind]}"
    return policy, arguments | {"base": {"class_path": class_path, "init_args": options}}


@pytest.mark.parametrize(
    ("kind", "bound"),
    [
        ("sasrec", 0.0),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("sasrec", 2.0), ("hstu", 0.0), ("semantic", 0.0), ("semantic", 2.0))
        ),
    ],
)
def test_both_engines_of_a_tilted_bundle_are_the_policy(kind, bound, parts, tmp_path):
    (tmp_path / "codes").mkdir()
    policy, options = make_tilted(parts, kind, tmp_path / "codes", bound)
    # compares every engine with the policy
    export_bundle(policy, parts.items, parts.feedback, tmp_path / "bundle", k=10, options=options)
    manifest = BundleManifest.read(tmp_path / "bundle")
    assert manifest.max_history == LONGER
    assert manifest.options["base"]["class"].endswith(CLASSES[kind])
    assert manifest.options["lower_bound"] == bound
    assert manifest.options["base"]["options"]["max_history"] == MAX_HISTORY
    rebuilt = load_policy(tmp_path / "bundle", manifest)
    assert torch.equal(rebuilt.factors.item_factors, policy.factors.item_factors)
    events = [
        {"item_id": f"item-{n}", "timestamp": n * 1000, "watch_time": 7.0, "duration": 10.0} for n in range(1, 15)
    ]
    listed = [Bundle.load(tmp_path / "bundle", engine).recommend_one(events, k=5) for engine in ("onnx", "torch")]
    np.testing.assert_allclose(*([score for _, score in one] for one in listed), atol=1e-4)
    operators = {node.op_type for node in onnx.load(tmp_path / "bundle" / "model.onnx").graph.node}
    assert not operators & {"Loop", "Scan", "If"}


def manifest_of(policy, parts, described):
    sizes = {"num_items": NUM_ITEMS, "max_history": LONGER, "k": 3, "reads_timestamps": False}
    return BundleManifest(**sizes, feedback=parts.feedback, policy=described)


def test_what_is_below_a_tilted_policy_is_one_of_recpos_own(parts, tmp_path):
    policy, options = make_tilted(parts, "sasrec", None)
    described = describe_policy(policy, options)
    save_policy(policy, parts.items, tmp_path)
    rebuilt = load_policy(tmp_path, manifest_of(policy, parts, described))
    assert torch.equal(rebuilt.factors.item_factors, policy.factors.item_factors)
    own, fitting = described["options"], described["options"]["base"]
    for base in (
        {**fitting, "class": "os.system"},
        {**fitting, "class": "recpo.policies.tilted.TiltedPolicy"},
        {**fitting, "class": ["x"]},
        {**fitting, "options": None},
        {**fitting, "options": {**fitting["options"], "dim": "16"}},
        {**fitting, "options": {**fitting["options"], "codes": "/etc"}},
        {**fitting, "more": 1},
        "recpo.policies.catalog_softmax.CatalogSoftmaxPolicy",
        None,
        3,
    ):
        with pytest.raises(RecpoError, match="option"):
            load_policy(tmp_path, manifest_of(policy, parts, {**described, "options": {**own, "base": base}}))
    lacking = {key: value for key, value in own.items() if key != "base"}
    with pytest.raises(RecpoError, match="do not fit"):
        load_policy(tmp_path, manifest_of(policy, parts, {**described, "options": lacking}))


def test_a_tilted_policy_over_somebody_elses_has_the_onnx_engine_only(parts):
    policy, options = make_tilted(parts, "sasrec", None)
    assert describe_policy(policy, {**options, "base": None})["options"] is None
    policy.base.__class__ = type("Own", (CatalogSoftmaxPolicy,), {})
    assert describe_policy(policy, options)["options"] is None
