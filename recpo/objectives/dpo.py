"""Direct preference optimization over pairs (arXiv 2305.18290) and its variants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from recpo.base.errors import RecpoError
from recpo.base.types import ObjectiveInputs
from recpo.objectives.preference import PreferenceLists, PreferenceObjective, grade_gaps
from recpo.ops.reduce import check_same_shape, zero_masked

PairVariant = Literal["sigmoid", "robust", "ipo", "hinge"]
"""Losses of one pair against a reference policy; see ``dpo_loss``."""

Variant = Literal["sigmoid", "robust", "ipo", "hinge", "simpo", "dmpo"]
"""All variants of ``DPO``: those of a pair, no reference (``simpo_loss``), the mean of the rejected items
(``dmpo_loss``)."""


def dpo_loss(
    logp_chosen: Tensor,
    logp_rejected: Tensor,
    logp_ref_chosen: Tensor,
    logp_ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    variant: PairVariant = "sigmoid",
    margin: float | Tensor = 0.0,
) -> Tensor:
    """Preference loss of pairs, by their lead ``h = (logp_c - logp_ref_c) - (logp_r - logp_ref_r) - margin / beta``.

    With ``ls`` the smoothing:

    - ``sigmoid`` (arXiv 2305.18290): ``-(1 - ls) logsigmoid(beta h) - ls logsigmoid(-beta h)``
    - ``robust`` (rDPO, arXiv 2403.00409): ``[-(1 - ls) logsigmoid(beta h) + ls logsigmoid(-beta h)] / (1 - 2 ls)``
    - ``ipo`` (arXiv 2310.12036): ``(h - 1 / (2 beta))^2``
    - ``hinge`` (SLiC, arXiv 2305.10425): ``max(0, 1 - beta h)``

    Gradient of ``sigmoid`` on ``logp_chosen``: ``-beta sigmoid(-beta h)``, and its opposite on ``logp_rejected``: pairs
    in the wrong order have the largest weight.

    Args:
        logp_chosen: ``[B]`` (any shape), summed over tokens.
        logp_rejected: same shape.
        logp_ref_chosen: same shape; no gradient flows into it.
        logp_ref_rejected: same shape; no gradient flows into it.
        beta: temperature; inside the sigmoid.
        label_smoothing: assumed share of wrongly labeled pairs, in [0, 0.5); read by ``sigmoid`` and ``robust``.
        variant: see above.
        margin: lead in implicit reward (``beta`` times the log-ratio) that the chosen item should have (DPO with an
            offset, arXiv 2402.10571; by the gap of the labels, RecPO, arXiv 2506.02261); same shape, or one number. No
            gradient flows into it.

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
    h = h - (margin.detach() if isinstance(margin, Tensor) else margin) / beta
    if variant == "sigmoid":
        return -(1.0 - label_smoothing) * logsigmoid(beta * h) - label_smoothing * logsigmoid(-beta * h)
    if variant == "robust":
        right, wrong = logsigmoid(beta * h), logsigmoid(-beta * h)
        return (label_smoothing * wrong - (1.0 - label_smoothing) * right) / (1.0 - 2.0 * label_smoothing)
    if variant == "ipo":
        return (h - 0.5 / beta).square()
    if variant == "hinge":
        return (1.0 - beta * h).clamp(min=0.0)
    raise ValueError(f"unknown variant {variant!r}; expected one of {', '.join(get_args(PairVariant))}")


def simpo_loss(
    logp_chosen: Tensor,
    logp_rejected: Tensor,
    *,
    beta: float = 2.0,
    margin: float | Tensor = 1.0,
    label_smoothing: float = 0.0,
) -> Tensor:
    """SimPO (arXiv 2405.14734), per pair: no reference policy, log-probabilities per token, a target margin.

    ``-(1 - ls) logsigmoid(x) - ls logsigmoid(-x)`` with ``x = beta (logp_c - logp_r) - margin``. Gradient on
    ``logp_c``: ``-beta sigmoid(-x)`` without smoothing. No term keeps the policy close to its start.

    Args:
        logp_chosen: ``[B]`` (any shape), the mean over tokens.
        logp_rejected: same shape, the mean over tokens.
        beta: temperature.
        margin: lead in ``beta logp`` that the chosen item should have; same shape, or one number.
        label_smoothing: assumed share of wrongly labeled pairs, in [0, 0.5).

    Returns:
        Same shape.

    Raises:
        ValueError: ``label_smoothing`` out of range, or shapes that differ.
    """
    zero = torch.zeros_like(logp_chosen), torch.zeros_like(logp_rejected)
    return dpo_loss(logp_chosen, logp_rejected, *zero, beta=beta, margin=margin, label_smoothing=label_smoothing)


