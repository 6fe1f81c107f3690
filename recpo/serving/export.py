"""Writes a trained policy as a bundle and verifies it against the policy before publishing it.

Golden requests are requests with known answers that are part of a bundle. ``recpo export`` sends them to the finished
program and stores the answers. A server sends them again before it accepts requests. A checksum shows that the files
are the exported ones. Golden requests show that this machine, with its versions of ONNX Runtime and recpo, computes the
same lists from raw events.

The program may also be machine code from AOTInductor, in a separate file for machines of the same kind. Loading such a
file runs the code in it. A bundle contains only data, so the file is not part of the bundle. Load only files that you
compiled.
"""

from __future__ import annotations

import copy
import gc
import json
import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import copyfile
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn
from torch._inductor.package import load_package
from torch.export import Dim, ExportedProgram

from recpo import __version__
from recpo.artifacts import output_directory, output_file, parse_json, sha256, validate_archive
from recpo.base.contracts import Policy
from recpo.base.errors import RecpoError
from recpo.base.feature_encoding import FittedFeatures
from recpo.base.features import Category, Number, Vector
from recpo.base.feedback import FeedbackDefinition
from recpo.base.frames import FrameOrPath, read_frame
from recpo.log.id_map import IdMap
from recpo.policies.catalog_search import BLOCK_ROWS, Precision, validate_precision
from recpo.serving.attributes import ATTRIBUTES, attribute_columns
from recpo.serving.bundle import Bundle, load_runtime
from recpo.serving.histories import EncodedHistories
from recpo.serving.indexing import StateProgram, build_index, validate_indexable, verify_index
from recpo.serving.item_index import STATES, IndexOptions, IndexRuntime, import_faiss
from recpo.serving.manifest import ITEMS, MANIFEST, ONNX_PROGRAM, BundleFeatures, BundleManifest
from recpo.serving.model_card import MODEL_CARD, model_card
from recpo.serving.program import CatalogSearch, ServingProgram, ranker_of
from recpo.serving.program_inputs import EXCLUDE, ProgramInput, ProgramReads, program_inputs
from recpo.serving.recommending import validate_k
from recpo.serving.runtimes import OUTPUTS, PolicyRuntime, TorchProgramRuntime
from recpo.serving.saved_policy import describe_policy, save_item_encoders, save_policy
from recpo.serving.verification import random_inputs, verify_rounded, verify_runtime

_EXAMPLE_USERS = 2  # a size of 1 would be exported as a constant
_PROTOBUF_LIMIT = 2**31 - 2**24  # bytes of weights, with room for the graph


def export_bundle(
    policy: Policy,
    items: IdMap,
    feedback: FeedbackDefinition,
    out: Path,
    *,
    k: int = 100,
    item_precision: Precision = "float32",
    index: IndexOptions | None = None,
    repeats: bool = False,
    options: Mapping[str, Any] | None = None,
    origin: Mapping[str, Any] | None = None,
    features: BundleFeatures = BundleFeatures(),  # noqa: B008  immutable
    attributes: FrameOrPath | None = None,
    card: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    inputs: Iterable[object] = (),
) -> None:
    """Exports ``policy`` to the directory ``out``, which appears only when it is complete and verified.

    Item features are encoded once, here: the bundle stores the sum of id row and features for every item. Every engine
    must reproduce the policy's lists and scores, within 1e-4, on random histories that include empty and full ones.
    With a rounded item matrix, the program must agree with the rounded policy within 1e-4, and its log-probabilities
    must be within 0.02 (float16) or 0.25 (int8) of the policy's; the manifest records the agreement of the lists. With
    an index, states and scores must equal the policy's, and the manifest records the recall.

    Args:
        policy: a trained policy.
        items: external ids of its catalog.
        feedback: the feedback definition of its training data.
        out: the bundle directory.
        k: length of the lists; at most the size of the catalog.
        item_precision: number format of the item vectors in the program: float32, float16, or int8 with a scale per
            item. The torch engine always uses the original vectors.
        index: use an approximate index instead of scoring the complete catalog. Scores are then log-probabilities up to
            a constant per user.
        repeats: items of the history may be listed again; only the items that a request excludes are left out.
        options: constructor options of the policy, with which the torch engine rebuilds it; None = the bundle has only
            the ONNX program. Ignored for policies that are not recpo's own.
        origin: where the policy comes from, for the manifest (``BundleManifest.origin``).
        features: the fitted features that the policy reads. If item features are among them, the bundle keeps their
            encoder, for items that it does not know yet (``recpo.serving.refresh``).
        attributes: ``item_id`` and attributes of the items for the filters of requests; see
            ``recpo.serving.attributes``.
        card: the facts about the run for the model card (``recpo.serving.model_card``).
        overwrite: replace a bundle in ``out``.
        inputs: files and directories that ``out`` must not touch, such as the run.

    Raises:
        RecpoError: ``out`` exists, the policy belongs to another catalog, k is out of range, an option does not fit the
            policy or another option, or an engine differs from the policy.
    """
    if len(items) != policy.num_items:
        raise RecpoError(
            f"{len(items)} items are named, the policy has {policy.num_items}: pass its own items",
            code="mismatch",
            field="items",
        )
    _validate_features(policy, features)
    known = None if attributes is None else attribute_columns(read_frame(attributes, "attributes"), items, "attributes")
    k, described = validate_k(k, policy.num_items), describe_policy(policy, options)
    encoded = policy if policy.reads_item_features and described["options"] is not None else None
    features = replace(features, item=None if encoded is None else features.item)
    policy = _servable(policy).cpu().eval()
    manifest = BundleManifest(
        num_items=policy.num_items,
        max_history=policy.max_history,
        k=k,
        reads_timestamps=policy.reads_timestamps,
        feedback=feedback,
        policy=described,
        origin=origin or {},
        versions=versions(),
        item_precision=item_precision,
        features=features.schema,
        behaviors=features.behaviors,
        repeats=repeats,
    )

    def write_features(root: Path) -> None:
        features.save(root)
        if encoded is not None and features.item is not None:
            save_item_encoders(encoded, features.item, root)
        if known is not None:
            pq.write_table(known, root / ATTRIBUTES)

    said = partial(model_card, facts=card or {})
    write_bundle(policy, manifest, items, out, write_features, said, index=index, overwrite=overwrite, inputs=inputs)


