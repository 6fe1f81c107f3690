"""Rollouts: training uses the drawn items, groups, logged items, repeats, dynamic sampling, preference lists."""

from dataclasses import dataclass, field

import pytest
import torch

from recpo.base.contracts import RewardFunction
from recpo.base.types import Slates
from recpo.batches.datamodule import FeedbackDataModule
from recpo.batches.slates import ImpressionLayout
from recpo.ops.ranking import first_places
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.training.options import RolloutOptions
from recpo.training.rollout import Candidates, Rollouts, as_preference_list, roll_out, with_logged
from tests.refusals import refused

LAYOUT = ImpressionLayout(history_length=12, slate_length=6)


@dataclass(frozen=True)
class Modulo(RewardFunction):
    """1 for every ``of``-th item, 0 for the others; counts how often it is asked."""

    of: int = 3
    calls: list = field(default_factory=list)

    def __call__(self, batch, candidates):
        self.calls.append(len(candidates.item_ids))
        reward = (candidates.item_ids % self.of == 0).float()
        return reward.masked_fill(candidates.item_ids == 0, torch.nan)


@pytest.fixture
def batch(prepared):
    return next(iter(FeedbackDataModule(prepared, batch_size=16, layout=LAYOUT).train_dataloader()))


@pytest.fixture
def policy():
    torch.manual_seed(0)
    policy = CatalogSoftmaxPolicy(60, dim=8, layers=1, heads=1, max_history=12).eval()
    torch.nn.init.normal_(policy.item_table.weight[1:], std=1.0)
    return policy


def drawn(policy, batch, reward=None, **options):
    torch.manual_seed(1)
    return roll_out(policy, batch, RolloutOptions(**options), reward or Modulo())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"replacement": False},
        {"candidates": "beam"},
        {"logged_share": 0.5},
        {"candidates": "beam", "logged_share": 0.25},
    ],
    ids=str,
)
def test_log_probabilities_of_draws_are_those_that_training_computes(policy, batch, options):
    rollout = drawn(policy, batch, group_size=8, **options)
    again = policy.log_prob(batch._replace(slates=rollout.slates))
    kept = rollout.slates.mask
    assert kept.all()
    torch.testing.assert_close(rollout.logp[kept], again[kept], rtol=0, atol=1e-5)


def test_tempered_draws_carry_the_tempered_probability(policy, batch):
    rollout = drawn(policy, batch, temperature=0.5, top_p=0.8)
    states = policy.encode(batch.histories)[torch.arange(16), batch.histories.lengths]
    logits = states @ policy.item_table.weight[1:].T / 0.5
    probability, order = logits.softmax(-1).sort(descending=True)
    kept = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, probability.cumsum(1) - probability < 0.8)
    nucleus = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
    torch.testing.assert_close(rollout.logp[..., 0], nucleus.gather(1, rollout.slates.item_ids - 1), rtol=0, atol=1e-4)


def test_without_replacement_no_item_comes_twice_and_the_first_is_a_draw(policy, batch):
    one = batch._replace(histories=batch.histories.rows(torch.zeros(3000, dtype=torch.long)))
    torch.manual_seed(0)
    ids, logp = policy.sample(one.histories, 4, RolloutOptions(replacement=False).sampling)
    assert first_places(ids, torch.ones_like(ids, dtype=torch.bool)).all()
    exact = torch.zeros(61).index_put((ids[0],), logp[0, :, 0].exp())
    seen = torch.bincount(ids[:, 0], minlength=61) / 3000
    likely = ids[0][logp[0, :, 0] > -4]
    torch.testing.assert_close(seen[likely], exact[likely], rtol=0, atol=0.04)


def test_a_small_catalog_runs_out_of_items(batch):
    torch.manual_seed(0)
    tiny = CatalogSoftmaxPolicy(5, dim=8, layers=1, heads=1, max_history=12).eval()
    histories = batch.histories._replace(item_ids=batch.histories.item_ids.clamp(max=5))
    ids, _ = tiny.sample(histories, 8, RolloutOptions(replacement=False).sampling)
    assert ((ids > 0).sum(1) == 5).all()
    rollout = drawn(tiny, batch._replace(histories=histories), replacement=False)
    assert (rollout.slates.mask.sum(1) == 5).all()
    assert rollout.metrics["valid_share"] == 5 / 8


def test_repeats_are_kept_or_dropped(policy, batch):
    sharp = {"temperature": 0.2, "group_size": 16}
    kept, dropped = drawn(policy, batch, **sharp), drawn(policy, batch, **sharp, duplicates="drop")
    assert kept.slates.mask.all()
    items, mask = dropped.slates.item_ids, dropped.slates.mask
    assert (dropped.logp[..., 0].diff() <= 0)[mask[:, 1:]].all()
    assert torch.equal(items, kept.slates.item_ids)
    for row in range(len(items)):
        expected = [item not in items[row, :place].tolist() for place, item in enumerate(items[row].tolist())]
        assert mask[row].tolist() == expected
    torch.testing.assert_close(kept.metrics["unique_share"], mask.float().mean())


