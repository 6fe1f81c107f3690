"""No malformed input of evaluate and calibrate ends in a traceback or damages existing outputs."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml

import recpo
from recpo.cli.main import main
from recpo.evaluation.evaluation import Evaluation
from tests.cli.conftest import SMALL
from tests.refusals import refused

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(world, prepared, tmp_path_factory, request):
    """Paths by name: a simulation, prepared data, a run and a bundle."""
    root, config = tmp_path_factory.mktemp("made"), str(request.config.rootpath / "configs" / "pretrain.yaml")
    out = ["--data.prepared", str(prepared), "--out", str(root / "run-0")]
    assert main(["train", "--config", config, *out, *SMALL]) == 0
    recpo.export("popularity", prepared=prepared, out=root / "bundle")
    return {"log": world, "prepared": prepared, "run-0": root / "run-0", "bundle": root / "bundle"}


@pytest.fixture
def place(made, tmp_path):
    """These paths, and a directory of the test's own."""
    return {name: str(path) for name, path in made.items()} | {"tmp": str(tmp_path)}


def evaluate(place, *options):
    given = {"--prepared": place["prepared"], "--out": f"{place['tmp']}/evaluation", "--contenders": "[random]"}
    given |= {"--segments": "false", "--off_policy": "null"}
    given |= {name: value.format(**place) for name, value in zip(options[::2], options[1::2], strict=True)}
    return main(["evaluate", *(word for pair in given.items() for word in pair)])


def said(capsys):
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "Traceback" not in error
    return error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ks", "[0]"), "ks: expected a number >0, got 0"),
        (("--ks", "[-3]"), "ks: expected"),
        (("--ks", "[]"), "ks must be"),
        (("--ks", "[5,5]"), "ks must be"),
        (("--ks", "[2.5]"), "ks"),
        (("--ks", "ten"), "ks"),
        (("--contenders", "[best]"), "nor a baseline"),
        (("--contenders", "[random,random]"), "two contenders have the name random"),
        (("--contenders", "[]", "--baselines", "false"), "nothing to evaluate"),
        (("--batch_size", "0"), "batch_size"),
        (("--bootstrap_resamples", "-1"), "bootstrap_resamples"),
        (("--split", "train"), "split"),
        (("--gain", "cubic"), "gain"),
        (("--checkpoint", "first"), "checkpoint"),
        (("--device", "abacus"), "device 'abacus' cannot be used here"),
        (("--prepared", "{run-0}"), "expected prepared data"),
        (("--prepared", "nowhere"), "nowhere: expected prepared data"),
        (("--contenders", "nowhere"), "nowhere is neither a run nor a bundle"),
        (("--contenders", "{prepared}"), "is neither a run nor a bundle"),
        (("--contenders", "{log}"), "is neither a run nor a bundle"),
        (("--contenders", "[{run-0},{run-0}]"), "named twice"),
        (("--truth", "{prepared}"), "prepared"),
        (
            ("--item_features.file", "{prepared}/items.parquet", "--item_features.tags", "none"),
            "column 'none' is missing",
        ),
        (("--out", "{run-0}", "--contenders", "{run-0}", "--overwrite", "true"), "run-0"),
        (("--out", "{run-0}", "--overwrite", "true"), "run-0"),
        (("--out", "{prepared}", "--overwrite", "true"), "prepared"),
        (("--out", "{prepared}/evaluation"), "prepared"),
        (("--out", "{bundle}", "--overwrite", "true"), "bundle"),
        (("--out", "/dev/null", "--overwrite", "true"), "/dev/null"),
        (("--off_policy.resamples", "0", "--off_policy", "{{}}"), "resamples"),
    ],
)
def test_malformed_options(place, capsys, options, message):
    before = sorted(str(file) for name in ("run-0", "prepared", "bundle") for file in _files(place[name]))
    assert evaluate(place, *options) in (1, 2)
    assert message in said(capsys)
    assert sorted(str(file) for name in ("run-0", "prepared", "bundle") for file in _files(place[name])) == before
    assert _files(place["tmp"]) == []


def _files(directory):
    from pathlib import Path

    return [file for file in Path(directory).rglob("*") if file.is_file()]


