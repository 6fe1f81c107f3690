"""The verb ``compare``: compares a new bundle with the old one on logged requests, before a swap."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import KW_ONLY, asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from recpo.artifacts.checksums import sha256
from recpo.artifacts.outputs import output_directory
from recpo.base.errors import ClosedUnitInterval, NonNegativeFloat, OpenUnitInterval, PositiveInt, RecpoError
from recpo.base.types import EvaluationBatch, Recommendations
from recpo.batches.slates import HeldOutHistories
from recpo.evaluation.candidates import HeldOut, begin_of, has_positions
from recpo.evaluation.comparison import NEW, OLD, Comparison, agreement, comparison_document, gate
from recpo.evaluation.contenders import Contender
from recpo.evaluation.held_out_pass import ValueOptions
from recpo.evaluation.measures import Recommender
from recpo.evaluation.reading import Document
from recpo.log.id_map import IdMap
from recpo.log.prepared import Prepared
from recpo.serving.bundle import Bundle
from recpo.serving.histories import ITEM_ID, USER_ID, ServingCounts
from recpo.serving.manifest import MANIFEST
from recpo.verbs.evaluate import evaluate
from recpo.verbs.verb import WritingVerb, function_of


@dataclass(frozen=True)
class Compare(ValueOptions, WritingVerb[Comparison]):
    """Compares a new bundle with the old one on logged requests: agreement, value, ranking, and limits for a swap.

    Both bundles list k items for every held-out user of the prepared data. They read the raw events before the period
    as a server does, each with its own catalog and feedback cutoffs. Lists are compared by external item id. Value and
    ranking metrics are those of ``evaluate``, paired over users. The document::

        setting         prepared, split, k, persistence, off_policy, reward, requests
        bundles         {old, new: {path, checksum, origin, items, k}}
        items           {shared, only_old, only_new, old_not_in_data, new_not_in_data}
        agreement       {overlap@k, rank_biased_overlap@k, kendall_tau@k, equal_lists@k: {mean, half_width, n}}
        lists           {old, new: {coverage@k, gini@k, short_lists, places_of_items_not_in_data, and the counts of
                        ``ServingCounts``}}
        ranking         {metric: {old, new: {mean, half_width, n}, difference: {mean, half_width, n}}}, new - old; with
                        the metrics of ``measures``
        value           {estimator: {old, new: {value, low, high}, difference: {value, low, high}}} of the first k
                        places, bootstrap intervals; null = no propensities
        gate            {max_loss, min_overlap, measure, lower_end, overlap, failures: [sentence]}
        warnings        [sentence]

    Raises:
        RecpoError: no bundle; ids, feedback or list lengths that do not fit; options out of range; ``out`` exists.
    """

    first_day: ClassVar = ("old", "new", "prepared", "out", "k", "max_loss", "min_overlap")

    old: Bundle | Path | str
    """the bundle that serves, or its directory"""
    new: Bundle | Path | str
    """the bundle that will replace it, or its directory"""
    prepared: Prepared | Path | str
    """prepared data with the logged requests in a held-out period, or its directory"""
    _: KW_ONLY
    out: Path | str | None = None
    """output directory for ``compare.json``; null = keep the comparison in memory only"""
    k: PositiveInt = 10
    """list length, at most that of both bundles"""
    persistence: OpenUnitInterval = 0.9
    """probability that a reader continues to the next place, for the rank-biased overlap"""
    max_loss: NonNegativeFloat | None = None
    """the new bundle fails if a larger loss cannot be ruled out, that is, if the lower end of the paired 95 %
    interval of new - old is below ``-max_loss``. The interval is that of the value (SNIPS, top k) if the value is
    estimated, otherwise of NDCG; null = no such limit"""
    min_overlap: ClosedUnitInterval | None = None
    """the new bundle fails if the mean overlap of the lists is below this; null = no such limit"""

    def execute(self) -> Comparison:
        """Asks both bundles for lists of the same users, and compares these."""
        data = Prepared.open(self.prepared)
        bundles = {OLD: Bundle.open(self.old), NEW: Bundle.open(self.new)}
        for name, bundle in bundles.items():
            self._validate(name, bundle, data)
        inputs = [data, *bundles.values()]
        writes = partial(output_directory, kind="comparison", overwrite=self.overwrite, inputs=inputs)
        with nullcontext() if self.out is None else writes(self.out) as target:
            numbers, counts = _shared_numbers(data.item_ids(), bundles)
            served = {name: _ServedBundle(name, one, data, self.split, numbers[name]) for name, one in bundles.items()}
            options = vars(self.part(ValueOptions))  # value and ranking of the first k
            options |= {"off_policy": None if self.off_policy is None else replace(self.off_policy, top_k=(self.k,))}
            options |= {"ks": [self.k], "baselines": False, "segments": False, "device": "cpu"}
            evaluated = evaluate(data, [one.contender for one in served.values()], **options).document
            old, new = (torch.cat(one.lists) for one in served.values())
            agreed = agreement(old, new, self.k, self.persistence)
            document = comparison_document(evaluated, self.k, agreed)
            document["setting"] |= {"persistence": self.persistence, "reward": asdict(self.reward)}
            document["setting"] |= {"off_policy": None if self.off_policy is None else asdict(self.off_policy)}
            document["bundles"] = {name: one.facts() for name, one in served.items()}
            document["items"] = counts
            for name, one in served.items():
                document["lists"][name] |= one.counts()
                document["warnings"] += one.warnings()
            document["gate"] = gate(document, self.k, self.max_loss, self.min_overlap)
            if target is not None:
                Comparison.write_facts(target, document)
        return Comparison(document, None if self.out is None else Path(self.out))

    def _validate(self, name: str, bundle: Bundle, data: Prepared) -> None:
        """Raises if a bundle cannot list k items, or reads feedback levels from other columns."""
        longest = min(bundle.k, data.num_items)
        if self.k > longest:
            raise RecpoError(
                f"compare: k is {self.k}, expected 1 to {longest}, as the {name} bundle {bundle.root} serves lists of "
                f"up to {bundle.k} and the data have {data.num_items} items: choose another k, or export with a larger "
                "one",
                code="mismatch",
                field="k",
            )
        if bundle.feedback.levels_from != data.feedback.levels_from:
            raise RecpoError(
                f"compare: the {name} bundle {bundle.root} reads feedback levels from {bundle.feedback.levels_from}, "
                f"and {data.root} has them from {data.feedback.levels_from}: prepare the log as that of the bundle",
                code="mismatch",
                field=name,
            )


compare = function_of(Compare)


def _shared_numbers(known: IdMap, bundles: Mapping[str, Bundle]) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """One numbering of all items: those of the data are 1..V, as in the shards; others of the bundles follow.

    Returns:
        For each bundle, ``[V_b + 1]``: the shared number of each of its items, 0 for 0. And how many items are in both
        bundles, in one of them, and not in the data.
    """
    external = {name: one.items.to_external(np.arange(1, len(one.items) + 1)) for name, one in bundles.items()}
    places = {name: known.to_internal(ids) for name, ids in external.items()}
    strange = {name: ids.filter(pa.array(places[name] == 0)).to_pylist() for name, ids in external.items()}
    # as Python values, because integers of different widths, or short and long strings, are the same ids
    further = dict.fromkeys(value for ids in strange.values() for value in ids)
    further_numbers = {value: number for number, value in enumerate(further, len(known) + 1)}
    for name, place in places.items():
        place[place == 0] = [further_numbers[value] for value in strange[name]]
    old, new = (set(one.tolist()) for one in places.values())
    counts = {"shared": len(old & new), "only_old": len(old - new), "only_new": len(new - old)}
    counts |= {f"{name}_not_in_data": len(ids) for name, ids in strange.items()}
    return {name: np.concatenate([[0], place]) for name, place in places.items()}, counts


class _ServedBundle:
    """A bundle as a contender that reads the raw events of held-out users, as a server does; it keeps its lists.

    Args:
        name: which of the compared bundles it is.
        bundle: the bundle.
        data: prepared data with the logged requests.
        split: held-out period.
        numbers: its items in the shared numbering, see ``_shared_numbers``.

    Attributes:
        lists: ``[B, k]`` for every batch so far, in the order of users and in the shared numbering.
    """

    def __init__(self, name: str, bundle: Bundle, data: Prepared, split: HeldOut, numbers: np.ndarray) -> None:
        self.lists: list[Tensor] = []
        self._name, self._bundle, self._numbers, self._known = name, bundle, numbers, data.item_ids()
        self._histories, self._served = HeldOutHistories(data, split, bundle.manifest.reads.batches), ServingCounts()
        # when the bundle's items must be available: the start of the period, or the last of the users' first held-out
        # events
        self._at = None if has_positions(data) else int(np.max(begin_of(data, split)))

    @property
    def contender(self) -> Contender:
        """The contender of the evaluation."""
        bundle, name = self._bundle, f"the {self._name} bundle"
        recommender = Recommender(
            recommend_to_batch=self._recommend,
            name=name,
            scores_are_logp=bundle.scores_are_log_probabilities,
            max_history=bundle.manifest.max_history,
        )
        return Contender(self._name, "bundle", lambda: recommender, {"kind": "bundle", "path": str(bundle.root)})

    def _recommend(self, batch: EvaluationBatch, k: int, exclude: Tensor) -> Recommendations:
        """The lists as the evaluation reads them. An item that is not in the data leaves an empty place."""
        asked, reader = batch.user_ids.numpy(), self._bundle.reader
        row, column = np.nonzero(exclude.numpy())
        past = pa.table({USER_ID: asked[row], ITEM_ID: self._known.to_external(exclude.numpy()[row, column])})
        events, now = self._histories.events(asked), self._histories.requests(asked)
        people = self._histories.user_features(asked)
        read = reader.read(events, exclude=past, users=asked, user_features=people, context=now, at=self._at)
        ((_, inputs),) = read.batches(len(asked))
        top_items, scores = self._bundle.runtime.recommend(inputs, k)
        numbers = torch.from_numpy(self._numbers[top_items])
        self.lists.append(numbers.int())
        self._served += replace(read.counts, short_lists=int((numbers == 0).any(1).sum()))
        known = numbers <= len(self._known)
        found = torch.from_numpy(scores.copy()).masked_fill(~known | (numbers == 0), -torch.inf)
        return Recommendations(numbers * known, found)

    def counts(self) -> dict[str, int]:
        """Counts of served and skipped events so far."""
        # past items outside the bundle's catalog cannot be listed anyway
        counts = {name: value for name, value in asdict(self._served).items() if not name.startswith("unknown_")}
        strange = sum(int((one > len(self._known)).sum()) for one in self.lists)
        return counts | {"unknown_items": self._served.unknown_items, "places_of_items_not_in_data": strange}

    def warnings(self) -> list[str]:
        """Warnings about events and items that it could not read or list."""
        found, counts = [], self.counts()
        if skipped := counts["unknown_items"]:
            found.append(
                f"{self._name}: skipped {skipped:,} of {counts['events']:,} events, whose items it does not know"
            )
        if strange := counts["places_of_items_not_in_data"]:
            found.append(
                f"{self._name}: {strange:,} places of its lists hold items that the prepared data do not know: they "
                "are compared in the agreement, and earn nothing in ranking and value"
            )
        return found

    def facts(self) -> Document:
        """What identifies the bundle, for the document."""
        bundle = self._bundle
        return {
            "path": str(bundle.root),
            "checksum": sha256(bundle.root / MANIFEST),
            "origin": dict(bundle.manifest.origin),
            "items": len(bundle.items),
            "k": bundle.k,
        }
