"""Rollouts over the whole catalog: exact log-probabilities and gradients, expectations, resume, refusals."""

from dataclasses import dataclass

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.optim import Adam

from recpo.base.contracts import Objective, RewardFunction, StatePolicy
from recpo.base.types import LogProbs, LossOutput, catalog_slates
from recpo.batches.datamodule import FeedbackDataModule, Phases
from recpo.batches.slates import ImpressionLayout
from recpo.objectives import GRPO, MPO, CatalogPolicyGradient
from recpo.objectives.advantages import GroupNormalizedAdvantage
from recpo.policies.blocks import HSTUBlock
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.rewards.rewards import HitReward, RankAwareReward, WeightedSum
from recpo.training.inputs import InputBuilder
from recpo.training.kl_control import KLControl
from recpo.training.module import PreferenceModule
from recpo.training.networks import Networks
from recpo.training.options import CollapseLimits, LearningOptions, RolloutOptions
from recpo.training.rollout import roll_out
from recpo.training.trainer import TrainerOptions, TrainOptions
from tests.refusals import refused

LAYOUT = ImpressionLayout(history_length=12, slate_length=6)
CATALOG = RolloutOptions(candidates="catalog", batches=3, epochs=2)


@dataclass(frozen=True)
class ByItem(RewardFunction):
    """1 / id, unknown for item 7."""

    def __call__(self, batch, candidates):
        return (1.0 / candidates.item_ids).masked_fill(candidates.item_ids == 7, torch.nan)


@dataclass(frozen=True)
class ExpectedReward(Objective):
    """``-sum_i pi(i) r_i``, the simplest objective over the whole catalog."""

    @property
    def requires(self):
        return frozenset({"rewards", "reference", "entropy", "catalog"})

    def count(self, inputs):
        return inputs.logp.mask.any(1).sum()

    def __call__(self, inputs):
        denominator = self.count(inputs) if inputs.denominator is None else inputs.denominator
        return LossOutput(-(inputs.logp.policy[..., 0].exp() * inputs.rewards).sum() / denominator, {})


class Losses(Callback):
    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.values.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def new_policy(**options):
    torch.manual_seed(0)
    sizes = {"dim": 8, "layers": 1, "heads": 1, "max_history": 12, "dropout": 0.0}
    policy = CatalogSoftmaxPolicy(60, **{**sizes, **options})
    torch.nn.init.normal_(policy._output.weight[1:], std=0.7)
    return policy


@pytest.fixture
def batch(prepared):
    batch = next(iter(FeedbackDataModule(prepared, batch_size=16, layout=LAYOUT).train_dataloader()))
    empty = batch.slates.mask.clone()
    empty[3] = False  # a row that fills up a step
    return batch._replace(slates=batch.slates._replace(mask=empty))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"similarity": "cosine", "temperature": 0.1},
        {"tie_weights": False, "temperature": 2.0},
        {"block": HSTUBlock},
    ],
    ids=str,
)
def test_the_catalog_has_the_log_probability_and_the_gradient_of_every_item(batch, options):
    policy = new_policy(**options)
    own = policy.catalog_log_prob(batch)
    assert own.shape == (16, 60, 1)
    assert own.dtype == torch.float32
    torch.testing.assert_close(own.logsumexp(1), torch.zeros(16, 1), rtol=0, atol=1e-5)
    weight = torch.randn(16, 60, 1)
    others = [
        StatePolicy.catalog_log_prob(policy, batch),  # through log_prob of a slate of all items
        policy.catalog_log_prob(batch, policy.encode(batch.histories)),
    ]
    parameters = [p for p in policy.parameters() if p.requires_grad]
    gradients = torch.autograd.grad((own * weight).sum(), parameters, allow_unused=True)
    for other in others:
        torch.testing.assert_close(own, other, rtol=0, atol=2e-5)
        again = torch.autograd.grad((other * weight).sum(), parameters, allow_unused=True)
        for one, two in zip(gradients, again, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=2e-4)


