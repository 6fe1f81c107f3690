"""export and recommend on a small simulated log, through the command line."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import recpo
from recpo.artifacts.checksums import sha256
from recpo.base.feedback import HIGHEST
from recpo.batches.slates import evaluation_batches
from recpo.cli.main import main
from recpo.log.prepared import Prepared
from recpo.serving.bundle import Bundle
from recpo.serving.histories import HistoryReader
from recpo.training.run import Run, checkpoint_path
from recpo.verbs.recommend import recommend

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["items.parquet", "feedback.json", "resolved.yaml", "checkpoints/best.ckpt"])
def test_a_run_that_has_changed_is_not_exported(road, tmp_path, capsys, name):
    run = Path(shutil.copytree(road / "run-0", tmp_path / "run"))
    content = bytearray((run / name).read_bytes())
    content[len(content) // 2] ^= 1
    (run / name).write_bytes(content)
    assert main(["export", "--run", str(run), "--out", str(tmp_path / "bundle")]) == 1
    assert f"{name} (changed)" in capsys.readouterr().err
    assert not (tmp_path / "bundle").exists()


def test_item_ids_in_another_order_are_never_recommended_from(road, tmp_path, capsys):
    """Reversed item ids gave wrong items, exit status 0."""
    run = Path(shutil.copytree(road / "run-0", tmp_path / "run"))
    table = pq.read_table(run / "items.parquet")
    reversed_ids = pa.array(table["item_id"].to_pylist()[::-1], table["item_id"].type)
    place = table.column_names.index("item_id")
    pq.write_table(table.set_column(place, "item_id", reversed_ids), run / "items.parquet")
    histories = str(road / "prepared" / "histories.parquet")
    for verb in (["export", "--run"], ["recommend", "--histories", histories, "--source"]):
        assert main([*verb, str(run), "--out", str(tmp_path / "out")]) == 1
        assert "items.parquet (changed)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_elsewhere_without_its_data_exports_and_recommends(road, histories, tmp_path):
    run = Path(shutil.copytree(road / "run-0", tmp_path / "on another machine" / "run"))
    (tmp_path / "in").mkdir()
    events = histories.to_parquet(tmp_path / "in" / "histories.parquet") or tmp_path / "in" / "histories.parquet"
    lists = tmp_path / "lists.parquet"
    assert main(["recommend", "--source", str(run), "--histories", str(events), "--out", str(lists), "--k", "5"]) == 0
    assert main(["export", "--run", str(run), "--out", str(tmp_path / "bundle")]) == 0
    served, expected = recommend(tmp_path / "bundle", events, 5), pd.read_parquet(lists)
    assert served["item_id"].tolist() == expected["item_id"].tolist()
    np.testing.assert_allclose(served["score"], expected["score"], atol=1e-4)
    assert served.drop(columns="score").equals(recpo.recommend(run, histories, 5).drop(columns="score"))


def test_recommend_needs_a_source_and_an_output(road, tmp_path, capsys):
    options = ["--histories", str(road / "prepared" / "histories.parquet")]
    assert main(["recommend", *options, "--out", str(tmp_path / "o.parquet")]) == 2
    assert "source" in capsys.readouterr().err
    assert main(["recommend", str(road / "bundle"), *options]) == 1
    assert "--out" in capsys.readouterr().err


@pytest.fixture(scope="module")
def histories(road):
    """What prepare hands to a server: the last raw events of every user, without levels."""
    return pd.read_parquet(road / "prepared" / "histories.parquet")


@pytest.mark.parametrize("engine", ["onnx", "torch"])
def test_the_bundle_gives_every_test_user_the_policys_list(road, engine):
    """From raw events with external ids, the lists that evaluation computes from the prepared shards."""
    policy, data = Run.open(road / "run-0").policy(), Prepared.open(road / "prepared")
    bundle, items = Bundle.open(road / "bundle", engine), data.item_ids()
    users = data.table("users.parquet").column("user_id").to_numpy()
    events = held_out_histories(data, users, items)
    for batch in evaluation_batches(road / "prepared", "test", policy.max_history, 32):
        histories = batch.feedback.histories
        with torch.inference_mode():
            expected = policy.recommend(histories, 10, batch.exclude)
        asked = users[batch.user_ids.numpy()]
        pairs = [(user, item) for user, row in zip(asked, external(items, batch.exclude), strict=True) for item in row]
        exclude = pd.DataFrame(pairs, columns=["user_id", "item_id"])
        served = bundle.recommend(events, k=10, exclude=exclude, users=asked)
        assert served["item_id"].tolist() == items.to_external(expected.item_ids.numpy()).to_pylist()
        np.testing.assert_allclose(served["score"].to_numpy(), expected.scores.flatten(), atol=1e-4)


def held_out_histories(data, users, items):
    """The raw events of the test shards before the test period."""
    shards = [data.table(shard["file"]).to_pandas() for shard in data.manifest["shards"]["test"]]
    events = pd.concat(shards).query("not is_target")
    columns = {name: events[name].to_numpy() for name in ("timestamp", "watch_time", "duration", "dislike", "label")}
    item_id = items.to_external(events["item_index"].to_numpy()).to_numpy()
    return pd.DataFrame({"user_id": users[events["user_index"]], "item_id": item_id, **columns})


def test_levels_of_raw_histories_are_those_of_prepare(road, histories):
    """A server sees what training saw: the levels of the shards, from raw watch times."""
    data = Prepared.open(road / "prepared")
    items = data.item_ids()
    read = HistoryReader(items, data.feedback, 1000).read(histories)
    ((_, encoded),) = read.batches(10**9)
    levels = {}
    for shard in data.manifest["shards"]["test"] + data.manifest["shards"]["train"]:
        rows = data.table(shard["file"]).to_pandas()
        keys = zip(rows["user_index"], rows["item_index"], rows["timestamp"], rows["feedback"], strict=True)
        levels |= {(user, item, time): level for user, item, time, level in keys}
    index = {user: row for row, user in enumerate(data.table("users.parquet").column("user_id").to_pylist())}
    compared = 0
    for row, user in enumerate(read.users.to_pylist()):
        times = sorted(histories["timestamp"][histories["user_id"] == user])
        for item, level, time in zip(encoded.item_ids[row], encoded.feedback[row], times, strict=False):
            if (index[user], item, time) in levels:
                assert level == levels[index[user], item, time]
                compared += 1
    assert compared > len(histories) / 2
    assert set(encoded.feedback.flatten().tolist()) == set(range(HIGHEST + 1))


def external(items, ids):
    return [items.to_external(row[row > 0]).to_pylist() for row in ids.numpy()]


def test_recommend_serves_the_histories_of_prepare(road, histories, tmp_path, capsys):
    out = tmp_path / "lists.parquet"
    options = ["--source", str(road / "bundle"), "--histories", str(road / "prepared" / "histories.parquet")]
    assert main(["recommend", *options, "--out", str(out), "--k", "5", "--batch_size", "16", "--show", "2"]) == 0
    printed = capsys.readouterr().out
    assert "up to 5 items each" in printed
    assert str(histories["user_id"].iloc[0]) in printed
    lists = pd.read_parquet(out)
    assert lists.groupby("user_id", sort=False)["rank"].apply(list).map(lambda ranks: ranks == [1, 2, 3, 4, 5]).all()
    assert lists["user_id"].unique().tolist() == histories["user_id"].unique().tolist()
    assert lists.merge(histories, on=["user_id", "item_id"]).empty
    expected = Bundle.open(road / "bundle").recommend(histories, k=5)
    assert lists["item_id"].tolist() == expected["item_id"].tolist()


def test_users_and_exclusions_of_the_command_line(road, histories, tmp_path):
    users, exclude = tmp_path / "users.parquet", tmp_path / "exclude.parquet"
    known, new = histories["user_id"].iloc[-1], 10**9
    bundle = Bundle.open(road / "bundle")
    best = bundle.recommend(histories, k=2, users=[known, new])
    pd.DataFrame({"user_id": [new, known]}).to_parquet(users)
    best[["user_id", "item_id"]].to_parquet(exclude)
    options = ["--source", str(road / "bundle"), "--histories", str(road / "prepared" / "histories.parquet")]
    options += ["--users", str(users), "--exclude", str(exclude), "--out", str(tmp_path / "o.parquet"), "--k", "3"]
    assert main(["recommend", *options]) == 0
    lists = pd.read_parquet(tmp_path / "o.parquet")
    assert lists["user_id"].tolist() == [known] * 3 + [new] * 3
    assert lists.merge(best, on=["user_id", "item_id"]).empty


@pytest.mark.parametrize("target", ["histories", "bundle", "inside", "device", "directory"])
def test_an_output_that_is_an_input_or_no_file_is_refused(road, tmp_path, capsys, target):
    """`--out HISTORIES` replaced its own input, and a device node became a file."""
    source = Path(shutil.copy(road / "prepared" / "histories.parquet", tmp_path / "histories.parquet"))
    bundle = Path(shutil.copytree(road / "bundle", tmp_path / "bundle"))
    content = source.read_bytes()
    places = {"histories": source, "bundle": bundle, "inside": bundle / "lists.parquet", "device": Path("/dev/null")}
    out = places.get(target, tmp_path)
    assert main(["recommend", "--source", str(bundle), "--histories", str(source), "--out", str(out)]) == 1
    assert str(out) in capsys.readouterr().err
    assert source.read_bytes() == content
    assert not Path("/dev/null").is_file()
    Bundle.open(bundle)


def test_users_that_do_not_stand_together_are_refused(road, histories, tmp_path, capsys):
    histories.sort_values("timestamp").to_parquet(tmp_path / "by_time.parquet", row_group_size=50)
    options = ["--histories", str(tmp_path / "by_time.parquet"), "--out", str(tmp_path / "o.parquet")]
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr("recpo.verbs.recommend._ROWS_AT_ONCE", 50)
    with monkeypatch.context():
        assert main(["recommend", "--source", str(road / "bundle"), *options]) == 1
        assert "are not adjacent" in capsys.readouterr().err
        whole = road / "prepared" / "histories.parquet"
        counts = recommend(road / "bundle", whole, 3, out=tmp_path / "o.parquet")
    monkeypatch.undo()
    assert counts.events == len(histories)
    assert counts.users == histories["user_id"].nunique()
    frame = recommend(road / "bundle", histories, 3)
    assert pd.read_parquet(tmp_path / "o.parquet")["item_id"].tolist() == frame["item_id"].tolist()


@pytest.mark.parametrize("content", [None, b"", b"PAR1 cut off"])
def test_unreadable_histories_are_refused(road, tmp_path, capsys, content):
    histories = tmp_path / "histories.parquet"
    if content is not None:
        histories.write_bytes(content)
    options = ["--source", str(road / "bundle"), "--histories", str(histories), "--out", str(tmp_path / "o.parquet")]
    assert main(["recommend", *options]) == 1
    assert str(histories) in capsys.readouterr().err
    assert not (tmp_path / "o.parquet").exists()


def test_export_refuses_an_existing_output_and_caps_k_at_the_catalog(road, capsys):
    options = ["--run", str(road / "run-0"), "--out", str(road / "bundle")]
    assert main(["export", *options]) == 1
    assert "exists already" in capsys.readouterr().err
    bundle = Bundle.open(road / "bundle")
    assert bundle.k == min(100, bundle.manifest.num_items)
    assert bundle.feedback == Prepared.open(road / "prepared").feedback
    assert bundle.manifest.policy["class"].endswith("CatalogSoftmaxPolicy")
    assert bundle.manifest.origin["weights"] == sha256(checkpoint_path(road / "run-0", "best"))


def test_forms_of_a_large_catalog_through_the_command_line(road, tmp_path, capsys):
    pytest.importorskip("faiss", reason="faiss is not installed (pip install recpo[index])")
    run, indexed, rounded = str(road / "run-0"), tmp_path / "indexed", tmp_path / "rounded"
    export = ["export", "--run", run, "--k", "5", "--out"]
    assert main([*export, str(indexed), "--index.recall", "0.5"]) == 0
    assert "the index looks into" in capsys.readouterr().out
    assert main([*export, str(rounded), "--item_precision", "float16"]) == 0
    assert "float16: of the 10 best items" in capsys.readouterr().out
    whole = tmp_path / "whole"  # tests/serving/test_compiled.py compiles a bundle; the program lies outside
    assert main([*export, str(whole), "--compiled", str(whole / "program.pt2")]) == 1
    assert f"program.pt2 is inside {whole}" in capsys.readouterr().err
    assert not whole.exists(), "it is refused before anything is exported"
    histories, lists = str(road / "prepared" / "histories.parquet"), str(tmp_path / "lists.parquet")
    answer = ["recommend", "--histories", histories, "--out", lists, "--source"]
    assert main([*answer, str(indexed), "--provider", "CPUExecutionProvider"]) == 0
    assert len(pd.read_parquet(lists))
    assert main([*answer, str(rounded), "--provider", "GPU"]) == 1
    assert "provider is 'GPU'" in capsys.readouterr().err
    evaluate = ["evaluate", "--prepared", str(road / "prepared"), "--out", str(tmp_path / "evaluation")]
    evaluate += ["--baselines", "false", "--segments", "false", "--off_policy", "null", "--contenders"]
    assert main([*evaluate, f"[{run}, {indexed}]", "--ks", "[5]"]) == 0
    assert "indexed" in capsys.readouterr().out
    # what a bundle cannot do
    evaluate += [str(rounded), "--overwrite", "true"]
    assert main([*evaluate, "--ks", "[7]"]) == 1
    assert "serves lists of up to 5, and ks asks for 7" in capsys.readouterr().err
    # a bundle without repeats does not list the history, whatever it may
    assert main([*evaluate, "--contenders", str(run), "--ks", "[5]", "--repeats", "true"]) == 0
    served = recpo.load(tmp_path / "evaluation").to_pandas().set_index(["contender", "metric"])["mean"]
    assert served[rounded.name, "repeat_rate@5"] < served[Path(run).name, "repeat_rate@5"]
