"""Mutation testing: changes one operator, constant, sign or mask of a module at a time; its tests must fail.

    python tests/mutation.py recpo/objectives recpo/ops          # the modules and their own tests (``OWNERS``)
    python tests/mutation.py recpo/objectives/grpo.py --only 17  # one mutant (or more), with the output of the tests

Prints every mutant that survived, as the line that it changed; the exit status is 1 where there are any that
``mutation_equivalents.txt`` does not name. Works on a copy in a temporary directory, so the checkout may be edited
meanwhile. Tests are imported and collected once; a mutant is put into the functions of a forked process and meets only
the tests that reach its line, so most take a tenth of a second. A change outside of functions (a constant, a default)
is put into the loaded modules likewise and meets all tests; where they do not notice, a new interpreter has the last
word.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

ROOT = Path(__file__).parent.parent
LOSSES = [
    "tests/ops/test_pure_ops.py",
    "tests/ops/test_shapes.py",
    "tests/test_vectors.py",
    "tests/test_objective_references.py",
    "tests/objectives",
]
NEWER = ["catalog_closed_forms", "labels_and_weights", "identities"]
PREFERENCES = [f"tests/objectives/test_{name}.py" for name in (*NEWER[1:], "terms_and_metrics", "defaults_and_bounds")]
#: the tests of a module, fast ones first; the longest prefix counts
OWNERS = {
    "recpo/objectives": LOSSES,
    **{
        f"recpo/objectives/{module}": [f"tests/objectives/test_{name}.py" for name in NEWER]
        for module in ("mpo", "catalog_policy_gradient", "likelihood")
    },
    **{f"recpo/objectives/{module}": PREFERENCES for module in ("preference", "listwise_dpo")},
    "recpo/ops": ["tests/ops", *LOSSES],
    "recpo/ops/kl": LOSSES,
    "recpo/ops/surrogate": LOSSES,
    "recpo/ops/reduce": LOSSES,
    "recpo/ops/kernels": ["tests/ops/test_kernels.py", "tests/ops/test_linear_logprob.py"],
    "recpo/ops/linear_logprob": ["tests/ops/test_linear_logprob.py", "tests/ops/test_sampled_softmax.py"],
    "recpo/ops/exposures": ["tests/ops", *LOSSES, "tests/policies/test_item_features.py"],
    "recpo/ops/sharded_logprob": ["tests/ops/test_sharded_logprob.py"],
    "recpo/ops/small_systems": ["tests/ops/test_small_systems.py", "tests/policies/test_tilted.py"],
    "recpo/policies/grade_factors": ["tests/policies/test_tilted.py"],
    "recpo/objectives/advantages": [
        "tests/test_advantages.py",
        "tests/test_vectors.py",
        "tests/test_objective_references.py",
        "tests/objectives/test_labels_and_weights.py",
        "tests/objectives/test_token_advantages.py",
    ],
    "recpo/rewards": ["tests/rewards/test_rewards.py", "tests/test_vectors.py"],
    "recpo/ops/ranking": ["tests/ops/test_ranking.py", "tests/ops/test_item_sets.py"],
    **{
        f"recpo/rewards/{module}": [
            "tests/rewards/test_factorization_closed_forms.py",
            f"tests/rewards/test_{tests}.py",
        ]
        for module, tests in {
            "factors": "factors",
            "graded": "graded",
            "selection": "graded",
            "variational": "variational",
            "prior_features": "prior_features",
            "implicit": "implicit_and_ease",
            "ease": "implicit_and_ease",
        }.items()
    },
    "recpo/evaluation/off_policy": ["tests/evaluation/off_policy"],
    **{
        f"recpo/evaluation/off_policy/{module}": [
            f"tests/evaluation/off_policy/test_off_policy_{name}.py" for name in own
        ]
        for module, own in {
            "weights": ["closed_forms", "weights"],
            "ratio_intervals": ["closed_forms", "intervals"],
            "diagnostics": ["warnings", "closed_forms"],
            "options": ["warnings"],
            "propensities": ["closed_forms", "measure"],
            "slate_estimators": ["closed_forms", "slates"],
            "estimators": ["closed_forms", "estimators"],
            "target_sums": ["closed_forms", "intervals", "measure"],
            "results": ["closed_forms", "measure"],
            "measure": ["closed_forms", "measure"],
            "setting": ["setting"],
        }.items()
    },
    "recpo/log/shaping": ["tests/log/test_shaping.py"],
    "recpo/base/feedback": ["tests/test_feedback.py"],
}
#: modules whose tests start interpreters of their own, which know nothing of a mutant in memory
IN_OTHER_PROCESSES = ("recpo/ops/sharded_logprob",)
PYTEST = ["-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider", "-m", "not slow"]
CANNOT = 77


def equivalents(text: str) -> dict[str, str]:
    """Mutated lines to the reason why they change no result: under ``# reason`` the lines, as they are printed."""
    found, reason = {}, ""
    for line in text.splitlines():
        if line.startswith("# "):
            reason = line[2:]
        elif line and reason:
            found[line] = reason
    return found


