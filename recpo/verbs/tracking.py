"""Tracking: every verb is one run of MLflow, Weights & Biases or TensorBoard, if one of them was chosen.

Chosen once for all verbs: ``recpo VERB --track mlflow:http://host:5000``, the environment variable ``RECPO_TRACK``, or
``with recpo.tracked("mlflow:http://host:5000"):``. A run has the options of the verb, its metrics, and its inputs and
its output by path and checksum, so that runs are linked by what one wrote and another read. No result depends on it.

The trackers: adapters over the clients of MLflow, Weights & Biases and TensorBoard, which are imported when chosen.

MLflow and Weights & Biases report to their makers unless told otherwise; here they do so only if the user's
environment says so.
"""

from __future__ import annotations

import importlib
import os
import re
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, TypeVar

import yaml

import recpo
from recpo.artifacts.checksums import DOCUMENTS, kind_of, sha256
from recpo.base.errors import RecpoError, first_line

if TYPE_CHECKING:
    from recpo.verbs.verb import Verb


VARIABLE: Final = "RECPO_TRACK"
Status = Literal["finished", "failed", "killed"]
R = TypeVar("R")
_Texts = Mapping[str, str]

_JOURNAL: Final = "_journal"  # marks the log of a server, see recpo.server.impressions
_UPLOADED: Final = ("decision.json", "report.html", "README.md")  # README.md is the model card of a bundle
_MOST_BYTES: Final = 10 << 20
_SECRET: Final = re.compile(r"password|secret|token|credential|access.?key", re.IGNORECASE)
_LOGIN: Final = re.compile(r"(?<=://)[^/@\s]+@")


class Reference(NamedTuple):
    """A file or directory that a verb read or wrote: nothing of it is uploaded.

    Attributes:
        option: the option that names it, such as ``init_from`` or ``contenders.0``.
        kind: what it is, or ``file``.
        path: absolute path.
        checksum: SHA-256 of its document, or of the file; of the path, if there is none, as of a log that is served.
    """

    option: str
    kind: str
    path: str
    checksum: str


class TrackedRun(ABC):
    """One run of a tracker, which starts when it is made. Every method may fail.

    Every kind of run is made of ``(package, place, name, facts, options, parent)``: the client, its address, project or
    directory (empty = its own default), the name of the run, verb, version and path of the output, every recorded
    option by its dotted name, and the run of the verb that calls this one (None = nothing calls it).
    """

    module: ClassVar[str]
    """The package of the client."""
    environment: ClassVar[Mapping[str, str]] = {}
    """Variables that are set before the package is imported, unless the user has set them."""

    @abstractmethod
    def metrics(self, values: Mapping[str, float], step: int | None) -> None:
        """Records numbers; None = they are of the whole run."""

    @abstractmethod
    def facts(self, values: Mapping[str, str]) -> None:
        """Records text by name."""

    @abstractmethod
    def read(self, one: Reference) -> None:
        """Records an input, and links the run that wrote it."""

    def wrote(self, one: Reference) -> None:
        """Records the output."""
        self.facts({"recpo.output.kind": one.kind, "recpo.output.checksum": one.checksum})

    @abstractmethod
    def document(self, name: str, text: str) -> None:
        """Uploads a small text file."""

    @abstractmethod
    def end(self, status: Status) -> None:
        """Ends the run."""


#: Starts a run from its name, facts, options and parent.
Tracker = Callable[[str, Mapping[str, str], Mapping[str, str], Any], TrackedRun]


