"""What training does to preference lists: hard negatives, the chosen item, shared prefixes."""

from __future__ import annotations

import torch
from torch import Tensor

from recpo.contracts import Policy
from recpo.types import FeedbackBatch, Slates


@torch.no_grad()
def with_hard_negatives(batch: FeedbackBatch, policy: Policy, count: int) -> FeedbackBatch:
    """Appends the policy's ``count`` top ranks after the whole history to every slate, as rejected items.

    Left out: what the slate holds already, and what the user is known to like. The policy ranks in evaluation mode.
    """
    slates, was_training = batch.slates, policy.training
    exclude = slates.item_ids
    if batch.known_positives is not None:
        exclude = torch.cat([exclude, batch.known_positives], 1)
    policy.eval()
    items = policy.recommend(batch.histories, min(count, policy.num_items), exclude).item_ids
    policy.train(was_training)
    kept = (items > 0) & slates.mask[:, :1]

    def appended(values: Tensor | None, fill: float) -> Tensor | None:
        return None if values is None else torch.cat([values, values.new_full(items.shape, fill)], 1)

    return batch._replace(
        slates=Slates(
            item_ids=torch.cat([slates.item_ids, items * kept], 1),
            visible=torch.cat([slates.visible, batch.histories.lengths[:, None] * kept], 1),
            mask=torch.cat([slates.mask, kept], 1),
            label=appended(slates.label, torch.nan),
            dislike=appended(slates.dislike, 0),
            positive=appended(slates.positive, 0),
            reward=appended(slates.reward, torch.nan),
            logp_behavior=appended(slates.logp_behavior, torch.nan),
            is_logged=appended(slates.is_logged, 0),
            is_random=appended(slates.is_random, 0),
            chosen=appended(slates.chosen, 0),
        )
    )


def without_shared_prefix(mask: Tensor, tokens: Tensor) -> Tensor:
    """Keeps of every rejected item the tokens from the first one on in which it differs from the chosen item.

    The chosen and a rejected item are generated through the same first codes, so pushing these down for one pushes them
    down for the other (RAD-DPO, arXiv 2602.23964).

    Args:
        mask: ``[B, S, T]`` or ``[B, S, 1]``, True keeps; the chosen item stands first in its list.
        tokens: ``[B, S, T]``.
    """
    shared = (tokens == tokens[:, :1]).long().cumprod(-1).bool()
    shared[:, 0] = False
    return mask & ~shared
