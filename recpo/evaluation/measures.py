"""Recommenders and measures, the extension points of the pass over held-out users, and the outcomes that they see.

A ``Recommender`` answers for a batch of users; a ``Measure`` computes metrics from the answers (``Observed``) and the
held-out outcomes (``Targets``). Measures of held-out exposures are here: the ranking of what the user was shown
(``exposure_auc``), also against items that the user never saw (``unseen_auc``), and the behaviors on it, such as likes,
follows and shares (``BehaviorRates``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, NamedTuple

import torch
from torch import Tensor

from recpo.base.errors import RecpoError
from recpo.base.types import EvaluationBatch, FeedbackBatch, Histories, Recommendations, Slates
from recpo.ops.ranking import first_places, is_member

#: Number of items that are drawn per user for ``AUC_unseen``.
UNSEEN_DRAWS: Final = 50
#: Weight of ``AUC_other`` in ``AUC_mixed``.
OTHER_WEIGHT: Final = 0.6


@dataclass(frozen=True)
class Recommender:
    """A recommender to evaluate: the bound methods of a policy or a baseline.

    Attributes:
        recommend: ``(histories, k, exclude) -> Recommendations``, as ``Policy.recommend``.
        log_prob: ``batch -> [B, S, T]``, as ``Policy.log_prob``: scores the held-out slates. None = not available, or
            not wanted: a policy scores slates in a second forward pass.
        name: used in messages about its answers.
        scores_are_logp: the scores of its lists are log-probabilities, so at most 0.
        score: ``batch -> [B, S]`` of the held-out slates, for a recommender without probabilities: any numbers, higher
            = better. Only for metrics of scores; None = not available.
        recommend_to_batch: ``(batch, k, exclude, past [B, M]) -> Recommendations``, instead of ``recommend`` if lists
            depend on more of the batch: on the rest of the user's past, as re-ranked lists do, on a reward, or on who
            the user is, as given lists and those of an oracle do.
    """

    recommend: Callable[[Histories, int, Tensor | None], Recommendations] | None = None
    log_prob: Callable[[FeedbackBatch], Tensor] | None = None
    name: str = "the recommender"
    scores_are_logp: bool = False
    score: Callable[[FeedbackBatch], Tensor] | None = None
    recommend_to_batch: Callable[[EvaluationBatch, int, Tensor | None, Tensor], Recommendations] | None = None

    def lists(
        self, batch: EvaluationBatch, k: int, past: Tensor | None, unavailable: Tensor | None = None
    ) -> Recommendations:
        """The lists of a batch of held-out users.

        Args:
            batch: the users.
            k: length of the lists.
            past: ``[B, M]`` items of the users' past that must not be listed, padded with 0; None = they may be.
            unavailable: ``[B, N]`` items that are not candidates, padded with 0; None = every item is one.

        Raises:
            RecpoError: it makes no lists.
        """
        excluded = [part for part in (past, unavailable) if part is not None]
        exclude = torch.cat(excluded, 1) if excluded else None
        if self.recommend_to_batch is not None:
            read = batch.feedback.histories.item_ids if past is None else past
            return self.recommend_to_batch(batch, k, exclude, read)
        if self.recommend is None:
            raise RecpoError(f"{self.name} makes no lists", code="wrong_class", field=self.name)
        return self.recommend(batch.feedback.histories, k, exclude)


class Observed(NamedTuple):
    """One batch of held-out users and the recommender's answers, all on the recommender's device.

    Attributes:
        batch: the users, their held-out events and their past.
        lists: ``[B, K]``, K the longest requested list (at most the catalog).
        targets: the held-out sets; without items of the past if those are excluded from the lists.
        logp: ``[B, S]`` log-probability of every held-out slate item (summed over its tokens); None if the recommender
            has none.
        scores: ``[B, S]`` scores of the held-out slate items, for a recommender without log-probabilities.
        unavailable: ``[B, N]`` items that were not candidates, padded with 0; they are in no list and no target. None =
            all items were candidates.
        new_lists: lists of new items alone, see ``recpo.evaluation.segments``; None = not requested.
        unseen: items that the user never saw, and their scores; None = the recommender scores no items.
        deep: the lists with more places, ``Ranking.depth``; None = not requested.
    """

    batch: EvaluationBatch
    lists: Recommendations
    targets: Targets
    logp: Tensor | None
    scores: Tensor | None = None
    unavailable: Tensor | None = None
    new_lists: Recommendations | None = None
    unseen: Recommendations | None = None
    deep: Recommendations | None = None


Direction = Literal["higher", "lower"]
"""Which values of a metric are better."""


class Measure(ABC):
    """Metrics that the pass computes in addition to rankings. One instance serves one pass of one recommender.

    A metric of your own is a subclass, given to ``recpo.evaluate(measures=[...])`` or by its class path
    (``--measures my_package.MyMetric``); see docs/metrics.md. Make it a dataclass if it has options, so that
    ``resolved.yaml`` can record them. Names of metrics of a list length end in ``@k``.

    Attributes:
        direction: which values are better, of all its metrics.
    """

    direction: ClassVar[Direction] = "higher"

    @abstractmethod
    def update(self, observed: Observed) -> Mapping[str, Tensor]:
        """Per-user metrics ``[B]`` of the batch by name; nan if a user has none; empty if there are only totals."""

    def totals(self) -> Mapping[str, float]:
        """Metrics of all lists so far; nan if not defined; empty if there are only per-user metrics, as by default."""
        return {}


class Further(Measure):
    """A copy of a user's measure for one pass, which checks what it returns and notes the names.

    Args:
        measure: not changed, so that it can serve every contender.

    Attributes:
        names: the metrics so far.
    """

    def __init__(self, measure: Measure) -> None:
        self._measure = deepcopy(measure)
        self.names: dict[str, Direction] = {}

    def update(self, observed: Observed) -> Mapping[str, Tensor]:
        """The per-user metrics of the measure.

        Raises:
            RecpoError: they are not one number per user (code ``wrong_shape``).
        """
        found, users = self._measure.update(observed), len(observed.batch.user_ids)
        for name, values in found.items():
            if not isinstance(values, Tensor) or values.shape != (users,):
                shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
                raise RecpoError(
                    f"measures: {type(self._measure).__name__} returned {shape} for {name}, expected a tensor "
                    f"[{users}], one number per user of the batch, nan for a user without one",
                    code="wrong_shape",
                    field=name,
                )
        self.names |= dict.fromkeys(found, self._measure.direction)
        return found

    def totals(self) -> Mapping[str, float]:
        """The totals of the measure."""
        found = self._measure.totals()
        self.names |= dict.fromkeys(found, self._measure.direction)
        return found


class Targets(NamedTuple):
    """The held-out events' items and their sets, all ``[B, S]``.

    A set contains items: an event's membership says that its item is in the set. An item that the user disliked in any
    held-out event is disliked and in no other set. An item that was positive in any event is not in ``other``. The
    prepared log defines the kinds of events (``recpo.base.feedback.FeedbackRule``).

    Attributes:
        item_ids: int64, padded with 0.
        positive: bool, positive in this event and never disliked.
        disliked: bool, disliked in this event.
        other: bool, labeled and in none of the other sets: skipped and neutral exposures. An event without a label is
            in no set, unless it is disliked.
    """

    item_ids: Tensor
    positive: Tensor
    disliked: Tensor
    other: Tensor

    def without(self, exclude: Tensor) -> Targets:
        """The same sets without the items of ``exclude [B, M]``."""
        kept = ~is_member(self.item_ids, exclude)
        return Targets(self.item_ids, self.positive & kept, self.disliked & kept, self.other & kept)


def held_out_targets(batch: EvaluationBatch) -> Targets:
    """The sets of the held-out events' items.

    Raises:
        RecpoError: the batch does not say which events are positive.
    """
    slates = batch.feedback.slates
    if slates.label is None or slates.positive is None:
        message = "targets are made of Slates.label and Slates.positive, and this batch lacks them"
        raise RecpoError(message, code="missing_value", field="label")
    items = slates.item_ids
    disliked = torch.zeros_like(slates.mask) if slates.dislike is None else slates.dislike & slates.mask
    liked = slates.mask & slates.positive
    labeled = slates.mask & ~slates.label.isnan()
    acceptable = ~is_member(items, items, disliked)
    other = labeled & acceptable & ~is_member(items, items, liked)
    return Targets(items, liked & acceptable, disliked, other)


class BehaviorRates(Measure):
    """``<behavior>_rate@k`` ``[B]``: the rate among the first k items that the user was shown in the period.

    An item with several events has a behavior if one of its events has it. nan if the user was shown none of the first
    k items.

    Args:
        behaviors: names of the bits of ``Slates.behaviors``.
        k: length of the lists; a single one, because most users were shown few of their items.
    """

    def __init__(self, behaviors: Sequence[str], k: int) -> None:
        self._behaviors, self._k = tuple(behaviors), k

    def update(self, observed: Observed) -> dict[str, Tensor]:
        """The rates of a batch; empty where its slates have no behaviors."""
        slates, lists = observed.batch.feedback.slates, observed.lists.item_ids[:, : self._k]
        if slates.behaviors is None:
            return {}
        shown = is_member(lists, slates.item_ids, slates.mask).sum(1)
        rates = {}
        for bit, name in enumerate(self._behaviors):
            done = slates.mask & (slates.behaviors >> bit & 1).bool()
            share = is_member(lists, slates.item_ids, done).sum(1) / shown.clamp_min(1)
            rates[f"{name}_rate@{self._k}"] = share.masked_fill(shown == 0, torch.nan)
        return rates


def exposure_auc(logp: Tensor, targets: Targets) -> dict[str, Tensor]:
    """``AUC_other`` and ``AUC_dislikes`` ``[B]``, float32: each user's positives against other and disliked items.

    Only items that the user was shown are compared, so neither metric depends on items that the log never showed. An
    item with several events counts once.

    Args:
        logp: ``[B, S]`` scores of the slate items.
        targets: the sets.
    """
    positive = first_places(targets.item_ids, targets.positive)
    return {
        "AUC_other": auc(logp, positive, first_places(targets.item_ids, targets.other)).float(),
        "AUC_dislikes": auc(logp, positive, first_places(targets.item_ids, targets.disliked)).float(),
    }


def auc_precision(targets: Targets, unseen: Tensor) -> dict[str, Tensor]:
    """How precisely each AUC of a user is known, ``[B]`` float32: ``m n / (m + n + 1)``.

    Where m positives and n other items are ranked alike, an AUC has the variance ``(m + n + 1) / (12 m n)`` (Mann and
    Whitney, 1947). With its inverse as weight, the mean over users tells policies apart with the fewest users (van
    Elteren, Bulletin of the International Statistical Institute 37, 1960). ``AUC_mixed`` has that of ``AUC_other``.

    Args:
        targets: the sets.
        unseen: ``[B, N]`` from ``unseen_items``.
    """
    kinds = (targets.positive, targets.other, targets.disliked)
    m, other, disliked = (first_places(targets.item_ids, kind).sum(1).float() for kind in kinds)
    against = {"AUC_other": other, "AUC_mixed": other, "AUC_dislikes": disliked, "AUC_unseen": (unseen > 0).sum(1)}
    return {name: m * n / (m + n + 1) for name, n in against.items()}


def unseen_items(batch: EvaluationBatch, num_items: int, unavailable: Tensor | None = None) -> Tensor:
    """``UNSEEN_DRAWS`` uniformly drawn items per user that the user never saw, ``[B, N]`` int64; 0 = no item.

    A draw that is an item of the past or of the period, no candidate, or drawn before is left out. The draws depend on
    the user alone, so all contenders, batch sizes and devices get the same ones.

    Args:
        batch: the users.
        num_items: V.
        unavailable: ``[B, M]`` items that were no candidates, padded with 0; None = all were.
    """
    place = torch.arange(UNSEEN_DRAWS, device=batch.user_ids.device)
    drawn = _mixed_bits(batch.user_ids[:, None] * UNSEEN_DRAWS + place) % num_items + 1
    seen = [batch.exclude, batch.feedback.slates.item_ids, batch.feedback.histories.item_ids]
    seen += [] if unavailable is None else [unavailable]
    kept = first_places(drawn, ~is_member(drawn, torch.cat([part.long() for part in seen], 1)))
    return drawn.masked_fill(~kept, 0)


def with_unseen(batch: EvaluationBatch, num_items: int, unavailable: Tensor | None = None) -> FeedbackBatch:
    """The held-out slates with items behind them that the user never saw, to score both in one pass."""
    drawn = unseen_items(batch, num_items, unavailable)
    slates, lengths = batch.feedback.slates, batch.feedback.histories.lengths[:, None]
    logged, unseen = (slates.item_ids, slates.visible, slates.mask), (drawn, lengths.expand_as(drawn), drawn > 0)
    parts = zip(logged, unseen, strict=True)
    return batch.feedback._replace(slates=Slates(*(torch.cat([own, more], 1) for own, more in parts)))


def _mixed_bits(values: Tensor) -> Tensor:
    """SplitMix64 of int64 values, 0..2^62: integers that look random (Steele, Lea and Flood, OOPSLA 2014)."""
    values = (values + 1) * -7046029254386353131  # 0x9E3779B97F4A7C15; products wrap around
    values = (values ^ _shifted(values, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    values = (values ^ _shifted(values, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return _shifted(values ^ _shifted(values, 31), 2)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """A logical shift to the right; that of torch copies the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def unseen_auc(scores: Tensor, of_unseen: Tensor, targets: Targets, unseen: Tensor) -> dict[str, Tensor]:
    """``AUC_unseen`` and ``AUC_mixed`` ``[B]``, float32.

    ``AUC_unseen`` compares each user's positives with items that the user was never shown: an item that neither users
    nor the logging policy care for should not be listed. ``AUC_mixed = .6 AUC_other + .4 AUC_unseen`` asks for both:
    what the user prefers among the shown items, and what was worth showing to this user. Either part alone misjudges
    policies in worlds where exposures carry, or do not carry, taste (docs/evaluation.md).

    Args:
        scores: ``[B, S]`` of the slate items.
        of_unseen: ``[B, N]`` of the unseen items.
        targets: the sets of the slates.
        unseen: ``[B, N]`` from ``unseen_items``.
    """
    positive = first_places(targets.item_ids, targets.positive)
    none = torch.zeros_like(unseen, dtype=torch.bool)
    both = torch.cat([scores, of_unseen], 1)
    against = torch.cat([torch.zeros_like(positive), unseen > 0], 1)
    found = auc(both, torch.cat([positive, none], 1), against)
    other = auc(scores, positive, first_places(targets.item_ids, targets.other))
    mixed = OTHER_WEIGHT * other + (1 - OTHER_WEIGHT) * found
    return {"AUC_unseen": found.float(), "AUC_mixed": mixed.float()}


def auc(scores: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """Area under the ROC curve of every row, ``[B]`` float64; nan if a row lacks positives or negatives.

    The probability that a positive scores higher than a negative, with ties counting one half:

        (sum of the positives' mean ranks - P (P + 1) / 2) / (P N)

    with ranks 1, 2, ... of ascending scores among the row's P positives and N negatives; ties share the mean of their
    ranks (Mann and Whitney, 1947).

    Args:
        scores: ``[B, S]``, less than infinity.
        positive: ``[B, S]`` bool.
        negative: ``[B, S]`` bool, disjoint from ``positive``.
    """
    kept = scores.masked_fill(~(positive | negative), torch.inf).contiguous()
    ascending = kept.sort(1).values
    below = torch.searchsorted(ascending, kept)
    up_to = torch.searchsorted(ascending, kept, right=True)
    mean_rank = (below + up_to + 1).double() / 2
    positives, negatives = positive.sum(1).double(), negative.sum(1).double()
    return ((mean_rank * positive).sum(1) - positives * (positives + 1) / 2) / (positives * negatives)
