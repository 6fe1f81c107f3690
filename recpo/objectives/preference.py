"""Preferences against a reference policy: over pairs (DPO and its variants), and of single items (KTO).

``PreferenceLists`` and ``PreferenceObjective`` are the common part of the objectives that compare the items of a list;
the list-wise losses are in ``recpo.objectives.listwise_dpo``.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from recpo.base.contracts import Objective, Requirement
from recpo.base.errors import NonNegativeFloat, PositiveFloat, RecpoError, validate_range
from recpo.base.types import LossOutput, ObjectiveInputs
from recpo.objectives.inputs import advantage_shares, masked_mean, required, validate_log_probs
from recpo.ops.reduce import aggregate, check_same_shape, zero_masked


class PreferenceLists(NamedTuple):
    """Preference lists: one chosen and up to ``L`` rejected items per context.

    Attributes:
        kept: ``[B]`` bool, rows with exactly one chosen item; the others are dropped.
        is_chosen: ``[B, L]`` bool, the chosen position of kept rows.
        is_rejected: ``[B, L]`` bool, every other kept position of kept rows.
    """

    kept: Tensor
    is_chosen: Tensor
    is_rejected: Tensor

    def chosen(self, values: Tensor) -> Tensor:
        """``values [B, L]`` of the chosen item, ``[B]``; 0 in dropped rows."""
        return zero_masked(values, self.is_chosen).sum(-1)

    def pair_mean(self, values: Tensor) -> Tensor:
        """Mean of ``values [B, L]`` over the rejected items, ``[B]``; 0 without any."""
        return zero_masked(values, self.is_rejected).sum(-1) / self.is_rejected.sum(-1).clamp(min=1)


def preference_lists(inputs: ObjectiveInputs, objective: object) -> PreferenceLists:
    """Splits the slate axis into the chosen item and the rejected ones.

    An item is kept if any of its tokens is kept. Rows without exactly one kept chosen item are dropped.
    """
    kept = inputs.logp.mask.bool().any(-1)
    is_chosen = required(inputs, "chosen", objective).bool() & kept
    rows = is_chosen.sum(-1) == 1
    return PreferenceLists(rows, is_chosen & rows.unsqueeze(-1), kept & ~is_chosen & rows.unsqueeze(-1))


def grade_gaps(lists: PreferenceLists, inputs: ObjectiveInputs, objective: object) -> Tensor:
    """Grade of the chosen item minus the grade of each other item, ``[B, L]``.

    0 if the other item has the higher grade, or if either grade is unknown (items that were never shown).
    """
    grades = required(inputs, "grades", objective).detach()
    return zero_masked(
        (lists.chosen(grades).unsqueeze(-1) - grades).nan_to_num(nan=0.0).clamp(min=0.0), lists.is_rejected
    )


@dataclass(frozen=True)
class PreferenceObjective(Objective):
    """One chosen item against the rejected items of its list: ``mean over lists (list loss - nll_coef * logp_chosen)``.

    Log-probabilities are summed over the tokens of an item. For semantic ids, tokens that a rejected item shares with
    the chosen one can be left out of the rejected side (RAD-DPO, arXiv 2602.23964): mask them there.

    Attributes:
        beta: temperature of the implicit rewards ``beta (logp - logp_ref)``; larger = closer to the reference policy.
        nll_coef: weight of the likelihood of the chosen item, which keeps its probability from falling; 0 = none.
    """

    beta: PositiveFloat = 0.1
    nll_coef: float = 0.0

    @property
    def requires(self) -> frozenset[str]:
        """See ``Objective.requires``."""
        return frozenset({Requirement.CHOSEN, Requirement.REFERENCE})

    def count(self, inputs: ObjectiveInputs) -> Tensor:
        """Lists with exactly one chosen item, those without any rejected item included."""
        return preference_lists(inputs, self).kept.sum()

    @abstractmethod
    def list_loss(self, logp: Tensor, logp_ref: Tensor, lists: PreferenceLists, inputs: ObjectiveInputs) -> Tensor:
        """The preference loss ``[B]`` of token-summed log-probabilities ``[B, L]``, without the likelihood term."""

    def __call__(self, inputs: ObjectiveInputs) -> LossOutput:
        """See ``Objective``."""
        validate_log_probs(inputs.logp, self)
        lists = preference_lists(inputs, self)
        logp = self.item_logp(inputs.logp.policy, inputs.logp.mask)
        logp_ref = torch.zeros_like(logp)
        if self._compares():
            logp_ref = self.item_logp(required(inputs, "reference", self).detach(), inputs.logp.mask)
        total = self.list_loss(logp, logp_ref, lists, inputs)
        if self.nll_coef:
            total = total - self.nll_coef * lists.chosen(logp)
        loss = aggregate(total, lists.kept, count=inputs.denominator)
        return LossOutput(loss, self._health(logp.detach(), logp_ref, lists))

    def _compares(self) -> bool:
        """Whether there is a reference; fixed when a step is compiled."""
        return Requirement.REFERENCE in self.requires

    # what torch.compiler.assume_constant_result sets; the decorator would import the compiler, two seconds
    _compares._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def item_logp(self, logp: Tensor, mask: Tensor) -> Tensor:
        """Log-probability of each item, ``[B, L]``: the sum over its kept tokens."""
        return zero_masked(logp, mask).sum(-1)

    @torch.no_grad()
    def _health(self, logp: Tensor, logp_ref: Tensor, lists: PreferenceLists) -> dict[str, Tensor]:
        rewards = self.beta * (logp - logp_ref)
        margin = lists.chosen(rewards).unsqueeze(-1) - rewards
        paired = lists.is_rejected.any(-1)
        return {
            "reward_chosen": masked_mean(rewards, lists.is_chosen),
            "reward_rejected": masked_mean(rewards, lists.is_rejected),
            "reward_margin": masked_mean(margin, lists.is_rejected),
            "reward_accuracy": masked_mean(margin > 0, lists.is_rejected),
            "best_of_list": masked_mean(((margin > 0) | ~lists.is_rejected).all(-1), paired),
            "logp_chosen": masked_mean(logp, lists.is_chosen),
            "logp_rejected": masked_mean(logp, lists.is_rejected),
            "dropped_list_share": masked_mean(~lists.kept, torch.ones_like(lists.kept)),
            "lone_list_share": masked_mean(~paired, lists.kept),
        }


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
        RecpoError: unknown variant, ``label_smoothing`` out of range, or shapes that differ.
    """
    check_same_shape(
        logp_chosen=logp_chosen,
        logp_rejected=logp_rejected,
        logp_ref_chosen=logp_ref_chosen,
        logp_ref_rejected=logp_ref_rejected,
    )
    validate_range(0.0 <= label_smoothing < 0.5, "label_smoothing", "must lie in [0, 0.5)", label_smoothing)
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
    raise RecpoError(
        f"unknown variant {variant!r}; expected one of {', '.join(get_args(PairVariant))}",
        code="unknown_name",
        field="variant",
    )


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
        RecpoError: ``label_smoothing`` out of range, or shapes that differ.
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
        RecpoError: shapes that do not fit.
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
    margin: NonNegativeFloat = 0.0
    grade_gap_coef: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = 0.0 <= self.label_smoothing < 0.5
        validate_range(fits, "DPO.label_smoothing", "must lie in [0, 0.5)", self.label_smoothing)

    @property
    def requires(self) -> frozenset[str]:
        """See ``Objective.requires``."""
        requires = super().requires | ({Requirement.GRADES} if self.grade_gap_coef else frozenset())
        return requires - ({Requirement.REFERENCE} if self.variant == "simpo" else frozenset())

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


