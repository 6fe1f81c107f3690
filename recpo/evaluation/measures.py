"""Recommenders and measures, the extension points of the pass over held-out users, and the outcomes that they see.

A ``Recommender`` answers for a batch of users; a ``Measure`` computes metrics from the answers (``Observed``) and the
held-out outcomes (``recpo.ops.exposures.Targets``). A measure of what the user was shown is here: the behaviors on it,
such as likes, follows and shares (``BehaviorRates``).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from recpo.base.contracts import Policy
from recpo.base.features import Reads
from recpo.base.types import EvaluationBatch, FeedbackBatch, Histories, Recommendations
from recpo.ops.exposures import Targets
from recpo.ops.ranking import is_member


@dataclass(frozen=True)
class Recommender:
    """A recommender in memory to evaluate: the bound methods of a policy or a baseline, and what they read.

    Attributes:
        recommend: ``(histories, k, exclude) -> Recommendations``, as ``Policy.recommend``.
        log_prob: ``batch -> [B, S, T]``, as ``Policy.log_prob``: scores the held-out slates. None = not available, or
            not wanted: a policy scores slates in a second forward pass.
        name: used in messages about its answers.
        scores_are_logp: the scores of its lists are log-probabilities, so at most 0.
        score: ``batch -> [B, S]`` of the held-out slates, for a recommender without probabilities: any numbers, higher
            = better. Only for metrics of scores; None = not available.
        recommend_to_batch: ``(batch, k, exclude [B, E]) -> Recommendations``, instead of ``recommend`` if lists
            depend on more of the batch: on the rest of the user's past, as re-ranked lists do, on a reward, or on who
            the user is, as given lists and those of an oracle do.
        max_history: number of history events that it reads.
        reads: what batches must contain for it, besides items, feedback and times.
        policy: the policy whose items can be drawn; None = there are only lists.
        counts: after the pass, further counts besides users and events.
    """

    recommend: Callable[[Histories, int, Tensor | None], Recommendations] | None = None
    log_prob: Callable[[FeedbackBatch], Tensor] | None = None
    name: str = "the recommender"
    scores_are_logp: bool = False
    score: Callable[[FeedbackBatch], Tensor] | None = None
    recommend_to_batch: Callable[[EvaluationBatch, int, Tensor], Recommendations] | None = None
    max_history: int = 1
    reads: Reads = Reads()  # noqa: RUF009  immutable
    policy: Policy | None = None
    counts: Callable[[], Mapping[str, int]] = dict

    def lists(self, batch: EvaluationBatch, k: int, unavailable: Tensor | None = None) -> Recommendations:
        """The lists of a batch of held-out users.

        Args:
            batch: the users.
            k: length of the lists.
            unavailable: ``[B, N]`` items that are not candidates, padded with 0; None = every item is one.
        """
        exclude = batch.exclude if unavailable is None else torch.cat([batch.exclude, unavailable], 1)
        if self.recommend_to_batch is not None:
            return self.recommend_to_batch(batch, k, exclude)
        assert self.recommend is not None
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
