"""Training on the policy's own candidates: ratios, clipping, phases, exact resume, KL control, collapse, learning."""

import copy
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.optim import SGD, Adam

from recpo.base.contracts import RewardFunction
from recpo.batches.datamodule import FeedbackDataModule, Phases
from recpo.batches.slates import ImpressionLayout
from recpo.objectives import DAPO, DPO, GRPO, GSPO, PPO, DrGRPO, Reinforce, SoftmaxDPO
from recpo.objectives.advantages import GroupNormalizedAdvantage, LeaveOneOutAdvantage
from recpo.objectives.gae import GAEAdvantage
from recpo.ops.surrogate import is_clipped
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.training.callbacks import CollapseGuard
from recpo.training.inputs import InputBuilder
from recpo.training.module import PreferenceModule
from recpo.training.networks import Networks
from recpo.training.options import CollapseLimits, KLTarget, LearningOptions, RolloutOptions
from tests.refusals import refused

LAYOUT = ImpressionLayout(history_length=12, slate_length=6)
GROUPS = {"advantage": GroupNormalizedAdvantage()}
VALUES = {"advantage": GAEAdvantage(gamma=0.9)}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Taste(RewardFunction):
    """1 where item and last item of the history leave the same remainder, 0 elsewhere."""

    of: int = 4

    def __call__(self, batch, candidates):
        last = batch.histories.item_ids.gather(1, (batch.histories.lengths[:, None] - 1).clamp(min=0))
        return (candidates.item_ids % self.of == last % self.of).float()


@dataclass(frozen=True)
class Nothing(RewardFunction):
    """0 for everything."""

    def __call__(self, batch, candidates):
        return torch.zeros(candidates.item_ids.shape)


class Log(Callback):
    """The training metrics and the largest weight after every step."""

    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        metrics = {name.removeprefix("train/"): float(v) for name, v in trainer.callback_metrics.items()}
        self.steps.append(metrics | {"weights": [p.detach().clone() for p in pl_module.policy.parameters()]})

    def of(self, name):
        return [metrics.get(name) for metrics in self.steps]


def adam(parameters):
    return Adam(parameters, lr=0.01)


def sgd(parameters):
    return SGD(parameters, lr=1.0)


def new_policy(num_items=60, **options):
    torch.manual_seed(0)
    return CatalogSoftmaxPolicy(
        num_items, **{"dim": 8, "layers": 1, "heads": 1, "max_history": 12, "dropout": 0.0, **options}
    )


def fit(prepared, objective, rollout, *, policy=None, resume=None, callbacks=(), trainer=None, batch_size=16, **module):
    data = FeedbackDataModule(prepared, batch_size=batch_size, layout=LAYOUT)
    data.phases = Phases(rollout.batches, rollout.epochs)
    torch.manual_seed(1)
    options = {"optimizer": adam, "reward": Taste(), "old_policy": "snapshot", **module}
    options = LearningOptions(objective=objective, rollout=rollout, **options)
    learner = PreferenceModule(policy or new_policy(data.prepared.num_items), options, slates=LAYOUT.traits)
    log = Log()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    limits = {"max_epochs": -1, "max_steps": 8, "limit_val_batches": 0, "num_sanity_val_steps": 0}
    keeps = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    options = {**quiet, **limits, "enable_checkpointing": keeps, **(trainer or {})}
    Trainer(callbacks=[log, *callbacks], **options).fit(learner, datamodule=data, ckpt_path=resume, weights_only=True)
    return learner, log


def test_the_ratio_is_one_at_the_first_batch_of_a_phase_and_not_after_it(prepared):
    _, log = fit(prepared, GRPO(kl_coef=0.0), RolloutOptions(batches=2, epochs=2), **GROUPS)
    assert len(log.steps) == 8
    for step, deviation in enumerate(log.of("ratio_std")):
        if step % 4 == 0:
            assert deviation < 1e-5
            assert log.of("ratio_max")[step] == pytest.approx(1.0, abs=1e-5)
            assert log.of("approx_kl")[step] == pytest.approx(0.0, abs=1e-5)
        else:
            assert deviation > 1e-3


