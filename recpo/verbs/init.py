"""The verb ``init``: inspects the files of a log and writes configurations for it."""

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import yaml

from recpo.artifacts.documents import as_configuration
from recpo.artifacts.outputs import output_file
from recpo.base.errors import RecpoError
from recpo.log import shaping
from recpo.log.csv_files import CsvFormat
from recpo.log.feature_columns import FeatureColumns
from recpo.log.files import find_files
from recpo.log.inspection import SNAPSHOTS, Choice, Inspection, inspect_log
from recpo.log.schema import PRESETS, Columns, LogColumns
from recpo.log.splits import LeaveLastOut, TemporalSplit
from recpo.training.recipes import FACTORS, MPO, PREPARED, PRETRAIN, RECIPES, RUNS
from recpo.verbs.prepare import source_of
from recpo.verbs.verb import PYTHON_ONLY, Verb, configurations, function_of


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
    is_tracked: ClassVar = False

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
        log = source_of(self.log, "log")
        if not isinstance(log, list):
            raise RecpoError(
                "log: init reads files, which prepare.yaml names: write the frame to Parquet, or give it to recpo.fit",
                code="wrong_type",
                field="log",
            )
        found = inspect_log(log, columns=self.columns, csv=self.csv)
        self.on_inspected(found)
        return write_configurations(found, Path(self.out))


def write_configurations(found: Inspection, out: Path) -> Inspection:
    """Writes the configurations of what was found.

    Args:
        found: the result of ``inspect_log``.
        out: directory for them.

    Raises:
        RecpoError: a question is open, or a file exists.
    """
    _validate_answered(found)
    steps = [PRETRAIN, *found.objectives]
    files = {step: out / f"{step}.yaml" for step in ("prepare", *steps)}
    if existing := [str(file) for file in files.values() if file.exists()]:
        raise RecpoError(
            f"{', '.join(existing)} exists already: remove it, or choose another --out; nothing written",
            code="exists",
            field="out",
        )
    texts = {"prepare": _prepare_text(found, out), **{step: _training_text(found, step, out) for step in steps}}
    for step, file in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        with output_file(file, overwrite=False) as whole:
            whole.write_text(texts[step], encoding="utf-8")
    return replace(found, written=files, commands=tuple(_commands(out, steps)))


def preparation_of(found: Inspection, out: Path | None = None) -> dict[str, Any]:
    """The options of ``recpo.prepare`` that ``prepare.yaml`` has.

    Args:
        found: the result of ``inspect_log``.
        out: where the log is prepared; of a directory around it, the files are named.

    Raises:
        RecpoError: a question is open.
    """
    _validate_answered(found)
    split: Any = {"TemporalSplit": TemporalSplit, "LeaveLastOut": LeaveLastOut}[found.split.class_name]
    label: Any = getattr(shaping, found.label.class_name)
    columns, log = found.columns, _log_of(found, out)
    chosen: dict[str, Any] = {"log": log, "preset": found.preset, "csv": found.sample.form}
    if found.table_columns.duration is not None:
        columns = replace(columns, duration=None, duration_unit=None)
    if found.table_columns != FeatureColumns():
        chosen |= {f"{side}s": file for side, file in found.tables.items()} | {"features": found.table_columns}
    if found.behaviors and found.preset == "plain":
        chosen["behaviors"] = dict(found.behaviors)
    if found.outcome_rows:
        chosen["outcome_rows"] = True
    if found.has_snapshots:
        chosen["repeats"] = False
    chosen |= found.left_out
    chosen |= {"label": label(**found.label.init_args), "split": split(**found.split.init_args)}
    return {**chosen, "columns": columns}


