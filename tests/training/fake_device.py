"""One training step of every objective, an evaluation and a rollout on fake tensors of another device.

Fake tensors have shapes, types and a device, and no values. On a device that is not the CPU, an operation that mixes
devices fails as it would on a GPU, and so does one that needs a value on the CPU (``.item()``, a branch, a shape that
depends on data): there, a GPU would make the training wait. PyTorch cannot forget a device that was added to it: use
it in a process of its own.
"""

from __future__ import annotations

import copy
import traceback
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import AdamW
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from recpo.base.errors import RecpoError
from recpo.batches.datamodule import FeedbackDataModule
from recpo.log.prepared import Prepared
from recpo.objectives import GRPO
from recpo.objectives.advantages import GroupNormalizedAdvantage, PrefixGroupAdvantage
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.policies.semantic_id import SemanticIdPolicy
from recpo.rewards.rewards import FactorReward
from recpo.training.module import PreferenceModule
from recpo.training.options import LearningOptions, RolloutOptions
from tests.training.test_objectives_learn import (
    BYSTANDERS,
    GROUPS,
    HISTORY,
    IMPRESSIONS,
    LEARNERS,
    ON_CATALOGS,
    WHOLE_CATALOG,
)

DEVICE = "gpu"
#: Cases that policies of semantic ids are tried with: a path of their own through the step, or a refusal.
OF_CODES = {
    "gbpo", "gbpo_logged", "softmax_dpo_hard", "ppo", "mpo_draws", "mpo_old", "pairwise_reward", "q_learning",
    "grpo_rollout", "grpo_learned_reward", "grpo_tokens",
}  # fmt: skip
#: Cases of ``test_objectives_learn`` whose steps are those of others, with another formula or coefficient at the end.
SAME_STEP = {"dpo_ipo", "margin_without_likelihood", "softmax_dpo_grades"}


def moved(module, mode):
    """Replaces the parameters and buffers of a module by fake ones on the device; shared ones stay shared."""
    made = {}

    def of(tensor):
        if id(tensor) not in made:
            made[id(tensor)] = mode.from_tensor(tensor.detach()).to(DEVICE)
        return made[id(tensor)]

    weights = {}
    for part in module.modules():
        for name, weight in list(part._parameters.items()):
            if weight is not None:
                if id(weight) not in weights:
                    weights[id(weight)] = nn.Parameter(of(weight), weight.requires_grad)
                part._parameters[name] = weights[id(weight)]
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = of(buffer)
    return module


class Quiet(PreferenceModule):
    """Logs nothing, and lies on the device."""

    def log(self, *args, **kwargs):
        """Logs nothing."""

    def log_dict(self, *args, **kwargs):
        """Logs nothing."""

    @property
    def device(self):
        return torch.device(DEVICE)


def step(prepared, policy, objective, layout, uploads, **module):
    """Two steps of training; the second one must not copy constants to the device."""
    mode = uploads.mode
    data = FeedbackDataModule(prepared, batch_size=16, layout=layout, seed=0)
    options = LearningOptions(objective=objective, optimizer=lambda p: AdamW(p, lr=1e-3, fused=True), seed=0, **module)
    learner = Quiet(policy, options, slates=layout.traits)
    strategy = SimpleNamespace(root_device=torch.device("cpu"), reduce=lambda value, reduce_op: value)
    learner._trainer = SimpleNamespace(
        datamodule=data,
        world_size=1,
        accumulate_grad_batches=1,
        global_step=0,
        current_epoch=0,
        global_rank=0,
        strategy=strategy,
        lightning_module=learner,
        sanity_checking=False,
        estimated_stepping_batches=10,
        node_rank=0,
        local_rank=0,
    )
    data.trainer = learner._trainer
    uploads.allowed = True
    learner.setup("fit")
    batch = next(iter(data.train_dataloader()))
    with mode:
        moved(learner, mode)
        optimizer = learner.configure_optimizers()
        optimizer = optimizer["optimizer"] if isinstance(optimizer, dict) else optimizer
        batch = tree_map(lambda part: mode.from_tensor(part).to(DEVICE) if isinstance(part, Tensor) else part, batch)
        learner.train()
        for number in range(2):
            uploads.allowed = number == 0  # what is copied to the device once is kept there
            learner._trainer.global_step = number
            learner.on_train_batch_start(batch, number)
            loss = learner.training_step(batch, number)
            optimizer.zero_grad()
            loss.backward()
            learner.on_before_optimizer_step(optimizer)
            optimizer.step()
        assert loss.device.type == DEVICE


