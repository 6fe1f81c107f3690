"""Full-catalog ranking of held-out users, streamed. Memory grows with users and items, not with their product."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import torch
from torch import Tensor

from recpo.base.errors import RecpoError
from recpo.base.types import EvaluationBatch, Recommendations
from recpo.evaluation.beyond_accuracy import Exposure
from recpo.evaluation.candidates import Candidates
from recpo.evaluation.estimates import Estimate, estimate
from recpo.evaluation.measures import Measure, Observed, Recommender
from recpo.evaluation.segments import HISTORY_BINS, HISTORY_LENGTH, ItemSegment, history_bin
from recpo.ops.exposures import Targets, auc_precision, exposure_auc, held_out_targets, unseen_auc, with_unseen
from recpo.ops.ranking import accuracy, accuracy_of_bin, first_places, graded_ndcg, is_member, named, ranked_hits

Gain = Literal["linear", "exponential"]

_ROUNDING = 1e-3  # tolerance for log-probabilities of nearly certain items, which rounding may put above 0
_Parts = dict[str, list[Tensor]]


@dataclass(frozen=True)
class RankingResult:
    """Metrics of one recommender for every held-out user, in the order of the batches.

    Attributes:
        user_ids: ``[U]`` int64, the users.
        per_user: metric name, such as ``NDCG@10``, to ``[U]`` float32; nan if the user has no target of that kind.
        totals: metrics of all lists together, such as ``coverage@10``.
        counts: numbers of users and held-out events, used and removed.
        user_segments: segment name to bin to ``[U]`` bool, the users in it.
        item_segments: segment name to bin to metrics as in ``per_user``, of the targets in that bin alone.
        precision: the AUCs of ``per_user`` to ``[U]`` float32, how precisely they are known (``auc_precision``).
        measured_by: the names of metrics and totals to the measures that returned them.
    """

    user_ids: Tensor
    per_user: dict[str, Tensor]
    totals: dict[str, float]
    counts: dict[str, int]
    user_segments: dict[str, dict[str, Tensor]]
    item_segments: dict[str, dict[str, dict[str, Tensor]]]
    precision: dict[str, Tensor] = field(default_factory=dict)
    measured_by: dict[str, Measure] = field(default_factory=dict)

    def estimate(self, metric: str) -> Estimate:
        """Mean of a metric over the users for whom it is defined."""
        return estimate(self.per_user[metric])

    def difference(self, other: Self, metric: str) -> Estimate:
        """Mean of ``self - other`` over the same users: the paired interval, narrower than two separate ones."""
        return estimate(self.differences(other, metric))

    def differences(self, other: Self, metric: str) -> Tensor:
        """``self - other`` of every user, ``[U]`` float64; nan for a user without a value."""
        assert torch.equal(self.user_ids, other.user_ids)  # every pass has the same users in the same order
        return self.per_user[metric].double() - other.per_user[metric].double()

    def segments(self) -> dict[str, dict[str, dict[str, Estimate]]]:
        """Segment to bin to metric to its mean over the bin's users, or over the users with targets in the bin."""
        found = {
            name: {
                bin_name: {metric: estimate(values[inside]) for metric, values in self.per_user.items()}
                for bin_name, inside in bins.items()
            }
            for name, bins in self.user_segments.items()
        }
        for name, of_items in self.item_segments.items():
            found[name] = {one: {metric: estimate(v) for metric, v in of.items()} for one, of in of_items.items()}
        return found


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """How the complete catalog is ranked for held-out users.

    Items of ``EvaluationBatch.exclude`` may not be recommended. Held-out events of these items cannot be ranked, so
    they are removed from the targets and counted.

    Attributes:
        num_items: catalog size.
        ks: list lengths.
        gain: gain of the graded NDCG, see ``graded_accuracy``.
        by_history: every per-user metric also has means over the users of each bin of ``HISTORY_BINS``.
        item_segments: HitRate, Recall and NDCG of each bin's targets.
        candidates: items that may be listed; held-out events of other items are removed from the targets and counted.
            None = every item of the catalog.
        new_items_among: ``[O]`` items that are not new: the measures also get lists without these items
            (``Observed.new_lists``). None = they do not.
        depth: number of places of ``Observed.deep``, if more than those of the metrics; 0 = it is not requested.
    """

    num_items: int
    ks: Sequence[int] = (10, 50)
    gain: Gain = "linear"
    by_history: bool = False
    item_segments: Sequence[ItemSegment] = ()
    candidates: Candidates | None = None
    new_items_among: Tensor | None = None
    depth: int = 0

    def __post_init__(self) -> None:
        validate_ks(self.ks)


