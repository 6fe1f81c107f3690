"""The measure within a pass: used rows, targets, missing estimates, differences, JSON."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from recpo.base.contracts import RewardFunction
from recpo.base.types import EvaluationBatch, FeedbackBatch, Histories, Recommendations, Slates
from recpo.evaluation.catalog_ranking import Ranking, evaluate_ranking
from recpo.evaluation.estimates import as_json
from recpo.evaluation.measures import Observed, Recommender
from recpo.evaluation.off_policy.estimators import AdditiveRewardModel, OffPolicyOptions, Rows
from recpo.evaluation.off_policy.measure import ExposureModel, OffPolicyMeasure, OffPolicySetting, discounted
from recpo.evaluation.off_policy.results import result_of_rows
from tests.refusals import refused

ITEMS, PLACES = 12, 3
CALM = OffPolicyOptions(resamples=50)
UNIFORM = OffPolicyOptions(resamples=50, propensity="uniform")


class Given(RewardFunction):
    def __call__(self, batch: FeedbackBatch, candidates: Slates) -> Tensor:
        return candidates.reward


class Contender:
    """A policy with a table of probabilities; a user's row number is its only history."""

    def __init__(self, seed=0, users=40):
        logits = 2 * torch.randn(users, ITEMS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.logp = logits.log_softmax(1)

    def recommend(self, histories, k, exclude=None):
        scores, order = self.logp[histories.item_ids[:, 0] - 1].topk(k)
        return Recommendations(order + 1, scores)

    def log_prob(self, batch):
        return self.logp[batch.context_ids[:, None], (batch.slates.item_ids - 1).clamp_min(0)][..., None]

    def sample(self, histories, size):
        return torch.multinomial(self.logp[histories.item_ids[:, 0] - 1].exp(), size, replacement=True) + 1


def log(users=40, seed=0, batch=16):
    """Batches of users with one to six exposures each, items drawn from a known policy, rewards in [0, 1]."""
    rng = np.random.default_rng(seed)
    propensity = rng.dirichlet(np.ones(ITEMS), users)
    for begin in range(0, users, batch):
        rows = np.arange(begin, min(users, begin + batch))
        mask = np.arange(6) < rng.integers(1, 7, (len(rows), 1))
        item = np.array([rng.choice(ITEMS, 6, p=propensity[row]) for row in rows])
        slates = Slates(
            item_ids=torch.from_numpy(np.where(mask, item + 1, 0)),
            visible=torch.from_numpy(mask.astype(np.int64)),
            mask=torch.from_numpy(mask),
            label=torch.zeros(mask.shape),
            positive=torch.zeros(mask.shape, dtype=torch.bool),
            reward=torch.from_numpy(np.where(mask, rng.random(mask.shape), np.nan)),
            logp_behavior=torch.from_numpy(np.where(mask, np.log(propensity[rows[:, None], item]), np.nan)),
            is_random=torch.from_numpy(mask & (rng.random(mask.shape) < 0.5)),
        )
        histories = Histories(torch.from_numpy(rows[:, None] + 1), torch.ones(len(rows), dtype=torch.long))
        nothing = torch.zeros(len(rows), 1, dtype=torch.long)
        yield EvaluationBatch(FeedbackBatch(histories, slates, torch.from_numpy(rows)), nothing, nothing)


def changed(batches, **fields):
    for batch in batches:
        values = {name: change(getattr(batch.feedback.slates, name)) for name, change in fields.items()}
        yield batch._replace(feedback=batch.feedback._replace(slates=batch.feedback.slates._replace(**values)))


def measured(batches, contender=None, *, options=CALM, scores=True, sample=None, **training):
    contender = contender or Contender()
    measure = OffPolicyMeasure(OffPolicySetting(options, Given(), ITEMS, [PLACES], **training), sample)
    for batch in batches:
        logp = contender.log_prob(batch.feedback).sum(-1) if scores else None
        lists = contender.recommend(batch.feedback.histories, PLACES)
        assert measure.update(Observed(batch, lists, None, logp)) == {}
    assert measure.totals() == {}
    return measure.result()


def additive(users=40):
    effects = torch.Generator().manual_seed(1)
    items = torch.cat([torch.zeros(1), torch.rand(ITEMS, generator=effects)]).double()
    return AdditiveRewardModel(0.3, torch.rand(users, generator=effects).double(), items)


def rows_of(batches, contender):
    """Everything flat: users, items, rewards, propensities and both targets' probabilities."""
    columns = []
    for batch in batches:
        feedback, kept = batch.feedback, batch.feedback.slates.mask
        lists = contender.recommend(feedback.histories, PLACES).item_ids
        in_list = (feedback.slates.item_ids[:, :, None] == lists[:, None]).any(-1).double() / PLACES
        values = (
            feedback.context_ids[:, None].expand_as(kept),
            feedback.slates.item_ids,
            feedback.slates.reward,
            feedback.slates.logp_behavior.exp(),
            contender.log_prob(feedback)[..., 0].exp(),
            in_list,
        )
        columns.append([value[kept].numpy() for value in values])
    return (np.concatenate(part) for part in zip(*columns, strict=True))


def test_estimates_are_the_formulas_over_all_rows():
    contender, model = Contender(), additive()
    result = measured(log(), contender, model=model, sample=contender.sample)
    user, item, reward, p, pi, in_list = rows_of(log(), contender)
    q = 0.3 + model.user_effect.numpy()[user] + model.item_effect.numpy()[item]
    lists = contender.logp.topk(PLACES).indices + 1
    v = 0.3 + model.user_effect.numpy()[user] + model.item_effect[lists].mean(1).numpy()[user]
    for target, chance in (("policy", pi), (f"top_{PLACES}", in_list)):
        weight = chance / p
        assert result.estimate(target, "IPS").value == pytest.approx((weight * reward).mean())
        assert result.estimate(target, "SNIPS").value == pytest.approx((weight * reward).sum() / weight.sum())
        naive = result.estimate(target, "naive average")
        assert naive.value == pytest.approx((chance * reward).sum() / chance.sum())
        assert "confounded" in naive.warnings[0]
        diagnostics = naive.diagnostics
        assert diagnostics.mean_weight == pytest.approx(weight.mean())
        assert diagnostics.effective_rows == pytest.approx(weight.sum() ** 2 / (weight**2).sum())
        by_user = np.bincount(user, weight)
        assert diagnostics.effective_users == pytest.approx(by_user.sum() ** 2 / (by_user**2).sum())
        assert (diagnostics.rows, diagnostics.users) == (len(user), 40)
    weight = in_list / p
    assert result.estimate(f"top_{PLACES}", "DM").value == pytest.approx(v.mean()), "exact over a list"
    assert result.estimate(f"top_{PLACES}", "DR").value == pytest.approx((v + weight * (reward - q)).mean())
    exact = 0.3 + model.user_effect.numpy()[user] + (contender.logp.exp() @ model.item_effect[1:]).numpy()[user]
    assert result.estimate("policy", "DM").value == pytest.approx(exact.mean(), abs=0.03), "32 draws for each user"
    assert result.estimate("logging policy", "mean").value == pytest.approx(reward.mean())
    assert result.estimate("logging policy", "mean").diagnostics.rows_without_propensity == 0


def test_probabilities_are_computed_in_double_precision():
    contender = Contender()
    contender.logp = contender.logp.float()
    result = measured(log(), contender)
    _, _, reward, p, _, in_list = rows_of(log(), contender)
    pi = np.concatenate(
        [contender.log_prob(b.feedback)[..., 0].double().exp()[b.feedback.slates.mask].numpy() for b in log()]
    )
    assert result.estimate("policy", "IPS").value == pytest.approx((pi / p * reward).mean(), rel=1e-12)
    assert result.estimate(f"top_{PLACES}", "IPS").value == pytest.approx((in_list / p * reward).mean(), rel=1e-12)


def test_only_logged_items_count():
    """Items of a slate that the log did not show are no exposures."""
    first = torch.tensor([True, False, False, True, True, False])
    result = measured(changed(log(), is_logged=lambda _: first.expand(1, 6)))
    expected = measured(changed(log(), mask=lambda mask: mask & first))
    for mine, theirs in zip(result.estimates, expected.estimates, strict=True):
        assert (mine.rows, mine.value) == (theirs.rows, theirs.value)


def test_a_list_with_one_item_shows_it_always():
    class One(Contender):
        def recommend(self, histories, k, exclude=None):
            ids = torch.ones(len(histories.lengths), k, dtype=torch.long)
            return Recommendations(ids * (torch.arange(k) == 0), torch.zeros(ids.shape))

    model = additive()
    result = measured(log(), One(), model=model)
    user, item, reward, p, _, _ = rows_of(log(), Contender())
    top = f"top_{PLACES}"
    assert result.estimate(top, "IPS").value == pytest.approx(((item == 1) / p * reward).mean(), rel=1e-12)
    worth = 0.3 + model.user_effect.numpy()[user] + float(model.item_effect[1])
    assert result.estimate(top, "DM").value == pytest.approx(worth.mean())
    diagnostics = result.estimate(top, "IPS").diagnostics
    assert (diagnostics.no_item_share, diagnostics.unsupported_share) == (0.0, 0.0)
    never = changed(log(), item_ids=lambda items: torch.where(items == 1, 2, items))
    assert measured(never, One()).estimate(top, "IPS").diagnostics.unsupported_share == 1.0


def test_rewards_at_the_ends_of_their_range():
    ends = changed(log(), reward=lambda r: torch.where(r.isnan(), r, (r > 0.5).double()))
    measured(ends, options=OffPolicyOptions(resamples=2, reward_range=(0.0, 1.0)))


def test_rows_in_arrays_have_the_same_result():
    contender = Contender()
    user, _, reward, p, pi, _ = rows_of(log(), contender)
    found = result_of_rows(Rows(reward, pi, p), user, CALM)
    expected = [e for e in measured(log(), contender).estimates if e.target == "policy"]
    for mine, theirs in zip(found.estimates, expected, strict=True):
        assert (mine.estimator, mine.warnings) == (theirs.estimator, theirs.warnings)
        assert mine.value == pytest.approx(theirs.value)
        np.testing.assert_allclose(list(mine.intervals.values()), list(theirs.intervals.values()))


def test_a_mean_over_users_counts_every_user_alike():
    contender = Contender()
    options = OffPolicyOptions(resamples=50, average="user")
    result = measured(log(), contender, options=options)
    user, _, reward, p, pi, _ = rows_of(log(), contender)
    own = np.bincount(user, pi / p * reward) / np.bincount(user)
    assert result.estimate("policy", "IPS").value == pytest.approx(own.mean())
    normal = result.estimate("policy", "IPS").intervals["normal"]
    assert normal.high - normal.low == pytest.approx(2 * 1.95996 * own.std(ddof=1) / np.sqrt(40), rel=1e-4)


def test_batches_do_not_matter():
    a, b = (measured(log(batch=40), options=CALM), measured(list(log(batch=40)), options=CALM))
    split = measured(halves(log(batch=40)))
    for whole, other in ((a, b), (a, split)):
        for x, y in zip(whole.estimates, other.estimates, strict=True):
            assert x.value == pytest.approx(y.value)
            assert x.warnings == y.warnings
            np.testing.assert_allclose(list(x.intervals.values()), list(y.intervals.values()))


def halves(batches):
    """Each user's events in two batches."""
    for batch in batches:
        for part in (slice(0, 2), slice(2, 6)):
            slates = Slates(*(None if column is None else column[:, part] for column in batch.feedback.slates))
            yield batch._replace(feedback=batch.feedback._replace(slates=slates))


def test_rows_without_reward_or_propensity_are_left_out_and_counted():
    hole = torch.tensor([True, False, False, False, False, False])
    partial = changed(
        log(),
        reward=lambda r: r.masked_fill(hole, torch.nan),
        logp_behavior=lambda p: p.masked_fill(hole.roll(1), torch.nan),
    )
    shorter = changed(log(), mask=lambda mask: mask & ~hole & ~hole.roll(1))
    result, expected = measured(partial), measured(shorter)
    found = result.estimate("policy", "IPS")
    assert found.value == pytest.approx(expected.estimate("policy", "IPS").value)
    assert found.diagnostics.rows_without_reward == 40
    every = sum(int(batch.feedback.slates.mask.sum()) for batch in log())
    assert found.rows + 40 + found.diagnostics.rows_without_propensity == every
    assert result.estimate("logging policy", "mean").rows == every - 40


def test_random_exposures_alone_count_with_uniform_propensities():
    contender = Contender()
    result = measured(log(), contender, options=UNIFORM)
    only = changed(log(), mask=lambda mask: mask)
    kept = [(batch, batch.feedback.slates.is_random) for batch in only]
    pi = np.concatenate([contender.log_prob(b.feedback)[..., 0].exp()[r].numpy() for b, r in kept])
    reward = np.concatenate([b.feedback.slates.reward[r].numpy() for b, r in kept])
    assert result.estimate("policy", "IPS").value == pytest.approx((pi * ITEMS * reward).mean())
    assert result.estimate("policy", "IPS").propensity == "uniform"


def test_estimated_propensities_are_those_of_the_model_of_exposures_and_are_labeled():
    features = torch.Generator().manual_seed(2)
    model = ExposureModel(torch.randn(40, 2, generator=features), torch.randn(ITEMS, 2, generator=features))
    options = OffPolicyOptions(resamples=50, propensity="estimated")
    batches = list(changed(log(), is_random=lambda flags: flags & False))
    result = measured(batches, options=options, exposures=model)
    found = result.estimate("policy", "SNIPS")
    assert found.propensity == "estimated"
    assert any("estimated" in warning for warning in found.warnings)
    setting, batch = OffPolicySetting(options, Given(), ITEMS, [PLACES], exposures=model), batches[1]
    slates, users = batch.feedback.slates, batch.user_ids
    share = (model.users[users] @ model.items.T).softmax(1).double().gather(1, (slates.item_ids - 1).clamp_min(0))
    estimated = setting.propensities(users, slates)
    torch.testing.assert_close(estimated[slates.mask], (0.9 * share + 0.1 / ITEMS)[slates.mask])
    few = slates._replace(item_ids=slates.item_ids[3:5], is_random=None)
    torch.testing.assert_close(setting.propensities(users[3:5], few), estimated[3:5], equal_nan=True)


def test_deep_lists_have_a_target_of_their_own():
    contender, options = Contender(), replace(CALM, depth=ITEMS - 1)
    measure = OffPolicyMeasure(OffPolicySetting(options, Given(), ITEMS, [PLACES]))
    sums = np.zeros(2)
    for batch in log():
        lists, deep = (contender.recommend(batch.feedback.histories, places) for places in (PLACES, ITEMS))
        measure.update(Observed(batch, lists, None, None, deep=deep))
        slates = batch.feedback.slates
        chance = discounted(deep.item_ids[:, : ITEMS - 1], slates.item_ids, PLACES)[slates.mask].numpy()
        weight = chance / slates.logp_behavior[slates.mask].exp().numpy()
        sums += [(weight * slates.reward[slates.mask].numpy()).sum(), weight.sum()]
    result = measure.result()
    assert {e.target for e in result.estimates} == {"logging policy", f"top_{PLACES}", f"discounted_{PLACES}"}
    assert result.estimate(f"discounted_{PLACES}", "SNIPS").value == pytest.approx(sums[0] / sums[1])


def test_a_policy_that_gives_no_probabilities_has_lists_only_and_no_sampler_means_no_model_for_the_policy():
    result = measured(log(), scores=False, model=additive())
    assert {e.target for e in result.estimates} == {"logging policy", f"top_{PLACES}"}
    result = measured(log(), model=additive())
    assert "DR" not in {e.estimator for e in result.estimates if e.target == "policy"}
    assert "DR" in {e.estimator for e in result.estimates if e.target == f"top_{PLACES}"}


def test_draws_are_seeded_and_leave_the_callers_random_numbers_alone():
    contender = Contender()
    before = torch.get_rng_state()
    first, again = (measured(log(), contender, model=additive(), sample=contender.sample) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert as_json(first.estimates) == as_json(again.estimates)


def test_paired_differences():
    mine, theirs = Contender(0), Contender(1)
    a, b = measured(log(), mine), measured(log(), theirs)
    found = {(d.target, d.estimator): d for d in a.differences(b)}
    difference = found["policy", "IPS"]
    values = a.estimate("policy", "IPS"), b.estimate("policy", "IPS")
    assert difference.value == pytest.approx(values[0].value - values[1].value)
    user, _, reward, p, pi, _ = rows_of(log(), mine)
    other = list(rows_of(log(), theirs))[4]
    own, rows = np.bincount(user, (pi - other) / p * reward), np.bincount(user)
    moved = (own - own.sum() / rows.sum() * rows) / rows.sum()
    half = 1.95996 * np.sqrt(40 / 39 * (moved**2).sum())
    assert difference.intervals["normal"] == pytest.approx((difference.value - half, difference.value + half), rel=1e-4)
    for d in a.differences(a):
        assert (d.value, d.intervals["normal"], d.intervals["bootstrap"]) == (0, (0, 0), (0, 0))
    gains, snips = a.gains(b, "policy"), found["policy", "SNIPS"]
    assert gains.shape == (snips.users,)
    assert gains.mean() == pytest.approx(snips.value)
    assert gains.std(ddof=1) / len(gains) ** 0.5 == pytest.approx(snips.standard_error)
    assert {d.target for d in a.differences(b)} == {"policy", f"top_{PLACES}"}
    assert {d.target for d in a.differences(measured(log(), theirs, scores=False))} == {f"top_{PLACES}"}
    over = {(d.target, d.estimator): d for d in a.over_logging_policy()}
    assert over["policy", "IPS"].value == pytest.approx(values[0].value - reward.mean())
    with refused("mismatch", "users"):
        a.differences(measured(log(seed=5)))
    with refused("mismatch", field="users"):
        a.gains(measured(log(seed=5)), "policy")


def test_the_logging_policy_is_paired_by_user_although_it_has_more_rows():
    result = measured(log(), options=UNIFORM)
    (difference,) = [d for d in result.over_logging_policy() if (d.target, d.estimator) == ("policy", "SNIPS")]
    low, high = difference.intervals["normal"]
    assert low < difference.value < high


def test_without_any_row_it_is_refused():
    with refused("empty", "off_policy.propensity"):
        measured(changed(log(), logp_behavior=lambda p: torch.full_like(p, torch.nan)))
    with refused("missing_column", "propensity"):
        measured(changed(log(), logp_behavior=lambda p: None))
    with refused("missing_column", "is_random"):
        measured(changed(log(), is_random=lambda r: None), options=UNIFORM)
    with refused("out_of_range", "propensity"):
        measured(changed(log(), logp_behavior=lambda p: torch.full_like(p, np.log(2))))


def test_a_target_without_support_is_refused_and_the_others_are_not():
    class Elsewhere(Contender):
        def recommend(self, histories, k, exclude=None):
            ids = torch.full((len(histories.lengths), k), ITEMS)
            return Recommendations(ids * (torch.arange(k) == 0), torch.zeros(ids.shape))

    elsewhere = changed(log(), item_ids=lambda items: torch.where(items == ITEMS, 1, items))
    result = measured(elsewhere, Elsewhere())
    refused = result.estimate(f"top_{PLACES}", "IPS")
    assert np.isnan(refused.value)
    assert "refused" in refused.warnings[0]
    assert refused.diagnostics.unsupported_share == 1
    assert result.estimate("policy", "IPS").value > 0
    assert {d.target for d in result.over_logging_policy()} == {"policy"}
    json.dumps(as_json(result.estimates), allow_nan=False)


def test_intervals_of_bounded_rewards_and_json():
    options = OffPolicyOptions(resamples=50, reward_range=(0.0, 1.0), clip=2.0)
    result = measured(log(), options=options)
    clipped = result.estimate("policy", "clipped IPS")
    low, high = clipped.intervals["empirical_bernstein"]
    assert low < clipped.intervals["normal"].low < clipped.value < clipped.intervals["normal"].high < high
    (entry,) = [e for e in as_json(result.estimates) if (e["target"], e["estimator"]) == ("policy", "SNIPS")]
    assert json.loads(json.dumps(entry, allow_nan=False)) == entry
    assert entry["intervals"]["empirical_bernstein"] == {"low": None, "high": None}
    assert entry["diagnostics"]["tail"]["largest"] > 1
    with refused("out_of_range", "off_policy.reward_range"):
        measured(log(), options=OffPolicyOptions(reward_range=(0.0, 0.5)))


def test_meaningless_estimates_have_a_warning():
    tiny = measured(log())
    assert any("means nothing" in warning for warning in tiny.estimate("policy", "IPS").warnings)
    wrong = measured(changed(log(600, batch=600), logp_behavior=lambda p: p - 1.0), Contender(users=600))
    assert any("mean weight" in warning for warning in wrong.estimate("policy", "SNIPS").warnings)
    right = measured(log(600, batch=600), Contender(users=600))
    assert not any("mean weight" in warning for warning in right.estimate("policy", "SNIPS").warnings)


def test_lists_shorter_than_asked_for_are_named():
    with refused("out_of_range", "off_policy.top_k"):
        measured(log(), options=OffPolicyOptions(top_k=(7,)))


def test_it_is_a_measure_of_the_one_pass():
    contender = Contender()
    measure = OffPolicyMeasure(OffPolicySetting(CALM, Given(), ITEMS, [PLACES]))
    recommender = Recommender(contender.recommend, contender.log_prob)
    evaluate_ranking(recommender, log(), Ranking(num_items=ITEMS, ks=[PLACES]), measures=[measure])
    assert as_json(measure.result().estimates) == as_json(measured(log(), contender).estimates)


class Truncated(Contender):
    """A policy over codes, a part of whose probability leads to no item: its draws are 0 there."""

    def __init__(self, mass=0.6):
        super().__init__()
        self.mass, self.logp = mass, self.logp + np.log(mass)

    def sample(self, histories, size):
        items = self.logp[histories.item_ids[:, 0] - 1].exp()
        whole = torch.cat([(1 - self.mass) * torch.ones(len(items), 1, dtype=items.dtype), items], 1)
        return torch.multinomial(whole, size, replacement=True)


def test_a_draw_without_an_item_earns_0_for_the_reward_model_too():
    """v_hat is the sum over the items of pi q: 0.6 of what it is of a policy that always draws an item."""
    options = OffPolicyOptions(resamples=10, samples=4000)
    contender, model = Truncated(), additive()
    found = measured(log(), contender, options=options, model=model, sample=contender.sample)
    whole = Contender()
    other = measured(log(), whole, options=options, model=model, sample=whole.sample)
    direct = found.estimate("policy", "DM").value
    assert direct == pytest.approx(0.6 * other.estimate("policy", "DM").value, rel=0.01)
    exact = (contender.logp.exp() * model(torch.arange(40), torch.arange(1, ITEMS + 1).expand(40, -1))).sum(1)
    users = np.concatenate([b.feedback.context_ids.repeat_interleave(b.feedback.slates.mask.sum(1)) for b in log()])
    assert direct == pytest.approx(exact.numpy()[users].mean(), rel=0.01)
    assert found.estimate("policy", "IPS").value == pytest.approx(0.6 * other.estimate("policy", "IPS").value)
    assert found.estimate("policy", "DR").value == pytest.approx(0.6 * other.estimate("policy", "DR").value, rel=0.05)
    diagnostics = found.estimate("policy", "DR").diagnostics
    assert diagnostics.no_item_share == pytest.approx(0.4, abs=0.01)
    for estimator, warned in (("SNIPS", True), ("SNDR", True), ("DR", False), ("IPS", False)):
        said = found.estimate("policy", estimator).warnings
        assert any("draws are not items" in warning for warning in said) == warned, estimator
    assert not any("draws are not items" in w for w in other.estimate("policy", "SNIPS").warnings)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("propensity", 0.0, ("bad_value", "propensity")),
        ("propensity", 1.5, ("bad_value", "propensity")),
        ("propensity", np.nan, ("bad_value", "propensity")),
        ("propensity", -0.2, ("bad_value", "propensity")),
        ("target", 1.2, ("bad_value", "target")),
        ("target", np.inf, ("bad_value", "target")),
        ("reward", np.nan, ("bad_value", "reward")),
    ],
)
def test_rows_that_cannot_be_weighted_are_refused(column, value, message):
    rows = Rows(np.array([1.0, 0.0]), np.array([0.5, 0.5]), np.array([0.5, 0.5]))
    getattr(rows, column)[1] = value
    with refused(*message) as raised:
        result_of_rows(rows, np.array([0, 1]), CALM)
    assert f"{column} of row 1 " in str(raised.value)


def test_no_weight_is_infinite():
    rows = Rows(np.array([1.0]), np.array([0.5]), np.array([0.0]))
    with refused("out_of_range", "propensity"):
        _ = rows.weight
    never = changed(log(), logp_behavior=lambda p: torch.where(torch.arange(6) == 0, -torch.inf, p))
    found = measured(never).estimate("policy", "IPS")
    assert np.isfinite(found.value)
    assert found.diagnostics.rows_without_propensity == 40
