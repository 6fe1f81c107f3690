"""The model card of a bundle: what the policy is, what it was trained on, what is known of it and what is not.

Every number comes from a manifest: the bundle's own, the run's (``run.json``, ``origin.json``) or an evaluation's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recpo.serving.manifest import BundleManifest

MODEL_CARD = "README.md"
_UNKNOWN = "not recorded"


def model_card(manifest: BundleManifest, facts: Mapping[str, Any]) -> str:
    """The card of a bundle as Markdown.

    Args:
        manifest: manifest of the bundle, without its files.
        facts: of the run, as ``recpo.serving.of_runs.card_facts`` gathers them; missing facts are marked as missing.
    """
    origin = manifest.origin
    parts = [
        f"# {_plain(origin.get('run', 'policy'))}: a recommendation policy\n",
        _what(manifest),
        "## Data\n\n" + _data(facts.get("data")),
        "## Training\n\n" + _rows(("", ""), _training(manifest, facts)),
        "## Metrics\n\n" + _metrics(facts),
        "## Limits\n\n" + "".join(f"- {limit}\n" for limit in _limits(manifest)),
        _SERVING,
    ]
    return "\n".join(parts)


def refreshed_card(manifest: BundleManifest, root: Path) -> str:
    """The card of a bundle that has got more items: that of the bundle in ``root``, and what has changed.

    Args:
        manifest: of the new bundle.
        root: the bundle that it was made from.
    """
    file = root / MODEL_CARD
    before = file.read_text(encoding="utf-8") if file.is_file() else model_card(manifest, {})
    return (
        f"{before}\n## Refreshed\n\nItems were added after training, with vectors from their features: the catalog has "
        f"{manifest.num_items:,} items now. The numbers above are of the catalog before.\n"
    )


def _what(manifest: BundleManifest) -> str:
    read = "items, feedback and times" if manifest.reads_timestamps else "items and feedback"
    name = _plain(str(manifest.policy["class"]).rpartition(".")[2])
    recpo, torch = (_plain(manifest.versions.get(library, _UNKNOWN)) for library in ("recpo", "torch"))
    return (
        f"`{name}` gives every one of {manifest.num_items:,} items a probability after a user's last "
        f"{manifest.max_history:,} events ({read}), and lists up to {manifest.k:,} of them. Exported by recpo {recpo} "
        f"with torch {torch}.\n"
    )


def _data(data: Mapping[str, Any] | None) -> str:
    if not data:
        return f"Period and counts: {_UNKNOWN} in the run.\n"
    bounds, splits = data["boundaries"], data["splits"]
    held_out = ""
    if "valid_start" in bounds:
        held_out = f"; validation from {bounds['valid_start']}, test from {bounds['test_start']}"
    counted = ("targets", "users", "positive", "skipped", "disliked")
    rows = [
        (name, *(f"{int(splits[name].get(key, 0)):,}" for key in counted))
        for name in ("train", "valid", "test")
        if name in splits
    ]
    period = f"{_date(bounds.get('first_ms'))} to {_date(bounds.get('last_ms'))} (UTC){held_out}"
    period = "Positions without a clock" if data.get("time_unit") == "order" else period
    label = _plain(str(data.get("label", _UNKNOWN)).rpartition(".")[2])
    return f"{period}. Label: `{label}`.\n\n{_rows(('period', 'events', 'users', *counted[2:]), rows)}"


def _training(manifest: BundleManifest, facts: Mapping[str, Any]) -> list[Sequence[str]]:
    origin = manifest.origin
    entries = [(name, facts.get(name)) for name in ("objective", "reward", "init_from", "seed", "data seed", "recpo")]
    rows = [(name, f"`{_plain(value)}`") for name, value in entries if value is not None]
    monitor = facts.get("monitor")
    reached = facts.get("results", {}).get(monitor)
    if monitor is not None:
        end = "" if reached is None else f", at the end {reached:.4f}"
        rows.append(("selected by", f"`{_plain(monitor)}`{end}"))
    rows += [
        (name, f"`{_plain(origin[key])}`")
        for name, key in (("checkpoint", "checkpoint"), ("weights (SHA-256)", "weights"), ("items", "catalog_checksum"))
        if origin.get(key)
    ]
    return list(rows) or [("run", _UNKNOWN)]


def _metrics(facts: Mapping[str, Any]) -> str:
    evaluation = facts.get("evaluation")
    if evaluation is not None:
        measured = evaluation["metrics"]
        rows = [
            (f"`{_plain(name)}`", *(_estimate(metrics.get(name)) for metrics in measured.values()))
            for name in evaluation["names"]
        ]
        head = (f"{evaluation['split']} period, {evaluation['users']:,} users", *map(_plain, measured))
        return _rows(head, rows) + "\nmean ± half of the 95 % interval over users.\n"
    validated = {name: value for name, value in facts.get("results", {}).items() if name.startswith("val/")}
    if not validated:
        return "None: evaluate the run, and export it with `--evaluation`.\n"
    last = [
        (f"`{_plain(name)}`", "-" if value is None else f"{value:.4f}") for name, value in sorted(validated.items())
    ]
    return _rows(("last validation", ""), last) + "\nOf the test period: none; export with `--evaluation DIR`.\n"


def _limits(manifest: BundleManifest) -> list[str]:
    limits = [
        f"It lists the {manifest.num_items:,} items that it was trained with and no others; users need not be known.",
        "It was trained on what an earlier policy showed; metrics on logged positives reward agreeing with that one.",
        "Intervals are over users of one period, not over training seeds or later days.",
        "Nothing was measured about groups of users or of providers unless a table above says so.",
    ]
    if manifest.agreement is not None:
        overlap = manifest.agreement["overlap_10"]
        limits.append(
            f"Item vectors are {manifest.item_precision}: {overlap:.3f} of the 10 best items are the policy's."
        )
    if manifest.index is not None:
        recall = manifest.index["recall_10"]
        limits.append(f"An approximate index searches: {recall:.3f} of the 10 best items are found.")
    if manifest.options is None:
        limits.append("The policy is none of recpo's own: the bundle has the ONNX program only.")
    return limits


_SERVING = """## Serving

```
recpo serve --bundle BUNDLE
recpo recommend BUNDLE --histories histories.parquet --out lists.parquet
```

In Python `recpo.Bundle.open(BUNDLE).recommend(events, k=10)`. `manifest.json` describes the program, and has the
checksum of every file, this one too.
"""


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _estimate(metric: Mapping[str, Any] | None) -> str:
    if metric is None or metric.get("mean") is None:
        return "-"
    half = metric.get("half_width")
    return f"{metric['mean']:.4f}" + ("" if half is None else f" ± {half:.4f}")


def _date(milliseconds: int | None) -> str:
    if milliseconds is None:
        return _UNKNOWN
    return datetime.fromtimestamp(milliseconds / 1000.0, UTC).strftime("%Y-%m-%d")


def _plain(value: object) -> str:
    """A name as text of one line that Markdown leaves alone in a table."""
    text = "".join(letter if letter.isprintable() else " " for letter in str(value))
    return text.replace("|", "/").replace("`", "'")
