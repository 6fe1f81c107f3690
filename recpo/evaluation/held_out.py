"""Full-catalogue ranking of held-out users, streamed: memory grows with users and items, not with their product."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from recpo.errors import RecpoError
from recpo.evaluation.ranking import (
    Coverage,
    RankedHits,
    hit_rate,
    is_member,
    mean_average_precision,
    mrr,
    ndcg,
    precision,
    ranked_hits,
    recall,
)
from recpo.types import EvaluationBatch, Histories, Recommendations

#: Anything that recommends as ``Policy.recommend`` does: ``(histories, k, exclude) -> Recommendations``.
Recommender = Callable[[Histories, int, Tensor | None], Recommendations]
#: Adds per-user metrics ``[B]`` of the lists of users ``row_ids [B]``, ``item_ids [B, k]``: a simulator's truth, say.
Judge = Callable[[Tensor, Tensor], Mapping[str, Tensor]]

_Z95 = 1.959963984540054  # 97.5 % quantile of the standard normal distribution


class Estimate(NamedTuple):
    """A mean over users with the half-width of its normal 95 % interval ``1.96 s / sqrt(n)``.

    ``mean`` is nan for n = 0, ``half_width`` for n < 2.
    """

    mean: float
    half_width: float
    n: int


class Targets(NamedTuple):
    """The two target sets of a batch of users: the held-out events' items ``[B, S]`` and who belongs to which set.

    An item that the user disliked in any held-out event is disliked, never positive.
    """

    item_ids: Tensor
    positive: Tensor
    disliked: Tensor


@dataclass(frozen=True)
class RankingResult:
    """Metrics of one recommender for every held-out user, in the order of the batches.

    Attributes:
        row_ids: ``[U]`` int64, the users.
        per_user: metric name, such as ``NDCG@10``, to ``[U]`` float32; nan where the user has no target of that kind.
        coverage: ``coverage@k`` to the share of the catalogue that is in somebody's first k items.
        counts: users and held-out events, by what became of them.
    """

    row_ids: Tensor
    per_user: dict[str, Tensor]
    coverage: dict[str, float]
    counts: dict[str, int]

    def estimate(self, metric: str) -> Estimate:
        """Mean of a metric over the users for whom it is defined."""
        return estimate(self.per_user[metric])

    def difference(self, other: RankingResult, metric: str) -> Estimate:
        """Mean of ``self - other`` over the same users: the paired interval, narrower than two separate ones.

        Raises:
            ValueError: the two were not evaluated on the same users.
        """
        if not torch.equal(self.row_ids, other.row_ids):
            raise ValueError("a paired difference needs both results on the same users in the same order")
        return estimate(self.per_user[metric].double() - other.per_user[metric].double())


def estimate(values: Tensor) -> Estimate:
    """Mean and normal 95 % half-width of the values that are not nan."""
    defined = values[~values.isnan()].double()
    n = len(defined)
    mean = defined.mean().item() if n else math.nan
    return Estimate(mean, _Z95 * defined.std().item() / math.sqrt(n) if n > 1 else math.nan, n)


def held_out_targets(batch: EvaluationBatch, positive_threshold: float) -> Targets:
    """Positives are held-out events with ``watch_quantile >= positive_threshold`` of items that were not disliked.

    Raises:
        ValueError: the batch has no watch quantiles.
    """
    slates = batch.feedback.slates
    if slates.watch_quantile is None:
        raise ValueError("positives are told by watch_quantile, and this batch has none")
    disliked = torch.zeros_like(slates.mask) if slates.dislike is None else slates.dislike & slates.mask
    liked = slates.mask & (slates.watch_quantile >= positive_threshold)
    return Targets(slates.item_ids, liked & ~is_member(slates.item_ids, slates.item_ids, disliked), disliked)


def evaluate_ranking(
    recommend: Recommender,
    batches: Iterable[EvaluationBatch],
    *,
    num_items: int,
    ks: Sequence[int] = (10, 50),
    positive_threshold: float = 0.75,
    exclude_seen: bool = True,
    judge: Judge | None = None,
) -> RankingResult:
    """Ranks the whole catalogue for every held-out user.

    For the user's positives (see ``held_out_targets`` and ``recpo.evaluation.ranking``): HitRate, Recall, Precision,
    NDCG, MRR and MAP at every k. For the held-out items that the user disliked, over the users who have any, lower is
    better: ``disliked_hit_rate@k``, 1 if one of them is among the first k, and ``disliked@k``, their share of the k
    places. ``coverage@k`` over all lists.

    Args:
        recommend: the recommender, called as ``recommend(histories, k, exclude)`` without gradients.
        batches: held-out users.
        num_items: catalogue size.
        ks: list lengths.
        positive_threshold: least watch quantile of a positive.
        exclude_seen: nothing from ``EvaluationBatch.seen`` may be recommended. Held-out events of such items cannot be
            ranked then, so they are removed from the targets and counted. False keeps both.
        judge: adds metrics of its own.

    Raises:
        RecpoError: no user, ``ks`` that are no list lengths, or a recommender that shows what it was told to exclude.
    """
    if not ks or min(ks) < 1 or len(set(ks)) != len(ks):
        raise RecpoError(f"ks must be different whole numbers from 1 on, such as [10, 50]; got {list(ks)}")
    counts: Counter[str] = Counter()
    collected: dict[str, list[Tensor]] = defaultdict(list)
    row_ids: list[Tensor] = []
    coverage = Coverage(num_items, ks)
    for batch in batches:
        exclude = batch.seen if exclude_seen else None
        with torch.inference_mode():
            item_ids = recommend(batch.feedback.histories, min(max(ks), num_items), exclude).item_ids
            if exclude is not None and bool(is_member(item_ids, exclude).any()):
                raise RecpoError("the recommender returned items that it was told to exclude; its metrics mean nothing")
            targets = _rankable(held_out_targets(batch, positive_threshold), exclude, counts)
            metrics = _metrics_of(item_ids, targets, ks, counts)
            metrics |= judge(batch.feedback.row_ids, item_ids) if judge else {}
            coverage.update(item_ids)
        row_ids.append(batch.feedback.row_ids.cpu())
        for name, values in metrics.items():
            collected[name].append(values.float().cpu())
    if not row_ids:
        raise RecpoError("nothing to evaluate: there are no held-out users")
    return RankingResult(
        row_ids=torch.cat(row_ids),
        per_user={name: torch.cat(parts) for name, parts in collected.items()},
        coverage={f"coverage@{k}": value for k, value in zip(ks, coverage.compute(), strict=True)},
        counts=dict(counts),
    )


def _rankable(targets: Targets, exclude: Tensor | None, counts: Counter[str]) -> Targets:
    counts["positive_events"] += int(targets.positive.sum())
    counts["disliked_events"] += int(targets.disliked.sum())
    unseen = torch.ones_like(targets.positive) if exclude is None else ~is_member(targets.item_ids, exclude)
    kept = Targets(targets.item_ids, targets.positive & unseen, targets.disliked & unseen)
    counts["positive_events_removed_as_seen"] += int((targets.positive & ~unseen).sum())
    counts["disliked_events_removed_as_seen"] += int((targets.disliked & ~unseen).sum())
    return kept


def _metrics_of(item_ids: Tensor, targets: Targets, ks: Sequence[int], counts: Counter[str]) -> dict[str, Tensor]:
    positive = ranked_hits(item_ids, targets.item_ids, targets.positive)
    disliked = ranked_hits(item_ids, targets.item_ids, targets.disliked)
    counts["users"] += len(item_ids)
    counts["users_with_positives"] += _users_with(positive)
    counts["users_with_dislikes"] += _users_with(disliked)
    by_name = {
        "NDCG": ndcg(positive, ks),
        "Recall": recall(positive, ks),
        "HitRate": hit_rate(positive, ks),
        "MRR": mrr(positive, ks),
        "MAP": mean_average_precision(positive, ks),
        "Precision": precision(positive, ks),
        "disliked": precision(disliked, ks),
        "disliked_hit_rate": hit_rate(disliked, ks),
    }
    return {f"{name}@{k}": values[:, i] for name, values in by_name.items() for i, k in enumerate(ks)}


def _users_with(hits: RankedHits) -> int:
    return int((hits.num_targets > 0).sum())
