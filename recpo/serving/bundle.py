"""A bundle: an exported policy that recommends from raw events and external ids, without training code.

::

    bundle/model.onnx           the program for ONNX Runtime (and model.onnx.data beside it if it exceeds 2 GB)
    bundle/index.faiss          an approximate index, from recpo export --index, and vectors.npy, the item vectors
    bundle/policy.safetensors   weights for the torch engine, for recpo's own policies; codes/ with semantic ids
    bundle/items.parquet        item_index 1..V, item_id, the external id, and, where known, when an item may be listed
    bundle/manifest.json        sizes, feedback definition, origin, SHA-256 of every file and of itself; written last

The default engine, ONNX Runtime, imports neither torch nor lightning nor torchrec.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from recpo.base.errors import RecpoError
from recpo.base.feedback import FeedbackDefinition
from recpo.base.frames import Frame
from recpo.log.id_map import IdMap
from recpo.serving.attributes import ItemFilters, Wanted, filtered
from recpo.serving.encoded_histories import EncodedHistories
from recpo.serving.histories import HistoryReader
from recpo.serving.item_index import IndexRuntime
from recpo.serving.manifest import ITEMS, ONNX_PROGRAM, BundleFeatures, BundleManifest
from recpo.serving.recommending import (
    Moment,
    milliseconds,
    recommend_lists,
    score_candidates,
    validate_k,
)
from recpo.serving.runtimes import CPU_PROVIDER, EngineName, OnnxRuntime, Runtime, validate_engine


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
        cls, path: Path | str, engine: EngineName = "onnx", threads: int = 0, provider: str = CPU_PROVIDER
    ) -> Bundle:
        """Verifies every checksum, then loads the bundle. Loading runs no code of the bundle; see ``docs/security.md``.

        Args:
            path: directory written by ``recpo export``.
            engine: ``onnx`` (ONNX Runtime, without torch) or ``torch`` (recpo's own policy, which can also score
                candidates).
            threads: threads of ONNX Runtime, 0 = one per core.
            provider: execution provider of ONNX Runtime (``onnxruntime.get_available_providers()``). The CPU runs
                operations that it does not support.

        Raises:
            RecpoError: an unknown engine or provider, or a bundle that is missing, incomplete, altered, or of another
                format version.
        """
        root, engine = Path(path), validate_engine(engine)
        manifest = BundleManifest.read(root)
        items = IdMap.load(root / ITEMS)
        if len(items) != manifest.num_items:
            raise RecpoError(
                f"{root / ITEMS} has {len(items)} items, the program {manifest.num_items}: export again",
                code="mismatch",
                field=ITEMS,
            )
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
    def features(self) -> BundleFeatures:
        """The fitted features that the policy reads."""
        return BundleFeatures.load(self.root, self.manifest.features, self.manifest.behaviors)

    @cached_property
    def filters(self) -> ItemFilters | None:
        """The attributes for ``allow`` and ``deny``; None = the bundle was exported without attributes."""
        return ItemFilters.load(self.root, self.items)

    @property
    def reader(self) -> HistoryReader:
        """Reads histories for this policy."""
        manifest, known = self.manifest, self.features
        parts = known.behaviors, known.user, known.context
        return HistoryReader(
            self.items, manifest.feedback, manifest.max_history, manifest.reads_timestamps, *parts, manifest.repeats
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
        allow: Wanted | None = None,
        deny: Wanted | None = None,
        at: Moment | None = None,
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
                with ``available_from <= at < available_until`` are listed. None = now.

        Returns:
            ``user_id``, ``rank`` from 1, ``item_id``, ``score`` (natural-log probability; with an index, up to a
            constant per user). ``attrs["counts"]`` reports what was left out (``ServingCounts``).

        Raises:
            RecpoError: a column is missing, has a wrong type or impossible values; or k is not an integer in its range.
        """
        return recommend_lists(
            self.runtime,
            self.reader,
            histories,
            k=k,
            exclude=exclude,
            users=users,
            user_features=user_features,
            context=context,
            allowed=filtered(self.filters, allow, deny),
            at=at,
        ).to_pandas()

    def recommend_one(
        self,
        events: Sequence[Mapping[str, Any]],
        k: int | None = None,
        exclude: Sequence[Any] = (),
        *,
        user: Mapping[str, Any] | None = None,
        context: Mapping[str, Any] | None = None,
        allow: Wanted | None = None,
        deny: Wanted | None = None,
        at: Moment | None = None,
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
            at: see ``recommend``.

        Returns:
            Pairs of external item id and natural-log probability (with an index, up to a constant), best first.

        Raises:
            RecpoError: see ``recommend``.
        """
        k = validate_k(self.k if k is None else k, self.k)
        inputs = self.reader.read_request(events, exclude, user, context, milliseconds(at))
        allowed = filtered(self.filters, allow, deny)
        return self.ranked(inputs if allowed is None else inputs._replace(allowed=allowed[None]), k)

    def ranked(self, inputs: EncodedHistories, k: int) -> list[tuple[Any, float]]:
        """``recommend_one`` for a history that is already encoded, ``B = 1``."""
        top_items, scores = self.runtime.recommend(inputs, k)
        listed = top_items[0] > 0
        items = self.items.listed(top_items[0][listed])
        return list(zip(items, scores[0][listed].tolist(), strict=True))

    def score(
        self,
        histories: Frame,
        candidates: Frame,
        *,
        user_features: Frame | None = None,
        context: Frame | None = None,
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
        served = score_candidates(
            self.runtime, self.reader, histories, candidates, user_features=user_features, context=context
        )
        return served.to_pandas()


def load_runtime(
    root: Path, manifest: BundleManifest, engine: EngineName, threads: int = 0, provider: str = CPU_PROVIDER
) -> Runtime:
    """The engine of a bundle whose files are already verified."""
    if engine != "onnx" and provider != CPU_PROVIDER:
        raise RecpoError(
            f"provider is {provider!r}, which is for engine=onnx, not for engine={engine}: leave it out",
            code="unused_option",
            field="provider",
        )
    if engine == "torch":
        from recpo.serving.runtimes import PolicyRuntime
        from recpo.serving.saved_policy import load_policy

        return PolicyRuntime(load_policy(root, manifest), manifest.k, manifest.reads)
    if manifest.index is not None:
        return IndexRuntime(root, manifest, threads=threads, provider=provider)
    return OnnxRuntime(root / ONNX_PROGRAM, manifest, threads=threads, provider=provider)
