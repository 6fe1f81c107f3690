"""``recpo evaluate``: full-catalog ranking and off-policy value of policies, bundles and baselines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from recpo.cli.output import console
from recpo.cli.verb_results import VerbResult, after_evaluate
from recpo.data.prepared import Prepared
from recpo.evaluation.candidates import CandidateTable
from recpo.evaluation.contenders import Baseline, default_baselines
from recpo.evaluation.disagreement import best_by_value
from recpo.evaluation.evaluation import Evaluation
from recpo.evaluation.headroom import shares_at
from recpo.evaluation.html_report.new_items_section import candidates_sentence
from recpo.evaluation.lists import Lists
from recpo.evaluation.new_items import NEW_METRICS
from recpo.evaluation.reading import Document, best_first
from recpo.reranking import Reranker
from recpo.workflows.evaluate import evaluate as evaluate_contenders

_HEADINGS = ("NDCG", "Recall", "HitRate", "AUC_other", "disliked", "true_reward")
_COMPARED = ("NDCG", "Recall", "disliked", "true_reward", "true_dislike")
_MOST_FOR_ALL_PAIRS = 4
_T = TypeVar("_T")


def evaluate(
    prepared: str | Path,
    out: Path,
    run: list[Path] | Path = [],  # noqa: B006  jsonargparse prints it
    bundle: list[Path] | Path = [],  # noqa: B006
    factors: list[Path] | Path = [],  # noqa: B006
    lists: list[str] | str = [],  # noqa: B006
    baselines: list[Baseline] | None = None,
    ks: list[int] = [10, 50],  # noqa: B006
    baseline_cache: Path | None = None,
    truth: Path | None = None,
    candidates: CandidateTable | Path | None = None,
    rerank: list[Reranker] | Reranker = [],  # noqa: B006
    trust: list[str] = [],  # noqa: B006
    **options: Any,
) -> VerbResult:
    """Evaluates policies, bundles and baselines on the same held-out users, with paired differences.

    Computes full-catalog ranking metrics, beyond-accuracy metrics, off-policy value and paired differences. Writes a
    directory with metrics.json (every number), report.html (one file, opens offline) and resolved.yaml (options that
    reproduce the result), and prints the main tables.

    Args:
        prepared: directory written by ``recpo prepare``.
        out: output directory.
        run: run directory written by ``recpo train``, or a list of them, ``[runs/a, runs/b]``, on the same items.
        bundle: bundle directory written by ``recpo export``, or a list of them; a bundle ranks, but gives no
            probabilities of logged items.
        factors: directory written by ``recpo factorize``, or a list of them.
        lists: recommendations of any other system, ``NAME=FILE`` or a list of them: a Parquet file, a directory of
            such files, or a CSV file, with the columns user_id, item_id and rank (1 = best) or score (higher = better),
            in the ids of the log.
        baselines: popularity (training events), positives (training positives), recency (training events, newer ones
            counting more), cooccurrence (items near the user's last ones), factorization (matrix factorization of
            graded feedback), implicit_als (alternating least squares on positives), ease (linear model of items by
            items, for catalogs up to 10,000 items), random. The logging policy is added if its value is known. null =
            popularity, recency, cooccurrence, random, and factorization if the log has grades.
        ks: list lengths; the tables show the first.
        baseline_cache: directory of fitted baselines, which evaluations of the same data can share; null = in ``out``,
            where a later evaluation that replaces this one reads them. Each baseline is fitted once per data and
            options.
        truth: directory written by ``recpo simulate``; adds the true expected reward and the true probability of a
            dislike (means over the first k places, on the first day of the period), the oracle, which lists every
            user's best items, and each contender's share of the oracle's gain over the pre-trained policy.
        candidates: items that could be listed at the start of the period: a Parquet file of items (item_id and
            optionally available_from and available_until), a CandidateTable with other column names, or the word all.
            null = the times of the prepared data, or every item if the data have no times. Items that were not
            available are in no list and are no targets.
        rerank: also evaluate every run, bundle and factor model with re-ranked lists (slates of the first k):
            MaximalMarginalRelevance, Determinantal, AttributeCap or Calibration of ``recpo.reranking``, or a list of
            them (``docs/exploration.md``).
        trust: packages, in addition to recpo, whose classes the configurations of the runs may name.
        **options: those of ``recpo.workflows.evaluate.evaluate``.
    """
    data = Prepared.open(prepared)
    if baselines is None:
        baselines = default_baselines(data)
        if "factorization" not in baselines:
            console().print("no baseline factorization: the train or the validation period has no graded event")
    found = evaluate_contenders(
        data,
        contenders=[*baselines, *_listed(run), *_listed(bundle), *_listed(factors), *map(Lists.parse, _listed(lists))],
        out=out,
        ks=ks,
        baseline_cache=baseline_cache,
        truth=truth,
        candidates=candidates,
        rerank=_listed(rerank),
        trust=trust,
        progress=True,
        **options,
    )
    print_evaluation(found)
    metrics = {one["name"]: one["metrics"] for one in found.document["contenders"]}
    return after_evaluate(out, _best_run(found.document), {"warnings": found.warnings, "metrics": metrics})


def _best_run(document: Document) -> Path | None:
    """The directory of the run with the best value; None without runs."""
    origins = document["provenance"]["runs"]
    paths = {name: Path(origin["path"]) for name, origin in origins.items() if origin.get("kind") == "run"}
    best = best_by_value(document, list(paths)) or next(reversed(paths), None)
    return None if best is None else paths[best]


def _listed(given: list[_T] | _T) -> list[_T]:
    return given if isinstance(given, list) else [given]


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
    names = _shown(contenders, _HEADINGS, k)
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
    names = _shown(contenders, _COMPARED, k)
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
