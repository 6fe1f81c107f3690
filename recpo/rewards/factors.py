"""A fitted factor model of graded feedback: predictions, fold-in, and the directory on disk.

::

    factors/factors.safetensors   item factors and biases, user factors, covariances
    factors/manifest.json         mean, ridge, noise, checksums, how the model was selected

Uncertainty of a factor model's grades: the posterior variance of two ridge regressions.

``noise (x_uᵀ C_i x_u + y_iᵀ C_u y_i)`` with ``x_u = [p_u, 1]``, ``y_i = [q_i, 1]`` and the inverses ``C`` of the normal
matrices: the uncertainty of the item plus the uncertainty of the user, each given the other. It shrinks with every
event of either. It is a dot product of one vector per user and one per item.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from recpo.artifacts.artifact import Artifact
from recpo.artifacts.checksums import verify
from recpo.artifacts.documents import write_tensors
from recpo.artifacts.outputs import output_directory
from recpo.base.errors import RecpoError
from recpo.base.features import FeatureSchema, Reads, Side
from recpo.base.feedback import GRADES, FeedbackDefinition
from recpo.base.types import Histories, Recommendations
from recpo.log.prepared import Prepared
from recpo.ops import small_systems
from recpo.policies import grade_factors
from recpo.policies.catalog_search import best_by_blocks

MANIFEST: Final = "manifest.json"
_TENSORS: Final = "factors.safetensors"
_NUMBERS: Final = ("mean", "ridge", "bias_ridge", "noise", "lower_bound")
# float64 rows of one block of histories
_FOLD_IN_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class Factors(Artifact):
    """``grade(u, i) = mean + p_u · q_i + b_u + b_i``, the expected grade (``recpo.base.feedback.GRADES``) of an item.

    Attributes:
        mean: the mean grade.
        item_factors: ``[V, r]`` float32, ``q`` of the items 1..V.
        item_bias: ``[V]`` float32; with the popularity of the item where ``with_popularity`` added it.
        factor_variance: ``[V, r]`` float32, variance of the item factors, used when a user is folded in; 0 = exact.
        history_prior: ``[V, r + 1]`` float32. The damped mean (``recpo.ops.small_systems.damped_mean``) over the
            events of a history is the prior mean of its user's factors and bias; 0 = the prior mean is 0 for everybody.
        user_prior: ``[C, r + 1]`` float32, what the features of a user add to the prior mean
            (``recpo.policies.grade_factors.linear_in_features``); None = no features of users are read.
        item_prior: ``[C + 1, 2 (r + 1)]`` float32, factors, bias and ``history_prior`` of an item without events: what
            its features say, and in the last row what is true of all; None = 0.
        prior_variance: ``[r]`` float32, ``factor_variance`` of such an item; None = 0.
        prior_covariance: ``[r + 1, r + 1]`` float32, the inverse of its normal matrix; None = ``I / ridge``.
        ridge: weight of ``|p_u - prior mean|^2`` when a user is folded in: the noise divided by the variance of a user
            factor.
        bias_ridge: weight of ``(b_u - prior mean)^2``.
        user_factors: ``[U, r + 1]`` float32 of the training users by their prepared index, bias last; for users without
            events, what ``user_prior`` says. None = users are only folded in from their history.
        item_covariance: ``[V, r + 1, r + 1]`` float32, inverses of the normal matrices of the items; None = no bounds.
        noise: variance of a grade around its expectation on the training events.
        catalog_checksum: identifies the items (``Prepared.catalog_checksum``).
        max_history: number of most recent events that ``fold_in`` reads.
        users_checksum: identifies the users of ``user_factors`` (``Prepared.users_checksum``); None = unknown.
        feedback: defines the grades that it predicts, and those that ``fold_in`` reads; None = unknown.
        lower_bound: number of posterior standard deviations (``recpo.rewards.graded``) that lists and rankings
            subtract from the grade; 0 = rank by the grade itself.
        features: the fitted features that ``user_prior`` and ``item_prior`` belong to.
        feature_checksums: identify what was fitted of them, by side (``Prepared.features_checksum``).
        facts: how the model was fitted and selected, for people.
    """

    kind: ClassVar = "factors"
    version: ClassVar = 11
    made_by: ClassVar = "recpo factorize"

    mean: float
    item_factors: Tensor
    item_bias: Tensor
    factor_variance: Tensor
    history_prior: Tensor
    ridge: float
    bias_ridge: float
    user_factors: Tensor | None
    item_covariance: Tensor | None
    noise: float
    catalog_checksum: str
    max_history: int
    users_checksum: str | None = None
    feedback: FeedbackDefinition | None = None
    lower_bound: float = 0.0
    user_prior: Tensor | None = None
    item_prior: Tensor | None = None
    prior_variance: Tensor | None = None
    prior_covariance: Tensor | None = None
    features: FeatureSchema = field(default_factory=FeatureSchema)
    feature_checksums: Mapping[Side, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Rejects tensors that do not fit together."""
        if not 0 <= self.lower_bound < float("inf") or (self.lower_bound and self.item_covariance is None):
            raise RecpoError(
                f"factors: lower_bound is {self.lower_bound}; it is at least 0, and 0 where the model was fitted with "
                "uncertainty: false",
                code="out_of_range",
                field="lower_bound",
            )
        items, rank = self.item_factors.shape
        expected = {
            "item_bias": (items,),
            "factor_variance": (items, rank),
            "history_prior": (items, rank + 1),
            "item_covariance": (items, rank + 1, rank + 1),
            "user_prior": (grade_factors.num_columns(self.features.user), rank + 1),
            "user_factors": (0 if self.user_factors is None else len(self.user_factors), rank + 1),
            "item_prior": (grade_factors.num_columns(self.features.item) + 1, 2 * (rank + 1)),
            "prior_variance": (rank,),
            "prior_covariance": (rank + 1, rank + 1),
        }
        for name, shape in expected.items():
            tensor = getattr(self, name)
            if tensor is not None and tuple(tensor.shape) != shape:
                raise RecpoError(
                    f"factors: {name} has shape {tuple(tensor.shape)}, expected {shape}", code="wrong_shape", field=name
                )

    @property
    def num_items(self) -> int:
        """``V``."""
        return len(self.item_factors)

    @property
    def rank(self) -> int:
        """``r``."""
        return self.item_factors.shape[1]

    @property
    def user_features(self) -> bool:
        """Whether it reads the features of users."""
        return self.user_prior is not None

    @property
    def item_features(self) -> bool:
        """Whether features of items say what is true of an item without events."""
        return bool(self.features.item)

    @property
    def reads(self) -> Reads:
        """What batches must contain for it, beyond items, feedback and times."""
        return Reads(user=self.user_features)

    @property
    def options(self) -> grade_factors.GradeFactorsOptions:
        """The numbers of the same model as a module (``recpo.policies.grade_factors``)."""
        return grade_factors.GradeFactorsOptions(
            **{one.name: getattr(self, one.name) for one in fields(grade_factors.GradeFactorsOptions)}
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the model, by name."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device | str) -> Self:
        """The model with its tensors on ``device``."""
        if self.item_factors.device == torch.device(device):
            return self
        tensors: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return replace(self, **tensors)

    def fold_in(self, histories: Histories) -> Tensor:
        """Factors of users with a history: ridge regression of the graded events on the item factors.

        ``argmin over (p, b) of sum_h [(g_h - mean - b_i(h) - p · q_i(h) - b)^2 + sum_j v_i(h)j p_j^2] + ridge |p - c|^2
        + bias_ridge (b - d)^2`` with the variances ``v`` of the item factors, over those of the last ``max_history``
        events that have a grade; ``(c, d)`` is the damped mean of ``history_prior`` over them, plus what the features
        of the user say (``user_prior``). Training fits its users with the same step.

        Args:
            histories: contexts with feedback levels; an empty history gives ``(c, d)``.

        Returns:
            ``[B, r + 1]`` float32, bias last.

        Raises:
            RecpoError: the histories have no feedback levels, or no features of users although the model reads them.
        """
        return self.fold_in_with_covariance(histories)[0]

    def fold_in_with_covariance(self, histories: Histories) -> tuple[Tensor, Tensor]:
        """Like ``fold_in``; also returns the inverses ``[B, r + 1, r + 1]`` float32 of the normal matrices."""
        if histories.feedback is None:
            raise RecpoError(
                "factors are folded in from graded events, and these histories have no feedback levels",
                code="missing_value",
                field="feedback",
            )
        width = max(1, histories.item_ids.shape[1])
        size = max(1, _FOLD_IN_BYTES // (8 * width * (self.rank + 1)))
        means = torch.zeros(len(histories.lengths), self.rank + 1, dtype=torch.float64, device=histories.lengths.device)
        if self.user_prior is not None:
            means = grade_factors.user_means(self.features.user, histories, self.user_prior)
        feedback, recent = grade_factors.recent_feedback(histories, self.max_history)
        columns = histories.item_ids, feedback, recent & (feedback > 0), means
        parts = [self._folded(*part) for part in zip(*(column.split(size) for column in columns), strict=True)]
        weights, covariance = (torch.cat(column).float() for column in zip(*parts, strict=True))
        return weights, covariance

    def _folded(self, item_ids: Tensor, feedback: Tensor, known: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
        row = (item_ids - 1).clamp_min(0)
        targets = _grades_on(item_ids.device)[feedback] - self.mean - self.item_bias[row].double()
        variance = F.pad((self.factor_variance[row].double() * known[..., None]).sum(1), (0, 1))
        prior = torch.full((self.rank + 1,), self.ridge, dtype=torch.float64, device=item_ids.device)
        prior[-1] = self.bias_ridge
        pull = prior * (small_systems.damped_mean(self.history_prior[row], known) + means)
        return ridge_regression(small_systems.with_one(self.item_factors[row]), targets, known, variance + prior, pull)

    def scores(self, users: Tensor) -> Tensor:
        """Predicted grades ``[B, V]`` of all items for ``users [B, r + 1]``."""
        offset = self.item_bias + (users[:, -1:] + self.mean)
        return offset.addmm_(users[:, :-1], self.item_factors.T)

    def grades(self, users: Tensor, item_ids: Tensor) -> Tensor:
        """Predicted grades ``[B, S]`` of items ``[B, S]`` for ``users [B, r + 1]``; arbitrary for id 0.

        For many items, such as the complete catalog, computed by one matrix product.
        """
        row = (item_ids - 1).clamp_min(0)
        if row.shape[1] * GATHER_COST >= self.num_items:
            return self.scores(users).gather(1, row)
        factors = torch.einsum("bsr,br->bs", self.item_factors[row], users[:, :-1])
        return factors + self.item_bias[row] + (users[:, -1:] + self.mean)

    def bounded_grades(
        self, histories: Histories, item_ids: Tensor, lower_bound: float | None = None, users: Tensor | None = None
    ) -> Tensor:
        """Grades of items ``[B, S]`` minus a number of standard deviations of their posterior.

        Args:
            histories: of the users; with a bound, the uncertainty about a user always comes from them.
            item_ids: ``[B, S]``; the result for id 0 is arbitrary.
            lower_bound: that number; None = the model's own, which gives the ranking scores of ``recommend``.
            users: ``[B, r + 1]``; None = folded in from the histories.
        """
        bound = self.lower_bound if lower_bound is None else lower_bound
        if not bound:
            return self.grades(self.fold_in(histories) if users is None else users, item_ids)
        folded, covariance = self.fold_in_with_covariance(histories)
        users = folded if users is None else users
        deviation = posterior_variance(self, users, covariance, item_ids).sqrt()
        return self.grades(users, item_ids) - bound * deviation

    def recommend(self, histories: Histories, k: int, exclude: Tensor | None = None) -> Recommendations:
        """The ``k`` items with the highest predicted grade for folded-in users, as ``Policy.recommend``.

        With a ``lower_bound``, the items with the highest bound. ``scores`` are the ranking scores, not
        log-probabilities. For a frame of events, with external ids: ``recpo.recommend(factors, frame, prepared=...)``.

        Raises:
            RecpoError: ``histories`` is a frame, whose ids the factors do not know.
        """
        if not isinstance(histories, Histories):
            raise RecpoError(
                f"Factors.recommend takes encoded Histories, not {type(histories).__name__}: factors know no ids of "
                "items; for a frame of events, call recpo.recommend(factors, frame, prepared=...)",
                code="wrong_type",
                field="histories",
            )
        users, covariance = self.fold_in_with_covariance(histories)
        states = small_systems.with_one(torch.cat([users[:, :-1], users[:, -1:] + self.mean], 1))
        table = torch.cat([small_systems.with_one(self.item_factors), self.item_bias[:, None]], 1)
        variance_columns = 0
        if self.lower_bound:
            assert self.item_covariance is not None
            of_items = small_systems.item_variance_vectors(self.item_factors, self.item_covariance)
            of_users = small_systems.user_variance_vectors(users, covariance) * (self.noise * self.lower_bound**2)
            states, table = torch.cat([states, of_users], 1), torch.cat([table, of_items], 1)
            variance_columns = of_items.shape[1]
        exclude = None if exclude is None else exclude - 1
        rows, best, _ = best_by_blocks(states, table, k, exclude, padding_rows=0, variance_columns=variance_columns)
        return Recommendations((rows + 1).masked_fill(best == -torch.inf, 0), best)

    def with_popularity(self, counts: Tensor, weight: float) -> Self:
        """The model with ``weight log(1 + count)`` added to the bias of every item.

        Grades of shown items cannot say what a recommender had reasons to show often; their number can. The logarithm
        is centered over events, so grades keep their mean. The term is part of the bias wherever the model is used: in
        lists, rewards and tilted policies, and in the fold-in, whose users take the rest of a grade.

        Args:
            counts: ``[V]`` training events of the items.
            weight: grade per unit of the logarithm, at least 0; at 0 the model is the same.
        """
        if not weight:
            return self
        counts = counts.double()
        logs = torch.log1p(counts)
        center = (counts * logs).sum() / counts.sum()
        model = replace(self, item_bias=(self.item_bias + weight * (logs - center)).float())
        if self.item_prior is None:
            return model
        prior = self.item_prior.clone()
        prior[-1, self.rank] -= weight * center
        return replace(model, item_prior=prior)

    def save(self, path: Path | str, *, overwrite: bool = False) -> None:
        """Writes the directory, which appears complete or not at all.

        Raises:
            RecpoError: it exists and ``overwrite`` is False.
        """
        with output_directory(path, kind="factors", overwrite=overwrite) as partial:
            self.write_files(partial)

    def write_files(self, directory: Path) -> None:
        """Writes the files into an empty directory, which the caller then moves into place."""
        kept = {name: tensor.contiguous().cpu() for name, tensor in self.tensors.items()}
        write_tensors(directory / _TENSORS, kept)
        content = {
            **{name: getattr(self, name) for name in _NUMBERS},
            **{name: getattr(self, name) for name in ("max_history", "catalog_checksum", "users_checksum")},
            "feedback": None if self.feedback is None else self.feedback.to_json(),
            "features": self.features.to_json(),
            "feature_checksums": dict(self.feature_checksums),
            "facts": dict(self.facts),
        }
        self.write_facts(directory, content, [_TENSORS])

    @classmethod
    def _read(cls, root: Path) -> Self:
        manifest = cls.facts_of(root)
        verify(root, manifest["files"], cls.remedy())
        try:
            feedback, source = manifest["feedback"], f"{root / MANIFEST}, feedback"
            values: dict[str, Any] = {name: float(manifest[name]) for name in _NUMBERS}
            values |= {"user_factors": None, "item_covariance": None} | load_file(root / _TENSORS)
            return cls(
                **values,
                catalog_checksum=str(manifest["catalog_checksum"]),
                users_checksum=manifest["users_checksum"],
                max_history=int(manifest["max_history"]),
                feedback=None if feedback is None else FeedbackDefinition.from_json(feedback, source),
                features=FeatureSchema.from_json(manifest["features"], f"{root / MANIFEST}, features"),
                feature_checksums=manifest["feature_checksums"],
                facts=manifest["facts"],
            )
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise RecpoError(
                f"{root} is damaged ({error!r}); {cls.remedy()}", code="damaged", field=_TENSORS
            ) from error

    def validate_feedback(self, feedback: FeedbackDefinition, shown: object) -> None:
        """Raises ``RecpoError`` if ``feedback``, that of ``shown``, defines other grades than the model's own."""
        if self.feedback is not None:
            self.feedback.validate_same(feedback, "the factors", shown)

    def validate_items(self, catalog_checksum: str, shown: object) -> None:
        """Raises ``RecpoError`` unless ``shown`` has the catalog that the model was fitted on."""
        if catalog_checksum != self.catalog_checksum:
            raise RecpoError(
                f"the factors were fitted on other items than {shown} holds (items.parquet differs): use the prepared "
                "directory that they were fitted on, or run `recpo factorize` on this one",
                code="mismatch",
                field="items.parquet",
            )

    def validate_features(self, data: Prepared, sides: Sequence[Side] = ("user",)) -> None:
        """Raises ``RecpoError`` unless ``data`` has the features that the model reads, with the same meaning."""
        for side, checksum in self.feature_checksums.items():
            if side in sides and data.features_checksum(side) != checksum:
                raise RecpoError(
                    f"the factors read features of {side}s that {data.root} does not have, or has with other "
                    "vocabularies or means: use the prepared directory that they were fitted on, or run `recpo "
                    "factorize` on this one",
                    code="mismatch",
                    field=f"{side}_features",
                )


# a product with looked-up items costs this many times as much as one in a matrix product
GATHER_COST: Final = 8


def ridge_regression(
    rows: Tensor, targets: Tensor, known: Tensor, ridge: Tensor, pull: Tensor
) -> tuple[Tensor, Tensor]:
    """The solutions ``[B, d]`` of ``normal_equations``, and the inverses ``[B, d, d]`` of their matrices, float64.

    The inverse times the variance of the noise is the covariance of the posterior.
    """
    matrix, right = small_systems.normal_equations(rows, targets, known, ridge, pull)
    factor = torch.linalg.cholesky(matrix)
    return torch.cholesky_solve(right[..., None], factor)[..., 0], torch.cholesky_inverse(factor)


@lru_cache
def _grades_on(device: torch.device) -> Tensor:
    """The grades of the feedback levels, copied to a device once: a copy in every step would wait for it."""
    return torch.tensor(GRADES, dtype=torch.float64, device=device)


def posterior_variance(model: Factors, users: Tensor, covariance: Tensor, item_ids: Tensor) -> Tensor:
    """Variance of the predicted grades of some items.

    Args:
        model: a model with item covariances.
        users: ``[B, r + 1]``.
        covariance: ``[B, r + 1, r + 1]``, ``C_u``.
        item_ids: ``[B, S]``; the result for id 0 is arbitrary.

    Returns:
        ``[B, S]``. For many items, such as the complete catalog, computed by one matrix product.

    Raises:
        RecpoError: the model was fitted without ``uncertainty``.
    """
    of_items = model.item_covariance
    if of_items is None:
        raise RecpoError(
            "these factors were fitted with uncertainty: false, so they have no bounds; fit them again",
            code="unsupported",
            field="uncertainty",
        )
    row = (item_ids - 1).clamp_min(0)
    if row.shape[1] * GATHER_COST >= model.num_items:
        of_all_items = small_systems.item_variance_vectors(model.item_factors, of_items)
        variance = small_systems.user_variance_vectors(users, covariance) @ of_all_items.T
        return model.noise * variance.gather(1, row).clamp_min(0.0)
    known_users, known_items = small_systems.with_one(users[:, :-1]), small_systems.with_one(model.item_factors)[row]
    of_item = torch.einsum("bj,bsjk,bk->bs", known_users, of_items[row], known_users)
    of_user = torch.einsum("bsj,bjk,bsk->bs", known_items, covariance, known_items)
    return model.noise * (of_item + of_user).clamp_min(0.0)


def plain(options: Any) -> dict[str, Any]:
    """The fields of a dataclass as JSON values."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(options)))
    return values