DAMAGE = [
    ("run.json", None),
    ("run.json", b""),
    ("run.json", b"{"),
    ("run.json", b"[]"),
    ("run.json", b"{}"),
    ("run.json", b"\xff\xfe\x00"),
    ("resolved.yaml", None),
    ("resolved.yaml", b"policy: ["),
    ("resolved.yaml", b"1"),
    ("checkpoints/best.ckpt", None),
    ("checkpoints/best.ckpt", b"no checkpoint"),
]


@pytest.mark.parametrize(("file", "content"), DAMAGE)
def test_damaged_runs(place, tmp_path, capsys, file, content):
    run = shutil.copytree(place["run-0"], tmp_path / "damaged" / "run")
    if content is None:
        (run / file).unlink()
    else:
        (run / file).write_bytes(content)
    assert evaluate(place, "--contenders", str(run)) == 1
    said(capsys)


@pytest.mark.parametrize("name", ["[/x]", "[red]x[/red]", "a\\:smile:"])
def test_names_and_paths_are_never_markup(place, tmp_path, capsys, name):
    run = shutil.copytree(place["run-0"], tmp_path / name)
    out = tmp_path / f"out {name}"
    given = {"--prepared": place["prepared"], "--out": str(out), "--contenders": json.dumps([str(run)])}
    options = [word for pair in given.items() for word in pair]
    assert main(["evaluate", *options, "--contenders", "[random]", "--ks", "[5]"]) == 0
    printed = capsys.readouterr().out
    assert name in printed
    assert f"out {name}/report.html" in printed.replace("\n", "")


@pytest.mark.parametrize(
    ("content", "code"),
    [(b"", "damaged"), (b"{", "damaged"), (b"[]", "damaged"), (b"{}", "old_format"), (b"\xff", "damaged")],
)
def test_a_damaged_evaluation_is_not_opened(place, tmp_path, content, code):
    found = recpo.evaluate(place["prepared"], ["random"], ks=[3], off_policy=None, segments=False)
    found.write(tmp_path / "evaluation")
    (tmp_path / "evaluation" / "metrics.json").write_bytes(content)
    with refused(code, ...):
        Evaluation.open(tmp_path / "evaluation")


def test_an_old_evaluation_and_a_foreign_directory_are_not_opened(place, tmp_path):
    found = recpo.evaluate(place["prepared"], ["random"], ks=[3], off_policy=None, segments=False)
    found.write(tmp_path / "evaluation")
    (tmp_path / "evaluation" / "metrics.json").write_text(json.dumps(found.document | {"format_version": 2}))
    with refused("old_format", ...):
        Evaluation.open(tmp_path / "evaluation")
    with refused("wrong_file", "metrics.json"):
        Evaluation.open(place["run-0"])
    found.write(tmp_path / "evaluation", overwrite=True)
    for content in ("[", "1", ""):
        (tmp_path / "evaluation" / "resolved.yaml").write_text(content)
        with refused("damaged", ...):
            Evaluation.open(tmp_path / "evaluation")


def test_the_same_options_are_written_from_python_and_from_the_command_line(place, tmp_path):
    assert evaluate(place, "--contenders", "{run-0}", "--ks", "[4]") == 0
    found = recpo.evaluate(
        place["prepared"],
        place["run-0"],
        out=tmp_path / "python",
        ks=[4],
        segments=False,
        off_policy=None,
    )
    one, other = (yaml.safe_load((tmp_path / n / "resolved.yaml").read_text()) for n in ("evaluation", "python"))
    assert one | {"out": ""} == other | {"out": ""}
    assert "overwrite" not in one
    assert found.document == Evaluation.open(tmp_path / "evaluation").document


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rewards", "{run-0}"), "which is no reward model"),
        (("--rewards", "{prepared}"), "expected a run"),
        (("--rewards", "nowhere"), "expected a run"),
        (("--rewards", "{run-0}", "--batch_size", "0"), "batch_size"),
        (("--rewards", "{run-0}", "--resamples", "0"), "resamples"),
        (("--rewards", "{run-0}", "--prepared", "{log}"), "expected prepared data"),
    ],
)
def test_malformed_options_of_calibrate(place, capsys, options, message):
    given = {"--prepared": place["prepared"]}
    given |= {name: value.format(**place) for name, value in zip(options[::2], options[1::2], strict=True)}
    assert main(["calibrate", *(word for pair in given.items() for word in pair)]) in (1, 2)
    assert message in said(capsys)
