"""Writes a trained policy as a bundle and verifies it against the policy before publishing it.

The model card of a bundle: what the policy is, what it was trained on, what is known of it and what is not.

Every number comes from a manifest: the bundle's own, the run's (``run.json``, ``origin.json``) or an evaluation's.
"""

from __future__ import annotations

import copy
import gc
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from jinja2 import Environment, PackageLoader
from torch.export import Dim, ExportedProgram

from recpo import __version__
from recpo.artifacts.outputs import output_directory
from recpo.base.contracts import Policy
from recpo.base.errors import PositiveInt, RecpoError
from recpo.base.feature_encoding import PolicyFeatures
from recpo.base.feedback import FeedbackDefinition
from recpo.base.frames import FrameOrPath, read_frame
from recpo.log.id_map import IdMap
from recpo.policies.baseline import FactorPolicy
from recpo.policies.catalog_search import Precision
from recpo.serving.bundle import Bundle, load_runtime, write_golden
from recpo.serving.encoded_histories import EXCLUDE
from recpo.serving.item_index import STATES, IndexOptions, IndexRuntime
from recpo.serving.manifest import ITEMS, ONNX_PROGRAM, BundleManifest
from recpo.serving.program import (
    CatalogSearch,
    ServingProgram,
    build_index,
    random_inputs,
    ranker_of,
    verify_index,
    verify_rounded,
    verify_runtime,
)
from recpo.serving.recommending import ATTRIBUTES, attribute_columns, validate_k
from recpo.serving.runtimes import OUTPUTS
from recpo.serving.saved_policy import describe_policy, save_item_encoders, save_policy

