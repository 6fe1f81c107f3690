"""Every notebook runs from its first cell to its last, and is small enough to be looked at on a code host."""

import json
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
#: What makes a notebook long, and less of it.
LESS = {
    r'("trainer.max_epochs"|epochs): \d+': r"\1: 1",
    r"users=600": "users=150",
    r"events=\d+_000": "events=10_000",
    r"dim=32": "dim=8",
    r"range\(60\)": "range(6)",
    r"steps: int = 400": "steps: int = 40",
}


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_names_no_machine(notebook):
    text = notebook.read_text(encoding="utf-8")
    assert len(text) < 300_000, f"{notebook.name} has {len(text):,} bytes: smaller or fewer figures"
    cells = json.loads(text)["cells"]
    outputs = json.dumps([cell.get("outputs", []) for cell in cells])
    for telltale in ("site-packages", "Traceback", "Warning", str(Path.home()) + os.sep):
        assert telltale not in outputs, f"{notebook.name} shows {telltale!r} in an output"


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """What runs the cells of a notebook, without its messages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    with matplotlib.rc_context():
        yield InteractiveShell.instance()
        matplotlib.pyplot.close("all")
    InteractiveShell.clear_instance()


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook, shell):
    """In this process, where everything is imported, with less training and fewer repetitions."""
    for cell in nbformat.read(notebook, as_version=4).cells:
        if cell.cell_type == "code":
            source = cell.source
            for pattern, less in LESS.items():
                source = re.sub(pattern, less, source)
            shell.run_cell(source).raise_error()
