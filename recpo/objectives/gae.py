"""Generalized advantage estimation along sessions, the slate axis (arXiv 1506.02438)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from recpo.base.contracts import Requirement, ReturnEstimator
from recpo.base.errors import RecpoError
from recpo.base.types import FeedbackBatch
from recpo.objectives.advantages import kept_mask, rewards_of
from recpo.ops.reduce import zero_masked


def generalized_advantage_estimate(
    rewards: Tensor,
    values: Tensor,
    dones: Tensor | None,
    next_value: Tensor | float,
    *,
    gamma: float = 0.99,
    lam: float = 0.95,
    mask: Tensor | None = None,
    truncations: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation along the last axis (GAE, arXiv 1506.02438).

    ``delta_t = r_t + gamma (1 - d_t) v_{t+1} - v_t``; ``A_t = delta_t + gamma lam (1 - d_t) A_{t+1}``; the return is
    ``A + v``. Termination (``dones``) means that nothing follows. Truncation means that later steps were not recorded:
    the recursion stops there, and ``bootstrap_values`` replaces the next value.

    Args:
        rewards: ``[..., S]``, the last axis is time.
        values: ``[..., S]`` state values before each step.
        dones: ``[..., S]`` bool or 0/1, 1 = the step ends its session; None = none does.
        next_value: ``[...]`` or a number, the value after the last step.
        gamma: discount.
        lam: 0 = one-step temporal difference, 1 = Monte Carlo.
        mask: ``[..., S]``; masked steps are skipped (their successor follows their predecessor) and return 0.
        truncations: ``[..., S]`` bool or 0/1.
        bootstrap_values: ``[..., S]``, read where truncated.

    Returns:
        advantages and returns, each ``[..., S]``, without gradient.

    Raises:
        RecpoError: ``truncations`` without ``bootstrap_values``.
    """
    if truncations is not None and bootstrap_values is None:
        raise RecpoError(
            "truncations need bootstrap_values: the value that stands for the unrecorded next state",
            code="missing_option",
            field="bootstrap_values",
        )
    kept = kept_mask(rewards, mask)
    rewards, values = zero_masked(rewards.detach(), kept), zero_masked(values.detach(), kept)
    ends = torch.zeros_like(kept) if dones is None else dones.bool()
    cut = torch.zeros_like(kept) if truncations is None else truncations.bool()
    bootstrap = values if bootstrap_values is None else bootstrap_values.detach()
    following = torch.as_tensor(next_value, dtype=values.dtype, device=values.device).detach()
    following = following.expand(values.shape[:-1])
    running = torch.zeros_like(following)
    steps = []
    for t in reversed(range(rewards.shape[-1])):
        goes_on = ~ends[..., t]
        next_t = zero_masked(torch.where(cut[..., t], bootstrap[..., t], following), goes_on)
        delta = rewards[..., t] + gamma * next_t - values[..., t]
        advantage = delta + gamma * lam * zero_masked(running, goes_on & ~cut[..., t])
        steps.append(zero_masked(advantage, kept[..., t]))
        running = torch.where(kept[..., t], advantage, running)
        following = torch.where(kept[..., t], values[..., t], following)
    advantages = torch.stack(steps[::-1], -1) if steps else torch.zeros_like(rewards)
    return advantages, advantages + values


@dataclass(frozen=True)
class GAEAdvantage(ReturnEstimator):
    """Generalized advantage estimation over the slate axis, whose positions are the steps of sessions.

    Nothing follows a position that ends its session. If the last kept position does not end its session (its window was
    cut, or the log ends there), the later steps were not recorded. Its value then replaces them in the returns of the
    steps before it, and it learns nothing itself (advantage 0, return = value). With ``gamma`` 0 later steps are not
    read, and every step learns. A slate without session ends is treated as one session that ends with the slate. Each
    candidate of a rollout is a session of one step: ``A = r - V``.

    Where the tokens of an item have rewards of their own (``Slates.token_rewards``), a token does not answer for those
    of the tokens before it: its advantage is that of the item minus them. This is GAE over the tokens with ``gamma``
    and ``lam`` 1 and the value of the state at each of them. The return is that of the item.

    Attributes:
        gamma: discount.
        lam: 0 = one-step temporal difference, 1 = Monte Carlo.
    """

    gamma: float = 0.99
    lam: float = 0.95

    requires = frozenset({Requirement.REWARDS, Requirement.VALUE})

    def __call__(self, batch: FeedbackBatch, values: Tensor | None = None) -> Tensor:
        """See ``AdvantageEstimator``; needs ``values [B, S]``."""
        return self.advantages_and_returns(batch, values)[0]

    def advantages_and_returns(self, batch: FeedbackBatch, values: Tensor | None) -> tuple[Tensor, Tensor]:
        """See ``ReturnEstimator``."""
        if values is None:
            raise RecpoError(
                "GAEAdvantage needs state values: configure a critic.", code="missing_value", field="values"
            )
        rewards, kept, ends = rewards_of(batch, self), batch.slates.mask, batch.slates.ends_session
        open_end = torch.zeros_like(kept)
        if ends is not None:
            ends = _ends_of_kept(ends, kept)
            last = kept & (kept.flip(-1).cumsum(-1).flip(-1) == 1)
            open_end = last & ~ends if self.gamma else open_end
        values = zero_masked(values.detach(), kept)
        rest = zero_masked(values, open_end).sum(-1)
        advantages, returns = generalized_advantage_estimate(
            rewards, values, ends, rest, gamma=self.gamma, lam=self.lam, mask=kept & ~open_end
        )
        returns = torch.where(open_end, values, returns)
        tokens = batch.slates.token_rewards
        if tokens is None or tokens.shape[-1] == 1:
            return advantages, returns
        before = tokens.detach().cumsum(-1) - tokens.detach()
        return zero_masked(advantages[..., None] - before, (kept & ~open_end)[..., None]), returns


def _ends_of_kept(ends: Tensor, kept: Tensor) -> Tensor:
    """Which kept steps are the last kept steps of their session; the step that ended it may be masked."""
    ended = ends.long().cumsum(-1)
    before = ended - ends.long()
    after = torch.where(kept, before, ended[..., -1:]).flip(-1).cummin(-1).values.flip(-1)
    following = torch.cat([after[..., 1:], ended[..., -1:]], -1)
    return kept & (following > before)
