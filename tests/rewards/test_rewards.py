"""Rewards of candidates: against loops, edge cases, and their short names in YAML."""

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser

from recpo.base.contracts import RewardFunction, RewardScope
from recpo.base.feedback import FeedbackRule
from recpo.base.types import FeedbackBatch, Histories, Slates
from recpo.log.prepared import Prepared
from recpo.rewards.rewards import (
    HitReward,
    LoggedReward,
    RankAwareReward,
    ValidityReward,
    WeightedSum,
    rank_aware_reward,
    validate_identity,
)
from tests.refusals import refused


def batch_of(items, visible=None, quantile=None, dislike=None, mask=None, is_logged=None, least=None):
    items = torch.tensor(items)
    visible = torch.zeros_like(items) if visible is None else torch.tensor(visible)
    label = torch.ones(items.shape) if quantile is None else torch.tensor(quantile)
    dislike = torch.zeros(items.shape, dtype=torch.bool) if dislike is None else torch.tensor(dislike)
    slates = Slates(
        items,
        visible,
        items > 0 if mask is None else torch.tensor(mask),
        label=label,
        dislike=dislike,
        positive=FeedbackRule(0.75 if least is None else least).positive(label, dislike),
        is_logged=None if is_logged is None else torch.tensor(is_logged),
    )
    histories = Histories(torch.zeros(len(items), 6, dtype=torch.long), torch.full((len(items),), 6))
    return FeedbackBatch(histories, slates, torch.arange(len(items)))


def candidates_of(items, visible=None, mask=None):
    items = torch.tensor(items)
    visible = torch.zeros_like(items) if visible is None else torch.tensor(visible)
    return Slates(items, visible, torch.ones_like(items, dtype=torch.bool) if mask is None else torch.tensor(mask))


def test_a_hit_is_a_logged_positive():
    nan = float("nan")
    batch = batch_of(
        [[1, 2, 3, 4, 5, 6]],
        quantile=[[0.8, 0.75, 0.74, nan, 1.0, 0.9]],
        dislike=[[False] * 4 + [True, False]],
        is_logged=[[True] * 5 + [False]],
    )
    reward = HitReward()(batch, candidates_of([[1, 2, 3, 4, 5, 6, 7, 0]]))
    assert reward.tolist() == [[1, 1, 0, 0, 0, 0, 0, 0]]


def test_a_position_that_left_the_logged_slate_is_not_a_hit():
    batch = batch_of([[1, 2]], mask=[[True, False]])
    assert HitReward()(batch, candidates_of([[1, 2]])).tolist() == [[1, 0]]


def test_hits_are_those_of_a_loop():
    rng = np.random.default_rng(0)
    items, visible = rng.integers(0, 8, (40, 9)), rng.integers(0, 7, (40, 9))
    quantile, disliked = rng.random((40, 9)).astype(np.float32), rng.random((40, 9)) < 0.2
    proposed, seen = rng.integers(0, 8, (40, 5)), rng.integers(0, 7, (40, 5))
    kept = rng.random((40, 5)) < 0.8
    batch = batch_of(items.tolist(), visible.tolist(), quantile.tolist(), disliked.tolist(), least=0.4)
    got = HitReward()(batch, candidates_of(proposed.tolist(), seen.tolist(), kept.tolist()))
    for b in range(40):
        for g in range(5):
            expected = kept[b, g] and any(
                items[b, s] == proposed[b, g] > 0
                and visible[b, s] >= seen[b, g]
                and quantile[b, s] >= 0.4
                and not disliked[b, s]
                for s in range(9)
            )
            assert got[b, g] == expected


def test_an_id_without_an_item_is_not_a_hit_even_if_the_log_has_such_a_positive():
    batch = batch_of([[0, 2]], mask=[[True, True]])
    assert HitReward()(batch, candidates_of([[0, 2]])).tolist() == [[0, 1]]


def test_a_hit_without_positives_is_refused():
    batch = batch_of([[1]])
    batch = batch._replace(slates=batch.slates._replace(positive=None))
    with refused("missing_value", "positive"):
        HitReward()(batch, candidates_of([[1]]))


