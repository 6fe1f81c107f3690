"""Writes a trained policy as a bundle and verifies it against the policy before publishing it.

A bundle contains only data. Its program as machine code from AOTInductor is a separate file, for machines of the same
kind. Loading such a file runs the code in it: load only files that you compiled.

The model card of a bundle: what the policy is, what it was trained on, what is known of it and what is not.

Every number comes from a manifest: the bundle's own, the run's (``run.json``, ``origin.json``) or an evaluation's.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from shutil import copyfile
from typing import TYPE_CHECKING, Any, Final

import pyarrow.parquet as pq
import torch
from jinja2 import Environment, PackageLoader

from recpo import __version__
from recpo.artifacts.checksums import sha256
from recpo.artifacts.documents import validate_archive
from recpo.artifacts.outputs import output_directory, output_file
from recpo.base.contracts import Policy
from recpo.base.errors import PositiveInt, RecpoError
from recpo.base.feature_encoding import FittedFeatures, PolicyFeatures
from recpo.base.feedback import FeedbackDefinition
from recpo.base.frames import FrameOrPath, read_frame
from recpo.log.id_map import IdMap
from recpo.policies.baseline import FactorPolicy
from recpo.policies.catalog_search import BLOCK_ROWS, Precision
from recpo.serving.bundle import Bundle, load_runtime, write_golden
from recpo.serving.manifest import ITEMS, MANIFEST, ONNX_PROGRAM, BundleManifest, readable
from recpo.serving.program import (
    CatalogSearch,
    ServingProgram,
    TorchProgramRuntime,
    build_index,
    exported_program,
    ranker_of,
    traces_forgotten,
    verify_index,
    verify_rounded,
    verify_runtime,
)
from recpo.serving.recommending import ATTRIBUTES, attribute_columns, validate_k
from recpo.serving.runtimes import IndexOptions, IndexRuntime
from recpo.serving.saved_policy import PolicyRuntime, describe_policy, load_policy, save_item_encoders, save_policy

if TYPE_CHECKING:
    from recpo.training.run import Run


@dataclass(frozen=True, kw_only=True)
class BundleOptions:
    """What a bundle serves, and in which form."""

    k: PositiveInt = 100
    """length of the lists that the bundle serves, at most the size of the catalog"""
    item_precision: Precision = "float32"
    """how the program stores the item vectors: float32, float16, or int8 with a scale for each item. The torch engine
    always uses the original vectors"""
    index: IndexOptions | None = None
    """an approximate index (faiss) instead of a search of the full catalog: recall, lists, oversampling. Scores are
    then log-probabilities plus a constant per user. null = the full catalog is scored"""
    repeats: bool | None = None
    """items of the history may be listed again, as in music or groceries; only items that a request excludes are not
    listed. null = as the prepared data say (``recpo prepare --repeats``)"""
    attributes: FrameOrPath | None = None
    """frame or Parquet file with ``item_id`` and attributes of the items (integers, strings, booleans, or lists of
    them) that requests can filter by (``allow``, ``deny``)"""


@dataclass(frozen=True)
class PolicyFacts:
    """What a bundle keeps of the training of its policy.

    Attributes:
        feedback: the feedback definition of its training data.
        features: the fitted features that the policy reads. If item features are among them, the bundle keeps their
            encoder, for items that it does not know yet (``recpo.serving.refresh``).
        options: constructor options of the policy, with which the torch engine rebuilds it; None = the bundle has only
            the ONNX program. Ignored for policies that are not recpo's own.
        origin: where the policy comes from, for the manifest (``BundleManifest.origin``).
        repeats: whether lists may have items of the history, unless ``BundleOptions.repeats`` says so.
        card: the facts about the run for the model card (``recpo.serving.export``).
    """

    feedback: FeedbackDefinition
    features: PolicyFeatures = field(default_factory=PolicyFeatures)
    options: Mapping[str, Any] | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)
    card: Mapping[str, Any] = field(default_factory=dict)
    repeats: bool = False


def export_bundle(
    policy: Policy,
    items: IdMap,
    facts: PolicyFacts,
    out: Path,
    options: BundleOptions = BundleOptions(),
    *,
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
        facts: what the bundle keeps of the policy's training.
        out: the bundle directory.
        options: what the bundle serves, and in which form.
        overwrite: replace a bundle in ``out``.
        inputs: files and directories that ``out`` must not touch, such as the run.

    Raises:
        RecpoError: ``out`` exists, the policy belongs to another catalog, k is out of range, an option does not fit the
            policy or another option, or an engine differs from the policy.
    """
    if len(items) != policy.num_items:
        message = f"{len(items)} items are named, the policy has {policy.num_items}: pass its own items"
        raise RecpoError(message, code="mismatch", field="items")
    _validate_features(policy, facts.features)
    given = options.attributes
    known = None if given is None else attribute_columns(read_frame(given, "attributes"), items, "attributes")
    k, described = validate_k(options.k, policy.num_items), describe_policy(policy, facts.options)
    encoded = policy if policy.reads_item_features and described["options"] is not None else None
    features = (
        facts.features if encoded is not None or grows(policy) else replace(facts.features, item=FittedFeatures())
    )
    # the policy that was given stays as it is, and where it is
    if policy.reads_item_features or any(weight.device.type != "cpu" for weight in policy.parameters()):
        policy = copy.deepcopy(policy)
    if policy.reads_item_features:  # so that they do not change the cost of serving
        policy.precompute_item_vectors()
    policy = policy.cpu().eval()
    manifest = BundleManifest(
        num_items=policy.num_items,
        max_history=policy.max_history,
        k=k,
        reads_timestamps=policy.reads_timestamps,
        feedback=facts.feedback,
        policy=described,
        origin=facts.origin,
        versions=versions(),
        item_precision=options.item_precision,
        features=features.schema,
        behaviors=features.behaviors,
        repeats=facts.repeats if options.repeats is None else options.repeats,
    )

    if options.index is not None and options.item_precision != "float32":
        message = "index: its exact scores are float32: leave item_precision at float32"
        raise RecpoError(message, code="conflicting_options", field="item_precision")
    with output_directory(out, kind="bundle", overwrite=overwrite, inputs=inputs) as root:
        features.save(root)
        if encoded is not None and features.item:
            save_item_encoders(encoded, features.item, root)
        if known is not None:
            pq.write_table(known, root / ATTRIBUTES)
        manifest = write_engines(policy, manifest, items, root, options.index)
        (root / MODEL_CARD).write_text(model_card(manifest, facts.card), encoding="utf-8")
        manifest.write(root)


