"""The networks of a training run: the policy, a frozen reference, an old policy, and the critic with its heads.

They are attributes of ``PreferenceModule``, so a checkpoint names their weights ``policy.*``, ``reference.*``,
``old.*`` and ``critic.*``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Set
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from recpo.base.contracts import Policy, StatePolicy
from recpo.base.types import FeedbackBatch, Histories, NextRequests, Slates, on_device
from recpo.objectives.q_learning import bellman_target
from recpo.ops.kernels import take_rows
from recpo.policies.item_table import ItemTable, PlacedTable
from recpo.training.contradictions import COMPARED, OF_STATES, requirements_of
from recpo.training.options import CriticOptions, LearningOptions

_POSITIONS_AT_ONCE = 1 << 14
# Bytes of the values of one block of states and items. Larger catalogs are searched block by block.
BLOCK_BYTES = 64 << 20
_ITEMS_PER_BLOCK = 8192


@dataclass
class Networks:
    """The trained policy and the other networks that an objective needs; None if it does not need one.

    Attributes:
        policy: the trained policy.
        reference: frozen copy of the initial policy.
        old: frozen copy that ``refresh`` updates, together with its state values.
        critic: heads on the policy's states.
        reference_cache: reference log-probabilities in memory instead of a frozen copy.
    """

    policy: Policy
    reference: Snapshot | None = None
    old: Snapshot | None = None
    critic: Critic | None = None
    reference_cache: ReferenceCache | None = None

    @classmethod
    def of(cls, policy: Policy, options: LearningOptions) -> Networks:
        """Creates the networks that ``options.objective`` requires. The policy itself is neither copied nor changed."""
        requires = requirements_of(options)
        critic = None
        if requires & (OF_STATES - {"entropy", "divergence"}):
            assert isinstance(policy, StatePolicy)
            critic = Critic(policy, requires, options.critic, options.objective.num_scores)
        frozen = bool(requires & COMPARED) and options.reference == "frozen"
        return cls(
            policy,
            Snapshot(policy) if frozen else None,
            Snapshot(policy, critic and critic.state_value) if options.old_policy == "snapshot" else None,
            critic,
        )

    def refresh(self, step: int, snapshot_every: int) -> None:
        """Updates the old policy and the target network for optimizer step ``step``."""
        if self.old is not None and step % snapshot_every == 0:
            self.old.refresh(self.policy, None if self.critic is None else self.critic.state_value)
        critic = self.critic
        if critic is not None and critic.target is not None and step and step % critic.options.target_every == 0:
            critic.target.refresh(self.policy, critic.q_value, critic.options.target_rate)


class Snapshot(nn.Module):
    """A frozen copy of a policy, always in evaluation mode. Its weights are part of the module's checkpoints.

    Args:
        policy: the policy to copy.
        head: a head on the policy's states to copy with it: state values, or values of items.
    """

    def __init__(self, policy: Policy, head: nn.Module | None = None) -> None:
        super().__init__()
        self.policy = copy.deepcopy(policy).requires_grad_(False).eval()
        self.head = None if head is None else copy.deepcopy(head).requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Snapshot:
        """Stays in evaluation mode, although Lightning switches every submodule to training."""
        return self

    @torch.no_grad()
    def refresh(self, policy: Policy, head: nn.Module | None = None, rate: float = 1.0) -> None:
        """Moves the weights by ``rate`` of the way to the weights of ``policy`` and ``head``; 1 copies them."""
        for own, other in ((self.policy, policy), (self.head, head)):
            if own is not None and other is not None:
                _move_towards(own, other, rate)

    @torch.no_grad()
    def log_prob(self, batch: FeedbackBatch, needed: Tensor | None = None, states: Tensor | None = None) -> Tensor:
        """See ``Policy.log_prob``. ``states`` is the result of ``encode`` if the caller already has it."""
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
    # not by state_dict: for a sharded table it has all ranks' blocks, and the copy has the blocks of its original
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
    """Weights and saved buffers. Other buffers, such as a trie, are equal in every copy."""
    saved = {
        f"{prefix}.{name}": buffer
        for prefix, part in module.named_modules()
        for name, buffer in part.named_buffers(recurse=False)
        if name not in part._non_persistent_buffers_set
    }
    return dict(module.named_parameters()) | saved


class ReferenceCache:
    """Reference log-probabilities of every training row, from one pass before training.

    Memory: ``rows * S * T`` floats on the CPU, instead of a second policy and its forward pass in each step. Only
    slates that are equal in every epoch can be cached.
    """

    def __init__(
        self, policy: Policy, batches: Iterable[FeedbackBatch], num_contexts: int, device: torch.device
    ) -> None:
        frozen = Snapshot(policy).to(device)
        self._table = torch.zeros(num_contexts, 0, policy.num_tokens)
        for batch in batches:
            logp = frozen.log_prob(on_device(batch, device)).cpu()
            wider = logp.shape[1] - self._table.shape[1]
            if wider > 0:
                self._table = F.pad(self._table, (0, 0, 0, wider))
            kept = batch.slates.mask.any(-1)  # an empty row, which pads a rank's last step, has no id
            self._table[batch.context_ids[kept], : logp.shape[1]] = logp[kept]

    def log_prob(self, batch: FeedbackBatch) -> Tensor:
        """``[B, S, T]``, the values of ``Policy.log_prob``."""
        return self._table[batch.context_ids.cpu(), : batch.slates.mask.shape[1]].to(batch.context_ids.device)


class Critic(nn.Module):
    """The heads that an objective requires.

    Args:
        policy: the policy whose states they read.
        requires: a subset of ``{"value", "q_value", "score"}``; other names are ignored.
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

    def positions(self, states: Tensor, batch: FeedbackBatch) -> Tensor:
        """The states that heads read at every slate position, ``[B, S, d]``, from the policy's ``[B, H + 1, d]``."""
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
        """Bellman targets ``[B, S]``: the next state of a position is the state of the next request on its slate.

        The last request of a slate has no next state.

        Args:
            states: ``[B, H + 1, d]`` of the online policy.
            batch: slates in the order of time.
            rewards: ``[B, S]``.
        """
        assert self.target is not None
        planned = None if batch.plan is None else batch.plan.next_requests
        next_visible, is_last, positions = next_requests_of(batch.slates) if planned is None else planned
        next_target = states_at(self.target.encode(batch.histories), next_visible).flatten(0, 1)[positions]
        chooser = self.q_value if self.options.double else self.target.head
        next_chooser = next_target
        if self.options.double:
            next_chooser = states_at(states, next_visible).flatten(0, 1)[positions]
        assert isinstance(chooser, ItemValue)
        assert self.target.head is not None
        values = self.target.head(next_target, chooser.best_items(next_chooser))
        best = rewards.new_zeros(rewards.numel()).index_copy(0, positions, values.to(rewards.dtype)).view_as(rewards)
        return bellman_target(rewards, best.unsqueeze(-1), is_last, gamma=self.options.gamma)


