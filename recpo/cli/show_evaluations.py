"""What the verbs print that measure and choose: ``evaluate``, ``compare``, ``calibrate``, ``tilt`` and ``fit``."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.text import Text

from recpo.artifacts.checksums import kind_of
from recpo.base.errors import GateClosedError
from recpo.cli.output import VerbResult, command, configuration, decimals, evaluation_of, path_of, say, table, warn
from recpo.evaluation.evaluation import Evaluation, VariantEvaluation
from recpo.evaluation.reading import Document, best_by_value, best_first, candidates_sentence, further_at, shares_at
from recpo.evaluation.segments import NEW_METRICS
from recpo.evaluation.variants import INTERVALS
from recpo.training.learned_reward import CALIBRATION

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.table import Table

    from recpo.evaluation.calibration import CalibrationReport
    from recpo.evaluation.comparison import Comparison
    from recpo.training.tilting import TiltResult, TiltTrial
    from recpo.verbs import calibrate, compare, demo, evaluate, fit, tilt

_HEADINGS = ("NDCG", "Recall", "HitRate", "AUC_other", "disliked", "true_reward")
_COMPARED = ("NDCG", "Recall", "disliked", "true_reward", "true_dislike")
_MOST_FOR_ALL_PAIRS = 4


def show_evaluate(verb: evaluate.Evaluate, evaluation: Evaluation) -> VerbResult:
    """Prints the main tables; the run with the best value is exported next."""
    if isinstance(evaluation, VariantEvaluation):
        return _show_variants(evaluation)
    document = evaluation.document
    setting, counts = document["setting"], _ranked(document)[0]["counts"]
    warn(evaluation.warnings)
    for shown in (_metrics_table, _differences_table, _headroom_table, _new_items_table, _value_table):
        say(*filter(None, [shown(document)]))
    if document["candidates"] is not None:
        say(f"candidates: {candidates_sentence(document)}")
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
    document, about = evaluation.document, f"experiment {evaluation.document['experiment']}"
    warn(evaluation.warnings)
    names = ("value", "dislikes", "difference")
    if document["variants"]:
        rows = []
        for one in document["variants"]:
            cells = [_sequence_cell(one.get(name), signed=name == "difference") for name in names]
            rows.append((one["variant"], f"{one['users']:,}", f"{one['impressions']:,}", *cells))
        title = f"{about}; control {document['control']}"
        say(table(title, ("variant", "users", "impressions", *names), rows, caption=INTERVALS))
    if (found := document["preference"]) is not None:
        counts = f"{found['users']:,}", f"{found['impressions']:,}"
        shares = f"{100 * found['wins']:.1f} %", f"{100 * found['losses']:.1f} %"
        row = (f"{found['of']} over {found['over']}", *counts, _sequence_cell(found, signed=True), *shares)
        headings = ("preference", "users", "impressions", "credit", "won", "lost")
        say(table(f"{about}; interleaved lists", headings, [row], caption=INTERVALS))
    return VerbResult((evaluation.path, evaluation.report), result=document)


def _sequence_cell(value: Mapping[str, Any] | None, *, signed: bool) -> Text:
    cell = _cell(value, signed=signed)
    if value is not None and value["sequence"] is not None:
        cell.append("\n[{:.4f}, {:.4f}]".format(*value["sequence"]))
    return cell


def _metrics_table(document: Document) -> Table:
    """One row per contender: the main metrics at the first k with 95 % half-widths; the best of a column is bold."""
    setting, contenders, k = document["setting"], _ranked(document), document["setting"]["ks"][0]
    users = contenders[0]["counts"]["users"]
    title = f"{setting['split']} period, {users:,} users, {setting['num_items']:,} items, all ranked; lists of {k}"
    names = [*_shown(contenders, _HEADINGS, k), *further_at(document, k)]
    best = {name: best_first(document, name)[:1] if len(contenders) > 1 else [] for name in names}
    rows = []
    for one in contenders:
        cells = [_cell(one["metrics"].get(name), bold=one in best[name]) for name in names]
        rows.append((one["name"], *cells, f"{one['totals'][f'coverage@{k}']:.3f}"))
    headings = ("contender", *map(_heading, names), "coverage")
    return table(title, headings, rows, caption="mean ± half of the 95 % interval over users")


def _differences_table(document: Document) -> Table | None:
    """Paired differences of metrics at the first k, bold where they survive Holm's correction for all pairs.

    With up to four contenders, every pair; with more, each against the first. The document has every pair.
    """
    if not document["differences"]:
        return None
    contenders, k = _ranked(document), document["setting"]["ks"][0]
    ranked = [contender["name"] for contender in contenders]
    pairs = [pair for pair in document["differences"] if {pair["contender"], pair["against"]} <= set(ranked)]
    names = [*_shown(contenders, _COMPARED, k), *further_at(document, k)]
    family = "interval excludes 0" if len(pairs) == 1 else "survives Holm's correction for all pairs"
    rows: list[Sequence[str | Text]] = []
    for pair in pairs:
        if len(ranked) <= _MOST_FOR_ALL_PAIRS or pair["against"] == ranked[0]:
            found = [pair["metrics"].get(name) for name in names]
            cells = [_cell(value, bold=value is not None and value["survives_holm"], signed=True) for value in found]
            rows.append((f"{pair['contender']} - {pair['against']}", *cells))
    headings = ("contender - against", *map(_heading, names))
    title = f"paired differences on the same users; lists of {k}"
    return table(title, headings, rows, caption=f"bold: {family} (5 %)")


def _headroom_table(document: Document) -> Table | None:
    """Shares of the true value between the start and the oracle; None if the truth is not known."""
    k = document["setting"]["ks"][0]
    shares = shares_at(document, k)
    if not shares:
        return None
    found, ends = document["headroom"], document["headroom"]["metrics"][f"true_reward@{k}"]
    start = f"0 % = {found['start']}, {ends['start']:.4f}: {found['start_is']}; 100 % = oracle, {ends['oracle']:.4f}"
    rewards = {one["name"]: one["metrics"].get(f"true_reward@{k}") for one in document["contenders"]}
    rows: list[Sequence[str | Text]] = []
    for name, value in shares:
        width = "" if value["half_width"] is None else f" ±{100 * value['half_width']:.1f}"
        rows.append((name, _cell(rewards[name]), f"{100 * value['mean']:.1f}{width} %"))
    title = f"share of the headroom in true reward; lists of {k}"
    return table(title, ("contender", "true\nreward", "share"), rows, caption=start)


def _new_items_table(document: Document) -> Table | None:
    """Metrics of the contenders on candidates without a training event; None if there are none."""
    k, new = document["setting"]["ks"][0], document["new_items"]["items"]
    names = _shown(_ranked(document), NEW_METRICS, k)
    if not new or not names:
        return None
    title = f"{new:,} new items, candidates without an event in training; lists of {k}"
    rows = [(one["name"], *(_cell(one["metrics"].get(name)) for name in names)) for one in _ranked(document)]
    caption = "true reward: of the best new items as the contender ranks them"
    return table(title, ("contender", *map(_heading, names)), rows, caption=caption)


def _value_table(document: Document) -> Table | None:
    """Off-policy values of the policies and of their lists of the first k; None if the document has none."""
    k = document["setting"]["ks"][0]
    shown = [(target, estimator) for target in ("policy", f"top_{k}") for estimator in ("SNIPS", "DR")]
    found = {
        contender["name"]: {(entry["target"], entry["estimator"]): entry for entry in contender["off_policy"]}
        for contender in document["contenders"]
        if contender["kind"] != "oracle"
    }
    columns = [column for column in shown if any(column in row for row in found.values())]
    if not columns:
        return None
    rows = []
    for name, entries in found.items():
        earned = [entry for (_, estimator), entry in entries.items() if estimator == "mean"]
        rows.append((name, *(_value_cell(entries.get(column, earned[0] if earned else None)) for column in columns)))
    caption = "mean reward per exposure ± half of the 95 % interval; ! read the warnings in the report; - not known"
    return table("off-policy value", ("contender", *map("\n".join, columns)), rows, caption=caption)


def _ranked(document: Document) -> list[Document]:
    """All contenders except the logging policy, which makes no lists."""
    return [contender for contender in document["contenders"] if contender["counts"]]


def _value_cell(entry: Mapping[str, Any] | None) -> str:
    if entry is None or entry["value"] is None:
        return "-"
    ends = entry["intervals"]["normal"]
    half_width = "" if ends["low"] is None else f"\n±{(ends['high'] - ends['low']) / 2:.4f}"
    return f"{entry['value']:.4f}{' !' if entry['warnings'] else ''}{half_width}"


def _shown(contenders: Sequence[Document], headings: Sequence[str], k: int) -> list[str]:
    known = contenders[0]["metrics"]
    return [name for heading in headings for name in (f"{heading}@{k}", heading) if name in known]


def _heading(metric: str) -> str:
    return metric.split("@")[0].replace("_", "\n")


def _cell(value: Mapping[str, Any] | None, *, bold: bool = False, signed: bool = False) -> Text:
    if value is None or value["mean"] is None:
        return Text("-")
    text = f"{value['mean']:{'+' if signed else ''}.4f}"
    text += "" if value["half_width"] is None else f"\n±{value['half_width']:.4f}"
    return Text(text, style="bold" if bold else "")


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
        mean, half = row["difference"]["mean"], row["difference"]["half_width"]
        ends = (None, None) if mean is None or half is None else (mean - half, mean + half)
        yield (name, *(decimals(row[side]["mean"]) for side in ("old", "new")), _interval_text(mean, *ends))
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
    from recpo.verbs.fit import leaderboard_table  # here, because other verbs print without it

    found, rows = leaderboard_table(done.facts), []
    for row in found.rows:
        name = f"{row.name} (ships)" if row.name == done.chosen else row.name
        rows.append((name, *(f"{cell.text} {cell.note}".strip() for cell in row.cells)))
    say(table("contenders, the best first", found.head, rows, caption=found.caption))
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
