"""Objectives whose inputs (candidates, old policy) contradict the options."""

from dataclasses import replace

import pytest

from recpo.base.contracts import StatePolicy
from recpo.base.errors import RecpoError
from recpo.base.types import SlateTraits
from recpo.objectives import GRPO, MPO, WeightedLikelihood
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.training.contradictions import (
    validate_draws,
    validate_old_policy,
    validate_policy,
    validate_slates,
    validate_snapshot_reference,
)
from recpo.training.options import RolloutOptions


@pytest.mark.parametrize("candidates", ["draws", "beam", "catalog"])
def test_the_objective_must_know_whether_candidates_are_draws(candidates):
    rollout, drawn = RolloutOptions(candidates=candidates), candidates == "draws"
    validate_draws(GRPO(), rollout)
    validate_draws(MPO(candidates_are_draws=drawn), rollout)
    remedy = (
        f"candidates is {candidates}: set objective.init_args.candidates_are_draws to {'true' if drawn else 'false'}"
    )
    with pytest.raises(RecpoError, match=remedy):
        validate_draws(MPO(candidates_are_draws=not drawn), rollout)


@pytest.mark.parametrize("changed", [{"replacement": False}, {"duplicates": "drop"}, {"logged_share": 0.5}])
def test_frequencies_are_those_of_independent_draws(changed):
    with pytest.raises(RecpoError, match=r"MPO reads how often an item was drawn: set rollout\.replacement to true"):
        validate_draws(MPO(candidates_are_draws=True), RolloutOptions(**changed))
    validate_draws(GRPO(), RolloutOptions(**changed))


@pytest.mark.parametrize("old_policy", ["current", "snapshot"])
def test_inverse_propensities_are_those_of_the_log(old_policy):
    with pytest.raises(RecpoError, match=f"propensities of the log, and old_policy is {old_policy}: set it to logged"):
        validate_old_policy(WeightedLikelihood(ips_power=0.5), old_policy)
    validate_old_policy(WeightedLikelihood(), old_policy)
    validate_old_policy(WeightedLikelihood(ips_power=0.5), "logged")


EXACT = GRPO(kl_coef=0.1, kl_kind="full")


def test_the_exact_divergence_needs_whole_distributions_of_the_reference():
    slates = SlateTraits()
    with pytest.raises(RecpoError, match=r"cached keeps .* set reference to frozen"):
        validate_slates(EXACT, slates, "cached", 0.0)
    validate_slates(EXACT, slates, "frozen", 0.0)
    validate_slates(replace(EXACT, kl_coef=0.0), slates, "cached", 0.0)
    with pytest.raises(RecpoError, match="set old_policy to snapshot, not logged"):
        validate_snapshot_reference(EXACT, "snapshot", "logged")


class Estimated(CatalogSoftmaxPolicy):
    """A policy without an exact divergence."""

    divergence = StatePolicy.divergence


def test_the_exact_divergence_needs_a_policy_that_has_it():
    validate_policy(CatalogSoftmaxPolicy(5, dim=4, heads=1), EXACT)
    policy = Estimated(5, dim=4, heads=1)
    with pytest.raises(RecpoError, match=r"Estimated has no method divergence: set objective\.init_args\.kl_kind"):
        validate_policy(policy, EXACT)
    with pytest.raises(RecpoError, match="has no method divergence"):
        policy.divergence(None, policy)
    validate_policy(policy, replace(EXACT, kl_kind="k3"))
