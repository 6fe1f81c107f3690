"""Programs as machine code: the policy's lists, for the bundle that they were compiled from."""

import os
import shutil

import pytest
import torch._inductor.config

from recpo.serving import export
from recpo.serving.bundle import Bundle
from recpo.serving.export import load_compiled, write_compiled
from recpo.serving.program import verify_runtime
from recpo.serving.saved_policy import PolicyRuntime
from tests.refusals import refused

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs a C++ compiler"),
]


def test_a_compiled_program_ranks_as_the_policy(export_once, tmp_path, monkeypatch):
    policy, bundle = export_once("sasrec")
    options = torch._inductor.config.aot_inductor
    monkeypatch.setattr(options, "compile_wrapper_opt_level", "O0")  # g++ takes half of the time
    monkeypatch.setattr(options, "precompile_headers", False)
    write_compiled(bundle, tmp_path / "program.pt2")
    loaded = load_compiled(bundle, tmp_path / "program.pt2")
    verify_runtime(loaded.runtime, PolicyRuntime(policy))
    events = [{"item_id": "item-3", "timestamp": 1_767_225_600_000, "watch_time": 9.5, "duration": 10.0}]
    found, expected = loaded.recommend_one(events, k=5), Bundle.open(bundle).recommend_one(events, k=5)
    assert [item for item, _ in found] == [item for item, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-4)
    with refused("exists"):
        write_compiled(bundle, tmp_path / "program.pt2")
    monkeypatch.setattr(export, "sha256", lambda file: "0" * 64)
    with refused("mismatch", ...):
        load_compiled(bundle, tmp_path / "program.pt2")


def test_a_file_that_is_not_a_program_of_the_bundle_is_refused(bundle_path, tmp_path):
    (tmp_path / "program.pt2").write_bytes(b"no archive")
    with refused("damaged", ...):
        load_compiled(bundle_path, tmp_path / "program.pt2")
