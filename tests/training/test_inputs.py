"""Inputs that the module computes for an objective: only requested ones, from the right network, resumed exactly."""

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import Adam

from recpo.base.types import Slates
from recpo.batches.datamodule import FeedbackDataModule
from recpo.batches.preference_lists import PreferenceListLayout
from recpo.batches.slates import ImpressionLayout, SequenceLayout
from recpo.objectives import GBPO, GRPO, PPO, Likelihood, PairwiseReward, QLearning
from recpo.objectives.advantages import GroupNormalizedAdvantage, TernaryAdvantage
from recpo.objectives.gae import GAEAdvantage
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.rewards.rewards import LoggedReward
from recpo.training.inputs import InputBuilder
from recpo.training.module import PreferenceModule
from recpo.training.networks import Critic, ItemValue, Networks, StateValue, next_requests_of, states_at
from recpo.training.options import CriticOptions, LearningOptions
from recpo.training.rollout import with_hard_negatives
from tests.refusals import refused

SEQUENCES, IMPRESSIONS = SequenceLayout(history_length=12), ImpressionLayout(history_length=12, slate_length=6)
LISTS = PreferenceListLayout(history_length=12, hard=2)
GAE = {"advantage": GAEAdvantage(gamma=0.5), "reward": LoggedReward(), "old_policy": "snapshot", "snapshot_every": 3}
GROUPS = {"advantage": GroupNormalizedAdvantage(), "reward": LoggedReward(), "old_policy": "snapshot"}


def adam(parameters):
    return Adam(parameters, lr=0.01)


def new_policy(num_items=60, **options):
    torch.manual_seed(0)
    return CatalogSoftmaxPolicy(num_items, dim=8, layers=1, heads=1, max_history=12, **{"dropout": 0.0, **options})


def builder_of(policy, objective, **options):
    options = LearningOptions(objective=objective, **options)
    networks = Networks.of(policy, options)
    return InputBuilder(networks, options), networks


def batch_of(prepared, layout, batch_size=16):
    data = FeedbackDataModule(prepared, batch_size=batch_size, layout=layout)
    return next(iter(data.train_dataloader())), data.prepared.num_items


def fit(prepared, objective, layout, *, resume=None, callbacks=(), trainer=None, **module):
    data = FeedbackDataModule(prepared, batch_size=16, layout=layout)
    policy = new_policy(data.prepared.num_items, dropout=0.1)
    torch.manual_seed(1)
    learner = PreferenceModule(
        policy, LearningOptions(objective=objective, optimizer=adam, **module), slates=layout.traits
    )
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    limits = {"max_epochs": -1, "limit_val_batches": 0, "num_sanity_val_steps": 0}
    options = {**quiet, **limits, "enable_checkpointing": bool(callbacks), **(trainer or {})}
    lightning_trainer = Trainer(callbacks=list(callbacks), **options)
    lightning_trainer.fit(learner, datamodule=data, ckpt_path=resume, weights_only=True)
    return learner, lightning_trainer.callback_metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "layout", "module"),
    [
        (PPO(value_clip=0.2), SEQUENCES, GAE),
        (QLearning(), SEQUENCES, {"reward": LoggedReward(), "critic": CriticOptions(target_every=2)}),
        (PairwiseReward(), LISTS, {}),
    ],
    ids=["ppo", "q_learning", "pairwise_reward"],
)
def test_a_critic_resumes_exactly_and_is_not_part_of_the_policy(prepared, tmp_path, objective, layout, module):
    whole, _ = fit(prepared, objective, layout, trainer={"max_steps": 7}, **module)
    keep = ModelCheckpoint(tmp_path, filename="state", every_n_train_steps=4, save_top_k=-1)
    fit(prepared, objective, layout, callbacks=[keep], trainer={"max_steps": 4}, **module)
    resumed, _ = fit(prepared, objective, layout, resume=tmp_path / "state.ckpt", trainer={"max_steps": 7}, **module)
    state = resumed.state_dict()
    assert any(name.startswith("critic.") for name in state)
    assert state.keys() == whole.state_dict().keys()
    for name, value in whole.state_dict().items():
        assert torch.equal(value, state[name]), name
    own = {name.removeprefix("policy.") for name in state if name.startswith("policy.")}
    assert own == resumed.policy.state_dict().keys()