class _Current:
    """The run of a verb. After the first failure, it and the runs inside it send nothing more."""

    def __init__(self, tracker: Tracker, outer: _Current | None, verb: Verb[Any]) -> None:
        self._outermost: _Current = self if outer is None else outer._outermost
        self._lost, self._run = False, None
        self._verb, options = verb, _flat(hidden(verb.recorded()))
        out = options.get(verb.output_option)
        self._out = None if out in (None, "None") or "://" in str(out) else os.path.abspath(str(out))
        facts = {"recpo.verb": type(verb).__name__.lower(), "recpo.version": recpo.__version__}
        if self._out is not None:
            facts["recpo.output.path"] = self._out
        name = facts["recpo.verb"] + ("" if self._out is None else f" {os.path.basename(self._out)}")
        try:
            if not self._outermost._lost:
                self._run = tracker(name, facts, options, None if outer is None else outer._run)
        except Exception as error:
            if outer is None:
                raise RecpoError(
                    f"track: the tracker does not answer ({_reason(error)}): check its address and whether it runs, "
                    "or leave out --track",
                    code="failed",
                    field="track",
                ) from error
            self._fail(error)
        for one in references(options, self._out):
            self.send("read", one)

    def send(self, method: str, *values: object) -> None:
        """Calls a method of the run of the client. A failure warns once."""
        if not self._outermost._lost:
            try:
                getattr(self._run, method)(*values)
            except Exception as error:  # a result must not be lost because a tracker is down
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._outermost._lost = True
        warnings.warn(f"nothing more is tracked: {_reason(error)}; the work continues", stacklevel=2)

    def metrics(self, values: Mapping[str, Any], step: int | None) -> None:
        """Sends metrics of training."""
        self.send("metrics", {name: float(value) for name, value in values.items()}, step)

    def finish(self, result: Any) -> None:
        """Sends what is known of a result."""
        measured = self._verb.measured(result)
        if numbers := {name: value for name, value in measured.items() if not isinstance(value, str)}:
            self.metrics(numbers, None)
        if texts := {f"recpo.{name}": value for name, value in measured.items() if isinstance(value, str)}:
            self.send("facts", texts)
        wrote = None if self._out is None else _reference(self._verb.output_option, Path(self._out))
        if wrote is not None:
            self.send("wrote", wrote)
        text = yaml.safe_dump(hidden(self._verb.recorded()), sort_keys=False, allow_unicode=True)
        self.send("document", "resolved.yaml", text)
        for file in [] if wrote is None or wrote.kind == "file" else map(Path(wrote.path).joinpath, _UPLOADED):
            if file.is_file() and file.stat().st_size <= _MOST_BYTES:
                self.send("document", file.name, file.read_text("utf-8"))


_TRACKER: ContextVar[Tracker | None] = ContextVar("tracker", default=None)
_CURRENT: ContextVar[_Current | None] = ContextVar("current", default=None)


@contextmanager
def tracked(tracker: str) -> Iterator[None]:
    """Tracks every verb that is called inside the block, instead of what ``RECPO_TRACK`` names.

    ::

        with recpo.tracked("mlflow:http://127.0.0.1:5000"):
            run = recpo.train(data, out="runs/pretrain")

    Args:
        tracker: ``mlflow:ADDRESS``, ``wandb:PROJECT`` or ``tensorboard:DIRECTORY``. ``mlflow`` and ``wandb`` alone take
            what the environment variables of these programs say.

    Raises:
        RecpoError: there is no such kind (code ``unknown_name``), or its client is missing (``not_installed``); from a
            verb in the block: the tracker does not answer when the verb starts (``failed``).
    """
    token = _TRACKER.set(_tracker(tracker))
    try:
        yield
    finally:
        _TRACKER.reset(token)


def is_first_process() -> bool:
    """Whether this is the first of several training processes, or the only one."""
    return not int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0)


def run_tracked(verb: Verb[R]) -> R:
    """Executes a verb, as a run of the tracker if one was chosen.

    A verb that another verb calls is a run inside the run of that verb. Of several training processes, only the first
    tracks.
    """
    tracker = _TRACKER.get()
    if tracker is None and os.environ.get(VARIABLE):
        tracker = _tracker(os.environ[VARIABLE])
    if tracker is None or not verb.is_tracked or not is_first_process():
        return verb.execute()
    current = _Current(tracker, _CURRENT.get(), verb)
    token = _CURRENT.set(current)
    status: Status = "killed"
    try:
        result = verb.execute()
        current.finish(result)
        status = "finished"
        return result
    except Exception:
        status = "failed"
        raise
    finally:
        _CURRENT.reset(token)
        current.send("end", status)


def metrics_of_training() -> Callable[[Mapping[str, Any], int | None], None] | None:
    """Where training sends its metrics and their step; None = nothing is tracked."""
    current = _CURRENT.get()
    return None if current is None else current.metrics


def _tracker(text: str) -> Tracker:
    kind, _, place = text.partition(":")
    runs: dict[str, Callable[..., TrackedRun]] = {"mlflow": _MLflow, "wandb": _Wandb, "tensorboard": _TensorBoard}
    run: Any = runs.get(kind)
    if run is None:
        raise RecpoError(
            f"track: {_LOGIN.sub('', text)!r}, expected mlflow:ADDRESS, wandb:PROJECT or tensorboard:DIRECTORY",
            code="unknown_name",
            field="track",
        )
    if run is _TensorBoard and not place:
        raise RecpoError("track: expected tensorboard:DIRECTORY", code="missing_option", field="track")
    for name, value in run.environment.items():
        os.environ.setdefault(name, value)
    try:
        return partial(run, importlib.import_module(run.module), place)
    except ImportError as error:
        raise RecpoError(
            f"track: {run.module} cannot be imported ({error}): pip install recpo[{kind}]",
            code="not_installed",
            field="track",
        ) from error


