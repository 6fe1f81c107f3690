"""Unsupported options of a sharded run raise before training, once, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from recpo.base.errors import Code
from recpo.policies.item_table import ItemTable, tables_on_meta
from recpo.training.networks import ItemValue
from tests.forks import Command
from tests.refusals import refused
from tests.sharding.ranks import Ranks
from tests.sharding.tables import Model, as_torchrun, shard


class Policy(nn.Module):
    """Tables under the names that they have in a run."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Module()
        self.policy.item_table = ItemTable(22, 8)
        self.policy.output_table = ItemTable(22, 8, use="softmax")
        self.head = ItemValue(22, 8, 4)


def options(**values: Any) -> Any:
    from recpo.sharding.lookup_tables import TableOptions

    return TableOptions(**values)


@pytest.mark.parametrize(
    ("sharding", "code", "field"),
    [
        ({"policy.item": "row_wise"}, "unknown_name", "sharding"),
        ({"head.item_table": "row_wise"}, "unknown_name", "sharding"),
        ({"policy.output_table": "table_wise"}, "conflicting_options", "policy.output_table"),
        ({"policy.output_table": "column_wise"}, "conflicting_options", "policy.output_table"),
        ({"policy.item_table": "column_wise"}, "conflicting_options", "policy.item_table"),
    ],
)
def test_mistaken_sharding_is_refused(alone: None, sharding: dict[str, str], code: Code, field: str) -> None:
    with refused(code, field):
        shard(Policy(), sharding)


def test_the_rest_of_the_names_may_be_left_out(alone: None) -> None:
    from recpo.sharding.lookup_tables import LookupTable
    from recpo.sharding.row_tables import RowTable

    net: Any = shard(Policy(), {"policy.item_table": "row_wise"})
    assert isinstance(net.policy.item_table, LookupTable)
    assert isinstance(net.policy.output_table, RowTable)
    replicated: Any = shard(Policy(), "data_parallel")
    assert type(replicated.policy.output_table) is ItemTable
    assert replicated.policy.item_table.optimizer is not None
    assert not hasattr(replicated.policy.output_table, "optimizer")  # the dense parameters' one steps it


def test_tables_that_are_read_whole_stay_whole(alone: None) -> None:
    with tables_on_meta():
        net: Any = Policy()
    before = net.head.item_table.weight
    shard(net, "row_wise")
    assert type(net.head.item_table) is ItemTable
    assert net.head.item_table.weight is before
    assert not before.is_meta
    assert not any(parameter.is_meta for parameter in net.parameters())


@pytest.mark.parametrize(
    "values", [{"lr": -0.1}, {"eps": -1e-8}, {"betas": (0.9, 1.0)}, {"betas": (-0.1, 0.9)}, {"lr": float("nan")}]
)
def test_options_that_are_none_are_refused(values: dict[str, Any]) -> None:
    (name,) = values
    with refused("out_of_range", f"table_optimizer.{name}"):
        options(**values)


def test_widths_that_cannot_be_cut_are_refused_or_replicated(alone: None) -> None:
    with refused("unsupported", "table"):
        shard(Model(table=(9, 6)), "row_wise")
    assert not shard(Model(table=(9, 6)), "auto").table.is_block


def check_memory() -> bool:
    """Whether this rank knows that the tables do not fit; one that waits for others runs into the timeout of them."""
    with tables_on_meta():
        net = nn.Module()
        net.table = ItemTable(10**9, 64)
    with refused("resources"):
        shard(net, "row_wise", options(), None, 1.0)
    dist.barrier()
    return True


def test_every_rank_hears_that_tables_do_not_fit(two: Ranks) -> None:
    assert all(two.run(check_memory))


def run(prepared: Path, out: Path, strategy: Any = None, **values: Any) -> None:
    """A run of this process."""
    from recpo.verbs.train import train

    as_torchrun()
    trainer = {"max_epochs": 1, "limit_train_batches": 1, "accelerator": "cpu", "devices": 1}
    trainer |= {"num_sanity_val_steps": 0, "strategy": strategy or {"class_path": "recpo.sharding.ShardedStrategy"}}
    sizes = {"dim": 8, "layers": 1, "heads": 1, "max_history": 12}
    layout = values.pop("layout", {"class_path": "SequenceLayout", "init_args": {"history_length": 12}})
    train(
        prepared,
        out=out,
        policy={"class_path": "CatalogSoftmaxPolicy", "init_args": sizes},
        trainer=trainer | values.pop("trainer", {}),
        allocator=False,
        **{"data.batch_size": 8, "data.layout": layout},
        **values,
    )


@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
def test_tables_are_kept_in_single_precision(alone: None, prepared: Path, tmp_path: Path, precision: str) -> None:
    with refused("conflicting_options", "trainer.precision"):
        run(prepared, tmp_path / "run", trainer={"precision": precision})


def test_a_reference_cannot_be_cached_from_tables_without_memory(alone: None, prepared: Path, tmp_path: Path) -> None:
    from recpo.objectives import PPO
    from recpo.objectives.gae import GAEAdvantage
    from recpo.rewards.rewards import LoggedReward

    sources = {"advantage": GAEAdvantage(), "reward": LoggedReward(), "old_policy": "snapshot", "reference": "cached"}
    with refused("conflicting_options", "reference"):
        run(prepared, tmp_path / "run", objective=PPO(kl_coef=0.1), **sources)


def test_it_is_for_training(alone: None) -> None:
    from lightning import LightningModule, Trainer

    from recpo.sharding import ShardedStrategy

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.table = ItemTable(5, 4)

        def validation_step(self, *_: Any) -> None:
            raise AssertionError("must not come to this")

    as_torchrun()
    trainer = Trainer(accelerator="cpu", devices=1, strategy=ShardedStrategy(), logger=False, barebones=True)
    with refused("unsupported", "trainer.strategy"):
        trainer.validate(Net(), torch.utils.data.DataLoader([0]))


CONFIG = """
data:
  prepared: {prepared}
  batch_size: 4
  layout: {{class_path: SequenceLayout, init_args: {{history_length: 12}}}}
policy:
  class_path: CatalogSoftmaxPolicy
  init_args: {{dim: 64, layers: 1, heads: 1, max_history: 12, normalizer: sampled, num_negatives: 20}}
objective: {{class_path: Likelihood}}
trainer:
  max_epochs: 1
  accelerator: cpu
  devices: 2
  enable_progress_bar: false
  strategy:
    class_path: recpo.sharding.ShardedStrategy
    init_args: {{sharding: row_wise, memory_per_rank: 0.000001}}
"""


@pytest.mark.slow
def test_two_ranks_of_the_command_line_end_with_the_message(prepared: Path, tmp_path: Path) -> None:
    message, config = "the tables do not fit into 0.00 GiB per rank", tmp_path / "config.yaml"
    config.write_text(CONFIG.format(prepared=prepared))
    command = Command(["train", "--config", str(config), "--out", str(tmp_path / "run")], tmp_path)
    assert command.ended(300) == 1
    _, errors = command.printed
    assert "Traceback" not in errors
    assert 1 <= errors.count(message) <= 2, errors  # each rank may say it
