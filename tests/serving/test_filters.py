"""Lists with ``allow`` and ``deny`` are the full ranking without the filtered items."""

from __future__ import annotations

from functools import partial

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, strategies as st

from recpo.base.feedback import FeedbackDefinition
from recpo.cli.main import main
from recpo.log.id_map import IdMap
from recpo.policies.catalog_search import BlockedTable
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.serving import export
from recpo.serving.bundle import Bundle
from recpo.serving.export import BundleOptions, PolicyFacts
from recpo.serving.program import ranker_of
from recpo.serving.recommending import ItemFilters, attribute_columns
from recpo.serving.runtimes import IndexOptions
from tests.refusals import refused

ITEMS = 45
IDS = IdMap(pa.array([f"i{number}" for number in range(1, ITEMS + 1)]))
PAST = [{"item_id": "i3", "timestamp": 10**12, "label": 0.9}, {"item_id": "i7", "timestamp": 10**12 + 5}]


def table():
    """Attributes of some of the items, in another order, and of one that nobody knows."""
    rng = np.random.default_rng(0)
    numbers = np.append(rng.permutation(np.arange(1, ITEMS)), 99)  # of the last item nothing is known
    return pa.table(
        {
            "category": rng.choice(["film", "news", None], len(numbers)),
            "item_id": [f"i{number}" for number in numbers],
            "tags": [rng.choice(5, rng.integers(0, 3), replace=False).tolist() for _ in numbers],
            "adult": rng.random(len(numbers)) < 0.3,
            "length": rng.random(len(numbers)),
        }
    )


def policy_of():
    torch.manual_seed(0)
    options = {"dim": 8, "heads": 1, "layers": 1, "max_history": 4}
    policy = CatalogSoftmaxPolicy(ITEMS, **options)
    with torch.no_grad():
        policy.item_table.weight.mul_(40)
    return policy.eval(), options


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    policy, options = policy_of()
    out = tmp_path_factory.mktemp("filters") / "bundle"
    export.export_bundle(
        policy, IDS, PolicyFacts(FeedbackDefinition(), options=options), out, BundleOptions(k=ITEMS, attributes=table())
    )
    return Bundle.open(out)


def fits(row, allow, deny):
    """Whether an item with these attributes may be listed."""

    def has(name, values):
        value = row.get(name)
        own = value if isinstance(value, list) else [] if value is None else [value]
        return bool(set(own) & set(values))

    return all(has(name, values) for name, values in allow.items()) and not any(
        has(name, values) for name, values in deny.items()
    )


filters = st.fixed_dictionaries(
    {},
    optional={
        "category": st.lists(st.sampled_from(["film", "news", "other"]), max_size=3),
        "tags": st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 2**70]), max_size=3),
        "adult": st.lists(st.integers(0, 1), max_size=2),
    },
)


@given(filters, filters)
def test_filters_are_what_a_loop_finds(bundle, allow, deny):
    rows = {row["item_id"]: row for row in table().to_pylist()}
    kept = bundle.filters.allowed(allow, deny)
    names = IDS.to_external(np.arange(1, ITEMS + 1)).to_pylist()
    expected = [fits(rows.get(name, {}), allow, deny) for name in names]
    assert (kept is None and all(expected)) or kept[1:].tolist() == expected


FILTERS = [
    ({"category": ["film"]}, {}),
    ({}, {"category": ["film"], "tags": [1, 2]}),
    ({"category": ["film", "news"], "adult": [True]}, {"tags": [0]}),
    ({"category": ["nothing"]}, {}),
]


def assert_filtered(bundle, tolerance=1e-5):
    rows = {row["item_id"]: row for row in table().to_pylist()}
    whole = bundle.recommend_one(PAST)
    for allow, deny in FILTERS:
        found = bundle.recommend_one(PAST, 8, allow=allow, deny=deny)
        expected = [pair for pair in whole if fits(rows.get(pair[0], {}), allow, deny)][:8]
        assert [item for item, _ in found] == [item for item, _ in expected]
        np.testing.assert_allclose([s for _, s in found], [s for _, s in expected], atol=tolerance)


