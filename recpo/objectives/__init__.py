"""The objectives, one file each."""

from recpo.objectives.grpo import ASPO, CISPO, DAPO, ECPO, GBPO, GRPO, GSPO, DrGRPO
from recpo.objectives.likelihood import Likelihood, WeightedLikelihood
from recpo.objectives.listwise_dpo import MarginListwiseDPO, SoftmaxDPO
from recpo.objectives.mpo import MPO
from recpo.objectives.policy_gradient import PPO, CatalogPolicyGradient, Reinforce
from recpo.objectives.preference import DPO, KTO
from recpo.objectives.q_learning import QLearning
from recpo.objectives.reward_model import PairwiseReward, PointwiseReward

__all__ = [
    "ASPO",
    "CISPO",
    "DAPO",
    "DPO",
    "ECPO",
    "GBPO",
    "GRPO",
    "GSPO",
    "KTO",
    "MPO",
    "PPO",
    "CatalogPolicyGradient",
    "DrGRPO",
    "Likelihood",
    "MarginListwiseDPO",
    "PairwiseReward",
    "PointwiseReward",
    "QLearning",
    "Reinforce",
    "SoftmaxDPO",
    "WeightedLikelihood",
]
