"""The verb ``compare``: compares a new bundle with the old one on logged requests, before a swap."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import KW_ONLY, asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch

from recpo.artifacts import output_directory
from recpo.base.errors import RecpoError
from recpo.base.ranges import ClosedUnitInterval, NonNegativeFloat, OpenUnitInterval, PositiveInt
from recpo.evaluation.comparison import NEW, OLD, Comparison, agreement, comparison_document, gate
from recpo.evaluation.contenders import Contender
from recpo.evaluation.held_out_pass import ValueOptions
from recpo.evaluation.reading import Document
from recpo.log.prepared import Prepared
from recpo.serving.bundle import Bundle
from recpo.verbs.contenders import ServedBundle, SharedItems
from recpo.verbs.evaluate import evaluate
from recpo.verbs.verb import Verb, function_of


@dataclass(frozen=True)
class Compare(ValueOptions, Verb[Comparison]):
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
    overwrite: bool = False
    """replace ``out`` if it exists"""

    def execute(self) -> Comparison:
        """Asks both bundles for lists of the same users, and compares these."""
        data = Prepared.open(self.prepared)
        given = {OLD: self.old, NEW: self.new}
        bundles = {name: one if isinstance(one, Bundle) else Bundle.open(one) for name, one in given.items()}
        for name, bundle in bundles.items():
            self._validate(name, bundle, data)
        inputs = [data.root, *(bundle.root for bundle in bundles.values())]
        sealed = Comparison.sealed
        writes = partial(output_directory, kind="comparison", overwrite=self.overwrite, inputs=inputs, sealed=sealed)
        with nullcontext() if self.out is None else writes(self.out) as target:
            items = SharedItems.of(data.item_ids(), bundles)
            served = {
                name: ServedBundle(name, bundle, data, self.split, items.numbers[name])
                for name, bundle in bundles.items()
            }
            evaluated = self._evaluated(data, [one.contender for one in served.values()])
            old, new = (torch.cat(one.lists) for one in served.values())
            agreed = agreement(old, new, self.k, self.persistence)
            document = comparison_document(evaluated, self.k, agreed)
            document["setting"] |= {"persistence": self.persistence, "reward": asdict(self.reward)}
            document["setting"] |= {"off_policy": None if self.off_policy is None else asdict(self.off_policy)}
            document["bundles"] = {name: one.facts() for name, one in served.items()}
            document["items"] = items.counts
            for name, one in served.items():
                document["lists"][name] |= one.counts()
                document["warnings"] += one.warnings()
            document["gate"] = gate(document, self.k, self.max_loss, self.min_overlap)
            if target is not None:
                Comparison.write_facts(target, document)
        return Comparison(document, None if self.out is None else Path(self.out))

    def _evaluated(self, data: Prepared, contenders: list[Contender]) -> Document:
        """The evaluation of both bundles: value and ranking of the first k."""
        options = vars(self.part(ValueOptions))
        options |= {"off_policy": None if self.off_policy is None else replace(self.off_policy, top_k=(self.k,))}
        return evaluate(
            data, contenders, ks=[self.k], baselines=False, segments=False, device="cpu", **options
        ).document

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
