"""Every notebook runs from its first cell to its last, and is small enough to be looked at on a code host."""

import json
import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_names_no_machine(notebook):
    text = notebook.read_text(encoding="utf-8")
    assert len(text) < 300_000, f"{notebook.name} has {len(text):,} bytes: smaller or fewer figures"
    cells = json.loads(text)["cells"]
    outputs = json.dumps([cell.get("outputs", []) for cell in cells])
    for telltale in ("site-packages", "Traceback", "Warning", str(Path.home()) + os.sep):
        assert telltale not in outputs, f"{notebook.name} shows {telltale!r} in an output"


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # models this small gain nothing from more, and lose on a busy machine
    client = NotebookClient(
        nbformat.read(notebook, as_version=4),
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
