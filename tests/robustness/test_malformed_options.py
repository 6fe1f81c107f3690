"""Impossible options through the command line: exit 1 or 2, one message, nothing written."""

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
    "--data.num_workers 99999": "num_workers must be at most 256",
    "--data.batch_size 99999999999999999999": "--data.batch_size: 99999999999999999999 is too large",
    "--data 3": "data",
    "--data.evaluation_batch_size 0": "evaluation_batch_size must be at least 1",
    "--data.max_validation_users 0": "max_validation_users must be at least 1",
    "--data.layout.history_length 0": "history_length",
    "--data.layout NoLayout": "NoLayout",
    "--data.prepared nowhere": "nowhere: expected prepared data",
    "--anchor_coef -1": "anchor_coef: expected a number >=0, got -1",
    "--anchor_coef nan": "anchor_coef",
    "--checkpoint_every -5": "checkpoint_every: expected a number >0, got -5",
    "--checkpoint_every 0": "checkpoint_every: expected a number >0, got 0",
    "--snapshot_every 0": "snapshot_every: expected a number >0",
    "--validation_k 0": "validation_k: expected a number >0, got 0",
    "--seed -1": "seed: expected a number >=0 and <4294967296, got -1",
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
    "--policy.sparse true": "policy.normalizer to sampled",
    "--policy.feedback_levels 3": "policy.feedback_levels",
    "--policy.item_features 3": "--policy.item_features: 3 is no mapping",
    "--policy.dim 99999999999999999999": "--policy.dim: 99999999999999999999 is too large",
    "--rollout 3": "--rollout: 3 is no mapping",
    "--rollout []": "--rollout: a list is no mapping",
    "--rollout.collapse yes": "--rollout.collapse: yes is no mapping",
    "--critic 3": "--critic: 3 is no mapping",
    "--weight_averaging half": "--weight_averaging: half is no mapping",
    "--trainer 3": "trainer",
    "--objective []": "objective",
    "--objective 3": "objective",
    "--optimizer 3": "optimizer",
    "--trainer.callbacks [3]": "trainer",
    "--trainer.devices []": "devices=[]",
    "--critic.hidden 0": "critic.hidden: expected a number >0, got 0",
    "--critic.gamma 1": "critic.gamma must lie in [0, 1)",
    "--rollout.group_size 1": "rollout.group_size must be at least 2",
    "--rollout.temperature 0": "rollout.temperature: expected a number >0, got 0",
    "--rollout.collapse.max_kl -1": "rollout.collapse.max_kl: expected a number >=0, got -1",
    "--adaptive_kl.target 0": "adaptive_kl.target: expected a number >0, got 0",
    "--old_policy yesterday": "old_policy",
    "--matmul_precision lowest": "matmul_precision",
    "--objective NoObjective": "NoObjective",
    "--objective GRPO": "weights its loss by advantages",
    "--reward LearnedReward --reward.run nowhere": "nowhere: expected a run, run.json is missing",
    "--init_from nowhere": "nowhere: expected a run, run.json is missing",
    "--no_such_option 1": "no_such_option",
    "--config nowhere.yaml": "nowhere.yaml",
}


@pytest.mark.slow
@pytest.mark.parametrize("options", REFUSED, ids=str)
def test_an_impossible_option_is_one_message(prepared, tmp_path, capfd, options):
    out = tmp_path / "run"
    words = ["train", "--data.prepared", str(prepared), "--out", str(out), *COMMON, *options.split()]
    assert main(words) in (1, 2)
    printed = capfd.readouterr().err
    assert REFUSED[options] in printed
    assert "Traceback" not in printed
    assert not out.exists()


HUGE = "99999999999999999999"
OF_OTHER_VERBS = {
    "prepare --log [] --out OUT": "log: an empty list names no file",
    "prepare --log LOG --out OUT --columns 3": "--columns: 3 is no mapping",
    "prepare --log LOG --out OUT --csv comma": "--csv: comma is no mapping",
    "prepare --log LOG --out OUT --feedback 3": "--feedback: 3 is no mapping",
    "prepare --log LOG --out OUT --features [a]": "--features: a list is no mapping",
    "prepare --log LOG --out OUT --features.item 3": "features",
    "prepare --log LOG --out OUT --label 3": "label",
    "prepare --log LOG --out OUT --split []": "split",
    "prepare --log LOG --out OUT --max_watch_time .inf": "max_watch_time",
    f"prepare --log LOG --out OUT --max_context {HUGE}": f"--max_context: {HUGE} is too large",
    f"prepare --log LOG --out OUT --threads {HUGE}": f"--threads: {HUGE} is too large",
    "init []": "log: an empty list names no file",
    "init LOG --out OUT --columns 3": "--columns: 3 is no mapping",
    "tokenize --prepared DATA --out OUT --vectors 3": "vectors",
    "tokenize --prepared DATA --out OUT --levels 1000000": "levels must be at most 64",
    "tokenize --prepared DATA --out OUT --seed 9999999999": "seed: expected a number >=0 and <4294967296",
    "factorize --prepared DATA --out OUT --seed -1": "seed: expected a number >=0",
    "train --data.prepared DATA --out OUT --policy.dim 0": "policy.dim: expected a number >0, got 0",
    "factorize --prepared DATA --out OUT --ranks []": "ranks is empty",
    "simulate --out OUT --after []": "after",
    "simulate --out OUT --after [] --policy nowhere": "after is an empty list",
    f"simulate --out OUT --users {HUGE}": f"--users: {HUGE} is too large",
    "simulate --out OUT --exploration 3": "--exploration: 3 is no mapping",
    "evaluate --prepared DATA --out OUT --rerank_options 3": "--rerank_options: 3 is no mapping",
    "evaluate --prepared DATA --out OUT --baseline_options 3": "--baseline_options: 3 is no mapping",
    "evaluate --prepared DATA --out OUT --off_policy yes": "--off_policy: yes is no mapping",
    "evaluate --prepared DATA --out OUT --rerank 3": "rerank",
    "evaluate --prepared DATA --out OUT --ks []": "ks must be different whole numbers",
    f"evaluate --prepared DATA --out OUT --ks [{HUGE}]": f"--ks: {HUGE} is too large",
    f"plan --num_items {HUGE}": f"--num_items: {HUGE} is too large",
    "calibrate --prepared DATA --rewards [3]": "[3]: expected a run",
    "export --run nowhere --out OUT --index 3": "--index: 3 is no mapping",
    "serve --bundle nowhere --rerank_options 3": "--rerank_options: 3 is no mapping",
    "loop --out OUT --recipe []": "recipe is []",
}


@pytest.mark.slow
@pytest.mark.parametrize("line", OF_OTHER_VERBS)
def test_an_impossible_option_of_another_verb_is_one_message(prepared, tmp_path, capfd, line):
    places = {"LOG": str(prepared / "histories.parquet"), "DATA": str(prepared), "OUT": str(tmp_path / "out")}
    words = [places.get(word, word) for word in line.split()]
    assert main(words) in (1, 2)
    printed = capfd.readouterr().err
    assert OF_OTHER_VERBS[line] in printed
    assert printed.count("error: ") == 1
    assert "Traceback" not in printed
    assert list(tmp_path.iterdir()) == []
