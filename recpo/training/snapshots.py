"""Other policies than the trained one: frozen copies, and reference log-probabilities kept in memory."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor, nn

from recpo.contracts import Policy, StatePolicy
from recpo.policies.critic import states_at
from recpo.policies.item_table import PlacedTable
from recpo.types import FeedbackBatch, Histories


class Snapshot(nn.Module):
    """A frozen copy of a policy, always in evaluation mode; its weights travel with the module's checkpoints.

    Args:
        policy: what is copied.
        head: a head on the policy's states that is copied along: state values, or values of items.
    """

    def __init__(self, policy: Policy, head: nn.Module | None = None) -> None:
        super().__init__()
        self.policy = copy.deepcopy(policy).requires_grad_(False).eval()
        self.head = None if head is None else copy.deepcopy(head).requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Snapshot:
        """Stays in evaluation mode: Lightning switches every submodule to training."""
        return self

    @torch.no_grad()
    def refresh(self, policy: Policy, head: nn.Module | None = None, rate: float = 1.0) -> None:
        """Moves the weights by ``rate`` of the way to those of ``policy`` and ``head``; 1 takes them over."""
        for own, other in ((self.policy, policy), (self.head, head)):
            if own is not None and other is not None:
                _move_towards(own, other, rate)

    @torch.no_grad()
    def log_prob(self, batch: FeedbackBatch, needed: Tensor | None = None, states: Tensor | None = None) -> Tensor:
        """See ``Policy.log_prob``; ``states`` are those of ``encode``, where they are at hand already."""
        if states is None:
            return self.policy.log_prob(batch, needed)
        assert isinstance(self.policy, StatePolicy)
        return self.policy.log_prob(batch, needed, states)

    @torch.no_grad()
    def encode(self, histories: Histories) -> Tensor:
        """See ``StatePolicy.encode``."""
        assert isinstance(self.policy, StatePolicy)
        return self.policy.encode(histories)

    @torch.no_grad()
    def state_values(self, states: Tensor, visible: Tensor) -> Tensor:
        """The values ``[B, S]`` of the head at every slate position."""
        assert self.head is not None
        values: Tensor = self.head(states_at(states, visible))
        return values


def _move_towards(own: nn.Module, other: nn.Module, rate: float) -> None:
    # not by state_dict: of a sharded table that is all ranks' blocks, and the copy's block lies where its original's is
    weights = _tensors(other)
    for name, value in _tensors(own).items():
        if rate < 1.0 and value.is_floating_point():
            value.lerp_(weights[name], rate)
        else:
            value.copy_(weights[name])
    for module in own.modules():
        if isinstance(module, PlacedTable):
            module.changed()


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Weights and the buffers that are saved: the others, such as a trie, are the same in every copy."""
    saved = {
        f"{prefix}.{name}": buffer
        for prefix, part in module.named_modules()
        for name, buffer in part.named_buffers(recurse=False)
        if name not in part._non_persistent_buffers_set
    }
    return dict(module.named_parameters()) | saved


class ReferenceCache:
    """Reference log-probabilities of every training row, from one pass before training.

    Memory: ``rows * S * T`` floats on the CPU, in place of a second policy and its forward pass in each step. Only
    slates that are the same in every epoch can be cached.
    """

    def __init__(
        self, policy: Policy, batches: Iterable[FeedbackBatch], num_contexts: int, device: torch.device
    ) -> None:
        frozen = Snapshot(policy).to(device)
        self._table = torch.zeros(num_contexts, 0, policy.num_tokens)
        for batch in batches:
            logp = frozen.log_prob(move_data_to_device(batch, device)).cpu()
            wider = logp.shape[1] - self._table.shape[1]
            if wider > 0:
                self._table = nn.functional.pad(self._table, (0, 0, 0, wider))
            kept = batch.slates.mask.any(-1)  # an empty row pads a rank's last step and has no id of its own
            self._table[batch.context_ids[kept], : logp.shape[1]] = logp[kept]

    def log_prob(self, batch: FeedbackBatch) -> Tensor:
        """``[B, S, T]``, as ``Policy.log_prob`` gave it."""
        return self._table[batch.context_ids.cpu(), : batch.slates.mask.shape[1]].to(batch.context_ids.device)
