"""Encodes features as a vector: one encoder class for the features of items, users and requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from recpo.base.errors import RecpoError
from recpo.base.features import UNKNOWN, Categories, Category, Feature, Number, Vector, of_type
from recpo.base.types import Features
from recpo.ops import kernels
from recpo.policies.layers import Linear


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
        features: fitted features of one side of a ``FeatureSchema``.
        dim: d, width of the result.
        hidden: width of the sum.
        starts_at_zero: False initializes ``P`` as ``torch.nn.Linear`` does, for results that go through another
            zero-initialized layer.

    Raises:
        RecpoError: no features are given, or one is not fitted.
    """

    _offsets: Tensor
    _sizes: Tensor

    def __init__(self, features: Sequence[Feature], dim: int, *, hidden: int = 64, starts_at_zero: bool = True) -> None:
        super().__init__()
        _validate_features(features, hidden)
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
        places = [one.length if isinstance(one, Categories) else 1 for one in coded]
        self.register_buffer("_sizes", _repeated(sizes, places), persistent=False)
        firsts = [sum(sizes[:number]) for number in range(len(sizes))]
        self.register_buffer("_offsets", _repeated(firsts, places), persistent=False)
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
        with torch.autocast(inputs.dense.device.type, enabled=False):
            summed = self.bias if self.dense is None else kernels.linear(inputs.dense, self.dense, self.bias)
            if self.table is not None:
                summed = summed + self._bags(inputs)
            encoded: Tensor = self.output(F.gelu(summed))
        return encoded

    def inputs(self, features: Features) -> FeatureInputs:
        """The input of ``encode`` for ``features``. This step has no learned parameters."""
        dtype, lists = self.bias.dtype, features.lists
        self._validate_widths(features)
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

    def _validate_widths(self, features: Features) -> None:
        """Raises if the features differ from those that the encoder was built for."""
        expected = (
            len(of_type(self.features, Category)),
            *(one.length for one in of_type(self.features, Categories)),
            len(of_type(self.features, Number)),
            *(one.width for one in of_type(self.features, Vector)),
        )
        columns = (features.codes, *features.lists, features.numbers, *features.vectors)
        found = tuple(column.shape[-1] for column in columns)
        if found != expected:
            raise RecpoError(
                f"features have the widths {list(found)} (categories, lists, numbers, vectors), the encoder was made "
                f"for {list(expected)}: pass the features of the policy's schema"
            )


def _repeated(values: Sequence[int], times: Sequence[int]) -> Tensor:
    every = [value for value, count in zip(values, times, strict=True) for _ in range(count)]
    return torch.tensor(every, dtype=torch.long)


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


def _validate_features(features: Sequence[Feature], hidden: int) -> None:
    if not features:
        raise RecpoError("a FeatureEncoder was asked for, and there are no features to encode")
    if hidden < 1:
        raise RecpoError(f"the hidden width of a FeatureEncoder must be at least 1, got {hidden}")
    if unfitted := [one.name for one in features if not one.is_fitted]:
        raise RecpoError(f"feature {unfitted[0]} was not fitted: take the schema that `recpo prepare` wrote")
