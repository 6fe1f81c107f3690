"""A run that starts from the previous run, whose catalog had fewer items."""

import numpy as np
import pandas as pd
import pytest
import torch

import recpo
from recpo.batches.datamodule import Epochs, FeedbackDataModule, TrainBatches
from recpo.batches.slates import ImpressionLayout, Rank
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.training.run import Run
from recpo.training.warm_start import WarmStart, grown_rows, growth_of
from tests.log.test_extension import OPTIONS, between, living_log
from tests.refusals import refused

POLICY = {"dim": 8, "layers": 1, "heads": 1, "tie_weights": False}
SAMPLED = {"normalizer": "sampled", "num_negatives": 8, "proposal": "popularity"}


@pytest.fixture(scope="module")
def nights(tmp_path_factory):
    """Data of two nights, the second one with new items, and a run on the first."""
    folder, log = tmp_path_factory.mktemp("nights"), living_log(5, 6)
    first = recpo.prepare(between(log, 0, 5), folder / "first", **OPTIONS)
    second = recpo.prepare(between(log, 5, 6), folder / "second", extends=first)
    assert second.num_items > first.num_items
    policy = {"class_path": "CatalogSoftmaxPolicy", "init_args": POLICY | SAMPLED}
    run = recpo.train(first, policy=policy, out=folder / "run", trainer={"max_steps": 3})
    return first, second, run


def test_grown_rows_are_the_saved_ones_and_their_mean():
    rows = torch.randn(6, 3)
    grown = grown_rows(rows, 6, 9, 1)
    expected = torch.cat([rows, rows[1:].double().mean(0).float().expand(3, -1)])
    torch.testing.assert_close(grown.whole(), expected)
    for part in (slice(0, 4), slice(5, 8), slice(7, 9), slice(2, 2)):
        torch.testing.assert_close(grown[part], expected[part])
    assert not grown_rows(rows, 6, 9, 1, zero=True)[6:9].any()


@pytest.mark.slow
def test_known_rows_are_copied_and_new_ones_start_from_their_mean(nights):
    first, second, run = nights
    growth, before = growth_of(run, second), run.policy()
    assert growth == (first.num_items, second.num_items)
    policy = CatalogSoftmaxPolicy(second.num_items, **POLICY, **SAMPLED)
    WarmStart(run, growth).load_policy(policy)
    for table in ("item_table", "output_table"):
        old, new = (getattr(each, table).weight.detach() for each in (before, policy))
        torch.testing.assert_close(new[: len(old)], old, rtol=0, atol=0)
        torch.testing.assert_close(new[len(old) :], old[1:].mean(0).expand(len(new) - len(old), -1))
    for name, weight in before.encoder.state_dict().items():
        torch.testing.assert_close(policy.encoder.state_dict()[name], weight, rtol=0, atol=0)


@pytest.mark.slow
def test_training_continues_with_the_state_of_the_optimizer(nights, tmp_path):
    _, second, run = nights
    found = {}
    for name, asked in (("auto", None), ("without", False)):
        out = recpo.train(
            second,
            init_from=run,
            out=tmp_path / name,
            init_training=asked,
            trainer={"max_steps": 2},
            **{"data.segments": "newest", "data.replay": 0.5},
        )
        state = torch.load(out.checkpoint("last"), weights_only=True)["optimizer_states"][0]["state"]
        found[name] = {int(values["step"]) for values in state.values()}
        assert out.num_items == second.num_items
        # the proposal follows today's counts
        counts = torch.from_numpy(second.item_counts())
        fresh = CatalogSoftmaxPolicy(second.num_items, **POLICY, **SAMPLED)
        fresh.set_item_counts(counts)
        torch.testing.assert_close(out.policy().cdf, fresh.cdf)
    assert found == {"auto": {5}, "without": {2}}


