"""The verb ``factorize`` on a small log, and its result as the reward of a run."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import recpo
from recpo.cli.main import main
from recpo.rewards.selection import close_to_best
from recpo.training.run import Run
from recpo.verbs import factorize as verb
from tests.refusals import refused

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
    assert main(["factorize", "--prepared", str(prepared), "--out", str(out), "--ranks", "[-1]"]) == 2
    assert "ranks: expected a number >=0, got -1" in capfd.readouterr().err


def test_popularity_is_a_part_of_the_bias_and_chosen_by_the_mixed_area(place, prepared, tmp_path, capfd):
    weights = ["--popularity", "0", "0.02", "2"]
    assert main(["factorize", "--prepared", str(prepared), "--out", str(tmp_path / "out"), *SMALL, *weights]) == 0
    made, plain, data = recpo.load(tmp_path / "out"), recpo.load(place), recpo.load(prepared)
    tried = {one["weight"]: one["AUC_mixed"] for one in made.facts["popularity_tried"]}
    chosen = made.facts["popularity"]
    assert f"popularity {chosen:g}" in capfd.readouterr().out
    counts = data.item_counts()
    logs = np.log1p(counts)
    expected = plain.item_bias.numpy() + chosen * (logs - np.average(logs, weights=counts))
    np.testing.assert_allclose(made.item_bias, expected, atol=1e-6)
    assert torch.equal(made.item_factors, plain.item_factors)
    plain.with_popularity(torch.from_numpy(counts), 2.0).save(tmp_path / "heavy")
    both = [place, tmp_path / "heavy"]
    evaluated = recpo.evaluate(data, both, out=tmp_path / "evaluation", split="valid", baselines=False)
    metrics = {one["name"]: one["metrics"] for one in evaluated.document["contenders"]}
    for name, weight in (("factors", 0.0), ("heavy", 2.0)):
        assert tried[weight] == pytest.approx(metrics[name]["AUC_mixed"]["mean"], abs=1e-6)


def test_what_is_within_one_error_of_the_best_is_close_to_it():
    users, noise = torch.linspace(0, 1, 400), 0.1 * (-1.0) ** torch.arange(400)
    for gains, close in (
        ((users, users + noise + 0.004, users), [True, True, True]),  # the error is .005
        ((users, users + noise + 0.006, users), [False, True, False]),
        ((users, users + 0.1, users + 0.1), [False, True, True]),
        ((users - 1, users + 0.2, users + 0.5), [False, False, True]),
        (users[None, :1].expand(3, 1), [True, True, True]),
    ):
        assert close_to_best(torch.stack(tuple(gains))).tolist() == close


@pytest.mark.parametrize(
    ("options", "code"),
    [({"popularity": []}, "empty"), ({"popularity": [0.0, 0.1], "period": "valid"}, "conflicting_options")],
)
def test_weights_of_popularity_that_nothing_can_choose_are_refused(prepared, options, code):
    with refused(code, "popularity"):
        recpo.factorize(prepared, **options)


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


@pytest.mark.slow
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
    monkeypatch.setattr(verb, "similar_lists", alike)
    options = ["factorize", "--prepared", str(prepared), "--method", "als", "--ranks", "[2]", "--sweeps", "1"]
    assert main([*options, "--ridges", "[1.0]", "--out", str(tmp_path / "personal")]) == 0
    personal, data = recpo.load(tmp_path / "personal"), recpo.load(prepared)
    # items of few events first, which hardly anybody has in the past
    bias = {"item_factors": torch.zeros(60, 2), "item_bias": -torch.from_numpy(data.item_counts()).float()}
    said = alike(recpo.Factors(**{**vars(personal), **bias, "lower_bound": 0.0}), data)
    assert "hardly differ between users" in said
    assert "of 60 items" in said
    monkeypatch.setattr(verb, "similar_lists", lambda *_: said)
    capsys.readouterr()
    assert main([*options, "--ridges", "[1.0]", "--out", str(tmp_path / "again")]) == 0
    assert f"warning: {said}" in capsys.readouterr().out
