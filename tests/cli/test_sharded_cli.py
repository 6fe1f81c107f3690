"""A sharded run from the command line: a rank dies, the run continues with other ranks, and its policy is served."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from recpo.training.checkpoints import LazyRows, saved_tensors
from recpo.training.run import checkpoint_path
from tests.cli.ranks import on_this_rank
from tests.forks import Command

CONFIG = """
data:
  prepared: {prepared}
  batch_size: 4
  layout: {{class_path: SequenceLayout, init_args: {{history_length: 12}}}}
policy:
  class_path: CatalogSoftmaxPolicy
  init_args: {{dim: 8, layers: 1, heads: 1, max_history: 12, dropout: 0.0, normalizer: {normalizer}, num_negatives: 20}}
objective: {{class_path: Likelihood}}
optimizer: {{class_path: torch.optim.SGD, init_args: {{lr: 0.02, momentum: 0.9}}}}
lr_scheduler: {{class_path: torch.optim.lr_scheduler.CosineAnnealingLR, init_args: {{T_max: 100}}}}
checkpoint_every: 4
trainer:
  max_epochs: 3
  accelerator: cpu
  devices: 2
  num_sanity_val_steps: 0
  enable_progress_bar: false
  strategy:
    class_path: recpo.sharding.ShardedStrategy
    init_args:
      sharding: row_wise
      table_optimizer: {{optimizer: {optimizer}, lr: 0.05}}
      table_scheduler: {{class_path: torch.optim.lr_scheduler.ExponentialLR, init_args: {{gamma: 0.99}}}}
"""


#: Verbs one after another in a process that has no torchrec; the status of the last one.
WITHOUT_TORCHREC = """
import json, sys
sys.modules["torchrec"] = sys.modules["fbgemm_gpu"] = None
from recpo.cli.main import main
*first, last = json.load(open(sys.argv[1]))
for words in first:
    assert main(words) == 0, words
sys.exit(main(last))
"""


def weights(run):
    saved = saved_tensors(checkpoint_path(run, "last"))
    return {name: value.whole() if isinstance(value, LazyRows) else value for name, value in saved.items()}


def assert_same(first, second, tolerance):
    one, other = weights(first), weights(second)
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m)


def killed(config, out, folder):
    """A run that starts its second rank itself, which is killed after its first checkpoint."""
    first = Command(["train", "--config", str(config), "--out", str(out)], folder)
    first.until(checkpoint_path(out, "last").exists)
    children = subprocess.run(["pgrep", "-P", str(first.process.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(children[0]), signal.SIGKILL)
    return first.ended(300), first.printed[1]


@pytest.fixture(scope="module")
def killed_run(two, prepared, tmp_path_factory):
    """Configuration, an uninterrupted run, and one that lost a rank in mid-epoch, with what it said."""
    root = tmp_path_factory.mktemp("sharded")
    config = root / "config.yaml"
    config.write_text(CONFIG.format(prepared=prepared, normalizer="sampled", optimizer="rowwise_adagrad"))
    two.run(on_this_rank, ["train", "--config", str(config), "--out", str(root / "whole")])
    return root, killed(config, root / "killed", root)


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_run_with_one_message(killed_run):
    root, (status, errors) = killed_run
    assert status == 1
    assert "rank 0 has lost another rank of this run" in errors
    assert "--resume true" in errors
    assert "Traceback" not in errors
    assert not (root / "killed" / "run.json").exists()


@pytest.mark.slow
def test_a_run_that_lost_a_rank_continues(two, killed_run, tmp_path):
    """With as many ranks; tests/sharding/test_sharded_checkpoint.py continues with other numbers of them."""
    root, _ = killed_run
    run = tmp_path / "resumed"
    subprocess.run(["cp", "-r", str(root / "killed"), str(run)], check=True)
    meta = torch.load(checkpoint_path(run, "last") / "meta.pt", weights_only=True)
    assert meta["global_step"] < 30  # it was killed on its way
    again = ["train", "--config", str(root / "config.yaml"), "--out", str(run), "--resume", "true"]
    two.run(on_this_rank, again)
    assert_same(root / "whole", run, 1e-6)


@pytest.fixture(scope="module")
def reward_model(two, prepared, tmp_path_factory, request):
    """A sharded reward model."""
    run = tmp_path_factory.mktemp("reward") / "run"
    train_small(two, "reward_model", prepared, run, request, "--init_from", "null")
    assert ranks_that_saved(run, "best") == 2
    return run


def ranks_that_saved(run, checkpoint):
    return len(list(checkpoint_path(run, checkpoint).glob("*.safetensors")))


@pytest.mark.slow
def test_sharded_runs_are_evaluated_exported_calibrated_and_continued_without_torchrec(
    killed_run, reward_model, prepared, tmp_path
):
    root, _ = killed_run
    run = root / "whole"
    assert ranks_that_saved(run, "last") == 2
    assert "policy.item_table.weight" in weights(run)
    plain, bundle, histories = tmp_path / "plain.yaml", tmp_path / "bundle", prepared / "histories.parquet"
    plain.write_text((root / "config.yaml").read_text().split("  strategy:")[0].replace("devices: 2", "devices: 1"))
    again = ["train", "--config", plain, "--trainer.max_epochs", 1, "--out"]
    few = ["--baselines", "false", "--segments", "false", "--off_policy", "null", "--bootstrap_resamples", "5"]
    verbs = [
        ["evaluate", "--prepared", prepared, "--contenders", run, "--out", tmp_path / "evaluation", *few],
        ["export", "--run", run, "--out", bundle],
        ["recommend", "--source", bundle, "--histories", histories, "--out", tmp_path / "lists.parquet"],
        ["calibrate", "--rewards", reward_model, "--prepared", prepared],
        [*again, tmp_path / "plain", "--init_from", run],
        [*again, run, "--resume", "true"],
    ]
    (tmp_path / "verbs.json").write_text(json.dumps([[*map(str, words)] for words in verbs]))
    command = [sys.executable, "-c", WITHOUT_TORCHREC, str(tmp_path / "verbs.json")]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (tmp_path / "plain" / "run.json").is_file(), finished.stderr[-3000:]
    assert finished.returncode == 1
    assert "was written with ShardedStrategy" in finished.stderr
    metrics = json.loads((tmp_path / "evaluation" / "metrics.json").read_text())
    assert metrics["format_version"] == 8
    assert (tmp_path / "lists.parquet").is_file()
    assert (reward_model / "calibration.json").is_file()


def train_small(two, config, prepared, out, request, *options):
    """Trains a shipped configuration with the strategy of two ranks."""
    file = request.config.rootpath / "configs" / f"{config}.yaml"
    sizes = {"dim": 16, "layers": 1, "heads": 1, "max_history": 12}
    small = [word for name, size in sizes.items() for word in (f"--policy.init_args.{name}", str(size))]
    small += ["--data.layout.init_args.history_length", "12", "--data.batch_size", "16", "--trainer.max_epochs", "1"]
    ranks = ["--trainer.devices", "2", "--trainer.accelerator", "cpu"]
    strategy = ["--trainer.strategy", "{class_path: recpo.sharding.ShardedStrategy}"]
    run = ["train", "--config", str(file), "--data.prepared", str(prepared), "--out", str(out)]
    two.run(on_this_rank, [*run, *small, *ranks, *strategy, *options])


@pytest.mark.slow
def test_the_shipped_configuration_of_sharded_training(two, prepared, tmp_path, request):
    train_small(two, "sharded_pretrain", prepared, tmp_path / "run", request)
    assert ranks_that_saved(tmp_path / "run", "best") == 2
