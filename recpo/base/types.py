"""The data types of recpo: NamedTuples of tensors, which Lightning and ``on_device`` move between devices.

Shapes: ``B`` contexts (one user history each), ``H`` history events, ``S`` slate positions, ``T`` tokens per item (1
for a catalog softmax, the codebook depth for semantic ids), ``k`` recommended items. Item ids are internal: 1..V, and
0 is padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Self, TypeVar

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from recpo.base.features import FeatureColumns

_Batch = TypeVar("_Batch", bound=tuple)


#: Features of items, users or requests as tensors.
Features = FeatureColumns[Tensor]


class EventIndices(NamedTuple):
    """The indices of the events of right-padded histories, with which a policy skips the padding.

    Attributes:
        indices: ``[N]`` indices into the flattened ``[B, width]``: those of all events, then as many of padding as make
            N a multiple that is fast (``recpo.policies.blocks.event_indices``). Empty if skipping the padding would not
            be faster.
        width: the number of columns of the histories.
    """

    indices: Tensor
    width: int


class Histories(NamedTuple):
    """What the policy knows about each context: events in order of time, padded on the right.

    ``behaviors``, ``user`` and ``context`` are present only if the policy reads them (``Policy.reads``) and the log
    has them.

    Attributes:
        item_ids: ``[B, H]`` int64, padded with 0.
        lengths: ``[B]`` int64, number of events, 0..H.
        feedback: ``[B, H]`` int64 feedback levels (see ``base.feedback.FeedbackDefinition``), 0 = unknown or padding.
        timestamps: ``[B, H]`` int64, milliseconds since the epoch.
        behaviors: ``[B, H]`` int64 bit sets: bit b is the b-th behavior of the prepared data (``Prepared.behaviors``).
        user: features of the users, leading shape ``[B]``.
        context: features of the requests, leading shape ``[B, H + 1]``. Row j < H is the request that showed event j;
            it is known when event j is predicted. The row at index ``lengths`` is the request that is being answered.
            Later rows are missing.
        event_indices: of the events that the policy's blocks read, computed on the CPU; None = the policy computes
            them.
    """

    item_ids: Tensor
    lengths: Tensor
    feedback: Tensor | None = None
    timestamps: Tensor | None = None
    behaviors: Tensor | None = None
    user: Features | None = None
    context: Features | None = None
    event_indices: EventIndices | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> Histories:
        """Applies ``change`` to every tensor, for example to move it to a device or to select rows."""
        user, context = (None if part is None else part.map(change) for part in (self.user, self.context))
        return self._events(change, change(self.lengths), user, context)

    def rows(self, index: Tensor) -> Histories:
        """Selects the contexts ``index [N]``."""
        return self.map(lambda column: column[index])

    def first(self, size: int) -> Histories:
        """The first ``size`` events of every history."""
        context = None if self.context is None else self.context.map(lambda column: column[:, : size + 1])
        return self._events(lambda column: column[:, :size], self.lengths.clamp_max(size), self.user, context)

    def up_to(self, lengths: Tensor) -> Histories:
        """The first ``lengths [B]`` events of each history. The number of columns does not change."""
        place = torch.arange(self.item_ids.shape[1] + 1, device=lengths.device)
        kept = place[:-1] < lengths[:, None]
        context = None if self.context is None else self.context.where(place <= lengths[:, None])
        return self._events(lambda column: column * kept, lengths, self.user, context)

    def recent(self, size: int) -> Histories:
        """The last ``size`` events of every history."""
        width = self.item_ids.shape[1]
        if width <= size:
            return self
        lengths = self.lengths.clamp_max(size)
        place = torch.arange(size + 1, device=lengths.device)
        index = ((self.lengths - lengths)[:, None] + place).clamp_max(width)
        kept, at, context = place[:-1] < lengths[:, None], index[:, :-1].clamp_max(width - 1), None
        if self.context is not None:
            # a gather exports with a free number of contexts; an index of rows would fix that number
            wide = self.context.map(lambda column: column.gather(1, index[..., None].expand(-1, -1, column.shape[-1])))
            context = wide.where(place <= lengths[:, None])
        return self._events(lambda column: column.gather(1, at) * kept, lengths, self.user, context)

    def _events(
        self, change: Callable[[Tensor], Tensor], lengths: Tensor, user: Features | None, context: Features | None
    ) -> Histories:
        """Applies ``change`` to the columns that have one value per event."""
        feedback, timestamps, behaviors = (
            None if column is None else change(column) for column in (self.feedback, self.timestamps, self.behaviors)
        )
        return Histories(change(self.item_ids), lengths, feedback, timestamps, behaviors, user, context)


class Slates(NamedTuple):
    """The items to score: an impression, a preference list, a group, a session or a shifted history.

    Attributes:
        item_ids: ``[B, S]`` int64, padded with 0.
        visible: ``[B, S]`` int64, the number of history events that are known when the position is scored, 0..H.
        mask: ``[B, S]`` bool, True for real positions, False for padding.
        label: ``[B, S]`` float, the preference label in [0, 1]; nan = missing.
        dislike: ``[B, S]`` bool.
        positive: ``[B, S]`` bool, positive according to the log's ``base.feedback.FeedbackRule``; False if nothing is
            known.
        grade: ``[B, S]`` float32, the grade of the event's feedback level (``base.feedback.GRADES``); nan = unknown.
        reward: ``[B, S]`` float, a given reward (simulator, reward model).
        logp_behavior: ``[B, S]`` float, log-probability under the policy that produced the log; nan = not logged.
        is_logged: ``[B, S]`` bool, False for sampled negatives and generated candidates.
        is_random: ``[B, S]`` bool, True if the log showed the item at random and not because a policy chose it.
        ends_session: ``[B, S]`` bool, True if nothing follows the position in its session; None = unknown. If the last
            real position of a slate does not end its session, the log does not contain the rest of the session.
        chosen: ``[B, S]`` bool, the preferred item of a preference list, at most one per slate; every other real
            position is rejected. None = the slate is not a preference list.
        behaviors: ``[B, S]`` int64 bit sets of what the user did with the item, as in ``Histories``; 0 = nothing, or
            nothing is known. None = no component reads them, or the log has none.
        token_rewards: ``[B, S, T]`` float, ``reward`` by token, with the same sum; None = all of it follows the last
            token.
    """

    item_ids: Tensor
    visible: Tensor
    mask: Tensor
    label: Tensor | None = None
    dislike: Tensor | None = None
    positive: Tensor | None = None
    grade: Tensor | None = None
    reward: Tensor | None = None
    logp_behavior: Tensor | None = None
    is_logged: Tensor | None = None
    is_random: Tensor | None = None
    ends_session: Tensor | None = None
    chosen: Tensor | None = None
    behaviors: Tensor | None = None
    token_rewards: Tensor | None = None


def catalog_slates(histories: Histories, num_items: int) -> Slates:
    """Slates ``[B, V]`` of the items 1..V in the order of their ids, scored after the complete history.

    The columns are views of a single row or column, so they take no memory.
    """
    shape = (len(histories.lengths), num_items)
    items = torch.arange(1, num_items + 1, device=histories.lengths.device)
    kept = torch.ones((), dtype=torch.bool, device=items.device)
    return Slates(items.expand(shape), histories.lengths[:, None].expand(shape), kept.expand(shape))


class ScoringPlan(NamedTuple):
    """The positions to score, and their states (``recpo.policies.sampling``).

    Attributes:
        needed: ``[B, S]`` bool.
        positions: ``[P]`` their indices in the flattened ``[B, S]``.
        rows: ``[R]`` the states that they need, indices into the flattened ``[B, H + 1]``.
        state_index: ``[P]`` the index of each position's state in ``rows``; None if every position has its own state.
        has_extra_positions: ``positions`` may contain positions that are not needed; their values are dropped.
        max_per_context: the largest number of needed positions of a context; None = not counted.
    """

    needed: Tensor
    positions: Tensor
    rows: Tensor
    state_index: Tensor | None
    has_extra_positions: bool = False
    max_per_context: int | None = None

    @property
    def states(self) -> Tensor:
        """``[P]`` the index of each position's state in ``rows``."""
        return torch.arange(len(self.rows), device=self.rows.device) if self.state_index is None else self.state_index


