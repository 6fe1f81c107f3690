"""The report and its charts from hand-made documents: hostile names, missing numbers, one contender."""

from __future__ import annotations

import math
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import yaml
from hypothesis import example, given, strategies as st

from recpo.evaluation.document import with_holm
from recpo.evaluation.html_report import svg
from recpo.evaluation.html_report.view import EvaluationView, html_report

HOSTILE = "<script>alert('x')</script>\"&]]>--> {{ 7*7 }}"
TAIL = {"quantile_99": 9.0, "largest": 12.0, "largest_share": 0.02, "pareto_k": None, "zero_share": 0.5}


def estimate(mean, half_width=0.01, n=200):
    return {"mean": mean, "half_width": half_width, "n": n, "differing": n}


def value(target, estimator, number, warnings=()):
    ends = {"low": None if number is None else number - 0.1, "high": None if number is None else number + 0.1}
    diagnostics = {"rows": 900, "effective_rows": 321.0, "effective_users": 80.0, "mean_weight": 1.01}
    diagnostics |= {"tail": TAIL, "unsupported_share": None}
    return {
        "target": target,
        "estimator": estimator,
        "value": number,
        "intervals": dict.fromkeys(("normal", "bootstrap"), ends),
        "effective_sample_size": 321.0,
        "rows": 900,
        "users": 90,
        "propensity": "logged",
        "diagnostics": diagnostics,
        "warnings": list(warnings),
        "standard_error": None if number is None else 0.05,
    }


def contender(name, kind, mean, off_policy=()):
    metrics = {f"{m}@{k}": estimate(mean) for m in ("NDCG", "disliked", "novelty") for k in (5, 100)}
    return {
        "name": name,
        "kind": kind,
        "counts": {"users": 250, "users_with_positives": 200, "users_with_dislikes": 0, "positive_events": 900},
        "metrics": metrics | {"AUC_other": estimate(None, None, 0)},
        "totals": {"coverage@5": 0.25, "gini@5": None},
        "segments": {HOSTILE: {"few": {"NDCG@5": estimate(mean)}, "many": {"NDCG@5": estimate(None, None, 0)}}},
        "off_policy": list(off_policy),
    }


def document_of(contenders):
    differences = []
    for index, later in enumerate(contenders):
        for earlier in contenders[:index]:
            metrics = {
                name: estimate(later["metrics"][name]["mean"] - earlier["metrics"][name]["mean"])
                for name in ("NDCG@5", "disliked@5")
            }
            names = {"contender": later["name"], "against": earlier["name"]}
            differences.append({**names, "metrics": metrics, "off_policy": [value("policy", "SNIPS", 0.5)]})
    group = {"name": HOSTILE, "events": 10, "positive": 4, "neutral": 3, "negative": 2, "unlabeled": 1}
    return {
        "candidates": None,
        "new_items": {"items": 0, "remark": None},
        "setting": {
            "recpo_version": "1",
            "split": "test",
            "ks": [5, 100],
            "num_items": 1000,
            "segments": {HOSTILE: ["few", "many"]},
            "repeats": False,
            "positive_threshold": 0.75,
        },
        "conventions": {"ndcg": HOSTILE},
        "warnings": [HOSTILE],
        "contenders": contenders,
        "differences": with_holm(differences),
        "labels": {"threshold": 0.75, "periods": {"test": [{**group, "histogram": [0] * 10}], "train": []}},
        "training": {c["name"]: {"train/loss": [[0.0, 1.0], [9.0, 0.5]]} for c in contenders if c["kind"] == "run"},
        "provenance": {
            "data": {"prepared": HOSTILE, "items": 1000},
            "runs": {HOSTILE: {"kind": "run", "path": HOSTILE, "max_history": 20, "configuration": HOSTILE}},
        },
    }


def several(number=3):
    runs = [contender(f"{HOSTILE}{i}", "run", 0.2 + i / 100, [value("policy", "SNIPS", 0.4)]) for i in range(number)]
    logged = contender("logging policy", "baseline", 0.1, [value("logging policy", "mean", 0.3)])
    ends = {"start": 0.1, "oracle": 0.9, "contenders": {f"{HOSTILE}0": estimate(0.25)}}
    headroom = {"start": HOSTILE, "start_is": HOSTILE, "metrics": {"true_reward@5": ends}}
    document = document_of([*runs, {**logged, "counts": {}, "totals": {}, "segments": {}}])
    return document | {"headroom": headroom}


