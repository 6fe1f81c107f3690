"""The names of ``import recpo``: each resolves, has a docstring, and is imported only when used."""

import shutil
import subprocess
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import recpo
from tests.refusals import refused

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


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Trainer"):
        _ = recpo.Trainer


def test_all_objectives_are_public():
    import recpo.objectives

    assert set(recpo.objectives.__all__) <= set(recpo.__all__)


def test_load_opens_each_kind_of_directory_by_its_marker(prepared, world, tmp_path, capfd):
    codes = recpo.tokenize(prepared, tmp_path / "codes", levels=2, codebook_size=8, capacity_slack=None)
    assert isinstance(recpo.load(prepared), recpo.Prepared)
    assert isinstance(recpo.load(str(world)), recpo.Simulation)
    assert isinstance(recpo.load(codes), recpo.Codes)
    for other in (recpo.Prepared, recpo.Run, recpo.Bundle, recpo.Factors):
        with refused("wrong_file", ...):  # open, but of another kind
            other.open(codes)
    assert capfd.readouterr() == ("", "")


def test_load_says_what_it_found_instead(prepared, tmp_path):
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for path, _found in ((tmp_path / "absent", "nothing there"), (tmp_path / "file", "a file")):
        with refused("wrong_file"):
            recpo.load(path)
    with refused("wrong_file"):
        recpo.load(tmp_path)
    (tmp_path / "recpo.json").write_text('{"kind": "demo"}', encoding="utf-8")
    with refused("wrong_file"):
        recpo.load(tmp_path)


class Stream:
    """A frame of a library that recpo does not know: all it has is the Arrow C stream."""

    def __init__(self, frame):
        self.table = pa.Table.from_pandas(frame, preserve_index=False)

    def __arrow_c_stream__(self, requested_schema=None):
        return self.table.__arrow_c_stream__(requested_schema)


KINDS = {
    "pandas": lambda frame: frame,
    "pyarrow": lambda frame: pa.Table.from_pandas(frame, preserve_index=False),
    "stream": Stream,
}
TINY = {"data.batch_size": 16, "trainer.accelerator": "cpu", "trainer.max_epochs": 1, "trainer.limit_train_batches": 2}


@pytest.fixture(scope="module")
def road(world, tmp_path_factory):
    """``log``, ``data``, ``run`` and what the functions that made them printed."""
    out, log = tmp_path_factory.mktemp("road"), pd.read_parquet(world / "log")
    data = recpo.prepare(log, out=out / "prepared")
    policy = partial(recpo.CatalogSoftmaxPolicy, dim=8, heads=1, layers=1, max_history=50)
    run = recpo.train(data, policy=policy, out=out / "run", **TINY)
    return SimpleNamespace(log=log, data=data, run=run, out=out)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_prepare_takes_any_frame_and_writes_the_same(road, tmp_path, kind):
    data = recpo.prepare(KINDS[kind](road.log), out=tmp_path / "prepared")
    assert data.manifest["files"] == road.data.manifest["files"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_and_a_bundle_take_any_frame_and_return_pandas_in_external_ids(road, bundle, kind):
    frame = KINDS[kind](road.log)
    for lists in (recpo.recommend(road.run, frame, k=3), bundle.recommend(frame, k=3)):
        assert isinstance(lists, pd.DataFrame)
        assert list(lists) == ["user_id", "rank", "item_id", "score"]
        assert lists["item_id"].dtype == road.log["item_id"].dtype
        assert set(lists["user_id"]) <= set(road.log["user_id"])
        assert set(lists["item_id"]) <= set(road.log["item_id"])
        assert lists.merge(road.log, on=["user_id", "item_id"]).empty


@pytest.fixture(scope="module")
def bundle(road):
    return recpo.export(road.run, out=road.out / "bundle", k=5)


def test_a_run_scores_candidates_as_its_bundle_does(road, bundle):
    users = road.log["user_id"].unique()[:4]
    pairs = pd.DataFrame({"user_id": users.repeat(3), "item_id": [*road.log["item_id"].unique()[:11], -1]})
    scored = recpo.score(road.run.root, road.log, pairs)
    pd.testing.assert_frame_equal(scored[["user_id", "item_id"]], pairs)
    assert np.isnan(scored["score"].iloc[-1])
    expected = recpo.Bundle.open(bundle.root, "torch").score(road.log, pairs)
    pd.testing.assert_frame_equal(scored, expected, check_exact=False, atol=1e-4)


@pytest.mark.slow
def test_the_functions_print_nothing(road, tmp_path, capfd):
    data = recpo.prepare(road.log, out=tmp_path / "prepared")
    run = recpo.train(data, objective=recpo.GBPO(), init_from=road.run, out=tmp_path / "aligned", **TINY)
    result = recpo.evaluate(data, [road.run, run, "popularity"], out=tmp_path / "evaluation")
    assert {"run", "aligned", "popularity"} <= set(result.to_pandas()["contender"])
    recpo.export(run, out=tmp_path / "bundle", k=3).recommend(road.log, k=2)
    assert capfd.readouterr() == ("", "")
    kinds = {"prepared": recpo.Prepared, "aligned": recpo.Run, "bundle": recpo.Bundle, "evaluation": recpo.Evaluation}
    for name, kind in kinds.items():
        assert isinstance(recpo.load(tmp_path / name), kind)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_run_on_another_path_without_its_prepared_data_recommends_and_exports(road, tmp_path, monkeypatch):
    expected = recpo.recommend(road.run, road.log, k=3)
    shutil.copytree(road.out / "run", tmp_path / "elsewhere" / "moved")
    monkeypatch.chdir(tmp_path)
    road.data.root.rename(tmp_path / "gone")
    try:
        moved = recpo.load("elsewhere/moved")
        pd.testing.assert_frame_equal(recpo.recommend(moved, road.log, k=3), expected)
        served = recpo.export(moved, out=tmp_path / "bundle", k=3).recommend(road.log, k=3)
        assert served[["user_id", "rank", "item_id"]].equals(expected[["user_id", "rank", "item_id"]])
    finally:
        (tmp_path / "gone").rename(road.data.root)


@pytest.mark.parametrize("name", ["Prepared", "Run", "Evaluation", "Bundle"])
def test_the_text_of_a_result_is_short(name):
    large = {"manifest", "document", "facts", "items", "runtime", "options"}
    shown = {one.name for one in fields(getattr(recpo, name)) if one.repr}
    assert shown
    assert not shown & large
