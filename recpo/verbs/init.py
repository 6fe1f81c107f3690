"""The verb ``init``: inspects the files of a log and writes configurations for it."""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from jinja2 import Environment, PackageLoader, StrictUndefined

from recpo.artifacts.outputs import output_file
from recpo.base.errors import RecpoError
from recpo.log import shaping
from recpo.log.csv_files import CsvFormat
from recpo.log.files import find_files
from recpo.log.inspection import Inspection, inspect_log
from recpo.log.recognition import Recognition
from recpo.log.schema import PRESETS, Columns, FlagColumn, LogColumns
from recpo.log.splits import LeaveLastOut, TemporalSplit
from recpo.training.sizes import sizes_of
from recpo.verbs.verb import PYTHON_ONLY, Verb, function_of

_PREPARE, _PRETRAIN = "prepare.yaml", "pretrain.yaml"


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
        found = inspect_log(self.log, columns=self.columns, csv=self.csv)
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
    return replace(found, written=files, commands=tuple(_commands(files)))


def preparation_of(found: Inspection) -> dict[str, Any]:
    """The options of ``recpo.prepare`` that ``prepare.yaml`` has.

    Raises:
        RecpoError: a question is open.
    """
    _validate_answered(found)
    split: Any = {"TemporalSplit": TemporalSplit, "LeaveLastOut": LeaveLastOut}[found.split.class_name]
    label: Any = getattr(shaping, found.label.class_name)
    columns, log = found.columns, _log_of(found)
    chosen: dict[str, Any] = {"log": log, "preset": found.preset, "csv": found.sample.form}
    if found.label.column is not None:
        columns = replace(columns, label=found.label.column)
    if _differs_from_preset(found):
        chosen["behaviors"] = dict(found.behaviors)
    if found.outcome_rows:
        chosen["outcome_rows"] = True
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
    counts, label = found.counts, found.label
    about = "" if counts.is_whole else "about "
    unknown = [name for name in found.unused if name != label.column]
    return _render(
        "prepare.yaml.jinja",
        events=f"{about}{counts.events:,} events of {counts.users:,} users and {counts.items:,} items",
        files={step: str(file) for step, file in files.items()},
        paths={name: _quoted(path) for name, path in _paths(files["prepare"].parent).items()},
        log=_quoted(_log_of(found)),
        preset=found.preset,
        csv=_csv_entries(found.sample.form),
        columns=_column_lines(found),
        label=_class_entry(label.class_name, label.init_args),
        label_why=_comment(label.why),
        outcome_rows=found.outcome_rows,
        split=_class_entry(found.split.class_name, found.split.init_args),
        split_why=_comment(found.split.why),
        behaviors=_quoted(dict(found.behaviors)) if _differs_from_preset(found) else None,
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
    preset = PRESETS[found.preset]
    entries: list[tuple[str, str | FlagColumn, str]] = []
    for one in found.findings:
        entries.append((one.role, one.source, one.evidence))
    if (column := found.label.column) is not None:
        entries.append((LogColumns.LABEL, column, found.label.why))
    units = ("time_unit", "watch_time_unit", "duration_unit")
    entries += [(name, unit, "") for name in units if (unit := getattr(found.columns, name)) is not None]
    kept = [entry for entry in entries if found.preset == "plain" or getattr(preset, entry[0]) != entry[1]]
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


def _commands(files: Mapping[str, Path]) -> list[str]:
    """The commands to run, in order, from the log to recommendations."""
    paths = _paths(files["prepare"].parent)
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