def test_the_slate_is_the_whole_catalog_and_metrics_are_expectations(batch):
    policy = new_policy().eval()
    rollout = roll_out(policy, batch, RolloutOptions(candidates="catalog", monitor_reward=HitReward()), ByItem())
    slates = rollout.slates
    assert torch.equal(slates.item_ids, torch.arange(1, 61).expand(16, 60))
    assert torch.equal(slates.visible, batch.histories.lengths[:, None].expand(16, 60))
    assert not slates.mask[3].any()
    assert not slates.mask[:, 6].any()  # item 7: its reward is unknown
    assert slates.mask.sum() == 15 * 59
    kept = [row for row in range(16) if row != 3]
    p = rollout.logp[..., 0].exp().double()[kept]
    known = [item for item in range(60) if item != 6]
    reward = 1.0 / torch.arange(1, 61).double()
    expected = (p[:, known] @ reward[known]).sum() / p[:, known].sum()
    assert rollout.metrics["reward_mean"].item() == pytest.approx(expected.item(), rel=1e-5)
    assert rollout.metrics["draw_entropy"].item() == pytest.approx(-(p * p.log()).sum().item() / 15, rel=1e-5)
    liked = batch.slates.positive & batch.slates.mask
    hits = 0.0
    for place, row in enumerate(kept):
        hits += sum(p[place, item - 1].item() for item in set(batch.slates.item_ids[row][liked[row]].tolist()))
    assert rollout.metrics["monitor_reward_mean"].item() == pytest.approx(hits / 15, rel=1e-4)


def test_inputs_hold_the_catalog_under_every_policy(batch):
    policy = new_policy()
    options = LearningOptions(
        objective=ExpectedReward(), rollout=CATALOG, reward=ByItem(), old_policy="snapshot", anchor_coef=0.5
    )
    networks = Networks.of(policy, options)
    with torch.no_grad():
        networks.reference.policy.item_table.weight[1:] += 0.1
        policy.item_table.weight[1:] *= 1.2
    step = InputBuilder(networks, options)(batch)
    slates = catalog_slates(batch.histories, 60)
    for logp, scored in (
        (step.objective.logp.policy, policy),
        (step.objective.logp.old, networks.old),
        (step.objective.logp.reference, networks.reference),
    ):
        torch.testing.assert_close(logp, scored.log_prob(batch._replace(slates=slates)), rtol=0, atol=2e-5)
    torch.testing.assert_close(step.logged.logp.policy, policy.log_prob(batch), rtol=0, atol=2e-5)
    logp = step.objective.logp.policy[..., 0]
    expected = -(logp.exp() * logp).sum(1)[:, None].expand(16, 60)
    torch.testing.assert_close(step.objective.entropy, expected, rtol=0, atol=1e-6)
    assert not step.objective.logp.mask[3].any()
    old = step.objective.logp.old[..., 0]
    divergence = (old.exp() * (old - logp))[step.objective.logp.mask[..., 0]].sum() / 15
    assert step.metrics["approx_kl"].item() == pytest.approx(divergence.item(), rel=1e-5)
    assert divergence > 0


def test_the_exact_divergence_over_the_catalog_comes_from_its_log_probabilities(batch):
    objective, estimator = GRPO(kl_coef=0.3, kl_kind="full"), GroupNormalizedAdvantage()
    sources = {"advantage": estimator, "reward": HitReward(), "old_policy": "snapshot"}
    options = LearningOptions(objective=objective, rollout=CATALOG, **sources)
    networks = Networks.of(new_policy(), options)
    with torch.no_grad():
        networks.policy.item_table.weight[1:] += 0.3 * torch.randn(60, 8)
    found = InputBuilder(networks, options)(batch).objective
    slates = catalog_slates(batch.histories, 60)
    want = networks.policy.divergence(batch._replace(slates=slates), networks.reference.policy)
    torch.testing.assert_close(found.divergence, want, rtol=1e-4, atol=1e-5)
    got, exact = (
        torch.autograd.grad(x.sum(), networks.policy.item_table.weight, retain_graph=True)[0]
        for x in (found.divergence, want)
    )
    torch.testing.assert_close(got, exact, rtol=1e-3, atol=1e-3)


