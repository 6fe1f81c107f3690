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
    seen = {(node.module, alias.name) for node in block.body for alias in node.names if alias.name == alias.asname}
    assert seen == {(module, name) for name, module in recpo._MODULE_OF.items()}


def test_an_unknown_name_is_an_attribute_error_that_lists_the_names():
    with pytest.raises(AttributeError, match=r"no attribute 'Trainer'.*GBPO"):
        _ = recpo.Trainer


def test_all_objectives_are_public():
    import recpo.objectives

    assert set(recpo.objectives.__all__) <= set(recpo.__all__)


def test_load_opens_each_kind_of_directory_by_its_marker(prepared, world, tmp_path, capfd):
    codes = recpo.tokenize(prepared, tmp_path / "codes", levels=2, codebook_size=8, capacity_slack=None)
    assert isinstance(recpo.load(prepared), recpo.Prepared)
    assert isinstance(recpo.load(str(world)), recpo.Simulation)
    assert isinstance(recpo.load(codes), recpo.Codes)
    assert capfd.readouterr() == ("", "")


def test_load_says_what_it_found_instead(prepared, tmp_path):
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for path, found in ((tmp_path / "absent", "nothing there"), (tmp_path / "file", "a file")):
        with pytest.raises(recpo.RecpoError, match=f"expected prepared data, .*, found {found}"):
            recpo.load(path)
    with pytest.raises(recpo.RecpoError, match=r"found a directory without recpo\.json"):
        recpo.load(tmp_path)
    (tmp_path / "recpo.json").write_text('{"kind": "demo"}', encoding="utf-8")
    with pytest.raises(recpo.RecpoError, match="found a demo directory, whose parts can be opened"):
        recpo.load(tmp_path)
