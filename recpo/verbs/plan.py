"""The verb ``plan``: counts the memory of training and shards its tables before it runs."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar

from recpo.artifacts.outputs import write_json
from recpo.base.errors import NonNegativeInt, PositiveFloat, PositiveInt, RecpoError
from recpo.log.prepared import Prepared
from recpo.sharding.memory import Needs, Sharding, Workload, WorkloadOptions, needs_of
from recpo.verbs.verb import Verb, function_of


@dataclass(frozen=True)
class Plan(WorkloadOptions, Verb[Needs]):
    """Counts the memory that a run needs on every rank, and shards its tables with torchrec's planner.

    Nothing is run; docs/scaling.md says what is counted exactly, what is an upper bound, and what is not counted. The
    exit status is 1 if the run does not fit.
    """

    first_day: ClassVar = ("num_items", "prepared", "ranks", "memory_gib", "device", "batch_size", "policy", "dim")
    is_tracked: ClassVar = False

    num_items: PositiveInt | None = None
    """catalog size; give either this or prepared"""
    _: KW_ONLY
    prepared: Prepared | str | Path | None = None
    """directory written by ``recpo prepare``; gives the catalog size"""
    ranks_per_node: PositiveInt | None = None
    """ranks of one machine; null = all"""
    memory_gib: PositiveFloat | None = None
    """memory of a rank in GiB; null = no limit"""
    item_features: NonNegativeInt = 0
    """hidden width of the encoder of prepared's item features (policy.init_args.item_features.hidden); 0 = ids
    only"""
    sharding: Sharding | dict[str, Sharding] = "auto"
    """sharding of all tables, or by name (policy.item_table, policy.output_table, policy.code_table)"""
    out: Path | str | None = None
    """JSON file for all results"""

    def execute(self) -> Needs:
        """Counts everything; nothing is run."""
        needs = needs_of(
            Workload(**vars(self.part(WorkloadOptions)), **self._catalog()),
            sharding=self.sharding,
            ranks_per_node=self.ranks_per_node,
            memory_gib=self.memory_gib,
        )
        if self.out is not None:
            out = Path(self.out)
            write_json(out, needs.document)
            self.write_resolved(out.with_suffix(".resolved.yaml"))
        return needs

    def _catalog(self) -> dict[str, Any]:
        """The size of the catalog and the features of its items, for a ``Workload``.

        Raises:
            RecpoError: neither or both of ``num_items`` and ``prepared``, or features that there are not.
        """
        if (self.num_items is None) == (self.prepared is None):
            raise RecpoError(
                "give the catalog size with --num_items, or a prepared directory with --prepared",
                code="missing_option" if self.prepared is None else "conflicting_options",
                field="num_items",
            )
        if self.prepared is None:
            if self.item_features:
                raise RecpoError(
                    "--item_features counts the features of a prepared directory: name it with --prepared",
                    code="missing_option",
                    field="prepared",
                )
            return {"num_items": self.num_items}
        data = Prepared.open(self.prepared)
        if not self.item_features:
            return {"num_items": data.num_items}
        features = data.feature_schema.item
        if not features:
            raise RecpoError(
                f"{self.prepared} has no item features: prepare it with --items, or leave --item_features out",
                code="empty",
                field="item_features",
            )
        return {"num_items": data.num_items, "item_features": features, "feature_hidden": self.item_features}


plan = function_of(Plan)
