"""docs/objectives.md has an entry for every objective, complete, with a configuration that builds it."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentParser

import recpo.objectives
from recpo.contracts import AdvantageEstimator, Objective

TEXT = (Path(__file__).parent.parent / "docs" / "objectives.md").read_text(encoding="utf-8")
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
    own = set(inspect.get_annotations(CLASSES[name]))
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