def test_one_encoding_serves_policy_critic_and_entropy(prepared):
    batch, num_items = batch_of(prepared, SEQUENCES)
    policy, objective = new_policy(num_items), PPO(entropy_coef=0.01)
    inputs, networks = builder_of(policy, objective, **{**GAE, "advantage": GAEAdvantage()})
    calls = {"policy": 0, "snapshot": 0}
    policy.encoder.register_forward_hook(lambda *_: calls.__setitem__("policy", calls["policy"] + 1))
    networks.old.policy.encoder.register_forward_hook(lambda *_: calls.__setitem__("snapshot", calls["snapshot"] + 1))
    found = inputs(batch).objective
    assert calls == {"policy": 1, "snapshot": 1}
    torch.testing.assert_close(found.logp.policy, policy.log_prob(batch))
    torch.testing.assert_close(found.entropy, policy.entropy(batch))
    torch.testing.assert_close(found.logp.old, found.logp.policy.detach())
    assert found.values.requires_grad
    assert not found.values_old.requires_grad
    assert not found.returns.requires_grad


@pytest.mark.parametrize("reference", ["frozen", "snapshot"])
def test_the_exact_divergence_needs_no_log_probabilities_of_the_reference(prepared, reference):
    batch, num_items = batch_of(prepared, IMPRESSIONS)
    objective = GRPO(kl_coef=0.5, kl_kind="full")
    inputs, networks = builder_of(new_policy(num_items), objective, **GROUPS, reference=reference)
    with torch.no_grad():
        networks.policy.item_table.weight[1:] += torch.randn(num_items, 8)
    found = inputs(batch).objective
    copied = networks.old if reference == "snapshot" else networks.reference
    assert (networks.reference is None) == (reference == "snapshot")
    assert networks.critic is None
    assert found.logp.reference is None
    torch.testing.assert_close(found.divergence, networks.policy.divergence(batch, copied.policy))
    assert found.divergence[batch.slates.mask].min() > 0
    output = objective(found)
    torch.testing.assert_close(output.metrics["kl_reference"], found.divergence[found.logp.mask].mean())
    (gradient,) = torch.autograd.grad(output.loss, found.divergence)
    torch.testing.assert_close(gradient.sum(), torch.tensor(0.5))


def test_advantages_and_returns_are_those_of_the_old_values(prepared):
    batch, num_items = batch_of(prepared, SEQUENCES)
    policy = new_policy(num_items)
    estimator = GAEAdvantage(gamma=0.9)
    inputs, networks = builder_of(policy, PPO(), **{**GAE, "advantage": estimator})
    with torch.no_grad():
        networks.old.head.output.bias.fill_(0.7)
        networks.critic.state_value.output.bias.fill_(-0.3)
    found = inputs(batch).objective
    kept = batch.slates.mask
    torch.testing.assert_close(found.values_old[kept], torch.full_like(found.values_old[kept], 0.7))
    torch.testing.assert_close(found.values[kept], torch.full_like(found.values[kept], -0.3))
    rewarded = batch._replace(slates=batch.slates._replace(reward=LoggedReward()(batch, batch.slates)))
    advantages, returns = estimator.advantages_and_returns(rewarded, found.values_old)
    torch.testing.assert_close(found.advantages, advantages)
    torch.testing.assert_close(found.returns, returns)


