"""What the verbs print that measure: ``evaluate``, ``compare`` and ``calibrate``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from recpo.artifacts import kind_of
from recpo.base.errors import GateClosedError
from recpo.cli.output import VerbResult, command, configuration, console, path_of
from recpo.evaluation.evaluation import Evaluation, VariantEvaluation
from recpo.evaluation.reading import Document, best_by_value, best_first, candidates_sentence, further_at, shares_at
from recpo.evaluation.segments import NEW_METRICS
from recpo.evaluation.variants import INTERVALS
from recpo.training.learned_reward import CALIBRATION

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from recpo.evaluation.comparison import Comparison
    from recpo.evaluation.reward_comparison import CalibrationReport
    from recpo.verbs.calibrate import Calibrate
    from recpo.verbs.compare import Compare
    from recpo.verbs.evaluate import Evaluate

_HEADINGS = ("NDCG", "Recall", "HitRate", "AUC_other", "disliked", "true_reward")
_COMPARED = ("NDCG", "Recall", "disliked", "true_reward", "true_dislike")
_MOST_FOR_ALL_PAIRS = 4


def show_evaluate(verb: Evaluate, evaluation: Evaluation) -> VerbResult:
    """Prints the main tables; the run with the best value is exported next."""
    if isinstance(evaluation, VariantEvaluation):
        return _show_variants(evaluation)
    print_evaluation(evaluation)
    document = evaluation.document
    metrics = {one["name"]: one["metrics"] for one in document["contenders"]}
    runs = {name: one["path"] for name, one in document["provenance"]["runs"].items() if one["kind"] == "run"}
    best = best_by_value(document, list(runs))
    served = runs.get(best, next(reversed(runs.values()), None))
    following = None if served is None else command("export", "--run", served, "--out", "runs/bundle")
    return VerbResult(_written(evaluation), following, {"warnings": evaluation.warnings, "metrics": metrics})


def _written(evaluation: Evaluation) -> tuple[str, ...]:
    return () if evaluation.path is None else (str(evaluation.path), str(evaluation.report))


def _show_variants(evaluation: VariantEvaluation) -> VerbResult:
    document, terminal = evaluation.document, console()
    for warning in evaluation.warnings:
        terminal.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    names = ("value", "dislikes", "difference")
    if document["variants"]:
        table = _table(f"experiment {document['experiment']}; control {document['control']}", INTERVALS)
        for name in ("variant", "users", "impressions", *names):
            table.add_column(name, justify="left" if name == "variant" else "right")
        for one in document["variants"]:
            cells = [_sequence_cell(one.get(name), signed=name == "difference") for name in names]
            table.add_row(Text(one["variant"]), f"{one['users']:,}", f"{one['impressions']:,}", *cells)
        terminal.print(table)
    if (found := document["preference"]) is not None:
        table = _table(f"experiment {document['experiment']}; interleaved lists", INTERVALS)
        for name in ("preference", "users", "impressions", "credit", "won", "lost"):
            table.add_column(name, justify="left" if name == "preference" else "right")
        counts = f"{found['users']:,}", f"{found['impressions']:,}"
        shares = f"{100 * found['wins']:.1f} %", f"{100 * found['losses']:.1f} %"
        table.add_row(Text(f"{found['of']} over {found['over']}"), *counts, _sequence_cell(found, signed=True), *shares)
        terminal.print(table)
    return VerbResult(_written(evaluation), result=document)


def _sequence_cell(value: Mapping[str, Any] | None, *, signed: bool) -> Text:
    cell = _cell(value, signed=signed)
    if value is not None and value["sequence"] is not None:
        cell.append("\n[{:.4f}, {:.4f}]".format(*value["sequence"]))
    return cell


def print_evaluation(evaluation: Evaluation) -> None:
    """Prints the warnings, the main tables, and the path of the rest; names and paths are never read as markup."""
    document, terminal = evaluation.document, console()
    setting, counts = document["setting"], _ranked(document)[0]["counts"]
    for warning in evaluation.warnings:
        terminal.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    terminal.print(metrics_table(document))
    if document["differences"]:
        terminal.print(differences_table(document))
    for table in (headroom_table(document), new_items_table(document), value_table(document)):
        if table is not None:
            terminal.print(table)
    if document["candidates"] is not None:
        terminal.print(f"candidates: {candidates_sentence(document)}", soft_wrap=True)
    removed = counts["positive_events_excluded"]
    past = f"excluded ({removed:,} positive events of them removed)" if setting["exclude_past"] else "kept"
    terminal.print(
        f"items of a user's past: {past}; positives: label >= {setting['positive_threshold']:g} and not disliked, "
        f"{counts['users_with_positives']:,} users have some; {counts['users_with_dislikes']:,} have dislikes"
    )
    if evaluation.report is not None:
        terminal.print(str(evaluation.report), soft_wrap=True)


def metrics_table(document: Document) -> Table:
    """One row per contender: the main metrics at the first k with 95 % half-widths; the best of a column is bold."""
    setting, contenders, k = document["setting"], _ranked(document), document["setting"]["ks"][0]
    users = contenders[0]["counts"]["users"]
    title = f"{setting['split']} period, {users:,} users, {setting['num_items']:,} items, all ranked; lists of {k}"
    table = _table(title, "mean ± half of the 95 % interval over users")
    table.add_column("contender")
    names = [*_shown(contenders, _HEADINGS, k), *further_at(document, k)]
    best = {name: best_first(document, name)[:1] if len(contenders) > 1 else [] for name in names}
    for name in names:
        table.add_column(_heading(name), justify="right")
    table.add_column("coverage", justify="right")
    for contender in contenders:
        cells = [_cell(contender["metrics"].get(name), bold=contender in best[name]) for name in names]
        table.add_row(Text(contender["name"]), *cells, f"{contender['totals'][f'coverage@{k}']:.3f}")
    return table


def differences_table(document: Document) -> Table:
    """Paired differences of metrics at the first k, bold where they survive Holm's correction for all pairs.

    With up to four contenders, every pair; with more, each against the first. The document has every pair.
    """
    contenders, k = _ranked(document), document["setting"]["ks"][0]
    ranked = [contender["name"] for contender in contenders]
    pairs = [pair for pair in document["differences"] if {pair["contender"], pair["against"]} <= set(ranked)]
    names = [*_shown(contenders, _COMPARED, k), *further_at(document, k)]
    family = "interval excludes 0" if len(pairs) == 1 else "survives Holm's correction for all pairs"
    table = _table(f"paired differences on the same users; lists of {k}", f"bold: {family} (5 %)")
    table.add_column("contender - against")
    for name in names:
        table.add_column(_heading(name), justify="right")
    shown = pairs if len(ranked) <= _MOST_FOR_ALL_PAIRS else [pair for pair in pairs if pair["against"] == ranked[0]]
    for pair in shown:
        found = [pair["metrics"].get(name) for name in names]
        cells = [_cell(value, bold=value is not None and value["survives_holm"], signed=True) for value in found]
        table.add_row(Text(f"{pair['contender']} - {pair['against']}"), *cells)
    return table


def headroom_table(document: Document) -> Table | None:
    """Shares of the true value between the start and the oracle; None if the truth is not known."""
    k = document["setting"]["ks"][0]
    shares = shares_at(document, k)
    if not shares:
        return None
    found, ends = document["headroom"], document["headroom"]["metrics"][f"true_reward@{k}"]
    start = f"0 % = {found['start']}, {ends['start']:.4f}: {found['start_is']}; 100 % = oracle, {ends['oracle']:.4f}"
    table = _table(f"share of the headroom in true reward; lists of {k}", start)
    for name in ("contender", "true\nreward", "share"):
        table.add_column(name, justify="left" if name == "contender" else "right")
    rewards = {one["name"]: one["metrics"].get(f"true_reward@{k}") for one in document["contenders"]}
    for name, value in shares:
        width = "" if value["half_width"] is None else f" ±{100 * value['half_width']:.1f}"
        table.add_row(Text(name), _cell(rewards[name]), f"{100 * value['mean']:.1f}{width} %")
    return table


def new_items_table(document: Document) -> Table | None:
    """Metrics of the contenders on candidates without a training event; None if there are none."""
    k, new = document["setting"]["ks"][0], document["new_items"]["items"]
    names = _shown(_ranked(document), NEW_METRICS, k)
    if not new or not names:
        return None
    title = f"{new:,} new items, candidates without an event in training; lists of {k}"
    table = _table(title, "true reward: of the best new items as the contender ranks them")
    table.add_column("contender")
    for name in names:
        table.add_column(_heading(name), justify="right")
    for contender in _ranked(document):
        table.add_row(Text(contender["name"]), *(_cell(contender["metrics"].get(name)) for name in names))
    return table


def value_table(document: Document) -> Table | None:
    """Off-policy values of the policies and of their lists of the first k; None if the document has none."""
    k = document["setting"]["ks"][0]
    shown = [(target, estimator) for target in ("policy", f"top_{k}") for estimator in ("SNIPS", "DR")]
    rows = {
        contender["name"]: {(entry["target"], entry["estimator"]): entry for entry in contender["off_policy"]}
        for contender in document["contenders"]
        if contender["kind"] != "oracle"
    }
    columns = [column for column in shown if any(column in row for row in rows.values())]
    if not columns:
        return None
    caption = "mean reward per exposure ± half of the 95 % interval; ! read the warnings in the report; - not known"
    table = _table("off-policy value", caption)
    table.add_column("contender")
    for target, estimator in columns:
        table.add_column(f"{target}\n{estimator}", justify="right")
    for name, entries in rows.items():
        earned = [entry for (_, estimator), entry in entries.items() if estimator == "mean"]
        cells = [_value_cell(entries.get(column, earned[0] if earned else None)) for column in columns]
        table.add_row(Text(name), *cells)
    return table


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


def _table(title: str, caption: str) -> Table:
    # narrow enough for a terminal of 80 columns
    return Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )


def _cell(value: Mapping[str, Any] | None, *, bold: bool = False, signed: bool = False) -> Text:
    if value is None or value["mean"] is None:
        return Text("-")
    text = f"{value['mean']:{'+' if signed else ''}.4f}"
    text += "" if value["half_width"] is None else f"\n±{value['half_width']:.4f}"
    return Text(text, style="bold" if bold else "")


_SHOWN_ESTIMATORS = ("IPS", "SNIPS", "DR")
_COUNTS = ("short_lists", "unknown_items", "places_of_items_not_in_data")


def show_compare(verb: Compare, comparison: Comparison) -> VerbResult:
    """Prints the numbers; the new bundle is served next.

    Raises:
        GateClosedError: it violates a limit.
    """
    print_comparison(comparison)
    if comparison.failures:
        raise GateClosedError("; ".join(comparison.failures))
    wrote = () if comparison.path is None else (str(comparison.path),)
    return VerbResult(wrote, command("serve", "--bundle", path_of(verb.new)), comparison.document)


def print_comparison(comparison: Comparison) -> None:
    """Prints the warnings, one table, and the path of all numbers."""
    document, terminal = comparison.document, console()
    for warning in comparison.warnings:
        terminal.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    terminal.print(comparison_table(document))
    items = document["items"]
    terminal.print(
        f"items: {items['shared']:,} in both bundles, {items['only_old']:,} in the old one only, "
        f"{items['only_new']:,} in the new one only",
        soft_wrap=True,
    )
    if comparison.path is not None:
        terminal.print(str(comparison.path), soft_wrap=True)


def comparison_table(document: Mapping[str, Any]) -> Table:
    """Rows of agreement, value, ranking and lists: old, new, and new - old with its 95 % interval."""
    setting = document["setting"]
    title = f"{setting['split']} period, {setting['requests']:,} users, lists of {setting['k']}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("")
    for name in ("old", "new", "new - old (95 %)"):
        table.add_column(name, justify="right")
    for name, value in document["agreement"].items():
        table.add_row(name, "", "", _decimals(value["mean"]))
    for name, row in (document["value"] or {}).items():
        if name in _SHOWN_ESTIMATORS:
            difference = row["difference"]
            sides = (_decimals(row[side]["value"]) for side in ("old", "new"))
            table.add_row(
                f"value, {name}", *sides, _interval_text(difference["value"], difference["low"], difference["high"])
            )
    for name, row in document["ranking"].items():
        mean, half = row["difference"]["mean"], row["difference"]["half_width"]
        ends = (None, None) if mean is None or half is None else (mean - half, mean + half)
        table.add_row(name, *(_decimals(row[side]["mean"]) for side in ("old", "new")), _interval_text(mean, *ends))
    old, new = document["lists"]["old"], document["lists"]["new"]
    for name in (one for one, value in old.items() if not isinstance(value, int)):
        table.add_row(name, _decimals(old[name]), _decimals(new[name]), "")
    for name in _COUNTS:
        table.add_row(name.replace("_", " "), f"{old[name]:,}", f"{new[name]:,}", "")
    return table


def _decimals(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _interval_text(value: float | None, low: float | None, high: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:+.4f}" + ("" if low is None or high is None else f" [{low:+.4f}, {high:+.4f}]")


def show_calibrate(verb: Calibrate, report: CalibrationReport) -> VerbResult:
    """Prints the tables; the first calibrated reward model aligns a policy next."""
    print_report(report)
    following = None
    named = verb.rewards if isinstance(verb.rewards, list) else []
    runs = [one for one in named if isinstance(one, str) and kind_of(one) == "run"]
    if runs:
        reward = ("--reward", "LearnedReward", "--reward.init_args.run", runs[0])
        words = ("--config", configuration("mpo.yaml"), "--data.prepared", path_of(verb.prepared), *reward)
        following = command("train", *words, "--init_from", "runs/pretrain", "--out", "runs/mpo")
    return VerbResult(() if report.path is None else (str(report.path),), following, report.content)


def print_report(report: CalibrationReport) -> None:
    """The tables of the test period; a path is never read as markup."""
    terminal, content = console(), report.content
    terminal.print(_errors(content))
    terminal.print(_values(content))
    for note in content["notes"]:
        terminal.print(f"note: {note}", soft_wrap=True)
    for name, fitted in report.calibrations.items():
        error = fitted["targets"]["dislike"]["test"]["all"]
        before, after = (_metric_text(error[f"calibration_error{end}"]) for end in ("_uncalibrated", ""))
        terminal.print(
            f"{name}: {CALIBRATION} written; calibration error of dislikes {before} before, {after} after",
            soft_wrap=True,
        )
    if report.path is not None:
        terminal.print(f"{report.path}: every number with its 95 % interval", soft_wrap=True)


def _errors(content: dict[str, Any]) -> Table:
    table = _reward_table(
        "test period", ("reward", "shown"), ("number", "RMSE", "rank corr.", "per user", "dislike AUC")
    )
    for name, entry in content["rewards"].items():
        for group, found in entry["test"].items():
            metrics = ("rmse", "rank_correlation", "rank_correlation_per_user", "dislike_auc")
            table.add_row(
                name, group, f"{found['exposures']:,}", *(_metric_text(found.get(metric)) for metric in metrics)
            )
    return table


def _values(content: dict[str, Any]) -> Table:
    title = f"greedy lists of {content['k']}, mean reward per place"
    table = _reward_table(title, ("reward",), ("from the log (SNIPS)", "95 %", "true", "true dislikes"))
    rows = {**{name: entry["lists"] for name, entry in content["rewards"].items()}}
    for name, found in {**rows, "logging policy": content["logging_policy"]}.items():
        estimated = found.get("off_policy")
        interval = "-" if estimated is None else "-".join(_decimals(estimated[end], 3) for end in ("low", "high"))
        table.add_row(
            name,
            _metric_text(estimated),
            interval,
            _metric_text(found.get("true_reward")),
            _metric_text(found.get("true_dislike"), 4),
        )
    return table


def _reward_table(title: str, left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for column in left:
        table.add_column(column, no_wrap=True)
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _metric_text(metric: dict[str, float | None] | None, digits: int = 3) -> str:
    return _decimals(None if metric is None else metric["value"], digits)