def write_engines(
    policy: Policy, manifest: BundleManifest, items: IdMap, root: Path, index: IndexOptions | None
) -> BundleManifest:
    """Writes items, program, weights and golden requests of a bundle, and verifies them; see ``export_bundle``.

    Args:
        policy: on the CPU, in evaluation mode, with one vector per item.
        manifest: the manifest without files, agreement and index.
        items: external ids.
        root: the unfinished bundle, with the files of its features.
        index: use an approximate index instead of scoring the complete catalog.

    Returns:
        The manifest without files.
    """
    items.save(root / ITEMS)
    manifest = _write_search(policy, manifest, root) if index is None else _write_index(policy, manifest, root, index)
    write_golden(Bundle(root, manifest, items, load_runtime(root, manifest, "onnx")))
    if manifest.options is not None:
        save_policy(policy, items, root)
        verify_runtime(load_runtime(root, manifest, "torch"), PolicyRuntime(policy, manifest))
    return manifest


def versions() -> dict[str, str]:
    """The versions of the libraries used here."""
    return {"recpo": __version__, "torch": torch.__version__}


def _validate_features(policy: Policy, features: PolicyFeatures) -> None:
    """Raises if ``features`` lacks something that the policy reads, or has something that it does not read."""
    for name, read, known in (
        ("user_features", policy.reads.user, features.user),
        ("context_features", policy.reads.context, features.context),
        ("behaviors", policy.reads.behaviors, features.behaviors),
    ):
        if read != bool(known):
            message = (
                f"the policy {'reads' if read else 'does not read'} {name}, and the argument features "
                f"{'has none' if read else 'has them'}: pass those of the run (recpo.export does)"
            )
            raise RecpoError(message, code="mismatch", field="features")


def grows(policy: Policy) -> bool:
    """Whether a policy without encoders of item features takes new items: see ``GradeFactors.new_item_rows``."""
    return isinstance(policy, FactorPolicy) and policy.factors.options.item_features


def _write_search(policy: Policy, manifest: BundleManifest, root: Path) -> BundleManifest:
    """The program that ranks the complete catalog, compared with the policy."""
    from recpo.serving.onnx_program import save_onnx

    ranker = ranker_of(policy, manifest.item_precision)
    # a program that scores a small catalog at once takes forbidden items as ids
    masked = isinstance(ranker, CatalogSearch) and (root / ATTRIBUTES).is_file()
    manifest = replace(manifest, mask=masked)
    program = ServingProgram(ranker, manifest.k, manifest.reads)
    may_loop = isinstance(ranker, CatalogSearch) or manifest.options is None  # a policy from outside may
    with traces_forgotten() if may_loop else nullcontext():
        save_onnx(program, root / ONNX_PROGRAM)
    runtime, exact = load_runtime(root, manifest, "onnx"), PolicyRuntime(policy, manifest)
    if manifest.item_precision == "float32":
        verify_runtime(runtime, exact)
        return manifest
    return replace(manifest, agreement=verify_rounded(runtime, program, exact, manifest.item_precision))


