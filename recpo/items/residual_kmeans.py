"""Residual k-means: one codebook for the vectors, one for the residuals of the first, and so on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from recpo.base.errors import RecpoError
from recpo.base.ranges import PositiveInt, validate_ranges
from recpo.items.capacity import settle
from recpo.items.codebooks import Codebooks, Normalization, nearest, normalization, squared_distances, subtract

_POINTS_PER_CODE = 32
_LARGEST = 1e15
_MOST_LEVELS = 64


def _nothing() -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class ResidualKMeans:
    """Level t clusters the residuals ``x - centroid_0[code_0] - ... - centroid_{t-1}[code_{t-1}]`` by Lloyd's k-means.

    Residual quantization: Chen, Guan and Wang, "Approximate nearest neighbor search by residual vector quantization"
    (Sensors 2010); for semantic ids: QARM, arXiv 2411.11739, and OneRec, arXiv 2502.18965, which also balances codes.
    Equal vectors and seed give equal codes.
    """

    levels: PositiveInt = 3
    """T, number of codes per item"""
    codebook_size: PositiveInt = 256
    """K, number of codes per level"""
    normalize: Normalization = "l2"
    """normalization of the vectors (``recpo.items.codebooks.normalization``)"""
    capacity_slack: float | None = 2.0
    """at least 1. A code of a level is given to at most ``slack * items / K`` items, so that no code covers most of the
    catalog. null = every item gets its nearest code"""
    iterations: PositiveInt = 25
    """steps of Lloyd's algorithm"""
    sample: PositiveInt = 65_536
    """number of items that the codebooks are fitted on (at least 32 per code). All items get codes"""

    def __post_init__(self) -> None:
        """Refuses invalid options."""
        validate_ranges(self)
        if self.levels > _MOST_LEVELS:
            raise RecpoError(
                f"levels must be at most {_MOST_LEVELS}, got {self.levels}", code="out_of_range", field="levels"
            )
        if self.capacity_slack is not None and not self.capacity_slack >= 1:
            raise RecpoError(
                f"capacity_slack must be at least 1 (1 = all codes equally full), got {self.capacity_slack}",
                code="out_of_range",
                field="capacity_slack",
            )

    def fit(self, vectors: Tensor, seed: int, finished: Callable[[], object] = _nothing) -> tuple[Codebooks, Tensor]:
        """Fits the codebooks on the device of the vectors.

        Args:
            vectors: ``[V, d]`` float32, finite.
            seed: seed of the sample and of the first centroids.
            finished: called after every level.

        Returns:
            The codebooks, and the codes ``[V, T]`` int64; several items may have the same codes.

        Raises:
            RecpoError: values so large that their squares overflow in float32.
        """
        if float(vectors.abs().max()) > _LARGEST:
            raise RecpoError(f"item vectors have values beyond {_LARGEST:g}, whose squares overflow: scale them down")
        shift, scale, unit = normalization(vectors, self.normalize)
        empty = Codebooks(vectors.new_zeros(0, self.codebook_size, vectors.shape[1]), shift, scale, unit)
        residual = empty.normalize(vectors)
        generator = torch.Generator().manual_seed(seed)
        sampled = max(self.sample, _POINTS_PER_CODE * self.codebook_size)
        centroids, codes = [], []
        for _ in range(self.levels):
            chosen = torch.randperm(len(residual), generator=generator)[:sampled].to(residual.device)
            centroids.append(self._lloyd(residual[chosen], generator))
            codes.append(self._assign(residual, centroids[-1])[0])
            subtract(residual, centroids[-1], codes[-1])
            finished()
        return Codebooks(torch.stack(centroids), shift, scale, unit), torch.stack(codes, 1)

    def _lloyd(self, points: Tensor, generator: torch.Generator) -> Tensor:
        centroids = _first_centroids(points, self.codebook_size, generator)
        for _ in range(self.iterations):
            centroids = _means(points, *self._assign(points, centroids), centroids)
        return centroids

    def _assign(self, points: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
        """Codes ``[n]`` and squared distances ``[n]`` to the nearest centroid, within the capacity if it is limited."""
        code, distance = nearest(points, centroids)
        if self.capacity_slack is None:
            return code, distance
        places = max(1, -int(-self.capacity_slack * len(points) // len(centroids)))
        one_group = torch.zeros_like(code)
        code = settle(
            code,
            distance,
            one_group,
            num_codes=len(centroids),
            capacity=places,
            distances=lambda items: squared_distances(points[items], centroids),
        )
        return code, distance


def _first_centroids(points: Tensor, num_codes: int, generator: torch.Generator) -> Tensor:
    """k-means++ (Arthur and Vassilvitskii, 2007): draws each centroid with probability proportional to ``D(x)^2``.

    The draw is ``argmax D(x)^2 / e(x)`` with exponential e. It is the same on every device, and also works if every
    point is already a centroid (all distances 0).
    """
    centroids = points.new_empty(num_codes, points.shape[1])
    norms = points.square().sum(1)
    distance = torch.ones_like(norms)
    for index in range(num_codes):
        race = torch.empty(len(points)).exponential_(generator=generator).to(points.device)
        chosen = (distance / race).argmax()
        centroids[index] = points[chosen]
        to_new = torch.addmv(norms + norms[chosen], points, points[chosen], alpha=-2).clamp_min_(0)
        distance = to_new if index == 0 else torch.minimum(distance, to_new)
    return centroids


def _means(points: Tensor, code: Tensor, distance: Tensor, centroids: Tensor) -> Tensor:
    """Mean of the points of every code; an empty code restarts at one of the points farthest from their centroid.

    The sums run over points sorted by code, so that they do not depend on the order of atomic additions.
    """
    counts = torch.bincount(code, minlength=len(centroids))
    ordered = points[code.argsort(stable=True)]
    sums = torch.segment_reduce(ordered, "sum", lengths=counts, initial=0)
    means = sums / counts.clamp_min(1)[:, None]
    empty = (counts == 0).nonzero().squeeze(1)[: len(points)]
    means[empty] = points[distance.argsort(descending=True, stable=True)[: len(empty)]]
    return means
