"""Exact log-probabilities of a softmax over a large catalog, in bounded memory.

``s = h Eᵀ`` are the logits of a state ``h [d]``, already divided by the temperature, over a table ``E [V, d]``. Nothing
of size ``[N, V]`` outlives a block unless it fits ``KEEP_BYTES``: logits are computed block by block (a block fits the
cache), reduced, and computed again in the backward pass. Everything is computed in float32 (float64 for float64
inputs), under autocast too: a log-probability of -14 in bfloat16 would be wrong by 0.03.

Gradients, with ``p`` the softmax, ``u = Σ_v p_v E_v`` the expected row and ``g`` the incoming gradients of a state's
log-probabilities: ``dh = Σ_k g_k E[t_k] - (Σ_k g_k) u`` and ``dE = Σ_k g_k h at row t_k, minus (Σ_k g_k) p hᵀ``. ``u``
is gathered in the forward pass, while the block is in the cache, so the backward pass needs blocks only for ``dE``.

``sampled_logprob`` estimates the same from shared negatives, for tables too large to normalize over in every step.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from recpo.base.errors import RecpoError
from recpo.ops import kernels
from recpo.ops.kernels import Scored, as_float, sum_rows


def linear_logprob(states: Tensor, table: Tensor, targets: Tensor, state_index: Tensor | None = None) -> Tensor:
    """``log softmax(states tableᵀ)`` at ``targets``, without ``[N, V]`` held for the backward pass.

    Several targets of one state share its normalizer, so a preference list of 1 + 20 items costs one row.

    Args:
        states: ``[N, d]``.
        table: ``[V + 1, d]``; row 0 is padding: it is not in the softmax, gets no gradient and is not a target.
        targets: rows of the table: ``[N]`` or ``[N, K]``; ``[M]`` with ``state_index``.
        state_index: ``[M]``, the state of each target; None = target (or row of targets) ``n`` belongs to state ``n``.

    Returns:
        float32 (float64 for float64 states), of the shape of ``targets``. Differentiable once, in states and table.

    Raises:
        RecpoError: shapes that do not fit.
    """
    check_states(states, table, len(table) - 1)
    # one target per state needs no index
    if state_index is not None or targets.shape != states.shape[:1]:
        state_index = state_of_targets(states, targets, state_index)
    inputs = as_float(states), as_float(table), targets.reshape(-1)
    with kernels.without_autocast(states.device):
        logp = _LinearLogProb.apply(*inputs, state_index)
    return logp.view(targets.shape)


def linear_entropy(states: Tensor, table: Tensor) -> Tensor:
    """Entropy of ``softmax(states tableᵀ)`` in nats, ``[N]``: ``lse - h·u`` with ``u`` the expected row.

    Arguments as in ``linear_logprob``; the backward pass computes the blocks again.
    """
    check_states(states, table, len(table) - 1)
    with kernels.without_autocast(states.device):
        return _LinearEntropy.apply(as_float(states), as_float(table))


def linear_divergence(states: Tensor, table: Tensor, reference_states: Tensor, reference_table: Tensor) -> Tensor:
    """Exact ``KL(p || q)`` in nats, ``[N]``, of two softmaxes over the same catalog; see ``categorical_kl``.

    ``p = softmax(states tableᵀ)``, and ``q`` the same of the reference. Both are computed in blocks, and
    again in the backward pass: two products of each policy forward and one backward, and those of the gradient. Neither
    ``p`` nor ``q`` is held.

    Args:
        states: ``[N, d]``.
        table: ``[V + 1, d]``; row 0 is padding: it is not in the softmax and gets no gradient.
        reference_states: ``[N, e]``; no gradient flows into it.
        reference_table: ``[V + 1, e]``; no gradient flows into it.

    Returns:
        float32 (float64 for float64 states). Differentiable once, in states and table.

    Raises:
        RecpoError: shapes that do not fit.
    """
    check_states(states, table, len(table) - 1)
    check_reference(states, table, reference_states, reference_table)
    own = as_float(states), as_float(table)
    reference = as_float(reference_states.detach()), as_float(reference_table.detach())
    with kernels.without_autocast(states.device):
        return _LinearDivergence.apply(*own, *reference)


def linear_log_softmax(states: Tensor, table: Tensor) -> Tensor:
    """``log softmax(states tableᵀ)`` of every item, ``[N, V]``, which is held for the backward pass.

    Arguments as in ``linear_logprob``; float32 (float64 for float64 states), under autocast too.
    """
    check_states(states, table, len(table) - 1)
    with kernels.without_autocast(states.device):
        scores: Tensor = _Scores.apply(as_float(states), as_float(table)[1:])
        return scores.log_softmax(-1)


def check_states(states: Tensor, rows: Tensor, num_items: int) -> None:
    """Raises if states and rows of a table do not fit together, or if the table has no item."""
    if states.dim() != 2 or rows.dim() != 2 or states.shape[1] != rows.shape[1] or num_items < 1:
        raise RecpoError(
            f"states must be [N, d] and the rows of a table [R, d], with at least one item, got {tuple(states.shape)} "
            f"and {tuple(rows.shape)} with {num_items} items",
            code="wrong_shape",
            field="states",
        )


def check_reference(states: Tensor, table: Tensor, reference_states: Tensor, reference_table: Tensor) -> None:
    """Raises if the reference of a divergence has other states or other items than the policy."""
    matrices = reference_states.dim() == reference_table.dim() == 2
    fits = matrices and reference_states.shape[1] == reference_table.shape[1]
    if not fits or len(reference_states) != len(states) or len(reference_table) != len(table):
        raise RecpoError(
            f"the reference must have {len(states)} states and {len(table)} rows, "
            f"got {tuple(reference_states.shape)} and {tuple(reference_table.shape)}",
            code="wrong_shape",
            field="reference",
        )


def state_of_targets(states: Tensor, targets: Tensor, state_index: Tensor | None) -> Tensor:
    """The state of each target, ``[M]``; arguments as in ``linear_logprob``.

    Raises:
        RecpoError: shapes that do not fit.
    """
    if state_index is None:
        if targets.shape[:1] != states.shape[:1] or targets.dim() not in (1, 2):
            raise RecpoError(
                f"targets must be [N] or [N, K] with N = {len(states)}, got {tuple(targets.shape)}",
                code="wrong_shape",
                field="targets",
            )
        rows = torch.arange(len(states), device=states.device)
        return rows.view(-1, *[1] * (targets.dim() - 1)).expand_as(targets).reshape(-1)
    if state_index.shape != targets.shape or targets.dim() != 1:
        raise RecpoError(
            f"state_index {tuple(state_index.shape)} and targets {tuple(targets.shape)} must both be [M]",
            code="wrong_shape",
            field="state_index",
        )
    return state_index


class _Scores(torch.autograd.Function):
    """``states tableᵀ`` of ``[N, d]`` and ``[V, d]``, in full precision in both passes."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(states, table)
        return kernels.matmul_transposed(states, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        states, table = ctx.saved_tensors
        needs_states, needs_table = ctx.needs_input_grad
        grad_states = kernels.matmul_transposed(grad, table.T) if needs_states else None
        return grad_states, kernels.matmul_transposed(states.T, grad.T).T if needs_table else None


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, table: Tensor, targets: Tensor, state_index: Tensor | None) -> Tensor:
        needs_states, needs_table = ctx.needs_input_grad[:2]
        keep_bytes = kernels.KEEP_BYTES if needs_table else 0
        sums = kernels.sum_over_catalog(
            states, table, 1, want_expected_row=needs_states, keep_bytes=keep_bytes, fuses=True
        )
        target_rows = as_float(table[targets])
        of_target = states if state_index is None else states[state_index]
        lse = sums.lse if state_index is None else sums.lse[state_index]
        ctx.save_for_backward(states, table, targets, state_index)
        ctx.sums, ctx.target_rows = sums, target_rows if needs_states else None
        return kernels.row_products(of_target, target_rows) - lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        states, table, targets, state_index = ctx.saved_tensors
        per_state = grad if state_index is None else grad.new_zeros(len(states)).index_add_(0, state_index, grad)
        grad_states = grad_table = None
        if ctx.needs_input_grad[0]:
            grad_states = ctx.sums.expected_row * -per_state[:, None]
            chosen = ctx.target_rows * grad[:, None]
            grad_states += chosen if state_index is None else sum_rows(chosen, state_index, len(states))
        if ctx.needs_input_grad[1]:
            of_target = states if state_index is None else states[state_index]
            grad_table = sum_rows(of_target * grad[:, None], targets, len(table))
            grad_table[0] = 0
            kernels.add_softmax_gradient(grad_table, -per_state, states, table, 1, ctx.sums)
        return grad_states, grad_table, None, None


