"""What the verbs print that make and use policies and bundles: ``fit``, ``train``, ``tilt``, ``export`` and so on."""

from __future__ import annotations

import math
import platform
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from recpo import __version__
from recpo.artifacts import kind_of
from recpo.base.errors import RecpoError
from recpo.cli.output import VerbResult, command, console, evaluation_of, path_of

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from recpo.serving.bundle import Bundle
    from recpo.serving.encoded_histories import ServingCounts
    from recpo.serving.manifest import BundleManifest
    from recpo.serving.refresh import Refreshed
    from recpo.training.run import Run
    from recpo.training.tilting import TiltResult, TiltTrial
    from recpo.verbs.demo import Demo
    from recpo.verbs.doctor import Doctor, Finding
    from recpo.verbs.explore import Explore
    from recpo.verbs.export import Export
    from recpo.verbs.fit import Decision, Fit
    from recpo.verbs.loop import Loop, LoopResult
    from recpo.verbs.loop_rounds import Round
    from recpo.verbs.recommend import Recommend
    from recpo.verbs.serve import Serve
    from recpo.verbs.tilt import Tilt
    from recpo.verbs.train import Train


def watch_fit(verb: Fit | Demo) -> dict[str, Any]:
    """Prints every step with the time that is left."""
    return {"on_step": lambda text: print(text, flush=True)}


watch_demo = watch_fit  # the same steps


def show_fit(verb: Fit, done: Decision) -> VerbResult:
    """Prints the leaderboard and the answer; the bundle is served next."""
    show_decision(done)
    wrote = (str(done.root / "decision.json"), str(done.report), str(done.root / "bundle"))
    facts = {name: done.facts[name] for name in ("chosen", "reason", "strongest_baseline", "gain", "p_value")}
    return VerbResult(wrote, command("serve", "--bundle", done.root / "bundle"), facts)


def show_decision(done: Decision) -> None:
    """Prints the leaderboard and the answer."""
    console().print(_leaderboard(done))
    for sentence in done.facts["advice"]:
        print(f"warning: {sentence}")
    print(f"ship {done.chosen}: {done.reason}")


def _leaderboard(done: Decision) -> Table:
    from recpo.verbs.fit import TEMPERATURE, tested_metrics  # here, because other verbs print without it

    metric, rows = done.facts["criterion"]["metric"], done.facts["leaderboard"]
    tested = tested_metrics(done.facts)
    table = Table(
        title="contenders, the best first", title_justify="left", caption=f"± half of the 95 % interval; {TEMPERATURE}"
    )
    table.add_column("contender")
    for heading in (f"{metric}, validation", "behind the best", "temperature", *(f"{name}, test" for name in tested)):
        table.add_column(heading, justify="right")
    for row in rows:
        behind = "" if not row["behind"] else f"{row['behind']:.4f} ± {row['behind_half_width']:.4f}"
        name = f"{row['name']} (ships)" if row["name"] == done.chosen else row["name"]
        own = _number(row["value"], row["half_width"])
        measured = (row["test"].get(name) for name in tested)
        warmth = "" if row["temperature"] is None else f"{row['temperature']:g}"
        cells = [
            own,
            behind,
            warmth,
            *("-" if one is None else _number(one["mean"], one["half_width"]) for one in measured),
        ]
        table.add_row(name, *cells)
    if (oracle := done.facts["oracle"]) is not None:
        known = (oracle.get(name) for name in tested)
        measured = ("-" if one is None else _number(one["mean"], one["half_width"]) for one in known)
        table.add_row("oracle", "", "", "", *measured)
    return table