def write_bundle(
    policy: Policy,
    manifest: BundleManifest,
    items: IdMap,
    out: Path,
    write_features: Callable[[Path], None],
    card: Callable[[BundleManifest], str],
    *,
    index: IndexOptions | None = None,
    overwrite: bool = False,
    inputs: Iterable[object] = (),
) -> None:
    """Writes and verifies a bundle; see ``export_bundle``.

    Args:
        policy: on the CPU, in evaluation mode, with one vector per item.
        manifest: the manifest without files, agreement and index.
        items: external ids.
        out: the bundle directory.
        write_features: writes the feature files into the directory.
        card: the text of its model card.
        index: use an approximate index instead of scoring the complete catalog.
        overwrite: replace a bundle in ``out``.
        inputs: files and directories that ``out`` must not touch.

    Raises:
        RecpoError: see ``export_bundle``.
    """
    _validate_options(policy, manifest.item_precision, index)
    with (
        traces_forgotten(),
        output_directory(out, kind="bundle", overwrite=overwrite, inputs=inputs) as root,
    ):
        items.save(root / ITEMS)
        write_features(root)
        if index is None:
            manifest = _write_search(policy, manifest, root)
        else:
            manifest = _write_index(policy, manifest, root, index)
        write_golden(Bundle(root, manifest, items, load_runtime(root, manifest, "onnx")), root / GOLDEN)
        if manifest.options is not None:
            save_policy(policy, items, root)
            verify_runtime(load_runtime(root, manifest, "torch"), policy, manifest.k)
        (root / MODEL_CARD).write_text(card(manifest), encoding="utf-8")
        manifest.write(root)


def versions() -> dict[str, str]:
    """The versions of the libraries used here."""
    return {"recpo": __version__, "torch": torch.__version__}


def _validate_features(policy: Policy, features: BundleFeatures) -> None:
    """Raises if ``features`` lacks something that the policy reads, or has something that it does not read."""
    for name, read, known in (
        ("user_features", policy.reads_user, features.user),
        ("context_features", policy.reads_context, features.context),
        ("behaviors", policy.reads_behaviors, features.behaviors),
    ):
        if read != bool(known):
            raise RecpoError(
                f"the policy {'reads' if read else 'does not read'} {name}, and the argument features "
                f"{'has none' if read else 'has them'}: pass those of the run (Run.export does)",
                code="mismatch",
                field="features",
            )


def _servable(policy: Policy) -> Policy:
    """The policy with precomputed item vectors, so that item features do not change the cost of serving."""
    if policy.reads_item_features:
        policy = copy.deepcopy(policy)
        policy.precompute_item_vectors()
    return policy


