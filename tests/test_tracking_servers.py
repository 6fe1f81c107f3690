"""Tracking with the real clients: a server of MLflow in a process of its own, and Weights & Biases offline."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

import recpo
from recpo.artifacts.checksums import sha256
from recpo.cli.main import main
from recpo.verbs.tracking import run_tracked
from tests.conftest import example_program
from tests.refusals import refused
from tests.server.conftest import process
from tests.test_tracking import Step

ROOT = Path(__file__).parents[1]
SMALL = ["--policy.init_args.dim", "8", "--policy.init_args.layers", "1", "--trainer.max_steps", "3"]
pytestmark = pytest.mark.slow


class Server:
    """``mlflow server`` on a free port, with its store in a directory."""

    def __init__(self, place):
        program = example_program("mlflow", "mlflow")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        words = ["server", "--port", str(port), "--workers", "1", "--backend-store-uri", f"sqlite:///{place}/runs.db"]
        words += ["--artifacts-destination", str(place / "artifacts")]
        given = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        # its jobs are seven further processes, which recpo never asks for anything
        given |= {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (place / "server.log").open("w") as log:
            self.process = subprocess.Popen(
                [program, *words], cwd=place, env=given, stdout=log, stderr=log, start_new_session=True
            )
        try:
            self._wait(time.monotonic() + 300, place / "server.log")
        except BaseException:
            self.stop()
            raise

    def _wait(self, until, log):
        while True:
            try:
                urllib.request.urlopen(f"{self.address}/health", timeout=5).close()
                break
            except OSError:
                assert self.process.poll() is None, log.read_text()
                assert time.monotonic() < until
                time.sleep(0.2)

    def stop(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # the session started above: the server, its workers
            self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    pytest.importorskip("mlflow")
    started = Server(tmp_path_factory.mktemp("mlflow"))
    yield started
    started.stop()


@pytest.fixture
def runs(server):
    """A function that reads all runs, the oldest first, with a client of its own."""
    from mlflow import MlflowClient

    client = MlflowClient(server.address)

    def read():
        found = client.search_runs([client.get_experiment_by_name("recpo").experiment_id])
        return sorted(found, key=lambda run: run.info.start_time)

    read.client = client
    return read


def test_the_road_from_a_log_to_served_days_can_be_followed_in_mlflow(server, runs, tmp_path, capsys):
    track = ["--quiet", "--track", f"mlflow:{server.address}"]
    data, run, evaluation, bundle, log = (str(tmp_path / name) for name in ("data", "run", "tested", "bundle", "log"))
    config = str(ROOT / "configs" / "pretrain.yaml")
    training = ["--config", config, "--data.prepared", data, "--out", run, *SMALL, "--trainer.log_every_n_steps", "1"]
    training += ["--policy.init_args.max_history", "20", "--data.layout.init_args.history_length", "20"]
    training += ["--policy.init_args.profile", "false", "--policy.init_args.fold_in", "0"]  # a smaller program
    training += ["--trainer.limit_val_batches", "1"]
    for words in (
        ["prepare", str(ROOT / "data" / "sample.parquet"), "--out", data],
        ["train", *training],
        ["evaluate", "--prepared", data, "--contenders", run, "--out", evaluation, "--baselines", "false"],
        ["export", "--run", run, "--evaluation", evaluation, "--out", bundle],
    ):
        assert main([*words, *track]) == 0, capsys.readouterr()
    assert capsys.readouterr() == ("", "")
    with process(bundle, "--log", log, *track[1:]):
        pass
    assert main(["prepare", log, "--out", str(tmp_path / "next"), *track]) == 1  # nothing was served, but it was read

    found = {one.data.tags["recpo.verb"]: one for one in runs()[:5]}
    prepared, trained, tested, exported, serving = found.values()
    assert list(found) == ["prepare", "train", "evaluate", "export", "serve"]
    day = runs()[5]
    assert [one.info.status for one in found.values()] == ["FINISHED"] * 5
    assert day.info.status == "FAILED"

    def source(one, option):
        return one.data.tags[f"recpo.input.{option}.run_id"]

    assert source(day, "log") == serving.info.run_id
    assert source(serving, "bundle") == exported.info.run_id
    assert source(exported, "run") == source(tested, "contenders") == trained.info.run_id
    assert source(exported, "evaluation") == tested.info.run_id
    assert source(tested, "prepared") == source(trained, "data.init_args.prepared") == prepared.info.run_id

    checksum = sha256(tmp_path / "bundle" / "manifest.json")  # as the server's /v1/ready names it
    assert serving.data.tags["recpo.input.bundle"] == exported.data.tags["recpo.output.checksum"] == checksum
    assert {one.dataset.digest for one in serving.inputs.dataset_inputs} == {checksum[:36]}
    assert trained.data.params["policy.init_args.dim"] == "8"
    steps = [metric.step for metric in runs.client.get_metric_history(trained.info.run_id, "train/loss")]
    assert steps == list(range(len(steps)))
    assert len(steps) > 1
    table = recpo.load(evaluation).to_pandas().set_index(["contender", "metric"])["mean"]
    assert tested.data.metrics["run/NDCG_at_10"] == pytest.approx(table["run", "NDCG@10"])
    documents = {one.path for one in runs.client.list_artifacts(exported.info.run_id)}
    assert documents == {"README.md", "resolved.yaml"}


def test_a_server_that_dies_costs_a_warning_and_one_that_is_down_an_error(server, runs, tmp_path):
    with recpo.tracked(f"mlflow:{server.address}"):
        assert run_tracked(Step(out=tmp_path / "a", work=lambda: run_tracked(Step()))) == 7
        outer, inner = [one for one in runs() if one.data.tags["recpo.verb"] == "step"]
        assert inner.data.tags["mlflow.parentRunId"] == outer.info.run_id
        assert outer.data.tags["recpo.word"] == "yes"
        with pytest.warns(UserWarning, match="nothing more is tracked"):
            assert run_tracked(Step(work=lambda: server.stop() or 7)) == 7
        began = time.monotonic()
        with refused("failed", "track"):
            run_tracked(Step(work=lambda: pytest.fail("it started")))
        assert time.monotonic() - began < 30


def test_weights_and_biases_writes_runs_offline(prepared, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["told-program", "told-password"])  # no chance text of a record has these
    options = {"policy": {"class_path": "CatalogSoftmaxPolicy", "init_args": {"dim": 8, "layers": 1, "heads": 1}}}
    options["trainer"] = {"max_epochs": 1, "log_every_n_steps": 1}
    with recpo.tracked("wandb:shop"):
        recpo.train(prepared, out=tmp_path / "run", **options)
    wandb.teardown()  # as at the end of a process: its service writes the last records
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    written = file.read_bytes()  # records of Protocol Buffers, whose texts are as they are
    outputs = f"run-{sha256(tmp_path / 'run' / 'run.json')[:12]}"
    inputs = sha256(prepared / "manifest.json")
    for text in ("shop", "train run", "train/loss", "policy.init_args.dim", outputs, inputs, "resolved.yaml"):
        assert text.encode() in written, text
    assert b"told-p" not in written, "a command line may have passwords"
