"""Base class of policies with item tables and a history encoder, extended by features and behaviors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from recpo.base.contracts import StatePolicy
from recpo.base.errors import RecpoError
from recpo.base.features import FeatureSchema
from recpo.base.types import Features, Histories
from recpo.policies.encoder import HistoryEncoder
from recpo.policies.history_features import HistoryFeatures, history_features
from recpo.policies.item_features import ItemFeatureOptions, ItemFeatures
from recpo.policies.item_table import ItemTable


class FeaturePolicy(StatePolicy):
    """A ``StatePolicy`` that may read features. ``_read_features`` stores at construction what it reads.

    ``set_schema`` creates the layers that read features, because the schema determines their sizes.

    Attributes:
        encoder: the history encoder.
        history_features: what the encoder reads beyond items and feedback; None = nothing.
    """

    encoder: HistoryEncoder
    history_features: HistoryFeatures | None
    _item_options: ItemFeatureOptions | None
    _schema_missing: bool

    @abstractmethod
    def item_tables(self) -> tuple[ItemTable, ...]:
        """The tables of item vectors."""

    def _read_features(
        self,
        item_features: ItemFeatureOptions | None,
        *,
        user_features: bool,
        context_features: bool,
        behaviors: bool,
        time_gaps: bool,
    ) -> None:
        """Stores the options. The constructor calls it after it has created the encoder."""
        self._item_options, self.history_features = item_features, None
        self.reads_item_features = item_features is not None
        self.reads_user, self.reads_context, self.reads_behaviors = user_features, context_features, behaviors
        self._time_gaps = time_gaps
        self.reads_timestamps = self.encoder.reads_time or time_gaps
        self._schema_missing = self.reads_item_features or user_features or context_features or behaviors
        if time_gaps and not self._schema_missing:  # no schema describes them
            self.set_schema(FeatureSchema())

    def set_schema(self, schema: FeatureSchema, behaviors: Sequence[str] = ()) -> None:
        """See ``Policy.set_schema``."""
        if self._item_options is not None:
            if not schema.item:
                raise RecpoError(
                    "policy.item_features is set and the prepared log has no item features: prepare it with --items, "
                    "or leave the option out"
                )
            for table in self.item_tables():
                table.features = ItemFeatures(schema.item, self.num_items, table.dim, self._item_options)
        self.history_features = history_features(
            self.dim,
            schema,
            behaviors,
            reads_behaviors=self.reads_behaviors,
            time_gaps=self._time_gaps,
            user=self.reads_user,
            context=self.reads_context,
        )
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
        self._item_options, self.reads_item_features = None, False

    def encoded(self, vectors: Tensor, histories: Histories) -> Tensor:
        """States ``[B, H + 1, d]`` of histories with item vectors ``[B, H, d]``."""
        if vectors.shape[1] == 0:
            return self.encoded(*_with_a_place(vectors, histories))[:, :1]
        feedback, times, lengths = histories.feedback, histories.timestamps, histories.lengths
        if not self._joins():
            return self.encoder(vectors, feedback, times, lengths, places=histories.places)
        assert self.history_features is not None
        parts = self.history_features.of_events(histories, self.encoder.attention_length)
        states = self.encoder(vectors, feedback, times, lengths, parts, histories.places)
        return self.history_features.joined(states, histories)

    def encoded_last(self, vectors: Tensor, histories: Histories) -> Tensor:
        """The state after the complete history, ``[B, d]``."""
        if vectors.shape[1] == 0:
            return self.encoded_last(*_with_a_place(vectors, histories))
        feedback, times, lengths = histories.feedback, histories.timestamps, histories.lengths
        if not self._joins():
            return self.encoder.last(vectors, feedback, times, lengths, places=histories.places)
        assert self.history_features is not None
        parts = self.history_features.of_events(histories, self.encoder.attention_length)
        state = self.encoder.last(vectors, feedback, times, lengths, parts, histories.places)
        return self.history_features.joined_last(state, histories)

    def _joins(self) -> bool:
        """Whether the encoder reads more than items, feedback and time."""
        if self._schema_missing:
            raise RecpoError(
                "the policy reads features or behaviors and does not know them yet: call set_schema with those of the "
                "prepared data, before weights are loaded"
            )
        return self.history_features is not None


def _with_a_place(vectors: Tensor, histories: Histories) -> tuple[Tensor, Histories]:
    """If no user of a batch has an event, the histories have width 0; this adds one padded place."""

    def widened(column: Tensor | None) -> Tensor | None:
        return None if column is None else F.pad(column, (0, 1))

    def with_a_row(column: Tensor) -> Tensor:
        return F.pad(column, (0, 0, 0, 1), value=torch.nan if column.is_floating_point() else 0)

    return F.pad(vectors, (0, 0, 0, 1)), histories._replace(
        item_ids=F.pad(histories.item_ids, (0, 1)),
        feedback=widened(histories.feedback),
        timestamps=widened(histories.timestamps),
        behaviors=widened(histories.behaviors),
        context=None if histories.context is None else histories.context.map(with_a_row),
    )