def _write_index(policy: Policy, manifest: BundleManifest, root: Path, options: IndexOptions) -> BundleManifest:
    """The program that computes states, and the index, compared with the policy."""
    from recpo.serving.onnx_program import save_onnx

    program = ServingProgram(policy, None, manifest.reads)
    manifest = replace(manifest, index=build_index(program, manifest.k, options, root))
    save_onnx(program, root / ONNX_PROGRAM)
    verify_index(IndexRuntime(root, manifest), program)
    return manifest


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
    from torch._inductor.package import load_package  # importing Inductor takes seconds

    root = Path(bundle)
    manifest = replace(BundleManifest.open(root), mask=False)  # it takes all forbidden items as ids
    policy = load_policy(root, manifest)
    with (
        output_file(out, overwrite=overwrite, inputs=[root]) as working,
        tempfile.TemporaryDirectory(prefix="recpo-compiled-") as work,
        traces_forgotten(),
        torch._inductor.config.patch(compile_threads=1),  # a process pool would outlive the call
    ):
        exported = exported_program(ServingProgram(_ranker(policy), manifest.k, manifest.reads))
        settings = {"aot_inductor.metadata": {_CHECKSUM: sha256(root / MANIFEST)}}
        try:
            file = torch._inductor.aoti_compile_and_package(
                exported, package_path=f"{work}/program.pt2", inductor_configs=settings
            )
        except Exception as error:  # errors of Inductor's own classes and of the compiler
            message = (
                f"the program cannot be compiled ({str(error).strip()[-300:]}): install a C++ compiler (g++, or name "
                "it in CXX), or serve the bundle with ONNX Runtime"
            )
            raise RecpoError(message, code="not_installed", field="compile") from error
        verify_runtime(TorchProgramRuntime(load_package(str(file)), manifest), PolicyRuntime(policy, manifest))
        copyfile(file, working)


def load_compiled(bundle: Path | str, file: Path | str) -> Bundle:
    """The bundle with its compiled program as the engine. This runs the code in the file.

    Raises:
        RecpoError: no bundle, or a file that was not compiled from it.
    """
    from torch._inductor.package import load_package

    loaded = Bundle.open(bundle)
    with readable(Path(file), Exception, remedy="compile the bundle again"):  # errors of the loader, the linker, or zip
        validate_archive(Path(file), contents=True)  # a damaged library could end the process
        program: Any = load_package(str(file))
        found = program.get_metadata().get(_CHECKSUM)
    if found != sha256(loaded.root / MANIFEST):
        message = f"{file} was compiled from another bundle than {bundle}: compile this one"
        raise RecpoError(message, code="mismatch", field=Path(file).name)
    return replace(loaded, runtime=TorchProgramRuntime(program, replace(loaded.manifest, mask=False)))


def _ranker(policy: Policy) -> Policy | CatalogSearch:
    """Inductor cannot lower the loop over blocks, so it is unrolled into a few blocks."""
    rows = max(BLOCK_ROWS, math.ceil((policy.num_items + 1) / MOST_BLOCKS))
    ranker = ranker_of(policy, "float32", rows)
    if isinstance(ranker, CatalogSearch):
        ranker.table.written_out = True
    return ranker


MODEL_CARD = "README.md"
_UNKNOWN = "not recorded"
_METRICS: Final = ("NDCG", "Recall", "HitRate", "MRR", "disliked", "true_reward", "true_dislike")


def facts_of(run: Run, policy: Policy, checkpoint: str, measured: Mapping[str, Any] | None = None) -> PolicyFacts:
    """What a bundle keeps of a run.

    Args:
        run: the run.
        policy: its policy.
        checkpoint: which of its checkpoints.
        measured: what ``evaluation_facts`` found, for the model card; None = nothing.
    """
    data = run.origin.get("data", {})
    origin = {
        "run": run.root.resolve().name,
        "checkpoint": checkpoint,
        "weights": run.weights_checksum(checkpoint),
        "catalog_checksum": run.catalog_checksum,
        "user_ids": data.get("user_ids"),
        "item_column": data.get("item_column"),
    }
    return PolicyFacts(
        run.feedback,
        run.kept_features(policy),
        run.configuration["policy"].get("init_args", {}),
        origin,
        card_facts(run, measured),
        run.repeats,
    )


