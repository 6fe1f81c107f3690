"""Malformed logs through the real ``recpo prepare``: success or one message, no traceback, no partial output."""

import datetime as dt
import decimal
import gzip

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from recpo.cli.main import main
from recpo.log.prepared import Prepared

USERS, EVENTS = 4, 12
ROWS = USERS * EVENTS
START_MS = 1_714_500_000_000


def sound():
    """A small log without faults, as a dictionary of lists."""
    return {
        "user_id": [row // EVENTS for row in range(ROWS)],
        "item_id": [row % 7 for row in range(ROWS)],
        "timestamp": [START_MS + 43_200_000 * (row % EVENTS) + row for row in range(ROWS)],
        "watch_time": [float(row % 5) for row in range(ROWS)],
        "duration": [10.0 + row % 3 for row in range(ROWS)],
        "dislike": [row % 9 == 0 for row in range(ROWS)],
    }


def prepare(folder, capsys, *options, log=None, name="log.parquet"):
    """Runs the verb on what lies in ``folder``; checks what holds for all, and returns the status and what it said."""
    before = sorted(path.name for path in folder.iterdir())
    source = folder / name if log is None else log
    arguments = ["prepare", "--log", str(source), "--out", str(folder / "out"), "--threads", "1", *options]
    status = main([*arguments, "--progress", "false"])  # a traceback would be an exception here
    said = capsys.readouterr().err
    assert status in (0, 1, 2)
    after = sorted(path.name for path in folder.iterdir())
    if status:
        assert said.startswith("error:")
        assert "Traceback" not in said
        assert after == before, "nothing may be left behind"
    else:
        assert after == sorted([*before, "out"])
        Prepared.open(folder / "out").verify()
    return status, said


def write(folder, columns, name="log.parquet"):
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    pq.write_table(table, folder / name)


REPEATED = {
    "null": pa.nulls(ROWS),
    "text": pa.array(["word"] * ROWS),
    "empty text": pa.array([""] * ROWS),
    "long text": pa.array(["x" * 100_000] * ROWS),
    "unicode": pa.array(["ü\u202e\U0001f600\x00'\";--"] * ROWS),
    "binary": pa.array([b"\xff\xfe"] * ROWS),
    "nan": pa.array([float("nan")] * ROWS),
    "infinite": pa.array([float("inf")] * ROWS),
    "minus infinite": pa.array([float("-inf")] * ROWS),
    "negative": pa.array([-5] * ROWS),
    "zero": pa.array([0] * ROWS),
    "huge": pa.array([2**63 - 1] * ROWS),
    "huge unsigned": pa.array([2**64 - 1] * ROWS, pa.uint64()),
    "smallest": pa.array([-(2**63)] * ROWS),
    "huge float": pa.array([1e308] * ROWS),
    "tiny float": pa.array([5e-324] * ROWS),
    "half": pa.array(np.ones(ROWS, np.float16)),
    "int8": pa.array([1] * ROWS, pa.int8()),
    "bool": pa.array([True] * ROWS),
    "half null": pa.array([1, None] * (ROWS // 2)),
    "list": pa.array([[1, 2]] * ROWS),
    "struct": pa.array([{"a": 1}] * ROWS),
    "map": pa.array([[("a", 1)]] * ROWS, pa.map_(pa.string(), pa.int64())),
    "decimal": pa.array([decimal.Decimal("1.50")] * ROWS),
    "date": pa.array([dt.date(2024, 5, 1)] * ROWS),
    "date64": pa.array([dt.date(2024, 5, 1)] * ROWS, pa.date64()),
    "time": pa.array([dt.time(12)] * ROWS),
    "duration type": pa.array([dt.timedelta(seconds=1)] * ROWS),
    "zoned": pa.array([dt.datetime(2024, 5, 1, tzinfo=dt.UTC)] * ROWS, pa.timestamp("us", "Asia/Kathmandu")),
    "nanoseconds": pa.array([START_MS * 10**6] * ROWS, pa.timestamp("ns")),
    "year 1": pa.array([dt.datetime(1, 1, 1)] * ROWS, pa.timestamp("us")),
    "category": pa.array(["a", "b"] * (ROWS // 2)).dictionary_encode(),
    "number category": pa.array([1, 2] * (ROWS // 2)).dictionary_encode(),
    "large text": pa.array(["a"] * ROWS, pa.large_string()),
}


#: one of every kind of column, and the values with which a log is prepared
READ = {
    "user_id": "text, empty text, long text, large text, unicode, negative, zero, huge, huge unsigned, smallest, int8, "
    "half, category, number category",
    "watch_time": "nan, infinite, minus infinite, negative, zero, huge, huge unsigned, smallest, huge float, "
    "tiny float, half, int8, half null, number category, decimal",
    "dislike": "nan, zero, half, int8, bool, half null",
    "timestamp": "date, date64, zoned, nanoseconds",
    "label": "nan, infinite, negative, huge, bool, decimal",
    "propensity": "nan, infinite, negative, huge, decimal",
    "is_random": "nan, bool",
    "request_id": "text, nan, infinite, negative, huge",
}
READ = {column: names.split(", ") for column, names in READ.items()}
OPTIONAL = ("label", "propensity", "is_random", "request_id")
OF_OPTIONAL = ("null", "text", "nan", "infinite", "negative", "huge", "list", "decimal", "bool")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(8))
def test_columns_of_any_value_that_they_may_have(tmp_path, capsys, number):
    """Items have the second half of the values of users, and durations those of watch times."""
    assert max(map(len, READ.values())) == 15
    halves = {"item_id": READ["user_id"][7:], "duration": READ["watch_time"][7:]}
    chosen = {column: REPEATED[names[number % len(names)]] for column, names in (READ | halves).items()}
    write(tmp_path, sound() | chosen | {"timestamp": sound()["timestamp"]})
    assert prepare(tmp_path, capsys)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("values", READ["timestamp"])
def test_one_time_of_any_type_has_no_periods(tmp_path, capsys, values):
    write(tmp_path, sound() | {"timestamp": REPEATED[values]})
    status, said = prepare(tmp_path, capsys)
    assert status == 1
    assert "each period needs events" in said


@pytest.mark.slow
@pytest.mark.parametrize("values", REPEATED)
def test_columns_of_any_other_type_and_value(tmp_path, capsys, values):
    refused = [column for column in READ if values not in READ[column]]
    refused = [column for column in refused if column not in OPTIONAL or values in OF_OPTIONAL]
    write(tmp_path, sound() | dict.fromkeys(refused, REPEATED[values]))
    status, said = prepare(tmp_path, capsys)
    assert status == 1
    assert [column for column in refused if f"column {column}: " not in said] == []


@pytest.mark.parametrize("column", ["user_id", "item_id", "timestamp", "watch_time", "duration"])
def test_missing_columns(tmp_path, capsys, column):
    columns = sound()
    del columns[column]
    write(tmp_path, columns)
    assert prepare(tmp_path, capsys)[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["user_id", "watch_time", "unused"])
def test_two_columns_of_one_name(tmp_path, capsys, name):
    columns = sound() | {"unused": [0] * ROWS}
    table = pa.table(columns)
    write(tmp_path, table.append_column(name, table[name]))
    status, said = prepare(tmp_path, capsys)
    assert status == (name != "unused")
    assert name == "unused" or f"column {name}: 2 columns of this name" in said


UNUSED = [
    "file_row_number",
    "filename",
    "__file",
    "__row",
    "index",
    "select",
    "rowid",
    "period",
    "position",
    "user_index",
]
UNUSED += ["a b", 'a"b', "a'b", "", "ü", "\U0001f600", "x" * 5000, "%s", "a.b", "*", "file_index"]


@pytest.mark.slow
@pytest.mark.parametrize("names", [UNUSED, ["FILENAME", "USER_ID"]])
def test_names_of_columns_that_are_not_used_do_not_matter(tmp_path, capsys, names):
    write(tmp_path, sound() | dict.fromkeys(names, ["x"] * ROWS))
    assert prepare(tmp_path, capsys) == (0, "")


@pytest.mark.slow
def test_names_of_columns_that_are_used(tmp_path, capsys):
    named = {"user_id": "USER", "item_id": "select", "timestamp": "a b", "watch_time": "watched.time"}
    named |= {"duration": 'a"b', "dislike": "ü"}
    write(tmp_path, {named[column]: values for column, values in sound().items()})
    flags = [f"--columns.{column}={name}" for column, name in named.items()]
    assert prepare(tmp_path, capsys, *flags) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["file_row_number", "filename", ""])
def test_names_that_a_used_column_cannot_have(tmp_path, capsys, name):
    columns = sound()
    columns[name] = columns.pop("watch_time")
    write(tmp_path, columns)
    status, said = prepare(tmp_path, capsys, f"--columns.watch_time={name}")
    assert status == 1
    assert not name or "a name that the engines use themselves" in said


def damaged_files():
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(sound()), sink)
    whole = sink.getvalue().to_pybytes()
    yield from ((f"cut at {size}", whole[:size]) for size in (0, 1, 3, 4, 8, 100, len(whole) // 2, len(whole) - 1))
    yield "zeros", bytes(1000)
    yield "text", b"user_id,item_id,timestamp\n1,2,3\n"
    yield "magic only", b"PAR1" + bytes(100) + b"PAR1"
    yield "gzip", gzip.compress(whole)
    yield "appended", whole + b"more"
    yield "twice", whole + whole
    rng = np.random.default_rng(0)
    for number in range(12):
        changed = bytearray(whole)
        for place in rng.integers(0, len(whole), 1 + number % 4):
            changed[place] ^= 1 << int(rng.integers(8))
        yield f"flipped {number}", bytes(changed)


DAMAGED = dict(damaged_files())


@pytest.mark.slow
@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_files(tmp_path, capsys, kind):
    (tmp_path / "log.parquet").write_bytes(DAMAGED[kind])
    prepare(tmp_path, capsys)


def as_csv(columns):
    rows = zip(*columns.values(), strict=True)
    return "\n".join([",".join(columns), *(",".join(map(str, row)) for row in rows)]) + "\n"


SOUND_CSV = as_csv(sound())
FIRST, *REST = SOUND_CSV.splitlines(keepends=True)
CSV = {
    "sound": (SOUND_CSV, 0),
    "no rows": (FIRST, 1),
    "empty": ("", 1),
    "only line ends": ("\n\n\n", 1),
    "no names": ("".join(REST), 1),
    "windows line ends": (SOUND_CSV.replace("\n", "\r\n"), 0),
    "no last line end": (SOUND_CSV.rstrip("\n"), 0),
    "blank lines": (SOUND_CSV.replace("\n", "\n\n"), 0),
    "semicolons": (SOUND_CSV.replace(",", ";"), 1),
    "tabs": (SOUND_CSV.replace(",", "\t"), 1),
    "utf-16": (SOUND_CSV.encode("utf-16"), 1),
    "utf-16 without a mark": (SOUND_CSV.encode("utf-16-le"), 1),
    "utf-8 with a mark": (SOUND_CSV.encode("utf-8-sig"), 0),
    "latin-1 name": (SOUND_CSV.replace("dislike", "k\xe4se").encode("latin-1"), 1),
    "latin-1 value": (FIRST.encode() + "f\xfcnf,1,1714500000000,1,10,0\n".encode("latin-1"), 1),
    "ragged": (SOUND_CSV + "1,2\n", 1),
    "too many": (SOUND_CSV.replace("\n", ",9\n").replace(FIRST.strip() + ",9", FIRST.strip()), 1),
    "open quote": (SOUND_CSV + '"1,2,3\n', 1),
    "quoted": ("\n".join(",".join(f'"{v}"' for v in line.split(",")) for line in SOUND_CSV.splitlines()) + "\n", 0),
    "word": (SOUND_CSV + "1,2,1714500000000,lots,10,0\n", 1),
    "empty user": (SOUND_CSV + ",2,1714500000000,1,10,0\n", 1),
    "quoted empty user": (SOUND_CSV + '"",2,1714500000000,1,10,0\n', 1),
    "empty time": (SOUND_CSV + "1,2,,1,10,0\n", 1),
    "nul bytes": (SOUND_CSV + "1,\x00,1714500000000,1,10,0\n", 0),
    "twice a name": (SOUND_CSV.replace("duration", "watch_time"), 1),
    "a huge number": (SOUND_CSV + f"{'9' * 400},2,1714500000000,1,10,0\n", 0),
    "a huge time": (SOUND_CSV + f"1,2,{'9' * 400},1,10,0\n", 1),
    "true and false": (SOUND_CSV.replace("True", "1").replace("False", "0"), 0),
    "gzip": (gzip.compress(SOUND_CSV.encode()), 0),
    "cut gzip": (gzip.compress(SOUND_CSV.encode())[:-20], 1),
    "parquet": (DAMAGED["appended"], 1),
}


ALIKE = ["sound", "windows line ends", "no last line end", "blank lines", "utf-8 with a mark", "quoted"]
ALIKE += ["true and false", "gzip"]


@pytest.mark.slow
def test_csv_files_with_the_same_rows(tmp_path, capsys):
    """Written in other ways: the second file and all others hold duplicates of the first one's rows."""
    (tmp_path / "log").mkdir()
    for number, kind in enumerate(ALIKE):
        content, expected = CSV[kind]
        assert expected == 0
        (tmp_path / "log" / f"{number}.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert prepare(tmp_path, capsys, log=tmp_path / "log")[0] == 0
    counts = Prepared.open(tmp_path / "out").manifest["counts"]
    assert (counts["read"], sum(counts["dropped"].values())) == (len(ALIKE) * ROWS, (len(ALIKE) - 1) * ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in CSV if kind not in ALIKE])
def test_csv(tmp_path, capsys, kind):
    content, expected = CSV[kind]
    (tmp_path / "log.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert prepare(tmp_path, capsys, name="log.csv")[0] == expected


def test_a_csv_with_several_faults_names_them_all_with_rows(tmp_path, capsys):
    (tmp_path / "log.csv").write_text(
        FIRST + "1,2\n" + "".join(REST) + ",2,1714500000000,1,10,0\n1,1,1714500000000,x,1,0\n"
    )
    _, said = prepare(tmp_path, capsys, name="log.csv")
    assert "3 faults" in said
    assert "[first: row 0 ('2 values')]" in said
    assert f"column watch_time: 1 row: not a number [first: row {ROWS + 2} ('x')]" in said
    assert f"column user_id: 1 row: null key [first: row {ROWS + 1} (null)]" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["log[1].parquet", "a*?ü'b\".parquet"])
def test_names_of_files(tmp_path, capsys, name):
    write(tmp_path, sound(), name)
    assert prepare(tmp_path, capsys, name=name) == (0, "")


@pytest.mark.slow
def test_names_of_directories_are_not_columns(tmp_path, capsys):
    (tmp_path / "user_id=77").mkdir()
    write(tmp_path / "user_id=77", sound())
    assert prepare(tmp_path, capsys, log=tmp_path / "user_id=77") == (0, "")
    assert Prepared.open(tmp_path / "out").table("users.parquet")["user_id"].to_pylist() == list(range(USERS))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["log.parquet", "log.csv"])
def test_relative_paths(tmp_path, capsys, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    late = sound() | {"timestamp": [time // 1000 for time in sound()["timestamp"]]}
    write(tmp_path, late)
    (tmp_path / "log.csv").write_text(as_csv(late))
    status = main(["prepare", "--log", name, "--out", "out"])
    said = capsys.readouterr().err
    assert status == 1
    assert f"{name}, column timestamp: {ROWS} rows: unparseable or impossible time [first: row 0 " in said
    assert main(["prepare", "--log", name, "--out", "out", "--columns.time_unit", "s"]) == 0


@pytest.mark.parametrize(
    "options",
    [
        *(["--threads=0"], ["--threads=-1"], ["--threads=x"], ["--memory_limit=lots"], ["--memory_limit=0GB"]),
        *(["--max_context=0"], ["--rows_per_shard=0"], ["--max_watch_time=nan"], ["--max_watch_time=-1"]),
        *(["--preset=unknown"], ["--split=Unknown"], ["--label=Unknown"], ["--columns.user_id=nobody"]),
        *(["--feedback.positive_threshold=2"], ["--work=/dev/null/x"], ["--out=/dev/null"], ["--log=none.parquet"]),
    ],
    ids=" ".join,
)
def test_options(tmp_path, capsys, options):
    write(tmp_path, sound())
    assert prepare(tmp_path, capsys, *options)[0] in (1, 2)


@pytest.mark.parametrize("target", ["log", "log/out", ".", "link"])
def test_the_log_is_never_replaced(tmp_path, capsys, target):
    (tmp_path / "log").mkdir()
    (tmp_path / "link").symlink_to("log")
    write(tmp_path / "log", sound())
    before = (tmp_path / "log/log.parquet").read_bytes()
    out = str(tmp_path / target)
    assert prepare(tmp_path, capsys, f"--out={out}", "--overwrite=true", log=tmp_path / "log")[0] == 1
    assert (tmp_path / "log/log.parquet").read_bytes() == before


VALUE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["2024-05-01", "12:00", "1e400", "NaN", "-0", "0x10", "\uff11", "=1+1"]),
)


@pytest.mark.slow
@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(data=st.data(), kind=st.sampled_from(["parquet", "csv"]))
def test_values_of_any_kind(tmp_path_factory, capsys, data, kind):
    folder = tmp_path_factory.mktemp("values")
    columns = sound()
    for name in data.draw(st.lists(st.sampled_from(list(columns)), min_size=1, max_size=3, unique=True)):
        row, value = data.draw(st.integers(0, ROWS - 1)), data.draw(VALUE)
        columns[name] = [*columns[name][:row], value, *columns[name][row + 1 :]]
    if kind == "csv":
        (folder / "log.csv").write_bytes(as_csv(columns).encode(errors="surrogatepass"))
    else:
        try:
            write(folder, columns)
        except (pa.ArrowException, OverflowError, UnicodeError):
            return  # no Parquet file holds these values
    prepare(folder, capsys, name=f"log.{kind}")
