"""Placement of tables on ranks: torchrec's planner with recpo's own memory estimate.

A plan covers embedding collections of one table each. A frozen copy (old policy, reference) is always placed with the
table that it copies, so copying sends nothing between ranks. Names are dotted module paths. Torchrec does not allow
dots in names; inside torchrec a table is called ``table_key(name)``.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
    types as planner_types,
)
from torchrec.distributed.planner.constants import DEFAULT_PERF_ESTIMATOR
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.estimator import EmbeddingPerfEstimatorFactory
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from recpo.base.errors import RecpoError
from recpo.sharding.memory import (
    BYTES_PER_ID,
    COLUMN_MULTIPLE,
    FLOAT,
    GIB,
    Placement,
    TableBlock,
    TableOptimizerName,
    TableSpec,
    block_bytes,
)

_META = torch.device("meta")
_UNLIMITED = 1 << 50
# the planner warns that a data-parallel table has no blocks
logging.getLogger().addFilter(lambda record: not record.getMessage().startswith("Sharding spec not found"))


class TablePlan(NamedTuple):
    """How tables are sharded, by name; frozen copies like the table that they copy.

    Attributes:
        sharding: for torchrec.
        placements: the blocks of every table on every rank.
        milliseconds: torchrec's estimate for the lookups and updates of a step on the slowest rank, exchange included.
    """

    sharding: dict[str, ParameterSharding]
    placements: dict[str, Placement]
    milliseconds: float


def table_key(name: str) -> str:
    """The name of a table inside torchrec, which forbids dots: ``policy/item_table`` for ``policy.item_table``."""
    return name.replace(".", "/")


def make_collection(spec: TableSpec, device: torch.device = _META) -> EmbeddingCollection:
    """The collection of one table. Its table and its only feature are both called ``table_key(spec.name)``.

    Args:
        spec: the table.
        device: where its rows are allocated. On ``meta`` nothing is allocated; every rank then creates its own rows.
    """
    key = table_key(spec.name)
    config = EmbeddingConfig(name=key, embedding_dim=spec.dim, num_embeddings=spec.num_rows, feature_names=[key])
    return EmbeddingCollection(tables=[config], device=device)


def collection_plan(sharding: Mapping[str, ParameterSharding]) -> ShardingPlan:
    """Torchrec's plan for collections of one table each, by the name of the table."""
    by_key = {table_key(name): one for name, one in sharding.items()}
    return ShardingPlan({key: EmbeddingModuleShardingPlan({key: one}) for key, one in by_key.items()})


