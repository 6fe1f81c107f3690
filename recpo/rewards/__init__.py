"""Rewards of candidates, logged or generated."""

from recpo.rewards.ensemble import EnsembleReward
from recpo.rewards.factor import FactorReward
from recpo.rewards.hit import HitReward, RankAwareReward, rank_aware_reward
from recpo.rewards.logged import LoggedReward
from recpo.rewards.validity import ValidityReward
from recpo.rewards.weighted_sum import WeightedSum

__all__ = [
    "EnsembleReward",
    "FactorReward",
    "HitReward",
    "LoggedReward",
    "RankAwareReward",
    "ValidityReward",
    "WeightedSum",
    "rank_aware_reward",
]
