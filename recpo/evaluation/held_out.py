"""Full-catalog ranking of held-out users, streamed: memory grows with users and items, not with their product."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recpo.errors import RecpoError
from recpo.evaluation.accuracy import Gain, accuracy, accuracy_of_bin, graded_accuracy
from recpo.evaluation.beyond_accuracy import Exposure
from recpo.evaluation.exposures import exposure_auc
from recpo.evaluation.intervals import Estimate, estimate
from recpo.evaluation.measures import Measure, Observed, Recommender
from recpo.evaluation.ranking import is_member, ranked_hits
from recpo.evaluation.segments import ItemSegment, UserSegment
from recpo.evaluation.targets import Targets, held_out_targets
from recpo.types import EvaluationBatch

_Parts = dict[str, list[Tensor]]


@dataclass(frozen=True)
class UserLabels:
    """The users' bins of one ``UserSegment``: names, and ``[U]`` int64 indices, ``NO_BIN`` for none."""

    bins: tuple[str, ...]
    label: Tensor


@dataclass(frozen=True)
class RankingResult:
    """Metrics of one recommender for every held-out user, in the order of the batches.

    Attributes:
        user_ids: ``[U]`` int64, the users.
        per_user: metric name, such as ``NDCG@10``, to ``[U]`` float32; nan where the user has no target of that kind.
        totals: metrics of all lists together, such as ``coverage@10``.
        counts: users and held-out events, by what became of them.
        user_segments: segment name to the users' bins.
        item_segments: segment name to bin to metrics as in ``per_user``, of the targets in that bin alone.
    """

    user_ids: Tensor
    per_user: dict[str, Tensor]
    totals: dict[str, float]
    counts: dict[str, int]
    user_segments: dict[str, UserLabels]
    item_segments: dict[str, dict[str, dict[str, Tensor]]]

    def estimate(self, metric: str) -> Estimate:
        """Mean of a metric over the users for whom it is defined."""
        return estimate(self.per_user[metric])

    def difference(self, other: RankingResult, metric: str) -> Estimate:
        """Mean of ``self - other`` over the same users: the paired interval, narrower than two separate ones.

        Raises:
            ValueError: the two were not evaluated on the same users.
        """
        if not torch.equal(self.user_ids, other.user_ids):
            raise ValueError("a paired difference needs both results on the same users in the same order")
        return estimate(self.per_user[metric].double() - other.per_user[metric].double())

    def segments(self) -> dict[str, dict[str, dict[str, Estimate]]]:
        """Segment to bin to metric to its mean over the bin's users, or over the users with targets in the bin."""
        found = {
            name: {
                bin_name: {metric: estimate(values[users.label == index]) for metric, values in self.per_user.items()}
                for index, bin_name in enumerate(users.bins)
            }
            for name, users in self.user_segments.items()
        }
        of_items = {
            name: {
                bin_name: {metric: estimate(values) for metric, values in metrics.items()}
                for bin_name, metrics in bins.items()
            }
            for name, bins in self.item_segments.items()
        }
        return found | of_items


def evaluate_ranking(
    recommender: Recommender,
    batches: Iterable[EvaluationBatch],
    *,
    num_items: int,
    ks: Sequence[int] = (10, 50),
    exclude_seen: bool = True,
    gain: Gain = "linear",
    measures: Sequence[Measure] = (),
    user_segments: Sequence[UserSegment] = (),
    item_segments: Sequence[ItemSegment] = (),
) -> RankingResult:
    """Ranks the whole catalog for every held-out user, in one pass over the batches.

    For every user ``accuracy``, ``graded_accuracy`` and, where the recommender scores slates, ``exposure_auc``; of all
    lists ``Exposure``; and whatever the ``measures`` add.

    Args:
        recommender: called without gradients.
        batches: held-out users.
        num_items: catalog size.
        ks: list lengths.
        exclude_seen: nothing from ``EvaluationBatch.exclude`` may be recommended. Held-out events of it cannot be
            ranked then, so they are removed from the targets and counted. False keeps both.
        gain: of the graded NDCG, see ``graded_accuracy``.
        measures: metrics beside these; instances that have not seen a pass yet.
        user_segments: labels every user.
        item_segments: HitRate, Recall and NDCG of each bin's targets.

    Raises:
        RecpoError: no user, ``ks`` that are no list lengths, or a recommender that shows what it was told to exclude,
            shows an item twice, or gives log-probabilities that are nan.
        ValueError: two measures give a metric of the same name.
    """
    if not ks or min(ks) < 1 or len(set(ks)) != len(ks):
        raise RecpoError(f"ks must be different whole numbers from 1 on, such as [10, 50]; got {list(ks)}")
    collected = _Collected(ks, gain, [Exposure(num_items, ks), *measures], user_segments, item_segments)
    for batch in batches:
        with torch.inference_mode():
            exclude = batch.exclude if exclude_seen else None
            lists = recommender.recommend(batch.feedback.histories, min(max(ks), num_items), exclude)
            logp = recommender.log_prob(batch.feedback).sum(-1) if recommender.log_prob else None
            _refuse_nonsense(lists.item_ids, exclude, logp)
            targets = collected.rankable(held_out_targets(batch), exclude)
            collected.add(Observed(batch, lists, targets, logp))
    return collected.result()


