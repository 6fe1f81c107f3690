"""The verb ``plan``: computes the memory, communication and table placement of training before it runs."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar

from recpo.artifacts import write_json
from recpo.base.errors import RecpoError
from recpo.base.ranges import PositiveInt
from recpo.log.prepared import Prepared
from recpo.sharding.blocks import Links, Sharding
from recpo.sharding.plan import Needs, needs_of
from recpo.sharding.workload import Workload, WorkloadOptions
from recpo.verbs.verb import Verb, function_of


@dataclass(frozen=True)
class Plan(WorkloadOptions, Verb[Needs]):
    """Computes what a run needs: memory per rank, bytes sent and operations per step, and the placement of tables.

    Everything is computed and nothing is run; docs/scaling.md has the formulas and their accuracy. The exit status is 1
    if the run does not fit.
    """

    first_day: ClassVar = ("num_items", "prepared", "ranks", "memory_gib", "device", "batch_size", "policy", "dim")

    num_items: PositiveInt | None = None
    """catalog size; give either this or prepared"""
    _: KW_ONLY
    prepared: Prepared | str | Path | None = None
    """directory written by ``recpo prepare``; gives the catalog size and the training events of an epoch"""
    events: int | None = None
    """training events of an epoch, for the number of steps; prepared overrides it"""
    ranks_per_node: int | None = None
    """ranks of one machine; null = all"""
    memory_gib: float | None = None
    """memory of a rank in GiB; null = no limit"""
    item_features: int = 0
    """hidden width of the encoder of prepared's item features (policy.init_args.item_features.hidden); 0 = ids
    only"""
    sharding: Sharding | dict[str, Sharding] = "auto"
    """sharding of all tables, or by name (policy.item_table, policy.output_table, policy.code_table)"""
    within_node_gb: float = 600.0
    """bandwidth from a rank to the others of its node, GB per second"""
    between_nodes_gb: float = 12.5
    """bandwidth from a rank to other nodes, GB per second"""
    out: Path | str | None = None
    """JSON file for all results"""

    def execute(self) -> Needs:
        """Counts everything; nothing is run."""
        catalog, in_log = catalog_of(self.num_items, self.prepared, self.events)
        workload = Workload(
            num_items=catalog,
            **vars(self.part(WorkloadOptions)),
            **item_features_of(self.prepared, self.item_features),
        )
        needs = needs_of(
            workload,
            sharding=self.sharding,
            ranks_per_node=self.ranks_per_node,
            memory_gib=self.memory_gib,
            links=Links(self.within_node_gb * 1e9, self.between_nodes_gb * 1e9),
            events=in_log,
        )
        if self.out is not None:
            out = Path(self.out)
            write_json(out, needs.document)
            self.write_resolved(out.with_suffix(".resolved.yaml"))
        return needs


plan = function_of(Plan)


def item_features_of(prepared: Prepared | str | Path | None, hidden: int) -> dict[str, Any]:
    """The item features of a prepared directory for a ``Workload``; ``hidden`` 0 = they are not read.

    Raises:
        RecpoError: there are none.
    """
    if hidden == 0:
        return {}
    if prepared is None:
        raise RecpoError("--item_features counts the features of a prepared directory: name it with --prepared")
    data = Prepared.open(prepared)
    features = data.feature_schema.item
    if not features:
        raise RecpoError(f"{prepared} has no item features: prepare it with --items, or leave --item_features out")
    return {"item_features": features, "feature_hidden": hidden}


def catalog_of(
    num_items: int | None, prepared: Prepared | str | Path | None, events: int | None = None
) -> tuple[int, int | None]:
    """Catalog size and number of training events: as given, or of a prepared directory; ``events`` None = not known.

    Raises:
        RecpoError: neither or both of ``num_items`` and ``prepared``.
    """
    if (num_items is None) == (prepared is None):
        raise RecpoError("give the catalog size with --num_items, or a prepared directory with --prepared")
    if prepared is None:
        assert num_items is not None
        return num_items, events
    data = Prepared.open(prepared)
    return data.num_items, sum(shard["targets"] for shard in data.manifest["shards"]["train"])
