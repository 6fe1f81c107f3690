"""Masks and the one reduction that every objective shares.

Shapes: any leading axes; the last axis holds the tokens of a sequence. Masks are True (or 1) where an entry is kept.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from recpo.base.errors import RecpoError

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
"""How token losses become one number; see ``aggregate``."""


def check_same_shape(**tensors: Tensor | None) -> None:
    """Checks arguments that must not be broadcast, such as ``[B, S]`` with ``[S]``, at the start of a pure function.

    Args:
        tensors: tensors by argument name; None = not given.

    Raises:
        RecpoError: two shapes differ; the message names both arguments and both shapes.
    """
    given = [(name, tensor.shape) for name, tensor in tensors.items() if tensor is not None]
    name, shape = given[0]
    for other, its_shape in given[1:]:
        if its_shape != shape:
            raise RecpoError(
                f"{other} has shape {tuple(its_shape)} and {name} has shape {tuple(shape)}: they must be the same",
                code="wrong_shape",
                field=other,
            )


def zero_masked(values: Tensor, mask: Tensor | None) -> Tensor:
    """``values`` where kept, else 0: a masked entry equals a removed one, even if it is nan or inf.

    No gradient reaches a masked entry. Apply it to the *inputs* of a formula: if it were applied only to the result,
    the backward pass would still multiply 0 by the nan inside.

    Args:
        values: any shape.
        mask: broadcasts to ``values``; None keeps everything.

    Raises:
        RecpoError: the mask would broadcast ``values`` to another shape.
    """
    if mask is None:
        return values
    kept = torch.where(mask.bool(), values, torch.zeros_like(values))
    if kept.shape != values.shape:
        raise RecpoError(
            f"mask has shape {tuple(mask.shape)}, which does not fit values {tuple(values.shape)}",
            code="wrong_shape",
            field="mask",
        )
    return kept


def over_tokens(values: Tensor, logp: Tensor) -> Tensor:
    """Gives ``values`` the shape of ``logp``: broadcasts over the token axis if ``values`` has none.

    Args:
        values: ``[..., T]`` or ``[...]``.
        logp: ``[..., T]``.

    Raises:
        RecpoError: ``values`` has neither shape.
    """
    if values.shape == logp.shape:
        return values
    if values.shape == logp.shape[:-1]:
        return values.unsqueeze(-1).expand(logp.shape)
    raise RecpoError(
        f"expected shape {tuple(logp.shape)}, or {tuple(logp.shape[:-1])} without its token axis, got "
        f"{tuple(values.shape)}",
        code="wrong_shape",
        field="values",
    )


def denominator(mask: Tensor, mode: Aggregation = "token-mean") -> Tensor:
    """The contribution of a batch to the denominator of its optimizer step.

    Kept tokens for ``token-mean``, non-empty sequences otherwise.

    Args:
        mask: ``[..., T]``.
        mode: the aggregation mode.

    Returns:
        A scalar int64 tensor; sums of it over micro-batches and ranks are exact.
    """
    kept = mask.bool()
    return kept.sum() if mode == "token-mean" else kept.any(-1).sum()


def aggregate(
    values: Tensor,
    mask: Tensor,
    mode: Aggregation = "token-mean",
    *,
    count: Tensor | float | None = None,
    length: float | None = None,
) -> Tensor:
    """Reduces per-token values to a scalar.

    - ``token-mean``: sum over kept tokens / number of kept tokens.
    - ``seq-mean-token-sum``: token sums, averaged over the non-empty sequences.
    - ``seq-mean-token-mean``: token means, averaged over the non-empty sequences.
    - ``seq-mean-token-sum-norm``: token sums / ``length``, averaged over the non-empty sequences (Dr.GRPO,
      arXiv 2503.20783, as in TRL; verl's mode of this name does not divide by the number of sequences).

    Half-precision values are summed in float32.

    Args:
        values: ``[..., T]``; masked entries may have any value.
        mask: shape of ``values``; True keeps.
        mode: see above.
        count: the denominator of the whole optimizer step, if this batch is only a part of it (the sum of
            ``denominator`` over its parts); None = this batch is the whole step. With it, the sum over the parts equals
            the value of the whole step.
        length: the constant of ``seq-mean-token-sum-norm``; None = the size of the token axis.

    Returns:
        A scalar; 0 with zero gradients if nothing is kept.

    Raises:
        RecpoError: unknown mode, or a mask of another shape (which would silently broadcast into a wrong average).
    """
    if mode not in get_args(Aggregation):
        raise RecpoError(
            f"unknown aggregation {mode!r}; expected one of {', '.join(get_args(Aggregation))}",
            code="unknown_name",
            field="aggregation",
        )
    check_same_shape(values=values, mask=mask)
    kept = mask.bool()
    half = values.dtype in (torch.float16, torch.bfloat16)
    values = zero_masked(values, kept).to(torch.float32 if half else values.dtype)
    if mode == "seq-mean-token-mean":
        total = (values.sum(-1) / kept.sum(-1).clamp(min=1)).sum()
    elif mode == "seq-mean-token-sum-norm":
        total = values.sum() / (values.shape[-1] if length is None else length)
    else:
        total = values.sum()
    divisor = denominator(kept, mode) if count is None else torch.as_tensor(count, device=values.device)
    return total / divisor.clamp(min=1)