class NextRequests(NamedTuple):
    """The next request after every position of slates, in the order of time.

    Attributes:
        next_visible: ``[B, S]`` int64, ``visible`` of the next request; 0 if there is none.
        is_last: ``[B, S]`` bool, True if there is no next request, and at masked positions.
        positions: ``[N]`` positions with a next request, as indices in the flattened ``[B, S]``.
    """

    next_visible: Tensor
    is_last: Tensor
    positions: Tensor


class BatchPlan(NamedTuple):
    """What depends on counts, computed on the CPU so that a training step never waits for its device.

    See ``recpo.training.planning``.

    Attributes:
        scored: the positions to score; None = they depend on values that the device computes.
        advantages: ``[B, S]`` of the logged slates; None = they depend on values that the device computes.
        contexts: the context numbers that seed a rollout, as integers, which stay on the CPU; None = not planned.
        scorable: all positions that may be scored, if the device decides which are: real ones, and those of hard
            negatives after them.
        next_requests: of the logged slates, for Q-learning; None = not planned.
    """

    scored: ScoringPlan | None = None
    advantages: Tensor | None = None
    contexts: tuple[int, ...] | None = None
    scorable: ScoringPlan | None = None
    next_requests: NextRequests | None = None


class FeedbackBatch(NamedTuple):
    """One batch: the contexts and the positions to score.

    Attributes:
        histories: the contexts.
        slates: the positions to score.
        context_ids: ``[B]`` int64, the row of each context among all contexts of its kind. It is the same in every
            epoch and is the key of cached reference log-probabilities. For held-out contexts it equals ``user_ids``.
        step_labels: ``[N]``, the labels of the complete optimizer step (every micro-batch, every rank), for thresholds
            that are computed over the step. None = this batch is the complete step.
        known_positives: ``[B, M]`` int64, items that the user is known to like and that must not become negatives,
            padded with 0; present only if the policy adds hard negatives.
        user_ids: ``[B]`` int64, the users of the contexts: rows of the prepared ``users.parquet``.
        plan: computed on the CPU; None = not planned. It is valid for these slates only: code that replaces them must
            set it to None.
        later_micro_batches: on the first micro-batch of an optimizer step, the others of this rank, for statistics of
            the step that its first loss needs (whitened advantages). Empty = there are none, or nothing needs them.
    """

    histories: Histories
    slates: Slates
    context_ids: Tensor
    step_labels: Tensor | None = None
    known_positives: Tensor | None = None
    user_ids: Tensor | None = None
    plan: BatchPlan | None = None
    later_micro_batches: tuple[FeedbackBatch, ...] = ()