def _validate_options(policy: Policy, precision: Precision, index: IndexOptions | None) -> None:
    validate_precision(precision)
    if index is None:
        return
    if precision != "float32":
        raise RecpoError(
            "index: its exact scores are float32: leave item_precision at float32",
            code="conflicting_options",
            field="item_precision",
        )
    import_faiss()
    validate_indexable(policy)


def _write_search(policy: Policy, manifest: BundleManifest, root: Path) -> BundleManifest:
    """The program that ranks the complete catalog, compared with the policy."""
    ranker, k = ranker_of(policy, manifest.item_precision), manifest.k
    # a program that scores a small catalog at once takes forbidden items as ids
    masked = isinstance(ranker, CatalogSearch) and (root / ATTRIBUTES).is_file()
    manifest = replace(manifest, mask=masked)
    program = ServingProgram(ranker, k, manifest.reads)
    given = program_inputs(manifest.max_history, manifest.reads)
    _save_onnx(exported_program(policy, program), root / ONNX_PROGRAM, given, OUTPUTS)
    runtime = load_runtime(root, manifest, "onnx")
    if manifest.item_precision == "float32":
        verify_runtime(runtime, policy, k)
        return manifest
    return replace(manifest, agreement=verify_rounded(runtime, program, policy, k, manifest.item_precision))


def _write_index(policy: Policy, manifest: BundleManifest, root: Path, options: IndexOptions) -> BundleManifest:
    """The program that computes states, and the index, compared with the policy."""
    manifest = replace(manifest, index=build_index(policy, manifest.k, options, root, manifest.reads))
    random = random_inputs(policy, _EXAMPLE_USERS, torch.Generator().manual_seed(0), manifest.reads)
    program = StateProgram(policy, manifest.reads)
    _save_onnx(_exported(program, random, program.inputs), root / ONNX_PROGRAM, program.inputs, (STATES,))
    verify_index(IndexRuntime(root, manifest), policy, manifest.k)
    return manifest


def exported_program(policy: Policy, program: ServingProgram) -> ExportedProgram:
    """A serving program of a policy as a graph, for any number of users and of excluded items."""
    random = random_inputs(policy, _EXAMPLE_USERS, torch.Generator().manual_seed(0), program.reads)
    return _exported(program, random, program_inputs(policy.max_history, program.reads))


def _exported(program: nn.Module, random: EncodedHistories, given: Sequence[ProgramInput]) -> ExportedProgram:
    """The program for any number of users and of excluded items."""
    users, width = Dim("users", min=1), Dim(EXCLUDE, min=1)
    inputs = tuple(torch.from_numpy(one.of(random)) for one in given)
    shapes = (tuple({0: users, 1: width} if one.name == EXCLUDE else {0: users} for one in given),)
    with _quiet(), torch.no_grad():
        exported = torch.export.export(program, inputs, dynamic_shapes=shapes)
        _forget_sources(exported)
    return exported


def _save_onnx(exported: ExportedProgram, file: Path, given: Sequence[ProgramInput], outputs: Sequence[str]) -> None:
    names = [one.name for one in given]
    with _quiet(), torch.no_grad():
        onnx = torch.onnx.export(exported, input_names=names, output_names=outputs, dynamo=True, verbose=False)
    assert onnx is not None
    size = sum(values.nbytes for values in exported.state_dict.values())
    onnx.save(str(file), external_data=size > _PROTOBUF_LIMIT)


def _forget_sources(exported: ExportedProgram) -> None:
    """Removes the stack traces, which contain file names of the exporting machine."""
    for module in exported.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)


@contextmanager
def traces_forgotten() -> Iterator[None]:
    """Removes torch's caches of a traced loop over blocks, which include a second class with the policy's name.

    While that class exists, a configuration that names the class of a policy would be ambiguous.
    """
    try:
        yield
    finally:
        torch._dynamo.reset()
        gc.collect()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the exporter's notes about its own internals (a missing torchvision, deprecated classes)."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


GOLDEN: Final = "golden.json"
TOLERANCE: Final = 1e-4
"""Allowed difference of natural-log probabilities. Items this close may swap places."""

_REQUESTS, _LISTED = 8, 10
_LEFT_OUT: Final = 0.2  # share of the features that are missing in a request
_FIRST_TIME_MS, _LONGEST_GAP_MS = 1_600_000_000_000, 86_400_000
_REMEDY: Final = "export the bundle again with this version of recpo and ONNX Runtime"


