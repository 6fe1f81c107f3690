"""Frozen codebooks, which encode the vectors of a catalog and of items that are added later."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from recpo.artifacts import verify_sealed, write_tensors
from recpo.artifacts.semantic_codes import CODEBOOKS
from recpo.base.errors import RecpoError

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
                "use vectors of the model that the codebooks were made from"
            )
        return _normalize(vectors.to(self.shift), self.shift, self.scale, bool(self.unit))

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
    def load(cls, root: Path) -> Codebooks:
        """Reads them back.

        Raises:
            RecpoError: the directory has no codebooks (its codes came from a file), or the file is damaged.
        """
        file = Path(root) / CODEBOOKS
        if not file.is_file():
            raise RecpoError(
                f"{root} has no {CODEBOOKS}: its codes were not made from vectors, so nothing encodes items"
            )
        verify_sealed(Path(root), [CODEBOOKS], "run `recpo tokenize` again")
        try:
            return cls(**load_file(file))
        except (SafetensorError, TypeError) as error:
            raise RecpoError(f"{file} is damaged ({error}): run `recpo tokenize` again") from error


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


def _normalize(vectors: Tensor, shift: Tensor, scale: Tensor, unit: bool) -> Tensor:
    points = (vectors - shift).div_(scale)
    if unit:
        points /= points.norm(dim=1, keepdim=True).clamp_min(torch.finfo(points.dtype).tiny)
    return points


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
