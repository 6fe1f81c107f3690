"""Changes that training makes to slates: candidates instead of logged items, hard negatives, preference lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from recpo.base.contracts import Policy
from recpo.base.types import FeedbackBatch, Slates


class Candidates(NamedTuple):
    """Groups of candidates ``[B, S]`` and their log-probabilities ``[B, S, T]`` under what they were drawn from."""

    slates: Slates
    logp: Tensor


def items_of(slates: Slates) -> Tensor:
    """``[B, S]``: kept positions that hold an item. A draw may be none; it counts in its group, but has no tokens."""
    return slates.mask & (slates.item_ids > 0)


def with_logged(slates: Slates, logged: Slates, count: int) -> Slates:
    """Puts up to ``count`` random items of the logged slate, with their labels, into the first places of each group.

    Args:
        slates: ``[B, G]`` generated candidates, which hold every column that is not None below.
        logged: ``[B, S]`` what the log shows for the same contexts.
        count: at most G.
    """
    if not count:
        return slates
    order = torch.rand(logged.mask.shape, device=logged.mask.device).masked_fill(~logged.mask, -1.0)
    index = order.argsort(1, descending=True)[:, :count]
    there = logged.mask.gather(1, index)

    def placed(own: Tensor, other: Tensor) -> Tensor:
        head = torch.where(there, other.gather(1, index).to(own.dtype), own[:, : index.shape[1]])
        return torch.cat([head, own[:, index.shape[1] :]], 1)

    sources = logged._replace(is_logged=logged.mask, reward=None, logp_behavior=None, ends_session=None)._asdict()
    pairs = {name: (own, sources[name]) for name, own in slates._asdict().items()}
    both = {name: pair for name, pair in pairs.items() if pair[0] is not None and pair[1] is not None}
    return slates._replace(**{name: placed(*pair) for name, pair in both.items()})


def first_occurrences(item_ids: Tensor) -> Tensor:
    """``[B, G]``: the item does not stand at an earlier place of its group; empty places (0) count as items."""
    group = item_ids.shape[1]
    earlier = torch.ones(group, group, dtype=torch.bool, device=item_ids.device).tril(-1)
    return ~((item_ids[:, :, None] == item_ids[:, None, :]) & earlier).any(-1)


def take_rows(batch: FeedbackBatch, rows: Tensor) -> FeedbackBatch:
    """The contexts ``rows`` of a batch."""
    return batch._replace(
        histories=batch.histories.rows(rows),
        slates=batch.slates._replace(**_changed(batch.slates, lambda column: column[rows])),
        context_ids=batch.context_ids[rows],
        known_positives=None if batch.known_positives is None else batch.known_positives[rows],
        user_ids=None if batch.user_ids is None else batch.user_ids[rows],
        plan=None,
    )


def put_rows(candidates: Candidates, rows: Tensor, others: Candidates) -> Candidates:
    """Replaces the groups ``rows`` by ``others``, which have the same columns."""
    columns = others.slates._asdict()
    slates = candidates.slates._asdict()
    put = {name: own.index_copy(0, rows, columns[name]) for name, own in slates.items() if own is not None}
    return Candidates(candidates.slates._replace(**put), candidates.logp.index_copy(0, rows, others.logp))


def _changed(columns: Slates, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The columns that there are, each changed."""
    return {name: change(column) for name, column in columns._asdict().items() if column is not None}


def as_preference_list(candidates: Candidates, *, worst_only: bool) -> Candidates:
    """Sorts every group by reward: the best candidate first, as the chosen item, and those with less as the rejected.

    Candidates whose reward equals the best one's leave the list; a group without any rejected item is masked.

    Args:
        candidates: with rewards.
        worst_only: keep one rejected item, that of the lowest reward.
    """
    slates = candidates.slates
    assert slates.reward is not None
    ranked = slates.reward.masked_fill(~slates.mask, -torch.inf)
    index = ranked.argsort(stable=True, dim=1, descending=True)
    if worst_only:
        last = (slates.mask.sum(1, keepdim=True) - 1).clamp(min=0)
        index = torch.cat([index[:, :1], index.gather(1, last)], 1)
    ordered = _ordered(candidates, index)
    reward = ordered.slates.reward
    assert reward is not None
    rejected = ordered.slates.mask & (reward < reward[:, :1])
    kept = rejected.clone()
    kept[:, 0] = rejected.any(1)
    return ordered._replace(slates=ordered.slates._replace(mask=kept, chosen=kept & ~rejected))


def most_probable_first(candidates: Candidates) -> Candidates:
    """Sorts every group by the probability of what was drawn; ties stay in their order."""
    logp = candidates.logp.sum(-1).masked_fill(~candidates.slates.mask, -torch.inf)
    return _ordered(candidates, logp.argsort(stable=True, dim=1, descending=True))


def _ordered(candidates: Candidates, index: Tensor) -> Candidates:
    """The places ``index [B, K]`` of every group."""
    slates, logp = candidates
    columns = _changed(slates, lambda column: column.gather(1, index))
    return Candidates(slates._replace(**columns), logp.gather(1, index[..., None].expand(-1, -1, logp.shape[2])))


def side_by_side(slates: Slates, others: Slates) -> Slates:
    """The items of two slates of the same contexts, to be scored at once."""
    return Slates(*(torch.cat([own, other], 1) for own, other in zip(slates[:3], others[:3], strict=True)))


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
    assert slates.chosen is not None  # only preference lists ask for hard negatives
    kept = (items > 0) & (slates.chosen & slates.mask).any(1, keepdim=True)

    fills = {"item_ids": items * kept, "visible": batch.histories.lengths[:, None] * kept, "mask": kept}

    def appended(name: str, values: Tensor) -> Tensor:
        # what is not known of an appended item: nan where a column can say so, else False
        missing = values.new_full(items.shape, torch.nan if values.is_floating_point() else 0)
        return torch.cat([values, fills.get(name, missing)], 1)

    columns = {name: values for name, values in slates._asdict().items() if values is not None}
    slates = slates._replace(**{name: appended(name, v) for name, v in columns.items()})
    return batch._replace(slates=slates, plan=None)


def without_shared_prefix(mask: Tensor, tokens: Tensor, chosen: Tensor) -> Tensor:
    """Keeps of every rejected item the tokens from the first one on in which it differs from the chosen item.

    The chosen and a rejected item are generated through the same first codes, so pushing these down for one pushes them
    down for the other (RAD-DPO, arXiv 2602.23964).

    Args:
        mask: ``[B, S, T]`` or ``[B, S, 1]``, True keeps.
        tokens: ``[B, S, T]``.
        chosen: ``[B, S]`` bool, one item at most; a list without any is left as it is.
    """
    of_chosen = (tokens * chosen[..., None]).sum(1, keepdim=True)
    shared = (tokens == of_chosen).long().cumprod(-1).bool()
    return mask & ~(shared & ~chosen[..., None] & chosen.any(1)[:, None, None])
