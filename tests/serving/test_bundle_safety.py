"""Damaged, altered and hostile bundles; and bundles in a process without training code."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import recpo
from recpo.errors import RecpoError
from recpo.serving.bundle import Bundle

REPOSITORY = Path(recpo.__file__).parent.parent


@pytest.fixture
def copy(bundle_path, tmp_path):
    return Path(shutil.copytree(bundle_path, tmp_path / "bundle"))


def edit_manifest(root, **changes):
    manifest = json.loads((root / "manifest.json").read_text())
    (root / "manifest.json").write_text(json.dumps(manifest | changes))


def test_what_is_no_bundle_is_refused(tmp_path):
    with pytest.raises(RecpoError, match="is no bundle"):
        Bundle.load(tmp_path)


@pytest.mark.parametrize("name", ["model.onnx", "model.pt2", "items.parquet"])
def test_altered_cut_and_missing_files_are_refused(copy, name):
    content = bytearray((copy / name).read_bytes())
    (copy / name).write_bytes(content[:-1])
    with pytest.raises(RecpoError, match=f"{name} is not the file that was exported"):
        Bundle.load(copy)
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    with pytest.raises(RecpoError, match=f"{name} is not the file that was exported"):
        Bundle.load(copy)
    (copy / name).unlink()
    with pytest.raises(RecpoError, match="incomplete"):
        Bundle.load(copy)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format_version": 1}', '{"format_version": 1, "files": {}}'])
def test_a_damaged_manifest_is_refused(copy, text):
    (copy / "manifest.json").write_text(text)
    with pytest.raises(RecpoError, match="is damaged"):
        Bundle.load(copy)


def test_another_format_version_and_files_outside_are_refused(copy):
    files = json.loads((copy / "manifest.json").read_text())["files"]
    edit_manifest(copy, files=files | {"../secret": "0"})
    with pytest.raises(RecpoError, match="is damaged"):
        Bundle.load(copy)
    edit_manifest(copy, format_version=99)
    with pytest.raises(RecpoError, match="format_version 99"):
        Bundle.load(copy)


class Payload:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("part", ["sample_inputs/model.pt", "constants/opaque_obj_0", "weights/weight_0"])
def test_pickles_inside_a_program_are_never_run(copy, tmp_path, part):
    trace = tmp_path / "was_run"
    program = copy / "model.pt2"
    with zipfile.ZipFile(program) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    stem = next(iter(parts)).split("/")[0]
    parts[f"{stem}/data/{part}"] = pickle.dumps(Payload(trace))
    if part.startswith("weights"):
        name = f"{stem}/data/weights/model_weights_config.json"
        parts[name] = parts[name].replace(b'"use_pickle": false', b'"use_pickle": true')
    with zipfile.ZipFile(program, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    files = json.loads((copy / "manifest.json").read_text())["files"]
    edit_manifest(copy, files=files | {"model.pt2": hashlib.sha256(program.read_bytes()).hexdigest()})
    with pytest.raises(RecpoError, match=r"model\.pt2"):
        Bundle.load(copy, engine="torch")
    assert not trace.exists()


def test_a_bundle_names_no_path_of_the_machine_that_made_it(bundle_path):
    for file in bundle_path.iterdir():
        content = file.read_bytes()
        assert str(REPOSITORY).encode() not in content
        assert str(bundle_path.parent).encode() not in content


WITHOUT = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError("blocked: " + name, name=name)
sys.meta_path.insert(0, Refuse())
from recpo.cli.main import main
sys.exit(main({arguments!r}))
"""


@pytest.mark.parametrize("engine", ["onnx", "torch"])
def test_recommend_runs_where_training_code_cannot_be_imported(bundle_path, tmp_path, engine):
    blocked = ["lightning", "pytorch_lightning", "lightning_fabric", "torchrec", "fbgemm_gpu"]
    blocked += ["torch", "ibis", "duckdb", "sklearn"] if engine == "onnx" else []
    histories = pa.table({"user_id": [5, 6], "item_ids": [["item-3", "?"], []]})
    pq.write_table(histories, tmp_path / "histories.parquet")
    arguments = ["recommend", "--bundle", str(bundle_path), "--histories", str(tmp_path / "histories.parquet")]
    arguments += ["--out", str(tmp_path / "lists.parquet"), "--engine", engine, "--k", "3", "--show", "2"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(blocked=blocked, arguments=arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "unknown items skipped: 1" in done.stdout
    assert pq.read_table(tmp_path / "lists.parquet").equals(
        Bundle.load(bundle_path, engine).recommend(histories, 3).table
    )
