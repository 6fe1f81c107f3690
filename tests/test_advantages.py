"""Advantage estimators on batches: masks, thresholds of the whole step, and errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from recpo.base.contracts import AdvantageEstimator
from recpo.base.feedback import FeedbackRule
from recpo.base.types import FeedbackBatch, Histories, Slates
from recpo.objectives import advantages, gae
from recpo.objectives.advantages import (
    GatedAdvantage,
    GroupNormalizedAdvantage,
    LeaveOneOutAdvantage,
    TernaryAdvantage,
    group_normalized_advantage,
    leave_one_out_advantage,
    share_threshold,
    ternary_advantage,
    whitened_advantage,
)
from recpo.objectives.gae import GAEAdvantage, generalized_advantage_estimate
from tests.refusals import refused


def feedback(step_labels=None, **columns):
    shape = next(iter(columns.values())).shape
    ids = torch.ones(shape, dtype=torch.long)
    slates = Slates(ids, torch.zeros_like(ids), **({"mask": torch.ones(shape, dtype=torch.bool)} | columns))
    histories = Histories(ids[:, :1], torch.ones(shape[0], dtype=torch.long))
    return FeedbackBatch(histories, slates, torch.arange(shape[0]), step_labels)


QUANTILE = torch.tensor([[0.9, 0.2, 0.5, math.nan], [0.8, 0.1, 0.3, 0.95]])
DISLIKE = torch.tensor([[False, True, False, True], [False, False, False, True]])


def test_ternary_estimator_leaves_padding_out():
    mask = torch.ones(2, 4, dtype=torch.bool)
    mask[1, 3] = False
    advantage = TernaryAdvantage(0.25)(feedback(label=QUANTILE, dislike=DISLIKE, mask=mask))
    # known: .9 .2 .5 .8 .1 .3, whose 0.75-quantile is 0.725
    assert advantage.tolist() == [[1, -1, 0, -1], [1, 0, 0, 0]]


def test_without_a_fraction_the_log_says_what_is_positive():
    mask = torch.tensor([[True] * 4, [True, True, True, False]])
    positive = FeedbackRule(0.85).positive(QUANTILE, DISLIKE)
    batch = feedback(label=QUANTILE, dislike=DISLIKE, positive=positive, mask=mask)
    assert TernaryAdvantage()(batch).tolist() == [[1, -1, 0, -1], [0, 0, 0, 0]]
    assert TernaryAdvantage()(feedback(positive=positive)).tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]
    assert TernaryAdvantage().requires == {"positives", "dislikes"}
    assert TernaryAdvantage(0.25).requires == {"step_labels", "dislikes"}


def test_a_label_at_the_threshold_is_positive():
    label = torch.tensor([0.75, 0.7499])
    assert ternary_advantage(label, None, threshold=0.75).tolist() == [1, 0]
    assert ternary_advantage(label, None, threshold=torch.tensor(0.75)).tolist() == [1, 0]
    labels = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])  # the 0.75-quantile is 0.4 itself
    assert ternary_advantage(labels, None).tolist() == [0, 0, 0, 1, 1]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.floats(0.01, 0.99))
def test_the_threshold_is_numpys_quantile(labels, fraction):
    found = share_threshold(torch.tensor([*labels, math.nan], dtype=torch.float64), fraction)
    assert found.item() == pytest.approx(np.quantile(labels, 1 - fraction), abs=1e-9)


def test_a_label_of_zero_is_never_positive():
    labels = torch.tensor([0.0] * 8 + [0.9, 1.0])  # the 0.75-quantile is 0
    assert ternary_advantage(labels, None).tolist() == [0] * 8 + [1, 1]
    assert ternary_advantage(torch.zeros(4), torch.tensor([False, False, False, True])).tolist() == [0, 0, 0, -1]


def test_thresholds_of_shares_that_fall_on_an_event():
    labels = torch.arange(1, 12, dtype=torch.float64)
    for tenths in range(1, 10):
        assert ternary_advantage(labels, None, positive_fraction=tenths / 10).sum() == tenths + 1


@pytest.mark.slow
def test_a_step_may_hold_more_values_than_torch_quantile_takes():
    number = (1 << 24) + 9
    label = torch.zeros(number, dtype=torch.uint8)
    label[::2] = 1
    assert share_threshold(label, 0.25).item() == 1.0
    assert share_threshold(label, 0.75).item() == 0.0


def test_micro_batches_share_the_threshold_of_the_step():
    estimator = TernaryAdvantage(positive_fraction=0.4)
    whole = estimator(feedback(label=QUANTILE, dislike=DISLIKE))
    parts = [
        estimator(feedback(label=QUANTILE[i : i + 1], dislike=DISLIKE[i : i + 1], step_labels=QUANTILE))
        for i in range(2)
    ]
    assert torch.cat(parts).tolist() == whole.tolist()


def test_threshold_edges():
    assert share_threshold(torch.tensor([math.nan])).isnan()
    assert share_threshold(torch.tensor([])).isnan()
    assert ternary_advantage(torch.tensor([math.nan, math.nan]), torch.tensor([True, False])).tolist() == [-1, 0]
    ties = torch.tensor([0.5, 0.5, 0.5, 0.1])
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert ternary_advantage(ties.to(dtype), None).tolist() == [1, 1, 1, 0]
        assert ternary_advantage(ties.to(dtype), None, threshold=0.5).tolist() == [1, 1, 1, 0]
    for fraction in (0.0, 1.0):
        with refused("out_of_range", "positive_fraction"):
            share_threshold(ties, fraction)


def test_a_rank_that_misses_a_whole_number_by_rounding_is_that_number():
    labels = 10.0 ** torch.arange(-11, 0, dtype=torch.float64)  # next to its neighbor each is almost 0
    for tenths in range(1, 10):
        assert share_threshold(labels, tenths / 10) == labels[10 - tenths]


def test_no_gradient_flows_into_the_threshold():
    assert not share_threshold(torch.tensor([0.1, 0.9], requires_grad=True)).requires_grad


def test_dislikes_may_be_numbers():
    assert ternary_advantage(torch.tensor([0.9, 0.9]), torch.tensor([0, 1]), threshold=0.5).tolist() == [1, -1]


def test_rewards_may_sit_far_from_zero():
    advantages = group_normalized_advantage(torch.full((1, 3), 0.1, dtype=torch.float64) + 1e6)
    assert (advantages == 0).all()


def test_equal_rewards_give_exactly_zero_though_their_mean_is_rounded():
    rewards = torch.tensor([0.1, 0.1, 0.1, 9.0], dtype=torch.float64)  # 0.1 + 0.1 + 0.1 is more than 0.3
    assert (group_normalized_advantage(rewards[:3]) == 0).all()
    for last in (9.0, -9.0, math.nan):
        rewards[3] = last
        assert (group_normalized_advantage(rewards, torch.tensor([1, 1, 1, 0])) == 0).all()
        assert (leave_one_out_advantage(rewards, torch.tensor([1, 1, 1, 0])) == 0).all()


@pytest.mark.parametrize("advantage", [group_normalized_advantage, leave_one_out_advantage])
def test_the_group_is_the_last_axis(advantage):
    rewards = torch.arange(24.0).square().view(2, 4, 3)
    expected = torch.stack([advantage(part) for part in rewards])
    torch.testing.assert_close(advantage(rewards), expected)
    assert leave_one_out_advantage(torch.tensor([1.0, 2.0, 6.0])).tolist() == [-3.0, -1.5, 4.5]


def test_what_estimators_read_and_their_defaults():
    assert GroupNormalizedAdvantage() == GroupNormalizedAdvantage(scale=True, unbiased=True, eps=1e-6)
    assert GroupNormalizedAdvantage().requires == LeaveOneOutAdvantage().requires == {"rewards"}


@pytest.mark.parametrize("estimator", [GroupNormalizedAdvantage(scale=False), LeaveOneOutAdvantage()])
def test_group_estimators_stay_inside_their_context(estimator):
    rewards = torch.tensor([[1.0, 0.0, 5.0], [7.0, 7.0, 7.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    advantage = estimator(feedback(reward=rewards, mask=mask))
    assert advantage[0, 0] == -advantage[0, 1] > 0
    assert advantage[0, 2] == 0
    assert (advantage[1] == 0).all()


def test_gae_estimator_ends_a_session_with_its_last_kept_position():
    rewards = torch.tensor([[1.0, 2.0, 99.0]])
    values = torch.tensor([[0.5, 0.25, 99.0]])
    mask = torch.tensor([[True, True, False]])
    advantage, returns = GAEAdvantage(gamma=0.5, lam=1.0).advantages_and_returns(
        feedback(reward=rewards, mask=mask), values
    )
    assert returns.tolist() == [[2.0, 2.0, 0.0]]
    assert advantage.tolist() == [[1.5, 1.75, 0.0]]
    assert GAEAdvantage(gamma=0.5, lam=1.0)(feedback(reward=rewards, mask=mask), values).equal(advantage)


def test_termination_and_truncation_differ():
    rewards, values = torch.ones(1, 3), torch.zeros(1, 3)
    flag, bootstrap = torch.tensor([[0, 1, 0]]), torch.full((1, 3), 10.0)
    ended, _ = generalized_advantage_estimate(rewards, values, flag, 0.0, gamma=0.5, lam=1.0)
    cut, _ = generalized_advantage_estimate(
        rewards, values, None, 0.0, gamma=0.5, lam=1.0, truncations=flag, bootstrap_values=bootstrap
    )
    assert ended.tolist() == [[1.5, 1.0, 1.0]]
    assert cut.tolist() == [[4.0, 6.0, 1.0]]
    with refused("missing_option", "bootstrap_values"):
        generalized_advantage_estimate(rewards, values, None, 0.0, truncations=flag)


def test_estimators_say_what_they_lack():
    with refused("missing_value", "positive"):
        TernaryAdvantage()(feedback(reward=torch.ones(1, 2)))
    with refused("missing_value", "label"):
        TernaryAdvantage(0.25)(feedback(reward=torch.ones(1, 2)))
    for estimator in (GroupNormalizedAdvantage(), LeaveOneOutAdvantage(), GAEAdvantage()):
        with refused("missing_option", "reward"):
            estimator(feedback(label=torch.ones(1, 2)), torch.zeros(1, 2))
    with refused("missing_value", "values"):
        GAEAdvantage()(feedback(reward=torch.ones(1, 2)))
    for fraction in (0.0, 1.0, 1.5):
        with refused("out_of_range", "TernaryAdvantage.positive_fraction"):
            TernaryAdvantage(positive_fraction=fraction)


def session(rewards, ends, mask=None):
    """One row of rewards; 1 in ``ends`` where the session ends."""
    columns = {"reward": torch.tensor([rewards]), "ends_session": torch.tensor([ends]).bool()}
    return feedback(**columns, **({} if mask is None else {"mask": torch.tensor([mask]).bool()}))


def test_a_session_ends_where_it_ends_and_not_where_the_window_does():
    gamma, lam, values = 0.5, 0.5, torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    advantages, returns = GAEAdvantage(gamma, lam).advantages_and_returns(
        session([1.0, 1.0, 1.0, 1.0], [0, 1, 0, 0]), values
    )
    # the second step ends its session; the fourth does not, so its value stands for what follows the third
    second, third = 1.0 - 2.0, 1.0 + gamma * 4.0 - 3.0
    first = 1.0 + gamma * 2.0 - 1.0 + gamma * lam * second
    torch.testing.assert_close(advantages, torch.tensor([[first, second, third, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[first + 1.0, second + 2.0, third + 3.0, 4.0]]))


def test_without_a_discount_the_cut_step_learns_too():
    batch, values = session([1.0, 2.0], [0, 0]), torch.tensor([[0.5, 0.5]])
    assert GAEAdvantage(gamma=0.0)(batch, values).tolist() == [[0.5, 1.5]]


def test_candidates_are_sessions_of_one_step():
    batch, values = session([1.0, 2.0, 3.0], [1, 1, 1]), torch.tensor([[0.5, 0.5, 0.5]])
    assert GAEAdvantage(gamma=0.9)(batch, values).tolist() == [[0.5, 1.5, 2.5]]


def test_a_session_also_ends_where_its_last_step_was_left_out():
    values = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    whole = GAEAdvantage(0.5)(session([1.0, 9.0, 1.0, 1.0], [0, 1, 0, 1], mask=[1, 0, 1, 1]), values)
    assert whole[0, 0] == 1.0 - 1.0
    assert whole[0, 1] == 0.0
    assert whole[0, 3] == 1.0 - 4.0


def test_slates_that_do_not_say_where_sessions_end_are_one_session():
    values = torch.tensor([[1.0, 2.0]])
    batch = feedback(reward=torch.tensor([[1.0, 1.0]]))
    assert GAEAdvantage(0.5, 1.0)(batch, values)[0, 1] == -1.0


# ---------------------------------------------------------------- what mutants survived
def test_groups_of_two_are_divided_by_one_and_not_by_two():
    rewards = torch.tensor([[1.0, 4.0]])
    assert leave_one_out_advantage(rewards).tolist() == [[-3.0, 3.0]]
    assert group_normalized_advantage(rewards)[0].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5)
    numbers = torch.tensor([[1, 1, 0]])  # a mask of numbers
    padded = group_normalized_advantage(torch.tensor([[1.0, 4.0, 9.0]]), numbers)
    assert padded[0].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5, 0.0], rel=1e-5)


def test_no_gradient_flows_into_rewards_and_values():
    rewards, values = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    for result in generalized_advantage_estimate(rewards, values, torch.zeros(2, 3), torch.zeros(2)):
        assert not result.requires_grad
    assert not group_normalized_advantage(rewards).requires_grad
    assert not leave_one_out_advantage(rewards).requires_grad
    cut = {"truncations": torch.ones(2, 3), "bootstrap_values": values}
    for result in generalized_advantage_estimate(rewards, values, None, values[:, 0], **cut):
        assert not result.requires_grad
    batch = feedback(reward=rewards, ends_session=torch.zeros(2, 3).bool())
    for result in GAEAdvantage().advantages_and_returns(batch, values):
        assert not result.requires_grad


def test_defaults_of_gae_and_what_it_reads():
    assert GAEAdvantage() == GAEAdvantage(gamma=0.99, lam=0.95)
    assert GAEAdvantage().requires == {"rewards", "value"}
    rewards, values = torch.randn(2, 2, 5)
    given = generalized_advantage_estimate(rewards, values, None, 0.0, gamma=0.99, lam=0.95)
    torch.testing.assert_close(generalized_advantage_estimate(rewards, values, None, 0.0), given, rtol=0, atol=0)


def test_what_stands_at_a_masked_step_is_not_read():
    rewards, values = torch.tensor([[1.0, math.nan, 2.0]]), torch.tensor([[0.5, math.nan, 0.25]])
    kept = {"mask": torch.tensor([[True, False, True]]), "gamma": 0.5, "lam": 1.0}
    advantages, returns = generalized_advantage_estimate(rewards, values, None, 0.0, **kept)
    assert returns.tolist() == [[2.0, 0.0, 2.0]]
    assert advantages.tolist() == [[1.5, 0.0, 1.75]]


def gae_of_row(rewards, values, ends, kept, gamma, lam):
    """Advantages and returns of the kept steps of one row, by their place, as ``GAEAdvantage`` describes them."""
    session, ended, steps = 0, set(), []
    for s in range(len(rewards)):
        steps += [(s, session)] if kept[s] else []
        if ends[s]:
            ended.add(session)
            session += 1
    found, following = {}, None
    for s, session in reversed(steps):
        if following is None or following[1] != session:
            advantage = rewards[s] - values[s] if session in ended else 0.0
        else:
            after = following[0]
            advantage = rewards[s] + gamma * values[after] - values[s] + gamma * lam * found[after][0]
        found[s], following = (advantage, advantage + values[s]), (s, session)
    return found


def test_gae_of_many_rows_is_that_of_a_loop():
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 40, 7))
    ends, kept = rng.random((40, 7)) < 0.3, rng.random((40, 7)) < 0.7
    columns = {"ends_session": torch.tensor(ends), "mask": torch.tensor(kept)}
    batch = feedback(reward=torch.tensor(np.where(kept, rewards, np.nan)), **columns)
    got = GAEAdvantage(0.9, 0.8).advantages_and_returns(batch, torch.tensor(np.where(kept, values, np.nan)))
    for row in range(40):
        want = gae_of_row(rewards[row], values[row], ends[row], kept[row], 0.9, 0.8)
        for which in range(2):
            expected = [want.get(s, (0.0, 0.0))[which] for s in range(7)]
            assert got[which][row].tolist() == pytest.approx(expected, abs=1e-12)


def test_a_token_does_not_answer_for_the_rewards_of_earlier_tokens():
    """GAE over the tokens of every candidate, with the value of its state at each of them."""
    rng = np.random.default_rng(0)
    tokens, values = torch.tensor(rng.normal(size=(3, 4, 5))), torch.tensor(rng.normal(size=(3, 4)))
    mask = torch.tensor(rng.random((3, 4)) < 0.8)
    columns = {"reward": tokens.sum(-1), "mask": mask, "ends_session": torch.ones(3, 4, dtype=torch.bool)}
    advantages, returns = GAEAdvantage().advantages_and_returns(feedback(**columns, token_rewards=tokens), values)
    last = torch.arange(5) == 4
    every = values[..., None].expand_as(tokens)
    want, _ = generalized_advantage_estimate(tokens, every, last.expand_as(tokens), 0.0, gamma=1.0, lam=1.0)
    torch.testing.assert_close(advantages, want * mask[..., None])
    torch.testing.assert_close(returns, tokens.sum(-1) * mask)
    one = feedback(**columns | {"reward": tokens[..., 0]}, token_rewards=tokens[..., :1])
    plain, _ = GAEAdvantage().advantages_and_returns(feedback(**columns | {"reward": tokens[..., 0]}), values)
    assert torch.equal(GAEAdvantage().advantages_and_returns(one, values)[0], plain)


def test_whitening_keeps_a_single_advantage_and_sets_equal_ones_to_zero():
    one = torch.tensor([[3.0, math.nan]])
    assert whitened_advantage(one, ~one.isnan()).tolist() == [[3.0, 0.0]]
    equal = torch.full((2, 3), 0.7)
    assert whitened_advantage(equal, torch.ones(2, 3, dtype=torch.bool)).abs().max() < 1e-6


def test_whitening_keeps_the_zeros_of_groups_that_are_centered():
    rewards = torch.rand(50, 7, generator=torch.Generator().manual_seed(0))
    rewards[3] = 0.3
    centered = group_normalized_advantage(rewards, scale=False)
    white = whitened_advantage(centered, torch.ones(50, 7, dtype=torch.bool))
    assert (white[3] == 0).all()
    assert white.std(correction=0) == pytest.approx(1.0, abs=1e-5)


def test_whitening_is_an_option_of_every_estimator():
    estimators = [
        cls
        for module in (advantages, gae)
        for cls in vars(module).values()
        if isinstance(cls, type) and issubclass(cls, AdvantageEstimator) and cls.__module__ == module.__name__
    ]
    assert len(estimators) == 7
    for estimator in estimators:
        assert not estimator().whiten
        assert estimator(whiten=True).whiten
    with refused("conflicting_options", "GatedAdvantage.estimator"):
        GatedAdvantage(LeaveOneOutAdvantage(whiten=True))
