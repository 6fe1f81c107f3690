"""Rewards of candidates, logged or generated."""

from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import or_
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from recpo.base.contracts import Requirement, RewardFunction, RewardScope
from recpo.base.errors import NonNegativeFloat, PositiveInt, RecpoError
from recpo.base.features import Reads
from recpo.base.types import FeedbackBatch, Slates
from recpo.log.prepared import Prepared
from recpo.ops.kernels import without_autocast
from recpo.ops.reduce import zero_masked
from recpo.rewards.factors import Factors


@dataclass(frozen=True)
class LoggedReward(RewardFunction):
    """``label + sum_b behaviors_b did_b - dislike_cost * disliked`` of logged items.

    An item without a label but with a dislike, or with a behavior that has a weight, is known; its label counts as 0.
    An item without label, dislike and behavior (a missing watch time, a sampled negative) has no reward. It leaves its
    slate, and so the group mean, the session and every denominator, unless ``unknown`` gives its reward.

    Attributes:
        dislike_cost: amount that a dislike subtracts.
        unknown: reward of an item without label, dislike and behavior; none = it is left out.
        behaviors: amount that a behavior adds, by its name in the prepared data, such as ``{"like": 1.0, "follow":
            2.0}``.
    """

    dislike_cost: float = 1.0
    unknown: float | None = None
    behaviors: dict[str, float] = field(default_factory=dict)
    #: bits of the behaviors in the training data (``for_behaviors``); not an option
    _bits: ClassVar[tuple[tuple[int, float], ...] | None] = None

    requires = frozenset({Requirement.LABELS})
    needs_only_slates = True

    @property
    def reads(self) -> Reads:
        """See ``RewardFunction.reads``."""
        return Reads(behaviors=bool(self.behaviors))

    def for_behaviors(self, names: tuple[str, ...]) -> Self:
        """See ``RewardFunction.for_behaviors``."""
        unknown = sorted(self.behaviors.keys() - set(names))
        if unknown:
            raise RecpoError(
                f"LoggedReward weighs the behavior {unknown[0]!r}, which the data lacks (it has "
                f"{', '.join(names) or 'none'}); name its column in `behaviors` of recpo prepare",
                code="unknown_name",
                field="LoggedReward.behaviors",
            )
        known = replace(self)
        bits = tuple((names.index(name), weight) for name, weight in self.behaviors.items())
        object.__setattr__(known, "_bits", bits)
        return known

    def __call__(self, batch: FeedbackBatch, candidates: Slates) -> Tensor:
        """See ``RewardFunction``."""
        if candidates.label is None:
            raise RecpoError(
                "LoggedReward needs labels, which these candidates lack.", code="missing_value", field="label"
            )
        label = candidates.label
        reward = label if self.unknown is None else label.nan_to_num(self.unknown)
        if self.behaviors:
            gain, did = self._gain(candidates)
            label = torch.where(did, label.nan_to_num(0.0) + gain, label)
            reward = torch.where(did, label, reward)
        if candidates.dislike is None:
            return reward
        return torch.where(candidates.dislike.bool(), label.nan_to_num(0.0) - self.dislike_cost, reward)

    def _gain(self, candidates: Slates) -> tuple[Tensor, Tensor]:
        """``[B, S]``: what behaviors add, and where there is one with a weight."""
        if candidates.behaviors is None or self._bits is None:
            raise RecpoError(
                "LoggedReward weighs behaviors, which these candidates lack: it is for logged slates of prepared data "
                "with behaviors (recpo.train reads them; elsewhere call for_behaviors and load them)",
                code="missing_value",
                field="behaviors",
            )
        done = [(candidates.behaviors >> bit & 1, weight) for bit, weight in self._bits]
        gain = torch.stack([bit * weight for bit, weight in done]).sum(0)
        return gain, torch.stack([bit.bool() for bit, _ in done]).any(0)


def validate_identity(reward: RewardFunction, name: str, data: Prepared) -> None:
    """Raises if a reward was made for other items, users or feedback than those that it scores.

    Args:
        reward: the reward.
        name: its name in the message.
        data: the data that it scores.

    Raises:
        RecpoError: the items differ, the reward keeps factors of other users, or it reads feedback levels or features
            of users of another meaning.
    """
    scopes = reward.scopes
    for one in scopes:
        if one.feedback is not None:
            one.feedback.validate_same(data.feedback, name, data.root)
    if any(one.catalog_checksum not in (None, data.catalog_checksum) for one in scopes):
        raise RecpoError(
            f"{name}: it was made for other items than {data.root} holds (items.parquet differs); use the prepared "
            "directory it was made with",
            code="mismatch",
            field=name,
        )
    if any(one.users_checksum not in (None, data.users_checksum) for one in scopes):
        raise RecpoError(
            f"{name}: it knows its users by their number, and was made for others than {data.root} holds "
            "(users.parquet differs); use the prepared directory it was made with, or for FactorReward set users to "
            "folded",
            code="mismatch",
            field=name,
        )
    if any(one.user_features_checksum not in (None, data.features_checksum("user")) for one in scopes):
        raise RecpoError(
            f"{name}: it reads features of users that {data.root} does not have, or has with other vocabularies or "
            "means; use the prepared directory it was made with",
            code="mismatch",
            field=name,
        )


