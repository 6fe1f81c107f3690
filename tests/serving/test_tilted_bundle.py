"""Bundles of tilted policies: both engines agree with the policy, and the base is one of recpo's own policies."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import onnx
import pytest
import torch

from recpo.base.types import FeedbackBatch, Histories, Slates, catalog_slates
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.policies.grade_factors import GradeFactorsOptions
from recpo.policies.tilted import RerankedPolicy, TiltedPolicy
from recpo.rewards.factors import Factors
from recpo.rewards.rewards import FactorReward
from recpo.serving.bundle import Bundle
from recpo.serving.export import BundleOptions, PolicyFacts, export_bundle
from recpo.serving.histories import EncodedHistories
from recpo.serving.manifest import BundleManifest
from recpo.serving.saved_policy import describe_policy, load_policy, save_policy
from recpo.training.tilting import ByFactors
from tests.refusals import refused

NUM_ITEMS, MAX_HISTORY = 120, 12  # of conftest
RANK, LONGER = 4, MAX_HISTORY + 6
CLASSES = {"sasrec": "CatalogSoftmaxPolicy", "hstu": "CatalogSoftmaxPolicy", "semantic": "SemanticIdPolicy"}


def make_tilted(parts, kind, root, bound=0.0):
    """A policy of that kind, tilted, and the options that a run would have."""
    base, options = parts.policy(kind, root, codebooks=(12, 11))
    own = RerankedPolicy if kind == "semantic" else TiltedPolicy
    numbers = GradeFactorsOptions(rank=RANK, mean=0.4, ridge=2.0, bias_ridge=3.0, max_history=LONGER, lower_bound=bound)
    arguments = {"factors": numbers, "temperature": 0.2} | ({"candidates": 60} if kind == "semantic" else {})
    policy = own(NUM_ITEMS, base=lambda _: base, **arguments).eval()
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(NUM_ITEMS, RANK + 1, RANK + 1, generator=generator)
    covariance = torch.linalg.inv(rows @ rows.mT + torch.eye(RANK + 1))
    factors = torch.randn(NUM_ITEMS, RANK, generator=generator) * 0.4
    variance = torch.rand(NUM_ITEMS, RANK, generator=generator)
    prior = torch.randn(NUM_ITEMS, RANK + 1, generator=generator)
    tensors = {"item_factors": factors, "item_bias": torch.zeros(NUM_ITEMS), "factor_variance": variance}
    policy.factors.assign(tensors | {"history_prior": prior, "item_covariance": covariance}, 0.1)
    module = {"semantic": "semantic_id"}.get(kind, "catalog_softmax")
    class_path = f"recpo.policies.{module}.{CLASSES[kind]}"
    return policy, arguments | {"factors": asdict(numbers), "base": {"class_path": class_path, "init_args": options}}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sasrec", "semantic"])
def test_both_engines_of_a_tilted_bundle_are_the_policy(kind, parts, tmp_path):
    (tmp_path / "codes").mkdir()
    policy, options = make_tilted(parts, kind, tmp_path / "codes", bound=2.0)
    # compares every engine with the policy
    export_bundle(
        policy, parts.items, PolicyFacts(parts.feedback, options=options), tmp_path / "bundle", BundleOptions(k=10)
    )
    manifest = BundleManifest.open(tmp_path / "bundle")
    assert manifest.max_history == LONGER
    assert manifest.options["base"]["class"].endswith(CLASSES[kind])
    assert manifest.options["factors"]["lower_bound"] == 2.0
    assert manifest.options["base"]["options"]["max_history"] == MAX_HISTORY
    rebuilt = load_policy(tmp_path / "bundle", manifest)
    assert torch.equal(rebuilt.factors.item_factors, policy.factors.item_factors)
    events = [
        {"item_id": f"item-{n}", "timestamp": n * 1000, "watch_time": 7.0, "duration": 10.0} for n in range(1, 15)
    ]
    listed = [Bundle.open(tmp_path / "bundle", engine).recommend_one(events, k=5) for engine in ("onnx", "torch")]
    np.testing.assert_allclose(*([score for _, score in one] for one in listed), atol=1e-4)
    operators = {node.op_type for node in onnx.load(tmp_path / "bundle" / "model.onnx").graph.node}
    assert not operators & {"Loop", "Scan", "If"}


@pytest.mark.slow
def test_a_users_grade_is_the_same_in_factors_reward_policy_and_bundle(parts, tmp_path):
    """For a history that is longer than what factors and base read; factors read fewer events than the base."""
    generator, temperature, length, reads = torch.Generator().manual_seed(1), 0.2, LONGER + 7, 5
    factors = Factors(
        mean=0.4,
        item_factors=torch.randn(NUM_ITEMS, RANK, generator=generator) * 0.4,
        item_bias=torch.randn(NUM_ITEMS, generator=generator) * 0.1,
        factor_variance=torch.rand(NUM_ITEMS, RANK, generator=generator) * 0.2,
        history_prior=torch.randn(NUM_ITEMS, RANK + 1, generator=generator),
        ridge=2.0,
        bias_ridge=3.0,
        user_factors=None,
        item_covariance=None,
        noise=0.1,
        catalog_checksum="items",
        max_history=reads,
    )
    ids, levels = (torch.randint(1, end, (2, length), generator=generator) for end in (NUM_ITEMS + 1, 6))
    histories = Histories(ids, torch.full((2,), length), levels)
    catalog = torch.arange(1, NUM_ITEMS + 1).expand(2, -1)
    grades = factors.grades(factors.fold_in(histories), catalog)
    assert torch.equal(grades, factors.grades(factors.fold_in(histories.recent(reads)), catalog))
    assert not torch.allclose(grades, factors.grades(replace(factors, max_history=length).fold_in(histories), catalog))

    slates = Slates(catalog, torch.full_like(catalog, length), torch.ones_like(catalog, dtype=torch.bool))
    factors.save(tmp_path / "factors")
    reward = FactorReward(tmp_path / "factors", users="folded")
    assert torch.equal(reward(FeedbackBatch(histories, slates, torch.arange(2)), slates), grades)
    listed = factors.recommend(histories, 3)
    torch.testing.assert_close(listed.scores, grades.topk(3, 1).values)

    base, options = parts.policy("sasrec")
    policy = ByFactors(factors)(base, temperature)
    assert policy.max_history == max(reads, MAX_HISTORY)
    read = histories.recent(policy.max_history)
    of_base = base.catalog_log_prob(_last(histories.recent(MAX_HISTORY)))[..., 0]
    everything = _last(read)._replace(slates=catalog_slates(read, NUM_ITEMS))
    moved = temperature * (policy.log_prob(everything)[..., 0] - of_base)
    torch.testing.assert_close(moved - moved[:, :1], grades - grades[:, :1], atol=1e-5, rtol=0)

    below = {"class_path": "recpo.policies.catalog_softmax.CatalogSoftmaxPolicy", "init_args": options}
    options = {"factors": asdict(policy.factors.options), "temperature": temperature, "base": below}
    export_bundle(
        policy, parts.items, PolicyFacts(parts.feedback, options=options), tmp_path / "bundle", BundleOptions(k=20)
    )
    inputs = EncodedHistories(read.item_ids.numpy(), read.feedback.numpy(), np.zeros((2, 1), np.int64))
    for engine in ("onnx", "torch"):
        top, scores = map(torch.from_numpy, Bundle.open(tmp_path / "bundle", engine).runtime.recommend(inputs, 20))
        moved = temperature * (scores - of_base.gather(1, top - 1))
        expected = grades.gather(1, top - 1)
        torch.testing.assert_close(moved - moved[:, :1], expected - expected[:, :1], atol=1e-4, rtol=0)


def _last(histories):
    """A batch that asks for every item after the whole history."""
    lengths = histories.lengths[:, None]
    return FeedbackBatch(histories, Slates(lengths, lengths, lengths > 0), torch.arange(len(lengths)))


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
        with refused("damaged", ...):
            load_policy(tmp_path, manifest_of(policy, parts, {**described, "options": {**own, "base": base}}))
    numbers = own["factors"]
    for factors in (numbers | {"rank": "4"}, numbers | {"more": 1}, {"rank": 4}, "os.system", None):
        with refused("damaged", ...):
            load_policy(tmp_path, manifest_of(policy, parts, {**described, "options": {**own, "factors": factors}}))
    lacking = {key: value for key, value in own.items() if key != "base"}
    with refused("damaged", "recpo.policies.tilted.TiltedPolicy"):
        load_policy(tmp_path, manifest_of(policy, parts, {**described, "options": lacking}))


def test_a_tilted_policy_over_somebody_elses_has_the_onnx_engine_only(parts):
    policy, options = make_tilted(parts, "sasrec", None)
    assert describe_policy(policy, {**options, "base": None})["options"] is None
    policy.base.__class__ = type("Own", (CatalogSoftmaxPolicy,), {})
    assert describe_policy(policy, options)["options"] is None
