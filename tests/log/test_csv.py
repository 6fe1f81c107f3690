"""CSV files: types from the whole file, faults with row and value, gzip, encodings."""

import gzip
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import recpo
from recpo.base.errors import RecpoError
from recpo.log.csv_files import CsvFormat, csv_to_parquet, read_ids, row_in_file
from recpo.log.inspection import inspect_log
from recpo.log.schema import Columns
from recpo.log.shaping import EveryEvent
from recpo.verbs.init import preparation_of
from tests.refusals import refused

MAPPING = {name: name for name in ("user_id", "item_id", "timestamp", "watch_time", "dislike", "label")}


def read(tmp_path, text, name="log.csv", encoding="utf-8"):
    content = text if isinstance(text, bytes) else text.encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    names, faults, left_out, _ = csv_to_parquet(tmp_path / name, tmp_path / "staged.parquet", MAPPING, CsvFormat())
    return pq.read_table(tmp_path / "staged.parquet"), [str(fault) for fault in faults], left_out, names


@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz", "gzip-inside.csv"])
def test_columns_that_are_used_with_the_type_of_all_their_values(tmp_path, name):
    text = "user_id,other,item_id,timestamp,dislike,watch_time\n7,x,a,1,True,1\n8,y,1,2,,2.5\n9,z,b,3,FALSE, 3 \n"
    content = gzip.compress(text.encode()) if name == "gzip-inside.csv" else text
    table, faults, left_out, names = read(tmp_path, content, name)
    assert (faults, left_out) == ([], [])
    assert names == ["user_id", "other", "item_id", "timestamp", "dislike", "watch_time"]
    assert table.schema.types == [pa.int64(), pa.string(), pa.int64(), pa.float64(), pa.bool_()]
    assert table.to_pydict() == {
        "user_id": [7, 8, 9],
        "item_id": ["a", "1", "b"],
        "timestamp": [1, 2, 3],
        "watch_time": [1.0, 2.5, 3.0],
        "dislike": [True, None, False],
    }


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["1", "2"], [1, 2]),
        (["007", "7"], ["007", "7"]),
        (["1", "", '""'], [1, None, None]),
        (["a", "", '""'], ["a", None, None]),
        (["a", r"\N", "NULL", " null ", "NULLA"], ["a", None, None, None, "NULLA"]),
        (["1", r"\N", "<NA>"], [1, None, None]),
        (["1714500000000000000", "-3"], [1714500000000000000, -3]),
        (["99999999999999999999", "1"], ["99999999999999999999", "1"]),
        (["1.0", "2"], ["1.0", "2"]),
        (['"a,b"', '"a ""b"""'], ["a,b", 'a "b"']),
        (['"two\nlines"', "b"], ["two\nlines", "b"]),
    ],
)
def test_ids_keep_what_they_are_and_empty_text_is_none(tmp_path, values, expected):
    table, faults, *_ = read(tmp_path, "user_id,item_id\n" + "".join(f"{value},1\n" for value in values))
    assert faults == []
    assert table["user_id"].to_pylist() == expected


@pytest.mark.parametrize(
    ("column", "values", "expected"),
    [
        ("watch_time", ["1e3", "+2", ".5", "-inf", "NaN", "NA", "null", ""], [1e3, 2, 0.5, float("-inf")] + [None] * 4),
        ("label", ["true", "2", "False"], [1, 2, 0]),
        ("timestamp", ["1714500000.5", "1714500001"], [1714500000.5, 1714500001]),
        ("timestamp", ["2024-05-01 12:00:00", "2024-05-01T12:00:00+08:00"], None),
    ],
)
def test_numbers_flags_and_times(tmp_path, column, values, expected):
    table, faults, *_ = read(tmp_path, f"user_id,{column}\n" + "".join(f"1,{value}\n" for value in values))
    assert faults == []
    assert table[column].to_pylist() == (expected or values)


