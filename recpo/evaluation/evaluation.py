"""The result of ``evaluate``: the document with all numbers, and its directory."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import pandas as pd
import yaml

from recpo.artifacts.artifact import Artifact
from recpo.artifacts.checksums import Kind, verify
from recpo.artifacts.documents import read_yaml
from recpo.artifacts.outputs import output_directory
from recpo.base.errors import RecpoError
from recpo.evaluation.html_report.parts import render
from recpo.evaluation.html_report.view import html_report, html_table, variants_tables
from recpo.evaluation.reading import Document

#: Files of the directory: every number, the report, and the options that repeat the evaluation.
METRICS, REPORT, RESOLVED = "metrics.json", "report.html", "resolved.yaml"

Rows = Literal["metrics", "differences", "off_policy"]


@dataclass(frozen=True)
class Evaluation(Artifact):
    """Contenders on the same held-out users: numbers, intervals, paired differences and a report.

    Attributes:
        document: all numbers, see ``recpo.evaluation.document.evaluation_document``.
        options: arguments of ``evaluate``, as in ``resolved.yaml``.
        path: the directory; None = the evaluation is only in memory.
    """

    kind: ClassVar[Kind] = "evaluation"
    version: ClassVar = 8
    made_by: ClassVar = "recpo evaluate"

    document: Document = field(repr=False)
    options: Mapping[str, Any] = field(repr=False)
    path: Path | None = None

    @classmethod
    def _read(cls, root: Path) -> Self:
        document = cls.facts_of(root)
        verify(root, document.pop("files"), cls.remedy())
        return cls(document, read_yaml(root / RESOLVED, cls.remedy()), root)

    @property
    def report(self) -> Path | None:
        """The report, one HTML file that opens offline; None if the evaluation is only in memory."""
        return None if self.path is None else self.path / REPORT

    @property
    def warnings(self) -> list[str]:
        """Warnings to read before the numbers."""
        return list(self.document["warnings"])

    def html(self) -> str:
        """The report's page."""
        return html_report(self.document)

    def write(self, path: Path | str, *, overwrite: bool = False) -> Self:
        """Writes the directory, which appears complete or not at all.

        Args:
            path: directory to create.
            overwrite: replace an existing one.

        Returns:
            The evaluation in its directory.

        Raises:
            RecpoError: it exists and ``overwrite`` is False.
        """
        root = Path(path)
        with output_directory(root, kind=self.kind, overwrite=overwrite) as partial:
            self.write_files(partial)
        return replace(self, path=root)

    def write_files(self, directory: Path) -> None:
        """Writes the files of an evaluation into an empty directory, which the caller then moves into place."""
        (directory / REPORT).write_text(self.html(), encoding="utf-8")
        text = yaml.safe_dump(dict(self.options), sort_keys=False, allow_unicode=True)
        (directory / RESOLVED).write_text(text, encoding="utf-8")
        self.write_facts(directory, self.document, [RESOLVED])

    def to_pandas(self, rows: Rows = "metrics") -> pd.DataFrame:
        """The numbers as a frame.

        Args:
            rows: kind of rows. ``metrics``: a metric of a contender: ``contender kind metric mean half_width n``,
                half_width of the 95 % interval over n users; nan for metrics of all lists together, such as coverage.
                ``differences``: a paired difference of two contenders on a metric: ``contender against metric mean
                half_width n p_value p_holm survives_holm``. ``off_policy``: an estimate of a contender's value:
                ``contender target estimator value low high rows effective_rows warnings``, with the ends of the
                bootstrap interval.

        Raises:
            RecpoError: there is no such kind of rows.
        """
        makers = {"metrics": _metric_rows, "differences": _difference_rows, "off_policy": _off_policy_rows}
        if rows not in makers:
            raise RecpoError(
                f"to_pandas: rows is {rows!r}, expected one of {', '.join(makers)}", code="unknown_name", field="rows"
            )
        columns, found = makers[rows](self.document)
        return pd.DataFrame(found, columns=columns)

    def _repr_html_(self) -> str:
        return html_table(self.document)


def _metric_rows(document: Document) -> tuple[list[str], list[tuple[Any, ...]]]:
    columns = ["contender", "kind", "metric", "mean", "half_width", "n"]
    found: list[tuple[Any, ...]] = []
    for contender in document["contenders"]:
        who = (contender["name"], contender["kind"])
        for metric, value in contender["metrics"].items():
            found.append((*who, metric, value["mean"], value["half_width"], value["n"]))
        users = contender["counts"].get("users", 0)
        found += [(*who, metric, value, None, users) for metric, value in contender["totals"].items()]
    return columns, found


def _difference_rows(document: Document) -> tuple[list[str], list[tuple[Any, ...]]]:
    numbers = ["mean", "half_width", "n", "p_value", "p_holm", "survives_holm"]
    found = [
        (pair["contender"], pair["against"], metric, *(value[name] for name in numbers))
        for pair in document["differences"]
        for metric, value in pair["metrics"].items()
    ]
    return ["contender", "against", "metric", *numbers], found


def _off_policy_rows(document: Document) -> tuple[list[str], list[tuple[Any, ...]]]:
    columns = ["contender", "target", "estimator", "value", "low", "high", "rows", "effective_rows", "warnings"]
    found = [
        (
            contender["name"],
            entry["target"],
            entry["estimator"],
            entry["value"],
            *(entry["intervals"]["bootstrap"][end] for end in ("low", "high")),
            entry["rows"],
            entry["effective_sample_size"],
            "; ".join(entry["warnings"]),
        )
        for contender in document["contenders"]
        for entry in contender["off_policy"]
    ]
    return columns, found


class VariantEvaluation(Evaluation):
    """The variants of a served log: ``document`` is that of ``recpo.evaluation.variants.variants_document``."""

    kind: ClassVar[Kind] = "variants"
    version: ClassVar = 2
    made_by: ClassVar = "recpo evaluate --log LOG --by variant"

    def to_pandas(self, rows: Rows = "metrics") -> pd.DataFrame:
        """A row per variant and number: ``variant metric mean half_width low high``, ends of the confidence sequence.

        Args:
            rows: ``metrics``; there are no other rows.

        Raises:
            RecpoError: other rows are wanted.
        """
        if rows != "metrics":
            raise RecpoError(f"to_pandas: variants have no rows {rows!r}", code="unknown_name", field="rows")
        found = []
        entries = [(one["variant"], name, one[name]) for one in self.document["variants"] for name in one]
        if (preference := self.document["preference"]) is not None:
            entries.append((preference["of"], "preference", preference))
        for variant, metric, value in entries:
            if isinstance(value, dict):
                low, high = value["sequence"] or (None, None)
                found.append((variant, metric, value["mean"], value["half_width"], low, high))
        return pd.DataFrame(found, columns=["variant", "metric", "mean", "half_width", "low", "high"])

    def html(self) -> str:
        """The report's page."""
        return render(
            "variants.html.jinja",
            title=f"Variants of experiment {self.document['experiment']}",
            subtitle="impressions of a server's log; a value is the sum of the grades of a list less its dislikes",
            version=self.document["recpo_version"],
            numbers=METRICS,
            document=self.document,
            tables=variants_tables(self.document),
        )

    def _repr_html_(self) -> str:
        return str(self.to_pandas().to_html(index=False))
