"""Extensions of directories with features, context and behaviors: equal to preparing the whole log, with kept codes."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import recpo
from recpo.base.features import Categories, Category, Number, Vector
from recpo.log.feature_columns import FeatureColumns
from tests.log.conftest import DAY_MS, START_MS
from tests.log.test_extension import OPTIONS, assert_equal, between, living_log
from tests.refusals import refused

COLUMNS = FeatureColumns(
    item=(Category("author"), Categories("tags", length=2), Number("length", log=True), Vector("text")),
    user=(Category("country"), Number("age")),
    context=(Category("position", column="slot"), Number("hour")),
    available_from="born",
    available_until="gone",
    duration="lasts",
)
BEHAVIORS = {"like": "is_like", "share": "is_share"}
FEATURES = {"features": COLUMNS, "behaviors": BEHAVIORS, "catalog": "items"}
ENGINE = {"memory_limit": "512MB", "threads": 1}


def rich_log(seed, days, **sizes):
    """Later days have values that the first ones do not have; no request goes on after midnight."""
    rng, log = np.random.default_rng(seed), living_log(seed, days, **sizes)
    day = (log["timestamp"].to_numpy() - START_MS) // DAY_MS
    slot = [None if rng.random() < 0.1 else f"s{rng.integers(0, 2 + d // 2)}" for d in day]
    hour = np.where(rng.random(len(day)) < 0.2, np.nan, rng.integers(0, 24, len(day)))
    requests = [f"{d}-{request}" for d, request in zip(day, log["request_id"].to_pylist(), strict=True)]
    log = log.set_column(log.schema.get_field_index("request_id"), "request_id", pa.array(requests))
    seconds, place = log["duration"].to_numpy(zero_copy_only=False), log.schema.get_field_index("duration")
    log = log.set_column(place, "duration", pa.array(seconds, mask=np.isnan(seconds) | (rng.random(len(day)) < 0.3)))
    return (
        log.append_column("is_like", pa.array(rng.integers(0, 2, len(day)).astype(np.int8)))
        .append_column("is_share", pa.array(rng.random(len(day)) < 0.2))
        .append_column("slot", pa.array(slot))
        .append_column("hour", pa.array(hour))
    )


def item_rows(log, seed):
    """Rows of the log's items and of three that nobody was shown yet, by id."""
    rng = np.random.default_rng(seed)
    ids = np.append(np.unique(log["item_id"].to_numpy()), [2000, 2001, 2002])
    first = log.group_by("item_id").aggregate([("timestamp", "min")]).to_pydict()
    first = dict(zip(first["item_id"], first["timestamp_min"], strict=True))
    born = [first.get(i, START_MS + 9 * DAY_MS) + int(rng.integers(-2, 2)) * 3_600_000 for i in ids.tolist()]
    tags = [rng.choice(9, rng.integers(0, 4), replace=False).tolist() for _ in ids]
    vectors = rng.normal(size=(len(ids), 3)).astype(np.float32).tolist()
    return pa.table(
        {
            "item_id": pa.array(ids),
            "author": pa.array([None if a == 0 else f"a{a}" for a in rng.integers(0, 40, len(ids))]),
            "tags": pa.array(tags, pa.list_(pa.int64())),
            "length": pa.array(np.where(rng.random(len(ids)) < 0.2, np.nan, rng.lognormal(3, 1, len(ids)))),
            "text": pa.array([None if i % 5 == 4 else v for i, v in enumerate(vectors)], pa.list_(pa.float32())),
            "born": pa.array(born, mask=rng.random(len(ids)) < 0.2),
            "gone": pa.array(START_MS + rng.integers(2, 12, len(ids)) * DAY_MS, mask=rng.random(len(ids)) < 0.3),
            "lasts": pa.array(rng.integers(5, 90, len(ids)).astype(float)),
        }
    )


def user_rows(log, seed):
    rng, ids = np.random.default_rng(seed), log["user_id"].unique().sort()
    country = rng.choice(["de", "us", "jp", "fr", "in"], len(ids))
    return pa.table({"user_id": ids, "country": country, "age": pa.array(rng.integers(15, 70, len(ids)))})


def known_on(rows, log, key):
    """The rows that a table of that day had: those of the log so far, and one item that nobody was shown."""
    shown = pc.is_in(rows[key], log[key].combine_chunks())
    return rows.filter(pc.or_(shown, pc.equal(rows[key], 2000)) if key == "item_id" else shown)


def values_of(data, side, feature, codes):
    """The values behind codes; of lists, sorted ones without the padding."""
    values = [None, "unknown", *data.vocabulary(side, feature).to_pylist()]
    if np.ndim(codes) == 2:
        return [[values[code] for code in row if code] for row in codes.tolist()]
    return [values[code] for code in codes.tolist()]


