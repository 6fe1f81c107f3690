"""What the verbs print that make and describe data, policies, bundles and lists."""

from __future__ import annotations

import platform
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, get_args

import recpo
from recpo.artifacts.checksums import kind_of
from recpo.artifacts.documents import path_of
from recpo.base.errors import RecpoError
from recpo.base.features import SIDES, Categories, Category, Feature, Vector
from recpo.base.feedback import FEEDBACK_KINDS
from recpo.cli.output import VerbResult, command, configuration, decimals, evaluation_of, say, table, warn
from recpo.log.schema import FlagColumn, LogColumns, columns_to_json, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import pandas as pd
    from rich.table import Table

    from recpo.serving.histories import ServingCounts
    from recpo.serving.manifest import BundleManifest
    from recpo.serving.refresh import Refreshed
    from recpo.sharding.memory import Needs
    from recpo.verbs import (
        doctor,
        explore,
        export,
        factorize,
        init,
        loop,
        loop_rounds,
        plan,
        prepare,
        recommend,
        serve,
        simulate,
        tokenize,
        train,
    )
    from recpo.worlds.log import ServedDays


def watch_init(verb: init.Init) -> dict[str, Any]:
    """Prints what was found before anything is asked."""
    return {"on_inspected": _print_found}


def show_init(verb: init.Init, done: recpo.Inspection) -> VerbResult:
    """Prints the files and the commands to run; the first of these is next."""
    purposes = {"prepare": f"the log, with label {done.label.class_name}", "pretrain": "imitates the log"}
    say(*(f"{file}: {(purposes | done.objectives)[step]}" for step, file in done.written.items()))
    say("\nwhat to run, in this order:\n", *(f"  {words}" for words in done.commands), "")
    facts = {
        "preset": done.preset,
        "columns": done.columns.to_json(),
        "behaviors": columns_to_json(done.behaviors),
        "label": done.label.class_name,
        "counts": asdict(done.counts),
        "check": done.doubts,
        "commands": done.commands,
    }
    return VerbResult([*done.written.values()], next(iter(done.commands), None), facts)


def _print_found(found: recpo.Inspection) -> None:
    """Prints columns with their evidence, counts, and what to check."""
    counts, preset = found.counts, found.preset
    log = f"{'' if counts.is_whole else 'about '}{counts.events:,} events"
    if counts.users and counts.items:  # 0 = not counted, because no column was recognized
        log += f" of {counts.users:,} users and {counts.items:,} items"
    say(f"{', '.join(found.log)}: {log}{'' if preset == 'plain' else f'; preset {preset}'}")
    rows = []
    for one in found.findings:
        rows.append((one.column, f"{one.role}{_values(one.source)}", one.unit or "", one.evidence))
    for name, column in found.behaviors.items():
        evidence = found.facts[name_of(column)].evidence
        rows.append((name_of(column), f"behavior {name}{_values(column)}", "", evidence))
    rows += [(column, "(not read)", "", found.facts[column].evidence) for column in found.unused]
    say(table("", ("column", "is", "unit", "evidence"), rows, names=4))
    say(*(f"{file}: a table with one row for each {side}" for side, file in found.tables.items()))
    say(*(f"check: {doubt}" for doubt in found.doubts), style="yellow")


def _values(column: str | FlagColumn) -> str:
    return f": {', '.join(column.values)}" if isinstance(column, FlagColumn) else ""


def show_simulate(verb: simulate.Simulate, simulated: recpo.Simulation) -> VerbResult:
    """Prints what was simulated; the log is prepared next."""
    following = command("prepare", "--log", simulated.root / "log", "--out", "prepared")
    if simulated.served is not None:
        _print_served(simulated, simulated.served)
        days = [asdict(day) for day in simulated.served.days]
        return VerbResult((simulated.root,), following, {"days": days})
    parameters = simulated.truth.preferences.parameters
    print(
        f"{simulated.root}: {parameters.events:,} events of {parameters.users:,} users and {parameters.items:,} items "
        f"over {parameters.days} days"
    )
    if not (complete := simulated.truth.preferences.complete).all():
        print(f"{int(complete.sum()):,} users have a reward for every item; the others are only in the training period")
    if parameters.lives:
        first, last = (int(simulated.truth.available(float(day)).sum()) for day in (0, parameters.days - 1))
        print(f"{simulated.items}: {first:,} items on day 0, {last:,} on day {parameters.days - 1}")
    users = 500
    listed = ", ".join(f"{name} {value:.3f}" for name, value in simulated.values(users=users).items())
    print(f"true expected reward on the last day ({min(users, parameters.users)} users): {listed}")
    sizes = {name: getattr(parameters, name) for name in ("events", "users", "items", "days")}
    return VerbResult((simulated.root,), following, sizes)


