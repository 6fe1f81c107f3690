"""What ships: the criterion, the leaderboard, and the rule that a policy must beat the strongest baseline."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy.stats import norm

from recpo.evaluation import decision
from recpo.evaluation.catalog_ranking import RankingResult
from recpo.evaluation.decision import REWARD, criterion_of, reward_of
from recpo.evaluation.estimates import Interval, adjusted_p_values
from recpo.evaluation.held_out_pass import Evaluated
from recpo.evaluation.off_policy.estimators import SNIPS, OffPolicyOptions
from recpo.evaluation.off_policy.results import OffPolicyEstimate, OffPolicyResult, TargetTotals
from tests.refusals import refused

USERS = 400
choose = partial(decision.choose, k=10)
leaderboard = partial(decision.leaderboard, k=10)


def measured(name, values, *, baseline=False, metric="AUC_mixed", **others):
    per_user = {metric: values, "AUC_other": values, "NDCG@10": values, **others}
    result = RankingResult(torch.arange(len(values)), per_user, {}, {}, {}, {})
    kind = "baseline" if baseline else "run"
    return Evaluated(name, kind, result)


def noisy(mean, seed, spread=0.1):
    return mean + spread * torch.randn(USERS, generator=torch.Generator().manual_seed(seed))


def test_a_policy_that_is_surely_better_than_the_strongest_baseline_ships():
    found = choose(
        [
            measured("popularity", noisy(0.5, 0), baseline=True),
            measured("als", noisy(0.7, 1), baseline=True),
            measured("mpo", noisy(0.75, 2)),
            measured("gbpo", noisy(0.72, 3)),
        ],
        "AUC_mixed",
    )
    assert (found.name, found.standings[0].name, found.strongest_baseline) == ("mpo", "mpo", "als")
    assert found.p_value <= 0.05
    assert found.gain.mean == pytest.approx(0.05, abs=0.02)
    assert "mpo beats als, the strongest baseline, by +0.0" in found.reason


def test_without_a_sure_gain_the_baseline_ships_and_the_reason_says_so():
    shared = noisy(0.7, 1)
    policies = [measured(f"run-{seed}", shared + noisy(0.002, seed + 5)) for seed in range(8)]
    found = choose([measured("als", shared, baseline=True), *policies], "AUC_mixed")
    assert found.name == "als"
    assert found.policy.startswith("run-")
    assert "no policy beats als, the strongest baseline, beyond doubt, so it ships" in found.reason
    assert choose([measured("als", shared, baseline=True)], "AUC_mixed").name == "als"


def test_a_period_that_cannot_tell_two_contenders_apart_says_how_many_users_could():
    criterion, als = "AUC_mixed", measured("als", noisy(0.7, 1), baseline=True)
    gains = 0.02 + torch.linspace(-1, 1, USERS) * 0.5
    unsure = choose([als, measured("mpo", noisy(0.7, 1) + gains)], criterion)
    (said,) = unsure.advice
    half_width = unsure.gain.half_width
    assert half_width > 0.02
    assert f"by +0.0200 ± {half_width:.4f} (p = {unsure.p_value:.2f}," in said
    assert f"about {math.ceil(USERS * (half_width / 0.02) ** 2):,} such users" in said
    better, worse = noisy(0.8, 1) + noisy(0, 2), noisy(0.6, 1) + noisy(0, 2)
    assert choose([als, measured("mpo", better)], criterion).advice == []  # it ships
    assert choose([als, measured("mpo", worse)], criterion).advice == []  # it is surely worse
    assert choose([als], criterion).advice == []
    assert choose([als, measured("copy", noisy(0.7, 1))], criterion).advice == []  # nothing is to be seen


def rewarded(name, values, reward, half_width=0.1, **others):
    """A contender with an estimated reward."""
    ends = {"normal": Interval(reward - half_width, reward + half_width)}
    estimates = [OffPolicyEstimate("discounted_10", "SNIPS", reward, ends, 9.0, 9, 9, "logged", None, ())]
    estimates += [one._replace(target="top_10", value=9.0) for one in estimates]
    of_users = noisy(0, sum(name.encode()), half_width / 1.96 * math.sqrt(USERS)).double()
    sums = torch.stack([reward + of_users - of_users.mean(), torch.ones(USERS)], 1).numpy()
    totals = {"discounted_10": TargetTotals(np.arange(USERS), np.ones(USERS, np.int64), {SNIPS: sums}, None)}
    return measured(name, values, **others)._replace(
        value=OffPolicyResult(tuple(estimates), totals, OffPolicyOptions())
    )


def test_of_policies_that_pass_the_one_with_the_highest_estimated_reward_ships():
    als, shared = rewarded("als", noisy(0.6, 1), 0.9, baseline=True), noisy(0.7, 1)
    log, taste = rewarded("log", shared + 0.02, 0.5), rewarded("taste", shared, 0.6, half_width=0.2)
    unsure = rewarded("unsure", noisy(0.6, 1), 0.8)
    found = choose([als, log, taste, unsure], "AUC_mixed")
    assert (found.standings[0].name, found.strongest_baseline, found.policy, found.name) == (
        "log",
        "als",
        "taste",
        "taste",
    )
    assert choose([als, unsure, rewarded("worse", noisy(0.5, 1), 0.9)], "AUC_mixed").policy == "unsure"
    assert found.reason.endswith("; of the 2 policies that do, it has the highest estimated reward")
    assert found.gain.mean == pytest.approx(0.1, abs=0.02)
    known = {row.name: (row.reward, row.reward_half_width) for row in found.standings}
    assert known["taste"] == pytest.approx((0.6, 0.2))
    assert known == {one.name: reward_of(one, 10) for one in (als, log, taste, unsure)}


def test_the_strongest_baseline_is_the_one_with_the_highest_estimated_reward():
    # what was shown next follows the log's rules: they rank it best, and people gain less from it
    rules = rewarded("rules", noisy(0.7, 1), 0.4, baseline=True)
    als = rewarded("als", noisy(0.6, 2), 0.5, baseline=True)
    tilted = rewarded("tilted", als.result.per_user["AUC_mixed"] + noisy(0.02, 3, 0.01), 0.55)
    found = choose([rules, als, tilted], "AUC_mixed")
    assert (found.standings[0].name, found.strongest_baseline, found.name) == ("rules", "als", "tilted")
    assert "tilted beats als, the strongest baseline by estimated reward, by +0.02" in found.reason
    alone = choose([rules, als], "AUC_mixed")
    assert (alone.standings[0].name, alone.name) == ("rules", "als")
    unknown = [one._replace(value=None) for one in (rules, als, tilted)]
    assert choose(unknown, "AUC_mixed").name == choose(unknown, "AUC_mixed").strongest_baseline == "rules"


def test_what_one_baseline_beats_by_the_criterion_and_another_by_estimated_reward_does_not_ship():
    rate = rewarded("rate", noisy(0.7, 1), 0.4, baseline=True)
    als = rewarded("als", noisy(0.6, 2), 0.5, baseline=True)
    between = rewarded("between", noisy(0.65, 3), 0.45)
    found = choose([rate, als, between], "AUC_mixed")
    assert (found.strongest_baseline, found.policy, found.name) == ("als", "between", "als")
    assert found.p_value < 0.05
    assert "without a lower estimated reward" in found.reason
    for better in (rewarded("between", noisy(0.65, 3), 0.55), rewarded("between", noisy(0.7, 3), 0.45)):
        assert choose([rate, als, better], "AUC_mixed").name == "between"


def test_what_no_baseline_beats_by_the_criterion_ships_before_what_one_beats():
    shared = noisy(0.7, 1)
    rate = rewarded("rate", shared, 0.4, baseline=True)
    als = rewarded("als", noisy(0.5, 2), 0.5, baseline=True)
    beaten = rewarded("beaten", noisy(0.6, 3), 0.8)  # lists of what nobody is shown, say
    low, high = rewarded("low", shared + noisy(0.01, 4, 0.01), 0.45), rewarded("high", shared, 0.48)
    assert choose([rate, als, beaten], "AUC_mixed").name == "beaten"
    found = choose([rate, als, beaten, low, high], "AUC_mixed")
    assert (found.name, found.strongest_baseline) == ("high", "als")
    assert "of the 2 policies that do, and that no baseline beats by AUC_mixed, it has the highest" in found.reason
    alone = choose([rate, als, beaten, low], "AUC_mixed")
    assert alone.name == "low"
    assert "of the 2 policies that do, it is the only one that no baseline beats by AUC_mixed" in alone.reason


def test_a_policy_of_unknown_reward_ships_if_no_other_passes_and_without_rewards_the_best_one():
    als, shared = measured("als", noisy(0.6, 1), baseline=True), noisy(0.7, 1)
    unknown, low = rewarded("unknown", shared + 0.02, math.nan), rewarded("low", shared, 0.1)
    assert choose([als, unknown, low], "AUC_mixed").name == "low"
    assert choose([als, unknown, measured("other", shared)], "AUC_mixed").name == "unknown"
    assert math.isnan(reward_of(unknown, 10)[0])
    assert all(map(math.isnan, reward_of(als, 10)))
    # where positives alone decide, no exposure says what would have been gained
    lists = [measured(one.name, one.result.per_user["AUC_mixed"], metric="NDCG@10") for one in (unknown, low)]
    best = measured("als", noisy(0.6, 1), baseline=True, metric="NDCG@10")
    found = choose([best, *lists], "NDCG@10")
    assert found.name == found.standings[0].name == "unknown"
    assert found.reason.startswith("unknown beats")


def test_by_ndcg_what_is_only_like_the_log_does_not_ship_where_rewards_are_known():
    of = partial(rewarded, metric="NDCG@10")
    rules, rate = of("rules", noisy(0.6, 1), 0.4, baseline=True), of("rate", noisy(0.5, 1), 0.6, baseline=True)
    imitates, liked = of("imitates", noisy(0.8, 1), 0.5), of("liked", noisy(0.7, 1), 0.7)
    found = choose([rules, rate, imitates], "NDCG@10")
    assert (found.standings[0].name, found.strongest_baseline, found.name) == ("imitates", "rate", "rate")
    assert choose([rules, rate, imitates, liked], "NDCG@10").name == "liked"
    assert found.reason.startswith("no policy beats rate, the strongest baseline by estimated reward, without a lower")
    (said,) = found.advice
    assert said.startswith("imitates has lists that are surely more like what users chose than those of rate")
    assert "test both online" in said


def test_where_the_criterion_cannot_tell_the_estimated_reward_is_tested():
    # an AUC weighs all ranks alike: who knows the best items may have no more of it
    shared = noisy(0.7, 1)
    rate = rewarded("rate", shared, 0.6, half_width=0.02, baseline=True)
    knows = rewarded("knows", shared + noisy(-0.001, 2), 0.7, half_width=0.02)
    found = choose([rate, knows, rewarded("other", shared + noisy(0, 3), 0.61, half_width=0.02)], "AUC_mixed")
    assert (found.name, found.strongest_baseline, found.measure) == ("knows", "rate", REWARD)
    assert found.gain.mean == pytest.approx(0.1)
    assert found.p_value <= 0.05
    assert "where AUC_mixed cannot tell" in found.reason
    # what is surely lower by the criterion does not pass, whatever is estimated
    worse = rewarded("knows", shared + noisy(-0.05, 2, 0.01), 0.7, half_width=0.02)
    assert choose([rate, worse], "AUC_mixed").name == "rate"
    # neither does what may be chance, and then the criterion says by how much they differ
    unsure = choose([rate, rewarded("knows", shared + noisy(0, 2), 0.61, half_width=0.02)], "AUC_mixed")
    assert (unsure.name, unsure.measure) == ("rate", "AUC_mixed")
    # what passes the first test ships before what only the second one lets pass
    sure = rewarded("sure", shared + noisy(0.02, 4, 0.01), 0.55, half_width=0.02)
    assert choose([rate, knows, sure], "AUC_mixed").name == "sure"


@pytest.mark.slow
def test_two_tests_together_are_wrong_in_at_most_one_of_ten_decisions():
    shipped = 0
    for seed in range(100):
        rate = rewarded("rate", noisy(0.7, seed), 0.6, baseline=True)
        draws = torch.Generator().manual_seed(seed + 1000)
        of_users = 0.6 + torch.randn(USERS, generator=draws).double()
        sums = torch.stack([of_users, torch.ones(USERS)], 1).numpy()
        same = measured("same", noisy(0.7, seed + 500))
        totals = {"discounted_10": TargetTotals(np.arange(USERS), np.ones(USERS, np.int64), {SNIPS: sums}, None)}
        value = replace(rate.value, totals=totals)
        shipped += choose([rate, same._replace(value=value)], "AUC_mixed").name == "same"
    assert 4 <= shipped <= 16  # of 100; 10 % are 10, with a standard deviation of 3


def test_a_policy_that_is_surely_better_ships_before_a_better_one_that_is_not_sure():
    als, noise = measured("als", noisy(0.6, 1), baseline=True), torch.linspace(-2, 2, USERS)
    wild, sure = measured("wild", noisy(0.6, 1) + 0.05 + noise), measured("sure", noisy(0.6, 1) + 0.02 + noise / 20)
    assert choose([als, wild], "AUC_mixed").name == "als"
    found = choose([als, wild, sure], "AUC_mixed")
    assert (found.standings[0].name, found.policy, found.name) == ("wild", "sure", "sure")


def test_in_the_gain_users_weigh_by_the_precision_of_their_auc():
    generator = torch.Generator().manual_seed(2)
    precision = torch.tensor([1 / 3, 1 / 3, 1 / 3, 10.0]).repeat(USERS // 4)  # one pair of items, and many
    noise = torch.randn(USERS, generator=generator) / (12 * precision).sqrt()
    als, policy = measured("als", torch.full((USERS,), 0.6), baseline=True), measured("mpo", 0.62 + noise)
    assert choose([als, policy], "AUC_mixed").name == "als"
    known = {"AUC_mixed": precision}
    found = choose([one._replace(result=replace(one.result, precision=known)) for one in (als, policy)], "AUC_mixed")
    assert found.name == "mpo"
    gain = noise + 0.02
    assert found.gain.mean == pytest.approx(((gain * precision).sum() / precision.sum()).item())
    assert found.standings[0].value == pytest.approx(0.62 + noise.mean().item())


def test_what_ships_is_tested_though_it_has_lost_to_a_policy_that_is_not_sure():
    precision = torch.tensor([1 / 3, 10.0]).repeat(USERS // 2)
    known, base, noise = {"AUC_mixed": precision}, torch.full((USERS,), 0.6), noisy(0.0, 3)
    wild = base + torch.where(precision < 1, 0.2, 5 * (noise - noise.mean()))  # much better for those who say little
    made = [measured("als", base, baseline=True), measured("sure", base + 0.02 + noise / 50), measured("wild", wild)]
    made += [measured("worse", base - 0.1 + noise / 50)]
    found = choose([one._replace(result=replace(one.result, precision=known)) for one in made], "AUC_mixed")
    assert (found.standings[0].name, found.name) == ("wild", "sure")
    assert {row.name for row in found.standings if row.lost} == {"als", "sure", "worse"}
    assert sorted(found.tested) == ["als", "sure", "wild"]


def test_a_decision_needs_a_baseline():
    with refused("empty", "contenders"):
        choose([measured("run", noisy(0.5, 0))], "AUC_mixed")


def test_the_leaderboard_is_paired_and_says_who_has_lost():
    base = noisy(0.5, 0, spread=1.0)  # users differ much, contenders hardly
    rows = leaderboard(
        [
            measured("b", base - 0.01, baseline=True),
            measured("a", base + noisy(0.0, 1, 0.001)),
            measured("c", base * math.nan),
        ],
        "AUC_mixed",
    )
    assert [row.name for row in rows] == ["a", "b", "c"]
    assert [row.lost for row in rows] == [False, True, False]
    assert rows[1].behind == pytest.approx(0.01, abs=1e-3)
    assert rows[1].half_width > 10 * rows[1].behind_half_width


def test_the_criterion_is_that_of_exposures_if_enough_users_have_it():
    nothing, few = torch.full((USERS,), math.nan), noisy(0.5, 3)
    few[29:] = math.nan
    full = {"AUC_unseen": noisy(0.5, 1), "NDCG@10": noisy(0.1, 2)}
    assert criterion_of([measured("a", noisy(0.5, 0), **full)], 10) == "AUC_mixed"
    for lacking in (nothing, few):
        assert criterion_of([measured("a", lacking, **full)], 10) == "NDCG@10"
        assert criterion_of([measured("a", noisy(0.5, 0), **full), measured("b", lacking, **full)], 10) == "NDCG@10"


def test_of_a_single_contender_the_p_value_is_the_normal_one():
    for mean in (0.0, 0.005, 0.01, 0.02):
        values = noisy(0.0, 7)
        values = values - values.mean() + mean
        z = mean / (values.std() / math.sqrt(USERS))
        (found,) = adjusted_p_values(values[:, None], resamples=20_000)
        assert found == pytest.approx(norm.sf(float(z)), abs=0.02)


def test_a_copy_of_a_contender_changes_nothing_and_others_cost_power():
    values = noisy(0.01, 3)
    (alone,) = adjusted_p_values(values[:, None])
    assert adjusted_p_values(torch.stack([values] * 10, 1)) == [alone] * 10
    others = torch.stack([values, *(noisy(0.0, seed) for seed in range(20, 40))], 1)
    assert alone < adjusted_p_values(others)[0] <= min(1.0, 21 * alone) + 0.01


def test_the_best_of_many_worthless_policies_seldom_ships():
    shipped = 0
    for trial in range(60):
        columns = torch.randn(100, 12, generator=torch.Generator().manual_seed(trial))
        shipped += min(adjusted_p_values(columns, resamples=400)) <= 0.05
    assert shipped <= 8  # 5 % of 60 are 3; without the correction about half would


def test_differences_without_users_or_spread():
    assert adjusted_p_values(torch.full((5, 1), math.nan)) == [1.0]
    assert adjusted_p_values(torch.zeros(5, 1)) == [1.0]
    assert adjusted_p_values(torch.ones(5, 1), resamples=99) == [0.01]
