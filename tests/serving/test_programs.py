"""The program of a bundle: its tensors are those of the manifest; execution providers."""

from __future__ import annotations

import onnx
import onnxruntime
import pytest

from recpo.serving.bundle import Bundle
from recpo.serving.manifest import BundleManifest, program_interface
from tests.refusals import refused

ELEMENT_TYPES = {"int64": onnx.TensorProto.INT64, "float32": onnx.TensorProto.FLOAT}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sasrec", "hstu"])
def test_the_manifest_has_the_types_and_shapes_of_the_program(kind, export_once):
    _, bundle = export_once(kind)
    graph = onnx.load(bundle / "model.onnx").graph
    interface = program_interface(BundleManifest.read(bundle))
    for values, tensors in ((graph.input, interface["inputs"]), (graph.output, interface["outputs"])):
        assert {value.name for value in values} == tensors.keys()
        for value in values:
            tensor, of_program = tensors[value.name], value.type.tensor_type
            assert of_program.elem_type == ELEMENT_TYPES[tensor["type"]]
            sizes = [dim.dim_value or -1 for dim in of_program.shape.dim][1:]
            assert sizes == [size if isinstance(size, int) else -1 for size in tensor["shape"][1:]]
            assert of_program.shape.dim[0].dim_param  # the number of users is free


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