def kto_loss(
    logp: Tensor,
    logp_ref: Tensor,
    signs: Tensor,
    reference_point: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    mask: Tensor | None = None,
) -> Tensor:
    """One minus the value of an item, which saturates on both sides of a reference point, per item.

    With ``h = logp - logp_ref`` and ``z`` the reference point: the loss is ``desirable_weight (1 - s)`` with ``s =
    sigmoid(beta (h - z))`` for a positive sign, and ``undesirable_weight (1 - s)`` with ``s = sigmoid(beta (z - h))``
    for a negative sign. Gradient on ``logp``: ``-`` or ``+ weight beta s (1 - s)``. It is largest at ``h = z`` and
    almost 0 far from it on both sides, so the loss gives up on items that it cannot move.

    Args:
        logp: ``[..., S]``, summed over tokens.
        logp_ref: ``[..., S]``; no gradient flows into it.
        signs: ``[..., S]``: above 0 desirable, below 0 undesirable, 0 not labeled.
        reference_point: broadcasts to ``[..., S]``, not negative; no gradient flows into it.
        beta: temperature.
        desirable_weight: of the desirable items.
        undesirable_weight: of the undesirable items.
        mask: ``[..., S]``, True keeps.

    Returns:
        ``[..., S]``; 0 where masked or not labeled.

    Raises:
        RecpoError: shapes that differ.
    """
    check_same_shape(logp=logp, logp_ref=logp_ref, signs=signs, mask=mask)
    signs = zero_masked(signs.detach(), mask).sign()
    labeled = signs != 0
    lead = zero_masked(logp, labeled) - zero_masked(logp_ref.detach(), labeled) - reference_point.detach()
    weight = torch.where(signs > 0, lead.new_full((), desirable_weight), lead.new_full((), undesirable_weight))
    return zero_masked(weight * torch.sigmoid(-beta * signs * lead), labeled)


