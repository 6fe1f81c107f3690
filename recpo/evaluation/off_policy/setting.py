"""The setting of off-policy evaluation from prepared data: propensities, and a reward model of the training period."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from recpo.base.contracts import Policy, RewardFunction
from recpo.base.types import FeedbackBatch, Histories, Slates
from recpo.evaluation.off_policy.additive_model import AdditiveRewardModel, RewardedExposures
from recpo.evaluation.off_policy.measure import OffPolicyMeasure
from recpo.evaluation.off_policy.options import OffPolicyOptions
from recpo.evaluation.off_policy.propensities import (
    EstimatedPropensities,
    LoggedPropensities,
    Propensities,
    UniformPropensities,
)
from recpo.log.prepared import Events, Prepared


@dataclass(frozen=True)
class OffPolicySetting:
    """The setting that all contenders share; ``measure`` creates the measure of each.

    Attributes:
        options: how values are estimated.
        reward: reward of logged items.
        propensities: propensities of logged items.
        model: reward model, fitted on the training period.
        num_items: V.
        ks: list lengths, unless the options name others.
    """

    options: OffPolicyOptions
    reward: RewardFunction
    propensities: Propensities
    model: AdditiveRewardModel
    num_items: int
    ks: Sequence[int]

    def measure(self, policy: Policy | None = None) -> OffPolicyMeasure:
        """The measure of a policy that can be sampled, or of a contender that only has lists."""
        return OffPolicyMeasure(
            self.options,
            reward=self.reward,
            propensities=self.propensities,
            num_items=self.num_items,
            ks=self.ks,
            model=self.model,
            sample=None if policy is None else lambda histories, size: policy.sample(histories, size)[0],
        )


def off_policy_setting(
    options: OffPolicyOptions, data: Prepared, reward: RewardFunction, ks: Sequence[int]
) -> OffPolicySetting:
    """Reads item counts and fits the reward model, in passes over the training shards.

    Raises:
        RecpoError: no training event has a reward.
    """
    reward = reward.for_behaviors(data.behaviors)

    def training() -> Iterator[RewardedExposures]:
        for shard in range(data.num_shards("train")):
            events = data.load("train", shard, reward.reads)
            exposures = rewarded(events, reward)
            yield RewardedExposures(*(column[events.is_target] for column in exposures))

    propensities: Propensities = {
        "logged": LoggedPropensities,
        "uniform": lambda: UniformPropensities(options.pool_size or data.num_items),
        "estimated": lambda: EstimatedPropensities(torch.from_numpy(data.item_counts())),
    }[options.propensity]()
    num_users = int(data.manifest["num_users"])
    model = AdditiveRewardModel.fit(training, num_users=num_users, num_items=data.num_items)
    return OffPolicySetting(options, reward, propensities, model, data.num_items, ks)


def has_propensities(data: Prepared, split: Literal["valid", "test"]) -> bool:
    """Whether any held-out event of the period has a logged propensity."""
    shards = (data.columns(split, shard, ["propensity", "is_target"]) for shard in range(data.num_shards(split)))
    return any(bool((~np.isnan(shard["propensity"]) & shard["is_target"]).any()) for shard in shards)


def rewarded(events: Events, reward: RewardFunction) -> RewardedExposures:
    """The rewards of a shard's events, each as a separate slate."""
    columns = (events.item_index, events.label, events.dislike)
    items, quantile, dislike = (torch.tensor(column)[:, None] for column in columns)
    mask = torch.ones_like(items, dtype=torch.bool)
    slates = Slates(items, torch.zeros_like(items), mask, quantile, dislike, is_logged=mask)
    if events.behaviors is not None:
        slates = slates._replace(behaviors=torch.tensor(events.behaviors)[:, None])
    nothing = torch.zeros_like(items[:, :0])
    batch = FeedbackBatch(Histories(nothing, torch.zeros(len(items), dtype=torch.long)), slates, items[:, 0])
    return RewardedExposures(events.user_index, events.item_index, reward(batch, slates)[:, 0].double().numpy())
