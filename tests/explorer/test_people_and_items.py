"""Users and items that are looked up one by one: against the log and the table."""

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recpo.explorer.people_and_items import Catalog, ItemColumns, People
from recpo.log.prepared import Prepared
from tests.explorer.conftest import HOSTILE, PNG
from tests.refusals import refused


@pytest.fixture(scope="module")
def log(world):
    return pd.concat([pd.read_parquet(file) for file in sorted((world / "log").glob("*.parquet"))])


def test_the_events_of_a_user_are_those_of_the_log(people, data, log, survey):
    begin = data.manifest["boundaries"]["test_start_ms"]
    known = {*data.item_ids().to_external(range(1, data.num_items + 1)).to_pylist()}
    for user in survey.users.tolist()[:8]:
        person = people.person(user)
        own = log[(log["user_id"] == person.user_id) & log["item_id"].isin(known)]
        later = own[own["timestamp"] >= begin]
        assert sorted(event.time_ms for event in person.later) == sorted(later["timestamp"])
        assert [event.time_ms for event in person.history] == sorted((e.time_ms for e in person.history), reverse=True)
        assert {event.time_ms for event in person.history} <= {*own[own["timestamp"] < begin]["timestamp"]}
        by_time = {(event.time_ms, event.item): event for event in person.later}
        items = data.item_ids().to_internal(later["item_id"].to_numpy())
        for row, item in zip(later.itertuples(), items.tolist(), strict=True):
            event = by_time[row.timestamp, item]
            assert event.watch_time == pytest.approx(row.watch_time, rel=1e-5)
            assert event.propensity == pytest.approx(row.propensity, rel=1e-5)
            assert event.is_random == row.is_random
            assert (event.kind == "disliked") == bool(row.dislike)
        assert person.batch is not None


def test_a_user_without_held_out_events_has_training_events_and_no_lists(people, data, survey, log):
    held_out = {int(user) for user in survey.users}
    later = log[log["timestamp"] >= data.manifest["boundaries"]["test_start_ms"]]
    ids = pd.read_parquet(data.root / "users.parquet").set_index("user_index")["user_id"]
    user = next(user for user, user_id in ids.items() if user_id not in {*later["user_id"]} and user not in held_out)
    person = people.person(int(user))
    assert person.batch is None
    assert person.later == []
    boundary = data.manifest["boundaries"]["valid_start_ms"]
    own = log[(log["user_id"] == person.user_id) & (log["timestamp"] < boundary)]
    assert len(person.history) == len(own)
    assert survey.lists_of(person) == [[] for _ in survey.contenders]


def test_a_search_finds_the_id_and_ids_that_begin_with_it(people, data):
    ids = pd.read_parquet(data.root / "users.parquet")
    some = str(ids["user_id"].iloc[5])
    found = people.search(some)
    assert found[0] == (int(ids["user_index"].iloc[5]), ids["user_id"].iloc[5])
    assert all(str(user_id).startswith(some[:1]) for _, user_id in people.search(some[:1]))
    assert people.search("no such'; DROP TABLE x; --") == []
    assert people.person(10**9) is None


def test_several_shards_and_no_directory(data, survey, tmp_path):
    shards = {
        "test": [{"last_user": 4}, {"last_user": 9}],
        "train": [{"last_user": 5}, {"last_user": 9}, {"last_user": 7}],
    }
    made = Prepared(data.root, {**data.manifest, "shards": shards, "segments": [2, 1]})
    found = People(made, "test")
    assert [found._shards_of("test", user) for user in (0, 4, 5, 9, 10)] == [[0], [0], [1], [1], []]
    assert [found._shards_of("train", user) for user in (5, 6, 8)] == [[2, 0], [2, 1], [1]]


def test_an_item_is_what_the_table_and_the_log_say(catalog, data, item_table):
    items = catalog.items([2, 1, 1, 0])
    assert [*items] == [1, 2]
    assert items[1].title == HOSTILE
    assert items[2].attributes == {"category": "news", "tags": "a"}
    counts = pd.read_parquet(data.root / "items.parquet").set_index("item_index")
    assert items[2].events == counts.loc[2, "train_count"]
    assert (
        items[2].rank
        == 1
        + (counts["train_count"] > items[2].events).sum()
        + ((counts["train_count"] == items[2].events) & (counts.index < 2)).sum()
    )
    assert items[2].duration == pytest.approx(counts.loc[2, "duration"])
    assert catalog.attributes == ["category", "tags"]  # no vector


def test_without_a_table_the_title_is_the_id(data):
    plain = Catalog(data)
    item = plain.items([3])[3]
    assert item.title == str(item.item_id)
    assert item.attributes == {}
    assert plain.search(item.title) == [3]
    assert plain.search("title") == []
    assert plain.attributes == []


def test_a_search_reads_ids_and_titles(catalog, data):
    item = catalog.items([7])[7]
    assert catalog.search(str(item.item_id))[0] == 7
    assert 7 in catalog.search(f"fILM {item.item_id}")
    assert catalog.search("SCRIPT") == [1]
    assert catalog.search("%") == []  # plain text, not a pattern
    assert catalog.search("") == []


def test_only_pictures_beside_the_table_are_read(catalog):
    assert catalog.picture(1) == (PNG, "image/png")
    assert catalog.picture(2) is None  # leads out of the directory
    assert catalog.picture(3) is None  # an address
    assert catalog.items([3])[3].has_remote_picture
    assert catalog.picture(4) is None  # no such file
    assert catalog.picture(5) is None
    assert catalog.picture(10**6) is None


@pytest.mark.parametrize(
    ("columns", "code", "field"),
    [
        ({"title": "name"}, "missing_column", "title"),
        ({"picture": "cover"}, "missing_column", "picture"),
        ({"attributes": ["category", "genre"]}, "missing_column", "attributes"),
        ({"item_column": "video"}, "missing_column", "item_column"),
    ],
)
def test_a_missing_column_is_named(data, item_table, columns, code, field):
    with refused(code, field):
        Catalog(data, ItemColumns(item_table=item_table, **columns))


def test_a_table_that_cannot_be_read_is_refused(data, tmp_path):
    (tmp_path / "items.parquet").write_bytes(b"nothing")
    with refused("damaged", "item_table"):
        Catalog(data, ItemColumns(item_table=tmp_path / "items.parquet"))
    with refused("damaged", "item_table"):
        Catalog(data, ItemColumns(item_table=tmp_path / "none.parquet"))


def test_columns_may_be_chosen_and_have_any_name(data, tmp_path):
    ids = data.item_ids().to_external(range(1, data.num_items + 1)).to_pylist()
    table = pa.table({'my "id"': ids, "what is it": [f"t{one}" for one in ids], "x": [1.5] * len(ids)})
    pq.write_table(table, tmp_path / "t.parquet")
    chosen = Catalog(
        data,
        ItemColumns(item_table=tmp_path / "t.parquet", item_column='my "id"', title="what is it", attributes=["x"]),
    )
    assert chosen.items([1])[1].title == f"t{ids[0]}"
    assert chosen.items([1])[1].attributes == {"x": "1.5"}
