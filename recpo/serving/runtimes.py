"""Runs an exported program on NumPy arrays: ONNX Runtime, which needs no torch, or torch itself."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np

from recpo.errors import RecpoError
from recpo.serving.manifest import ONNX_PROGRAM, TORCH_PROGRAM

RuntimeName = Literal["onnx", "torch"]
#: The inputs in the order of ``INPUTS`` to ``top_items [B, k]`` and ``scores [B, k]``.
Runtime = Callable[..., tuple[np.ndarray, np.ndarray]]

INPUTS = ("item_ids", "feedback", "blocked", "timestamps")  # the last only where the policy reads it
OUTPUTS = ("top_items", "scores")

# what torch.export.save writes for a program of plain tensors; everything else in an archive could be executed
_PLAIN_PARTS = re.compile(
    r"[^/]+/(archive_format|archive_version|byteorder|\.format_version|\.storage_alignment|version"
    r"|\.data/(version|serialization_id)|models/model\.json|data/sample_inputs/model\.pt"
    r"|data/weights/(weight_\d+|model_weights_config\.json)|data/constants/(tensor_\d+|model_constants_config\.json))"
)


def load_runtime(root: Path, name: RuntimeName) -> Runtime:
    """Loads the program of a bundle whose checksums are verified already."""
    return _onnx_engine(root / ONNX_PROGRAM) if name == "onnx" else _torch_engine(root / TORCH_PROGRAM)


def _onnx_engine(path: Path) -> Runtime:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(*inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        top_items, scores = session.run(OUTPUTS, dict(zip(INPUTS, inputs, strict=False)))
        return top_items, scores

    return run


def _torch_engine(path: Path) -> Runtime:
    import torch

    _refuse_pickles(path)
    program = torch.export.load(path).module()

    def run(*inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with torch.inference_mode():
            top_items, scores = program(*(torch.from_numpy(array) for array in inputs))
        return top_items.numpy(), scores.numpy()

    return run


def _refuse_pickles(path: Path) -> None:
    """Stops before ``torch.export.load`` would unpickle anything but plain tensors.

    That function (torch 2.13) reads whatever the archive marks as pickled with ``weights_only=False`` and, when the
    example inputs do not load with ``weights_only=True``, silently tries again without. Recpo writes neither.

    Raises:
        RecpoError: the archive holds more than tensors and a graph.
    """
    import torch

    try:
        with zipfile.ZipFile(path) as archive:
            names = Counter(archive.namelist())
            strange = [name for name, times in names.items() if times > 1 or not _PLAIN_PARTS.fullmatch(name)]
            configs = [json.loads(archive.read(name)) for name in names if name.endswith("_config.json")]
            strange += [key for c in configs for key, part in c["config"].items() if part["use_pickle"] is not False]
            for name in names:
                if name.endswith("sample_inputs/model.pt") and not strange:
                    torch.load(io.BytesIO(archive.read(name)), weights_only=True)
    except Exception as error:
        raise RecpoError(f"{path} cannot be loaded safely ({error}): export the bundle again") from error
    if strange:
        raise RecpoError(f"{path} holds pickled or unknown parts ({', '.join(strange[:3])}): recpo does not load them")
