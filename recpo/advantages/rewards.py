"""The rewards of a batch, and which of its positions are kept."""

from __future__ import annotations

import torch
from torch import Tensor

from recpo.errors import RecpoError
from recpo.types import FeedbackBatch


def kept_mask(values: Tensor, mask: Tensor | None) -> Tensor:
    """``mask`` as bool; True throughout where there is none."""
    return torch.ones_like(values, dtype=torch.bool) if mask is None else mask.bool()


def rewards_of(batch: FeedbackBatch, estimator: object) -> Tensor:
    """The rewards ``[B, S]`` that ``estimator`` reads.

    Raises:
        RecpoError: nobody configured a reward.
    """
    if batch.slates.reward is None:
        raise RecpoError(f"{type(estimator).__name__} needs rewards, which this batch lacks: configure a reward.")
    return batch.slates.reward
