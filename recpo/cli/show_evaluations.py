"""What the verbs print that measure and choose: ``evaluate``, ``compare``, ``calibrate``, ``tilt`` and ``fit``."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from recpo.artifacts.checksums import kind_of
from recpo.artifacts.documents import path_of
from recpo.base.errors import GateClosedError
from recpo.cli.output import VerbResult, command, configuration, decimals, evaluation_of, say, show_tables, table, warn
from recpo.evaluation.evaluation import Evaluation, VariantEvaluation
from recpo.evaluation.html_report.parts import leaderboard_table
from recpo.evaluation.html_report.view import EvaluationView, variants_tables
from recpo.evaluation.reading import Document, best_by_value, ends_of
from recpo.training.learned_reward import CALIBRATION

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from recpo.evaluation.calibration import CalibrationReport
    from recpo.evaluation.comparison import Comparison
    from recpo.training.tilting import TiltResult, TiltTrial
    from recpo.verbs import calibrate, compare, demo, evaluate, fit, tilt


def show_evaluate(verb: evaluate.Evaluate, evaluation: Evaluation) -> VerbResult:
    """Prints the main tables; the run with the best value is exported next."""
    if isinstance(evaluation, VariantEvaluation):
        return _show_variants(evaluation)
    document = evaluation.document
    view = EvaluationView(document, narrow=True)
    setting, counts = document["setting"], view.ranked[0]["counts"]
    warn(evaluation.warnings)
    about = f"{setting['split']} period, {counts['users']:,} users, {setting['num_items']:,} items, all ranked"
    show_tables(about, view.main_table)
    show_tables("beyond accuracy", *view.totals)
    if document["differences"]:
        show_tables("paired differences on the same users", view.differences(view.compared_pairs))
    show_tables("share of the headroom in true reward", *view.headroom[:1])
    if new := document["new_items"]["items"]:
        show_tables(f"{new:,} new items", *view.new_items_tables[:1])
    for target in view.off_policy.targets:
        if target in ("policy", f"top_{view.k}"):
            show_tables("off-policy value", view.off_policy.values(target))
    if view.candidates:
        say(f"candidates: {view.candidates}")
    removed = counts["positive_events_excluded"]
    past = "kept" if setting["repeats"] else f"excluded ({removed:,} positive events of them removed)"
    say(
        f"items of a user's past: {past}; positives: label >= {setting['positive_threshold']:g} and not disliked, "
        f"{counts['users_with_positives']:,} users have some; {counts['users_with_dislikes']:,} have dislikes"
    )
    if evaluation.report is not None:
        say(str(evaluation.report))
    metrics = {one["name"]: one["metrics"] for one in document["contenders"]}
    runs = {name: one["path"] for name, one in document["provenance"]["runs"].items() if one["kind"] == "run"}
    best = best_by_value(document, list(runs))
    served = runs.get(best, next(reversed(runs.values()), None))
    following = None if served is None else command("export", "--run", served, "--out", "runs/bundle")
    facts = {"warnings": evaluation.warnings, "metrics": metrics}
    return VerbResult((evaluation.path, evaluation.report), following, facts)


def _show_variants(evaluation: VariantEvaluation) -> VerbResult:
    warn(evaluation.warnings)
    show_tables(f"experiment {evaluation.document['experiment']}", *variants_tables(evaluation.document, narrow=True))
    return VerbResult((evaluation.path, evaluation.report), result=evaluation.document)


_SHOWN_ESTIMATORS = ("IPS", "SNIPS", "DR")
_COUNTS = ("short_lists", "unknown_items", "places_of_items_not_in_data")


def show_compare(verb: compare.Compare, comparison: Comparison) -> VerbResult:
    """Prints the numbers; the new bundle is served next.

    Raises:
        GateClosedError: it violates a limit.
    """
    document, setting = comparison.document, comparison.document["setting"]
    warn(comparison.warnings)
    title = f"{setting['split']} period, {setting['requests']:,} users, lists of {setting['k']}"
    say(table(title, ("", "old", "new", "new - old (95 %)"), _comparison_rows(document)))
    items = document["items"]
    say(
        f"items: {items['shared']:,} in both bundles, {items['only_old']:,} in the old one only, "
        f"{items['only_new']:,} in the new one only"
    )
    if comparison.path is not None:
        say(str(comparison.path))
    if comparison.failures:
        raise GateClosedError("; ".join(comparison.failures))
    return VerbResult((comparison.path,), command("serve", "--bundle", path_of(verb.new)), comparison.document)


def _comparison_rows(document: Document) -> Iterator[tuple[str, ...]]:
    """Rows of agreement, value, ranking and lists: old, new, and new - old with its 95 % interval."""
    for name, value in document["agreement"].items():
        yield (name, "", "", decimals(value["mean"]))
    for name, row in (document["value"] or {}).items():
        if name in _SHOWN_ESTIMATORS:
            difference = _interval_text(*(row["difference"][end] for end in ("value", "low", "high")))
            yield (f"value, {name}", *(decimals(row[side]["value"]) for side in ("old", "new")), difference)
    for name, row in document["ranking"].items():
        mean = row["difference"]["mean"]
        difference = _interval_text(mean, *ends_of(mean, row["difference"]["half_width"]))
        yield (name, *(decimals(row[side]["mean"]) for side in ("old", "new")), difference)
    old, new = document["lists"]["old"], document["lists"]["new"]
    for name in (one for one, value in old.items() if not isinstance(value, int)):
        yield (name, decimals(old[name]), decimals(new[name]), "")
    for name in _COUNTS:
        yield (name.replace("_", " "), f"{old[name]:,}", f"{new[name]:,}", "")


def _interval_text(value: float | None, low: float | None, high: float | None) -> str:
    ends = "" if value is None or low is None or high is None else f" [{low:+.4f}, {high:+.4f}]"
    return decimals(value, sign="+") + ends


def show_calibrate(verb: calibrate.Calibrate, report: CalibrationReport) -> VerbResult:
    """Prints the tables; the first calibrated reward model aligns a policy next."""
    content, path = report.content, report.path
    headings = ("reward", "shown", "number", "RMSE", "rank corr.", "per user", "dislike AUC")
    say(table("test period", headings, _error_rows(content), names=2))
    columns = ("reward", "from the log (SNIPS)", "95 %", "true", "true dislikes")
    say(table(f"greedy lists of {content['k']}, mean reward per place", columns, _list_rows(content)))
    say(*(f"note: {note}" for note in content["notes"]))
    for name, fitted in report.calibrations.items():
        error = fitted["targets"]["dislike"]["test"]["all"]
        before, after = (_metric_text(error[f"calibration_error{end}"]) for end in ("_uncalibrated", ""))
        say(f"{name}: {CALIBRATION} written; calibration error of dislikes {before} before, {after} after")
    if path is not None:
        say(f"{path}: every number with its 95 % interval")
    following = None
    named = verb.rewards if isinstance(verb.rewards, list) else []
    runs = [one for one in named if isinstance(one, str) and kind_of(one) == "run"]
    if runs:
        reward = ("--reward", "LearnedReward", "--reward.init_args.run", runs[0])
        words = ("--config", configuration("mpo.yaml"), "--data.prepared", path_of(verb.prepared), *reward)
        following = command("train", *words, "--init_from", "runs/pretrain", "--out", "runs/mpo")
    return VerbResult((path,), following, content)


def _error_rows(content: Document) -> Iterator[tuple[str, ...]]:
    metrics = ("rmse", "rank_correlation", "rank_correlation_per_user", "dislike_auc")
    for name, entry in content["rewards"].items():
        for group, found in entry["test"].items():
            yield (name, group, f"{found['exposures']:,}", *(_metric_text(found.get(metric)) for metric in metrics))


def _list_rows(content: Document) -> Iterator[tuple[str, ...]]:
    rows = {name: entry["lists"] for name, entry in content["rewards"].items()}
    for name, found in {**rows, "logging policy": content["logging_policy"]}.items():
        estimated = found.get("off_policy")
        interval = "-" if estimated is None else "-".join(decimals(estimated[end], 3) for end in ("low", "high"))
        true = _metric_text(found.get("true_reward")), _metric_text(found.get("true_dislike"), 4)
        yield (name, _metric_text(estimated), interval, *true)


def _metric_text(metric: Mapping[str, float | None] | None, digits: int = 3) -> str:
    return decimals(None if metric is None else metric["value"], digits)


def watch_fit(verb: fit.Fit | demo.Demo) -> dict[str, Any]:
    """Prints every step with the time that is left."""
    return {"on_step": lambda text: print(text, flush=True)}


watch_demo = watch_fit  # the same steps


def show_fit(verb: fit.Fit, done: fit.Decision) -> VerbResult:
    """Prints the leaderboard and the answer; the bundle is served next."""
    show_decision(done)
    bundle = done.root / "bundle"
    facts = {name: done.facts[name] for name in ("chosen", "reason", "strongest_baseline", "gain", "p_value")}
    return VerbResult((done.root / "decision.json", done.report, bundle), command("serve", "--bundle", bundle), facts)


def show_decision(done: fit.Decision) -> None:
    """Prints the leaderboard and the answer."""
    show_tables("contenders, the best first", leaderboard_table(done.facts))
    warn(done.facts["advice"])
    print(f"ship {done.chosen}: {done.reason}")


_USERS = 3


def show_demo(verb: demo.Demo, done: fit.Decision) -> VerbResult:
    """Prints some lists of the bundle, the leaderboard and the answer; next comes the user's own log."""
    import pandas as pd

    from recpo.cli.show_outputs import lists_table

    histories = pd.read_parquet(done.root / "prepared" / "histories.parquet")
    some = histories[histories["user_id"].isin(histories["user_id"].unique()[:_USERS])]
    say(lists_table(some, done.bundle.recommend(some, k=10), _USERS))
    show_decision(done)
    print(f"everything that the demo wrote is in {verb.out}")
    return VerbResult((verb.out, done.report), command("fit", "YOUR_LOG"), {"chosen": done.chosen})


