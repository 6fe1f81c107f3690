"""docs/objectives.md has an entry for every objective, complete, with a picture and a configuration that builds it."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
import runpy
import sys
from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentParser

import recpo.objectives
from recpo.base.contracts import AdvantageEstimator, Objective

DOCS = Path(__file__).parent.parent / "docs"
TEXT = (DOCS / "objectives.md").read_text(encoding="utf-8")
ENTRIES = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))
PARTS = ("Formula", "Paper", "Gradient", "Configuration", "Departures")


def objectives():
    for module in pkgutil.iter_modules(recpo.objectives.__path__, "recpo.objectives."):
        for name, cls in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if cls.__module__ == module.name and issubclass(cls, Objective) and not inspect.isabstract(cls):
                yield name, cls


CLASSES = dict(objectives())


def test_every_entry_names_an_objective():
    assert set(ENTRIES) <= set(CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_every_objective_has_a_complete_entry(name):
    assert name in ENTRIES, f"docs/objectives.md lacks an entry '## {name}'"
    assert [part for part in PARTS if f"**{part}.**" not in ENTRIES[name]] == []
    own = {field for field in inspect.get_annotations(CLASSES[name]) if not field.startswith("_")}
    assert {field for field in own if field not in ENTRIES[name]} <= {"kl_coef", "aggregation"}


@pytest.mark.parametrize("name", CLASSES)
def test_the_configuration_builds_it(name):
    (snippet,) = re.findall(r"```yaml\n(.*?)```", ENTRIES[name], re.DOTALL)
    config = yaml.safe_load(snippet)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--objective", type=Objective)
    parser.add_argument("--advantage", type=AdvantageEstimator)
    built = parser.instantiate_classes(
        parser.parse_object({k: config[k] for k in ("objective", "advantage") if k in config})
    )
    assert type(built.objective) is CLASSES[name]
    options = config["objective"]["init_args"]
    assert dataclasses.asdict(built.objective) == dataclasses.asdict(built.objective) | options


@pytest.mark.parametrize("name", CLASSES)
def test_the_entry_shows_its_picture(name):
    (picture,) = re.findall(r"!\[[^\]]+\]\((images/\w+\.svg)\)", ENTRIES[name])
    assert Path(picture).stem.replace("_", "") == name.lower()
    assert (DOCS / picture).read_text(encoding="utf-8").startswith("<?xml")
    assert (DOCS / picture).stat().st_size < 40_000, f"{picture} is large: fewer points or ticks"


@pytest.mark.slow
def test_the_script_draws_the_pictures(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    script = str(DOCS / "plot_objectives.py")
    monkeypatch.setattr(sys, "argv", [script, "--out", str(tmp_path), "--only", "gbpo", "margin_listwise_dpo"])
    runpy.run_path(script, run_name="__main__")
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == ["gbpo.svg", "margin_listwise_dpo.svg"]
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    assert not ended.value.code
    offered = capsys.readouterr().out
    committed = {path.stem for path in (DOCS / "images").iterdir()}
    assert committed <= set(re.findall(r"\w+", offered))
    assert {re.sub("_", "", name) for name in committed} == {name.lower() for name in CLASSES}