def write_golden(bundle: Bundle, path: Path, *, seed: int = 0) -> None:
    """Sends requests to ``bundle`` and writes them with its answers.

    The first request has no history, and the last history is longer than the policy reads. Some events lack their
    outcome, and every request has items to exclude.
    """
    generator = np.random.default_rng(seed)
    lengths = np.linspace(0, bundle.manifest.max_history + 2, _REQUESTS).round().astype(int)
    requests = [_request(bundle, int(length), generator) for length in lengths]
    k = min(_LISTED, bundle.k)
    content = [{**request, "k": k, "answer": _answer(bundle, request, k)} for request in requests]
    path.write_text(json.dumps({"tolerance": TOLERANCE, "requests": content}, allow_nan=False) + "\n", encoding="utf-8")


def check_golden(bundle: Bundle) -> int:
    """Sends the golden requests of a bundle again.

    Returns:
        The number of requests; 0 for a bundle that was exported without them.

    Raises:
        RecpoError: an answer differs from the answer at export.
    """
    path = bundle.root / GOLDEN
    if GOLDEN not in bundle.manifest.files:
        return 0
    content = parse_json(path.read_bytes(), path, _REMEDY)
    try:
        requests = content["requests"]
        for number, request in enumerate(requests):
            expected = [(item, float(score)) for item, score in request["answer"]]
            found = _answer(bundle, request, request["k"])
            _compare(expected, found, f"{path}: request {number}")
    except (KeyError, TypeError, ValueError) as error:
        raise RecpoError(f"{path} is damaged ({error!r}): {_REMEDY}", code="damaged", field=path.name) from error
    return len(requests)


def _request(bundle: Bundle, length: int, generator: np.random.Generator) -> dict[str, Any]:
    items: list[Any] = bundle.items.to_external(generator.integers(1, len(bundle.items) + 1, length + 2)).to_pylist()
    times = _FIRST_TIME_MS + generator.integers(1, _LONGEST_GAP_MS, length).cumsum()
    history = [{"item_id": item, "timestamp": int(time)} for item, time in zip(items[2:], times, strict=True)]
    known = bundle.features
    for event in history:
        event |= _outcome(bundle.feedback, generator)
        event |= {name: bool(generator.random() < 0.3) for name in known.behaviors}
        event |= {} if known.context is None else _features(known.context, generator, by_name=True)
    request: dict[str, Any] = {"history": history, "exclude": items[:2]}
    if known.user is not None:
        request["user"] = _features(known.user, generator)
    if known.context is not None:
        request["context"] = _features(known.context, generator, by_name=True)
    return request


def _answer(bundle: Bundle, request: Mapping[str, Any], k: int) -> list[tuple[Any, float]]:
    """The answer at any time: items that are not available yet, or no longer, are ranked as well."""
    parts = request["history"], request["exclude"], request.get("user"), request.get("context")
    return bundle.ranked(bundle.reader.read_request(*parts), k)


def _features(fitted: FittedFeatures, generator: np.random.Generator, by_name: bool = False) -> dict[str, Any]:
    """Raw values of some features: values of the vocabulary and unknown values; other features are left out."""
    found: dict[str, Any] = {}
    for feature in fitted.features:
        if generator.random() < _LEFT_OUT:
            continue
        name = feature.name if by_name else feature.source
        if isinstance(feature, Number):
            found[name] = round(float(abs(generator.normal(feature.mean or 0.0, feature.std or 1.0))), 3)
        elif isinstance(feature, Vector):
            found[name] = generator.normal(size=feature.width or 0).round(3).tolist()
        else:
            drawn = _of_vocabulary(fitted.vocabularies[feature.name].values, generator)
            if isinstance(feature, Category):
                found[name] = drawn
            else:
                found[name] = [drawn] if getattr(feature, "separator", None) is None else str(drawn)
    return found


def _of_vocabulary(values: pa.Array, generator: np.random.Generator) -> Any:
    place = int(generator.integers(len(values) + 1))
    strange = "?" if pa.types.is_string(values.type) else -(2**31)
    return strange if place == len(values) else values[place].as_py()


def _outcome(feedback: FeedbackDefinition, generator: np.random.Generator) -> dict[str, Any]:
    """The outcome of an event. All feedback levels occur, including unknown."""
    if generator.random() < 0.1:
        return {}
    disliked = {"dislike": bool(generator.random() < 0.1)}
    if not feedback.cutoffs:
        return {"label": round(float(generator.random()), 3), **disliked}
    bucket = list(feedback.cutoffs)[int(generator.integers(len(feedback.cutoffs)))]
    duration = float(feedback.duration_base) ** (bucket + 0.5)
    longest = 2 * max(feedback.cutoffs[bucket][-1], 0.5)
    return {
        "watch_time": round(float(generator.random()) * longest, 3),
        "duration": round(duration, 3),
        **disliked,
    }