def next_requests_of(slates: Slates) -> NextRequests:
    """The next request after every position: the first later position with a larger ``visible``."""
    visible, mask = slates.visible, slates.mask
    # a position without a larger value sorts after every position
    beyond = int(torch.iinfo(visible.dtype).max)
    ascending = visible.masked_fill(~mask, beyond).sort(-1).values
    index = torch.searchsorted(ascending, visible.contiguous(), right=True)
    next_visible = torch.cat([ascending, ascending.new_full((len(ascending), 1), beyond)], 1).gather(1, index)
    is_last = (next_visible == beyond) | ~mask
    positions = (~is_last).reshape(-1).nonzero().squeeze(1)
    return NextRequests(next_visible.masked_fill(is_last, 0), is_last, positions)


@torch.no_grad()
def item_scores(policy: StatePolicy, head: ItemScore, histories: Histories, slates: Slates) -> Tensor:
    """Scores ``[B, S, K]`` of the items of ``slates``, 0 at masked positions; no gradient.

    Each item is scored after the ``visible`` events of its history. Positions are processed in blocks.
    """
    states = policy.encode(histories)
    rows = torch.arange(len(states), device=states.device)[:, None] * states.shape[1] + slates.visible
    positions = slates.mask.reshape(-1).nonzero().squeeze(1)
    flat, state_rows, items = states.flatten(0, 1), rows.reshape(-1)[positions], slates.item_ids.reshape(-1)[positions]
    parts = [
        head(flat[of_state], of_item, policy.item_vectors(of_item)).float()
        for of_state, of_item in zip(state_rows.split(_POSITIONS_AT_ONCE), items.split(_POSITIONS_AT_ONCE), strict=True)
    ]
    scores = torch.zeros(slates.mask.numel(), head.bias.shape[1], device=states.device)
    return scores.index_copy(0, positions, torch.cat(parts)).view(*slates.mask.shape, -1)


