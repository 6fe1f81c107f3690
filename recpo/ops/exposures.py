"""Held-out exposures of users: their sets, items that the users never saw, and the areas under the curves of both.

The items that a user never saw are drawn by hashes (``mixed_bits``), so nothing has to be drawn or stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from recpo.base.errors import RecpoError
from recpo.base.types import EvaluationBatch, FeedbackBatch, Slates
from recpo.ops.ranking import first_places, is_member

#: Number of items that are drawn per user for ``AUC_unseen``.
UNSEEN_DRAWS: Final = 50
#: Weight of ``AUC_other`` in ``AUC_mixed``.
OTHER_WEIGHT: Final = 0.6


class Targets(NamedTuple):
    """The held-out events' items and their sets, all ``[B, S]``.

    A set contains items: an event's membership says that its item is in the set. An item that the user disliked in any
    held-out event is not positive, and an item that is positive is not in ``other``. The prepared log defines the kinds
    of events (``recpo.base.feedback.FeedbackRule``).

    Attributes:
        item_ids: int64, padded with 0.
        positive: bool, positive in this event and never disliked.
        disliked: bool, disliked in this event.
        other: bool, labeled or disliked, and not positive: skipped, neutral and disliked exposures. An event with
            neither a label nor a dislike is in no set.
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
    positive = liked & ~is_member(items, items, disliked)
    return Targets(items, positive, disliked, (labeled | disliked) & ~is_member(items, items, positive))


def exposure_auc(logp: Tensor, targets: Targets) -> dict[str, Tensor]:
    """``AUC_other`` and ``AUC_dislikes`` ``[B]``, float32: each user's positives against all other and disliked items.

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
    drawn = mixed_bits(batch.user_ids[:, None] * UNSEEN_DRAWS + place + 1, 62) % num_items + 1
    seen = [batch.past, batch.exclude, batch.feedback.slates.item_ids, batch.feedback.histories.item_ids]
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


def mixed_aucs(batch: EvaluationBatch, num_items: int, models: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    """``AUC_mixed`` ``[models, B]`` float64 of a batch of held-out users, without items that must not be listed.

    Args:
        batch: the users.
        num_items: V.
        models: each gives the scores ``[B, N]`` of items ``[B, N]``, where 0 pads.
    """
    targets, unseen = held_out_targets(batch).without(batch.exclude), unseen_items(batch, num_items)
    items, shown = torch.cat([targets.item_ids, unseen], 1), targets.item_ids.shape[1]
    scores = (model(items) for model in models)
    aucs = [unseen_auc(one[:, :shown], one[:, shown:], targets, unseen)["AUC_mixed"] for one in scores]
    return torch.stack(aucs).double()


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


def mixed_bits(numbers: Tensor, bits: int, start: int = 0) -> Tensor:
    """The first ``bits`` bits, 0 .. 2^bits - 1, of these numbers of the sequence SplitMix64 that begins at ``start``.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
    """
    values = numbers * _signed(0x9E3779B97F4A7C15) + _signed(start)  # products wrap around
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values = (values ^ _shifted(values, shift)) * _signed(factor)
    return _shifted(values ^ _shifted(values, 31), 64 - bits)


def _signed(value: int) -> int:
    """The int64 with the lowest 64 bits of ``value``."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (fills with zeros)."""
    return (values >> bits) & (2 ** (64 - bits) - 1)
