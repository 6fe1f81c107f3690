"""The trackers: adapters over the clients of MLflow, Weights & Biases and TensorBoard, which are imported when chosen.

MLflow and Weights & Biases report to their makers unless told otherwise; here they do so only if the user's
environment says so.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from recpo.base.errors import RecpoError
from recpo.verbs.tracking import DOCUMENTS, Reference, Status, TrackedRun

_LONGEST: Final = 500  # characters of an option: what every version of the trackers takes
_MOST_PARAMETERS: Final = 100  # in one request to MLflow
_DIGEST: Final = 36  # longest digest of a data set of MLflow


def _client(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RecpoError(
            f"track: {module} cannot be imported ({error}): pip install recpo[{extra}]",
            code="not_installed",
            field="track",
        ) from error


class MLflow:
    """Runs of MLflow, in the experiment of ``MLFLOW_EXPERIMENT_NAME``, or ``recpo``.

    Args:
        address: of the server, or of a store, as ``mlflow.set_tracking_uri`` takes it; empty = MLflow's own default.
    """

    def __init__(self, address: str) -> None:
        defaults = {"HTTP_REQUEST_MAX_RETRIES": "1", "HTTP_REQUEST_TIMEOUT": "10"}  # MLflow itself waits for minutes
        defaults |= {"SUPPRESS_PRINTING_URL_TO_STDOUT": "true", "DISABLE_TELEMETRY": "true"}
        for name, value in defaults.items():
            os.environ.setdefault(f"MLFLOW_{name}", value)
        self._address = address or None
        self._package = _client("mlflow", "mlflow")

    def start(self, name: str, facts: Mapping[str, str], options: Mapping[str, str], parent: Any) -> TrackedRun:
        """See ``Tracker``."""
        client = self._package.MlflowClient(self._address)
        wanted = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "recpo"
        found = client.get_experiment_by_name(wanted)
        experiment = client.create_experiment(wanted) if found is None else found.experiment_id
        tags = dict(facts) if parent is None else {**facts, "mlflow.parentRunId": parent.id}
        run = client.create_run(experiment, run_name=name, tags=tags).info.run_id
        parameter = self._package.entities.Param
        parameters = [parameter(_name(key), value[:_LONGEST]) for key, value in options.items()]
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            client.log_batch(run, params=parameters[first : first + _MOST_PARAMETERS])
        return _MLflowRun(self._package.entities, client, experiment, run)


class _MLflowRun:
    def __init__(self, entities: Any, client: Any, experiment: str, run: str) -> None:
        self._entities, self._client, self._experiment, self.id = entities, client, experiment, run

    def metrics(self, values: Mapping[str, float], step: int | None) -> None:
        now, metric = int(time.time() * 1000), self._entities.Metric
        found = [metric(_name(name), value, now, step or 0) for name, value in values.items()]
        for first in range(0, len(found), 1000):
            self._client.log_batch(self.id, metrics=found[first : first + 1000])

    def facts(self, values: Mapping[str, str]) -> None:
        tag = self._entities.RunTag
        self._client.log_batch(self.id, tags=[tag(name, value[:_LONGEST]) for name, value in values.items()])

    def read(self, one: Reference) -> None:
        option, entities = f"recpo.input.{one.option}", self._entities
        tags = {option: one.checksum or one.path, f"{option}.path": one.path}
        name, value = ("checksum", one.checksum) if one.checksum else ("path", one.path.replace("'", "\\'"))
        wanted = f"tags.`recpo.output.{name}` = '{value}'"
        made = self._client.search_runs([self._experiment], wanted, max_results=1)  # the newest first
        if made:
            tags[f"{option}.run_id"] = made[0].info.run_id
        self.facts(tags)
        digest = (one.checksum or hashlib.sha256(one.path.encode()).hexdigest())[:_DIGEST]
        data = entities.Dataset(f"{one.kind} {Path(one.path).name}", digest, "local", one.path)
        context = [entities.InputTag("mlflow.data.context", one.option)]
        self._client.log_inputs(self.id, [entities.DatasetInput(data, context)])

    def wrote(self, one: Reference) -> None:
        self.facts({"recpo.output.kind": one.kind, "recpo.output.checksum": one.checksum or one.path})

    def document(self, name: str, text: str) -> None:
        self._client.log_text(self.id, text, name)

    def end(self, status: Status) -> None:
        self._client.set_terminated(self.id, status.upper())


def _name(name: str) -> str:
    """A name as MLflow allows it: NDCG@10 becomes NDCG_at_10, as its own metrics are called."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))[:250]