def states_at(states: Tensor, visible: Tensor) -> Tensor:
    """The state of every slate position.

    Args:
        states: ``[B, H + 1, d]``, state v after the first v events.
        visible: ``[B, S]``, number of events that a position sees.

    Returns:
        ``[B, S, d]``.
    """
    batch, width, _ = states.shape
    rows = torch.arange(batch, device=states.device)[:, None] * width + visible
    return take_rows(states, rows)


class StateValue(nn.Module):
    """``V(s)``: one hidden layer on the state. The initial value is 0 for every state.

    Args:
        dim: width of the states.
        hidden: width of the hidden layer.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(dim, hidden)
        self.output = nn.Linear(hidden, 1)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, states: Tensor) -> Tensor:
        """Values ``[...]`` float32 of states ``[..., d]``."""
        values: Tensor = self.output(F.gelu(self.hidden(states))).squeeze(-1)
        return values.float()


class ItemValue(nn.Module):
    """``f(s, item) = <g(s), vector_item> + bias_item`` with one hidden layer ``g`` and its own item vectors.

    This is Q(s, item) of Q-learning. The initial values are close to 0.

    Args:
        num_items: catalog size V.
        dim: width of the states and of the vectors.
        hidden: width of the hidden layer.
    """

    def __init__(self, num_items: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(dim, hidden)
        self.output = nn.Linear(hidden, dim)
        self.item_table = ItemTable(num_items, dim, use="whole")
        self.bias = nn.Parameter(torch.zeros(num_items + 1))

    def forward(self, states: Tensor, item_ids: Tensor) -> Tensor:
        """Values ``[...]`` of the items ``[...]`` in states ``[..., d]``; one item per state."""
        return (self.project(states) * self.item_table(item_ids)).sum(-1) + self.bias[item_ids]

    def project(self, states: Tensor) -> Tensor:
        """``g(s)``, in the shape of ``states``."""
        return self.output(F.gelu(self.hidden(states)))

    @torch.no_grad()
    def best_items(self, states: Tensor) -> Tensor:
        """The item ``[N]`` with the largest value in each of the states ``[N, d]``; of equal values the smallest id.

        States and catalog are processed in blocks, so ``BLOCK_BYTES`` bounds the memory.
        """
        count = max(1, BLOCK_BYTES // (4 * _ITEMS_PER_BLOCK))
        return torch.cat([self._best_items(self.project(part)) for part in states.split(count)])

    def _best_items(self, projected: Tensor) -> Tensor:
        weight, bias = self.item_table.weight, self.bias
        best = projected.new_full((len(projected),), -torch.inf)
        ids = torch.zeros(len(projected), dtype=torch.long, device=projected.device)
        for start in range(1, len(weight), _ITEMS_PER_BLOCK):
            stop = min(start + _ITEMS_PER_BLOCK, len(weight))
            top, index = torch.addmm(bias[start:stop], projected, weight[start:stop].T).max(1)
            ids = torch.where(top > best, index + start, ids)
            best = torch.maximum(best, top)
        return ids


class ItemScore(nn.Module):
    """``f_k(s, item) = <g_k(s), v> + h_k(v) + bias_k[item]``: the K scores of a reward model.

    ``v = A e / |e| + own vector``, where ``e`` is the vector that the policy reads for the item. A log shows each item
    to only a few users, so an item with little feedback is scored like the items that the policy considers similar.
    ``g`` and ``h`` have one hidden layer. The initial scores are close to 0.

    Args:
        num_items: catalog size V.
        dim: width of the states and of the vectors.
        hidden: width of the hidden layers.
        num_scores: K.
    """

    def __init__(self, num_items: int, dim: int, hidden: int, num_scores: int) -> None:
        super().__init__()
        self.of_state = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, num_scores * dim))
        self.of_item = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, num_scores))
        self.adapt = nn.Linear(dim, dim)
        self.item_table = ItemTable(num_items, dim)
        self.bias = nn.Parameter(torch.zeros(num_items + 1, num_scores))

    def forward(self, states: Tensor, item_ids: Tensor, vectors: Tensor) -> Tensor:
        """Scores ``[..., K]`` of the items ``[...]`` in states ``[..., d]``; one item per state.

        Args:
            states: ``[..., d]``.
            item_ids: ``[...]``.
            vectors: ``[..., d]``, the vectors that the policy reads for the items.
        """
        items = self.adapt(F.normalize(vectors, dim=-1)) + self.item_table(item_ids)
        match = self.of_state(states).unflatten(-1, (-1, items.shape[-1])) * items.unsqueeze(-2)
        return match.sum(-1) + self.of_item(items) + F.embedding(item_ids, self.bias)
