"""The commands in the documents exist and run."""

import functools
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from recpo.cli.main import VERBS, joined_lists, parser_of, verb_class, without_help
from recpo.cli.output import terminal_options
from tests.commands import run_commands

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", ROOT / "data" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
_NEEDED = {
    "simulate": ("out",),
    "prepare": ("log", "out"),
    "tokenize": ("prepared", "out"),
    "factorize": ("prepared", "out"),
    "tilt": ("run", "factors", "prepared", "out"),
    "evaluate": ("prepared", "out"),
    "export": ("out",),
    "recommend": ("source", "histories", "out"),
}
_FOLDERS = ("recpo", "configs", "data", "docs", "notebooks", "benchmarks", "tests", "requirements", ".ci")


def _text(document):
    if document.suffix != ".ipynb":
        return document.read_text(encoding="utf-8")
    cells = json.loads(document.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def _commands(document):
    """Every ``recpo VERB ...`` in code: whole lines (also commented ones) and inline."""
    text = re.sub(r" \\\n[#$ ]*", " ", _text(document))  # continued lines
    lines = re.findall(r"^[#$ ]*(recpo [a-z]+ -.*)$", text, re.MULTILINE)
    inline = re.findall(r"`(recpo [a-z]+ -[^`\n]*)`", text)  # a whole line begins with no backtick
    return [command for command in lines + inline if "<" not in command]  # <class> stands for anything


def _block(language, document="README.md"):
    """The one block of a language that a document marks as tested."""
    text = (ROOT / document).read_text(encoding="utf-8")
    (block,) = re.findall(rf"<!-- tested -->\n```{language}\n(.*?)```", text, re.DOTALL)
    return block


def _named_file(name):
    found = re.search(rf"<!-- file: {re.escape(name)} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found is not None, f"README.md shows no {name}"
    return found.group(1)


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A directory with what the commands read: the configurations, the sample and the README's ``prepare.yaml``."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    shutil.copytree(ROOT / "data", tmp_path / "data")
    (tmp_path / "prepare.yaml").write_text(_named_file("prepare.yaml"), encoding="utf-8")
    for page in ("metrics.md", "training.md"):  # the modules that they show, which their commands name
        for name, text in re.findall(r"```python\n# (\w+)\.py\n(.*?)```", _text(ROOT / "docs" / page), re.DOTALL):
            (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _complete(verb, words):
    """A document may show one option alone: what the verb cannot do without is filled in."""
    words = ["--config", "configs/gbpo.yaml", *words] if verb == "train" and "--config" not in words else words
    if verb == "train" and not any("help" in word for word in words):
        for option in ("--data.prepared", "--out"):
            words = words if option in words else [*words, option, "anything"]
    for option in _NEEDED.get(verb, ()):
        if f"--{option}" not in words and "--config" not in words:
            words = [*words, f"--{option}", "anything"]
    return words


@functools.cache
def _parser(verb):
    """One for all commands: making it takes longer than parsing with it."""
    return parser_of(verb_class(verb))


@pytest.mark.slow
@pytest.mark.parametrize("document", [*DOCUMENTS, *NOTEBOOKS, *CONFIGS], ids=lambda path: path.name)
def test_every_command_of_the_documents_is_understood(document, clone, capsys):
    for command in _commands(document):
        _, verb, *words = shlex.split(command, comments=True)
        assert verb in VERBS, f"{document.name}: {command}"
        words = terminal_options(words)[1]
        for word in words:
            if word.endswith("resolved.yaml"):
                (clone / word).parent.mkdir(parents=True, exist_ok=True)
                resolved = yaml.safe_dump(dict.fromkeys(_NEEDED.get(verb, ()), "anything"))
                resolved = (clone / "configs" / "gbpo.yaml").read_text() if verb == "train" else resolved
                (clone / word).write_text(resolved, encoding="utf-8")
        status = None
        try:
            with without_help(words):
                _parser(verb).parse_args(joined_lists(verb_class(verb), _complete(verb, words)))
        except SystemExit as stop:
            status = stop.code
        assert not status, f"{document.name}: {command}\n{capsys.readouterr().err}"


def test_the_trainer_options_of_the_documents_are_understood(clone):
    (options,) = re.findall(r"```yaml\n(trainer:.*?)```", _text(ROOT / "docs" / "training.md"), re.DOTALL)
    (clone / "trainer.yaml").write_text(options, encoding="utf-8")
    configuration = parser_of(verb_class("train")).parse_args(
        ["--config", "configs/gbpo.yaml", "--data.prepared", "any", "--out", "any", "--config", "trainer.yaml"]
    )
    assert configuration.trainer.init_args.devices == 2


def test_the_sample_is_what_the_command_beside_it_makes(clone):
    from recpo.cli.main import main

    (command,) = [line for line in _commands(ROOT / "data" / "README.md") if line.startswith("recpo simulate")]
    assert main(shlex.split(command)[1:]) == 0
    made = pq.read_table(clone / "world" / "log")
    assert made.equals(pq.read_table(ROOT / "data" / "sample.parquet"))


def test_the_readme_starts_with_two_commands():
    assert re.search(r"^make demo\b.*^make test\b", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", [*DOCUMENTS, *NOTEBOOKS], ids=lambda path: path.name)
def test_every_file_and_target_that_the_documents_name_exists(document):
    text = _text(document)
    for link in re.findall(r"\]\(([^)#:\s]+)\)", text):
        assert (document.parent / link).exists(), f"{document.name} links to {link}"
    for path in re.findall(rf"`((?:{'|'.join(map(re.escape, _FOLDERS))})(?:/[\w./-]+)?)`", text):
        assert (ROOT / path).exists(), f"{document.name} names {path}"
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{document.name}: make {target}"
    for verb in re.findall(r"`recpo ([a-z]+)`", text):
        assert verb in VERBS, f"{document.name}: recpo {verb}"


def _write_own_log(directory):
    """A simulated log under the column names and units that the README's ``prepare.yaml`` speaks of."""
    from recpo.verbs.simulate import simulate

    simulate(directory / "world", users=80, items=60, events=5000, days=10)
    log = pq.read_table(directory / "world" / "log").to_pandas()
    log = log.assign(
        ts=log["timestamp"] // 1000,
        played_ms=(log["watch_time"] * 1000).round().astype("int64"),
        length_ms=(log["duration"] * 1000).round().astype("int64"),
    )
    log = log.rename(columns={"user_id": "uid", "item_id": "video", "dislike": "thumbs_down"})
    (directory / "logs").mkdir()
    log[["uid", "video", "ts", "played_ms", "length_ms", "thumbs_down"]].to_parquet(directory / "logs" / "0.parquet")


def _three_steps(directory):
    """Three steps of a small policy in the configurations there."""
    for config in (directory / "configs").glob("*.yaml"):
        text = config.read_text(encoding="utf-8")
        text = re.sub(r"(?m)^  max_epochs: \d+", "  max_epochs: 1\n  max_steps: 3", text)
        text = text.replace("    profile: true\n", "    layers: 1\n    dim: 8\n").replace("    fold_in: 16\n", "")
        config.write_text(text, encoding="utf-8")


@pytest.mark.slow
def test_the_python_road_of_the_readme_runs(clone, capsys):
    """From a data frame to recommendations and back, in at most 15 lines."""
    _write_own_log(clone)
    _three_steps(clone)
    road = _block("python")
    assert len([line for line in road.splitlines() if line and not line.startswith("import")]) <= 15
    show = "\nprint('rows', len(recpo.recommend(run, recent, k=10)), 'frame', type(result.to_pandas()).__name__)"
    (clone / "road.py").write_text(road + show, encoding="utf-8")
    runpy.run_path(str(clone / "road.py"), run_name="__main__")
    assert "rows 800 frame DataFrame" in capsys.readouterr().out
    assert (clone / "runs/comparison/report.html").is_file()


@pytest.mark.slow
def test_the_road_of_the_readme_runs(clone):
    _write_own_log(clone)
    _three_steps(clone)
    run_commands(_block("bash"))
    document = json.loads((clone / "runs/evaluation/metrics.json").read_text())
    assert {"popularity", "factorization", "pretrain", "mpo"} <= {
        contender["name"] for contender in document["contenders"]
    }
    assert (clone / "runs/evaluation/report.html").is_file()
    assert pq.read_table(clone / "runs/lists.parquet").num_rows == 80 * 10
    unavailable = "import sys; sys.modules.update(torch=None, lightning=None, torchrec=None)\n"
    serving = unavailable + _block("python", "docs/serving.md")
    served = subprocess.run([sys.executable, "-c", serving], capture_output=True, text=True, check=False)
    assert served.returncode == 0, served.stderr
    assert "'users': 2" in served.stdout
