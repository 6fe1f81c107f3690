"""A sharded run from the command line: a rank dies, the run continues with other ranks, and its policy is served."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from recpo.training.checkpoints import SavedTensor, saved_tensors
from recpo.training.run import checkpoint_path

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
checkpoint_every: 7
trainer:
  max_epochs: 10
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


def recpo(*options, check=True, block_torchrec=False):
    start = ["-m", "recpo.cli.main"]
    if block_torchrec:
        blocked = "import sys; sys.modules['torchrec'] = sys.modules['fbgemm_gpu'] = None; "
        start = ["-c", blocked + "from recpo.cli.main import main; sys.exit(main())"]
    finished = subprocess.run([sys.executable, *start, *options], capture_output=True, text=True, timeout=300)
    if check:
        assert finished.returncode == 0, finished.stderr[-3000:]
    return finished


def weights(run):
    saved = saved_tensors(checkpoint_path(run, "last"))
    return {name: value.whole() if isinstance(value, SavedTensor) else value for name, value in saved.items()}


def assert_same(first, second, tolerance):
    one, other = weights(first), weights(second)
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m)


def killed(config, out):
    """A run of two ranks of which the second one is killed after its first checkpoint."""
    command = [sys.executable, "-m", "recpo.cli.main", "train", "--config", str(config), "--out", str(out)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    last, deadline = checkpoint_path(out, "last"), time.monotonic() + 600
    while not last.exists():
        assert first.poll() is None, first.communicate()[1][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    children = subprocess.run(["pgrep", "-P", str(first.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(children[0]), signal.SIGKILL)
    _, errors = first.communicate(timeout=300)
    return first.returncode, errors


@pytest.fixture(scope="module")
def killed_run(prepared, tmp_path_factory):
    """Configuration, an uninterrupted run, and one that lost a rank in mid-epoch, with what it said."""
    root = tmp_path_factory.mktemp("sharded")
    config = root / "config.yaml"
    config.write_text(CONFIG.format(prepared=prepared, normalizer="sampled", optimizer="rowwise_adagrad"))
    recpo("train", "--config", str(config), "--out", str(root / "whole"))
    return root, killed(config, root / "killed")


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_run_with_one_message(killed_run):
    root, (status, errors) = killed_run
    assert status == 1
    assert "rank 0 has lost another rank of this run" in errors
    assert "--resume true" in errors
    assert "Traceback" not in errors
    assert not (root / "killed" / "run.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1])
def test_a_run_continues_with_any_number_of_ranks(killed_run, ranks, tmp_path):
    root, _ = killed_run
    run = tmp_path / "resumed"
    subprocess.run(["cp", "-r", str(root / "killed"), str(run)], check=True)
    meta = torch.load(checkpoint_path(run, "last") / "meta.pt", weights_only=True)
    assert meta["global_step"] < 100  # it was killed on its way
    sizes = ["--trainer.devices", str(ranks), "--trainer.accumulate_grad_batches", str(2 // ranks)]
    recpo("train", "--config", str(root / "config.yaml"), "--out", str(run), "--resume", "true", *sizes)
    assert_same(root / "whole", run, 1e-6 if ranks == 2 else 2e-4)


@pytest.mark.slow
def test_a_sharded_run_is_evaluated_exported_and_continued_without_torchrec(killed_run, prepared, tmp_path):
    root, _ = killed_run
    run = root / "whole"
    tables = {"policy.item_table.weight"}
    files = list(checkpoint_path(run, "last").glob("*.safetensors"))
    assert len(files) == 2  # one per rank
    assert tables <= weights(run).keys()
    evaluate = ["--prepared", str(prepared), "--contenders", str(run), "--out", str(tmp_path / "evaluation")]
    recpo("evaluate", *evaluate, block_torchrec=True)
    metrics = json.loads((tmp_path / "evaluation" / "metrics.json").read_text())
    assert metrics["format_version"] == 6
    export = ["--run", str(run), "--out", str(tmp_path / "bundle")]
    recpo("export", *export, block_torchrec=True)
    histories = ["--histories", str(prepared / "histories.parquet"), "--out", str(tmp_path / "lists.parquet")]
    recpo("recommend", "--source", str(tmp_path / "bundle"), *histories, block_torchrec=True)
    plain = tmp_path / "plain.yaml"
    plain.write_text((root / "config.yaml").read_text().split("  strategy:")[0].replace("devices: 2", "devices: 1"))
    again = ["train", "--config", str(plain), "--trainer.max_epochs", "1", "--out"]
    recpo(*again, str(tmp_path / "plain"), "--init_from", str(run), block_torchrec=True)
    refused = recpo(*again, str(run), "--resume", "true", check=False, block_torchrec=True)
    assert refused.returncode == 1
    assert "was written with ShardedStrategy" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("config", ["sharded_pretrain", "pretrain"])
def test_the_strategy_goes_into_any_configuration(prepared, tmp_path, config, request):
    file = request.config.rootpath / "configs" / f"{config}.yaml"
    sizes = {"dim": 16, "layers": 1, "heads": 1, "max_history": 12}
    small = [word for name, size in sizes.items() for word in (f"--policy.init_args.{name}", str(size))]
    small += ["--data.layout.init_args.history_length", "12", "--data.batch_size", "16", "--trainer.max_epochs", "1"]
    ranks = ["--trainer.devices", "2", "--trainer.accelerator", "cpu"]
    strategy = ["--trainer.strategy", "{class_path: recpo.sharding.ShardedStrategy}"]
    run = ["train", "--config", str(file), "--data.prepared", str(prepared), "--out", str(tmp_path / "run")]
    recpo(*run, *small, *ranks, *strategy)
    assert len(list(checkpoint_path(tmp_path / "run", "best").glob("*.safetensors"))) == 2


@pytest.mark.slow
def test_a_sharded_reward_model_is_calibrated(prepared, tmp_path, request):
    file = request.config.rootpath / "configs" / "reward_model.yaml"
    sizes = {"dim": 16, "layers": 1, "heads": 1, "max_history": 12}
    small = [word for name, size in sizes.items() for word in (f"--policy.init_args.{name}", str(size))]
    small += ["--data.layout.init_args.history_length", "12", "--data.batch_size", "16", "--trainer.max_epochs", "1"]
    sharded = ["--trainer.strategy", "{class_path: recpo.sharding.ShardedStrategy}", "--trainer.accelerator", "cpu"]
    run = str(tmp_path / "run")
    start = ["train", "--config", str(file), "--data.prepared", str(prepared), "--out", run]
    recpo(*start, *small, *sharded, "--trainer.devices", "2", "--init_from", "null")
    recpo("calibrate", "--rewards", run, "--prepared", str(prepared), block_torchrec=True)
    assert (tmp_path / "run" / "calibration.json").is_file()
