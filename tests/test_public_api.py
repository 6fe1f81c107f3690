"""What ``import recpo`` gives: every name resolves, says what it is, and costs nothing before it is used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import recpo

SOURCE = Path(recpo.__file__).read_text(encoding="utf-8")


def test_importing_recpo_imports_neither_torch_nor_pandas():
    heavy = "{'torch', 'pandas', 'numpy', 'pyarrow', 'lightning', 'ibis'}"
    code = f"import sys, recpo; dir(recpo); recpo.__version__; print(sorted({heavy} & set(sys.modules)))"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed.strip() == "[]"


@pytest.mark.parametrize("name", [name for name in recpo.__all__ if name != "__version__"])
def test_every_public_name_resolves_and_has_a_docstring(name):
    value = getattr(recpo, name)
    assert value is getattr(recpo, name)
    assert (value.__doc__ or "").strip()
    assert name in dir(recpo)


def test_type_checkers_see_the_names_that_exist():
    """The imports under TYPE_CHECKING and the table of lazy imports are the same list."""
    block = next(node for node in ast.parse(SOURCE).body if isinstance(node, ast.If))
    seen = {(node.module, alias.name, alias.asname) for node in block.body for alias in node.names}
    assert seen == {(module, name, public) for public, (module, name) in recpo._MODULE_AND_NAME.items()}


def test_an_unknown_name_is_an_attribute_error_that_lists_the_names():
    with pytest.raises(AttributeError, match=r"no attribute 'Trainer'.*GBPO"):
        _ = recpo.Trainer


def test_all_objectives_are_public():
    import recpo.objectives

    assert set(recpo.objectives.__all__) <= set(recpo.__all__)