def references(options: Mapping[str, str], out: str | None) -> list[Reference]:
    """The directories of recpo's among the values of options, except the output."""
    found = [_reference(option, Path(value)) for option, value in options.items() if value and "://" not in value]
    return [one for one in found if one is not None and one.kind != "file" and one.path != out]


def _reference(option: str, path: Path) -> Reference | None:
    """What lies at a path; None = nothing. The files of a simulated or served log stand for their directory."""
    place = Path(os.path.abspath(path))
    for root in (place, place.parent):
        is_served = kind_of(root / _JOURNAL) == "impressions"
        kind = "impressions" if is_served else kind_of(root)
        if kind is not None and (is_served or root == place or kind == "simulation"):
            document = root / DOCUMENTS.get(kind, "")
            return Reference(option, kind, str(root), sha256(document if document.is_file() else str(root).encode()))
    try:
        return Reference(option, "file", str(place), sha256(place)) if place.is_file() else None
    except (OSError, ValueError):
        return None


def hidden(value: Any, name: str = "") -> Any:
    """Options without passwords: text under a name such as ``secret`` or ``token``, and logins in addresses."""
    if isinstance(value, Mapping):
        return {key: hidden(part, str(key)) for key, part in value.items()}
    if isinstance(value, list):
        return [hidden(part, name) for part in value]
    if not isinstance(value, str):
        return value
    return "(hidden)" if _SECRET.search(name) else _LOGIN.sub("", value)


def _flat(value: Any, name: str = "") -> dict[str, str]:
    """A tree of options as text by dotted name."""
    if isinstance(value, Mapping | list) and value:
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        found: dict[str, str] = {}
        for key, part in pairs:
            found |= _flat(part, f"{name}.{key}" if name else str(key))
        return found
    return {name: str(value)}


def _reason(error: Exception) -> str:
    """The first line of an error, without logins."""
    return f"{type(error).__name__}: {_LOGIN.sub('', first_line(error))}"


_LONGEST: Final = 500  # characters of an option: what every version of the trackers takes
_AT_ONCE: Final = 100  # parameters or metrics in one request to MLflow
_DIGEST: Final = 36  # longest digest of a data set of MLflow


class _MLflow(TrackedRun):
    """A run of MLflow, in the experiment of ``MLFLOW_EXPERIMENT_NAME``, or ``recpo``."""

    module = "mlflow"
    environment: ClassVar = {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # MLflow itself waits for minutes
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }

    def __init__(self, package: Any, place: str, name: str, facts: _Texts, options: _Texts, parent: Any) -> None:
        self._entities, self._client = package.entities, package.MlflowClient(place or None)
        wanted = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "recpo"
        found = self._client.get_experiment_by_name(wanted)
        self._experiment = self._client.create_experiment(wanted) if found is None else found.experiment_id
        tags = dict(facts) if parent is None else {**facts, "mlflow.parentRunId": parent.id}
        self.id = self._client.create_run(self._experiment, run_name=name, tags=tags).info.run_id
        parameter = self._entities.Param
        self._log("params", [parameter(_name(key), value[:_LONGEST]) for key, value in options.items()])

    def _log(self, kind: str, entries: list[Any]) -> None:
        for first in range(0, len(entries), _AT_ONCE):
            self._client.log_batch(self.id, **{kind: entries[first : first + _AT_ONCE]})

    def metrics(self, values: Mapping[str, float], step: int | None) -> None:
        now, metric = int(time.time() * 1000), self._entities.Metric
        self._log("metrics", [metric(_name(name), value, now, step or 0) for name, value in values.items()])

    def facts(self, values: Mapping[str, str]) -> None:
        tag = self._entities.RunTag
        self._log("tags", [tag(name, value[:_LONGEST]) for name, value in values.items()])

    def read(self, one: Reference) -> None:
        option, entities = f"recpo.input.{one.option}", self._entities
        tags = {option: one.checksum, f"{option}.path": one.path}
        wanted = f"tags.`recpo.output.checksum` = '{one.checksum}'"
        made = self._client.search_runs([self._experiment], wanted, max_results=1)  # the newest first
        if made:
            tags[f"{option}.run_id"] = made[0].info.run_id
        self.facts(tags)
        data = entities.Dataset(f"{one.kind} {Path(one.path).name}", one.checksum[:_DIGEST], "local", one.path)
        context = [entities.InputTag("mlflow.data.context", one.option)]
        self._client.log_inputs(self.id, [entities.DatasetInput(data, context)])

    def document(self, name: str, text: str) -> None:
        self._client.log_text(self.id, text, name)

    def end(self, status: Status) -> None:
        self._client.set_terminated(self.id, status.upper())