def test_misses_share_minus_one_and_masked_candidates_have_no_rank():
    torch.manual_seed(0)
    hits, mask = torch.rand(50, 7) < 0.3, torch.rand(50, 7) < 0.7
    reward = rank_aware_reward(hits, mask)
    misses = mask & ~hits
    total = torch.where(misses, reward, 0.0).sum(1)
    torch.testing.assert_close(total, -misses.any(1).double())
    assert (reward[hits & mask] == 1).all()
    assert (reward[~mask] == 0).all()
    for row in range(50):
        alone = rank_aware_reward(hits[row, mask[row]])
        torch.testing.assert_close(reward[row, mask[row]], alone)
        assert (alone[~hits[row, mask[row]]].diff() >= 0).all()


def test_a_miss_costs_the_discount_of_its_rank():
    """1 / log2(rank + 1) over the sum of the misses'; hits and masked candidates take ranks or none."""
    hits, mask = torch.tensor([[False, True, False, False]]), torch.tensor([[2, 1, 0, 3]])  # of numbers
    first, third = 1 / np.log2(2), 1 / np.log2(4)
    expected = [-first / (first + third), 1.0, 0.0, -third / (first + third)]
    assert rank_aware_reward(hits, mask)[0].tolist() == pytest.approx(expected)
    alone = rank_aware_reward(torch.tensor([False, False, False, False]))
    weights = 1 / np.log2(np.arange(2, 6))
    assert alone.tolist() == pytest.approx((-weights / weights.sum()).tolist())


def test_hits_where_every_logged_item_is_positive():
    """The last key is a positive too, and ids beyond it are looked for."""
    batch = batch_of([[3, 5]], is_logged=[[1, 1]])
    reward = HitReward()(batch, candidates_of([[3, 5, 1, 9]]))
    assert reward.tolist() == [[1.0, 1.0, 0.0, 0.0]]
    assert reward.dtype == torch.float32
    assert HitReward().requires == RankAwareReward().requires - {"ranks"} == {"positives"}


def test_rank_aware_reward_of_candidates():
    batch = batch_of([[5, 6]])
    reward = RankAwareReward()(batch, candidates_of([[4, 0, 5, 3]]))
    expected = rank_aware_reward(torch.tensor([[False, False, True, False]])).float()
    torch.testing.assert_close(reward, expected)


def test_validity_judges_some_candidates_at_random():
    items = torch.randint(0, 3, (400, 12))
    candidates = candidates_of(items.tolist(), mask=(torch.rand(400, 12) < 0.9).tolist())
    batch = batch_of([[1]])
    torch.manual_seed(7)
    reward = ValidityReward(count=3)(batch, candidates)
    judged = ~reward.isnan()
    assert (judged.sum(1) == 3).all()
    assert not (judged & ~candidates.mask).any()
    assert torch.equal(reward[judged], (items > 0).float()[judged])
    share = judged[candidates.mask.all(1)].double().mean(0)
    assert (share - 3 / 12).abs().max() < 0.12  # every place alike, whatever its rank
    torch.manual_seed(7)
    assert torch.equal(ValidityReward(count=3)(batch, candidates).isnan(), ~judged)
    assert not ValidityReward(count=99)(batch, candidates_of([[0, 1]])).isnan().any()
    with refused("out_of_range", "ValidityReward.count"):
        ValidityReward(count=0)


@pytest.mark.parametrize("cost", [1.0, 2.0, 0.25])
@pytest.mark.parametrize("unknown", [None, 0.5])
def test_logged_reward_in_closed_form(cost, unknown):
    nan = float("nan")
    label, dislike = [[0.75, 0.75, nan, nan, 0.0]], [[False, True, True, False, True]]
    candidates = batch_of([[1, 2, 3, 4, 5]], quantile=label, dislike=dislike).slates
    reward = LoggedReward(cost, unknown)(batch_of([[1]]), candidates)
    expected = torch.tensor([[0.75, 0.75 - cost, -cost, nan if unknown is None else unknown, -cost]])
    torch.testing.assert_close(reward, expected, equal_nan=True)
    bare = LoggedReward(cost, unknown)(batch_of([[1]]), candidates._replace(dislike=None))
    rest = nan if unknown is None else unknown
    torch.testing.assert_close(bare, torch.tensor([[0.75, 0.75, rest, rest, 0.0]]), equal_nan=True)


