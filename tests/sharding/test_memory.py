"""What `recpo plan` counts, against the modules that it describes, closed forms, and what autograd keeps in truth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch.autograd.graph import saved_tensors_hooks

from recpo.base.features import Categories, Category, FeatureSchema, Number, Vector
from recpo.base.types import Features, Histories
from recpo.policies.blocks import HSTUBlock, SASRecBlock
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.policies.encoder import EncoderOptions, HistoryEncoder
from recpo.policies.item_features import ItemFeatureOptions
from recpo.policies.item_table import ItemTable
from recpo.policies.lazy_decoder import DecoderOptions, LazyDecoder, Placement
from recpo.policies.semantic_search import Trie
from recpo.sharding.memory import (
    TableBlock,
    Workload,
    _trie_bytes,
    block_bytes,
    needs_of,
    row_wise_placement,
    softmax_placement,
)
from recpo.verbs.plan import plan
from tests.refusals import refused

BLOCKS = {"sasrec": SASRecBlock, "hstu": HSTUBlock}
SEMANTIC: dict[str, Any] = {"policy": "semantic", "codebooks": (64, 32, 16)}


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
    assert result is not None  # and alive so far
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def in_rows(workload):
    """Placements of all tables, cut into rows."""
    return {spec.name: row_wise_placement(spec.num_rows, spec.dim, workload.ranks) for spec in workload.tables()}


def total(*arguments, **options):
    return sum(block_bytes(*arguments, **options).values())


# ---------------------------------------------------------------- tables
def test_bytes_of_a_block():
    assert total(10, 8, "sgd") == 320
    assert total(10, 8, "rowwise_adagrad") == 320 + 40
    assert total(10, 8, "adagrad", copies=2) == 320 * 3 + 320
    assert total(10, 8, "adam", gradients=2) == 320 * (1 + 2 + 2)
    assert total(10, 8, "adam", frozen=True, gradients=2) == 320


@given(rows=st.integers(1, 10_000), ranks=st.integers(1, 70))
def test_row_blocks_are_those_of_torchrec(rows, ranks):
    sharding_plan = pytest.importorskip("torchrec.distributed.sharding_plan")
    sizes, offsets = sharding_plan._calculate_rw_shard_sizes_and_offsets(rows, ranks, 8)
    blocks = row_wise_placement(rows, 8, ranks).blocks
    assert [[block.num_rows, block.num_columns] for block in blocks] == sizes
    assert [block.first_row for block in blocks if block.num_rows] == [
        offset[0] for offset, size in zip(offsets, sizes, strict=True) if size[0]
    ]


def test_the_tables_of_policies():
    full = Workload(1000, batch_size=10, history_length=20, copies=1, tie_weights=False)
    assert [spec[:3] for spec in full.tables()] == [
        ("policy.item_table", 1001, 64),
        ("policy.output_table", 1001, 64),
    ]
    assert list(needs_of(full).document["tables"]) == [
        "policy.item_table",
        "policy.output_table",
        "copy_1.policy.item_table",
        "copy_1.policy.output_table",
    ]
    assert full.softmax_table == "policy.output_table"
    assert [spec.lookups for spec in full.tables()[:2]] == [200, 0]
    semantic = Workload(1000, policy="semantic", codebooks=(10, 10, 10), id_vectors=False)
    assert [(spec.name, spec.num_rows) for spec in semantic.tables()] == [("policy.code_table", 31)]
    assert semantic.softmax_table is None
    # looked up twice in a step: for the histories, and for the codes that are generated
    assert semantic.tables()[0].lookups == 62
    sampled = Workload(10_000, batch_size=10, history_length=20, normalizer="sampled", num_negatives=50, slate=5)
    assert sampled.tables()[0].lookups == 200 + 50 + 50


def test_memory_of_the_tables_of_the_fullest_rank():
    workload = Workload(999, ranks=3, tie_weights=False, copies=2, table_optimizer="adagrad")
    placements = in_rows(workload)
    memory = workload.table_memory(placements)
    block = 334 * 64 * 4
    assert memory == {
        "tables": 2 * block,
        "state of their optimizer": block + 2 * block,  # Adam steps the table of the softmax
        "their dense gradients": block,
        "frozen copies of tables": 4 * block,
    }
    whole = TableBlock(1, 0, 1000, 0, 64)
    placements["policy.item_table"] = placements["policy.item_table"]._replace(blocks=[whole])
    assert workload.table_memory(placements)["tables"] == block + 1000 * 64 * 4
    specs = [spec._replace(sharding="data_parallel") for spec in workload.tables()]
    everywhere = softmax_placement(workload, specs)
    assert workload.table_memory(everywhere)["their dense gradients"] == 2 * 1000 * 64 * 4


# ---------------------------------------------------------------- parameters and features of items
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
    memory = workload.other_memory()
    assert memory["item features"] == sum(buffer.numel() * buffer.element_size() for buffer in held)
    assert memory["item matrix and its gradient"] == 2 * 4 * 51 * 32
    without = Workload(50, history_length=9, **options)
    assert not {"item features", "item matrix and its gradient"} & without.other_memory().keys()


def test_features_are_those_of_a_prepared_directory(prepared):
    with refused("missing_option", "prepared"):
        plan(10, item_features=64)
    with refused("empty", "item_features"):
        plan(prepared=prepared, item_features=64)


@pytest.mark.parametrize("block", ["sasrec", "hstu"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_policy(block, tied):
    sizes = {"dim": 32, "layers": 3, "heads": 4}
    workload = Workload(50, history_length=9, tie_weights=tied, ranks=2, copies=1, block=block, **sizes)
    policy = CatalogSoftmaxPolicy(50, max_history=9, tie_weights=tied, block=BLOCKS[block], **sizes)
    tables = [table.weight.numel() for table in policy.modules() if isinstance(table, ItemTable)]
    assert [spec.num_rows * spec.dim for spec in workload.tables()[: len(tables)]] == tables
    dense = parameters(policy) - sum(tables)
    assert workload.dense_parameters == dense
    # weight, gradient, Adam's two moments, the bucket of two ranks, and a frozen copy
    assert workload.other_memory()["dense parameters, gradients, Adam"] == 4 * (4 + 1 + 1) * dense


def test_a_billion_items_take_no_memory_here():
    large = Workload(10**9, policy="semantic", codebooks=(8192,) * 3, batch_size=512)
    assert large.tables()[1].num_rows == 10**9 + 1
    assert large.dense_parameters < 10**7


# ---------------------------------------------------------------- activations
@pytest.mark.parametrize("block", ["sasrec", "hstu"])
@pytest.mark.parametrize(("dim", "layers", "heads", "history"), [(64, 2, 2, 50), (32, 1, 2, 100)])
@pytest.mark.parametrize("mixed", [False, True])
def test_activations_of_the_encoder(block, dim, layers, heads, history, mixed):
    sizes = {"layers": layers, "heads": heads}
    module = HistoryEncoder(EncoderOptions(dim=dim, max_history=history, block=BLOCKS[block], **sizes))
    items = torch.randn(6, history, dim, requires_grad=True)
    events = torch.ones(6, history, dtype=torch.long)
    full = Histories(events, history * events[:, 0], events, events)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        kept = saved_bytes(lambda: module(items, full))
    precision = "bf16-mixed" if mixed else "32-true"
    workload = Workload(50, dim=dim, batch_size=6, history_length=history, precision=precision, block=block, **sizes)
    # the same kernels; a few whose choice depends on the values differ
    assert workload.other_memory()["activations"] == pytest.approx(kept, rel=0.01)


@pytest.mark.parametrize("slate", [None, 5])
def test_activations_of_the_decoder(slate):
    workload = Workload(1000, dim=32, batch_size=4, history_length=20, slate=slate, **SEMANTIC)
    options = DecoderOptions(dim=32, max_history=20)
    encoder, decoder = HistoryEncoder(options), LazyDecoder((64, 32, 16), options)
    items, events = torch.randn(4, 20, 32, requires_grad=True), torch.ones(4, 20, dtype=torch.long)
    count = 4 * (slate or 20)
    codes = torch.randn(count, 2, 32, requires_grad=True)
    placement = Placement(torch.zeros(4, slate or 20, dtype=torch.long))

    def forward():
        hidden = decoder(
            codes, decoder.read(encoder(items, Histories(events, 20 * events[:, 0], events, events))), placement
        )
        barred = [torch.zeros(count, size, dtype=torch.bool) for size in (64, 32, 16)]
        logits = [decoder.logits(level, hidden[:, level]) for level in range(3)]
        return [one.masked_fill(mask, -1e9).log_softmax(1) for one, mask in zip(logits, barred, strict=True)]

    assert workload.other_memory()["activations"] == pytest.approx(saved_bytes(forward), rel=0.01)


def test_activations_grow_with_the_batch_and_shrink_with_precision():
    small, large, mixed = (
        Workload(1000, batch_size=batch, precision=precision).other_memory()["activations"]
        for batch, precision in ((16, "32-true"), (64, "32-true"), (64, "bf16-mixed"))
    )
    assert large == pytest.approx(4 * small, rel=0.01)
    assert mixed < 0.7 * large


# ---------------------------------------------------------------- softmax and trie
def test_the_exact_softmax_never_holds_all_logits():
    def softmax(items, ranks=1):
        return Workload(items, ranks=ranks, device="cpu").other_memory()["softmax"]

    states = 128 * 50
    assert softmax(999_999) == 3 * (8 << 20) + 12 * 64 * states + 4 * states * 123
    assert softmax(999_999, 2) > softmax(999_999)  # the states of both ranks
    sampled = Workload(1000, normalizer="sampled", num_negatives=100).other_memory()
    assert sampled["softmax"] == 17 * 100 * states
    assert "softmax" not in Workload(1000, **SEMANTIC).other_memory()


@pytest.mark.parametrize("sizes", [(16, 16, 16), (4, 300, 40), (40_000, 3)])
def test_bytes_of_a_trie_are_at_least_those_of_random_codes(sizes):
    every = torch.cartesian_prod(*[torch.arange(size) for size in sizes])
    codes = every[torch.randperm(len(every), generator=torch.Generator().manual_seed(0))[:2000]]
    trie = Trie(codes, sizes)
    held = sum(buffer.nbytes for name, buffer in trie.named_buffers() if name != "_powers")
    assert held - 8 <= _trie_bytes(2000, sizes) <= 1.2 * held


# ---------------------------------------------------------------- all of it
@pytest.mark.parametrize("policy", [{}, {"normalizer": "sampled"}, SEMANTIC | {"codebooks": (256,) * 4}])
def test_two_ranks_share_the_tables(policy):
    alone, together = (Workload(1_000_000, ranks=ranks, **policy) for ranks in (1, 2))
    memory = [workload.table_memory(in_rows(workload)) for workload in (alone, together)]
    assert memory[1]["tables"] == pytest.approx(memory[0]["tables"] / 2, rel=1e-3)


def test_what_does_not_fit_is_said_and_all_is_counted_nevertheless():
    run = Workload(1_000_000, ranks=2)
    needs = needs_of(run, memory_gib=1.0)
    assert needs.fault is not None
    assert (needs.fault.code, needs.fault.field) == ("resources", "memory_gib")
    needed = sum(needs.memory.values()) / (1 << 30)
    assert needed > 1.0
    assert needs_of(run, memory_gib=needed + 0.01).fault is None
    assert needs.milliseconds is None  # no table is only looked up


@pytest.mark.parametrize(
    ("options", "code", "field"),
    [
        ({"num_items": 0}, "out_of_range", "num_items"),
        ({"ranks": 0}, "out_of_range", "ranks"),
        ({"slate": 0}, "out_of_range", "slate"),
        (SEMANTIC | {"codebooks": (10, 10)}, "out_of_range", "codebooks"),
    ],
)
def test_impossible_workloads(options, code, field):
    with refused(code, field):
        Workload(**({"num_items": 1000} | options))


def test_a_sharding_that_training_refuses_is_refused():
    run = Workload(num_items=1000, ranks=2, device="cpu")
    with refused("conflicting_options", "policy.item_table"):
        needs_of(run, sharding={"policy.item_table": "table_wise"})
