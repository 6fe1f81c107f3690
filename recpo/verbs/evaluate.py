"""The verb ``evaluate``: full-catalog ranking and off-policy value of policies, bundles and baselines."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar

from recpo.artifacts import output_directory
from recpo.base.frames import Frame
from recpo.evaluation.baselines import BASELINES_DIRECTORY, BaselineCache
from recpo.evaluation.beyond_accuracy import ItemFeatures, item_facts
from recpo.evaluation.candidates import CandidateTable, candidates_of, table_of
from recpo.evaluation.contenders import (
    BASELINES,
    BaselineOptions,
    Contender,
    baseline,
    default_baselines,
    oracle,
    validate_names,
)
from recpo.evaluation.evaluation import SEALED, Evaluation
from recpo.evaluation.held_out_pass import HeldOutPass, RankingOptions
from recpo.evaluation.lists import Lists
from recpo.evaluation.off_policy.measure import OffPolicySetting, has_propensities, off_policy_setting
from recpo.evaluation.off_policy.options import OffPolicyOptions
from recpo.evaluation.segments import NewItems, item_age, item_ages, item_segments, new_items
from recpo.evaluation.true_rewards import true_rewards
from recpo.lists.reranking import Reranker, RerankOptions
from recpo.log.prepared import Prepared
from recpo.rewards.rewards import LoggedReward
from recpo.training.learned_reward import Checkpoint
from recpo.verbs.contenders import Named, contenders_of, directory_of, reranked_contenders
from recpo.verbs.devices import compute_device
from recpo.verbs.verb import Verb, function_of

_NO_PROPENSITIES = (
    "The log of this period has no propensities, so there are no off-policy values, and the metrics give no credit for "
    "items that were never shown. Map the log's propensity column, or set off_policy.propensity to uniform or "
    "estimated."
)
_NO_GRADES = "There is no baseline factorization: the train or the validation period has no graded event."


@dataclass(frozen=True)
class Evaluate(RankingOptions, Verb[Evaluation]):
    """Evaluates policies, bundles and baselines on the same held-out users, with paired differences.

    Computes full-catalog ranking metrics, beyond-accuracy metrics, off-policy value and paired differences. With
    ``out`` it writes a directory with metrics.json (every number), report.html (one file, opens offline) and
    resolved.yaml (the options; ``recpo evaluate --config`` repeats the result).

    Raises:
        RecpoError: an entry is not a contender, is unfinished, or knows other items; options are out of range; ``out``
            exists.
    """

    first_day: ClassVar = ("prepared", "contenders", "out", "baselines", "ks", "truth", "exclude_past")

    prepared: Prepared | str | Path
    """prepared data, or its directory"""
    contenders: Sequence[Named] | Named = ()
    """what to compare, on the same items: runs, bundles and factors (or their directories), lists of another system
    (NAME=FILE), and names of baselines. Lists are a Parquet file, a directory of such files, or a CSV file, with the
    columns user_id, item_id and rank (1 = best) or score (higher = better), in the ids of the log. Baselines:
    popularity (training events), positives (training positives), recency (training events, newer ones counting more),
    cooccurrence (items near the user's last ones), factorization (matrix factorization of graded feedback),
    implicit_als (alternating least squares on positives), ease (linear model of items by items, for catalogs up to
    10,000 items), random. A bundle ranks, but gives no probabilities of logged items. The logging policy is added if
    its value is known"""
    _: KW_ONLY
    out: Path | str | None = None
    """output directory; null = keep the evaluation in memory only"""
    baselines: bool = True
    """add popularity, recency, cooccurrence, random, and factorization if the log has grades, unless ``contenders``
    names a baseline"""
    candidates: CandidateTable | Frame | str | Path | None = None
    """items that could be listed at the start of the period: a Parquet file or frame of items (item_id and optionally
    available_from and available_until), a CandidateTable with other column names, or the word all. null = the times of
    the prepared data, or every item if the data have no times. Items that were not available are in no list and are no
    targets"""
    item_features: ItemFeatures | None = None
    """tags or vectors of the items, for diversity and calibration"""
    off_policy: OffPolicyOptions | None = OffPolicyOptions()  # noqa: RUF009  frozen
    """how the value is estimated from the log; null = not at all. With logged propensities it is left out if the period
    has none"""
    reward: LoggedReward = LoggedReward()  # noqa: RUF009  frozen
    """reward of logged items, for the off-policy value"""
    baseline_options: BaselineOptions = BaselineOptions()  # noqa: RUF009  frozen
    """options of the baselines"""
    baseline_cache: Path | str | None = None
    """directory of fitted baselines, which evaluations of the same data can share; null = in ``out``, where a later
    evaluation that replaces this one reads them. Each baseline is fitted once per data and options"""
    truth: Path | str | None = None
    """directory written by ``recpo simulate``; adds the true expected reward and the true probability of a dislike
    (means over the first k places, on the first day of the period), the oracle, which lists every user's best items,
    and each contender's share of the oracle's gain over the pre-trained policy"""
    rerank: Sequence[Reranker] | Reranker = ()
    """MaximalMarginalRelevance, Determinantal, AttributeCap or Calibration of ``lists.reranking``, or a list of them:
    every run, bundle and factor model is also evaluated with lists re-ranked by each method (slates of the first k), to
    measure the cost and the effect of diversity, caps and calibration (docs/exploration.md)"""
    rerank_options: RerankOptions = RerankOptions()  # noqa: RUF009  frozen
    """number of items to re-rank, and the file of their attributes"""
    checkpoint: Checkpoint = "best"
    """which checkpoint of the runs"""
    device: str = "auto"
    """where policies run: auto (a GPU if there is one), cpu, cuda, cuda:1 and so on"""
    trust: Sequence[str] = ()
    """packages, in addition to recpo, whose classes the configurations of the runs may name"""
    overwrite: bool = False
    """replace ``out`` if it exists"""

    def execute(self) -> Evaluation:
        """Opens and checks every contender, evaluates one after the other, and writes the directory at the end."""
        data = self._data
        with ExitStack() as stack:
            target = None
            if self.out is not None:
                target = stack.enter_context(
                    output_directory(
                        self.out, kind="evaluation", overwrite=self.overwrite, inputs=self._inputs(), sealed=SEALED
                    )
                )
            compared, warnings = self._contenders(self._cache(target))
            pass_ = self._pass(data)
            if pass_.truth is not None:
                compared.append(oracle(pass_.truth))
            validate_names(compared)
            if self.off_policy is not None and pass_.off_policy is None:
                warnings.append(_NO_PROPENSITIES)
            evaluated = [pass_.evaluate(contender) for contender in compared]
            document = pass_.document(compared, evaluated, {"checkpoint": self.checkpoint}, warnings)
            evaluation = Evaluation(document, self.recorded())
            if target is not None:
                evaluation.write_files(target)
        return evaluation if self.out is None else replace(evaluation, path=Path(self.out))

    @cached_property
    def _data(self) -> Prepared:
        return Prepared.open(self.prepared)

    @cached_property
    def _named(self) -> list[Named]:
        named = [self.contenders] if isinstance(self.contenders, Named) else list(self.contenders)
        return [
            Lists.parse(one) if isinstance(one, str) and "=" in one and not Path(one).exists() else one for one in named
        ]

    def _inputs(self) -> list[object]:
        """Directories and files that are read, and therefore must not be replaced."""
        table, features = table_of(self.candidates), self.item_features
        read: list[object] = [self._data.root, self.truth, self.baseline_cache, self.rerank_options.attributes]
        read += [features and features.file, table and table.path]
        return [*read, *(one.path if isinstance(one, Lists) else directory_of(one) for one in self._named)]

    def _contenders(self, cache: BaselineCache) -> tuple[list[Contender], list[str]]:
        """The contenders, and a warning if a default baseline is left out."""
        named, warnings = self._named, []
        if self.baselines and not any(one in BASELINES for one in named if isinstance(one, str)):
            added = default_baselines(self._data)
            warnings = [] if "factorization" in added else [_NO_GRADES]
            named = [*added, *named]
        made = partial(baseline, data=self._data, options=self.baseline_options, cache=cache, progress=self.progress)
        device = compute_device(self.device)
        found = contenders_of(named, self._data, self.ks, self.checkpoint, device, self.trust, made)
        methods = [self.rerank] if isinstance(self.rerank, Reranker) else self.rerank
        found += reranked_contenders(found, methods, self.rerank_options, self._data, self.ks)
        validate_names(found)
        return found, warnings

    def _pass(self, data: Prepared) -> HeldOutPass:
        available = candidates_of(data, self.split, self.candidates)
        truth = None if self.truth is None else true_rewards(Path(self.truth), data, self.split, self.ks)
        facts = item_facts(data, self.item_features)
        is_new = new_items(facts.train_count, None if available is None else available.is_candidate)
        ages = item_ages(data, self.split, available) if self.segments else None
        return HeldOutPass(
            data=data,
            options=self,
            facts=facts,
            item_segments=[*item_segments(facts), *([] if ages is None else [item_age(ages)])] if self.segments else [],
            candidates=available,
            new_items=NewItems(is_new, self.ks, truth),
            truth=truth,
            off_policy=self._off_policy(data),
            device=compute_device(self.device),
        )

    def _cache(self, target: Path | None) -> BaselineCache:
        """The default cache: baselines are read from the evaluation that is replaced, and written to the new one."""
        if self.baseline_cache is not None:
            return BaselineCache(Path(self.baseline_cache), Path(self.baseline_cache))
        if self.out is None or target is None:
            return BaselineCache()
        return BaselineCache(Path(self.out) / BASELINES_DIRECTORY, target / BASELINES_DIRECTORY)

    def _off_policy(self, data: Prepared) -> OffPolicySetting | None:
        options = self.off_policy
        if options is None or (options.propensity == "logged" and not has_propensities(data, self.split)):
            return None
        return off_policy_setting(options, data, self.reward, self.ks)


evaluate = function_of(Evaluate)
