"""A softmax over the whole catalog on top of a causal history encoder."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from recpo.errors import RecpoError
from recpo.ops.kernels import take_rows
from recpo.ops.sampled_softmax import draw_from_cdf, draw_uniform, proposal_cdf, sampled_logprob
from recpo.policies.encoder import HistoryEncoder, readable_ids
from recpo.policies.feature_policy import FeaturePolicy
from recpo.policies.item_features import ItemFeatureOptions
from recpo.policies.item_table import ItemTable, TableUse
from recpo.types import FeedbackBatch, Histories, Recommendations, SamplingOptions, Slates


class CatalogSoftmaxPolicy(FeaturePolicy):
    """``pi(item | history) = softmax_v(state · vector_v / temperature)`` over every item of the catalog.

    Args:
        num_items: catalog size V; items are 1..V.
        dim: width d of item vectors and states.
        blocks: "sasrec" (transformer, arXiv 1808.09781) or "hstu" (pointwise attention that also reads the time between
            events, arXiv 2402.17152).
        layers: number of blocks.
        heads: attention heads; divides ``dim``.
        max_history: H, the most recent events that are read.
        dropout: probability in the encoder.
        feedback_levels: levels of ``Histories.feedback`` that the encoder reads, 0 (unknown) included; 0 = none.
        attention_length: of a longer history, the blocks read only the last so many events; None = all. Slates are then
            scored after the whole history only (data.layout ImpressionLayout, or a history_length up to this).
        profile: add to every state a profile of all events (``recpo.policies.encoder.Profile``): long-term taste, at
            a cost that is linear in the history.
        fold_in: add to every state what a ridge regression of all feedback on so many projections of the item vectors
            says (``recpo.policies.encoder.FoldIn``), as a factorization folds users in; 0 = none.
        similarity: "dot", or "cosine": states and vectors have length 1, so popularity cannot hide in a
            vector's length; it wants a temperature of about 0.05.
        temperature: divides the scores.
        tie_weights: the input vectors of the items are also the output vectors; False = a second table.
        sparse: lookups give sparse gradients; worth it with ``normalizer="sampled"`` and a large catalog, and it
            needs an optimizer that takes them.
        normalizer: "full" is exact; "sampled" estimates the normalizer from ``num_negatives`` shared items while
            training (in evaluation mode log-probabilities are exact all the same).
        num_negatives: K, sampled items per batch.
        proposal: what they are drawn from: "uniform", or "popularity", ``(count + 1)^0.75`` of the counts given to
            ``set_item_counts``.
        item_features: add the features of the items to their vectors; null = ids alone.
        user_features: the features of the user join the states.
        context_features: the features of the requests are parts of the events, and join the states.
        behaviors: what the user did beside watching (``like``, ``follow``, ...) is a part of the events.
        time_gaps: the time since the event before is a part of each event.
    """

    cdf: Tensor | None
    _step_seed: int | None = None

    def __init__(
        self,
        num_items: int,
        *,
        dim: int = 64,
        blocks: Literal["sasrec", "hstu"] = "sasrec",
        layers: int = 2,
        heads: int = 2,
        max_history: int = 50,
        dropout: float = 0.2,
        feedback_levels: int = 6,
        attention_length: int | None = None,
        profile: bool = False,
        fold_in: int = 0,
        similarity: Literal["dot", "cosine"] = "dot",
        temperature: float = 1.0,
        tie_weights: bool = True,
        sparse: bool = False,
        normalizer: Literal["full", "sampled"] = "full",
        num_negatives: int = 1024,
        proposal: Literal["uniform", "popularity"] = "uniform",
        item_features: ItemFeatureOptions | None = None,
        user_features: bool = False,
        context_features: bool = False,
        behaviors: bool = False,
        time_gaps: bool = False,
    ) -> None:
        if dim < 1 or not temperature > 0:
            raise RecpoError(
                f"policy.dim must be at least 1 and policy.temperature above 0, got {dim} and {temperature}"
            )
        super().__init__()
        if num_items < 1:
            raise RecpoError(f"the catalog is empty (num_items = {num_items}): a policy needs at least one item")
        self.num_items, self.max_history, self.dim = num_items, max_history, dim
        self.similarity, self.temperature = similarity, temperature
        self.normalizer, self.num_negatives = normalizer, num_negatives
        self.has_exact_log_prob = normalizer == "full"
        scored: TableUse = "softmax" if normalizer == "full" else "lookup"
        self.item_table = ItemTable(num_items, dim, sparse=sparse, use=scored if tie_weights else "lookup")
        self.output_table = None if tie_weights else ItemTable(num_items, dim, sparse=sparse, use=scored)
        self.encoder = HistoryEncoder(
            dim,
            blocks=blocks,
            layers=layers,
            heads=heads,
            max_history=max_history,
            dropout=dropout,
            feedback_levels=feedback_levels,
            attention_length=attention_length,
            profile=profile,
            fold_in=fold_in,
        )
        self._read_features(
            item_features,
            user_features=user_features,
            context_features=context_features,
            behaviors=behaviors,
            time_gaps=time_gaps,
        )
        # a buffer, so that a checkpoint brings its proposal along; zero until the counts are set
        unset = torch.zeros(num_items + 1, dtype=torch.float64) if proposal == "popularity" else None
        self.register_buffer("cdf", unset)

    def set_item_counts(self, counts: Tensor) -> None:
        """Sets the popularity proposal from the training counts ``[V]`` of the items 1..V, and who has any."""
        super().set_item_counts(counts)
        if self.cdf is not None:
            self.cdf.copy_(proposal_cdf(counts, 0.75))

    def begin_step(self, seed: int) -> None:
        """See ``Policy.begin_step``: the negatives of the step come from ``seed``, so all ranks have the same."""
        super().begin_step(seed)
        self._step_seed = seed

    def item_tables(self) -> tuple[ItemTable, ...]:
        """See ``FeaturePolicy.item_tables``."""
        return (self.item_table,) if self.output_table is None else (self.item_table, self.output_table)

    def log_prob(self, batch: FeedbackBatch, needed: Tensor | None = None, states: Tensor | None = None) -> Tensor:
        """See ``StatePolicy.log_prob``. Positions that share a state share its normalizer.

        With ``normalizer="sampled"``, in training mode and without ``states``, the estimate of
        ``recpo.ops.sampled_softmax.sampled_logprob``.
        """
        slates = batch.slates
        wanted = slates.mask if needed is None else slates.mask & needed
        self._check_visible(batch.histories, slates, wanted)
        positions = wanted.reshape(-1).nonzero().squeeze(1)
        targets = slates.item_ids.reshape(-1)[positions]
        if self.normalizer == "sampled" and self.training and states is None:
            logp = self._sampled_log_prob(batch.histories, slates, positions, targets)
        else:
            states = self._scored_states(batch.histories, states)
            rows, state_index = shared_states(slates, positions, states.shape[1])
            logp = self._output.log_prob(
                take_rows(states, rows), targets, state_index, temperature=self.temperature, cosine=self._cosine
            )
        return logp.new_zeros(wanted.numel()).index_copy(0, positions, logp).view(*wanted.shape, 1)

    def entropy(self, batch: FeedbackBatch, needed: Tensor | None = None, states: Tensor | None = None) -> Tensor:
        """See ``StatePolicy.entropy``."""
        slates = batch.slates
        wanted = slates.mask if needed is None else slates.mask & needed
        self._check_visible(batch.histories, slates, wanted)
        positions = wanted.reshape(-1).nonzero().squeeze(1)
        states = self._scored_states(batch.histories, states)
        rows, state_index = shared_states(slates, positions, states.shape[1])
        entropy = self._output.entropy(take_rows(states, rows), temperature=self.temperature, cosine=self._cosine)
        entropy = entropy if state_index is None else entropy[state_index]
        return entropy.new_zeros(wanted.numel()).index_copy(0, positions, entropy).view(wanted.shape)

    def catalog_log_prob(self, batch: FeedbackBatch, states: Tensor | None = None) -> Tensor:
        """See ``StatePolicy.catalog_log_prob``: one product of the states and the whole table."""
        if not self.has_exact_log_prob:
            raise RecpoError(
                "log-probabilities of the whole catalog are exact, and policy.normalizer is sampled: set it to full (a "
                "policy pre-trained with sampled negatives loads as it is)"
            )
        histories = batch.histories
        if states is None:
            last = self.last_states(histories)
        else:
            rows = torch.arange(len(states), device=states.device)
            last = self.scaled(states[rows, histories.lengths])
        return self._output.catalog_log_prob(last, cosine=self._cosine)[..., None]

    def encode(self, histories: Histories) -> Tensor:
        """See ``StatePolicy.encode``."""
        return self.encoded(self.item_table(readable_ids(histories, self.max_history)), histories)

    def item_vectors(self, item_ids: Tensor) -> Tensor:
        """See ``StatePolicy.item_vectors``."""
        vectors: Tensor = self.item_table(item_ids)
        return vectors

    def recommend(self, histories: Histories, k: int, exclude: Tensor | None = None) -> Recommendations:
        """See ``Policy.recommend``; the catalog is scored in blocks where ``B x V`` is large."""
        if not 1 <= k <= self.num_items:
            raise RecpoError(f"k must be between 1 and the {self.num_items} items of the catalog, got {k}")
        return self._output.top_k(self.last_states(histories), k, exclude, cosine=self._cosine)

    @torch.no_grad()
    def sample(
        self,
        histories: Histories,
        group_size: int,
        options: SamplingOptions = SamplingOptions(),  # noqa: B008  immutable
    ) -> tuple[Tensor, Tensor]:
        """See ``Policy.sample``."""
        ids, logp = self._output.draw(self.last_states(histories), group_size, options, cosine=self._cosine)
        return ids, logp[..., None]

    def _check_visible(self, histories: Histories, slates: Slates, wanted: Tensor) -> None:
        """Raises where a state is asked for that the encoder does not compute."""
        readable = self.encoder.attention_length
        if histories.item_ids.shape[1] <= readable:
            return
        if (wanted & (slates.visible != histories.lengths[:, None])).any():
            raise RecpoError(
                f"histories of {histories.item_ids.shape[1]} events exceed policy.attention_length ({readable}), "
                "so items are scored after the whole history only: set data.layout to class_path: ImpressionLayout, or "
                f"its history_length to at most {readable}"
            )

    def _scored_states(self, histories: Histories, states: Tensor | None = None) -> Tensor:
        """The states as the softmax takes them, from those of ``encode`` where they are at hand."""
        states = self.encode(histories) if states is None else states
        return F.normalize(states, dim=-1) if self._cosine else states

    def last_states(self, histories: Histories) -> Tensor:
        """States ``[B, d]`` after the whole history, as ``scaled`` makes them."""
        return self.scaled(self.encoded_last(self.item_table(readable_ids(histories, self.max_history)), histories))

    def scaled(self, states: Tensor) -> Tensor:
        """States of ``encode`` as the softmax multiplies them with ``output_vectors``: divided by the temperature."""
        states = F.normalize(states, dim=-1) if self._cosine else states
        return states.float() / self.temperature

    def output_vectors(self) -> Tensor:
        """What states are multiplied with, ``[V + 1, d]``; row 0 is no item."""
        vectors = self._output.vectors()
        return F.normalize(vectors, dim=-1) if self._cosine else vectors

    @property
    def _output(self) -> ItemTable:
        """The table whose vectors the states are compared with."""
        return self.item_table if self.output_table is None else self.output_table

    @property
    def _cosine(self) -> bool:
        return self.similarity == "cosine"

    def _sampled_log_prob(self, histories: Histories, slates: Slates, positions: Tensor, targets: Tensor) -> Tensor:
        """Estimated log-probabilities; the tied table is looked up once: history, targets and negatives together."""
        generator = None if self._step_seed is None else torch.Generator(targets.device).manual_seed(self._step_seed)
        if self.cdf is not None:
            if self.cdf[-1] == 0:
                raise RecpoError('proposal="popularity" needs the training counts of the items: call set_item_counts')
            negatives, log_expected_count = draw_from_cdf(self.cdf, self.num_negatives, generator)
        else:
            negatives, log_expected_count = draw_uniform(self.num_items, self.num_negatives, targets.device, generator)
        history, output_ids = readable_ids(histories, self.max_history), torch.cat([targets, negatives])
        if self.output_table is None:
            vectors = self.item_table(torch.cat([history.reshape(-1), output_ids]))
            history_vectors, output = vectors[: history.numel()], vectors[history.numel() :]
        else:
            history_vectors, output = self.item_table(history.reshape(-1)), self.output_table(output_ids)
        encoded = self.encoded(history_vectors.view(*history.shape, -1), histories)
        states = self._scored_states(histories, encoded)
        output = F.normalize(output, dim=-1) if self._cosine else output
        rows, state_index = shared_states(slates, positions, states.shape[1])
        scored = take_rows(states, rows) / self.temperature
        scores = (scored @ output[len(targets) :].T).float()
        if state_index is not None:
            scores, scored = scores[state_index], scored[state_index]
        target_scores = (scored * output[: len(targets)]).sum(-1).float()
        return sampled_logprob(target_scores, scores, targets, negatives, log_expected_count)


def shared_states(slates: Slates, positions: Tensor, num_states: int) -> tuple[Tensor, Tensor | None]:
    """Which of the ``B x num_states`` states the positions need, and the place of each position's state among them.

    Neighbors with the same state are grouped, which is all there is in impressions, lists and sequences; the second
    result is None where every position has its own.
    """
    keys = positions // slates.mask.shape[1] * num_states + slates.visible.reshape(-1)[positions]
    rows, index = torch.unique_consecutive(keys, return_inverse=True)
    return rows, None if len(rows) == len(keys) else index
