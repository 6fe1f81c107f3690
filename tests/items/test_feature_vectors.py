"""Codes from vectors in the item table: known items keep their codes, new items get codes from their vectors."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch

import recpo
from recpo.artifacts.semantic_codes import Codes
from recpo.items.residual_kmeans import Codebooks
from recpo.items.sources import VectorsFromFeatures
from tests.log.conftest import DAY_MS, START_MS
from tests.refusals import refused

SMALL = {"levels": 2, "codebook_size": 8, "capacity_slack": None}


@pytest.fixture(scope="module")
def nights(tmp_path_factory):
    """Prepared data of two nights, and the raw vectors; item 3 has none, and the second night has new items."""
    root, rng = tmp_path_factory.mktemp("nights"), np.random.default_rng(0)
    day = np.repeat(np.arange(9), 40)
    log = pa.table(
        {
            "user_id": rng.integers(0, 12, len(day)),
            "item_id": np.where(day < 5, rng.integers(0, 20, len(day)), rng.integers(0, 30, len(day))),
            "timestamp": START_MS + day * DAY_MS + rng.integers(0, DAY_MS, len(day)),
        }
    )
    vectors = rng.normal(size=(30, 3)).astype(np.float32)
    rows = [None if item == 3 else vector for item, vector in enumerate(vectors.tolist())]
    items = pa.table(
        {"item_id": np.arange(30), "text": pa.array(rows, pa.list_(pa.float32())), "length": np.arange(30)}
    )
    first = pa.array(day < 7)
    options = {"threads": 1, "memory_limit": "512MB"}
    label = {"label": recpo.EveryEvent()}
    monday = recpo.prepare(log.filter(first), root / "monday", items=items, **options, **label)
    rest = log.filter(pc.invert(first))
    tuesday = recpo.prepare(rest, root / "tuesday", items=items, extends=monday, **options)
    return monday, tuesday, vectors


def test_new_items_get_the_codes_of_their_vectors(nights, tmp_path):
    monday, tuesday, vectors = nights
    source = VectorsFromFeatures(missing="mean")
    first = recpo.tokenize(monday, tmp_path / "monday", vectors=source, **SMALL)
    second = recpo.tokenize(tuesday, tmp_path / "tuesday", vectors=source, extends=first)
    before, now = (Codes.open(codes.root).codes for codes in (first, second))
    assert monday.num_items < tuesday.num_items
    assert np.array_equal(now[: monday.num_items], before)
    ids = tuesday.item_ids().to_external(range(1, tuesday.num_items + 1)).to_numpy()
    books = Codebooks.load(first.root)
    fresh = ids[monday.num_items :]
    wanted = books.encode(books.normalize(torch.from_numpy(vectors[fresh]))).numpy()
    assert int((wanted != now[monday.num_items :]).any(1).sum()) == second.report["moved"] < len(fresh)
    assert json.loads((first.root / "manifest.json").read_text())["feature"] == "text"


def test_missing_vectors(nights):
    monday = nights[0]
    ids, vectors = monday.item_ids(), nights[2]
    place = int(ids.to_internal(pa.array([3]))[0]) - 1
    with refused("missing_value", "text"):
        VectorsFromFeatures().read(monday, ids, 0)
    known = np.delete(ids.to_external(range(1, len(ids) + 1)).to_numpy(), place)
    mean = VectorsFromFeatures("text", "mean").read(monday, ids, 0)
    np.testing.assert_allclose(mean.values[place], vectors[known].mean(0), rtol=1e-5)
    np.testing.assert_array_equal(np.delete(mean.values, place, 0), vectors[known])
    assert mean.facts == {"feature": "text", "items_missing": 1}
    assert not VectorsFromFeatures(missing="zero").read(monday, ids, 0).values[place].any()


def test_data_without_such_a_vector_are_refused(nights, prepared):
    with refused("unknown_name", "vectors.feature"):
        VectorsFromFeatures("image").read(nights[0], nights[0].item_ids(), 0)
    data = recpo.Prepared.open(prepared)
    with refused("missing_option", "items"):
        VectorsFromFeatures().read(data, data.item_ids(), 0)
