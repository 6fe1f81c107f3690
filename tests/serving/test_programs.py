"""The program in other runtimes: a Triton repository, execution providers."""

from __future__ import annotations

import re

import onnx
import onnxruntime
import pytest

from recpo.serving.bundle import Bundle
from recpo.serving.triton import write_triton
from tests.refusals import refused

TOKEN = re.compile(r'\s*(?:#[^\n]*|("(?:[^"\\]|\\.)*"|[\w.+-]+|[{}\[\]:,<>;]))')
ELEMENT_TYPES = {"TYPE_INT64": onnx.TensorProto.INT64, "TYPE_FP32": onnx.TensorProto.FLOAT}


def parsed(text):
    """The text format of a protobuf message: fields by name, each a list of its values."""
    tokens = [token for token in TOKEN.findall(text) if token]
    message, rest = message_of(tokens, None)
    assert not rest
    return message


def message_of(tokens, end):
    message = {}
    while tokens and tokens[0] != end:
        name, tokens = tokens[0], tokens[1:]
        assert re.fullmatch(r"\w+", name), name
        if tokens[0] == ":":
            tokens = tokens[1:]
        values, tokens = values_of(tokens)
        message.setdefault(name, []).extend(values)
        if tokens and tokens[0] in ",;":
            tokens = tokens[1:]
    assert end is None or tokens[0] == end
    return message, tokens[1:] if end else tokens


def values_of(tokens):
    if tokens[0] == "{":
        message, tokens = message_of(tokens[1:], "}")
        return [message], tokens
    if tokens[0] != "[":
        word = tokens[0]
        return [word[1:-1] if word[0] == '"' else int(word) if re.fullmatch(r"-?\d+", word) else word], tokens[1:]
    values, tokens = [], tokens[1:]
    while tokens[0] != "]":
        found, tokens = values_of(tokens)
        values += found
        tokens = tokens[1:] if tokens[0] == "," else tokens
    return values, tokens[1:]


def tensors_of(entries):
    return {e["name"][0]: (ELEMENT_TYPES[e["data_type"][0]], e["dims"]) for e in entries}


def tensors_of_program(values):
    """Type and shape without the first axis, -1 where it is free."""
    return {
        value.name: (
            value.type.tensor_type.elem_type,
            [dim.dim_value or -1 for dim in value.type.tensor_type.shape.dim][1:],
        )
        for value in values
    }


@pytest.mark.parametrize("kind", ["sasrec", "hstu"])
def test_the_configuration_of_triton_is_that_of_the_program(kind, export_once, tmp_path):
    _, bundle = export_once(kind)
    write_triton(bundle, tmp_path / "repository", name="videos", max_batch=8)
    model = tmp_path / "repository" / "videos"
    config = parsed((model / "config.pbtxt").read_text())
    assert (config["name"], config["backend"], config["max_batch_size"]) == (["videos"], ["onnxruntime"], [8])
    program = onnx.load(model / "1" / config["default_model_filename"][0])
    assert tensors_of(config["input"]) == tensors_of_program(program.graph.input)
    assert tensors_of(config["output"]) == tensors_of_program(program.graph.output)
    # the first axis of every tensor is the batch, which the configuration leaves out
    assert all(v.type.tensor_type.shape.dim[0].dim_param for v in (*program.graph.input, *program.graph.output))
    assert config["dynamic_batching"] == [{"max_queue_delay_microseconds": [0]}]
    assert config["version_policy"] == [{"latest": [{"num_versions": [2]}]}]
    assert len(config["parameters"][0]["value"][0]["string_value"][0]) == 64
    assert sorted(file.name for file in (model / "1").iterdir()) == ["items.parquet", "manifest.json", "model.onnx"]


def test_a_repository_is_not_replaced_unasked_and_names_are_checked(bundle_path, tmp_path):
    write_triton(bundle_path, tmp_path / "r")
    with refused("exists"):
        write_triton(bundle_path, tmp_path / "r")
    write_triton(bundle_path, tmp_path / "r", name="other", overwrite=True)
    assert (tmp_path / "r" / "other" / "config.pbtxt").is_file()
    for name in ("../x", "", "a b"):
        with refused("invalid"):
            write_triton(bundle_path, tmp_path / "s", name=name)
    with refused("invalid"):
        write_triton(bundle_path, tmp_path / "s", max_batch=0)


def test_providers_are_those_of_this_build(bundle_path):
    assert "CPUExecutionProvider" in onnxruntime.get_available_providers()
    assert Bundle.load(bundle_path, provider="CPUExecutionProvider").recommend_one([], k=3)
    with refused("unknown_name", "provider"):
        Bundle.load(bundle_path, provider="GPU")
    with refused("unused_option", "provider"):
        Bundle.load(bundle_path, "torch", provider="CUDAExecutionProvider")


def test_a_provider_that_does_not_start_is_told(bundle_path, monkeypatch):
    """ONNX Runtime only warns, and runs on the CPU."""
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    with refused("resources", "provider"):
        Bundle.load(bundle_path, provider="CUDAExecutionProvider")
