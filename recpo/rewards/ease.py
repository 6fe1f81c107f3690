"""EASE: a linear model from all positives of a user to every item, in closed form.

Steck, "Embarrassingly Shallow Autoencoders for Sparse Data" (WWW 2019, arXiv 1905.03375). Let X be the matrix of users
by items with 1 for each positive pair. ``argmin_B |X - X B|^2 + ridge |B|^2`` with a diagonal of 0 is ``B = I - P
diag(1 / diag P)``, ``P = (Xᵀ X + ridge I)^-1``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

import numpy as np
import torch
from scipy.linalg.lapack import dpotrf, dpotri
from scipy.sparse import csr_array
from torch import Tensor
from torch.nn.functional import embedding_bag
from tqdm import tqdm

from recpo.base.errors import RecpoError
from recpo.base.types import Histories, Recommendations
from recpo.log.prepared import Prepared
from recpo.rewards.factors import ModelInOneFile, plain
from recpo.rewards.implicit import best_on_validation, positive_pairs, positive_places

_KIND: Final = "ease"


@dataclass(frozen=True)
class EaseOptions:
    """Hyper-parameters of EASE. The validation period selects the ridge.

    Args:
        ridges: ridges to try.
        max_items: a larger catalog is rejected: fitting needs about ``32 V^2`` bytes, which is 3.2 GB for 10,000 items,
            and each ridge takes ``V^3`` operations.
        max_history: number of history events that are read; null = as many as the prepared data keep per user.
    """

    ridges: tuple[float, ...] = (30.0, 100.0, 300.0, 1000.0)
    max_items: int = 10_000
    max_history: int | None = None

    def __post_init__(self) -> None:
        if not self.ridges or not min(self.ridges) > 0:
            raise RecpoError(
                f"ease: ridges is {list(self.ridges)}; give at least one, each above 0",
                code="out_of_range",
                field="ridges",
            )


@dataclass(frozen=True)
class EASE(ModelInOneFile):
    """A recommender that ranks by ``sum of B[j, i]`` over the positives j of the history.

    Attributes:
        weights: ``[V, V]`` float32, ``B``; row and column 0 are item 1.
        catalog_checksum: identifies the items.
        max_history: number of most recent events that are read.
        facts: how the model was fitted and selected.
    """

    kind: ClassVar[str] = _KIND
    weights: Tensor
    catalog_checksum: str
    max_history: int
    facts: Mapping[str, Any] = field(default_factory=dict)

    def scores(self, histories: Histories) -> Tensor:
        """``[B, V]``; 0 for a history without a positive."""
        known = positive_places(histories, self.max_history)
        row = (histories.item_ids - 1).clamp_min(0)
        return embedding_bag(row, self.weights, mode="sum", per_sample_weights=known.to(self.weights.dtype))

    def recommend(self, histories: Histories, k: int, exclude: Tensor | None = None) -> Recommendations:
        """The ``k`` items with the highest scores, as ``Policy.recommend``. Scores are not log-probabilities."""
        scores = torch.nn.functional.pad(self.scores(histories), (1, 0), value=-torch.inf)
        if exclude is not None:
            scores.scatter_(1, exclude, -torch.inf)
        best, ids = scores.sort(dim=1, descending=True, stable=True)
        return Recommendations(ids[:, :k].masked_fill(best[:, :k] == -torch.inf, 0), best[:, :k])


def fit_ease(
    data: Prepared,
    options: EaseOptions = EaseOptions(),
    *,
    progress: bool = False,
) -> EASE:
    """Fits on the positive pairs of the training period and keeps the ridge with the best validation NDCG@10.

    Args:
        data: prepared data.
        options: ridges to try, and the maximum catalog size.
        progress: show a progress bar on a terminal.

    Raises:
        RecpoError: the catalog is too large, or there are several ridges and the validation period has no positive
            event.
    """
    if data.num_items > options.max_items:
        raise RecpoError(
            f"ease inverts a matrix of items by items, and {data.root} has {data.num_items:,} of them, above max_items "
            f"{options.max_items:,}: leave ease out, or raise max_items where 32 bytes * V^2 of memory are there",
            code="resources",
            field="max_items",
        )
    pairs, max_history = cooccurrences(data), options.max_history or int(data.manifest["max_context"])
    best: EASE | None = None
    tried: list[float | None] = []
    for ridge in tqdm(options.ridges, desc=_KIND, unit="ridge", disable=None if progress else True):
        model = EASE(torch.from_numpy(item_weights(pairs, ridge)), data.catalog_checksum, max_history)
        value = best_on_validation(data, [model])[1][0]
        if value is None and len(options.ridges) > 1:
            raise RecpoError(
                f"{data.root}: no validation user has a positive event, so nothing says which of {len(options.ridges)} "
                "ridges is best: give one",
                code="empty",
                field="ridges",
            )
        # besides the best model, only one other is in memory: each is a matrix of items by items
        best = model if best is None or (value or 0.0) > max(known for known in tried if known is not None) else best
        tried.append(value)
    assert best is not None
    named = [{"ridge": ridge, "NDCG@10": value} for ridge, value in zip(options.ridges, tried, strict=True)]
    return replace(best, facts={"options": plain(options), "tried": named})


def cooccurrences(data: Prepared) -> np.ndarray:
    """``Xᵀ X [V, V]``: the number of users with positive events of both items. One shard is in memory at a time."""
    total = np.zeros((data.num_items, data.num_items))
    for user, item, _ in positive_pairs(data):
        _, row = np.unique(user, return_inverse=True)
        pairs = csr_array((np.ones(len(user)), (row, item)), shape=(int(row.max(initial=-1)) + 1, data.num_items))
        total += (pairs.T @ pairs).toarray()
    return total


def item_weights(pairs: np.ndarray, ridge: float) -> np.ndarray:
    """``B [V, V]`` float32 of ``Xᵀ X``; its diagonal is 0."""
    matrix = pairs.copy(order="F")
    matrix[np.diag_indices_from(matrix)] += ridge
    # Cholesky in place: a third of the time of a general inverse, and no second matrix
    factor, wrong = dpotrf(matrix, lower=1, overwrite_a=1)
    inverse, also_wrong = dpotri(factor, lower=1, overwrite_c=1)
    assert not wrong
    assert not also_wrong
    diagonal = np.diag(inverse).copy()
    weights: np.ndarray = np.tril(inverse, -1).astype(np.float32)
    weights += weights.T
    weights /= -diagonal.astype(np.float32)
    return weights
