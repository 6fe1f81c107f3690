"""The verb ``init``: inspects the files of a log and writes configurations for it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import date
from functools import cached_property
from os import PathLike, fspath
from pathlib import Path
from typing import Any, ClassVar, Final

import pyarrow as pa
import pyarrow.compute as pc
from jinja2 import Environment, PackageLoader, StrictUndefined

from recpo.artifacts import output_file
from recpo.base.errors import RecpoError
from recpo.log.column_facts import ColumnFacts, column_facts
from recpo.log.csv_files import CsvFormat
from recpo.log.feature_columns import PRESET_FEATURES
from recpo.log.files import find_files
from recpo.log.log_sample import TableSample, sample_tables
from recpo.log.recognition import Finding, Recognition, recognize
from recpo.log.schema import MILLISECONDS_PER_UNIT, PRESETS, Columns, FlagColumn, LogColumns
from recpo.verbs.starting_point import Label, LogCounts, label_of, objectives_of, sizes_of, split_of
from recpo.verbs.verb import PYTHON_ONLY, Verb, function_of

_PREPARE, _PRETRAIN = "prepare.yaml", "pretrain.yaml"
_MS_PER_DAY: Final = 86_400_000.0


@dataclass(frozen=True)
class Inspection:
    """The findings in a log, and the suggested configurations.

    Attributes:
        log: the files that were named.
        sample: the files of the log, and the inspected rows.
        recognition: its columns, units, preset, doubts and questions.
        counts: its size.
        others: other named files that are not the log, with their columns.
        tables: "item" and "user" -> a file with one row for each.
        written: the files that were written, by what they configure; empty before.
    """

    log: tuple[str, ...]
    sample: TableSample = field(repr=False)
    recognition: Recognition
    counts: LogCounts
    others: tuple[TableSample, ...] = field(repr=False, default=())
    tables: Mapping[str, str] = field(default_factory=dict)
    written: Mapping[str, Path] = field(default_factory=dict)

    @property
    def columns(self) -> Columns:
        """The columns and units that ``recpo.prepare`` takes."""
        return self.recognition.columns

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The standard columns that were recognized, each with its evidence."""
        return self.recognition.findings

    @property
    def questions(self) -> tuple[str, ...]:
        """Questions that only the user can answer; nothing is written while there is one."""
        return self.recognition.questions

    @property
    def doubts(self) -> tuple[str, ...]:
        """Assumptions that should be checked."""
        return self.recognition.doubts

    @cached_property
    def facts(self) -> dict[str, ColumnFacts]:
        """Facts about the values of every column, by its name."""
        return facts_of(self.sample.table)

    @property
    def label(self) -> Label:
        """How the preference label is made."""
        return label_of(self.recognition, self.facts)

    @property
    def objectives(self) -> dict[str, str]:
        """The alignments that the feedback allows, with reasons."""
        return objectives_of(self.recognition, self.label)

    @property
    def commands(self) -> list[str]:
        """The commands to run, in order, from the log to recommendations."""
        return [] if not self.written else _commands(self)


def facts_of(table: pa.Table) -> dict[str, ColumnFacts]:
    """The facts of every column of a table."""
    return {name: column_facts(name, table[name]) for name in table.column_names}


@dataclass(frozen=True)
class Init(Verb[Inspection]):
    """Inspects a log and writes prepare.yaml, pretrain.yaml and the alignments that fit the log.

    Columns are recognized by their names and values, and units by plausible values. If two readings differ by units, or
    if no user, item or time column is recognized, it asks for the option that decides, ends with status 1, and writes
    nothing.

    Raises:
        RecpoError: there are no such files, or an option has to decide; every question is in the message.
    """

    first_day: ClassVar = ("log", "out", "columns", "csv")

    log: str | Path | Sequence[str | Path]
    """Parquet or text files, a directory of them, or a pattern; item and user tables may be among them"""
    out: str | Path = Path(".")
    """directory for the configurations; files that exist are not replaced"""
    _: KW_ONLY
    columns: Columns = Columns()  # noqa: RUF009  frozen
    """known column names and units; recpo does not guess these"""
    csv: CsvFormat = CsvFormat()  # noqa: RUF009  frozen
    """delimiter and column names of text files, if known"""
    on_inspected: Callable[[Inspection], object] = field(default=lambda found: None, metadata=PYTHON_ONLY)
    """called with the findings before anything is asked or written"""

    def execute(self) -> Inspection:
        """Inspects, then writes."""
        found = inspect_log(self.log, columns=self.columns, csv=self.csv)
        self.on_inspected(found)
        return write_configurations(found, Path(self.out))


