"""Two gloo ranks are equivalent to one process with twice the batch size.

Here, processes that are there already run the verb. In test_sharded_cli.py, the verb starts its second one itself.
"""

import pytest
import torch

from recpo.batches.datamodule import Epochs, TrainBatches
from recpo.batches.slates import Rank, SequenceLayout
from recpo.cli.main import main
from recpo.log.prepared import Prepared
from recpo.training.run import checkpoint_path
from recpo.verbs.prepare import prepare
from tests.cli.ranks import on_this_rank

CONFIG = """
data:
  prepared: {prepared}
  layout: {layout}
policy:
  class_path: CatalogSoftmaxPolicy
  init_args: {{dim: 8, layers: 1, heads: 1, max_history: 12, dropout: 0.0}}
objective: {{class_path: {objective}}}
{extra}
optimizer: {{class_path: torch.optim.SGD, init_args: {{lr: 0.5}}}}
trainer:
  max_steps: 12
  accelerator: cpu
  num_sanity_val_steps: 0
  gradient_clip_val: 0.1
  enable_progress_bar: false
"""
CASES = {
    "GBPO": (
        "{class_path: SequenceLayout, init_args: {history_length: 12}}",
        "advantage: {class_path: TernaryAdvantage}",
    ),
    "PPO": (
        "{class_path: SequenceLayout, init_args: {history_length: 12}}",
        "advantage: {class_path: GAEAdvantage, init_args: {whiten: true}}\nreward: {class_path: LoggedReward}\n"
        "old_policy: snapshot\nsnapshot_every: 3",
    ),
}


def words(config, out, *options):
    return ["train", "--config", str(config), "--out", str(out), *options]


def train(config, out, *options, ranks=None):
    """A training by this process, or by ``ranks``; its last checkpoint."""
    if ranks is None:
        assert main(words(config, out, *options)) == 0
    else:
        ranks.run(on_this_rank, words(config, out, *options))
    return torch.load(checkpoint_path(out, "last"), weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["PPO"])
def test_two_ranks_equal_one_process_with_twice_the_batch(two, tmp_path, prepared, objective):
    layout, extra = CASES[objective]
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(prepared=prepared, layout=layout, objective=objective, extra=extra))
    one = train(config, tmp_path / "one", "--data.batch_size", "32")
    ranks = ["--trainer.devices", "2", "--trainer.strategy", "ddp"]
    both = train(config, tmp_path / "two", "--data.batch_size", "16", *ranks, ranks=two)
    assert one["global_step"] == both["global_step"] == 12
    assert one["state_dict"].keys() == both["state_dict"].keys()
    for name, weights in one["state_dict"].items():
        torch.testing.assert_close(weights, both["state_dict"][name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: n + m)
    assert (tmp_path / "two" / "run.json").is_file()


@pytest.mark.slow
def test_a_run_of_two_ranks_goes_on_as_one_that_accumulates(two, tmp_path, prepared):
    layout, extra = CASES["GBPO"]
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(prepared=prepared, layout=layout, objective="GBPO", extra=extra))
    size, ranks = ["--data.batch_size", "8"], ["--trainer.devices", "2", "--trainer.strategy", "ddp"]
    whole = train(config, tmp_path / "whole", *size, *ranks, ranks=two)
    train(config, tmp_path / "cut", *size, *ranks, "--trainer.max_steps", "5", ranks=two)
    one = ["--resume", "true", "--trainer.accumulate_grad_batches", "2"]
    train(config, tmp_path / "cut", *size, *one, "--trainer.max_steps", "8")
    resumed = train(config, tmp_path / "cut", *size, *one)
    assert whole["global_step"] == resumed["global_step"] == 12
    for name, weights in whole["state_dict"].items():
        torch.testing.assert_close(weights, resumed["state_dict"][name], rtol=1e-4, atol=1e-5)