def among(values, vocabulary):
    """Those values, unknown where the vocabulary lacks them."""
    return [None if pd.isna(v) else v if v in vocabulary else "unknown" for v in values]


def raw_numbers(feature, standard):
    raw = standard.astype(np.float64) * feature.std + feature.mean
    return np.expm1(raw) if feature.log else raw


def requests_of(data, split):
    """Behaviors and context of every row of a period, by user and time."""
    names = ["user_index", "timestamp", "behaviors", "context_position", "context_hour"]
    pieces = (
        data.train_columns(names)
        if split == "train"
        else (data.columns(split, shard, names) for shard in range(data.num_shards(split)))
    )
    frame = pd.concat([pd.DataFrame(piece) for piece in pieces], ignore_index=True)
    users = data.table("users.parquet", ["user_id"]).column(0).to_numpy(zero_copy_only=False)
    frame["user_index"] = users[frame["user_index"]]
    frame["position"] = values_of(data, "context", "position", frame.pop("context_position").to_numpy())
    hour = frame.pop("context_hour").to_numpy()
    frame["hour"] = raw_numbers(data.feature_schema.context[1], hour).round(3)
    return frame.sort_values("user_index", kind="stable").reset_index(drop=True)


def assert_equal_features(extended, whole, rows):
    """By the values of the whole log's data, whose codes differ, and by the rows of the last table."""
    for split in ("train", "valid", "test"):
        expected, found = requests_of(whole, split), requests_of(extended, split)
        kept = extended.vocabulary("context", "position").to_pylist()
        expected["position"] = among(expected["position"], kept)
        pd.testing.assert_frame_equal(found, expected)
        assert (
            extended.manifest["counts"]["splits"][split]["behaviors"]
            == (whole.manifest["counts"]["splits"][split]["behaviors"])
        )
    ids = extended.table("items.parquet", ["item_id"]).column(0)
    rows = rows.take(pc.index_in(ids, rows["item_id"]))
    found, (_, _, length, _) = extended.item_features(), extended.feature_schema.item
    authors, tags = (extended.vocabulary("item", name).to_pylist() for name in ("author", "tags"))
    assert values_of(extended, "item", "author", found.codes[1:, 0]) == among(rows["author"].to_pylist(), authors)
    for codes, own in zip(found.lists[0][1:].tolist(), rows["tags"].to_pylist(), strict=True):
        expected = sorted(tags.index(t) + 2 for t in own if t in tags) + [1] * any(t not in tags for t in own)
        assert codes == [*expected, 0, 0][:2]
    np.testing.assert_allclose(raw_numbers(length, found.numbers[1:, 0].numpy()), rows["length"].to_numpy(), rtol=1e-5)
    missing = [np.nan] * 3
    expected = np.array([missing if v is None else v for v in rows["text"].to_pylist()], np.float32)
    np.testing.assert_array_equal(found.vectors[0][1:].numpy(), expected)


def assert_equal_users(extended, whole, rows):
    users = extended.table("users.parquet", ["user_id"]).column(0)
    rows = rows.take(pc.index_in(users, rows["user_id"]))
    found, countries = extended.user_features(), extended.vocabulary("user", "country").to_pylist()
    assert values_of(extended, "user", "country", found.codes[:, 0]) == among(rows["country"].to_pylist(), countries)
    age = raw_numbers(extended.feature_schema.user[1], found.numbers[:, 0])
    np.testing.assert_allclose(age, rows["age"].to_numpy(), rtol=1e-5)
    assert extended.table("histories.parquet").schema == whole.table("histories.parquet").schema


def extended_day_by_day(folder, parts, items, users):
    """The tables hold new rows alone, on the second day all rows; returns the directories."""
    log, found = parts[0], []
    tables = {"items": known_on(items, log, "item_id"), "users": known_on(users, log, "user_id")}
    found.append(recpo.prepare(log, folder / "0", **tables, **FEATURES, **OPTIONS))
    for number, part in enumerate(parts[1:], start=1):
        before, log = log, pa.concat_tables([log, part])
        now = {"items": known_on(items, log, "item_id"), "users": known_on(users, log, "user_id")}
        if number != 2:
            new = {"items": pc.is_in(now["items"]["item_id"], before["item_id"].combine_chunks())}
            new["users"] = pc.is_in(now["users"]["user_id"], before["user_id"].combine_chunks())
            now = {name: table.filter(pc.invert(new[name])) for name, table in now.items()}
        found.append(recpo.prepare(part, folder / str(number), extends=found[-1], **now, **ENGINE))
    return found