def inspect_log(
    log: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    columns: Columns = Columns(),  # noqa: B008  frozen
    csv: CsvFormat = CsvFormat(),  # noqa: B008  frozen
) -> Inspection:
    """Inspects a log as ``init`` does, but writes nothing.

    Args:
        log: as for ``init``.
        columns: as for ``init``.
        csv: as for ``init``.

    Raises:
        RecpoError: a file cannot be read, or the log has no row.
    """
    named = (fspath(log),) if isinstance(log, str | PathLike) else tuple(fspath(name) for name in log)
    samples = sample_tables(list(named), csv)
    found = {number: recognize(facts_of(one.table).values(), columns, one.table) for number, one in enumerate(samples)}
    best = max(found, key=lambda number: _likeness(found[number], samples[number]))
    sample, recognition = samples[best], found[best]
    _validate_names(columns, sample)
    if not sample.table.num_rows:
        raise RecpoError(f"{', '.join(named)}: the log has no rows: name one with events", code="empty", field="log")
    others = tuple(one for number, one in enumerate(samples) if number != best)
    tables = _tables(recognition, others)
    recognition = replace(
        recognition,
        questions=(*_unnamed(sample), *recognition.questions),
        doubts=(*recognition.doubts, *_doubts_of_files(sample, others, tables)),
    )
    return Inspection(named, sample, recognition, counts_of(sample, recognition), others, tables)


def _likeness(found: Recognition, sample: TableSample) -> tuple[int, int, int]:
    """How similar a table is to a log: number of required columns, then of all columns, then of rows."""
    required = sum(found.column(role) is not None for role in LogColumns.REQUIRED)
    return required, len(found.findings) + len(found.behaviors) + 3 * (found.preset != "plain"), sample.rows


def _validate_names(given: Columns, sample: TableSample) -> None:
    for role, name in given.named().items():
        if name not in sample.table.column_names:
            raise RecpoError(
                f"--columns.{role} {name}: no such column; the log has {', '.join(sample.table.column_names)}",
                code="unknown_name",
                field=f"columns.{role}",
            )


def _unnamed(sample: TableSample) -> list[str]:
    if sample.has_names or sample.form.names is None or "column_1" not in sample.form.names:
        return []
    shown = ", ".join(str(value) for value in sample.table.slice(0, 1).to_pylist()[0].values())
    return [
        f"the first line has no names ({shown}): name its {len(sample.form.names)} columns in order, with "
        "--csv.names '[user_id, item_id, ...]'"
    ]


def _tables(found: Recognition, others: Sequence[TableSample]) -> dict[str, str]:
    """Files with one row per item or user; of several, the one with the most features of the preset."""
    tables = {}
    item, user = found.column(LogColumns.ITEM_ID), found.column(LogColumns.USER_ID)
    for side, own, other in (("item", item, user), ("user", user, item)):
        features = PRESET_FEATURES[found.preset].of("item" if side == "item" else "user") or ()
        columns = {feature.source for feature in features}
        suiting = [
            (len(columns & set(one.table.column_names)), one)
            for one in others
            if own in one.table.column_names
            and other not in one.table.column_names
            and one.table.num_columns > 1
            and pc.count_distinct(one.table[own]).as_py() == one.table.num_rows > 0
        ]
        if suiting:
            tables[side] = str(max(suiting, key=lambda pair: pair[0])[1].files[0])
    return tables