def test_dislikes_may_be_numbers():
    candidates = batch_of([[1, 2]], quantile=[[0.5, 0.5]], dislike=[[False, True]]).slates
    candidates = candidates._replace(dislike=torch.tensor([[0, 1]]))
    assert LoggedReward()(batch_of([[1]]), candidates).tolist() == [[0.5, -0.5]]


def test_validity_is_float32_for_any_default():
    torch.set_default_dtype(torch.float64)
    try:
        assert ValidityReward()(batch_of([[1]]), candidates_of([[0, 1]])).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_rewards_learn_from_and_their_defaults():
    assert LoggedReward() == LoggedReward(1.0, None)
    assert LoggedReward().requires == {"labels"}
    assert ValidityReward(count=1).count == 1
    assert ValidityReward() == ValidityReward(5)
    both = WeightedSum((LoggedReward(), HitReward()), (1.0, 2.0))
    assert both.requires == {"labels", "positives"}
    assert WeightedSum((LoggedReward(), RankAwareReward()), (1.0, 1.0)).requires == {"labels", "positives", "ranks"}


def test_logged_reward_needs_labels():
    with refused("missing_value", "label"):
        LoggedReward()(batch_of([[1]]), candidates_of([[1]]))


class Given(RewardFunction):
    def __init__(self, values, checksum=None):
        self.values, self.checksum = torch.tensor(values), checksum

    @property
    def scopes(self):
        return (RewardScope(self.checksum),)

    def __call__(self, batch, candidates):
        return self.values


def test_a_sum_leaves_out_what_a_term_does_not_know():
    nan = float("nan")
    first, second = Given([[1.0, nan, nan, 2.0]]), Given([[10.0, 20.0, nan, nan]])
    batch, candidates = batch_of([[1]]), candidates_of([[1, 2, 3, 4]])
    total = WeightedSum([first, second], [1.0, -0.5])(batch, candidates)
    torch.testing.assert_close(total, torch.tensor([[-4.0, -10.0, nan, 2.0]]), equal_nan=True)
    strict = WeightedSum([first, second], [1.0, -0.5], strict=True)(batch, candidates)
    torch.testing.assert_close(strict, torch.tensor([[-4.0, nan, nan, nan]]), equal_nan=True)


def test_a_sum_of_rewards_in_other_formats_is_float32():
    terms = [Given([[True, False]]), Given(np.array([[0.25, 0.5]])), Given([[1, 2]])]
    total = WeightedSum(terms, [1.0, 2.0, 3.0])(batch_of([[1]]), candidates_of([[1, 2]]))
    assert total.dtype == torch.float32
    assert total.tolist() == [[4.5, 7.0]]


def test_a_sum_that_cannot_be_is_refused():
    for rewards, weights in (([], []), ([HitReward()], []), ([HitReward()], [1.0, 2.0])):
        with refused("wrong_shape", "WeightedSum.weights"):
            WeightedSum(rewards, weights)


def test_every_term_of_a_sum_was_made_for_the_items_of_the_data(prepared):
    data = Prepared.open(prepared)
    own = Given([[0.0]], data.catalog_checksum)
    validate_identity(WeightedSum([HitReward(), own], [1.0, 1.0]), "reward", data)
    for strange in ([own, Given([[0.0]], "b")], [HitReward(), Given([[0.0]], "b")]):
        with refused("mismatch", "reward"):
            validate_identity(WeightedSum(strange, [1.0, 1.0]), "reward", data)


def test_rewards_are_known_by_their_bare_names():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--reward", type=RewardFunction)
    terms = [{"class_path": "RankAwareReward"}, {"class_path": "ValidityReward", "init_args": {"count": 2}}]
    options = {"class_path": "WeightedSum", "init_args": {"rewards": terms, "weights": [1.0, 0.1]}}
    reward = parser.instantiate(parser.parse_object({"reward": options})).reward
    assert reward == WeightedSum([RankAwareReward(), ValidityReward(2)], [1.0, 0.1])
    assert parser.instantiate(parser.parse_object({"reward": "LoggedReward"})).reward == LoggedReward()