def _refuse_nonsense(item_ids: Tensor, exclude: Tensor | None, logp: Tensor | None) -> None:
    if exclude is not None and bool(is_member(item_ids, exclude).any()):
        raise RecpoError("the recommender returned items that it was told to exclude; its metrics mean nothing")
    ordered = item_ids.sort(1).values
    if bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] > 0)).any()):
        raise RecpoError("the recommender returned an item twice in one list; its metrics mean nothing")
    if logp is not None and bool(logp.isnan().any()):
        raise RecpoError("the recommender's log-probabilities are nan; was its training stable?")


class _Collected:
    """What one pass has found so far, on the CPU."""

    def __init__(
        self,
        ks: Sequence[int],
        gain: Gain,
        measures: Sequence[Measure],
        user_segments: Sequence[UserSegment],
        item_segments: Sequence[ItemSegment],
    ) -> None:
        self._ks, self._gain, self._measures = ks, gain, measures
        self._user_segments, self._item_segments = user_segments, item_segments
        self._counts: Counter[str] = Counter()
        self._user_ids: list[Tensor] = []
        self._per_user: _Parts = defaultdict(list)
        self._labels: _Parts = defaultdict(list)
        self._per_bin: dict[tuple[str, str], _Parts] = defaultdict(lambda: defaultdict(list))

    def rankable(self, targets: Targets, exclude: Tensor | None) -> Targets:
        """The targets that a list can hold; counts what is removed."""
        kept = targets if exclude is None else targets.without(exclude)
        for kind, before, after in (
            ("positive", targets.positive, kept.positive),
            ("disliked", targets.disliked, kept.disliked),
        ):
            self._counts[f"{kind}_events"] += int(before.sum())
            self._counts[f"{kind}_events_removed_as_seen"] += int(before.sum()) - int(after.sum())
        return kept

    def add(self, observed: Observed) -> None:
        """Measures one batch."""
        lists, targets = observed.lists.item_ids, observed.targets
        positive = ranked_hits(lists, targets.item_ids, targets.positive)
        disliked = ranked_hits(lists, targets.item_ids, targets.disliked)
        self._counts["users"] += len(lists)
        self._counts["users_with_positives"] += int((positive.num_targets > 0).sum())
        self._counts["users_with_dislikes"] += int((disliked.num_targets > 0).sum())
        metrics = accuracy(positive, disliked, self._ks) | graded_accuracy(observed, self._ks, self._gain)
        metrics |= {} if observed.logp is None else exposure_auc(observed.logp, targets)
        for measure in self._measures:
            more = measure.update(observed)
            if again := metrics.keys() & more.keys():
                raise ValueError(f"two measures give metrics of the same name: {', '.join(sorted(again))}")
            metrics |= {name: values.float() for name, values in more.items()}
        self._user_ids.append(observed.batch.user_ids.cpu())
        _append(self._per_user, metrics)
        _append(self._labels, {segment.name: segment.label(observed.batch) for segment in self._user_segments})
        for segment in self._item_segments:
            for bin_name, of_bin in zip(segment.bins, segment.split(positive, lists), strict=True):
                _append(self._per_bin[segment.name, bin_name], accuracy_of_bin(of_bin, self._ks))

    def result(self) -> RankingResult:
        """Everything, of all users.

        Raises:
            RecpoError: there was no user.
        """
        if not self._user_ids:
            raise RecpoError("nothing to evaluate: there are no held-out users")
        labels = _joined(self._labels)
        return RankingResult(
            user_ids=torch.cat(self._user_ids),
            per_user=_joined(self._per_user),
            totals={name: value for measure in self._measures for name, value in measure.totals().items()},
            counts=dict(self._counts),
            user_segments={s.name: UserLabels(s.bins, labels[s.name]) for s in self._user_segments},
            item_segments={
                segment.name: {name: _joined(self._per_bin[segment.name, name]) for name in segment.bins}
                for segment in self._item_segments
            },
        )


def _append(parts: _Parts, values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        parts[name].append(value.cpu())


def _joined(parts: _Parts) -> dict[str, Tensor]:
    return {name: torch.cat(values) for name, values in parts.items()}
