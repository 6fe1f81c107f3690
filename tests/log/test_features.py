"""Feature tables, behaviors and context of a log: what ``recpo prepare`` fits, writes and rejects."""

import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from recpo.base.errors import RecpoError
from recpo.base.features import Categories, Category, Number, Reads, Vector
from recpo.batches.slates import histories_of
from recpo.log import feature_tables as feature_files
from recpo.log.engine import DuckDBEngine, EngineOptions
from recpo.log.feature_columns import FeatureColumns
from recpo.log.prepare import Preparation
from recpo.log.prepared import Prepared
from recpo.log.schema import Columns
from recpo.log.shaping import EveryEvent
from recpo.log.splits import TemporalSplit, TrainOnly
from recpo.log.writing import Output, Sources
from tests.log.conftest import DAY_MS, START_MS, make_log
from tests.refusals import refused

ENGINE = EngineOptions(memory_limit="512MB", threads=1)
COLUMNS = FeatureColumns(
    item=(
        Category("author", column="author_id"),
        Categories("tags", length=2),
        Number("length", log=True),
        Vector("text"),
        Category("kind", min_count=3),
    ),
    user=(Category("country"), Number("age")),
    context=(Category("surface"), Number("hour")),
    available_from="born",
    available_until="gone",
)
BEHAVIORS = {"like": "is_like", "share": "is_share"}


def rich_log(events=900, seed=0):
    return enriched(make_log(events=events, seed=seed), seed)


def enriched(log, seed=0):
    """The log with behaviors and context."""
    rng, events = np.random.default_rng(seed), len(log)
    hour = rng.integers(0, 24, events).astype(float)
    hour[rng.random(events) < 0.2] = np.nan
    return (
        log.append_column("is_like", pa.array(rng.integers(0, 2, events).astype(np.int8)))
        .append_column("is_share", pa.array(rng.random(events) < 0.1))
        .append_column("surface", pa.array([["home", "search", None][s] for s in rng.integers(0, 3, events)]))
        .append_column("hour", pa.array(hour))
    )


def item_rows(items=30, seed=1, ids=None):
    """Rows of items in random order: five more than the log has."""
    rng = np.random.default_rng(seed)
    ids = rng.permutation(items) * 7 - 20 if ids is None else rng.permutation(ids)
    items = len(ids)
    vectors = rng.normal(size=(items, 3)).astype(np.float32).tolist()
    return pa.table(
        {
            "item_id": pa.array(ids),
            "author_id": pa.array([None if a == 0 else f"a{a}" for a in rng.integers(0, 8, items)]),
            "tags": pa.array([rng.choice(9, rng.integers(0, 4)).tolist() for _ in range(items)], pa.list_(pa.int64())),
            "length": pa.array(np.where(rng.random(items) < 0.2, np.nan, rng.lognormal(3, 1, items))),
            "text": pa.array([None if i % 6 == 5 else v for i, v in enumerate(vectors)], pa.list_(pa.float32())),
            "kind": pa.array(rng.integers(0, 12, items).astype(float)),
            "born": pa.array(START_MS + rng.integers(-3, 3, items) * DAY_MS, mask=rng.random(items) < 0.3),
            "gone": pa.array(START_MS + rng.integers(2, 9, items) * DAY_MS, mask=rng.random(items) < 0.3),
            "note": pa.array([None] * items, pa.binary()),
        }
    )


def user_rows(users=45, seed=2):
    rng = np.random.default_rng(seed)
    return pa.table(
        {
            "user_id": pa.array([f"u{u}" for u in rng.permutation(users)]),
            "country": pa.array(rng.choice(["de", "us", "jp"], users)),
            "age": pa.array(rng.integers(15, 70, users)),
        }
    )


def prepare(out, log=None, items=None, users=None, engine=ENGINE, **choice):
    choice = {"features": COLUMNS, "behaviors": BEHAVIORS, "split": TemporalSplit(), **choice}
    Preparation(**choice).write(
        Sources(
            rich_log() if log is None else log,
            items=item_rows() if items is None else items,
            users=user_rows() if users is None else users,
        ),
        Output(out, engine=engine, progress=False),
    )
    return Prepared.open(out)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("features") / "out")