@dataclass(frozen=True)
class HitReward(RewardFunction):
    """1 for a candidate that is a logged positive of its context; 0 for any other, including one that is not an item.

    A logged positive is an item of the context's logged slate (``batch.slates``) that is positive there
    (``Slates.positive``) and is not in the candidate's history yet: the candidate sees no more events than the log's
    position did. If a slate is one request, these are the items of the request; in a sequence, they are all later
    positives.
    """

    requires = frozenset({Requirement.POSITIVES})

    def __call__(self, batch: FeedbackBatch, candidates: Slates) -> Tensor:
        """See ``RewardFunction``."""
        return is_hit(batch, candidates).float()


def is_hit(batch: FeedbackBatch, candidates: Slates) -> Tensor:
    """``[B, G]`` bool: the candidate is a logged positive of its context; see ``HitReward``.

    Sorted by item, so memory does not grow with the product of candidates and logged positions.

    Raises:
        RecpoError: the logged slates do not say what is positive.
    """
    logged = batch.slates
    if logged.positive is None:
        raise RecpoError(
            "a hit is a logged positive, and the logged slates lack Slates.positive",
            code="missing_value",
            field="positive",
        )
    positive = logged.mask & logged.positive
    if logged.is_logged is not None:
        positive &= logged.is_logged.bool()
    # a logged position counts from when it lies ahead: keys order the positions by item, then by what they see
    width = batch.histories.item_ids.shape[1] + 1
    beyond = torch.iinfo(torch.int64).max
    keys = (logged.item_ids * width + logged.visible).masked_fill(~positive, beyond).sort(1).values
    wanted = (candidates.item_ids * width + candidates.visible).contiguous()
    place = torch.searchsorted(keys, wanted).clamp(max=keys.shape[1] - 1)
    found = keys.gather(1, place)
    is_same = (found >= wanted) & (found // width == candidates.item_ids) & (found != beyond)
    return is_same & candidates.mask & (candidates.item_ids > 0)


def rank_aware_reward(hits: Tensor, mask: Tensor | None = None) -> Tensor:
    """``1`` for a hit and ``-(1 / log2(rank + 1)) / sum over the misses of (1 / log2(rank' + 1))`` for a miss.

    Ranks count all kept candidates, best first, from 1 on; a group's misses sum to -1. In ReRe's code the sum runs over
    the hits as well, and a group without a hit gets 0 throughout; this is the form of the paper (equations 7 to 9).

    Args:
        hits: ``[..., G]`` bool, candidates of a group in descending probability under the policy.
        mask: ``[..., G]`` bool, True keeps; None = all.

    Returns:
        ``[..., G]`` float64, 0 where masked.
    """
    kept = torch.ones_like(hits, dtype=torch.bool) if mask is None else mask.bool()
    rank = kept.long().cumsum(-1).clamp(min=1)
    discount = 1.0 / torch.log2(rank.double() + 1.0)
    missed = zero_masked(discount, kept & ~hits)
    share = missed / missed.sum(-1, keepdim=True).clamp(min=torch.finfo(missed.dtype).tiny)
    return zero_masked(torch.where(hits, 1.0, -share), kept)


@dataclass(frozen=True)
class RankAwareReward(RewardFunction):
    """1 for a hit (see ``HitReward``), and a share of -1 for a miss; a higher rank gives a larger share.

    The candidates of a group must be in the order of the policy's own probability, best first. See
    ``rank_aware_reward``.
    """

    requires = frozenset({Requirement.POSITIVES, Requirement.RANKS})

    def __call__(self, batch: FeedbackBatch, candidates: Slates) -> Tensor:
        """See ``RewardFunction``."""
        return rank_aware_reward(is_hit(batch, candidates), candidates.mask).float()


@dataclass(frozen=True)
class ValidityReward(RewardFunction):
    """1 for a candidate that is an item and 0 for one that is not (id 0), for ``count`` random candidates per context.

    The other candidates have no validity reward (nan). The draw must be random: the most probable candidates are valid
    anyway, and rewarding only those makes the policy more certain (OneRec finds that their validity then rises while
    the validity of all candidates falls).

    Attributes:
        count: candidates per context that get a reward, or all if there are fewer; the paper takes 5 of 128.
    """

    count: PositiveInt = 5

    def __call__(self, batch: FeedbackBatch, candidates: Slates) -> Tensor:
        """See ``RewardFunction``. It draws from torch's random numbers, which training seeds at every step."""
        draws = torch.rand(candidates.mask.shape, device=candidates.mask.device).masked_fill(~candidates.mask, 2.0)
        judged = (draws.argsort(1).argsort(1) < self.count) & candidates.mask
        return torch.where(judged, (candidates.item_ids > 0).float(), torch.nan)


@dataclass(frozen=True)
class FactorReward(RewardFunction):
    """The grade, in about [0, 1], that a graded matrix factorization predicts for a candidate.

    ``mean + p_u · q_i + b_u + b_i - lower_bound * sqrt(variance)``, with the variance of
    ``recpo.rewards.graded.posterior_variance``. A policy finds the items that a model overrates. A lower bound
    reduces the reward of items and users with few events the most (Jeunen and Goethals, "Pessimistic Reward Models for
    Off-Policy Learning in Recommendation", RecSys 2021). A candidate that is not an item (id 0) has no reward (nan).

    One matrix product scores the full catalog. The reward depends only on user and item, not on the events of the
    history that a position sees (``Slates.visible``).

    Attributes:
        factors: directory that ``recpo factorize`` wrote, of the same items.
        users: "trained" takes the user factors that were fitted on all events of the training period, by
            ``FeedbackBatch.user_ids``; the prepared data must be the same (``users_checksum`` identifies them), and a
            user without an event there has the factors of an empty history. "folded" folds users in from
            ``FeedbackBatch.histories``.
        lower_bound: number of standard deviations of the posterior to subtract, at least 0. The uncertainty about a
            user comes from the batch's history, also with trained users.
    """

    factors: Path
    users: Literal["trained", "folded"] = "trained"
    lower_bound: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        # what is wrong is said before training starts
        super().__post_init__()
        if self.users not in ("trained", "folded"):
            raise RecpoError(
                f"FactorReward: users is {self.users!r}; it is trained or folded",
                code="unknown_name",
                field="FactorReward.users",
            )
        if self.users == "trained" and self._opened.user_factors is None:
            raise RecpoError(
                f"{self.factors} has no factors of users: set users to folded",
                code="unsupported",
                field="FactorReward.users",
            )
        if self.lower_bound and self._opened.item_covariance is None:
            raise RecpoError(
                f"{self.factors} was fitted with uncertainty: false, so it has no bounds; fit it again",
                code="unsupported",
                field="FactorReward.lower_bound",
            )

    @property
    def scopes(self) -> tuple[RewardScope, ...]:
        """See ``RewardFunction.scopes``: histories matter unless trained users replace them."""
        model = self._opened
        users = model.users_checksum if self.users == "trained" else None
        features = model.feature_checksums.get("user") if self.reads.user else None
        return (RewardScope(model.catalog_checksum, users, features, model.feedback if self._folds_in else None),)

    @property
    def reads(self) -> Reads:
        """See ``RewardFunction.reads``: what the factors read, unless trained users replace the fold-in."""
        return self._opened.reads if self._folds_in else Reads()

    @property
    def _folds_in(self) -> bool:
        return self.users == "folded" or self.lower_bound > 0

    @cached_property
    def _opened(self) -> Factors:
        return Factors.open(self.factors)

    @cached_property
    def _on_device(self) -> dict[torch.device, Factors]:
        return {}

    def model(self, device: torch.device | str = "cpu") -> Factors:
        """The factor model, its tensors on ``device``."""
        place = torch.device(device)
        if place not in self._on_device:
            self._on_device[place] = self._opened.to(place)
        return self._on_device[place]

    @torch.no_grad()
    def __call__(self, batch: FeedbackBatch, candidates: Slates) -> Tensor:
        """See ``RewardFunction``."""
        items = candidates.item_ids
        model = self.model(items.device)
        with without_autocast(items.device):
            users = None if self.users == "folded" else self._trained(model, batch)
            rewards = model.bounded_grades(batch.histories, items, self.lower_bound, users)
        return rewards.masked_fill(~candidates.mask | (items == 0), torch.nan)

    def _trained(self, model: Factors, batch: FeedbackBatch) -> Tensor:
        assert model.user_factors is not None
        if batch.user_ids is None:
            raise RecpoError(
                "FactorReward with trained users asks whose contexts they are, and this batch does not say",
                code="missing_value",
                field="user_ids",
            )
        on_cpu = batch.user_ids.device.type == "cpu"  # a step on another device would wait for the answer
        if on_cpu and len(batch.user_ids) and int(batch.user_ids.max()) >= len(model.user_factors):
            raise RecpoError(
                f"{self.factors} knows {len(model.user_factors):,} users, and the data have more: they are not those "
                "that it was fitted on; set users to folded, or run `recpo factorize` on these data",
                code="mismatch",
                field="FactorReward.users",
            )
        return model.user_factors[batch.user_ids]


class _CombinedReward(RewardFunction):
    """A reward computed from others, which are its option ``_parts``; what those were made for is theirs to say."""

    _parts: ClassVar[str]

    @property
    def parts(self) -> list[RewardFunction]:
        """The rewards that it is computed from."""
        rewards: list[RewardFunction] = getattr(self, self._parts)
        return rewards

    @property
    def scopes(self) -> tuple[RewardScope, ...]:
        """See ``RewardFunction.scopes``."""
        return tuple(one for part in self.parts for one in part.scopes)

    @property
    def requires(self) -> frozenset[str]:
        """See ``RewardFunction.requires``: what any of the parts cannot do without."""
        return frozenset().union(*(part.requires for part in self.parts))

    @property
    def reads(self) -> Reads:
        """See ``RewardFunction.reads``: what any of the parts reads."""
        return reduce(or_, (part.reads for part in self.parts))

    def for_behaviors(self, names: tuple[str, ...]) -> Self:
        """See ``RewardFunction.for_behaviors``."""
        adapted: Any = {self._parts: [part.for_behaviors(names) for part in self.parts]}
        changed: Self = replace(self, **adapted)  # type: ignore[type-var]
        return changed


@dataclass(frozen=True)
class EnsembleReward(_CombinedReward):
    """``mean - lower_bound * standard deviation`` over the members, such as models of different seeds.

    If members that were fitted the same way disagree, the log has little information. A lower bound keeps a policy away
    from items that only some members rate high (Jeunen and Goethals, RecSys 2021). All members must have the same unit.
    The standard deviation divides by the number of members. A candidate that any member does not know is unknown (nan).

    Attributes:
        members: at least two rewards.
        lower_bound: number of standard deviations to subtract, at least 0.
    """

    _parts: ClassVar = "members"

    members: list[RewardFunction]
    lower_bound: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        if len(self.members) < 2:
            raise RecpoError(
                f"EnsembleReward: {len(self.members)} members; give at least two",
                code="out_of_range",
                field="EnsembleReward.members",
            )
        super().__post_init__()

    def __call__(self, batch: FeedbackBatch, candidates: Slates) -> Tensor:
        """See ``RewardFunction``."""
        rewards = torch.stack([member(batch, candidates).float() for member in self.members])
        deviation, mean = torch.std_mean(rewards, 0, correction=0)
        return mean - self.lower_bound * deviation


@dataclass(frozen=True)
class WeightedSum(_CombinedReward):
    """``sum_i weight_i reward_i`` over the rewards that are known.

    A candidate that some rewards do not know (nan) gets the sum of the others, as if the unknown ones were 0. A
    candidate that no reward knows stays unknown. With ``strict``, all rewards must know it.

    Attributes:
        rewards: the terms.
        weights: one per term; may be negative.
        strict: a candidate that any of the rewards does not know is unknown.
    """

    _parts: ClassVar = "rewards"

    rewards: list[RewardFunction]
    weights: list[float]
    strict: bool = False

    def __post_init__(self) -> None:
        if len(self.rewards) != len(self.weights) or not self.rewards:
            raise RecpoError(
                f"WeightedSum: {len(self.rewards)} rewards and {len(self.weights)} weights; give at least one reward, "
                "and one weight for each",
                code="wrong_shape",
                field="WeightedSum.weights",
            )

    def __call__(self, batch: FeedbackBatch, candidates: Slates) -> Tensor:
        """See ``RewardFunction``."""
        terms = torch.stack([reward(batch, candidates).float() for reward in self.rewards])
        weights = torch.tensor(self.weights, device=terms.device)
        unknown = terms.isnan()
        total = (terms.nan_to_num(0.0) * weights[:, None, None]).sum(0)
        return total.masked_fill(unknown.any(0) if self.strict else unknown.all(0), torch.nan)
