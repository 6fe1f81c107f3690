"""Validation during training: head and tail of the catalog, coverage, several ranks, value, the selecting metric."""

import math

import numpy as np
import pytest
import torch

import recpo
from recpo.base.contracts import RewardFunction
from recpo.base.types import SlateTraits
from recpo.batches.datamodule import FeedbackDataModule
from recpo.batches.slates import SequenceLayout
from recpo.evaluation.catalog_ranking import Ranking, evaluate_ranking
from recpo.evaluation.measures import Recommender
from recpo.objectives import DPO, GBPO, GRPO, Likelihood, PairwiseReward, PointwiseReward, SoftmaxDPO
from recpo.objectives.advantages import TernaryAdvantage
from recpo.ops.exposures import held_out_targets
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.training.module import PreferenceModule
from recpo.training.options import CriticOptions, LearningOptions, RolloutOptions
from recpo.training.validation import (
    MAX_WEIGHT,
    HeldOutFacts,
    ScoreMetrics,
    ValidationMetrics,
    default_monitor,
    held_out_facts,
    metrics_of_exposures,
    tail_items,
    validate_monitor,
)
from tests.refusals import refused


def test_the_tail_holds_a_fifth_of_the_events():
    counts = torch.tensor([5, 50, 0, 25, 10, 10])
    # 50 + 25 = 75 of 100 events, + 10 = 85: the tail begins behind the item that reaches 80
    assert tail_items(counts).tolist() == [False, True, False, True, False, False, True]


def test_head_tail_and_coverage_equal_a_loop_and_add_up_over_ranks(prepared):
    data = FeedbackDataModule(prepared, layout=SequenceLayout(history_length=12), evaluation_batch_size=16)
    torch.manual_seed(0)
    policy = CatalogSoftmaxPolicy(data.prepared.num_items, dim=8, layers=1, heads=1, max_history=12).eval()
    torch.nn.init.normal_(policy.item_table.weight[1:])
    counts = torch.from_numpy(data.prepared.item_counts())
    tail = tail_items(counts)
    ranks = [ValidationMetrics(LearningOptions(), data.prepared.num_items, counts) for _ in range(2)]
    shown, recalls = set(), {True: [], False: []}
    for number, batch in enumerate(data.val_dataloader()):
        ranks[number % 2].update(policy, batch)
        lists = policy.recommend(batch.feedback.histories, 10, batch.exclude).item_ids
        targets = held_out_targets(batch).without(batch.exclude)
        for row, items in enumerate(lists.tolist()):
            shown |= set(items)
            liked = set(targets.item_ids[row][targets.positive[row]].tolist())
            for in_tail, found in recalls.items():
                wanted = {item for item in liked if bool(tail[item]) == in_tail}
                if wanted:
                    found.append(len(wanted & set(items)) / len(wanted))
    sums = [rank._sums for rank in ranks]
    seen = [rank._shown for rank in ranks]
    answers = iter([sums[0] + sums[1], seen[0] + seen[1]])
    metrics = ranks[0].compute(lambda value: next(answers))
    assert metrics["coverage@10"].item() == pytest.approx(len(shown - {0}) / data.prepared.num_items)
    for name, in_tail in (("Recall_head@10", False), ("Recall_tail@10", True)):
        assert metrics[name].item() == pytest.approx(sum(recalls[in_tail]) / len(recalls[in_tail]), rel=1e-5)


@pytest.fixture
def held_out(prepared):
    data = FeedbackDataModule(prepared, layout=SequenceLayout(history_length=12), evaluation_batch_size=16)
    torch.manual_seed(0)
    policy = CatalogSoftmaxPolicy(data.prepared.num_items, dim=8, layers=1, heads=1, max_history=12).eval()
    torch.nn.init.normal_(policy.item_table.weight[1:])
    return policy, list(data.val_dataloader())


