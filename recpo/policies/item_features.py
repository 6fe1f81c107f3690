"""Features as vectors: one encoder for the features of items, users and requests.

Item features beside id rows give vectors to items that training never saw.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from recpo.base.errors import PositiveInt, RecpoError, validate_range, validate_ranges
from recpo.base.features import UNKNOWN, Categories, Category, Feature, Number, Vector, of_type
from recpo.base.types import Features
from recpo.ops import kernels
from recpo.ops.exposures import mixed_bits
from recpo.policies.blocks import Linear


class FeatureInputs(NamedTuple):
    """Features in the form that the encoder multiplies. Everything constant is computed once.

    Attributes:
        rows: ``[..., M]`` rows of the code table: one per category, ``L_i`` per list.
        weights: ``[..., M]`` weights of these rows; None = 1.
        dense: ``[..., D]`` numbers with a flag for each missing one, and vectors, each with such a flag.
    """

    rows: Tensor
    weights: Tensor | None
    dense: Tensor

    def at(self, index: Tensor | slice) -> FeatureInputs:
        """Selects the rows ``index`` of the leading axis."""
        weights = None if self.weights is None else self.weights[index]
        return FeatureInputs(self.rows[index], weights, self.dense[index])


class FeatureEncoder(nn.Module):
    """``P gelu(b + sum_c E_c[code_c] + sum_l mean_j E_l[code_lj] + A [x, is missing] + sum_i (B_i v_i or m_i))``.

    ``c`` runs over categories and ``l`` over lists of categories. ``x`` are the numbers (0 if missing). ``v_i`` are the
    vectors, each divided by the root mean square of its entries: only the direction of a text or image embedding
    counts, and all sources have the same scale. Missing values (code 0, an empty list, a number or vector of nan) have
    their own learned row, and so do unknown values (code 1). A code beyond the encoder's vocabulary counts as unknown.

    ``P`` is initialized to zero, so an untrained encoder adds nothing. The other parts are initialized such that the
    argument of the GELU has a variance of about 1 for any set of features.

    Args:
        features: fitted features of one side, at least one of a ``FeatureSchema``.
        dim: d, width of the result.
        hidden: width of the sum.
        starts_at_zero: False initializes ``P`` as ``torch.nn.Linear`` does, for results that go through another
            zero-initialized layer.

    Raises:
        RecpoError: a feature is not fitted.
    """

    _offsets: Tensor
    _sizes: Tensor

    def __init__(self, features: Sequence[Feature], dim: int, *, hidden: int = 64, starts_at_zero: bool = True) -> None:
        super().__init__()
        if unfitted := [one.name for one in features if not one.is_fitted]:
            raise RecpoError(
                f"feature {unfitted[0]} was not fitted: take the schema that `recpo prepare` wrote",
                code="unfinished",
                field=unfitted[0],
            )
        self.features = tuple(features)
        coded: list[Category | Categories] = [*of_type(features, Category), *of_type(features, Categories)]
        numbers, vectors = of_type(features, Number), of_type(features, Vector)
        sizes = [int(one.num_codes or 0) for one in coded]
        self.table = nn.Parameter(torch.empty(sum(sizes), hidden)) if sizes else None
        scales = [1.0] * (2 * len(numbers))
        for one in vectors:
            scales += [float(one.width or 1) ** -0.5] * int(one.width or 0) + [1.0]
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.dense = nn.Parameter(torch.empty(hidden, len(scales))) if scales else None
        self.output = Linear(hidden, dim)
        lengths = [one.length if isinstance(one, Categories) else 1 for one in coded]
        of_places = [number for number, length in enumerate(lengths) for _ in range(length)]
        firsts = [sum(sizes[:number]) for number in range(len(sizes))]
        for name, values in (("_sizes", sizes), ("_offsets", firsts)):
            repeated = torch.tensor([values[number] for number in of_places], dtype=torch.long)
            self.register_buffer(name, repeated, persistent=False)
        std = len(features) ** -0.5
        with torch.no_grad():
            if self.table is not None:
                nn.init.normal_(self.table, std=std)
            if self.dense is not None:
                nn.init.normal_(self.dense, std=std).mul_(torch.tensor(scales))
            if starts_at_zero:
                nn.init.zeros_(self.output.weight)
                nn.init.zeros_(self.output.bias)

    def forward(self, features: Features) -> Tensor:
        """``[..., d]`` for features with the leading shape ``[...]``."""
        return self.encode(self.inputs(features))

    def encode(self, inputs: FeatureInputs) -> Tensor:
        """``[..., d]`` float32 of ``inputs``, also under autocast."""
        with kernels.without_autocast(inputs.dense.device):
            summed = self.bias if self.dense is None else kernels.linear(inputs.dense, self.dense, self.bias)
            if self.table is not None:
                summed = summed + self._bags(inputs)
            encoded: Tensor = self.output(F.gelu(summed))
        return encoded

    def inputs(self, features: Features) -> FeatureInputs:
        """The input of ``encode`` for ``features``. This step has no learned parameters."""
        dtype, lists = self.bias.dtype, features.lists
        codes = torch.cat([features.codes, *lists], -1)
        rows = torch.where((codes >= 0) & (codes < self._sizes), codes, UNKNOWN) + self._offsets
        weights = None
        if lists:
            weights = torch.cat(
                [torch.ones_like(features.codes, dtype=dtype), *(_list_weights(one, dtype) for one in lists)], -1
            )
        absent = features.numbers.isnan()
        dense = [features.numbers.nan_to_num(0.0), absent, *(_directed(one) for one in features.vectors)]
        return FeatureInputs(rows, weights, torch.cat([part.to(dtype) for part in dense], -1))

    def _bags(self, inputs: FeatureInputs) -> Tensor:
        """The weighted sum of the rows of each bag, ``[..., hidden]``."""
        assert self.table is not None
        rows, weights = inputs.rows, inputs.weights
        if torch.compiler.is_exporting():  # every runtime supports a sum of lookups
            found = F.embedding(rows, self.table)
            return (found if weights is None else found * weights[..., None]).sum(-2)
        width = rows.shape[-1]
        flat = None if weights is None else weights.reshape(-1, width)
        bags = F.embedding_bag(rows.reshape(-1, width), self.table, per_sample_weights=flat, mode="sum")
        return bags.view(*rows.shape[:-1], self.table.shape[1])


def _list_weights(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """``1 / n`` for each of the n codes of a list ``[..., L]``, and 0 for padding.

    For an empty list, the first place has weight 1. Its code is 0, the row for missing values.
    """
    named = (codes > 0).to(dtype)
    weights = named / named.sum(-1, keepdim=True).clamp_min(1.0)
    empty = (~(codes > 0).any(-1, keepdim=True)).to(dtype)
    return torch.cat([weights[..., :1] + empty, weights[..., 1:]], -1)


def _directed(vectors: Tensor) -> Tensor:
    """Vectors ``[..., w]`` whose entries have a mean square of 1, and a column that flags missing vectors (nan)."""
    missing = vectors.isnan().any(-1, keepdim=True)
    values = torch.where(missing, 0.0, vectors)
    size = values.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-12)
    return torch.cat([values / size, missing.to(values.dtype)], -1)


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

    hidden: PositiveInt = 64
    id_dropout: float = 0.1

    def __post_init__(self) -> None:
        validate_ranges(self, "item_features.")
        validate_range(0.0 <= self.id_dropout < 1.0, "item_features.id_dropout", "must be in [0, 1)", self.id_dropout)


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
        """Sets the features of the items, leading shape ``[V + 1]``; row 0 is not an item."""
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
                "the policy reads item features and was given none: call set_item_features with those of its catalog",
                code="missing_option",
                field="item_features",
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
    """True for a share ``rate`` of the ids, which a hash of seed and id decides."""
    return mixed_bits(ids, 53, seed * 0xD1342543DE82EF95 + 1) < int(rate * 2**53)
