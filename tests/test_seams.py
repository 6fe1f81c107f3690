"""What a user adds from outside: a metric and a changed step of training, as the documentation shows them."""

from __future__ import annotations

import importlib
import json
import re
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml

import recpo
from recpo.base.types import Histories
from recpo.cli.main import main
from tests.refusals import refused

ROOT = Path(__file__).parents[1]
SMALL = {
    "policy.init_args": {"dim": 8, "layers": 1, "max_history": 12},
    "data.layout.init_args.history_length": 12,
    "trainer": {"max_steps": 3, "accelerator": "cpu", "enable_progress_bar": False},
    "allocator": False,
}


def documented(page, name, directory, monkeypatch):
    """The module that a page of the documentation shows, imported from ``directory``."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    (directory / f"{name}.py").write_text(next(block for block in blocks if block.startswith(f"# {name}.py")))
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


@pytest.fixture
def metrics(tmp_path, monkeypatch):
    return documented("metrics.md", "my_metrics", tmp_path, monkeypatch)


@pytest.fixture
def blocks(tmp_path, monkeypatch):
    return documented("training.md", "my_block", tmp_path, monkeypatch)


@pytest.fixture
def steps(tmp_path, monkeypatch):
    return documented("training.md", "my_module", tmp_path, monkeypatch)


@pytest.mark.slow
def test_a_metric_from_outside_is_in_tables_report_and_differences(metrics, prepared, tmp_path, capsys):
    words = ["--prepared", str(prepared), "--contenders", "popularity", "random", "--ks", "5", "--off_policy", "null"]
    own = ["--measures", "{class_path: my_metrics.FirstPositive, init_args: {k: 5}}"]
    assert main(["evaluate", *words, *own, "--out", str(tmp_path / "evaluation")]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"first\s", printed)
    document = json.loads((tmp_path / "evaluation" / "metrics.json").read_text())
    for contender in document["contenders"][:2]:
        found = contender["metrics"]["first_positive@5"]
        assert 1 <= found["mean"] <= 6
        assert found["n"] == contender["metrics"]["MRR@5"]["n"]
    assert "p_holm" in document["differences"][0]["metrics"]["first_positive@5"]
    assert document["setting"]["further_metrics"] == {"first_positive@5": "lower"}
    page = (tmp_path / "evaluation" / "report.html").read_text()
    assert "first_positive \u2193" in page
    resolved = yaml.safe_load((tmp_path / "evaluation" / "resolved.yaml").read_text())
    assert resolved["measures"] == [{"class_path": "my_metrics.FirstPositive", "init_args": {"k": 5}}]
    again = ["evaluate", "--config", str(tmp_path / "evaluation" / "resolved.yaml"), "--out", str(tmp_path / "again")]
    assert main(again) == 0
    assert json.loads((tmp_path / "again" / "metrics.json").read_text())["contenders"] == document["contenders"]


def test_it_agrees_with_the_reciprocal_rank(metrics, prepared):
    evaluation = recpo.evaluate(
        prepared,
        ["popularity"],
        ks=[7],
        off_policy=None,
        segments=False,
        measures=[metrics.FirstPositive(7), Inverse()],
    )
    found = evaluation.document["contenders"][0]["metrics"]
    assert found["inverse@7"]["mean"] == pytest.approx(found["MRR@7"]["mean"], abs=1e-6)


@dataclass
class Inverse(recpo.Measure):
    """1 / rank of the first positive within 7, 0 beyond; counts its batches."""

    batches: int = 0

    def update(self, observed):
        first = sys.modules["my_metrics"].FirstPositive(7).update(observed)["first_positive@7"]
        self.batches += 1
        return {"inverse@7": torch.where(first > 7, 0.0, 1 / first).masked_fill(first.isnan(), torch.nan)}

    def totals(self):
        return {"batches": float(self.batches)}


def test_every_contender_gets_a_fresh_copy(metrics, prepared):
    measure = Inverse()
    evaluation = recpo.evaluate(
        prepared, ["popularity", "random"], ks=[7], off_policy=None, segments=False, batch_size=16, measures=[measure]
    )
    totals = [contender["totals"]["batches"] for contender in evaluation.document["contenders"]]
    assert totals[0] == totals[1] > 1
    assert measure.batches == 0


@dataclass
class Returns(recpo.Measure):
    """Whatever it is told to return."""

    name: str
    value: object

    def update(self, observed):
        return {self.name: self.value}


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("mine", torch.zeros(3, 2), "wrong_shape"),
        ("mine", 1.0, "wrong_shape"),
        ("NDCG@5", None, "duplicate"),
    ],
)
def test_what_is_no_metric_is_refused(prepared, tmp_path, name, value, code):
    class Same(recpo.Measure):
        def update(self, observed):
            return {name: torch.zeros(len(observed.batch.user_ids))}

    measure = Same() if value is None else Returns(name, value)
    with pytest.raises(recpo.RecpoError) as raised:
        recpo.evaluate(
            prepared, ["popularity"], ks=[5], off_policy=None, out=tmp_path / "evaluation", measures=[measure]
        )
    assert (raised.value.code, raised.value.field) == (code, name)
    assert not (tmp_path / "evaluation").exists()


def weights(run):
    return torch.cat([value.flatten() for value in run.policy().state_dict().values() if value.is_floating_point()])


def trained(prepared, out, **options):
    return recpo.train(prepared, objective=recpo.GBPO(), out=out, **{**SMALL, **options})


@pytest.mark.slow
def test_a_changed_step_is_one_subclass(steps, prepared, tmp_path):
    plain = trained(prepared, tmp_path / "plain")
    milder = trained(prepared, tmp_path / "milder", module=steps.MilderDislikes)
    same = trained(prepared, tmp_path / "same", module=Unchanged)
    assert torch.equal(weights(plain), weights(same))
    assert not torch.equal(weights(plain), weights(milder))
    assert milder.configuration["module"] == "my_module.MilderDislikes"
    by_name = trained(prepared, tmp_path / "by_name", module="my_module.MilderDislikes")
    assert torch.equal(weights(milder), weights(by_name))
    with refused("untrusted", "module"):
        recpo.Run.open(tmp_path / "milder")
    assert torch.equal(weights(recpo.Run.open(tmp_path / "milder", trust=["my_module"])), weights(milder))


class Unchanged(recpo.PreferenceModule):
    """Overrides both steps without changing them."""

    def step_inputs(self, batch):
        return super().step_inputs(batch)

    def loss(self, inputs):
        return super().loss(inputs)


def test_a_module_that_cannot_train_a_policy_is_refused(prepared, tmp_path):
    with pytest.raises(recpo.RecpoError) as raised:
        trained(prepared, tmp_path / "out", module="lightning.LightningModule")
    assert (raised.value.code, raised.value.field) == ("wrong_class", "module")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_block_from_outside_is_trained_opened_exported_and_served(blocks, prepared, tmp_path):
    words = ["--data.prepared", str(prepared), "--data.layout.init_args.history_length", "12", "--allocator", "false"]
    words += ["--policy.init_args.block", "my_block.ConvolutionBlock", "--policy.init_args.block.init_args.width", "3"]
    words += ["--policy.init_args.dim", "8", "--policy.init_args.max_history", "12", "--trainer.max_steps", "2"]
    words += ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]
    assert main(["train", *words, "--out", str(tmp_path / "run")]) == 0
    with refused("untrusted", "policy.block"):
        recpo.Run.open(tmp_path / "run")
    run = recpo.Run.open(tmp_path / "run", trust=["my_block"])
    policy = run.policy()
    assert [type(block) for block in policy.encoder.blocks] == [blocks.ConvolutionBlock] * 2
    assert [block.width for block in policy.encoder.blocks] == [3, 3]
    recpo.export(run, out=tmp_path / "bundle", k=5)
    bundle = recpo.Bundle.open(tmp_path / "bundle")
    assert bundle.manifest.options is None
    served = [item for item, _ in bundle.recommend_one([])]
    listed = policy.eval().recommend(
        Histories(torch.zeros(1, 12, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)), 5
    )
    assert served == run.items.to_external(listed.item_ids[0].numpy()).to_pylist()


@pytest.mark.slow
def test_a_block_in_python_with_options_of_its_own(blocks, prepared, tmp_path):
    wide = partial(recpo.SASRecBlock, expansion=2)
    run = trained(prepared, tmp_path / "wide", policy=partial(recpo.CatalogSoftmaxPolicy, dim=8, layers=1, block=wide))
    assert [block.expand.out_features for block in run.policy().encoder.blocks] == [16]
    recpo.export(run, out=tmp_path / "bundle", k=5)
    options = recpo.Bundle.open(tmp_path / "bundle", engine="torch").manifest.options
    assert options["block"] == {"class": "recpo.policies.blocks.SASRecBlock", "options": {"expansion": 2}}


@pytest.mark.parametrize("block", ["torch.nn.Linear", "recpo.policies.encoder.kernels", "recpo.CatalogSoftmaxPolicy"])
def test_what_is_no_block_is_refused(prepared, tmp_path, block):
    with pytest.raises(recpo.RecpoError):
        trained(prepared, tmp_path / "out", **{"policy.init_args": {**SMALL["policy.init_args"], "block": block}})
    assert not (tmp_path / "out").exists()