def _doubts_of_files(sample: TableSample, others: Sequence[TableSample], tables: Mapping[str, str]) -> list[str]:
    doubts = []
    if len(sample.files) > 1:
        names = ", ".join(file.name for file in sample.files[:5])
        doubts.append(f"{len(sample.files)} files have the same columns and are one log: {names}")
    left = [str(file) for one in others for file in one.files if str(file) not in tables.values()]
    if left:
        doubts.append(f"other columns, not read: {', '.join(left)}")
    if sample.nested:
        doubts.append(
            f"{', '.join(f'`{name}`' for name in sample.nested)}: nested columns are not read; write their fields as "
            "columns of their own, for example user.id as user_id"
        )
    if sample.skipped:
        doubts.append(f"{sample.skipped:,} rows have another number of values: recpo prepare will refuse them")
    if not sample.is_whole:
        doubts.append(f"{sample.table.num_rows:,} of about {sample.rows:,} rows were looked at")
    return doubts


def counts_of(sample: TableSample, found: Recognition) -> LogCounts:
    """The size of a log, from the inspected rows."""
    user, item, request = (
        found.column(role) for role in (LogColumns.USER_ID, LogColumns.ITEM_ID, LogColumns.REQUEST_ID)
    )
    table, rows = sample.table, sample.table.num_rows
    if user is None or item is None:
        return LogCounts(sample.rows, 0, 0, sample.rows, 1, None, sample.is_whole)
    per_user = table.group_by(user).aggregate([([], "count_all")])["count_all"]
    requests = rows
    if request is not None:
        requests = table.group_by([user, request]).aggregate([]).num_rows
    return LogCounts(
        events=sample.rows,
        users=len(per_user),
        items=pc.count_distinct(table[item]).as_py(),
        requests=int(requests * sample.rows / max(1, rows)),
        events_per_user=int(pc.quantile(per_user, 0.9)[0].as_py() or 1) if rows else 1,
        days=_days(table, found),
        is_whole=sample.is_whole,
    )


def _days(table: pa.Table, found: Recognition) -> float | None:
    column, unit = found.column(LogColumns.TIMESTAMP), found.columns.time_unit
    if column is None or unit == "order":
        return None
    values = table[column]
    if pa.types.is_timestamp(values.type) or pa.types.is_date(values.type):
        ends = pc.min_max(values.cast(pa.timestamp("ms"), safe=False).cast(pa.int64())).as_py()
        return None if ends["min"] is None else float(ends["max"] - ends["min"]) / _MS_PER_DAY
    facts = column_facts(column, values)
    if facts.is_number and facts.least is not None and facts.most is not None and unit is not None:
        return (facts.most - facts.least) * MILLISECONDS_PER_UNIT[unit] / _MS_PER_DAY
    if facts.is_number:
        return None
    days = pc.min_max(pc.utf8_slice_codeunits(values.cast(pa.string()), 0, 10)).as_py()
    try:
        return float((date.fromisoformat(days["max"]) - date.fromisoformat(days["min"])).days + 1)
    except (TypeError, ValueError):
        return None


def timezone_of(values: pa.ChunkedArray) -> str | None:
    """The time zone that a column of times states: that of its type, or the most frequent offset of its texts.

    Returns:
        An IANA name or an offset such as "+01:00"; None = it states none, or UTC.
    """
    if pa.types.is_timestamp(values.type):
        zone = values.type.tz
    elif pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        offsets = pc.extract_regex(values.drop_null(), r"[0-9](?P<offset>[+-][0-9]{2}:[0-9]{2})$").drop_null()
        counts = pc.value_counts(pc.struct_field(offsets, "offset")).to_pylist() if len(offsets) else []
        zone = max(counts, key=lambda one: one["counts"])["values"] if counts else None
    else:
        zone = None
    return None if zone in ("UTC", "Etc/UTC", "GMT", "Z", "+00:00", "-00:00") else zone


