"""Tables and their blocks on the ranks, and the memory of a training run on every rank, counted before it runs.

The policy is built on fake tensors, which have sizes but no memory. Its parameters are counted there, and what autograd
keeps of a forward pass of the history encoder and the decoder of semantic ids: as much as a run on a CPU with full
histories keeps. torchrec's planner shards the tables (``recpo.sharding.planning``). ``NOT_COUNTED`` names the rest.

Tables are float32, also under mixed precision. Symbols: ``W`` ranks, ``V`` items, ``d`` the width of vectors and
states, ``N`` states that a rank scores per step.
"""

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from types import ModuleType
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from recpo.base.errors import NonNegativeInt, PositiveInt, RecpoError, validate_ranges
from recpo.base.features import Categories, Category, Feature, FeatureSchema, Number, Vector, of_type
from recpo.base.types import EventIndices, Histories
from recpo.ops.kernels import block_size
from recpo.policies.blocks import HSTUBlock, SASRecBlock
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.policies.item_features import ItemFeatureOptions, ItemFeatures
from recpo.policies.item_table import ItemTable
from recpo.policies.lazy_decoder import Placement as DecoderPlacement
from recpo.policies.semantic_id import SemanticNetworkOptions, semantic_network

Sharding = Literal["auto", "row_wise", "table_wise", "column_wise", "data_parallel"]
TableOptimizerName = Literal["sgd", "adagrad", "rowwise_adagrad", "adam"]

GIB = 1 << 30
BYTES_PER_ID = 8
FLOAT = 4
#: the columns of a block must be a multiple of this (FBGEMM reads four floats at a time)
COLUMN_MULTIPLE = 4


class TableSpec(NamedTuple):
    """One table.

    Attributes:
        name: dotted module path.
        num_rows: rows, including the padding row (V + 1).
        dim: d.
        lookups: ids that a rank looks up per step; the planner weights communication with this number.
        sharding: how it is sharded.
        frozen: it has no gradient and no optimizer state.
        copies: number of frozen copies (old policy, reference), which are placed with it and looked up as often.
    """

    name: str
    num_rows: int
    dim: int
    lookups: int
    sharding: Sharding = "auto"
    frozen: bool = False
    copies: int = 0


class TableBlock(NamedTuple):
    """A rank's part of a table: ``num_rows`` rows starting with ``first_row``, and a range of columns."""

    rank: int
    first_row: int
    num_rows: int
    first_column: int
    num_columns: int


class Placement(NamedTuple):
    """Sharding of a table, and its blocks in the order of the ranks (``data_parallel``: a full table on each)."""

    sharding: str
    blocks: list[TableBlock]


def sharding_by_table(sharding: Sharding | dict[str, Sharding], tables: Iterable[str]) -> dict[str, Sharding]:
    """The sharding of all tables, or by name, for each of ``tables``; those that are not named are ``auto``.

    Raises:
        RecpoError: ``sharding`` names another table.
    """
    named = sharding if isinstance(sharding, dict) else dict.fromkeys(tables, sharding)
    if unknown := sorted(named.keys() - set(tables)):
        raise RecpoError(
            f"sharding names {', '.join(unknown)}; the tables are {', '.join(sorted(tables))}",
            code="unknown_name",
            field="sharding",
        )
    return {name: named.get(name, "auto") for name in tables}


