"""A bundle: an exported policy that recommends from raw events and external ids, without training code.

::

    bundle/model.onnx           the program for ONNX Runtime (and model.onnx.data beside it if it exceeds 2 GB)
    bundle/index.faiss          an approximate index, from recpo export --index, and vectors.npy, the item vectors
    bundle/policy.safetensors   weights for the torch engine, for recpo's own policies; codes/ with semantic ids
    bundle/items.parquet        item_index 1..V, item_id, the external id, and, where known, when an item may be listed
    bundle/manifest.json        sizes, feedback definition, origin, SHA-256 of every file and of itself; written last

The default engine, ONNX Runtime, imports neither torch nor lightning nor torchrec.

Golden requests: requests with known answers that are part of a bundle.

``recpo export`` sends them to the finished program and stores the answers. A server sends them again before it accepts
requests. A checksum shows that the files are the exported ones. Golden requests show that this machine, with its
versions of ONNX Runtime and recpo, computes the same lists from raw events.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self, get_args

import numpy as np
import pandas as pd
import pyarrow as pa

from recpo.artifacts.documents import parse_json
from recpo.base.errors import RecpoError
from recpo.base.feature_encoding import FittedFeatures, PolicyFeatures, by_source, decoded
from recpo.base.features import Categories, Category, Feature, FeatureArrays, Number, Vector, of_type
from recpo.base.feedback import FeedbackDefinition
from recpo.base.frames import Frame
from recpo.log.id_map import IdMap
from recpo.serving import recommending
from recpo.serving.histories import EncodedHistories, HistoryReader, Request
from recpo.serving.manifest import ITEMS, WEIGHTS, BundleManifest, readable
from recpo.serving.runtimes import CPU_PROVIDER, EngineName, IndexRuntime, OnnxRuntime, Runtime


@dataclass(frozen=True)
class Bundle:
    """A loaded bundle.

    Attributes:
        root: its directory.
        manifest: the verified manifest.
        items: external ids of the catalog.
        runtime: ranks encoded histories.
    """

    root: Path
    manifest: BundleManifest = field(repr=False)
    items: IdMap = field(repr=False)
    runtime: Runtime = field(repr=False)

    @classmethod
    def open(
        cls, root: Self | Path | str, engine: EngineName = "onnx", threads: int = 0, provider: str = CPU_PROVIDER
    ) -> Self:
        """Verifies every checksum, then loads the bundle. Loading runs no code of the bundle; see ``docs/security.md``.

        Args:
            root: directory written by ``recpo export``; a bundle that is open already is returned as it is.
            engine: ``onnx`` (ONNX Runtime, without torch) or ``torch`` (recpo's own policy, which can also score
                candidates).
            threads: threads of ONNX Runtime, 0 = one per core.
            provider: execution provider of ONNX Runtime (``onnxruntime.get_available_providers()``). The CPU runs
                operations that it does not support.

        Raises:
            RecpoError: an unknown engine or provider, or a bundle that is missing, incomplete, altered, or of another
                format version.
        """
        if isinstance(root, Bundle):
            return root
        manifest, root = BundleManifest.open(root), Path(root)
        items = IdMap.load(root / ITEMS)
        if len(items) != manifest.num_items:
            message = f"{root / ITEMS} has {len(items)} items, the program {manifest.num_items}: export again"
            raise RecpoError(message, code="mismatch", field=ITEMS)
        bundle = cls(root, manifest, items, load_runtime(root, manifest, engine, threads, provider))
        _ = bundle.features, bundle.filters  # read now, while the files are still the verified ones
        return bundle

    @property
    def k(self) -> int:
        """Length of the longest list."""
        return self.manifest.k

    @property
    def scores_are_log_probabilities(self) -> bool:
        """False if an index searches. Scores are then log-probabilities up to a constant per request."""
        return not isinstance(self.runtime, IndexRuntime)

    @property
    def feedback(self) -> FeedbackDefinition:
        """Defines positive, disliked, skipped and unknown events, and how feedback levels are computed."""
        return self.manifest.feedback

    @cached_property
    def features(self) -> PolicyFeatures:
        """The fitted features that the policy reads."""
        manifest = self.manifest
        return PolicyFeatures.load(self.root, manifest.features, manifest.behaviors, remedy=manifest.remedy())

    @cached_property
    def filters(self) -> recommending.ItemFilters:
        """The attributes for ``allow`` and ``deny``; none if the bundle was exported without attributes."""
        return recommending.ItemFilters.load(self.root, self.items)

    @cached_property
    def reader(self) -> HistoryReader:
        """Reads histories for this policy."""
        manifest = self.manifest
        return HistoryReader(
            self.items,
            manifest.feedback,
            manifest.max_history,
            manifest.reads_timestamps,
            self.features,
            manifest.repeats,
        )

    def recommend(
        self,
        histories: Frame,
        k: int | None = None,
        *,
        exclude: Frame | None = None,
        users: Iterable[Any] | None = None,
        user_features: Frame | None = None,
        context: Frame | None = None,
        allow: recommending.Wanted | None = None,
        deny: recommending.Wanted | None = None,
        at: recommending.Moment | None = None,
    ) -> pd.DataFrame:
        """The best items of every user, excluding the items of the history and of ``exclude``.

        Unknown items are skipped and counted. A user without a known event gets the recommendations for an empty
        history. If a history is longer than the policy reads, the most recent events count; older items are not
        recommended either.

        Args:
            histories: events, one per row, in any order (any Arrow-compatible frame): ``user_id``, ``item_id``,
                ``timestamp`` (times, or milliseconds since 1970) and, if the log has them, ``watch_time`` and
                ``duration`` in seconds, ``dislike``, ``label``; also flags of behaviors and features of the requests,
                by their names, if the policy reads them.
            k: list length, at most the bundle's maximum; None = the maximum.
            exclude: ``user_id`` and ``item_id`` pairs that must not be listed.
            users: the users to serve, in this order; may include new users. None = the users of ``histories``.
            user_features: ``user_id`` and columns as in the prepared user table, if the policy reads it.
            context: ``user_id`` and the features of the current requests, if the policy reads them.
            allow: attribute -> values, for a bundle with attributes: list only items that have one of the values of
                each attribute.
            deny: attribute -> values: list no item that has one of the values.
            at: when the lists are made, an ISO time or date (UTC without a zone) or milliseconds since 1970: only items
                with ``available_from <= at < available_until`` are listed. None = now; if no item is available any
                more, the time of the newest event, with a warning.

        Returns:
            ``user_id``, ``rank`` from 1, ``item_id``, ``score`` (natural-log probability; with an index, up to a
            constant per user). ``attrs["counts"]`` reports what was left out (``ServingCounts``).

        Raises:
            RecpoError: a column is missing, has a wrong type or impossible values; or k is not an integer in its range.
        """
        k, allowed = recommending.validate_k(self.k if k is None else k, self.k), self.filters.allowed(allow, deny)
        sides = {"user_features": user_features, "context": context}
        begin = recommending.moment_of_lists(at, self.items, lambda: histories)
        read = self.reader.read(histories, exclude=exclude, users=users, at=begin, **sides)
        return recommending.recommend_lists(self.runtime, self.items, read, k=k, allowed=allowed).to_pandas()

    def recommend_one(
        self,
        events: Sequence[Mapping[str, Any]],
        k: int | None = None,
        exclude: Sequence[Any] = (),
        *,
        user: Mapping[str, Any] | None = None,
        context: Mapping[str, Any] | None = None,
        allow: recommending.Wanted | None = None,
        deny: recommending.Wanted | None = None,
        at: recommending.Moment | None = None,
    ) -> list[tuple[Any, float]]:
        """The best items of one user, for a server that has the request as Python objects.

        Args:
            events: the user's past in any order; the keys are the columns of ``recommend`` without ``user_id``.
            k: list length; None = the bundle's maximum.
            exclude: items that must not be listed.
            user: features of the user, by the columns of the user table; features that are not named count as missing.
            context: features of this request, by name.
            allow: see ``recommend``.
            deny: see ``recommend``.
            at: as in ``recommend``; None = now.

        Returns:
            Pairs of external item id and natural-log probability (with an index, up to a constant), best first.

        Raises:
            RecpoError: see ``recommend``.
        """
        k = recommending.validate_k(self.k if k is None else k, self.k)
        inputs = self.reader.read_request(Request(events, exclude, user, context), recommending.milliseconds(at))
        allowed = self.filters.allowed(allow, deny)
        return self.ranked(inputs if allowed is None else inputs._replace(allowed=allowed[None]), k)

    def ranked(self, inputs: EncodedHistories, k: int) -> list[tuple[Any, float]]:
        """``recommend_one`` for a history that is already encoded, ``B = 1``."""
        top_items, scores = self.runtime.recommend(inputs, k)
        listed = top_items[0] > 0
        items = self.items.listed(top_items[0][listed])
        return list(zip(items, scores[0][listed].tolist(), strict=True))

    def score(
        self, histories: Frame, candidates: Frame, *, user_features: Frame | None = None, context: Frame | None = None
    ) -> pd.DataFrame:
        """Log-probabilities of given items, for a bundle loaded with ``engine="torch"``.

        Args:
            histories: see ``recommend``.
            candidates: ``user_id`` and ``item_id``.
            user_features: see ``recommend``.
            context: see ``recommend``.

        Returns:
            ``user_id``, ``item_id``, ``score``, in the order of the candidates; nan for unknown items.

        Raises:
            RecpoError: see ``recommend``; or the engine is onnx.
        """
        served = recommending.score_candidates(
            self.runtime, self.reader, histories, candidates, user_features=user_features, context=context
        )
        return served.to_pandas()


def load_runtime(
    root: Path, manifest: BundleManifest, engine: EngineName, threads: int = 0, provider: str = CPU_PROVIDER
) -> Runtime:
    """The engine of a bundle whose files are already verified."""
    if engine not in get_args(EngineName):
        message = f"engine is {engine!r}, expected one of: {', '.join(get_args(EngineName))}"
        raise RecpoError(message, code="unknown_name", field="engine")
    if engine != "onnx" and provider != CPU_PROVIDER:
        message = f"provider is {provider!r}, which is for engine=onnx, not for engine={engine}: leave it out"
        raise RecpoError(message, code="unused_option", field="provider")
    if engine == "torch":
        from recpo.serving.saved_policy import PolicyRuntime, load_policy

        return PolicyRuntime(load_policy(root, manifest), manifest)
    return (OnnxRuntime if manifest.index is None else IndexRuntime)(root, manifest, threads, provider)


_TABLES = ("item_table.weight", "base.item_table.weight")  # of a catalog softmax, alone or below a tilted policy
_CODES = ("code_table.weight", "base.code_table.weight")


def bundle_item_vectors(root: Path, manifest: BundleManifest | None = None) -> np.ndarray:
    """The vectors that the bundle's encoder reads for its items, ``[V + 1, d]`` float32; row 0 is not an item.

    They are in ``policy.safetensors``, whose checksum is in the manifest, so the bundle needs no further file.

    Args:
        root: the bundle.
        manifest: its manifest, already verified; None = read and verify it here.

    Raises:
        RecpoError: no bundle, or its policy has no table of item vectors (semantic ids, a class that is not recpo's).
    """
    from safetensors import SafetensorError, safe_open  # lists without re-ranking do not need it

    manifest = BundleManifest.open(root) if manifest is None else manifest
    if manifest.options is not None:
        file = root / WEIGHTS
        with readable(file, SafetensorError, OSError), safe_open(str(file), framework="numpy") as weights:
            names = set(weights.keys())
            if not names & set(_CODES) and (found := [name for name in _TABLES if name in names]):
                return np.asarray(weights.get_tensor(found[0]), np.float32)
    message = (
        f"{root}: its policy, {manifest.policy['class']}, has no table of item vectors; re-rank with vectors of a file "
        "(rerank_options.attributes and rerank_options.vectors)"
    )
    raise RecpoError(message, code="unsupported", field="vectors")


GOLDEN: Final = "golden.json"
TOLERANCE: Final = 1e-4
"""Allowed difference of natural-log probabilities. Items this close may swap places."""

_REQUESTS, _LISTED = 8, 10
_MISSING: Final = 0.2  # share of the features that are missing
FIRST_TIME_MS: Final = 1_600_000_000_000  # of random histories
_LONGEST_GAP_MS: Final = 86_400_000
_REMEDY: Final = "export the bundle again with this version of recpo and ONNX Runtime"


def write_golden(bundle: Bundle) -> None:
    """Sends requests to an unfinished bundle and writes them with its answers.

    The first request has no history, and the last history is longer than the policy reads. Some events lack their
    outcome, and every request has items to exclude.
    """
    generator = np.random.default_rng(0)
    lengths = np.linspace(0, bundle.manifest.max_history + 2, _REQUESTS).round().astype(int)
    requests = [_request(bundle, int(length), generator) for length in lengths]
    k = min(_LISTED, bundle.k)
    content = [{**request, "k": k, "answer": _answer(bundle, request, k)} for request in requests]
    text = json.dumps({"tolerance": TOLERANCE, "requests": content}, allow_nan=False) + "\n"
    (bundle.root / GOLDEN).write_text(text, encoding="utf-8")


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
    with readable(path, KeyError, TypeError, ValueError, remedy=_REMEDY):
        requests = parse_json(path.read_bytes(), path, _REMEDY)["requests"]
        for number, request in enumerate(requests):
            expected = [(item, float(score)) for item, score in request["answer"]]
            found = _answer(bundle, request, request["k"])
            compare_lists(expected, found, f"{path}: request {number}", f": {_REMEDY}")
    return len(requests)


def _request(bundle: Bundle, length: int, generator: np.random.Generator) -> dict[str, Any]:
    items: list[Any] = bundle.items.listed(generator.integers(1, len(bundle.items) + 1, length + 2))
    times = FIRST_TIME_MS + generator.integers(1, _LONGEST_GAP_MS, length).cumsum()
    history = [{"item_id": item, "timestamp": int(time)} for item, time in zip(items[2:], times, strict=True)]
    known = bundle.features
    for event in history:
        event |= _outcome(bundle.feedback, generator)
        event |= {name: bool(generator.random() < 0.3) for name in known.behaviors}
    request: dict[str, Any] = {"history": history, "exclude": items[:2]}
    if known.user:
        (request["user"],) = _features(known.user, 1, generator)
    if known.context:
        *past, request["context"] = _features(known.context, length + 1, generator, by_name=True)
        for event, features in zip(history, past, strict=True):
            event |= features
    return request


def _answer(bundle: Bundle, request: Mapping[str, Any], k: int) -> list[tuple[Any, float]]:
    """The answer at any time: items that are not available yet, or no longer, are ranked as well."""
    asked = Request(request["history"], request["exclude"], request.get("user"), request.get("context"))
    return bundle.ranked(bundle.reader.read_request(asked), k)


def _features(
    fitted: FittedFeatures, rows: int, generator: np.random.Generator, by_name: bool = False
) -> list[dict[str, Any]]:
    """Raw values of random features; those that are missing are left out."""
    columns = decoded(fitted, random_features(fitted.features, (rows,), generator))
    table = pa.table(columns if by_name else by_source(fitted, columns))
    return [{name: value for name, value in row.items() if value is not None} for row in table.to_pylist()]


def random_features(
    features: Sequence[Feature], shape: tuple[int, ...], generator: np.random.Generator
) -> FeatureArrays:
    """Random features with the leading ``shape``: codes of the vocabulary, unknown codes, and a fifth missing."""

    def codes(sizes: Sequence[int | None]) -> np.ndarray:
        ends = np.array([size or 2 for size in sizes], np.int64)
        return generator.integers(1, ends, (*shape, len(sizes)))

    def known(width: int) -> np.ndarray:
        return generator.random((*shape, width)) > _MISSING

    def numbers(width: int, kept: np.ndarray) -> np.ndarray:
        return np.where(kept, generator.standard_normal((*shape, width), np.float32), np.float32(np.nan))

    sizes = [one.num_codes for one in of_type(features, Category)]
    width = len(of_type(features, Number))
    return FeatureArrays(
        codes(sizes) * known(len(sizes)),
        tuple(-np.sort(-codes([one.num_codes] * one.length) * known(1)) for one in of_type(features, Categories)),
        numbers(width, known(width)),
        tuple(numbers(one.width or 0, known(1)) for one in of_type(features, Vector)),
    )


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
    return {"watch_time": round(float(generator.random()) * longest, 3), "duration": round(duration, 3), **disliked}


def compare_lists(
    expected: Sequence[tuple[Any, float]], found: Sequence[tuple[Any, float]], where: str, remedy: str = ""
) -> None:
    """Raises ``RecpoError`` if two lists of items and scores differ, by more than items that swap places within 1e-4.

    Args:
        expected: the list as it should be, best first.
        found: the list to check.
        where: the beginning of the message.
        remedy: its end.
    """
    gaps = [abs(mine - theirs) for (_, mine), (_, theirs) in zip(found, expected, strict=False)]
    if len(found) != len(expected) or any(not gap <= TOLERANCE for gap in gaps):
        message = (
            f"{where}: {len(found)} items whose scores are nan or differ by up to {max(gaps, default=0.0):.2g} from "
            f"the expected ones ({len(expected)} items, {TOLERANCE:g} is allowed){remedy}"
        )
        raise RecpoError(message, code="mismatch", field="scores")
    score_of = dict(expected)
    last = expected[-1][1] if expected else 0.0  # an item outside the list scores at most as much as its last place
    moved = [
        item
        for (item, score), (other, _) in zip(found, expected, strict=True)
        if item != other and abs(score_of.get(item, last) - score) > TOLERANCE
    ]
    if moved:
        message = f"{where}: other items than expected, {moved[0]!r} among them{remedy}"
        raise RecpoError(message, code="mismatch", field="items")
