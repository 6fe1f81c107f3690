"""`recpo tokenize` as a user runs it: every source, frozen codebooks, hostile files."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import recpo
from recpo.artifacts.semantic_codes import Codes
from recpo.cli.main import main
from recpo.items.residual_kmeans import Codebooks
from recpo.log.id_map import IdMap
from recpo.log.prepared import Prepared
from recpo.training.run import Run
from recpo.verbs.prepare import prepare
from tests.conftest import resealed
from tests.refusals import refused

SMALL = ["--levels", "2", "--codebook_size", "8", "--capacity_slack", "null"]


def tokenize(prepared, out, *options):
    return main(["tokenize", "--prepared", str(prepared), "--out", str(out), *map(str, options)])


def item_ids(prepared):
    return pq.read_table(prepared / "items.parquet")["item_id"].to_pylist()


def write_vectors(file, ids, dim=6, seed=0):
    vectors = np.random.default_rng(seed).normal(size=(len(ids), dim)).astype(np.float32)
    pq.write_table(pa.table({"item_id": ids, "vector": list(vectors)}), file)
    return file


def from_file(file, *options):
    return ["--vectors", "VectorsFromParquet", "--vectors.file", str(file), *options]


@pytest.mark.slow
def test_from_a_log_to_codes(prepared, tmp_path, capsys):
    assert tokenize(prepared, tmp_path / "codes", *SMALL) == 0
    printed = capsys.readouterr().out
    assert "error / variance" in printed
    assert "items;" in printed
    codes = Codes.open(tmp_path / "codes")
    data = Prepared.open(prepared)
    assert codes.num_items == data.num_items
    assert codes.codebook_sizes == (8, 8)
    assert codes.catalog_checksum == data.catalog_checksum
    table = pq.read_table(tmp_path / "codes/codes.parquet")
    assert table["item_id"].to_pylist() == item_ids(prepared)
    manifest = json.loads((tmp_path / "codes/manifest.json").read_text())
    assert manifest["source"] == "VectorsFromCooccurrence"
    assert manifest["report"]["items"] == data.num_items
    assert 0 < manifest["report"]["levels"][1]["error"] < manifest["report"]["levels"][0]["error"] < 1
    assert tokenize(prepared, tmp_path / "again", *SMALL) == 0
    for name in ("codes.parquet", "manifest.json", "codebooks.safetensors"):
        assert (tmp_path / "codes" / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name
    resolved = ["--config", str(tmp_path / "codes/resolved.yaml"), "--out", str(tmp_path / "third")]
    assert main(["tokenize", *resolved]) == 0
    assert (tmp_path / "third/codes.parquet").read_bytes() == (tmp_path / "codes/codes.parquet").read_bytes()


def test_an_existing_directory_is_kept_unless_told_otherwise(prepared, tmp_path, capsys):
    assert tokenize(prepared, tmp_path / "codes", *SMALL) == 0
    before = (tmp_path / "codes/codes.parquet").read_bytes()
    assert tokenize(prepared, tmp_path / "codes", *SMALL, "--seed", 1) == 1
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "codes/codes.parquet").read_bytes() == before
    assert tokenize(prepared, tmp_path / "codes", *SMALL, "--seed", 1, "--overwrite", "true") == 0
    assert (tmp_path / "codes/codes.parquet").read_bytes() != before


def test_vectors_of_a_file(prepared, tmp_path):
    ids = item_ids(prepared)
    file = write_vectors(tmp_path / "vectors.parquet", [*reversed(ids), 10**9])
    assert tokenize(prepared, tmp_path / "codes", *from_file(file), *SMALL, "--normalize", "none") == 0
    manifest = json.loads((tmp_path / "codes/manifest.json").read_text())
    assert manifest["rows_of_other_items"] == 1
    codes, books = Codes.open(tmp_path / "codes"), Codebooks.load(tmp_path / "codes")
    given = dict(zip(*(pq.read_table(file)[name].to_pylist() for name in ("item_id", "vector")), strict=True))
    wanted = books.encode(torch.tensor([given[item] for item in ids])).numpy()
    assert int((wanted != codes.codes).any(1).sum()) == manifest["report"]["moved"]
    pq.write_table(
        pa.table({"item_id": ids, **{f"v{number}": [given[item][number] for item in ids] for number in range(6)}}),
        tmp_path / "columns.parquet",
    )
    columns = "[" + ",".join(f"v{number}" for number in range(6)) + "]"
    options = from_file(tmp_path / "columns.parquet", "--vectors.vector", columns)
    assert tokenize(prepared, tmp_path / "other", *options, *SMALL, "--normalize", "none") == 0
    assert np.array_equal(Codes.open(tmp_path / "other").codes, codes.codes)


def test_an_extra_code_and_balanced_codes(prepared, tmp_path):
    few = ["--levels", "1", "--codebook_size", "4", "--collisions", "extra", "--capacity_slack", "1"]
    assert tokenize(prepared, tmp_path / "codes", *few) == 0
    codes = Codes.open(tmp_path / "codes")
    largest = -(-codes.num_items // 4)
    assert codes.codebook_sizes == (4, largest)
    assert np.bincount(codes.codes[:, 0]).max() == largest


def test_missing_items_are_an_error_or_get_the_vector_that_was_asked_for(prepared, tmp_path, capsys):
    ids = item_ids(prepared)
    file = write_vectors(tmp_path / "vectors.parquet", ids[2:])
    assert tokenize(prepared, tmp_path / "codes", *from_file(file), *SMALL) == 1
    assert f"has no vector for 2 of {len(ids)} items, the first is {ids[0]}" in capsys.readouterr().err
    assert not (tmp_path / "codes").exists()
    for missing in ("mean", "zero"):
        assert tokenize(prepared, tmp_path / missing, *from_file(file, "--vectors.missing", missing), *SMALL) == 0
        assert json.loads((tmp_path / missing / "manifest.json").read_text())["items_missing"] == 2


@pytest.mark.slow
def test_vectors_of_a_run(prepared, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    policy = [
        "--policy",
        "CatalogSoftmaxPolicy",
        "--policy.dim",
        "8",
        "--policy.heads",
        "1",
        "--policy.max_history",
        "8",
    ]
    options = ["--trainer.max_epochs", "1", "--trainer.limit_train_batches", "1", "--data.batch_size", "8"]
    layout = ["--data.layout", "SequenceLayout", "--data.layout.history_length", "8", "--objective", "Likelihood"]
    common = ["--data.prepared", str(prepared), "--out", str(run), "--trainer.accelerator", "cpu"]
    assert main(["train", *common, *policy, *layout, *options]) == 0
    source = ["--vectors", "VectorsFromRun", "--vectors.run", run]
    assert tokenize(prepared, tmp_path / "codes", *source, *SMALL) == 0
    table = Run.open(run).policy().item_table.weight.detach()[1:]
    books = Codebooks.load(tmp_path / "codes")
    wanted = books.encode(books.normalize(table)).numpy()
    moved = json.loads((tmp_path / "codes/manifest.json").read_text())["report"]["moved"]
    assert int((wanted != Codes.open(tmp_path / "codes").codes).any(1).sum()) == moved
    other = json.loads((run / "run.json").read_text()) | {"catalog_checksum": "other"}
    (run / "run.json").write_text(json.dumps(resealed(other)))
    monkeypatch.setattr(IdMap, "equals", lambda *_: False)
    assert tokenize(prepared, tmp_path / "refused", *source, *SMALL) == 1
    assert "was trained on other items than" in capsys.readouterr().err
    assert tokenize(prepared, tmp_path / "refused", *source, "--extends", tmp_path / "codes") == 1
    assert "have their own space" in capsys.readouterr().err


def write_codes(file, ids, **columns):
    pq.write_table(pa.table({"item_id": ids, **columns}), file)
    return ["--vectors", "CodesFromFile", "--vectors.file", file, "--vectors.codes", f"[{','.join(columns)}]"]


def test_codes_of_a_file(prepared, tmp_path):
    ids = item_ids(prepared)
    numbers = np.arange(len(ids))
    source = write_codes(tmp_path / "f.parquet", ids, a=[f"<a_{n // 9}>" for n in numbers], b=numbers % 9 // 2)
    assert tokenize(prepared, tmp_path / "extra", *source) == 0
    codes = Codes.open(tmp_path / "extra")
    assert codes.codebook_sizes == ((len(ids) - 1) // 9 + 1, 5, 2)
    assert np.array_equal(codes.codes[:, 0], numbers // 9)
    assert not (tmp_path / "extra/codebooks.safetensors").exists()
    sized = ["--collisions", "first_free", "--vectors.codebook_size", 16]
    assert tokenize(prepared, tmp_path / "free", *source, *sized) == 0
    codes = Codes.open(tmp_path / "free")
    assert codes.codebook_sizes == (16, 16)
    assert np.array_equal(codes.codes[:, 0], numbers // 9)


def test_the_shipped_configuration_on_a_small_catalog(prepared, tmp_path):
    ids, config = item_ids(prepared), Path(__file__).parents[2] / "configs/tokenize_beauty.yaml"
    assert f"recpo tokenize --config configs/{config.name}\n" in config.read_text()
    columns = {f"sid_{level}": [f"<{level}_{n // 2}>" for n in range(len(ids))] for level in "abcd"}
    file = write_codes(tmp_path / "f.parquet", ids, **columns)[3]
    options = ["tokenize", "--config", config, "--vectors.init_args.file", file, "--prepared", prepared]
    assert main([*map(str, options), "--out", str(tmp_path / "codes")]) == 0
    codes = Codes.open(tmp_path / "codes")
    assert codes.codebook_sizes == (256,) * 4
    assert np.array_equal(codes.codes[::2, 3], np.arange(0, len(ids), 2) // 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--collisions", "nearest"], "nearest needs vectors"),
        (["--levels", "4"], "CodesFromFile has its codes already: leave out levels"),
        (["--vectors.codebook_size", "3"], "does not fit into a codebook of 3"),
        (["--collisions", "first_free"], "items do not fit into"),
        (["--extends", "anything"], "CodesFromFile has none"),
    ],
)
def test_what_codes_of_a_file_cannot_do(prepared, tmp_path, capsys, options, message):
    ids = item_ids(prepared)
    source = write_codes(tmp_path / "f.parquet", ids, a=np.arange(len(ids)) % 5)
    assert tokenize(prepared, tmp_path / "codes", *source, *options) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "codes").exists()


def test_a_column_that_holds_no_codes(prepared, tmp_path, capsys):
    ids = item_ids(prepared)
    source = write_codes(tmp_path / "f.parquet", ids, a=np.arange(len(ids)) + 10**8)
    assert tokenize(prepared, tmp_path / "codes", *source) == 1
    assert "does not fit into a codebook" in capsys.readouterr().err
    assert tokenize(prepared, tmp_path / "codes", *source[:-1], "[]") == 1
    assert "name at least one column beside item_id" in capsys.readouterr().err


def test_a_device_that_is_not_there(prepared, tmp_path, capsys):
    assert tokenize(prepared, tmp_path / "codes", *SMALL, "--device", "cuda:99") == 1
    assert "device 'cuda:99' cannot be used here" in capsys.readouterr().err


def test_codes_of_a_file_that_lacks_items(prepared, tmp_path, capsys):
    ids = item_ids(prepared)
    source = write_codes(tmp_path / "f.parquet", ids[1:], a=np.arange(len(ids) - 1))
    assert tokenize(prepared, tmp_path / "codes", *source) == 1
    assert f"has no codes for 1 items, the first is {ids[0]}" in capsys.readouterr().err


@pytest.fixture(scope="module")
def grown(world, tmp_path_factory):
    """Two catalogs of one log: without and with some of its items."""
    folder = tmp_path_factory.mktemp("grown")
    log = pa.concat_tables(pq.read_table(file) for file in sorted((world / "log").glob("*.parquet")))
    item = log["item_id"].to_numpy()
    pq.write_table(log.filter(pa.array(item % 4 != 0)), folder / "old.parquet")
    pq.write_table(log.filter(pa.array(item % 7 != 1)), folder / "new.parquet")
    for name in ("old", "new"):
        prepare(str(folder / f"{name}.parquet"), folder / name)
    return folder


@pytest.mark.parametrize("collisions", ["nearest", "extra"])
@pytest.mark.parametrize("source", ["file", "log"])
def test_old_items_keep_their_codes_and_new_ones_get_free_ones(grown, tmp_path, source, collisions):
    old_ids, new_ids = item_ids(grown / "old"), item_ids(grown / "new")
    everything = sorted({*old_ids, *new_ids})
    options = from_file(write_vectors(tmp_path / "vectors.parquet", everything)) if source == "file" else []
    first = [*options, *SMALL, "--normalize", "standardize", "--collisions", collisions]
    assert tokenize(grown / "old", tmp_path / "old", *first) == 0
    assert tokenize(grown / "new", tmp_path / "new", *options, "--extends", tmp_path / "old") == 0
    old, new = Codes.open(tmp_path / "old"), Codes.open(tmp_path / "new")  # loading checks uniqueness
    given = dict(zip(old_ids, old.codes.tolist(), strict=True))
    found = dict(zip(new_ids, new.codes.tolist(), strict=True))
    assert all(found[item] == given[item] for item in given.keys() & found.keys())
    manifest = json.loads((tmp_path / "new/manifest.json").read_text())
    assert manifest["items_kept"] == len(given.keys() & found.keys())
    assert manifest["items_gone"] == len(given.keys() - found.keys())
    assert manifest["report"]["movable"] == len(found.keys() - given.keys())
    assert manifest["catalog_checksum"] == Prepared.open(grown / "new").catalog_checksum
    name = "codebooks.safetensors"
    assert (tmp_path / "old" / name).read_bytes() == (tmp_path / "new" / name).read_bytes()


def test_only_new_items_need_a_vector(grown, tmp_path, capsys):
    old_ids, new_ids = item_ids(grown / "old"), item_ids(grown / "new")
    file = write_vectors(tmp_path / "old.parquet", old_ids)
    assert tokenize(grown / "old", tmp_path / "old", *from_file(file), *SMALL) == 0
    added = sorted({*new_ids} - {*old_ids})
    frozen = ["--extends", tmp_path / "old"]
    file = write_vectors(tmp_path / "new.parquet", added)
    assert tokenize(grown / "new", tmp_path / "new", *from_file(file), *frozen) == 0
    file = write_vectors(tmp_path / "fewer.parquet", added[1:])
    assert tokenize(grown / "new", tmp_path / "fewer", *from_file(file), *frozen) == 1
    assert f"no vector for 1 of {len(added)} items, the first is {added[0]}" in capsys.readouterr().err
    file = write_vectors(tmp_path / "wide.parquet", added, dim=7)
    assert tokenize(grown / "new", tmp_path / "wide", *from_file(file), *frozen) == 1
    assert "item vectors have 7 dimensions and the codebooks 6" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--levels", "2"], "earlier codes come with their options of k-means"),
        (["--collisions", "extra"], "its collisions were resolved the other way"),
        (["--collisions", "first_free"], "first_free is for codes without vectors"),
    ],
)
def test_frozen_codebooks_take_no_options(grown, tmp_path, capsys, options, message):
    assert tokenize(grown / "old", tmp_path / "old", *SMALL) == 0
    assert tokenize(grown / "new", tmp_path / "new", "--extends", tmp_path / "old", *options) == 1
    assert message in capsys.readouterr().err


def test_directories_that_hold_no_codebooks(prepared, tmp_path, capsys):
    assert tokenize(prepared, tmp_path / "new", "--extends", tmp_path / "nowhere") == 1
    assert "expected semantic codes" in capsys.readouterr().err
    assert tokenize(prepared, tmp_path / "old", *SMALL) == 0
    (tmp_path / "old/codebooks.safetensors").unlink()
    assert tokenize(prepared, tmp_path / "new", "--extends", tmp_path / "old") == 1
    assert "has no codebooks.safetensors" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "old")
    assert tokenize(tmp_path, tmp_path / "new") == 1
    assert "expected prepared data" in capsys.readouterr().err


def test_more_items_than_tuples(prepared, tmp_path, capsys):
    assert tokenize(prepared, tmp_path / "codes", "--levels", "1", "--codebook_size", "4") == 1
    assert "items do not fit into 4 code tuples: take more levels or larger codebooks" in capsys.readouterr().err


def test_from_python_frames_in_and_an_object_out_in_silence(prepared, tmp_path, capfd):
    ids = item_ids(prepared)
    file = write_vectors(tmp_path / "vectors.parquet", ids)
    assert tokenize(prepared, tmp_path / "file", *from_file(file), *SMALL) == 0
    capfd.readouterr()
    small = {"levels": 2, "codebook_size": 8, "capacity_slack": None}
    codes = recpo.tokenize(Prepared.open(prepared), tmp_path / "frame", vectors=pd.read_parquet(file), **small)
    assert capfd.readouterr() == ("", "")
    assert (codes.root / "codes.parquet").read_bytes() == (tmp_path / "file/codes.parquet").read_bytes()
    frame = codes.to_pandas()
    assert frame["item_id"].tolist() == ids
    assert np.array_equal(frame[["code_0", "code_1"]], codes.codes)
    assert codes.report["items"] == len(ids)
    again = recpo.tokenize(str(prepared), tmp_path / "again", vectors=pd.read_parquet(file), extends=codes)
    assert np.array_equal(again.codes, codes.codes)
    with refused("missing_value", "vectors"):
        recpo.tokenize(prepared, tmp_path / "x", vectors={"item_id": ids[1:], "vector": [[1.0]] * (len(ids) - 1)})
