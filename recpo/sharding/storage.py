"""What the planner is told of the memory that tables take, and what a user is told where it is not enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ShardEstimator, ShardingOption, Storage

from recpo.errors import RecpoError
from recpo.sharding.costs import BYTES_PER_ID, FLOAT, GIB, TableOptimizerName, TableSpec, block_bytes

# where a table lies that is not split
_WHOLE = {"table_wise": "on one rank", "data_parallel": "on every rank"}


class TableStorage(ShardEstimator):
    """Bytes of every block: weights, optimizer state, copies, and the ids and vectors of a step's lookups."""

    def __init__(
        self, topology: Topology, specs: dict[str, TableSpec], copies: dict[str, int], optimizer: TableOptimizerName
    ) -> None:
        self._on_cpu = topology.compute_device == "cpu"
        self._copies, self._specs, self._optimizer = copies, specs, optimizer

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: Any = None) -> None:
        """Sets the storage of every shard of every option."""
        for option in sharding_options:
            spec = self._specs[option.name]
            for shard in option.shards:
                rows, columns = shard.size
                size = block_bytes(
                    rows,
                    columns,
                    self._optimizer,
                    copies=self._copies[option.name],
                    frozen=spec.frozen,
                    gradients=2 if option.sharding_type == "data_parallel" else 0,
                )
                size += round(option.input_lengths[0]) * (BYTES_PER_ID + 2 * FLOAT * columns)
                shard.storage = Storage(hbm=0 if self._on_cpu else size, ddr=size if self._on_cpu else 0)


def does_not_fit(
    specs: Sequence[TableSpec],
    allowed: dict[str, list[str]],
    optimizer: TableOptimizerName,
    ranks: int,
    memory: int | None,
    error: Exception,
) -> RecpoError:
    """Says what every table takes where, and what would fix it.

    Args:
        specs: the tables.
        allowed: the sharding types that the planner could choose from, by table; copies as their originals.
        optimizer: of the tables.
        ranks: W.
        memory: bytes per rank for the tables; None = no limit.
        error: what the planner said.
    """
    if memory is None:
        return RecpoError(f"no way to shard the tables was found: {error}")
    lines, total = [], 0
    for spec in specs:
        size = block_bytes(spec.num_rows, spec.dim, optimizer, frozen=spec.frozen or spec.copy_of is not None)
        types = allowed[spec.copy_of or spec.name]
        where = _WHOLE.get(types[0]) if len(types) == 1 else None
        share, where = (size, where) if where else (size // ranks, f"on each of {ranks} ranks")
        lines.append(f"{spec.name} {spec.num_rows:,} x {spec.dim} {share / GIB:,.2f} GiB {where}")
        total += size
    return RecpoError(
        f"the tables do not fit into {memory / GIB:,.2f} GiB per rank: with the state of {optimizer} "
        f"{', '.join(lines)}, and the vectors that are looked up; split evenly all of it takes "
        f"{-(-total // max(1, memory))} ranks or a few more. Take more ranks and row_wise, semantic ids without item "
        "vectors, a smaller dim, rowwise_adagrad or fewer frozen copies"
    )