EQUIVALENT = equivalents((ROOT / "tests" / "mutation_equivalents.txt").read_text(encoding="utf-8"))

SWAPS: dict[type, type] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Pow: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd},
    **{ast.And: ast.Or, ast.Or: ast.And},
}
NAMES = {"any": "all", "all": "any", "maximum": "minimum", "minimum": "maximum", "amax": "amin", "amin": "amax"}
NAMES |= {"clamp_min": "clamp_max", "clamp_max": "clamp_min", "argmax": "argmin"}
KEYWORDS = {"min": "max", "max": "min"}
#: calls whose removal leaves a program that runs
TRANSPARENT = {"detach", "square", "sqrt", "exp", "log", "neg", "abs", "bool", "float", "double", "flip", "zero_masked"}


def mutants(tree: ast.Module) -> Iterator[tuple[ast.Module, tuple[int, int], bool]]:
    """Every tree that differs from ``tree`` in one place, the lines of it, and whether the code of a function has it.

    Default arguments, constants of modules and fields of classes are not in the code of a function.
    """
    bodies = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    spans = [(node.body[0].lineno, node.body[-1].end_lineno or 0) for node in bodies]
    places = list(_places(tree))
    for number, (node, parent, _, _) in enumerate(places):
        for choice in range(len(_changes(node, parent))):
            changed = copy.deepcopy(tree)
            again, its_parent, field, index = list(_places(changed))[number]
            new = _changes(again, its_parent)[choice]
            if index is None:
                setattr(its_parent, field, new)
            else:
                getattr(its_parent, field)[index] = new
            at = node if hasattr(node, "lineno") else parent
            lines = at.lineno, at.end_lineno or at.lineno
            yield ast.fix_missing_locations(changed), lines, any(a <= lines[0] and lines[1] <= b for a, b in spans)


