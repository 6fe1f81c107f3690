"""The plug points of the pass over held-out users: who recommends, and what is measured of every batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from recpo.evaluation.targets import Targets
from recpo.types import EvaluationBatch, FeedbackBatch, Histories, Recommendations


@dataclass(frozen=True)
class Recommender:
    """What is evaluated: a policy's or a baseline's bound methods.

    Attributes:
        recommend: ``(histories, k, exclude) -> Recommendations``, as ``Policy.recommend``.
        log_prob: ``batch -> [B, S, T]``, as ``Policy.log_prob``: scores the held-out slates. None = it cannot, or the
            metrics of scores are not wanted: a policy scores slates in a second forward pass.
        name: in messages about its answers.
        scores_are_logp: the scores of its lists are log-probabilities, so at most 0.
    """

    recommend: Callable[[Histories, int, Tensor | None], Recommendations]
    log_prob: Callable[[FeedbackBatch], Tensor] | None = None
    name: str = "the recommender"
    scores_are_logp: bool = False


class Observed(NamedTuple):
    """One batch of held-out users and what the recommender made of it, all on the recommender's device.

    Attributes:
        batch: the users, their held-out events and what they saw before.
        lists: ``[B, K]``, K the longest list asked for (at most the catalog).
        targets: the held-out sets; without seen items where those are excluded from the lists.
        logp: ``[B, S]`` log-probability of every held-out slate item (its tokens summed), None where the recommender
            does not score.
    """

    batch: EvaluationBatch
    lists: Recommendations
    targets: Targets
    logp: Tensor | None


class Measure(Protocol):
    """Metrics that the pass collects beside the rankings; one instance serves one pass of one recommender."""

    def update(self, observed: Observed) -> Mapping[str, Tensor]:
        """Per-user metrics ``[B]`` of the batch by name; nan where a user has none; empty if there are only totals."""

    def totals(self) -> Mapping[str, float]:
        """Metrics of all lists seen so far together; nan where not defined; empty if there are only per-user ones."""
