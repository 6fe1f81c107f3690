"""Allowed imports between layers: checks the imports of every module of the package."""

import ast
import graphlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "recpo"
#: A room may import these other rooms. Arrows point downward only; verbs and the command line lie on top.
SHARED = {"base", "artifacts"}
MAY_IMPORT = {
    "base": set(),
    "artifacts": {"base"},
    "ops": {"base"},
    "log": SHARED,
    "batches": SHARED | {"log"},
    "items": SHARED | {"log"},
    "policies": {"base", "ops", "artifacts"},
    "objectives": {"base", "ops"},
    # of policies it takes the search of the best items of a catalog
    "rewards": SHARED | {"ops", "log", "batches", "policies"},
    "worlds": SHARED,
    "lists": SHARED | {"log"},
    "evaluation": SHARED | {"ops", "log", "batches", "rewards", "lists", "worlds"},
    "training": SHARED | {"ops", "log", "batches", "policies", "objectives", "rewards", "evaluation"},
    "serving": SHARED | {"policies", "log", "training"},
    "sharding": SHARED | {"ops", "policies", "training"},
    # of evaluation it takes the sums of a log by variant and their confidence sequences, which need no torch
    "server": SHARED | {"serving", "lists", "evaluation"},
    "explorer": SHARED | {"log", "batches", "rewards", "evaluation"},
    "verbs": None,
    "cli": None,
    "__main__": None,
}
FOREIGN = {
    "ops": {"torch", "triton", "math", "typing", "collections", "__future__", "functools", "contextlib"},
    "objectives": {"torch", "math", "typing", "collections", "__future__", "dataclasses", "functools", "abc"},
}
SERVER = {*SHARED, "log", "lists", "serving", "server"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module


def layer(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_only_what_its_layer_may(path):
    own = layer(path)
    if own == "__init__":
        return
    allowed = MAY_IMPORT[own]
    for name in imports(path):
        root, _, rest = name.partition(".")
        if root == "recpo":
            target = rest.split(".")[0]
            assert own in ("cli", "__main__") or target != "cli", f"{path}: nothing imports the command line"
            assert own in ("cli", "verbs", "__main__") or target != "verbs", f"{path}: the verbs lie on top"
            assert allowed is None or not target or target == own or target in allowed, (
                f"{path}: {own} may not import {name}"
            )
        elif own in FOREIGN:
            assert root in FOREIGN[own], f"{path}: {own} may not import {name}"
        if root in ("scipy", "sklearn"):
            assert own not in SERVER, f"{path}: the environment of a server has no {root} (requirements/serve.lock)"
        if root == "torchrec":
            assert own == "sharding", f"{path}: only sharding.py imports torchrec"
        if root in ("lightning", "pytorch_lightning") and own not in (
            "training",
            "sharding",
            "evaluation",
            "verbs",
            "cli",
        ):
            assert path.name == "datamodule.py", f"{path}: lightning belongs to training and the data module"


def test_serving_uses_only_ids_and_names_of_columns_of_data():
    for path in (PACKAGE / "serving").glob("*.py"):
        for name in imports(path):
            assert not name.startswith("recpo.log") or name.endswith((".id_map", ".schema")), f"{path}: {name}"


OPTIONAL = ("torchrec", "fbgemm_gpu", "fastapi", "starlette", "uvicorn", "prometheus_client", "faiss")
OPTIONAL += ("pyspark", "matplotlib", "polars", "optuna", "mlflow", "wandb")
#: their classes inherit from those of the package, or its decorators make them; verbs import them where they need them
INTEGRATIONS = {
    "torchrec": ["sharding.lookup_tables", "sharding.planning", "sharding.strategy"],
    "fastapi": ["server.app", "server.processes"],
    "triton": ["ops.fused_catalog"],
}
READING = ("evaluate", "export", "tilt", "tokenize", "compare", "calibrate", "factorize")


@pytest.fixture(scope="module")
def fresh():
    """What a fresh process says that imports the verbs that read runs, then every module, without optional packages."""
    names = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in MODULES}
    names = {name.removesuffix(".__init__") for name in names}
    names -= {f"recpo.{name}" for modules in INTEGRATIONS.values() for name in modules}
    code = f"""
import importlib, sys, warnings
warnings.simplefilter("ignore")
sys.modules.update(dict.fromkeys({OPTIONAL}))
for verb in {READING}:
    importlib.import_module("recpo.verbs." + verb)
    print(verb, sorted({{"lightning", "torch._dynamo", "sympy"}} & set(sys.modules)))
for name in {sorted(names)}: importlib.import_module(name)
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_verbs_that_read_runs_import_neither_lightning_nor_the_compiler(fresh):
    assert fresh.stdout.splitlines()[-len(READING) :] == [f"{verb} []" for verb in READING], fresh.stderr


@pytest.mark.slow
def test_every_module_imports_without_the_optional_packages(fresh):
    assert fresh.returncode == 0, fresh.stderr


def test_the_command_line_imports_only_the_verb_asked_for():
    heavy = "{'torch', 'lightning', 'pandas', 'ibis'}"
    code = f"import sys; from recpo.cli.main import main; main(['--help']); print(sorted({heavy} & set(sys.modules)))"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed.splitlines()[-1] == "[]"


def sources_outside():
    """Python that uses recpo and that no type checker reads, by the file that it stands in."""
    root = PACKAGE.parent
    for path in sorted((*root.glob("benchmarks/**/*.py"), *root.glob("examples/**/*.py"), *root.glob("tests/**/*.py"))):
        yield path, path.read_text(encoding="utf-8")
    for path in sorted(root.glob("notebooks/*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        yield from ((path, "".join(cell["source"])) for cell in cells if cell["cell_type"] == "code")
    for path in sorted((root / "README.md", *root.glob("docs/**/*.md"))):
        for block in re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            yield path, block


@pytest.mark.slow
def test_names_that_sources_outside_the_package_import_exist():
    absent = set()
    for path, source in sources_outside():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "recpo":
                module = importlib.import_module(node.module)
                absent |= {(path.name, node.module, one.name) for one in node.names if not has(module, one.name)}
    assert not absent


def has(module, name):
    package = hasattr(module, "__path__")
    return hasattr(module, name) or (package and importlib.util.find_spec(f"{module.__name__}.{name}") is not None)


def executed_imports(path):
    """What importing a module imports at once: neither what its functions import nor what only type checkers see."""
    pending = list(ast.parse(path.read_text(encoding="utf-8")).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending += ast.iter_child_nodes(node)


@pytest.mark.slow
def test_the_import_graph_has_no_circles():
    files = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in MODULES}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    graph = {
        module: {
            f"{source}.{name}" if f"{source}.{name}" in files else source
            for source, name in executed_imports(path)
            if source in files
        }
        for module, path in files.items()
    }
    assert sum(map(len, graph.values())) > len(MODULES), "the imports were not found"
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(f"modules import each other: {' <- '.join(error.args[1])}")