_NAMES = {
    "grade": "grade of the lists by a factorization of this period",
    "top_k": "off-policy value of the lists (SNIPS)",
    "policy": "off-policy value of the policy (SNIPS)",
    "auc": "AUC of positives against other exposures",
    "auc_mixed": "AUC of positives against other exposures (weight .6) and items never shown (.4)",
    "ndcg": "NDCG of the lists on logged positives",
    "monitor_reward": "monitor reward of the lists",
}


def show_tilt(verb: tilt.Tilt, found: TiltResult) -> VerbResult:
    """Prints the table of temperatures; the run, or the untilted one if it is kept, is evaluated next."""
    if found.trials and found.criterion is not None:
        title = f"validation period, lists of {found.k}; value: {_NAMES[found.criterion]}"
        caption = "± half of the 95 % interval; behind: the best less this one ± its standard error, same users"
        if any(not one.keeps_order for one in found.trials):
            caption += "; -: not chosen, as its AUC is lower than the highest by more than a standard error"
        headings = ("temp.", "value", "±", "behind", "±", "rows", "grade", "SNIPS", "AUC", "NDCG", "coverage", "KL")
        say(table(title, headings, (_trial_row(one, found.temperature) for one in found.trials), caption=caption))
    if found.run is None:
        say(
            "no temperature is better than the untilted policy: keep the run as it is; nothing was written. "
            "--temperature NUMBER writes a tilted run regardless"
        )
    else:
        taken = [one.value for one in found.trials if one.temperature == found.temperature]
        if taken and taken[0] < found.trials[0].value:
            warn(["by this criterion the untilted policy is worth more"])
        say(f"{found.run.root}: tilted with temperature {found.temperature:g}, lower bound {found.lower_bound:g}")
    facts = {"temperature": found.temperature, "lower_bound": found.lower_bound, "trials": [*map(asdict, found.trials)]}
    wrote = None if found.run is None else found.run.root
    return VerbResult((wrote,), evaluation_of(wrote or path_of(verb.run), path_of(verb.prepared or "prepared")), facts)


def _trial_row(trial: TiltTrial, chosen: float) -> tuple[str, ...]:
    name = "base" if trial.temperature == math.inf else f"{trial.temperature:g}"
    numbers = map(decimals, (trial.value, trial.half_width, trial.loss, trial.loss_error))
    others = map(decimals, (trial.grade, trial.top_k, trial.auc, trial.ndcg, trial.coverage))
    rows = "-" if math.isnan(trial.effective_rows) else f"{trial.effective_rows:,.0f}"
    name += " *" if trial.temperature == chosen else "" if trial.keeps_order else " -"
    return (name, *numbers, rows, *others, decimals(trial.kl, 2))
