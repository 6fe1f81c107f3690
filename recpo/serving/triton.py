"""A model repository for the Triton Inference Server around the ONNX program of a bundle.

::

    repository/NAME/config.pbtxt          inputs, outputs, dynamic batching
    repository/NAME/VERSION/model.onnx    the program (and model.onnx.data)
    repository/NAME/VERSION/items.parquet and manifest.json: external ids and feedback levels, for the client

Triton takes and gives internal ids; feedback levels are the client's part (``recpo.FeedbackDefinition``).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from recpo.artifacts import output_directory, sha256
from recpo.base.errors import RecpoError
from recpo.serving.manifest import ITEMS, MANIFEST, ONNX_PROGRAM, BundleManifest, program_interface

_TYPES: Final = {"int64": "TYPE_INT64", "float32": "TYPE_FP32", "bool": "TYPE_BOOL"}
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def write_triton(
    bundle: Path,
    repository: Path,
    *,
    name: str = "recpo",
    max_batch: int = 32,
    overwrite: bool = False,
    inputs: Iterable[object] = (),
) -> None:
    """Writes a model repository with one model in one version, 1.

    Args:
        bundle: directory written by ``recpo export``, without an index.
        repository: directory to create.
        name: name of the model.
        max_batch: maximum number of users that Triton ranks together.
        overwrite: replace a repository that recpo wrote.
        inputs: files and directories that ``repository`` must not touch, besides the bundle.

    Raises:
        RecpoError: no bundle, a bundle whose program does not list items, an invalid name, or ``repository`` already
            exists.
    """
    manifest = BundleManifest.read(bundle)
    validate_triton(repository, has_index=manifest.index is not None)
    config = triton_config(manifest, name, max_batch, sha256(bundle / MANIFEST))
    with output_directory(repository, kind="triton", overwrite=overwrite, inputs=[bundle, *inputs]) as root:
        version = root / name / "1"
        version.mkdir(parents=True)
        programs = [file for file in manifest.files if file in (ONNX_PROGRAM, f"{ONNX_PROGRAM}.data")]
        for file in (*programs, ITEMS, MANIFEST):
            shutil.copyfile(bundle / file, version / file)
        (root / name / "config.pbtxt").write_text(config, encoding="utf-8")


def validate_triton(repository: Path | str, *, has_index: bool, overwrite: bool = True) -> None:
    """Raises ``RecpoError`` if Triton cannot run the program or the directory already exists."""
    if has_index:
        raise RecpoError(
            "triton: with an index the program gives states and the search is recpo's own, which Triton does not run: "
            "export without an index"
        )
    if Path(repository).exists() and not overwrite:
        raise RecpoError(f"{repository} exists already: name another directory for triton, or set overwrite")


def triton_config(manifest: BundleManifest, name: str, max_batch: int, checksum: str) -> str:
    """The text of ``config.pbtxt``.

    Args:
        manifest: of the bundle.
        name: of the model.
        max_batch: most users in a batch; the first axis of all tensors, which the file leaves out.
        checksum: SHA-256 of the bundle's manifest, kept as a parameter.
    """
    if not _NAME.fullmatch(name):
        raise RecpoError(f"triton: the model's name is {name!r}, expected letters, digits and _ . -")
    if max_batch < 1:
        raise RecpoError(f"triton: max_batch is {max_batch}, expected at least 1")
    interface = program_interface(manifest)
    blocks = [_tensors(kind, interface[f"{kind}s"]) for kind in ("input", "output")]
    return "\n".join(
        [
            f"name: {json.dumps(name)}",
            'backend: "onnxruntime"',
            f"default_model_filename: {json.dumps(ONNX_PROGRAM)}",
            f"max_batch_size: {max_batch}",
            *blocks,
            # requests that arrive while a batch runs form the next batch; no request waits to fill a batch
            "dynamic_batching { max_queue_delay_microseconds: 0 }",
            "version_policy { latest { num_versions: 2 } }",
            "instance_group [ { count: 1 kind: KIND_CPU } ]",
            f'parameters {{ key: "recpo_bundle" value {{ string_value: "{checksum}" }} }}',
            "",
        ]
    )


def _tensors(kind: str, tensors: dict[str, dict[str, Any]]) -> str:
    """All inputs or outputs; -1 is a width that each request chooses."""
    entries = [
        f"  {{ name: {json.dumps(name)} data_type: {_TYPES[tensor['type']]} "
        f"dims: [ {', '.join(str(size) if isinstance(size, int) else '-1' for size in tensor['shape'][1:])} ] }}"
        for name, tensor in tensors.items()
    ]
    return f"{kind} [\n" + ",\n".join(entries) + "\n]"
