"""One pass over the held-out users for every contender, with the same data and options."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import torch
from tqdm import tqdm

from recpo.base.errors import NonNegativeInt, PositiveInt, validate_ranges
from recpo.base.features import Reads
from recpo.base.frames import Frame
from recpo.base.types import EvaluationBatch, on_device
from recpo.batches.slates import evaluation_batches
from recpo.evaluation.beyond_accuracy import BeyondAccuracy, ItemFacts, ItemFeatures, item_facts
from recpo.evaluation.candidates import CandidateTable, HeldOut, candidates_of
from recpo.evaluation.catalog_ranking import Gain, Ranking, RankingResult, evaluate_ranking, validate_ks
from recpo.evaluation.contenders import Contender, Kind
from recpo.evaluation.measures import BehaviorRates, Direction, Measure, Recommender
from recpo.evaluation.off_policy.estimators import OffPolicyOptions
from recpo.evaluation.off_policy.measure import OffPolicySetting, off_policy_setting, propensity_share
from recpo.evaluation.off_policy.results import OffPolicyResult
from recpo.evaluation.segments import NewItems, item_ages, item_segments, new_items
from recpo.evaluation.true_rewards import TrueRewards, true_rewards
from recpo.log.prepared import Prepared
from recpo.rewards.rewards import LoggedReward

_EXCLUDED_AT_ONCE = 1 << 24  # size of a users x items matrix: 128 MiB
_NO_PROPENSITIES = (
    "The log of this period has no propensities, so there are no off-policy values, and the metrics give no credit for "
    "items that were never shown. Map the log's propensity column, or set off_policy.propensity to uniform or "
    "estimated."
)


@dataclass(frozen=True, kw_only=True)
class PassOptions:
    """How a pass over held-out users is made."""

    batch_size: PositiveInt = 512
    """users scored at once, or fewer if the items of so many users would not fit into memory"""
    max_users: PositiveInt | None = None
    """number of held-out users, evenly spaced, if the period has more; null = all"""
    progress: bool = False
    """show progress bars on a terminal"""

    def __post_init__(self) -> None:
        validate_ranges(self)


@dataclass(frozen=True, kw_only=True)
class ValueOptions(PassOptions):
    """What contenders are measured by on held-out users, besides the ranking metrics."""

    split: HeldOut = "test"
    """held-out period"""
    off_policy: OffPolicyOptions | None = OffPolicyOptions()  # noqa: RUF009  frozen
    """how the value is estimated from the log; null = not at all. With logged propensities it is left out if the period
    has none"""
    reward: LoggedReward = LoggedReward()  # noqa: RUF009  frozen
    """reward of logged items, for the off-policy value"""
    measures: Sequence[Measure] = ()
    """metrics of your own, by class path: subclasses of ``recpo.Measure`` (docs/metrics.md). The tables, the report and
    the paired differences show them"""


@dataclass(frozen=True, kw_only=True)
class RankingOptions(ValueOptions):
    """How held-out users are ranked, and what is known about the items and the users."""

    ks: Sequence[PositiveInt] = (10, 50)
    """list lengths; the tables show the first"""
    repeats: bool | None = None
    """whether lists may have items of a user's past. Otherwise their held-out events are no targets. null = as the
    prepared data say"""
    gain: Gain = "linear"
    """gain of the graded NDCG: the label (linear), or 0, 1, 3, 7 for its quarters (exponential)"""
    segments: bool = True
    """also report by length of the history and by popularity, duration and age of the items"""
    bootstrap_resamples: NonNegativeInt = 0
    """number of resamples for bootstrap intervals over users of every per-user metric; 0 = none"""
    candidates: CandidateTable | Frame | str | Path | None = None
    """items that could be listed at the start of the period: a Parquet file or frame of items (item_id and optionally
    available_from and available_until), a CandidateTable with other column names, or the word all. null = the times of
    the prepared data, or every item if the data have no times. Items that were not available are in no list and are no
    targets"""
    item_features: ItemFeatures | None = None
    """tags or vectors of the items, for diversity and calibration"""
    truth: Path | str | None = None
    """directory written by ``recpo simulate``; adds the true expected reward and the true probability of a dislike
    (means over the first k places, on the first day of the period), the oracle, which lists every user's best items,
    and each contender's share of the oracle's gain over the pre-trained policy"""

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_ks(self.ks)


def held_out_users(data: Prepared, split: HeldOut, most: int | None = None) -> int:
    """Number of users of a period, at most ``most``; None = all."""
    users = sum(int(shard["users"]) for shard in data.manifest["shards"][split])
    return users if most is None else min(users, most)


def held_out_batches(
    data: Prepared,
    split: HeldOut,
    max_history: int,
    reads: Reads,
    options: PassOptions,
    device: torch.device,
    title: str,
    repeats: bool | None = None,
) -> Iterator[EvaluationBatch]:
    """The held-out users of a period on ``device``, with a progress bar on a terminal.

    Args:
        data: prepared data.
        split: the period.
        max_history: number of history events.
        reads: what the batches contain besides items, feedback and times.
        options: number of users at once, and whether a bar is shown.
        device: where the batches are needed.
        title: label of the progress bar.
        repeats: whether lists may have items of the past; None = as the data say.
    """
    users = held_out_users(data, split, options.max_users)
    hidden = None if options.progress else True  # None: hidden if there is no terminal
    with tqdm(total=users, desc=title, unit="user", disable=hidden, leave=False) as bar:
        batches = evaluation_batches(data, split, max_history, options.batch_size, reads, repeats, options.max_users)
        for batch in batches:
            yield on_device(batch, device)
            bar.update(len(batch.exclude))


class Evaluated(NamedTuple):
    """What one pass found about a contender.

    Attributes:
        name: unique among the contenders.
        kind: the kind of contender.
        result: its metrics.
        value: its off-policy value; None = not estimated.
        further: the metrics of the user's own measures.
        facts: its origin, and how much history it reads.
        curves: its training curves.
    """

    name: str
    kind: Kind
    result: RankingResult
    value: OffPolicyResult | None = None
    further: Mapping[str, Direction] = MappingProxyType({})
    facts: Mapping[str, Any] = MappingProxyType({})
    curves: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class HeldOutPass:
    """The data and options that all contenders share."""

    data: Prepared
    options: RankingOptions
    facts: ItemFacts
    ranking: Ranking
    new_items: NewItems
    truth: TrueRewards | None
    off_policy: OffPolicySetting | None
    device: torch.device

    @classmethod
    def of(cls, data: Prepared, options: RankingOptions, device: torch.device) -> Self:
        """Reads what all contenders share, and fits the reward model of the off-policy values.

        Raises:
            RecpoError: the candidates, the item features or the truth cannot be read or are those of other data, or no
                training event has a reward.
        """
        available = candidates_of(data, options.split, options.candidates)
        truth = None if options.truth is None else true_rewards(Path(options.truth), data, options.split, options.ks)
        facts = item_facts(data, options.item_features)
        is_new = new_items(facts.train_count, None if available is None else available.is_candidate)
        fresh = NewItems(is_new, options.ks, truth)
        how, split, value = options.off_policy, options.split, None
        if how is not None and (how.propensity != "logged" or propensity_share(data, split)):
            value = off_policy_setting(how, data, split, options.reward, options.ks)
        ranking = Ranking(
            num_items=data.num_items,
            ks=options.ks,
            gain=options.gain,
            by_history=options.segments,
            item_segments=item_segments(facts, item_ages(data, options.split, available)) if options.segments else [],
            candidates=available,
            new_items_among=fresh.others,
            depth=0 if value is None else value.options.depth or 0,
        )
        return cls(data, options, facts, ranking, fresh, truth, value, device)

    @property
    def repeats(self) -> bool:
        """Whether lists may have items of a user's past."""
        return self.data.repeats if self.options.repeats is None else self.options.repeats

    @property
    def warnings(self) -> list[str]:
        """Warnings about what all contenders share."""
        return [_NO_PROPENSITIES] if self.options.off_policy is not None and self.off_policy is None else []

    def evaluate(self, contender: Contender) -> Evaluated:
        """One pass over the held-out users. The contender is loaded for it and released afterwards."""
        recommender = contender.load()
        is_estimated = self.off_policy is not None and contender.kind != "oracle"
        value = self.off_policy.measure(recommender.policy) if self.off_policy is not None and is_estimated else None
        behaviors, further = self.data.behaviors, [deepcopy(measure) for measure in self.options.measures]
        optional: list[Measure | None] = [
            self.truth,
            value,
            self.new_items if self.new_items.is_new.any() else None,
            BehaviorRates(behaviors, max(self.options.ks)) if behaviors else None,
        ]
        known = [BeyondAccuracy(self.facts, self.options.ks), *(one for one in optional if one is not None), *further]
        batches = self._batches(recommender, contender.name)
        result = evaluate_ranking(recommender, batches, self.ranking, known)
        result = replace(result, counts={**result.counts, **recommender.counts()})
        estimated = None if value is None else value.result()
        own = {name: by.direction for name, by in result.measured_by.items() if any(by is one for one in further)}
        facts = dict(contender.facts)
        if facts and contender.kind != "lists":
            facts["max_history"] = recommender.max_history
        return Evaluated(contender.name, contender.kind, result, estimated, own, facts, contender.curves)

    def one_list(self, contender: Contender, k: int) -> tuple[int, list[int]]:
        """The first held-out user and the items of the user's list; internal ids."""
        recommender = contender.load()
        batch = next(self._batches(recommender, contender.name, users=1))
        candidates = self.ranking.candidates
        absent = None if candidates is None else candidates.unavailable(batch.user_ids)
        with torch.inference_mode():
            items = recommender.lists(batch, k, absent).item_ids[0]
        return int(batch.user_ids[0]), items[items > 0].tolist()

    def _batches(self, recommender: Recommender, name: str, users: int | None = None) -> Iterator[EvaluationBatch]:
        """Batches of ``users``; None = of the batch size, reduced if many items are excluded for every user."""
        candidates, others = self.ranking.candidates, self.ranking.new_items_among
        width = (0 if candidates is None else candidates.most_unavailable) + (0 if others is None else len(others))
        users = users or max(1, min(self.options.batch_size, _EXCLUDED_AT_ONCE // max(1, width)))
        options = replace(self.options, batch_size=users)
        split, reads = self.options.split, Reads(behaviors=bool(self.data.behaviors)) | recommender.reads
        length, title = recommender.max_history, f"evaluate {name}"
        return held_out_batches(self.data, split, length, reads, options, self.device, title, self.repeats)
