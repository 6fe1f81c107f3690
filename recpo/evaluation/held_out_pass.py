"""One pass over the held-out users for every contender, with the same data and options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from tqdm import tqdm

from recpo import __version__
from recpo.base.features import Reads
from recpo.base.ranges import NonNegativeInt, PositiveInt, validate_ranges
from recpo.base.types import EvaluationBatch
from recpo.batches.datamodule import evaluation_batches
from recpo.evaluation.beyond_accuracy import BeyondAccuracy, ItemFacts
from recpo.evaluation.candidates import Candidates
from recpo.evaluation.catalog_ranking import Gain, evaluate_ranking, validate_ks
from recpo.evaluation.contenders import Contender
from recpo.evaluation.document import ContenderResult, evaluation_document, logging_policy
from recpo.evaluation.measures import BehaviorRates, Direction, Further, Measure
from recpo.evaluation.off_policy.measure import OffPolicySetting
from recpo.evaluation.off_policy.results import LOGGING_POLICY, OffPolicyResult
from recpo.evaluation.reading import Document
from recpo.evaluation.segments import ItemSegment, NewItems, history_length
from recpo.evaluation.true_rewards import TrueRewards
from recpo.log.prepared import Prepared

HeldOut = Literal["valid", "test"]

_EXCLUDED_AT_ONCE = 1 << 24  # size of a users x items matrix: 128 MiB


class Evaluated(NamedTuple):
    """What one pass found: the metrics, the off-policy value, and how much history the contender reads.

    ``further`` are the metrics of the user's own measures.
    """

    contender: ContenderResult
    value: OffPolicyResult | None
    max_history: int
    further: dict[str, Direction]


@dataclass(frozen=True, kw_only=True)
class RankingOptions:
    """How held-out users are ranked."""

    split: HeldOut = "test"
    """held-out period"""
    ks: Sequence[PositiveInt] = (10, 50)
    """list lengths; the tables show the first"""
    exclude_past: bool = True
    """exclude the items of a user's past from the lists, and their held-out events from the targets"""
    gain: Gain = "linear"
    """gain of the graded NDCG: the label (linear), or 0, 1, 3, 7 for its quarters (exponential)"""
    segments: bool = True
    """also report by length of the history and by popularity, duration and age of the items"""
    bootstrap_resamples: NonNegativeInt = 0
    """number of resamples for bootstrap intervals over users of every per-user metric; 0 = none"""
    batch_size: PositiveInt = 512
    """users scored at once"""
    measures: Sequence[Measure] = ()
    """metrics of your own, by class path: subclasses of ``recpo.Measure`` (docs/metrics.md). The tables, the report and
    the paired differences show them"""
    progress: bool = False
    """show progress bars on a terminal"""

    def __post_init__(self) -> None:
        validate_ranges(self)
        validate_ks(self.ks)


@dataclass(frozen=True)
class HeldOutPass:
    """The data and options that all contenders share."""

    data: Prepared
    options: RankingOptions
    facts: ItemFacts
    item_segments: Sequence[ItemSegment]
    candidates: Candidates | None
    new_items: NewItems
    truth: TrueRewards | None
    off_policy: OffPolicySetting | None
    device: torch.device

    def evaluate(self, contender: Contender) -> Evaluated:
        """One pass over the held-out users. The contender is loaded for it and released afterwards."""
        recommender, max_history, policy, counts, reads = contender.load()
        estimated_too = self.off_policy is not None and contender.kind != "oracle"
        value = self.off_policy.measure(policy) if self.off_policy is not None and estimated_too else None
        measures: list[Measure] = [BeyondAccuracy(self.facts, self.options.ks)]
        has_new = bool(self.new_items.is_new.any())
        optional = (self.truth, value, self.new_items if has_new else None)
        measures += [measure for measure in optional if measure is not None]
        further = [Further(measure) for measure in self.options.measures]
        measures += [BehaviorRates(self.data.behaviors, max(self.options.ks))] * bool(self.data.behaviors)
        reads = Reads(behaviors=bool(self.data.behaviors)) | reads
        result = evaluate_ranking(
            recommender,
            self._batches(max_history, contender.name, reads),
            num_items=self.data.num_items,
            ks=self.options.ks,
            exclude_past=self.options.exclude_past,
            gain=self.options.gain,
            measures=[*measures, *further],
            user_segments=[history_length()] if self.options.segments else [],
            item_segments=self.item_segments,
            candidates=self.candidates,
            new_items_among=self.new_items.others if has_new else None,
        )
        result = replace(result, counts={**result.counts, **counts()})
        estimated = None if value is None else value.result()
        off_policy = (
            [] if estimated is None else [e.as_json() for e in estimated.estimates if e.target != LOGGING_POLICY]
        )
        own = {name: direction for measure in further for name, direction in measure.names.items()}
        found = ContenderResult(contender.name, contender.kind, result, off_policy)
        return Evaluated(found, estimated, max_history, own)

    def _batches(self, max_history: int, name: str, reads: Reads) -> Iterator[EvaluationBatch]:
        users = sum(shard["users"] for shard in self.data.manifest["shards"][self.options.split])
        hidden = None if self.options.progress else True  # None: hidden if there is no terminal
        with tqdm(total=users, desc=f"evaluate {name}", unit="user", disable=hidden, leave=False) as bar:
            for batch in evaluation_batches(
                self.data.root, self.options.split, max_history, self._users_at_once, reads
            ):
                yield move_data_to_device(batch, self.device)
                bar.update(len(batch.exclude))

    @property
    def _users_at_once(self) -> int:
        """The batch size, reduced if many items are excluded for every user."""
        absent = 0 if self.candidates is None else self.candidates.most_unavailable
        others = self.new_items.others if self.new_items.is_new.any() else None
        width = absent + (0 if others is None else len(others))
        return max(1, min(self.options.batch_size, _EXCLUDED_AT_ONCE // max(1, width)))

    def document(
        self,
        contenders: Sequence[Contender],
        evaluated: Sequence[Evaluated],
        setting: dict[str, Any],
        warnings: Sequence[str],
    ) -> Document:
        """The document: all results, and every option and input that they depend on, including ``setting``."""
        results = [one.contender for one in evaluated]
        values = {one.contender.name: one.value for one in evaluated if one.value is not None}
        described = {
            "recpo_version": __version__,
            "split": self.options.split,
            "ks": list(self.options.ks),
            "positive_threshold": self.data.feedback.rule.positive_threshold,
            "exclude_past": self.options.exclude_past,
            "gain": self.options.gain,
            "num_items": self.data.num_items,
            "catalog_checksum": self.data.catalog_checksum,
            "max_context": self.data.manifest["max_context"],
            "further_metrics": {name: value for one in evaluated for name, value in one.further.items()},
        }
        return evaluation_document(
            [*results, *logging_policy(results[0].result, values, self.truth)],
            values,
            data=self.data,
            runs={
                contender.name: {
                    **contender.facts,
                    **({} if contender.kind == "lists" else {"max_history": one.max_history}),
                }
                for contender, one in zip(contenders, evaluated, strict=True)
                if contender.facts
            },
            training={contender.name: contender.curves for contender in contenders if contender.curves},
            setting=described | setting,
            candidates=None if self.candidates is None else self.candidates.as_json(),
            new_items=self.new_items.as_json(),
            warnings=warnings,
            bootstrap_resamples=self.options.bootstrap_resamples,
        )
