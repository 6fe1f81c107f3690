"""Base class of policies with item tables and a history encoder.

Its inputs beyond items and feedback are behaviors, time gaps, request features and user features.
"""

# Annotations are not postponed: the command line reads the types of options from the fields of dataclasses.

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from recpo.base.contracts import StatePolicy
from recpo.base.errors import RecpoError
from recpo.base.features import FeatureSchema, Reads
from recpo.base.types import Features, Histories
from recpo.policies.blocks import TIME_BUCKETS, Linear, logarithmic_buckets
from recpo.policies.encoder import EncoderOptions, HistoryEncoder
from recpo.policies.item_features import FeatureEncoder, ItemFeatureOptions, ItemFeatures
from recpo.policies.item_table import ItemTable

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

    The time gap of the first event counts as 0.

    Args:
        policy: its options say what is read, and the width d of tokens and states.
        schema: the schema whose user and context features are read.
        behaviors: the behaviors of the log.

    Raises:
        RecpoError: the policy reads something that the log does not have.
    """

    #: width of the hidden layers
    hidden = 64

    def __init__(self, policy: "FeaturePolicy", schema: FeatureSchema, behaviors: Sequence[str]) -> None:
        super().__init__()
        user, context, dim, hidden = policy.user_features, policy.context_features, policy.dim, self.hidden
        for asked, found, name, remedy in (
            (policy.behaviors, behaviors, "behaviors", "map its behaviors in `recpo prepare`"),
            (user, schema.user, "user_features", "prepare it with --users and user features"),
            (context, schema.context, "context_features", "prepare it with context features"),
        ):
            if asked and not found:
                raise RecpoError(
                    f"policy.{name} is true and the prepared log has none: {remedy}, or set it to false",
                    code="mismatch",
                    field=f"policy.{name}",
                )
        self.behaviors = nn.Parameter(torch.zeros(len(behaviors), dim)) if policy.behaviors else None
        self.time_gaps = nn.Parameter(torch.zeros(TIME_BUCKETS, dim)) if policy.time_gaps else None
        self.event_context = FeatureEncoder(schema.context, dim, hidden=hidden) if context else None
        self.user = FeatureEncoder(schema.user, hidden, hidden=hidden, starts_at_zero=False) if user else None
        self.request = FeatureEncoder(schema.context, hidden, hidden=hidden, starts_at_zero=False) if context else None
        self.expand = Linear(dim, hidden) if user or context else None
        self.contract = Linear(hidden, dim) if user or context else None
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
    return logarithmic_buckets(F.pad(timestamps[:, 1:] - timestamps[:, :-1], (1, 0)))


def _given(values: _T | None, name: str) -> _T:
    if values is None:
        raise RecpoError(
            f"the policy reads Histories.{name}, and it is not there: hand it over with the histories",
            code="missing_value",
            field=name,
        )
    return values


@dataclass(eq=False, repr=False, kw_only=True)
class FeaturePolicy(StatePolicy, EncoderOptions):
    """A ``StatePolicy`` that may read features. Its options are fields, from which a subclass builds its modules.

    A subclass is a dataclass too. Its ``__post_init__`` begins with that of this class, creates item tables and
    encoder, and ends with ``_read_features``. ``set_schema`` creates the layers that read features, because the schema
    determines their sizes.

    Attributes:
        encoder: the history encoder.
        history_features: what the encoder reads beyond items and feedback; None = nothing.
    """

    num_items: int = field(kw_only=False)
    """catalog size V; items are 1..V"""
    item_features: ItemFeatureOptions | None = None
    """add the features of the items to their vectors; null = ids only"""
    user_features: bool = False
    """add the features of the user to the states"""
    context_features: bool = False
    """add the features of the requests to the events and to the states"""
    behaviors: bool = False
    """add the user's other actions (``like``, ``follow``, ...) to the events"""
    time_gaps: bool = False
    """add the time since the previous event to each event"""
    encoder: HistoryEncoder = field(init=False)
    history_features: HistoryFeatures | None = field(init=False)

    def __post_init__(self) -> None:
        """Validates the ranges of the options."""
        nn.Module.__init__(self)  # the constructor of a dataclass calls no other
        super().__post_init__()
        if self.num_items < 1:
            raise RecpoError(
                f"the catalog is empty (num_items = {self.num_items}): a policy needs at least one item",
                code="empty",
                field="num_items",
            )

    @abstractmethod
    def item_tables(self) -> tuple[ItemTable, ...]:
        """The tables of item vectors."""

    def _read_features(self) -> None:
        """Sets what batches must contain. A subclass calls it after it has created the encoder."""
        self.history_features = None
        self.reads_item_features = self.item_features is not None
        self.reads = Reads(self.behaviors, self.user_features, self.context_features)
        self.reads_timestamps = self.encoder.reads_time or self.time_gaps
        self._schema_missing = self.reads_item_features or any(self.reads)
        if self.time_gaps and not self._schema_missing:  # no schema describes them
            self.set_schema(FeatureSchema())

    def set_schema(self, schema: FeatureSchema, behaviors: Sequence[str] = ()) -> None:
        """See ``Policy.set_schema``."""
        if self.item_features is not None:
            if not schema.item:
                raise RecpoError(
                    "policy.item_features is set and the prepared log has no item features: prepare it with --items, "
                    "or leave the option out",
                    code="mismatch",
                    field="policy.item_features",
                )
            for table in self.item_tables():
                table.features = ItemFeatures(schema.item, self.num_items, table.dim, self.item_features)
        joins = self.behaviors or self.time_gaps or self.user_features or self.context_features
        self.history_features = HistoryFeatures(self, schema, behaviors) if joins else None
        self._schema_missing = False

    def set_item_features(self, features: Features) -> None:
        """See ``Policy.set_item_features``."""
        for table in self.item_tables():
            if table.features is not None:
                table.features.assign(features)

    def set_item_counts(self, counts: Tensor) -> None:
        """Sets which items had training events ``[V]``. For the others, only the features count, not the id row."""
        for table in self.item_tables():
            if table.features is not None:
                table.features.trained[1:] = counts > 0

    def begin_step(self, seed: int) -> None:
        """See ``Policy.begin_step``."""
        for table in self.item_tables():
            table.begin_step(seed)

    @torch.no_grad()
    def precompute_item_vectors(self) -> None:
        """See ``Policy.precompute_item_vectors``."""
        for table in self.item_tables():
            if table.features is not None:
                training, table.training = table.training, False
                table.features.eval()
                table.weight = nn.Parameter(table.vectors(), requires_grad=table.weight.requires_grad)
                table.features, table.training = None, training
        self.item_features, self.reads_item_features = None, False

    def encoded(self, vectors: Tensor, histories: Histories) -> Tensor:
        """States ``[B, H + 1, d]`` of histories with item vectors ``[B, H, d]``."""
        states: Tensor = self.encoder(vectors, histories, self._parts(histories))
        return states if self.history_features is None else self.history_features.joined(states, histories)

    def encoded_last(self, vectors: Tensor, histories: Histories) -> Tensor:
        """The state after the complete history, ``[B, d]``."""
        state = self.encoder.last(vectors, histories, self._parts(histories))
        return state if self.history_features is None else self.history_features.joined_last(state, histories)

    def _parts(self, histories: Histories) -> Tensor | None:
        """What the encoder reads of the events beyond items, feedback and time; None = nothing."""
        if self._schema_missing:
            raise RecpoError(
                "the policy reads features or behaviors and does not know them yet: call set_schema with those of the "
                "prepared data, before weights are loaded",
                code="missing_option",
                field="schema",
            )
        extra = self.history_features
        return None if extra is None else extra.of_events(histories, self.encoder.attention_length)
