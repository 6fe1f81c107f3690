"""Impossible options of `recpo train` through the command line: exit 1 or 2, one message, nothing written."""

import pytest

from recpo.cli.main import main

COMMON = ["--policy.dim", "8", "--policy.layers", "1", "--policy.heads", "1", "--policy.max_history", "12"]
COMMON += ["--data.layout", "SequenceLayout", "--data.layout.history_length", "12", "--trainer.max_epochs", "1"]
COMMON += ["--trainer.accelerator", "cpu", "--trainer.logger", "false", "--progress", "false", "--allocator", "false"]
REFUSED = {
    "--data.batch_size 0": "batch_size must be at least 1, got 0",
    "--data.batch_size -3": "batch_size must be at least 1, got -3",
    "--data.batch_size many": "batch_size",
    "--data.num_workers -1": "num_workers must be at least 0",
    "--data.evaluation_batch_size 0": "evaluation_batch_size must be at least 1",
    "--data.max_validation_users 0": "max_validation_users must be at least 1",
    "--data.layout.history_length 0": "history_length",
    "--data.layout NoLayout": "NoLayout",
    "--data.prepared nowhere": "nowhere is not a prepared directory",
    "--anchor_coef -1": "anchor_coef is a weight of at least 0, got -1",
    "--anchor_coef nan": "anchor_coef",
    "--checkpoint_every -5": "checkpoint_every must be at least 1, got -5",
    "--checkpoint_every 0": "checkpoint_every must be at least 1, got 0",
    "--snapshot_every 0": "snapshot_every must be at least 1",
    "--validation_k 0": "validation_k must be at least 1, got 0",
    "--seed -1": "seed must be at least 0",
    "--trainer.max_epochs 0": "trainer.max_epochs must be at least 1",
    "--trainer.max_epochs -2": "trainer.max_epochs must be at least 1",
    "--trainer.max_steps 0": "trainer.max_steps must be at least 1",
    "--trainer.limit_train_batches 0": "trainer.limit_train_batches must be above 0",
    "--trainer.accumulate_grad_batches 0": "trainer.accumulate_grad_batches must be at least 1",
    "--trainer.devices 0": "trainer",
    "--trainer.accelerator abacus": "trainer",
    "--trainer.precision 7": "precision",
    "--trainer.gradient_clip_val -1": "trainer.gradient_clip_val must be at least 0",
    "--optimizer torch.optim.Adam --optimizer.lr -0.1": "learning rate",
    "--optimizer torch.optim.Adam --optimizer.lr nan": "optimizer",
    "--optimizer torch.optim.Nadir": "optimizer",
    "--policy.dim 0": "dim",
    "--policy.heads 3": "heads",
    "--policy.dropout 1.5": "dropout",
    "--policy.temperature 0": "temperature",
    "--critic.hidden 0": "critic.hidden must be at least 1",
    "--critic.gamma 1": "critic.gamma must lie in [0, 1)",
    "--rollout.group_size 1": "rollout.group_size must be at least 2",
    "--rollout.temperature 0": "rollout.temperature must be above 0",
    "--rollout.collapse.max_kl -1": "rollout.collapse.max_kl must not be negative",
    "--adaptive_kl.target 0": "adaptive_kl.target must be above 0",
    "--old_policy yesterday": "old_policy",
    "--matmul_precision lowest": "matmul_precision",
    "--objective NoObjective": "NoObjective",
    "--objective GRPO": "weighs by advantages",
    "--reward LearnedReward --reward.run nowhere": "nowhere is not a run directory",
    "--init_from nowhere": "nowhere is not a run directory",
    "--no_such_option 1": "no_such_option",
    "--config nowhere.yaml": "nowhere.yaml",
}


@pytest.mark.parametrize("options", REFUSED, ids=str)
def test_an_impossible_option_is_one_message(prepared, tmp_path, capfd, options):
    out = tmp_path / "run"
    words = ["train", "--data.prepared", str(prepared), "--out", str(out), *COMMON, *options.split()]
    assert main(words) in (1, 2)
    printed = capfd.readouterr().err
    assert REFUSED[options] in printed
    assert "Traceback" not in printed
    assert not out.exists()
