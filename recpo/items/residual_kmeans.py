"""Residual k-means: one codebook for the vectors, one for the residuals of the first, and so on.

Frozen codebooks, which encode the vectors of a catalog and of items that are added later.

Assignment of items to codes, with a limit on the number of items per code.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from recpo.artifacts.documents import write_tensors
from recpo.artifacts.semantic_codes import CODEBOOKS
from recpo.base.errors import PositiveInt, RecpoError, reading, validate_range, validate_ranges

Normalization = Literal["l2", "standardize", "none"]
_BLOCK = 1 << 22  # floats of a block of distances


@dataclass(frozen=True)
class Codebooks:
    """Residual codebooks: ``x ~ centroid_0[code_0] + ... + centroid_{T-1}[code_{T-1}]`` of a normalized vector ``x``.

    Attributes:
        centroids: ``[T, K, d]`` float32.
        shift: ``[d]``, subtracted from every vector.
        scale: ``[d]``, the divisor after the subtraction.
        unit: scalar bool; if true, the result is scaled to length 1 (a zero vector stays zero).
    """

    centroids: Tensor
    shift: Tensor
    scale: Tensor
    unit: Tensor

    @property
    def levels(self) -> int:
        """T."""
        return self.centroids.shape[0]

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        """``K_t`` of every level."""
        return (self.centroids.shape[1],) * self.levels

    def normalize(self, vectors: Tensor) -> Tensor:
        """``[n, d]`` normalized vectors, in the dtype and on the device of the codebooks.

        Raises:
            RecpoError: the width of the vectors differs from that of the codebooks.
        """
        if vectors.shape[1] != len(self.shift):
            raise RecpoError(
                f"item vectors have {vectors.shape[1]} dimensions and the codebooks {len(self.shift)}: "
                "use vectors of the model that the codebooks were made from",
                code="wrong_shape",
                field="vectors",
            )
        points = (vectors.to(self.shift) - self.shift).div_(self.scale)
        if self.unit:
            points /= points.norm(dim=1, keepdim=True).clamp_min(torch.finfo(points.dtype).tiny)
        return points

    def encode(self, points: Tensor, first_level: int = 0) -> Tensor:
        """Nearest codes ``[n, T - first_level]`` of ``points``, the residuals ``[n, d]`` before ``first_level``."""
        residual, codes = points.clone(), []
        for centroids in self.centroids[first_level:]:
            code = nearest(residual, centroids)[0]
            subtract(residual, centroids, code)
            codes.append(code)
        return torch.stack(codes, 1) if codes else points.new_zeros(len(points), 0, dtype=torch.int64)

    def reconstruct(self, codes: Tensor) -> Tensor:
        """The points ``[n, d]`` that ``codes [n, T]`` represent: the sums of their centroids."""
        points = self.shift.new_zeros(len(codes), len(self.shift))
        for centroids, code in zip(self.centroids, codes.T, strict=True):
            points += centroids[code]
        return points

    def save(self, root: Path) -> None:
        """Writes ``codebooks.safetensors`` into the existing directory ``root``."""
        tensors = {"centroids": self.centroids, "shift": self.shift, "scale": self.scale, "unit": self.unit}
        write_tensors(root / CODEBOOKS, {name: tensor.contiguous().cpu() for name, tensor in tensors.items()})

    @classmethod
    def load(cls, root: Path) -> Self:
        """Reads them back; ``Codes.open`` has verified the file.

        Raises:
            RecpoError: the directory has no codebooks (its codes came from a file), or the file is damaged.
        """
        file = Path(root) / CODEBOOKS
        if not file.is_file():
            raise RecpoError(
                f"{root} has no {CODEBOOKS}: its codes were not made from vectors, so nothing encodes items",
                code="missing_file",
                field=CODEBOOKS,
            )
        with reading(file, SafetensorError, TypeError, remedy="run `recpo tokenize` again"):
            return cls(**load_file(file))


def normalization(vectors: Tensor, kind: Normalization) -> tuple[Tensor, Tensor, Tensor]:
    """``shift [d]``, ``scale [d]`` and ``unit`` of ``kind``, fitted on ``vectors [n, d]``.

    "l2" scales every vector to length 1. "standardize" gives every dimension mean 0 and variance 1 (0 if it is
    constant). "none" leaves the vectors unchanged.
    """
    shift, scale = torch.zeros_like(vectors[0]), torch.ones_like(vectors[0])
    if kind == "standardize":
        variance, shift = torch.var_mean(vectors, 0, correction=0)
        scale = torch.where(vectors.amin(0) == vectors.amax(0), scale, variance.sqrt())
    return shift, scale, torch.tensor(kind == "l2", device=vectors.device)


def squared_distances(points: Tensor, centroids: Tensor) -> Tensor:
    """``|x_i - c_k|^2`` as ``[n, K]``, by one matrix product; at least 0."""
    # two in-place sums are faster than one [n, K] offset, which would have to be written and read
    table = torch.addmm(centroids.square().sum(1), points, centroids.T, alpha=-2)
    return table.add_(points.square().sum(1, keepdim=True)).clamp_min_(0)


def nearest(points: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the nearest centroid ``[n]`` int64 and the squared distance ``[n]``, in blocks of bounded memory."""
    code = torch.empty(len(points), dtype=torch.int64, device=points.device)
    distance = torch.empty_like(points[:, 0])
    rows = max(1, _BLOCK // len(centroids))
    for start in range(0, len(points), rows):
        block = slice(start, start + rows)
        distance[block], code[block] = squared_distances(points[block], centroids).min(1)
    return code, distance


def subtract(residual: Tensor, centroids: Tensor, code: Tensor) -> None:
    """``residual[i] -= centroids[code[i]]`` in place, in blocks of bounded memory."""
    rows = max(1, _BLOCK // residual.shape[1])
    for part, chosen in zip(residual.split(rows), code.split(rows), strict=True):
        part -= centroids[chosen]


#: The distances ``[m, K]`` of the items ``[m]`` to every code.
Distances = Callable[[Tensor], Tensor]

_TABLE = 1 << 24  # entries of a table of free places, [groups, codes]


def settle(
    code: Tensor, distance: Tensor, group: Tensor, *, num_codes: int, capacity: int, distances: Distances
) -> Tensor:
    """Moves as few items as possible, so that no code has more than ``capacity`` items of a group.

    The nearest items of a crowded code keep it; of equally distant items, the first ones do. The other items, nearest
    first, take the nearest code of their group that has a free place. They are placed in waves of at most ``capacity``
    items per group, for all groups at once. A wave fits into one code unless that code is partly occupied, so the
    distances of an item are computed about twice.

    Args:
        code: ``[n]`` int64, the nearest codes.
        distance: ``[n]``, the distances to these codes.
        group: ``[n]`` int64, any ids; a group has at most ``num_codes * capacity`` items.
        num_codes: K.
        capacity: number of items that may have a code, per group.
        distances: gives the distances of items to all codes.

    Returns:
        Codes ``[n]``.
    """
    over = rank_within(group * num_codes + code, distance) >= capacity
    movers = over.nonzero().squeeze(1)
    code = code.clone()
    if not len(movers):
        return code
    movers = movers[_lexicographic(group[movers], distance[movers])]
    crowded = group[movers].unique()
    for groups in crowded.split(max(1, _TABLE // num_codes)):
        local = torch.searchsorted(groups, group).clamp_max(len(groups) - 1)
        inside = (groups[local] == group) & ~over
        taken = torch.bincount(local[inside] * num_codes + code[inside], minlength=len(groups) * num_codes)
        queue = movers[torch.isin(group[movers], groups)]
        _place(code, queue, local, capacity - taken.view(-1, num_codes), capacity, distances)
    return code


def _place(code: Tensor, queue: Tensor, group: Tensor, free: Tensor, capacity: int, distances: Distances) -> None:
    """Gives the items of ``queue`` (sorted by group) places in ``free [G, K]``; writes ``code`` and ``free``."""
    groups, num_codes = free.shape
    left = torch.bincount(group[queue], minlength=groups)
    start = left.cumsum(0) - left
    active = left.nonzero().squeeze(1)
    while len(active):
        wave = left[active].clamp_max(capacity)
        owner = active.repeat_interleave(wave)
        positions = start[owner] + _count_up(wave)
        items = queue[positions]
        chosen, distance = _nearest_free(items, owner, free, distances)
        key = owner * num_codes + chosen
        accepted = rank_within(key, distance) < free.view(-1)[key]
        code[items[accepted]] = chosen[accepted]
        free.view(-1).sub_(torch.bincount(key[accepted], minlength=free.numel()))
        # items that found their code full go to the front of their group's next wave
        queue[positions] = items[(2 * owner + ~accepted).argsort(stable=True)]
        done = torch.bincount(owner[accepted], minlength=groups)
        start, left = start + done, left - done
        active = active[left[active] > 0]


def _nearest_free(items: Tensor, owner: Tensor, free: Tensor, distances: Distances) -> tuple[Tensor, Tensor]:
    found = []
    rows = max(1, _BLOCK // free.shape[1])
    for block, groups in zip(items.split(rows), owner.split(rows), strict=True):
        found.append(distances(block).masked_fill(free[groups] <= 0, torch.inf).min(1))
    return torch.cat([best.indices for best in found]), torch.cat([best.values for best in found])


def rank_within(key: Tensor, value: Tensor) -> Tensor:
    """Rank ``[n]`` of every element among those with its ``key``: 0 = the smallest value, the first where equal."""
    order = _lexicographic(key, value)
    _, lengths = key[order].unique_consecutive(return_counts=True)
    return torch.empty_like(order).scatter_(0, order, _count_up(lengths))


def _lexicographic(key: Tensor, value: Tensor) -> Tensor:
    order = value.argsort(stable=True)
    return order[key[order].argsort(stable=True)]


def _count_up(lengths: Tensor) -> Tensor:
    """``0 .. n_0 - 1, 0 .. n_1 - 1, ...``."""
    ends = lengths.cumsum(0)
    return torch.arange(int(lengths.sum()), device=lengths.device) - (ends - lengths).repeat_interleave(lengths)


_POINTS_PER_CODE = 32
_LARGEST = 1e15
_MOST_LEVELS = 64


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
    """normalization of the vectors (``recpo.items.residual_kmeans.normalization``)"""
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
        validate_range(self.levels <= _MOST_LEVELS, "levels", f"must be at most {_MOST_LEVELS}", self.levels)
        fits = self.capacity_slack is None or self.capacity_slack >= 1
        validate_range(fits, "capacity_slack", "must be at least 1 (1 = all codes equally full)", self.capacity_slack)

    def fit(
        self, vectors: Tensor, seed: int, finished: Callable[[], object] = lambda: None
    ) -> tuple[Codebooks, Tensor]:
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
            raise RecpoError(
                f"item vectors have values beyond {_LARGEST:g}, whose squares overflow: scale them down",
                code="out_of_range",
                field="vectors",
            )
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
