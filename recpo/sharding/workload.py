"""The cost of a training step on a rank: the policy counted on the meta device, plus the formulas of ``costs``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from recpo.base.errors import RecpoError
from recpo.base.features import Feature, FeatureSchema
from recpo.ops.kernels import KEEP_BYTES
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.policies.encoder import Block, HSTUBlock, SASRecBlock
from recpo.policies.item_features import ItemFeatureOptions, ItemFeatures
from recpo.policies.item_table import LOOKUPS_WORTH, ItemTable
from recpo.policies.semantic_id import semantic_network
from recpo.sharding import policy_costs
from recpo.sharding.costs import (
    BYTES_PER_ID,
    FLOAT,
    Exchange,
    Placement,
    TableBlock,
    TableOptimizerName,
    TableSpec,
    all_reduce_bytes,
    distinct_ids,
    lookup_exchange,
    row_wise_placement,
    softmax_exchange,
    state_bytes,
)

PolicyKind = Literal["softmax", "semantic"]
# a batch position: item, watch quantile, reward, propensity and a few flags; an event: item, feedback, time
_BYTES_PER_POSITION, _BYTES_PER_EVENT = 40, 24
# training counts, tail flags, and flags of the items on a list of the validation
_BYTES_PER_ITEM = 8 + 1 + 8
_NOWHERE = Placement("", [])
_BLOCKS: dict[policy_costs.Blocks, type[Block]] = {"sasrec": SASRecBlock, "hstu": HSTUBlock}
_POSITIVE = (
    *("num_items", "ranks", "batch_size", "history_length", "dim", "layers", "heads"),
    *("num_negatives", "decoder_layers", "kv_groups", "kv_layers", "feature_hidden"),
)


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """A policy, its batches, and the ranks that train it, without the catalog."""

    ranks: int = 1
    """number of processes, one per device"""
    device: policy_costs.Device = "cuda"
    """device of every rank"""
    batch_size: int = 128
    """contexts per rank and step"""
    history_length: int = 50
    """events per context"""
    slate: int | None = None
    """number of items scored after the full history (an impression, a list, a group); null = pre-training, which
    scores every event of the history"""
    policy: PolicyKind = "softmax"
    """kind of policy: a softmax over the catalog, or semantic ids"""
    dim: int = 64
    """width of vectors and states"""
    blocks: policy_costs.Blocks = "sasrec"
    """kind of blocks of the history encoder"""
    layers: int = 2
    """number of layers of the history encoder"""
    heads: int = 2
    """number of attention heads"""
    feedback_levels: int = 6
    """number of feedback levels that the encoder reads"""
    tie_weights: bool = True
    """catalog softmax: one table for input and output"""
    normalizer: Literal["full", "sampled"] = "full"
    """catalog softmax: normalize over all items, or over sampled ones"""
    num_negatives: int = 1024
    """number of sampled items per step"""
    codebooks: Sequence[int] = (256, 256, 256, 256)
    """semantic ids: the number of codes of every level"""
    decoder_layers: int = 2
    """semantic ids: number of decoder layers"""
    kv_groups: int = 1
    """semantic ids: groups of query heads that share keys and values"""
    kv_layers: int = 1
    """semantic ids: number of distinct sets of keys and values over the decoder layers"""
    item_vectors: bool = True
    """semantic ids: the encoder also reads a vector per item"""
    copies: int = 0
    """number of frozen copies of the policy: 1 for an old policy (snapshot), 1 for a frozen reference"""
    table_optimizer: TableOptimizerName = "rowwise_adagrad"
    """optimizer of the tables; Adam updates all other parameters"""
    precision: Literal["32-true", "16-mixed", "bf16-mixed"] = "32-true"
    """mixed precision makes activations smaller, but not weights, optimizer states or messages"""


@dataclass(frozen=True)
class Workload(WorkloadOptions):
    """The options with a catalog of ``num_items`` items, whose ``item_features`` the encoder reads."""

    num_items: int
    item_features: tuple[Feature, ...] = ()
    feature_hidden: int = 64

    def __post_init__(self) -> None:
        """Rejects values that no policy can have."""
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise RecpoError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.copies < 0 or (self.slate is not None and self.slate < 1):
            raise RecpoError(f"copies must be 0 or more and slate 1 or more, got {self.copies} and {self.slate}")
        if self.dim % self.heads or self.heads % self.kv_groups:
            raise RecpoError(
                f"heads must divide dim, and kv_groups heads; got dim {self.dim}, heads {self.heads}, "
                f"kv_groups {self.kv_groups}"
            )
        tuples = 1
        for size in self.codebooks:
            tuples *= size
        if self.policy == "semantic" and tuples < self.num_items:
            raise RecpoError(
                f"{self.num_items:,} items need as many different code tuples, and codebooks of "
                f"{' x '.join(map(str, self.codebooks))} give {tuples:,}: take larger ones or one more"
            )

    @property
    def mixed(self) -> bool:
        """Whether activations are kept in 16 bits."""
        return self.precision != "32-true"

    @property
    def events(self) -> int:
        """History events that a rank encodes in a step."""
        return self.batch_size * self.history_length

    @property
    def scored(self) -> int:
        """Number of items that a rank scores: all events of the history, or the slate."""
        return self.batch_size * (self.slate or self.history_length)

    @property
    def states(self) -> int:
        """Number of states that they are scored from: one per event, or one per context."""
        return self.batch_size * (self.history_length if self.slate is None else 1)

    @cached_property
    def policy_on_meta(self) -> nn.ModuleDict:
        """The policy's modules with parameters, by name, on the meta device (no memory)."""
        encoder: dict[str, Any] = {
            **{"dim": self.dim, "block": _BLOCKS[self.blocks], "layers": self.layers, "heads": self.heads},
            **{"max_history": self.history_length, "dropout": 0.0, "feedback_levels": self.feedback_levels},
        }
        with torch.device("meta"):
            if self.policy == "semantic":
                network = semantic_network(
                    self.num_items,
                    tuple(self.codebooks),
                    decoder_layers=self.decoder_layers,
                    kv_groups=self.kv_groups,
                    kv_layers=self.kv_layers,
                    item_vectors=self.item_vectors,
                    **encoder,
                )
                parts = {name: part for name, part in network._asdict().items() if part is not None}
                if self.item_features and network.item_table is not None:
                    features = self.item_features, self.num_items, self.dim, self._feature_options
                    network.item_table.features = ItemFeatures(*features)
                return nn.ModuleDict({"policy": nn.ModuleDict(parts)})
            options: dict[str, Any] = {"tie_weights": self.tie_weights, "normalizer": self.normalizer} | encoder
            options["item_features"] = self._feature_options if self.item_features else None
            policy = CatalogSoftmaxPolicy(self.num_items, **options)
            policy.set_schema(FeatureSchema(item=self.item_features))
            return nn.ModuleDict({"policy": policy})

    @property
    def _feature_options(self) -> ItemFeatureOptions:
        return ItemFeatureOptions(self.feature_hidden)

    @property
    def feature_sizes(self) -> policy_costs.FeatureSizes | None:
        """What the policy reads of an item's features; None = it reads none."""
        return policy_costs.FeatureSizes.of(self.item_features) if self.item_features else None

    @cached_property
    def featured_tables(self) -> tuple[str, ...]:
        """The tables with features added to their rows."""
        return tuple(name for name, table in self.item_tables.items() if table.features is not None)

    @cached_property
    def item_tables(self) -> dict[str, ItemTable]:
        """The tables of the policy by name, the code table first."""
        found = {name: part for name, part in self.policy_on_meta.named_modules() if isinstance(part, ItemTable)}
        return dict(sorted(found.items()))

    @property
    def softmax_table(self) -> str | None:
        """The table of an exact softmax during training."""
        return next((name for name, table in self.item_tables.items() if table.use == "softmax"), None)

    def optimizer_of(self, name: str) -> TableOptimizerName:
        """The table of an exact softmax is updated by Adam, like the dense parameters."""
        return "adam" if name == self.softmax_table else self.table_optimizer

    def gradients(self, name: str, sharding: str) -> int:
        """Number of dense gradients of a table in a backward pass; see ``costs.block_bytes``."""
        if sharding == "data_parallel":
            return 2
        return 0 if name != self.softmax_table else 2 if self.tie_weights else 1

    def tables(self) -> list[TableSpec]:
        """The tables of the policy and of its frozen copies. ``lookups`` counts the expected distinct ids."""
        specs = [
            TableSpec(name, table.num_items + 1, table.dim, self._lookups(name, table.num_items + 1))
            for name, table in self.item_tables.items()
        ]
        copied = [
            spec._replace(name=f"copy_{number}.{spec.name}", frozen=True, copy_of=spec.name)
            for number in range(1, self.copies + 1)
            for spec in specs
        ]
        return specs + copied

    def _lookups(self, name: str, rows: int) -> int:
        """Expected number of distinct ids that a step requests from a table, summed over its lookups."""
        return round(sum(distinct_ids(count, rows) for count in self._draws(name)))

    def encoded_lookups(self, name: str) -> float:
        """Number of items whose features a step encodes, counted per lookup; 0 if the vectors come from the matrix."""
        asked = sum(self._draws(name))
        shares = name == self.softmax_table and asked * LOOKUPS_WORTH >= self.num_items
        return 0.0 if shares else asked

    def _draws(self, name: str) -> list[float]:
        """The number of ids that each lookup of a step requests from a table."""
        asked, codes = float(self.events), len(self.codebooks)
        output = self.scored + self.num_negatives if self.normalizer == "sampled" else 0
        if self.policy == "semantic":
            return [asked * codes, self.scored * (codes - 1.0)] if name == "policy.code_table" else [asked]
        if self.tie_weights:
            return [asked + output]
        return [asked] if name == "policy.item_table" else [float(output)]

    @cached_property
    def dense_parameters(self) -> int:
        """The parameters that every rank has: all except the tables."""
        of_tables = sum(table.weight.numel() for table in self.item_tables.values())
        return sum(parameter.numel() for parameter in self.policy_on_meta.parameters()) - of_tables


