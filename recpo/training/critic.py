"""The critic: heads on the policy's states, trained beside it and left behind when it is exported."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recpo.contracts import StatePolicy
from recpo.errors import RecpoError
from recpo.objectives.q_learning import bellman_target
from recpo.policies.critic import ItemScore, ItemValue, StateValue, states_at
from recpo.training.snapshots import Snapshot
from recpo.types import FeedbackBatch


@dataclass(frozen=True)
class CriticOptions:
    """Options of the heads that the objective asks for: state values (PPO), Q-values, or scores (a reward model).

    Attributes:
        hidden: width of their hidden layer.
        shares_encoder: their losses also train the encoder that they read; false: they only read it, which makes the
            better reward model where the policy was trained on the same log.
        gamma: discount of Q-learning; 0 = a regression on the rewards.
        double: the online network chooses the best next item, the target network values it; false: the target both.
        target_every: optimizer steps between two updates of the target network (encoder and Q head).
        target_rate: how far an update moves it towards the online network; 1 = all the way.
    """

    hidden: int = 64
    shares_encoder: bool = True
    gamma: float = 0.5
    double: bool = True
    target_every: int = 1
    target_rate: float = 0.05

    def __post_init__(self) -> None:
        if not 0.0 <= self.gamma < 1.0:
            raise RecpoError(f"critic.gamma must lie in [0, 1), got {self.gamma}")
        if not 0.0 < self.target_rate <= 1.0:
            raise RecpoError(f"critic.target_rate must lie in (0, 1], got {self.target_rate}")
        if self.target_every < 1 or self.hidden < 1:
            raise RecpoError("critic.target_every and critic.hidden must be at least 1")


class Critic(nn.Module):
    """The heads that an objective requires.

    Args:
        policy: whose states they read.
        requires: out of ``{"value", "q_value", "score"}``; others are ignored.
        options: see ``CriticOptions``.
        num_scores: ``Objective.num_scores``.
    """

    def __init__(self, policy: StatePolicy, requires: Set[str], options: CriticOptions, num_scores: int = 1) -> None:
        super().__init__()
        self.options = options
        size = policy.num_items, policy.dim, options.hidden
        self.state_value = StateValue(policy.dim, options.hidden) if "value" in requires else None
        self.q_value = ItemValue(*size) if "q_value" in requires else None
        self.score = ItemScore(*size, num_scores) if "score" in requires else None
        self.target = None if self.q_value is None else Snapshot(policy, self.q_value)

    def refresh_target(self, policy: StatePolicy, step: int) -> None:
        """Moves the target network where it is due at optimizer step ``step``."""
        if self.target is not None and step and step % self.options.target_every == 0:
            self.target.refresh(policy, self.q_value, self.options.target_rate)

    def positions(self, states: Tensor, batch: FeedbackBatch) -> Tensor:
        """What the heads read at every slate position, ``[B, S, d]``, from the policy's states ``[B, H + 1, d]``."""
        return states_at(states if self.options.shares_encoder else states.detach(), batch.slates.visible)

    def scores(self, policy: StatePolicy, states: Tensor, batch: FeedbackBatch) -> Tensor:
        """The scores ``[B, S, K]`` of a reward model, from the policy's states ``[B, H + 1, d]``."""
        assert self.score is not None
        vectors = policy.item_vectors(batch.slates.item_ids)
        vectors = vectors if self.options.shares_encoder else vectors.detach()
        scores: Tensor = self.score(self.positions(states, batch), batch.slates.item_ids, vectors)
        return scores

    @torch.no_grad()
    def q_targets(self, states: Tensor, batch: FeedbackBatch, rewards: Tensor) -> Tensor:
        """Bellman targets ``[B, S]``: the next state of a position is that of the next request on its slate.

        Nothing follows the last request of a slate.

        Args:
            states: ``[B, H + 1, d]`` of the online policy.
            batch: slates in the order of time.
            rewards: ``[B, S]``.
        """
        assert self.target is not None
        following, ends = next_visible(batch.slates.visible, batch.slates.mask)
        flat = (~ends).reshape(-1).nonzero().squeeze(1)
        next_target = states_at(self.target.encode(batch.histories), following).flatten(0, 1)[flat]
        chooser = self.q_value if self.options.double else self.target.head
        next_chooser = states_at(states, following).flatten(0, 1)[flat] if self.options.double else next_target
        assert isinstance(chooser, ItemValue)
        assert self.target.head is not None
        values = self.target.head(next_target, chooser.best_items(next_chooser))
        best = rewards.new_zeros(rewards.numel()).index_copy(0, flat, values.to(rewards.dtype)).view_as(rewards)
        return bellman_target(rewards, best.unsqueeze(-1), ends, gamma=self.options.gamma)


def next_visible(visible: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """For every position the ``visible`` of the first later position that sees more, and whether there is none.

    Args:
        visible: ``[B, S]``, not decreasing over the kept positions.
        mask: ``[B, S]``.

    Returns:
        ``[B, S]`` each; 0 and True where there is none, and at masked positions.
    """
    # what sees nothing more sorts behind every position
    beyond = int(torch.iinfo(visible.dtype).max)
    ascending = visible.masked_fill(~mask, beyond).sort(-1).values
    index = torch.searchsorted(ascending, visible.contiguous(), right=True)
    following = torch.cat([ascending, ascending.new_full((len(ascending), 1), beyond)], 1).gather(1, index)
    ends = (following == beyond) | ~mask
    return following.masked_fill(ends, 0), ends