def _number(value: float | None, half_width: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if half_width is None else f"{value:.4f} ± {half_width:.4f}"


_EVENTS_SHOWN_FROM = 1 << 16


def watch_recommend(verb: Recommend) -> dict[str, object]:
    """Lists of the command line go to a file."""
    if verb.out is None:
        raise RecpoError("recommend: name the Parquet file to write with --out", field="out", code="missing_option")
    return {}


def show_recommend(verb: Recommend, counts: ServingCounts) -> VerbResult:
    """Prints some lists and what was left out; a bundle is served next, a run exported."""
    from recpo.verbs.recommend import LIST_LENGTH

    k = LIST_LENGTH if verb.k is None else verb.k
    if verb.show:
        console().print(_some_lists(str(verb.histories), str(verb.out), verb.show))
    _print_counts(counts, str(verb.out), k)
    following, kind = None, kind_of(str(verb.source))
    if kind == "bundle":
        following = command("serve", "--bundle", verb.source)
    elif kind == "run":
        following = command("export", "--run", verb.source, "--out", "runs/bundle")
    return VerbResult((str(verb.out),), following, {"k": k, **asdict(counts)})


def _some_lists(histories: str, lists: str, users: int) -> Table:
    import pyarrow.dataset as ds

    served = ds.dataset(lists).head(_EVENTS_SHOWN_FROM, columns=["user_id", "item_id"]).to_pandas()
    events = ds.dataset(histories).head(_EVENTS_SHOWN_FROM, columns=["user_id", "item_id", "timestamp"]).to_pandas()
    return lists_table(events, served, users)


def lists_table(events: pd.DataFrame, served: pd.DataFrame, users: int) -> Table:
    """The most recent items of the ``events`` and the lists of the first ``users`` that were ``served``."""
    table = Table(title="recommendations", title_justify="left")
    for heading in ("user", "most recent items", "recommended"):
        table.add_column(heading, overflow="fold")
    events = events.sort_values("timestamp", kind="stable")
    for user in served["user_id"].unique()[:users]:
        recent = events["item_id"][events["user_id"] == user].tail(5)
        listed = served["item_id"][served["user_id"] == user].head(10)
        shown = (" ".join(map(str, items)) for items in (recent, listed))
        table.add_row(*(text or "(none)" for text in (str(user), *shown)))
    return table


def _print_counts(counts: ServingCounts, out: str, k: int) -> None:
    left_out = {
        "empty histories": counts.empty_histories,
        "unknown items skipped": counts.unknown_items,
        "events without feedback": counts.events_without_feedback,
        "impossible watch times and durations": counts.impossible_values,
        "unknown items to exclude": counts.unknown_excluded,
        "users whose history was cut to its most recent events": counts.truncated_histories,
        f"lists shorter than {k}": counts.short_lists,
    }
    listed = "; ".join(f"{what}: {number:,}" for what, number in left_out.items() if number)
    print(f"{out}: {counts.users:,} users, up to {k} items each" + (f"; {listed}" if listed else ""))


_USERS = 3


def show_demo(verb: Demo, done: Decision) -> VerbResult:
    """Prints some lists of the bundle, the leaderboard and the answer; next comes the user's own log."""
    import pandas as pd

    histories = pd.read_parquet(done.root / "prepared" / "histories.parquet")
    some = histories[histories["user_id"].isin(histories["user_id"].unique()[:_USERS])]
    console().print(lists_table(some, done.bundle.recommend(some, k=10), _USERS))
    show_decision(done)
    print(f"everything that the demo wrote is in {verb.out}")
    return VerbResult((str(verb.out), str(done.report)), command("fit", "YOUR_LOG"), {"chosen": done.chosen})


def show_train(verb: Train, run: Run) -> VerbResult:
    """Prints the path of the run; it is evaluated next, or calibrated if it is a reward model."""
    reached = None if run.monitor is None else run.results.get(run.monitor)
    print(f"{run.root}: finished" + ("" if reached is None else f", {run.monitor} {reached:.4f}"))
    for sentence in run.advice:
        print(f"warning: {sentence}")
    prepared = str(verb.configuration.data.init_args.prepared)
    following = evaluation_of(run.root, prepared)
    if is_reward_model(run):
        following = command("calibrate", "--prepared", prepared, "--rewards", run.root)
    return VerbResult(
        (str(run.root),), following, {"monitor": run.monitor, "results": run.results, "advice": run.advice}
    )


def is_reward_model(run: Run) -> bool:
    """Whether the policy only scores items and makes no lists."""
    return str(run.configuration["objective"]["class_path"]).endswith(("PointwiseReward", "PairwiseReward"))


_NAMES = {
    "grade": "grade of the lists by a factorization of this period",
    "top_k": "off-policy value of the lists (SNIPS)",
    "policy": "off-policy value of the policy (SNIPS)",
    "auc": "AUC of positives against other exposures",
    "monitor_reward": "monitor reward of the lists",
}


def show_tilt(verb: Tilt, found: TiltResult) -> VerbResult:
    """Prints the table of temperatures; the run, or the untilted one if it is kept, is evaluated next."""
    print_tilt(found)
    facts = {
        "temperature": found.temperature,
        "lower_bound": found.lower_bound,
        "trials": [asdict(one) for one in found.trials],
    }
    wrote = () if found.run is None else (str(found.run.root),)
    run = path_of(verb.run) if found.run is None else found.run.root
    return VerbResult(wrote, evaluation_of(run, path_of(verb.prepared or "prepared")), facts)


def print_tilt(found: TiltResult) -> None:
    """Prints the table of temperatures and the chosen one; a path is never read as markup."""
    terminal = console()
    if found.trials:
        terminal.print(_temperatures(found))
    if found.run is None:
        terminal.print(
            "no temperature is better than the untilted policy: keep the run as it is; nothing was written. "
            "--temperature NUMBER writes a tilted run regardless",
            soft_wrap=True,
        )
        return
    if found.trials and _taken(found).value < found.trials[0].value:
        terminal.print("warning: by this criterion the untilted policy is worth more", style="yellow", soft_wrap=True)
    terminal.print(
        f"{found.run.root}: tilted with temperature {found.temperature:g}, lower bound {found.lower_bound:g}",
        soft_wrap=True,
    )


def _taken(found: TiltResult) -> TiltTrial:
    return next(trial for trial in found.trials if trial.temperature == found.temperature)


def _temperatures(found: TiltResult) -> Table:
    assert found.criterion is not None
    table = Table(
        title=f"validation period, lists of {found.k}; value: {_NAMES[found.criterion]}",
        caption="± half of the 95 % interval; behind: the best less this one ± its standard error, same users",
        title_justify="left",
        caption_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    for column in (
        "temp.",
        "value",
        "±",
        "behind",
        "±",
        "rows",
        "grade",
        "SNIPS",
        "AUC",
        "NDCG",
        "coverage",
        "KL",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for trial in found.trials:
        name = "base" if trial.temperature == math.inf else f"{trial.temperature:g}"
        numbers = (trial.value, trial.half_width, trial.loss, trial.loss_error)
        others = (trial.grade, trial.top_k, trial.auc, trial.ndcg, trial.coverage)
        rows = "-" if math.isnan(trial.effective_rows) else f"{trial.effective_rows:,.0f}"
        kl = "-" if math.isnan(trial.kl) else f"{trial.kl:.2f}"
        name += " *" if trial.temperature == found.temperature else ""
        table.add_row(name, *map(_decimals, numbers), rows, *map(_decimals, others), kl)
    return table


def _decimals(number: float) -> str:
    return "-" if math.isnan(number) else f"{number:.4f}"


def show_loop(verb: Loop, done: LoopResult) -> VerbResult:
    """Prints what each policy was expected to earn and earned; the last bundle is served next."""
    for one in done.outcomes:
        if one.value is not None and one.earned is not None and one.low is not None and one.high is not None:
            print(
                f"policy of round {one.number}: expected {one.value:.4f} ({one.low:.4f} to {one.high:.4f}), "
                f"earned {one.earned:.4f}"
            )
    print(done.report)
    facts = {"outcomes": [one._asdict() for one in done.outcomes]}
    return VerbResult((str(done.root), str(done.report)), command("serve", "--bundle", done.bundle.root), facts)


def watch_loop(verb: Loop) -> dict[str, Any]:
    """Prints a round as soon as it is complete."""
    return {"on_round": _print_round}


def _print_round(one: Round) -> None:
    lists = one.lists
    if (day := one.served) is not None:
        print(
            f"round {one.number}: day {day.day} as served: true value {day.value:.3f} of the oracle's "
            f"{day.oracle_value:.3f} (logging policy {day.logging_value:.3f}), dislikes {day.dislikes:.2%}, "
            f"coverage {day.coverage:.1%}"
        )
    print(
        f"round {one.number}: best lists of the policy{' (warm start)' if one.warm_start else ''}: true value "
        f"{lists.true_reward:.3f} of the oracle's {lists.oracle:.3f}, coverage {lists.coverage:.1%}",
        flush=True,
    )


def show_export(verb: Export, result: Bundle | Refreshed) -> VerbResult:
    """Prints what the bundle lists; it is served next."""
    from recpo.serving.refresh import Refreshed

    following = command("serve", "--bundle", verb.out)
    if isinstance(result, Refreshed):
        print(
            f"{verb.out}: {result.listed:,} items may be listed, {result.later:,} of them later (available_from); "
            f"{result.retired:,} are retired; {result.added:,} new ones are added, {result.left_out:,} left out"
        )
        counts = {"items": result.listed, "retired": result.retired, "left_out": result.left_out}
        return VerbResult((str(verb.out),), following, counts)
    print(f"{verb.out}: {len(result.items):,} items, lists of {result.k}; {_verified(result.manifest)}")
    if verb.compiled is not None:
        print(f"{verb.compiled}: machine code for this kind of machine; its lists are the policy's")
    facts = {"items": len(result.items), "k": result.k, "agreement": result.manifest.agreement}
    return VerbResult((str(verb.out),), following, facts)


def _verified(manifest: BundleManifest) -> str:
    if manifest.index is not None:
        facts = manifest.index
        return (
            f"the index looks into {facts['probes']} of {facts['lists']} lists and finds {facts['recall_10']:.3f} of "
            f"the 10 best items of {facts['users']} random histories"
        )
    if manifest.agreement is not None:
        facts = manifest.agreement
        return (
            f"{manifest.item_precision}: of the 10 best items of {facts['users']} random histories "
            f"{facts['overlap_10']:.3f} are the policy's; log-probabilities differ by up to "
            f"{facts['largest_difference']:.2g}"
        )
    return "every engine gives the policy's lists and scores"


def show_serve(verb: Serve, result: None) -> VerbResult:
    """The server has stopped; it has logged what it did."""
    return VerbResult()


def watch_explore(verb: Explore) -> dict[str, Any]:
    """Prints the address once the server listens."""
    return {"on_ready": lambda url: print(f"open {url}   (Ctrl-C ends it)", flush=True)}


def show_explore(verb: Explore, written: Path | None) -> VerbResult:
    """The file, if one was asked for."""
    return VerbResult(() if written is None else (str(written),))


def show_doctor(verb: Doctor, findings: list[Finding]) -> VerbResult:
    """Prints the table and what to do about libraries that do not work.

    Raises:
        RecpoError: a required library is broken.
    """
    table = Table(title=f"recpo {__version__}, Python {platform.python_version()}, {platform.platform()}")
    for heading in ("library", "version", "state"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        state = "works" if finding.works else ("BROKEN" if finding.part.is_core else "not usable")
        table.add_row(
            finding.part.name, finding.version or "-", f"{state}: {finding.words}" if finding.words else state
        )
    console().print(table)
    from recpo.verbs.doctor import advice

    print(advice(findings))
    broken = [finding.part.name for finding in findings if finding.part.is_core and not finding.works]
    if broken:
        raise RecpoError(
            f"{', '.join(broken)} must work: remove .venv and install again with `make setup`", code="not_installed"
        )
    facts = {one.part.name: {"version": one.version, "works": one.works} for one in findings}
    return VerbResult((), command("demo"), facts)