class StepCosts(NamedTuple):
    """The costs of a step.

    Attributes:
        memory: bytes by part, on the rank with the largest tables.
        exchange: bytes that a rank sends per step, by part.
        operations: floating-point operations of a rank per step, by part.
    """

    memory: dict[str, float]
    exchange: dict[str, Exchange]
    operations: dict[str, float]


def place_softmax_tables(workload: Workload, *, replicated: bool) -> dict[str, Placement]:
    """Placement of the exact softmax's table and its copies: cut into rows, or complete on every rank."""
    ranks, placed = workload.ranks, {}
    for spec in workload.tables():
        if (spec.copy_of or spec.name) == workload.softmax_table:
            everywhere = [TableBlock(rank, 0, spec.num_rows, 0, spec.dim) for rank in range(ranks)]
            in_rows = row_wise_placement(spec.num_rows, spec.dim, ranks)
            placed[spec.name] = Placement("data_parallel", everywhere) if replicated else in_rows
    return placed


def estimate(workload: Workload, placements: dict[str, Placement]) -> StepCosts:
    """All costs of a step for a given placement of all tables."""
    memory = table_memory(workload, placements) | _other_memory(workload, placements)
    return StepCosts(memory, _exchange(workload, placements), _operations(workload))


def table_memory(workload: Workload, placements: dict[str, Placement]) -> dict[str, float]:
    """Bytes of the placed tables on the rank that holds most of them."""
    parts = ("tables", "state of their optimizer", "their dense gradients", "frozen copies of tables")
    of_rank = [[0.0] * len(parts) for _ in range(workload.ranks)]
    for spec in workload.tables():
        placement = placements.get(spec.name, _NOWHERE)
        for block in placement.blocks:
            rows, columns = block.num_rows, block.num_columns
            weights, held = FLOAT * rows * columns, of_rank[block.rank]
            if spec.frozen:
                held[3] += weights
                continue
            held[0] += weights
            held[1] += state_bytes(rows, columns, workload.optimizer_of(spec.name))
            held[2] += weights * workload.gradients(spec.name, placement.sharding)
    return dict(zip(parts, max(of_rank, key=sum), strict=True))