def test_logged_items_take_their_share_and_bring_their_labels(policy, batch):
    slates = drawn(policy, batch, group_size=8, logged_share=0.25).slates
    logged = batch.slates
    assert torch.equal(slates.is_logged.sum(1), logged.mask.sum(1).clamp(max=2))
    for row in range(len(slates.mask)):
        shown = set(zip(logged.item_ids[row].tolist(), logged.label[row].tolist(), strict=True))
        there = slates.is_logged[row]
        placed = zip(slates.item_ids[row, there].tolist(), slates.label[row, there].tolist(), strict=True)
        assert set(placed) <= shown
    assert slates.label[~slates.is_logged].isnan().all()


def test_a_rollout_is_a_function_of_snapshot_contexts_and_seed(policy, batch):
    def make(rows):
        return roll_out(policy, rows, RolloutOptions(), Modulo())

    rollouts, others = Rollouts(seed=3), Rollouts(seed=3)
    rollouts.begin(0, 0)
    first = rollouts.of(batch, make)
    torch.rand(7)  # random numbers in between change nothing
    assert rollouts.of(batch, make) is first
    others.begin(0, 0)
    assert torch.equal(others.of(batch, make).slates.item_ids, first.slates.item_ids)
    others.begin(0, 1)
    assert not torch.equal(others.of(batch, make).slates.item_ids, first.slates.item_ids)


def test_dynamic_sampling_is_bounded_and_leaves_out_what_remains_constant(policy, batch):
    never = Modulo(of=1000)
    rollout = drawn(policy, batch, never, resamples=3)
    assert never.calls == [16] * 4
    assert not rollout.slates.mask.any()
    assert rollout.metrics["dropped_group_share"] == 1
    assert rollout.metrics["resamples_per_group"] == 3
    rare = Modulo(of=10)
    plain, again = drawn(policy, batch, rare), drawn(policy, batch, rare, resamples=5)
    constant = plain.slates.reward.amax(1) == plain.slates.reward.amin(1)
    assert constant.any()
    assert torch.equal(again.slates.item_ids[~constant], plain.slates.item_ids[~constant])
    informative = again.slates.reward.amax(1) > again.slates.reward.amin(1)
    assert torch.equal(again.slates.mask.any(1), informative)
    assert informative.sum() > (~constant).sum()
    assert sum(rare.calls[1:]) <= 16 * 6
    scored = policy.log_prob(batch._replace(slates=again.slates))
    kept = again.slates.mask
    torch.testing.assert_close(again.logp[kept], scored[kept], rtol=0, atol=1e-5)


@pytest.mark.parametrize("worst_only", [True, False])
def test_a_scored_group_becomes_a_preference_list(worst_only):
    reward = torch.tensor([[0.2, 0.9, 0.9, 0.1], [0.5, 0.5, 0.5, 0.5], [0.3, 0.0, 0.8, 0.0]])
    mask = torch.tensor([[True] * 4, [True] * 4, [True, False, True, False]])
    items = torch.arange(1, 13).view(3, 4)
    found = as_preference_list(
        Candidates(Slates(items, torch.zeros_like(items), mask, reward=reward), items[..., None].float()),
        worst_only=worst_only,
    )
    lists = [row[kept].tolist() for row, kept in zip(found.slates.item_ids, found.slates.mask, strict=True)]
    assert lists == ([[2, 4], [], [11, 9]] if worst_only else [[2, 1, 4], [], [11, 9]])
    assert torch.equal(found.logp[..., 0].long(), found.slates.item_ids)


def test_logged_items_of_a_short_slate_leave_the_rest_to_draws():
    slates = Slates(
        torch.full((2, 4), 9), torch.ones(2, 4).long(), torch.ones(2, 4).bool(), is_logged=torch.zeros(2, 4).bool()
    )
    logged = Slates(
        torch.tensor([[1, 0], [0, 0]]), torch.tensor([[5, 0], [0, 0]]), torch.tensor([[1, 0], [0, 0]]).bool()
    )
    mixed = with_logged(slates, logged, 3)
    assert mixed.item_ids.tolist() == [[1, 9, 9, 9], [9, 9, 9, 9]]
    assert mixed.is_logged.tolist() == [[True, False, False, False], [False] * 4]
    assert mixed.visible[0].tolist() == [5, 1, 1, 1]


def test_an_empty_row_gets_no_candidates(policy, batch):
    empty = batch._replace(slates=batch.slates._replace(mask=torch.zeros_like(batch.slates.mask)))
    rollout = drawn(policy, empty, resamples=2, logged_share=0.5)
    assert not rollout.slates.mask.any()
    assert all(value.isfinite() for value in rollout.metrics.values())


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"group_size": 1}, ("out_of_range", "rollout.group_size")),
        ({"batches": 0}, ("out_of_range", "rollout.batches")),
        ({"temperature": 0.0}, ("out_of_range", "rollout.temperature")),
        ({"top_p": 1.5}, ("out_of_range", "rollout.top_p")),
        ({"logged_share": -0.1}, ("out_of_range", "rollout.logged_share")),
        ({"max_kl": 0.0}, ("out_of_range", "rollout.max_kl")),
        ({"candidates": "beam", "resamples": 1}, ("conflicting_options", "rollout.resamples")),
    ],
    ids=str,
)
def test_impossible_rollouts_are_refused(options, refusal):
    with refused(*refusal):
        RolloutOptions(**options)
