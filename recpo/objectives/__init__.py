"""The objectives, one file each."""

from recpo.objectives.aspo import ASPO
from recpo.objectives.catalog_policy_gradient import CatalogPolicyGradient
from recpo.objectives.cispo import CISPO
from recpo.objectives.dpo import DPO
from recpo.objectives.ecpo import ECPO
from recpo.objectives.gbpo import GBPO
from recpo.objectives.grpo import DAPO, GRPO, DrGRPO
from recpo.objectives.gspo import GSPO
from recpo.objectives.kto import KTO
from recpo.objectives.likelihood import Likelihood
from recpo.objectives.listwise_dpo import MarginListwiseDPO, SoftmaxDPO
from recpo.objectives.mpo import MPO
from recpo.objectives.ppo import PPO
from recpo.objectives.q_learning import QLearning
from recpo.objectives.reinforce import Reinforce
from recpo.objectives.reward_model import PairwiseReward, PointwiseReward
from recpo.objectives.weighted_likelihood import WeightedLikelihood

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