def dmpo_loss(
    logp_chosen: Tensor,
    logp_rejected: Tensor,
    logp_ref_chosen: Tensor,
    logp_ref_rejected: Tensor,
    *,
    beta: float = 1.0,
    label_smoothing: float = 0.0,
    margin: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """DMPO (Bai et al., CIKM 2024): the chosen item against the mean of the rejected ones, per list.

    ``-logsigmoid(r_c - mean_l r_l - mean_l margin_l)`` with ``r = beta (logp - logp_ref)``. All L rejected items of a
    list get the same gradient, 1 / L of the chosen item's. In softmax-DPO the hardest one gets the largest gradient.

    Args:
        logp_chosen: ``[B]``, summed over tokens.
        logp_rejected: ``[B, L]``, summed over tokens.
        logp_ref_chosen: ``[B]``; no gradient flows into it.
        logp_ref_rejected: ``[B, L]``; no gradient flows into it.
        beta: temperature.
        label_smoothing: see ``dpo_loss``.
        margin: ``[B, L]``, see ``dpo_loss``; None = 0.
        mask: ``[B, L]``, True keeps.

    Returns:
        ``[B]``; 0 for a list without any rejected item.

    Raises:
        ValueError: shapes that do not fit.
    """
    check_same_shape(logp_rejected=logp_rejected, logp_ref_rejected=logp_ref_rejected, margin=margin, mask=mask)
    kept = torch.ones_like(logp_rejected, dtype=torch.bool) if mask is None else mask.bool()
    size = kept.sum(-1).clamp(min=1)
    rejected, ref_rejected = (zero_masked(x, kept).sum(-1) / size for x in (logp_rejected, logp_ref_rejected))
    loss = dpo_loss(
        logp_chosen,
        rejected,
        logp_ref_chosen,
        ref_rejected,
        beta=beta,
        label_smoothing=label_smoothing,
        margin=0.0 if margin is None else zero_masked(margin, kept).sum(-1) / size,
    )
    return zero_masked(loss, kept.any(-1))


@dataclass(frozen=True)
class DPO(PreferenceObjective):
    """Direct preference optimization (arXiv 2305.18290) and the robust, IPO, hinge, SimPO and DMPO variants.

    The chosen item is paired with every rejected item of its list. The list's loss is the mean over its pairs, and 0
    without pairs. See ``dpo_loss`` for the formulas, ``simpo_loss`` for the variant without a reference policy, and
    ``dmpo_loss`` for the variant that compares the chosen item with the mean of the rejected items.

    Attributes:
        variant: ``sigmoid``, ``robust``, ``ipo``, ``hinge``, ``simpo`` or ``dmpo``.
        label_smoothing: assumed share of wrongly labeled pairs, in [0, 0.5); ``ipo`` and ``hinge`` do not read it.
        length_normalized: divide an item's log-probability by its number of tokens (the IPO of TRL); ``simpo`` always
            does.
        margin: lead in implicit reward that the chosen item should have over a rejected one; the gamma of SimPO.
        grade_gap_coef: factor on the gap of the two items' grades, added to the margin (RecPO, arXiv 2506.02261). The
            gap is 0 if either grade is unknown or the rejected item has the higher grade.
    """

    variant: Variant = "sigmoid"
    label_smoothing: float = 0.0
    length_normalized: bool = False
    margin: float = 0.0
    grade_gap_coef: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.label_smoothing < 0.5:
            raise RecpoError(f"DPO.label_smoothing must lie in [0, 0.5), got {self.label_smoothing}.")
        for name in ("margin", "grade_gap_coef"):
            if not getattr(self, name) >= 0.0:
                raise RecpoError(f"DPO.{name} must not be negative, got {getattr(self, name)}.")

    @property
    def requires(self) -> frozenset[str]:
        """See ``Objective.requires``."""
        requires = super().requires | ({"grades"} if self.grade_gap_coef else frozenset())
        return requires - ({"reference"} if self.variant == "simpo" else frozenset())

    def item_logp(self, logp: Tensor, mask: Tensor) -> Tensor:
        """Sum, or mean with ``length_normalized`` and in SimPO, over the kept tokens."""
        total = super().item_logp(logp, mask)
        is_mean = self.length_normalized or self.variant == "simpo"
        return total / mask.bool().sum(-1).clamp(min=1) if is_mean else total

    def list_loss(self, logp: Tensor, logp_ref: Tensor, lists: PreferenceLists, inputs: ObjectiveInputs) -> Tensor:
        """The mean of ``dpo_loss`` over the pairs of a list, or ``dmpo_loss``."""
        margin = torch.full_like(logp, self.margin)
        if self.grade_gap_coef:
            margin = margin + self.grade_gap_coef * grade_gaps(lists, inputs, self)
        chosen, ref_chosen = lists.chosen(logp), lists.chosen(logp_ref)
        options = {"beta": self.beta, "label_smoothing": self.label_smoothing}
        if self.variant == "dmpo":
            return dmpo_loss(chosen, logp, ref_chosen, logp_ref, margin=margin, mask=lists.is_rejected, **options)
        pairs = dpo_loss(
            chosen.unsqueeze(-1).expand_as(logp),
            zero_masked(logp, lists.is_rejected),
            ref_chosen.unsqueeze(-1).expand_as(logp),
            zero_masked(logp_ref, lists.is_rejected),
            margin=margin,
            variant="sigmoid" if self.variant == "simpo" else self.variant,
            **options,
        )
        return lists.pair_mean(pairs)