def _validate_answered(found: Inspection) -> None:
    """Raises if a question is open."""
    if found.questions:
        asked = "\n".join(f"  {number}. {text}" for number, text in enumerate(found.questions, 1))
        one, role = len(found.questions) == 1, found.questions[0].partition(":")[0]
        raise RecpoError(
            f"{', '.join(found.log)}: {'one thing' if one else f'{len(found.questions)} things'} cannot be told from "
            f"the log, nothing written\n{asked}",
            code="missing_option",
            field=role if role in LogColumns.ALL else "csv.names",
        )


def _prepare_text(found: Inspection, out: Path) -> str:
    """The options of ``preparation_of``, with the reasons for them as comments."""
    options, counts, about = preparation_of(found, out), found.counts, "" if found.counts.is_whole else "about "
    size = f"{about}{counts.events:,} events of {counts.users:,} users and {counts.items:,} items"
    readme = "data/README.md has the columns and their units"
    lines = [
        f"# The log, as recpo init read it: {size}.",
        "#",
        f"#   recpo prepare --config {out / 'prepare.yaml'}",
        "#",
        f"# Every key is an option of `recpo prepare` (see recpo prepare --help); {readme}.",
        "",
        f"log: {_yaml(options['log'])}",
        f"out: {_yaml(out / PREPARED)}",
    ]
    if found.preset != "plain":
        lines.append(f"preset: {found.preset}")
    if csv := {name: value for name, value in vars(options["csv"]).items() if value is not None}:
        lines.append(f"csv: {_yaml(csv)}")
    lines += [
        "\ncolumns:                      # standard name: name in the log",
        *_column_lines(found, options["columns"]),
    ]
    lines.append(_class_entry("label", found.label))
    if found.has_snapshots:
        lines.append(f"\n# {SNAPSHOTS}.\nrepeats: false")
    if "outcome_rows" in options:
        followed = "# an exposure and what followed are one event: the one with the highest label"
        lines.append(f"outcome_rows: true            {followed}")
    lines.append(_class_entry("split", found.split))
    if found.left_out:
        lines.append("\n# Rows without a user, item or time, and rows of wrong clocks, are left out and counted.")
        lines += [f"{name}: {_yaml(value)}" for name, value in found.left_out.items()]
    if "behaviors" in options:
        lines.append(f"\nbehaviors: {_yaml(options['behaviors'])}")
    for side, file in found.tables.items():
        known = "what is known of them goes into their vectors (docs/features.md)"
        is_read = f"{side}s" in options
        lines += [
            f"\n# A table with one row for each {side}: {known}.",
            f"{'' if is_read else '# '}{side}s: {_yaml(file)}",
        ]
    if "features" in options:
        said = {
            name: value for name, value in vars(options["features"]).items() if value != getattr(FeatureColumns(), name)
        }
        lines += ["features:", *(f"  {name}: {_yaml(value)}" for name, value in said.items())]
    if found.unused:
        lines.append(f"\n# Columns that are not read: {_comment(', '.join(found.unused))}")
    return "\n".join(lines) + "\n"


def _class_entry(name: str, choice: Choice) -> str:
    """A label or split below its reason."""
    options = choice.init_args
    value = {"class_path": choice.class_name, "init_args": options} if options else choice.class_name
    return f"\n# {_comment(choice.why)}\n{name}: {_yaml(value)}"


def _log_of(found: Inspection, out: Path | None) -> str | list[str]:
    """The given name if it stands for the log and nothing else, also with ``out``; otherwise, the files of the log."""
    is_around = out is not None and any(
        Path(name).resolve() in (out / PREPARED).resolve().parents for name in found.log
    )
    if not is_around and set(find_files(list(found.log))) == set(found.sample.files):
        return found.log[0] if len(found.log) == 1 else list(found.log)
    files = [str(file) for file in found.sample.files]
    return files[0] if len(files) == 1 else files