class Text(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.heads, self.text = [], [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.heads += [dict(attributes).get("scope")] if tag == "th" else []

    def handle_data(self, data):
        self.text += data


def test_hostile_strings_are_text_everywhere():
    page = html_report(several())
    found = Text(page)
    assert "script" not in found.tags
    assert "<script" not in page
    assert "7*7" in page
    assert "49" not in found.text.split("Warnings")[-1].split("Paired differences")[0]
    assert found.text.count("alert('x')") > 10


def test_every_table_has_heads_and_every_chart_a_title():
    page = html_report(several())
    found = Text(page)
    assert set(found.heads) == {"col", "row"}
    assert found.tags.count("caption") == found.tags.count("table")
    for chart in page.split("<svg")[1:]:
        tree = ElementTree.fromstring("<svg" + chart.split("</svg>")[0] + "</svg>")
        assert [child.tag for child in tree][:2] == ["title", "desc"]
        assert tree.get("role") == "img"


def test_the_same_document_gives_the_same_page_and_more_contenders_than_colors_are_drawn():
    document = several(12)
    page = html_report(document)
    assert page == html_report(document)
    assert "s3 again" in page
    assert "all 78 pairs" in page


def test_tables_and_differences_begin_with_what_the_answer_is_about():
    """By NDCG, the first contender would lead; what users get is the criterion, and it leads to the last."""
    contenders = [contender(f"run-{i}", "run", 0.3 - i / 100) for i in range(9)]
    for place, one in enumerate(contenders):
        one["metrics"]["true_reward@5"] = estimate(0.1 + place / 100)
    view = EvaluationView(document_of(contenders))
    assert view.answer.best == "run-8"
    assert view.main_table.head[:3] == ["contender", "true_reward ↑", "NDCG ↑"]
    assert view.compared_pairs == [("run-8", f"run-{i}") for i in reversed(range(8))]


def test_one_contender_without_off_policy_values_leaves_those_sections_out():
    document = document_of([contender("only", "baseline", 0.1)])
    page = html_report({**document, "warnings": []})
    for heading in ("Paired differences", "Off-policy value", "Training curves"):
        assert f"{heading}</h2>" not in page
    assert "nothing was found that makes these numbers weaker" in page


@pytest.mark.parametrize("target", ["policy", "top_5", "discounted_5"])
def test_the_values_of_every_target_are_explained(target):
    page = html_report(document_of([contender("one", "run", 0.1, [value(target, "SNIPS", 0.4)])]))
    assert f"{target}: an item" in Text(page).text


def runs_of(*recipes):
    """Runs with these configurations, the first of a contender named by its place."""
    document = document_of([contender(f"run-{i}", "run", 0.2 + i / 100) for i in range(len(recipes))])
    facts = [{"kind": "run", "path": f"out/run-{i}", "max_history": 20} for i in range(len(recipes))]
    for fact, recipe in zip(facts, recipes, strict=True):
        fact["configuration"] = yaml.safe_dump(recipe)
    return document | {"provenance": {"data": {}, "runs": {f"run-{i}": fact for i, fact in enumerate(facts)}}}


def test_training_seeds_of_one_recipe_are_one_row_with_their_spread():
    pretrained = [{"objective": "Likelihood", "seed": i, "data": {"seed": i}, "out": f"o{i}"} for i in range(2)]
    aligned = [{"objective": "DPO", "seed": i, "init_from": f"out/run-{i}"} for i in range(2)]
    only = runs_of(*pretrained)
    assert [row.name for row in EvaluationView(only).rows] == ["run (2 seeds)"]
    document = runs_of(*pretrained, *aligned, {"objective": "DPO", "seed": 2, "init_from": "elsewhere"})
    view = EvaluationView(document)
    assert [len(row.members) for row in view.rows] == [2, 2, 1]
    assert [row.name for row in view.rows] == ["run-0, run-1", "run-2, run-3", "run-4"]
    assert view.main_table.rows[0].cells[0] == ("0.2050", "0.2000 to 0.2100", "")
    assert len(view.all_metrics[0][1].rows) == 5
    copies = runs_of(pretrained[0], pretrained[0], {**pretrained[1], "dim": 8})
    assert [len(row.members) for row in EvaluationView(copies).rows] == [1, 1, 1]


@pytest.mark.parametrize(
    ("kinds", "best", "against", "difference"),
    [
        (["baseline", "baseline", "run"], "c", "b", "+0.2000"),
        (["run", "baseline", "run"], "c", "b", "+0.2000"),
        (["run", "run", "baseline"], "b", "c", "\u22120.2000"),
        (["run", "run", "oracle"], "b", "a", "+0.1000"),
    ],
)
def test_the_answer_compares_the_best_with_the_strongest_baseline(kinds, best, against, difference):
    document = document_of([contender(*one) for one in zip("abc", kinds, (0.1, 0.2, 0.4), strict=True)])
    answer = EvaluationView(document).answer
    assert (answer.metric, answer.best, answer.against, answer.difference) == ("NDCG@5", best, against, difference)
    assert answer.beyond_doubt
    text = Text(html_report(document)).text
    assert text.index("Answer", text.index("Conventions")) < text.index("lists of 5; mean")
    assert "This is beyond doubt" in text
    for pair in document["differences"]:
        pair["metrics"]["NDCG@5"]["survives_holm"] = False
    assert "This may be chance" in html_report(document)


def test_without_any_value_the_answer_says_so():
    document = document_of([contender("a", "run", None)])
    assert EvaluationView(document).answer is None
    assert "No contender has a value of NDCG@5" in html_report(document)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (0.12345, "0.1235"),
        (-0.5, "\u22120.5000"),
        (12.3456, "12.35"),
        (3.0, "3"),
        (123456, "123,456"),
        (1e-7, "1e\u221207"),
        (math.nan, "-"),
    ],
)
def test_numbers_are_short(number, text):
    assert svg.number_text(number) == text