def write_configurations(found: Inspection, out: Path) -> Inspection:
    """Writes the configurations of what was found.

    Args:
        found: the result of ``inspect_log``.
        out: directory for them.

    Raises:
        RecpoError: a question is open, or a file exists.
    """
    if found.questions:
        asked = "\n".join(f"  {number}. {text}" for number, text in enumerate(found.questions, 1))
        one = len(found.questions) == 1
        raise RecpoError(
            f"{', '.join(found.log)}: {'one thing' if one else f'{len(found.questions)} things'} cannot be told from "
            f"the log, nothing written\n{asked}",
            code="missing_option",
            field="columns",
        )
    steps = ["pretrain", *found.objectives]
    files = {"prepare": out / _PREPARE, **{step: out / f"{step}.yaml" for step in steps}}
    if existing := [str(file) for file in files.values() if file.exists()]:
        raise RecpoError(
            f"{', '.join(existing)} exists already: remove it, or choose another --out; nothing written",
            code="exists",
            field="out",
        )
    texts = {"prepare": _prepare_text(found, files), **{step: _training_text(found, step, files) for step in steps}}
    for step, file in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        with output_file(file, overwrite=False) as whole:
            whole.write_text(texts[step], encoding="utf-8")
    return replace(found, written=files)


def _paths(out: Path) -> dict[str, str]:
    """Output directories of the commands, beside the configurations."""
    runs = ("pretrain", "mpo", "gbpo", "evaluation", "bundle")
    paths = {"prepared": out / "prepared", "factors": out / "factors", **{name: out / "runs" / name for name in runs}}
    return {name: str(path) for name, path in paths.items()}


