"""The last lines of every verb: written files, next command; nothing with --quiet, one document with --json."""

import importlib
import json
import math
import shlex
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest

from recpo.cli import verb_results
from recpo.cli.main import VERBS, main, parser_of
from recpo.cli.verb_results import VerbResult

ROOT = Path(__file__).parents[2]
HERE = Path("a b")
RESULTS = {
    "simulate": verb_results.after_simulate(HERE, {}),
    "prepare": verb_results.after_prepare(HERE, {}),
    "prepare --extends": verb_results.after_extend(HERE, {}),
    "tokenize": verb_results.after_tokenize(Path("codes"), "prepared", {}),
    "factorize": verb_results.after_factorize(Path("factors"), "prepared", {}),
    "train": verb_results.after_train(Path("run"), "prepared", {}),
    "reward model": verb_results.after_reward_model(Path("run"), "prepared", {}),
    "calibrate": verb_results.after_calibrate([Path("run")], Path("out.json"), "prepared", {}),
    "evaluate": verb_results.after_evaluate(Path("out"), Path("last"), {}),
    "export": verb_results.after_export(Path("bundle"), Path("triton"), {}),
    "recommend": verb_results.after_recommend(Path("lists"), Path("bundle"), None, {}),
    "recommend of a run": verb_results.after_recommend(Path("lists"), None, Path("run"), {}),
    "compare": verb_results.after_compare(Path("new"), None, {}),
    "loop": verb_results.after_loop(Path("loop"), Path("bundle"), {}),
    "demo": verb_results.after_demo(Path("demo"), {}),
    "doctor": verb_results.after_doctor({}),
}


@pytest.mark.parametrize("verb", RESULTS)
def test_the_next_command_is_one_that_recpo_understands(verb, monkeypatch):
    monkeypatch.chdir(ROOT)
    program, following, *words = shlex.split(RESULTS[verb].following)
    assert program == "recpo"
    function = getattr(importlib.import_module(f"recpo.cli.{following}"), following)
    if following == "init":
        assert words == ["YOUR_LOG"]
        return
    parser_of(function).parse_args(words)


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ("serve", "plan")])
def test_every_verb_says_how_it_ended(verb):
    module = importlib.import_module(f"recpo.cli.{verb}")
    assert get_type_hints(getattr(module, verb), vars(module))["return"] is VerbResult


def test_configurations_of_init_come_before_those_of_the_clone(tmp_path):
    (tmp_path / "mpo.yaml").write_text("", encoding="utf-8")
    assert verb_results.configuration("mpo.yaml", tmp_path) == "mpo.yaml"
    installed = verb_results.configuration("gbpo.yaml", tmp_path)
    assert (ROOT / "configs" / "gbpo.yaml").samefile(installed)
    assert verb_results.configuration("gbpo.yaml", ROOT) == "configs/gbpo.yaml"


def test_a_document_holds_what_json_can():
    facts = {"path": Path("x"), "nan": math.nan, "numbers": (np.float32(0.5), np.int64(3)), "none": None, "on": True}
    content = json.loads(VerbResult(("x",), "recpo demo", facts).document("verb"))
    assert content == {
        **{"verb": "verb", "status": 0, "wrote": ["x"], "next": "recpo demo"},
        **{"path": "x", "nan": None, "numbers": [0.5, 3], "none": None, "on": True},
    }


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


def test_a_first_word_is_the_value_of_the_first_option(tmp_path, capfd):
    assert main(["prepare", str(ROOT / "data" / "sample.parquet"), "--out", str(tmp_path / "out"), "--quiet"]) == 0
    assert (tmp_path / "out" / "manifest.json").is_file()
    assert main(["doctor", "everything"]) == 2
    assert "error: " in capfd.readouterr().err
