"""Training on any number of ranks equals training on one process, for every sharding and optimizer."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from recpo.artifacts.semantic_codes import Codes
from recpo.training.checkpoints import LazyRows, saved_tensors
from recpo.training.run import Run, checkpoint_path
from tests.sharding.tables import as_torchrun, only_rank

SMALL = {"dim": 8, "layers": 1, "heads": 1, "max_history": 12, "dropout": 0.0}
SAMPLED = {"normalizer": "sampled", "num_negatives": 20}
POLICIES = {
    "full": {},
    "full, own output table": {"tie_weights": False},
    "sampled": SAMPLED,
    "sampled, own output table, popularity": SAMPLED | {"tie_weights": False, "proposal": "popularity"},
    "semantic": None,
    "semantic, codes only": {"id_vectors": False},
}
EPS = 1e-10
RATES = {"sgd": 0.5, "adagrad": 0.05, "rowwise_adagrad": 0.05, "adam": 0.01}
KINDS = ["row_wise", "table_wise", "column_wise", "data_parallel"]
BATCHES = {"max_epochs": 2, "limit_train_batches": 4, "limit_val_batches": 2}


def train(out: Path, prepared: Path, policy: Any, strategy: dict[str, Any] | None, options: dict[str, Any]) -> None:
    """One run; ``strategy`` None is a plain one. Batches are 32 contexts over all ranks."""
    from lightning.pytorch.utilities import rank_zero_only

    from recpo.batches.slates import SequenceLayout
    from recpo.verbs.train import train as verb

    options = dict(options)
    how: dict[str, Any] = {"devices": 1}
    if strategy is not None:
        as_torchrun()
        rank_zero_only.rank = dist.get_rank()
        table = {
            "optimizer": strategy["optimizer"],
            "lr": options.get("lr") or RATES[strategy["optimizer"]],
            "eps": EPS,
        }
        arguments = {"sharding": strategy["sharding"], "table_optimizer": table}
        sharded = {"class_path": "recpo.sharding.ShardedStrategy", "init_args": arguments}
        how = {"strategy": sharded, "devices": dist.get_world_size()}
    lr, layout = options.pop("lr", 0.5), options.pop("layout", None) or SequenceLayout(history_length=12)
    trainer = {**BATCHES, "num_sanity_val_steps": 0, "enable_progress_bar": False, "accelerator": "cpu"}
    data = {"data.layout": layout, "data.batch_size": 32 // (dist.get_world_size() if strategy else 1)}
    kind = "SemanticIdPolicy" if "codes" in policy else "CatalogSoftmaxPolicy"
    verb(
        prepared,
        out=out,
        policy={"class_path": kind, "init_args": policy},
        optimizer={"class_path": "torch.optim.SGD", "init_args": {"lr": lr}},
        trainer=trainer | how | options.pop("trainer", {}),
        **data,
        **options,
    )
    if strategy is not None:
        dist.barrier()


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Of the last checkpoint, whoever wrote it."""
    saved = saved_tensors(checkpoint_path(run, "last"))
    return {name: value.whole() if isinstance(value, LazyRows) else value for name, value in saved.items()}


def assert_same(first: Path, second: Path, atol: float = 2e-5) -> None:
    one, other = weights(first), weights(second)
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-4, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
    metrics = Run.open(first).results, Run.open(second).results
    for name in metrics[0]:
        if name.startswith("val/"):
            assert metrics[0][name] == pytest.approx(metrics[1][name], rel=1e-5, abs=1e-6), name


def train_alone(out: Path, prepared: Path, policy: Any, strategy: dict[str, Any], options: dict[str, Any]) -> None:
    """A sharded run of one rank."""
    with only_rank():
        train(out, prepared, policy, strategy, options)