class Uploads:
    """Makes ``torch.tensor`` work on the device, and refuses it where a step would wait for a constant."""

    allowed = True

    def __init__(self, mode):
        self.mode, self.real = mode, torch.tensor

    def __call__(self, data, *, dtype=None, device=None, **more):
        if device is None or torch.device(device).type != DEVICE:
            return self.real(data, dtype=dtype, device=device, **more)
        assert self.allowed, "a constant is copied to the device in every step"
        return self.mode.from_tensor(self.real(data, dtype=dtype, **more)).to(device)


def cases_of(factors, mode):
    """Name -> objective, layout, options: every objective, and rollouts."""
    found = {
        name: (objective, layout, {key: value for key, value in module.items() if key != "rate"})
        for name, (objective, layout, module) in (LEARNERS | BYSTANDERS).items()
        if name not in SAME_STEP
    }
    reward = FactorReward(factors)
    model = reward._opened
    reward.__dict__["_opened"] = replace(model, **{name: mode.from_tensor(one) for name, one in model.tensors.items()})
    for name, objective in ON_CATALOGS.items():
        found[name] = (objective, IMPRESSIONS, {**WHOLE_CATALOG, "reward": reward})
    group = {"rollout": RolloutOptions(group_size=4), "old_policy": "snapshot", "reward": reward}
    found["grpo_rollout"] = (GRPO(kl_coef=0.1), IMPRESSIONS, {**group, "advantage": GroupNormalizedAdvantage()})
    learned = {"reward": reward, "old_policy": "snapshot", "advantage": GroupNormalizedAdvantage()}
    found["grpo_learned_reward"] = (GRPO(), IMPRESSIONS, learned)
    found["grpo_tokens"] = (GRPO(), IMPRESSIONS, {**GROUPS, "advantage": PrefixGroupAdvantage()})
    return found


def policies_of(num_items, codes):
    """Both families."""
    torch.manual_seed(0)
    common = {"num_items": num_items, "dim": 16, "layers": 1, "heads": 1, "max_history": HISTORY, "dropout": 0.1}
    semantic = SemanticIdPolicy(codes=codes, decoder_layers=1, **common)
    return {"catalog": CatalogSoftmaxPolicy(**common), "semantic": semantic}


def place_of(error):
    """The last two lines of recpo that led to an error."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if "recpo" in one.filename.split("/")]
    return "; ".join(f"{'/'.join(one.filename.split('/')[-2:])}: {one.line}" for one in frames[-2:])


def steps_on_a_device(prepared, factors, codes):
    """Case to error; None = it ran."""
    found = {}
    _setup_privateuseone_for_python_backend(rename=DEVICE)
    torch.gpu.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    uploads = torch.tensor = Uploads(mode)
    policies, cases = policies_of(Prepared.open(prepared).num_items, codes), cases_of(factors, mode)
    for family, policy in policies.items():
        for name, (objective, layout, module) in cases.items():
            if family == "semantic" and name not in OF_CODES:
                continue
            failed = None
            try:
                step(prepared, copy.deepcopy(policy), objective, layout, uploads, **module)
            except RecpoError as error:
                failed = f"refused: {error.code}"
            except Exception as error:
                failed = f"{type(error).__name__}: {str(error).splitlines()[0][:200]} at {place_of(error)}"
            found[f"{family} {name}"] = failed
    return found
