"""The monitor: the validation metric that early stopping, ``best.ckpt`` and the final report follow.

NDCG on logged positives rewards agreement with the logging policy, so it selects pre-trained policies well and aligned
policies badly. Policies that learn from feedback are selected by held-out feedback.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np

from recpo.base.contracts import Objective
from recpo.base.errors import RecpoError
from recpo.log.prepared import Prepared
from recpo.objectives.likelihood import Likelihood
from recpo.objectives.preference import PreferenceObjective
from recpo.objectives.reward_model import PointwiseReward
from recpo.training.options import LearningOptions, Monitor

LOWER_IS_BETTER: frozenset[Monitor] = frozenset({"pair_loss"})
MIN_PROPENSITY_SHARE = 0.5
"""Minimum share of validation events with a propensity for SNIPS as the default."""


class HeldOutFacts(NamedTuple):
    """Which metrics the validation period supports.

    Attributes:
        propensity_share: share of its events with a logged propensity.
        comparing_users: users with both a positive event and another labeled or disliked one.
    """

    propensity_share: float = 0.0
    comparing_users: int = 0


def held_out_facts(prepared: Prepared) -> HeldOutFacts:
    """Counts over the validation shards, one in memory at a time."""
    events = known = comparing = 0
    names = ["user_index", "label", "dislike", "propensity", "is_target"]
    for shard in range(len(prepared.manifest["shards"]["valid"])):
        columns = prepared.columns("valid", shard, names)
        target, dislike = columns["is_target"].astype(bool), columns["dislike"].astype(bool)
        positive = prepared.feedback.rule.positive(columns["label"], dislike) & target
        other = target & ~positive & (dislike | ~np.isnan(columns["label"]))
        users = columns["user_index"]
        comparing += len(np.intersect1d(users[positive], users[other]))
        events += int(target.sum())
        known += int((target & (columns["propensity"] > 0)).sum())
    return HeldOutFacts(known / max(1, events), comparing)


def default_monitor(options: LearningOptions, facts: HeldOutFacts) -> Monitor:
    """The default metric for an objective.

    - A reward model: its held-out log-likelihood, or ``AUC_other`` if it has no probabilities.
    - Pre-training (``Likelihood`` of all events): ``NDCG``.
    - Objectives that learn from feedback: ``reward`` if ``validation_reward`` is given; ``AUC_other`` for preference
      lists of logged events; otherwise ``SNIPS`` if at least ``MIN_PROPENSITY_SHARE`` of the validation events have a
      propensity, else ``AUC_other``. If the period has nothing to compare: ``NDCG``, with a warning.
    """
    objective = options.objective
    if "score" in objective.requires:
        return "log_likelihood" if isinstance(objective, PointwiseReward) else "AUC_other"
    if isinstance(objective, Likelihood) and not objective.positive_only and options.rollout is None:
        return "NDCG"
    if options.validation_reward is not None:
        return "reward"
    compares_logged = "chosen" in objective.requires and options.rollout is None
    if facts.propensity_share >= MIN_PROPENSITY_SHARE and not compares_logged:
        return "SNIPS"
    if facts.comparing_users:
        return "AUC_other"
    warnings.warn(
        "no user of the validation period has a positive event and another labeled one, and it has no propensities: "
        "the best checkpoint is chosen by NDCG, which rewards agreeing with the log; give validation_reward",
        stacklevel=2,
    )
    return "NDCG"


def has_pair_loss(objective: Objective) -> bool:
    """Whether ``pair_loss`` is meaningful for a policy that the objective trains.

    Objectives for preference lists have a ``beta`` and a reference, which ``pair_loss`` ignores: it rises while the
    value of the lists rises (docs/training.md).
    """
    return not isinstance(objective, PreferenceObjective)


def validate_monitor(monitor: Monitor, options: LearningOptions, facts: HeldOutFacts) -> None:
    """Raises ``RecpoError`` if the metric cannot be computed."""
    name = type(options.objective).__name__
    scores = "score" in options.objective.requires
    scored = {"log_likelihood", "AUC_other"} if isinstance(options.objective, PointwiseReward) else {"AUC_other"}
    known = scored if scores else None
    if known is not None and monitor not in known:
        raise RecpoError(
            f"monitor: {monitor} is a metric of policies, and objective {name} trains a reward model: set monitor to "
            f"{' or '.join(sorted(known))}, or leave it out"
        )
    if known is None and monitor == "log_likelihood":
        raise RecpoError(
            f"monitor: log_likelihood is a metric of reward models, and objective {name} trains a policy: leave it out"
        )
    if monitor == "reward" and options.validation_reward is None:
        raise RecpoError("monitor: reward is the value of lists under a reward: set validation_reward")
    if monitor == "SNIPS" and not facts.propensity_share:
        raise RecpoError(
            "monitor: SNIPS weighs held-out exposures by logged propensities, and no validation event has one: set "
            "monitor to AUC_other, or map the log's propensity column in `recpo prepare`"
        )
    if monitor == "pair_loss" and not has_pair_loss(options.objective):
        raise RecpoError(
            f"monitor: pair_loss rises while {name} trains a better policy, as it has neither its beta nor its "
            "reference: set monitor to AUC_other, or leave it out"
        )
    if monitor in ("AUC_other", "pair_loss") and not facts.comparing_users:
        raise RecpoError(
            f"monitor: {monitor} compares a user's positive events with the user's others, and no user of the "
            "validation period has both: set monitor to NDCG, or prepare the log with a longer validation period"
        )