ON_POLICY = """
data:
  prepared: {prepared}
  layout: {{class_path: ImpressionLayout, init_args: {{history_length: 12, slate_length: 6}}}}
policy:
  class_path: CatalogSoftmaxPolicy
  init_args: {{dim: 8, layers: 1, heads: 1, max_history: 12, dropout: 0.0}}
objective: {{class_path: PPO, init_args: {{kl_coef: 0.1}}}}
advantage: {{class_path: GAEAdvantage}}
reward: {{class_path: HitReward}}
rollout: {{batches: 3, epochs: 2, resamples: 1, max_kl: 0.02}}
adaptive_kl: {{target: 0.01}}
old_policy: snapshot
optimizer: {{class_path: torch.optim.Adam, init_args: {{lr: 0.01}}}}
trainer:
  max_steps: 14
  accelerator: cpu
  devices: 2
  strategy: ddp
  num_sanity_val_steps: 0
  enable_progress_bar: false
"""


@pytest.mark.slow
def test_two_ranks_learn_from_their_own_candidates_and_resume(two, tmp_path, prepared):
    config = tmp_path / "config.yaml"
    config.write_text(ON_POLICY.format(prepared=prepared))
    whole = train(config, tmp_path / "whole", "--data.batch_size", "16", ranks=two)
    assert whole["global_step"] == 14
    train(config, tmp_path / "cut", "--data.batch_size", "16", "--trainer.max_steps", "9", ranks=two)
    resumed = train(config, tmp_path / "cut", "--data.batch_size", "16", "--resume", "true", ranks=two)
    assert whole["kl_control"] == resumed["kl_control"]
    for name, weights in whole["state_dict"].items():
        torch.testing.assert_close(weights, resumed["state_dict"][name], rtol=0, atol=0)


DEALT = """
data:
  prepared: {prepared}
  batch_size: 12
  num_workers: {workers}
  assign: shards
  layout: {{class_path: SequenceLayout, init_args: {{history_length: 12}}}}
policy:
  class_path: CatalogSoftmaxPolicy
  init_args: {{dim: 8, layers: 1, heads: 1, max_history: 12}}
objective: {{class_path: GBPO}}
advantage: {{class_path: TernaryAdvantage}}
optimizer: {{class_path: torch.optim.Adam, init_args: {{lr: 0.01}}}}
checkpoint_every: {every}
trainer:
  max_epochs: 2
  accelerator: cpu
  devices: 2
  strategy: ddp
  num_sanity_val_steps: 0
  enable_progress_bar: false
"""


@pytest.mark.slow
def test_two_ranks_that_read_separate_shards_resume_within_the_epoch(two, tmp_path, world, capsys):
    prepared = tmp_path / "prepared"
    prepare(str(world / "log"), prepared, rows_per_shard=600)
    batches = [
        TrainBatches(Prepared.open(prepared), SequenceLayout(12), 12, 0, Rank(rank, 2), Epochs(assign="shards"))
        for rank in range(2)
    ]
    filled = [sum(bool(batch.slates.mask.any()) for batch in own) for own in batches]
    assert filled[0] == len(batches[0]) > filled[1]  # the second rank ends its epochs with empty batches
    every = len(batches[0]) + 4  # so that last.ckpt is one of mid-epoch
    config = tmp_path / "config.yaml"
    config.write_text(DEALT.format(prepared=prepared, workers=0, every=every))
    whole = train(config, tmp_path / "whole", ranks=two)
    cut = train(config, tmp_path / "cut", "--trainer.max_steps", str(every + 2), ranks=two)
    assert cut["global_step"] == every + 2
    alone = ["--resume", "true", "--trainer.devices", "1", "--trainer.strategy", "auto"]
    assert main(words(config, tmp_path / "cut", *alone)) == 1
    refused = capsys.readouterr().err
    assert "after 6 batches of 12 on each of 2 ranks (assign: shards); it cannot continue" in refused
    config.write_text(DEALT.format(prepared=prepared, workers=1, every=every))
    resumed = train(config, tmp_path / "cut", "--resume", "true", ranks=two)
    assert resumed["global_step"] == whole["global_step"] == 2 * len(batches[0])
    for name, weights in whole["state_dict"].items():
        torch.testing.assert_close(weights, resumed["state_dict"][name], rtol=0, atol=0)
