"""``recpo explore``: one file, or pages until Ctrl-C."""

import signal
import urllib.request
from pathlib import Path

import pandas as pd
import pytest

import recpo
from recpo.cli.main import main
from tests.forks import Command
from tests.refusals import refused


@pytest.mark.slow
def test_one_file_with_runs_and_a_bundle(road, tmp_path, capsys):
    out = tmp_path / "page.html"
    given = ["explore", str(road / "prepared"), "--static", str(out), "--k", "5"]
    named = ["--contenders", f"[{road / 'run-0'}, {road / 'run-1'}, {road / 'bundle'}]"]
    assert main([*given, *named]) == 0
    page = out.read_text(encoding="utf-8")
    assert "probability" in page  # of a run
    assert "run-1 instead of run-0" in page
    assert str(out) in capsys.readouterr().out
    assert main([*given, *named]) == 1  # it exists
    before = out.read_bytes()
    assert main([*given, "--overwrite", "true", "--contenders", "[nothing]"]) == 1
    assert out.read_bytes() == before
    assert [*tmp_path.iterdir()] == [out]
    assert main([*given, "--overwrite", "true", "--contenders", "popularity"]) == 0
    assert "Name a second contender" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "code", "field"),
    [
        ({"codes": "nowhere"}, "wrong_file", "manifest.json"),
        ({"server_log": "nowhere"}, "empty", "server_log"),
        ({"item_table": "nowhere.parquet"}, "damaged", "item_table"),
        ({"contenders": "nobody"}, "wrong_file", "nobody"),
    ],
)
def test_what_is_wrong_is_said_before_it_listens(road, options, code, field, tmp_path):
    with refused(code, field):
        recpo.explore(road / "prepared", **{"contenders": "popularity", "static": tmp_path / "p.html", **options})


@pytest.mark.slow
def test_it_listens_until_ctrl_c(road, tmp_path):
    command = Command(["explore", "--source", str(road / "prepared"), "--port", "0"], tmp_path)
    command.until(lambda: command.printed[0].endswith("\n"))
    line = command.printed[0]
    assert line.startswith("open http://127.0.0.1:")
    url = line.split()[1]
    with urllib.request.urlopen(url + "users", timeout=30) as answered:
        assert "popularity" in answered.read().decode()
    command.send(signal.SIGINT)
    assert command.ended(60) == 130
    assert "Traceback" not in "".join(command.printed)


def test_a_table_without_the_items_shows_ids(road, tmp_path):
    pd.DataFrame({"item_id": [-1], "title": ["none"]}).to_parquet(tmp_path / "items.parquet")
    written = recpo.explore(
        road / "prepared", "popularity", static=tmp_path / "p.html", item_table=tmp_path / "items.parquet", users=5
    )
    assert isinstance(written, Path)
    assert "none</a>" not in written.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_fit_of_data_that_were_prepared_before_is_explored(prepared, tmp_path, pretrained_alone):
    decision = recpo.fit(prepared, tmp_path / "fit", minutes=0.05)
    assert decision.prepared.root == Path(prepared).absolute()
    page = recpo.explore(tmp_path / "fit", static=tmp_path / "page.html", users=20)
    assert decision.chosen in page.read_text(encoding="utf-8")