def test_nothing_is_computed_that_is_not_asked_for(prepared, monkeypatch):
    batch, num_items = batch_of(prepared, LISTS)
    policy = new_policy(num_items)
    inputs, networks = builder_of(policy, PairwiseReward())
    monkeypatch.setattr(policy, "log_prob", None)
    found, _, metrics, _ = inputs(batch)
    assert found.scores.requires_grad
    assert networks.reference is None
    assert networks.old is None
    assert (found.logp.policy == 0).all()
    assert metrics["rejected_per_list"] > 1
    batch, _ = batch_of(prepared, SEQUENCES)
    plain, networks = builder_of(new_policy(num_items), Likelihood())
    assert (networks.reference, networks.old, networks.critic) == (None, None, None)
    found, _, metrics, items = plain(batch)
    assert items is None
    assert [name for name, value in found._asdict().items() if value is not None] == ["logp"]
    assert metrics == {}


def test_a_head_may_leave_the_encoder_alone(prepared):
    batch, num_items = batch_of(prepared, LISTS)
    for shares in (True, False):
        policy = new_policy(num_items)
        inputs, networks = builder_of(policy, PairwiseReward(), critic=CriticOptions(shares_encoder=shares))
        found = inputs(batch).objective
        PairwiseReward()(found).loss.backward()
        assert (policy.encoder.start.grad is not None) == shares
        assert networks.critic.score.bias.grad.abs().sum() > 0


def test_an_unknown_reward_leaves_its_slate(prepared):
    batch, num_items = batch_of(prepared, IMPRESSIONS)
    batch.slates.label[0, 0] = torch.nan
    policy = new_policy(num_items)
    found = builder_of(policy, GRPO(kl_coef=0.0), **GROUPS)[0](batch).objective
    assert not found.logp.mask[0, 0]
    assert found.advantages[0, 0] == 0
    kept = batch.slates.mask.clone()
    kept[0, 0] = False
    quantile, dislike = batch.slates.label, batch.slates.dislike
    torch.testing.assert_close(found.rewards[kept], quantile[kept] - dislike[kept].float())
    neutral = LoggedReward(dislike_cost=2.0, unknown=0.5)(batch, batch.slates)
    assert neutral[0, 0] == 0.5
    torch.testing.assert_close(neutral[kept], quantile[kept] - 2 * dislike[kept].float())


def test_hard_negatives_are_the_top_ranks_without_what_the_user_likes(prepared):
    batch, num_items = batch_of(prepared, LISTS)
    policy = new_policy(num_items).train()
    longer = with_hard_negatives(batch, policy, 2)
    assert policy.training
    width = batch.slates.item_ids.shape[1]
    appended = longer.slates.item_ids[:, width:]
    ranked = policy.eval().recommend(batch.histories, num_items).item_ids
    for row in range(len(ranked)):
        barred = {*batch.known_positives[row].tolist(), *batch.slates.item_ids[row].tolist()}
        assert appended[row].tolist() == [item for item in ranked[row].tolist() if item not in barred][:2]
    assert not longer.slates.is_logged[:, width:].any()
    assert longer.slates.label[:, width:].isnan().all()
    assert (longer.slates.visible[:, width:] == batch.histories.lengths[:, None]).all()
    assert torch.equal(longer.slates.item_ids[:, :width], batch.slates.item_ids)


def test_hard_negatives_keep_every_column(prepared):
    batch, num_items = batch_of(prepared, LISTS)
    shape = batch.slates.item_ids.shape
    made = {
        name: torch.rand(shape) if name in ("reward", "logp_behavior") else torch.ones(shape, dtype=torch.bool)
        for name, column in batch.slates._asdict().items()
        if column is None
    }
    batch = batch._replace(slates=batch.slates._replace(**made))
    longer = with_hard_negatives(batch, new_policy(num_items), 2).slates
    for name, column in batch.slates._asdict().items():
        found = getattr(longer, name)
        torch.testing.assert_close(found[:, : shape[1]], column, rtol=0, atol=0, equal_nan=True)
        assert found.shape == (shape[0], shape[1] + 2), name
        if name not in ("item_ids", "visible", "mask"):
            appended = found[:, shape[1] :]
            assert (appended.isnan() if found.is_floating_point() else appended == 0).all(), name


