"""``recpo init`` on logs of many formats: its findings and questions, and that its configurations run."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

import recpo
from recpo.base.feedback import HIGHEST, LOWEST
from recpo.cli.main import main
from recpo.log.feature_columns import FeatureColumns
from recpo.log.inspection import inspect_log
from recpo.log.schema import Columns
from recpo.log.splits import TemporalSplit
from recpo.verbs.fit import _decided_by
from recpo.verbs.init import _yaml, preparation_of
from recpo.verbs.verb import configurations
from tests.refusals import refused

DAYS, USERS, ITEMS = 12, 30, 25
QUICK = ["--trainer.max_steps", "1", "--trainer.limit_val_batches", "1", "--trainer.accelerator", "cpu"]
QUICK += ["--policy.init_args.dim", "8", "--policy.init_args.layers", "1", "--trainer.enable_progress_bar", "false"]


def events(number=600, seed=0):
    """Users, items, seconds, played and whole milliseconds, ratings and flags."""
    random = np.random.default_rng(seed)
    length = random.integers(8_000, 120_000, ITEMS)
    item = random.integers(0, ITEMS, number)
    return pd.DataFrame(
        {
            "user": random.integers(0, USERS, number) + 100,
            "item": item + 7,
            "second": np.sort(random.integers(0, DAYS * 86_400, number)) + 1_700_000_000,
            "played": (length[item] * random.uniform(0, 1.2, number)).astype(int),
            "length": length[item],
            "rating": random.integers(1, 6, number),
            "flag": (random.uniform(size=number) < 0.1).astype(int),
        }
    )


def kuairand(root):
    table = events()
    log = pd.DataFrame({"user_id": table["user"], "video_id": table["item"], "time_ms": table["second"] * 1000})
    log = log.assign(
        date=20220408, hourmin=1200, is_click=table["flag"], is_like=1 - table["flag"], is_hate=table["flag"]
    )
    log = log.assign(long_view=table["flag"], play_time_ms=table["played"], duration_ms=table["length"], is_rand=0)
    log.assign(tab=1).to_csv(root / "log_standard.csv", index=False)
    tags = pd.DataFrame({"video_id": np.arange(ITEMS) + 7, "author_id": 1, "tag": "3,4"})
    tags.to_csv(root / "video_features_basic.csv", index=False)
    tags[["video_id"]].assign(show_cnt=5).to_csv(root / "video_features_statistic.csv", index=False)
    pd.DataFrame({"user_id": np.arange(USERS) + 100, "onehot_feat0": 1}).to_csv(root / "user_features.csv", index=False)
    return root


def movielens(root):
    table = events().rename(columns={"user": "userId", "item": "movieId", "second": "timestamp"})
    table[["userId", "movieId", "rating", "timestamp"]].assign(rating=table["rating"] - 0.5).to_csv(
        root / "ratings.csv", index=False
    )
    movies = pd.DataFrame({"movieId": np.arange(ITEMS) + 7, "title": "A, B", "genres": "Comedy|Drama"})
    movies.to_csv(root / "movies.csv", index=False)
    return root


def movielens_1m(root):
    rows = events()[["user", "item", "rating", "second"]].astype(str).agg("::".join, axis=1)
    (root / "ratings.dat").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return root / "ratings.dat"


def recbole(root):
    table = events()[["user", "item", "rating", "second"]]
    table.columns = ["user_id:token", "item_id:token", "rating:float", "timestamp:float"]
    table.to_csv(root / "ml-100k.inter", sep="\t", index=False)
    (root / "ml-100k.item").write_text("item_id:token\ttitle:token_seq\n7\tA\n", encoding="utf-8")
    return root


def kuairec(root):
    table = events()
    log = pd.DataFrame({"user_id": table["user"], "video_id": table["item"], "play_duration": table["played"]})
    log["video_duration"] = table["length"]
    log["time"] = [str(datetime.fromtimestamp(second, UTC))[:19] + ".5" for second in table["second"]]
    log = log.assign(date=20200705, timestamp=table["second"] + 0.5, watch_ratio=table["played"] / table["length"])
    log.to_csv(root / "big_matrix.csv", index=False)
    return root / "big_matrix.csv"


def listens(root):
    """As Yambda: seconds from another begin than 1970, a played share, lengths in seconds."""
    table = events()
    log = pd.DataFrame({"uid": table["user"], "item_id": table["item"], "timestamp": table["second"] - 1_700_000_000})
    log = log.assign(is_organic=table["flag"], track_length_seconds=(table["length"] // 1000).astype("uint32"))
    log["played_ratio_pct"] = np.minimum(100 * table["played"] // table["length"], 100).astype("uint16")
    log.to_parquet(root / "listens.parquet")
    return root / "listens.parquet"


def purchases(root):
    table = events()
    log = pd.DataFrame({"Customer ID": ["c" + str(user) for user in table["user"]], "SKU": table["item"].astype(str)})
    log["createdAt"] = pd.to_datetime(table["second"], unit="s", utc=True)
    log.to_parquet(root / "purchases.parquet")
    return root / "purchases.parquet"


def clicks(root):
    """A European export: semicolons, an impression with a request, a click and a propensity."""
    table = events()
    log = pd.DataFrame({"visitor_id": table["user"], "article_id": table["item"], "event_time": table["second"]})
    log = log.assign(request_id=np.arange(len(log)) // 3, clicked=table["flag"], pscore=0.25, thumbs_down=0)
    log.loc[::9, "thumbs_down"] = 1
    log.to_csv(root / "clicks.csv", sep=";", index=False)
    return root / "clicks.csv"


def shop(root):
    """As RetailRocket: one column says what kind of event a row is."""
    table = events()
    log = pd.DataFrame({"timestamp": table["second"] * 1000, "visitorid": table["user"], "itemid": table["item"]})
    log["event"] = np.where(table["flag"] == 1, "addtocart", "view")
    log.assign(transactionid=np.nan).to_csv(root / "events.csv", index=False)
    return root / "events.csv"


def sequences(root):
    table = events()
    log = pd.DataFrame({"user_id": table["user"], "item_id": table["item"]})
    log.assign(pos=log.groupby("user_id").cumcount()).to_parquet(root / "sequences.parquet")
    return root / "sequences.parquet"


# name -> preset, columns and units, label, split, alignments
KNOWN = {
    kuairand: (
        "kuairand",
        "user_id video_id time_ms ms play_time_ms ms",
        "WatchQuantiles",
        "TemporalSplit",
        "mpo gbpo",
    ),
    movielens: ("movielens", "userId movieId timestamp s", "NumericColumn", "TemporalSplit", "mpo"),
    movielens_1m: ("movielens", "userId movieId timestamp s", "NumericColumn", "TemporalSplit", "mpo"),
    recbole: ("recbole", "user_id:token item_id:token timestamp:float s", "NumericColumn", "TemporalSplit", "mpo"),
    kuairec: ("plain", "user_id video_id timestamp s play_duration ms", "WatchQuantiles", "TemporalSplit", "mpo"),
    listens: ("plain", "uid item_id timestamp order", "NumericColumn", "LeaveLastOut", "mpo"),
    purchases: ("plain", "Customer ID|SKU|createdAt|None", "EveryEvent", "TemporalSplit", ""),
    clicks: ("plain", "visitor_id article_id event_time s", "BinaryColumn", "TemporalSplit", "mpo gbpo"),
    shop: ("plain", "visitorid itemid timestamp ms", "BinaryColumn", "TemporalSplit", "mpo"),
    sequences: ("plain", "user_id item_id pos order", "EveryEvent", "LeaveLastOut", ""),
}


@pytest.mark.parametrize("log", list(KNOWN), ids=lambda log: log.__name__)
def test_what_it_recognizes(log, tmp_path, capfd):
    preset, said, label, split, alignments = KNOWN[log]
    (tmp_path / "log").mkdir()
    found = recpo.init(log(tmp_path / "log"), tmp_path / "out")
    assert capfd.readouterr() == ("", "")
    columns = found.columns
    read = [columns.user_id, columns.item_id, columns.timestamp, columns.time_unit, columns.watch_time]
    read += [columns.watch_time_unit] if columns.watch_time else []
    separator = "|" if "|" in said else " "
    assert [str(name) for name in read[: len(said.split(separator))]] == said.split(separator)
    assert (found.preset, found.label.class_name) == (preset, label)
    assert " ".join(found.objectives) == alignments
    assert sorted(found.written) == sorted(["prepare", "pretrain", *found.objectives])
    written = yaml.safe_load((tmp_path / "out" / "prepare.yaml").read_text())
    assert split in str(written["split"])
    assert (found.counts.events, found.counts.users, found.counts.items) == (600, USERS, ITEMS)


def test_trainings_are_recpos_own_with_the_paths_and_sizes_of_the_log(tmp_path):
    out = tmp_path / "out"
    written = recpo.init(clicks(tmp_path), out).written
    steps = ("pretrain", "mpo", "gbpo")
    own = {step: yaml.safe_load((configurations() / f"{step}.yaml").read_text()) for step in steps}
    own["pretrain"] |= {"out": str(out / "runs/pretrain")}
    own["pretrain"]["policy"]["init_args"] |= {"dim": 32, "max_history": 50}
    own["mpo"] |= {"out": str(out / "runs/mpo"), "init_from": str(out / "runs/pretrain")}
    own["mpo"]["reward"]["init_args"]["factors"] = str(out / "factors")
    own["gbpo"] |= {"out": str(out / "runs/gbpo"), "init_from": str(out / "runs/pretrain")}
    own["gbpo"]["advantage"]["init_args"]["positive_fraction"] = None
    for step, batch, epochs in zip(steps, (8, 16, 8), (12, 8, 3), strict=True):
        own[step]["data"] |= {"prepared": str(out / "prepared"), "batch_size": batch}
        own[step]["data"]["layout"]["init_args"]["history_length"] = 50
        own[step]["trainer"]["max_epochs"] = epochs
        text = written[step].read_text()
        assert yaml.safe_load(text) == own[step]
        assert f"recpo train --config {written[step]}" in text
    assert "one pass per window" in written["pretrain"].read_text()  # comments stay


@pytest.mark.parametrize(
    "value",
    [
        *("plain", "on", "007", "+01:00", "", "a: b # c", "two\nlines", "\u2028", "\x85 é 😀", "'\"", None, 3, 0.5),
        *(["a", "b, c"], {"column": "x\n", "equals": {"cart": 0.5, "buy\r": 1}}, {}),
    ],
)
def test_a_value_is_one_line_of_yaml(value):
    text = _yaml(value)
    assert len(f"name: {text}  # why".splitlines()) == 1
    assert yaml.safe_load(f"name: {text}  # why") == {"name": value}


@pytest.mark.parametrize(("log", "shares"), [(listens, {"valid_share": 0.1, "test_share": 0.1}), (sequences, {})])
def test_without_days_a_share_of_graded_events_is_held_out_and_else_the_last_event(log, shares, tmp_path):
    split = recpo.init(log(tmp_path), tmp_path / "out").split
    assert (split.class_name, split.init_args) == ("LeaveLastOut", shares)


@pytest.mark.parametrize(("each", "share"), [(20, 0.1), (8, 0.1), (6, 0.334), (5, 0.4), (3, 0.4)])
def test_where_users_have_few_graded_events_two_of_them_can_be_compared(each, share, tmp_path):
    user, item = (axis.ravel() for axis in np.indices((30, each)))
    log = pd.DataFrame({"user_id": user, "item_id": (user + item) % 25, "rating": 1 + (user * item) % 5})
    log.to_csv(tmp_path / "ratings.csv", index=False)
    split = recpo.init(tmp_path / "ratings.csv", tmp_path / "out").split
    assert (split.class_name, split.init_args) == ("LeaveLastOut", {"valid_share": share, "test_share": 0.1})
    assert math.floor(each * share) >= 2 or each in (20, 8, 3)


@pytest.mark.parametrize(
    ("label", "returning", "split"),
    [
        ("rating", False, "LeaveLastOut"),
        ("rating", True, "TemporalSplit"),
        ("clicked", False, "LeaveLastOut"),
        ("clicked", True, "TemporalSplit"),
    ],
)
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_the_last_days_are_no_test_where_they_are_of_new_users(label, returning, split, suffix, tmp_path):
    random = np.random.default_rng(0)
    log = pd.DataFrame({"user": np.arange(3000) // 10, "item": random.integers(0, 50, 3000)})
    day = random.permutation(3000) / 50 if returning else log["user"] // 5 + random.random(3000) / 2
    log["timestamp"] = (1_700_006_400 + day * 86_400).astype(np.int64)
    log[label] = random.integers(1, 6, 3000) if label == "rating" else random.integers(0, 2, 3000)
    log["user"] = log["user"].map("u{}".format).astype("category")
    getattr(log, f"to_{suffix}")(tmp_path / f"log.{suffix}", index=False)
    found = recpo.init(tmp_path / f"log.{suffix}", tmp_path / "out")
    assert found.split.class_name == split
    assert found.counts.new_share(8) == (0.0 if returning else 1.0)
    assert sum(found.counts.by_first_day) == 3000


def test_tables_of_items_and_users_are_told_from_the_log(tmp_path):
    found = recpo.init(kuairand(tmp_path), tmp_path / "out")
    assert [file.name for file in found.sample.files] == ["log_standard.csv"]
    assert {side: file.rpartition("/")[2] for side, file in found.tables.items()} == {
        "item": "video_features_basic.csv",
        "user": "user_features.csv",
    }
    assert any("video_features_statistic.csv" in doubt for doubt in found.doubts)
    assert "# items: " in (tmp_path / "out" / "prepare.yaml").read_text()


def test_a_table_whose_only_features_are_lists_is_one(tmp_path):
    table = events().rename(columns={"user": "user_id", "item": "item_id", "second": "ts"})[
        ["user_id", "item_id", "ts"]
    ]
    table.to_parquet(tmp_path / "log.parquet")
    items = table[["item_id"]].drop_duplicates(ignore_index=True)
    items.assign(tags=[[1, number] for number in range(len(items))]).to_parquet(tmp_path / "items.parquet")
    items.assign(facts=[{"size": number} for number in range(len(items))]).to_parquet(tmp_path / "facts.parquet")
    found = recpo.init(tmp_path, tmp_path / "out")
    assert found.tables == {"item": str(tmp_path / "items.parquet")}
    assert any("facts.parquet" in doubt for doubt in found.doubts)


@pytest.mark.slow
@pytest.mark.parametrize("log", [kuairand, listens, purchases], ids=lambda log: log.__name__)
def test_what_it_writes_is_prepared_and_trained_on(log, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log").mkdir()
    named = log(tmp_path / "log").relative_to(tmp_path)
    assert main(["init", str(named)]) == 0
    printed = capsys.readouterr().out
    commands = [line.strip() for line in printed.splitlines() if line.startswith("  recpo ")]
    verbs = [command.split()[1] for command in commands]
    assert (verbs[:2], verbs[-3:]) == (["prepare", "train"], ["evaluate", "export", "recommend"])
    for command in commands:
        _, verb, *options = shlex.split(command)
        if verb in ("prepare", "factorize"):
            assert main([verb, *options, *(["--ranks", "[2]"] if verb == "factorize" else [])]) == 0, command
        elif verb == "train":
            assert main([verb, *options, *QUICK]) == 0, command
    assert recpo.load("runs/pretrain").num_items == ITEMS


def test_an_open_unit_is_asked_for_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    table = events().assign(played=lambda t: t["played"] // 20 + 300, length=lambda t: t["length"] // 20 + 300)
    table.columns = ["user_id", "item_id", "timestamp", "watch_time", "duration", "rating", "flag"]
    table.drop(columns=["rating", "flag"]).to_csv("log.csv", index=False)
    assert main(["init", "log.csv"]) == 1
    printed = capsys.readouterr()
    assert "timestamp" in printed.out  # what it found is shown
    assert "2 things cannot be told from the log, nothing written" in printed.err
    assert "--columns.watch_time_unit s or --columns.watch_time_unit ms" in printed.err
    assert [file.name for file in tmp_path.iterdir()] == ["log.csv"]
    assert main(["init", "log.csv", "--columns.watch_time_unit", "ms"]) == 0
    written = yaml.safe_load((tmp_path / "prepare.yaml").read_text())
    assert (written["columns"]["watch_time_unit"], written["columns"]["duration_unit"]) == ("ms", "ms")


def test_it_replaces_no_file_and_refuses_names_that_are_not_there(tmp_path):
    log = purchases(tmp_path)
    (tmp_path / "pretrain.yaml").write_text("mine", encoding="utf-8")
    with refused("exists", "out"):
        recpo.init(log, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["pretrain.yaml", "purchases.parquet"]
    with refused("missing_column", "columns.user_id"):
        recpo.init(log, tmp_path / "out", columns=recpo.Columns(user_id="who"))


def test_columns_without_names_are_asked_for(tmp_path):
    events()[["user", "item", "second"]].to_csv(tmp_path / "log.csv", index=False, header=False)
    with refused("missing_option", "csv.names"):
        recpo.init(tmp_path / "log.csv", tmp_path / "out")
    found = recpo.init(
        tmp_path / "log.csv", tmp_path / "out", csv=recpo.CsvFormat(names=("user_id", "item_id", "timestamp"))
    )
    assert found.columns.time_unit == "s"


def test_the_events_of_a_day_are_counted_whatever_a_time_is_written_as(tmp_path):
    table = events()[["user", "item", "second"]]
    moment = pd.to_datetime(table["second"], unit="s", utc=True)
    written = {"numbers": table["second"], "times": moment, "texts": moment.dt.strftime("%Y-%m-%d %H:%M:%S")}
    written["short"] = moment.dt.strftime("%Y/%-m/%-d %-H:%M")
    expected = tuple(moment.dt.floor("D").value_counts().sort_index(ascending=False))
    for name, times in written.items():
        table.assign(second=times).to_parquet(tmp_path / f"{name}.parquet", index=False)
        assert inspect_log(tmp_path / f"{name}.parquet").counts.by_day == expected
    table[["user", "item"]].to_parquet(tmp_path / "timeless.parquet", index=False)
    assert inspect_log(tmp_path / "timeless.parquet").counts.by_day == ()


@pytest.mark.parametrize(
    ("offset", "timezone"), [("+02", "+02:00"), (".5+0530", "+05:30"), (" -0300", "-03:00"), (" +0000", None)]
)
def test_offsets_in_other_spellings_are_the_time_zone_and_are_prepared(offset, timezone, tmp_path):
    table = events()[["user", "item", "second"]]
    table["second"] = [str(pd.Timestamp(second, unit="s")) + offset for second in table["second"]]
    table.to_csv(tmp_path / "log.csv", index=False)
    found = inspect_log(tmp_path / "log.csv", columns=recpo.Columns(timestamp="second"))
    assert found.split.init_args.get("timezone") == timezone
    data = recpo.prepare(out=tmp_path / "prepared", progress=False, **preparation_of(found))
    assert data.manifest["counts"]["read"] == 600


def test_a_row_whose_number_is_no_time_is_left_out(tmp_path):
    table = events()[["user", "item", "second"]]
    table.loc[3, "second"] = np.iinfo(np.int64).max
    table.to_parquet(tmp_path / "log.parquet", index=False)
    columns = recpo.Columns(user_id="user", item_id="item", timestamp="second", time_unit="s")
    found = inspect_log(tmp_path / "log.parquet", columns=columns)
    assert (sum(found.counts.by_day), found.counts.events) == (599, 599)
    data = recpo.prepare(out=tmp_path / "prepared", progress=False, **preparation_of(found))
    assert data.manifest["counts"]["dropped"]["row without timestamp"] == 1


def test_whole_stars_run_from_one_to_five(tmp_path):
    found = recpo.init(movielens_1m(tmp_path), tmp_path / "out")
    assert dict(found.label.init_args) == {"low": 1, "high": 5}


def test_nested_columns_are_reported(tmp_path):
    table = events().assign(user_id=lambda t: t["user"], item_id=lambda t: t["item"], ts=lambda t: t["second"])
    table["metrics"] = [{"watch_ms": 3} for _ in range(len(table))]
    table[["user_id", "item_id", "ts", "metrics"]].to_parquet(tmp_path / "log.parquet")
    unlabeled, nested = recpo.init(tmp_path / "log.parquet", tmp_path / "out").doubts
    assert "every event has the same label" in unlabeled
    assert nested.startswith("`metrics`: nested columns are not read")


def test_files_that_are_no_tables_say_why(tmp_path):
    table = events().assign(user_id=lambda t: t["user"], item_id=lambda t: t["item"], ts=lambda t: t["second"])
    table[["user_id", "item_id", "ts"]].to_parquet(tmp_path / "log.parquet")
    pd.DataFrame({"item_id": [1, 2, 2, 2], "genre": list("abcd")}).to_parquet(tmp_path / "genres.parquet")
    pd.DataFrame({"id": [1, 2], "color": list("ab")}).to_parquet(tmp_path / "colors.parquet")
    pd.DataFrame({"item_id": [1, 2], "user_id": [1, 1]}).to_parquet(tmp_path / "pairs.parquet")
    found = inspect_log(tmp_path)
    assert dict(found.tables) == {}
    (genres,), (colors,), (pairs,) = (
        [doubt for doubt in found.doubts if f"{name}.parquet: " in doubt] for name in ("genres", "colors", "pairs")
    )
    assert "2 rows have the `item_id` of an earlier row" in genres
    assert "no column is `item_id` or `user_id` (id, color)" in colors
    orders = pd.DataFrame({"order_id": range(200), "user_id": np.arange(200) % 7, "state": "paid"})
    orders.to_csv(tmp_path / "orders.csv", index=False)
    lines = pd.DataFrame({"order_id": np.arange(600) % 200, "item_id": np.arange(600) % 11})
    lines.to_csv(tmp_path / "lines.csv", index=False)
    found = inspect_log([tmp_path / "orders.csv", tmp_path / "lines.csv"])
    assert any("if `user_id` is the user_id, join it to the log by `order_id`" in doubt for doubt in found.doubts)
    assert "other columns than the log" in pairs


@pytest.mark.parametrize("suffixes", [("csv", "csv"), ("parquet", "parquet"), ("csv", "tsv")])
def test_files_with_the_columns_of_the_log_in_any_order_and_more_are_one_log(suffixes, tmp_path):
    table = events()[["user", "item", "second", "flag"]].rename(columns={"flag": "click"})
    first, second = table[:300].assign(note=1.5), table[300:][["click", "second", "item", "user"]]
    second = second.assign(note="a", device="ios")
    (tmp_path / "log").mkdir()
    for frame, name, suffix in zip((first, second), "ab", suffixes, strict=True):
        file = tmp_path / "log" / f"{name}.{suffix}"
        frame.to_parquet(file) if suffix == "parquet" else frame.to_csv(file, sep={"csv": ",", "tsv": "\t"}[suffix])
    found = recpo.init(tmp_path / "log", tmp_path / "out")
    assert found.counts.events == len(table)
    assert any("2 files" in doubt and "`device`" in doubt for doubt in found.doubts)
    data = recpo.prepare(**preparation_of(found), out=tmp_path / "data", progress=False)
    assert data.manifest["counts"]["read"] == len(table)
    first.assign(rating=events()["rating"]).to_csv(tmp_path / "log" / "c.csv")
    found = inspect_log(tmp_path / "log")
    assert [file.name for file in found.sample.files] == ["c.csv"]
    assert any("(300 rows), as it lacks `rating`" in doubt for doubt in found.doubts)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("column", "values", "left_out"),
    [
        ("user", [np.nan] * 200, {"skip_incomplete": True}),  # numbers with fractions, as pandas has them
        ("day", ["0000-00-00 00:00:00", None, "soon"], {"skip_incomplete": True}),
        ("day", ["2031-01-01 00:00:00"] * 3, {"end": "2023-11-27"}),
        ("day", ["2031-01-01 00:00:00", "1985-02-02 10:00:00", ""], {"skip_incomplete": True, "begin": "2023-11-14"}),
        ("item", [np.nan] * 350, None),
    ],
)
def test_rows_that_prepare_cannot_read_are_left_out_and_said(suffix, column, values, left_out, tmp_path, monkeypatch):
    table = events()[["user", "item", "second", "rating"]]
    table = table.assign(day=pd.to_datetime(table.pop("second"), unit="s").astype(str))
    table = table.astype({column: float} if column != "day" else {})
    table.loc[np.arange(1, 600, 600 // len(values))[: len(values)], column] = values
    monkeypatch.chdir(tmp_path)
    table.to_csv("log.csv", index=False) if suffix == "csv" else table.to_parquet("log.parquet")
    if left_out is None:
        with refused("missing_option", "item_id"):
            recpo.init(f"log.{suffix}")
        return
    found = recpo.init(f"log.{suffix}")
    assert left_out.items() <= found.left_out.items()
    assert (found.counts.events, round(found.counts.days)) == (600 - len(values), 13)
    assert found.split.class_name == "TemporalSplit"
    (*_, said) = found.doubts
    assert "leave" in said
    assert main(["prepare", "--config", "prepare.yaml"]) == 0
    counts = recpo.load("prepared").manifest["counts"]
    dropped = [count for reason, count in counts["dropped"].items() if "outside" not in reason]
    assert (counts["read"], sum(dropped)) == (600, len(values))


def plays(number=1200, watched="play_seconds", length="track_seconds", factor=1.0):
    """Plays of tracks, most of them whole; thumbs as texts: 5 % down, 15 % up, the rest null."""
    random = np.random.default_rng(0)
    seconds = random.integers(120, 320, ITEMS)
    item = random.integers(0, ITEMS, number)
    log = pd.DataFrame({"user": random.integers(0, USERS, number), "track": item})
    log["at"] = np.sort(random.integers(0, DAYS * 86_400, number)) + 1_700_000_000
    log[watched] = (seconds[item] * np.minimum(random.uniform(0, 1.3, number), 1.0) * factor).astype(int)
    log[length] = seconds[item]
    chance = random.random(number)
    return log.assign(thumb=np.where(chance < 0.05, "down", np.where(chance < 0.2, "up", None)))


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_plays_and_thumbs_as_texts_are_recognized_and_prepared(suffix, tmp_path):
    (tmp_path / "log").mkdir()
    log = plays()
    for day in range(3):
        part, file = log[day * 400 : (day + 1) * 400], tmp_path / "log" / f"day-{day}.{suffix}"
        part.to_csv(file, index=False) if suffix == "csv" else part.to_parquet(file)
    found = recpo.init(tmp_path / "log", tmp_path)
    columns = found.columns
    assert (columns.watch_time, columns.watch_time_unit, columns.duration) == ("play_seconds", "s", "track_seconds")
    assert columns.dislike == recpo.FlagColumn("thumb", "down")
    assert sorted(found.written) == ["gbpo", "mpo", "prepare", "pretrain"]
    assert "'down' is read as a dislike and 'up' is read as the behavior like" in found.doubts[0]
    written = yaml.safe_load((tmp_path / "prepare.yaml").read_text())
    assert written["behaviors"] == {"like": {"column": "thumb", "equals": "up"}}
    assert main(["prepare", "--config", str(tmp_path / "prepare.yaml"), "--quiet"]) == 0
    counts = recpo.load(tmp_path / "prepared").manifest["counts"]["splits"]
    assert sum(period["disliked"] for period in counts.values()) == (log["thumb"] == "down").sum()
    assert sum(period["behaviors"]["like"] for period in counts.values()) == (log["thumb"] == "up").sum()


@pytest.mark.parametrize(("longest", "label"), [(1.25, "WatchQuantiles"), (1.4, "WatchRatio")])
def test_where_plays_end_with_the_item_the_label_is_their_share(longest, label, tmp_path):
    """Of 1.25, a fifth of the plays are whole, of 1.4 two sevenths, which ranks cannot tell apart."""
    log = plays()
    share = np.minimum(np.random.default_rng(2).uniform(0, longest, len(log)), 1.0)
    log["play_seconds"] = (log["track_seconds"] * share).round().astype(int)
    log.to_parquet(tmp_path / "log.parquet")
    found = inspect_log(tmp_path / "log.parquet")
    assert found.label.class_name == label
    data = recpo.prepare(out=tmp_path / "prepared", progress=False, **preparation_of(found))
    if label == "WatchRatio":
        levels = data.feedback.levels(np.array([100.0, 200.0]), np.array([100.0, 200.0]), np.zeros(2, bool), np.ones(2))
        assert levels.tolist() == [HIGHEST, HIGHEST]
        positive = sum(period["positive"] for period in data.manifest["counts"]["splits"].values())
        mostly = log["play_seconds"] / log["track_seconds"] >= 0.75
        assert positive == (mostly & (log["thumb"] != "down")).sum()


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_durations_and_the_times_of_items_are_read_from_their_table(suffix, tmp_path):
    log = plays()
    first, last = log.groupby("track")["at"].min(), log.groupby("track")["at"].max()
    items = log.groupby("track")["track_seconds"].first().rename("track_length").reset_index()
    moment = {"published_on": first - 3_600, "expires_at": (last + 7_200).mask(last.index % 3 == 0)}
    items["removed_at"] = pd.to_datetime(first.to_numpy() + 60, unit="s")  # most plays are after it
    items["sold_at"] = np.datetime64("9999-12-31", "s")
    items = items.assign(**{name: pd.to_datetime(when.to_numpy(), unit="s") for name, when in moment.items()})
    for name, table in (("log", log.drop(columns="track_seconds")), ("tracks", items)):
        file = tmp_path / f"{name}.{suffix}"
        table.to_csv(file, index=False) if suffix == "csv" else table.to_parquet(file)
    found = recpo.init(tmp_path, tmp_path / "configs")
    assert found.label.class_name == "WatchQuantiles"
    assert vars(found.table_columns) == vars(
        FeatureColumns(duration="track_length", available_from="published_on", available_until="expires_at")
    )
    assert sum("`removed_at` is not read" in doubt or "`sold_at` is not read" in doubt for doubt in found.doubts) == 2
    assert main(["prepare", "--config", str(tmp_path / "configs" / "prepare.yaml"), "--quiet"]) == 0
    data = recpo.load(tmp_path / "configs" / "prepared")
    rows = data.table("items.parquet").to_pandas().merge(items, left_on="item_id", right_on="track")
    assert (rows["duration"] == rows["track_length"]).all()
    assert (rows["available_until"].isna() == rows["expires_at"].isna()).all()
    assert (rows["available_from"] == rows["published_on"].astype("datetime64[ms]").astype(int)).all()


@pytest.mark.parametrize(
    ("numbers", "share", "expected"),
    [
        (range(-1, 11), 0.1, {"low": 1, "high": 10, "missing": -1}),
        (range(6), 0.4, {"low": 1, "high": 5, "missing": 0}),
        (range(6), 0.2, {"low": 0, "high": 5}),
        (range(1, 6), 0.5, {"low": 1, "high": 5}),
        ([99, *range(-10, 11)], 0.3, {"low": -10, "high": 10, "missing": 99}),
        ([10, *range(3)], 0.01, {"low": 0, "high": 10}),
    ],
)
def test_a_number_that_is_no_rating_is_missing(numbers, share, expected, tmp_path):
    """As of people who did not rate what they had: -1 or 0, beside a scale."""
    numbers, log = [number for number in numbers if number or numbers[0] != -1], events()[["user", "item", "second"]]
    probabilities = [share, *np.full(len(numbers) - 1, (1 - share) / (len(numbers) - 1))]
    log["rating"] = np.random.default_rng(1).choice(numbers, len(log), p=probabilities)
    log.to_parquet(tmp_path / "log.parquet")
    found = inspect_log(tmp_path / "log.parquet")
    assert (found.label.class_name, found.label.init_args) == ("NumericColumn", expected)
    data = recpo.prepare(out=tmp_path / "prepared", progress=False, **preparation_of(found))
    counts = data.manifest["counts"]
    unrated = (log["rating"] == expected.get("missing")).sum()
    assert sum(period["unknown"] for period in counts["splits"].values()) == unrated
    assert counts["neutralized"] == {}


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("column", "values", "positive"),
    [("clicked", (True, False), True), ("skipped", (True, False), False), ("event", ("click", "impression"), "click")],
)
def test_what_users_did_with_an_impression_is_the_label(column, values, positive, suffix, tmp_path):
    log = events()[["user", "item", "second"]]
    log[column] = np.random.default_rng(1).choice(values, len(log), p=(0.3, 0.7))
    log.to_csv(tmp_path / "log.csv", index=False) if suffix == "csv" else log.to_parquet(tmp_path / "log.parquet")
    found = inspect_log(tmp_path / f"log.{suffix}")
    assert (found.label.class_name, found.column("label")) == ("BinaryColumn", column)
    data = recpo.prepare(out=tmp_path / "prepared", progress=False, **preparation_of(found))
    counts = data.manifest["counts"]["splits"].values()
    kinds = [sum(period[kind] for period in counts) for kind in ("positive", "skipped")]
    if column == "event":  # the click is the outcome of an impression of the same day
        log["day"] = log["second"] // 86_400
        log = log.sort_values(column).drop_duplicates(["user", "item", "day"])
    expected = (log[column] == positive).sum()
    assert kinds == [expected, len(log) - expected]


@pytest.mark.parametrize(
    ("name", "factor", "unit"), [("amount", 1.0, "s"), ("amount", 1000.0, "ms"), ("x_ms", 1e3, "ms")]
)
def test_a_share_of_the_duration_is_the_watch_time_under_any_name(name, factor, unit, tmp_path):
    plays(watched=name, factor=factor).drop(columns="thumb").to_csv(tmp_path / "log.csv", index=False)
    found = recpo.init(tmp_path / "log.csv", tmp_path)
    assert (found.columns.watch_time, found.columns.watch_time_unit) == (name, unit)
    assert found.label.class_name == "WatchQuantiles"
    assert found.doubts[0].startswith(f"`{name}` is read as the watch time in {unit}")


def test_several_or_doubtful_shares_of_the_duration_are_named_and_none_is_read(tmp_path):
    log = plays(watched="first").assign(second=lambda t: t["first"] // 2)
    log = log.assign(tempo=90 + log["track"] * 3, volume=np.random.default_rng(1).integers(0, 101, len(log)))
    log.drop(columns="thumb").to_csv(tmp_path / "log.csv", index=False)
    found = recpo.init(tmp_path / "log.csv", tmp_path / "out")
    assert found.columns.watch_time is None
    (doubt,) = (one for one in found.doubts if "shares of `track_seconds`" in one)
    assert "--columns.watch_time first --columns.watch_time_unit s" in doubt
    assert "--columns.watch_time second" in doubt
    assert "tempo" not in doubt  # each track has one
    log.drop(columns=["thumb", "first", "second"]).to_csv(tmp_path / "log.csv", index=False)
    (doubt,) = (one for one in recpo.init(tmp_path / "log.csv", tmp_path).doubts if "shares of" in one)
    assert "--columns.watch_time volume" in doubt


def test_a_flag_of_texts_is_asked_for_if_its_values_are_unknown(tmp_path):
    log = plays().assign(verdict=lambda t: np.where(t["thumb"] == "down", "zonk", "tilt")).drop(columns="thumb")
    log.to_csv(tmp_path / "log.csv", index=False)
    with refused("missing_option", "dislike"):
        recpo.init(tmp_path / "log.csv", tmp_path / "out", columns=recpo.Columns(dislike="verdict"))
    assert not (tmp_path / "out").exists()
    given = recpo.FlagColumn("verdict", "zonk")
    found = recpo.init(tmp_path / "log.csv", tmp_path / "out", columns=recpo.Columns(dislike=given))
    assert found.columns.dislike == given


def test_a_podcast_log_is_recognized_whole(tmp_path):
    table = events()
    log = pd.DataFrame({"listener": "l" + table["user"].astype(str), "episode": "e" + table["item"].astype(str)})
    log["started_at"] = [str(pd.Timestamp(second, unit="s"))[:19] + "+01:00" for second in table["second"]]
    log["seconds_listened"], log["episode_minutes"] = table["played"] // 20, 5 + table["length"] // 1200
    log.assign(hidden=table["flag"] == 1, show="s").to_csv(tmp_path / "plays.csv", index=False)
    found = recpo.init(tmp_path / "plays.csv", tmp_path)
    columns, units = found.columns, (found.columns.watch_time_unit, found.columns.duration_unit)
    assert (columns.user_id, columns.item_id, columns.timestamp) == ("listener", "episode", "started_at")
    assert (columns.watch_time, columns.duration, columns.dislike) == ("seconds_listened", "episode_minutes", "hidden")
    assert (units, found.doubts, list(found.objectives)) == (("s", "min"), (), ["mpo", "gbpo"])
    assert "split: {class_path: TemporalSplit, init_args: {valid_days: 1, test_days: 1, timezone: '+01:00'}}" in (
        (tmp_path / "prepare.yaml").read_text(encoding="utf-8")
    )


def test_tables_tell_users_and_items_of_unknown_names(tmp_path):
    log = events()[["user", "item", "second", "flag"]]
    log.columns = ["human", "leaflet", "seen_at", "applied"]
    log.assign(auction_id=np.arange(len(log)) // 2).to_csv(tmp_path / "seen.csv", index=False)
    for name, count, first in (("human", USERS, 100), ("leaflet", ITEMS, 7)):
        pd.DataFrame({name: np.arange(count) + first, "kind": "a"}).to_csv(tmp_path / f"{name}.csv", index=False)
    with refused("missing_option", "user_id"):  # one of two columns with tables is the user, and the other the item
        preparation_of(inspect_log(tmp_path))
    found = inspect_log(tmp_path, columns=Columns(user_id="human"))
    assert (found.questions, found.columns.item_id, found.columns.request_id) == ((), "leaflet", "auction_id")
    assert (found.label.class_name, {*found.tables}) == ("BinaryColumn", {"item", "user"})


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_swipes_and_times_at_which_something_happened_are_labels(suffix, tmp_path):
    random = np.random.default_rng(0)
    log = events(800).rename(columns={"user": "viewer_id", "item": "profile_id", "second": "shown_ts"})
    log = log[["viewer_id", "profile_id", "shown_ts"]]
    swipes = log.assign(
        decision=random.choice(["like", "pass", "superlike", "report"], len(log), p=(0.3, 0.5, 0.1, 0.1))
    )
    times = pd.to_datetime(log["shown_ts"] + 90, unit="s").where(random.random(len(log)) < 0.3)
    emails = log.rename(columns={"shown_ts": "sent_at"}).assign(clicked_at=times.astype(str).where(times.notna()))
    for name, table in (("swipes", swipes), ("emails", emails)):
        (tmp_path / name).mkdir()
        file = tmp_path / name / f"log.{suffix}"
        table.to_csv(file, index=False) if suffix == "csv" else table.to_parquet(file)
    found = recpo.init(tmp_path / "swipes", tmp_path / "a")
    assert (found.columns.label.values, found.columns.dislike.values) == (("like", "superlike"), ("report",))
    assert not found.outcome_rows
    recpo.init(tmp_path / "emails", tmp_path / "b")
    for out, positive, disliked in (
        ("a", swipes["decision"].isin(["like", "superlike"]), swipes["decision"] == "report"),
        ("b", times.notna(), times == 0),
    ):
        assert main(["prepare", "--config", str(tmp_path / out / "prepare.yaml"), "--quiet"]) == 0
        counts = recpo.load(tmp_path / out / "prepared").manifest["counts"]["splits"].values()
        assert sum(period["positive"] for period in counts) == positive.sum()
        assert sum(period["disliked"] for period in counts) == disliked.sum()
        assert sum(period["unknown"] for period in counts) == 0


def test_tables_may_call_their_ids_otherwise_than_the_log(tmp_path):
    log = events().rename(columns={"user": "payload.user", "item": "payload.article_id", "second": "event_ts"})
    log = log[["payload.user", "payload.article_id", "event_ts", "flag"]].rename(columns={"flag": "clicked"})
    log.to_csv(tmp_path / "log.csv", index=False)
    items, users = (log[name].drop_duplicates() for name in ("payload.article_id", "payload.user"))
    pd.DataFrame({"article_id": items, "topic": items % 3}).to_csv(tmp_path / "articles.csv", index=False)
    pd.DataFrame({"id": users, "age": users % 50}).to_csv(tmp_path / "people.csv", index=False)
    pd.DataFrame({"id": users + 10_000, "size": 1}).to_csv(tmp_path / "others.csv", index=False)
    found = recpo.init(tmp_path, tmp_path / "out")
    named = {"item": "articles.csv", "user": "people.csv"}
    assert found.tables == {side: str(tmp_path / name) for side, name in named.items()}
    assert (found.table_columns.item_id, found.table_columns.user_id) == ("article_id", "id")
    assert any("others.csv" in doubt and "not read" in doubt for doubt in found.doubts)
    assert main(["prepare", "--config", str(tmp_path / "out" / "prepare.yaml"), "--quiet"]) == 0
    schema = recpo.load(tmp_path / "out" / "prepared").feature_schema
    assert ([one.name for one in schema.item], [one.name for one in schema.user]) == (["topic"], ["age"])


def test_watch_times_without_durations_are_ranks_of_all(tmp_path):
    """Sessions with a long tail: divided by their 99 % quantile, hardly one would be positive."""
    random, log = np.random.default_rng(0), events(2000)
    log = log[["user", "item", "second"]].assign(session_seconds=random.lognormal(5, 1.5, len(log)).round(1))
    log.to_parquet(tmp_path / "log.parquet")
    found = inspect_log(tmp_path / "log.parquet")
    assert (found.label.class_name, found.label.init_args["by_duration"]) == ("WatchQuantiles", False)
    data = recpo.prepare(out=tmp_path / "prepared", progress=False, **preparation_of(found))
    counts = data.manifest["counts"]["splits"]["train"]
    assert 0.2 * counts["targets"] < counts["positive"] < 0.3 * counts["targets"]
    assert (counts["unknown"], data.manifest["warnings"]) == (0, [])
    seconds = np.quantile(log["session_seconds"], [0.01, 0.5, 0.99])
    for duration in (np.full(3, np.nan), np.array([1.0, 100.0, 9000.0])):  # nothing is compared with it
        levels = data.feedback.levels(seconds, duration, np.zeros(3, bool), np.full(3, np.nan))
        assert levels.tolist() == [LOWEST, levels[1], HIGHEST]
        assert abs(levels[1] - (LOWEST + HIGHEST) / 2) <= 1
    with refused("out_of_range", "duration_exponent"):
        recpo.WatchQuantiles(by_duration=False, duration_exponent=0.5)


def test_a_log_that_grows_holds_fewer_days_out(tmp_path):
    random = np.random.default_rng(0)
    for power, days in ((1.0, 2), (0.25, 1)):  # of 30 days, evenly, or mostly at the end
        log = events(2000)[["user", "item", "rating"]]
        log["second"] = 1_700_006_400 + (30 * 86_400 * random.random(len(log)) ** power).astype(int)
        log.to_parquet(tmp_path / "log.parquet")
        split = inspect_log(tmp_path / "log.parquet").split
        assert (split.init_args["valid_days"], split.init_args["test_days"]) == (days, days)


def test_points_of_the_upper_half_of_a_scale_have_their_own_range(tmp_path):
    log = events().assign(rating=lambda table: 80 + 5 * (table["rating"] - 1))
    log[["user", "item", "second", "rating"]].to_parquet(tmp_path / "log.parquet")
    assert inspect_log(tmp_path / "log.parquet").label.init_args == {"low": 80, "high": 100}


def test_no_reward_is_a_reward_of_zero(tmp_path):
    log = events()[["user", "item", "second"]]
    log["reward"] = np.random.default_rng(1).choice([0, 1, 5, 15], len(log), p=[0.7, 0.15, 0.1, 0.05])
    log.to_parquet(tmp_path / "log.parquet")
    assert inspect_log(tmp_path / "log.parquet").label.init_args == {"low": 0, "high": 15}


def test_how_often_something_happened_is_a_success_from_once_on(tmp_path):
    log = events()[["user", "item", "second"]]
    log["clicks"] = np.random.default_rng(1).choice(4, len(log), p=[0.8, 0.13, 0.05, 0.02])
    log.to_parquet(tmp_path / "log.parquet")
    found = recpo.init(tmp_path / "log.parquet", tmp_path / "out", columns=Columns(label="clicks"))
    assert found.label.init_args == {"low": 0, "high": 1}


@pytest.mark.parametrize("kept", [1.0, 0.6])
def test_nobody_chose_again_what_snapshots_repeat(kept, tmp_path):
    """Holdings by month, and weekly purchases."""
    random, rows = np.random.default_rng(0), []
    has = random.random((60, 30)) < 0.2
    for month in range(12):
        rows += [(user, item, month) for user, item in np.argwhere(has).tolist()]
        has = np.where(random.random(has.shape) < kept, has, random.random(has.shape) < 0.2)
    log = pd.DataFrame(rows, columns=["customer", "fund_id", "month"])
    log["month"] = pd.to_datetime("2025-01-01") + pd.to_timedelta(31 * log["month"], unit="D")
    log["month"] = log["month"].astype(str).astype("category") if kept < 1 else log["month"]
    log.to_parquet(tmp_path / "log.parquet")
    found = recpo.init(tmp_path / "log.parquet", tmp_path / "out", columns=Columns(item_id="fund_id"))
    assert found.has_snapshots == (kept == 1.0)
    text = (tmp_path / "out" / "prepare.yaml").read_text()
    assert ("these are snapshots, so lists do not repeat items.\nrepeats: false" in text) == found.has_snapshots


def test_numbers_of_plays_have_a_scale_that_the_largest_do_not_decide(tmp_path):
    log = events()[["user", "item"]].drop_duplicates()
    plays = np.ceil(np.random.default_rng(0).lognormal(1.0, 1.5, len(log)))
    log.assign(plays=plays.astype(int)).to_parquet(tmp_path / "log.parquet")
    found = inspect_log(tmp_path / "log.parquet")
    low, high = found.label.init_args.values()
    assert (found.column("label"), low) == ("plays", 1)
    assert np.mean(plays >= high) == pytest.approx(0.1, abs=0.03)
    assert f"up to {plays.max():g}" in found.label.why
    data = recpo.prepare(out=tmp_path / "prepared", progress=False, **preparation_of(found))
    assert data.manifest["counts"]["splits"]["train"]["positive"] > 0.1 * len(log)


@pytest.mark.parametrize(("name", "key"), [("rating", "item"), ("session_length", "user")])
def test_a_number_that_each_item_or_user_has_once_is_no_feedback(name, key, tmp_path):
    log = events()[["user", "item", "second"]]
    log[name] = 10 + log[key] % 7
    log.assign(stars=events()["rating"]).to_csv(tmp_path / "log.csv", index=False)
    found = inspect_log(tmp_path / "log.csv")
    assert (found.column("label"), found.column("watch_time")) == ("stars", None)
    assert name in found.unused
    assert any(doubt.startswith(f"`{name}` is not read as the") for doubt in found.doubts)


def test_ids_that_cannot_be_those_of_users_and_items_are_asked_about(tmp_path):
    log = events()[["user", "item", "second", "rating"]]
    for column, values, said in (
        ("item", 7, "item_id: `item` has one value in all rows (7)"),
        ("user", np.arange(len(log)), "user_id: `user` has another value in nearly every row (0)"),
    ):
        log.assign(**{column: values}).to_parquet(tmp_path / "log.parquet")
        (question,) = inspect_log(tmp_path / "log.parquet").questions
        assert question.startswith(said)
        given = recpo.Columns(**{f"{column}_id": column})
        assert inspect_log(tmp_path / "log.parquet", columns=given).questions == ()


def test_a_user_with_very_many_events_may_be_nobody(tmp_path):
    log = events()[["user", "item", "second", "rating"]]
    log.loc[::3, "user"] = -1
    log.to_parquet(tmp_path / "log.parquet")
    (doubt,) = inspect_log(tmp_path / "log.parquet").doubts
    assert doubt.startswith("`user` -1 has 33% of the events")


def test_a_directory_is_inspected_prepared_and_inspected_again_in_place(tmp_path, monkeypatch, capsys):
    events()[["user", "item", "second", "rating"]].to_csv(tmp_path / "log.csv", index=False)
    monkeypatch.chdir(tmp_path)
    assert main(["init", "."]) == 0
    assert main(["prepare", "--config", "prepare.yaml"]) == 0
    found = recpo.init(".", "again")
    assert (found.sample.files, found.tables) == ((Path("log.csv"),), {})


def test_what_names_of_directories_say_is_reported_and_asked_for_where_there_is_no_time(tmp_path):
    log = events()[["user", "item", "second", "rating"]]
    for day, rows in log.groupby(log["second"] // 86_400):
        (tmp_path / f"day={day}").mkdir()
        rows.to_parquet(tmp_path / f"day={day}" / "part.parquet")
    assert any("`day`: in the names of directories only" in doubt for doubt in inspect_log(tmp_path).doubts)
    for file in tmp_path.rglob("*.parquet"):
        pd.read_parquet(file).drop(columns="second").to_parquet(file)
    (question,) = inspect_log(tmp_path).questions
    assert question.startswith("timestamp: `day`")
    assert inspect_log(tmp_path, columns=Columns(time_unit="none")).questions == ()


@pytest.mark.parametrize(("names", "said"), [(["shop-views", "shop-purchases"], 1), (["2026-01", "2026-02"], 0)])
def test_files_that_are_called_as_kinds_of_events_are_doubted(names, said, tmp_path):
    for name in names:
        events()[["user", "item", "second"]].to_csv(tmp_path / f"{name}.csv", index=False)
    doubts = inspect_log(tmp_path).doubts
    assert sum("are called as kinds of events" in doubt for doubt in doubts) == said


def test_the_days_that_decide_are_asked_for_new_users_too(tmp_path):
    """A quarter of a small log decides: most people of the last week are new, and few of those of the last two days."""
    random, first = np.random.default_rng(0), np.concatenate([np.zeros(40), 21 + np.arange(160) % 7])
    user = np.repeat(np.arange(200), 20)
    day = first[user] + (28 - first[user]) * random.random(len(user)) ** np.where(first[user], 1.0, 1.5)
    log = pd.DataFrame(
        {"user": user, "item": random.integers(0, 50, len(user)), "clicked": random.integers(0, 2, len(user))}
    )
    log["timestamp"] = (1_700_006_400 + day * 86_400).astype(np.int64)
    log.to_parquet(tmp_path / "log.parquet")
    found = recpo.init(tmp_path / "log.parquet", tmp_path / "out")
    split = TemporalSplit(**found.split.init_args)
    decided, (why,) = _decided_by(found, split)
    assert (found.split.class_name, decided.test_share) == ("TemporalSplit", 0.1)
    assert "are of users without earlier ones" in why
    known = replace(found, counts=replace(found.counts, by_first_day=()))
    assert isinstance(_decided_by(known, split)[0], TemporalSplit)
