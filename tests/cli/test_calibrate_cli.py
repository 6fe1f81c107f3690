"""A learned reward on the command line: train, calibrate, use."""

import json
from pathlib import Path

import pytest

from recpo.cli.main import main

CONFIGS = Path(__file__).parent.parent.parent / "configs"
SMALL = (
    *("--policy.init_args.dim=8", "--policy.init_args.heads=1", "--policy.init_args.layers=1"),
    *("--policy.init_args.max_history=12", "--data.layout.init_args.history_length=12", "--trainer.max_epochs=1"),
    *("--trainer.limit_train_batches=4", "--trainer.accelerator=cpu"),
    *("--trainer.enable_progress_bar=false", "--allocator=false"),
)


@pytest.mark.slow
def test_train_calibrate_use(prepared, tmp_path, capfd):
    def recpo(*arguments, status=0):
        assert main(list(map(str, arguments))) == status
        said = capfd.readouterr()
        return said.out + said.err

    def train(config, out, *options, status=0):
        files = [f"--config={CONFIGS / name}" for name in config.split()]
        places = (*files, f"--data.prepared={prepared}", f"--out={tmp_path / out}")
        return recpo("train", *places, *SMALL, *options, status=status)

    train("pretrain.yaml", "policy")
    start = f"--init_from={tmp_path / 'policy'}"
    train("reward_model.yaml", "reward", start)
    use = (start, "--reward=LearnedReward", f"--reward.init_args.run={tmp_path / 'reward'}")
    said = train("on_policy.yaml grpo.yaml", "aligned", *use, status=1)
    assert f"recpo calibrate --rewards {tmp_path / 'reward'}" in said
    said = recpo("calibrate", f"--rewards={tmp_path / 'reward'}", f"--prepared={prepared}", "--resamples=20")
    assert "rank corr." in said
    assert "calibration.json written" in said
    report = json.loads((tmp_path / "reward" / "calibration.json").read_text())
    assert set(report["targets"]) == {"grade", "dislike"}
    train("on_policy.yaml grpo.yaml", "aligned", *use, "--overwrite=true")
    again = json.loads((tmp_path / "reward" / "calibration.json").read_text())
    recpo("calibrate", f"--rewards={tmp_path / 'reward'}", f"--prepared={prepared}", "--resamples=20")
    assert json.loads((tmp_path / "reward" / "calibration.json").read_text()) == again


def test_what_cannot_be_calibrated_is_reported_in_one_line(prepared, tmp_path, capsys):
    assert main(["calibrate", f"--rewards={tmp_path}", f"--prepared={prepared}"]) == 1
    said = capsys.readouterr().err
    assert said == f"error: {tmp_path}: expected a run, run.json is missing; make it with `recpo train`\n"