def _places(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST, str, int | None]]:
    """Every node that may be changed, with its parent and where it is held; no annotations, messages or docstrings."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params", "bases"):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            skipped = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
            if not isinstance(child, ast.AST) or isinstance(child, skipped):
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue
            if isinstance(child, ast.keyword) and child.arg == "strict" and getattr(node.func, "id", "") == "zip":  # type: ignore[attr-defined]
                continue  # a check of lengths, as an assert is
            yield child, node, field, index
            yield from _places(child)


def _changes(node: ast.AST, parent: ast.AST) -> list[ast.AST]:  # noqa: C901  one line per kind
    """What may stand in the place of a node."""
    new: list[ast.AST] = []
    if type(node) in SWAPS:
        new.append(SWAPS[type(node)]())
    elif isinstance(node, ast.UnaryOp):
        # the last axis: of [B, S] it is the axis 1 as well, so it becomes the first one
        is_axis = ast.unparse(node) == "-1" and isinstance(parent, ast.Call | ast.keyword)
        new.append(ast.Constant(0) if is_axis else node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        new.append(ast.Constant(not node.value))
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        new.append(ast.Constant(node.value + 1))
    elif isinstance(node, ast.Attribute) and node.attr in NAMES:
        new.append(ast.Attribute(node.value, NAMES[node.attr], node.ctx))
    elif isinstance(node, ast.keyword) and node.arg in KEYWORDS:
        new.append(ast.keyword(KEYWORDS[node.arg], node.value))
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        new.append(ast.Return(ast.Constant(None)))
    elif isinstance(node, ast.IfExp):
        new.append(ast.IfExp(node.test, node.orelse, node.body))
    elif isinstance(node, ast.If):
        new.append(ast.If(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse))
    elif isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in TRANSPARENT:
            new.append(node.func.value if isinstance(node.func, ast.Attribute) and not node.args else node.args[0])
    return new


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def difference(before: str, after: str) -> str:
    """The first line that differs, as it is now."""
    lines = zip(before.splitlines(), after.splitlines(), strict=False)
    return next((new.strip() for old, new in lines if old != new), after.splitlines()[-1].strip())


def tests_of(module: str, tree: Path) -> list[str]:
    """The tests that own a module."""
    prefix = max((prefix for prefix in OWNERS if module.startswith(prefix)), key=len, default=None)
    if prefix is None:
        raise SystemExit(f"{module}: say in OWNERS of tests/mutation.py which tests are its own")
    return [path for path in OWNERS[prefix] if (tree / path).exists()]


class Tests:
    """The tests of a module: collected once, run in forks of this process, each with another mutant in memory.

    A pytest plugin that runs mutants in place of tests. ``lines`` says which lines of the module a test reaches and
    ``seconds`` how long it takes; a mutant meets only the tests that reach it, fast ones first.
    """

    def __init__(self, module: str, tree: Path, only: list[int] | None) -> None:
        self._module, self._path, self._only = module, tree / module, only
        self._quiet, self._failed = only is None, False
        self._lines: dict[str, list[int]] = {}
        self._seconds: dict[str, float] = {}
        self._functions: list[FunctionType] = []
        self.results: list[dict[str, object]] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Notes a failure."""
        self._failed |= report.failed

    def pytest_runtestloop(self, session: Any) -> bool:
        """Runs every mutant."""
        if session.testsfailed:
            raise SystemExit("the tests cannot be collected")
        with tempfile.NamedTemporaryFile("r") as file:
            if self._fork(lambda: self._measure(session, Path(file.name)), 1200):
                raise SystemExit("the tests fail on the unchanged module: run them by themselves")
            self._lines, self._seconds = json.load(file)
        functions = (thing for thing in gc.get_objects() if type(thing) is FunctionType)
        self._functions = [function for function in functions if function.__code__.co_filename == str(self._path)]
        gc.disable()  # a collection would copy the memory that the forks share
        source = self._path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        plain = ast.unparse(tree)
        for number, (mutant, lines, in_function) in enumerate(mutants(tree)):
            if self._only is not None and number not in self._only:
                continue
            text = ast.unparse(mutant)
            items = self._reaching(session.items, lines if in_function else None)
            limit = 10 + 5 * sum(self._seconds[item.nodeid] for item in items)
            put = self._put_code if in_function else self._put_constants
            elsewhere = any(self._module.startswith(prefix) for prefix in IN_OTHER_PROCESSES)
            if elsewhere or not items:
                status = CANNOT if elsewhere else 0
            else:
                status = self._fork(lambda put=put, mutant=mutant, items=items: self._try(put, mutant, items), limit)
            key = f"{self._module}: {difference(plain, text)}"
            if status == CANNOT or (status == 0 and not in_function and key not in EQUIVALENT):
                self._path.write_text(text, encoding="utf-8")
                status = self._fork(lambda: _fresh(tests_of(self._module, Path.cwd())), limit + 60)
                self._path.write_text(source, encoding="utf-8")
            self.results.append({"number": number, "key": key, "killed": status != 0, "line": lines[0]})
            if status == 0 and key not in EQUIVALENT:
                print(f"SURVIVED #{number} line {lines[0]} of {key}", flush=True)
        killed = sum(bool(result["killed"]) for result in self.results)
        print(f"{self._module}: {killed} of {len(self.results)} killed", flush=True)
        if self._only is None:
            survived = {result["key"] for result in self.results if not result["killed"]}
            for key in [key for key in EQUIVALENT if key.startswith(f"{self._module}: ") and key not in survived]:
                print(f"STALE in mutation_equivalents.txt: {key}", flush=True)
        return True

    def _reaching(self, items: list[Any], lines: tuple[int, int] | None) -> list[Any]:
        """The items that reach any of the lines, fast ones first; None = all items."""
        if lines is not None:
            wanted = set(range(lines[0], lines[1] + 1))
            items = [item for item in items if wanted & set(self._lines[item.nodeid])]
        return sorted(items, key=lambda item: self._seconds[item.nodeid])

    def _measure(self, session: Any, to: Path) -> int:
        """Runs all tests on the unchanged module."""
        reached: set[int] = set()
        name = str(self._path)

        def trace(frame: Any, event: str, _: Any) -> Any:
            if frame.f_code.co_filename != name:
                return None
            reached.add(frame.f_lineno)
            return trace

        lines, seconds = {}, {}
        for item, following in zip(session.items, [*session.items[1:], None], strict=True):
            begin = time.monotonic()
            reached.clear()
            sys.settrace(trace)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            sys.settrace(None)
            lines[item.nodeid], seconds[item.nodeid] = sorted(reached), time.monotonic() - begin
        to.write_text(json.dumps([lines, seconds]))
        return int(self._failed)

    def _try(self, put: Callable[[ast.Module], bool], mutant: ast.Module, items: list[Any]) -> int:
        """Puts the mutant into the loaded module, then runs the items until one fails."""
        if not put(mutant):
            return CANNOT
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._failed:
                return 1
        return 0

    def _put_code(self, mutant: ast.Module) -> bool:
        """Puts the mutant's code into the module's functions; whether that can be done."""
        codes: dict[str, Any] = {}

        def collect(code: Any) -> None:
            for constant in code.co_consts:
                if hasattr(constant, "co_qualname"):
                    codes[f"{constant.co_qualname}:{constant.co_firstlineno}"] = constant
                    collect(constant)

        collect(compile(mutant, str(self._path), "exec"))
        for function in self._functions:
            code = codes.get(f"{function.__code__.co_qualname}:{function.__code__.co_firstlineno}")
            if code is None or len(code.co_freevars) != len(function.__code__.co_freevars):
                return False
            function.__code__ = code
        return True

    def _put_constants(self, mutant: ast.Module) -> bool:
        """Puts the mutant's constants and defaults into the loaded modules; whether there were any."""
        name = self._module.removesuffix(".py").replace("/", ".")
        loaded = sys.modules[name]
        changed: dict[str, Any] = {
            "__name__": name,
            "__package__": name.rpartition(".")[0],
            "__file__": str(self._path),
        }
        holders = [module for key, module in list(sys.modules.items()) if key.startswith(("recpo", "tests"))]
        try:
            exec(compile(mutant, str(self._path), "exec"), changed)
            names = [key for key in vars(loaded) if key in changed and not key.startswith("__")]
            found = [_transfer(getattr(loaded, key), changed[key], key, [loaded, *holders]) for key in names]
        except Exception:
            return False  # the mutant cannot be imported, or not twice: a new interpreter finds out
        return any(found)

    def _fork(self, run: Callable[[], int], limit: float) -> int:
        """Exit status of ``run`` in a forked process; 124 = too slow."""
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            if self._quiet:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 1)
                os.dup2(null, 2)
            status = 1  # whatever breaks the run was noticed
            try:
                status = run()
            finally:
                os._exit(status)
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return 124