@pytest.mark.slow
def test_heads_per_item_grow_with_the_catalog(nights, tmp_path):
    first, second, _ = nights
    policy = {"class_path": "CatalogSoftmaxPolicy", "init_args": POLICY}
    options = {"objective": recpo.PointwiseReward(), "trainer": {"max_steps": 2}}
    base = recpo.train(first, policy=policy, out=tmp_path / "base", **options)
    run = recpo.train(second, init_from=base, out=tmp_path / "run", **options)
    old, new = (torch.load(each.checkpoint("last"), weights_only=True)["state_dict"] for each in (base, run))
    grown = {name for name in old if old[name].shape != new[name].shape}
    assert {"critic.score.bias", "critic.score.item_table.weight", "policy.item_table.weight"} <= grown
    for name in grown:
        assert new[name].shape[0] - old[name].shape[0] == second.num_items - first.num_items


@pytest.mark.slow
def test_semantic_ids_of_yesterday_are_kept(nights, tmp_path):
    first, second, _ = nights
    rng = np.random.default_rng(0)
    ids = second.table("items.parquet", ["item_id"]).column(0).to_numpy()
    vectors = pd.DataFrame({"item_id": ids, "vector": list(rng.normal(size=(len(ids), 4)))})
    codes = recpo.tokenize(first, tmp_path / "codes", vectors=vectors, levels=2, codebook_size=16)
    grown = recpo.tokenize(second, tmp_path / "grown", vectors=vectors, extends=codes)
    kept = codes.codes
    np.testing.assert_array_equal(grown.codes[: len(kept)], kept)
    arguments = {name: value for name, value in POLICY.items() if name != "tie_weights"} | {"decoder_layers": 1}
    policy = {"class_path": "SemanticIdPolicy", "init_args": {**arguments, "codes": str(codes.root)}}
    options = {"trainer": {"max_steps": 2}}
    base = recpo.train(first, policy=policy, out=tmp_path / "base", **options)
    run = recpo.train(
        second,
        init_from=base,
        policy={"class_path": "SemanticIdPolicy", "init_args": {"codes": str(grown.root)}},
        out=tmp_path / "run",
        **options,
    )
    assert run.policy().num_items == second.num_items
    others = recpo.tokenize(second, tmp_path / "others", vectors=vectors, levels=2, codebook_size=16, seed=1)
    with refused("mismatch", "codes"):
        recpo.train(
            second,
            init_from=base,
            policy={"class_path": "SemanticIdPolicy", "init_args": {"codes": str(others.root)}},
            out=tmp_path / "no",
            **options,
        )


def test_another_line_is_refused(nights, tmp_path):
    first, _, run = nights
    other = recpo.prepare(between(living_log(6, 5), 0, 5), tmp_path / "other", **OPTIONS)
    with refused("mismatch", "items.parquet"):
        growth_of(run, other)
    later = Run.open(run.root)
    assert not growth_of(later, first).grows


def test_the_newest_segment_is_read_once_with_a_share_of_older_ones(nights):
    _, second, _ = nights
    layout, older = ImpressionLayout(history_length=4), sum(second.segments[:-1])
    fresh = sum(shard["targets"] for shard in second.manifest["shards"]["train"][older:])
    alone = TrainBatches(second, layout, 4, 0, Rank(), Epochs(newest_only=True))
    assert sum(int(batch.slates.mask.sum()) for batch in alone) == fresh
    replayed = TrainBatches(second, layout, 4, 0, Rank(), Epochs(newest_only=True, replay=0.5))
    assert len(replayed) == len(alone) + round(0.5 * len(alone))
    epochs = []
    for epoch in (0, 0, 1):
        replayed.epoch, replayed.start = epoch, 0
        epochs.append([batch.context_ids.tolist() for batch in replayed])
        assert len({context for batch in epochs[-1] for context in batch}) == sum(map(len, epochs[-1]))
    assert epochs[0] == epochs[1] != epochs[2]
    replayed.epoch, replayed.start = 1, 3
    assert [batch.context_ids.tolist() for batch in replayed] == epochs[2][3:]
    with refused("conflicting_options", "data.assign"):
        TrainBatches(second, layout, 4, 0, Rank(), Epochs(assign="shards", newest_only=True))


def test_replay_belongs_to_the_newest_segment(nights):
    with refused("out_of_range", "data.replay"):
        FeedbackDataModule(nights[0].root, replay=0.1)
    with refused("unused_option", "data.segments"):
        FeedbackDataModule(nights[0].root, segments="newest").train_dataloader()