@pytest.mark.slow
def test_a_log_of_which_nothing_is_held_out_has_the_same_behaviors(data, tmp_path):
    whole = prepare(tmp_path / "out", split=TrainOnly()).manifest["counts"]["splits"]
    did = {period: counts["behaviors"] for period, counts in whole.items()}
    assert did["valid"] == did["test"] == {"like": 0, "share": 0}
    by_period = [counts["behaviors"] for counts in data.manifest["counts"]["splits"].values()]
    assert did["train"]["like"] >= sum(counts["like"] for counts in by_period) > 0  # more items are in the catalog


def by_id(table, column, key):
    return dict(zip(table[key].to_pylist(), table[column].to_pylist(), strict=True))


def known(values):
    return [v for v in values if v is not None and v == v]


def vocabulary_of(values, min_count=1):
    """Descending count, then value: counted by hand."""
    counts = Counter(values)
    return sorted((v for v in counts if counts[v] >= min_count), key=lambda v: (-counts[v], v))


def wide_items(columns):
    """Strings, integers, lists and numbers in turn."""
    rng, ids = np.random.default_rng(3), item_rows()["item_id"]
    table = {"item_id": ids}
    for place in range(columns):
        codes = rng.integers(0, 6, len(ids))
        values = [codes.astype(str), codes, [[str(code), "x"] for code in codes], codes / 7]
        table[f"c{place}"] = pa.array(values[place % 4], mask=None if place % 4 == 2 else rng.random(len(ids)) < 0.2)
    return pa.table(table)


@pytest.fixture
def queries(monkeypatch):
    """The SQL of every expression that the engine runs."""
    run = []

    def recorded(method):
        def record(engine, *arguments):
            run.append(engine._connection.compile(arguments[-1]))
            return method(engine, *arguments)

        return record

    for name in ("table", "stream", "materialize"):
        monkeypatch.setattr(DuckDBEngine, name, recorded(getattr(DuckDBEngine, name)))
    return run


@pytest.mark.slow
def test_work_is_linear_in_the_columns_of_a_table(tmp_path, queries):
    counts, sizes = [], []
    for number in (4, 12, 20):
        queries.clear()
        Preparation(label=EveryEvent()).write(
            Sources(make_log(), items=wide_items(number)), Output(tmp_path / str(number), engine=ENGINE, progress=False)
        )
        counts.append(len(queries))
        sizes.append(sum(map(len, queries)))
    assert len(set(counts)) == 1
    assert sizes[2] - sizes[1] < 1.2 * (sizes[1] - sizes[0])


@pytest.mark.slow
def test_the_name_of_the_item_ids_is_remembered(tmp_path):
    log = make_log().rename_columns({"item_id": "song"})
    columns, tracks = Columns(item_id="song"), item_rows().select(["item_id", "kind"]).rename_columns(["track", "kind"])
    for choice, items, expected in (
        ({}, None, "song"),
        ({"features": FeatureColumns(item_id="track")}, tracks, "track"),
    ):
        out = tmp_path / expected
        Preparation(label=EveryEvent(), columns=columns, **choice).write(
            Sources(log, items=items), Output(out, engine=ENGINE)
        )
        assert Prepared.open(out).item_column == expected


@pytest.mark.slow
def test_vocabularies_of_many_columns_are_counted_together(tmp_path, monkeypatch):
    monkeypatch.setattr(feature_files, "_COLUMNS_OF_QUERY", 3)
    table = wide_items(16)
    out = tmp_path / "out"
    Preparation(label=EveryEvent()).write(Sources(make_log(), items=table), Output(out, engine=ENGINE, progress=False))
    data = Prepared.open(out)
    items = data.table("items.parquet")
    train = set(items["item_id"].filter(pc.greater(items["train_count"], 0)).to_pylist())
    rows = [row for row in table.to_pylist() if row["item_id"] in train]
    for place in range(16):
        values = known(row[f"c{place}"] for row in rows)
        if place % 4 == 2:
            values = [value for row in values for value in row]
        if place % 4 < 3:
            assert data.vocabulary("item", f"c{place}").to_pylist() == vocabulary_of(values)


