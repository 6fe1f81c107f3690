"""Item features beside id rows: vectors for items that training never saw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from recpo.base.errors import RecpoError
from recpo.base.features import Feature
from recpo.base.types import Features
from recpo.policies.feature_encoder import FeatureEncoder, FeatureInputs

# Number of items encoded at once. It bounds the intermediate results, whatever the size of the catalog.
BLOCK_ITEMS = 1 << 15


@dataclass(frozen=True)
class ItemFeatureOptions:
    """How item vectors use the features of the items.

    Attributes:
        hidden: width of the encoder's hidden layer.
        id_dropout: share of the items whose id row is dropped in a training step, in histories and among candidates, so
            that the model learns to rely on features.
    """

    hidden: int = 64
    id_dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.hidden < 1 or not 0.0 <= self.id_dropout < 1.0:
            raise RecpoError(
                f"item_features: hidden must be at least 1 and id_dropout in [0, 1), got {self.hidden} and "
                f"{self.id_dropout}"
            )


class ItemFeatures(nn.Module):
    """``vector_i = k_i id_row_i + encoder(features_i)``: the features of an ``ItemTable``'s items.

    ``k_i`` is 0 for an item without training events, because its id row is untrained. In a training step, ``k_i`` is
    also 0 for a share ``id_dropout`` of the items. The seed of the step and the id determine which, so all ranks,
    histories and candidates drop the same rows. Otherwise ``k_i`` is 1. Without ``begin_step`` nothing is dropped.

    Args:
        features: fitted item features.
        num_items: catalog size V.
        dim: d.
        options: see ``ItemFeatureOptions``.

    Attributes:
        trained: ``[V + 1]`` bool, the items with events in the training period; saved with the weights.
    """

    trained: Tensor
    _rows: Tensor | None
    _weights: Tensor | None
    _dense: Tensor | None

    def __init__(self, features: Sequence[Feature], num_items: int, dim: int, options: ItemFeatureOptions) -> None:
        super().__init__()
        self.encoder = FeatureEncoder(features, dim, hidden=options.hidden)
        self.num_items, self._rate = num_items, options.id_dropout
        self._seed: int | None = None
        self.register_buffer("trained", torch.ones(num_items + 1, dtype=torch.bool))
        for name in ("_rows", "_weights", "_dense"):  # data, not weights: stored beside a checkpoint, not in it
            self.register_buffer(name, None, persistent=False)

    @torch.no_grad()
    def assign(self, features: Features) -> None:
        """Sets the features of the items, leading shape ``[V + 1]``; row 0 is not an item.

        Raises:
            RecpoError: the features belong to another number of items.
        """
        if len(features.codes) != self.num_items + 1:
            raise RecpoError(
                f"item features have {len(features.codes)} rows, expected {self.num_items + 1}: one for each of the "
                f"{self.num_items} items of the catalog, behind that of no item"
            )
        count = len(features.codes)
        rows, weights, dense = self.encoder.inputs(features.rows(torch.arange(0)))
        self._rows = rows.new_empty((count, *rows.shape[1:]), dtype=torch.int32)
        self._weights = None if weights is None else weights.new_empty((count, *weights.shape[1:]))
        self._dense = dense.new_empty((count, *dense.shape[1:]))
        for begin in range(0, count, BLOCK_ITEMS):  # bounds the encoder's intermediate results
            block = torch.arange(begin, min(begin + BLOCK_ITEMS, count), device=features.codes.device)
            inputs = self.encoder.inputs(features.rows(block))
            self._rows[block], self._dense[block] = inputs.rows.int(), inputs.dense
            if self._weights is not None and inputs.weights is not None:
                self._weights[block] = inputs.weights

    def begin_step(self, seed: int) -> None:
        """Draws the id rows to drop until the next step."""
        self._seed = seed

    def forward(self, ids: Tensor) -> Tensor:
        """The part of the vectors that comes from the features of the items ``[...]``, ``[..., d]``; zero for id 0."""
        return self.encoded_by(self.encoder, ids)

    def encoded_by(self, encoder: FeatureEncoder, ids: Tensor) -> Tensor:
        """The result of ``encoder`` for the features of the items ``[...]``, ``[..., d]``; zero for id 0."""
        return encoder.encode(self._inputs.at(ids)) * (ids > 0)[..., None]

    def kept(self, ids: Tensor) -> Tensor:
        """``k`` for the items ``[...]``, bool."""
        kept = self.trained[ids]
        if self.training and self._rate and self._seed is not None:
            kept = kept & ~drawn(ids, self._seed, self._rate)
        return kept

    def added_to(self, id_rows: Tensor, ids: Tensor) -> Tensor:
        """Vectors of the items ``[...]`` with id rows ``[..., d]``."""
        return id_rows * self.kept(ids)[..., None] + self(ids)

    def matrix(self, id_rows: Tensor, first: int = 0, weight: float = 1.0) -> Tensor:
        """Vectors of consecutive items. ``BLOCK_ITEMS`` bounds the memory beyond the result.

        The backward pass runs the encoder again.

        Args:
            id_rows: ``[n, d]``.
            first: id of the first item.
            weight: factor for the encoder's gradient.
        """
        parameters = tuple(self.encoder.parameters())
        matrix: Tensor = _Matrix.apply(id_rows, self, first, weight, *parameters)
        return matrix

    def blocks(self, first: int, count: int) -> Iterator[tuple[slice, Tensor]]:
        """The feature part of consecutive items, in blocks: yields the rows of ``count`` and their ``[n, d]``."""
        for begin in range(0, count, BLOCK_ITEMS):
            rows = slice(begin, min(begin + BLOCK_ITEMS, count))
            vectors = self.encoder.encode(self._inputs.at(slice(first + rows.start, first + rows.stop)))
            if first + begin == 0:
                vectors = torch.cat([torch.zeros_like(vectors[:1]), vectors[1:]])
            yield rows, vectors

    @property
    def _inputs(self) -> FeatureInputs:
        if self._rows is None or self._dense is None:
            raise RecpoError(
                "the policy reads item features and was given none: call set_item_features with those of its catalog"
            )
        return FeatureInputs(self._rows, self._weights, self._dense)


class _Matrix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, id_rows: Tensor, features: ItemFeatures, first: int, weight: float, *parameters: Tensor
    ) -> Tensor:
        kept = features.kept(torch.arange(first, first + len(id_rows), device=id_rows.device))[:, None]
        matrix = id_rows * kept
        for rows, vectors in features.blocks(first, len(id_rows)):
            matrix[rows] += vectors
        ctx.features, ctx.first, ctx.weight, ctx.parameters = features, first, weight, parameters
        ctx.save_for_backward(kept)
        return matrix

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = ctx.saved_tensors
        learns = [parameter for parameter, needs in zip(ctx.parameters, ctx.needs_input_grad[4:], strict=True) if needs]
        sums = [torch.zeros_like(parameter) for parameter in learns]
        with torch.enable_grad():
            for rows, vectors in ctx.features.blocks(ctx.first, len(grad)) if learns else ():
                for total, part in zip(sums, torch.autograd.grad(vectors, learns, grad[rows]), strict=True):
                    total.add_(part, alpha=ctx.weight)
        found = iter(sums)
        of_parameters = [next(found) if needs else None for needs in ctx.needs_input_grad[4:]]
        return grad * kept if ctx.needs_input_grad[0] else None, None, None, None, *of_parameters


def drawn(ids: Tensor, seed: int, rate: float) -> Tensor:
    """True for a share ``rate`` of the ids. A hash of seed and id decides, so nothing has to be stored.

    Steele et al., "Fast splittable pseudorandom number generators" (2014), the mixing function of SplitMix64.
    """
    mixed = ids * _signed(0x9E3779B97F4A7C15) + _signed(seed * 0xD1342543DE82EF95 + 1)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
    return _shifted(mixed ^ _shifted(mixed, 31), 11) < int(rate * 2**53)


def _signed(value: int) -> int:
    """The int64 with the lowest 64 bits of ``value``."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (fills with zeros)."""
    return (values >> bits) & (2 ** (64 - bits) - 1)
