"""`recpo train` as a user runs it: refusals, and a killed run that ends like one that was not."""

import signal
import subprocess
import sys
import time

import pytest
import torch

from recpo.cli.main import main
from recpo.errors import RecpoError
from recpo.training.run import checkpoint_path, load_policy, read_finished

CONFIG = """
data:
  prepared: {prepared}
  batch_size: 8
  layout: {{class_path: SequenceLayout, init_args: {{history_length: 12}}}}
policy:
  class_path: CatalogSoftmaxPolicy
  init_args: {{dim: 8, layers: 1, heads: 1, max_history: 12, dropout: 0.2}}
objective: {{class_path: Likelihood}}
trainer: {{max_epochs: {epochs}, accelerator: cpu, num_sanity_val_steps: 0}}
checkpoint_every: 10
out: {out}
"""


def write_config(folder, prepared, name, epochs=2):
    file = folder / f"{name}.yaml"
    file.write_text(CONFIG.format(prepared=prepared, out=folder / name, epochs=epochs))
    return file


def command(config, *options):
    return [sys.executable, "-m", "recpo.cli.main", "train", "--config", str(config), *options]


def weights(run, checkpoint):
    return torch.load(checkpoint_path(run, checkpoint), weights_only=True)["state_dict"]


def test_a_run_is_loadable_when_it_is_finished_and_refused_before(tmp_path, prepared, capsys):
    config = write_config(tmp_path, prepared, "run", epochs=1)
    assert main(["train", "--config", str(config)]) == 0
    finished = read_finished(tmp_path / "run")
    assert {"num_items", "catalog_checksum", "results", "files"} <= finished.keys()
    policy = load_policy(tmp_path / "run")
    assert policy.num_items == finished["num_items"]
    assert not policy.training
    assert (tmp_path / "run" / "logs" / "version_0" / "metrics.csv").is_file()
    assert main(["train", "--config", str(config)]) == 1
    assert "exists already: pass --resume true" in capsys.readouterr().err
    (tmp_path / "run" / "run.json").unlink()
    with pytest.raises(RecpoError, match="did not finish: resume it with"):
        load_policy(tmp_path / "run")


def test_the_resolved_configuration_repeats_the_run(tmp_path, prepared):
    config = write_config(tmp_path, prepared, "first", epochs=1)
    assert main(["train", "--config", str(config), "--seed", "5"]) == 0
    again = ["train", "--config", str(tmp_path / "first" / "resolved.yaml"), "--out", str(tmp_path / "second")]
    assert main(again) == 0
    one, other = (weights(tmp_path / name, "last") for name in ("first", "second"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("every", ["null", "4"])
def test_a_run_that_max_steps_ended_goes_on_in_mid_epoch(tmp_path, prepared, every):
    whole, cut = (write_config(tmp_path, prepared, name) for name in ("whole", "cut"))
    assert main(["train", "--config", str(whole)]) == 0
    options = ["train", "--config", str(cut), "--checkpoint_every", every]
    assert main([*options, "--trainer.max_steps", "13"]) == 0
    assert torch.load(checkpoint_path(tmp_path / "cut", "last"), weights_only=True)["global_step"] == 13
    assert main([*options, "--resume", "true"]) == 0
    one, other = (torch.load(checkpoint_path(tmp_path / name, "last"), weights_only=True) for name in ("whole", "cut"))
    assert one["global_step"] == other["global_step"]
    assert all(torch.equal(value, other["state_dict"][name]) for name, value in one["state_dict"].items())


def test_the_last_state_is_that_of_the_end_however_often_it_is_kept(tmp_path, prepared):
    config = write_config(tmp_path, prepared, "run", epochs=1)
    assert main(["train", "--config", str(config), "--checkpoint_every", "7"]) == 0
    last = torch.load(checkpoint_path(tmp_path / "run", "last"), weights_only=True)
    assert last["global_step"] % 7
    assert last["epoch"] == 0
    assert last["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"] == 1  # the epoch was over


def test_a_popularity_proposal_gets_the_counts_of_the_training_period(tmp_path, prepared):
    config = write_config(tmp_path, prepared, "run", epochs=1)
    sampled = ["--policy.normalizer", "sampled", "--policy.proposal", "popularity", "--policy.num_negatives", "20"]
    assert main(["train", "--config", str(config), *sampled]) == 0
    proposal = load_policy(tmp_path / "run").cdf
    assert proposal[-1] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--init_from", "nowhere"], "nowhere is no run directory"),
        (["--data.prepared", "nowhere"], "nowhere is no prepared directory"),
        (["--objective", "GRPO"], "objective GRPO weighs by advantages: set advantage"),
    ],
)
def test_a_users_mistake_is_one_line_without_traceback(tmp_path, prepared, capsys, options, message):
    assert main(["train", "--config", str(write_config(tmp_path, prepared, "run")), *options]) == 1
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "run").exists()


def test_a_mistyped_key_is_refused(tmp_path, prepared, capsys):
    config = write_config(tmp_path, prepared, "run")
    assert main(["train", "--config", str(config), "--trainer.max_epoch", "3"]) == 2
    printed = capsys.readouterr().err
    assert "max_epoch" in printed
    assert "see: recpo train --help" in printed
    assert len(printed.splitlines()) < 6


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_result(tmp_path, prepared):
    whole = write_config(tmp_path, prepared, "whole", epochs=3)
    subprocess.run(command(whole), check=True, capture_output=True)
    killed = write_config(tmp_path, prepared, "killed", epochs=3)
    process = subprocess.Popen(command(killed), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    last = checkpoint_path(tmp_path / "killed", "last")
    deadline = time.monotonic() + 120
    while not last.is_file() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert last.is_file()
    assert not (tmp_path / "killed" / "run.json").exists()
    evaluate = ["evaluate", "--prepared", str(prepared), "--run", f'["{tmp_path}/killed"]', "--out", "m.json"]
    refused = subprocess.run([sys.executable, "-m", "recpo.cli.main", *evaluate], capture_output=True, text=True)
    assert refused.returncode == 1
    assert "did not finish" in refused.stderr
    resolved = tmp_path / "killed" / "resolved.yaml"
    subprocess.run(command(resolved, "--resume", "true"), check=True, capture_output=True)
    for checkpoint in ("best", "last"):
        one, other = (weights(tmp_path / name, checkpoint) for name in ("whole", "killed"))
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_any_logger_by_class_path_and_mixed_precision(tmp_path, prepared):
    config = write_config(tmp_path, prepared, "run", epochs=1)
    logger = [
        "--trainer.logger",
        "lightning.pytorch.loggers.CSVLogger",
        "--trainer.logger.save_dir",
        str(tmp_path / "x"),
    ]
    options = ["--trainer.precision", "bf16-mixed", "--trainer.accumulate_grad_batches", "2"]
    stopping = [
        "--trainer.callbacks+=lightning.pytorch.callbacks.EarlyStopping",
        "--trainer.callbacks.monitor=val/NDCG@10",
    ]
    subprocess.run(command(config, *logger, *options, *stopping), check=True, capture_output=True)
    assert list((tmp_path / "x").rglob("metrics.csv"))
    assert not (tmp_path / "run" / "logs").exists()
    assert torch.isfinite(weights(tmp_path / "run", "best")["policy.item_table.weight"]).all()
