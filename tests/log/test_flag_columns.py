"""Flags that are read from values: ``dislike: {column: thumb, equals: down}``, behaviors and labels likewise."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import recpo
from recpo.base.errors import RecpoError
from recpo.cli.main import parse
from recpo.log.schema import Columns, FlagColumn
from recpo.log.shaping import BinaryColumn
from recpo.verbs.prepare import Prepare
from tests.log.conftest import DAY_MS, START_MS, make_log
from tests.refusals import refused

QUICK = {"memory_limit": "512MB", "threads": 1}
THUMBS = Columns(dislike=FlagColumn("thumb", "down"))
LIKE = {"like": FlagColumn("thumb", ("up", "superb"))}


def rated(**changes):
    """The log of the other tests with thumbs: about 3 % down, 20 % up, the rest null; and the same as flags."""
    log, random = make_log(**changes), np.random.default_rng(1)
    down = log["dislike"].to_numpy(zero_copy_only=False)
    up = ~down & (random.random(len(down)) < 0.2)
    words = np.where(up, np.where(random.random(len(down)) < 0.1, "superb", "up"), "")
    words = np.where(down, "down", words)
    thumb = pa.array([word or None for word in words.tolist()])
    return log.drop_columns(["dislike"]).append_column("thumb", thumb), log.append_column("like", pa.array(up))


def shards(data):
    return {file.name: file.read_bytes() for file in sorted(data.root.rglob("*.parquet"))}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "dictionary", "csv"])
def test_texts_give_the_same_bytes_as_flags(tmp_path, kind):
    texts, flags = rated()
    if kind == "dictionary":
        texts = texts.set_column(texts.column_names.index("thumb"), "thumb", texts["thumb"].dictionary_encode())
    if kind == "csv":
        for name, table in (("texts", texts), ("flags", flags)):
            pa.csv.write_csv(table, tmp_path / f"{name}.csv")
        texts, flags = tmp_path / "texts.csv", tmp_path / "flags.csv"
    one = recpo.prepare(texts, tmp_path / "one", columns=THUMBS, behaviors=LIKE, **QUICK)
    two = recpo.prepare(flags, tmp_path / "two", behaviors={"like": "like"}, **QUICK)
    assert shards(one) == shards(two)
    assert one.manifest["counts"]["splits"]["train"]["disliked"] > 0
    assert one.manifest["columns"]["dislike"] == "thumb"
    assert one.manifest["config"]["columns"]["dislike"] == {"column": "thumb", "equals": ["down"]}


@pytest.mark.slow
def test_a_label_of_texts_is_unknown_where_the_text_is_missing(tmp_path):
    columns = Columns(dislike=FlagColumn("thumb", "down"), label=FlagColumn("thumb", ("up", "superb")))
    data = recpo.prepare(rated()[0], tmp_path / "out", columns=columns, label=BinaryColumn(), **QUICK)
    counts = data.manifest["counts"]["splits"]["train"]
    assert min(counts["positive"], counts["disliked"]) > 0
    assert counts["unknown"] > counts["positive"] > counts["disliked"]


@pytest.mark.slow
def test_words_for_a_missing_value_and_spaces_in_text_files(tmp_path):
    log, _ = rated()
    thumb = pc.fill_null(pc.binary_join_element_wise(" ", log["thumb"], " ", ""), "null")
    log = log.set_column(log.column_names.index("thumb"), "thumb", thumb)
    pa.csv.write_csv(log, tmp_path / "log.csv")
    data = recpo.prepare(tmp_path / "log.csv", tmp_path / "out", columns=THUMBS, **QUICK)
    missing = data.manifest["counts"]["neutralized"]["dislike: missing, taken as false"]
    assert missing == sum(word == "null" for word in thumb.to_pylist())
    assert data.manifest["counts"]["splits"]["train"]["disliked"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_numbers_and_a_column_that_is_also_the_label(tmp_path, suffix):
    log = make_log().drop_columns(["dislike"])
    stars = np.random.default_rng(0).integers(1, 6, log.num_rows) * 1.0
    log = log.append_column("stars", pa.array(stars))
    (pa.csv.write_csv if suffix == "csv" else pq.write_table)(log, tmp_path / f"log.{suffix}")
    columns = Columns(label="stars", dislike=FlagColumn("stars", (1, 2)))
    label = recpo.NumericColumn(low=1, high=5)
    data = recpo.prepare(tmp_path / f"log.{suffix}", tmp_path / "out", columns=columns, label=label, **QUICK)
    counts = data.manifest["counts"]["splits"]
    assert sum(period["disliked"] for period in counts.values()) == pytest.approx((stars <= 2).sum(), rel=0.05)


def test_a_value_that_no_row_has_is_one_fault_that_names_the_values(tmp_path):
    columns = Columns(dislike=FlagColumn("thumb", "Down"))
    with refused("unknown_name", "thumb"):
        recpo.prepare(rated()[0], tmp_path / "out", columns=columns, **QUICK)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_texts_without_their_meaning_are_one_fault_for_all_files(tmp_path, suffix):
    log, _ = rated()
    for day in range(12):
        part, file = log.slice(day * 100, 100), tmp_path / f"day-{day:02}.{suffix}"
        (pa.csv.write_csv if suffix == "csv" else pq.write_table)(part, file)
    with pytest.raises(RecpoError) as caught:
        recpo.prepare(str(tmp_path / f"*.{suffix}"), tmp_path / "out", columns=Columns(dislike="thumb"), **QUICK)
    message = str(caught.value)
    assert "1 fault " in message
    assert f"day-00.{suffix}, day-01.{suffix}, day-02.{suffix} and 9 more files, column thumb: " in message
    assert "columns.dislike: {column: thumb, equals: VALUE}" in message


@pytest.mark.slow
def test_an_extension_keeps_the_values_and_may_lack_them(tmp_path):
    log, _ = rated(days=8)
    time = log["timestamp"].to_numpy()
    before, after = (
        log.filter(pa.array(mask)) for mask in (time < START_MS + 7 * DAY_MS, time >= START_MS + 7 * DAY_MS)
    )
    data = recpo.prepare(before, tmp_path / "one", columns=THUMBS, behaviors=LIKE, **QUICK)
    later = after.set_column(after.column_names.index("thumb"), "thumb", pa.array(["up"] * after.num_rows))
    two = recpo.prepare(later, tmp_path / "two", extends=data, columns=THUMBS, behaviors=LIKE, **QUICK)
    assert two.manifest["config"]["behaviors"] == {"like": {"column": "thumb", "equals": ["up", "superb"]}}
    assert two.manifest["counts"]["splits"]["test"]["behaviors"]["like"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_grades_of_texts_give_the_same_labels_as_numbers(tmp_path, suffix):
    grades = {"cart": 0.5, "purchase": 1.0}
    log, random = make_log(), np.random.default_rng(2)
    kinds = random.choice(["view", "cart", "purchase"], log.num_rows, p=[0.7, 0.2, 0.1]).tolist()
    texts = log.append_column("event", pa.array(kinds))
    numbers = log.append_column("label", pa.array([grades.get(kind, 0.0) for kind in kinds]))
    label = recpo.NumericColumn(low=0, high=1)
    for name, table in (("texts", texts), ("numbers", numbers)):
        (pa.csv.write_csv if suffix == "csv" else pq.write_table)(table, tmp_path / f"{name}.{suffix}")
    read = Columns(label=FlagColumn("event", grades))
    one = recpo.prepare(tmp_path / f"texts.{suffix}", tmp_path / "one", columns=read, label=label, **QUICK)
    two = recpo.prepare(tmp_path / f"numbers.{suffix}", tmp_path / "two", label=label, **QUICK)
    assert shards(one) == shards(two)
    assert one.manifest["config"]["columns"]["label"] == {"column": "event", "equals": grades}
    other = Columns(label=FlagColumn("event", {"cart": 1.0, "purchase": 1.0}))
    three = recpo.prepare(tmp_path / f"texts.{suffix}", tmp_path / "three", columns=other, label=label, **QUICK)
    with refused("mismatch", "feedback"):
        one.feedback.validate_same(three.feedback, "one", "three")


def test_grades_of_codes_from_the_command_line():
    words = ["log", "--out", "out", "--columns.label", "{column: action, equals: {3: 0.5, 4: 1}}"]
    label = parse(Prepare, words).columns.label
    assert (label.grades, label.numbers) == ({"3": 0.5, "4": 1.0}, (3.0, 4.0))


def test_only_a_label_has_grades():
    graded = FlagColumn("thumb", {"down": 0.5})
    for role in ("dislike", "is_random"):
        with refused("bad_value", f"columns.{role}"):
            Columns(**{role: graded})
    with refused("bad_value", "behaviors.like"):
        recpo.prepare(rated()[0], "out", behaviors={"like": graded}, **QUICK)


@pytest.mark.parametrize("equals", ["", (), " ", {}, {"up": 0.0}, {"up": 1.5}, {"": 1.0}])
def test_no_value_is_refused(equals):
    with refused("bad_value", "thumb"):
        FlagColumn("thumb", equals)