def _name(name: str) -> str:
    """A name as MLflow allows it: NDCG@10 becomes NDCG_at_10, as its own metrics are called."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))[:250]


class _Wandb(TrackedRun):
    """A run of Weights & Biases; ``WANDB_MODE=offline`` writes it to ``WANDB_DIR`` for a later ``wandb sync``.

    Its place is ``PROJECT`` or ``TEAM/PROJECT``; empty = that of ``WANDB_PROJECT``, or ``recpo``.
    """

    module = "wandb"
    environment: ClassVar = {"WANDB_ERROR_REPORTING": "false"}

    def __init__(self, package: Any, place: str, name: str, facts: _Texts, options: _Texts, parent: Any) -> None:
        self._package, (team, _, project) = package, place.rpartition("/")
        self._run = package.init(
            entity=team or None,
            project=project or os.environ.get("WANDB_PROJECT") or "recpo",
            name=name,
            job_type=facts["recpo.verb"],
            group=None if parent is None else parent.group,
            config={**facts, **options},
            reinit="create_new",  # a verb inside a verb is a run of its own
            # no terminal output, and no command line or source: recorded options are enough, and have no passwords
            settings=package.Settings(silent=True, console="off", disable_git=True, x_disable_meta=True),
        )
        self.group = self._run.name if parent is None else parent.group

    def metrics(self, values: Mapping[str, float], step: int | None) -> None:
        if step is None:
            self._run.summary.update(dict(values))
        else:
            self._run.log(dict(values), step=step)

    def facts(self, values: Mapping[str, str]) -> None:
        self._run.summary.update(dict(values))

    def read(self, one: Reference) -> None:
        self._run.config.update({f"recpo.input.{one.option}": one.checksum})
        if not self._run.offline:  # a run that is written offline cannot use an artifact
            self._run.use_artifact(self._artifact(one))

    def wrote(self, one: Reference) -> None:
        self._run.log_artifact(self._artifact(one))
        super().wrote(one)

    def _artifact(self, one: Reference) -> Any:
        """A reference to the document. Equal contents are one version, so what reads is linked to what wrote."""
        artifact = self._package.Artifact(f"{one.kind}-{one.checksum[:12]}", one.kind, metadata={"path": one.path})
        file = Path(one.path) / DOCUMENTS.get(one.kind, "")  # type: ignore[call-overload]
        artifact.add_reference(file.as_uri(), name=one.kind, checksum=file.is_file())
        return artifact

    def document(self, name: str, text: str) -> None:
        artifact = self._package.Artifact(f"documents-{self._run.id}-{name}", "documents")
        with artifact.new_file(name, encoding="utf-8") as file:
            file.write(text)
        self._run.log_artifact(artifact)

    def end(self, status: Status) -> None:
        self._run.finish(exit_code={"finished": 0, "failed": 1, "killed": 130}[status])


class _TensorBoard(TrackedRun):
    """Event files of TensorBoard: one directory per run, with options, inputs and output as text.

    Its place is the directory of all runs, as ``tensorboard --logdir`` takes it.
    """

    module = "torch.utils.tensorboard"

    def __init__(self, package: Any, place: str, name: str, facts: _Texts, options: _Texts, parent: Any) -> None:
        own = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09d} {name}".replace(" ", "-")
        self.place = (Path(place) if parent is None else parent.place) / own
        self._writer = package.SummaryWriter(str(self.place))
        self.facts({**facts, "options": "\n\n".join(f"{key}: {value}" for key, value in options.items())})

    def metrics(self, values: Mapping[str, float], step: int | None) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step or 0)

    def facts(self, values: Mapping[str, str]) -> None:
        for name, value in values.items():
            self._writer.add_text(name, value)

    def read(self, one: Reference) -> None:
        self.facts({f"recpo.input.{one.option}": f"{one.kind} {one.path} {one.checksum}"})

    def wrote(self, one: Reference) -> None:
        self.facts({"recpo.output": f"{one.kind} {one.path} {one.checksum}"})

    def document(self, name: str, text: str) -> None:
        if not name.endswith(".html"):
            self.facts({name: text})

    def end(self, status: Status) -> None:
        self.facts({"status": status})
        self._writer.close()