def test_the_next_state_is_that_of_the_next_request():
    visible = torch.tensor([[0, 0, 2, 2, 3], [1, 4, 4, 0, 0]])
    mask = torch.tensor([[True] * 5, [True, True, True, False, False]])
    next_visible, is_last, positions = next_requests_of(Slates(mask.long(), visible, mask))
    assert next_visible.tolist() == [[2, 2, 3, 3, 0], [4, 0, 0, 0, 0]]
    assert is_last.tolist() == [[False] * 4 + [True], [False, True, True, True, True]]
    assert positions.tolist() == [0, 1, 2, 3, 5]


@pytest.mark.parametrize("double", [True, False])
def test_bellman_targets_equal_a_loop_over_the_catalog(prepared, double):
    batch, num_items = batch_of(prepared, SEQUENCES, batch_size=4)
    policy = new_policy(num_items)
    critic = Critic(policy, {"q_value"}, CriticOptions(gamma=0.8, double=double))
    with torch.no_grad():
        for head in (critic.q_value, critic.target.head):
            torch.nn.init.normal_(head.bias)
        critic.target.policy.encoder.start.add_(0.5)
    rewards = torch.randn(batch.slates.mask.shape)
    states, target_states = policy.encode(batch.histories), critic.target.policy.encode(batch.histories)
    targets = critic.q_targets(states, batch, rewards)
    items = torch.arange(1, num_items + 1)
    visible, mask = batch.slates.visible, batch.slates.mask
    for row in range(len(mask)):
        for place in range(int(mask[row].sum())):
            later = [int(v) for v in visible[row][mask[row]] if v > visible[row, place]]
            expected = rewards[row, place]
            if later:
                of_target = critic.target.head(target_states[row, later[0]].expand(num_items, -1), items)
                online = critic.q_value(states[row, later[0]].expand(num_items, -1), items)
                best = (online if double else of_target).argmax()
                expected = expected + 0.8 * of_target[best]
            torch.testing.assert_close(targets[row, place], expected.detach(), rtol=1e-4, atol=1e-5)


def test_the_best_item_is_found_block_by_block(monkeypatch):
    torch.manual_seed(0)
    head = ItemValue(50, 4, 8)
    torch.nn.init.normal_(head.item_table.weight[1:])
    head.bias.data.normal_()[0] = 100.0  # the padding item is never the best
    states = torch.randn(30, 4)
    monkeypatch.setattr("recpo.training.networks._ITEMS_PER_BLOCK", 7)
    monkeypatch.setattr("recpo.training.networks.BLOCK_BYTES", 7 * 4 * 5)
    items = torch.arange(1, 51).expand(30, 50)
    every = head(states[:, None].expand(30, 50, 4), items)
    assert head.best_items(states).tolist() == (every.argmax(1) + 1).tolist()


def test_heads_start_neutral_and_states_are_gathered():
    states = torch.randn(3, 6, 8)
    assert (StateValue(8, 4)(states) == 0).all()
    visible = torch.tensor([[0, 5], [1, 1], [2, 0]])
    assert torch.equal(states_at(states, visible), states.gather(1, visible[..., None].expand(-1, -1, 8)))


@pytest.mark.parametrize("options", [{"gamma": 1.0}, {"target_rate": 0.0}, {"target_every": 0}, {"hidden": 0}])
def test_impossible_critics_are_refused(options):
    with refused("out_of_range", f"critic.{next(iter(options))}"):
        CriticOptions(**options)


class Halved(InputBuilder):
    """All advantages count half."""

    def advantages(self, learned, states):
        found = super().advantages(learned, states)
        return found._replace(advantages=0.5 * found.advantages)


class HalvedModule(PreferenceModule):
    builder = Halved


def test_a_subclass_changes_one_step(prepared):
    batch, num_items = batch_of(prepared, IMPRESSIONS)
    options = LearningOptions(objective=GBPO(), advantage=TernaryAdvantage())
    plain, halved = (
        kind(new_policy(num_items), options).step_inputs(batch) for kind in (PreferenceModule, HalvedModule)
    )
    torch.testing.assert_close(halved.objective.advantages, 0.5 * plain.objective.advantages)
    torch.testing.assert_close(halved.objective.logp, plain.objective.logp)
