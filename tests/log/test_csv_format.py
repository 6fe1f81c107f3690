"""Text files with other delimiters, and without a header line."""

import pandas as pd
import pyarrow.parquet as pq
import pytest

import recpo
from recpo.cli.main import main
from recpo.log.csv_files import CsvFormat, csv_to_parquet
from recpo.log.prepared import Prepared
from recpo.verbs.init import preparation_of
from tests.refusals import refused

NAMES = ("user_id", "item_id", "timestamp", "label")
ROWS = [("1", "a b", "1714500000", "4.5"), ("2", 'say "x"', "1714500001", "3"), ("3", "c:d", "1714500002", "")]


def write(file, delimiter, named=True):
    lines = [NAMES, *ROWS] if named else ROWS
    file.write_text("".join(delimiter.join(line) + "\n" for line in lines), encoding="utf-8")
    return file


def read(file, form):
    staged = file.with_name("staged.parquet")
    names, faults, left_out, _ = csv_to_parquet(file, staged, {name: name for name in NAMES}, form)
    assert (names, faults, left_out) == (list(NAMES), [], [])
    return pq.read_table(staged).to_pydict()


@pytest.mark.parametrize(
    ("name", "delimiter", "form"),
    [
        ("log.csv", ";", CsvFormat(";")),
        ("log.tsv", "\t", CsvFormat()),
        ("log.inter", "\t", CsvFormat()),
        ("log.dat", "::", CsvFormat("::")),
        ("log.csv", "||", CsvFormat("||")),
    ],
)
def test_a_delimiter_is_given_or_follows_from_the_name(tmp_path, name, delimiter, form):
    table = read(write(tmp_path / name, delimiter), form)
    assert table["user_id"] == [1, 2, 3]
    assert table["item_id"] == ([row[1] for row in ROWS] if len(delimiter) > 1 else ["a b", 'say "x"', "c:d"])
    assert table["label"] == [4.5, 3.0, None]


def test_names_stand_in_for_the_first_line(tmp_path):
    file = write(tmp_path / "log.dat", "::", named=False)
    assert read(file, CsvFormat("::", NAMES))["timestamp"] == [1714500000, 1714500001, 1714500002]
    file.write_text(file.read_text() + "9::e\n")
    _, (fault,), left_out, _ = csv_to_parquet(file, tmp_path / "staged", {"user_id": "user_id"}, CsvFormat("::", NAMES))
    assert left_out == [3]
    assert (fault.code, fault.count, fault.examples[0].row) == ("wrong_shape", 1, 3)


def test_a_delimiter_that_two_blocks_share_is_one(tmp_path):
    rows = 400_000  # blocks of Arrow have a megabyte
    (tmp_path / "log.dat").write_text("user_id::item_id\n" + "".join(f"{n}::{n % 7}\n" for n in range(rows)))
    names, faults, *_ = csv_to_parquet(
        tmp_path / "log.dat", tmp_path / "staged", {"user_id": "user_id", "item_id": "item_id"}, CsvFormat("::")
    )
    assert (names, faults) == (["user_id", "item_id"], [])
    assert pq.read_table(tmp_path / "staged")["user_id"].to_pylist() == list(range(rows))


@pytest.mark.parametrize(
    ("wrong", "code", "field"),
    [
        ({"delimiter": ""}, "bad_value", "csv.delimiter"),
        ({"delimiter": "\n"}, "bad_value", "csv.delimiter"),
        ({"delimiter": "→"}, "unsupported", "csv.delimiter"),
        ({"names": ("a", "a")}, "duplicate", "csv.names"),
    ],
)
def test_formats_that_cannot_be(wrong, code, field):
    with refused(code, field):
        CsvFormat(**wrong)


@pytest.mark.slow
def test_ratings_of_movielens_one_million_and_of_recbole_are_prepared(tmp_path):
    events = [
        (user, 1 + (user * step) % 7, 1 + step % 5, 978300000 + 1000 * step) for user in (1, 2, 3) for step in range(6)
    ]
    (tmp_path / "ratings.dat").write_text("".join("::".join(map(str, event)) + "\n" for event in events))
    head = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    (tmp_path / "ml.inter").write_text(head + "".join("\t".join(map(str, event)) + "\n" for event in events))
    named = ["--csv.delimiter", "::", "--csv.names", "[userId, movieId, rating, timestamp]"]
    common = ["--split", "LeaveLastOut", "--label", "NumericColumn", "--label.low", "0.5", "--label.high", "5"]
    for preset, log, options in (("movielens", "ratings.dat", named), ("recbole", "ml.inter", [])):
        out = tmp_path / preset
        words = ["--log", str(tmp_path / log), "--out", str(out), "--preset", preset, *options, *common]
        assert main(["prepare", *words]) == 0
        assert Prepared.open(out).manifest["counts"]["read"] == len(events)


@pytest.mark.parametrize(
    ("delimiters", "title"), [((";", ";"), "a, b"), ((";", ","), "a b"), ((",", ";"), "a, b"), (("\t", "|"), "a;b")]
)
def test_each_table_is_read_with_the_delimiter_of_its_first_line(tmp_path, delimiters, title):
    log, items = (["user id", "item id", "ts"], ["item id", "title"])
    rows = [[f"u{n % 20}", f"i{n % 7}", 1_714_500_000 + 3_600 * n] for n in range(300)]
    pd.DataFrame(rows, columns=log).to_csv(tmp_path / "log.csv", sep=delimiters[0], index=False)
    table = pd.DataFrame([[f"i{n}", title] for n in range(7)], columns=items)
    table.to_csv(tmp_path / "items.csv", sep=delimiters[1], index=False)
    found = recpo.init(tmp_path, tmp_path / "out")
    assert found.tables == {"item": str(tmp_path / "items.csv")}
    data = recpo.prepare(**preparation_of(found), items=tmp_path / "items.csv", out=tmp_path / "data", progress=False)
    assert [feature.name for feature in data.feature_schema.item] == ["title"]
