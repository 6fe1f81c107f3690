"""What is watched while training: rankings of the full catalogue for the held-out users of the validation split."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from recpo.contracts import Policy
from recpo.evaluation.ranking import hit_rate, ndcg, precision, ranked_hits
from recpo.evaluation.targets import held_out_targets
from recpo.types import EvaluationBatch


class ValidationMetrics:
    """Means over users of NDCG@k and HitRate@k on positives and of the disliked share of the lists.

    Items of the user's past are left out of the lists and of the targets. Users without a positive target are left out
    of the first two means, users without a held-out dislike out of the last.

    Args:
        k: length of the lists.
        positive_threshold: watch quantile from which an event counts as positive, unless it was disliked.
        num_items: catalogue size.
    """

    def __init__(self, k: int, positive_threshold: float, num_items: int) -> None:
        self._k, self._threshold = min(k, num_items), positive_threshold
        self._sums = torch.zeros(3, 2, dtype=torch.float64)  # (sum over users, users) of each metric

    @property
    def names(self) -> list[str]:
        """Names of the metrics, in the order of ``compute``."""
        return [f"NDCG@{self._k}", f"HitRate@{self._k}", f"disliked@{self._k}"]

    @torch.no_grad()
    def update(self, policy: Policy, batch: EvaluationBatch) -> None:
        """Adds the users of ``batch``."""
        items = policy.recommend(batch.feedback.histories, self._k, batch.seen).item_ids
        targets = held_out_targets(batch, self._threshold).without(batch.seen)
        liked = ranked_hits(items, targets.item_ids, targets.positive)
        disliked = ranked_hits(items, targets.item_ids, targets.disliked)
        columns = [metric(liked, [self._k]) for metric in (ndcg, hit_rate)] + [precision(disliked, [self._k])]
        per_user = torch.cat(columns, 1).T.cpu().double()
        known = per_user.isfinite()
        self._sums += torch.stack([per_user.nan_to_num(0.0).sum(1), known.sum(1).double()], 1)

    def compute(self, reduce_sum: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The means over every rank's users, 0 where there is none; starts anew."""
        totals = reduce_sum(self._sums)
        self._sums = torch.zeros_like(self._sums)
        means = (totals[:, 0] / totals[:, 1].clamp(min=1.0)).float()
        return dict(zip(self.names, means, strict=True))