values = st.floats(-1e6, 1e6)


@given(st.lists(st.tuples(values, st.floats(0, 1e3)), min_size=1, max_size=6), st.booleans())
def test_everything_is_drawn_within_the_chart(rows, with_zero):
    intervals = [svg.IntervalRow(HOSTILE, mean, mean - half, mean + half, "s0") for mean, half in rows]
    drawn = ElementTree.fromstring(svg.interval_chart("t", "d", intervals, with_zero=with_zero).svg)
    height = float(drawn.get("viewBox").split()[3])
    for circle in drawn.iter("circle"):
        assert 0 <= float(circle.get("cx")) <= svg.WIDTH
        assert 0 <= float(circle.get("cy")) <= height


@given(st.lists(st.tuples(values, values), min_size=1, max_size=8), st.integers(1, 6))
@example([(5e-324, 0.0), *((10.0**power, 1.0) for power in range(7))], 1)
def test_lines_lie_within_the_chart(points, number):
    lines = [svg.Line(HOSTILE, [svg.Point(x, y, y, y) for x, y in sorted(points)], "s0")] * number
    drawn = ElementTree.fromstring(svg.line_chart("t", "d", lines, x_label="x").svg)
    for line in drawn.iter("polyline"):
        for place in line.get("points").split():
            x, y = map(float, place.split(","))
            assert -15 <= x <= svg.WIDTH + 15
            assert 0 <= y <= 210


def test_bars_are_as_wide_and_as_high_as_their_shares():
    parts = [("positive", "up", 0.25), ("negative", "down", 0.75)]
    drawn = ElementTree.fromstring(svg.shares_chart("t", "d", [svg.Shares("a", parts, "9")]).svg)
    widths = [float(bar.get("width")) for bar in drawn.iter("rect")]
    assert widths[1] / widths[0] == pytest.approx(3, abs=0.01)
    drawn = ElementTree.fromstring(svg.histogram_chart("t", "d", [svg.Histogram("a", [1, 3, 0, 0], "4")]).svg)
    heights = [float(bar.get("height")) for bar in drawn.iter("rect")]
    assert heights[1] / heights[0] == pytest.approx(3, abs=0.05)
    assert heights[2:] == [0, 0]


def test_an_empty_chart_is_still_a_chart():
    for drawn in (
        svg.interval_chart("t", "d", []),
        svg.interval_chart("t", "d", [svg.IntervalRow("a", None, None, None, "s0")]),
        svg.line_chart("t", "d", [], x_label="x"),
        svg.shares_chart("t", "d", []),
        svg.histogram_chart("t", "d", []),
    ):
        assert ElementTree.fromstring(drawn.svg).tag == "svg"