@pytest.fixture(scope="module")
def codes(prepared, tmp_path_factory):
    """Codes of the small catalog."""
    from recpo.log.prepared import Prepared

    data, out = Prepared.open(prepared), tmp_path_factory.mktemp("codes") / "codes"
    table = np.stack(np.unravel_index(np.arange(data.num_items), (8, 8)), 1)
    out.mkdir()
    items = pq.read_table(prepared / "items.parquet", columns=["item_id"]).column(0)
    # a codebook of more than 256 codes: its trie has 16-bit numbers, which no process group can send
    Codes(table, (8, 300), data.catalog_checksum).save(out, items, {})
    return out


def options_of(name: str, codes: Path) -> dict[str, Any]:
    if name.startswith("semantic"):
        return SMALL | {"codes": codes} | (POLICIES[name] or {})
    return SMALL | POLICIES[name]


@pytest.fixture(scope="module")
def started(codes, prepared, tmp_path_factory):
    """A plain run of every policy, by name, that others start from."""

    @cache
    def run(name: str) -> Path:
        out = tmp_path_factory.mktemp("start") / "run"
        train(out, prepared, options_of(name, codes), None, {"trainer": {"max_epochs": 1, "limit_train_batches": 1}})
        return out

    return run


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("full", ["row_wise", "data_parallel"]),  # a softmax is cut into rows by the others, too
        ("semantic", ["row_wise"]),  # and by other kinds, as "sampled": see below
        ("semantic, codes only", ["row_wise"]),
        ("sampled, own output table, popularity", ["row_wise"]),
    ],
)
@pytest.mark.slow
def test_two_ranks_train_what_a_plain_process_trains(two, codes, prepared, started, tmp_path, name, kinds):
    policy = options_of(name, codes)
    train(tmp_path / "plain", prepared, policy, None, {"init_from": started(name)})
    for kind in kinds:
        strategy = {"sharding": kind, "optimizer": "sgd"}
        two.run(train, tmp_path / kind, prepared, policy, strategy, {"init_from": started(name)})
        assert_same(tmp_path / "plain", tmp_path / kind)


@pytest.mark.parametrize(
    ("name", "optimizer", "kinds"),
    [
        ("sampled", "adam", KINDS),
        ("sampled", "rowwise_adagrad", ["row_wise", "table_wise"]),  # by columns: refused
        ("semantic", "adagrad", ["row_wise", "column_wise", "data_parallel"]),
    ],
)
@pytest.mark.slow
def test_ranks_and_sharding_do_not_matter_to_any_optimizer(two, codes, prepared, tmp_path, name, optimizer, kinds):
    policy = options_of(name, codes)
    train_alone(tmp_path / "one", prepared, policy, {"sharding": "data_parallel", "optimizer": optimizer}, {})
    for kind in kinds:
        two.run(train, tmp_path / kind, prepared, policy, {"sharding": kind, "optimizer": optimizer}, {})
        assert_same(tmp_path / "one", tmp_path / kind)


@pytest.mark.parametrize(("optimizer", "peer"), [("adagrad", torch.optim.Adagrad), ("adam", torch.optim.SparseAdam)])
@pytest.mark.slow
def test_tables_learn_as_with_the_sparse_optimizers_of_torch(two, prepared, started, tmp_path, optimizer, peer):
    policy, start = SMALL | SAMPLED, started("sampled")
    plain = {"init_from": start, "sparse_optimizer": partial(peer, lr=RATES[optimizer], eps=EPS)}
    train(tmp_path / "plain", prepared, policy | {"sparse": True}, None, plain)
    strategy = {"sharding": "row_wise", "optimizer": optimizer}
    two.run(train, tmp_path / "sharded", prepared, policy, strategy, {"init_from": start})
    # SparseAdam adds eps before it corrects the bias of the denominator: gradients near eps tell the difference
    assert_same(tmp_path / "plain", tmp_path / "sharded", 2e-5 if optimizer == "adagrad" else 3e-4)


