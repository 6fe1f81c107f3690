"""The program of a bundle as machine code from AOTInductor, in a separate file for machines of the same kind.

Loading such a file runs the code in it. A bundle contains only data, so the file is not part of the bundle. Load only
files that you compiled.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path
from shutil import copyfile
from typing import Any, Final

import torch
from torch._inductor.package import load_package

from recpo.artifacts.checksums import sha256
from recpo.artifacts.documents import validate_archive
from recpo.artifacts.outputs import output_file
from recpo.base.contracts import Policy
from recpo.base.errors import RecpoError
from recpo.policies.catalog_search import BLOCK_ROWS
from recpo.serving.bundle import Bundle
from recpo.serving.export import exported_program, traces_forgotten
from recpo.serving.manifest import MANIFEST, BundleManifest, readable
from recpo.serving.program import CatalogSearch, ServingProgram, ranker_of, verify_runtime
from recpo.serving.runtimes import PolicyRuntime, TorchProgramRuntime

MOST_BLOCKS: Final = 16
"""The loop over blocks of items is unrolled, and every block is code to compile."""

_CHECKSUM: Final = "recpo_bundle"


def write_compiled(bundle: Path | str, out: Path | str, *, overwrite: bool = False) -> None:
    """Compiles the policy of a bundle, compares it with the policy, and writes one file, by convention ``.pt2``.

    The program ranks the complete catalog in float32, even if the bundle rounds the item vectors or has an index.
    Compiling needs a C++ compiler and takes ten seconds or more.

    Args:
        bundle: directory written by ``recpo export``, with weights for the torch engine.
        out: the file to write.
        overwrite: replace an existing file.

    Raises:
        RecpoError: no bundle, a bundle without the torch engine, no compiler, a program whose lists differ from the
            policy's, or ``out`` already exists.
    """
    loaded = Bundle.open(bundle, engine="torch")
    assert isinstance(loaded.runtime, PolicyRuntime)
    policy, manifest = loaded.runtime.policy, _of_ids(loaded.manifest)
    with (
        output_file(out, overwrite=overwrite, inputs=[loaded.root]) as working,
        tempfile.TemporaryDirectory(prefix="recpo-compiled-") as work,
        traces_forgotten(),
        torch._inductor.config.patch(compile_threads=1),  # a process pool would outlive the call
    ):
        exported = exported_program(ServingProgram(_ranker(policy), manifest.k, manifest.reads))
        settings = {"aot_inductor.metadata": {_CHECKSUM: sha256(loaded.root / MANIFEST)}}
        try:
            file = torch._inductor.aoti_compile_and_package(
                exported, package_path=f"{work}/program.pt2", inductor_configs=settings
            )
        except Exception as error:  # errors of Inductor's own classes and of the compiler
            raise RecpoError(
                f"the program cannot be compiled ({str(error).strip()[-300:]}): install a C++ compiler (g++, or name "
                "it in CXX), or serve the bundle with ONNX Runtime",
                code="not_installed",
                field="compile",
            ) from error
        verify_runtime(TorchProgramRuntime(load_package(str(file)), manifest), policy, manifest.k)
        copyfile(file, working)


def load_compiled(bundle: Path | str, file: Path | str) -> Bundle:
    """The bundle with its compiled program as the engine. This runs the code in the file.

    Raises:
        RecpoError: no bundle, or a file that was not compiled from it.
    """
    loaded = Bundle.open(bundle)
    with readable(Path(file), Exception, remedy="compile the bundle again"):  # errors of the loader, the linker, or zip
        validate_archive(Path(file), contents=True)  # a damaged library could end the process
        program: Any = load_package(str(file))
        found = program.get_metadata().get(_CHECKSUM)
    if found != sha256(loaded.root / MANIFEST):
        raise RecpoError(
            f"{file} was compiled from another bundle than {bundle}: compile this one",
            code="mismatch",
            field=Path(file).name,
        )
    return replace(loaded, runtime=TorchProgramRuntime(program, _of_ids(loaded.manifest)))


def _of_ids(manifest: BundleManifest) -> BundleManifest:
    """The manifest of a program that takes all forbidden items as ids, never as a mask."""
    return replace(manifest, mask=False)


def _ranker(policy: Policy) -> Policy | CatalogSearch:
    """Inductor cannot lower the loop over blocks, so it is unrolled into a few blocks."""
    rows = max(BLOCK_ROWS, math.ceil((policy.num_items + 1) / MOST_BLOCKS))
    ranker = ranker_of(policy, "float32", rows)
    if isinstance(ranker, CatalogSearch):
        ranker.table.written_out = True
    return ranker