NO_LIMITS = CollapseLimits(max_kl=None)
READING = [
    # what reads the snapshot's log-probabilities, and whether anything does
    ({}, {}, False),
    ({"batches": 2}, {}, True),
    ({"epochs": 2}, {}, True),
    ({"batches": 2, "epochs": 2, "collapse": NO_LIMITS}, {}, False),
    ({"max_kl": 0.5}, {}, False),
    ({"batches": 2, "max_kl": 0.5, "collapse": NO_LIMITS}, {}, True),
    ({}, {"reference": "snapshot"}, True),
    ({}, {"objective": MPO(base="old")}, True),
    ({}, {"objective": GRPO(kl_coef=0.0), "advantage": GroupNormalizedAdvantage()}, True),
    ({}, {"objective": CatalogPolicyGradient(), "reward": HitReward()}, False),
]


@pytest.mark.parametrize(("rollout", "changes", "read"), READING, ids=str)
def test_the_snapshot_scores_the_catalog_only_where_something_reads_it(batch, monkeypatch, rollout, changes, read):
    phase = RolloutOptions(
        **{"candidates": "catalog", "batches": 1, "epochs": 1, "monitor_reward": HitReward()} | rollout
    )
    options = LearningOptions(
        **{"objective": MPO(), "rollout": phase, "reward": ByItem(), "old_policy": "snapshot"} | changes
    )
    networks = Networks.of(new_policy(), options)
    scored = []

    def scores(self, batch, states=None):
        scored.append(self)
        return CatalogSoftmaxPolicy.catalog_log_prob(self, batch, states)

    for policy in (networks.policy, networks.old.policy):
        monkeypatch.setattr(policy, "catalog_log_prob", scores.__get__(policy))
    step = InputBuilder(networks, options)(batch)
    assert [policy is networks.old.policy for policy in scored].count(True) == int(read)
    assert (step.objective.logp.old is None) == (not read)
    assert ("approx_kl" in step.metrics) == read
    # the policy has not moved: its expectations are those of the snapshot
    expected = roll_out(networks.old.policy, batch, phase, options.reward).metrics
    assert expected.keys() == {"reward_mean", "draw_entropy", "monitor_reward_mean"}
    for name, value in expected.items():
        torch.testing.assert_close(step.metrics[name], value)
    assert not any(value.requires_grad for value in step.metrics.values())
    options.objective(step.objective).loss.backward()


def test_the_divergence_that_ends_a_phase_is_exact_and_per_context():
    old = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]).log()[..., None]
    policy = torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.1, 0.8]]).log()[..., None]
    exact = 0.5 * torch.tensor(0.5 / 0.2).log().item() + 0.2 * torch.tensor(0.2 / 0.5).log().item()
    for limit, stops in ((exact / 2 * 0.99, True), (exact / 2 * 1.01, False)):
        rollout = RolloutOptions(candidates="catalog", max_kl=limit)
        control = KLControl(LearningOptions(objective=GRPO(), rollout=rollout))
        control.measure(LogProbs(policy, torch.ones(2, 3, 1, dtype=torch.bool), old), {})
        control.end_step(lambda value: value)
        assert control.stopped == stops