def test_vocabularies_and_moments_are_those_of_the_items_of_the_train_period(data):
    items = data.table("items.parquet")
    ids, trained = items["item_id"].to_pylist(), items["train_count"].to_numpy() > 0
    rows, schema = item_rows(), data.feature_schema.item
    assert [one.name for one in schema] == ["author", "tags", "length", "text", "kind"]
    assert all(one.is_fitted for one in schema)
    train_ids = [i for i, t in zip(ids, trained, strict=True) if t]
    author, tags, kind = (by_id(rows, c, "item_id") for c in ("author_id", "tags", "kind"))
    authors = vocabulary_of(known(author[i] for i in train_ids))
    all_tags = vocabulary_of(t for i in train_ids for t in set(tags[i]))
    kinds = vocabulary_of([int(kind[i]) for i in train_ids], min_count=3)
    assert data.vocabulary("item", "author").to_pylist() == authors
    assert data.vocabulary("item", "tags").to_pylist() == all_tags
    assert data.vocabulary("item", "kind").to_pylist() == kinds
    assert (schema[0].num_codes, schema[1].num_codes) == (len(authors) + 2, len(all_tags) + 2)

    def code(vocabulary, value):
        return 0 if value is None else vocabulary.index(value) + 2 if value in vocabulary else 1

    found = data.item_features()
    assert found.codes.shape == (data.num_items + 1, 2)
    assert found.codes[0].tolist() == [0, 0]
    expected = [[code(authors, author[i]), code(kinds, int(kind[i]))] for i in ids]
    assert found.codes[1:].tolist() == expected
    assert 1 in np.array(expected)[:, 1]
    for row, item in zip(found.lists[0][1:].tolist(), ids, strict=True):
        codes = sorted({code(all_tags, t) for t in tags[item]} - {1}) + [1] * any(t not in all_tags for t in tags[item])
        assert row == [*codes, 0, 0][:2]
    length = by_id(rows, "length", "item_id")
    values = np.log1p([length[i] for i in ids])
    of_train = values[trained & ~np.isnan(values)]
    np.testing.assert_allclose([schema[2].mean, schema[2].std], [of_train.mean(), of_train.std()], rtol=1e-12)
    np.testing.assert_allclose(found.numbers[1:, 0], (values - of_train.mean()) / of_train.std(), rtol=1e-5)
    text = by_id(rows, "text", "item_id")
    expected_text = np.array([[np.nan] * 3 if text[i] is None else text[i] for i in ids], np.float32)
    np.testing.assert_array_equal(found.vectors[0][1:], expected_text)
    assert np.isnan(found.vectors[0][0]).all()
    counts = data.manifest["feature_tables"]["item"]["counts"]
    assert counts == {"rows": 30, "unused": 30 - len(ids), "without": 0}
    assert "note" in data.manifest["feature_tables"]["item"]["left_alone"]


def test_available_from_is_never_later_than_an_event(data):
    items, born = data.table("items.parquet"), by_id(item_rows(), "born", "item_id")
    log = rich_log()
    first = {}
    for item, time in zip(log["item_id"].to_pylist(), log["timestamp"].to_pylist(), strict=True):
        first[item] = min(time, first.get(item, time))
    ids = items["item_id"].to_pylist()
    assert items["available_from"].to_pylist() == [None if born[i] is None else min(born[i], first[i]) for i in ids]
    corrected = sum(born[i] is not None and born[i] > first[i] for i in ids)
    assert data.manifest["counts"]["shown_before_available_from"] == corrected > 0


