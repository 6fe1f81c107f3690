"""What `recpo plan` and docs/scaling.md say of a run against the run itself: memory of tables, bytes sent by two ranks.

Bytes are counted in the collectives of one training step. The formulas of docs/scaling.md stand here; they are given
what was asked for in truth (different ids, states, targets).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recpo.artifacts.semantic_codes import Codes
from recpo.batches.slates import SequenceLayout
from recpo.log.prepared import Prepared
from recpo.objectives import GBPO, Likelihood
from recpo.objectives.advantages import TernaryAdvantage
from recpo.policies.item_table import ItemTable
from recpo.sharding.memory import Workload, row_blocks, row_wise_placement, softmax_placement
from recpo.sharding.planning import plan_tables
from recpo.verbs.train import train
from tests.sharding.tables import as_torchrun

DIM, BATCH, HISTORY = 32, 16, 12
SIZES = {"dim": DIM, "layers": 1, "heads": 1, "max_history": HISTORY, "dropout": 0.0}
# counts of lists, of ids per owner, losses: a few numbers per collective, whatever the sizes
SMALL_MESSAGES = 700


class Observed(NamedTuple):
    """Of one rank.

    Attributes:
        sent: bytes sent to the other rank in one step.
        asked: different ids of every lookup of the step, of tables by name.
        scored: states N and targets M of every softmax of the step, of tables by name.
        weights: bytes of the blocks of tables that learn, of their frozen copies.
        state: bytes of the state of all optimizers.
    """

    sent: float
    asked: dict[str, list[int]]
    scored: dict[str, list[tuple[int, int]]]
    weights: tuple[int, int]
    state: int


class Sent(TorchDispatchMode):
    """Adds up what this rank sends in collectives: a ring for all-reduces, straight to its owner for anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.bytes += self._sent(function.__name__.split(".")[0], args)
        return function(*args, **(kwargs or {}))

    @staticmethod
    def _sent(name: str, args: Any) -> float:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        if name in ("allreduce_", "reduce_scatter_", "_reduce_scatter_base_"):
            share = (ranks - 1) / ranks * (2 if name == "allreduce_" else 1)
            return share * tensors[-1].nbytes
        if name in ("allgather_", "_allgather_base_"):
            return (ranks - 1) * tensors[-1].nbytes
        if name == "alltoall_base_":
            given = tensors[1]
            splits = args[4] or [len(given) // ranks] * ranks
            return given.nbytes * (1 - splits[rank] / max(1, len(given)))
        assert name in ("barrier", "broadcast_"), name
        return 0.0


class Watch(Callback):
    """Looks at the second step of a run."""

    def __init__(self) -> None:
        self._sent, self._asked, self._scored = Sent(), {}, {}
        self.seen: Observed | None = None

    def on_train_start(self, trainer: Any, module: Any) -> None:
        for name, table in module.named_modules():
            if isinstance(table, ItemTable):
                table.forward = self._lookups(name, table.forward)
                table.log_prob = self._softmax(name, table.log_prob)

    def _lookups(self, name: str, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def counted(ids: Tensor) -> Tensor:
            self._asked.setdefault(name, []).append(len(ids.unique()))
            return forward(ids)

        return counted

    def _softmax(self, name: str, log_prob: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def counted(states: Tensor, targets: Tensor, *rest: Any, **options: Any) -> Tensor:
            self._scored.setdefault(name, []).append((len(states), targets.numel()))
            return log_prob(states, targets, *rest, **options)

        return counted

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
        if number == 1:
            self._asked.clear()
            self._scored.clear()
            self._sent.__enter__()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
        if number == 1:
            self._sent.__exit__(None, None, None)
            tables = [table.weight for table in module.modules() if isinstance(table, ItemTable)]
            learning, frozen = ([t for t in tables if t.requires_grad == learns] for learns in (True, False))
            state = size_of(tree_leaves([optimizer.state_dict() for optimizer in trainer.optimizers]))
            weights = size_of(learning), size_of(frozen)
            self.seen = Observed(self._sent.bytes, self._asked, self._scored, weights, state)


def size_of(values: list[Any]) -> int:
    """Bytes of this rank's parts of tensors, whole ones or not."""
    size = 0
    for value in values:
        if hasattr(value, "local_shards"):
            size += sum(shard.tensor.nbytes for shard in value.local_shards())
        elif isinstance(value, Tensor):
            size += (value.to_local() if hasattr(value, "to_local") else value).nbytes
    return size


def observe(prepared: Path, out: Path, policy: dict[str, Any], strategy: dict[str, Any], old: bool) -> Any:
    """Trains two steps with the verb and looks at the second one."""
    as_torchrun()
    rank_zero_only.rank = dist.get_rank()
    watch = Watch()
    kind = "SemanticIdPolicy" if "codes" in policy else "CatalogSoftmaxPolicy"
    quiet = {"num_sanity_val_steps": 0, "limit_val_batches": 0, "logger": False}
    table = {"optimizer": strategy["optimizer"]}
    arguments = {"sharding": strategy["sharding"], "table_optimizer": table}
    sharded = {"class_path": "recpo.sharding.ShardedStrategy", "init_args": arguments}
    train(
        prepared,
        out=out,
        policy={"class_path": kind, "init_args": {**SIZES, **policy}},
        objective=GBPO() if old else Likelihood(),
        advantage=TernaryAdvantage() if old else None,
        old_policy="snapshot" if old else "current",
        trainer={"strategy": sharded, "devices": 2, "accelerator": "cpu", "max_steps": 2} | quiet,
        callbacks=[watch],
        **{"data.batch_size": BATCH, "data.layout": SequenceLayout(HISTORY)},
    )
    dist.barrier()
    assert watch.seen is not None
    return watch.seen._asdict()  # the other side knows this file by another name


@pytest.fixture(scope="module")
def codes(prepared, tmp_path_factory):
    data, out = Prepared.open(prepared), tmp_path_factory.mktemp("codes") / "codes"
    out.mkdir()
    items = pq.read_table(prepared / "items.parquet", columns=["item_id"]).column(0)
    table = np.stack(np.unravel_index(np.arange(data.num_items), (8, 8)), 1)
    Codes(table, (8, 8), data.catalog_checksum).save(out, items, {})
    return out


SAMPLED = {"normalizer": "sampled", "num_negatives": 20}
CASES = {
    "full": ({}, "row_wise", "sgd", False),
    "full, own output table, old policy": ({"tie_weights": False}, "table_wise", "adagrad", True),
    "sampled, rows": (SAMPLED, "row_wise", "rowwise_adagrad", False),
    "sampled, columns": (SAMPLED, "column_wise", "adagrad", False),
    "sampled, one rank": (SAMPLED, "table_wise", "sgd", False),
    "sampled, every rank": (SAMPLED, "data_parallel", "adagrad", False),
    "semantic": (None, "row_wise", "rowwise_adagrad", False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_run_takes_and_sends_what_was_planned(two, prepared, codes, tmp_path, name):
    options, sharding, optimizer, old = CASES[name]
    policy = {"codes": codes} if options is None else options
    strategy = {"sharding": sharding, "optimizer": optimizer}
    seen = [Observed(**one) for one in two.run(observe, prepared, tmp_path / "run", policy, strategy, old)]
    workload = Workload(
        60,
        ranks=2,
        batch_size=BATCH,
        history_length=HISTORY,
        policy="semantic" if options is None else "softmax",
        codebooks=(8, 8),
        dim=DIM,
        layers=1,
        heads=1,
        copies=int(old),
        table_optimizer=optimizer,
        device="cpu",
        **(options or {}),
    )
    assert mean(one.sent for one in seen) == pytest.approx(expected_bytes(workload, sharding, seen), abs=SMALL_MESSAGES)
    memory = workload.table_memory(placements_of(workload, sharding))
    fullest = max(seen, key=lambda one: sum(one.weights))
    assert fullest.weights == (memory["tables"], memory["frozen copies of tables"])
    moments = 2 * 4 * workload.dense_parameters
    assert max(one.state for one in seen) == pytest.approx(memory["state of their optimizer"] + moments, abs=500)


def placements_of(workload, sharding):
    specs = [spec._replace(sharding=sharding) for spec in workload.tables()]
    fixed = softmax_placement(workload, specs)
    specs = [spec for spec in specs if spec.name not in fixed]
    if not specs:
        return fixed
    plan = plan_tables(specs, optimizer=workload.table_optimizer, world_size=2)
    return fixed | plan.placements


def all_reduce_bytes(size, ranks=2):
    """A reduce-scatter and an all-gather over a ring."""
    return 2 * (ranks - 1) / ranks * size


def lookup_bytes(ids, rows, sharding, *, frozen=False, ranks=2):
    """One lookup of different ids, the vectors, and their gradients."""
    if sharding == "data_parallel":
        return 0.0 if frozen else all_reduce_bytes(4 * DIM * rows, ranks)
    others = (ranks - 1) / ranks
    vectors = 4 * DIM * ids * others
    return 8 * ids * (ranks - 1 if sharding == "column_wise" else others) + vectors * (1 if frozen else 2)


def softmax_bytes(states, targets, *, frozen=False, ranks=2):
    """States and targets to every rank; maximum, sum and scores reduced; gradients back: nothing of the catalog."""
    gathered = 4 * DIM * states * (ranks - 1)
    sums = all_reduce_bytes(4 * (2 * states + targets) * ranks, ranks)
    return 16 * targets * (ranks - 1) + gathered + sums + (0.0 if frozen else gathered + 4 * targets * (ranks - 1))


def expected_bytes(workload, sharding, seen):
    """The formulas, for what the ranks looked up and scored in truth."""
    total = all_reduce_bytes(4 * workload.dense_parameters)
    for name in seen[0].asked:
        frozen = not name.startswith("policy.")
        in_rows = workload.softmax_table is not None and name.endswith(workload.softmax_table)
        rows = next(spec.num_rows for spec in workload.tables() if name.endswith(spec.name))
        how = "row_wise" if in_rows else sharding
        for asked in zip(*(one.asked[name] for one in seen), strict=True):
            if how != "data_parallel":
                total += lookup_bytes(mean(asked), rows, how, frozen=frozen)
    if sharding == "data_parallel":
        total += sum(lookup_bytes(0, spec.num_rows, sharding) for spec in workload.tables())
    for name in seen[0].scored:
        for ours in zip(*(one.scored[name] for one in seen), strict=True):
            states, targets = map(max, zip(*ours, strict=True))  # padded on the wire to the largest
            total += softmax_bytes(states, targets, frozen=not name.startswith("policy."))
    return total


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def test_row_blocks_of_plan_and_run_are_the_same():
    for rows, size in ((61, 2), (5, 4), (1000, 7)):
        planned = row_wise_placement(rows, 4, size).blocks
        assert [(b.first_row, b.num_rows) for b in planned if b.num_rows] == [c for c in row_blocks(rows, size) if c[1]]
