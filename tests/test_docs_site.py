"""The documentation site is complete and true: names, verbs, links, anchors, code blocks and quoted numbers."""

from __future__ import annotations

import ast
import importlib.util
import json
import posixpath
import re
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest

import recpo
from recpo.cli.main import VERBS
from tests.commands import run_commands

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
DOCUMENTS = [*(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "data/README.md")), *PAGES]
CONFIGURATION = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
NAV = re.findall(r"([\w/]+\.md)$", CONFIGURATION[CONFIGURATION.index("\nnav:") :], re.MULTILINE)
#: What a page's Python blocks build on; pages that are not named here begin with nothing.
GIVEN = {
    "evaluation.md": """
import recpo
tiny = {"policy.init_args.dim": 8, "policy.init_args.layers": 1, "data.batch_size": 16, "trainer.max_epochs": 1}
tiny["trainer.limit_train_batches"] = 2
recpo.simulate("world", users=80, items=60, events=5000, days=10)
data = recpo.prepare("world/log", out="prepared")
run = recpo.train(data, out="runs/pretrain", **tiny)
recpo.train(data, objective=recpo.GBPO(), init_from=run, out="runs/gbpo", **tiny)
""",
    "exploration.md": """
import numpy as np
import recpo
num_items, history = 500, np.array([3, 4, 5])
items, logp = np.arange(10, 210), np.log(np.full(200, 1 / 200))
""",
    "features.md": """
import numpy as np
import pandas as pd
import recpo
log = recpo.simulate("world", users=80, items=60, events=5000, days=10).to_pandas()
rng = np.random.default_rng(0)
log["surface"], log["is_like"], log["is_forward"] = (rng.integers(0, most, len(log)) for most in (3, 2, 2))
items = pd.DataFrame({"item_id": sorted(set(log["item_id"]))})
items["author"], items["genres"], items["seconds"], items["uploaded"] = items["item_id"] % 7, "a|b", 30.0, 1_700_000_000
items["text_embedding"] = list(rng.normal(size=(len(items), 4)))
users = pd.DataFrame({"user_id": sorted(set(log["user_id"])), "age": 30})
""",
    "serving.md": """
import recpo
recpo.simulate("world", users=80, items=60, events=5000, days=10)
data = recpo.prepare("world/log", out="prepared")
tiny = {"policy.init_args.dim": 8, "policy.init_args.layers": 1, "trainer.limit_train_batches": 2}
run = recpo.train(data, out="run", **{"trainer.max_epochs": 1, **tiny})
recpo.export(run, out="runs/bundle")
""",
}


def module(name):
    specification = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    loaded = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(loaded)
    return loaded


