"""Inputs of a history encoder beyond items and feedback: behaviors, time gaps, request features and user features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from recpo.base.errors import RecpoError
from recpo.base.features import FeatureSchema
from recpo.base.types import Features, Histories
from recpo.policies.feature_encoder import FeatureEncoder
from recpo.policies.layers import TIME_BUCKETS, Linear

_T = TypeVar("_T", Tensor, Features)


class HistoryFeatures(nn.Module):
    """Two additions to a history encoder: parts of each event, and features that are known when a state is requested.

    The token of event j includes ``sum_{b in behaviors_j} e_b + g[bucket of the time since event j - 1] +
    encoder(context_j)``. These are added to the item vector, the position and the feedback level.

    User features and the features of the current request are added at the state: ``state_v + C gelu(A state_v + user +
    request_v)``, with one encoder each. They are not part of any token. The request of a prediction is later than all
    events that its state attends to, users without events have a state as well, and the blocks do not depend on a
    request, so a single pass still serves all positions. The hidden layer lets both select parts of the state.

    All parts are initialized to zero: untrained, they add nothing.

    Args:
        dim: d, width of tokens and states.
        schema: the schema whose user and context features are read.
        behaviors: number of behaviors; 0 = they are not read.
        time_gaps: read the time between neighboring events; for the first event it counts as 0.
        user: read the features of the user.
        context: read the features of the requests.
        hidden: width of the hidden layers.

    Raises:
        RecpoError: the schema lacks these features.
    """

    def __init__(
        self,
        dim: int,
        schema: FeatureSchema,
        *,
        behaviors: int = 0,
        time_gaps: bool = False,
        user: bool = False,
        context: bool = False,
        hidden: int = 64,
    ) -> None:
        super().__init__()
        self.behaviors = nn.Parameter(torch.zeros(behaviors, dim)) if behaviors else None
        self.time_gaps = nn.Parameter(torch.zeros(TIME_BUCKETS, dim)) if time_gaps else None
        self.event_context = FeatureEncoder(schema.context, dim, hidden=hidden) if context else None
        self.user = FeatureEncoder(schema.user, hidden, hidden=hidden, starts_at_zero=False) if user else None
        self.request = FeatureEncoder(schema.context, hidden, hidden=hidden, starts_at_zero=False) if context else None
        joins = user or context
        self.expand = Linear(dim, hidden) if joins else None
        self.contract = Linear(hidden, dim) if joins else None
        if self.contract is not None:
            nn.init.zeros_(self.contract.weight)
            nn.init.zeros_(self.contract.bias)

    def of_events(self, histories: Histories, most: int) -> Tensor | None:
        """The parts ``[B, min(H, most), d]`` of the most recent events; None if no such input is read."""
        recent = histories.recent(most)
        parts = []
        if self.behaviors is not None:
            sets = _given(recent.behaviors, "behaviors")[..., None]
            powers = 2 ** torch.arange(len(self.behaviors), device=sets.device)
            named = sets.div(powers, rounding_mode="floor").remainder(2)  # ONNX has no shifts of signed integers
            parts.append(named.to(self.behaviors.dtype) @ self.behaviors)
        if self.time_gaps is not None:
            parts.append(F.embedding(gap_buckets(_given(recent.timestamps, "timestamps")), self.time_gaps))
        if self.event_context is not None:
            context = _given(recent.context, "context")
            parts.append(self.event_context(context.map(lambda column: column[:, :-1])))
        return sum(parts[1:], parts[0]) if parts else None

    def joined(self, states: Tensor, histories: Histories) -> Tensor:
        """States ``[B, H + 1, d]`` with user and request added. States that the encoder left out (nan) stay nan."""
        if self.expand is None or self.contract is None:
            return states
        hidden = self.expand(states.nan_to_num(0.0))
        if self.user is not None:
            hidden = hidden + self.user(_given(histories.user, "user"))[:, None]
        if self.request is not None:
            hidden = hidden + self.request(_given(histories.context, "context"))
        return states + self.contract(F.gelu(hidden))

    def joined_last(self, states: Tensor, histories: Histories) -> Tensor:
        """States ``[B, d]`` after the complete history, with the user and the current request added."""
        if self.request is not None:
            place = histories.lengths[:, None, None]
            answered = _given(histories.context, "context").map(
                lambda column: column.gather(1, place.expand(-1, 1, column.shape[-1]))
            )
            histories = histories._replace(context=answered)
        return self.joined(states[:, None], histories)[:, 0]


def gap_buckets(timestamps: Tensor) -> Tensor:
    """Buckets ``floor(log2(1 + gap))`` of the milliseconds since the previous event, ``[B, H]``; the first has 0."""
    gaps = F.pad(timestamps[:, 1:] - timestamps[:, :-1], (1, 0)).double().clamp_min(0)
    # adding a half keeps powers of 2 in the right bucket, as in ``time_gap_buckets``
    return (gaps + 1.5).log2().long().clamp_max(TIME_BUCKETS - 1)


def history_features(
    dim: int,
    schema: FeatureSchema,
    behaviors: Sequence[str],
    *,
    reads_behaviors: bool,
    time_gaps: bool,
    user: bool,
    context: bool,
) -> HistoryFeatures | None:
    """The additions that a policy with these options makes to its encoder; None if it has none.

    Raises:
        RecpoError: it reads something that the log does not have.
    """
    if not (reads_behaviors or time_gaps or user or context):
        return None
    for asked, found, name, remedy in (
        (reads_behaviors, behaviors, "behaviors", "map its behaviors in `recpo prepare`"),
        (user, schema.user, "user_features", "prepare it with --users and user features"),
        (context, schema.context, "context_features", "prepare it with context features"),
    ):
        if asked and not found:
            raise RecpoError(f"policy.{name} is true and the prepared log has none: {remedy}, or set it to false")
    count = len(behaviors) if reads_behaviors else 0
    return HistoryFeatures(dim, schema, behaviors=count, time_gaps=time_gaps, user=user, context=context)


def _given(values: _T | None, name: str) -> _T:
    if values is None:
        raise RecpoError(f"the policy reads Histories.{name}, and it is not there: hand it over with the histories")
    return values
