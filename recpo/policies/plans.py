"""Which positions of a batch are scored, and at which states.

The CPU must wait for an accelerator whenever the size of a result is not known in advance (``nonzero``, ``unique``).
Training therefore plans a batch on the CPU, where the batch is gathered (``recpo.training.planning``). If a batch has
no plan, or a plan for other positions, the same functions run on the device of the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recpo.base.errors import RecpoError
from recpo.base.types import FeedbackBatch, Histories, ScoringPlan, Slates


def scoring_plan(batch: FeedbackBatch, needed: Tensor | None, readable: int | None = None) -> ScoringPlan:
    """The plan of the batch if it is a plan for ``needed``, otherwise a new one.

    Args:
        batch: the batch.
        needed: ``[B, S]`` positions to score; None = all real positions. A plan is recognized by the identity of this
            tensor, ``ScoringPlan.needed``.
        readable: see ``check_visible``; an existing plan was checked when it was created.
    """
    slates, plan = batch.slates, None if batch.plan is None else batch.plan.scored
    if plan is not None and needed is plan.needed:
        return plan
    wanted = slates.mask if needed is None else slates.mask & needed
    if readable is not None:
        check_visible(batch.histories, slates, wanted, readable)
    return plan_of(slates, wanted, batch.histories.item_ids.shape[1] + 1)


def plan_of(slates: Slates, wanted: Tensor, num_states: int) -> ScoringPlan:
    """The plan of the positions ``wanted [B, S]``, with ``num_states`` states per context."""
    positions = wanted.reshape(-1).nonzero().squeeze(1)
    return ScoringPlan(wanted, positions, *shared_states(slates, positions, num_states))


def plan_of_candidates(histories: Histories, needed: Tensor) -> ScoringPlan:
    """The plan of candidates ``needed [B, S]`` that are all scored after the complete history, without counting.

    Every position is scored, so no shape depends on the number of needed positions. Candidates of a context share one
    state, so a position that is not needed only costs one row of the item table.
    """
    contexts = torch.arange(len(needed), device=needed.device)
    rows = contexts * (histories.item_ids.shape[1] + 1) + histories.lengths
    positions = torch.arange(needed.numel(), device=needed.device)
    return ScoringPlan(needed, positions, rows, contexts[:, None].expand(needed.shape).reshape(-1), every_position=True)


def planned_items(plan: ScoringPlan, slates: Slates) -> Tensor:
    """The items ``[P]`` of the plan's positions; an arbitrary item for positions that are not needed."""
    items = slates.item_ids.reshape(-1)[plan.positions]
    return items.clamp_min(1) if plan.every_position else items


def spread(plan: ScoringPlan, values: Tensor) -> Tensor:
    """``values [P]`` of the plan's positions as ``[B, S]``, 0 at all others."""
    if plan.every_position:
        return torch.where(plan.needed, values.view(plan.needed.shape), 0.0)
    flat = values.new_zeros(plan.needed.numel()).index_copy(0, plan.positions, values)
    return flat.view(plan.needed.shape)


def shared_states(slates: Slates, positions: Tensor, num_states: int) -> tuple[Tensor, Tensor | None]:
    """The states among the ``B x num_states`` that the positions need, and the index of each position's state.

    Adjacent positions with the same state are grouped, which covers impressions, lists and sequences. The second result
    is None if every position has its own state.
    """
    keys = positions // slates.mask.shape[1] * num_states + slates.visible.reshape(-1)[positions]
    rows, index = torch.unique_consecutive(keys, return_inverse=True)
    return rows, None if len(rows) == len(keys) else index


def check_visible(histories: Histories, slates: Slates, wanted: Tensor, readable: int) -> None:
    """Raises if a position needs a state that the encoder, whose blocks read ``readable`` events, does not compute."""
    if histories.item_ids.shape[1] <= readable:
        return
    if (wanted & (slates.visible != histories.lengths[:, None])).any():
        raise RecpoError(
            f"histories of {histories.item_ids.shape[1]} events exceed policy.attention_length ({readable}), "
            "so items are scored after the whole history only: set data.layout to class_path: ImpressionLayout, or "
            f"its history_length to at most {readable}"
        )