@dataclass(frozen=True)
class KTO(Objective):
    """Kahneman-Tversky optimization (arXiv 2402.01306): no pairs, only items that are good or bad on their own.

    Items with a positive advantage are desirable, and items with a negative one are undesirable. Only the sign is read;
    items with advantage 0 leave both the loss and its denominator. So any layout and any advantage works: only dislikes
    as undesirable (``TernaryAdvantage``), or everything below a grade (``GradedAdvantage``).

    Attributes:
        beta: temperature of the implicit rewards ``beta (logp - logp_ref)``.
        desirable_weight: weight of the desirable items; the paper keeps ``desirable_weight * number of desirable``
            within 1 to 4/3 of the same product of the undesirable ones.
        undesirable_weight: of the undesirable items.
        reference_point: scope of the estimate of KL(pi || pi_ref) that separates gains from losses: the mean of ``logp
            - logp_ref`` over the labeled items of the ``slate`` or of the micro-``batch``, at least 0.
    """

    beta: PositiveFloat = 0.1
    desirable_weight: NonNegativeFloat = 1.0
    undesirable_weight: NonNegativeFloat = 1.0
    reference_point: Literal["slate", "batch"] = "slate"

    requires = frozenset({Requirement.ADVANTAGES, Requirement.REFERENCE})
    zero_advantage_is_inert = True

    def _signs(self, inputs: ObjectiveInputs) -> Tensor:
        """``[B, S]`` of -1, 0 and 1; 0 where masked."""
        advantages = required(inputs, "advantages", self).detach()
        return zero_masked(advantages, inputs.logp.mask.bool().any(-1)).sign()

    def count(self, inputs: ObjectiveInputs) -> Tensor:
        """Labeled items."""
        return (self._signs(inputs) != 0).sum()

    def __call__(self, inputs: ObjectiveInputs) -> LossOutput:
        """See ``Objective``."""
        signs = self._signs(inputs)
        labeled = signs != 0
        scored = inputs.logp.mask.bool() & labeled.unsqueeze(-1)
        reference = required(inputs, "reference", self).detach()
        validate_log_probs(inputs.logp._replace(mask=scored), self)
        logp, logp_ref = (zero_masked(x, scored).sum(-1) for x in (inputs.logp.policy, reference))
        point = self._reference_point((logp - logp_ref).detach(), labeled)
        losses = kto_loss(
            logp,
            logp_ref,
            signs,
            point,
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )
        loss = aggregate(losses, labeled, count=inputs.denominator)
        rewards = self.beta * (logp - logp_ref).detach()
        metrics = {
            "reward_desirable": masked_mean(rewards, signs > 0),
            "reward_undesirable": masked_mean(rewards, signs < 0),
            "reference_point": masked_mean(point.expand_as(logp), labeled),
        }
        return LossOutput(loss, metrics | advantage_shares(signs, inputs.logp.mask.bool().any(-1)))

    def _reference_point(self, log_ratio: Tensor, labeled: Tensor) -> Tensor:
        """``[B, 1]`` or ``[1, 1]``, of log-ratios that are 0 where nothing is labeled."""
        over = (0, 1) if self.reference_point == "batch" else (1,)
        total = log_ratio.sum(over, keepdim=True)
        return (total / labeled.sum(over, keepdim=True).clamp(min=1)).clamp(min=0.0)
