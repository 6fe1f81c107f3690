"""The types of features, as JSON and as arrays."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from recpo.base.features import (
    Categories,
    Category,
    FeatureArrays,
    FeatureSchema,
    Number,
    Vector,
    missing_features,
    read_features,
)
from recpo.base.types import Histories
from tests.refusals import refused

SCHEMA = FeatureSchema(
    item=(
        Number("length", log=True, mean=1.5, std=0.5),
        Category("author", column="author_id", num_codes=7),
        Categories("tags", separator=",", length=3, num_codes=9),
        Vector("text", width=2),
        Category("kind", num_codes=4),
    ),
    context=(Category("surface", num_codes=3), Number("hour", mean=12.0, std=6.0)),
)


def test_a_schema_survives_json():
    assert FeatureSchema.from_json(SCHEMA.to_json()) == SCHEMA
    assert FeatureSchema.from_json(None) == FeatureSchema()
    assert SCHEMA
    assert not FeatureSchema()
    assert all(feature.is_fitted for feature in SCHEMA.item)
    assert not Category("author").is_fitted
    assert SCHEMA.item[1].source == "author_id"
    assert SCHEMA.item[0].source == "length"


@pytest.mark.parametrize("damage", [{"type": "Word"}, {"mean": None, "weight": 1}])
def test_a_damaged_schema_is_refused(damage):
    content = SCHEMA.to_json()
    content["item"][2] |= damage
    with refused("damaged", "features"):
        FeatureSchema.from_json(content, "manifest")


def test_features_that_make_no_sense_are_refused():
    with refused("out_of_range", "length"):
        Categories("tags", length=0)
    with refused("duplicate", "a"):
        FeatureSchema(item=(Category("a"), Number("a")))


def test_columns_become_arrays_in_the_order_of_the_schema():
    vectors = pa.FixedSizeListArray.from_arrays(pa.array([1, 2, np.nan, np.nan, 5, 6], pa.float32()), 2)
    table = pa.table(
        {
            "kind": pa.array([2, 0, 1], pa.int32()),
            "length": pa.array([0.5, np.nan, -1.0], pa.float32()),
            "tags": pa.array([[2, 4], [], [3, 1, 5]], pa.list_(pa.int32())),
            "text": vectors,
            "author": pa.array([3, 4, 0], pa.int32()),
        }
    )
    cut = pa.concat_tables([table.slice(0, 1), table.slice(1)])  # more than one chunk
    found = read_features(SCHEMA.item, cut, first_missing=True)
    assert found.codes.tolist() == [[0, 0], [3, 2], [4, 0], [0, 1]]
    assert found.lists[0].tolist() == [[0, 0, 0], [2, 4, 0], [0, 0, 0], [3, 1, 5]]
    np.testing.assert_array_equal(found.numbers, np.array([[np.nan], [0.5], [np.nan], [-1.0]], np.float32))
    np.testing.assert_array_equal(found.vectors[0], np.array([[np.nan] * 2, [1, 2], [np.nan] * 2, [5, 6]], np.float32))
    assert [part.dtype for part in (found.codes, found.lists[0], found.numbers, found.vectors[0])] == [
        np.int64,
        np.int64,
        np.float32,
        np.float32,
    ]
    for one, other in zip(found.rows(np.array([0])), missing_features(SCHEMA.item, (1,)), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_histories_are_cut_with_their_context_and_behaviors():
    """Row ``lengths`` of the context is that of the request that is answered now, however a history is cut."""
    number = np.arange(10, dtype=np.float32).reshape(2, 5, 1)
    context = FeatureArrays(np.zeros((2, 5, 0), np.int64), (), number, ()).tensors()
    events = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]])
    user = FeatureArrays(np.array([[3], [4]]), (), np.zeros((2, 0), np.float32), ()).tensors()
    histories = Histories(events, torch.tensor([4, 2]), events, events * 10, events + 100, user, context)

    recent = histories.recent(3)
    assert recent.item_ids.tolist() == [[2, 3, 4], [5, 6, 0]]
    assert recent.behaviors.tolist()[0] == [102, 103, 104]
    nan = np.nan
    np.testing.assert_array_equal(recent.context.numbers[..., 0], [[1, 2, 3, 4], [5, 6, 7, nan]])
    first = histories.first(2)
    assert first.item_ids.tolist() == [[1, 2], [5, 6]]
    assert first.lengths.tolist() == [2, 2]
    np.testing.assert_array_equal(first.context.numbers[..., 0], [[0, 1, 2], [5, 6, 7]])
    some = histories.rows(torch.tensor([0, 0])).up_to(torch.tensor([0, 3]))
    assert some.item_ids.tolist() == [[0, 0, 0, 0], [1, 2, 3, 0]]
    assert some.timestamps.tolist()[1] == [10, 20, 30, 0]
    np.testing.assert_array_equal(some.context.numbers[..., 0], [[0, nan, nan, nan, nan], [0, 1, 2, 3, nan]])
    assert some.user.codes.tolist() == [[3], [3]]
    assert histories.recent(4) is histories