def _transfer(old: Any, new: Any, name: str, holders: list[Any]) -> bool:
    """Puts a constant in the place of ``old`` wherever that is held as ``name``; of a function or class, its defaults.

    Returns whether anything differed.
    """
    if old is new:
        return False
    if isinstance(new, FunctionType) and isinstance(old, FunctionType):
        if not _differ((old.__defaults__, old.__kwdefaults__), (new.__defaults__, new.__kwdefaults__)):
            return False
        old.__defaults__, old.__kwdefaults__ = new.__defaults__, new.__kwdefaults__
        return True
    if isinstance(new, type) and isinstance(old, type):
        pairs = [(vars(old)[key], value, key, [old]) for key, value in vars(new).items() if key in vars(old)]
        fields = {} if not is_dataclass(old) else old.__dataclass_fields__
        pairs += [(it.default, new.__dataclass_fields__[key].default, "default", [it]) for key, it in fields.items()]
        found = [_transfer(*pair) for pair in pairs]
        return any(found)
    if not isinstance(new, bool | int | float | str | tuple | list | dict | frozenset | None) or not _differ(old, new):
        return False
    for holder in holders:
        if getattr(holder, name, None) is old:
            setattr(holder, name, new)
    return True


def _differ(old: object, new: object) -> bool:
    """Whether two constants are written differently; what is written with its address is not compared."""
    return repr(old) != repr(new) and " at 0x" not in repr(old)


