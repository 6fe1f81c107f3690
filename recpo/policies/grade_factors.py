"""The grades of a factor model as a module, which tilted policies and the factorization as a policy share."""

# Annotations are not postponed: the command line reads the types of options from the fields of dataclasses.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from recpo.base.errors import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    RecpoError,
    validate_range,
    validate_ranges,
)
from recpo.base.features import UNKNOWN, Categories, Category, Feature, FeatureSchema, Number, Reads, Vector, of_type
from recpo.base.feedback import GRADES
from recpo.base.types import Features, Histories
from recpo.ops.small_systems import (
    damped_mean,
    item_variance_vectors,
    normal_equations,
    solve_positive_definite,
    user_variance_vectors,
    with_one,
)


@dataclass(frozen=True, kw_only=True)
class GradeFactorsOptions:
    """Numbers of a factor model of grades, which runs and bundles save beside its tensors."""

    rank: NonNegativeInt
    """r, number of factors; 0 = averages of users and items"""
    mean: float
    """mean grade"""
    ridge: PositiveFloat
    """weight of ``|p - c|^2`` when a user is folded in"""
    bias_ridge: PositiveFloat
    """weight of ``(b - d)^2``"""
    max_history: PositiveInt
    """number of most recent events that ``fold_in`` reads"""
    lower_bound: NonNegativeFloat = 0.0
    """number of standard deviations of its posterior by which a grade is reduced"""
    user_features: bool = False
    """the prior means ``(c, d)`` depend on features of the user"""
    item_features: bool = False
    """the prior means of items without events depend on their features"""
    noise: NonNegativeFloat = 0.0
    """variance of a grade around its expectation"""

    def __post_init__(self) -> None:
        """Validates the ranges."""
        validate_ranges(self)


