"""What a demo refuses; test_fit.py has a whole one."""

import pytest

from recpo.cli.main import main


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--overwrite", "true"], "files that recpo did not write"),
        ([], "exists already"),
        (["--events", "0", "--overwrite", "true"], "events: expected a number >0, got 0"),
    ],
)
def test_a_demo_takes_the_place_of_nothing_but_a_demo(tmp_path, capsys, options, message):
    (tmp_path / "precious").write_text("mine", encoding="utf-8")
    assert main(["demo", "--out", str(tmp_path), *options]) in (1, 2)
    assert message in capsys.readouterr().err
    assert (tmp_path / "precious").read_text(encoding="utf-8") == "mine"
