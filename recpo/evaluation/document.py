"""The evaluation of several contenders as one JSON document, which is ``metrics.json`` and the source of the report."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, Final

import numpy as np
import yaml
from torch import Tensor

from recpo import __version__
from recpo.base.feedback import UNKNOWN_BUCKET
from recpo.evaluation import Z95
from recpo.evaluation.catalog_ranking import RankingResult
from recpo.evaluation.cautions import cautions
from recpo.evaluation.estimates import LEVEL, Estimate, as_json, estimate, holm, p_value, percentile_interval
from recpo.evaluation.held_out_pass import Evaluated, HeldOutPass
from recpo.evaluation.off_policy.results import (
    LOGGING_POLICY,
    OffPolicyDifference,
    bootstrap_values,
    influence,
    standard_error,
)
from recpo.evaluation.reading import TRUE_REWARD, Document
from recpo.evaluation.true_rewards import ORACLE, TrueRewards
from recpo.log.prepared import Period, Prepared
from recpo.log.schema import PERIODS, Derived, LogColumns

_OF_A_PERIOD = {"events": "targets", "users": "users"}


def evaluation_document(
    shared: HeldOutPass, evaluated: Sequence[Evaluated], *, checkpoint: str, warnings: Sequence[str] = ()
) -> Document:
    """The content of ``metrics.json``: that of ``metrics_document``, and the following.

    ::

        warnings        [sentence], what a reader must know before the numbers: those given, after ``cautions``
        headroom        shares of the true value between the pre-trained policy and the oracle (``headroom``), null
                        where the truth is not known
        same_weights    [[name, name]]: a run and its bundle, or a copy of it; any difference is rounding
        labels          {threshold, periods: {period: [{name, events, positive, neutral, negative, unlabeled,
                        histogram}]}}: labels by duration of the item
        training        {run: {metric: [[step, value]]}}
        provenance      {data: {...}, runs: {name: {...}}}; runs with equal ``weights_sha256`` are the same policy
        candidates      ``Candidates.as_json``; null = every item was a candidate
        new_items       ``NewItems.as_json``: candidates without an event in training; the metrics new_* are of them

    Args:
        shared: the data and the options that all numbers depend on.
        evaluated: all contenders. The logging policy is added if something is known about it.
        checkpoint: which checkpoint of the runs was evaluated.
        warnings: further warnings to read before the numbers.
    """
    options, data, candidates = shared.options, shared.data, shared.ranking.candidates
    threshold = data.feedback.rule.positive_threshold
    setting = {
        "recpo_version": __version__,
        "split": options.split,
        "ks": list(options.ks),
        "positive_threshold": threshold,
        "repeats": shared.repeats,
        "gain": options.gain,
        "num_items": data.num_items,
        "catalog_checksum": data.catalog_checksum,
        "max_context": data.manifest["max_context"],
        "further_metrics": {name: value for one in evaluated for name, value in one.further.items()},
        "checkpoint": checkpoint,
    }
    runs = {one.name: one.facts for one in evaluated if one.facts}
    every, same = [*evaluated, *logging_policy(evaluated, shared.truth)], _same_weights(runs)
    periods: tuple[Period, ...] = ("train", options.split)
    document = metrics_document(every, setting=setting, same=same, bootstrap_resamples=options.bootstrap_resamples)
    document |= {
        "headroom": headroom({one.name: one.result for one in every}, runs),
        "same_weights": same,
        "labels": {"threshold": threshold, "periods": {period: label_summary(data, period) for period in periods}},
        "training": {one.name: one.curves for one in evaluated if one.curves},
        "provenance": {"data": _data_facts(data), "runs": runs},
        "candidates": None if candidates is None else candidates.as_json(),
        "new_items": shared.new_items.as_json(),
    }
    document["warnings"] = [*cautions(document), *warnings, *shared.warnings]
    return document


def metrics_document(
    contenders: Sequence[Evaluated],
    *,
    setting: Mapping[str, Any],
    same: Sequence[Sequence[str]] = (),
    bootstrap_resamples: int = 0,
) -> Document:
    """The part of the document that comes from the pass. Undefined numbers (no user, no list) are null.

    ::

        setting         split, ks, positive_threshold, repeats, ... as given
        conventions     {topic: how to read the numbers, in words}
        contenders      [{name, kind: ``Kind``,
                          counts: {users, users_with_positives, users_with_dislikes, and for positive and disliked
                                   events: positive_events, positive_events_unavailable (their items were no
                                   candidates), positive_events_excluded (of the rest, items of the past)},
                          metrics: {metric: estimate},            per-user metrics, such as NDCG@10, AUC_other
                          totals: {metric: number},               of all lists together, such as coverage@10, gini@10
                          segments: {segment: {bin: {metric: estimate}}},
                          off_policy: [...]}]
        differences     [{contender, against,                       paired, contender - against
                          metrics: {metric: {mean, half_width, n, differing, p_value, p_holm, survives_holm}},
                          off_policy: [{target, estimator, value, intervals, standard_error, users, p_value, p_holm,
                                        survives_holm}]}]

    Differences are of every pair (i, j) with i < j, as against = contender i, and of metrics that both have; differing
    counts the users whose difference is not 0. Left out are pairs that have nothing in common, pairs of the same
    weights, and those with the oracle.

    An ``estimate`` is ``{mean, half_width, n}``: mean over the n users for whom the metric is defined, and half of
    its normal 95 % interval. With ``bootstrap_resamples`` the estimates under ``metrics`` of contenders also have
    ``low`` and ``high``, the ends of the 95 % percentile interval over resampled users. Segments are ``history
    length``, with every metric of the users of a bin, and ``item popularity`` and other divisions of the items, with
    NDCG, Recall and HitRate of the targets of a bin. JSON keys are sorted; the order of bins is in
    ``setting["segments"]``: ``{segment: [bin]}``.

    Args:
        contenders: contenders that were evaluated on the same users.
        setting: ``repeats``, ``positive_threshold`` and all other options that describe the evaluation.
        same: pairs of the same weights, which are not compared.
        bootstrap_resamples: number of resamples of users; 0 = no bootstrap intervals.
    """
    first = contenders[0].result
    bins = {name: list(of) for name, of in first.user_segments.items()}
    bins |= {name: list(of) for name, of in first.item_segments.items()}
    pairs = [
        _paired(later, earlier)
        for earlier, later in combinations(contenders, 2)
        if ORACLE not in (earlier.name, later.name) and [earlier.name, later.name] not in same
    ]
    document: Document = as_json(
        {
            "setting": {**setting, "segments": bins},
            "conventions": conventions(bool(setting["repeats"]), float(setting["positive_threshold"])),
            "contenders": [_as_entry(contender, bootstrap_resamples) for contender in contenders],
            "differences": with_holm([pair for pair in pairs if pair["metrics"] or pair["off_policy"]]),
        }
    )
    return document


def conventions(repeats: bool, positive_threshold: float) -> dict[str, str]:
    """How to read the numbers, for the document and beside the table."""
    past = (
        "kept: they may be recommended, and held-out events of such items are targets"
        if repeats
        else "excluded from the lists; held-out events of such items are removed from the targets and counted"
    )
    return {
        "catalog": "every candidate is ranked, no sampled negatives",
        "candidates": "items that could be listed when lists are made, by default all; held-out events of others are "
        "no targets and are counted; as logged exposures they have weight 0 and stay occasions to choose",
        "new_items": "candidates without an event in the training period; new_true_reward@k is that of the k best new "
        "items as the contender ranks them, whatever it lists above them",
        "past_items": f"every item that a user had before the period is {past}",
        "positives": f"distinct held-out items with label >= {positive_threshold:g} that were not disliked",
        "disliked": "distinct held-out items that were disliked; disliked@k is their share of the k places",
        "ndcg": "binary gains, divided by the DCG of an ideal list of min(k, number of targets) items",
        "map": "divided by min(k, number of targets)",
        "gNDCG": "gains are the labels of held-out items, 0 of disliked ones; ideal list of the user's own",
        "disliked_rank": "mean rank of the disliked items, k + 1 for one that is not in the list; higher is better",
        "AUC": "positives against other or disliked exposures by log-probability, per user; ties count one half",
        "segments": "users by their past, targets by their item; ranks are always those among all items",
        "popularity": "head: fewest items with half of the training events, torso: up to 80 %, tail: the rest",
        "users": "means over the users who have such targets (n); half_width is the normal 95 % interval of the mean",
        "p_value": "normal, of the paired differences; never below 2^(1 - m) for m users who differ, as in a sign test",
    }


def logging_policy(contenders: Sequence[Evaluated], truth: TrueRewards | None) -> list[Evaluated]:
    """The logging policy, if something is known about it: its earnings, and its true value."""
    users = contenders[0].result.user_ids
    earned = next((one.value for one in contenders if one.value is not None), None)
    per_user = {} if truth is None else truth.of_logging_policy(users)
    if earned is None and not per_user:
        return []
    result = RankingResult(users, per_user, totals={}, counts={}, user_segments={}, item_segments={})
    return [Evaluated(LOGGING_POLICY, "baseline", result, earned)]


def headroom(results: Mapping[str, RankingResult], runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """``(value - start) / (oracle - start)`` of every contender: 0 = no better than the start, 1 = the oracle.

    The start is the pre-trained policy if exactly one run is pre-trained, that is, if its objective is the likelihood
    of every exposure; otherwise, it is the logging policy.

    Args:
        results: results by contender, including the oracle and the logging policy.
        runs: origin of the contenders; ``configuration`` of a run describes its training.

    Returns:
        ``{start, start_is, metrics: {true_reward@k: {start, oracle, contenders: {name: {mean, half_width, n}}}}}``;
        None without an oracle or a start. A share is null if the oracle is not better than the start.
    """
    trained = [name for name, facts in runs.items() if name in results and _is_pretrained(facts)]
    start = trained[0] if len(trained) == 1 else LOGGING_POLICY
    if ORACLE not in results or start not in results:
        return None
    said = {
        0: "no run is pre-trained, by the likelihood of every exposure",
        1: "the run that is pre-trained, by the likelihood of every exposure",
    }.get(len(trained), f"{len(trained)} runs are pre-trained, by the likelihood of every exposure, not one")
    metrics = [metric for metric in results[ORACLE].per_user if metric.startswith(TRUE_REWARD)]
    found: dict[str, Any] = {metric: _of_metric(results, start, metric) for metric in metrics}
    return {"start": start, "start_is": said, "metrics": as_json(found)}


def _is_pretrained(facts: Mapping[str, Any]) -> bool:
    try:
        objective = yaml.safe_load(facts.get("configuration", "")).get("objective")
        name, options = objective["class_path"].rsplit(".", 1)[-1], objective.get("init_args") or {}
    except (yaml.YAMLError, AttributeError, TypeError, KeyError):
        return False
    return name == "Likelihood" and not options.get("positive_only")


def _of_metric(results: Mapping[str, RankingResult], start: str, metric: str) -> dict[str, Any]:
    first, best = (results[name].per_user[metric].double().numpy() for name in (start, ORACLE))
    shares = {
        name: share(result.per_user[metric].double().numpy(), first, best)
        for name, result in results.items()
        if name not in (start, ORACLE) and metric in result.per_user
    }
    ends = {"start": results[start].estimate(metric).mean, "oracle": results[ORACLE].estimate(metric).mean}
    return {**ends, "contenders": shares}


def share(value: np.ndarray, start: np.ndarray, oracle: np.ndarray) -> Estimate:
    """``sum_u (value_u - start_u) / sum_u (oracle_u - start_u)`` with the half-width of its 95 % interval.

    The interval is that of a ratio of means over the same users (delta method).

    Args:
        value: ``[U]`` value of the contender; nan here or in the next two = the user is skipped.
        start: ``[U]`` value of the start.
        oracle: ``[U]`` value of the oracle.

    Returns:
        nan if the oracle is not better than the start.
    """
    sums = np.stack([value - start, oracle - start], 1)
    sums = sums[~np.isnan(sums).any(1)]
    gained, possible = sums.sum(0)
    if not possible > 0:
        return Estimate(math.nan, math.nan, len(sums))
    return Estimate(float(gained / possible), Z95 * standard_error(influence(sums)), len(sums))


def with_holm(differences: Sequence[Document]) -> Sequence[Document]:
    """Adds ``p_value``, ``p_holm`` and ``survives_holm`` to the entries of the document's ``differences``.

    The comparisons of one metric between all pairs of contenders form one family; so do the comparisons of one
    off-policy estimator of one target, where all users count as differing.
    """
    families: dict[tuple[str, ...], list[tuple[Document, float]]] = defaultdict(list)
    for difference in differences:
        for name, entry in difference["metrics"].items():
            families[name,].append((entry, p_value(entry["mean"], entry["half_width"], entry["differing"])))
        for entry in difference["off_policy"]:
            p = p_value(entry["value"], Z95 * entry["standard_error"], entry["users"])
            families[entry["target"], entry["estimator"]].append((entry, p))
    for family in families.values():
        for (entry, p), adjusted in zip(family, holm([p for _, p in family]), strict=True):
            entry |= {"p_value": p, "p_holm": adjusted, "survives_holm": adjusted <= LEVEL}
    return differences


def _as_entry(contender: Evaluated, resamples: int) -> Document:
    result, is_logging = contender.result, contender.name == LOGGING_POLICY
    metrics = {metric: result.estimate(metric)._asdict() for metric in result.per_user}
    if resamples and metrics:  # the logging policy has none
        sums = [np.stack([np.nan_to_num(v), ~np.isnan(v)], 1) for v in map(Tensor.numpy, result.per_user.values())]
        for value, drawn in zip(metrics.values(), bootstrap_values(sums, resamples, seed=0), strict=True):
            value |= percentile_interval(drawn)._asdict()
    estimates = () if contender.value is None else contender.value.estimates
    return {
        "name": contender.name,
        "kind": contender.kind,
        "counts": result.counts,
        "metrics": metrics,
        "totals": result.totals,
        "segments": result.segments(),
        # what the logging policy earned is an entry of its own
        "off_policy": [one for one in estimates if (one.target == LOGGING_POLICY) == is_logging],
    }


def _paired(later: Evaluated, earlier: Evaluated) -> Document:
    metrics = {}
    for metric in later.result.per_user:
        if metric in earlier.result.per_user:
            difference = later.result.differences(earlier.result, metric)
            differing = int(((difference != 0) & ~difference.isnan()).sum())
            metrics[metric] = {**estimate(difference)._asdict(), "differing": differing}
    gains = sorted(_gains(later, earlier), key=lambda gain: (gain.target, gain.estimator))
    off_policy = [gain._asdict() for gain in gains]
    return {"contender": later.name, "against": earlier.name, "metrics": metrics, "off_policy": off_policy}


def _gains(later: Evaluated, earlier: Evaluated) -> Sequence[OffPolicyDifference]:
    """In value; the logging policy is the last contender, so it is never what another is against."""
    if later.value is None or earlier.value is None:
        return ()
    if later.name == LOGGING_POLICY:
        return [-gain for gain in earlier.value.over_logging_policy()]
    return later.value.differences(earlier.value)


def _same_weights(runs: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Pairs of runs and bundles with the same trained weights, in the order of the contenders."""
    known = {name: facts["weights_sha256"] for name, facts in runs.items() if facts.get("weights_sha256")}
    return [[one, other] for one, other in combinations(known, 2) if known[one] == known[other]]