class GradeFactors(nn.Module):
    """``grade(h, i) = mean + p(h) · q_i + b(h) + b_i``: the expected grade of an item (``recpo.base.feedback.GRADES``).

    ``(p, b)`` of a history is the ridge regression of the graded events among its last ``max_history`` on the factors
    of their items, as in ``recpo.rewards.factors.Factors.fold_in``. With a ``lower_bound``, the grade is reduced
    by that many standard deviations of its posterior, ``sqrt(s(h) · t_i)``. This is the variance of
    ``recpo.rewards.graded`` written as a dot product. ``set_schema`` makes the rows of ``user_prior`` and
    ``item_prior`` that belong to features.

    Args:
        num_items: V.
        options: the numbers of the model.

    Attributes:
        item_factors: ``[V + 1, r]``, ``q``; row 0 is zero and not an item.
        item_bias: ``[V + 1]``.
        factor_variance: ``[V + 1, r]``, variance of the factors; 0 if they are treated as exact.
        history_prior: ``[V + 1, r + 1]``; its damped mean over a history is ``(c, d)``, the prior mean of ``(p, b)``.
        user_prior: ``[C, r + 1]``, what the features of a user add to ``(c, d)`` (``linear_in_features``); None = they
            are not read.
        item_prior: ``[C + 1, 2 (r + 1)]``, ``(q, b)`` and ``history_prior`` of an item without events: what its
            features say, and in the last row what is true of all.
        prior_variance: ``[r]``, ``factor_variance`` of such an item.
        prior_covariance: ``[r + 1, r + 1]``, the inverse of its normal matrix.
        item_variances: ``[V + 1, variance_columns]``, ``t``.
        max_history: number of most recent events that ``fold_in`` reads.
        reads: features of users, or nothing.
        variance_columns: width of ``s`` and ``t``: ``(r + 1) (r + 2)``; 0 without a lower bound.
    """

    item_factors: Tensor
    item_bias: Tensor
    factor_variance: Tensor
    history_prior: Tensor
    user_prior: Tensor | None
    item_prior: Tensor
    prior_variance: Tensor
    prior_covariance: Tensor
    item_variances: Tensor
    _grades: Tensor

    def __init__(self, num_items: int, options: GradeFactorsOptions) -> None:
        super().__init__()
        self.options, rank = options, options.rank
        self.max_history, self.reads = options.max_history, Reads(user=options.user_features)
        self.variance_columns = (rank + 1) * (rank + 2) if options.lower_bound else 0
        self.register_buffer("item_factors", torch.zeros(num_items + 1, rank))
        self.register_buffer("item_bias", torch.zeros(num_items + 1))
        self.register_buffer("factor_variance", torch.zeros(num_items + 1, rank))
        self.register_buffer("history_prior", torch.zeros(num_items + 1, rank + 1))
        self._schema = FeatureSchema()
        self.register_buffer("user_prior", None)
        self.register_buffer("item_prior", torch.zeros(1, 2 * (rank + 1)))
        self.register_buffer("prior_variance", torch.zeros(rank))
        self.register_buffer("prior_covariance", torch.eye(rank + 1) / options.ridge)
        # nothing to store without a bound
        variances = torch.zeros(num_items + 1, self.variance_columns)
        self.register_buffer("item_variances", variances, persistent=bool(options.lower_bound))
        # the value for an unknown level is arbitrary: such an event has weight 0
        self.register_buffer("_grades", torch.tensor([0.0, *GRADES[1:]], dtype=torch.float64), persistent=False)

    def set_schema(self, schema: FeatureSchema, behaviors: Sequence[str] = ()) -> None:
        """Creates the priors for the features of a schema, on the sides that the model reads. It reads no behaviors.

        Raises:
            RecpoError: the model reads features of a side, and the schema has none there.
        """
        for side, read in (("user", self.options.user_features), ("item", self.options.item_features)):
            if read and not getattr(schema, side):
                raise RecpoError(
                    f"the factors read features of {side}s and the prepared log has none: take the data that they were "
                    "fitted on",
                    code="mismatch",
                    field=f"{side}_features",
                )
        self._schema, width, zero = schema, self.options.rank + 1, self.history_prior
        if self.options.user_features:
            self.user_prior = zero.new_zeros(num_columns(schema.user), width)
        if self.options.item_features:
            self.item_prior = zero.new_zeros(num_columns(schema.item) + 1, 2 * width)

    def assign(self, tensors: Mapping[str, Tensor], noise: float) -> None:
        """Sets the tensors of a factor model. Tensors with a row per item have rows for the items 1..V.

        Args:
            tensors: by their names (``recpo.rewards.factors.Factors.tensors``); missing tensors do not change.
            noise: variance of a grade around its expectation.

        Raises:
            RecpoError: missing covariances although there is a bound.
        """
        for name in ("item_factors", "item_bias", "factor_variance", "history_prior"):
            getattr(self, name)[1:] = tensors[name]
        for name in ("user_prior", "item_prior", "prior_variance", "prior_covariance"):
            own: Tensor | None = getattr(self, name)
            if own is not None and name in tensors:  # without item features, only the last row of item_prior is used
                own.copy_(tensors[name][-len(own) :])
        if not self.options.lower_bound:
            return
        if "item_covariance" not in tensors:
            raise RecpoError(
                "these factors were fitted with uncertainty: false, so they have no bounds: fit them again, or set "
                "lower_bound to 0",
                code="missing_value",
                field="lower_bound",
            )
        self.item_variances[1:] = noise * item_variance_vectors(tensors["item_factors"], tensors["item_covariance"])

    def new_item_rows(self, features: Features) -> dict[str, Tensor]:
        """Rows for items without events, of every tensor that has a row per item, by the name of the tensor.

        Args:
            features: of the items ``[N]``.
        """
        rank, count = self.options.rank, len(features.codes)
        means = self.item_prior[-1].expand(count, -1)
        if self.options.item_features:
            means = means + linear_in_features(self._schema.item, features, self.item_prior[:-1])
        factors, bias, history = means.split([rank, 1, rank + 1], 1)
        rows = {"item_factors": factors, "item_bias": bias[:, 0], "history_prior": history}
        rows["factor_variance"] = self.prior_variance.expand(count, -1)
        if self.options.lower_bound:
            covariance = self.prior_covariance.expand(count, -1, -1)
            rows["item_variances"] = self.options.noise * item_variance_vectors(factors, covariance)
        return rows

    def fold_in(self, histories: Histories) -> Tensor:
        """``(p, b)`` of every history and, with a lower bound, ``s``: ``[B, r + 1 + variance_columns]`` float32.

        ``argmin sum_h [(g_h - mean - b_i(h) - p · q_i(h) - b)^2 + sum_j v_i(h)j p_j^2] + ridge |p - c|^2 + bias_ridge
        (b - d)^2`` over the last ``max_history`` events, with the variances ``v`` of the factors, in float64. The
        result is the prior mean if no event has a grade: what the features of the user say, or zero. Positions after
        ``lengths`` are ignored.

        Raises:
            RecpoError: the model reads features of users and the histories have none.
        """
        item_ids, (feedback, recent) = histories.item_ids, recent_feedback(histories, self.options.max_history)
        known = recent & (feedback > 0)
        rows = with_one(self.item_factors[item_ids].double())
        targets = self._grades[feedback] - self.options.mean - self.item_bias[item_ids]
        variance = (self.factor_variance[item_ids].double() * known[..., None]).sum(1)
        prior = F.pad(torch.full_like(variance, self.options.ridge), (0, 1), value=self.options.bias_ridge)
        means = damped_mean(self.history_prior[item_ids], known)
        if self.user_prior is not None:
            means = means + user_means(self._schema.user, histories, self.user_prior)
        pull = prior * means
        matrix, right = normal_equations(rows, targets, known, F.pad(variance, (0, 1)) + prior, pull)
        if not self.options.lower_bound:
            return solve_positive_definite(matrix, right).float()
        identity = torch.eye(rows.shape[-1], dtype=rows.dtype, device=rows.device).expand_as(matrix)
        solved = solve_positive_definite(matrix, torch.cat([right[..., None], identity], 2))
        weights = solved[..., 0].float()
        variances = self.options.lower_bound**2 * user_variance_vectors(weights, solved[..., 1:].float())
        return torch.cat([weights, variances], 1)

    def tilt(self, users: Tensor, temperature: float) -> Tensor:
        """``[p / t, 1 / t, s / t^2]`` of folded-in users at the temperature t; multiplies ``item_vectors``.

        The part that all items share (``mean + b``) is left out.
        """
        rank = self.item_factors.shape[1]
        own = torch.cat([users[:, :rank], torch.ones_like(users[:, :1])], 1) / temperature
        return torch.cat([own, users[:, rank + 1 :] / temperature**2], 1) if self.options.lower_bound else own

    def item_vectors(self) -> Tensor:
        """``[q, b, t]`` of all items, including row 0: ``[V + 1, r + 1 + variance_columns]``."""
        variances = [self.item_variances] if self.options.lower_bound else []
        return torch.cat([self.item_factors, self.item_bias[:, None], *variances], 1)

    def relative_grades(self, users: Tensor, item_ids: Tensor) -> Tensor:
        """Grades of the items ``[B, C]`` minus the bound, up to a constant per user; ``users`` is from ``fold_in``."""
        rank = self.item_factors.shape[1]
        products = (self.item_factors[item_ids] @ users[:, :rank, None]).squeeze(-1) + self.item_bias[item_ids]
        if not self.options.lower_bound:
            return products
        variance = (self.item_variances[item_ids] @ users[:, rank + 1 :, None]).squeeze(-1)
        return products - variance.clamp_min(0.0).sqrt()