def test_available_until_is_never_before_the_end_of_a_held_out_event(data):
    items, gone = data.table("items.parquet"), by_id(item_rows(), "gone", "item_id")
    log, begin, end = rich_log(), data.manifest["boundaries"]["valid_start_ms"], {}
    for item, time in zip(log["item_id"].to_pylist(), log["timestamp"].to_pylist(), strict=True):
        end[item] = max(time + 1, end.get(item, 0)) if time >= begin else end.get(item, 0)
    ids = items["item_id"].to_pylist()
    assert items["available_until"].to_pylist() == [None if gone[i] is None else max(gone[i], end[i]) for i in ids]
    corrected = sum(gone[i] is not None and gone[i] < end[i] for i in ids)
    assert data.manifest["counts"]["shown_after_available_until"] == corrected > 0


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_durations_of_the_item_table_are_those_of_events_without_one(share, tmp_path):
    """The same directory as of a log that has them all, for labels that read durations."""
    log, rows = make_log(events=900), item_rows()
    items, seconds = log["item_id"].to_pylist(), log["duration"].to_numpy()
    of_item = dict(zip(items, seconds, strict=True))
    minutes = pa.array([of_item.get(item, -1.0) / 60 for item in rows["item_id"].to_pylist()])
    rows, keeps = rows.append_column("minutes", minutes), np.random.default_rng(4).random(len(log)) < share
    place = log.schema.get_field_index("duration")
    lacking = log.set_column(place, "duration", pa.array(seconds, mask=~keeps)) if share else log.remove_column(place)
    # that the table has a feature with the name of the option changes nothing
    features = FeatureColumns((Number("duration", column="length"),), duration="minutes", duration_unit="min")
    options = {"features": features, "behaviors": {}}
    made = prepare(tmp_path / "made", lacking, rows, **options)
    whole = prepare(tmp_path / "whole", log, rows, **{**options, "features": FeatureColumns(item=())})
    for name in ("quantiles.parquet", "histories.parquet"):
        assert made.table(name).equals(whole.table(name)), name
    own = [made.table("items.parquet")[name].to_pylist() for name in ("item_id", "duration")]
    assert dict(zip(*own, strict=True)) == pytest.approx({item: of_item[item] for item in own[0]}, rel=1e-6)
    columns = ["duration", "label", "feedback"]
    for period in ("train", "valid", "test"):
        one, other = (data.columns(period, 0, columns) for data in (made, whole))
        assert all(np.array_equal(one[name], other[name]) for name in columns)
        assert (one["duration"] > 0).all()


def test_users_and_events_have_their_features_and_behaviors(data):
    log, users = rich_log(), data.table("users.parquet")["user_id"].to_pylist()
    country = by_id(user_rows(), "country", "user_id")
    found = data.user_features()
    countries = data.vocabulary("user", "country").to_pylist()
    assert found.codes[:, 0].tolist() == [countries.index(country[u]) + 2 for u in users]
    some = data.user_features(np.array([1, 5]))
    assert some.codes.tolist() == found.codes[[1, 5]].tolist()

    assert data.behaviors == ("like", "share")
    key = ["user_id", "item_id", "timestamp", "request_id"]
    rows = log.select([*key, "is_like", "is_share", "surface", "hour"]).to_pylist()
    raw = {(r["user_id"], r["item_id"], r["timestamp"]): r for r in rows}
    ids = data.table("items.parquet")["item_id"].to_pylist()
    surface, hour = data.feature_schema.context
    surfaces = data.vocabulary("context", "surface").to_pylist()
    likes = {}
    train_hours = []
    for period in ("train", "valid", "test"):
        likes[period] = [0, 0]
        for shard in range(data.num_shards(period)):
            names = [
                "user_index",
                "item_index",
                "timestamp",
                "is_target",
                "behaviors",
                "context_surface",
                "context_hour",
            ]
            columns = data.columns(period, shard, names)
            for user, item, time, target, bits, place, standard in zip(*columns.values(), strict=True):
                row = raw[users[user], ids[item - 1], time]
                assert bits == row["is_like"] + 2 * row["is_share"]
                assert place == (0 if row["surface"] is None else surfaces.index(row["surface"]) + 2)
                expected = (row["hour"] - hour.mean) / hour.std
                assert np.isnan(standard) == np.isnan(expected)
                assert np.isnan(standard) or abs(standard - expected) < 1e-5
                likes[period] = [likes[period][0] + (bits & 1) * target, likes[period][1] + (bits >> 1) * target]
                train_hours += [row["hour"]] * (period == "train")
    assert surface.num_codes == 4
    np.testing.assert_allclose([hour.mean, hour.std], [np.nanmean(train_hours), np.nanstd(train_hours)], rtol=1e-12)
    splits = data.manifest["counts"]["splits"]
    assert {p: list(splits[p]["behaviors"].values()) for p in splits} == likes
    histories = data.table("histories.parquet").slice(0, 20).to_pylist()
    for row in histories:
        source = raw[row["user_id"], row["item_id"], row["timestamp"]]
        assert (row["like"], row["share"], row["surface"]) == (
            bool(source["is_like"]),
            source["is_share"],
            source["surface"],
        )