def _data_facts(data: Prepared) -> Document:
    manifest = data.manifest
    splits = manifest["counts"]["splits"]
    return {
        "prepared": str(data.root),
        "items": data.num_items,
        "users": manifest["num_users"],
        "events read": manifest["counts"]["read"],
        **{f"{name} {of}": splits[name][key] for of, key in _OF_A_PERIOD.items() for name in PERIODS},
        **{f"dropped: {reason}": count for reason, count in manifest["counts"]["dropped"].items()},
        "label": manifest["label"]["class_path"].rsplit(".", 1)[-1],
        **{name: value for name, value in manifest["boundaries"].items() if isinstance(value, str)},
        "prepared by recpo": manifest["recpo_version"],
    }


#: Bins of the histogram of labels, and the columns that are counted.
_BINS: Final = 10
_COLUMNS: Final = (Derived.LABEL, LogColumns.DISLIKE, LogColumns.DURATION, Derived.IS_TARGET)
_KINDS: Final = ("positive", "neutral", "negative", "unlabeled")
_LAST_BUCKET: Final = 1000  # longer than any item
_GROUPS: Final = _LAST_BUCKET - UNKNOWN_BUCKET + 1


def label_summary(data: Prepared, split: Period) -> list[dict[str, Any]]:
    """Counts the events of ``split``, shard by shard: all events, then by duration bucket.

    Args:
        data: the prepared directory.
        split: the period; context events in its shards are not counted.

    Returns:
        For each group its ``name``, such as ``8 to 16 s``, and ``events``; ``positive``, ``neutral`` (skipped ones
        included), ``negative`` (disliked) and ``unlabeled``, which sum to ``events``; ``histogram``: labels in 10 equal
        bins over [0, 1]. A bin includes its upper end, because the longest watch of a group has a label on it.
    """
    signs, bins = np.zeros((_GROUPS, 4), np.int64), np.zeros((_GROUPS, _BINS), np.int64)
    rule, base = data.feedback.rule, data.feedback.duration_base
    for shard in range(data.num_shards(split)):
        label, disliked, duration, is_target = data.columns(split, shard, _COLUMNS).values()
        label, disliked, duration = (column[is_target] for column in (label, disliked, duration))
        group = np.minimum(data.feedback.buckets(duration), _LAST_BUCKET) - UNKNOWN_BUCKET
        kind = np.select([disliked, rule.unknown(label, disliked), rule.positive(label, disliked)], [2, 3, 0], 1)
        signs += np.bincount(group * 4 + kind, minlength=_GROUPS * 4).reshape(_GROUPS, 4)
        known = ~np.isnan(label)
        place = np.clip(np.ceil(label[known] * _BINS - 1e-4).astype(np.int64) - 1, 0, _BINS - 1)
        bins += np.bincount(group[known] * _BINS + place, minlength=_GROUPS * _BINS).reshape(_GROUPS, _BINS)
    found = np.flatnonzero(signs.sum(1))
    rows = [_group_row("all", signs.sum(0), bins.sum(0))]
    if len(found) > 1:
        rows += [
            _group_row(_group_name(int(group) + UNKNOWN_BUCKET, base), signs[group], bins[group]) for group in found
        ]
    return rows


def _group_name(bucket: int, base: float) -> str:
    return "unknown" if bucket == UNKNOWN_BUCKET else f"{base**bucket:.4g} to {base ** (bucket + 1):.4g} s"


def _group_row(name: str, signs: np.ndarray, bins: np.ndarray) -> dict[str, Any]:
    kinds = dict(zip(_KINDS, signs.tolist(), strict=True))
    return {"name": name, "events": int(signs.sum()), **kinds, "histogram": bins.tolist()}
