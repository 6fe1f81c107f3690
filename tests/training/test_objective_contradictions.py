"""Objectives whose inputs (candidates, old policy) contradict the options."""

import pytest

from recpo.errors import RecpoError
from recpo.objectives import GRPO, MPO, WeightedLikelihood
from recpo.training.contradictions import validate_draws, validate_old_policy
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