def exposures_of(policy, batches):
    """Per user: lists of (item, log-probability, positive, disliked, labeled, propensity, grade)."""
    for batch in batches:
        slates = batch.feedback.slates
        logp = policy.log_prob(batch.feedback)[..., 0]
        for row in range(len(logp)):
            yield [
                {
                    "item": int(slates.item_ids[row, place]),
                    "logp": float(logp[row, place]),
                    "positive": bool(slates.positive[row, place]),
                    "disliked": bool(slates.dislike[row, place]),
                    "labeled": not math.isnan(float(slates.label[row, place])),
                    "propensity": math.exp(float(slates.logp_behavior[row, place])),
                    "grade": float(slates.grade[row, place]),
                }
                for place in range(logp.shape[1])
                if slates.mask[row, place]
            ]


@torch.no_grad()
def test_metrics_of_exposures_equal_loops_over_users(held_out):
    policy, batches = held_out
    weighed = total = 0.0
    areas, losses = [], []
    for events in exposures_of(policy, batches):
        for event in events:
            if event["disliked"] or not math.isnan(event["grade"]):
                weight = min(math.exp(event["logp"]) / event["propensity"], MAX_WEIGHT)
                reward = -1.0 if event["disliked"] else event["grade"]
                weighed, total = weighed + weight * reward, total + weight
        disliked = {e["item"] for e in events if e["disliked"]}
        liked = {e["item"]: e["logp"] for e in events if e["positive"] and e["item"] not in disliked}
        shown = {e["item"]: e["logp"] for e in events if e["labeled"] or e["disliked"]}
        pairs = [(p, n) for p in liked.values() for item, n in shown.items() if item not in liked]
        if pairs:
            areas.append(np.mean([(p > n) + 0.5 * (p == n) for p, n in pairs]))
            losses.append(np.mean([math.log1p(math.exp(n - p)) for p, n in pairs]))
    metrics = ValidationMetrics(LearningOptions(), policy.num_items)
    for batch in batches:
        metrics.update(policy, batch)
    found = metrics.compute(lambda value: value)
    assert found["SNIPS"].item() == pytest.approx(weighed / total, rel=1e-4)
    assert found["AUC_other"].item() == pytest.approx(sum(areas) / len(areas), rel=1e-4)
    assert found["pair_loss"].item() == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def test_the_mixed_area_of_a_validation_is_that_of_an_evaluation(held_out):
    policy, batches = held_out
    metrics = ValidationMetrics(LearningOptions(monitor="AUC_mixed"), policy.num_items)
    for batch in batches:
        metrics.update(policy, batch)
    found = metrics.compute(lambda value: value)
    every = Ranking(num_items=policy.num_items, ks=[10])
    ranking = evaluate_ranking(
        Recommender(policy.recommend, policy.log_prob),
        (one._replace(exclude=one.past[:, :0]) for one in batches),
        every,
    )
    for name in ("AUC_mixed", "AUC_other"):
        assert found[name].item() == pytest.approx(ranking.estimate(name).mean, rel=1e-5)
    assert found["AUC_mixed"] != found["AUC_other"]


def test_the_mixed_area_is_computed_as_the_monitor_only():
    assert "AUC_mixed" in metrics_of_exposures(LearningOptions(monitor="AUC_mixed"))
    assert "AUC_mixed" not in metrics_of_exposures(LearningOptions())
    validate_monitor("AUC_mixed", LearningOptions(), KNOWN)
    with refused("empty", "monitor"):
        validate_monitor("AUC_mixed", LearningOptions(), KNOWN._replace(comparing_users=0))


@pytest.mark.parametrize("objective", [DPO(), SoftmaxDPO(), DPO(variant="simpo")], ids=str)
def test_preference_lists_have_no_pair_loss(held_out, objective):
    """It has neither their beta nor their reference."""
    policy, batches = held_out
    learning = LearningOptions(objective=objective)
    with refused("conflicting_options", "monitor"):
        validate_monitor("pair_loss", learning, KNOWN)
    validate_monitor("pair_loss", LearningOptions(), KNOWN)
    plain, module = (
        ValidationMetrics(LearningOptions(), policy.num_items),
        PreferenceModule(policy, learning, slates=SlateTraits(is_preference_list=True)),
    )
    for metrics in (plain, module._validation):
        metrics.update(policy, batches[0])
    expected, found = (metrics.compute(lambda value: value) for metrics in (plain, module._validation))
    assert expected.keys() - found.keys() == {"pair_loss"}
    assert "pair_loss" not in module._validation.names
    assert found == {name: expected[name] for name in found}