def num_columns(features: Sequence[Feature]) -> int:
    """C, the number of rows of the weights of ``linear_in_features``."""
    coded: list[Category | Categories] = [*of_type(features, Category), *of_type(features, Categories)]
    widths = [int(one.width or 0) for one in of_type(features, Vector)]
    return sum(int(one.num_codes or 0) for one in coded) + len(of_type(features, Number)) + sum(widths)


def linear_in_features(features: Sequence[Feature], values: Features, weights: Tensor) -> Tensor:
    """Sums of ``weights`` over what is known: ``[..., d]`` of features with the leading shape ``[...]``.

    A category has one row of the weights per code, and gives that of its code; a set of n categories gives the sum of n
    rows, divided by ``sqrt(n)``; a number, and a component of a vector, has one row, which it multiplies. A missing
    value gives 0, and a code beyond the vocabulary counts as unknown.

    Args:
        features: the fitted features.
        values: their values.
        weights: ``[C, d]``: first the categories, then the sets of categories, the numbers and the vectors.
    """
    coded: list[Category | Categories] = [*of_type(features, Category), *of_type(features, Categories)]
    begin, total = 0, weights.new_zeros(*values.numbers.shape[:-1], weights.shape[1])
    for one, codes in zip(coded, [*values.codes[..., None].unbind(-2), *values.lists], strict=True):
        size = int(one.num_codes or 0)
        known = (codes > 0).to(weights.dtype)
        share = known / known.sum(-1, keepdim=True).clamp_min(1.0).sqrt()
        rows = F.embedding(torch.where(codes < size, codes, UNKNOWN), weights[begin : begin + size])
        total, begin = total + (rows * share[..., None]).sum(-2), begin + size
    if begin == len(weights):
        return total
    return total + torch.cat([values.numbers, *values.vectors], -1).nan_to_num(0.0).to(weights.dtype) @ weights[begin:]


def user_means(features: Sequence[Feature], histories: Histories, weights: Tensor) -> Tensor:
    """``linear_in_features`` of the users of histories, ``[B, d]`` float64.

    Raises:
        RecpoError: the histories have no features of users.
    """
    return linear_in_features(features, user_features_of(histories), weights.double())


def user_features_of(histories: Histories) -> Features:
    """The features of the users of histories.

    Raises:
        RecpoError: the histories have none.
    """
    if histories.user is None:
        raise RecpoError(
            "the model reads features of users, and these histories have none: read them with the histories, or give "
            "user_features",
            code="missing_value",
            field="user_features",
        )
    return histories.user


def recent_feedback(histories: Histories, max_history: int) -> tuple[Tensor, Tensor]:
    """Feedback levels ``[B, H]``, 0 where there are none, and which events are items among the last ``max_history``."""
    item_ids, feedback = histories.item_ids, histories.feedback
    place = torch.arange(item_ids.shape[1], device=item_ids.device)
    lengths = histories.lengths[:, None]
    recent = (place < lengths) & (place >= lengths - max_history) & (item_ids > 0)
    return torch.zeros_like(item_ids) if feedback is None else feedback, recent


def validate_temperature(temperature: float) -> None:
    """Raises ``RecpoError`` unless ``temperature`` is a number above 0."""
    rule = "must be a number above 0 (small follows the factors, large the policy)"
    validate_range(0 < temperature < float("inf"), "temperature", rule, temperature)
