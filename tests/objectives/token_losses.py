"""The unreduced losses of an objective that weighs tokens, with its arguments as training prepares them."""

import torch

from recpo.ops.reduce import over_tokens, zero_masked


def token_loss(objective, logp, old, advantages, mask=None):
    """``token_loss`` of log-probabilities ``[..., T]``; ``old`` None = on-policy, ``mask`` None = every token."""
    mask = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask.bool()
    advantages = zero_masked(over_tokens(advantages, logp), mask)
    logp = zero_masked(logp, mask)
    old = logp if old is None else zero_masked(old, mask)
    return objective.token_loss(logp, old.detach(), advantages, mask)