@torch.no_grad()
def test_the_reward_of_lists_is_a_mean_over_users_of_known_rewards(held_out):
    policy, batches = held_out

    class ById(RewardFunction):
        def __call__(self, batch, candidates):
            return candidates.item_ids.float().masked_fill(candidates.item_ids % 5 == 0, torch.nan)

    metrics = ValidationMetrics(LearningOptions(validation_reward=ById()), policy.num_items)
    means = []
    for batch in batches:
        metrics.update(policy, batch)
        for items in policy.recommend(batch.feedback.histories, 10, batch.exclude).item_ids.tolist():
            known = [item for item in items if item and item % 5]
            means += [sum(known) / len(known)] if known else []
    assert metrics.compute(lambda value: value)["reward@10"].item() == pytest.approx(sum(means) / len(means), rel=1e-5)


def test_metrics_of_which_nothing_is_known_are_left_out(held_out):
    policy, batches = held_out
    batch = batches[0]
    slates = batch.feedback.slates
    blind = slates._replace(positive=torch.zeros_like(slates.mask), logp_behavior=None)
    metrics = ValidationMetrics(LearningOptions(), policy.num_items)
    metrics.update(policy, batch._replace(feedback=batch.feedback._replace(slates=blind)))
    found = metrics.compute(lambda value: value)
    assert not found.keys() & {"SNIPS", "AUC_other", "pair_loss"}
    assert {"NDCG@10", "coverage@10"} <= found.keys()
    assert {"SNIPS", "AUC_other", "pair_loss"} <= set(metrics.names)


@pytest.mark.parametrize("objective", [PointwiseReward(), PairwiseReward()], ids=str)
def test_scores_of_which_nothing_is_known_have_no_metrics(held_out, objective):
    policy, batches = held_out
    options = LearningOptions(objective=objective, critic=CriticOptions(shares_encoder=False))
    slates = SlateTraits(is_preference_list=isinstance(objective, PairwiseReward))
    metrics = PreferenceModule(policy, options, slates=slates)._validation
    for batch in batches:
        metrics.update(policy, batch)
    assert set(metrics.compute(lambda value: value)) == set(metrics.names)
    slates = batches[0].feedback.slates
    nobody = batches[0].feedback._replace(slates=slates._replace(mask=torch.zeros_like(slates.mask)))
    metrics.update(policy, batches[0]._replace(feedback=nobody))
    assert metrics.compute(lambda value: value) == {}


@pytest.mark.slow
@pytest.mark.parametrize("monitor", ["log_likelihood", "AUC_other"])
def test_no_checkpoint_is_the_best_by_a_metric_that_is_undefined(prepared, tmp_path, monkeypatch, monitor):
    """Otherwise the first one would stay the best: nothing is above a log-likelihood of 0."""

    def unlabeled(metrics, policy, batch):
        slates = batch.feedback.slates
        nobody = batch.feedback._replace(slates=slates._replace(mask=torch.zeros_like(slates.mask)))
        update(metrics, policy, batch._replace(feedback=nobody))

    update = ScoreMetrics.update
    monkeypatch.setattr(ScoreMetrics, "update", unlabeled)
    with refused("empty", "monitor"):
        recpo.train(
            prepared,
            out=tmp_path / "run",
            objective=PointwiseReward(),
            monitor=monitor,
            critic={"shares_encoder": False},
            trainer={"max_epochs": 1, "accelerator": "cpu", "logger": False, "limit_train_batches": 1},
            allocator=False,
        )
    assert not (tmp_path / "run" / "checkpoints" / "best.ckpt").exists()


class Held(RewardFunction):
    def __call__(self, batch, candidates):
        return candidates.mask.float()