def test_users_without_an_event_have_the_request_that_is_answered(data):
    """Also where a batch has no others: requests are one more than places for events, as ``Histories`` says."""
    events = data.load("valid", 0, Reads(context=True))
    start = np.array([0, 3])
    histories = histories_of(events, start, start)
    assert histories.item_ids.shape == (2, 1)
    assert histories.context.codes.shape[:2] == (2, 2)
    np.testing.assert_array_equal(histories.context.codes[:, 0], events.context.codes[start])
    assert not histories.context.codes[:, 1].any()


@pytest.mark.slow
def test_the_order_of_rows_and_files_changes_no_byte(data, tmp_path):
    rng = np.random.default_rng(5)
    log, items = rich_log(), item_rows()
    pq.write_table(items.slice(0, 11), tmp_path / "b.parquet")
    pq.write_table(items.slice(11).select(list(reversed(items.column_names))), tmp_path / "a.parquet")
    again = prepare(
        tmp_path / "out",
        log.take(rng.permutation(log.num_rows)),
        [str(tmp_path / "b.parquet"), str(tmp_path / "a.parquet")],
        user_rows().take(rng.permutation(45)),
    )
    assert again.checksums == data.checksums


def test_without_tables_context_or_behaviors_there_is_no_file_and_no_column(tmp_path):
    Preparation().write(Sources(rich_log()), Output(tmp_path / "out", engine=ENGINE, progress=False))
    data = Prepared.open(tmp_path / "out")
    assert not {"features", "behaviors", "feature_tables"} & data.manifest.keys()
    assert not data.feature_schema
    assert data.behaviors == ()
    assert not [name for name in data.checksums if "feature" in name or "vocabular" in name]
    assert data.item_features().codes.shape == (data.num_items + 1, 0)
    assert not set(data.columns("train", 0, ["user_index"])) - {"user_index"}
    schema = pq.read_schema(data.root / data.manifest["shards"]["train"][0]["file"])
    assert not [name for name in schema.names if name.startswith("context") or name == "behaviors"]


@pytest.mark.slow
def test_ids_of_a_catalog_table_may_be_wider_integers_than_those_of_the_log(tmp_path):
    log = rich_log()
    place = log.schema.get_field_index("item_id")
    narrow = log.set_column(place, "item_id", log["item_id"].cast(pa.int32()))
    wide, same = prepare(tmp_path / "wide", narrow, catalog="items"), prepare(tmp_path / "same", log, catalog="items")
    ids, expected = (data.table("items.parquet")["item_id"] for data in (wide, same))
    assert ids.type == pa.int32()
    assert ids.to_pylist() == expected.to_pylist()


@pytest.mark.slow
def test_a_table_says_its_features_by_its_types_and_can_fill_the_catalog(tmp_path):
    log = rich_log().filter(pa.compute.not_equal(rich_log()["item_id"], 1))
    features = FeatureColumns(context=())
    data = prepare(tmp_path / "out", log, features=features, behaviors=None, catalog="items", users=user_rows())
    assert [(type(f), f.name) for f in data.feature_schema.item] == [
        (Category, "author_id"),
        (Categories, "tags"),
        (Number, "length"),
        (Vector, "text"),
        (Number, "kind"),
        (Category, "born"),
        (Category, "gone"),
    ]
    assert data.manifest["feature_tables"]["item"]["inferred"] is True
    assert data.num_items == 30
    assert sorted(data.table("items.parquet")["item_id"].to_pylist()) == sorted(item_rows()["item_id"].to_pylist())
    counts = data.item_counts()
    assert (np.diff((counts > 0).astype(int)) <= 0).all()  # items of the train period come first
    assert (counts == 0).sum() >= 6


@pytest.mark.slow
def test_a_table_may_only_say_from_when_on_items_are_candidates(tmp_path):
    columns = FeatureColumns(item=(), available_from="born")
    made = prepare(tmp_path / "data", items=item_rows(), features=columns)
    assert made.feature_schema.item == ()
    assert "item_features.parquet" not in made.manifest["files"]
    assert made.manifest["feature_tables"]["item"]["counts"] == {
        "rows": 30,
        "unused": 30 - made.num_items,
        "without": 0,
    }
    assert made.item_features().codes.shape == (made.num_items + 1, 0)
    assert made.table("items.parquet")["available_from"].null_count < made.num_items


