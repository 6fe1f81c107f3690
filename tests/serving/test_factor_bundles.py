"""Factors with features of users and items: the same lists in memory, as a bundle and after new items."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

import recpo
from recpo.base.features import Reads
from recpo.log.feature_columns import FeatureColumns
from recpo.rewards.rewards import EnsembleReward, FactorReward, validate_identity
from recpo.rewards.selection import validation_batches
from recpo.serving.bundle import Bundle
from tests.refusals import refused

pytestmark = pytest.mark.slow

SIZES = {"users": 200, "items": 300, "events": 6000}
FEATURES = FeatureColumns(available_from="available_from")


def refresh(bundle, items, out):
    return recpo.export(refresh=bundle, items=items, out=out)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return recpo.simulate(tmp_path_factory.mktemp("living") / "world", world="living", seed=0, **SIZES)


@pytest.fixture(scope="module")
def living(world, tmp_path_factory):
    out = tmp_path_factory.mktemp("prepared") / "prepared"
    return recpo.prepare(world.log, out, items=world.items, users=world.users, catalog="items", features=FEATURES)


@pytest.fixture(scope="module")
def factors(living, tmp_path_factory):
    options = {"ranks": [3], "consumption": [4], "item_features": True, "user_features": True, "lower_bound": 1.0}
    return recpo.factorize(living, tmp_path_factory.mktemp("factors") / "factors", **options)


@pytest.fixture(scope="module")
def bundle(factors, living, tmp_path_factory):
    return recpo.export(factors, prepared=living, out=tmp_path_factory.mktemp("bundle") / "bundle", k=20)


@pytest.fixture(scope="module")
def asked(world):
    """Two events of some users, and the features of those and of users without events."""
    log = pa.concat_tables([pq.read_table(part) for part in sorted((world.root / "log").glob("*.parquet"))])
    rows = np.flatnonzero(np.isin(log["user_id"].to_numpy(), log["user_id"].to_numpy()[:40:20]))[:8]
    histories = log.take(rows).to_pandas()[["user_id", "item_id", "timestamp", "watch_time", "duration", "dislike"]]
    people = pq.read_table(world.users).to_pandas().head(60)
    return histories, people


def test_features_of_users_reach_lists_in_memory_and_bundles(factors, living, bundle, asked):
    histories, people = asked
    assert factors.reads == Reads(user=True)
    assert bundle.manifest.features.user == living.feature_schema.user
    expected = recpo.recommend(factors, histories, k=5, prepared=living, user_features=people)
    for engine in ("onnx", "torch"):
        found = Bundle.open(bundle.root, engine).recommend(histories, k=5, user_features=people)
        assert found["item_id"].tolist() == expected["item_id"].tolist()
    # without a history, the list is that of the features
    nobody = histories.head(0)
    lists = {}
    for user in people["user_id"]:
        row = people[people["user_id"] == user]
        found = bundle.recommend(nobody, users=[user], k=5, user_features=row)
        lists[user] = tuple(found["item_id"])
    assert len(set(lists.values())) > 1
    of_segment = people.groupby(["segment", "age"])["user_id"].first()
    assert len({lists[user] for user in of_segment}) == len(set(lists.values()))


def test_a_reward_reads_the_features_of_its_users(factors, living, world, tmp_path):
    factors.save(tmp_path / "factors")
    folded = FactorReward(tmp_path / "factors", users="folded")
    assert folded.reads == Reads(user=True)
    assert FactorReward(tmp_path / "factors").reads == Reads()
    validate_identity(folded, "reward", living)
    batch = next(iter(validation_batches(living, factors.max_history, reads=folded.reads))).feedback
    rewards = folded(batch, batch.slates)
    assert rewards.isfinite().any()
    changed = batch.histories._replace(user=batch.histories.user.map(lambda column: column.roll(1, 0)))
    assert (folded(batch._replace(histories=changed), batch.slates) - rewards).abs().nan_to_num(0).max() > 0.001
    with refused("missing_value", "user_features"):
        folded(batch._replace(histories=batch.histories._replace(user=None)), batch.slates)
    both = EnsembleReward([folded, folded])
    validate_identity(both, "reward", living)
    table = pq.read_table(world.users)
    order = pc.sort_indices(table, [("segment", "descending")])
    table = table.set_column(table.column_names.index("segment"), "segment", table["segment"].take(order))
    pq.write_table(table, tmp_path / "users.parquet")
    other = recpo.prepare(
        world.log,
        tmp_path / "other",
        items=world.items,
        users=tmp_path / "users.parquet",
        catalog="items",
        features=FEATURES,
    )
    assert other.catalog_checksum == living.catalog_checksum
    for reward in (folded, both):
        with refused("mismatch", "reward"):
            validate_identity(reward, "reward", other)
    with refused("mismatch", "user_features"):
        factors.validate_features(other)


def test_a_new_item_has_the_prior_mean_of_its_features(factors, living, world, bundle, asked, tmp_path):
    """As an item that the factors were fitted with, and that has no event."""
    table, unseen = pq.read_table(world.items), np.flatnonzero(living.item_counts() == 0) + 1
    rows = table.filter(pc.is_in(table["item_id"], living.item_ids().to_external(unseen)))
    place = table.column_names.index("item_id")
    new = rows.set_column(place, "item_id", pc.add(rows["item_id"], 10**6))
    pq.write_table(pa.concat_tables([table, new]), tmp_path / "items.parquet")
    refreshed = refresh(bundle, tmp_path / "items.parquet", tmp_path / "refreshed")
    assert refreshed.added == len(unseen) > 5
    assert refreshed.left_out == 0
    grown = Bundle.open(tmp_path / "refreshed", "torch")
    model = grown.runtime.policy.factors
    same = living.item_ids().to_internal(rows["item_id"].combine_chunks())
    for name in ("item_factors", "item_bias", "history_prior", "factor_variance", "item_variances"):
        values = getattr(model, name)
        torch.testing.assert_close(values[living.num_items + 1 :], values[same], atol=1e-4, rtol=1e-3)
    assert model.item_bias[same].std() > 0.001
    assert model.history_prior[same].std() > 0
    histories, people = asked
    users = np.repeat(histories["user_id"].unique(), len(rows))
    candidates = [pd.DataFrame({"user_id": users, "item_id": np.resize(t["item_id"], len(users))}) for t in (rows, new)]
    old, added = (grown.score(histories, one, user_features=people)["score"] for one in candidates)
    np.testing.assert_allclose(added, old, atol=1e-4)
    assert old.std() > 0.001
    # popularity says the same of both
    popular = factors.with_popularity(torch.from_numpy(living.item_counts()), 0.1)
    torch.testing.assert_close(
        popular.item_bias[same - 1] - factors.item_bias[same - 1],
        (popular.item_prior - factors.item_prior)[-1, factors.rank].expand(len(same)),
        atol=1e-5,
        rtol=1e-5,
    )


def test_tilting_needs_the_data_of_the_features_and_then_no_more(factors, living, asked, tmp_path):
    histories, people = asked
    small = {"policy.init_args.dim": 8, "policy.init_args.heads": 1, "policy.init_args.layers": 1}
    small |= {"policy.init_args.max_history": 20, "data.layout.init_args.history_length": 20}
    run = recpo.train(living, config="configs/pretrain.yaml", out=tmp_path / "run", trainer={"max_steps": 2}, **small)
    with refused("missing_option", "prepared"):
        recpo.tilt(run, factors, out=tmp_path / "tilted", temperature=0.1)
    tilted = recpo.tilt(run, factors, living, out=tmp_path / "tilted", temperature=0.1, lower_bound=1.0).run
    expected = recpo.recommend(tilted, histories, k=5, user_features=people)
    served = recpo.export(tilted, out=tmp_path / "bundle", k=5)
    found = served.recommend(histories, k=5, user_features=people)
    assert found["item_id"].tolist() == expected["item_id"].tolist()
    assert torch.equal(tilted.policy().factors.user_prior, factors.user_prior)
