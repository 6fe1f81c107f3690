from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest
import torch

import recpo
from recpo.contracts import Policy
from recpo.data.id_map import IdMap
from recpo.errors import RecpoError
from recpo.serving.bundle import Bundle
from recpo.serving.export import ServingProgram, export_bundle, verify_program
from recpo.types import Recommendations

REPOSITORY = Path(recpo.__file__).parent.parent


class Counting(Policy):
    """Scores items by how often the history holds them; 7 items."""

    num_items = 7
    max_history = 3

    def log_prob(self, batch, needed=None):
        raise NotImplementedError

    def sample(self, histories, group_size):
        raise NotImplementedError

    def recommend(self, histories, k, exclude=None):
        one_hot = torch.nn.functional.one_hot(histories.item_ids, self.num_items + 1)
        scores = one_hot.sum(1).float() - 0.01 * torch.arange(self.num_items + 1)
        scores = scores.scatter(1, torch.cat([exclude, torch.zeros_like(exclude[:, :1])], 1), -torch.inf)
        top = scores.log_softmax(1).topk(k)
        return Recommendations(top.indices.masked_fill(top.values == -torch.inf, 0), top.values)


class Drifting(Counting):
    """Is not the same policy once it is exported."""

    def recommend(self, histories, k, exclude=None):
        items, scores = super().recommend(histories, k, exclude)
        return Recommendations(items, scores + 0.001 if torch.compiler.is_exporting() else scores)


@pytest.fixture
def seven(tmp_path):
    IdMap(pa.array(range(10, 17))).save(tmp_path / "items.parquet")
    return tmp_path


def engine_of(policy, k, change=lambda items, scores: (items, scores)):
    def run(*inputs):
        with torch.inference_mode():
            items, scores = ServingProgram(policy, k)(*map(torch.from_numpy, inputs))
            return tuple(t.numpy() for t in change(items.clone(), scores.clone()))

    return run


def test_any_policy_can_be_exported_and_unused_inputs_do_no_harm(seven):
    export_bundle(Counting(), seven, seven / "bundle", k=7)
    for engine in ("onnx", "torch"):
        served = Bundle.load(seven / "bundle", engine).recommend(pa.table({"user_id": [1], "item_ids": [[12, 10]]}))
        assert served.table["item_id"].to_pylist() == [11, 13, 14, 15, 16]
        assert served.counts.short_lists == 1
    manifest = json.loads((seven / "bundle" / "manifest.json").read_text())
    assert manifest["torch_version"] == torch.__version__
    assert manifest["num_items"] == 7
    assert set(manifest["files"]) == {"items.parquet", "model.onnx", "model.pt2"}


def test_a_program_that_differs_from_its_policy_never_becomes_a_bundle(seven):
    with pytest.raises(RecpoError, match="differ from the policy's"):
        export_bundle(Drifting(), seven, seven / "bundle", k=3)
    assert {path.name for path in seven.iterdir()} == {"items.parquet"}


def test_k_catalog_and_existing_output_are_checked(seven):
    with pytest.raises(RecpoError, match="expected 1 to 7"):
        export_bundle(Counting(), seven, seven / "bundle", k=8)
    other = Counting()
    other.num_items = 8
    with pytest.raises(RecpoError, match="7 items, the policy 8"):
        export_bundle(other, seven, seven / "bundle", k=3)
    (seven / "bundle").mkdir()
    (seven / "bundle" / "notes.txt").write_text("mine")
    with pytest.raises(RecpoError, match="exists already"):
        export_bundle(Counting(), seven, seven / "bundle", k=3)


def swap_first(items, scores):
    items[:, [0, 1]] = items[:, [1, 0]]
    return items, scores


def test_verification_tells_ties_from_differences():
    policy = Counting()
    verify_program(engine_of(policy, 4), policy, 4)
    with pytest.raises(RecpoError, match="other items"):
        verify_program(engine_of(policy, 4, swap_first), policy, 4)
    with pytest.raises(RecpoError, match="nan"):
        verify_program(engine_of(policy, 4, lambda items, scores: (items, scores * torch.nan)), policy, 4)

    class Tied(Counting):
        def recommend(self, histories, k, exclude=None):
            items = torch.arange(1, k + 1).expand(len(histories.item_ids), -1)
            return Recommendations(items, torch.full(items.shape, -2.0))

    verify_program(engine_of(Tied(), 4, swap_first), Tied(), 4)


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from conftest import make_policy
from recpo.serving.export import export_bundle
export_bundle(make_policy("sasrec"), Path({prepared!r}), Path({out!r}), k=20)
"""


@pytest.mark.slow
@pytest.mark.parametrize("reached", ["items.parquet", "model.pt2", "model.onnx"])
def test_a_killed_export_leaves_nothing_that_loads(prepared, tmp_path, reached):
    out = tmp_path / "bundle"
    program = KILLED.format(tests=str(Path(__file__).parent), prepared=str(prepared), out=str(out))
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment)
    while process.poll() is None and not list(tmp_path.glob(f"bundle.recpo-unfinished-*/{reached}")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    for path in tmp_path.iterdir():
        with pytest.raises(RecpoError):
            Bundle.load(path)
