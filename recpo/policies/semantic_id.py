"""A policy that generates the codes of an item one by one, restricted to the trie of real items."""

# Annotations are not postponed: the command line reads the types of options from the fields of dataclasses.

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recpo.artifacts.semantic_codes import Codes
from recpo.base.contracts import StatePolicy
from recpo.base.errors import PositiveInt, RecpoError
from recpo.base.types import FeedbackBatch, Histories, Recommendations, SamplingOptions, ScoringPlan
from recpo.ops.kl import categorical_kl
from recpo.policies.catalog_search import validate_list_length
from recpo.policies.encoder import HistoryEncoder, readable_ids
from recpo.policies.feature_policy import FeaturePolicy
from recpo.policies.item_table import ItemTable
from recpo.policies.lazy_decoder import Cache, Context, DecoderOptions, LazyDecoder, Placement
from recpo.policies.sampling import planned_items, scoring_plan, spread
from recpo.policies.semantic_search import NEVER, CodeSearch, Trie

# Largest number of beams in one search, over all contexts of a batch; larger batches are searched in parts.
_BEAMS_AT_ONCE = 1 << 15


class SemanticNetwork(NamedTuple):
    """The modules of a ``SemanticIdPolicy``."""

    item_table: ItemTable | None
    code_table: ItemTable
    encoder: HistoryEncoder
    decoder: LazyDecoder


@dataclass(eq=False, repr=False, kw_only=True)
class SemanticNetworkOptions(DecoderOptions):
    """The options that the modules of a ``SemanticIdPolicy`` depend on."""

    id_vectors: bool = True
    """the encoder also reads a vector per item id, not only those of its codes. Without it, the number of parameters
    does not depend on the catalog."""
    sparse: bool = False
    """lookups of item and code vectors give sparse gradients; needs an optimizer that accepts them"""


def semantic_network(
    num_items: int, codebook_sizes: tuple[int, ...], options: SemanticNetworkOptions
) -> SemanticNetwork:
    """Creates the modules. They depend on no codes, so ``recpo plan`` can count parameters before codes exist."""
    return SemanticNetwork(
        ItemTable(num_items, options.dim, sparse=options.sparse) if options.id_vectors else None,
        ItemTable(sum(codebook_sizes), options.dim, sparse=options.sparse),
        HistoryEncoder(options),
        LazyDecoder(codebook_sizes, options),
    )


