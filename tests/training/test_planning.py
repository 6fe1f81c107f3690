"""A step does not read tensor values: it runs on the meta device, whose tensors have none."""

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch.utils._python_dispatch import TorchDispatchMode

from recpo.base.contracts import RewardFunction
from recpo.batches.datamodule import Contents, FeedbackDataModule
from recpo.batches.preference_lists import PreferenceListLayout
from recpo.batches.slates import ImpressionLayout, SequenceLayout
from recpo.objectives import DPO, GBPO, GRPO, GSPO, Likelihood, QLearning, SoftmaxDPO
from recpo.objectives.advantages import GroupNormalizedAdvantage, PrefixGroupAdvantage, TernaryAdvantage
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.rewards.rewards import HitReward, LoggedReward
from recpo.training.inputs import InputBuilder
from recpo.training.networks import Networks
from recpo.training.options import LearningOptions, RolloutOptions
from recpo.training.planning import StepPlanner

SEQUENCES, REQUESTS = SequenceLayout(12), ImpressionLayout(24, 6)
LISTS, HARD = PreferenceListLayout(24, uniform=3), PreferenceListLayout(24, skipped=2, fill=False, hard=3)


@dataclass(frozen=True)
class RewardOfItems(RewardFunction):
    """A reward that the planner does not compute; it knows nothing about every fifth item."""

    def __call__(self, batch, candidates):
        return torch.where(candidates.item_ids % 5 == 0, torch.nan, candidates.item_ids % 7 / 7)


GROUPS = {
    "advantage": GroupNormalizedAdvantage(), "reward": HitReward(), "old_policy": "snapshot",
    "rollout": RolloutOptions(group_size=4, epochs=1),
}  # fmt: skip
TOKENS = {"reward": LoggedReward(), "advantage": PrefixGroupAdvantage(), "rollout": None}
STEPS = {
    "pre-training": (Likelihood(), SEQUENCES, {}),
    "GBPO": (GBPO(), SEQUENCES, {"advantage": TernaryAdvantage(0.25)}),
    "GBPO by the log's positives": (GBPO(), REQUESTS, {"advantage": TernaryAdvantage()}),
    "DPO": (DPO(), LISTS, {}),
    "softmax-DPO": (SoftmaxDPO(), LISTS, {}),
    "GRPO": (GRPO(kl_coef=0.1), REQUESTS, GROUPS),
    "GSPO": (GSPO(), REQUESTS, GROUPS),
    "hard negatives": (SoftmaxDPO(), HARD, {}),
    "hard negatives with rewards": (SoftmaxDPO(gap_weighted=True), HARD, {"reward": LoggedReward(unknown=0.0)}),
    "Q-learning": (QLearning(), SEQUENCES, {"reward": LoggedReward()}),
    "a learned reward": (GRPO(), REQUESTS, {**GROUPS, "reward": RewardOfItems(), "rollout": None}),
    "advantages of tokens": (GRPO(), REQUESTS, {**GROUPS, **TOKENS}),
}
STEP = pytest.mark.parametrize("name", STEPS)
#: Operations whose result has a size, or a value for Python, that only the device knows.
READS_VALUES = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_consecutive",
    "unique_dim", "repeat_interleave", "item",
}  # fmt: skip


def step_of(name, prepared, planned=True, **options):
    """A batch, and what computes the inputs and the loss of a step."""
    objective, layout, more = STEPS[name]
    data = FeedbackDataModule(prepared, batch_size=16, layout=layout)
    torch.manual_seed(0)
    policy = CatalogSoftmaxPolicy(
        data.prepared.num_items, dim=8, layers=1, heads=1, max_history=24, attention_length=12, profile=True, fold_in=2,
        dropout=0.0,
    )  # fmt: skip
    learning = LearningOptions(objective=objective, **more, **options)
    hard = layout.traits.hard_negatives
    data.contents = Contents(planner=StepPlanner(policy, learning, hard) if planned else None)
    networks = Networks.of(policy, learning)
    torch.nn.init.normal_(policy.item_table.weight, std=0.3)  # it has moved from the copies

    def loss_of(batch):
        inputs = InputBuilder(networks, learning, hard)
        if inputs.rollouts is not None:
            inputs.rollouts.begin(0)
        return objective(inputs(batch).objective).loss

    return next(iter(data.train_dataloader())), networks, loss_of


@STEP
def test_a_step_waits_for_no_value_of_the_device(prepared, name, monkeypatch):
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # there is none for this device
    batch, networks, loss_of = step_of(name, prepared)
    for network in (networks.policy, networks.reference, networks.old, networks.critic):
        if network is not None:
            network.to("meta")
    loss = loss_of(move_data_to_device(batch, torch.device("meta")))
    loss.backward()
    assert networks.policy.item_table.weight.grad.is_meta


@STEP
def test_the_plan_changes_no_loss_and_no_gradient(prepared, name):
    results = []
    for planned in (True, False):
        batch, networks, loss_of = step_of(name, prepared, planned)
        assert (batch.plan is not None) is planned
        loss = loss_of(batch)
        loss.backward()
        results.append([loss.detach(), *(weight.grad for weight in networks.policy.parameters())])
    assert results[0][1].abs().sum() > 0
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


class Counting(TorchDispatchMode):
    """Counts the operations that read values."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in READS_VALUES or by_mask:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


def test_without_a_plan_a_step_does_wait(prepared):
    batch, _, loss_of = step_of("GBPO", prepared, planned=False)
    with Counting() as counted:
        loss_of(batch).backward()
    assert {"nonzero", "unique_consecutive"} <= set(counted.found)