def evaluate_ranking(
    recommender: Recommender, batches: Iterable[EvaluationBatch], ranking: Ranking, measures: Sequence[Measure] = ()
) -> RankingResult:
    """Ranks the complete catalog for every held-out user, in one pass over the batches; see ``RankingPass``.

    Raises:
        RecpoError: no users, or what ``RankingPass.add`` raises.
    """
    found = RankingPass(recommender, ranking, measures)
    for batch in batches:
        found.add(batch)
    return found.result()


class RankingPass:
    """The ranking of the complete catalog for held-out users, batch by batch.

    For every user, it computes ``accuracy``, ``graded_accuracy`` and, if the recommender scores slates,
    ``exposure_auc``; for all lists, ``Exposure``; and the metrics of ``measures``. Several passes may take turns on the
    same batches.

    Args:
        recommender: called without gradients.
        ranking: how users are ranked.
        measures: further metrics; new instances that have not been used in a pass.
    """

    def __init__(self, recommender: Recommender, ranking: Ranking, measures: Sequence[Measure] = ()) -> None:
        candidates = ranking.candidates
        exposure = Exposure(ranking.num_items, ranking.ks, None if candidates is None else candidates.is_candidate)
        self._recommender, self._ranking, self._measures = recommender, ranking, [exposure, *measures]
        # so far, on the CPU
        self._counts: Counter[str] = Counter()
        self._user_ids: list[Tensor] = []
        self._per_user: _Parts = defaultdict(list)
        self._precision: _Parts = defaultdict(list)
        self._history_bins: list[Tensor] = []
        self._per_bin: dict[tuple[str, str], _Parts] = defaultdict(lambda: defaultdict(list))
        self._measured_by: dict[str, Measure] = {}

    def add(self, batch: EvaluationBatch) -> None:
        """Ranks the users of a batch.

        Raises:
            RecpoError: lists with excluded items or an item twice, log-probabilities that are nan or above 0, or a
                measure returns something else than a number per user (code ``wrong_shape``), or a metric of another.
        """
        with torch.inference_mode():
            recommender, ranking, candidates = self._recommender, self._ranking, self._ranking.candidates
            size = min(max(ranking.ks), ranking.num_items)
            absent = None if candidates is None else candidates.unavailable(batch.user_ids)
            deep = recommender.lists(batch, max(size, min(ranking.depth, ranking.num_items)), absent)
            lists = Recommendations(*(part[:, :size] for part in deep))
            scored = with_unseen(batch, ranking.num_items, absent)
            logp = recommender.log_prob(scored).sum(-1) if recommender.log_prob else None
            scores = recommender.score(scored) if recommender.score else None
            _validate_answer(recommender, deep, batch.exclude, logp, scored.slates.mask)
            if absent is not None and bool(is_member(deep.item_ids, absent).any()):
                message = f"{recommender.name} returned items that are not candidates; leave them out of its lists"
                raise RecpoError(message, code="bad_value", field="candidates")
            targets = self._rankable(held_out_targets(batch), batch.exclude, absent)
            new = None
            if ranking.new_items_among is not None:
                others = ranking.new_items_among.to(batch.exclude.device).expand(len(batch.exclude), -1)
                unlisted = others if absent is None else torch.cat([others, absent], 1)
                new = recommender.lists(batch, size, unlisted)
            logged = batch.feedback.slates.item_ids.shape[1]
            both = scores if logp is None else logp
            unseen = None if both is None else Recommendations(scored.slates.item_ids[:, logged:], both[:, logged:])
            logp, scores = (None if part is None else part[:, :logged] for part in (logp, scores))
            further = deep if ranking.depth else None
            self._measure(Observed(batch, lists, targets, logp, scores, absent, new, unseen, further))

    def result(self) -> RankingResult:
        """The results of all users.

        Raises:
            RecpoError: there was no user.
        """
        if not self._user_ids:
            raise RecpoError("nothing to evaluate: there are no held-out users", code="empty", field="prepared")
        user_segments = {}
        if self._ranking.by_history:
            bins = torch.cat(self._history_bins)
            user_segments[HISTORY_LENGTH] = {name: bins == index for index, name in enumerate(HISTORY_BINS)}
        totals: dict[str, float] = {}
        for measure in self._measures:
            found = measure.totals()
            totals |= found
            self._measured_by |= dict.fromkeys(found, measure)
        return RankingResult(
            user_ids=torch.cat(self._user_ids),
            per_user=_joined(self._per_user),
            totals=totals,
            counts=dict(self._counts),
            user_segments=user_segments,
            item_segments={
                segment.name: {name: _joined(self._per_bin[segment.name, name]) for name in segment.bins}
                for segment in self._ranking.item_segments
            },
            precision=_joined(self._precision),
            measured_by=self._measured_by,
        )

    def _rankable(self, targets: Targets, exclude: Tensor, absent: Tensor | None) -> Targets:
        """The targets that a list can contain. Counts removed targets, first those that are not candidates."""
        there = targets if absent is None else targets.without(absent)
        kept = there.without(exclude)
        for kind, logged, before, after in (
            ("positive", targets.positive, there.positive, kept.positive),
            ("disliked", targets.disliked, there.disliked, kept.disliked),
        ):
            self._counts[f"{kind}_events"] += int(logged.sum())
            self._counts[f"{kind}_events_unavailable"] += int(logged.sum()) - int(before.sum())
            self._counts[f"{kind}_events_excluded"] += int(before.sum()) - int(after.sum())
        return kept

    def _measure(self, observed: Observed) -> None:
        lists, targets = observed.lists.item_ids, observed.targets
        positive = ranked_hits(lists, targets.item_ids, targets.positive)
        disliked = ranked_hits(lists, targets.item_ids, targets.disliked)
        self._counts["users"] += len(lists)
        self._counts["users_with_positives"] += int((positive.num_targets > 0).sum())
        self._counts["users_with_dislikes"] += int((disliked.num_targets > 0).sum())
        metrics = accuracy(positive, disliked, self._ranking.ks) | graded_accuracy(
            observed, self._ranking.ks, self._ranking.gain
        )
        scores = observed.scores if observed.logp is None else observed.logp
        if scores is not None and observed.unseen is not None:
            unseen = observed.unseen
            metrics |= exposure_auc(scores, targets) | unseen_auc(scores, unseen.scores, targets, unseen.item_ids)
            _append(self._precision, auc_precision(targets, unseen.item_ids))
        for measure in self._measures:
            more = measure.update(observed)
            _validate_measured(measure, more, len(lists))
            self._measured_by |= dict.fromkeys(more, measure)
            if again := metrics.keys() & more.keys():
                names = ", ".join(sorted(again))
                message = f"two measures give metrics of the same name: {names}; give yours another name"
                raise RecpoError(message, code="duplicate", field=names)
            metrics |= {name: values.float() for name, values in more.items()}
        self._user_ids.append(observed.batch.user_ids.cpu())
        _append(self._per_user, metrics)
        if self._ranking.by_history:
            self._history_bins.append(history_bin(observed.batch).cpu())
        for segment in self._ranking.item_segments:
            for bin_name, of_bin in zip(segment.bins, segment.split(positive, lists), strict=True):
                _append(self._per_bin[segment.name, bin_name], accuracy_of_bin(of_bin, self._ranking.ks))


