"""Tracking: what a tracker gets of a verb, and that no result depends on the tracker."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import recpo
from recpo.artifacts import artifact
from recpo.artifacts.checksums import DOCUMENTS, MARKER, marker, sha256
from recpo.cli.main import main
from recpo.verbs import tracking
from recpo.verbs.tracking import Reference, hidden, references, run_tracked
from recpo.verbs.verb import PYTHON_ONLY, Verb
from tests.refusals import refused


class Recorder:
    """A tracker that keeps what it gets; ``fails`` names a method that raises."""

    def __init__(self, fails=""):
        self.runs, self.fails = [], fails

    def __call__(self, name, facts, options, parent):
        run = RecordedRun(self, name, facts, options, parent)
        run("start", name)
        self.runs.append(run)
        return run


class RecordedRun:
    def __init__(self, tracker, name, facts, options, parent):
        self.tracker, self.name, self.facts_at_start, self.options, self.parent = tracker, name, facts, options, parent
        self.got = []

    def __call__(self, method, *values):
        if self.tracker.fails == method:
            raise ConnectionError("http://me:word@host is down\nand more")
        self.got.append((method, *values))

    def __getattr__(self, method):
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *values: self(method, *values)

    def all(self, method):
        return [values for name, *values in self.got if name == method]


@pytest.fixture
def chosen(monkeypatch):
    """Chooses a recorder with ``recpo.tracked("recorder")``."""

    def choose(fails=""):
        recorder = Recorder(fails)
        monkeypatch.setattr(tracking, "_tracker", lambda text: recorder)
        return recorder

    return choose


@dataclass(frozen=True)
class Step(Verb[int]):
    """A verb whose work is a function."""

    out: Path | None = None
    given: object = None
    work: Callable[[], int] = field(default=lambda: 7, metadata=PYTHON_ONLY)

    def execute(self):
        return self.work()

    def measured(self, result):
        return {"answer": result, "word": "yes"}


class Untracked(Step):
    is_tracked: ClassVar = False


def test_a_run_has_options_numbers_texts_and_the_output_by_reference(chosen, tmp_path):
    recorder, out = chosen(), tmp_path / "out"

    def work():
        out.mkdir()
        (out / MARKER).write_text(marker("decision"))
        (out / "decision.json").write_text("{}")
        return 7

    with recpo.tracked("recorder"):
        assert run_tracked(Step(out=out, given={"a": [1, {"b": None}]}, work=work)) == 7
    (run,) = recorder.runs
    assert run.options == {"out": str(out), "given.a.0": "1", "given.a.1.b": "None"}
    assert run.facts_at_start["recpo.verb"] == "step"
    assert run.all("metrics") == [[{"answer": 7.0}, None]]
    assert run.all("facts") == [[{"recpo.word": "yes"}]]
    assert run.all("wrote") == [[Reference("out", "decision", str(out), sha256(out / "decision.json"))]]
    documents = dict(run.all("document"))
    assert documents["decision.json"] == "{}"
    assert yaml.safe_load(documents["resolved.yaml"]) == {"out": str(out), "given": {"a": [1, {"b": None}]}}
    assert run.got[-1] == ("end", "finished")


def test_a_verb_in_a_verb_is_a_run_in_its_run(chosen):
    recorder = chosen()
    with recpo.tracked("recorder"):
        run_tracked(Step(work=lambda: run_tracked(Step(work=lambda: run_tracked(Untracked())))))
        run_tracked(Step())
    outer, inner, later = recorder.runs
    assert (outer.parent, inner.parent, later.parent) == (None, outer, None)


def test_nothing_is_tracked_unless_chosen_and_by_the_first_process_only(chosen, monkeypatch):
    recorder = chosen()
    monkeypatch.delenv("RECPO_TRACK", raising=False)
    run_tracked(Step())
    with recpo.tracked("recorder"):
        run_tracked(Untracked())
        monkeypatch.setenv("RANK", "1")
        run_tracked(Step())
    assert recorder.runs == []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("RECPO_TRACK", "recorder")
    run_tracked(Step())
    assert len(recorder.runs) == 1


@pytest.mark.parametrize(("error", "status"), [(ValueError, "failed"), (KeyboardInterrupt, "killed")])
def test_a_verb_that_raises_ends_its_run(chosen, error, status):
    recorder = chosen()

    def work():
        raise error

    with recpo.tracked("recorder"), pytest.raises(error):
        run_tracked(Step(work=work))
    assert recorder.runs[0].got[-1] == ("end", status)


def test_a_tracker_that_is_down_is_one_error_before_the_work(chosen):
    chosen("start")
    done = []
    with recpo.tracked("recorder"), refused("failed", "track") as caught:
        run_tracked(Step(work=lambda: done.append(1)))
    assert done == []
    assert "word" not in str(caught.value), "an address may have a login"


@pytest.mark.parametrize("method", ["metrics", "facts", "document", "end"])
def test_a_tracker_that_fails_later_costs_one_warning_and_no_result(chosen, method):
    recorder = chosen(method)
    with recpo.tracked("recorder"), pytest.warns(UserWarning, match="nothing more is tracked") as caught:
        assert run_tracked(Step()) == 7
    assert len(caught) == 1
    if method != "end":
        assert not recorder.runs[0].all("end"), "nothing is sent after a failure"


def test_a_failure_inside_silences_the_outer_run_too_and_the_next_verb_tries_again(chosen):
    recorder = chosen("metrics")
    with recpo.tracked("recorder"):
        for verb in (Step(work=lambda: run_tracked(Step())), Step()):
            with pytest.warns(UserWarning, match="nothing more is tracked") as caught:
                assert run_tracked(verb) == 7
            assert len(caught) == 1
    assert len(recorder.runs) == 3
    assert not recorder.runs[0].all("facts")


def test_inputs_are_the_directories_that_options_name(tmp_path):
    for kind, name in (("run", "mine"), ("simulation", "world"), ("bundle", "out")):
        (tmp_path / name).mkdir()
        (tmp_path / name / MARKER).write_text(marker(kind))
        (tmp_path / name / DOCUMENTS[kind]).parent.mkdir(exist_ok=True)
        (tmp_path / name / DOCUMENTS[kind]).write_text(name)
    (tmp_path / "served" / "_journal").mkdir(parents=True)
    (tmp_path / "served" / "_journal" / MARKER).write_text(marker("impressions"))
    (tmp_path / "a file").write_text("x")
    options = {"contenders.0": tmp_path / "mine", "log": tmp_path / "world" / "log", "served": tmp_path / "served"}
    options |= {"days": tmp_path / "served" / "*.parquet", "out": tmp_path / "out", "table": tmp_path / "a file"}
    options |= {"no": "None", "empty": "", "far": "s3://bucket/prepared", "odd": "a\0b", "long": "x" * 10_000}
    found = references({name: str(value) for name, value in options.items()}, str(tmp_path / "out"))
    log = str(tmp_path / "served"), sha256(str(tmp_path / "served").encode())
    assert found == [
        Reference("contenders.0", "run", str(tmp_path / "mine"), sha256(b"mine")),
        Reference("log", "simulation", str(tmp_path / "world"), sha256(b"world")),
        Reference("served", "impressions", *log),
        Reference("days", "impressions", *log),
    ]


def test_every_kind_that_load_opens_has_a_document():
    assert DOCUMENTS.keys() == artifact._CLASSES.keys()


def test_passwords_are_not_tracked():
    given = {"spark_conf": {"fs.s3a.secret.key": "x1", "fs.s3a.access.key": "x2", "cores": 4}, "log": ["s3://u:p@b/l"]}
    assert hidden(given) == {
        "spark_conf": {"fs.s3a.secret.key": "(hidden)", "fs.s3a.access.key": "(hidden)", "cores": 4},
        "log": ["s3://b/l"],
    }


@pytest.mark.parametrize("given", ["", "tensorbord:x", "http://127.0.0.1:5000"])
def test_an_unknown_kind_is_refused_before_the_work(given, tmp_path):
    with refused("unknown_name", "track"), recpo.tracked(given):
        pass
    words = ["prepare", "data/sample.parquet", "--out", str(tmp_path / "out"), "--quiet", "--track", given]
    assert main(words) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("client", ["mlflow", "wandb"])
def test_a_missing_client_names_its_extra(client, monkeypatch):
    monkeypatch.setitem(sys.modules, client, None)
    with refused("not_installed", "track") as caught, recpo.tracked(client):
        pass
    assert f"recpo[{client}]" in str(caught.value)


TINY = {"policy": {"class_path": "CatalogSoftmaxPolicy", "init_args": {"dim": 8, "layers": 1, "heads": 1}}}


@pytest.mark.slow
def test_tensorboard_has_metrics_by_step_and_the_lineage(prepared, tmp_path):
    trainer = {"max_epochs": 1, "log_every_n_steps": 1, "logger": False}
    with recpo.tracked(f"tensorboard:{tmp_path / 'board'}"):
        run = recpo.train(prepared, out=tmp_path / "run", trainer=trainer, **TINY)
        evaluation = recpo.evaluate(prepared, [run], out=tmp_path / "evaluation", baselines=False)
    trained, evaluated = (EventAccumulator(str(place)).Reload() for place in sorted((tmp_path / "board").iterdir()))
    steps = [event.step for event in trained.Scalars("train/loss")]
    assert steps == list(range(len(steps)))
    assert "val/NDCG@10" in trained.Tags()["scalars"]
    table = evaluation.to_pandas()
    ndcg = table[(table.contender == "run") & (table.metric == "NDCG@10")]["mean"].item()
    assert evaluated.Scalars("run/NDCG@10")[0].value == pytest.approx(ndcg)

    def text(events, name):
        return events.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0].decode()

    assert sha256(prepared / "manifest.json") in text(trained, "recpo.input.data.init_args.prepared")
    made = text(trained, "recpo.output")
    assert made == f"run {tmp_path / 'run'} {sha256(tmp_path / 'run' / 'run.json')}"
    assert text(evaluated, "recpo.input.contenders.0") == made
    assert text(evaluated, "status") == "finished"
    assert "track" not in (tmp_path / "run" / "resolved.yaml").read_text()
