"""A nightly update from the command line, in a living world: extend, continue training, evaluate, export, refresh."""

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import recpo
from recpo.cli.main import main
from recpo.serving.bundle import Bundle

DAY_MS = 86_400_000
TRAIN = {
    "policy": {
        "class_path": "CatalogSoftmaxPolicy",
        "init_args": {
            "dim": 8,
            "layers": 1,
            "heads": 1,
            "max_history": 20,
            "item_features": {"hidden": 8},
            "user_features": True,
            "context_features": True,
            "behaviors": True,
        },
    },
    "data": {"layout": {"class_path": "SequenceLayout", "init_args": {"history_length": 20}}},
    "objective": {"class_path": "Likelihood", "init_args": {"positive_only": True}},
    "trainer": {"max_epochs": 1, "logger": False},
}
FEATURES = [
    {"class_path": "Category", "init_args": {"name": "author"}},
    {"class_path": "Categories", "init_args": {"name": "tags"}},
    {"class_path": "Number", "init_args": {"name": "duration", "log": True}},
    {"class_path": "Vector", "init_args": {"name": "content"}},
]


def write_days(world, folder):
    """The log and the items of the first days and of the last one, and all users."""
    log = pq.read_table(world.log)
    day = pc.divide(pc.subtract(log["timestamp"], pc.min(log["timestamp"])), DAY_MS).to_numpy()
    hour = pc.cast(pc.divide(pc.subtract(log["timestamp"], pc.min(log["timestamp"])), 3_600_000), pa.float64())
    finished = pc.cast(pc.greater_equal(log["watch_time"], log["duration"]), pa.int8())
    log = log.append_column("hour", hour).append_column("finished", finished)
    items, last = pq.read_table(world.items), int(day.max())
    for name, chosen, until in (("first", day < last, last), ("second", day == last, last + 1)):
        pq.write_table(log.filter(pa.array(chosen)), folder / f"{name}.parquet")
        begin = world.truth.preferences.parameters.start_ms
        pq.write_table(
            items.filter(pc.less(items["available_from"], begin + until * DAY_MS)), folder / f"{name}-items.parquet"
        )
    users = pq.read_table(world.users)
    pq.write_table(users, folder / "users.parquet")
    context = pa.table({"user_id": users["user_id"], "hour": pa.array(np.full(len(users), 20.0))})
    pq.write_table(context, folder / "context.parquet")


@pytest.mark.slow
def test_a_night_from_the_command_line(tmp_path):
    sizes = {"users": 30, "items": 60, "events": 1500, "days": 6, "births": 0.1}
    world = recpo.simulate(tmp_path / "world", world="living", **sizes)
    write_days(world, tmp_path)
    (tmp_path / "train.json").write_text(json.dumps(TRAIN))
    place = {name: str(tmp_path / name) for name in ("monday", "tuesday", "run-1", "run-2", "eval", "bundle", "fresh")}
    files = {name: str(tmp_path / f"{name}.parquet") for name in ("first", "second", "users", "context", "lists")}
    items = {name: str(tmp_path / f"{name}-items.parquet") for name in ("first", "second")}
    train, engine = ["train", "--config", str(tmp_path / "train.json")], ["--threads", "1", "--memory_limit", "512MB"]
    asked = ["--features.available_from", "available_from", "--behaviors", '{"finished": "finished"}']
    asked += ["--features.context", '[{"class_path": "Number", "init_args": {"name": "hour"}}]']
    asked += ["--features.item", json.dumps(FEATURES)]
    monday = ["prepare", "--log", files["first"], "--items", items["first"], "--users", files["users"], *engine, *asked]
    tuesday = ["prepare", "--extends", place["monday"], "--log", files["second"], *engine]
    newest = ["--data.segments", "newest", "--data.replay", "1.0"]
    judged = ["--truth", str(tmp_path / "world" / "truth"), "--contenders", "[popularity]", "--ks", "[5]"]
    judged += ["--segments", "false", "--off_policy", "null", "--bootstrap_resamples", "5"]
    asking = ["--histories", str(tmp_path / "tuesday" / "histories.parquet"), "--user_features", files["users"]]
    asking += ["--context", files["context"]]
    steps = [
        [*monday, "--out", place["monday"]],
        [*train, "--data.prepared", place["monday"], "--out", place["run-1"]],
        [*tuesday, "--items", items["second"], "--users", files["users"], "--out", place["tuesday"]],
        [*train, *newest, "--init_from", place["run-1"], "--data.prepared", place["tuesday"], "--out", place["run-2"]],
        ["evaluate", "--prepared", place["tuesday"], "--contenders", place["run-2"], "--out", place["eval"], *judged],
        ["export", "--run", place["run-2"], "--out", place["bundle"]],
        ["export", "--refresh", place["bundle"], "--items", items["second"], "--out", place["fresh"]],
        ["recommend", "--source", place["fresh"], "--out", files["lists"], *asking],
    ]
    for words in steps:
        assert main(words) == 0, words
    before, now = (recpo.Prepared.open(place[name]) for name in ("monday", "tuesday"))
    assert before.num_items < now.num_items
    assert recpo.Run.open(place["run-2"]).num_items == now.num_items
    evaluated = recpo.load(place["eval"]).to_pandas().query("metric == 'true_reward@5'")
    assert "run-2" in set(evaluated["contender"])
    born = set(pq.read_table(items["second"])["item_id"].to_pylist())
    known = set(now.table("items.parquet", ["item_id"]).column(0).to_pylist())
    assert len(Bundle.open(place["fresh"]).items) == len(known | born) > len(known)
    listed = set(pd.read_parquet(files["lists"])["item_id"])
    assert listed & (born - known)
