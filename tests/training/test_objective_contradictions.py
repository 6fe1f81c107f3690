"""Options that do not fit together are refused before the first step: one table of all of them, by code and field."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from recpo.base.contracts import Policy, Requirement, StatePolicy
from recpo.base.types import SlateTraits
from recpo.objectives import (
    DPO,
    GBPO,
    GRPO,
    KTO,
    MPO,
    PPO,
    CatalogPolicyGradient,
    Likelihood,
    PairwiseReward,
    PointwiseReward,
    QLearning,
    Reinforce,
    SoftmaxDPO,
    WeightedLikelihood,
)
from recpo.objectives.advantages import (
    GatedAdvantage,
    GradedAdvantage,
    GroupNormalizedAdvantage,
    PrefixGroupAdvantage,
    TernaryAdvantage,
)
from recpo.objectives.gae import GAEAdvantage
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.rewards.rewards import LoggedReward, RankAwareReward
from recpo.training.contradictions import validate_options
from recpo.training.options import LearningOptions, RolloutOptions
from tests.refusals import refused

LISTS = SlateTraits(is_preference_list=True)
RESAMPLED = SlateTraits(is_preference_list=True, resampled=True)
REQUEST = SlateTraits(one_request=True)
TERNARY = {"advantage": TernaryAdvantage()}
GROUPS = {"advantage": GroupNormalizedAdvantage(), "reward": LoggedReward(), "old_policy": "snapshot"}
GAE = {**GROUPS, "advantage": GAEAdvantage()}
DRAWS = {**GROUPS, "rollout": RolloutOptions()}
CATALOG = {"reward": LoggedReward(), "old_policy": "snapshot", "rollout": RolloutOptions(candidates="catalog")}
EXACT = GRPO(kl_coef=0.1, kl_kind="full")
PENALIZED = RolloutOptions(kl_coef=0.1)


def catalog(**options):
    return CatalogSoftmaxPolicy(5, dim=4, heads=1, layers=1, **options)


class Stateless(Policy):
    """A policy without states."""

    num_items, max_history = 5, 4
    log_prob = recommend = sample = None


Stateless.__abstractmethods__ = frozenset()


class Codes(CatalogSoftmaxPolicy):
    """A policy of two tokens per item."""

    num_tokens = 2


class Estimated(CatalogSoftmaxPolicy):
    """A policy without an exact divergence."""

    divergence = StatePolicy.divergence


@dataclass(frozen=True)
class NeedsCritic(GBPO):
    """An objective that asks for state values."""

    @property
    def requires(self):
        return super().requires | {"value"}


@dataclass(frozen=True)
class NeedsMagic(GBPO):
    """An objective that asks for what nobody knows."""

    @property
    def requires(self):
        return super().requires | {"magic"}


SAMPLED = {"policy": catalog(normalizer="sampled")}
STATELESS = {"policy": Stateless()}
REFUSED = [
    # what the objective, the advantage or the reward requires and the options do not supply
    (GBPO(), {}, "missing_option", "advantage"),
    (KTO(), {}, "missing_option", "advantage"),
    (Likelihood(positive_only=True), {}, "missing_option", "advantage"),
    (GRPO(), {**GROUPS, "reward": None}, "missing_option", "reward"),
    (GRPO(), {**GROUPS, "advantage": GatedAdvantage(), "reward": None}, "missing_option", "reward"),
    (QLearning(), {}, "missing_option", "reward"),
    (MPO(), {}, "missing_option", "reward"),
    (SoftmaxDPO(gap_weighted=True), {"slates": LISTS}, "missing_option", "reward"),
    (GRPO(), {**GROUPS, "old_policy": "current"}, "missing_option", "old_policy"),
    (Reinforce(off_policy=True), {**GROUPS, "old_policy": "current"}, "missing_option", "old_policy"),
    (WeightedLikelihood(ips_power=0.5), TERNARY, "missing_option", "old_policy"),
    (WeightedLikelihood(ips_power=0.5), {**TERNARY, "old_policy": "snapshot"}, "missing_option", "old_policy"),
    (PPO(), GROUPS, "missing_option", "advantage"),
    (NeedsCritic(), TERNARY, "missing_option", "advantage"),
    (DPO(), {}, "missing_option", "data.layout"),
    (PairwiseReward(), {}, "missing_option", "data.layout"),
    (SoftmaxDPO(), {**DRAWS, "advantage": None, "slates": REQUEST}, "missing_option", "data.layout"),
    (CatalogPolicyGradient(), {"reward": LoggedReward()}, "missing_option", "rollout.candidates"),
    (CatalogPolicyGradient(), {**DRAWS, "slates": REQUEST}, "missing_option", "rollout.candidates"),
    (NeedsMagic(), TERNARY, "unknown_name", "objective"),
    # what the policy cannot compute
    (PPO(), {**GAE, **STATELESS}, "unsupported", "policy"),
    (QLearning(), {"reward": LoggedReward(), **STATELESS}, "unsupported", "policy"),
    (PointwiseReward(), STATELESS, "unsupported", "policy"),
    (GRPO(entropy_coef=0.1), {**GROUPS, **STATELESS}, "unsupported", "policy"),
    (EXACT, {**GROUPS, **STATELESS}, "unsupported", "policy"),
    (EXACT, {**GROUPS, "policy": Estimated(5, dim=4, heads=1)}, "unsupported", "objective.init_args.kl_kind"),
    (GBPO(), {**TERNARY, **SAMPLED}, "conflicting_options", "policy.normalizer"),
    # advantages of another kind
    (GRPO(), GAE, "conflicting_options", "objective"),
    (KTO(), {**GROUPS, "advantage": PrefixGroupAdvantage()}, "conflicting_options", "advantage"),
    # slates of another kind
    (Likelihood(), {"slates": LISTS}, "conflicting_options", "data.layout"),
    (SoftmaxDPO(), {"slates": LISTS, "anchor_coef": 0.1}, "conflicting_options", "anchor_coef"),
    (SoftmaxDPO(), {"slates": RESAMPLED, "reference": "cached"}, "conflicting_options", "reference"),
    (EXACT, {**GROUPS, "reference": "cached"}, "conflicting_options", "reference"),
    (GRPO(), {**DRAWS, "slates": REQUEST, "reference": "cached"}, "conflicting_options", "reference"),
    (EXACT, {**GROUPS, "reference": "snapshot", "old_policy": "logged"}, "conflicting_options", "old_policy"),
    (KTO(), {**TERNARY, "reference": "snapshot"}, "conflicting_options", "old_policy"),
    # candidates
    (GRPO(), DRAWS, "conflicting_options", "data.layout"),
    (Likelihood(), {**DRAWS, "reward": None, "slates": REQUEST}, "missing_option", "reward"),
    (GRPO(), {**DRAWS, "old_policy": "logged", "slates": REQUEST}, "conflicting_options", "old_policy"),
    (QLearning(), {**DRAWS, "slates": REQUEST}, "conflicting_options", "rollout"),
    (PointwiseReward(), {**DRAWS, "slates": REQUEST}, "conflicting_options", "rollout"),
    (
        GRPO(),
        {**DRAWS, "rollout": RolloutOptions(preference="best_vs_rest"), "slates": REQUEST},
        "unused_option",
        "rollout.preference",
    ),
    *(
        (
            MPO(candidates_are_draws=candidates != "draws"),
            {**CATALOG, "rollout": RolloutOptions(candidates=candidates), "slates": REQUEST},
            "conflicting_options",
            "objective.init_args.candidates_are_draws",
        )
        for candidates in ("draws", "beam", "catalog")
    ),
    *(
        (
            MPO(candidates_are_draws=True),
            {**CATALOG, "rollout": RolloutOptions(**changed), "slates": REQUEST},
            "conflicting_options",
            "rollout",
        )
        for changed in ({"replacement": False}, {"duplicates": "drop"}, {"logged_share": 0.5})
    ),
    (MPO(), {**CATALOG, "slates": REQUEST, "policy": Codes(5, dim=4)}, "unsupported", "rollout.candidates"),
    (MPO(), {**CATALOG, "slates": REQUEST, **STATELESS}, "unsupported", "rollout.candidates"),
    (Likelihood(), {**CATALOG, "slates": REQUEST, **SAMPLED}, "conflicting_options", "policy.normalizer"),
    (PPO(), {**GAE, **CATALOG, "slates": REQUEST}, "conflicting_options", "rollout.candidates"),
    (MPO(), {**CATALOG, "slates": REQUEST, "reward": RankAwareReward()}, "missing_option", "rollout.candidates"),
    (
        Reinforce(),
        {**DRAWS, **TERNARY, "rollout": PENALIZED, "slates": REQUEST},
        "unused_option",
        "rollout.kl_coef",
    ),
    (
        MPO(candidates_are_draws=True),
        {**DRAWS, "rollout": PENALIZED, "slates": REQUEST},
        "unused_option",
        "rollout.kl_coef",
    ),
    (
        GRPO(),
        {**DRAWS, "rollout": PENALIZED, "slates": REQUEST, "reference": "snapshot"},
        "conflicting_options",
        "reference",
    ),
    # additions to the loss
    (SoftmaxDPO(), {"slates": LISTS, "mask_shared_prefix": True}, "unused_option", "mask_shared_prefix"),
    (Likelihood(), {"mask_shared_prefix": True, "policy": Codes(5, dim=4)}, "unused_option", "mask_shared_prefix"),
    (Likelihood(), {"item_coef": 0.5}, "unsupported", "item_coef"),
    (
        Likelihood(positive_only=True),
        {**TERNARY, "item_coef": 0.5, "policy": Codes(5, dim=4)},
        "conflicting_options",
        "item_coef",
    ),
    (GBPO(), {**TERNARY, "item_coef": 0.5, "policy": Codes(5, dim=4)}, "conflicting_options", "item_coef"),
]
ACCEPTED = [
    (Reinforce(), TERNARY),
    (WeightedLikelihood(), TERNARY),
    (WeightedLikelihood(ips_power=0.5), {**TERNARY, "old_policy": "logged"}),
    (PPO(value_coef=0.0), GROUPS),
    (PPO(), GAE),
    (GRPO(), {**GROUPS, "advantage": PrefixGroupAdvantage()}),
    (KTO(), {"advantage": GradedAdvantage()}),
    (DPO(), {"slates": LISTS, "reference": "cached"}),
    (EXACT, GROUPS),
    (replace(EXACT, kl_coef=0.0), {**GROUPS, "reference": "cached"}),
    (replace(EXACT, kl_kind="k3"), {**GROUPS, "policy": Estimated(5, dim=4, heads=1)}),
    (GRPO(), {**DRAWS, "slates": REQUEST}),
    (GRPO(), {**DRAWS, "rollout": PENALIZED, "slates": REQUEST}),
    (GRPO(), {**DRAWS, "rollout": RolloutOptions(duplicates="drop"), "slates": REQUEST}),
    (SoftmaxDPO(), {**CATALOG, "rollout": RolloutOptions(preference="best_vs_rest"), "slates": REQUEST}),
    (MPO(), {**CATALOG, "slates": REQUEST}),
    (CatalogPolicyGradient(), {**CATALOG, "slates": REQUEST}),
    (Likelihood(), {"item_coef": 0.5, "policy": Codes(5, dim=4)}),
]


def validate(objective, options):
    options = dict(options)
    policy, slates = options.pop("policy", None), options.pop("slates", SlateTraits())
    validate_options(policy or catalog(), LearningOptions(objective=objective, **options), slates)


@pytest.mark.parametrize(("objective", "options", "code", "field"), REFUSED)
def test_what_does_not_fit_is_refused(objective, options, code, field):
    with refused(code, field):
        validate(objective, options)


@pytest.mark.parametrize(("objective", "options"), ACCEPTED)
def test_what_fits_is_accepted(objective, options):
    validate(objective, options)


def test_every_requirement_says_how_it_is_supplied():
    for requirement in Requirement:
        error = requirement.missing(GRPO(), ", here")
        assert str(error) == f"GRPO {requirement.use}, here: {requirement.remedy}"
        assert (error.code, error.field) == ("missing_option", requirement.option)
        assert requirement.implies <= set(Requirement)


def test_a_policy_without_an_exact_divergence_says_so():
    policy = Estimated(5, dim=4, heads=1)
    with refused("unsupported", "objective.init_args.kl_kind"):
        policy.divergence(None, policy)