def _column_lines(found: Inspection, columns: Columns) -> list[str]:
    """A line for every column and unit, with its evidence. Settings of the preset are not repeated."""
    evidence = {one.role: one.evidence for one in found.findings}
    entries = {name: value for name, value in vars(columns).items() if value is not None}
    own = {name: value for name, value in entries.items() if getattr(PRESETS[found.preset], name) != value}
    kept = entries if found.preset == "plain" else own or entries
    width = max(len(f"{name}: {_yaml(value)}") for name, value in kept.items()) + 2
    lines = []
    for name, value in kept.items():
        text, why = f"{name}: {_yaml(value)}", evidence.get(name)
        lines.append(f"  {text:<{width}}# {_comment(why)}" if why else f"  {text}")
    return lines


def _training_text(found: Inspection, step: str, out: Path) -> str:
    """The configuration of recpo's own for this step, with the sizes that ``fit`` takes for such a log."""
    recipe = RECIPES[step]
    chosen = recipe.options(out, found.counts, found.label.class_name)
    options = {"out": out / RUNS / step, **chosen, "data.prepared": out / PREPARED}
    text = (configurations() / f"{recipe.configs[0]}.yaml").read_text(encoding="utf-8")
    for name, value in reversed(options.items()):
        text = _with_option(text, name, value)
    title, body = text.partition("\n")[0], text[text.index("\n\n") :]
    lines = [title, *(f"# {_comment(why)}" for name, why in found.objectives.items() if name == step), "#"]
    if recipe.reward is not None:
        lines.append(f"#   recpo factorize --prepared {out / PREPARED} --out {out / FACTORS}")
    lines += [f"#   recpo train --config {out / step}.yaml", "#"]
    lines += ["# Every key is an option of `recpo train` (see recpo train --help); a flag after --config overrides it."]
    return "\n".join(lines) + body


def _with_option(text: str, name: str, value: Any) -> str:
    """A configuration in which the option of a dotted name has this value; its comments stay."""
    *groups, last = name.split(".")
    node = yaml.compose(text)
    for group in groups:
        node = {key.value: inner for key, inner in node.value}[group]
    start, entries = node.start_mark, {key.value: inner for key, inner in node.value}
    if (there := entries.get(last)) is not None:
        return text[: there.start_mark.index] + _yaml(value) + text[there.end_mark.index :]
    return f"{text[: start.index]}{last}: {_yaml(value)}\n{' ' * start.column}{text[start.index :]}"


def _yaml(value: Any) -> str:
    """A value in one line of YAML."""
    style: dict[str, Any] = {"default_flow_style": True, "allow_unicode": True, "sort_keys": False, "width": math.inf}
    plain = as_configuration(value)
    text = yaml.safe_dump(plain, **style)
    if len(text.removesuffix("...\n").splitlines()) > 1:  # line breaks in a name
        text = yaml.safe_dump(plain, default_style='"', **style)
    return text.removesuffix("...\n").strip()


def _comment(text: str) -> str:
    """Text from a log as one line for a comment."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def _commands(out: Path, steps: Sequence[str]) -> list[str]:
    """The commands to run, in order, from the log to recommendations."""
    prepared, bundle, runs = out / PREPARED, out / RUNS / "bundle", [out / RUNS / step for step in steps]
    pretrain, *aligned = (["train", "--config", out / f"{step}.yaml"] for step in steps)
    listed: list[list[object]] = [["prepare", "--config", out / "prepare.yaml"], pretrain]
    if MPO in steps:
        listed.append(["factorize", "--prepared", prepared, "--out", out / FACTORS])
    listed += [
        *aligned,
        ["evaluate", "--prepared", prepared, "--contenders", *runs, "--out", out / RUNS / "evaluation"],
        ["export", "--run", runs[1] if aligned else runs[0], "--out", bundle],
        ["recommend", "--source", bundle, "--histories", prepared / "histories.parquet"],
    ]
    listed[-1] += ["--out", out / RUNS / "lists.parquet", "--show", 3]
    return [shlex.join(["recpo", *map(str, words)]) for words in listed]


init = function_of(Init)
