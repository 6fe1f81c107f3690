"""The verb ``evaluate``: full-catalog ranking and off-policy value of policies, bundles and baselines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from tqdm import tqdm

from recpo import __version__
from recpo.artifacts import output_directory
from recpo.data.datamodule import evaluation_batches
from recpo.data.prepared import Prepared
from recpo.errors import RecpoError
from recpo.evaluation.behavior_rates import BehaviorRates
from recpo.evaluation.beyond_accuracy import BeyondAccuracy
from recpo.evaluation.candidates import Candidates, CandidateTable, Given, candidates_of, table_of
from recpo.evaluation.catalog_ranking import Gain, evaluate_ranking, validate_ks
from recpo.evaluation.contenders import BaselineOptions, Contender, baseline, oracle, validate_names
from recpo.evaluation.document import ContenderResult, evaluation_document, logging_policy
from recpo.evaluation.evaluation import SEALED, Evaluation
from recpo.evaluation.fitted import BASELINES_DIRECTORY, BaselineCache
from recpo.evaluation.item_ages import item_age, item_ages
from recpo.evaluation.item_facts import ItemFacts, ItemFeatures, item_facts
from recpo.evaluation.lists import Lists
from recpo.evaluation.measures import Measure
from recpo.evaluation.new_items import NewItems, new_items
from recpo.evaluation.off_policy.options import OffPolicyOptions
from recpo.evaluation.off_policy.results import LOGGING_POLICY, OffPolicyResult
from recpo.evaluation.off_policy.setting import OffPolicySetting, has_propensities, off_policy_setting
from recpo.evaluation.reading import Document
from recpo.evaluation.segments import ItemSegment, history_length, item_segments
from recpo.evaluation.true_rewards import TrueRewards, true_rewards
from recpo.features.schema import Reads
from recpo.reranking import Reranker, RerankOptions
from recpo.rewards import LoggedReward
from recpo.training.learned_reward import Checkpoint
from recpo.types import EvaluationBatch
from recpo.workflows.contenders import Named, contenders_of, directory_of
from recpo.workflows.devices import compute_device
from recpo.workflows.reranked import as_options, reranked_contenders

HeldOut = Literal["valid", "test"]

_EXCLUDED_AT_ONCE = 1 << 24  # size of a users x items matrix: 128 MiB

_NO_PROPENSITIES = (
    "The log of this period has no propensities, so there are no off-policy values, and the metrics give no credit for "
    "items that were never shown. Map the log's propensity column, or set off_policy.propensity to uniform or "
    "estimated."
)


def evaluate(
    prepared: Prepared | Path | str,
    contenders: Sequence[Named],
    *,
    out: Path | str | None = None,
    split: HeldOut = "test",
    ks: Sequence[int] = (10, 50),
    exclude_past: bool = True,
    gain: Gain = "linear",
    segments: bool = True,
    candidates: Given = None,
    bootstrap_resamples: int = 0,
    item_features: ItemFeatures | None = None,
    off_policy: OffPolicyOptions | None = OffPolicyOptions(),  # noqa: B008  frozen
    reward: LoggedReward = LoggedReward(),  # noqa: B008  frozen
    baseline_options: BaselineOptions = BaselineOptions(),  # noqa: B008  frozen
    baseline_cache: Path | str | None = None,
    truth: Path | str | None = None,
    rerank: Sequence[Reranker] = (),
    rerank_options: RerankOptions = RerankOptions(),  # noqa: B008  frozen
    checkpoint: Checkpoint = "best",
    batch_size: int = 512,
    device: str = "auto",
    trust: Sequence[str] = (),
    overwrite: bool = False,
    progress: bool = False,
) -> Evaluation:
    """Evaluates policies, bundles and baselines on the same held-out users, with paired differences.

    Computes full-catalog ranking metrics, beyond-accuracy metrics, off-policy value and paired differences. With
    ``out`` it writes a directory with metrics.json (every number), report.html (one file, opens offline) and
    resolved.yaml (the options; ``recpo evaluate --config`` repeats the result).

    Args:
        prepared: prepared data, or its directory.
        contenders: what to compare: runs, bundles and factors on the same items, their directories, ``Lists`` of other
            systems, and names of baselines (popularity, positives, recency, cooccurrence, factorization, implicit_als,
            ease, random). The logging policy is added if its value is known.
        out: output directory; null = keep the evaluation in memory only.
        split: held-out period.
        ks: list lengths; the tables show the first.
        exclude_past: exclude the items of a user's past from the lists, and their held-out events from the targets.
        gain: gain of the graded NDCG: the label (linear), or 0, 1, 3, 7 for its quarters (exponential).
        segments: also report by length of the history and by popularity, duration and age of the items.
        candidates: items that could be listed at the start of the period: a table (columns item_id and optionally
            available_from and available_until), a ``CandidateTable`` with other column names, or all. null = the times
            of the prepared data, or every item if the data have no times. Items that were not available are in no list
            and are no targets.
        bootstrap_resamples: number of resamples for bootstrap intervals over users of every per-user metric; 0 = none.
        item_features: tags or vectors of the items, for diversity and calibration.
        off_policy: how the value is estimated from the log; null = not at all. With logged propensities it is left out
            if the period has none.
        reward: reward of logged items, for the off-policy value.
        baseline_options: options of the baselines.
        baseline_cache: directory of fitted baselines, which evaluations of the same data can share; null = in ``out``,
            where a later evaluation that replaces this one reads them. Each baseline is fitted once per data and
            options.
        truth: directory written by ``recpo simulate``; adds the true expected reward and the true probability of a
            dislike (means over the first k places, on the first day of the period), the oracle, which lists every
            user's best items, and each contender's share of the oracle's gain over the pre-trained policy.
        rerank: methods; every run, bundle and factor model is also evaluated with lists re-ranked by each method
            (slates of the first k), to measure the cost and the effect of diversity, caps and calibration.
        rerank_options: number of items to re-rank, and the file of their attributes.
        checkpoint: which checkpoint of the runs.
        batch_size: users scored at once.
        device: where policies run: auto (a GPU if there is one), cpu, cuda, cuda:1 and so on.
        trust: packages, in addition to recpo, whose classes the configurations of the runs may name.
        overwrite: replace ``out`` if it exists.
        progress: show progress bars on a terminal.

    Raises:
        RecpoError: an entry is not a contender, is unfinished, or knows other items; options are out of range; ``out``
            exists.
    """
    contenders = [contenders] if isinstance(contenders, Named) else contenders
    validate_ks(ks)
    if batch_size < 1 or bootstrap_resamples < 0:
        raise RecpoError(
            f"batch_size is {batch_size}, expected at least 1; bootstrap_resamples is {bootstrap_resamples}, expected "
            "at least 0"
        )
    data = prepared if isinstance(prepared, Prepared) else Prepared.open(prepared)
    table = table_of(candidates)
    with ExitStack() as stack:
        target = None
        if out is not None:
            given = [one.path if isinstance(one, Lists) else directory_of(one) for one in contenders]
            inputs = [
                data.root,
                *given,
                truth,
                item_features and item_features.file,
                baseline_cache,
                rerank_options.attributes,
                table and table.path,
            ]
            target = stack.enter_context(
                output_directory(
                    out,
                    kind="evaluation",
                    overwrite=overwrite,
                    inputs=[one for one in inputs if one],
                    sealed=SEALED,
                )
            )
        where = compute_device(device)
        cache = _cache(baseline_cache, out, target)
        counted = partial(baseline, data=data, options=baseline_options, cache=cache, progress=progress)
        compared = contenders_of(contenders, data, ks, checkpoint, where, trust, counted)
        compared += reranked_contenders(compared, rerank, rerank_options, data, ks)
        validate_names(compared)
        available = candidates_of(data, split, candidates)
        known = None if truth is None else true_rewards(Path(truth), data, split, ks)
        if known is not None:
            compared.append(oracle(known))
            validate_names(compared)
        facts = item_facts(data, item_features)
        is_new = new_items(facts.train_count, None if available is None else available.is_candidate)
        shared = _Pass(
            data=data,
            split=split,
            ks=ks,
            exclude_past=exclude_past,
            gain=gain,
            bootstrap_resamples=bootstrap_resamples,
            facts=facts,
            item_segments=_item_segments(data, split, facts, available) if segments else [],
            segments=segments,
            candidates=available,
            new_items=NewItems(is_new, ks, known),
            truth=known,
            off_policy=_off_policy(data, split, off_policy, reward, ks),
            batch_size=batch_size,
            device=where,
            progress=progress,
        )
        evaluated = [shared.evaluate(contender) for contender in compared]
        warnings = [_NO_PROPENSITIES] if off_policy is not None and shared.off_policy is None else []
        options = {
            "prepared": data.root,
            "out": out,
            **_named_contenders(compared),
            "split": split,
            "ks": ks,
            "exclude_past": exclude_past,
            "gain": gain,
            "segments": segments,
            "candidates": _candidate_option(candidates),
            "bootstrap_resamples": bootstrap_resamples,
            "item_features": item_features,
            "off_policy": off_policy,
            "reward": reward,
            "baseline_options": baseline_options,
            "baseline_cache": baseline_cache,
            "truth": truth,
            "rerank": as_options(rerank),
            "rerank_options": rerank_options,
            "checkpoint": checkpoint,
            "batch_size": batch_size,
            "device": device,
            "trust": trust,
        }
        document = shared.document(compared, evaluated, {"checkpoint": checkpoint}, warnings)
        evaluation = Evaluation(document, _plain(options))
        if target is not None:
            evaluation.write_files(target)
    return evaluation if out is None else replace(evaluation, path=Path(out))


def _cache(given: Path | str | None, out: Path | str | None, target: Path | None) -> BaselineCache:
    """The default cache: baselines are read from the evaluation that is replaced, and written to the new one."""
    if given is not None:
        return BaselineCache(Path(given), Path(given))
    if out is None or target is None:
        return BaselineCache()
    return BaselineCache(Path(out) / BASELINES_DIRECTORY, target / BASELINES_DIRECTORY)


def _item_segments(
    data: Prepared, split: HeldOut, facts: ItemFacts, candidates: Candidates | None
) -> list[ItemSegment]:
    ages = item_ages(data, split, candidates)
    return [*item_segments(facts), *([] if ages is None else [item_age(ages)])]


def _candidate_option(given: Given) -> Any:
    """The value in YAML. A frame is only mentioned, so the evaluation cannot be repeated from the file."""
    table = table_of(given)
    if table is None:
        return given
    name = table.path or "a frame in memory"
    return replace(table, source=name) if isinstance(given, CandidateTable) else name


def _off_policy(
    data: Prepared, split: HeldOut, options: OffPolicyOptions | None, reward: LoggedReward, ks: Sequence[int]
) -> OffPolicySetting | None:
    if options is None or (options.propensity == "logged" and not has_propensities(data, split)):
        return None
    return off_policy_setting(options, data, reward, ks)


def _named_contenders(contenders: Sequence[Contender]) -> dict[str, list[str]]:
    """The contenders as the options of the verb."""
    return {
        "run": [str(one.facts["path"]) for one in contenders if one.kind == "run"],
        "bundle": [str(one.facts["path"]) for one in contenders if one.kind == "bundle"],
        "factors": [str(one.facts["path"]) for one in contenders if one.kind == "factors"],
        "lists": [f"{one.name}={one.facts['path']}" for one in contenders if one.kind == "lists"],
        "baselines": [one.name for one in contenders if one.kind == "baseline"],
    }


def _plain(value: Any) -> Any:
    """Options as YAML has them."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