class SlateTraits(NamedTuple):
    """Properties of a data layout's slates, with which training refuses an objective that does not fit them.

    Attributes:
        is_preference_list: a slate is one chosen item and its rejected items (``Slates.chosen``).
        hard_negatives: how many of the policy's own top-ranked items training must append to every slate.
        resampled: slates contain sampled items, drawn again in every epoch.
        one_request: a slate is one request: all its items are scored after the complete history.
    """

    is_preference_list: bool = False
    hard_negatives: int = 0
    resampled: bool = False
    one_request: bool = False


class EvaluationBatch(NamedTuple):
    """A batch of held-out users: the history ends where the period starts, and the slate holds the period's events.

    Attributes:
        feedback: histories and held-out events; ``visible`` equals the length of the history at every position.
        past: ``[B, M]`` int64, every item of the user's past (not only of the last H events), padded with 0.
        exclude: ``[B, E]`` int64, the items that must not be listed, padded with 0: retired ones, and those of the
            past unless lists may repeat them (``Prepared.repeats``).
    """

    feedback: FeedbackBatch
    past: Tensor
    exclude: Tensor

    @property
    def user_ids(self) -> Tensor:
        """``[B]`` int64, the users. Each held-out user has one context."""
        return self.feedback.context_ids


class LogProbs(NamedTuple):
    """Natural-log probabilities ``[B, S, T]`` of the same tokens under several policies; None if not requested.

    Attributes:
        policy: under the trained policy; carries the gradient.
        mask: ``[B, S, T]`` bool, True for real positions.
        old: under the last snapshot or the behavior policy; no gradient.
        reference: under the fixed anchor policy; no gradient.
    """

    policy: Tensor
    mask: Tensor
    old: Tensor | None = None
    reference: Tensor | None = None


