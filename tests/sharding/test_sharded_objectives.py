"""Critics and other trained modules, and mixed precision: several ranks equal one."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.sharding.ranks import Ranks
from tests.sharding.tables import only_rank
from tests.sharding.test_sharded_training import SAMPLED, SMALL, assert_same, train, weights

pytestmark = pytest.mark.slow

SHORT = {"max_epochs": 1, "limit_train_batches": 6, "limit_val_batches": 2}
KINDS = ["PairwiseReward", "PointwiseReward", "PointwiseReward that reads only", "QLearning"]


def options_of(kind: str) -> dict[str, Any]:
    from recpo.batches.preference_lists import PreferenceListLayout
    from recpo.objectives import PairwiseReward, PointwiseReward, QLearning
    from recpo.rewards.rewards import LoggedReward
    from recpo.training.options import CriticOptions

    if kind == "PairwiseReward":
        return {"objective": PairwiseReward(), "layout": PreferenceListLayout(history_length=12, in_batch=0)}
    if kind == "QLearning":
        return {"objective": QLearning(), "reward": LoggedReward()}
    return {"objective": PointwiseReward(), "critic": CriticOptions(shares_encoder=kind == "PointwiseReward")}


CUT: list[str] = []


def watched() -> Any:
    """A ``ShardedStrategy`` that says which tables it cuts."""
    from recpo.sharding import ShardedStrategy
    from recpo.sharding.lookup_tables import LookupTable

    replace = ShardedStrategy._replace

    def noting(self: Any, module: Any, name: str, table: Any) -> None:
        replace(self, module, name, table)
        CUT.extend([name] * isinstance(table, LookupTable))

    return patch.object(ShardedStrategy, "_replace", noting)


def train_beside(out: Path, prepared: Path, kind: str, sharding: str, policy: Any, find_unused: bool) -> list[str]:
    """One run; returns the tables that were cut."""
    CUT.clear()
    table = {"optimizer": "sgd", "lr": 0.1}
    arguments = {"sharding": sharding, "table_optimizer": table, "find_unused_parameters": find_unused}
    strategy = {"class_path": "recpo.sharding.ShardedStrategy", "init_args": arguments}
    trainer = {"trainer": {**SHORT, "strategy": strategy}, "lr": 0.1}
    with watched():
        train(out, prepared, policy, {"sharding": sharding, "optimizer": "sgd"}, options_of(kind) | trainer)
    return list(CUT)


@pytest.mark.parametrize(("policy", "kind"), [*(("full", kind) for kind in KINDS), ("sampled", "PointwiseReward")])
def test_critics_and_reward_models_train_as_on_one_rank(
    two: Ranks, prepared: Path, tmp_path: Path, kind: str, policy: str
) -> None:
    how = SMALL | (SAMPLED if policy == "sampled" else {"tie_weights": False})
    # an output table of the policy learns nothing from scores and Q-values
    unused = policy == "full"
    with only_rank():
        train_beside(tmp_path / "one", prepared, kind, "data_parallel", how, unused)
    cut = two.run(train_beside, tmp_path / "two", prepared, kind, "row_wise", how, unused)[0]
    assert_same(tmp_path / "one", tmp_path / "two", 5e-5)
    # a reward model's own vectors are looked up; Q-learning searches its table for the best item, which needs all of it
    assert ("critic.score.item_table" in cut) == ("Reward" in kind)
    assert "policy.item_table" in cut
    assert not any("q_value" in name for name in cut)


@pytest.mark.parametrize("policy", ["full", "sampled"])
def test_mixed_precision_stays_close_to_single(two: Ranks, prepared: Path, tmp_path: Path, policy: str) -> None:
    how = SMALL | (SAMPLED if policy == "sampled" else {"tie_weights": False})
    strategy = {"sharding": "row_wise", "optimizer": "sgd"}
    for precision in ("32-true", "bf16-mixed"):
        options = {"trainer": {**SHORT, "precision": precision}, "lr": 0.1}
        two.run(train, tmp_path / precision, prepared, how, strategy, options)
    exact, mixed = weights(tmp_path / "32-true"), weights(tmp_path / "bf16-mixed")
    for name, value in exact.items():
        assert mixed[name].dtype == value.dtype, name
        assert (mixed[name] - value).norm() <= 0.02 * value.norm(), name
    assert any((mixed[name] != value).any() for name, value in exact.items())