def fit(prepared, objective, *, resume=None, callbacks=(), steps=9, rollout=CATALOG, **module):
    data = FeedbackDataModule(prepared, batch_size=256, layout=LAYOUT)
    data.phases = Phases(rollout.batches, rollout.epochs)
    options = {
        "optimizer": lambda parameters: Adam(parameters, lr=0.01),
        "reward": ByItem(),
        "old_policy": "snapshot",
        "anchor_coef": 0.1,
        **module,
    }
    learner = PreferenceModule(
        new_policy(), LearningOptions(objective=objective, rollout=rollout, **options), slates=LAYOUT.traits
    )
    log = Losses()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    limits = {"max_epochs": -1, "max_steps": steps, "limit_val_batches": 0, "num_sanity_val_steps": 0}
    trainer = Trainer(callbacks=[log, *callbacks], enable_checkpointing=bool(callbacks), **quiet, **limits)
    trainer.fit(learner, datamodule=data, ckpt_path=resume, weights_only=True)
    return learner, log.values


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 2])
def test_resuming_in_the_middle_of_a_phase_equals_not_having_stopped(prepared, tmp_path, epochs):
    rollout = RolloutOptions(candidates="catalog", batches=3, epochs=epochs, max_kl=0.5)
    whole, log = fit(prepared, ExpectedReward(), rollout=rollout, reference="snapshot")
    keep = ModelCheckpoint(tmp_path, filename="state", every_n_train_steps=4, save_top_k=-1)
    fit(prepared, ExpectedReward(), rollout=rollout, reference="snapshot", steps=4, callbacks=[keep])
    state = tmp_path / "state.ckpt"
    resumed, again = fit(prepared, ExpectedReward(), rollout=rollout, reference="snapshot", resume=state)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert [step["train/loss"] for step in again] == [step["train/loss"] for step in log[4:]]
    assert log[-1]["train/reward_mean"] > log[0]["train/reward_mean"]  # the expectation rises


def test_an_objective_over_groups_takes_a_step(prepared):
    learner, log = fit(prepared, GRPO(kl_coef=0.1), steps=2, advantage=GroupNormalizedAdvantage())
    assert log[0]["train/approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert log[1]["train/approx_kl"] > 0
    before = new_policy()
    changed = [not torch.equal(a, b) for a, b in zip(before.parameters(), learner.policy.parameters(), strict=True)]
    assert any(changed)


def test_only_what_is_visited_again_is_kept(batch):
    for epochs, kept in ((1, 0), (2, 1)):
        options = LearningOptions(
            objective=ExpectedReward(),
            rollout=RolloutOptions(candidates="catalog", epochs=epochs),
            reward=ByItem(),
            old_policy="snapshot",
        )
        builder = InputBuilder(Networks.of(new_policy(), options), options)
        builder(batch)
        assert len(builder.rollouts._kept) == kept


DRAWING = [
    {"temperature": 0.5},
    {"top_p": 0.9},
    {"replacement": False},
    {"logged_share": 0.5},
    {"duplicates": "drop"},
    {"resamples": 1},
    {"preference": "best_vs_rest"},
]


@pytest.mark.parametrize("option", DRAWING, ids=str)
def test_options_of_drawing_are_refused(option):
    with refused("conflicting_options", f"rollout.{next(iter(option))}"):
        RolloutOptions(candidates="catalog", **option)


WHOLE_CATALOG = ("missing_option", "rollout.candidates")
REFUSALS = [
    ({"rollout": RolloutOptions()}, *WHOLE_CATALOG),
    ({"rollout": RolloutOptions(candidates="beam")}, *WHOLE_CATALOG),
    ({"rollout": None, "old_policy": "current"}, *WHOLE_CATALOG),
    ({"reward": WeightedSum([HitReward(), RankAwareReward()], [1.0, 1.0])}, *WHOLE_CATALOG),
    ({"policy": {"normalizer": "sampled"}}, "conflicting_options", "policy.normalizer"),
]


@pytest.mark.parametrize(("changes", "code", "field"), REFUSALS)
def test_what_cannot_be_computed_over_the_catalog_is_refused(changes, code, field):
    options = {"objective": ExpectedReward(), "rollout": CATALOG, "reward": ByItem(), "old_policy": "snapshot"}
    options |= changes
    policy = new_policy(**options.pop("policy", {}))
    with refused(code, field):
        PreferenceModule(policy, LearningOptions(**options), slates=LAYOUT.traits)


def test_a_sampled_normalizer_has_no_exact_log_probabilities_of_the_catalog(batch):
    with refused("conflicting_options", "policy.normalizer"):
        new_policy(normalizer="sampled").catalog_log_prob(batch)


def test_sharded_tables_are_refused(prepared):
    class Cuts:
        shards_tables = True

    options = {"data": FeedbackDataModule(prepared), "rollout": CATALOG}
    with refused("conflicting_options", "rollout.candidates"):
        TrainOptions(**options, trainer=TrainerOptions(strategy=Cuts()))