def _other_memory(workload: Workload, placements: dict[str, Placement]) -> dict[str, float]:
    w = workload
    parameters = w.dense_parameters
    activations = policy_costs.encoder_activation_bytes(
        w.events, w.dim, w.layers, w.blocks, w.heads, w.history_length, mixed=w.mixed
    )
    dense = policy_costs.dense_bytes(parameters, w.ranks, w.copies, mixed=w.mixed)
    parts = {"dense parameters, gradients, Adam": float(dense)}
    if w.policy == "semantic":
        activations += policy_costs.decoder_activation_bytes(
            w.scored, w.dim, w.decoder_layers, w.codebooks, mixed=w.mixed
        )
        levels = policy_costs.trie_levels(w.num_items, w.codebooks)
        parts["trie and codes"] = float(policy_costs.trie_bytes(levels, w.codebooks))
    elif w.normalizer == "sampled":
        parts["softmax"] = policy_costs.sampled_softmax_bytes(w.states, w.num_negatives)
    else:
        assert w.softmax_table is not None
        placement = placements[w.softmax_table]
        ranks = 1 if placement.sharding == "data_parallel" else w.ranks
        rows = placement.blocks[0].num_rows
        parts["softmax"] = policy_costs.full_softmax_bytes(w.states, w.dim, rows, ranks, w.device)
    # ids; vectors on their own rank and on the requesting rank; and the gradients of both
    per_id = BYTES_PER_ID + 4 * FLOAT * w.dim
    parts["activations"] = activations
    parts |= _feature_memory(workload, placements)
    parts["looked-up vectors"] = float(sum(spec.lookups for spec in w.tables()) * per_id)
    if w.device == "cpu":  # with a GPU they are in host memory
        parts["arrays over the items"] = float(_BYTES_PER_ITEM * w.num_items)
    parts["batch"] = float(w.events * _BYTES_PER_EVENT + w.scored * _BYTES_PER_POSITION)
    return parts