class _LinearEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, table: Tensor) -> Tensor:
        sums = kernels.sum_over_catalog(states, table, 1, want_expected_row=True)
        assert sums.expected_row is not None
        entropy = sums.lse - kernels.row_products(states, sums.expected_row)
        ctx.save_for_backward(states, table, sums.lse, entropy)
        return entropy.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        *own, entropy = ctx.saved_tensors
        return kernels.divergence_gradients(-grad, Scored(*own), None, -entropy, 1, ctx.needs_input_grad)


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, table: Tensor, reference_states: Tensor, reference_table: Tensor) -> Tensor:
        own, reference = (
            Scored(h, rows, kernels.sum_over_catalog(h, rows, 1, want_expected_row=False).lse)
            for h, rows in ((states, table), (reference_states, reference_table))
        )
        divergence = kernels.divergence_sum(own, reference, 1)
        ctx.save_for_backward(*own, *reference, divergence)
        return divergence.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *scored, divergence = ctx.saved_tensors
        own, reference = Scored(*scored[:3]), Scored(*scored[3:])
        gradients = kernels.divergence_gradients(grad, own, reference, divergence, 1, ctx.needs_input_grad)
        return *gradients, None, None


def sampled_logprob(
    target_scores: Tensor,
    negative_scores: Tensor,
    target_ids: Tensor,
    negative_ids: Tensor,
    log_expected_count: Tensor,
) -> Tensor:
    """Estimates log-softmax of a target from negatives that the whole batch shares.

    ``logp = s_t - log(exp(s_t) + Σ_{j: id_j != t} exp(s_j - log E[count_j]))``: the sum is an unbiased estimate of the
    rest of the normalizer, whatever the proposal, since every item is weighed by the reciprocal of how often it is
    expected among the negatives. With every item as a negative once (expected count 1) it is exact. Negatives that are
    the target itself ("accidental hits") are left out. Bengio and Senécal 2008; Yi et al. 2019 (logQ correction).

    Args:
        target_scores: ``[M]`` scores of the targets, uncorrected.
        negative_scores: ``[M, K]`` scores of the shared negatives, uncorrected.
        target_ids: ``[M]``.
        negative_ids: ``[K]``.
        log_expected_count: ``[K]`` log of the expected number of times that each negative is drawn: ``log(K q)`` for K
            draws with replacement from q.

    Returns:
        ``[M]``; its normalizer is unbiased, its logarithm is not: the estimate of a peaked softmax is too high.

    Raises:
        RecpoError: shapes that do not fit.
    """
    if negative_scores.shape != (*target_scores.shape, *negative_ids.shape) or target_ids.shape != target_scores.shape:
        raise RecpoError(
            f"expected scores [M] and [M, K] for ids [M] and [K], got {tuple(target_scores.shape)} and "
            f"{tuple(negative_scores.shape)} for {tuple(target_ids.shape)} and {tuple(negative_ids.shape)}",
            code="wrong_shape",
            field="scores",
        )
    hits = target_ids[:, None] == negative_ids
    rest = (negative_scores - log_expected_count).masked_fill(hits, -torch.inf)
    return target_scores - torch.cat([target_scores[:, None], rest], 1).logsumexp(1)


