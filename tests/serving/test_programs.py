"""Execution providers of the program of a bundle."""

from __future__ import annotations

import onnxruntime

from recpo.serving.bundle import Bundle
from tests.refusals import refused


def test_providers_are_those_of_this_build(bundle_path):
    assert "CPUExecutionProvider" in onnxruntime.get_available_providers()
    assert Bundle.open(bundle_path, provider="CPUExecutionProvider").recommend_one([], k=3)
    with refused("unknown_name", "provider"):
        Bundle.open(bundle_path, provider="GPU")
    with refused("unused_option", "provider"):
        Bundle.open(bundle_path, "torch", provider="CUDAExecutionProvider")


def test_a_provider_that_does_not_start_is_told(bundle_path, monkeypatch):
    """ONNX Runtime only warns, and runs on the CPU."""
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    with refused("resources", "provider"):
        Bundle.open(bundle_path, provider="CUDAExecutionProvider")