def card_facts(run: Run, evaluation: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The facts about a run for the model card of its bundle.

    Args:
        run: the run.
        evaluation: what ``evaluation_facts`` found; None = nothing.
    """
    configuration, origin = run.configuration, run.origin
    data, base = configuration.get("data", {}).get("init_args", {}), configuration.get("init_from")
    said = {
        "objective": _name(configuration.get("objective")),
        "reward": _name(configuration.get("reward")),
        "init_from": Path(str(base)).name if base is not None else origin.get("tilted", {}).get("run"),
        "seed": configuration.get("seed"),
        "data seed": data.get("seed"),
        "monitor": run.monitor,
        "results": run.results,
        "data": origin.get("data"),
        "evaluation": evaluation,
    }
    return {name: value for name, value in said.items() if value is not None}


def evaluation_facts(document: Mapping[str, Any], run: str) -> dict[str, Any]:
    """The metrics of a run, and of the baselines in the same evaluation.

    Args:
        document: ``Evaluation.document``.
        run: name of the run among its contenders.

    Raises:
        RecpoError: the run is not among its contenders.
    """
    contenders = {one["name"]: one for one in document["contenders"] if one.get("metrics")}
    if run not in contenders:
        message = f"evaluation: {run} is not among its contenders ({', '.join(contenders)}): evaluate the exported run"
        raise RecpoError(message, code="unknown_name", field="evaluation")
    k = document["setting"]["ks"][0]
    names = [f"{name}@{k}" for name in _METRICS if f"{name}@{k}" in contenders[run]["metrics"]]
    baselines = [name for name, one in contenders.items() if one.get("kind") == "baseline" and name != run]
    return {
        "split": document["setting"]["split"],
        "users": contenders[run]["counts"]["users"],
        "names": names,
        "metrics": {name: {key: contenders[name]["metrics"].get(key) for key in names} for name in (run, *baselines)},
    }


def _name(part: Any) -> str | None:
    path = part.get("class_path") if isinstance(part, Mapping) else None
    return None if path is None else str(path).rpartition(".")[2]


def model_card(manifest: BundleManifest, facts: Mapping[str, Any]) -> str:
    """The card of a bundle as Markdown.

    Args:
        manifest: manifest of the bundle, without its files.
        facts: of the run, as ``card_facts`` gathers them; missing facts are marked as missing.
    """
    environment = Environment(
        loader=PackageLoader("recpo.serving", ""), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"plain": _plain, "estimate": _estimate, "date": _date}
    results = facts.get("results", {}).items()
    return environment.get_template("model_card.md.jinja").render(
        manifest=manifest,
        origin=manifest.origin,
        data=facts.get("data"),
        training=_training(manifest.origin, facts),
        evaluation=facts.get("evaluation"),
        validated=sorted((name, value) for name, value in results if name.startswith("val/")),
        unknown=_UNKNOWN,
    )


def refreshed_card(manifest: BundleManifest, root: Path) -> str:
    """The card of a bundle that has got more items: that of the bundle in ``root``, and what has changed.

    Args:
        manifest: of the new bundle.
        root: the bundle that it was made from.
    """
    file = root / MODEL_CARD
    before = file.read_text(encoding="utf-8") if file.is_file() else model_card(manifest, {})
    return (
        f"{before}\n## Refreshed\n\nItems were added after training, with vectors from their features: the catalog has "
        f"{manifest.num_items:,} items now. The numbers above are of the catalog before.\n"
    )


def _training(origin: Mapping[str, Any], facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What is known about the training: name and value."""
    monitor, results = facts.get("monitor"), facts.get("results", {})
    reached = "" if results.get(monitor) is None else f", at the end {results[monitor]:.4f}"
    rows = [(name, facts.get(name), "") for name in ("objective", "reward", "init_from", "seed", "data seed")]
    rows.append(("selected by", monitor, reached))
    kept = (("checkpoint", "checkpoint"), ("weights (SHA-256)", "weights"), ("items", "catalog_checksum"))
    rows += [(name, origin.get(key) or None, "") for name, key in kept]
    said = [(name, f"`{_plain(value)}`{more}") for name, value, more in rows if value is not None]
    return said or [("run", _UNKNOWN)]


def _estimate(metric: Mapping[str, Any] | None) -> str:
    if metric is None or metric.get("mean") is None:
        return "-"
    half = metric.get("half_width")
    return f"{metric['mean']:.4f}" + ("" if half is None else f" ± {half:.4f}")


def _date(milliseconds: int | None) -> str:
    if not isinstance(milliseconds, int):
        return _UNKNOWN
    return datetime.fromtimestamp(milliseconds / 1000.0, UTC).strftime("%Y-%m-%d")


def _plain(value: object) -> str:
    """A name as text of one line that Markdown leaves alone in a table."""
    text = "".join(letter if letter.isprintable() else " " for letter in str(value))
    return text.replace("|", "/").replace("`", "'")
