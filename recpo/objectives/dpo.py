"""Direct preference optimization over pairs (arXiv 2305.18290) and its variants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor
from torch.nn.functional import logsigmoid

from recpo.errors import RecpoError
from recpo.objectives.preference import PreferenceLists, PreferenceObjective
from recpo.ops.reduce import check_same_shape, zero_masked
from recpo.types import ObjectiveInputs

Variant = Literal["sigmoid", "robust", "ipo", "hinge"]


def dpo_loss(
    logp_chosen: Tensor,
    logp_rejected: Tensor,
    logp_ref_chosen: Tensor,
    logp_ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    variant: Variant = "sigmoid",
) -> Tensor:
    """Preference loss of pairs; with ``h = (logp_c - logp_ref_c) - (logp_r - logp_ref_r)`` and ``ls`` the smoothing.

    - ``sigmoid`` (arXiv 2305.18290): ``-(1 - ls) logsigmoid(beta h) - ls logsigmoid(-beta h)``
    - ``robust`` (rDPO, arXiv 2403.00409): ``[-(1 - ls) logsigmoid(beta h) + ls logsigmoid(-beta h)] / (1 - 2 ls)``
    - ``ipo`` (arXiv 2310.12036): ``(h - 1 / (2 beta))^2``
    - ``hinge`` (SLiC, arXiv 2305.10425): ``max(0, 1 - beta h)``

    Gradient of ``sigmoid`` on ``logp_chosen``: ``-beta sigmoid(-beta h)``, and its opposite on ``logp_rejected``: a
    pair that the policy orders wrongly weighs most.

    Args:
        logp_chosen: ``[B]`` (any shape), summed over tokens.
        logp_rejected: same shape.
        logp_ref_chosen: same shape; no gradient flows into it.
        logp_ref_rejected: same shape; no gradient flows into it.
        beta: temperature; inside the sigmoid.
        label_smoothing: assumed share of wrongly labeled pairs, in [0, 0.5); read by ``sigmoid`` and ``robust``.
        variant: see above.

    Returns:
        Same shape.

    Raises:
        ValueError: unknown variant, ``label_smoothing`` out of range, or shapes that differ.
    """
    check_same_shape(
        logp_chosen=logp_chosen,
        logp_rejected=logp_rejected,
        logp_ref_chosen=logp_ref_chosen,
        logp_ref_rejected=logp_ref_rejected,
    )
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must lie in [0, 0.5), got {label_smoothing}")
    h = (logp_chosen - logp_ref_chosen.detach()) - (logp_rejected - logp_ref_rejected.detach())
    if variant == "sigmoid":
        return -(1.0 - label_smoothing) * logsigmoid(beta * h) - label_smoothing * logsigmoid(-beta * h)
    if variant == "robust":
        right, wrong = logsigmoid(beta * h), logsigmoid(-beta * h)
        return (label_smoothing * wrong - (1.0 - label_smoothing) * right) / (1.0 - 2.0 * label_smoothing)
    if variant == "ipo":
        return (h - 0.5 / beta).square()
    if variant == "hinge":
        return (1.0 - beta * h).clamp(min=0.0)
    raise ValueError(f"unknown variant {variant!r}; expected one of {', '.join(get_args(Variant))}")


@dataclass(frozen=True)
class DPO(PreferenceObjective):
    """Direct preference optimization (arXiv 2305.18290) and its robust, IPO and hinge variants.

    The chosen item is paired with every rejected item of its list; the list's loss is the mean over its pairs, and 0
    without any. See ``dpo_loss`` for the formulas.

    Attributes:
        variant: ``sigmoid``, ``robust``, ``ipo`` or ``hinge``.
        label_smoothing: assumed share of wrongly labeled pairs, in [0, 0.5).
        length_normalized: divide an item's log-probability by its number of tokens (the IPO of TRL).
    """

    variant: Variant = "sigmoid"
    label_smoothing: float = 0.0
    length_normalized: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.label_smoothing < 0.5:
            raise RecpoError(f"DPO.label_smoothing must lie in [0, 0.5), got {self.label_smoothing}.")

    def item_logp(self, logp: Tensor, mask: Tensor) -> Tensor:
        """Sum, or mean with ``length_normalized``, over the kept tokens."""
        total = super().item_logp(logp, mask)
        return total / mask.bool().sum(-1).clamp(min=1) if self.length_normalized else total

    def list_loss(self, logp: Tensor, logp_ref: Tensor, lists: PreferenceLists, inputs: ObjectiveInputs) -> Tensor:
        """The mean of ``dpo_loss`` over the pairs of a list."""
        pairs = dpo_loss(
            lists.chosen(logp).unsqueeze(-1).expand_as(logp),
            zero_masked(logp, lists.is_rejected),
            lists.chosen(logp_ref).unsqueeze(-1).expand_as(logp),
            zero_masked(logp_ref, lists.is_rejected),
            beta=self.beta,
            label_smoothing=self.label_smoothing,
            variant=self.variant,
        )
        return lists.pair_mean(pairs)
