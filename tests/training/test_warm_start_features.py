"""A run that starts from the previous run, whose policy reads features, context and behaviors."""

import numpy as np
import pyarrow as pa
import pytest
import torch

import recpo
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.policies.item_features import ItemFeatureOptions
from recpo.training.run import hand_over
from recpo.training.warm_start import WarmStart, growth_of, trained_rows
from tests.log.test_extension import OPTIONS, between
from tests.log.test_extension_features import ENGINE, FEATURES, item_rows, known_on, rich_log, user_rows
from tests.refusals import refused

POLICY = {
    "dim": 8,
    "layers": 1,
    "heads": 1,
    "user_features": True,
    "context_features": True,
    "behaviors": True,
    "time_gaps": True,
}


@pytest.fixture(scope="module")
def nights(tmp_path_factory):
    """Data of two nights and a run on the first; some items of its catalog were never shown."""
    folder, log = tmp_path_factory.mktemp("nights"), rich_log(4, 6)
    items, users = item_rows(log, 1), user_rows(log, 2)
    parts = [between(log, 0, 5), between(log, 5, 6)]
    tables = {"items": known_on(items, parts[0], "item_id"), "users": users}
    first = recpo.prepare(parts[0], folder / "first", **tables, **FEATURES, **OPTIONS)
    second = recpo.prepare(parts[1], folder / "second", extends=first, items=items, users=users, **ENGINE)
    assert second.num_items > first.num_items
    policy = {"class_path": "CatalogSoftmaxPolicy", "init_args": POLICY | {"item_features": {"hidden": 8}}}
    run = recpo.train(first, policy=policy, out=folder / "run", trainer={"max_steps": 3})
    return first, second, run, pa.concat_tables(parts), {"items": items, "users": users}


@pytest.mark.slow
def test_encoders_and_known_rows_are_copied_and_untrained_rows_are_zero(nights):
    first, second, run, _, _ = nights
    before = run.policy()
    policy = CatalogSoftmaxPolicy(second.num_items, **POLICY, item_features=ItemFeatureOptions(hidden=8))
    hand_over(policy, second)
    start = WarmStart(run, growth_of(run, second))
    start.validate_features(policy, second)
    start.load_policy(policy)
    rows, kept = policy.item_table.weight.detach(), before.item_table.weight.detach()
    trained = np.append(True, first.item_counts() > 0)
    assert not trained.all()
    torch.testing.assert_close(rows[: len(kept)], kept * torch.from_numpy(trained)[:, None], rtol=0, atol=0)
    assert not rows[len(kept) :].any()
    own, saved = policy.state_dict(), before.state_dict()
    same = [name for name in saved if saved[name].shape == own[name].shape]
    assert any(name.startswith("history_features") for name in same)
    assert any(name.startswith("item_table.features.encoder") for name in same)
    for name in same:
        torch.testing.assert_close(own[name], saved[name], rtol=0, atol=0)
    # vectors of known items, trained or not, are what they were: the features of today are those of yesterday
    policy.eval()
    policy.item_table.features.trained[: len(kept)] = torch.from_numpy(trained)
    torch.testing.assert_close(policy.item_table.vectors()[: len(kept)], before.item_table.vectors())


def test_trained_rows_keep_what_was_trained():
    rows, trained = torch.randn(5, 3), torch.tensor([True, False, True, True, False])
    kept = trained_rows(rows, trained)
    torch.testing.assert_close(kept.whole(), rows * trained[:, None])
    torch.testing.assert_close(kept[1:4], rows[1:4] * trained[1:4, None])


@pytest.mark.slow
def test_training_continues_and_data_that_was_fitted_again_is_refused(nights, tmp_path):
    _, second, run, log, tables = nights
    options = {"trainer": {"max_steps": 2}, "data.segments": "newest", "data.replay": 0.5}
    out = recpo.train(second, init_from=run, out=tmp_path / "out", **options)
    assert out.num_items == second.num_items
    again = recpo.prepare(log, tmp_path / "again", **tables, **FEATURES, **OPTIONS)
    assert again.feature_schema != second.feature_schema
    policy = CatalogSoftmaxPolicy(again.num_items, **POLICY, item_features=ItemFeatureOptions(hidden=8))
    hand_over(policy, again)
    start = WarmStart(run, growth_of(run, second))
    with refused("mismatch", "features"):
        start.validate_features(policy, again)