def test_a_type_that_shows_late_is_the_type_of_the_whole_file(tmp_path):
    late = "".join("1,1\n" for _ in range(300_000))  # more than the first block of the reader
    table, faults, *_ = read(tmp_path, f"user_id,watch_time\n{late}x,2.5\n")
    assert faults == []
    assert table.schema.types == [pa.string(), pa.float64()]
    assert table.num_rows == 300_001


def test_words_in_a_column_of_numbers_are_named_with_their_rows(tmp_path):
    rows = ["1,1,5,0", "1,1,lots,0", "1,1,6,yes", "1,1,true,1"]
    _, faults, *_ = read(tmp_path, "user_id,item_id,watch_time,dislike\n" + "\n".join(rows))
    assert faults == [
        "log.csv, column watch_time: 2 rows: not a number [first: row 1 ('lots'), row 3 ('true')]; expected a number: "
        "fix or empty these values",
        "log.csv, column dislike: 1 row: not a number [first: row 2 ('yes')]; expected a number, or true and false: "
        "fix or empty these values, or say which values mean true: columns.dislike: {column: dislike, equals: VALUE}",
    ]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (["1", "2", "oops", "3"], ["user_id: 1 row", "row 2 ('oops')", "the other 3 ids"]),
        (["1", "2", "3.0"], ["row 2 ('3.0')"]),
        (["1", "2", "007"], []),  # zeros are meant
        (["1", "2", ""], []),
        (["1", "b", "c", "2"], []),  # strings, some of which look like numbers
    ],
)
def test_a_word_that_turns_integer_ids_into_strings_is_named_with_its_row(tmp_path, values, said):
    (tmp_path / "log.csv").write_text("user_id,item_id\n" + "".join(f"{value},1\n" for value in values))
    *_, warnings = csv_to_parquet(tmp_path / "log.csv", tmp_path / "staged.parquet", MAPPING, CsvFormat())
    assert len(warnings) == bool(said)
    assert all(part in warnings[0] for part in said)


def test_ids_are_read_in_the_type_of_the_catalog(tmp_path):
    file = tmp_path / "ids.csv"
    file.write_text("name,item_id\nx,007\ny,7\n")
    assert read_ids(file, "item_id", pa.string()).to_pylist() == ["007", "7"]
    with refused("wrong_type", "item_id"):
        read_ids(file, "item_id", pa.int64())
    with refused("missing_column", "track"):
        read_ids(file, "track", pa.int64())
    file.write_text("name,item_id\nx,8\ny,-7\n")
    assert read_ids(file, "item_id", pa.int32()).to_pylist() == [8, -7]
    file.write_text("name,item_id\nx,8\ny,7,3\n")
    with refused("wrong_shape", "ids.csv"):
        read_ids(file, "item_id", pa.int64())


def test_rows_of_another_width_hide_no_other_fault(tmp_path):
    rows = ["1,1,5", "2", "1,1,lots", "1,1,2,3,4", "1,1,6", "1,1,more"]
    table, faults, left_out, _ = read(tmp_path, "user_id,item_id,watch_time\n" + "\n".join(rows) + "\n")
    assert left_out == [1, 3]
    assert table.num_rows == 4
    assert "2 rows: another number of values than the 3 columns" in faults[0]
    assert "[first: row 1 ('1 values'), row 3 ('5 values')]" in faults[0]
    assert "2 rows: not a number [first: row 2 ('lots'), row 5 ('more')]" in faults[1]
    assert [row_in_file(row, left_out) for row in range(4)] == [0, 2, 4, 5]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_wide_encodings_are_refused(tmp_path, encoding):
    with refused("unsupported", "encoding"):
        read(tmp_path, "user_id,item_id\n1,2\n", encoding=encoding)


