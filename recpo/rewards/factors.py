"""A fitted factor model of graded feedback: predictions, fold-in, and the directory on disk.

::

    factors/factors.safetensors   item factors and biases, user factors, covariances
    factors/manifest.json         mean, ridge, noise, checksums, how the model was selected
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from recpo.artifacts import (
    other_kind,
    output_directory,
    read_json,
    seal,
    sha256,
    unseal,
    verify,
    write_json,
    write_tensors,
)
from recpo.base.errors import RecpoError
from recpo.base.feedback import GRADES, FeedbackDefinition
from recpo.base.types import Histories, Recommendations
from recpo.ops import quadratic_forms
from recpo.ops.quadratic_forms import with_one
from recpo.ops.ridge import RidgeSolution, ridge_regression
from recpo.policies.catalog_search import best_by_blocks
from recpo.rewards.bounds import GATHER_COST, item_vectors, posterior_variance

FORMAT_VERSION: Final = 3
MANIFEST: Final = "manifest.json"
_TENSORS: Final = "factors.safetensors"
_REMEDY: Final = "copy the directory again, or make it again with `recpo factorize`"
_NUMBERS: Final = ("mean", "ridge", "bias_ridge", "noise", "lower_bound")
_OTHERS: Final = ("max_history", "catalog_checksum", "users_checksum")
# float64 rows of one block of histories
_FOLD_IN_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class Factors:
    """``grade(u, i) = mean + p_u · q_i + b_u + b_i``, the expected grade (``recpo.base.feedback.GRADES``) of an item.

    Attributes:
        mean: the mean grade.
        item_factors: ``[V, r]`` float32, ``q`` of the items 1..V.
        item_bias: ``[V]`` float32.
        factor_variance: ``[V, r]`` float32, variance of the item factors, used when a user is folded in; 0 = exact.
        ridge: weight of ``|p_u|^2`` when a user is folded in: the noise divided by the variance of a user factor.
        bias_ridge: weight of ``b_u^2``.
        user_factors: ``[U, r + 1]`` float32 of the training users by their prepared index, bias last; 0 for users
            without events. None = users are only folded in from their history.
        item_covariance: ``[V, r + 1, r + 1]`` float32, inverses of the normal matrices of the items; None = no bounds.
        noise: variance of a grade around its expectation on the training events.
        catalog_checksum: identifies the items (``Prepared.catalog_checksum``).
        max_history: number of most recent events that ``fold_in`` reads.
        users_checksum: identifies the users of ``user_factors`` (``Prepared.users_checksum``); None = unknown.
        feedback: defines the grades that it predicts, and those that ``fold_in`` reads; None = unknown.
        lower_bound: number of posterior standard deviations (``recpo.rewards.graded``) that lists and rankings
            subtract from the grade; 0 = rank by the grade itself.
        facts: how the model was fitted and selected, for people.
    """

    mean: float
    item_factors: Tensor
    item_bias: Tensor
    factor_variance: Tensor
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
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Rejects tensors that do not fit together."""
        if not 0 <= self.lower_bound < float("inf") or (self.lower_bound and self.item_covariance is None):
            raise RecpoError(
                f"factors: lower_bound is {self.lower_bound}; it is at least 0, and 0 where the model was fitted with "
                "uncertainty: false"
            )
        items, rank = self.item_factors.shape
        expected = {
            "item_bias": (items,),
            "factor_variance": (items, rank),
            "item_covariance": (items, rank + 1, rank + 1),
        }
        for name, shape in expected.items():
            tensor = getattr(self, name)
            if tensor is not None and tuple(tensor.shape) != shape:
                raise RecpoError(f"factors: {name} has shape {tuple(tensor.shape)}, expected {shape}")
        if self.user_factors is not None and self.user_factors.shape[1:] != (rank + 1,):
            shape = tuple(self.user_factors.shape)
            raise RecpoError(f"factors: user_factors has shape {shape}, expected (users, {rank + 1})")

    @property
    def num_items(self) -> int:
        """``V``."""
        return len(self.item_factors)

    @property
    def rank(self) -> int:
        """``r``."""
        return self.item_factors.shape[1]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the model, by name."""
        names = ("item_factors", "item_bias", "factor_variance", "user_factors", "item_covariance")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def to(self, device: torch.device | str) -> Factors:
        """The model with its tensors on ``device``."""
        if self.item_factors.device == torch.device(device):
            return self
        tensors: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return replace(self, **tensors)

    def fold_in(self, histories: Histories) -> Tensor:
        """Factors of users with a history: ridge regression of the graded events on the item factors.

        ``argmin over (p, b) of sum_h [(g_h - mean - b_i(h) - p · q_i(h) - b)^2 + sum_j v_i(h)j p_j^2] + ridge |p|^2 +
        bias_ridge b^2`` with the variances ``v`` of the item factors, over those of the last ``max_history`` events
        that have a grade. Training fits its users with the same step.

        Args:
            histories: contexts with feedback levels; an empty history gives zeros.

        Returns:
            ``[B, r + 1]`` float32, bias last.

        Raises:
            RecpoError: the histories have no feedback levels.
        """
        return torch.cat([solution.weights.float() for solution in self._solutions(histories)])

    def fold_in_with_covariance(self, histories: Histories) -> tuple[Tensor, Tensor]:
        """Like ``fold_in``; also returns the inverses ``[B, r + 1, r + 1]`` float32 of the normal matrices."""
        solutions = list(self._solutions(histories))
        covariance = torch.cat([solution.covariance.float() for solution in solutions])
        return torch.cat([solution.weights.float() for solution in solutions]), covariance

    def _solutions(self, histories: Histories) -> list[RidgeSolution]:
        if histories.feedback is None:
            raise RecpoError("factors are folded in from graded events, and these histories have no feedback levels")
        width = max(1, histories.item_ids.shape[1])
        size = max(1, _FOLD_IN_BYTES // (8 * width * (self.rank + 1)))
        parts = zip(
            histories.item_ids.split(size), histories.lengths.split(size), histories.feedback.split(size), strict=True
        )
        return [self._solution(*part) for part in parts]

    def _solution(self, item_ids: Tensor, lengths: Tensor, feedback: Tensor) -> RidgeSolution:
        place = torch.arange(item_ids.shape[1], device=item_ids.device)
        grade = torch.tensor(GRADES, dtype=torch.float64, device=item_ids.device)[feedback]
        known = (place < lengths[:, None]) & (place >= lengths[:, None] - self.max_history)
        known &= (item_ids > 0) & ~grade.isnan()
        row = (item_ids - 1).clamp_min(0)
        ones = torch.ones_like(grade, dtype=self.item_factors.dtype)[..., None]
        rows = torch.cat([self.item_factors[row], ones], -1)
        ridge = F.pad(
            (self.factor_variance[row].double() * known[..., None]).sum(1) + self.ridge, (0, 1), value=self.bias_ridge
        )
        return ridge_regression(rows, grade - self.mean - self.item_bias[row].double(), known, ridge)

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

    def bounded_grades(self, histories: Histories, item_ids: Tensor) -> Tensor:
        """The ranking scores of ``recommend`` for items ``[B, S]`` and folded-in users: grades minus the bound."""
        if not self.lower_bound:
            return self.grades(self.fold_in(histories), item_ids)
        users, covariance = self.fold_in_with_covariance(histories)
        deviation = posterior_variance(self, users, covariance, item_ids).sqrt()
        return self.grades(users, item_ids) - self.lower_bound * deviation

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
                "items; for a frame of events, call recpo.recommend(factors, frame, prepared=...)"
            )
        users, covariance = self.fold_in_with_covariance(histories)
        states = with_one(torch.cat([users[:, :-1], users[:, -1:] + self.mean], 1))
        table = torch.cat([with_one(self.item_factors), self.item_bias[:, None]], 1)
        rooted = 0
        if self.lower_bound:
            of_items = item_vectors(self)
            of_users = quadratic_forms.of_users(users, covariance) * (self.noise * self.lower_bound**2)
            states, table, rooted = torch.cat([states, of_users], 1), torch.cat([table, of_items], 1), of_items.shape[1]
        exclude = None if exclude is None else exclude - 1
        rows, best, _ = best_by_blocks(states, table, k, exclude, padding_rows=0, rooted=rooted)
        return Recommendations((rows + 1).masked_fill(best == -torch.inf, 0), best)

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
            "format_version": FORMAT_VERSION,
            **{name: getattr(self, name) for name in (*_NUMBERS, *_OTHERS)},
            "feedback": None if self.feedback is None else self.feedback.to_json(),
            "facts": dict(self.facts),
            "files": {_TENSORS: sha256(directory / _TENSORS)},
        }
        write_json(directory / MANIFEST, seal(content))

    @classmethod
    def open(cls, path: Path | str) -> Factors:
        """Opens a directory that ``save`` or ``recpo factorize`` wrote.

        Raises:
            RecpoError: it is not such a directory, has another format version, or was changed.
        """
        root = Path(path)
        if other := other_kind(root, "factors"):
            raise RecpoError(f"{root} holds no factors{other}: make factors with `recpo factorize`")
        if not (root / MANIFEST).is_file():
            raise RecpoError(f"{root} holds no factors: {MANIFEST} is missing; make them with `recpo factorize`")
        manifest = read_json(root / MANIFEST, _REMEDY)
        if manifest.get("format_version") != FORMAT_VERSION:
            raise RecpoError(
                f"{root / MANIFEST}: format_version {manifest.get('format_version')!r}, this recpo reads "
                f"{FORMAT_VERSION}; make it again with `recpo factorize`"
            )
        manifest = unseal(manifest, root / MANIFEST, _REMEDY)
        verify(root, manifest["files"], _REMEDY)
        try:
            feedback, source = manifest["feedback"], f"{root / MANIFEST}, feedback"
            tensors = load_file(root / _TENSORS)
            return cls(
                **{name: float(manifest[name]) for name in _NUMBERS},
                item_factors=tensors["item_factors"],
                item_bias=tensors["item_bias"],
                factor_variance=tensors["factor_variance"],
                user_factors=tensors.get("user_factors"),
                item_covariance=tensors.get("item_covariance"),
                catalog_checksum=str(manifest["catalog_checksum"]),
                users_checksum=manifest["users_checksum"],
                max_history=int(manifest["max_history"]),
                feedback=None if feedback is None else FeedbackDefinition.from_json(feedback, source),
                facts=manifest["facts"],
            )
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise RecpoError(f"{root} is damaged ({error!r}); {_REMEDY}") from error

    def validate_feedback(self, feedback: FeedbackDefinition, shown: object) -> None:
        """Raises ``RecpoError`` if ``feedback``, that of ``shown``, defines other grades than the model's own."""
        if self.feedback is not None:
            self.feedback.validate_same(feedback, "the factors", shown)

    def validate_items(self, catalog_checksum: str, shown: object) -> None:
        """Raises ``RecpoError`` unless ``shown`` has the catalog that the model was fitted on."""
        if catalog_checksum != self.catalog_checksum:
            raise RecpoError(
                f"the factors were fitted on other items than {shown} holds (items.parquet differs): use the prepared "
                "directory that they were fitted on, or run `recpo factorize` on this one"
            )