def prose(path):
    """A document without its code blocks; of a notebook the cells of text."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(path):
    """Anchors of the headings, as GitHub and the site make them, with how often each comes."""
    titles = re.findall(r"^#+ (.+?) *$", prose(path), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "") for title in titles)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain]


def links(path):
    text = re.sub(r"`[^`\n]*`", "", prose(path))
    return [
        link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link and not link.startswith("mailto:")
    ]


def blocks(path, language):
    """``(line number, code)`` of the blocks of a language that are not marked ``<!-- not run: why -->``."""
    text = path.read_text(encoding="utf-8")
    for found in re.finditer(rf"(<!-- not run: .+ -->\n+)?^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if found[1] is None:
            yield text[: found.start(2)].count("\n"), found[2]


def code_of(path, language):
    """All blocks of a language in one, on a log of fewer events."""
    return re.sub(r"\b20_?000\b", "5000", "\n".join(code for _, code in blocks(path, language)))


def test_every_public_name_is_in_the_reference_once():
    page = module("hooks").python_names()
    documented = re.findall(r"^::: recpo\.(\w+)$", page, re.MULTILINE)
    assert sorted(documented) == sorted(set(recpo.__all__) - {"__version__"})
    dataclasses = re.findall(r"^::: recpo\.verbs\.\w+\.(\w+)$", page, re.MULTILINE)
    assert {name.lower() for name in dataclasses} >= {verb for verb in VERBS if verb != "train"}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_section_in_the_reference(verb):
    sections = re.split(r"(?m)^(?=## )", (DOCS / "reference" / "verbs.md").read_text(encoding="utf-8"))
    (section,) = (text for text in sections if text.startswith(f"## recpo {verb}\n"))
    assert f"recpo {verb}" in section.partition("```")[2], "an example"
    assert section.count(f"<!-- options of {verb} -->") == 1
    assert f"(verbs.md#recpo-{verb})" in (DOCS / "reference" / "index.md").read_text(encoding="utf-8")


def test_every_page_is_in_the_navigation():
    hooks = module("hooks")
    made = {*hooks.PAGES, hooks.CONFIGURATIONS, hooks.PYTHON}
    pages = {str(page.relative_to(DOCS)) for page in PAGES} | made
    assert not pages - set(NAV), f"mkdocs.yml: the nav lacks {sorted(pages - set(NAV))}"
    assert sorted(NAV) == sorted(pages)


@pytest.mark.parametrize("path", [*DOCUMENTS, *(ROOT / "notebooks").glob("*.ipynb")], ids=lambda path: path.name)
def test_every_link_and_anchor_leads_somewhere(path):
    for link in links(path):
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), f"{path.name} links to {link}"
        if anchor:
            assert target.suffix == ".md", f"{path.name}: {link} has an anchor in a file that is no document"
            assert anchors(target).count(anchor) == 1, f"{path.name} links to {link}: no heading, or two, of that name"


def test_links_that_leave_docs_lead_to_pages_of_the_site():
    hooks = module("hooks")
    made = {*hooks.PAGES, hooks.CONFIGURATIONS, hooks.PYTHON} | {
        str(file.relative_to(DOCS)) for file in DOCS.rglob("*.*")
    }
    sources = {str(page.relative_to(DOCS)): page for page in PAGES}
    sources |= {page: ROOT / file for page, file in hooks.PAGES.items()}
    made |= {f"{hooks.FILES}/{file}" for page in sources for file in hooks.linked_files(page)}
    for page, path in sources.items():
        for link in links(path):
            file = hooks.site_link(page, link).partition("#")[0]
            found = posixpath.normpath(posixpath.join(posixpath.dirname(page), file)) if file else page
            assert found in made, f"{path.name}: {link} is no page of the site"


def test_options_are_shown_with_type_default_and_anchor():
    options = module("verb_options")
    by_name = {option.flags[0]: option for _, group in options.groups("tilt") for option in group}
    assert by_name["--run"].required
    assert by_name["--run"].kind == "Run or Path or str"
    assert by_name["--k"].default == "10"
    assert "--config" not in by_name
    text = options.markdown("tilt")
    assert '<span id="tilt-out"></span>`--out` (`Path or str`, required)\n:   ' in text


@pytest.mark.slow
def test_every_option_of_every_verb_is_described():
    options = module("verb_options")
    described = {verb: [option for _, group in options.groups(verb) for option in group] for verb in VERBS}
    lacking = [
        f"{verb} {option.flags[0]}" for verb, all_of in described.items() for option in all_of if not option.text
    ]
    assert not lacking


@pytest.mark.parametrize(("name", "least"), [("choosing_an_objective.md", 45), ("measurements.md", 5)])
def test_numbers_stand_where_the_row_says(name, least):
    """A number in a row of evidence is one of a page that the row links to."""
    checked = 0
    for row in re.findall(r"^\|.*\|$", (DOCS / name).read_text(encoding="utf-8"), re.MULTILINE):
        targets = re.findall(r"\]\(([\w./]+\.md)(?:#[\w-]+)?\)", row)
        linked = "\n".join((DOCS / target).read_text(encoding="utf-8") for target in targets)
        numbers = re.findall(r"(?<![\w.])[-+]?\d*\.\d+(?![\w.])|\b\d{1,3}(?:,\d{3})+\b", row.rpartition("](")[0])
        for number in numbers if targets else ():
            assert number.replace(",", "") in linked.replace(",", ""), f"{name}: {number} is on none of {targets}"
            checked += 1
    assert checked >= least


def test_the_options_of_benchmarks_exist():
    text = (DOCS / "measurements.md").read_text(encoding="utf-8")
    commands = re.findall(r"`[^`\n]*?(benchmarks/\w+\.py)([^`\n]*)`", text)
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py")} - {
        "ratings.py",
        "yardstick.py",
        "verbs.py",
        "gpu_parts.py",
        "published_search.py",
    }
    missing = sorted(scripts - {Path(script).name for script, _ in commands})
    assert not missing, f"docs/measurements.md needs a row for each of {missing}"
    for script, options in commands:
        source = (ROOT / script).read_text(encoding="utf-8")
        for option in re.findall(r"--[\w-]+", options):
            assert f'"{option}"' in source or f"{option[2:]}:" in source, f"measurements.md: {script} has no {option}"


@pytest.mark.parametrize("path", [page for page in DOCUMENTS if "```python" in page.read_text()], ids=lambda p: p.name)
def test_python_blocks_use_names_that_exist(path):
    for code in re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "recpo":
                assert node.attr in {*recpo.__all__, "verbs", "server"}, f"{path.name}: recpo.{node.attr}"


def test_the_example_of_plain_arrays_runs(capsys):
    text = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    names = {}
    exec(code, names)
    table = names["found"].to_pandas().set_index("estimator")
    assert "combined" in capsys.readouterr().out
    truth = (names["action_dist"] * (0.1 + 0.05 * np.arange(10))).sum(1).mean()
    for estimator in ("IPS", "beta-IPS", "DR", "combined"):
        assert table.loc[estimator, "normal_low"] < truth < table.loc[estimator, "normal_high"], estimator


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A directory with what the pages read: the sample, and the configurations, with three steps of a small policy."""
    for name in ("configs", "data"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for config in (tmp_path / "configs").glob("*.yaml"):
        text = config.read_text(encoding="utf-8")
        text = re.sub(r"(?m)^  max_epochs: \d+", "  max_epochs: 1\n  max_steps: 3", text)
        text = text.replace("    profile: true\n", "    layers: 1\n    dim: 8\n").replace("    fold_in: 16\n", "")
        config.write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("path", [page for page in PAGES if any(blocks(page, "python"))], ids=lambda page: page.name)
def test_python_blocks_run(path, clone):
    script = clone / "page.py"
    script.write_text(GIVEN.get(path.name, "") + code_of(path, "python"), encoding="utf-8")
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.slow
def test_the_commands_of_the_quickstart_run(clone):
    run_commands(code_of(DOCS / "quickstart.md", "bash"))
    assert (clone / "lists.parquet").is_file()
    assert (clone / "runs" / "evaluation" / "report.html").is_file()