class _Evaluated(NamedTuple):
    contender: ContenderResult
    value: OffPolicyResult | None
    max_history: int


@dataclass(frozen=True)
class _Pass:
    """The data and options that all contenders share."""

    data: Prepared
    split: HeldOut
    ks: Sequence[int]
    exclude_past: bool
    gain: Gain
    bootstrap_resamples: int
    facts: ItemFacts
    item_segments: Sequence[ItemSegment]
    segments: bool
    candidates: Candidates | None
    new_items: NewItems
    truth: TrueRewards | None
    off_policy: OffPolicySetting | None
    batch_size: int
    device: torch.device
    progress: bool

    def evaluate(self, contender: Contender) -> _Evaluated:
        """One pass over the held-out users. The contender is loaded for it and released afterwards."""
        recommender, max_history, policy, counts, reads = contender.load()
        estimated_too = self.off_policy is not None and contender.kind != "oracle"
        value = self.off_policy.measure(policy) if self.off_policy is not None and estimated_too else None
        measures: list[Measure] = [BeyondAccuracy(self.facts, self.ks)]
        has_new = bool(self.new_items.is_new.any())
        optional = (self.truth, value, self.new_items if has_new else None)
        measures += [measure for measure in optional if measure is not None]
        measures += [BehaviorRates(self.data.behaviors, max(self.ks))] * bool(self.data.behaviors)
        reads = Reads(behaviors=bool(self.data.behaviors)) | reads
        result = evaluate_ranking(
            recommender,
            self._batches(max_history, contender.name, reads),
            num_items=self.data.num_items,
            ks=self.ks,
            exclude_past=self.exclude_past,
            gain=self.gain,
            measures=measures,
            user_segments=[history_length()] if self.segments else [],
            item_segments=self.item_segments,
            candidates=self.candidates,
            new_items_among=self.new_items.others if has_new else None,
        )
        result = replace(result, counts={**result.counts, **counts()})
        estimated = None if value is None else value.result()
        off_policy = (
            [] if estimated is None else [e.as_json() for e in estimated.estimates if e.target != LOGGING_POLICY]
        )
        return _Evaluated(ContenderResult(contender.name, contender.kind, result, off_policy), estimated, max_history)

    def _batches(self, max_history: int, name: str, reads: Reads) -> Iterator[EvaluationBatch]:
        users = sum(shard["users"] for shard in self.data.manifest["shards"][self.split])
        hidden = None if self.progress else True  # None: hidden if there is no terminal
        with tqdm(total=users, desc=f"evaluate {name}", unit="user", disable=hidden, leave=False) as bar:
            for batch in evaluation_batches(self.data.root, self.split, max_history, self._users_at_once, reads):
                yield move_data_to_device(batch, self.device)
                bar.update(len(batch.exclude))

    @property
    def _users_at_once(self) -> int:
        """The batch size, reduced if many items are excluded for every user."""
        absent = 0 if self.candidates is None else self.candidates.most_unavailable
        others = self.new_items.others if self.new_items.is_new.any() else None
        width = absent + (0 if others is None else len(others))
        return max(1, min(self.batch_size, _EXCLUDED_AT_ONCE // max(1, width)))

    def document(
        self,
        contenders: Sequence[Contender],
        evaluated: Sequence[_Evaluated],
        setting: dict[str, Any],
        warnings: Sequence[str],
    ) -> Document:
        """The document: all results, and every option and input that they depend on, including ``setting``."""
        results = [one.contender for one in evaluated]
        values = {one.contender.name: one.value for one in evaluated if one.value is not None}
        described = {
            "recpo_version": __version__,
            "split": self.split,
            "ks": list(self.ks),
            "positive_threshold": self.data.feedback.rule.positive_threshold,
            "exclude_past": self.exclude_past,
            "gain": self.gain,
            "num_items": self.data.num_items,
            "catalog_checksum": self.data.catalog_checksum,
            "max_context": self.data.manifest["max_context"],
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
            bootstrap_resamples=self.bootstrap_resamples,
        )
