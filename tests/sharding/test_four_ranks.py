"""What two ranks do, four do too. All of it is in this file, because starting four takes half a minute of one core."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.ops.test_sharded_logprob import Case, cases, check_lookup, check_softmax
from tests.sharding import test_lookup_table as lookup, test_row_table as row
from tests.sharding.ranks import Ranks
from tests.sharding.tables import only_rank
from tests.sharding.test_blocks import check as check_blocks, layouts
from tests.sharding.test_sharded_checkpoint import load_run, save_run
from tests.sharding.test_sharded_search import Cut, check_draws, check_top_k, cuts
from tests.sharding.test_sharded_training import SAMPLED, SMALL, assert_same, train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


@settings(max_examples=10)
@given(layouts(4))
def test_any_blocks_are_one_tensor(four: Ranks, layout: Any) -> None:
    four.run(check_blocks, *layout)


@settings(max_examples=10)
@given(case=cases(4))
def test_any_cut_gives_values_and_gradients_of_the_whole_table(four: Ranks, case: Case) -> None:
    four.run(check_softmax, case)
    four.run(check_lookup, case.cut, case.states, case.seed)


def test_a_softmax_over_fewer_rows_than_ranks_and_over_each_half_of_them(four: Ranks) -> None:
    four.run(check_softmax, Case((0, 1, 1, 2, 3), (3, 0, 2, 1)))
    four.run(check_softmax, Case((0, 11, 30), (3, 4)), True)


@settings(max_examples=10)
@given(cuts(4), st.tuples(*[st.integers(0, 4)] * 4), st.integers(1, 12), st.integers(0, 1000), st.booleans())
def test_searches_and_draws_are_those_of_the_whole_table(
    four: Ranks, cut: Cut, contexts: Cut, k: int, seed: int, ties: bool
) -> None:
    four.run(check_top_k, cut, contexts, k, seed, ties, (1, 3))
    four.run(check_draws, cut, contexts, k, seed)


def test_searches_over_fewer_rows_than_ranks(four: Ranks) -> None:
    four.run(check_top_k, (0, 1, 1, 2, 3), (2, 0, 1, 3), 5, 0, False, (0, 1, 2, 3))
    four.run(check_draws, (0, 1, 1, 2, 3), (2, 0, 1, 3), 5, 0)


@pytest.mark.parametrize("kind", lookup.KINDS[:2])  # 8 columns make 2 blocks of 4
def test_a_table_of_lookups_is_the_whole_table(four: Ranks, kind: str) -> None:
    four.run(lookup.check_vectors, kind)
    four.run(lookup.check_gradients, kind, 3)
    four.run(lookup.check_idle_rank, kind)
    four.run(lookup.check_scores, kind)


def test_a_table_of_lookups_may_have_fewer_rows_than_ranks(four: Ranks) -> None:
    four.run(lookup.check_more_ranks_than_rows)


@pytest.mark.parametrize("rows", [2, 3, 23])
def test_a_table_of_a_softmax_may_have_fewer_rows_than_ranks(four: Ranks, rows: int) -> None:
    for check in (row.check_steps, row.check_search, row.check_refusal, row.check_frozen):
        four.run(check, rows)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_checkpoints_of_two_continue_on_four_and_those_of_four_on_two(
    two: Ranks, four: Ranks, tmp_path: Path, optimizer: str
) -> None:
    columns = "table_wise" if optimizer == "rowwise_adagrad" else "column_wise"
    for first, other, kinds in ((two, four, ("row_wise", "table_wise")), (four, two, ("row_wise", columns))):
        path = tmp_path / f"{first.world_size}.ckpt"
        expected = first.run(save_run, path, kinds[1] if first is two else "row_wise", optimizer)[0]
        for kind in (*kinds, "data_parallel"):
            other.run(load_run, path, kind, optimizer, expected)


def test_four_train_what_one_trains(four: Ranks, prepared: Path, tmp_path: Path) -> None:
    policy = SMALL | SAMPLED
    with only_rank():
        train(tmp_path / "one", prepared, policy, {"sharding": "data_parallel", "optimizer": "adam"}, {})
    four.run(train, tmp_path / "four", prepared, policy, {"sharding": "row_wise", "optimizer": "adam"}, {})
    assert_same(tmp_path / "one", tmp_path / "four")