def validate_ks(ks: Sequence[int]) -> None:
    """Raises ``RecpoError`` if ``ks`` are not valid list lengths."""
    if not ks or min(ks) < 1 or len(set(ks)) != len(ks):
        message = f"ks must be different whole numbers from 1 on, such as [10, 50]; got {list(ks)}"
        raise RecpoError(message, code="bad_value", field="ks")


def _validate_answer(
    recommender: Recommender, lists: Recommendations, exclude: Tensor, logp: Tensor | None, mask: Tensor
) -> None:
    """Raises ``RecpoError`` if an answer has no meaningful metrics."""
    name, item_ids = recommender.name, lists.item_ids
    if bool(is_member(item_ids, exclude).any()):
        message = f"{name} returned items that it was told to exclude; its metrics would mean nothing"
        raise RecpoError(message, code="bad_value", field="exclude")
    if bool((~first_places(item_ids, item_ids > 0) & (item_ids > 0)).any()):
        message = f"{name} returned an item twice in one list; its metrics would mean nothing"
        raise RecpoError(message, code="duplicate", field=name)
    listed = lists.scores if recommender.scores_are_logp else None
    for field_name, what, found, filled in (
        ("log_prob", "held-out items", logp, mask),
        ("scores", "listed items", listed, item_ids > 0),
    ):
        given = None if found is None else found.masked_fill(~filled, 0.0)
        if given is not None and bool(given.isnan().any()):
            message = f"{name} gave {what} log-probabilities that are nan; was its training stable?"
            raise RecpoError(message, code="diverged", field=field_name)
        if given is not None and bool((given > _ROUNDING).any()):
            message = f"{name} gave {what} log-probabilities up to {float(given.max()):.4g}, expected at most 0: these "
            message += "are not log-probabilities, so its values would be meaningless; normalize the scores"
            raise RecpoError(message, code="out_of_range", field=field_name)