def test_lists_are_the_ranking_without_the_rest(bundle):
    assert_filtered(bundle)
    assert_filtered(Bundle.open(bundle.root, "torch"))
    found = bundle.recommend({"user_id": [1], "item_id": ["i3"], "timestamp": [1]}, 9, allow={"category": ["nothing"]})
    assert (len(found), found.attrs["counts"]["short_lists"]) == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("form", [{"item_precision": "int8"}, {"index": IndexOptions(lists=1)}])
def test_programs_in_blocks_and_indexes_filter_alike(form, tmp_path, monkeypatch):
    if "index" in form:
        pytest.importorskip("faiss")
    monkeypatch.setattr(export, "ranker_of", partial(ranker_of, block_rows=20))
    policy, options = policy_of()
    facts = PolicyFacts(FeedbackDefinition(), options=options)
    export.export_bundle(policy, IDS, facts, tmp_path / "b", BundleOptions(k=ITEMS, attributes=table(), **form))
    bundle = Bundle.open(tmp_path / "b")
    assert bundle.manifest.mask == ("index" not in form)
    assert_filtered(bundle, 1e-4)


def test_a_table_in_blocks_lists_only_what_is_allowed():
    generator = torch.Generator().manual_seed(0)
    vectors, states = torch.randn(24, 4, generator=generator), torch.randn(3, 4, generator=generator)
    vectors[0] = 0
    allowed = torch.rand(3, 24, generator=generator) < 0.4
    exclude = torch.tensor([[3, 0], [5, 9], [0, 0]])
    scores = states @ vectors.T
    scores[:, 0] = -torch.inf
    lse = scores.logsumexp(1)
    scores = scores.masked_fill(~allowed, -torch.inf).scatter(1, exclude, -torch.inf)
    for rows in (7, 30):
        found = BlockedTable(vectors, block_rows=rows).top_k(states, 6, exclude, allowed)
        best, ids = scores.topk(6, 1)
        assert torch.equal(found.item_ids, ids.masked_fill(best == -torch.inf, 0))
        torch.testing.assert_close(found.scores, best - lse[:, None])


def test_what_cannot_be_filtered_names_its_field(bundle, bundle_path):
    for wanted, code, field in (
        ({"genre": ["x"]}, "unknown_name", "allow"),
        ({"category": [3]}, "wrong_type", "allow.category"),
        ({"tags": ["x"]}, "wrong_type", "allow.tags"),
        ({"category": "film"}, "wrong_type", "allow.category"),
        ({"tags": [0.5]}, "wrong_type", "allow.tags"),
    ):
        with refused(code, field):
            bundle.recommend_one(PAST, allow=wanted)
    with refused("missing_option", "attributes"):
        Bundle.open(bundle_path).recommend_one([], deny={"category": ["film"]})
    with refused("mismatch", "attributes"):
        attribute_columns(pa.concat_tables([table(), table()]), IDS, "attributes")
    with refused("empty", "attributes"):
        attribute_columns(table().select(["item_id", "length"]), IDS, "attributes")
    assert ItemFilters.load(bundle_path, IDS).attributes == {}


def test_the_command_line_filters(bundle, tmp_path):
    pq.write_table(pa.table({"user_id": [1, 1], "item_id": ["i3", "i7"], "timestamp": [1, 2]}), tmp_path / "h.parquet")
    words = [
        "recommend",
        "--source",
        bundle.root,
        "--histories",
        tmp_path / "h.parquet",
        "--out",
        tmp_path / "l.parquet",
    ]
    words += ["--k", 8, "--allow", '{"category": ["film"]}', "--deny", '{"tags": [1, 2]}']
    assert main([str(word) for word in words]) == 0
    expected = bundle.recommend_one(
        [{"item_id": "i3", "timestamp": 1}, {"item_id": "i7", "timestamp": 2}],
        8,
        allow={"category": ["film"]},
        deny={"tags": [1, 2]},
    )
    assert pd.read_parquet(tmp_path / "l.parquet")["item_id"].tolist() == [item for item, _ in expected]
