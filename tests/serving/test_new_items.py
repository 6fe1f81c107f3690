"""A bundle with new items from features equals a bundle that was exported with all items."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import recpo
from recpo.base.feature_encoding import PolicyFeatures, of_side
from recpo.base.features import Categories, Category, FeatureSchema, Number, Vector
from recpo.base.feedback import FeedbackDefinition
from recpo.cli.main import main
from recpo.log.id_map import IdMap
from recpo.ops.small_systems import item_variance_vectors
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.policies.grade_factors import GradeFactorsOptions
from recpo.policies.item_features import ItemFeatureOptions
from recpo.policies.tilted import TiltedPolicy
from recpo.serving import export
from recpo.serving.bundle import Bundle, check_golden
from recpo.serving.program import ranker_of
from recpo.serving.refresh import EncodedItems, refresh_bundle
from tests.refusals import refused

OLD, NEW = 40, 9
FEATURES = (
    Category("author", column="author_id", num_codes=6),
    Categories("tags", length=2, num_codes=5),
    Number("length", mean=2.0, std=3.0),
    Vector("text", width=3),
)
FITTED = of_side(FEATURES, {"author": pa.array(["a", "b", "c", "d"]), "tags": pa.array([7, 8, 9])})
OPTIONS = {"dim": 8, "heads": 1, "layers": 1, "max_history": 5}


def refresh(bundle, items, out):
    return recpo.export(refresh=bundle, items=items, out=out)


def item_rows(count=OLD + NEW):
    """A raw table: some values are unknown to the vocabularies, some are missing."""
    rng = np.random.default_rng(0)
    return pa.table(
        {
            "item_id": [f"i{number}" for number in range(count)],
            "author_id": rng.choice(["a", "b", "c", "d", "stranger", None], count),
            "tags": pa.array([rng.choice(6, rng.integers(0, 3)).tolist() for _ in range(count)], pa.list_(pa.int64())),
            "length": pa.array(rng.normal(2, 3, count), mask=rng.random(count) < 0.2),
            "text": pa.array(rng.normal(size=(count, 3)).astype(np.float32).tolist(), pa.list_(pa.float32())),
        }
    )


def policy_of(rows, trained, tie_weights=True, proposal="uniform"):
    """A policy on the first ``rows`` items, whose weights do not depend on how many they are."""
    options = OPTIONS | {"tie_weights": tie_weights, "proposal": proposal}
    policy = CatalogSoftmaxPolicy(rows, item_features=ItemFeatureOptions(hidden=7), **options)
    policy.set_schema(FeatureSchema(item=FEATURES))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in sorted(policy.named_parameters()):
            if "table.weight" in name:
                parameter[1 : OLD + 1] = torch.randn(OLD, 8, generator=generator)
                parameter[OLD + 1 :] = 99.0  # nobody trained them, so they must not count
            else:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + ("norm" in name))
    features = FITTED.read(item_rows().slice(0, rows), "items").tensors()
    missing = features.map(lambda column: torch.zeros_like(column[:1]))
    policy.set_item_features(features.map(lambda c: c) if rows == 0 else _joined(missing, features))
    policy.set_item_counts(torch.arange(rows) < trained)
    return policy.eval(), options


def _joined(first, rest):
    parts = zip(first.vectors, rest.vectors, strict=True), zip(first.lists, rest.lists, strict=True)
    vectors, lists = (tuple(torch.cat(pair) for pair in part) for part in parts)
    return rest._replace(
        codes=torch.cat([first.codes, rest.codes]),
        numbers=torch.cat([first.numbers, rest.numbers]),
        lists=lists,
        vectors=vectors,
    )


def bundle_of(policy, options, out, **form):
    ids = IdMap(pa.array([f"i{number}" for number in range(policy.num_items)]))
    known = PolicyFeatures(item=FITTED)
    facts = export.PolicyFacts(FeedbackDefinition(), known, options)
    export.export_bundle(policy, ids, facts, out, export.BundleOptions(k=20, **form))
    return Bundle.open(out)


def histories():
    rng = np.random.default_rng(1)
    users = np.repeat(np.arange(12), 4)
    items = [f"i{number}" for number in rng.integers(0, OLD + NEW, len(users))]
    return {"user_id": users, "item_id": items, "timestamp": np.arange(len(users))}


def assert_same_lists(found, expected, tolerance=1e-4):
    for engine in ("onnx", "torch"):
        first, second = (Bundle.open(one.root, engine).recommend(histories()) for one in (found, expected))
        assert first["item_id"].tolist() == second["item_id"].tolist()
        np.testing.assert_allclose(first["score"], second["score"], atol=tolerance)
        assert first["item_id"].isin([f"i{number}" for number in range(OLD, OLD + NEW)]).any()


POLICY = {"tie_weights": False, "proposal": "popularity"}


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    return bundle_of(*policy_of(OLD, OLD - 3, **POLICY), tmp_path_factory.mktemp("old") / "bundle")


@pytest.fixture(scope="module")
def fresh(old, tmp_path_factory):
    """The old bundle with all items."""
    folder = tmp_path_factory.mktemp("fresh")
    pq.write_table(item_rows(), folder / "items.parquet")
    return refresh(old, folder / "items.parquet", folder / "bundle")


@pytest.mark.slow
def test_a_refreshed_bundle_is_one_exported_over_the_larger_catalog(fresh, tmp_path):
    expected = bundle_of(*policy_of(OLD + NEW, OLD - 3, **POLICY), tmp_path / "expected")
    assert (fresh.listed, fresh.retired, fresh.later, fresh.left_out, fresh.added) == (OLD + NEW, 0, 0, 0, NEW)
    assert_same_lists(fresh.bundle, expected)
    assert check_golden(fresh.bundle) > 0
    assert fresh.bundle.manifest.item_precision == "float32"
    assert set(fresh.bundle.manifest.files) == set(expected.manifest.files)


@pytest.mark.slow
def test_a_refreshed_bundle_with_rounded_vectors_in_blocks_is_the_exact_one_rounded(fresh, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "ranker_of", partial(ranker_of, block_rows=30))
    old = bundle_of(*policy_of(OLD, OLD - 3, **POLICY), tmp_path / "old", item_precision="int8")
    pq.write_table(item_rows(), tmp_path / "items.parquet")
    rounded = refresh(old, tmp_path / "items.parquet", tmp_path / "fresh")
    assert (rounded.listed, rounded.added) == (OLD + NEW, NEW)
    assert rounded.bundle.manifest.item_precision == "int8"
    assert check_golden(rounded.bundle) > 0
    assert set(rounded.bundle.manifest.files) == set(fresh.bundle.manifest.files)
    exact, same = (Bundle.open(one.bundle.root, "torch").recommend(histories()) for one in (fresh, rounded))
    assert same.equals(exact)  # this engine has the vectors as they are
    listed = rounded.bundle.recommend(histories())
    assert set(listed["item_id"]) & {f"i{number}" for number in range(OLD, OLD + NEW)}
    for user, rows in listed.groupby("user_id"):
        expected = exact[exact["user_id"] == user].set_index("item_id")["score"]
        both = rows[rows["item_id"].isin(expected.index)]
        assert len(both) > 0.8 * len(rows)
        np.testing.assert_allclose(both["score"], expected[both["item_id"]], atol=0.25)


@pytest.mark.slow
def test_a_bundle_with_an_index_is_indexed_again(tmp_path):
    pytest.importorskip("faiss")
    index = export.IndexOptions(recall=0.9, lists=1)
    old = bundle_of(*policy_of(OLD, OLD), tmp_path / "old", index=index)
    pq.write_table(item_rows(), tmp_path / "items.parquet")
    fresh = refresh_bundle(old.root, tmp_path / "items.parquet", tmp_path / "fresh")
    assert fresh.bundle.manifest.index["recall_10"] == 1.0
    assert len(np.load(tmp_path / "fresh" / "vectors.npy")) == OLD + NEW + 1


@pytest.mark.slow
def test_some_items_retire_some_are_new_some_wait_and_the_next_refresh_continues(old, tmp_path):
    rows = item_rows()
    kept = rows.filter(pa.array([number not in (3, OLD + 2) for number in range(len(rows))]))
    kept = kept.append_column("retired", pa.array([i == 4 for i in range(len(kept))]))  # i5
    later = kept.append_column("available_from", pa.array([None] * (len(kept) - 2) + [2**42] * 2))  # the last two
    for number, table in enumerate((kept.slice(0, OLD + 1), later)):
        pq.write_table(table, tmp_path / f"items{number}.parquet")
    words = ["export", "--refresh", str(old.root), "--items", str(tmp_path / "items0.parquet")]
    assert main([*words, "--out", str(tmp_path / "one")]) == 0
    again = refresh(tmp_path / "one", tmp_path / "items1.parquet", tmp_path / "two")
    straight = refresh(old, tmp_path / "items1.parquet", tmp_path / "three")
    assert (again.retired, again.listed) == (2, OLD + NEW - 3)
    assert (again.later, straight.later, straight.added) == (2, 2, NEW - 1)
    assert_same_lists(again.bundle, straight.bundle)
    now, waiting = histories(), {f"i{number}" for number in (OLD + NEW - 2, OLD + NEW - 1)}
    assert not set(again.bundle.recommend(now)["item_id"]) & {"i3", "i5", f"i{OLD + 2}"}
    assert not set(again.bundle.recommend(now, at="2100-01-01")["item_id"]) & waiting
    after = again.bundle.reader.read(now, at=2**42)
    assert not set(after.unlisted.tolist()) & set(again.bundle.items.to_internal(sorted(waiting)).tolist())


@pytest.mark.slow
def test_encoded_features_take_the_place_of_raw_ones_if_they_mean_the_same(old, fresh, tmp_path):
    pq.write_table(item_rows().select(["item_id"]), tmp_path / "bare.parquet")
    grown = of_side(FEATURES, {"author": pa.array(["a", "b", "c", "d", "stranger"]), "tags": pa.array([7, 8, 9])})
    encoded = EncodedItems(grown, grown.read(item_rows(), "items"))
    cooked = refresh_bundle(old.root, tmp_path / "bare.parquet", tmp_path / "bare", encoded=encoded)
    assert_same_lists(cooked.bundle, fresh.bundle)
    other = of_side(FEATURES, {"author": pa.array(["b", "a", "c", "d"]), "tags": pa.array([7, 8, 9])})
    with refused("mismatch", "features"):
        refresh_bundle(
            old.root, tmp_path / "bare.parquet", tmp_path / "no", encoded=EncodedItems(other, encoded.features)
        )
    with refused("missing_column", "author_id"):
        refresh(old, tmp_path / "bare.parquet", tmp_path / "no")
    twice = pa.concat_tables([item_rows(), item_rows().slice(OLD)])
    pq.write_table(twice, tmp_path / "twice.parquet")
    with refused("duplicate", "item_id"):
        refresh(old, tmp_path / "twice.parquet", tmp_path / "no")
    assert not (tmp_path / "no").exists()


@pytest.mark.slow
def test_a_new_item_of_a_tilted_policy_has_the_prior_mean_of_its_features(tmp_path):
    base, options = policy_of(OLD, OLD)
    numbers = GradeFactorsOptions(
        rank=3,
        mean=0.4,
        ridge=2.0,
        bias_ridge=3.0,
        max_history=5,
        lower_bound=1.0,
        item_features=True,
        noise=0.1,
    )
    policy = TiltedPolicy(OLD, base=lambda _: base, factors=numbers, temperature=0.2).eval()
    model, factors = policy.factors, torch.randn(OLD, 3, generator=torch.Generator().manual_seed(0))
    model.set_schema(FeatureSchema(item=FEATURES))
    tensors = {"item_factors": factors, "item_bias": factors[:, 0], "factor_variance": factors.square()}
    tensors |= {"item_covariance": torch.eye(4).expand(OLD, 4, 4), "history_prior": torch.zeros(OLD, 4)}
    model.assign(tensors, 0.1)
    model.item_prior.copy_(torch.randn(model.item_prior.shape, generator=torch.Generator().manual_seed(1)))
    model.prior_variance.copy_(torch.tensor([0.1, 0.2, 0.3]))
    described = {"class_path": "recpo.policies.catalog_softmax.CatalogSoftmaxPolicy", "init_args": options}
    arguments = {"factors": asdict(numbers), "temperature": 0.2, "base": described}
    old = bundle_of(policy, arguments, tmp_path / "old")
    pq.write_table(item_rows(), tmp_path / "items.parquet")
    fresh = refresh(old, tmp_path / "items.parquet", tmp_path / "fresh")
    weights = Bundle.open(fresh.bundle.root, "torch").runtime.policy.factors
    columns = feature_columns(item_rows().slice(OLD))
    expected = columns @ model.item_prior[:-1].numpy() + model.item_prior[-1].numpy()
    found = torch.cat([weights.item_factors, weights.item_bias[:, None], weights.history_prior], 1)[OLD + 1 :]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert torch.equal(weights.factor_variance[OLD + 1 :], model.prior_variance.expand(NEW, 3))
    forms = 0.1 * item_variance_vectors(weights.item_factors[OLD + 1 :], torch.eye(4).expand(NEW, 4, 4) / 2.0)
    torch.testing.assert_close(weights.item_variances[OLD + 1 :], forms)
    assert set(fresh.bundle.recommend(histories())["item_id"]) & {f"i{number}" for number in range(OLD, OLD + NEW)}


def feature_columns(table):
    """The features of a raw table as columns, one item after the other."""
    rows = []
    for one in table.to_pylist():
        row = np.zeros(6 + 5 + 1 + 3)
        if one["author_id"] is not None:
            row[{"a": 2, "b": 3, "c": 4, "d": 5}.get(one["author_id"], 1)] = 1
        row[6 + 1] = bool(one["tags"])  # all are unknown, which is one code
        row[11] = 0 if one["length"] is None else (one["length"] - 2) / 3
        row[12:] = one["text"]
        rows.append(row)
    return np.stack(rows)
