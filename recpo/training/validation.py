"""Metrics of the validation split: rankings of the full catalog, or the scores of a reward model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from recpo.contracts import Objective, Policy, StatePolicy
from recpo.evaluation.exposures import exposure_auc
from recpo.evaluation.item_facts import POPULARITY_BINS, popularity_bins
from recpo.evaluation.ranking import hit_rate, ndcg, precision, ranked_hits, recall
from recpo.evaluation.targets import held_out_targets
from recpo.objectives.reward_model import PointwiseReward
from recpo.policies.critic import ItemScore
from recpo.training.networks import item_scores
from recpo.types import EvaluationBatch


def tail_items(item_counts: Tensor) -> Tensor:
    """Which items 0..V are in the tail or have no event, ``[V + 1]`` bool, from their training counts ``[V]``.

    The tail is that of ``popularity_bins``: the least popular items, behind those that hold 80 % of the events.
    """
    return popularity_bins(torch.nn.functional.pad(item_counts, (1, 0))) >= POPULARITY_BINS.index("tail")


class ValidationMetrics:
    """Means over users of NDCG@k and HitRate@k on positives and of the disliked share of the lists.

    Items of the user's past are left out of the lists and of the targets. Users without a positive target are left out
    of the first two means, users without a held-out dislike out of the third. ``coverage@k`` is the share of the
    catalog on at least one list; with ``item_counts``, ``Recall_head@k`` and ``Recall_tail@k`` are the recalls of the
    positives outside and inside the tail of the catalog (``tail_items``).

    Args:
        k: length of the lists, which a smaller catalog caps; the metrics are called by it.
        num_items: catalog size.
        item_counts: ``[V]`` training events of the items 1..V.
    """

    def __init__(self, k: int, num_items: int, item_counts: Tensor | None = None) -> None:
        self._asked, self._k = k, min(k, num_items)
        self._tail = None if item_counts is None else tail_items(item_counts)
        self._means = ["NDCG", "HitRate", "disliked"] + ["Recall_head", "Recall_tail"] * (item_counts is not None)
        self._sums = torch.zeros(len(self._means), 2, dtype=torch.float64)  # (sum over users, users) of each metric
        self._shown = torch.zeros(num_items + 1, dtype=torch.float64)

    @property
    def names(self) -> list[str]:
        """Names of the metrics, in the order of ``compute``."""
        return [f"{name}@{self._asked}" for name in [*self._means, "coverage"]]

    @torch.no_grad()
    def update(self, policy: Policy, batch: EvaluationBatch) -> None:
        """Adds the users of ``batch``."""
        items = policy.recommend(batch.feedback.histories, self._k, batch.exclude).item_ids
        targets = held_out_targets(batch).without(batch.exclude)
        liked = ranked_hits(items, targets.item_ids, targets.positive)
        disliked = ranked_hits(items, targets.item_ids, targets.disliked)
        columns = [metric(liked, [self._k]) for metric in (ndcg, hit_rate)] + [precision(disliked, [self._k])]
        if self._tail is not None:
            in_tail = self._tail.to(items.device)[targets.item_ids]
            parts = [targets.positive & ~in_tail, targets.positive & in_tail]
            columns += [recall(ranked_hits(items, targets.item_ids, part), [self._k]) for part in parts]
        per_user = torch.cat(columns, 1).T.cpu().double()
        known = per_user.isfinite()
        self._sums += torch.stack([per_user.nan_to_num(0.0).sum(1), known.sum(1).double()], 1)
        self._shown[items.flatten().cpu()] = 1.0

    def compute(self, reduce_sum: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The means over every rank's users, 0 where there is none; starts anew."""
        totals, shown = reduce_sum(self._sums), reduce_sum(self._shown)
        self._sums, self._shown = torch.zeros_like(self._sums), torch.zeros_like(self._shown)
        means = totals[:, 0] / totals[:, 1].clamp(min=1.0)
        coverage = (shown[1:] > 0).double().mean()
        return dict(zip(self.names, [*means.float(), coverage.float()], strict=True))


class ScoreMetrics:
    """What is watched while a reward model is trained, on the held-out exposures of the validation split.

    ``log_likelihood``, of a pointwise model, the mean over known targets; ``AUC_other``, the mean over users of the
    probability that the first score puts a positive item above another labeled one.

    Args:
        objective: what is trained.
        head: its scores.
    """

    def __init__(self, objective: Objective, head: ItemScore) -> None:
        self._pointwise = objective if isinstance(objective, PointwiseReward) else None
        self._head = head
        self._sums = torch.zeros(len(self.names), 2, dtype=torch.float64)  # (sum, number) of each metric

    @property
    def names(self) -> list[str]:
        """Names of the metrics, in the order of ``compute``."""
        return ["AUC_other"] if self._pointwise is None else ["log_likelihood", "AUC_other"]

    @torch.no_grad()
    def update(self, policy: Policy, batch: EvaluationBatch) -> None:
        """Adds the users of ``batch``."""
        assert isinstance(policy, StatePolicy)
        slates = batch.feedback.slates
        scores = item_scores(policy, self._head, batch.feedback.histories, slates)
        sums = []
        if self._pointwise is not None:
            assert slates.grade is not None
            assert slates.dislike is not None
            targets, known = self._pointwise.targets(slates.grade, slates.dislike)
            known = known & slates.mask[..., None]
            sums.append((-self._pointwise.losses(scores, targets, known).double().sum(), known.sum().double()))
        per_user = exposure_auc(scores[..., 0], held_out_targets(batch))["AUC_other"]
        sums.append((per_user.double().nansum(), per_user.isfinite().sum().double()))
        self._sums += torch.stack([torch.stack(pair) for pair in sums]).cpu()

    def compute(self, reduce_sum: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The means over every rank's users, 0 where there is none; starts anew."""
        totals = reduce_sum(self._sums)
        self._sums = torch.zeros_like(self._sums)
        means = (totals[:, 0] / totals[:, 1].clamp(min=1.0)).float()
        return dict(zip(self.names, means, strict=True))