def test_a_byte_order_mark_is_not_part_of_the_first_name(tmp_path):
    table, _, _, names = read(tmp_path, "user_id,item_id\n1,2\n", encoding="utf-8-sig")
    assert names == ["user_id", "item_id"]
    assert table.to_pydict() == {"user_id": [1], "item_id": [2]}


@pytest.mark.parametrize("text", ["", "\n\n", ",,\n1,2,3\n"])
def test_a_file_without_names_is_refused(tmp_path, text):
    with refused("empty", "first line"):
        read(tmp_path, text)


@pytest.mark.parametrize(("line", "name"), [(2, "log.csv"), (900, "log.csv"), (900, "log.csv.gz")])
def test_the_byte_that_is_not_utf_8_is_named(tmp_path, line, name):
    lines = [b"user_id,item_id,ts\n", *[b"1,2,1700000000\n"] * 1000]
    lines[line - 1] = b"1,K\xe4se,1700000000\n"
    (tmp_path / name).write_bytes(gzip.compress(b"".join(lines)) if name.endswith(".gz") else b"".join(lines))
    for read_log in (inspect_log, lambda log: recpo.prepare(log, tmp_path / "out", label=EveryEvent())):
        with pytest.raises(RecpoError, match=f"line {line:,} has 0xe4 as its byte 4;"):
            read_log(tmp_path / name)


@pytest.mark.parametrize("first", [f"{2**63}", "003.0001", "1000213.176722560", "00"])
def test_ids_that_no_number_holds_are_counted_as_texts(tmp_path, first):
    lines = [f"{first}{number % 9},{number},{1_700_000_000 + number}\n" for number in range(90)]
    (tmp_path / "log.csv").write_text("user_id,item_id,ts\n" + "".join(lines))
    found = inspect_log(tmp_path)
    assert (found.counts.users, found.column("user_id")) == (9, "user_id")
    assert found.sample.table["user_id"][0].as_py() == f"{first}0"


@pytest.mark.parametrize("width", ["7,a\xc7,1,extra", "7,a\xc7,1"])
def test_bytes_that_are_not_utf_8_are_refused_without_a_traceback(tmp_path, capfd, width):
    """Arrow decodes rows of another width in a callback, where Python can only print what fails."""
    content = b"user_id,item_id,timestamp\n" + width.encode("latin-1") + b"\n8,b,2\n"
    with pytest.raises((pa.ArrowInvalid, RecpoError)):
        read(tmp_path, content)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_two_columns_of_one_name_are_asked_about_if_they_are_read(tmp_path, suffix):
    rows = [(n % 7, n % 5, 1_700_000_000 + n, n % 2, n % 2) for n in range(60)]
    table = pa.table(list(zip(*rows, strict=True)), names=["user_id", "item_id", "ts", "click", "click"])
    if suffix == "csv":
        lines = [",".join(table.column_names), *(",".join(map(str, row)) for row in rows)]
        (tmp_path / "log.csv").write_text("\n".join(lines))
    else:
        pq.write_table(table, tmp_path / "log.parquet")
    (question,) = inspect_log(tmp_path).questions
    assert "`click`" in question
    assert f"log.{suffix}" in question


def test_what_init_cannot_read_is_named(tmp_path):
    (tmp_path / "log.jsonl").write_text("{}")
    with refused("missing_file", "log") as caught:
        recpo.init(tmp_path)
    assert "log.jsonl" in str(caught.value)
    with refused("wrong_file", "log.jsonl") as caught:
        recpo.init(tmp_path / "log.jsonl")
    assert "pandas.read_json(FILE, lines=True)" in str(caught.value)
    (tmp_path / "ratings.dat").write_text("1::2::3::978300760")
    with refused("missing_file", "log") as caught:
        recpo.init(tmp_path)
    assert f"name the files ({tmp_path / 'ratings.dat'})" in str(caught.value)
    with refused("wrong_type", "log") as caught:
        recpo.init(pa.table({"user_id": [1], "item_id": [1]}))
    assert "Parquet" in str(caught.value)


