"""Selects the kernels that pass over the catalog: the plain ones (``kernels``) or the fused ones (``triton_catalog``).

``plain`` is the default. The fused kernels have been compiled for several generations of GPUs and tested in Triton's
interpreter, but they have not run on a GPU, so callers must select ``fused`` by name.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from recpo.ops import kernels
from recpo.ops.kernels import CatalogSums

CatalogKernel = Literal["plain", "fused"]
#: Wider vectors do not fit the registers; there the plain kernels are limited by their products, not by memory.
LARGEST_FUSED_DIM = 128


class CatalogPasses(Protocol):
    """Three passes over a catalog; see the functions of these names in ``recpo.ops.kernels``."""

    def sum_over_catalog(  # noqa: D102
        self, states: Tensor, table: Tensor, padding_rows: int, *, want_expected_row: bool, keep_bytes: int = 0
    ) -> CatalogSums: ...

    def add_softmax_gradient(  # noqa: D102
        self, gradient: Tensor, weights: Tensor, states: Tensor, table: Tensor, padding_rows: int, sums: CatalogSums
    ) -> None: ...

    def entropy_gradients(  # noqa: D102
        self,
        grad: Tensor,
        states: Tensor,
        table: Tensor,
        padding_rows: int,
        lse: Tensor,
        entropy: Tensor,
        needs_states: bool,
        needs_table: bool,
    ) -> tuple[Tensor | None, Tensor | None]: ...


def catalog_passes(kernel: CatalogKernel, states: Tensor, table: Tensor) -> CatalogPasses:
    """The passes named ``kernel`` for states ``[N, d]`` and a table ``[V + padding_rows, d]``.

    Within ``kernels.reference_kernels()`` always those of ``kernels``.

    Raises:
        ValueError: ``kernel`` is "fused", and the fused kernels cannot run here; see ``why_not_fused``.
    """
    if kernel == "plain" or kernels.is_reference():
        return kernels
    reason = why_not_fused(states, table)
    if reason is not None:
        raise ValueError(f'kernel="fused" {reason}; kernel="plain" works everywhere')
    from recpo.ops import triton_catalog

    return triton_catalog


def why_not_fused(states: Tensor, table: Tensor) -> str | None:
    """The reason why the fused kernels cannot run on these tensors; None = they can."""
    try:
        from recpo.ops import triton_catalog
    except ImportError as error:
        return f"needs the package triton, which PyTorch's CUDA builds bring along, and cannot import it ({error})"
    if torch.float64 in (states.dtype, table.dtype):
        return "computes in float32, and states or table are float64"
    if states.shape[-1] > LARGEST_FUSED_DIM:
        return f"takes vectors of at most {LARGEST_FUSED_DIM} numbers, and these have {states.shape[-1]}"
    if triton_catalog.is_interpreted():
        return None
    if states.device.type != "cuda" or torch.version.hip:
        return f"needs an NVIDIA GPU, and the states are on {states.device}"
    return None
