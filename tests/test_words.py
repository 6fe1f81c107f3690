"""One spelling and one word per thing: spellings and phrases that text and names must not contain."""

import ast
import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# British spellings, by their stems: "optimis" finds optimise, optimiser, optimisation
BRITISH = re.compile(
    r"catalogue|(optim|normal|factor|initial|standard|neutral|material|quant|minim|maxim|general|penal|util|vector|"
    r"serial|summar|recogn|organ|parallel|regular|central|priorit)is(e|ed|er|ers|es|ing|ation|ations|able)\b|"
    r"colour|favour|behaviour|neighbour|honour|labell(ed|ing)\b|\bcent(re|res|red|ring)\b|\bgrey\b|\blicence|"
    r"\banalys(e|ed|es)\b|cancelled|modelling"
)
# habits of translated text, which plain US English does not need; tested in documents, configurations, and the
# docstrings, comments and messages of the package and the benchmarks
HABITS = re.compile(
    r"\bbut for\b|\bat hand\b|\banew\b|\bsaid to\b|\bthe begin\b|\bgo(es)? along\b|\btowards\b|\b(among|whil)st\b|"
    r"\bso are\b|\bin the place of\b|\bgone through\b|\bless (that|those)\b|\bis no part\b|\bto be had\b|"
    r"\bwhere none\b|\bon the way\b|"
    r"\b(compared|measured|counted|shown|read|listed) are the\b|\bwhat (the|a|an) \w+ says\b|"
    r"\bnone where\b|\bthe night before\b|\b(say|says|said) of\b|\bhands? over\b|\bgoes on\b|"
    r"(?<!there )\b(is|are) no (whole|bundle|run|prepared|plain|path|directory|JSON|YAML|ISO|item id|option)\b",
    re.IGNORECASE,
)
# what a name says, and the word for it
NAMES = {
    r"(^|_)refuse": "validate_* for a function that raises on bad options",
    r"(^|_)judge": "monitor_reward",
    r"(^|_)(deal|dealt|hands)($|_)": "assign, parts",
    r"(^|_)mend": "fix, remedy",
    r"watch_quantile($|_)": "label",
    r"(^|_)seen($|_)": "exclude",
}


def tracked(*patterns):
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout")
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def names_of(path):
    """Every name that a module defines: functions, classes, parameters, fields."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


@pytest.mark.slow
def test_the_text_is_spelled_as_in_the_us():
    wrong = []
    for path in tracked("*.py", "*.md", "*.yaml", "*.toml", "*.ipynb", "Makefile", ".ci/run"):
        if path == Path(__file__):
            continue
        text = path.read_text(encoding="utf-8").replace("aria-labelledby", "").lower()
        if not any(map(BRITISH.search, set(re.findall(r"\w+", text)))):  # far fewer than the words of the text
            continue
        for found in BRITISH.finditer(text):
            wrong.append(f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 1}: {found.group()}")
    assert not wrong, "\n".join(wrong)


def test_documents_have_no_habits_of_translated_text():
    wrong = []
    for path in tracked("*.md", "*.ipynb", "*.yaml"):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":  # what the cells of text say; outputs and code are not prose
            cells = json.loads(text)["cells"]
            text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        for number, line in enumerate(text.splitlines(), 1):
            found = HABITS.search(line)
            if found:
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {found.group()}")
    assert not wrong, "say it plainly:\n" + "\n".join(wrong)


@pytest.mark.slow
def test_the_text_in_the_code_has_no_habits_of_translated_text():
    wrong = []
    for path in tracked("recpo/*.py", "benchmarks/*.py"):  # code itself never matches: words in names are not separate
        text = path.read_text(encoding="utf-8").lower()
        for found in HABITS.finditer(text):
            wrong.append(f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 1}: {found.group()}")
    assert not wrong, "say it plainly:\n" + "\n".join(wrong)


@pytest.mark.slow
def test_names_use_the_word_of_the_thing():
    wrong = [
        f"{path.relative_to(ROOT)}: {name}: say {word}"
        for path in tracked("recpo/*.py")
        for name in names_of(path)
        for pattern, word in NAMES.items()
        if re.search(pattern, name)
    ]
    assert not wrong, "\n".join(sorted(set(wrong)))