def _validate_measured(measure: Measure, found: Mapping[str, Tensor], users: int) -> None:
    for name, values in found.items():
        if not isinstance(values, Tensor) or values.shape != (users,):
            shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            message = f"measures: {type(measure).__name__} returned {shape} for {name}, expected a tensor [{users}], "
            message += "one number per user of the batch, nan for a user without one"
            raise RecpoError(message, code="wrong_shape", field=name)


def graded_accuracy(observed: Observed, ks: Sequence[int], gain: Gain = "linear") -> dict[str, Tensor]:
    """``gNDCG@k``: NDCG with gains from the labels of all held-out items, liked or not.

    Linear: the gain is the label q. Exponential: ``2^level - 1`` with the quarter ``level = min(floor(4 q), 3)``, so 0,
    1, 3, 7. A disliked item has gain 0. An item with several events has the largest of their gains.
    """
    targets, label = observed.targets, observed.batch.feedback.slates.label
    assert label is not None  # the targets were built from it
    acceptable = (targets.positive | targets.other) & ~is_member(targets.item_ids, targets.item_ids, targets.disliked)
    gains = label if gain == "linear" else torch.exp2((4 * label).floor().clamp(max=3)) - 1
    gains = torch.where(acceptable, gains, 0.0)
    return named(ks, gNDCG=graded_ndcg(observed.lists.item_ids, targets.item_ids, gains, ks))


def _append(parts: _Parts, values: Mapping[str, Tensor]) -> None:
    alike = defaultdict(list)
    for name, value in values.items():
        alike[value.device, value.dtype, value.shape].append(name)
    for names in alike.values():  # a device is waited for once, not for every metric
        for name, row in zip(names, torch.stack([values[name] for name in names]).cpu(), strict=True):
            parts[name].append(row)


def _joined(parts: _Parts) -> dict[str, Tensor]:
    return {name: torch.cat(values) for name, values in parts.items()}