def plan_tables(
    specs: Sequence[TableSpec],
    *,
    optimizer: TableOptimizerName,
    world_size: int,
    local_world_size: int | None = None,
    compute_device: Literal["cpu", "cuda"] = "cpu",
    memory_per_rank: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> TablePlan:
    """Decides how every table is sharded.

    Row-wise blocks have ``ceil(rows / ranks)`` rows; the last ones may be shorter. Column-wise blocks have equal width,
    one per rank. ``auto`` chooses the option that torchrec's planner expects to be fastest among those that fit.

    Args:
        specs: the tables.
        optimizer: the optimizer of the tables. Its state counts toward the memory, and ``rowwise_adagrad`` rules out
            column-wise blocks.
        world_size: number of ranks; without a ``group`` they need not exist.
        local_world_size: ranks per node; None = all ranks are on one node.
        compute_device: where the tables are stored.
        memory_per_rank: bytes per rank for tables, optimizer state, copies and looked-up vectors; None = no limit.
        group: the plan is made on its first rank and sent to the other ranks. The call is collective, and an error
            reaches every rank.

    Raises:
        RecpoError: on all ranks of the group: tables that do not fit, or columns that cannot be split.
    """
    capacity = _UNLIMITED if memory_per_rank is None else memory_per_rank
    trainer = planner_types.TrainerConfig(
        world_size=world_size,
        local_world_size=local_world_size or world_size,
        hbm_cap_bytes=capacity,
        ddr_cap_bytes=capacity,
    )
    topology = planner_types.TopologyFactory.create_topology(
        trainer, planner_types.HardwareConfig(), planner_types.KernelConfig(compute_device=compute_device)
    )
    plan = partial(_plan, specs, optimizer, topology, memory_per_rank)
    return plan() if group is None else _on_first_rank(plan, group)


def _placement(planned: ParameterSharding, spec: TableSpec) -> Placement:
    if planned.sharding_spec is None:
        blocks = [TableBlock(rank, 0, spec.num_rows, 0, spec.dim) for rank in planned.ranks or []]
    else:
        blocks = [
            TableBlock(shard.placement.rank(), shard.shard_offsets[0], shard.shard_sizes[0], *columns)
            for shard in planned.sharding_spec.shards
            for columns in [(shard.shard_offsets[1], shard.shard_sizes[1])]
        ]
    return Placement(planned.sharding_type, blocks)


def _plan(
    specs: Sequence[TableSpec], optimizer: TableOptimizerName, topology: Topology, memory: int | None
) -> TablePlan:
    ranks = topology.world_size
    allowed = {spec.name: _allowed(spec, optimizer, ranks) for spec in specs}
    constraints = {
        table_key(spec.name): ParameterConstraints(
            sharding_types=allowed[spec.name],
            compute_kernels=["fused", "dense"],  # dense is what data_parallel means
            min_partition=max(COLUMN_MULTIPLE, spec.dim // ranks),
            pooling_factors=[float(max(1, spec.lookups * (1 + spec.copies)))],
        )
        for spec in specs
    }
    storage = _TableStorage({table_key(spec.name): spec for spec in specs}, optimizer, topology.compute_device)
    speed = EmbeddingPerfEstimatorFactory.create(DEFAULT_PERF_ESTIMATOR, topology=topology, constraints=constraints)
    estimate = _SlowestRank()
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=1,
        enumerator=EmbeddingEnumerator(topology, 1, constraints, estimator=[speed, storage]),
        storage_reservation=FixedPercentageStorageReservation(0.0),
        constraints=constraints,
        callbacks=[_one_column_block_per_rank],
        stats=[estimate],
    )
    tables = nn.ModuleDict({table_key(spec.name): make_collection(spec) for spec in specs})
    try:
        made: Any = planner.plan(tables, [EmbeddingCollectionSharder()]).plan
    except planner_types.PlannerError as error:
        raise _does_not_fit(specs, allowed, optimizer, memory, error) from error
    sharding = {spec.name: made[key][key] for spec in specs for key in [table_key(spec.name)]}
    placements = {spec.name: _placement(sharding[spec.name], spec) for spec in specs}
    return TablePlan(sharding, placements, estimate.milliseconds)


def _allowed(spec: TableSpec, optimizer: TableOptimizerName, world_size: int) -> list[str]:
    """The sharding types among which the planner may choose."""
    wanted, splittable = spec.sharding, spec.dim % (COLUMN_MULTIPLE * world_size) == 0
    if spec.dim % COLUMN_MULTIPLE:
        if wanted in ("auto", "data_parallel"):
            return ["data_parallel"]
        raise RecpoError(
            f"table {spec.name}: its vectors have {spec.dim} columns, and tables are cut in multiples of "
            f"{COLUMN_MULTIPLE} only; choose another dim, or data_parallel",
            code="unsupported",
            field=spec.name,
        )
    if wanted == "auto":
        types = ["row_wise", "table_wise", "data_parallel"]
        return [*types, "column_wise"] if splittable and world_size > 1 and optimizer != "rowwise_adagrad" else types
    if wanted == "column_wise" and not splittable:
        raise RecpoError(
            f"table {spec.name}: its {spec.dim} columns cannot be split over {world_size} ranks in equal blocks of a "
            f"multiple of {COLUMN_MULTIPLE}; choose row_wise, or a dim that is a multiple of "
            f"{COLUMN_MULTIPLE * world_size}",
            code="out_of_range",
            field=spec.name,
        )
    if wanted == "column_wise" and optimizer == "rowwise_adagrad":
        raise RecpoError(
            f"table {spec.name}: rowwise_adagrad keeps one accumulator per row, and every block of columns would have "
            "its own, so that the result would depend on the number of ranks; choose row_wise, or adagrad",
            code="conflicting_options",
            field=spec.name,
        )
    return [wanted]


def _one_column_block_per_rank(options: list[planner_types.ShardingOption]) -> list[planner_types.ShardingOption]:
    """Equal blocks are dealt out to the ranks here: the planner could give one rank two blocks and another none."""
    for option in options:
        if option.sharding_type == "column_wise":
            for rank, shard in enumerate(option.shards):
                shard.rank = rank
    return options


def _on_first_rank(plan: Callable[[], TablePlan], group: dist.ProcessGroup) -> TablePlan:
    """Runs ``plan`` on the group's first rank. Its result, or its error, reaches every rank."""
    outcome: list[Any] = [None, None]
    first = dist.get_rank(group) == 0
    if first:
        try:
            outcome[0] = plan()
        except RecpoError as error:
            outcome[1] = error
        except Exception as error:  # the other ranks are waiting, so they must receive any error
            logging.getLogger(__name__).exception("the plan could not be made")
            outcome[1] = RecpoError(
                f"the first rank could not plan how to shard the tables: {type(error).__name__}: {error}", code="failed"
            )
    dist.broadcast_object_list(outcome, src=dist.get_global_rank(group, 0), group=group)
    if outcome[1] is not None:
        raise outcome[1]
    made: TablePlan = outcome[0]
    return made


class _TableStorage(planner_types.ShardEstimator):
    """Bytes of every block: weights, optimizer state, copies, and the ids and vectors of a step's lookups."""

    def __init__(self, specs: dict[str, TableSpec], optimizer: TableOptimizerName, device: str) -> None:
        self._specs, self._optimizer, self._device = specs, optimizer, device

    def estimate(self, sharding_options: list[planner_types.ShardingOption], sharder_data_map: Any = None) -> None:
        """Sets the storage of every shard of every option."""
        for option in sharding_options:
            spec, gradients = self._specs[option.name], 2 if option.sharding_type == "data_parallel" else 0
            for shard in option.shards:
                rows, columns = shard.size
                held = block_bytes(
                    rows, columns, self._optimizer, copies=spec.copies, frozen=spec.frozen, gradients=gradients
                )
                size = sum(held.values()) + round(option.input_lengths[0]) * (BYTES_PER_ID + 2 * FLOAT * columns)
                shard.storage = (
                    planner_types.Storage(hbm=0, ddr=size)
                    if self._device == "cpu"
                    else planner_types.Storage(hbm=size, ddr=0)
                )


class _SlowestRank(planner_types.Stats):
    """The planner's own estimate of the time of a step, on the slowest rank."""

    milliseconds = 0.0

    def log(self, *, topology: Topology, best_plan: list[planner_types.ShardingOption], **others: Any) -> None:
        """Adds up the shards of every rank."""
        of_rank = [0.0] * topology.world_size
        for shard in (shard for option in best_plan for shard in option.shards):
            assert shard.rank is not None
            assert shard.perf is not None
            of_rank[shard.rank] += shard.perf.total
        self.milliseconds = max(of_rank)


def _does_not_fit(
    specs: Sequence[TableSpec],
    allowed: dict[str, list[str]],
    optimizer: TableOptimizerName,
    memory: int | None,
    error: Exception,
) -> RecpoError:
    """The memory of each table with its copies, and possible remedies."""
    if memory is None:
        return RecpoError(f"no way to shard the tables was found: {error}", code="failed")
    total, tables = 0, []
    for spec in specs:
        held = block_bytes(spec.num_rows, spec.dim, optimizer, copies=spec.copies, frozen=spec.frozen)
        total += (size := sum(held.values()))
        kinds, copies = " or ".join(allowed[spec.name]), f" with {spec.copies} copies" if spec.copies else ""
        tables.append(f"{spec.name} {spec.num_rows:,} x {spec.dim}{copies} {size / GIB:,.2f} GiB {kinds}")
    return RecpoError(
        f"the tables do not fit into {memory / GIB:,.2f} GiB per rank: with the state of {optimizer} "
        f"{', '.join(tables)}, and the vectors that are looked up; split evenly all of it takes "
        f"{-(-total // max(1, memory))} ranks or a few more. Take more ranks and row_wise, semantic ids "
        "without item vectors, a smaller dim, rowwise_adagrad or fewer frozen copies",
        code="resources",
    )
