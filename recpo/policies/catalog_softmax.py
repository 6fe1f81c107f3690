"""A softmax over the complete catalog on top of a causal history encoder."""

# Annotations are not postponed: the command line reads the types of options from the fields of dataclasses.

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from recpo.base.contracts import DotProductPolicy, StatePolicy
from recpo.base.errors import PositiveFloat, PositiveInt, RecpoError
from recpo.base.types import FeedbackBatch, Histories, Recommendations, SamplingOptions, ScoringPlan
from recpo.ops.kernels import as_float, take_rows
from recpo.ops.linear_logprob import draw_from_cdf, draw_uniform, proposal_cdf, sampled_logprob
from recpo.policies.catalog_search import validate_list_length
from recpo.policies.encoder import HistoryEncoder, readable_ids
from recpo.policies.feature_policy import FeaturePolicy
from recpo.policies.item_table import ItemTable, TableUse
from recpo.policies.sampling import planned_items, prefixes, scoring_plan, spread


@dataclass(eq=False, repr=False, kw_only=True)
class CatalogSoftmaxPolicy(FeaturePolicy, DotProductPolicy):
    """``pi(item | history) = softmax_v(state · vector_v / temperature)`` over every item of the catalog."""

    attention_length: PositiveInt | None = None
    """the blocks read only this many recent events of a longer history; None = all events. Slates are then scored only
    after the complete history (data.layout ImpressionLayout, or a history_length up to this value)."""
    similarity: Literal["dot", "cosine"] = "dot"
    """"dot" or "cosine". With "cosine", states and vectors have length 1, so the length of a vector cannot encode
    popularity. Use it with a temperature of about 0.05."""
    temperature: PositiveFloat = 1.0
    """divides the scores"""
    tie_weights: bool = True
    """use the input vectors of the items as output vectors too; False = a second table"""
    sparse: bool = False
    """lookups give sparse gradients. Useful with ``normalizer="sampled"`` and a large catalog; requires an optimizer
    that supports them."""
    normalizer: Literal["full", "sampled"] = "full"
    """"full" is exact. "sampled" estimates the normalizer from ``num_negatives`` shared items during training; in
    evaluation mode, log-probabilities are exact in both cases."""
    num_negatives: PositiveInt = 1024
    """K, sampled items per batch"""
    proposal: Literal["uniform", "popularity"] = "uniform"
    """distribution of the sampled items: "uniform", or "popularity", which is ``(count + 1)^0.75`` with the counts
    given to ``set_item_counts``"""
    cdf: Tensor | None = field(init=False)
    _step_seed: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Creates the modules."""
        super().__post_init__()
        exact = self.has_exact_log_prob = self.normalizer == "full"
        if self.sparse and exact:
            raise RecpoError(
                "policy.sparse: the exact softmax (policy.normalizer: full) gives every item a gradient, so none is "
                "sparse: set policy.normalizer to sampled, or policy.sparse to false",
                code="conflicting_options",
                field="policy.sparse",
            )
        scored: TableUse = "softmax" if exact else "lookup"
        use: TableUse = scored if self.tie_weights else "lookup"
        make = partial(ItemTable, self.num_items, self.dim, sparse=self.sparse, cosine=self._cosine)
        self.item_table = make(use=use)
        self.output_table = None if self.tie_weights else make(use=scored)
        self.encoder = HistoryEncoder(self, attention_length=self.attention_length)
        self._read_features()
        # a buffer, so that checkpoints contain the proposal; zero until the counts are set
        popular = self.proposal == "popularity"
        unset = torch.zeros(self.num_items + 1, dtype=torch.float64) if popular else None
        self.register_buffer("cdf", unset)

    def set_item_counts(self, counts: Tensor) -> None:
        """Sets the popularity proposal and the items with events, from the counts ``[V]`` of the items 1..V."""
        super().set_item_counts(counts)
        if self.cdf is not None:
            self.cdf.copy_(proposal_cdf(counts, 0.75))

    def begin_step(self, seed: int) -> None:
        """See ``Policy.begin_step``: ``seed`` determines the negatives of the step, so all ranks use the same ones."""
        super().begin_step(seed)
        self._step_seed = seed

    def item_tables(self) -> tuple[ItemTable, ...]:
        """See ``FeaturePolicy.item_tables``."""
        return (self.item_table,) if self.output_table is None else (self.item_table, self.output_table)

    def log_prob(self, batch: FeedbackBatch, needed: Tensor | None = None, states: Tensor | None = None) -> Tensor:
        """See ``StatePolicy.log_prob``. Positions with the same state share its normalizer.

        With ``normalizer="sampled"``, in training mode and without ``states``, this is the estimate of
        ``recpo.ops.linear_logprob.sampled_logprob``.
        """
        plan = scoring_plan(batch, needed, self.encoder.attention_length)
        targets = planned_items(plan, batch.slates)
        if self.normalizer == "sampled" and self.training and states is None:
            logp = self._sampled_log_prob(batch.histories, plan, targets)
        else:
            logp = self._output.log_prob(self._states(batch.histories, plan, states), targets, plan.state_index)
        return spread(plan, logp)[..., None]

    def entropy(self, batch: FeedbackBatch, needed: Tensor | None = None, states: Tensor | None = None) -> Tensor:
        """See ``StatePolicy.entropy``."""
        plan = scoring_plan(batch, needed, self.encoder.attention_length)
        entropy = self._output.entropy(self._states(batch.histories, plan, states))
        return spread(plan, entropy if plan.state_index is None else entropy[plan.state_index])

    def divergence(
        self,
        batch: FeedbackBatch,
        reference: StatePolicy,
        needed: Tensor | None = None,
        states: Tensor | None = None,
    ) -> Tensor:
        """See ``StatePolicy.divergence``. Positions with the same state share it."""
        assert isinstance(reference, CatalogSoftmaxPolicy)
        plan = scoring_plan(batch, needed, self.encoder.attention_length)
        states = self._states(batch.histories, plan, states)
        with torch.no_grad():
            others = reference._states(batch.histories, plan)
        divergence = self._output.divergence(states, reference._output, others)
        return spread(plan, divergence if plan.state_index is None else divergence[plan.state_index])[..., None]

    def catalog_log_prob(self, batch: FeedbackBatch, states: Tensor | None = None) -> Tensor:
        """See ``StatePolicy.catalog_log_prob``: one product of the states and the complete table."""
        if not self.has_exact_log_prob:
            raise RecpoError(
                "log-probabilities of the whole catalog are exact, and policy.normalizer is sampled: set it to full (a "
                "policy pre-trained with sampled negatives loads as it is)",
                code="conflicting_options",
                field="policy.normalizer",
            )
        histories = batch.histories
        if states is None:
            last = self.last_states(histories)
        else:
            rows = torch.arange(len(states), device=states.device)
            last = self.scaled(states[rows, histories.lengths])
        return self._output.catalog_log_prob(last)[..., None]

    def encode(self, histories: Histories) -> Tensor:
        """See ``StatePolicy.encode``."""
        return self.encoded(self.item_table(readable_ids(histories, self.max_history)), histories)

    def item_vectors(self, item_ids: Tensor) -> Tensor:
        """See ``StatePolicy.item_vectors``."""
        vectors: Tensor = self.item_table(item_ids)
        return vectors

    def recommend(self, histories: Histories, k: int, exclude: Tensor | None = None) -> Recommendations:
        """See ``Policy.recommend``. If ``B x V`` is large, the catalog is scored in blocks."""
        validate_list_length(k, self.num_items)
        return self._output.top_k(self.last_states(histories), k, exclude)

    @torch.no_grad()
    def sample(
        self, histories: Histories, group_size: int, options: SamplingOptions = SamplingOptions()
    ) -> tuple[Tensor, Tensor]:
        """See ``Policy.sample``."""
        ids, logp = self._output.draw(self.last_states(histories), group_size, options)
        return ids, logp[..., None]

    def _states(self, histories: Histories, plan: ScoringPlan, states: Tensor | None = None) -> Tensor:
        """The planned states in the form of ``scaled``, computed from the result of ``encode`` if it is given."""
        return self.scaled(take_rows(self.encode(histories) if states is None else states, plan.rows))

    def last_states(self, histories: Histories) -> Tensor:
        """See ``DotProductPolicy.last_states``; in the form of ``scaled``."""
        vectors = self.item_table(readable_ids(histories, self.max_history))
        return self.scaled(self.encoded_last(vectors, histories)).float()

    def states_at(self, histories: Histories, context: Tensor, visible: Tensor) -> Tensor:
        """See ``DotProductPolicy.states_at``. Prefixes that are longer than the attention are encoded one by one."""
        # a single causal pass gives all states up to the length of the blocks' attention
        attended = min(self.encoder.attention_length, histories.item_ids.shape[1])
        encoded = self.scaled(self.encode(histories.first(attended))).float()
        states = take_rows(encoded, context * (attended + 1) + visible.clamp_max(attended))
        longer = (visible > attended).nonzero().squeeze(1)
        if not len(longer):
            return states
        parts = prefixes(histories, context[longer], visible[longer])
        last = torch.cat([self.last_states(part.recent(self.max_history)) for part in parts])
        return states.index_copy(0, longer, last)

    def scaled(self, states: Tensor) -> Tensor:
        """States in the form that the softmax multiplies with ``output_vectors``: divided by the temperature."""
        states = F.normalize(states, dim=-1) if self._cosine else states
        return as_float(states) / self.temperature

    def output_vectors(self) -> Tensor:
        """See ``DotProductPolicy.output_vectors``."""
        return self._output.scored_rows()

    @property
    def _output(self) -> ItemTable:
        """The table whose vectors are compared with the states."""
        return self.item_table if self.output_table is None else self.output_table

    @property
    def _cosine(self) -> bool:
        return self.similarity == "cosine"

    def _sampled_log_prob(self, histories: Histories, plan: ScoringPlan, targets: Tensor) -> Tensor:
        """Estimated log-probabilities, with a single lookup in the tied table for history, targets and negatives."""
        generator = None if self._step_seed is None else torch.Generator(targets.device).manual_seed(self._step_seed)
        if self.cdf is not None:
            if self.cdf[-1] == 0:
                raise RecpoError(
                    'proposal="popularity" needs the training counts of the items: call set_item_counts',
                    code="missing_option",
                    field="item_counts",
                )
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
        output = F.normalize(output, dim=-1) if self._cosine else output
        scored, state_index = self._states(histories, plan, encoded), plan.state_index
        scores = (scored @ output[len(targets) :].T).float()
        if state_index is not None:
            scores, scored = scores[state_index], scored[state_index]
        target_scores = (scored * output[: len(targets)]).sum(-1).float()
        return sampled_logprob(target_scores, scores, targets, negatives, log_expected_count)
