"""Damaged, altered and hostile bundles; and bundles in a process without training code."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

import recpo
from recpo.artifacts.checksums import seal
from recpo.base.errors import RecpoError
from recpo.serving.bundle import Bundle
from recpo.serving.manifest import BundleManifest
from tests.refusals import refused
from tests.serving.conftest import served_by

pytestmark = pytest.mark.slow

REPOSITORY = Path(recpo.__file__).parent.parent
HISTORY = {"user_id": [1], "item_id": ["item-3"], "timestamp": [5], "watch_time": [8.0], "duration": [10.0]}


@pytest.fixture
def copy(bundle_path, tmp_path):
    return Path(shutil.copytree(bundle_path, tmp_path / "bundle"))


def read_manifest(root):
    return json.loads((root / "manifest.json").read_text())


def sign(root, **changes):
    """What somebody writes who wants a bundle to be taken for a whole one: all checksums are right again."""
    content = read_manifest(root) | changes
    content.pop("sha256")
    if "files" not in changes:
        content["files"] = {name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in content["files"]}
    (root / "manifest.json").write_text(json.dumps(seal(content)))


def test_other_directories_than_bundles_are_refused(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with refused("wrong_file", "manifest.json"):
            Bundle.open(path)


@pytest.mark.parametrize("name", ["model.onnx", "policy.safetensors", "items.parquet"])
def test_altered_cut_and_missing_files_are_refused(copy, name):
    content = bytearray((copy / name).read_bytes())
    (copy / name).write_bytes(content[:-1])
    with refused("damaged", name):
        Bundle.open(copy)
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    with refused("damaged", name):
        Bundle.open(copy)
    (copy / name).unlink()
    with refused("damaged", name):
        Bundle.open(copy)


@pytest.mark.parametrize("name", ["manifest.json", "model.onnx", "policy.safetensors", "items.parquet", "recpo.json"])
def test_a_flipped_bit_anywhere_is_refused_or_changes_nothing(copy, bundle_path, name):
    expected = Bundle.open(bundle_path).recommend(HISTORY)
    content, rng, refused = (copy / name).read_bytes(), np.random.default_rng(0), 0
    for place in [0, len(content) - 1, *rng.integers(0, len(content), 40)]:
        flipped = bytearray(content)
        flipped[place] ^= 1 << int(rng.integers(8))
        (copy / name).write_bytes(flipped)
        try:
            assert Bundle.open(copy).recommend(HISTORY).equals(expected)
        except RecpoError:
            refused += 1
    assert refused == 42 or name in ("recpo.json", "manifest.json")  # white space of JSON may change


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '"x"', "[" * 100_000, '{"format_version": 7}', "\xff"])
def test_a_damaged_manifest_is_refused(copy, text):
    (copy / "manifest.json").write_text(text, encoding="latin1")
    with refused(("damaged", "old_format"), ...):
        Bundle.open(copy)


def test_a_cut_manifest_is_refused(copy):
    content = (copy / "manifest.json").read_bytes()
    for length in range(0, len(content) - 2, 97):
        (copy / "manifest.json").write_bytes(content[:length])
        with pytest.raises(RecpoError):
            Bundle.open(copy)


@pytest.mark.parametrize(
    "key",
    [
        *("num_items", "max_history", "k", "reads_timestamps", "feedback", "policy", "origin", "versions", "files"),
        *("item_precision", "index", "features", "behaviors", "mask"),
    ],
)
@pytest.mark.parametrize("value", [None, -1, 0, 1.5, "x", [], {}, True, {"class": 3}, 10**30])
def test_values_of_a_wrong_type_are_refused(copy, key, value):
    fitting = (type(read_manifest(copy)[key]) is type(value)) and key in ("origin", "versions", "index", "behaviors")
    sign(copy, **{key: value})
    if fitting or (key == "reads_timestamps" and value is True):
        return
    with pytest.raises(RecpoError):
        Bundle.open(copy)


@pytest.mark.parametrize("version", [1, 2, "3", None])
def test_another_format_version_says_what_to_do(copy, version):
    sign(copy, format_version=version)
    with refused("old_format", "format_version"):
        Bundle.open(copy)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../b", "", ".", "a\\b", "c:x", "a\0b"])
def test_files_outside_the_bundle_cannot_be_named(copy, name):
    sign(copy, files=read_manifest(copy)["files"] | {name: "0"})
    with refused("untrusted", ...):
        Bundle.open(copy)


def test_files_without_a_checksum_are_refused(copy):
    (copy / "model.onnx.data").write_bytes(b"weights of somebody else")
    with refused("untrusted", "model.onnx.data"):
        Bundle.open(copy)
    (copy / "model.onnx.data").unlink()
    (copy / ".DS_Store").write_bytes(b"")
    Bundle.open(copy)


@pytest.mark.parametrize("place", ["/etc/passwd", "../../secret", "items.parquet", ".hidden"])
@pytest.mark.parametrize("where", ["initializer", "constant", "subgraph"])
def test_a_program_cannot_read_weights_from_other_files(copy, place, where):
    model = onnx.load(copy / "model.onnx")
    tensor = onnx.TensorProto(name="foreign", data_type=onnx.TensorProto.UINT8, dims=[4])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=place)
    constant = onnx.helper.make_node("Constant", [], ["read"], value=tensor)
    if where == "initializer":
        model.graph.initializer.append(tensor)
    elif where == "constant":
        model.graph.node.insert(0, constant)
    else:
        output = onnx.helper.make_tensor_value_info("read", onnx.TensorProto.UINT8, [4])
        branch = onnx.helper.make_graph([constant], "branch", [], [output])
        model.graph.node.append(onnx.helper.make_node("If", ["c"], ["d"], then_branch=branch, else_branch=branch))
    (copy / "model.onnx").write_bytes(model.SerializeToString())
    sign(copy)
    with refused("untrusted", ...):
        Bundle.open(copy)


@pytest.mark.parametrize("content", [b"", b"no program", b"\x08\x08", pickle.dumps([1])])
def test_other_files_than_programs_are_refused(copy, content):
    (copy / "model.onnx").write_bytes(content)
    sign(copy)
    with refused("damaged", "model.onnx"):
        Bundle.open(copy)


class Payload:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


def test_pickled_weights_are_never_read(copy, tmp_path):
    trace = tmp_path / "was_run"
    (copy / "policy.safetensors").write_bytes(pickle.dumps(Payload(trace)))
    sign(copy)
    with refused("damaged", "recpo.policies.catalog_softmax.CatalogSoftmaxPolicy"):
        Bundle.open(copy, engine="torch")
    assert not trace.exists()


CODE = "__import__('pathlib').Path({trace!r}).touch()"


@pytest.mark.parametrize("place", ["class", "key", "value", "block", "temperature", "codes", "num_items"])
def test_a_manifest_cannot_name_code(copy, tmp_path, monkeypatch, place):
    """``model.pt2`` had expressions that torch evaluates; a class path would import a module beside the bundle."""
    trace = tmp_path / "was_run"
    (tmp_path / "payload.py").write_text(CODE.format(trace=str(trace)) + "\nclass P: pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    policy = read_manifest(copy)["policy"]
    code = CODE.format(trace=str(trace))
    if place == "class":
        policy["class"] = "payload.P"
    elif place == "key":
        policy["options"][code] = 1
    else:
        policy["options"]["dim" if place == "value" else place] = {"class_path": "payload.P", "init_args": {"x": code}}
    sign(copy, policy=policy)
    with refused(("damaged", "unsupported", "mismatch"), ...):
        Bundle.open(copy, engine="torch")
    assert not trace.exists()
    assert "payload" not in sys.modules


@pytest.mark.parametrize("code", ["__import__('os')", "recpo.cli.main", "sasrec\n"])
@pytest.mark.parametrize("option", ["block", "similarity", "normalizer", "proposal"])
def test_options_are_words_of_their_signature(copy, option, code):
    policy = read_manifest(copy)["policy"]
    policy["options"][option] = code
    sign(copy, policy=policy)
    with refused("damaged", option):
        Bundle.open(copy, engine="torch")


def test_the_torch_engine_does_not_reach_the_deserializer_of_torch(bundle_path):
    """It called sympify on strings of the archive."""
    program = (
        "import torch, sys; from recpo.serving.bundle import Bundle\n"
        "def fail(*a, **k): raise SystemExit('reached')\n"
        "torch.load = torch.export.load = torch.jit.load = fail\n"
        f"import pickle; pickle.load = pickle.loads = fail\n"
        f"print(len(Bundle.open({str(bundle_path)!r}, engine='torch').recommend_one([], 3)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert done.stdout.strip() == "3", done.stderr


@pytest.mark.parametrize("change", ["renamed", "left_out", "reshaped", "retyped"])
def test_weights_that_do_not_fit_are_refused(copy, change):
    weights = load_file(copy / "policy.safetensors")
    name = next(iter(sorted(weights)))
    value = weights.pop(name)
    if change == "renamed":
        weights["other"] = value
    elif change == "reshaped":
        weights[name] = value[..., :1].contiguous()
    elif change == "retyped":
        weights[name] = value.new_zeros((*value.shape, 2))
    save_file(weights, copy / "policy.safetensors")
    sign(copy)
    with refused("damaged", "recpo.policies.catalog_softmax.CatalogSoftmaxPolicy"):
        Bundle.open(copy, engine="torch")


def test_a_manifest_is_read_as_it_was_written(copy, bundle_path):
    assert BundleManifest.open(copy) == Bundle.open(bundle_path).manifest


def test_a_bundle_names_no_path_of_the_machine_that_made_it(bundle_path):
    for file in bundle_path.iterdir():
        content = file.read_bytes()
        assert str(REPOSITORY).encode() not in content
        assert str(bundle_path.parent).encode() not in content


def test_a_bundle_can_be_moved(bundle_path, tmp_path):
    elsewhere = shutil.copytree(bundle_path, tmp_path / "on another machine" / "bundle")
    for engine in ("onnx", "torch"):
        expected = Bundle.open(bundle_path, engine).recommend(HISTORY)
        assert Bundle.open(elsewhere, engine).recommend(HISTORY).equals(expected)


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
    blocked += ["torch", "ibis", "duckdb", "sklearn", "safetensors"] if engine == "onnx" else []
    histories = pd.DataFrame({"user_id": [5, 5], "item_id": ["item-3", "?"], "timestamp": [1, 2]})
    pq.write_table(pa.Table.from_pandas(histories), tmp_path / "histories.parquet")
    arguments = ["recommend", "--source", str(bundle_path), "--histories", str(tmp_path / "histories.parquet")]
    arguments += ["--out", str(tmp_path / "lists.parquet"), "--engine", engine, "--k", "3", "--show", "2"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(blocked=blocked, arguments=arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "unknown items skipped: 1; events without feedback: 1" in done.stdout
    expected = served_by(Bundle.open(bundle_path, engine), histories, k=3).table
    assert pq.read_table(tmp_path / "lists.parquet").equals(expected)


@pytest.mark.parametrize(
    "table",
    [
        {"other": [1]},
        {"item_index": [1]},
        {"item_id": ["a"]},
        {"item_index": [None], "item_id": ["a"]},
        {"item_index": ["one"], "item_id": ["a"]},
        {"item_index": [[1]], "item_id": ["a"]},
        {"item_index": [1.5], "item_id": ["a"]},
        {"item_index": [1], "item_id": [1.5]},
        {"item_index": [1], "item_id": [None]},
        {"item_index": [1, 2], "item_id": ["a", "a"]},
        {"item_index": [2, 1], "item_id": ["a", "b"]},
        {"item_index": [1, 2], "item_id": ["a", "b"]},
        {"item_index": pa.array([], pa.int32()), "item_id": pa.array([], pa.string())},
    ],
    ids=lambda table: str({name: list(column) for name, column in table.items()}),
)
def test_any_other_item_table_is_refused(copy, table):
    pq.write_table(pa.table(table), copy / "items.parquet")
    sign(copy)
    with refused(("damaged", "bad_value", "missing_value", "mismatch", "wrong_file", "duplicate", "wrong_type"), ...):
        Bundle.open(copy)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" * 9, bytes(range(100))])
def test_other_files_than_item_tables_are_refused(copy, content):
    (copy / "items.parquet").write_bytes(content)
    sign(copy)
    with refused("wrong_file", "items.parquet"):
        Bundle.open(copy)