def _print_served(simulated: recpo.Simulation, served: ServedDays) -> None:
    for day in served.days:
        print(
            f"{simulated.root}: day {day.day}: {day.exposures:,} exposures in {day.requests:,} requests "
            f"({day.short_slates:,} short), explored {day.explored:.1%}\n"
            f"  true value {day.value:.3f} (logging policy {day.logging_value:.3f}, oracle {day.oracle_value:.3f}, "
            f"regret {day.regret:.3f})\n"
            f"  dislikes {day.dislikes:.2%} (logging policy {day.logging_dislikes:.2%}), coverage {day.coverage:.1%} "
            f"(logging policy {day.logging_coverage:.1%})"
        )


def show_prepare(verb: prepare.Prepare, data: recpo.Prepared) -> VerbResult:
    """Prints what happened to the events; a policy is pre-trained next, or the one of the days before continued."""
    counts = data.manifest["counts"]
    columns = [(column, data.manifest["columns"][column]) for column in LogColumns.ALL]
    found = ", ".join(column if column == name else f"{column} (from {name})" for column, name in columns if name)
    absent = ", ".join(column for column, name in columns if not name)
    say(f"columns: {found}" + (f"; absent: {absent}" if absent else ""))
    say(
        table("events of the log", ("outcome", "events"), ((what, f"{number:,}") for what, number in _outcomes(counts)))
    )
    periods = counts["splits"]
    sizes = {name: [period[key] for key in ("users", "targets", "rows")] for name, period in periods.items()}
    say(_by_period("periods", ("users", "events", "rows, with histories"), sizes))
    levels = {name: [period[kind] for kind in FEEDBACK_KINDS] for name, period in periods.items()}
    say(_by_period("feedback of the events", FEEDBACK_KINDS, levels))
    if data.behaviors:
        behaviors = {name: [period["behaviors"][one] for one in data.behaviors] for name, period in periods.items()}
        say(_by_period("behaviors of the events", data.behaviors, behaviors))
    if data.feature_schema or "feature_tables" in data.manifest:
        headings = ("of", "features", "left alone", "rows", "not in the data", "without a row")
        say(table("features", headings, _feature_rows(data), names=3))
    warn(data.manifest["warnings"])
    say(f"{data.root}: {data.manifest['num_users']:,} users, {data.num_items:,} items")
    facts = {name: data.manifest[name] for name in ("num_users", "num_items", "counts", "warnings")}
    words = ["--config", configuration("pretrain.yaml"), "--data.prepared", data.root, "--out", "runs/pretrain"]
    if verb.extends is not None:  # the previous run continues on the newest days (docs/growth.md)
        newest = ("--data.segments", "newest", "--data.replay", "1.0", "--trainer.max_epochs", "2")
        words = ["--init_from", "runs/pretrain", "--data.prepared", data.root, *newest, "--out", "runs/extended"]
    return VerbResult((data.root,), command("train", *words), facts)