_EXAMPLE_USERS = 2  # a size of 1 would be exported as a constant
_PROTOBUF_LIMIT = 2**31 - 2**24  # bytes of weights, with room for the graph


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
    repeats: bool = False
    """items of the history may be listed again, as in music or groceries; only items that a request excludes are not
    listed"""
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
        card: the facts about the run for the model card (``recpo.serving.export``).
    """

    feedback: FeedbackDefinition
    features: PolicyFeatures = field(default_factory=PolicyFeatures)
    options: Mapping[str, Any] | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)
    card: Mapping[str, Any] = field(default_factory=dict)


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
        raise RecpoError(
            f"{len(items)} items are named, the policy has {policy.num_items}: pass its own items",
            code="mismatch",
            field="items",
        )
    _validate_features(policy, facts.features)
    given = options.attributes
    known = None if given is None else attribute_columns(read_frame(given, "attributes"), items, "attributes")
    k, described = validate_k(options.k, policy.num_items), describe_policy(policy, facts.options)
    encoded = policy if policy.reads_item_features and described["options"] is not None else None
    features = facts.features if encoded is not None or grows(policy) else replace(facts.features, item=None)
    policy = _servable(policy).eval()
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
        repeats=options.repeats,
    )

    if options.index is not None and options.item_precision != "float32":
        raise RecpoError(
            "index: its exact scores are float32: leave item_precision at float32",
            code="conflicting_options",
            field="item_precision",
        )
    with output_directory(out, kind="bundle", overwrite=overwrite, inputs=inputs) as root:
        features.save(root)
        if encoded is not None and features.item is not None:
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
    with traces_forgotten():
        items.save(root / ITEMS)
        if index is None:
            manifest = _write_search(policy, manifest, root)
        else:
            manifest = _write_index(policy, manifest, root, index)
        write_golden(Bundle(root, manifest, items, load_runtime(root, manifest, "onnx")))
        if manifest.options is not None:
            save_policy(policy, items, root)
            verify_runtime(load_runtime(root, manifest, "torch"), policy, manifest.k)
    return manifest


def versions() -> dict[str, str]:
    """The versions of the libraries used here."""
    return {"recpo": __version__, "torch": torch.__version__}


def _validate_features(policy: Policy, features: PolicyFeatures) -> None:
    """Raises if ``features`` lacks something that the policy reads, or has something that it does not read."""
    for name, read, known in (
        ("user_features", policy.reads_user, features.user),
        ("context_features", policy.reads_context, features.context),
        ("behaviors", policy.reads_behaviors, features.behaviors),
    ):
        if read != bool(known):
            raise RecpoError(
                f"the policy {'reads' if read else 'does not read'} {name}, and the argument features "
                f"{'has none' if read else 'has them'}: pass those of the run (recpo.export does)",
                code="mismatch",
                field="features",
            )


def grows(policy: Policy) -> bool:
    """Whether a policy without encoders of item features takes new items: see ``GradeFactors.of_new_items``."""
    return isinstance(policy, FactorPolicy) and policy.factors.options.item_features


def _servable(policy: Policy) -> Policy:
    """The policy on the CPU, with precomputed item vectors, so that item features do not change the cost of serving.

    The policy that was given stays as it is, and where it is.
    """
    elsewhere = any(weight.device.type != "cpu" for weight in policy.parameters())
    if policy.reads_item_features or elsewhere:
        policy = copy.deepcopy(policy)
    if policy.reads_item_features:
        policy.precompute_item_vectors()
    return policy.cpu()


def _write_search(policy: Policy, manifest: BundleManifest, root: Path) -> BundleManifest:
    """The program that ranks the complete catalog, compared with the policy."""
    ranker, k = ranker_of(policy, manifest.item_precision), manifest.k
    # a program that scores a small catalog at once takes forbidden items as ids
    masked = isinstance(ranker, CatalogSearch) and (root / ATTRIBUTES).is_file()
    manifest = replace(manifest, mask=masked)
    program = ServingProgram(ranker, k, manifest.reads)
    _save_onnx(program, root / ONNX_PROGRAM, OUTPUTS)
    runtime = load_runtime(root, manifest, "onnx")
    if manifest.item_precision == "float32":
        verify_runtime(runtime, policy, k)
        return manifest
    return replace(manifest, agreement=verify_rounded(runtime, program, policy, k, manifest.item_precision))


def _write_index(policy: Policy, manifest: BundleManifest, root: Path, options: IndexOptions) -> BundleManifest:
    """The program that computes states, and the index, compared with the policy."""
    manifest = replace(manifest, index=build_index(policy, manifest.k, options, root, manifest.reads))
    _save_onnx(ServingProgram(policy, None, manifest.reads), root / ONNX_PROGRAM, (STATES,))
    verify_index(IndexRuntime(root, manifest), policy, manifest.k)
    return manifest


def exported_program(program: ServingProgram) -> ExportedProgram:
    """The program as a graph, for any number of users and of excluded items."""
    random = random_inputs(program.ranker, _EXAMPLE_USERS, np.random.default_rng(0), program.reads)
    users, width = Dim("users", min=1), Dim(EXCLUDE, min=1)
    inputs = tuple(torch.from_numpy(one.of(random)) for one in program.inputs)
    shapes = (tuple({0: users, 1: width} if one.name == EXCLUDE else {0: users} for one in program.inputs),)
    with _tracing():
        return torch.export.export(program, inputs, dynamic_shapes=shapes)


def _save_onnx(program: ServingProgram, file: Path, outputs: Sequence[str]) -> None:
    exported, names = exported_program(program), [one.name for one in program.inputs]
    with _tracing():
        onnx = torch.onnx.export(
            exported, input_names=names, output_names=outputs, dynamo=True, verbose=False, optimize=False
        )
        assert onnx is not None
        _simplify(onnx.model)
    size = sum(values.nbytes for values in exported.state_dict.values())
    onnx.save(str(file), external_data=size > _PROTOBUF_LIMIT)


def _simplify(model: Any) -> None:
    """What ``onnxscript.optimizer.optimize`` does, with those of its rules that apply to these programs.

    One of the others, for splits into two slices, compares every slice with every other one and finds nothing: it takes
    a fifth to a third of the time of an export.

    Args:
        model: the ``onnx_ir.Model``, changed in place.
    """
    from onnxscript import optimizer, rewriter  # imported here because only an export needs it
    from onnxscript.rewriter.rules import common

    no_op = (
        common.mul_by_1_rule,
        common.add_0_rule,
        common.sub_0_rule,
        common.no_op_cast_rule,
        common.no_op_expand_rule,
    )
    shape = (common.materialize_reshape_shape_rule, common.reshape_reshape_rule, common.squeeze_reshape_1d_rule)
    order = (common.no_op_transpose_rule, common.transpose_transpose_rule, common.unsqueeze_unsqueeze_rule)
    other = (common.cast_cast_rule, common.collapse_slice_rule, common.collapse_slice2_rule)
    optimizer.inline(model)
    for _ in range(2):  # folded constants make further rules apply
        optimizer.fold_constants(model)
        rewriter.rewrite(model, [*no_op, *shape, *order, *other])
    optimizer.optimize(model, num_iterations=0)


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
def _tracing() -> Iterator[None]:
    """Traces without gradients, without notes of the exporter about its own internals, and without stack traces.

    Stack traces contain file names of the exporting machine, and they take a tenth of the time of an export.
    """
    logger, config = logging.getLogger("torch.onnx"), torch.fx.config
    level, without = logger.level, config.do_not_emit_stack_traces
    logger.setLevel(logging.ERROR)
    config.do_not_emit_stack_traces = True
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        config.do_not_emit_stack_traces = without


MODEL_CARD = "README.md"
_UNKNOWN = "not recorded"


def model_card(manifest: BundleManifest, facts: Mapping[str, Any]) -> str:
    """The card of a bundle as Markdown.

    Args:
        manifest: manifest of the bundle, without its files.
        facts: of the run, as ``recpo.serving.of_runs.card_facts`` gathers them; missing facts are marked as missing.
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
    rows = [(name, facts.get(name)) for name in ("objective", "reward", "init_from", "seed", "data seed")]
    monitor, results = facts.get("monitor"), facts.get("results", {})
    reached = "" if results.get(monitor) is None else f", at the end {results[monitor]:.4f}"
    kept = (("checkpoint", "checkpoint"), ("weights (SHA-256)", "weights"), ("items", "catalog_checksum"))
    last = [(name, origin.get(key) or None) for name, key in kept]
    said = [(name, f"`{_plain(value)}`") for name, value in rows if value is not None]
    said += [] if monitor is None else [("selected by", f"`{_plain(monitor)}`{reached}")]
    said += [(name, f"`{_plain(value)}`") for name, value in last if value is not None]
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
