"""Bundles of policies that read user features, request features and behaviors: both engines equal the policy."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import onnx
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings, strategies as st

from recpo.artifacts.semantic_codes import Codes
from recpo.base.feature_encoding import PolicyFeatures, of_side
from recpo.base.features import Categories, Category, FeatureSchema, Number, Vector
from recpo.base.feedback import FeedbackDefinition
from recpo.base.types import Histories
from recpo.cli.main import main
from recpo.log.id_map import IdMap
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.policies.grade_factors import GradeFactorsOptions
from recpo.policies.semantic_id import SemanticIdPolicy
from recpo.policies.tilted import TiltedPolicy
from recpo.serving import export
from recpo.serving.bundle import Bundle, check_golden
from recpo.serving.export import BundleOptions, PolicyFacts
from recpo.serving.histories import HistoryReader, Request
from recpo.serving.saved_policy import PolicyRuntime
from tests.refusals import refused

pytestmark = pytest.mark.slow

ITEMS, LENGTH = 30, 5
USER = of_side(
    (
        Category("country", column="land", num_codes=4),
        Categories("hobbies", length=2, num_codes=5),
        Number("age", mean=40.0, std=10.0),
        Vector("taste", width=3),
    ),
    {"country": pa.array(["de", "us"]), "hobbies": pa.array([3, 4, 5])},
)
CONTEXT = of_side(
    (Category("surface", num_codes=4), Number("hour", mean=12.0, std=6.0)), {"surface": pa.array(["home", "search"])}
)
BEHAVIORS = ("like", "follow", "share")
KNOWN = PolicyFeatures(user=USER, context=CONTEXT, behaviors=BEHAVIORS)
OPTIONS = {"dim": 8, "heads": 1, "layers": 1, "max_history": LENGTH}
OPTIONS |= dict.fromkeys(("user_features", "context_features", "behaviors", "time_gaps"), True)
ITEM_IDS = IdMap(pa.array([f"i{number}" for number in range(ITEMS)]))


def policy_of():
    torch.manual_seed(0)
    policy = CatalogSoftmaxPolicy(ITEMS, **OPTIONS)
    policy.set_schema(FeatureSchema(user=USER.features, context=CONTEXT.features), BEHAVIORS)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
    return policy.eval()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("features") / "bundle"
    policy = policy_of()
    export.export_bundle(
        policy, ITEM_IDS, PolicyFacts(FeedbackDefinition(), features=KNOWN, options=OPTIONS), out, BundleOptions(k=10)
    )
    return SimpleNamespace(policy=policy, root=out, onnx=Bundle.open(out), torch=Bundle.open(out, "torch"))


surfaces = st.sampled_from(["home", "search", "moon", None])
hours = st.one_of(st.none(), st.floats(-50, 50, width=32))
flags = st.fixed_dictionaries({}, optional=dict.fromkeys(BEHAVIORS, st.booleans()))
contexts = st.fixed_dictionaries({}, optional={"surface": surfaces, "hour": hours})
users = st.fixed_dictionaries(
    {},
    optional={
        "land": st.sampled_from(["de", "us", "mars", None]),
        "hobbies": st.lists(st.integers(2, 6), max_size=4),
        "age": hours,
        "taste": st.lists(st.floats(-2, 2, width=32), min_size=3, max_size=3),
    },
)
events = st.tuples(
    st.integers(0, ITEMS + 2), st.integers(10**12, 10**12 + 10**9), st.floats(0, 1), flags, contexts
).map(lambda e: {"item_id": f"i{e[0]}", "timestamp": e[1], "label": e[2], **e[3], **e[4]})
requests = st.tuples(st.lists(events, max_size=8), users, contexts)


@settings(deadline=None, max_examples=15)
@given(st.lists(requests, min_size=1, max_size=4))
def test_engines_are_the_policy_on_random_requests(made, batch):
    """The reference is the policy itself on histories that are encoded here, feature by feature."""
    read = made.onnx.reader.read_requests([Request(history, (), user, context) for history, user, context in batch])
    ((_, inputs),) = read.batches(len(batch))
    item_ids = torch.from_numpy(inputs.item_ids)
    lengths = (item_ids > 0).sum(1)
    with torch.no_grad():
        histories = Histories(
            item_ids,
            lengths,
            torch.from_numpy(inputs.feedback),
            torch.from_numpy(inputs.timestamps),
            torch.from_numpy(inputs.behaviors),
            USER.read(
                pa.table(_columns([u for _, u, _ in batch], ("land", "hobbies", "age", "taste"))), "users"
            ).tensors(),
            inputs.context.tensors(),
        )
        exclude = torch.cat([item_ids, torch.from_numpy(inputs.exclude)], 1)
        expected = made.policy.recommend(histories, 10, exclude)
    for bundle in (made.onnx, made.torch):
        found, scores = bundle.runtime.recommend(inputs, 10)
        np.testing.assert_allclose(scores, expected.scores.numpy(), atol=1e-4)
        assert (found == expected.item_ids.numpy()).mean() > 0.9  # equal scores may swap places


def _columns(rows, names):
    kinds = {"land": pa.string(), "hobbies": pa.list_(pa.int64()), "age": pa.float64(), "taste": pa.list_(pa.float32())}
    return {name: pa.array([row.get(name) for row in rows], kinds[name]) for name in names}


def test_everything_that_is_read_changes_the_scores(made):
    past = [{"item_id": "i3", "timestamp": 10**12, "label": 0.9}, {"item_id": "i4", "timestamp": 2 * 10**12}]
    plain = dict(made.onnx.recommend_one(past, 10))
    for changed in (
        {"user": {"land": "de"}},
        {"user": {"taste": [1.0, 0.0, 0.0]}},
        {"context": {"surface": "home"}},
        {"history": [past[0] | {"share": True}, past[1]]},
        {"history": [past[0] | {"hour": 3.0}, past[1]]},
    ):
        history = changed.pop("history", past)
        assert dict(made.onnx.recommend_one(history, 10, **changed)) != plain
    # what the vocabulary does not hold is another value than none
    strange, missing = (made.onnx.recommend_one(past, 10, user={"land": land}) for land in ("mars", None))
    assert dict(missing) == plain != dict(strange)


def test_the_manifest_says_what_the_program_is_given(made):
    manifest = json.loads((made.root / "manifest.json").read_text())
    graph = onnx.load(made.root / "model.onnx").graph
    assert set(manifest["program"]["inputs"]) == {value.name for value in graph.input}
    assert manifest["program"]["inputs"]["context_codes"]["shape"] == ["users", LENGTH + 1, 1]
    assert manifest["behaviors"] == list(BEHAVIORS)
    assert check_golden(made.onnx) > 0
    golden = json.loads((made.root / "golden.json").read_text())["requests"]
    assert {"user", "context"} <= golden[0].keys()
    with refused("mismatch", "features"):
        export.export_bundle(
            made.policy, ITEM_IDS, PolicyFacts(FeedbackDefinition(), options=OPTIONS), made.root.parent / "no"
        )


def test_frames_and_the_command_line_take_users_and_requests(made, tmp_path, capsys):
    rng = np.random.default_rng(0)
    history = pd.DataFrame({"user_id": np.repeat([1, 2, 3], 4), "timestamp": np.arange(12) + 10**12})
    history["item_id"] = [f"i{number}" for number in rng.integers(0, ITEMS, 12)]
    for name in BEHAVIORS:
        history[name] = rng.random(12) < 0.5
    history["surface"], history["hour"] = rng.choice(["home", "search"], 12), rng.integers(0, 24, 12).astype(float)
    people = pd.DataFrame({"user_id": [3, 1, 9], "land": ["de", "us", "de"], "age": [20.0, 30.0, None]})
    people["hobbies"], people["taste"] = [[3], [4, 5], []], [[1.0, 2.0, 3.0], None, [0.0, 0.0, 1.0]]
    now = pd.DataFrame({"user_id": [1, 2], "surface": ["search", None], "hour": [1.0, 2.0]})
    expected = made.onnx.recommend(history, 5, user_features=people, context=now, users=[1, 2, 3, 9])
    known = PolicyFeatures(user=USER, context=CONTEXT, behaviors=BEHAVIORS)
    reader = HistoryReader(ITEM_IDS, FeedbackDefinition(), LENGTH, True, known)
    read = reader.read(history, user_features=people, context=now, users=[1, 2, 3, 9])
    ((_, inputs),) = read.batches(4)
    listed, _ = PolicyRuntime(made.policy).recommend(inputs, 5)
    assert expected["item_id"].tolist() == ITEM_IDS.to_external(listed.ravel()).to_pylist()
    for name, frame in (("histories", history), ("users", people), ("context", now)):
        pq.write_table(pa.Table.from_pandas(frame, preserve_index=False), tmp_path / f"{name}.parquet")
    words = ["recommend", "--source", made.root, "--histories", tmp_path / "histories.parquet", "--k", 5]
    words += ["--users", tmp_path / "users.parquet", "--out", tmp_path / "lists.parquet"]
    more = ["--user_features", tmp_path / "users.parquet", "--context", tmp_path / "context.parquet"]
    assert main([str(word) for word in words + more]) == 0
    found = pd.read_parquet(tmp_path / "lists.parquet")
    asked = expected[expected["user_id"].isin([1, 3, 9])]
    assert found["item_id"].tolist() == asked["item_id"].tolist()
    capsys.readouterr()
    assert main([str(word) for word in words]) == 1
    said = capsys.readouterr().err
    assert "user_features: land, hobbies, age, taste; context: surface, hour" in said


@pytest.mark.parametrize("kind", ["tilted", "semantic"])
def test_other_policies_are_given_the_same(kind, tmp_path):
    """The export compares every engine with the policy, on random features."""
    options = dict(OPTIONS)
    if kind == "semantic":
        codes = np.stack(np.unravel_index(np.arange(ITEMS), (8, 8)), 1)
        Codes(codes, (8, 8), "").save(tmp_path, pa.array(range(ITEMS)), {})
        options |= {"codes": str(tmp_path), "beam_width": ITEMS, "decoder_layers": 1}
    made = SemanticIdPolicy if kind == "semantic" else CatalogSoftmaxPolicy
    policy = made(ITEMS, **options)
    if kind == "tilted":
        numbers = GradeFactorsOptions(rank=3, mean=0.4, ridge=2.0, bias_ridge=3.0, max_history=LENGTH + 2)
        base = policy
        policy = TiltedPolicy(ITEMS, base=lambda _: base, factors=numbers, temperature=0.2)
        described = {"class_path": "recpo.policies.catalog_softmax.CatalogSoftmaxPolicy", "init_args": options}
        options = {"factors": asdict(numbers), "temperature": 0.2, "base": described}
    policy.set_schema(FeatureSchema(user=USER.features, context=CONTEXT.features), BEHAVIORS)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    facts = PolicyFacts(FeedbackDefinition(), KNOWN, options)
    export.export_bundle(policy.eval(), ITEM_IDS, facts, tmp_path / "b", BundleOptions(k=10))
    past = [{"item_id": f"i{n}", "timestamp": 10**12 + n, "label": 0.9, "like": n % 2 == 0} for n in range(LENGTH + 2)]
    lists = [
        dict(Bundle.open(tmp_path / "b").recommend_one(past, 10, user=user, context={"hour": 3.0}))
        for user in ({"land": "de"}, {"land": "us"})
    ]
    assert lists[0] != lists[1]