def draw_uniform(
    num_items: int, count: int, device: torch.device, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """``count`` ids out of 1..num_items with replacement, and their log expected counts, both ``[count]``."""
    ids = torch.randint(1, num_items + 1, (count,), device=device, generator=generator)
    return ids, torch.full((count,), count / num_items, device=device).log()


def draw_from_cdf(cdf: Tensor, count: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """``count`` ids with replacement from a proposal, and their log expected counts, both ``[count]``.

    Args:
        cdf: ``[V + 1]`` float64, cumulative probability of the ids 0..V; ``cdf[0] = 0`` and ``cdf[V] = 1``.
        count: number of draws.
        generator: on the device of ``cdf``; None = the default one.
    """
    draws = torch.rand(count, dtype=cdf.dtype, device=cdf.device, generator=generator)
    ids = torch.searchsorted(cdf, draws, right=True).clamp_(1, len(cdf) - 1)
    return ids, (count * (cdf[ids] - cdf[ids - 1])).log().float()


def proposal_cdf(counts: Tensor, power: float) -> Tensor:
    """Cumulative probabilities ``[V + 1]`` of a proposal ``q_v ∝ (counts_v + 1)^power``, ids 1..V.

    Args:
        counts: ``[V]`` how often each item occurs in the training period.
        power: 0 = uniform, 1 = popularity, 0.75 as in word2vec.
    """
    cdf = torch.cat([counts.new_zeros(1, dtype=torch.float64), (counts.double() + 1).pow(power).cumsum(0)])
    return cdf / cdf[-1]
