"""Single steps of training, taken apart: batches, what makes the inputs of an objective, and its loss.

The cases are those of ``test_objectives_learn``, and rollouts.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch

from recpo.batches.datamodule import Contents, FeedbackDataModule
from recpo.objectives import GRPO
from recpo.objectives.advantages import GroupNormalizedAdvantage
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.policies.semantic_id import SemanticIdPolicy
from recpo.rewards.rewards import HitReward
from recpo.training.inputs import InputBuilder
from recpo.training.networks import Networks
from recpo.training.options import LearningOptions, RolloutOptions
from recpo.training.planning import StepPlanner
from tests.training.test_objectives_learn import BYSTANDERS, HISTORY, IMPRESSIONS, LEARNERS, ON_CATALOGS, WHOLE_CATALOG

GROUP = {"rollout": RolloutOptions(group_size=4), "old_policy": "snapshot", "reward": HitReward()}
CASES = {
    **LEARNERS,
    **BYSTANDERS,
    **{name: (one, IMPRESSIONS, {**WHOLE_CATALOG, "reward": HitReward()}) for name, one in ON_CATALOGS.items()},
    "grpo_rollout": (GRPO(kl_coef=0.1), IMPRESSIONS, {**GROUP, "advantage": GroupNormalizedAdvantage()}),
}


def policy_of(num_items, codes=None):
    """A policy without dropout, far from uniform; with codes, of semantic ids."""
    torch.manual_seed(0)
    common = {"num_items": num_items, "dim": 16, "layers": 1, "heads": 1, "max_history": HISTORY, "dropout": 0.0}
    policy = CatalogSoftmaxPolicy(**common) if codes is None else SemanticIdPolicy(codes=codes, **common)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return policy


@dataclass
class Step:
    """What a case learns from, on a copy of a policy."""

    objective: object
    networks: Networks
    inputs: InputBuilder
    data: FeedbackDataModule

    @classmethod
    def of(cls, name, prepared, policy, batch_size=16):
        torch.manual_seed(0)  # of the heads
        objective, layout, more = CASES[name]
        policy, more = copy.deepcopy(policy), {key: value for key, value in more.items() if key != "rate"}
        data = FeedbackDataModule(prepared, batch_size=batch_size, layout=layout, seed=0)
        options, hard = LearningOptions(objective=objective, **more), layout.traits.hard_negatives
        data.contents = Contents(planner=StepPlanner(policy, options, hard))
        networks = Networks.of(policy, options)
        inputs = InputBuilder(networks, options, hard)
        if inputs.rollouts is not None:
            inputs.rollouts.begin(0)
        with torch.no_grad():  # the policy has moved on from its copies
            for weight in policy.parameters():
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 0.05)
        return cls(objective, networks, inputs, data)

    def gradients(self):
        """Those of the policy and the critic, by name."""
        modules = {"policy": self.networks.policy, "critic": self.networks.critic}
        return {
            f"{prefix}.{name}": weight.grad
            for prefix, module in modules.items()
            if module is not None
            for name, weight in module.named_parameters()
            if weight.grad is not None
        }