KNOWN, BARE = HeldOutFacts(1.0, 50), HeldOutFacts(0.0, 50)
LEARNS = {"advantage": TernaryAdvantage()}
ROLLOUT = {"rollout": RolloutOptions(), "reward": Held(), "old_policy": "snapshot"}
DEFAULTS = [
    ({}, KNOWN, "NDCG"),
    ({"objective": Likelihood(positive_only=True), **LEARNS}, KNOWN, "SNIPS"),
    ({"objective": GBPO(), **LEARNS}, KNOWN, "SNIPS"),
    ({"objective": GBPO(), **LEARNS}, BARE, "AUC_other"),
    ({"objective": GBPO(), **LEARNS}, HeldOutFacts(0.4, 1), "AUC_other"),
    ({"objective": GBPO(), **LEARNS, "validation_reward": Held()}, KNOWN, "reward"),
    ({"objective": DPO()}, KNOWN, "AUC_other"),
    ({"objective": GRPO(), **ROLLOUT}, KNOWN, "SNIPS"),
    ({"objective": GRPO(), **ROLLOUT, "validation_reward": Held()}, BARE, "reward"),
    ({"objective": PointwiseReward()}, KNOWN, "log_likelihood"),
    ({"objective": PairwiseReward()}, KNOWN, "AUC_other"),
]


@pytest.mark.parametrize(("options", "facts", "expected"), DEFAULTS)
def test_the_default_monitor_fits_what_is_learned(options, facts, expected):
    learning = LearningOptions(**options)
    assert default_monitor(learning, facts) == expected
    validate_monitor(expected, learning, facts)


def test_the_default_falls_back_aloud():
    with pytest.warns(UserWarning, match="chosen by NDCG, which rewards agreeing with the log"):
        assert default_monitor(LearningOptions(objective=GBPO(), **LEARNS), HeldOutFacts()) == "NDCG"


@pytest.mark.parametrize(
    ("monitor", "options", "facts", "refusal"),
    [
        ("SNIPS", {}, BARE, ("missing_column", "propensity")),
        ("AUC_other", {}, HeldOutFacts(1.0, 0), ("empty", "monitor")),
        ("pair_loss", {}, HeldOutFacts(1.0, 0), ("empty", "monitor")),
        ("reward", {}, KNOWN, ("missing_option", "validation_reward")),
        ("log_likelihood", {}, KNOWN, ("conflicting_options", "monitor")),
        ("NDCG", {"objective": PairwiseReward()}, KNOWN, ("conflicting_options", "monitor")),
    ],
)
def test_a_monitor_that_cannot_be_computed_is_refused(monitor, options, facts, refusal):
    with refused(*refusal):
        validate_monitor(monitor, LearningOptions(**options), facts)


def test_facts_of_the_held_out_period_are_counts(prepared):
    data = FeedbackDataModule(prepared, layout=SequenceLayout(history_length=12))
    events = known = comparing = 0
    for batch in data.val_dataloader():
        slates = batch.feedback.slates
        events += int(slates.mask.sum())
        known += int((slates.mask & slates.logp_behavior.isfinite()).sum())
        liked = slates.positive & slates.mask
        other = slates.mask & ~liked & (slates.dislike | ~slates.label.isnan())
        comparing += int((liked.any(1) & other.any(1)).sum())
    assert held_out_facts(data.prepared) == HeldOutFacts(known / events, comparing)


@pytest.mark.slow
def test_best_checkpoint_and_patience_follow_the_monitor(prepared, tmp_path):
    run = recpo.train(
        prepared,
        out=tmp_path / "run",
        monitor="pair_loss",
        patience=1,
        policy={"class_path": "CatalogSoftmaxPolicy", "init_args": {"dim": 8, "layers": 1, "heads": 1}},
        optimizer={"class_path": "torch.optim.Adam", "init_args": {"lr": 0.05}},
        trainer={"max_epochs": 8, "accelerator": "cpu", "logger": False, "limit_train_batches": 2},
        allocator=False,
    )
    assert run.monitor == "val/pair_loss"
    assert run.configuration["monitor"] == "pair_loss"
    state = torch.load(run.checkpoint("last"), weights_only=True)["callbacks"]
    best = next(value for key, value in state.items() if "BestCheckpoint" in key)
    stopping = next(value for key, value in state.items() if "EarlyStopping" in key)
    assert best["monitor"] == "val/pair_loss"
    assert float(best["best_model_score"]) <= run.results["val/pair_loss"]
    assert float(stopping["best_score"]) == float(best["best_model_score"])
