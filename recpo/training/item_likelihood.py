"""Likelihood of whole items, in addition to the likelihood of their codes, for the states of a semantic-id policy."""

from __future__ import annotations

import torch
from torch import Tensor

from recpo.base.contracts import StatePolicy
from recpo.base.types import Slates
from recpo.ops.kernels import take_rows
from recpo.ops.linear_logprob import linear_logprob
from recpo.policies.sampling import shared_states


def item_log_prob(policy: StatePolicy, states: Tensor, slates: Slates) -> Tensor:
    """``log softmax_v(state · vector_v)`` over the catalog for the items of slates, ``[B, S]``; 0 where masked.

    The vectors are the ones that the encoder reads (``StatePolicy.item_vectors``), so this also trains the codes'
    vectors.

    Args:
        policy: the policy that has the vectors.
        states: ``[B, H + 1, d]`` of ``policy.encode``.
        slates: the items.
    """
    positions = slates.mask.reshape(-1).nonzero().squeeze(1)
    rows, state_index = shared_states(slates, positions, states.shape[1])
    vectors = policy.item_vectors(torch.arange(policy.num_items + 1, device=states.device))
    targets = slates.item_ids.reshape(-1)[positions]
    logp = linear_logprob(take_rows(states, rows), vectors, targets, state_index)
    return logp.new_zeros(slates.mask.numel()).index_copy(0, positions, logp).view(slates.mask.shape)
