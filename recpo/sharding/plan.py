"""What a run needs before it runs: memory, communication and the placement of tables."""

from __future__ import annotations

from dataclasses import asdict
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from recpo.base.errors import RecpoError
from recpo.sharding.blocks import GIB, Links, Placement, Sharding, transfer_seconds
from recpo.sharding.workload import StepCosts, Workload, estimate, place_softmax_tables, table_memory


class Needs(NamedTuple):
    """The needs of a run.

    Attributes:
        document: all results, as JSON values.
        fault: why the run does not fit; None = it fits.
    """

    document: dict[str, Any]
    fault: RecpoError | None


def needs_of(
    workload: Workload,
    *,
    sharding: Sharding | dict[str, Sharding] = "auto",
    ranks_per_node: int | None = None,
    memory_gib: float | None = None,
    links: Links = Links(),  # noqa: B008  immutable
    events: int | None = None,
) -> Needs:
    """Computes what a run needs: memory per rank, bytes sent and operations per step, and the placement of tables.

    Weights are counted on the policy itself, on the meta device; the rest are formulas (docs/scaling.md).

    Args:
        workload: the policy, its batches and its ranks.
        sharding: sharding of all tables, or by name.
        ranks_per_node: number of ranks per machine; None = all on one machine.
        memory_gib: memory of a rank in GiB; None = no limit.
        links: bandwidths.
        events: training events of an epoch, for the number of steps.

    Raises:
        RecpoError: invalid options. A run that does not fit is not an error: see ``Needs.fault``.
    """
    if links.within_node <= 0 or links.between_nodes <= 0:
        raise RecpoError(
            f"bandwidths are positive, got {links.within_node / 1e9} and {links.between_nodes / 1e9} GB per second"
        )
    node = ranks_per_node or workload.ranks
    if workload.ranks % node:
        raise RecpoError(f"{workload.ranks} ranks cannot be split into nodes of {node} ranks each")
    limit = None if memory_gib is None else int(memory_gib * GIB)
    placements, fault = _placements(workload, sharding, node, limit, links)
    document = _document(workload, placements, estimate(workload, placements), node, links, events)
    if fault is None and limit is not None and document["memory_total"] > limit:
        fault = RecpoError(
            f"a rank needs {document['memory_total'] / GIB:,.2f} GiB and has {limit / GIB:,.2f}: use more ranks, a "
            "smaller batch_size, or what the largest parts above suggest"
        )
    return Needs(document, fault)


def _placements(
    workload: Workload, sharding: Sharding | dict[str, Sharding], node: int, limit: int | None, links: Links
) -> tuple[dict[str, Placement], RecpoError | None]:
    """The placement of every table by torchrec's planner. If it does not fit, the placement without limit, and why."""
    of_softmax = sharding.get(workload.softmax_table or "", "auto") if isinstance(sharding, dict) else sharding
    if workload.softmax_table is not None and isinstance(sharding, dict):
        sharding = {name: kind for name, kind in sharding.items() if name != workload.softmax_table}
    fixed = place_softmax_tables(workload, replicated=of_softmax == "data_parallel")
    specs = [spec for spec in workload.tables() if spec.name not in fixed]

    def planned(memory: int | None) -> dict[str, Placement]:
        if not specs:
            return fixed
        planning = _planner()
        made = planning.plan_tables(
            specs,
            sharding=sharding,
            optimizer=workload.table_optimizer,
            world_size=workload.ranks,
            local_world_size=node,
            compute_device=workload.device,
            memory_per_rank=memory,
            links=links,
        )
        return fixed | planning.placements(made, specs)

    unlimited = planned(None)
    if limit is None:
        return unlimited, None
    needed = estimate(workload, unlimited).memory
    of_specs = table_memory(workload, {spec.name: unlimited[spec.name] for spec in specs})
    elsewhere = sum(needed.values()) - needed["looked-up vectors"] - sum(of_specs.values())
    try:
        return planned(max(0, limit - round(elsewhere))), None
    except RecpoError as error:
        return unlimited, error


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


def _document(
    workload: Workload, placements: dict[str, Placement], costs: StepCosts, node: int, links: Links, events: int | None
) -> dict[str, Any]:
    sent = sum(part.total for part in costs.exchange.values())
    per_step = workload.ranks * workload.scored
    tables = {
        spec.name: {
            "rows": spec.num_rows,
            "dim": spec.dim,
            "lookups": spec.lookups,
            "copy_of": spec.copy_of,
            "sharding": placements[spec.name].sharding,
            "blocks": [block._asdict() for block in placements[spec.name].blocks],
        }
        for spec in workload.tables()
    }
    return {
        "workload": asdict(workload),
        "dense_parameters": workload.dense_parameters,
        "tables": tables,
        "memory_bytes": costs.memory,
        "memory_total": sum(costs.memory.values()),
        "exchange_bytes": {name: part._asdict() for name, part in costs.exchange.items()},
        "exchange_total": sent,
        "exchange_seconds": transfer_seconds(sent, workload.ranks, node, links),
        "operations": costs.operations,
        "operations_total": sum(costs.operations.values()),
        "steps_per_epoch": None if events is None else -(-events // per_step),
    }