def _render(template: str, **values: Any) -> str:
    environment = Environment(
        loader=PackageLoader("recpo.verbs", "templates"),
        autoescape=False,  # YAML: every value from the log was quoted before
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(**values)


def _prepare_text(found: Inspection, files: Mapping[str, Path]) -> str:
    counts, recognition, label = found.counts, found.recognition, found.label
    about = "" if counts.is_whole else "about "
    column = recognition.column(LogColumns.TIMESTAMP)
    timezone = None if column is None else timezone_of(found.sample.table[column])
    split, options, why = split_of(recognition, counts, label, timezone)
    unknown = [name for name in recognition.unused if name != label.column]
    return _render(
        "prepare.yaml.jinja",
        events=f"{about}{counts.events:,} events of {counts.users:,} users and {counts.items:,} items",
        files={step: str(file) for step, file in files.items()},
        paths={name: _quoted(path) for name, path in _paths(files["prepare"].parent).items()},
        log=_quoted(_log_of(found)),
        preset=recognition.preset,
        csv=_csv_entries(found.sample.form),
        columns=_column_lines(found),
        label=_class_entry(label.class_name, label.init_args),
        label_why=_comment(label.why),
        split=_class_entry(split, options),
        split_why=_comment(why),
        behaviors=_quoted(dict(recognition.behaviors)) if _differs_from_preset(recognition) else None,
        tables={side: _quoted(file) for side, file in found.tables.items()},
        unused=_comment(", ".join(unknown)),
    )


def _differs_from_preset(found: Recognition) -> bool:
    return bool(found.behaviors) and found.preset == "plain"


def _log_of(found: Inspection) -> str | list[str]:
    """The given name if it stands for the log and nothing else; otherwise, the files of the log."""
    if set(find_files(list(found.log))) == set(found.sample.files):
        return found.log[0] if len(found.log) == 1 else list(found.log)
    files = [str(file) for file in found.sample.files]
    return files[0] if len(files) == 1 else files


def _csv_entries(form: CsvFormat) -> dict[str, str]:
    entries = {"delimiter": form.delimiter, "names": None if form.names is None else list(form.names)}
    return {name: _quoted(value) for name, value in entries.items() if value is not None}


def _column_lines(found: Inspection) -> list[str]:
    """A line for every column and unit, with its evidence. Settings of the preset are not repeated."""
    preset = PRESETS[found.recognition.preset]
    entries: list[tuple[str, str | FlagColumn, str]] = []
    for one in found.findings:
        entries.append((one.role, one.source, one.evidence))
    if (column := found.label.column) is not None:
        entries.append((LogColumns.LABEL, column, found.label.why))
    units = ("time_unit", "watch_time_unit", "duration_unit")
    entries += [(name, unit, "") for name in units if (unit := getattr(found.columns, name)) is not None]
    kept = [entry for entry in entries if found.recognition.preset == "plain" or getattr(preset, entry[0]) != entry[1]]
    lines = [(f"{name}: {_quoted(value)}", why) for name, value, why in kept or entries]
    width = max(len(text) for text, _ in lines) + 2
    return [f"{text:<{width}}# {_comment(why)}" if why else text for text, why in lines]


def _training_text(found: Inspection, step: str, files: Mapping[str, Path]) -> str:
    sizes = sizes_of(step, found.counts)
    if step == "gbpo":
        sizes = replace(sizes, dim=sizes_of("pretrain", found.counts).dim)
    watched = found.label.class_name == "WatchQuantiles"
    return _render(
        f"{step}.yaml.jinja",
        files={name: str(file) for name, file in files.items()},
        paths={name: _quoted(path) for name, path in _paths(files["prepare"].parent).items()},
        sizes=sizes,
        why=_comment(found.objectives.get(step, "")),
        aligned=step != "pretrain",
        dropout=0.0 if step == "mpo" else 0.2,
        positive_fraction="0.25               # +1 in the top quarter of the step's labels, -1 disliked, else 0"
        if watched
        else "null               # +1 positive by the log's own definition, -1 disliked, else 0",
    )


def _class_entry(name: str, options: Mapping[str, Any]) -> str:
    return name if not options else f"{{class_path: {name}, init_args: {_quoted(dict(options))}}}"


def _quoted(value: Any) -> str:
    """A value as YAML: JSON, which is also YAML, or a plain word."""
    if isinstance(value, str) and value.replace("_", "").replace("/", "").replace(".", "").isalnum():
        plain = value.lower() not in ("null", "true", "false", "yes", "no", "on", "off", "y", "n")
        if plain and not value.replace(".", "").replace("_", "").isdigit() and value[0] not in "./0123456789":
            return value
    if isinstance(value, FlagColumn):
        value = {"column": value.column, "equals": value.equals}
    if isinstance(value, dict) and all(key.isidentifier() for key in value):
        parts = {
            key: _quoted(one) if isinstance(one, FlagColumn) else json.dumps(one, ensure_ascii=False)
            for key, one in value.items()
        }
        return "{" + ", ".join(f"{key}: {text}" for key, text in parts.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def _comment(text: str) -> str:
    """Text from a log as one line for a comment."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def _commands(found: Inspection) -> list[str]:
    files, paths = found.written, _paths(found.written["prepare"].parent)
    train = [["recpo", "train", "--config", str(files[step])] for step in files if step != "prepare"]
    fit = ["recpo", "factorize", "--prepared", paths["prepared"], "--out", paths["factors"]]
    runs = [paths[step] for step in files if step != "prepare"]
    served = runs[1] if len(runs) > 1 else runs[0]
    compared = ["--contenders", *runs]
    histories, lists = f"{paths['prepared']}/histories.parquet", str(Path(paths["bundle"]).parent / "lists.parquet")
    listed = [
        ["recpo", "prepare", "--config", str(files["prepare"])],
        train[0],
        *([fit] if "mpo" in files else []),
        *train[1:],
        ["recpo", "evaluate", "--prepared", paths["prepared"], *compared, "--out", paths["evaluation"]],
        ["recpo", "export", "--run", served, "--out", paths["bundle"]],
        [*("recpo", "recommend", "--source", paths["bundle"], "--histories", histories, "--out", lists), "--show", "3"],
    ]
    return [shlex.join(words) for words in listed]


init = function_of(Init)