def _fresh(tests: list[str]) -> int:
    """Exit status of the tests in a new interpreter."""
    return subprocess.run([sys.executable, "-m", "pytest", "-x", *PYTEST, *tests], check=False).returncode


def mutate_module(module: str, only: list[int] | None) -> list[dict[str, object]]:
    """Runs the tests of a module on each of its mutants, in a process of its own; the results, one for each."""
    tree = Path.cwd()
    tests, report = tests_of(module, tree), tree / "report.json"
    report.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        import pytest

        plugin, status = Tests(module, tree, only), 1
        try:
            pytest.main(["-p", "no:terminal", "--capture=no", *PYTEST, *tests], plugins=[plugin])
            report.write_text(json.dumps(plugin.results))
            status = 0
        finally:
            sys.stdout.flush()
            os._exit(status)
    os.waitpid(pid, 0)
    if not report.exists():
        raise SystemExit(f"{module}: no result")
    results: list[dict[str, object]] = json.loads(report.read_text())
    return results


def main() -> int:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", help="modules or packages, relative to the repository")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of mutants; prints the output of the tests")
    parser.add_argument("--report", type=Path, help="JSON file with every mutant")
    options = parser.parse_args()
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1"}
    files = [f for path in options.paths for f in (sorted(Path(ROOT, path).rglob("*.py")) or [Path(ROOT, path)])]
    modules = [str(f.relative_to(ROOT)) for f in files if f.name != "__init__.py"]
    report = None if options.report is None else options.report.resolve()
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        for part in ("recpo", "tests"):
            shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
        for part in ("pyproject.toml", "configs", "docs", "README.md"):
            (tree / part).symlink_to(ROOT / part)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = name
        sys.path[:] = [name, *(entry for entry in sys.path if Path(entry).resolve() not in (ROOT, ROOT / "tests"))]
        results = [result for module in modules for result in mutate_module(module, options.only)]
    left = [result for result in results if not result["killed"] and result["key"] not in EQUIVALENT]
    killed = sum(bool(result["killed"]) for result in results)
    print(f"{len(results)} mutants: {killed} killed, {len(results) - killed - len(left)} equivalent, {len(left)} left")
    if report is not None:
        report.write_text(json.dumps(results, indent=1))
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
