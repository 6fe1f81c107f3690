"""The verb ``factorize`` on a small log, and its result as the reward of a run."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

import recpo
from recpo.cli import factorize as command
from recpo.cli.main import main
from recpo.training.run import Run
from recpo.verbs import factorize as verb

SMALL = ["--method", "als", "--ranks", "[2]", "--ridges", "[2.0, 8.0]", "--sweeps", "2"]


@pytest.fixture(scope="module")
def place(prepared, tmp_path_factory):
    out = tmp_path_factory.mktemp("verb") / "factors"
    assert main(["factorize", "--prepared", str(prepared), "--out", str(out), *SMALL]) == 0
    return out


def test_the_verb_and_the_function_make_the_same_model(place, prepared, tmp_path, capfd):
    made = recpo.factorize(prepared, tmp_path / "again", method="als", ranks=[2], ridges=[2.0, 8.0], sweeps=2)
    assert capfd.readouterr() == ("", "")
    names = {"factors.safetensors", "manifest.json", "recpo.json"}
    assert {path.name for path in place.iterdir()} == names | {"resolved.yaml"}
    for name in names:
        assert (place / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    opened = recpo.load(place)
    assert isinstance(opened, recpo.Factors)
    assert torch.equal(opened.item_factors, made.item_factors)
    in_memory = recpo.factorize(recpo.load(prepared), method="als", ranks=[2], ridges=[2.0, 8.0], sweeps=2)
    assert torch.equal(in_memory.item_factors, made.item_factors)


def test_the_verb_says_what_it_chose(prepared, tmp_path, capfd):
    out = tmp_path / "factors"
    assert main(["factorize", "--prepared", str(prepared), "--out", str(out), *SMALL]) == 0
    printed = capfd.readouterr().out
    assert "validation error" in printed
    assert f"{out}: rank 2, ridge" in printed
    assert main(["factorize", "--prepared", str(prepared), "--out", str(out), *SMALL]) == 1
    assert "exists already" in capfd.readouterr().err
    assert main(["factorize", "--prepared", str(prepared), "--out", str(prepared / "inside"), *SMALL]) == 1
    assert main(["factorize", "--prepared", str(prepared), "--out", str(out), "--ranks", "0"]) == 2
    assert "ranks: expected a number >0, got 0" in capfd.readouterr().err


YAML = """
data:
  prepared: {prepared}
  batch_size: 16
  layout:
    class_path: ImpressionLayout
    init_args: {{history_length: 12, slate_length: 8}}
policy:
  class_path: CatalogSoftmaxPolicy
  init_args: {{dim: 8, layers: 1, heads: 1, max_history: 12, dropout: 0.0}}
objective:
  class_path: GRPO
  init_args: {{kl_coef: 0.0}}
advantage:
  class_path: GroupNormalizedAdvantage
reward:
  class_path: EnsembleReward
  init_args:
    lower_bound: 1.0
    members:
      - class_path: FactorReward
        init_args: {{factors: {factors}}}
      - class_path: FactorReward
        init_args: {{factors: {factors}, users: folded, lower_bound: 0.5}}
rollout: {{group_size: 4, batches: 1, epochs: 1}}
old_policy: snapshot
trainer:
  accelerator: cpu
  max_epochs: 1
  limit_train_batches: 1
  limit_val_batches: 1
  num_sanity_val_steps: 0
  enable_progress_bar: false
allocator: false
out: {out}
"""


def test_a_run_takes_factors_as_its_reward_and_notes_their_checksum(place, prepared, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(YAML.format(prepared=prepared, factors=place, out=tmp_path / "run"), encoding="utf-8")
    assert main(["train", "--config", str(config)]) == 0
    origin = json.loads((tmp_path / "run" / "origin.json").read_text())
    assert origin["reward_runs"] == {str(place): json.loads((place / "manifest.json").read_text())["sha256"]}
    assert Run.open(tmp_path / "run").catalog_checksum == recpo.load(place).catalog_checksum


def test_factors_of_another_catalog_are_refused(place, prepared, tmp_path, capfd):
    other = tmp_path / "other"
    model = recpo.load(place)
    recpo.Factors(**{**vars(model), "catalog_checksum": "another"}).save(other)
    config = tmp_path / "run.yaml"
    config.write_text(YAML.format(prepared=prepared, factors=other, out=tmp_path / "run"), encoding="utf-8")
    assert main(["train", "--config", str(config)]) == 1
    assert "other items" in capfd.readouterr().err
    assert not Path(tmp_path / "run").exists()


def test_lists_that_hardly_differ_between_users_are_reported(prepared, tmp_path, monkeypatch, capsys):
    alike = partial(verb.similar_lists, k=2)
    monkeypatch.setattr(command, "similar_lists", alike)
    options = ["factorize", "--prepared", str(prepared), "--method", "als", "--ranks", "[2]", "--sweeps", "1"]
    assert main([*options, "--ridges", "[1.0]", "--out", str(tmp_path / "personal")]) == 0
    personal, data = recpo.load(tmp_path / "personal"), recpo.load(prepared)
    # items of few events first, which hardly anybody has in the past
    bias = {"item_factors": torch.zeros(60, 2), "item_bias": -torch.from_numpy(data.item_counts()).float()}
    said = alike(recpo.Factors(**{**vars(personal), **bias, "lower_bound": 0.0}), data)
    assert "hardly differ between users" in said
    assert "of 60 items" in said
    monkeypatch.setattr(command, "similar_lists", lambda *_: said)
    capsys.readouterr()
    assert main([*options, "--ridges", "[1.0]", "--out", str(tmp_path / "again")]) == 0
    assert f"warning: {said}" in capsys.readouterr().out
