"""The report of an evaluation: one HTML file that opens offline, built from the document of ``metrics.json``."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from recpo.evaluation.html_report import charts, tables
from recpo.evaluation.html_report.blocks import Block, Details, Figures, Lines, Listing, Section, Text
from recpo.evaluation.html_report.new_items_section import new_item_blocks
from recpo.evaluation.html_report.off_policy_section import value_blocks
from recpo.evaluation.reading import Document, further_metrics, reading
from recpo.evaluation.segments import NEW_METRICS

_KINDS = {
    "run": ("trained run", "trained runs"),
    "bundle": ("bundle", "bundles"),
    "factors": ("factor model", "factor models"),
    "lists": ("system given by its lists", "systems given by their lists"),
    "baseline": ("baseline", "baselines"),
    "oracle": ("oracle", "oracles"),
    "reranked": ("contender with re-ranked lists", "contenders with re-ranked lists"),
}


def html_report(document: Document) -> str:
    """The whole page. Everything in it comes from ``document``; nothing is loaded from elsewhere.

    Args:
        document: see ``recpo.evaluation.document.evaluation_document``.
    """
    setting = document["setting"]
    counts = tables.ranked(document)[0][1]["counts"]
    names = ", ".join(contender["name"] for contender in document["contenders"])
    return render_page(
        f"Offline evaluation, {setting['split']} period",
        f"{names}: {counts['users']:,} users, {setting['num_items']:,} items, every item ranked",
        _sections(document),
        version=setting["recpo_version"],
        numbers="metrics.json",
    )


def render_page(title: str, subtitle: str, sections: Sequence[Section], *, version: str, numbers: str) -> str:
    """A page of sections. Sections without blocks are omitted.

    Args:
        title: heading of the page.
        subtitle: text below the heading.
        sections: the sections, in order.
        version: version of recpo that wrote the numbers.
        numbers: name of the file with the same numbers.
    """
    environment = Environment(
        loader=PackageLoader("recpo.evaluation", "html_report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja").render(
        title=title,
        subtitle=subtitle,
        sections=[section for section in sections if section.blocks],
        version=version,
        numbers=numbers,
    )


def _sections(document: Document) -> list[Section]:
    several = len(tables.ranked(document)) > 1
    return [
        Section("warnings", "Warnings", _warnings(document)),
        Section("summary", "Summary", _summary(document)),
        Section("metrics", "Metrics", [tables.main_table(document), *tables.all_metrics_tables(document)]),
        Section("headroom", "Headroom", tables.headroom_tables(document)),
        Section("differences", "Paired differences", _differences(document) if several else []),
        Section("plots", "Plots", _plots(document)),
        Section("segments", "Segments", _segments(document)),
        Section("new-items", "New items", new_item_blocks(document)),
        Section("beyond-accuracy", "Beyond accuracy", _beyond_accuracy(document)),
        Section("off-policy", "Off-policy value", value_blocks(document)),
        Section("labels", "Reward shaping", _labels(document["labels"])),
        Section("training", "Training curves", [charts.training_charts(document)] if document["training"] else []),
        Section("data", "Data and configuration", _data(document)),
        Section("conventions", "Conventions", [_conventions(document)]),
    ]


def _warnings(document: Document) -> list[Block]:
    if not document["warnings"]:
        return [Text("None: nothing was found that makes these numbers weaker than they look.")]
    return [Lines(document["warnings"])]


def _summary(document: Document) -> list[Block]:
    setting = document["setting"]
    ranked = [contender for _, contender in tables.ranked(document)]
    counts = ranked[0]["counts"]
    numbers = {kind: sum(contender["kind"] == kind for contender in ranked) for kind in _KINDS}
    listed = ", ".join(f"{number} {_KINDS[kind][number > 1]}" for kind, number in numbers.items() if number)
    what = (
        f"{listed}, on the {setting['split']} period: every one of {setting['num_items']:,} items was ranked for "
        f"each of {counts['users']:,} users. {counts['users_with_positives']:,} of them have positives and "
        f"{counts['users_with_dislikes']:,} have disliked items."
    )
    return [Text(what), Lines(reading(document))]


def _differences(document: Document) -> list[Block]:
    k = document["setting"]["ks"][0]
    names = tables.metrics_at(document, ("NDCG", "disliked", "true_reward"), k)
    found: list[Block] = [
        Text(
            "Both contenders of a pair are evaluated on the same users, so these intervals are narrower than those of "
            f"the means suggest. {_comparisons(document)}"
        ),
        tables.differences_table(document),
        Figures([charts.difference_chart(document, metric) for metric in names]),
    ]
    every = tables.all_pairs(document)
    if len(every) > len(tables.compared_pairs(document)):
        found.append(Details(f"all {len(every)} pairs", [tables.differences_table(document, every)]))
    return found


def _comparisons(document: Document) -> str:
    k = document["setting"]["ks"][0]
    number = sum(f"NDCG@{k}" in difference["metrics"] for difference in document["differences"])
    if number == 1:
        return "There is one comparison per metric; looking at many metrics still finds differences by accident."
    return (
        f"With {number} comparisons on a metric, {number * 0.05:.1f} intervals are expected to miss 0 by accident even "
        "if all contenders were equal: trust those marked *, which hold together at 5 % (Holm). The correction is for "
        "one metric at a time: decide which one counts before looking."
    )


def _plots(document: Document) -> list[Block]:
    found: list[Block] = [charts.metric_charts(document)]
    return found + ([charts.over_k_charts(document)] if len(document["setting"]["ks"]) > 1 else [])


def _segments(document: Document) -> list[Block]:
    k = document["setting"]["ks"][0]
    metric = f"NDCG@{k}"
    segments = document["setting"]["segments"]
    if not segments:
        return []
    listed = [tables.segment_table(document, segment, metric) for segment in segments]
    return [charts.segment_charts(document, metric), Details("the numbers", listed)]


def _beyond_accuracy(document: Document) -> list[Block]:
    ks = document["setting"]["ks"]
    known = {*tables.ACCURACY, *tables.DISLIKES, *tables.TRUE, *NEW_METRICS}
    further = further_metrics(document)
    every = [metric for metric in tables.every_metric(document) if "@" in metric and metric not in further]
    beyond = [metric for metric in every if metric.split("@")[0] not in known]
    totals = list(dict.fromkeys(total for _, contender in tables.ranked(document) for total in contender["totals"]))
    found: list[Block] = []
    if totals:
        found.append(tables.totals_table(document, totals))
    for k in ks:
        if at_k := [metric for metric in beyond if metric.endswith(f"@{k}")]:
            found.append(tables.metrics_table(document, at_k, f"lists of {k}", is_ranked=False))
    return found


def _labels(labels: Document | None) -> list[Block]:
    if labels is None:
        return []
    return [
        Text(
            "What the policies are rewarded with, by duration of the item. Quantiles that lean to one side in a bucket "
            "mean that watch time there is not comparable with other durations, or that the held-out period differs "
            f"from training. +1: a label of at least {labels['threshold']:g} without a dislike."
        ),
        charts.label_share_charts(labels),
        charts.quantile_charts(labels),
    ]


def _data(document: Document) -> list[Block]:
    provenance = document["provenance"]
    setting = {name: value for name, value in document["setting"].items() if name != "segments"}
    found: list[Block] = [tables.facts_table("data", provenance["data"]), tables.facts_table("setting", setting)]
    for name, run in provenance["runs"].items():
        facts = {key: value for key, value in run.items() if key != "configuration"}
        blocks: list[Block] = [tables.facts_table("run", facts)]
        blocks += [Listing(run["configuration"])] if run.get("configuration") else []
        found.append(Details(name, blocks))
    return found


def _conventions(document: Document) -> Block:
    return tables.facts_table("how to read the numbers", document["conventions"])
