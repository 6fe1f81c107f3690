import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from recpo.cli.main import main
from recpo.log.prepared import Prepared
from tests.log.conftest import DAY_MS, START_MS, make_log

SAMPLE = Path(__file__).parents[2] / "data" / "sample.parquet"


def prepare(*arguments):
    return main(["prepare", *map(str, arguments)])


@pytest.mark.slow
def test_from_a_foreign_log_through_yaml(tmp_path, capsys):
    rows = [
        (user, item, 1_700_000_000 + 60 * (7 * user + item), user % 2 == item % 2)
        for user in (1, 2, 3)
        for item in (5, 6, 7)
    ]
    who, what, when, click = map(list, zip(*rows, strict=True))
    pq.write_table(pa.table({"who": who, "what": what, "when": when, "click": click}), tmp_path / "clicks.parquet")
    (tmp_path / "prepare.yaml").write_text(
        f"""
log: [{tmp_path}/clicks.parquet]
out: {tmp_path}/prepared
columns: {{user_id: who, item_id: what, timestamp: when, label: click, time_unit: s}}
split: {{class_path: LeaveLastOut}}
label: BinaryColumn
catalog: log
"""
    )
    assert prepare("--config", tmp_path / "prepare.yaml") == 0
    printed = capsys.readouterr().out
    assert "3 users, 3 items" in printed
    assert "user_id (from who)" in printed
    manifest = json.loads((tmp_path / "prepared/manifest.json").read_text())
    assert manifest["config"]["label"]["class_path"].endswith("BinaryColumn")
    assert manifest["config"]["log"] == ["clicks.parquet"]
    assert prepare("--config", tmp_path / "prepare.yaml") == 1
    assert "exists already" in capsys.readouterr().err
    assert prepare("--config", tmp_path / "prepare.yaml", "--overwrite", "true") == 0


@pytest.mark.slow
def test_an_extension_is_followed_by_a_warm_start(tmp_path, capsys):
    log = make_log()
    is_new = pc.greater_equal(log["timestamp"], START_MS + 5 * DAY_MS)
    for name, rows in (("first", log.filter(pc.invert(is_new))), ("second", log.filter(is_new))):
        pq.write_table(rows, tmp_path / f"{name}.parquet")
    words = ["prepare", "--progress", "false", "--log", f"{tmp_path}/first.parquet", "--out", f"{tmp_path}/one"]
    assert main(words) == 0
    assert "next: recpo train --config" in capsys.readouterr().out
    words = [*words[:3], "--log", f"{tmp_path}/second.parquet", "--out", f"{tmp_path}/two"]
    assert main([*words, "--extends", f"{tmp_path}/one"]) == 0
    said = capsys.readouterr().out
    assert f"next: recpo train --init_from runs/pretrain --data.prepared {tmp_path}/two" in said
    assert "--data.segments newest" in said


@pytest.mark.parametrize("option", ["--log", "--items", "--users"])
def test_a_list_without_files_is_refused(tmp_path, capsys, option):
    words = ["--log", str(SAMPLE)] if option != "--log" else []
    assert main(["prepare", *words, option, "[]", "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert f"{option.strip('-')}: an empty list names no file" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_faults_end_without_a_traceback(tmp_path):
    pq.write_table(pa.table({"user": [1, None], "item_id": [1, 2], "timestamp": [1, 2]}), tmp_path / "log.parquet")
    words = ["--log", tmp_path / "log.parquet", "--out", tmp_path / "out", "--label", "EveryEvent"]
    command = [sys.executable, "-m", "recpo.cli.main", "prepare", *map(str, words)]
    failed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert "Traceback" not in failed.stderr
    assert "2 faults" in failed.stderr
    assert "near: user;" in failed.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_into_an_object_store_and_never_by_accident_elsewhere(tmp_path, capsys, monkeypatch):
    assert prepare("--log", f"file://{SAMPLE}", "--out", f"file://{tmp_path}/out", "--work", tmp_path / "work") == 0
    assert f"file://{tmp_path}/out: 60 users, 60 items" in capsys.readouterr().out
    assert not list((tmp_path / "work").iterdir())
    Prepared.open(f"file://{tmp_path}/out").verify()
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", "--out", "s3://bucket/log"]) == 1
    assert "--out s3:/bucket/log: a local path is expected" in capsys.readouterr().err
    assert not (tmp_path / "s3:").exists()


@pytest.mark.slow
def test_the_help_explains_every_option(capsys):
    assert prepare("--help", "all") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "One error lists every fault of the log" in text
    assert "unit of a numeric ``timestamp``, since 1970-01-01 UTC; of dates that are not written as in ISO 8601" in text