def test_clipping_acts_and_clipped_items_have_no_gradient(prepared):
    _, log = fit(prepared, GRPO(kl_coef=0.0), RolloutOptions(batches=1, epochs=4), **GROUPS)
    assert log.of("clip_fraction")[0] == 0
    assert log.of("clip_fraction")[3] > 0.02
    batch = next(iter(FeedbackDataModule(prepared, batch_size=16, layout=LAYOUT).train_dataloader()))
    policy, objective = new_policy(), GRPO(kl_coef=0.0)
    sources = {**GROUPS, "reward": Taste(), "old_policy": "snapshot", "rollout": RolloutOptions()}
    options = LearningOptions(objective=objective, **sources)
    builder = InputBuilder(Networks.of(policy, options), options)
    builder(batch)
    with torch.no_grad():
        policy.item_table.weight[1:] += 0.3 * torch.randn(60, 8)
    inputs = builder(batch).objective
    loss = objective(inputs).loss
    (gradient,) = torch.autograd.grad(loss, inputs.logp.policy)
    advantages = inputs.advantages[..., None]
    clipped = is_clipped(inputs.logp.policy - inputs.logp.old, advantages, 0.2, 0.2)
    assert clipped.any()
    assert (gradient[clipped] == 0).all()
    assert (gradient[~clipped & (advantages != 0)] != 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "rollout", "module", "stop_after"),
    [
        (
            PPO(kl_coef=0.1, value_clip=0.2),
            RolloutOptions(batches=3, epochs=2),
            {**VALUES, "adaptive_kl": KLTarget(1e-3, 100)},
            4,
        ),
        (DAPO(), RolloutOptions(batches=3, epochs=2, resamples=2, logged_share=0.25, max_kl=0.02), GROUPS, 10),
        (SoftmaxDPO(), RolloutOptions(batches=3, epochs=2, candidates="beam", preference="best_vs_rest"), {}, 4),
    ],
    ids=["ppo", "dapo", "iterative"],
)
def test_resuming_in_the_middle_of_a_phase_equals_not_having_stopped(
    prepared, tmp_path, objective, rollout, module, stop_after
):
    module = {**module, **({"reference": "snapshot"} if isinstance(objective, SoftmaxDPO) else {})}
    options = {"batch_size": 256, **module}
    whole, log = fit(prepared, objective, rollout, trainer={"max_steps": stop_after + 5}, **options)
    keep = ModelCheckpoint(tmp_path, filename="state", every_n_train_steps=stop_after, save_top_k=-1)
    fit(prepared, objective, rollout, callbacks=[keep], trainer={"max_steps": stop_after}, **options)
    state = tmp_path / "state.ckpt"
    resumed, again = fit(prepared, objective, rollout, resume=state, trainer={"max_steps": stop_after + 5}, **options)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert again.of("loss") == log.of("loss")[stop_after:]