@pytest.mark.parametrize("name", ["full, own output table", "sampled", "semantic"])
@pytest.mark.slow
def test_clipping_and_accumulation_mean_what_they_mean_on_one_process(two, codes, prepared, started, tmp_path, name):
    policy, start = options_of(name, codes), started(name)
    options = {"trainer": {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}, "init_from": start}
    train(tmp_path / "plain", prepared, policy, None, options)
    two.run(train, tmp_path / "sharded", prepared, policy, {"sharding": "row_wise", "optimizer": "sgd"}, options)
    assert_same(tmp_path / "plain", tmp_path / "sharded")


def aligned(kind: str) -> dict[str, Any]:
    """Options of an alignment with frozen copies: of the policy it started from, of the last iterate, of a critic."""
    from recpo.batches.preference_lists import PreferenceListLayout
    from recpo.batches.slates import ImpressionLayout
    from recpo.objectives import GRPO, PPO, SoftmaxDPO
    from recpo.objectives.advantages import GroupNormalizedAdvantage
    from recpo.objectives.gae import GAEAdvantage
    from recpo.rewards.rewards import HitReward, LoggedReward
    from recpo.training.options import RolloutOptions

    if kind == "SoftmaxDPO":
        return {"objective": SoftmaxDPO(), "layout": PreferenceListLayout(history_length=12, in_batch=0)}
    if kind == "PPO":
        objective, advantage = PPO(kl_coef=0.1, kl_kind="full"), GAEAdvantage(whiten=True)
        options = {"objective": objective, "advantage": advantage, "reward": LoggedReward()}
        return options | {"old_policy": "snapshot", "snapshot_every": 3}
    options = {"objective": GRPO(kl_coef=0.1), "advantage": GroupNormalizedAdvantage(), "reward": HitReward()}
    rollout = RolloutOptions(batches=1, epochs=2, resamples=1)
    layout = ImpressionLayout(history_length=12, slate_length=6)
    return options | {"layout": layout, "rollout": rollout, "old_policy": "snapshot"}


@pytest.mark.parametrize(
    ("name", "kind", "sharding"),
    [("full, own output table", "SoftmaxDPO", "table_wise"), ("semantic", "PPO", "row_wise")],
)
@pytest.mark.slow
def test_frozen_copies_are_sharded_like_what_they_copy(two, codes, prepared, started, tmp_path, name, kind, sharding):
    policy = options_of(name, codes)
    # rounding errors grow with every step, where the encoder's ReLU has its kinks
    options = aligned(kind) | {"lr": 0.05, "init_from": started(name), "trainer": {"max_epochs": 1}}
    train_alone(tmp_path / "one", prepared, policy, {"sharding": "data_parallel", "optimizer": "sgd"}, options)
    two.run(train, tmp_path / "two", prepared, policy, {"sharding": sharding, "optimizer": "sgd"}, options)
    assert_same(tmp_path / "one", tmp_path / "two", 5e-5)


@pytest.mark.slow
def test_ranks_learn_from_their_own_candidates(two, codes, prepared, started, tmp_path):
    """Each rank draws its own, so nothing equals one process; but a run repeats itself, and copies follow."""
    policy = options_of("semantic", codes)
    options = aligned("GRPO") | {"init_from": started("semantic"), "lr": 0.05, "trainer": {"max_epochs": 1}}
    strategy = {"sharding": "row_wise", "optimizer": "rowwise_adagrad"}
    for out in ("first", "second"):
        two.run(train, tmp_path / out, prepared, policy, strategy, options)
    assert_same(tmp_path / "first", tmp_path / "second")
    before, after = weights(options["init_from"]), weights(tmp_path / "first")
    table = "policy.item_table.weight"
    assert (after[table] != before[table]).any()
    assert (after[f"old.{table}"] != after[table]).any()
    assert (after[f"old.{table}"] != before[table]).any()
    assert (after[f"reference.{table}"] == before[table]).all()