def assert_extensions_equal(folder, log, cuts, seed):
    parts = [between(log, first, last) for first, last in zip([0, *cuts[:-1]], cuts, strict=True)]
    items, users = item_rows(log, seed), user_rows(log, seed)
    listed = known_on(items, log, "item_id")
    tables = {"items": listed, "users": users}
    whole = recpo.prepare(pa.concat_tables(parts), folder / "whole", **tables, **FEATURES, **OPTIONS)
    found = extended_day_by_day(folder, parts, items, users)
    found[-1].verify()
    assert found[-1].feature_schema == found[0].feature_schema
    assert_equal(found[-1], whole)
    assert_equal_features(found[-1], whole, listed)
    assert_equal_users(found[-1], whole, users)
    return found


@pytest.mark.slow
def test_two_extensions_with_features_equal_preparing_the_whole_log(tmp_path):
    first, extended, *_ = assert_extensions_equal(tmp_path, rich_log(7, 7), [4, 5, 7], 7)
    codes = extended.item_features().codes[first.num_items + 1 :, 0]
    assert 1 in codes  # an author that is new
    assert codes.max() > 1
    counts = extended.manifest["feature_tables"]["item"]["counts"]
    assert counts["kept"] == first.num_items - 1  # all but the item that nobody was shown, which is given again
    assert counts["without"] == counts["unused"] == 0


@pytest.fixture(scope="module")
def yesterday(tmp_path_factory):
    log = rich_log(5, 6)
    tables = {"items": item_rows(log, 1), "users": user_rows(log, 2)}
    folder = tmp_path_factory.mktemp("yesterday")
    data = recpo.prepare(between(log, 0, 5), folder / "prepared", **tables, **FEATURES, **OPTIONS)
    return data, between(log, 5, 6), tables


@pytest.mark.slow
def test_features_of_known_items_are_as_of_today_and_when_they_were_available_stays(yesterday, tmp_path):
    data, new, tables = yesterday
    kept = data.table("items.parquet").to_pandas()
    shown = kept.loc[kept["train_count"] > 0, "item_id"].iloc[0]
    waits = kept.loc[kept["item_id"] == 2001, "item_id"].iloc[0]
    vocabulary = data.vocabulary("item", "author").to_pylist()
    changed = tables["items"].filter(pc.is_in(tables["items"]["item_id"], pa.array([shown, waits])))
    now = START_MS + 40 * DAY_MS
    changed = changed.set_column(1, "author", pa.array([vocabulary[-1], "nobody knows"]))
    for name in ("born", "gone"):
        changed = changed.set_column(changed.schema.get_field_index(name), name, pa.array([now, now]))
    extended = recpo.prepare(
        new, tmp_path / "out", extends=data, items=changed, users=tables["users"].slice(0, 0), **ENGINE
    )
    place = {item: number for number, item in enumerate(kept["item_id"])}
    before, codes = data.item_features().codes[1:, 0], extended.item_features().codes[1:, 0]
    assert codes[place[shown]] == len(vocabulary) + 1
    assert codes[place[waits]] == 1
    others = [number for item, number in place.items() if item not in (shown, waits)]
    assert (codes[others] == before[others]).all()
    rows = extended.table("items.parquet").to_pandas()
    available = rows.set_index("item_id")["available_from"]
    first = kept.set_index("item_id")["available_from"]
    assert available[waits] == now
    assert available[shown] == first[shown] or np.isnan(first[shown])
    ends, ended = (table.set_index("item_id")["available_until"] for table in (rows, kept))
    assert ends[shown] == ends[waits] == now, "an offer may end at another time than was said"
    others = ended.index.difference([shown, waits])
    assert (ends[others].fillna(0) >= ended[others].fillna(0)).all()


def test_tables_that_yesterday_did_not_have_or_that_are_left_out_are_refused(yesterday, tmp_path):
    data, new, tables = yesterday
    with refused("missing_option", "users"):
        recpo.prepare(new, tmp_path / "out", extends=data, items=tables["items"])
    other = FeatureColumns(item=(Category("author"),))
    with refused("mismatch", "features"):
        recpo.prepare(new, tmp_path / "out", extends=data, features=other, **tables)
    place = tables["items"].schema.get_field_index("author")
    numbers = tables["items"].set_column(place, "author", pa.array(range(len(tables["items"]))))
    with refused("mismatch", "author"):
        recpo.prepare(new, tmp_path / "out", extends=data, items=numbers, users=tables["users"])
    for column in ("is_like", "slot"):
        with refused("missing_column", column):
            recpo.prepare(new.drop_columns([column]), tmp_path / "out", extends=data, **tables)
    cast = new.set_column(new.schema.get_field_index("slot"), "slot", pa.array(range(len(new))))
    with refused("mismatch", "slot"):
        recpo.prepare(cast, tmp_path / "out", extends=data, **tables)
    assert not (tmp_path / "out").exists()