@pytest.mark.parametrize(
    ("column", "values", "given", "asked", "said"),
    [
        ("enrolled", ["07.01.26", "12.01.26"], {}, "timestamp", "`enrolled` (07.01.26, 12.01.26)"),
        ("date", ["5th of Jan, 2026", "6th of Jan, 2026"], {}, "timestamp", "`date` (5th of Jan, 2026, "),
        ("date", ["20260107", "20260112"], {"time_unit": "order"}, None, "no column says"),
        ("mailed", ["03/02/2026", "11/08/2026"], {}, "timestamp", "may have the day or the month first: pass"),
        ("rating", ["3,5", "1.024,0"], {"time_unit": "none"}, "label", "`rating` (3,5, 1.024,0"),
        ("price", ["3,5", "12,25"], {"time_unit": "none"}, None, "`price` (3,5, 12,25)"),
    ],
)
def test_dates_and_numbers_of_other_forms_are_named(tmp_path, column, values, given, asked, said):
    rows = [f"u{n % 7};i{n % 5};{values[n % 2]}\n" for n in range(60)]
    (tmp_path / "log.csv").write_text(f"user_id;item_id;{column}\n" + "".join(rows))
    found = inspect_log(tmp_path, columns=Columns(**given))
    assert [question.partition(":")[0] for question in found.questions] == ([asked] if asked else [])
    assert any(said in text for text in (found.questions or found.doubts))
    assert not any("is no clock" in doubt for doubt in found.doubts if found.questions)
    assert not any("no column has times" in doubt for doubt in found.doubts)


#: Two moments, as they are written in each order.
MOMENTS = [datetime(2026, 1, 31, 18, 30, tzinfo=UTC), datetime(2026, 2, 1, 6, 5, tzinfo=UTC)]
DATES = [
    (
        "day_first",
        ("31.01.2026 18:30", "1.2.2026 6:05"),
        ("31-Jan-2026 18:30:00", "01-feb-2026 06:05:00"),
        ("Sat, 31 Jan 2026 18:30:00 +0000", "Sun, 01 Feb 2026 07:05:00 +0100"),
    ),
    (
        "month_first",
        ("1/31/2026 6:30 PM", "2/1/2026 6:05 AM"),
        ("January 31, 2026 6:30 p.m.", "February 1, 2026 6:05 a.m."),
        ("Sat Jan 31 18:30:00 +0000 2026", "Sun Feb 01 06:05:00 +0000 2026"),
    ),
    ("year_first", ("20260131183000", "20260201060500")),
    ("year_first", ("202601311830", "202602010605")),
    ("year_first", ("2026-01-31 06:30 PM", "2026-02-01 06:05 AM"), ("2026.01.31 18:30", "2026.02.01 06:05")),
]


def write_dates(folder, forms):
    folder.mkdir()
    written = (forms[n % len(forms)][n % 7 > 4] for n in range(84))
    rows = [f'u{n % 7};i{n % 5};"{moment}"\n' for n, moment in enumerate(written)]
    (folder / "log.csv").write_text("user_id;item_id;when\n" + "".join(rows))
    return folder


@pytest.mark.parametrize(("unit", "form"), [(unit, form) for unit, *forms in DATES for form in forms])
def test_dates_of_other_forms_are_recognized(tmp_path, unit, form):
    found = inspect_log(write_dates(tmp_path / "log", [form])).columns
    assert (found.timestamp, found.time_unit) == ("when", unit)


@pytest.mark.parametrize("dates", DATES)
def test_dates_of_other_forms_are_prepared(tmp_path, dates):
    unit, *forms = dates
    log = write_dates(tmp_path / "log", forms)
    columns = Columns(user_id="user_id", item_id="item_id", timestamp="when", time_unit=unit)
    choice = preparation_of(inspect_log(log, columns=columns)) | {"split": recpo.LeaveLastOut(), "catalog": "log"}
    recpo.prepare(**choice, out=tmp_path / "out", progress=False)
    times = pq.read_table(tmp_path / "out" / "histories.parquet")["timestamp"].cast(pa.int64()).to_pylist()
    assert sorted(set(times)) == [moment.timestamp() * 1000 for moment in MOMENTS]