def _compare(expected: Sequence[tuple[Any, float]], found: Sequence[tuple[Any, float]], where: str) -> None:
    gaps = [abs(mine - theirs) for (_, mine), (_, theirs) in zip(found, expected, strict=False)]
    if len(found) != len(expected) or any(not gap <= TOLERANCE for gap in gaps):
        raise RecpoError(
            f"{where}: {len(found)} items whose scores differ by up to {max(gaps, default=0.0):.2g} from those of the "
            f"export ({len(expected)} items, {TOLERANCE:g} is allowed): {_REMEDY}",
            code="mismatch",
            field="scores",
        )
    score_of = dict(expected)
    last = expected[-1][1] if expected else 0.0  # an item outside the list scores at most as much as its last place
    moved = [
        item
        for (item, score), (other, _) in zip(found, expected, strict=True)
        if item != other and abs(score_of.get(item, last) - score) > TOLERANCE
    ]
    if moved:
        raise RecpoError(
            f"{where}: other items than at the export, {moved[0]!r} among them: {_REMEDY}",
            code="mismatch",
            field="items",
        )


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
    loaded = Bundle.load(bundle, engine="torch")
    assert isinstance(loaded.runtime, PolicyRuntime)
    policy, manifest = loaded.runtime.policy, loaded.manifest
    with (
        output_file(out, overwrite=overwrite, inputs=[loaded.root]) as working,
        tempfile.TemporaryDirectory(prefix="recpo-compiled-") as work,
    ):
        file = _compiled(policy, manifest.k, loaded.runtime.reads, Path(work), sha256(loaded.root / MANIFEST))
        verify_runtime(TorchProgramRuntime(load_package(str(file)), manifest), policy, manifest.k)
        copyfile(file, working)


def load_compiled(bundle: Path | str, file: Path | str) -> Bundle:
    """The bundle with its compiled program as the engine. This runs the code in the file.

    Raises:
        RecpoError: no bundle, or a file that was not compiled from it.
    """
    loaded = Bundle.load(bundle)
    try:
        validate_archive(Path(file), contents=True)  # a damaged library could end the process
        program: Any = load_package(str(file))
        found = program.get_metadata().get(_CHECKSUM)
    except Exception as error:  # errors of the loader, the linker, or zip
        raise RecpoError(
            f"{file} is no compiled program ({error}): compile the bundle again", code="damaged", field=Path(file).name
        ) from error
    if found != sha256(loaded.root / MANIFEST):
        raise RecpoError(
            f"{file} was compiled from another bundle than {bundle}: compile this one",
            code="mismatch",
            field=Path(file).name,
        )
    return replace(loaded, runtime=TorchProgramRuntime(program, loaded.manifest))


def _compiled(policy: Policy, k: int, reads: ProgramReads, work: Path, checksum: str) -> Path:
    with traces_forgotten():
        exported = exported_program(policy, ServingProgram(_ranker(policy), k, reads))
        settings = {"aot_inductor.metadata": {_CHECKSUM: checksum}}
        with _in_this_process():
            try:
                made = torch._inductor.aoti_compile_and_package(
                    exported, package_path=str(work / "program.pt2"), inductor_configs=settings
                )
            except Exception as error:  # errors of Inductor's own classes and of the compiler
                raise RecpoError(
                    f"the program cannot be compiled ({str(error).strip()[-300:]}): install a C++ compiler (g++, or "
                    "name it in CXX), or serve the bundle with ONNX Runtime",
                    code="not_installed",
                    field="compile",
                ) from error
    return Path(made)


def _ranker(policy: Policy) -> Policy | CatalogSearch:
    """Inductor cannot lower the loop over blocks, so it is unrolled into a few blocks."""
    rows = max(BLOCK_ROWS, math.ceil((policy.num_items + 1) / MOST_BLOCKS))
    ranker = ranker_of(policy, "float32", rows)
    if isinstance(ranker, CatalogSearch):
        ranker.table.written_out = True
    return ranker


@contextmanager
def _in_this_process() -> Iterator[None]:
    """Compiles without a process pool, which would outlive the call."""
    with torch._inductor.config.patch(compile_threads=1):
        yield