class Wandb:
    """Runs of Weights & Biases; ``WANDB_MODE=offline`` writes them to ``WANDB_DIR`` for a later ``wandb sync``.

    Args:
        project: ``PROJECT`` or ``TEAM/PROJECT``; empty = that of ``WANDB_PROJECT``, or ``recpo``.
    """

    def __init__(self, project: str) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._team, _, self._project = project.rpartition("/")
        self._package = _client("wandb", "wandb")

    def start(self, name: str, facts: Mapping[str, str], options: Mapping[str, str], parent: Any) -> TrackedRun:
        """See ``Tracker``."""
        run = self._package.init(
            entity=self._team or None,
            project=self._project or os.environ.get("WANDB_PROJECT") or "recpo",
            name=name,
            job_type=facts["recpo.verb"],
            group=None if parent is None else parent.group,
            config={**facts, **options},
            reinit="create_new",  # a verb inside a verb is a run of its own
            # no terminal output, and no command line or source: recorded options are enough, and have no passwords
            settings=self._package.Settings(silent=True, console="off", disable_git=True, x_disable_meta=True),
        )
        return _WandbRun(self._package, run, run.name if parent is None else parent.group)


class _WandbRun:
    def __init__(self, package: Any, run: Any, group: str) -> None:
        self._package, self._run, self.group = package, run, group

    def metrics(self, values: Mapping[str, float], step: int | None) -> None:
        if step is None:
            self._run.summary.update(dict(values))
        else:
            self._run.log(dict(values), step=step)

    def facts(self, values: Mapping[str, str]) -> None:
        self._run.summary.update(dict(values))

    def read(self, one: Reference) -> None:
        self._run.config.update({f"recpo.input.{one.option}": one.checksum or one.path})
        if not self._run.offline:  # a run that is written offline cannot use an artifact
            self._run.use_artifact(self._artifact(one))

    def wrote(self, one: Reference) -> None:
        self._run.log_artifact(self._artifact(one))
        self.facts({"recpo.output.kind": one.kind, "recpo.output.checksum": one.checksum or one.path})

    def _artifact(self, one: Reference) -> Any:
        """A reference to the document. Equal contents are one version, so what reads is linked to what wrote."""
        identity = one.checksum or hashlib.sha256(one.path.encode()).hexdigest()
        artifact = self._package.Artifact(f"{one.kind}-{identity[:12]}", one.kind, metadata={"path": one.path})
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


class TensorBoard:
    """Event files of TensorBoard: one directory per run, with options, inputs and output as text.

    Args:
        directory: of all runs, as ``tensorboard --logdir`` takes it.
    """

    def __init__(self, directory: str) -> None:
        if not directory:
            raise RecpoError("track: expected tensorboard:DIRECTORY", code="missing_option", field="track")
        self._directory = Path(directory)
        self._writer = _client("torch.utils.tensorboard", "tensorboard").SummaryWriter

    def start(self, name: str, facts: Mapping[str, str], options: Mapping[str, str], parent: Any) -> TrackedRun:
        """See ``Tracker``."""
        own = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09d} {name}".replace(" ", "-")
        place = (self._directory if parent is None else parent.place) / own
        run = _TensorBoardRun(self._writer(str(place)), place)
        run.facts({**facts, "options": "\n\n".join(f"{key}: {value}" for key, value in options.items())})
        return run


class _TensorBoardRun:
    def __init__(self, writer: Any, place: Path) -> None:
        self._writer, self.place = writer, place

    def metrics(self, values: Mapping[str, float], step: int | None) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step or 0)

    def facts(self, values: Mapping[str, str]) -> None:
        for name, value in values.items():
            self._writer.add_text(name, value)

    def read(self, one: Reference) -> None:
        self.facts({f"recpo.input.{one.option}": f"{one.kind} {one.path} {one.checksum or ''}".strip()})

    def wrote(self, one: Reference) -> None:
        self.facts({"recpo.output": f"{one.kind} {one.path} {one.checksum or ''}".strip()})

    def document(self, name: str, text: str) -> None:
        if not name.endswith(".html"):
            self.facts({name: text})

    def end(self, status: Status) -> None:
        self.facts({"status": status})
        self._writer.close()