def test_negative_quantities_are_named(tmp_path):
    """As returns in the rows of an invoice (UCI's Online Retail)."""
    rows = [
        f"C{n // 5},S{n % 9},{-1 if n % 20 == 7 else 1 + n % 6},7/{1 + n % 28}/2017 2:4{n % 10},{n % 11}\n"
        for n in range(300)
    ]
    (tmp_path / "log.csv").write_text("InvoiceNo,StockCode,Quantity,InvoiceDate,CustomerID\n" + "".join(rows))
    found = inspect_log(tmp_path)
    assert (found.columns.user_id, found.columns.item_id, found.columns.time_unit) == (
        "CustomerID",
        "StockCode",
        "month_first",
    )
    assert any(doubt.startswith("`Quantity` (-1 to 6; 7 distinct) has negative numbers") for doubt in found.doubts)


def test_the_first_line_of_a_file_without_numbers_may_have_no_names(tmp_path):
    rows = [f"user_{n % 7}\t2009-05-{1 + n % 28:02d}T23:08:57Z\tartist_{n % 5}\n" for n in range(60)]
    (tmp_path / "log.tsv").write_text("".join(rows))
    (question,) = inspect_log(tmp_path).questions
    assert question.startswith(
        "the first line has no names (user_0, 2009-05-01T23:08:57Z, artist_0): name its 3 columns"
    )


def test_the_digits_of_days_are_a_clock(tmp_path):
    rows = [f"u{n % 7},i{n % 5},202601{1 + n % 28:02d}\n" for n in range(200)]
    (tmp_path / "log.csv").write_text("user_id,item_id,dt\n" + "".join(rows))
    found = inspect_log(tmp_path)
    assert (found.columns.timestamp, found.columns.time_unit, found.counts.days) == ("dt", "year_first", 27)


def test_the_time_of_day_in_a_column_of_its_own_is_named(tmp_path):
    rows = [f"u{n % 7},i{n % 5},2026-01-{1 + n % 28:02d},{n % 24:02d}:05\n" for n in range(60)]
    (tmp_path / "log.csv").write_text("user_id,item_id,date,time\n" + "".join(rows))
    assert any(doubt.startswith("`time` (00:05, 01:05, 02:05) is not read") for doubt in inspect_log(tmp_path).doubts)


def test_parts_of_dates_are_asked_about(tmp_path):
    rows = [f"u{n % 7},i{n % 5},2026,{1 + n % 12},{1 + n % 28}\n" for n in range(60)]
    (tmp_path / "log.csv").write_text("user_id,item_id,Year,Month,Day\n" + "".join(rows))
    (question,) = inspect_log(tmp_path).questions
    assert question.startswith("timestamp: `Year`, `Month`, `Day` are parts of dates")
    assert inspect_log(tmp_path, columns=Columns(time_unit="none")).questions == ()


def test_parts_without_rows_and_with_other_ids_are_one_log(tmp_path):
    names = "user_id,item_id,timestamp\n"
    rows = [f"{number % 7},{number % 5},2026-01-{1 + number % 9:02d}\n" for number in range(60)]
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "0.csv").write_text(names + "".join(rows))
    (tmp_path / "log" / "1.csv").write_text(names)
    (tmp_path / "log" / "2.csv").write_text(names + "".join(row.replace(",3,", ",3X,") for row in rows))
    data = recpo.prepare(tmp_path / "log", out=tmp_path / "out", label=EveryEvent(), progress=False)
    assert sorted(data.table("items.parquet")["item_id"].to_pylist()) == ["0", "1", "2", "3", "3X", "4"]
