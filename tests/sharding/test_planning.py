"""Plans of torchrec's planner: placement, memory limits, and that every rank receives an error."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpo.base.errors import RecpoError
from recpo.sharding import planning
from recpo.sharding.memory import GIB, Placement, TableBlock, TableSpec, block_bytes, sharding_by_table
from recpo.sharding.planning import collection_plan, make_collection, plan_tables, table_key
from tests.refusals import refused

ITEMS = TableSpec("policy.item_table", 1_000_001, 64, 6400)
CODES = TableSpec("policy.code_table", 769, 64, 600)
WITH_COPIES = ITEMS._replace(copies=2)


def plan(specs, sharding="auto", optimizer="adagrad", ranks=2, **options):
    kinds = sharding_by_table(sharding, [spec.name for spec in specs])
    specs = [spec._replace(sharding=kinds[spec.name]) for spec in specs]
    return plan_tables(specs, optimizer=optimizer, world_size=ranks, **options)


def placed(specs, sharding="auto", **options):
    return plan(specs, sharding, **options).placements


def bytes_of(rows, optimizer, **options):
    return sum(block_bytes(rows, 64, optimizer, **options).values())


def test_rows_are_cut_into_blocks_of_the_same_height_but_the_last_ones():
    small = ITEMS._replace(num_rows=10)
    blocks = placed([small], "row_wise", ranks=4)[small.name].blocks
    assert blocks == [
        TableBlock(0, 0, 3, 0, 64),
        TableBlock(1, 3, 3, 0, 64),
        TableBlock(2, 6, 3, 0, 64),
        TableBlock(3, 9, 1, 0, 64),
    ]
    tiny = ITEMS._replace(num_rows=5)
    assert [block.num_rows for block in placed([tiny], "row_wise", ranks=4)[tiny.name].blocks] == [2, 2, 1, 0]


def test_columns_are_assigned_one_block_per_rank_for_any_other_tables():
    specs = [ITEMS, CODES._replace(num_rows=900_000), CODES._replace(name="policy.output_table")]
    shardings = dict.fromkeys((spec.name for spec in specs[1:]), "column_wise") | {ITEMS.name: "table_wise"}
    found = placed(specs, shardings, ranks=4)
    for spec in specs[1:]:
        assert found[spec.name].blocks == [TableBlock(r, 0, spec.num_rows, 16 * r, 16) for r in range(4)]


def test_whole_tables():
    on_one, everywhere = placed([CODES], "table_wise")[CODES.name], placed([CODES], "data_parallel")[CODES.name]
    assert on_one.blocks in ([TableBlock(0, 0, 769, 0, 64)], [TableBlock(1, 0, 769, 0, 64)])
    assert everywhere == Placement("data_parallel", [TableBlock(0, 0, 769, 0, 64), TableBlock(1, 0, 769, 0, 64)])


@pytest.mark.parametrize("sharding", ["auto", "row_wise", "table_wise", "column_wise", "data_parallel"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_one_rank_holds_everything(sharding, device):
    for placement in placed([WITH_COPIES, CODES], sharding, ranks=1, compute_device=device).values():
        assert sharding in ("auto", placement.sharding)
        assert [block[:3] for block in placement.blocks] == [(0, 0, placement.blocks[0].num_rows)]


@given(
    rows=st.lists(st.integers(1, 5000), min_size=1, max_size=3),
    dim=st.sampled_from([8, 24, 64]),
    ranks=st.sampled_from([1, 2, 3, 8, 16]),
    sharding=st.sampled_from(["auto", "row_wise", "table_wise"]),
)
@settings(max_examples=25)
def test_blocks_cover_every_table_once(rows, dim, ranks, sharding):
    specs = [TableSpec(f"policy.table_{i}", count, dim, 100) for i, count in enumerate(rows)]
    for spec, placement in zip(specs, placed(specs, sharding, ranks=ranks).values(), strict=True):
        cells = torch.zeros(spec.num_rows, dim)
        for block in placement.blocks:
            rows_, columns = slice(block.first_row, block.first_row + block.num_rows), block.first_column
            cells[rows_, columns : columns + block.num_columns] += 1
        assert (cells == (ranks if placement.sharding == "data_parallel" else 1)).all()
        assert len({block.rank for block in placement.blocks}) == len(placement.blocks)


def test_the_planner_replicates_what_is_cheaper_to_reduce_than_to_exchange():
    found = placed([ITEMS, CODES._replace(lookups=100_000)], ranks=64, local_world_size=8, compute_device="cuda")
    assert found[ITEMS.name].sharding == "row_wise"
    assert found[CODES.name].sharding == "data_parallel"


def test_column_wise_is_never_chosen_where_its_result_would_depend_on_the_ranks():
    for optimizer in ("rowwise_adagrad", "adagrad"):
        for lookups in (10, 100_000):
            found = placed([ITEMS._replace(lookups=lookups)], optimizer=optimizer, ranks=4)[ITEMS.name]
            assert optimizer == "adagrad" or found.sharding != "column_wise"
    with refused("conflicting_options", ITEMS.name):
        placed([ITEMS], "column_wise", optimizer="rowwise_adagrad")


def test_a_collection_is_named_as_the_plan_names_it():
    collection = make_collection(ITEMS)
    assert dict(collection.named_parameters())["embeddings.policy/item_table.weight"].shape == (1_000_001, 64)
    assert next(collection.parameters()).device.type == "meta"
    assert collection.embedding_configs()[0].feature_names == [table_key(ITEMS.name)]


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_fits_is_counted_with_state_copies_and_lookups(optimizer, device):
    specs = [WITH_COPIES]
    lookups = 3 * 6400 * (8 + 2 * 4 * 64)
    needed = bytes_of(500_001, optimizer, copies=2) + lookups
    options = {"sharding": "row_wise", "optimizer": optimizer, "compute_device": device}
    placed(specs, **options, memory_per_rank=needed)
    with refused("resources"):
        placed(specs, **options, memory_per_rank=needed - 1)


def test_the_planner_falls_back_to_what_fits():
    busy, lookups = CODES._replace(lookups=100_000), 100_000 * (8 + 2 * 4 * 64)
    options = {"ranks": 64, "local_world_size": 8, "compute_device": "cuda"}
    whole = bytes_of(769, "adagrad", gradients=2)
    assert placed([busy], **options, memory_per_rank=lookups + whole)[busy.name].sharding == "data_parallel"
    assert placed([busy], **options, memory_per_rank=lookups + whole - 1)[busy.name].sharding == "row_wise"


def test_what_does_not_fit_is_reported_with_numbers_and_a_remedy():
    options = {"ranks": 2, "memory_per_rank": 3 * GIB // 8}
    for sharding in ("data_parallel", "table_wise"):
        with refused("resources") as caught:
            placed([ITEMS], sharding, **options)
        assert f"0.48 GiB {sharding}, and" in str(caught.value)
        assert "takes 2 ranks or a few more. Take more ranks and row_wise" in str(caught.value)


@pytest.mark.parametrize(
    ("specs", "options", "code", "field"),
    [
        ([ITEMS], {"sharding": "column_wise", "ranks": 3}, "out_of_range", ITEMS.name),
        ([ITEMS], {"sharding": "column_wise", "ranks": 32}, "out_of_range", ITEMS.name),
        ([ITEMS], {"sharding": {"item_table": "row_wise"}}, "unknown_name", "sharding"),
    ],
)
def test_mistakes(specs, options, code, field):
    with refused(code, field):
        placed(specs, **options)


def test_the_planner_expects_more_lookups_to_take_longer():
    few, many = (
        plan([ITEMS._replace(lookups=lookups)], "row_wise", optimizer="sgd", ranks=8).milliseconds
        for lookups in (1_000, 1_000_000)
    )
    assert 0 < few < many


@pytest.mark.slow
def test_a_thousand_ranks_are_planned():
    found = placed([ITEMS._replace(num_rows=10**9 + 1), CODES], ranks=1024, local_world_size=8, compute_device="cuda")
    assert [len(placement.blocks) for placement in found.values()] == [1024, 1024]


# ---------------------------------------------------------------- two ranks
def plan_together(memory):
    return plan_tables(
        [WITH_COPIES],
        optimizer="adagrad",
        world_size=2,
        memory_per_rank=memory,
        group=dist.group.WORLD,
    ).placements


def fault_of(memory, broken=False):
    """What a rank is told."""
    before = planning._plan
    if broken and dist.get_rank() == 0:
        planning._plan = lambda *arguments: 1 / 0
    try:
        plan_together(memory)
    except RecpoError as error:
        return error.code, str(error)
    finally:
        planning._plan = before
    return None


def looked_up(sharding):
    """Rows of a table that is sharded as planned, and the shape of what this rank holds of it."""
    spec = TableSpec("policy.item_table", 11, 8, 4, sharding)
    plan = plan_tables([spec], optimizer="sgd", world_size=2, group=dist.group.WORLD)
    key = table_key(spec.name)
    tables = nn.ModuleDict({key: make_collection(spec, torch.device("cpu"))})
    rows = torch.arange(88.0).view(11, 8)
    with torch.no_grad():
        next(tables.parameters()).copy_(rows)
    sharded = DistributedModelParallel(
        tables,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=collection_plan(plan.sharding),
        sharders=[EmbeddingCollectionSharder()],
        init_data_parallel=False,
    )
    ids = torch.tensor([10, 0, 3, 7, 3])
    features = KeyedJaggedTensor(keys=[key], values=ids, lengths=torch.tensor([5], dtype=torch.int32))
    vectors = sharded.module[key](features).wait()[key].values()
    held = [list(p.shape) for p in sharded.module[key].parameters()]
    return torch.equal(vectors, rows[ids]), held


@pytest.mark.slow
def test_all_ranks_get_the_plan_of_the_first(two):
    first, second = two.run(plan_together, None)
    assert first == second


def test_all_ranks_hear_of_what_went_wrong_on_the_first(two):
    first, second = two.run(fault_of, 1 << 20)
    assert first == second
    assert first[0] == "resources"
    first, second = two.run(fault_of, None, True)
    assert first == second
    assert first[0] == "failed"
    assert "ZeroDivisionError: division by zero" in first[1]


@pytest.mark.parametrize(
    ("sharding", "shapes"),
    [("row_wise", [[6, 8], [5, 8]]), ("column_wise", [[11, 4], [11, 4]]), ("table_wise", None)],
)
def test_torchrec_shards_as_planned(two, sharding, shapes):
    (right, first), (too, second) = two.run(looked_up, sharding)
    assert right
    assert too
    if shapes is not None:
        assert [first, second] == [[shapes[0]], [shapes[1]]]