@dataclass(eq=False, repr=False, kw_only=True)
class SemanticIdPolicy(FeaturePolicy, SemanticNetworkOptions):
    """``pi(item | history) = prod_t pi(code_t | codes before it, history)``, every factor a softmax over a codebook.

    A causal history encoder reads items and their codes. A lazy decoder (``recpo.policies.lazy_decoder``) attends to
    its states and generates the codes, so the cost of the output does not grow with the catalog. Search and sampling
    follow the trie of the catalog, so only code tuples of real items are generated.
    """

    codes: Path
    """directory written by ``recpo tokenize`` for the same prepared data"""
    normalizer: Literal["trie", "codebook"] = "trie"
    """"trie": every softmax runs over the codes that lead to an item, so the probabilities of the items sum to 1.
    "codebook": over all codes; the difference from 1 is the probability of tuples without an item."""
    beam_width: PositiveInt = 50
    """number of beams of ``recommend``, which uses ``k`` beams if that is more"""
    codes_checksum: Tensor = field(init=False)
    _code_offsets: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Reads the codes and creates the modules."""
        super().__post_init__()
        if self.item_features is not None and not self.id_vectors:
            raise RecpoError(
                "policy.item_features adds to the vectors of items, and policy.id_vectors is false: set it to true, "
                "or leave item_features out",
                code="conflicting_options",
                field="policy.id_vectors",
            )
        table = Codes.open(self.codes)
        if table.num_items != self.num_items:
            raise RecpoError(
                f"{self.codes} has codes of {table.num_items} items, the catalog has {self.num_items}: make them for "
                "the prepared data with `recpo tokenize`",
                code="mismatch",
                field="codes",
            )
        self.num_tokens, self.catalog_checksum = len(table.codebook_sizes), table.catalog_checksum
        self.trie = Trie(torch.from_numpy(table.codes), table.codebook_sizes)
        self.register_buffer("codes_checksum", _checksum(table.codes))
        # the row of code 0 of every level in the table of codes: row 0 is padding, and one level follows the other
        first_rows = torch.tensor([1, *table.codebook_sizes[:-1]]).cumsum(0)
        self.register_buffer("_code_offsets", first_rows, persistent=False)
        network = semantic_network(self.num_items, table.codebook_sizes, self)
        self.item_table, self.code_table, self.encoder, self.decoder = network
        self._read_features()

    def item_tables(self) -> tuple[ItemTable, ...]:
        """See ``FeaturePolicy.item_tables``: the table of the items, not that of the codes."""
        return () if self.item_table is None else (self.item_table,)

    def tokens(self, item_ids: Tensor) -> Tensor:
        """See ``Policy.tokens``: the codes ``[..., T]``, 0 for padding."""
        return self.trie.codes(item_ids)

    def log_prob(self, batch: FeedbackBatch, needed: Tensor | None = None, states: Tensor | None = None) -> Tensor:
        """See ``StatePolicy.log_prob``; all codes of all needed items in one pass."""
        plan, codes, logits = self._scored(batch, needed, states)
        of_levels = zip(logits, codes.split(1, 1), strict=True)
        return spread(plan, torch.cat([level.log_softmax(-1).gather(1, code) for level, code in of_levels], 1))

    def entropy(self, batch: FeedbackBatch, needed: Tensor | None = None, states: Tensor | None = None) -> Tensor:
        """An estimate from one item: ``sum_t`` of the entropy of code t given the codes of the slate's item before it.

        Its expectation over items drawn from the policy is the entropy of the policy (chain rule). The exact entropy
        would need every item of the catalog. For arguments and shape see ``StatePolicy.entropy``.
        """
        plan, _, logits = self._scored(batch, needed, states)
        logps = (level.log_softmax(-1) for level in logits)
        # a code without an item has probability 0 and a finite logarithm, so its term is 0
        return spread(plan, torch.stack([-(logp.exp() * logp).sum(1) for logp in logps], 1).sum(1))

    def divergence(
        self,
        batch: FeedbackBatch,
        reference: StatePolicy,
        needed: Tensor | None = None,
        states: Tensor | None = None,
    ) -> Tensor:
        """See ``StatePolicy.divergence``: over the codes that lead to an item, or with "codebook" over all codes."""
        assert isinstance(reference, SemanticIdPolicy)
        plan, _, logits = self._scored(batch, needed, states)
        with torch.no_grad():
            others = list(reference._scored(batch, needed, None)[2])
        # a code without an item has probability 0 and a finite logarithm, so its term is 0
        return spread(plan, torch.stack([categorical_kl(*both) for both in zip(logits, others, strict=True)], 1))

    def encode(self, histories: Histories) -> Tensor:
        """See ``StatePolicy.encode``."""
        return self.encoded(self.item_vectors(readable_ids(histories, self.max_history)), histories)

    def item_vectors(self, item_ids: Tensor) -> Tensor:
        """See ``StatePolicy.item_vectors``: the sum of the vectors of the item's codes and of its own vector."""
        rows = (self.trie.codes(item_ids) + self._code_offsets) * (item_ids > 0)[..., None]
        vectors: Tensor = self.code_table(rows).sum(-2)
        return vectors if self.item_table is None else vectors + self.item_table(item_ids)

    def recommend(self, histories: Histories, k: int, exclude: Tensor | None = None) -> Recommendations:
        """See ``Policy.recommend``; a beam search, exact if the beams hold every prefix of the catalog."""
        validate_list_length(k, self.num_items)
        states, width = self.encode(histories), max(self.beam_width, k)
        if torch.compiler.is_exporting():
            return _CodeByCode(self, states, histories.lengths).beam_search(k, width, exclude)
        contexts = max(1, _BEAMS_AT_ONCE // width)
        parts = [
            _CodeByCode(self, states[part], histories.lengths[part]).beam_search(
                k, width, None if exclude is None else exclude[part]
            )
            for part in (slice(begin, begin + contexts) for begin in range(0, max(1, len(states)), contexts))
        ]
        return Recommendations(torch.cat([p.item_ids for p in parts]), torch.cat([p.scores for p in parts]))

    @torch.no_grad()
    def sample(
        self, histories: Histories, group_size: int, options: SamplingOptions = SamplingOptions()
    ) -> tuple[Tensor, Tensor]:
        """See ``Policy.sample``. With ``normalizer="codebook"`` a draw may be no item: its id is 0."""
        return _CodeByCode(self, self.encode(histories), histories.lengths).sample(group_size, options)

    def _scored(
        self, batch: FeedbackBatch, needed: Tensor | None, states: Tensor | None
    ) -> tuple[ScoringPlan, Tensor, Iterator[Tensor]]:
        """The N positions that are needed, the codes ``[N, T]`` of their items, and the logits ``[N, K]`` by level.

        With "trie", the logits of codes that lead to no item are lowered.
        """
        plan = scoring_plan(batch, needed)
        items = planned_items(plan, batch.slates)
        codes, nodes = self.trie.codes(items), self.trie.paths(items)
        states = self.encode(batch.histories) if states is None else states
        placement = _packed(batch.slates.visible, plan)
        hidden = self.decoder(self.vectors_of_codes(codes[:, :-1]), self.decoder.read(states), placement)

        def logits(level: int) -> Tensor:
            found = self.decoder.logits(level, hidden[:, level])
            if self.normalizer == "codebook":
                return found
            return found.masked_fill(~self.trie.allowed(level, nodes[:, level]), NEVER)

        return plan, codes, map(logits, range(self.num_tokens))

    def vectors_of_codes(self, codes: Tensor, level: int = 0) -> Tensor:
        """Inputs of the decoder, ``[..., t, d]``, for codes ``[..., t]`` of the levels from ``level`` on."""
        vectors: Tensor = self.code_table(codes + self._code_offsets[level : level + codes.shape[-1]])
        return vectors * self.encoder.item_scale

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        saved = state_dict.get(prefix + "codes_checksum")
        if saved is not None and not torch.equal(saved.cpu(), self.codes_checksum.cpu()):
            raise RecpoError(
                "the checkpoint was trained on other semantic ids: name the codes directory it was made with",
                code="mismatch",
                field="codes",
            )
        super()._load_from_state_dict(state_dict, prefix, *rest)


class _CodeByCode(CodeSearch):
    """The decoder for a search: one step per level for the beams of every context."""

    def __init__(self, policy: SemanticIdPolicy, states: Tensor, lengths: Tensor) -> None:
        # not len(states), which an exported program would take for a constant
        super().__init__(policy.trie, states.shape[0], policy.normalizer)
        self._policy, self._lengths = policy, lengths
        self._context: Context = policy.decoder.read(states)

    def step(self, level: int, previous: Tensor | None, cache: Cache | None) -> tuple[Tensor, Cache]:
        """See ``CodeSearch``."""
        width = 1 if previous is None else previous.shape[1]
        visible = self._lengths[:, None].expand(-1, width)
        codes = None
        if previous is not None:
            codes = self._policy.vectors_of_codes(previous.reshape(-1, 1), level - 1).squeeze(1)
        logits, cache = self._policy.decoder.step(level, codes, self._context, Placement(visible), cache)
        return logits.view(-1, width, logits.shape[-1]), cache

    def reorder(self, cache: Cache, beams: Tensor) -> Cache:
        """See ``CodeSearch``."""
        batch = beams.shape[0]

        def picked(kept: Tensor) -> Tensor:
            rows = kept.view(batch, -1, *kept.shape[1:])
            index = beams[:, :, None, None, None].expand(-1, -1, *kept.shape[1:])
            return rows.gather(1, index).flatten(0, 1)

        return [(picked(key), picked(value)) for key, value in cache]


def _packed(visible: Tensor, plan: ScoringPlan) -> Placement:
    """Moves the positions of every row, ascending, to its front: attention pads to the largest number of them."""
    (contexts, size), positions, most = visible.shape, plan.positions, plan.max_per_context
    if most is None:
        most = int(plan.needed.sum(1).max()) if plan.needed.numel() else 0
    width, row = max(1, most), positions // max(1, size)
    first = torch.searchsorted(positions, torch.arange(contexts, device=positions.device) * size)
    places = row * width + torch.arange(len(positions), device=positions.device) - first[row]
    packed = visible.new_zeros(contexts * width).index_copy(0, places, visible.reshape(-1)[positions])
    return Placement(packed.view(-1, width), places)


def _checksum(codes: np.ndarray) -> Tensor:
    digest = hashlib.sha256(np.ascontiguousarray(codes, dtype="<i8").tobytes() + repr(codes.shape).encode()).digest()
    return torch.from_numpy(np.frombuffer(digest, dtype=np.int64).copy())