def _feature_memory(workload: Workload, placements: dict[str, Placement]) -> dict[str, float]:
    """Bytes of the items' features, of encoding the looked-up items, and of the matrix of an exact softmax."""
    w, sizes = workload, workload.feature_sizes
    if sizes is None:
        return {}
    lookups = sum(map(w.encoded_lookups, w.featured_tables))
    parts = {
        "item features": float(len(w.featured_tables) * (w.num_items + 1) * sizes.bytes_per_item),
        "encoded features": policy_costs.feature_activation_bytes(lookups, sizes, w.feature_hidden),
    }
    if w.softmax_table in w.featured_tables:
        rows = placements[w.softmax_table].blocks[0].num_rows
        parts["item matrix"] = policy_costs.item_matrix_bytes(rows, w.dim, sizes, w.feature_hidden)
    return parts


def _exchange(workload: Workload, placements: dict[str, Placement]) -> dict[str, Exchange]:
    w = workload
    parts, copies = {}, []
    for spec in w.tables():
        sharding = placements[spec.name].sharding
        sent = lookup_exchange(spec.lookups, spec.num_rows, spec.dim, w.ranks, sharding, frozen=spec.frozen)
        if spec.frozen:
            copies.append(sent)
        else:
            parts[spec.name] = sent
    in_rows = w.softmax_table is None or placements[w.softmax_table].sharding != "data_parallel"
    if w.policy == "softmax" and in_rows:
        if w.softmax_table is not None:
            parts["exact softmax"] = softmax_exchange(w.states, w.scored, w.dim, w.ranks)
        copies += [softmax_exchange(w.states, w.scored, w.dim, w.ranks, frozen=True)] * w.copies
    if copies:
        parts["frozen copies"] = Exchange(*(sum(kind) for kind in zip(*copies, strict=True)))
    parts["dense gradients"] = Exchange(backward=all_reduce_bytes(FLOAT * w.dense_parameters, w.ranks))
    return parts


def _operations(workload: Workload) -> dict[str, float]:
    """A backward pass costs twice the forward pass. Frozen copies have no backward pass."""
    w = workload
    passes = 3 + w.copies
    parts = {
        "history encoder": passes * policy_costs.encoder_flops(w.events, w.dim, w.layers, w.blocks, w.history_length),
    }
    if w.feature_sizes is not None:
        parts["item features"] = _feature_operations(w, w.feature_sizes)
    if w.policy == "semantic":
        parts["decoder"] = passes * policy_costs.decoder_flops(
            w.scored, w.dim, w.decoder_layers, w.codebooks, w.history_length
        )
        return parts
    # forward: logits and expected rows; backward: logits again unless kept, and the gradient of the rows
    exact = policy_costs.softmax_flops(w.states, w.num_items, w.dim)
    kept = FLOAT * w.states * w.num_items <= KEEP_BYTES
    own = 3 * policy_costs.softmax_flops(w.states, w.num_negatives, w.dim)
    parts["softmax"] = w.copies * exact + (own if w.softmax_table is None else (3 if kept else 4) * exact)
    return parts


def _feature_operations(workload: Workload, sizes: policy_costs.FeatureSizes) -> float:
    """Lookups; for an exact softmax also the rows of a rank, which the backward pass encodes again."""
    w = workload
    lookups = sum(map(w.encoded_lookups, w.featured_tables))
    operations = (3 + w.copies) * policy_costs.feature_flops(lookups, w.dim, sizes, w.feature_hidden)
    if w.softmax_table in w.featured_tables:
        rows = -(-w.num_items // w.ranks)
        operations += (4 + w.copies) * policy_costs.feature_flops(rows, w.dim, sizes, w.feature_hidden)
    return operations
