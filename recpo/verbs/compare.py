"""The verb ``compare``: compares a new bundle with the old one on logged requests, before a swap."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import KW_ONLY, asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch

from recpo.artifacts import output_directory, write_json
from recpo.base.ranges import ClosedUnitInterval, NonNegativeFloat, OpenUnitInterval, PositiveInt
from recpo.evaluation.agreement import agreement
from recpo.evaluation.estimates import estimate
from recpo.evaluation.held_out_pass import HeldOut
from recpo.evaluation.off_policy.options import OffPolicyOptions
from recpo.log.prepared import Prepared
from recpo.rewards.rewards import LoggedReward
from recpo.serving.bundle import Bundle
from recpo.verbs.comparison import (
    COMPARE,
    NEW,
    OLD,
    Answers,
    Comparison,
    SharedItems,
    bundle_facts,
    comparison_document,
    contender_of,
    gate,
    unread_warnings,
    validate_bundle,
)
from recpo.verbs.evaluate import evaluate
from recpo.verbs.verb import Verb, function_of


@dataclass(frozen=True)
class Compare(Verb[Comparison]):
    """Compares a new bundle with the old one on logged requests: agreement, value, ranking, and limits for a swap.

    Both bundles list k items for every held-out user of the prepared data. They read the raw events before the period
    as a server does, each with its own catalog and feedback cutoffs. Lists are compared by external item id. Value and
    ranking metrics are those of ``evaluate``, paired over users. The document::

        schema_version  1
        setting         prepared, split, k, persistence, off_policy, reward, requests
        bundles         {old, new: {path, checksum, origin, items, k}}
        items           {shared, only_old, only_new, old_not_in_data, new_not_in_data}
        agreement       {overlap@k, rank_biased_overlap@k, kendall_tau@k, equal_lists@k: {mean, half_width, n}}
        lists           {old, new: {coverage@k, gini@k, short_lists, places_of_items_not_in_data, and the counts of
                        ``ServingCounts``}}
        ranking         {metric: {old, new: {mean, half_width, n}, difference: {mean, half_width, n}}}, new - old
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
    split: HeldOut = "test"
    """held-out period"""
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
    off_policy: OffPolicyOptions | None = OffPolicyOptions()  # noqa: RUF009  frozen
    """how the value is estimated from the log; null = not at all. With logged propensities it is left out if the
    period has none"""
    reward: LoggedReward = LoggedReward()  # noqa: RUF009  frozen
    """reward of logged items, for the value"""
    batch_size: PositiveInt = 512
    """users ranked at once"""
    overwrite: bool = False
    """replace ``out`` if it exists"""
    progress: bool = False
    """show progress bars on a terminal"""

    def execute(self) -> Comparison:
        """Asks both bundles for lists of the same users, and compares these."""
        data = Prepared.open(self.prepared)
        bundles = {
            name: given if isinstance(given, Bundle) else Bundle.load(given)
            for name, given in ((OLD, self.old), (NEW, self.new))
        }
        for name, bundle in bundles.items():
            validate_bundle(name, bundle, data, self.k)
        with ExitStack() as stack:
            target = None
            if self.out is not None:
                inputs = [data.root, *(bundle.root for bundle in bundles.values())]
                target = stack.enter_context(
                    output_directory(
                        self.out, kind="comparison", overwrite=self.overwrite, inputs=inputs, sealed=[COMPARE]
                    )
                )
            items = SharedItems.of(data.item_ids(), bundles)
            answers = {
                name: Answers.of(bundle, items.numbers[name], data, self.split) for name, bundle in bundles.items()
            }
            evaluated = evaluate(
                data,
                [contender_of(name, bundles[name], answers[name]) for name in bundles],
                split=self.split,
                ks=[self.k],
                baselines=False,
                segments=False,
                off_policy=None if self.off_policy is None else replace(self.off_policy, top_k=(self.k,)),
                reward=self.reward,
                batch_size=self.batch_size,
                device="cpu",
                progress=self.progress,
            ).document
            agreed = agreement(torch.cat(answers[OLD].lists), torch.cat(answers[NEW].lists), self.k, self.persistence)
            document = comparison_document(
                evaluated, self.k, {name: estimate(values).as_json() for name, values in agreed.items()}
            )
            document["setting"] |= {"persistence": self.persistence, "reward": asdict(self.reward)}
            document["setting"] |= {"off_policy": None if self.off_policy is None else asdict(self.off_policy)}
            document["bundles"] = {name: bundle_facts(bundle) for name, bundle in bundles.items()}
            document["items"] = items.counts
            for name, one in answers.items():
                document["lists"][name] |= one.counts()
            document["warnings"] += unread_warnings(answers)
            document["gate"] = gate(document, self.k, self.max_loss, self.min_overlap)
            if target is not None:
                write_json(target / COMPARE, document)
        return Comparison(document, None if self.out is None else Path(self.out))


compare = function_of(Compare)