class ObjectiveInputs(NamedTuple):
    """The inputs of an objective. Fields that ``Objective.requires`` does not name are None.

    Attributes:
        logp: the log-probabilities and their mask.
        advantages: ``[B, S]``, or ``[B, S, T]`` if they differ between the tokens of an item; no gradient.
        rewards: ``[B, S]``; no gradient.
        chosen: ``[B, S]`` bool, the preferred items of a preference list; every other real position is rejected.
        values: ``[B, S]`` state values, with gradient ("value").
        values_old: ``[B, S]`` state values at the time of the rollout ("value").
        returns: ``[B, S]`` value targets ("value").
        entropy: ``[B, S]`` entropy of the policy at the position's state, with gradient ("entropy").
        divergence: ``[B, S, T]`` exact KL(policy || reference) over all choices of every token, with gradient
            ("divergence").
        q_values: ``[B, S]`` Q(state, item), with gradient ("q_value").
        q_targets: ``[B, S]`` Bellman targets, no gradient ("q_value").
        scores: ``[B, S, K]`` reward-model scores, ``Objective.num_scores`` per item, with gradient ("score").
        label: ``[B, S]`` preference label, nan = missing ("labels").
        dislike: ``[B, S]`` bool ("labels").
        grades: ``[B, S]`` grades of the feedback in [0, 1], nan = unknown ("grades").
        positive: ``[B, S]`` bool, positive according to the log's rule ("positives").
        behaviors: ``[B, S]`` int64 bit sets of what the user did, as in ``Slates`` ("behaviors").
        denominator: scalar, the denominator of the complete optimizer step (all micro-batches and ranks) if this batch
            is only a part of it; None = this batch is the complete step.
    """

    logp: LogProbs
    advantages: Tensor | None = None
    rewards: Tensor | None = None
    chosen: Tensor | None = None
    values: Tensor | None = None
    values_old: Tensor | None = None
    returns: Tensor | None = None
    entropy: Tensor | None = None
    divergence: Tensor | None = None
    q_values: Tensor | None = None
    q_targets: Tensor | None = None
    scores: Tensor | None = None
    label: Tensor | None = None
    dislike: Tensor | None = None
    grades: Tensor | None = None
    positive: Tensor | None = None
    behaviors: Tensor | None = None
    denominator: Tensor | None = None


class LossOutput(NamedTuple):
    """A scalar loss and detached scalar tensors to log."""

    loss: Tensor
    metrics: dict[str, Tensor]


class Recommendations(NamedTuple):
    """Top-k items, best first.

    Attributes:
        item_ids: ``[B, k]``, filled up with 0 if fewer than k items are allowed.
        scores: ``[B, k]`` log-probabilities; -inf for id 0.
    """

    item_ids: Tensor
    scores: Tensor

    @classmethod
    def by_place(cls, item_ids: Tensor) -> Self:
        """Lists ``[B, k]``, padded with 0, whose scores are minus the places."""
        places = torch.arange(1, item_ids.shape[1] + 1, device=item_ids.device).float()
        return cls(item_ids, (-places).expand_as(item_ids).masked_fill(item_ids == 0, -torch.inf))


class SamplingOptions(NamedTuple):
    """How candidates are drawn from a policy.

    Attributes:
        temperature: divides the scores before the softmax (at every token). 1 samples the policy itself; values close
            to 0 are nearly greedy.
        top_p: draw only from the smallest set of choices (at every token) whose total probability reaches this share
            (nucleus sampling, arXiv 1904.09751); 1 = draw from all.
        replacement: False draws distinct items with Gumbel top-k (arXiv 1903.06059): the first item is a draw from the
            policy, and each later one is a draw from the remaining items.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    replacement: bool = True


def on_device(batch: _Batch, device: torch.device) -> _Batch:
    """A batch, or any part of one, with its tensors on a device; copies from pinned memory are asynchronous."""
    is_blocking = device.type in ("cpu", "mps")  # as in Lightning: there, a copy could be read before it is complete
    moved: _Batch = apply_to_collection(batch, Tensor, lambda one: one.to(device, non_blocking=not is_blocking))
    return moved