def _outcomes(counts: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """How many events were read, dropped, kept and changed."""
    yield "read", counts["read"]
    yield from ((f"dropped: {reason}", count) for reason, count in sorted(counts["dropped"].items()))
    yield "kept", counts["read"] - sum(counts["dropped"].values())
    yield from ((f"value neutralized: {reason}", count) for reason, count in sorted(counts["neutralized"].items()))
    if counts["empty_files"]:
        yield "empty files skipped", counts["empty_files"]


def _feature_rows(data: recpo.Prepared) -> Iterator[tuple[str, ...]]:
    for side in SIDES:
        shown = ", ".join(_feature_text(feature) for feature in data.feature_schema.of(side))
        found = data.manifest["feature_tables"].get(side)
        if found is not None:
            cells = (f"{found['counts'][key]:,}" for key in ("rows", "unused", "without"))
            yield (f"{side}s", shown, ", ".join(found["left_alone"]), *cells)
        elif shown:
            yield (side, shown)


def _feature_text(feature: Feature) -> str:
    if isinstance(feature, Category | Categories):
        return f"{feature.name} ({feature.num_codes:,} codes)"
    return f"{feature.name} ({feature.width} wide)" if isinstance(feature, Vector) else feature.name


def _by_period(title: str, columns: Sequence[str], counts: Mapping[str, Sequence[int]]) -> Table:
    """A row of counts per period, in the order of time."""
    from recpo.log.prepared import Period  # imported where they are needed, because other verbs print without them

    order = [period for period in get_args(Period) if period in counts]
    return table(title, ("period", *columns), ((one, *(f"{cell:,}" for cell in counts[one])) for one in order))


def show_tokenize(verb: tokenize.Tokenize, codes: recpo.Codes) -> VerbResult:
    """Prints the report; a policy over these codes is pre-trained next."""
    from recpo.items.tokenization import MANY_MOVED

    report, rows = codes.report, []
    for number, level in enumerate(report["levels"]):
        cells = f"{level['utilization']:.1%}", f"{level['perplexity']:.1f}", f"{level['largest']:.2%}"
        rows.append(
            (str(number), f"{level['codebook_size']:,}", *cells, f"{level['error']:.4f}" if "error" in level else "")
        )
    say(table("codes", ("level", "codebook", "used", "perplexity", "largest share", "error / variance"), rows))
    moves = f"{report['moved']:,} moved ({report['moved_share']:.1%}), {report['prefix_changed']:,} to another prefix"
    told_apart = "told apart by an extra code" if codes.manifest["collisions"] == "extra" else moves
    say(
        f"{codes.root}: {report['items']:,} items; {report['collisions']:,} collided, at most "
        f"{report['largest_tuple']:,} on one tuple; {told_apart}"
    )
    if max(report["moved"], report["collisions"]) > MANY_MOVED * report["movable"]:
        warn(["many items hold codes that say little about them: take more levels or larger codebooks"])
    config = configuration("semantic_pretrain.yaml")
    data = ("--data.prepared", path_of(verb.prepared), "--policy.init_args.codes", codes.root)
    following = command("train", "--config", config, *data, "--out", "runs/semantic_pretrain")
    return VerbResult((codes.root,), following, {"report": report})


def show_factorize(verb: factorize.Factorize, factors: recpo.Factors) -> VerbResult:
    """Prints the errors on the validation period; the reward of MPO comes next."""
    from recpo.log.prepared import Prepared
    from recpo.verbs.factorize import similar_lists

    tried = factors.facts["tried"]
    ranks, errors = sorted({one["rank"] for one in tried}), dict[tuple[str, str], dict[int, str]]()
    for one in tried:
        errors.setdefault((_ridge(one, tried[0]), _prior(one)), {})[one["rank"]] = decimals(one["squared_error"], 5)
    rows = [(*row, *(own.get(rank, "") for rank in ranks)) for row, own in errors.items()]
    say(table("validation error", ("ridge", "prior means from", *(f"rank {rank}" for rank in ranks)), rows, names=2))
    say(
        f"{verb.out}: rank {factors.rank}, ridge {factors.ridge:.3g}, {factors.num_items:,} items, "
        f"{factors.facts['events']:,} graded events; squared error {factors.noise:.5f} on them"
    )
    weights = factors.facts["popularity_tried"]
    if any(one["weight"] for one in weights):
        values = [f"{one['weight']:g}: {one['AUC_mixed']:.4f}" for one in weights if "AUC_mixed" in one]
        told = f"; AUC_mixed by weight: {', '.join(values)}" if values else ""
        say(f"popularity {factors.facts['popularity']:g}{told}")
    if (half_life := factors.facts["half_life"]) is not None:
        say(f"the last events of an item count most for its bias, with a half-life of {half_life:g} days")
    caution = similar_lists(factors, Prepared.open(verb.prepared))
    warnings = [] if caution is None else [caution]
    warn(warnings)
    facts = {"rank": factors.rank, "ridge": factors.ridge, "squared_error": factors.noise, **factors.facts}
    facts["warnings"] = warnings
    data = ("--data.prepared", path_of(verb.prepared), "--reward.init_args.factors", verb.out)
    following = command(
        "train", "--config", configuration("mpo.yaml"), *data, "--init_from", "runs/pretrain", "--out", "runs/mpo"
    )
    return VerbResult((verb.out,), following, facts)


def _ridge(tried: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """The ridge of a model, or that it was learned, and after how many sweeps if the first model took others."""
    if tried["ridge"] is not None:
        return f"{tried['ridge']:g}"
    return "learned" if tried["warm_up"] == first["warm_up"] else f"learned after {tried['warm_up']} sweeps"


def _prior(tried: Mapping[str, Any]) -> str:
    """What the prior means of a model depend on."""
    parts = [f"consumption ({tried['consumption']})"] * bool(tried["consumption"])
    parts += [f"{side} features" for side in ("item", "user") if tried[f"{side}_features"]]
    return " + ".join(parts) or "-"


def show_plan(verb: plan.Plan, needs: Needs) -> VerbResult:
    """Prints the needs; training comes next.

    Raises:
        RecpoError: the run does not fit.
    """
    from recpo.sharding.memory import NOT_COUNTED

    copies = needs.workload.copies
    title = "tables" + (f"; their {copies} frozen copies are placed the same way" if copies else "")
    rows = []
    for spec in needs.workload.tables():
        placement = needs.placements[spec.name]
        blocks = [block for block in placement.blocks if block.num_rows]
        first, last = blocks[0], blocks[-1]
        on = f"{first.rank}" if first is last else f"{first.rank}-{last.rank}"
        held = f"{first.num_rows:,} x {first.num_columns}"
        rows.append((spec.name, f"{spec.num_rows:,} x {spec.dim}", placement.sharding, on, held))
    say("", table(title, ("table", "size", "sharding", "on ranks", "block"), rows))
    lines = [(name, _bytes(size)) for name, size in needs.memory.items() if size]
    lines.append(("sum", _bytes(sum(needs.memory.values()))))
    say(table("memory of the fullest rank", ("part", "size"), lines), "")
    if needs.milliseconds is not None and needs.workload.ranks > 1:
        print(f"looked-up tables: {needs.milliseconds:,.2f} ms per step, estimated by torchrec's planner")
    print("not counted: " + "; ".join(NOT_COUNTED[:-1]))
    if needs.fault is not None:
        raise needs.fault
    data = ("--data.prepared", "prepared", "--out", "runs/sharded")
    following = command("train", "--config", configuration("sharded_pretrain.yaml"), *data)
    return VerbResult((verb.out,), following, needs.document)


def _bytes(size: float) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:,.2f} {unit}"
    return f"{size:,.0f} B"


_EVENTS_SHOWN_FROM = 1 << 16


def watch_recommend(verb: recommend.Recommend) -> dict[str, object]:
    """Lists of the command line go to a file."""
    if verb.out is None:
        raise RecpoError("recommend: name the Parquet file to write with --out", field="out", code="missing_option")
    return {}


def show_recommend(verb: recommend.Recommend, counts: ServingCounts) -> VerbResult:
    """Prints some lists and what was left out; a bundle is served next, a run exported."""
    import pyarrow.dataset as ds

    from recpo.verbs.recommend import LIST_LENGTH

    k = LIST_LENGTH if verb.k is None else verb.k
    if verb.show:
        events, served = (
            ds.dataset(str(file)).head(_EVENTS_SHOWN_FROM, columns=["user_id", "item_id", *more]).to_pandas()
            for file, more in ((verb.histories, ["timestamp"]), (verb.out, []))
        )
        say(lists_table(events, served, verb.show))
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
    print(f"{verb.out}: {counts.users:,} users, up to {k} items each" + (f"; {listed}" if listed else ""))
    following, kind = None, kind_of(str(verb.source))
    if kind == "bundle":
        following = command("serve", "--bundle", verb.source)
    elif kind == "run":
        following = command("export", "--run", verb.source, "--out", "runs/bundle")
    return VerbResult((verb.out,), following, {"k": k, **asdict(counts)})


def lists_table(events: pd.DataFrame, served: pd.DataFrame, users: int) -> Table:
    """The most recent items of the ``events`` and the lists of the first ``users`` that were ``served``."""
    events, rows = events.sort_values("timestamp", kind="stable"), []
    for user in served["user_id"].unique()[:users]:
        recent = events["item_id"][events["user_id"] == user].tail(5)
        listed = served["item_id"][served["user_id"] == user].head(10)
        rows.append((str(user) or "(none)", *(" ".join(map(str, items)) or "(none)" for items in (recent, listed))))
    return table("recommendations", ("user", "most recent items", "recommended"), rows, names=3)


def show_train(verb: train.Train, run: recpo.Run) -> VerbResult:
    """Prints the path of the run; it is evaluated next, or calibrated if it is a reward model."""
    reached = None if run.monitor is None else run.results.get(run.monitor)
    print(f"{run.root}: finished" + ("" if reached is None else f", {run.monitor} {reached:.4f}"))
    warn(run.advice)
    prepared = str(verb.configuration.data.init_args.prepared)
    following = evaluation_of(run.root, prepared)
    if run.configuration["objective"]["class_path"].endswith(("PointwiseReward", "PairwiseReward")):  # makes no lists
        following = command("calibrate", "--prepared", prepared, "--rewards", run.root)
    return VerbResult((run.root,), following, {"monitor": run.monitor, "results": run.results, "advice": run.advice})


def show_loop(verb: loop.Loop, done: recpo.LoopResult) -> VerbResult:
    """Prints what each policy was expected to earn and earned; the last bundle is served next."""
    for one in done.outcomes:
        if one.value is not None and one.earned is not None and one.low is not None and one.high is not None:
            print(
                f"policy of round {one.number}: expected {one.value:.4f} ({one.low:.4f} to {one.high:.4f}), "
                f"earned {one.earned:.4f}"
            )
    print(done.report)
    facts = {"outcomes": [one._asdict() for one in done.outcomes]}
    return VerbResult((done.root, done.report), command("serve", "--bundle", done.bundle.root), facts)


def watch_loop(verb: loop.Loop) -> dict[str, Any]:
    """Prints a round as soon as it is complete."""
    return {"on_round": _print_round}


def _print_round(one: loop_rounds.Round) -> None:
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


def show_export(verb: export.Export, result: recpo.Bundle | Refreshed) -> VerbResult:
    """Prints what the bundle lists; it is served next."""
    from recpo.serving.refresh import Refreshed

    following = command("serve", "--bundle", verb.out)
    if isinstance(result, Refreshed):
        print(
            f"{verb.out}: {result.listed:,} items may be listed, {result.later:,} of them later (available_from); "
            f"{result.retired:,} are retired; {result.added:,} new ones are added, {result.left_out:,} left out"
        )
        counts = {"items": result.listed, "retired": result.retired, "left_out": result.left_out}
        return VerbResult((verb.out,), following, counts)
    print(f"{verb.out}: {len(result.items):,} items, lists of {result.k}; {_verified(result.manifest)}")
    if verb.compiled is not None:
        print(f"{verb.compiled}: machine code for this kind of machine; its lists are the policy's")
    facts = {"items": len(result.items), "k": result.k, "agreement": result.manifest.agreement}
    return VerbResult((verb.out,), following, facts)


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


def show_serve(verb: serve.Serve, result: None) -> VerbResult:
    """The server has stopped; it has logged what it did."""
    return VerbResult()


def watch_explore(verb: explore.Explore) -> dict[str, Any]:
    """Prints the address once the server listens."""
    return {"on_ready": lambda url: print(f"open {url}   (Ctrl-C ends it)", flush=True)}


def show_explore(verb: explore.Explore, written: Path | None) -> VerbResult:
    """The file, if one was asked for."""
    return VerbResult((written,))


def show_doctor(verb: doctor.Doctor, findings: list[doctor.Finding]) -> VerbResult:
    """Prints the table and what to do about libraries that do not work.

    Raises:
        RecpoError: a required library is broken.
    """
    rows = []
    for one in findings:
        state = "works" if one.works else "BROKEN" if one.part.is_core else "not usable"
        rows.append((one.part.name, one.version or "-", ": ".join(filter(None, [state, one.words]))))
    title = f"recpo {recpo.__version__}, Python {platform.python_version()}, {platform.platform()}"
    say(table(title, ("library", "version", "state"), rows, names=3))
    from recpo.verbs.doctor import advice

    print(advice(findings))
    broken = [finding.part.name for finding in findings if finding.part.is_core and not finding.works]
    if broken:
        raise RecpoError(
            f"{', '.join(broken)} must work: remove .venv and install again with `make setup`", code="not_installed"
        )
    facts = {one.part.name: {"version": one.version, "works": one.works} for one in findings}
    return VerbResult((), command("demo"), facts)
