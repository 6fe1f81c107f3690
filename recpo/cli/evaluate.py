"""``recpo evaluate``: full-catalog ranking and off-policy value of policies, bundles and baselines, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from tqdm import tqdm

from recpo import __version__
from recpo.artifacts import output_directory, write_json
from recpo.cli.config import write_resolved
from recpo.cli.contenders import (
    Baseline,
    BaselineOptions,
    Candidate,
    baseline,
    bundles,
    check_names,
    runs,
)
from recpo.cli.evaluation_document import evaluation_document, logging_policy
from recpo.cli.item_facts import ItemFeatures, item_facts
from recpo.cli.off_policy import OffPolicySetting, off_policy_setting
from recpo.cli.output import console
from recpo.cli.true_rewards import TrueRewards, true_rewards
from recpo.data.datamodule import evaluation_batches
from recpo.data.prepared import Prepared
from recpo.errors import RecpoError
from recpo.evaluation.accuracy import Gain
from recpo.evaluation.beyond_accuracy import BeyondAccuracy
from recpo.evaluation.held_out import evaluate_ranking
from recpo.evaluation.html_report.page import html_report
from recpo.evaluation.item_facts import ItemFacts
from recpo.evaluation.measures import Measure
from recpo.evaluation.off_policy.options import OffPolicyOptions
from recpo.evaluation.off_policy.result import LOGGING_POLICY, OffPolicyResult
from recpo.evaluation.report import Contender, differences_table, metrics_table, value_table
from recpo.evaluation.segments import history_length, item_segments
from recpo.rewards import LoggedReward
from recpo.types import EvaluationBatch
from recpo.workflows.devices import compute_device

METRICS, REPORT, RESOLVED = "metrics.json", "report.html", "resolved.yaml"

_NO_PROPENSITIES = (
    "The log of this period has no propensities, so there are no off-policy values, and the metrics give no credit for "
    "items that were never shown. Map the log's propensity column, or set --off_policy.propensity to uniform or "
    "estimated."
)


def evaluate(
    prepared: str | Path,
    out: Path,
    run: list[Path] | Path = [],  # noqa: B006  jsonargparse prints it
    bundle: list[Path] | Path = [],  # noqa: B006
    baselines: list[Baseline] = ["popularity", "recency", "cooccurrence", "random"],  # noqa: B006
    split: Literal["valid", "test"] = "test",
    ks: list[int] = [10, 50],  # noqa: B006
    exclude_seen: bool = True,
    gain: Gain = "linear",
    segments: bool = True,
    bootstrap_resamples: int = 0,
    item_features: ItemFeatures | None = None,
    off_policy: OffPolicyOptions | None = OffPolicyOptions(),  # noqa: B008  frozen
    reward: LoggedReward = LoggedReward(),  # noqa: B008  frozen
    baseline_options: BaselineOptions = BaselineOptions(),  # noqa: B008  frozen
    truth: Path | None = None,
    checkpoint: Literal["best", "last"] = "best",
    batch_size: int = 512,
    device: str = "auto",
    overwrite: bool = False,
) -> None:
    """Evaluates policies, bundles and baselines on the same held-out users, and tells them apart.

    Rankings of the full catalog, what is beyond accuracy, off-policy value, paired differences. Writes a directory
    with metrics.json (every number), report.html (one file, opens offline) and resolved.yaml (the options, which repeat
    the result), and prints the main tables.

    Args:
        prepared: directory written by ``recpo prepare``.
        out: directory to make.
        run: run directory written by ``recpo train``, or a list of them, ``[runs/a, runs/b]``, on the same items.
        bundle: bundle directory written by ``recpo export``, or a list of them; a bundle ranks, and gives no
            probabilities of logged items.
        baselines: popularity (training events), positives (training positives), recency (training events, newer ones
            counting more), cooccurrence (items near the user's last ones), random. The logging policy is added where
            its value is known.
        split: held-out period.
        ks: list lengths; the tables show the first.
        exclude_seen: leave a user's earlier items out of the lists, and such held-out events out of the targets.
        gain: of the graded NDCG: the watch quantile (linear), or 0, 1, 3, 7 for its quartiles (exponential).
        segments: also by length of the history, popularity and duration of the items.
        bootstrap_resamples: also bootstrap intervals over users of every per-user metric, from so many resamples.
        item_features: tags or vectors of the items, for diversity and calibration.
        off_policy: how the value is estimated from the log; null = not at all. With logged propensities it is left out
            where the period has none.
        reward: of logged items, for the off-policy value.
        baseline_options: of the baselines.
        truth: directory that ``recpo simulate`` wrote: adds the true expected reward and the true probability of a
            dislike, means over the first k places, on the first day of the period.
        checkpoint: which checkpoint of the runs.
        batch_size: users scored at once.
        device: where policies run: auto (a GPU if there is one), cpu, cuda, cuda:1 and so on.
        overwrite: replace ``out`` where it exists.
    """
    inputs = [prepared, *_listed(run), *_listed(bundle), truth]
    with output_directory(out, kind="evaluation", overwrite=overwrite, inputs=inputs) as partial:
        data = Prepared.open(prepared)
        target = compute_device(device)
        candidates = _candidates(
            data, _listed(run), _listed(bundle), baselines, baseline_options, ks, checkpoint, target
        )
        pass_over = _Pass(
            data=data,
            split=split,
            ks=ks,
            exclude_seen=exclude_seen,
            gain=gain,
            bootstrap_resamples=bootstrap_resamples,
            facts=item_facts(data, item_features),
            segments=segments,
            truth=None if truth is None else true_rewards(truth, data, split, ks),
            off_policy=_off_policy(data, split, off_policy, reward, ks),
            batch_size=batch_size,
            device=target,
        )
        evaluated = [pass_over.evaluate(candidate) for candidate in candidates]
        document = pass_over.document(candidates, evaluated, {"checkpoint": checkpoint})
        if off_policy is not None and pass_over.off_policy is None:
            document["warnings"].append(_NO_PROPENSITIES)
        write_json(partial / METRICS, document)
        (partial / REPORT).write_text(html_report(document), encoding="utf-8")
        write_resolved(partial / RESOLVED)
    _print([one.contender for one in evaluated], document, out)


def _candidates(
    data: Prepared,
    run: list[Path],
    bundle: list[Path],
    baselines: list[Baseline],
    options: BaselineOptions,
    ks: list[int],
    checkpoint: str,
    device: torch.device,
) -> list[Candidate]:
    found = [baseline(name, data, options) for name in baselines]
    found += runs(run, data, checkpoint, device)
    found += bundles(bundle, data, max(ks, default=1))
    check_names(found)
    if not found:
        raise RecpoError("nothing to evaluate: name at least one --run, one --bundle or one of --baselines")
    return found


def _listed(paths: list[Path] | Path) -> list[Path]:
    return [paths] if isinstance(paths, Path) else paths


def _off_policy(
    data: Prepared,
    split: Literal["valid", "test"],
    options: OffPolicyOptions | None,
    reward: LoggedReward,
    ks: list[int],
) -> OffPolicySetting | None:
    if options is None or (options.propensity == "logged" and not _has_propensities(data, split)):
        return None
    return off_policy_setting(options, data, reward, ks)


def _has_propensities(data: Prepared, split: Literal["valid", "test"]) -> bool:
    shards = (data.columns(split, shard, ["propensity", "is_target"]) for shard in range(data.num_shards(split)))
    return any(bool((~np.isnan(shard["propensity"]) & shard["is_target"]).any()) for shard in shards)


class _Evaluated(NamedTuple):
    contender: Contender
    value: OffPolicyResult | None
    max_history: int


@dataclass(frozen=True)
class _Pass:
    """What all contenders share."""

    data: Prepared
    split: Literal["valid", "test"]
    ks: Sequence[int]
    exclude_seen: bool
    gain: Gain
    bootstrap_resamples: int
    facts: ItemFacts
    segments: bool
    truth: TrueRewards | None
    off_policy: OffPolicySetting | None
    batch_size: int
    device: torch.device

    def evaluate(self, candidate: Candidate) -> _Evaluated:
        """One pass over the held-out users; the candidate is loaded for it and then forgotten."""
        recommender, max_history, policy = candidate.load()
        value = None if self.off_policy is None else self.off_policy.measure(policy)
        measures: list[Measure] = [BeyondAccuracy(self.facts, self.ks)]
        measures += [measure for measure in (self.truth, value) if measure is not None]
        result = evaluate_ranking(
            recommender,
            self._batches(max_history, candidate.name),
            num_items=self.data.num_items,
            ks=self.ks,
            exclude_seen=self.exclude_seen,
            gain=self.gain,
            measures=measures,
            user_segments=[history_length()] if self.segments else [],
            item_segments=item_segments(self.facts) if self.segments else [],
        )
        estimated = None if value is None else value.result()
        off_policy = (
            [] if estimated is None else [e.as_json() for e in estimated.estimates if e.target != LOGGING_POLICY]
        )
        return _Evaluated(Contender(candidate.name, candidate.kind, result, off_policy), estimated, max_history)

    def _batches(self, max_history: int, name: str) -> Iterator[EvaluationBatch]:
        users = sum(shard["users"] for shard in self.data.manifest["shards"][self.split])
        with tqdm(total=users, desc=f"evaluate {name}", unit="user", disable=None, leave=False) as bar:
            for batch in evaluation_batches(self.data.root, self.split, max_history, self.batch_size):
                yield move_data_to_device(batch, self.device)
                bar.update(len(batch.exclude))

    def document(
        self, candidates: Sequence[Candidate], evaluated: Sequence[_Evaluated], setting: dict[str, Any]
    ) -> dict[str, Any]:
        """Everything that was found, with what every number depends on; ``setting`` has more of that."""
        contenders = [one.contender for one in evaluated]
        values = {one.contender.name: one.value for one in evaluated if one.value is not None}
        described = {
            "recpo_version": __version__,
            "split": self.split,
            "ks": list(self.ks),
            "positive_threshold": self.data.feedback.rule.positive_threshold,
            "exclude_seen": self.exclude_seen,
            "gain": self.gain,
            "num_items": self.data.num_items,
            "catalog_checksum": self.data.catalog_checksum,
            "max_context": self.data.manifest["max_context"],
        }
        return evaluation_document(
            [*contenders, *logging_policy(contenders[0].result, values, self.truth)],
            values,
            data=self.data,
            runs={
                candidate.name: {**candidate.facts, "max_history": one.max_history}
                for candidate, one in zip(candidates, evaluated, strict=True)
                if candidate.facts
            },
            training={candidate.name: candidate.curves for candidate in candidates if candidate.curves},
            setting=described | setting,
            bootstrap_resamples=self.bootstrap_resamples,
        )


def _print(contenders: Sequence[Contender], document: dict[str, Any], out: Path) -> None:
    counts, setting, terminal = contenders[0].result.counts, document["setting"], console()
    k = setting["ks"][0]
    for warning in document["warnings"]:
        terminal.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    title = f"{setting['split']} period, {counts['users']:,} users, {setting['num_items']:,} items, all ranked"
    terminal.print(metrics_table(contenders, k, title=title))
    if len(contenders) > 1:
        terminal.print(differences_table(contenders, k))
    value = value_table(document)
    if value is not None:
        terminal.print(value)
    removed = counts["positive_events_removed_as_seen"]
    seen = f"excluded ({removed:,} positive events of seen items removed)" if setting["exclude_seen"] else "kept"
    terminal.print(
        f"seen items: {seen}; positives: label >= {setting['positive_threshold']:g} and not disliked, "
        f"{counts['users_with_positives']:,} users have some; {counts['users_with_dislikes']:,} have dislikes"
    )
    terminal.print(f"{out / REPORT}", soft_wrap=True)
