"""What the verbs print that make and describe data: ``init``, ``simulate``, ``prepare``, ``tokenize`` and so on."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, get_args

from rich.table import Table

from recpo.base.features import SIDES, Categories, Category, Feature, Vector
from recpo.base.feedback import FEEDBACK_KINDS
from recpo.cli.output import VerbResult, after_extend, after_prepare, command, configuration, console, path_of
from recpo.log.feature_columns import behaviors_to_json
from recpo.log.schema import FlagColumn, LogColumns, name_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from recpo.items.tokenization import Codes
    from recpo.log.inspection import Inspection
    from recpo.log.prepared import Prepared
    from recpo.rewards.factors import Factors
    from recpo.sharding.memory import Needs
    from recpo.verbs.factorize import Factorize
    from recpo.verbs.init import Init
    from recpo.verbs.plan import Plan
    from recpo.verbs.prepare import Prepare
    from recpo.verbs.simulate import Simulate
    from recpo.verbs.tokenize import Tokenize
    from recpo.worlds.log import ServedDays, Simulation


def watch_init(verb: Init) -> dict[str, Any]:
    """Prints what was found before anything is asked."""
    return {"on_inspected": _print_found}


def show_init(verb: Init, done: Inspection) -> VerbResult:
    """Prints the files and the commands to run; the first of these is next."""
    terminal = console()
    for step, file in done.written.items():
        terminal.print(f"{file}: {_purpose(done, step)}", soft_wrap=True)
    terminal.print("\nwhat to run, in this order:\n")
    for words in done.commands:
        terminal.print(f"  {words}", soft_wrap=True)
    terminal.print()
    return VerbResult(tuple(map(str, done.written.values())), next(iter(done.commands), None), _inspection_facts(done))


def _print_found(found: Inspection) -> None:
    """Prints columns with their evidence, counts, and what to check; text of the log is never read as markup."""
    terminal, counts = console(), found.counts
    about = "" if counts.is_whole else "about "
    preset = found.recognition.preset
    log = f"{about}{counts.events:,} events"
    if counts.users and counts.items:  # 0 = not counted, because no column was recognized
        log += f" of {counts.users:,} users and {counts.items:,} items"
    terminal.print(f"{', '.join(found.log)}: {log}{'' if preset == 'plain' else f'; preset {preset}'}", soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left")
    for heading in ("column", "is", "unit", "evidence"):
        table.add_column(heading, overflow="fold")
    for one in found.findings:
        role = f"{one.role}: {', '.join(one.texts)}" if one.texts else one.role
        table.add_row(one.column, role, one.unit or "", one.evidence)
    for name, column in found.recognition.behaviors.items():
        texts = f": {', '.join(column.values)}" if isinstance(column, FlagColumn) else ""
        table.add_row(name_of(column), f"behavior {name}{texts}", "", found.facts[name_of(column)].evidence)
    for column in found.recognition.unused:
        table.add_row(column, "(not read)", "", found.facts[column].evidence)
    terminal.print(table)
    for side, file in found.tables.items():
        terminal.print(f"{file}: a table with one row for each {side}", soft_wrap=True)
    for doubt in found.doubts:
        terminal.print(f"check: {doubt}", style="yellow", soft_wrap=True)


def _inspection_facts(found: Inspection) -> dict[str, Any]:
    return {
        "preset": found.recognition.preset,
        "columns": found.columns.to_json(),
        "behaviors": behaviors_to_json(found.recognition.behaviors),
        "label": found.label.class_name,
        "counts": asdict(found.counts),
        "check": found.doubts,
        "commands": found.commands,
    }


def _purpose(found: Inspection, step: str) -> str:
    named = {"prepare": f"the log, with label {found.label.class_name}", "pretrain": "imitates the log"}
    return named.get(step) or found.objectives[step]


def show_simulate(verb: Simulate, simulated: Simulation) -> VerbResult:
    """Prints what was simulated; the log is prepared next."""
    following = command("prepare", "--log", simulated.root / "log", "--out", "prepared")
    if simulated.served is not None:
        _print_served(simulated, simulated.served)
        days = [asdict(day) for day in simulated.served.days]
        return VerbResult((str(simulated.root),), following, {"days": days})
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
    return VerbResult((str(simulated.root),), following, sizes)


def _print_served(simulated: Simulation, served: ServedDays) -> None:
    for day in served.days:
        print(
            f"{simulated.root}: day {day.day}: {day.exposures:,} exposures in {day.requests:,} requests "
            f"({day.short_slates:,} short), explored {day.explored:.1%}\n"
            f"  true value {day.value:.3f} (logging policy {day.logging_value:.3f}, oracle {day.oracle_value:.3f}, "
            f"regret {day.regret:.3f})\n"
            f"  dislikes {day.dislikes:.2%} (logging policy {day.logging_dislikes:.2%}), coverage {day.coverage:.1%} "
            f"(logging policy {day.logging_coverage:.1%})"
        )


def show_prepare(verb: Prepare, data: Prepared) -> VerbResult:
    """Prints what happened to the events; a policy is pre-trained next, or the one of the days before continued."""
    _print_prepared(data)
    facts = {name: data.manifest[name] for name in ("num_users", "num_items", "counts", "warnings")}
    return after_prepare(data.root, facts) if verb.extends is None else after_extend(data.root, facts)


def _print_prepared(data: Prepared) -> None:
    counts, terminal = data.manifest["counts"], console()
    columns = [(column, data.manifest["columns"][column]) for column in LogColumns.ALL]
    found = ", ".join(column if column == name else f"{column} (from {name})" for column, name in columns if name)
    absent = ", ".join(column for column, name in columns if not name)
    terminal.print(f"columns: {found}" + (f"; absent: {absent}" if absent else ""), soft_wrap=True)
    terminal.print(_events_table(counts))
    terminal.print(_periods_table(counts["splits"]))
    terminal.print(_feedback_table(counts["splits"]))
    if data.behaviors:
        terminal.print(_behaviors_table(counts["splits"], data.behaviors))
    if data.feature_schema or "feature_tables" in data.manifest:
        terminal.print(_features_table(data))
    for warning in data.manifest["warnings"]:
        terminal.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    users, items = data.manifest["num_users"], data.num_items
    terminal.print(f"{data.root}: {users:,} users, {items:,} items", soft_wrap=True)


def _events_table(counts: dict[str, Any]) -> Table:
    table = Table(title="events of the log", title_justify="left")
    table.add_column("outcome")
    table.add_column("events", justify="right")
    table.add_row("read", f"{counts['read']:,}")
    for reason, count in sorted(counts["dropped"].items()):
        table.add_row(f"dropped: {reason}", f"{count:,}")
    table.add_row("kept", f"{counts['read'] - sum(counts['dropped'].values()):,}", end_section=True)
    for reason, count in sorted(counts["neutralized"].items()):
        table.add_row(f"value neutralized: {reason}", f"{count:,}")
    if counts["empty_files"]:
        table.add_row("empty files skipped", f"{counts['empty_files']:,}")
    return table


def _periods_table(periods: dict[str, dict[str, int]]) -> Table:
    columns = ("users", "events", "rows, with histories")
    counts = {name: [period[key] for key in ("users", "targets", "rows")] for name, period in periods.items()}
    return _by_period("periods", columns, counts)


def _behaviors_table(periods: dict[str, dict[str, Any]], behaviors: Sequence[str]) -> Table:
    counts = {name: [period["behaviors"][behavior] for behavior in behaviors] for name, period in periods.items()}
    return _by_period("behaviors of the events", behaviors, counts)


def _features_table(data: Prepared) -> Table:
    table = Table(title="features", title_justify="left")
    for name in ("of", "features", "left alone", "rows", "not in the data", "without a row"):
        table.add_column(name, justify="left" if name in ("of", "features", "left alone") else "right")
    for side in SIDES:
        shown = ", ".join(_feature_text(feature) for feature in data.feature_schema.of(side))
        found = data.manifest["feature_tables"].get(side)
        if found is not None:
            cells = (f"{found['counts'][key]:,}" for key in ("rows", "unused", "without"))
            table.add_row(f"{side}s", shown, ", ".join(found["left_alone"]), *cells)
        elif shown:
            table.add_row(side, shown, "", "", "", "")
    return table


def _feature_text(feature: Feature) -> str:
    if isinstance(feature, Category | Categories):
        return f"{feature.name} ({feature.num_codes:,} codes)"
    return f"{feature.name} ({feature.width} wide)" if isinstance(feature, Vector) else feature.name


def _feedback_table(periods: dict[str, dict[str, int]]) -> Table:
    counts = {name: [period[kind] for kind in FEEDBACK_KINDS] for name, period in periods.items()}
    return _by_period("feedback of the events", FEEDBACK_KINDS, counts)


def _by_period(title: str, columns: Sequence[str], counts: dict[str, list[int]]) -> Table:
    """A row of counts per period, in the order of time."""
    from recpo.log.prepared import Period  # imported where they are needed, because other verbs print without them

    table = Table(title=title, title_justify="left")
    table.add_column("period")
    for name in columns:
        table.add_column(name, justify="right")
    for period, cells in sorted(counts.items(), key=lambda one: get_args(Period).index(one[0])):
        table.add_row(period, *(f"{cell:,}" for cell in cells))
    return table


def show_tokenize(verb: Tokenize, codes: Codes) -> VerbResult:
    """Prints the report; a policy over these codes is pre-trained next."""
    _print_codes(codes)
    config = configuration("semantic_pretrain.yaml")
    data = ("--data.prepared", path_of(verb.prepared), "--policy.init_args.codes", codes.root)
    following = command("train", "--config", config, *data, "--out", "runs/semantic_pretrain")
    return VerbResult((str(codes.root),), following, {"report": codes.report})


def _print_codes(codes: Codes) -> None:
    from recpo.items.tokenization import MANY_MOVED

    report = codes.report
    terminal = console()
    table = Table(title="codes", title_justify="left")
    for name in ("level", "codebook", "used", "perplexity", "largest share", "error / variance"):
        table.add_column(name, justify="right")
    for number, level in enumerate(report["levels"]):
        cells = f"{level['utilization']:.1%}", f"{level['perplexity']:.1f}", f"{level['largest']:.2%}"
        error = f"{level['error']:.4f}" if "error" in level else ""
        table.add_row(str(number), f"{level['codebook_size']:,}", *cells, error)
    terminal.print(table)
    moves = f"{report['moved']:,} moved ({report['moved_share']:.1%}), {report['prefix_changed']:,} to another prefix"
    told_apart = "told apart by an extra code" if codes.manifest["collisions"] == "extra" else moves
    terminal.print(
        f"{codes.root}: {report['items']:,} items; {report['collisions']:,} collided, at most "
        f"{report['largest_tuple']:,} on one tuple; {told_apart}",
        soft_wrap=True,
    )
    if max(report["moved"], report["collisions"]) > MANY_MOVED * report["movable"]:
        terminal.print(
            "warning: many items hold codes that say little about them: take more levels or larger codebooks",
            style="yellow",
            soft_wrap=True,
        )


def show_factorize(verb: Factorize, factors: Factors) -> VerbResult:
    """Prints the errors on the validation period; the reward of MPO comes next."""
    from recpo.log.prepared import Prepared
    from recpo.verbs.factorize import similar_lists

    _print_factors(factors, verb.out)
    caution = similar_lists(factors, Prepared.open(verb.prepared))
    if caution is not None:
        console().print(f"warning: {caution}", style="yellow", soft_wrap=True)
    facts = {"rank": factors.rank, "ridge": factors.ridge, "squared_error": factors.noise, **factors.facts}
    facts["warnings"] = [] if caution is None else [caution]
    data = ("--data.prepared", path_of(verb.prepared), "--reward.init_args.factors", verb.out)
    following = command(
        "train", "--config", configuration("mpo.yaml"), *data, "--init_from", "runs/pretrain", "--out", "runs/mpo"
    )
    return VerbResult((str(verb.out),), following, facts)


def _print_factors(factors: Factors, out: object) -> None:
    terminal = console()
    table = Table(title="validation error", title_justify="left")
    tried = factors.facts["tried"]
    ranks = sorted({one["rank"] for one in tried})
    for name in ("ridge", "prior means from", *(f"rank {rank}" for rank in ranks)):
        table.add_column(name, justify="right")
    rows = dict[tuple[float | None, str], dict[int, float | None]]()
    for one in tried:
        rows.setdefault((one["ridge"], _prior(one)), {})[one["rank"]] = one["squared_error"]
    for (ridge, prior), errors in rows.items():
        cells = [_error(errors[rank]) if rank in errors else "" for rank in ranks]
        table.add_row("learned" if ridge is None else f"{ridge:g}", prior, *cells)
    terminal.print(table)
    terminal.print(
        f"{out}: rank {factors.rank}, ridge {factors.ridge:.3g}, {factors.num_items:,} items, "
        f"{factors.facts['events']:,} graded events; squared error {factors.noise:.5f} on them",
        soft_wrap=True,
    )
    weights = factors.facts["popularity_tried"]
    if any(one["weight"] for one in weights):
        values = [f"{one['weight']:g}: {one['AUC_mixed']:.4f}" for one in weights if "AUC_mixed" in one]
        told = f"; AUC_mixed by weight: {', '.join(values)}" if values else ""
        terminal.print(f"popularity {factors.facts['popularity']:g}{told}", soft_wrap=True)


def _prior(tried: Mapping[str, Any]) -> str:
    """What the prior means of a model depend on."""
    parts = [f"consumption ({tried['consumption']})"] * bool(tried["consumption"])
    parts += [f"{side} features" for side in ("item", "user") if tried[f"{side}_features"]]
    return " + ".join(parts) or "-"


def _error(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.5f}"


def show_plan(verb: Plan, needs: Needs) -> VerbResult:
    """Prints the needs; training comes next.

    Raises:
        RecpoError: the run does not fit.
    """
    from recpo.sharding.memory import NOT_COUNTED

    copies = needs.workload.copies
    title = "tables" + (f"; their {copies} frozen copies are placed the same way" if copies else "")
    _print_lines(title, ("", "size", "sharding", "on ranks", "block"), _placement_rows(needs))
    lines = [(name, _bytes(size)) for name, size in needs.memory.items() if size]
    _print_lines("memory of the fullest rank", ("", ""), [*lines, ("sum", _bytes(sum(needs.memory.values())))])
    print()
    if needs.milliseconds is not None and needs.workload.ranks > 1:
        print(f"looked-up tables: {needs.milliseconds:,.2f} ms per step, estimated by torchrec's planner")
    print("not counted: " + "; ".join(NOT_COUNTED[:-1]))
    if needs.fault is not None:
        raise needs.fault
    data = ("--data.prepared", "prepared", "--out", "runs/sharded")
    following = command("train", "--config", configuration("sharded_pretrain.yaml"), *data)
    return VerbResult(() if verb.out is None else (str(verb.out),), following, needs.document)


def _print_lines(title: str, headings: tuple[str, ...], lines: list[tuple[str, ...]]) -> None:
    print(f"\n{title}")
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=any(headings))
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    console().print(table)


def _placement_rows(needs: Needs) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for spec in needs.workload.tables():
        if spec.copy_of is None:
            placement = needs.placements[spec.name]
            blocks = [block for block in placement.blocks if block.num_rows]
            first, last = blocks[0], blocks[-1].rank
            on = f"{first.rank}" if len(blocks) == 1 else f"{first.rank}-{last}"
            held = f"{first.num_rows:,} x {first.num_columns}"
            lines.append((spec.name, f"{spec.num_rows:,} x {spec.dim}", placement.sharding, on, held))
    return lines


def _bytes(size: float) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:,.2f} {unit}"
    return f"{size:,.0f} B"
