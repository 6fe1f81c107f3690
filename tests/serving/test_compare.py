"""Two bundles on logged requests: against ``evaluate``, against lists served one by one, and as a gate."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

import recpo
from recpo.base.feature_encoding import PolicyFeatures
from recpo.batches.slates import HeldOutHistories, evaluation_batches
from recpo.cli.main import main
from recpo.evaluation.comparison import gate
from recpo.evaluation.contenders import Contender
from recpo.evaluation.measures import Recommender
from recpo.log.id_map import IdMap
from recpo.log.prepared import Prepared
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.serving.bundle import Bundle
from recpo.serving.export import BundleOptions, PolicyFacts, export_bundle
from tests.log.test_features import prepare
from tests.refusals import refused
from tests.serving.conftest import served_by

pytestmark = pytest.mark.slow

K = 5


@pytest.fixture(scope="module")
def bundles(prepared, tmp_path_factory):
    """``old`` and ``new`` on the items of the data; ``other`` has lost four of them and gained two."""
    root, data = tmp_path_factory.mktemp("compared"), Prepared.open(prepared)
    known = data.item_ids().to_external(np.arange(1, data.num_items + 1)).to_pylist()
    others = IdMap(pa.array([10**6, *reversed(known[4:]), 10**6 + 1]))
    cutoffs = {bucket: tuple(2 * limit for limit in limits) for bucket, limits in data.feedback.cutoffs.items()}
    made = {
        "old": (0, data.item_ids(), data.feedback),
        "new": (1, data.item_ids(), data.feedback),
        "other": (2, others, replace(data.feedback, cutoffs=cutoffs)),
    }
    for name, (seed, items, feedback) in made.items():
        torch.manual_seed(seed)
        options = {"dim": 8, "layers": 1, "max_history": 10}
        policy = CatalogSoftmaxPolicy(len(items), **options).eval()
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
        export_bundle(policy, items, PolicyFacts(feedback, options=options), root / name, BundleOptions(k=20))
    return root


@pytest.fixture(scope="module")
def compared(bundles, prepared):
    return recpo.compare(bundles / "old", bundles / "new", prepared, k=K).document


def test_ranking_and_value_are_those_of_evaluate(compared, bundles, prepared):
    expected = recpo.evaluate(prepared, [bundles / "old", bundles / "new"], ks=[K], segments=False).document
    by_name = {one["name"]: one for one in expected["contenders"]}
    (pair,) = (one for one in expected["differences"] if (one["contender"], one["against"]) == ("new", "old"))
    for metric, row in compared["ranking"].items():
        assert (row["old"], row["new"]) == tuple(by_name[name]["metrics"][metric] for name in ("old", "new"))
        assert row["difference"]["mean"] == pair["metrics"][metric]["mean"]
    for name in ("old", "new"):
        assert compared["lists"][name][f"coverage@{K}"] == by_name[name]["totals"][f"coverage@{K}"]
    for entry in pair["off_policy"]:
        assert compared["value"][entry["estimator"]]["difference"]["value"] == entry["value"]
    low = compared["value"]["SNIPS"]["difference"]["low"]
    assert low < compared["value"]["SNIPS"]["difference"]["value"]
    assert compared["gate"]["measure"] == f"SNIPS of top_{K}"
    assert compared["gate"]["lower_end"] == low
    assert compared["items"] == {
        "shared": 60, "only_old": 0, "only_new": 0, "old_not_in_data": 0, "new_not_in_data": 0
    }  # fmt: skip


class Length(recpo.Measure):
    """Filled places of a list, and the number of lists."""

    lists = 0

    def update(self, observed):
        self.lists += len(observed.lists.item_ids)
        return {f"length@{K}": (observed.lists.item_ids > 0).sum(1).float()}

    def totals(self):
        return {"lists": float(self.lists)}


def test_metrics_of_your_own_are_compared(compared, bundles, prepared):
    found = recpo.compare(bundles / "old", bundles / "new", prepared, k=K, measures=[Length()]).document
    own = found["ranking"].pop(f"length@{K}")
    assert found["ranking"] == compared["ranking"]
    assert own["old"]["mean"] == own["new"]["mean"] == K
    assert own["difference"] == {"mean": 0.0, "half_width": 0.0, "n": own["old"]["n"]}
    assert {found["lists"][name]["lists"] for name in ("old", "new")} == {found["setting"]["requests"]}


def test_bundles_of_other_items_and_cutoffs_are_compared_by_external_id(bundles, prepared):
    found = recpo.compare(bundles / "old", bundles / "other", prepared, k=K, batch_size=16).document
    assert found["items"] == {
        "shared": 56, "only_old": 4, "only_new": 2, "old_not_in_data": 0, "new_not_in_data": 2
    }  # fmt: skip
    data = Prepared.open(prepared)
    histories, items = HeldOutHistories(data, "test"), data.item_ids()
    old, other = Bundle.open(bundles / "old"), Bundle.open(bundles / "other")
    shared, strange, skipped = [], 0, 0
    for batch in evaluation_batches(data.root, "test", 10, 512):
        for user, past in zip(batch.user_ids.tolist(), batch.exclude.numpy(), strict=True):
            events = histories.events(np.array([user]))
            exclude = {"user_id": [user] * int((past > 0).sum()), "item_id": items.to_external(past[past > 0])}
            one, two = (served_by(b, events, k=K, exclude=exclude, users=[user]) for b in (old, other))
            listed = [set(served.table["item_id"].to_pylist()) for served in (one, two)]
            shared.append(len(listed[0] & listed[1]) / K)
            strange += len(listed[1] & {10**6, 10**6 + 1})
            skipped += two.counts.unknown_items
    assert found["agreement"][f"overlap@{K}"]["mean"] == pytest.approx(np.mean(shared))
    assert found["lists"]["new"]["places_of_items_not_in_data"] == strange > 0
    assert found["lists"]["new"]["unknown_items"] == skipped > 0
    assert sum("new: " in warning for warning in found["warnings"]) >= 2


def test_a_bundle_agrees_fully_with_itself_and_passes_the_strictest_gate(bundles, prepared):
    itself = recpo.compare(bundles / "old", bundles / "old", prepared, k=K, max_loss=0, min_overlap=1)
    assert itself.failures == []
    assert all(value["mean"] == pytest.approx(1) for value in itself.document["agreement"].values())
    for rows in (itself.document["ranking"], itself.document["value"]):
        for row in rows.values():
            assert row["old"] == row["new"]
            assert {row["difference"].get(end, 0) for end in ("mean", "half_width", "value", "low", "high")} == {0}


def test_without_propensities_ndcg_is_the_gate(bundles, prepared):
    arguments = (bundles / "old", bundles / "new", prepared)
    found = recpo.compare(*arguments, k=K, off_policy=None, max_loss=0.0)
    difference = found.document["ranking"][f"NDCG@{K}"]["difference"]
    assert found.document["value"] is None
    assert found.document["gate"]["lower_end"] == difference["mean"] - difference["half_width"] < 0
    assert found.failures[0].startswith(f"NDCG@{K}: new - old lies between -")
    assert recpo.compare(*arguments, k=K, off_policy=None, max_loss=1.0).failures == []


def test_the_status_of_the_verb_is_that_of_the_gate(bundles, prepared, capsys):
    options = ["--old", bundles / "old", "--new", bundles / "new", "--prepared", prepared, "--k", K]
    assert main(["compare", *map(str, options), "--max_loss", "10"]) == 0
    assert main(["compare", *map(str, options), "--max_loss", "0"]) == 3
    refused = capsys.readouterr().err.strip()
    assert refused.startswith(f"swap refused: SNIPS of top_{K}: new - old lies between -")
    assert "\n" not in refused


def test_a_value_without_an_interval_closes_the_gate(compared):
    nothing = {"value": None, "low": None, "high": None}
    document = {**compared, "value": {"SNIPS": {"difference": nothing}}}
    assert gate(document, K, 0.5, None)["failures"] == [
        f"SNIPS of top_{K} of new - old has no interval, so a loss above 0.5 cannot be ruled out"
    ]
    assert gate(document, K, None, None)["failures"] == []


def test_the_verb_prints_writes_and_ends_with_the_status_of_the_gate(bundles, prepared, tmp_path, capsys):
    options = ["--old", bundles / "old", "--new", bundles / "new", "--prepared", prepared, "--k", K]
    command = [*options, "--out", tmp_path / "out", "--min_overlap", 0.99, "--max_loss", 10]
    assert main(["compare", *map(str, command)]) == 3
    printed = capsys.readouterr()
    assert printed.err.strip().splitlines()[-1].startswith("swap refused: the lists share 0.")
    assert "value, SNIPS" in printed.out
    assert "60 in both bundles" in printed.out
    document = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert document.pop("format_version") == 3
    del document["sha256"]
    assert len(document["gate"]["failures"]) == 1
    assert recpo.load(tmp_path / "out").document == document


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 21}, ("mismatch", "k")),
        ({"k": 0}, ("out_of_range", "k")),
        ({"max_loss": -0.1}, ("out_of_range", "max_loss")),
        ({"max_loss": float("nan")}, ("out_of_range", "max_loss")),
        ({"min_overlap": 1.5}, ("out_of_range", "min_overlap")),
        ({"persistence": 1.0}, ("out_of_range", "persistence")),
    ],
)
def test_options_out_of_range_are_errors(bundles, prepared, tmp_path, options, message):
    with refused(*message):
        recpo.compare(bundles / "old", bundles / "new", prepared, out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_other_directories_than_bundles_are_errors(bundles, prepared, capsys):
    arguments = ["compare", "--old", str(bundles / "old"), "--new", str(prepared), "--prepared", str(prepared)]
    assert main(arguments) == 1
    assert "error: " in capsys.readouterr().err
    with refused("wrong_file", "compare.json"):
        recpo.Comparison.open(bundles / "old")


def test_bundles_that_read_features_are_evaluated_and_compared_as_their_policy(tmp_path):
    """Encoded features of batches and values decoded for a reader lead to the lists of the policy itself."""
    data = prepare(tmp_path / "prepared")
    reads = dict.fromkeys(("user_features", "context_features", "behaviors"), True)
    options = {"dim": 8, "heads": 1, "layers": 1, "max_history": 6, **reads}
    policy = CatalogSoftmaxPolicy(data.num_items, **options)
    policy.set_schema(data.feature_schema, data.behaviors)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    known = PolicyFeatures(
        user=data.fitted_features("user"), context=data.fitted_features("context"), behaviors=data.behaviors
    )
    out = tmp_path / "bundle"
    export_bundle(
        policy.eval(),
        data.item_ids(),
        PolicyFacts(data.feedback, features=known, options=options),
        out,
        BundleOptions(k=10),
    )
    loaded = Recommender(policy.recommend, max_history=policy.max_history, reads=policy.reads)
    own = Contender("policy", "run", lambda: loaded, {"path": "policy"})
    document = recpo.evaluate(data, [out, own], ks=[5], baselines=False, segments=False, off_policy=None).document
    bundle, eager = (one["metrics"]["NDCG@5"]["mean"] for one in document["contenders"])
    assert bundle == pytest.approx(eager, abs=1e-6)
    compared = recpo.compare(out, out, data, k=5, off_policy=None).document
    assert compared["ranking"]["NDCG@5"]["old"]["mean"] == pytest.approx(eager, abs=1e-6)
    with refused("mismatch", "behaviors"):
        recpo.evaluate(prepare(tmp_path / "other", behaviors={"share": "is_share", "like": "is_like"}), [out], ks=[5])
