"""Rollouts of a generating policy: several tokens per item, inside the trie or not."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from recpo.artifacts.semantic_codes import Codes
from recpo.base.contracts import RewardFunction
from recpo.batches.datamodule import FeedbackDataModule
from recpo.batches.slates import ImpressionLayout
from recpo.objectives import GRPO, GSPO, PPO
from recpo.objectives.advantages import GatedAdvantage, GroupNormalizedAdvantage, PrefixGroupAdvantage
from recpo.objectives.gae import GAEAdvantage
from recpo.policies.semantic_id import SemanticIdPolicy
from recpo.rewards.rewards import ValidityReward
from recpo.training.inputs import InputBuilder
from recpo.training.networks import Networks
from recpo.training.options import LearningOptions, RolloutOptions
from recpo.training.rollout import roll_out

SIZES = (5, 4, 6)


class Even(RewardFunction):
    """1 for even items."""

    def __call__(self, batch, candidates):
        reward = (candidates.item_ids % 2 == 0).float()
        return reward.masked_fill(candidates.item_ids == 0, torch.nan)


@pytest.fixture(scope="module")
def codes(tmp_path_factory):
    root = tmp_path_factory.mktemp("codes") / "codes"
    root.mkdir()
    tuples = np.random.default_rng(0).permutation(int(np.prod(SIZES)))[:60]
    table = np.stack(np.unravel_index(tuples, SIZES), 1)
    Codes(table, SIZES, "checksum").save(root, pa.array(range(60)), {})
    return root


@pytest.fixture
def batch(prepared):
    layout = ImpressionLayout(history_length=12, slate_length=6)
    return next(iter(FeedbackDataModule(prepared, batch_size=16, layout=layout).train_dataloader()))


def new_policy(codes, **options):
    torch.manual_seed(0)
    return SemanticIdPolicy(60, codes=codes, dim=16, max_history=12, dropout=0.0, beam_width=60, **options)


@pytest.mark.parametrize("normalizer", ["trie", "codebook"])
@pytest.mark.parametrize(
    "options", [{}, {"replacement": False}, {"candidates": "beam"}, {"logged_share": 0.5}], ids=str
)
def test_log_probabilities_of_draws_are_those_that_training_computes(codes, batch, normalizer, options):
    policy = new_policy(codes, normalizer=normalizer).eval()
    torch.manual_seed(1)
    rollout = roll_out(policy, batch, RolloutOptions(**options), Even())
    kept = rollout.slates.mask
    assert rollout.logp.shape == (16, 8, 3)
    assert kept.float().mean() > (0.99 if normalizer == "trie" or "candidates" in options else 0.2)
    assert 0 < rollout.metrics["valid_share"] <= 1
    again = policy.log_prob(batch._replace(slates=rollout.slates))
    torch.testing.assert_close(rollout.logp[kept], again[kept], rtol=0, atol=1e-5)


def builder_of(policy, objective, reward, rollout, advantage=GroupNormalizedAdvantage()):  # noqa: B008  frozen
    sources = {"advantage": advantage, "reward": reward, "old_policy": "snapshot", "rollout": rollout}
    options = LearningOptions(objective=objective, **sources)
    networks = Networks.of(policy, options)
    return InputBuilder(networks, options), networks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "advantage"),
    [
        (GRPO(), GroupNormalizedAdvantage()),
        (GSPO(), GroupNormalizedAdvantage()),
        (GRPO(), PrefixGroupAdvantage()),
        (GRPO(kl_coef=0.01, kl_kind="full"), GroupNormalizedAdvantage()),
    ],
    ids=["grpo", "gspo", "grpo_by_prefix", "grpo_with_exact_divergence"],
)
def test_the_expected_reward_rises(codes, batch, objective, advantage):
    policy = new_policy(codes)
    builder, networks = builder_of(policy, objective, Even(), RolloutOptions(group_size=16), advantage)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    rewards = []
    for phase in range(12):
        networks.old.refresh(policy)
        builder.rollouts.begin(phase)
        for _ in range(2):
            built = builder(batch)
            optimizer.zero_grad()
            objective(built.objective).loss.backward()
            optimizer.step()
        rewards.append(built.metrics["reward_mean"].item())
    assert rewards[-1] > rewards[0] + 0.15


def test_a_draw_without_an_item_counts_in_its_group_but_is_not_trained(codes, batch):
    policy = new_policy(codes, normalizer="codebook")
    builder, _ = builder_of(policy, GRPO(kl_coef=0.1), ValidityReward(count=8), RolloutOptions())
    inputs = builder(batch).objective
    trained = inputs.logp.mask.any(-1)
    share = trained.float().mean(1)
    mixed = (share > 0) & (share < 1)
    assert mixed.any()
    assert torch.equal(inputs.logp.mask, inputs.logp.mask[..., :1].expand_as(inputs.logp.mask))
    assert (inputs.advantages[mixed][trained[mixed]] > 0).all()
    assert (inputs.advantages[mixed][~trained[mixed]] < 0).all()
    assert (inputs.logp.policy[~trained] == 0).all()
    assert GRPO(kl_coef=0.1)(inputs).loss.isfinite()


@pytest.mark.parametrize("estimator", [GAEAdvantage(), GroupNormalizedAdvantage(scale=False)], ids=["gae", "group"])
def test_the_penalty_in_the_reward_reaches_every_token(codes, batch, estimator):
    policy, weight = new_policy(codes, normalizer="codebook"), 0.3
    objective = PPO(value_coef=0.5 if "value" in estimator.requires else 0.0)
    rollout = RolloutOptions(group_size=6, kl_coef=weight)
    builder, networks = builder_of(policy, objective, ValidityReward(count=6), rollout, estimator)
    with torch.no_grad():
        networks.reference.policy.code_table.weight[1:] *= -1.0
    built = builder(batch)
    found, kept = built.objective, built.objective.logp.mask.numpy()
    penalty = np.where(kept, weight * (found.logp.old - found.logp.reference).numpy(), 0.0)
    drawn = next(iter(builder.rollouts._kept.values())).slates
    score, slate = drawn.reward.numpy(), drawn.mask.numpy()
    assert kept.any()
    assert (slate & ~kept.any(-1)).any()  # a draw that is not an item has no tokens, and keeps its reward
    total = score - penalty.sum(-1)
    np.testing.assert_allclose(found.rewards.numpy(), total, atol=1e-5)
    assert built.metrics["reward_mean"] == pytest.approx(score[slate].mean(), abs=1e-6)
    assert built.metrics["kl_in_reward"] == pytest.approx(penalty[kept].mean() / weight, rel=1e-4)
    if isinstance(estimator, GAEAdvantage):
        # the penalties of a token and of those after it, and the score behind the last
        to_go = score[..., None] - penalty[..., ::-1].cumsum(-1)[..., ::-1]
        want = np.where(kept, to_go - found.values_old.numpy()[..., None], 0.0)
        np.testing.assert_allclose(np.where(kept, found.advantages.numpy(), 0.0), want, atol=1e-5)
        items = kept.any(-1)
        np.testing.assert_allclose(found.returns.numpy()[items], total[items], atol=1e-5)
    else:
        mean = [row[in_row].mean() if in_row.any() else 0.0 for row, in_row in zip(total, slate, strict=True)]
        want = np.where(slate, total - np.array(mean)[:, None], 0.0)
        np.testing.assert_allclose(found.advantages.numpy(), want, atol=1e-5)
    assert objective(found).loss.isfinite()


def test_advantages_of_tokens_and_the_gate_reach_the_objective(codes, batch):
    shares = RolloutOptions(group_size=8, logged_share=0.25)
    for advantage, shape in ((PrefixGroupAdvantage(), (16, 8, 3)), (GatedAdvantage(min_separation=0.0), (16, 8))):
        policy = new_policy(codes)
        builder, networks = builder_of(policy, GRPO(kl_coef=0.0), Even(), shares, advantage)
        networks.old.refresh(policy)
        builder.rollouts.begin(0)
        built = builder(batch).objective
        assert built.advantages.shape == shape
        assert (built.advantages != 0).any()
        assert GRPO(kl_coef=0.0)(built).loss.isfinite()
