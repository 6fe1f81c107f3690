"""Off-policy value in ``recpo evaluate``: propensities, the reward model and the true value of the logging policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch

from recpo.contracts import RewardFunction
from recpo.data.prepared import Prepared
from recpo.evaluation.off_policy.measure import OffPolicyMeasure, Sampler
from recpo.evaluation.off_policy.options import OffPolicyOptions
from recpo.evaluation.off_policy.propensities import (
    EstimatedPropensities,
    LoggedPropensities,
    Propensities,
    UniformPropensities,
)
from recpo.evaluation.off_policy.reward_model import AdditiveRewardModel, RewardedExposures
from recpo.types import FeedbackBatch, Histories, Slates

HeldOut = Literal["valid", "test"]


def has_propensities(data: Prepared, split: HeldOut) -> bool:
    """Whether any held-out event has a logged propensity."""
    shards = (data.columns(split, shard, ["propensity", "is_target"]) for shard in range(data.num_shards(split)))
    return any(bool((~np.isnan(shard["propensity"]) & shard["is_target"]).any()) for shard in shards)


@dataclass(frozen=True)
class OffPolicyMeasures:
    """Makes one measure per contender; the reward model is fitted once.

    Attributes:
        options: of the estimators.
        reward: of logged items.
        propensities: of logged items.
        model: predicts rewards.
        num_items: V.
        ks: list lengths.
    """

    options: OffPolicyOptions
    reward: RewardFunction
    propensities: Propensities
    model: AdditiveRewardModel
    num_items: int
    ks: Sequence[int]

    @classmethod
    def of(
        cls, data: Prepared, options: OffPolicyOptions, reward: RewardFunction, ks: Sequence[int]
    ) -> OffPolicyMeasures:
        """Reads what the options ask for from the prepared data.

        Raises:
            RecpoError: no training event has a reward.
        """
        model = AdditiveRewardModel.fit(
            partial(_rewarded, data, reward), num_users=int(data.manifest["num_users"]), num_items=data.num_items
        )
        return cls(options, reward, _propensities(data, options), model, data.num_items, ks)

    def measure(self, sample: Sampler | None) -> OffPolicyMeasure:
        """For one pass of one contender."""
        return OffPolicyMeasure(
            self.options,
            reward=self.reward,
            propensities=self.propensities,
            num_items=self.num_items,
            ks=self.ks,
            model=self.model,
            sample=sample,
        )


def _propensities(data: Prepared, options: OffPolicyOptions) -> Propensities:
    if options.propensity == "uniform":
        return UniformPropensities(options.pool_size or data.num_items)
    if options.propensity == "estimated":
        return EstimatedPropensities(torch.from_numpy(data.item_counts()))
    return LoggedPropensities()


def _rewarded(data: Prepared, reward: RewardFunction) -> Iterator[RewardedExposures]:
    """The training period, one shard at a time, its events as slates of one item."""
    for shard in range(data.num_shards("train")):
        names = ["user_index", "item_index", "watch_quantile", "dislike"]
        user, item, quantile, dislike = data.columns("train", shard, names).values()
        items, quantiles, dislikes = (torch.from_numpy(values.copy())[:, None] for values in (item, quantile, dislike))
        items = items.long()
        slates = Slates(items, torch.zeros_like(items), items > 0, quantiles, dislikes)
        histories = Histories(items[:, :0], torch.zeros(len(user), dtype=torch.long))
        batch = FeedbackBatch(histories, slates, torch.from_numpy(user.astype(np.int64)))
        yield RewardedExposures(user, item, reward(batch, slates)[:, 0].numpy())
