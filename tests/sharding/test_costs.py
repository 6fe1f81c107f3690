"""The formulas of `recpo plan` against closed forms, against the modules they describe, and against each other."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from recpo.base.errors import RecpoError
from recpo.base.features import Categories, Category, FeatureSchema, Number, Vector
from recpo.base.types import Features
from recpo.ops.linear_logprob import linear_logprob
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.policies.encoder import HistoryEncoder, HSTUBlock, SASRecBlock
from recpo.policies.item_features import FeatureEncoder, ItemFeatureOptions
from recpo.policies.item_table import ItemTable
from recpo.policies.lazy_decoder import LazyDecoder, Placement
from recpo.policies.semantic_id import semantic_network
from recpo.policies.semantic_search import Trie
from recpo.sharding import costs, policy_costs
from recpo.sharding.costs import Exchange, Links, TableBlock, row_wise_placement
from recpo.sharding.workload import Workload, estimate, place_softmax_tables, table_memory
from recpo.verbs.plan import item_features_of

BLOCKS = {"sasrec": SASRecBlock, "hstu": HSTUBlock}


def encoder(dim, layers, blocks, heads, history):
    return HistoryEncoder(
        dim, block=BLOCKS[blocks], layers=layers, heads=heads, max_history=history, dropout=0.2, feedback_levels=6
    )


def decoder(dim, layers, codebooks, heads, groups=1, kv_layers=1):
    return LazyDecoder(dim, codebooks, layers=layers, heads=heads, kv_groups=groups, kv_layers=kv_layers, dropout=0.2)


def parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


def saved_bytes(forward):
    """Bytes that the forward pass keeps for the backward pass, every storage once, parameters left out."""
    kept = {}

    def keep(tensor):
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()), result


# ---------------------------------------------------------------- tables
def test_bytes_of_a_block():
    assert costs.block_bytes(10, 8, "sgd") == 320
    assert costs.block_bytes(10, 8, "rowwise_adagrad") == 320 + 40
    assert costs.block_bytes(10, 8, "adagrad", copies=2) == 320 * 3 + 320
    assert costs.block_bytes(10, 8, "adam", gradients=2) == 320 * (1 + 2 + 2)
    assert costs.block_bytes(10, 8, "adam", frozen=True, gradients=2) == 320


@given(rows=st.integers(1, 10_000), ranks=st.integers(1, 70))
def test_row_blocks_are_those_of_torchrec(rows, ranks):
    sharding_plan = pytest.importorskip("torchrec.distributed.sharding_plan")
    sizes, offsets = sharding_plan._calculate_rw_shard_sizes_and_offsets(rows, ranks, 8)
    blocks = row_wise_placement(rows, 8, ranks).blocks
    assert [[block.num_rows, block.num_columns] for block in blocks] == sizes
    assert [block.first_row for block in blocks if block.num_rows] == [
        offset[0] for offset, size in zip(offsets, sizes, strict=True) if size[0]
    ]


def test_what_a_lookup_exchanges():
    vectors = 100 * 64 * 4 * 3 / 4
    assert costs.lookup_exchange(100, 1000, 64, 4, "row_wise") == Exchange(600, vectors, vectors)
    assert costs.lookup_exchange(100, 1000, 64, 4, "table_wise", frozen=True) == Exchange(600, vectors, 0)
    assert costs.lookup_exchange(100, 1000, 64, 4, "column_wise") == Exchange(2400, vectors, vectors)
    assert costs.lookup_exchange(100, 1000, 64, 4, "data_parallel") == Exchange(0, 0, 1.5 * 1000 * 64 * 4)
    for sharding in ("row_wise", "table_wise", "column_wise", "data_parallel"):
        assert costs.lookup_exchange(100, 1000, 64, 1, sharding).total == 0


def test_what_the_exact_softmax_exchanges_does_not_know_the_catalog():
    assert costs.softmax_exchange(10, 30, 64, 1).total == 0
    sent = costs.softmax_exchange(10, 30, 64, 3)
    states = 10 * 64 * 4 * 2
    assert sent == Exchange(30 * 16 * 2, states + 4 / 3 * (10 + 10 + 30) * 3 * 4, states + 30 * 4 * 2)


@given(rows=st.integers(2, 50), draws=st.integers(0, 200))
def test_expected_different_ids(rows, draws):
    assert math.isclose(costs.distinct_ids(draws, rows), rows * (1 - (1 - 1 / rows) ** draws), abs_tol=1e-9)


def test_the_slower_link_counts():
    links = Links(within_node=100.0, between_nodes=10.0)
    assert costs.transfer_seconds(700, 8, 8, links) == 7
    assert costs.transfer_seconds(700, 8, 2, links) == 60
    assert costs.transfer_seconds(700, 1, 1, links) == 0


# ---------------------------------------------------------------- features of items
FEATURES = (
    Category("author", num_codes=30),
    Categories("tags", length=3, num_codes=9),
    Number("length", mean=0.0, std=1.0),
    Vector("text", width=16),
)


def features_of(items):
    return Features(
        torch.randint(0, 30, (items, 1)),
        (torch.randint(0, 9, (items, 3)),),
        torch.randn(items, 1),
        (torch.randn(items, 16),),
    )


@pytest.mark.parametrize("tied", [True, False])
def test_features_are_counted_as_the_policy_holds_them(tied):
    options = {"dim": 32, "layers": 1, "heads": 2, "tie_weights": tied}
    workload = Workload(50, history_length=9, item_features=FEATURES, feature_hidden=24, **options)
    policy = CatalogSoftmaxPolicy(50, max_history=9, item_features=ItemFeatureOptions(hidden=24), **options)
    policy.set_schema(FeatureSchema(item=FEATURES))
    policy.set_item_features(features_of(51))
    tables = [table for table in policy.modules() if isinstance(table, ItemTable)]
    assert workload.dense_parameters == parameters(policy) - sum(table.weight.numel() for table in tables)
    held = [buffer for table in tables for buffer in table.features.buffers(recurse=False)]
    memory = estimate(workload, place_softmax_tables(workload, replicated=True) | placed_whole(workload)).memory
    assert memory["item features"] == sum(buffer.numel() * buffer.element_size() for buffer in held)
    without = Workload(50, history_length=9, **options)
    assert (
        not {"item features", "item matrix", "encoded features"}
        & estimate(without, place_softmax_tables(without, replicated=True) | placed_whole(without)).memory.keys()
    )


def test_features_are_those_of_a_prepared_directory(prepared):
    assert item_features_of(None, 0) == {}
    with pytest.raises(RecpoError, match="name it with --prepared"):
        item_features_of(None, 64)
    with pytest.raises(RecpoError, match="has no item features: prepare it with --items"):
        item_features_of(prepared, 64)


def placed_whole(workload):
    of_softmax = place_softmax_tables(workload, replicated=True)
    return {
        spec.name: costs.Placement("table_wise", [TableBlock(0, 0, spec.num_rows, 0, spec.dim)])
        for spec in workload.tables()
        if spec.name not in of_softmax
    }


def test_memory_and_operations_of_encoding_features():
    module, hidden, lookups = FeatureEncoder(FEATURES, 32, hidden=64), 64, 200
    sizes = policy_costs.FeatureSizes.of(FEATURES)
    inputs = module.inputs(features_of(lookups))
    inputs = inputs._replace(rows=inputs.rows.int())
    kept, _ = saved_bytes(lambda: module.encode(inputs))
    assert kept == pytest.approx(policy_costs.feature_activation_bytes(lookups, sizes, hidden), rel=0.2)
    with FlopCounterMode(display=False) as counter:
        module.encode(inputs)
    assert counter.get_total_flops() == policy_costs.feature_flops(lookups, 32, sizes, hidden)
    # what a step looks up is encoded as often as it is asked for, or comes out of the matrix of the softmax
    options = {"batch_size": 10, "history_length": 20, "item_features": FEATURES, "num_negatives": 50}
    assert Workload(10_000, normalizer="sampled", **options).encoded_lookups("policy.item_table") == 200 + 250
    assert Workload(10_000, **options).encoded_lookups("policy.item_table") == 200
    assert Workload(1_600, **options).encoded_lookups("policy.item_table") == 0
    # the matrix of a softmax and its gradient, and of a large catalog one block beside them
    small, large = (policy_costs.item_matrix_bytes(rows, 32, sizes, hidden) for rows in (1 << 20, 1 << 21))
    assert large - small == 2 * 4 * 32 * (1 << 20)


# ---------------------------------------------------------------- the policy beside its tables
@pytest.mark.parametrize("blocks", ["sasrec", "hstu"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_those_of_the_policy_and_take_no_memory(blocks, tied):
    sizes = {"dim": 32, "layers": 3, "heads": 4}
    workload = Workload(50, history_length=9, tie_weights=tied, blocks=blocks, **sizes)
    policy = CatalogSoftmaxPolicy(50, max_history=9, tie_weights=tied, block=BLOCKS[blocks], **sizes)
    tables = [table.weight.numel() for table in policy.modules() if isinstance(table, ItemTable)]
    assert [spec.num_rows * spec.dim for spec in workload.tables()] == tables
    assert workload.dense_parameters == parameters(policy) - sum(tables)
    assert all(parameter.is_meta for parameter in workload.policy_on_meta.parameters())


@pytest.mark.parametrize("item_vectors", [True, False])
def test_weights_of_semantic_ids(item_vectors):
    options = {"decoder_layers": 3, "kv_groups": 2, "kv_layers": 3, "dim": 32, "heads": 4, "layers": 1}
    workload = Workload(
        1000, policy="semantic", codebooks=(64, 32, 16), history_length=9, item_vectors=item_vectors, **options
    )
    network = semantic_network(
        1000,
        (64, 32, 16),
        **options,
        max_history=9,
        dropout=0.0,
        feedback_levels=6,
        item_vectors=item_vectors,
    )
    dense = parameters(network.encoder) + parameters(network.decoder)
    assert workload.dense_parameters == dense
    assert {spec.name: spec.num_rows for spec in workload.tables()} == {"policy.code_table": 113} | (
        {"policy.item_table": 1001} if item_vectors else {}
    )


@pytest.mark.parametrize("blocks", ["sasrec", "hstu"])
@pytest.mark.parametrize(("dim", "layers", "heads", "history"), [(64, 2, 2, 50), (128, 3, 4, 30), (32, 1, 2, 100)])
@pytest.mark.parametrize("mixed", [False, True])
def test_activations_of_the_encoder(blocks, dim, layers, heads, history, mixed):
    module, batch = encoder(dim, layers, blocks, heads, history), 6
    items = torch.randn(batch, history, dim, requires_grad=True)
    times = torch.arange(history).repeat(batch, 1) if blocks == "hstu" else None
    lengths = torch.full((batch,), history)
    feedback = torch.ones(batch, history, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        kept, _ = saved_bytes(lambda: module(items, feedback, times, lengths))
    expected = policy_costs.encoder_activation_bytes(batch * history, dim, layers, blocks, heads, history, mixed=mixed)
    of_weights = 2 * parameters(module) if mixed else 0  # counted among the dense parameters
    assert kept - of_weights == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize(("dim", "layers", "codebooks"), [(64, 2, (256, 256, 256)), (32, 3, (64, 32, 16, 8))])
def test_activations_of_the_decoder(dim, layers, codebooks):
    module, batch, length, slate = decoder(dim, layers, codebooks, 2), 4, 20, 20
    states = torch.randn(batch, length + 1, dim, requires_grad=True)
    vectors = torch.randn(batch * slate, len(codebooks) - 1, dim, requires_grad=True)
    placement = Placement(torch.arange(slate).repeat(batch, 1))

    def forward():
        hidden = module(vectors, module.read(states), placement)
        scores = []
        for level, size in enumerate(codebooks):
            logits = module.logits(level, hidden[:, level])
            logits = logits.masked_fill(torch.zeros(batch * slate, size, dtype=torch.bool), -1e9)
            scores.append(logits.log_softmax(-1).gather(1, torch.zeros(batch * slate, 1, dtype=torch.long)))
        return scores

    kept, _ = saved_bytes(forward)
    expected = policy_costs.decoder_activation_bytes(batch * slate, dim, layers, codebooks)
    assert kept == pytest.approx(expected, rel=0.15)


def test_operations_of_encoder_decoder_and_softmax():
    dim, layers, history, batch, codebooks = 32, 2, 10, 3, (16, 8)
    items = torch.randn(batch, history, dim)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        encoder(dim, layers, "sasrec", 2, history)(items)
    counted = policy_costs.encoder_flops(batch * history, dim, layers, "sasrec", history)
    assert counter.get_total_flops() == pytest.approx(counted, rel=0.01)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        module = decoder(dim, layers, codebooks, 2)
        hidden = module(
            torch.randn(batch * 5, 1, dim),
            module.read(torch.randn(batch, history + 1, dim)),
            Placement(torch.zeros(batch, 5, dtype=torch.long)),
        )
        for level in range(2):
            module.logits(level, hidden[:, level])
    counted = policy_costs.decoder_flops(batch * 5, dim, layers, codebooks, history)
    assert counter.get_total_flops() == pytest.approx(counted, rel=0.05)
    with FlopCounterMode(display=False) as counter:
        linear_logprob(torch.randn(7, dim), torch.randn(101, dim), torch.ones(7, dtype=torch.long))
    assert counter.get_total_flops() == pytest.approx(policy_costs.softmax_flops(7, 100, dim), rel=0.02)


def test_the_exact_softmax_never_holds_all_logits():
    small = policy_costs.full_softmax_bytes(100, 64, 1000, 1)
    assert small == 3 * 4 * 64 * 100 + 4 * 100 * 1 + 3 * 400_000 + 400_000
    large = policy_costs.full_softmax_bytes(6400, 64, 10_000_000, 1)
    assert large == 3 * 4 * 64 * 6400 + 4 * 6400 * 1221 + 3 * (8 << 20)
    assert policy_costs.full_softmax_bytes(6400, 64, 5_000_000, 2) > large  # the states of both ranks


@pytest.mark.parametrize("sizes", [(16, 16, 16), (4, 300, 40), (40_000, 3)])
def test_bytes_of_a_trie(sizes):
    every = torch.cartesian_prod(*[torch.arange(size) for size in sizes])
    codes = every[torch.randperm(len(every), generator=torch.Generator().manual_seed(0))[:2000]]
    trie = Trie(codes, sizes)
    held = sum(buffer.nbytes for name, buffer in trie.named_buffers() if name != "_powers")
    assert abs(policy_costs.trie_bytes(trie.level_sizes, sizes) - held) <= 8
    assert policy_costs.trie_levels(2000, sizes) == pytest.approx(trie.level_sizes, rel=0.06)


def test_levels_of_a_trie_of_a_billion_items():
    levels = policy_costs.trie_levels(10**9, (8192, 8192, 8192, 8192))
    assert levels[:2] == [1, 8192]
    assert levels[2] == pytest.approx(8192**2, rel=1e-3)
    assert levels[3] == pytest.approx(10**9, rel=1e-2)
    assert levels[4] == 10**9


# ---------------------------------------------------------------- all of it
def placements_of(workload, sharding="row_wise"):
    blocks = {spec.name: row_wise_placement(spec.num_rows, spec.dim, workload.ranks) for spec in workload.tables()}
    return blocks | place_softmax_tables(workload, replicated=sharding == "data_parallel")


def test_the_tables_of_policies():
    full = Workload(1000, batch_size=10, history_length=20, copies=1, tie_weights=False)
    assert [spec[:3] for spec in full.tables()] == [
        ("policy.item_table", 1001, 64),
        ("policy.output_table", 1001, 64),
        ("copy_1.policy.item_table", 1001, 64),
        ("copy_1.policy.output_table", 1001, 64),
    ]
    assert full.softmax_table == "policy.output_table"
    assert [spec.lookups for spec in full.tables()[:2]] == [round(1001 * (1 - (1 - 1 / 1001) ** 200)), 0]
    semantic = Workload(1000, policy="semantic", codebooks=(10, 10, 10), item_vectors=False)
    assert [(spec.name, spec.num_rows) for spec in semantic.tables()] == [("policy.code_table", 31)]
    assert semantic.softmax_table is None
    # looked up twice in a step: for the histories, and for the codes that are generated
    assert semantic.tables()[0].lookups == 62


def test_memory_of_the_tables_of_the_fullest_rank():
    workload = Workload(999, ranks=3, tie_weights=False, copies=2, table_optimizer="adagrad")
    placements = placements_of(workload)
    memory = table_memory(workload, placements)
    block = 334 * 64 * 4
    assert memory == {
        "tables": 2 * block,
        "state of their optimizer": block + 2 * block,  # Adam steps the table of the softmax
        "their dense gradients": block,
        "frozen copies of tables": 4 * block,
    }
    whole = TableBlock(1, 0, 1000, 0, 64)
    placements["policy.item_table"] = placements["policy.item_table"]._replace(blocks=[whole])
    assert table_memory(workload, placements)["tables"] == block + 1000 * 64 * 4


@pytest.mark.parametrize("policy", [{}, {"normalizer": "sampled"}, {"policy": "semantic"}])
def test_one_rank_sends_nothing_and_two_share_the_tables(policy):
    one, two = (Workload(1_000_000, ranks=ranks, **policy) for ranks in (1, 2))
    alone, together = estimate(one, placements_of(one)), estimate(two, placements_of(two))
    assert sum(part.total for part in alone.exchange.values()) == 0
    assert all(part.total > 0 for part in together.exchange.values())
    assert together.memory["tables"] == pytest.approx(alone.memory["tables"] / 2, rel=1e-3)
    assert together.operations == alone.operations  # a rank's share of the rows times the states of all ranks


def test_what_grows_with_the_catalog():
    """Memory of tables does; exchange does not, nor do operations, but for the exact softmax."""
    for policy, grows in (({}, True), ({"normalizer": "sampled"}, False), ({"policy": "semantic"}, False)):
        small, large = (Workload(items, ranks=4, **policy) for items in (10_000_000, 100_000_000))
        before, after = estimate(small, placements_of(small)), estimate(large, placements_of(large))
        assert after.memory["tables"] == pytest.approx(10 * before.memory["tables"], rel=1e-2)
        for name, part in after.exchange.items():
            assert part.total == pytest.approx(before.exchange[name].total, rel=0.01)
        ratio = sum(after.operations.values()) / sum(before.operations.values())
        assert ratio == pytest.approx(10 if grows else 1, rel=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_items": 0}, "num_items must be at least 1"),
        ({"ranks": 0}, "ranks must be at least 1"),
        ({"slate": 0}, "slate 1 or more"),
        ({"dim": 30, "heads": 4}, "heads must divide dim"),
        ({"policy": "semantic", "codebooks": (10, 10)}, "10 x 10 give 100: take larger ones or one more"),
    ],
)
def test_impossible_workloads(options, message):
    with pytest.raises(RecpoError, match=message):
        Workload(**({"num_items": 1000} | options))