def test_every_fault_of_log_and_tables_stands_in_one_report(tmp_path):
    items = item_rows().to_pylist()
    items[3]["item_id"] = items[2]["item_id"]
    items[4]["text"] = [1.0, 2.0]
    items[6]["text"] = [1.0, float("inf"), 0.0]
    items[7]["length"] = float("inf")
    items[8]["kind"] = 1.5
    items[9]["item_id"] = None
    items = pa.Table.from_pylist(items, item_rows().schema).drop_columns("born")
    items = items.append_column("born", pa.array(["2023-11-01"] * 12 + ["soon"] + ["2023-11-02"] * 17))
    users = user_rows().drop_columns("country").set_column(1, "age", pa.array(["young"] * 45))
    log = rich_log().drop_columns("is_like")
    with pytest.raises(RecpoError) as raised:
        prepare(tmp_path / "out", log, items, users)
    report = str(raised.value)
    for part in (
        "column is_like: no such column",
        "column item_id: 1 row: an id that an earlier row has [first: row 3",
        "column text: 1 row: a vector of another width than 3 [first: row 4",
        "column text: 1 row: a vector with nan, infinite or missing numbers [first: row 6",
        "column length: 1 row: an infinite number [first: row 7 (inf)]",
        "column kind: 1 row: a number that is not whole, in a category [first: row 8 (1.5)]",
        "column item_id: 1 row: null key [first: row 9",
        "column born: 1 row: unparseable or impossible time [first: row 12 ('soon')]",
        "column country: no such column (wanted as feature country)",
    ):
        assert part in report
    assert not (tmp_path / "out").exists()
    with refused("wrong_type", "age"):
        prepare(tmp_path / "out", users=user_rows().set_column(2, "age", pa.array(["young"] * 45)))


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"behaviors": {"label": "is_like"}}, ("bad_value", "behaviors")),
        ({"features": FeatureColumns(context=(Number("surface"),))}, ("wrong_type", "surface")),
        ({"catalog": "items", "items": None}, ("missing_option", "items")),
        ({"items": None}, ("missing_option", "items")),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, choice, said):
    choice = {"features": COLUMNS, "behaviors": BEHAVIORS, **choice}
    items = choice.pop("items", item_rows())
    if choice["features"] is not COLUMNS or choice.get("catalog"):
        choice["features"] = FeatureColumns(context=choice["features"].context)
    with refused(*said):
        Preparation(**choice).write(
            Sources(rich_log(), items=items), Output(tmp_path / "out", engine=ENGINE, progress=False)
        )


@pytest.mark.slow
def test_csv_tables_and_the_movielens_preset(tmp_path):
    rng = np.random.default_rng(0)
    movies = ["movieId,title,genres", '1,"A, B (1995)",Action|Comedy', "2,C,(no genres listed)", "3,D,Comedy"]
    (tmp_path / "movies.csv").write_text("\n".join(movies) + "\n")
    rows = [f"{u},{m},{r},{1_600_000_000 + 3600 * t}" for t, (u, m, r) in enumerate(rng.integers(1, 4, (60, 3)))]
    (tmp_path / "ratings.csv").write_text("\n".join(["userId,movieId,rating,timestamp", *rows]) + "\n")
    choice = Preparation(preset="movielens", label=EveryEvent())
    log, items = str(tmp_path / "ratings.csv"), str(tmp_path / "movies.csv")
    choice.write(Sources(log, items=items), Output(tmp_path / "out", engine=ENGINE, progress=False))
    data = Prepared.open(tmp_path / "out")
    assert data.feature_schema.item == (Categories("genres", separator="|", num_codes=5),)
    assert data.vocabulary("item", "genres").to_pylist() == ["Comedy", "(no genres listed)", "Action"]
    assert data.item_features().lists[0][:, :2].tolist() == [[0, 0], [2, 4], [3, 0], [2, 0]]
    assert data.manifest["feature_tables"]["item"]["left_alone"] == ["title"]
    json.dumps(data.manifest)


def test_an_id_in_two_files_of_a_table_is_a_fault_of_the_table(tmp_path):
    for part in ("0", "1"):
        pq.write_table(item_rows(), tmp_path / f"items-{part}.parquet")
    with refused("bad_value", "item_id") as raised:
        prepare(tmp_path / "out", items=[str(tmp_path / f"items-{part}.parquet") for part in ("0", "1")])
    assert "the table of items (2 files)" in str(raised.value)
