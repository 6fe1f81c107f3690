"""Advantages from graded feedback."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from recpo.advantages.group import kept_mask
from recpo.contracts import AdvantageEstimator
from recpo.errors import RecpoError
from recpo.ops.reduce import zero_masked
from recpo.types import FeedbackBatch


def graded_advantage(grade: Tensor, mask: Tensor | None = None, *, baseline: float | None = None) -> Tensor:
    """Grade minus a baseline.

    Args:
        grade: ``[..., S]`` in [0, 1]; nan = unknown.
        mask: ``[..., S]``, True keeps.
        baseline: a constant; None = the mean over the known grades of the slate, the last axis; over a user's sequence
            this is the user's mean grade.

    Returns:
        ``[..., S]`` in [-1, 1]; 0 at masked positions and where the grade is unknown.
    """
    kept = kept_mask(grade, mask)
    known = kept & ~grade.isnan()
    grade = zero_masked(grade.detach(), known)
    mean = grade.sum(-1, keepdim=True) / known.sum(-1, keepdim=True).clamp(min=1)
    return zero_masked(grade - (mean if baseline is None else baseline), known)


@dataclass(frozen=True)
class GradedAdvantage(AdvantageEstimator):
    """Grade of the feedback minus a baseline, in [-1, 1] (see ``graded_advantage``).

    All known feedback counts: a dislike has the grade 0, and other events have the grade of their watch-time quartile.
    Unknown feedback has the advantage 0.

    Attributes:
        baseline: a constant grade in [0, 1]; none = the mean of the slate. Over ``SequenceLayout`` that is about the
            mean of the user, so that generous users do not outweigh others.
    """

    baseline: float | None = None

    def __post_init__(self) -> None:
        if self.baseline is not None and not 0.0 <= self.baseline <= 1.0:
            raise RecpoError(f"GradedAdvantage.baseline is a grade in [0, 1], got {self.baseline}.")

    @property
    def learns_from(self) -> frozenset[str]:
        """See ``AdvantageEstimator.learns_from``."""
        return frozenset({"labels", "dislikes"})

    def __call__(self, batch: FeedbackBatch, values: Tensor | None = None) -> Tensor:
        """See ``AdvantageEstimator``; ``values`` is not used."""
        if batch.slates.grade is None:
            raise RecpoError("GradedAdvantage needs Slates.grade, which this batch lacks: read it from a prepared log.")
        return graded_advantage(batch.slates.grade, batch.slates.mask, baseline=self.baseline)
