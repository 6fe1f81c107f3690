"""Behaviors of users on the recommended items that the log contains: likes, follows, shares."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recpo.evaluation.measures import Measure, Observed
from recpo.ops.ranking import is_member


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