def row_blocks(num_rows: int, ranks: int) -> list[tuple[int, int]]:
    """``(first row, rows)`` of every rank: blocks of ``ceil(rows / W)`` rows; the last ones may be shorter or empty."""
    height = -(-num_rows // ranks)
    starts = [min(rank * height, num_rows) for rank in range(ranks + 1)]
    return [(begin, end - begin) for begin, end in pairwise(starts)]


def row_wise_placement(num_rows: int, dim: int, ranks: int) -> Placement:
    """The row-wise blocks of a table."""
    cuts = enumerate(row_blocks(num_rows, ranks))
    return Placement("row_wise", [TableBlock(rank, first, rows, 0, dim) for rank, (first, rows) in cuts])


def block_bytes(
    rows: int, columns: int, optimizer: TableOptimizerName, *, copies: int = 0, frozen: bool = False, gradients: int = 0
) -> dict[str, int]:
    """Bytes of a block of a table in float32, by part.

    The state of the optimizer: sgd 0, rowwise_adagrad ``rows``, adagrad ``rows d``, adam ``2 rows d``.

    Args:
        rows: rows of the block.
        columns: columns of the block.
        optimizer: the optimizer of the table.
        copies: number of frozen copies.
        frozen: the block has neither gradients nor state.
        gradients: number of gradient tensors of its size in a backward pass. None if the table is only looked up. 1 if
            the exact softmax multiplies with it, 2 if it is looked up as well (the two are then added). 2 if it is
            data-parallel (the second is the all-reduced bucket).
    """
    weights = FLOAT * rows * columns
    state = {"sgd": 0, "rowwise_adagrad": FLOAT * rows, "adagrad": weights, "adam": 2 * weights}[optimizer]
    return {
        "tables": weights,
        "state of their optimizer": 0 if frozen else state,
        "their dense gradients": 0 if frozen else gradients * weights,
        "frozen copies of tables": copies * weights,
    }


NOT_COUNTED: Final = (
    "temporary memory of kernels, of NCCL and of the allocator",
    "the forward pass of frozen copies, rewards and validation",
    "encoding the features of looked-up items",
    "batches, and arrays over the items in host memory (17 bytes per item)",
    "time: milliseconds are the estimate of torchrec's planner for looked-up tables, from its default bandwidths",
)
"""What the memory of a run does not contain, in words."""


_BLOCKS: Final = {"sasrec": SASRecBlock, "hstu": HSTUBlock}


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """A policy, its batches, and the ranks that train it, without the catalog."""

    ranks: PositiveInt = 1
    """number of processes, one per device"""
    device: Literal["cpu", "cuda"] = "cuda"
    """device of every rank"""
    batch_size: PositiveInt = 128
    """contexts per rank and step"""
    history_length: PositiveInt = 50
    """events per context"""
    slate: PositiveInt | None = None
    """number of items scored after the full history (an impression, a list, a group); null = pre-training, which
    scores every event of the history"""
    policy: Literal["softmax", "semantic"] = "softmax"
    """kind of policy: a softmax over the catalog, or semantic ids"""
    dim: PositiveInt = 64
    """width of vectors and states"""
    block: Literal["sasrec", "hstu"] = "sasrec"
    """kind of blocks of the history encoder"""
    layers: PositiveInt = 2
    """number of layers of the history encoder"""
    heads: PositiveInt = 2
    """number of attention heads"""
    tie_weights: bool = True
    """catalog softmax: one table for input and output"""
    normalizer: Literal["full", "sampled"] = "full"
    """catalog softmax: normalize over all items, or over sampled ones"""
    num_negatives: PositiveInt = 1024
    """number of sampled items per step"""
    codebooks: Sequence[PositiveInt] = (256, 256, 256, 256)
    """semantic ids: the number of codes of every level"""
    decoder_layers: PositiveInt = 2
    """semantic ids: number of decoder layers"""
    id_vectors: bool = True
    """semantic ids: the encoder also reads a vector per item id"""
    copies: NonNegativeInt = 0
    """number of frozen copies of the policy: 1 for an old policy (snapshot), 1 for a frozen reference"""
    table_optimizer: TableOptimizerName = "rowwise_adagrad"
    """optimizer of the tables; Adam updates all other parameters"""
    precision: Literal["32-true", "16-mixed", "bf16-mixed"] = "32-true"
    """mixed precision makes activations smaller, but not weights, optimizer states or messages"""


@dataclass(frozen=True)
class Workload(WorkloadOptions):
    """The options with a catalog of ``num_items`` items, whose ``item_features`` the encoder reads."""

    num_items: PositiveInt
    item_features: tuple[Feature, ...] = ()
    feature_hidden: PositiveInt = 64

    def __post_init__(self) -> None:
        """Rejects values that no policy can have."""
        validate_ranges(self)
        if self.policy == "semantic" and math.prod(self.codebooks) < self.num_items:
            raise RecpoError(
                f"{self.num_items:,} items need as many different code tuples, and codebooks of "
                f"{' x '.join(map(str, self.codebooks))} give {math.prod(self.codebooks):,}: take larger ones or one "
                "more",
                code="out_of_range",
                field="codebooks",
            )

    @property
    def scored(self) -> int:
        """Number of items that a rank scores: all events of the history, or the slate."""
        return self.batch_size * (self.slate or self.history_length)

    @property
    def states(self) -> int:
        """Number of states that they are scored from: one per event, or one per context."""
        return self.batch_size * (self.history_length if self.slate is None else 1)

    @cached_property
    def _fake(self) -> FakeTensorMode:
        return FakeTensorMode()

    @cached_property
    def network(self) -> nn.Module:
        """The modules of the policy with parameters, under the name ``policy``; they take no memory."""
        encoder: dict[str, Any] = {"dim": self.dim, "block": _BLOCKS[self.block], "layers": self.layers}
        encoder |= {"heads": self.heads, "max_history": self.history_length}
        features = ItemFeatureOptions(self.feature_hidden)
        with self._fake:
            if self.policy == "semantic":
                parts = semantic_network(
                    self.num_items,
                    tuple(self.codebooks),
                    SemanticNetworkOptions(decoder_layers=self.decoder_layers, id_vectors=self.id_vectors, **encoder),
                )
                if self.item_features and parts.item_table is not None:
                    parts.item_table.features = ItemFeatures(self.item_features, self.num_items, self.dim, features)
                policy: nn.Module = nn.ModuleDict({k: part for k, part in parts._asdict().items() if part is not None})
            else:
                catalog = CatalogSoftmaxPolicy(
                    self.num_items,
                    tie_weights=self.tie_weights,
                    normalizer=self.normalizer,
                    item_features=features if self.item_features else None,
                    **encoder,
                )
                catalog.set_schema(FeatureSchema(item=self.item_features))
                policy = catalog
        return nn.ModuleDict({"policy": policy})

    @cached_property
    def item_tables(self) -> dict[str, ItemTable]:
        """The tables of the policy by name, the code table first."""
        found = {name: part for name, part in self.network.named_modules() if isinstance(part, ItemTable)}
        return dict(sorted(found.items()))

    @property
    def softmax_table(self) -> str | None:
        """The table of an exact softmax during training."""
        return next((name for name, table in self.item_tables.items() if table.use == "softmax"), None)

    @cached_property
    def dense_parameters(self) -> int:
        """The parameters that every rank has: all except the tables."""
        of_tables = sum(table.weight.numel() for table in self.item_tables.values())
        return sum(parameter.numel() for parameter in self.network.parameters()) - of_tables

    def tables(self) -> list[TableSpec]:
        """The tables of the policy, with its frozen copies."""
        return [
            TableSpec(
                name, table.num_items + 1, table.dim, self._lookups(name, table.num_items + 1), copies=self.copies
            )
            for name, table in self.item_tables.items()
        ]

    def _lookups(self, name: str, rows: int) -> int:
        """The most different ids that the lookups of a step request: fewer, if items repeat."""
        events = self.batch_size * self.history_length
        scored = self.scored + self.num_negatives if self.normalizer == "sampled" else 0
        if self.policy == "semantic":
            codes = len(self.codebooks)
            asked = (events * codes, self.scored * (codes - 1)) if name == "policy.code_table" else (events,)
        elif self.tie_weights:
            asked = (events + scored,)
        else:
            asked = (events,) if name == "policy.item_table" else (scored,)
        return sum(min(count, rows) for count in asked)

    def table_memory(self, placements: dict[str, Placement]) -> dict[str, int]:
        """Bytes of the placed tables on the rank that holds most of them."""
        of_rank = [Counter[str]() for _ in range(self.ranks)]
        for name, (sharding, blocks) in placements.items():
            of_softmax = name == self.softmax_table
            # replicated: its gradient and the all-reduced bucket; softmax: its own, and that of lookups in it
            gradients = 2 if sharding == "data_parallel" else of_softmax * (2 if self.tie_weights else 1)
            # Adam updates the table of an exact softmax, like the dense parameters
            optimizer: TableOptimizerName = "adam" if of_softmax else self.table_optimizer
            for block in blocks:
                held = block_bytes(
                    block.num_rows, block.num_columns, optimizer, copies=self.copies, gradients=gradients
                )
                of_rank[block.rank].update(held)
        fullest = max(of_rank, key=lambda held: held.total())
        return dict(fullest)

    def other_memory(self) -> dict[str, int]:
        """Bytes of everything else that is counted."""
        per_parameter = FLOAT * (4 + (self.ranks > 1) + self.copies)  # weight, gradient, Adam; bucket; copies
        parts = {"dense parameters, gradients, Adam": per_parameter * self.dense_parameters}
        parts["activations"] = self._activations()
        parts["softmax"] = self._softmax()
        # ids; vectors on their own rank and on the requesting rank; and the gradients of both
        lookups = (1 + self.copies) * sum(spec.lookups for spec in self.tables())
        parts["looked-up vectors"] = lookups * (BYTES_PER_ID + 4 * FLOAT * self.dim)
        if self.policy == "semantic":
            parts["trie and codes"] = _trie_bytes(self.num_items, self.codebooks)
        featured = [name for name, table in self.item_tables.items() if table.features is not None]
        if featured:
            parts["item features"] = len(featured) * (self.num_items + 1) * _feature_bytes(self.item_features)
        if self.softmax_table in featured:
            parts["item matrix and its gradient"] = 2 * FLOAT * -(-(self.num_items + 1) // self.ranks) * self.dim
        return {name: size for name, size in parts.items() if size}

    def _activations(self) -> int:
        """What autograd keeps of the encoder and the decoder for a step, 16-bit copies of weights included."""
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, nn.Parameter):
                kept[tensor.untyped_storage()._cdata] = tensor
            return tensor

        policy: Any = self.network.get_submodule("policy")
        shape, tokens = (self.batch_size, self.history_length), len(self.codebooks)
        with (
            warnings.catch_warnings(action="ignore"),  # of slow kernels, none of which runs
            self._fake,
            torch.autocast("cpu", torch.bfloat16, enabled=self.precision != "32-true"),
            saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            events = torch.zeros(shape, dtype=torch.long)
            padded = EventIndices(events[:0, 0], self.history_length)  # no padding is skipped
            histories = Histories(events, events[:, 0], events, events, event_indices=padded)
            states = policy.encoder(torch.zeros(*shape, self.dim, requires_grad=True), histories)
            scores = []
            if self.policy == "semantic":
                visible = torch.zeros(self.batch_size, self.scored // self.batch_size, dtype=torch.long)
                codes = torch.zeros(self.scored, tokens - 1, self.dim, requires_grad=True)
                hidden = policy.decoder(codes, policy.decoder.read(states), DecoderPlacement(visible))
                for level, size in enumerate(self.codebooks):
                    barred = torch.zeros(self.scored, size, dtype=torch.bool)
                    scores.append(
                        policy.decoder.logits(level, hidden[:, level]).masked_fill(barred, -1e9).log_softmax(1)
                    )
            return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())

    def _softmax(self) -> int:
        """Memory of a softmax over the catalog beside its table; semantic ids have none.

        Exact: three blocks of logits; the states of all ranks with their expected rows and gradients, ``12 d N W``; and
        one log-sum-exp per state and block of rows. Sampled: ``17 N K`` for K negatives.
        """
        if self.policy == "semantic":
            return 0
        if self.softmax_table is None:
            return self.states * self.num_negatives * (4 * FLOAT + 1)
        states, rows = self.states * self.ranks, -(-(self.num_items + 1) // self.ranks)
        block_bytes, block_rows = block_size(self.device)
        blocks = 3 * min(block_bytes, FLOAT * states * rows)
        return blocks + 3 * FLOAT * self.dim * states + FLOAT * states * -(-rows // block_rows)


def _trie_bytes(num_items: int, codebooks: Sequence[int]) -> int:
    """The most bytes of ``policies.semantic_search``, which every rank holds.

    A level has no more nodes than there are prefixes, or items. Each node takes 4 bytes and its last code (1, 2 or 4
    bytes), plus 4 bytes if it has children. Each item takes 8 bytes. On levels where that is small, there is one bit
    per node and code.
    """
    levels = [min(math.prod(codebooks[:level]), num_items) for level in range(len(codebooks))] + [num_items]
    code_bytes = next(size for size, most in ((1, 1 << 8), (2, 1 << 15), (4, 1 << 31)) if max(codebooks) <= most)
    size = sum(levels) * (4 + code_bytes) + 4 * sum(levels[:-1]) + 8 * num_items
    for nodes, children, codes in zip(levels, levels[1:], codebooks, strict=False):
        bitmap = nodes * -(-codes // 8)
        size += bitmap if bitmap <= 4 * max(children, codes) else 0
    return size


def _feature_bytes(features: Sequence[Feature]) -> int:
    """Bytes of the features of an item on every rank: codes, weights of lists, columns, and whether it has events."""
    lists = of_type(features, Categories)
    codes = len(of_type(features, Category)) + sum(one.length for one in lists)
    dense = 2 * len(of_type(features, Number)) + sum((one.width or 0) + 1 for one in of_type(features, Vector))
    return FLOAT * (codes * (1 + bool(lists)) + dense) + 1


@dataclass(frozen=True)
class Needs:
    """The needs of a run.

    Attributes:
        workload: the run.
        placements: the blocks of every table, by name.
        memory: bytes by part, on the rank with the largest tables.
        milliseconds: torchrec's estimate for the looked-up tables per step, exchange included; None = there are none.
        fault: why the run does not fit; None = it fits.
    """

    workload: Workload
    placements: dict[str, Placement]
    memory: dict[str, int]
    milliseconds: float | None
    fault: RecpoError | None

    @property
    def document(self) -> dict[str, Any]:
        """All results, as JSON values."""
        tables = {
            f"copy_{number}.{spec.name}" if number else spec.name: {
                **{"rows": spec.num_rows, "dim": spec.dim, "lookups": spec.lookups},
                "copy_of": spec.name if number else None,
                "sharding": self.placements[spec.name].sharding,
                "blocks": [block._asdict() for block in self.placements[spec.name].blocks],
            }
            for number in range(self.workload.copies + 1)
            for spec in self.workload.tables()
        }
        return {
            "workload": asdict(self.workload),
            "dense_parameters": self.workload.dense_parameters,
            "tables": tables,
            "memory_bytes": self.memory,
            "memory_total": sum(self.memory.values()),
            "planner_milliseconds": self.milliseconds,
            "not_counted": list(NOT_COUNTED),
        }


def needs_of(
    workload: Workload,
    *,
    sharding: Sharding | dict[str, Sharding] = "auto",
    ranks_per_node: int | None = None,
    memory_gib: float | None = None,
) -> Needs:
    """Counts the memory that a run needs on a rank, and shards its tables.

    Args:
        workload: the policy, its batches and its ranks.
        sharding: sharding of all tables, or by name.
        ranks_per_node: number of ranks per machine; None = all on one machine.
        memory_gib: memory of a rank in GiB; None = no limit.

    Raises:
        RecpoError: invalid options. A run that does not fit is not an error: see ``Needs.fault``.
    """
    if ranks_per_node is not None and workload.ranks % ranks_per_node:
        raise RecpoError(
            f"{workload.ranks} ranks cannot be split into nodes of {ranks_per_node} ranks each",
            code="out_of_range",
            field="ranks_per_node",
        )
    kinds = sharding_by_table(sharding, workload.item_tables)
    validate_exact_softmax([] if workload.softmax_table is None else [workload.softmax_table], sharding)
    specs = [spec._replace(sharding=kinds[spec.name]) for spec in workload.tables()]
    fixed = softmax_placement(workload, specs)
    specs = [spec for spec in specs if spec.name not in fixed]

    def shard(memory: int | None) -> tuple[dict[str, Placement], float | None]:
        if not specs:
            return fixed, None
        plan = _planner().plan_tables(
            specs,
            optimizer=workload.table_optimizer,
            world_size=workload.ranks,
            local_world_size=ranks_per_node,
            compute_device=workload.device,
            memory_per_rank=memory,
        )
        return fixed | plan.placements, plan.milliseconds

    others, fault = workload.other_memory(), None
    # the planner counts the looked-up vectors itself
    rest = sum(others.values()) - others["looked-up vectors"] + sum(workload.table_memory(fixed).values())
    try:
        placements, milliseconds = shard(None if memory_gib is None else max(0, int(memory_gib * GIB) - rest))
    except RecpoError as error:
        fault, (placements, milliseconds) = error, shard(None)
    memory = workload.table_memory(placements) | others
    total = sum(memory.values()) / GIB
    if fault is None and memory_gib is not None and total > memory_gib:
        fault = RecpoError(
            f"a rank needs {total:,.2f} GiB and has {memory_gib:,.2f}: use more ranks for tables, a smaller batch_size "
            "or history_length for activations and the softmax, or what the largest parts above suggest",
            code="resources",
            field="memory_gib",
        )
    return Needs(workload, placements, memory, milliseconds, fault)


def validate_exact_softmax(tables: Iterable[str], sharding: Sharding | dict[str, Sharding]) -> None:
    """Raises ``RecpoError`` if a table of an exact softmax is named with a sharding that the softmax cannot have."""
    named = sharding if isinstance(sharding, dict) else {}
    for name in tables:
        if named.get(name, "auto") not in ("auto", "row_wise", "data_parallel"):
            raise RecpoError(
                f"sharding: an exact softmax runs over {name}, which may be row_wise or data_parallel, not "
                f"{named[name]}; with policy.normalizer sampled it is only looked up",
                code="conflicting_options",
                field=name,
            )


def softmax_placement(workload: Workload, specs: Sequence[TableSpec]) -> dict[str, Placement]:
    """Placement of the exact softmax's table, by its name: cut into rows, or complete on every rank."""
    placed = {}
    for spec in specs:
        if spec.name == workload.softmax_table:
            everywhere = [TableBlock(rank, 0, spec.num_rows, 0, spec.dim) for rank in range(workload.ranks)]
            in_rows = row_wise_placement(spec.num_rows, spec.dim, workload.ranks)
            placed[spec.name] = Placement("data_parallel", everywhere) if spec.sharding == "data_parallel" else in_rows
    return placed


def _planner() -> ModuleType:
    try:
        return import_module("recpo.sharding.planning")
    except (ImportError, OSError) as fault:  # an fbgemm build that does not fit the machine raises OSError
        raise RecpoError(
            f"recpo plan uses the planner of torchrec, which does not load ({fault}): install the extra "
            "sharding through requirements/cpu.lock or gpu.lock; `recpo doctor` says why it does not load and how to "
            "fix it",
            code="not_installed",
        ) from fault