@pytest.mark.slow
def test_accumulated_micro_batches_keep_phases_whole(prepared):
    seen = []

    class Rows(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append((trainer.global_step, tuple(batch.context_ids.tolist())))

    trainer = {"accumulate_grad_batches": 3, "max_epochs": 1, "max_steps": -1}
    fit(
        prepared,
        GRPO(),
        RolloutOptions(batches=4, epochs=2),
        trainer=trainer,
        callbacks=[Rows()],
        batch_size=64,
        **GROUPS,
    )
    by_step = {}
    for step, rows in seen:
        by_step.setdefault(step, []).append(rows)
    steps = list(by_step.values())
    assert {len(step) for step in steps} == {3}
    for start in range(0, len(steps), 8):
        phase = steps[start : start + 8]
        half = len(phase) // 2
        assert sorted(phase[:half]) == sorted(phase[half:])


def test_a_phase_that_moved_too_far_ends_early(prepared):
    rollout = RolloutOptions(batches=1, epochs=4, max_kl=1e-6)
    _, log = fit(prepared, GRPO(kl_coef=0.0), rollout, **GROUPS)
    same = [
        all(torch.equal(a, b) for a, b in zip(before["weights"], after["weights"], strict=True))
        for before, after in zip(log.steps, log.steps[1:], strict=False)
    ]
    # the second step measures how far the first one went; the next phase begins with step 4
    assert same == [True, True, True, False, True, True, True]
    assert log.of("step_skipped")[2:6] == [1.0, 1.0, 0.0, 0.0]


def test_the_adaptive_coefficient_moves_and_is_applied(prepared):
    module = {**GROUPS, "adaptive_kl": KLTarget(target=1e-6, horizon=100)}
    learner, log = fit(prepared, GRPO(kl_coef=0.1), RolloutOptions(), **module)
    coefficients = log.of("kl_coef")
    assert coefficients[0] == pytest.approx(0.1)
    assert coefficients[-1] > 0.12
    assert learner._kl.objective.kl_coef > coefficients[-1]
    _, low = fit(prepared, GRPO(kl_coef=0.1), RolloutOptions(), **{**module, "adaptive_kl": KLTarget(10.0, 100)})
    assert low.of("kl_coef")[-1] < 0.09


@pytest.mark.parametrize("objective", [GRPO(kl_coef=0.0), GSPO(), DAPO(), Reinforce(off_policy=True)], ids=str)
def test_groups_of_equal_rewards_give_no_gradient(prepared, objective):
    policy = new_policy()
    before = copy.deepcopy(policy.state_dict())
    rollout = RolloutOptions(resamples=1 if isinstance(objective, DAPO) else 0)
    _, log = fit(prepared, objective, rollout, policy=policy, reward=Nothing(), optimizer=sgd, **GROUPS)
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    share = "dropped_group_share" if isinstance(objective, DAPO) else "zero_group_share"
    assert log.of(share)[0] == 1


def test_the_anchor_is_the_likelihood_of_what_the_log_shows(prepared):
    policy = new_policy()
    batch = next(iter(FeedbackDataModule(prepared, batch_size=16, layout=LAYOUT).train_dataloader()))
    expected = -(policy.log_prob(batch)[..., 0].sum() / batch.slates.mask.sum()).item()
    _, log = fit(prepared, PPO(), RolloutOptions(), policy=policy, anchor_coef=0.5, **VALUES)
    assert log.of("anchor_nll")[0] == pytest.approx(expected, rel=1e-5)
    assert log.of("anchor_nll")[-1] != pytest.approx(expected, rel=1e-5)


def test_a_monitor_reward_is_logged_and_changes_nothing(prepared):
    alone, _ = fit(prepared, GRPO(), RolloutOptions(), **GROUPS)
    judged, log = fit(prepared, GRPO(), RolloutOptions(monitor_reward=Taste(of=2)), **GROUPS)
    assert all(torch.equal(a, b) for a, b in zip(alone.policy.parameters(), judged.policy.parameters(), strict=True))
    assert 0 < log.of("monitor_reward_mean")[0] != log.of("reward_mean")[0]


@pytest.mark.parametrize(
    ("limits", "module", "refusal"),
    [
        ({"min_entropy": 100.0}, {}, ("diverged", "train/draw_entropy")),
        ({"min_unique_share": 1.0}, {}, ("diverged", "train/unique_share")),
        ({"max_kl": 1e-6}, {}, ("diverged", "train/approx_kl")),
        ({"zero_group_steps": 3}, {"reward": Nothing()}, ("diverged", "train/zero_group_share")),
    ],
    ids=["entropy", "unique", "kl", "groups"],
)
def test_a_collapsed_run_stops_and_says_which_number_went_where(prepared, limits, module, refusal):
    guard = CollapseGuard(CollapseLimits(**limits), "val/NDCG@10")
    with refused(*refusal):
        fit(prepared, GRPO(kl_coef=0.0), RolloutOptions(), callbacks=[guard], **{**GROUPS, **module})


def test_a_ranking_that_falls_apart_stops_the_run(prepared):
    guard = CollapseGuard(CollapseLimits(min_ndcg_share=0.5), "val/NDCG@10")
    trainer = {"num_sanity_val_steps": -1, "limit_val_batches": 1.0, "val_check_interval": 2}

    class Break(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            # everybody gets the same ten items from here on
            pl_module.policy.item_table.weight.data[1:51] = 0.0
            pl_module.policy.encoder.start.data.zero_()
            pl_module.validated = {}
            pl_module._validation.update = lambda policy, batch: None

    with refused("diverged", "val/NDCG@10"):
        fit(prepared, GRPO(), RolloutOptions(), callbacks=[Break(), guard], trainer=trainer, **GROUPS)


LEARNERS = {
    "grpo": (GRPO(), {}, GROUPS),
    "dr_grpo": (DrGRPO(), {}, {"advantage": GroupNormalizedAdvantage(scale=False)}),
    "gspo": (GSPO(clip_low=0.2, clip_high=0.28), {}, GROUPS),
    "ppo": (PPO(dual_clip=3.0, entropy_coef=0.001), {}, VALUES),
    "dapo": (DAPO(), {"resamples": 2}, GROUPS),
    "reinforce": (Reinforce(off_policy=True), {}, {"advantage": LeaveOneOutAdvantage()}),
    "without_replacement": (GRPO(), {"replacement": False}, GROUPS),
    "iterative_dpo": (SoftmaxDPO(), {"candidates": "beam", "preference": "best_vs_rest"}, {"reference": "snapshot"}),
    "iterative_pairs": (DPO(beta=0.5), {"preference": "best_vs_worst"}, {"reference": "snapshot"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNERS)
def test_the_expected_reward_rises(prepared, name):
    objective, rollout, module = LEARNERS[name]
    policy = new_policy(dim=16)
    batches = list(FeedbackDataModule(prepared, batch_size=64, layout=LAYOUT).train_dataloader())[:4]

    def expected():
        """Of one draw, over the whole catalog: nothing is sampled."""
        with torch.no_grad():
            values = []
            for batch in batches:
                ranked = policy.eval().recommend(batch.histories, 60)
                rewards = Taste()(batch, batch.slates._replace(item_ids=ranked.item_ids))
                values.append((ranked.scores.exp() * rewards).sum(1))
            return torch.cat(values).mean().item()

    before = expected()
    options = {"policy": policy, "batch_size": 64, "trainer": {"max_steps": 20}, **module}
    rollout = RolloutOptions(group_size=8, **rollout)
    fit(prepared, objective, rollout, optimizer=lambda parameters: Adam(parameters, lr=0.02), **options)
    assert expected() > before + 0.04


@pytest.fixture(scope="module")
def moved(prepared):
    """How far a policy moves under penalties in the loss and in the reward, and the log of its training."""

    @cache
    def by(in_loss, in_reward):
        objective, module = PPO(kl_coef=in_loss, value_coef=0.0), {"advantage": LeaveOneOutAdvantage()}
        rollout = RolloutOptions(batches=1, epochs=1, group_size=32, kl_coef=in_reward)
        learner, log = fit(prepared, objective, rollout, trainer={"max_steps": 20}, **module)
        batch = next(iter(FeedbackDataModule(prepared, batch_size=64, layout=LAYOUT).train_dataloader()))
        with torch.no_grad():
            return learner.policy.divergence(batch, new_policy(learner.policy.num_items)).max().item(), log

    return by


@pytest.mark.slow
@pytest.mark.parametrize("where", ["loss", "reward", "both"])
def test_a_large_penalty_keeps_the_policy_at_the_reference(moved, where):
    free, _ = moved(0.0, 0.0)
    kept, log = moved(20.0 if where != "reward" else 0.0, 20.0 if where != "loss" else 0.0)
    assert kept < 0.2 * free
    assert ("kl_in_reward" in log.steps[0]) == (where != "loss")
    assert ("kl_reference" in log.steps[0]) == (where != "reward")


@pytest.mark.slow
def test_the_coefficient_in_the_reward_adapts_and_resumes(prepared, tmp_path):
    rollout = RolloutOptions(batches=2, epochs=2, kl_coef=0.1)
    options = {"adaptive_kl": KLTarget(1e-4, 100), **VALUES}
    whole, log = fit(prepared, PPO(), rollout, trainer={"max_steps": 9}, **options)
    # in the first phase, the policy that draws is the reference
    assert log.of("kl_in_reward")[:4] == pytest.approx([0.0] * 4, abs=1e-5)
    assert log.of("kl_coef")[:5] == pytest.approx([0.1 * 0.8**step for step in range(5)])
    assert len(set(log.of("kl_coef"))) == 9
    keep = ModelCheckpoint(tmp_path, filename="state", every_n_train_steps=6, save_top_k=-1)
    fit(prepared, PPO(), rollout, callbacks=[keep], trainer={"max_steps": 6}, **options)
    resumed, again = fit(prepared, PPO(), rollout, resume=tmp_path / "state.ckpt", trainer={"max_steps": 9}, **options)
    assert again.of("kl_coef") == log.of("kl_coef")[6:]
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


@pytest.mark.parametrize(
    ("rollout", "refusal"),
    [
        ({"kl_coef": -0.1}, ("out_of_range", "rollout.kl_coef")),
        ({"kl_coef": 0.1, "candidates": "beam"}, ("conflicting_options", "rollout.kl_coef")),
        ({"kl_coef": 0.1, "candidates": "catalog"}, ("conflicting_options", "rollout.kl_coef")),
        ({"kl_coef": 0.1, "preference": "best_vs_rest"}, ("conflicting_options", "rollout.preference")),
    ],
    ids=str,
)
def test_a_penalty_in_the_reward_needs_draws(rollout, refusal):
    with refused(*refusal):
        RolloutOptions(**rollout)


CONTRADICTIONS = [
    (GRPO(), {"rollout": RolloutOptions(kl_coef=0.1), "adaptive_kl": KLTarget(0.1)}, "conflicting_options"),
    (GSPO(), {"adaptive_kl": KLTarget(0.1)}, "missing_option"),
]


@pytest.mark.parametrize(("objective", "options", "code"), CONTRADICTIONS)
def test_an_adaptive_coefficient_is_one_coefficient(objective, options, code):
    options = {"rollout": RolloutOptions(), "reward": Taste(), "old_policy": "snapshot", **GROUPS, **options}
    with refused(code, "adaptive_kl"):
        PreferenceModule(new_policy(), LearningOptions(objective=objective, **options), slates=LAYOUT.traits)
