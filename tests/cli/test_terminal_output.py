"""The last lines of every verb: written files, next command; nothing with --quiet, one document with --json."""

import ast
import dataclasses
import json
import math
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from jsonargparse import ArgumentParser

from recpo.cli import output
from recpo.cli.main import VERBS, main, parser_of, printer, verb_class, without_help
from recpo.cli.output import VerbResult

ROOT = Path(__file__).parents[2]
SHOWN = sorted((ROOT / "recpo" / "cli").glob("show_*.py"))


@cache
def _options(verb):
    actions = parser_of(verb_class(verb))._actions
    return {flag for action in actions for flag in action.option_strings}


@pytest.mark.slow
@pytest.mark.parametrize("file", SHOWN, ids=lambda file: file.stem)
def test_the_next_commands_are_ones_that_recpo_understands(file):
    """The words of every ``command(verb, ...)`` in the source are verbs and flags that exist."""
    for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "command":
            verb = ast.literal_eval(call.args[0])
            flags = re.findall(r"'(--[a-z_]+)'", ast.unparse(call))  # dotted ones are of classes that a file names
            assert verb in VERBS
            assert set(flags) <= _options(verb), f"{file.name}: {ast.unparse(call)}"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_shows_its_result(verb):
    annotations = printer(verb, "show").__annotations__
    assert annotations["return"] == VerbResult.__name__
    assert annotations["verb"].rpartition(".")[2] == verb_class(verb).__name__


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_that_says_what_happens_meanwhile_is_watched(verb):
    calls = [one.name for one in dataclasses.fields(verb_class(verb)) if one.name.startswith("on_")]
    assert not calls or printer(verb, "watch"), calls


def test_configurations_of_init_come_before_those_of_the_clone(tmp_path):
    (tmp_path / "mpo.yaml").write_text("", encoding="utf-8")
    assert output.configuration("mpo.yaml", tmp_path) == "mpo.yaml"
    installed = output.configuration("gbpo.yaml", tmp_path)
    assert (ROOT / "configs" / "gbpo.yaml").samefile(installed)
    assert output.configuration("gbpo.yaml", ROOT) == "configs/gbpo.yaml"


def test_a_document_holds_what_json_can():
    facts = {"path": Path("x"), "nan": math.nan, "numbers": (np.float32(0.5), np.int64(3)), "none": None, "on": True}
    content = json.loads(VerbResult(("x",), "recpo demo", facts).document("verb"))
    assert content == {
        **{"verb": "verb", "status": 0, "wrote": ["x"], "next": "recpo demo"},
        **{"path": "x", "nan": None, "numbers": [0.5, 3], "none": None, "on": True},
    }


@pytest.mark.slow
def test_words_documents_and_silence(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(ROOT)
    sample, out = str(ROOT / "data" / "sample.parquet"), tmp_path / "prepared"
    words = ["prepare", "--log", sample, "--out", str(out)]
    assert main(words) == 0
    printed = capfd.readouterr().out.splitlines()
    assert printed[-2:] == [
        f"wrote {out}",
        f"next: recpo train --config configs/pretrain.yaml --data.prepared {out} --out runs/pretrain",
    ]
    assert main([*words, "--overwrite", "true", "--json"]) == 0
    content = json.loads(capfd.readouterr().out)
    assert (content["verb"], content["wrote"], content["num_items"]) == ("prepare", [str(out)], 60)
    assert main([*words, "--overwrite", "true", "--quiet"]) == 0
    assert capfd.readouterr() == ("", "")
    assert main([*words, "--quiet"]) == 1
    printed = capfd.readouterr()
    assert (printed.out, "exists already" in printed.err) == ("", True)
    assert main([*words, "--json", "--quiet"]) == 1
    printed = capfd.readouterr()
    assert json.loads(printed.out) == {"verb": "prepare", "status": 1, "error": printed.err.strip()}


@pytest.mark.slow
def test_a_first_word_is_the_value_of_the_first_option(tmp_path, capfd):
    assert main(["prepare", str(ROOT / "data" / "sample.parquet"), "--out", str(tmp_path / "out"), "--quiet"]) == 0
    assert (tmp_path / "out" / "manifest.json").is_file()
    assert main(["doctor", "everything"]) == 2
    assert "error: " in capfd.readouterr().err


def test_options_of_classes_are_parsed_without_their_help_unless_it_is_asked_for(monkeypatch):
    read = []
    reader = "docstring_parser.attrdoc.AttributeDocstrings.get_attr_docs"
    monkeypatch.setattr(reader, lambda _, component: read.append(component) or {})

    def described(words):
        read.clear()
        with without_help(words):
            ArgumentParser().add_class_arguments(VerbResult, "result")
        return VerbResult in read

    assert not described(["--seed", "0"])
    assert described(["--policy.help", "CatalogSoftmaxPolicy"])
    assert described(["--policy.help=CatalogSoftmaxPolicy"])
