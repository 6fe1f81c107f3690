"""`recpo train` as a user runs it: errors, and a killed run that ends like an uninterrupted one."""

import signal

import pandas as pd
import pytest
import torch

import recpo
from recpo.cli.main import main
from recpo.training.fit import instantiate, parse_arguments
from recpo.training.run import Run, checkpoint_path
from tests.forks import Command
from tests.refusals import refused

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


def weights(run, checkpoint):
    return torch.load(checkpoint_path(run, checkpoint), weights_only=True)["state_dict"]


@pytest.mark.slow
def test_a_run_is_loadable_and_repeated_when_it_is_finished_and_refused_before(tmp_path, prepared, capsys):
    config = write_config(tmp_path, prepared, "run", epochs=1)
    assert main(["train", "--config", str(config), "--seed", "5"]) == 0
    run = Run.open(tmp_path / "run")
    policy = run.policy()
    assert policy.num_items == run.num_items
    assert not policy.training
    assert (tmp_path / "run" / "logs" / "version_0" / "metrics.csv").is_file()
    again = ["train", "--config", str(tmp_path / "run" / "resolved.yaml"), "--out", str(tmp_path / "again")]
    assert main(again) == 0
    one, other = (weights(tmp_path / name, "last") for name in ("run", "again"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert main(["train", "--config", str(config)]) == 1
    assert "exists already: pass --resume true" in capsys.readouterr().err
    (tmp_path / "run" / "run.json").unlink()
    with refused("unfinished", "run.json"):
        Run.open(tmp_path / "run")


@pytest.mark.slow
def test_a_run_that_max_steps_ended_continues_within_the_epoch(tmp_path, prepared):
    assert main(["train", "--config", str(write_config(tmp_path, prepared, "whole"))]) == 0
    one = torch.load(checkpoint_path(tmp_path / "whole", "last"), weights_only=True)
    for every in ("null", "4"):
        last = checkpoint_path(tmp_path / every, "last")
        options = ["train", "--config", str(write_config(tmp_path, prepared, every)), "--checkpoint_every", every]
        assert main([*options, "--trainer.max_steps", "13"]) == 0
        assert torch.load(last, weights_only=True)["global_step"] == 13
        assert main([*options, "--resume", "true"]) == 0
        other = torch.load(last, weights_only=True)
        assert one["global_step"] == other["global_step"]
        assert all(torch.equal(value, other["state_dict"][name]) for name, value in one["state_dict"].items())


@pytest.mark.slow
def test_the_last_state_is_that_of_the_end_however_often_it_is_kept(tmp_path, prepared):
    config = write_config(tmp_path, prepared, "run", epochs=1)
    assert main(["train", "--config", str(config), "--checkpoint_every", "7"]) == 0
    last = torch.load(checkpoint_path(tmp_path / "run", "last"), weights_only=True)
    assert last["global_step"] % 7
    assert last["epoch"] == 0
    assert last["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"] == 1  # the epoch was over


@pytest.mark.slow
def test_a_popularity_proposal_gets_the_counts_of_the_training_period(tmp_path, prepared):
    config = write_config(tmp_path, prepared, "run", epochs=1)
    sampled = ["--policy.normalizer", "sampled", "--policy.proposal", "popularity", "--policy.num_negatives", "20"]
    sampled += ["--trainer.max_steps", "1"]
    assert main(["train", "--config", str(config), *sampled]) == 0
    proposal = Run.open(tmp_path / "run").policy().cdf
    assert proposal[-1] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--init_from", "nowhere"], "nowhere: expected a run, run.json is missing"),
        (["--data.prepared", "nowhere"], "nowhere: expected prepared data"),
        (["--objective", "GRPO"], "GRPO weights its loss by advantages: set advantage"),
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
def test_a_killed_run_resumes_to_the_same_result(tmp_path, prepared, capsys):
    assert main(["train", "--config", str(write_config(tmp_path, prepared, "whole"))]) == 0
    killed = write_config(tmp_path, prepared, "killed")
    command = Command(["train", "--config", str(killed)], tmp_path)
    last = checkpoint_path(tmp_path / "killed", "last")
    command.until(last.is_file)
    command.send(signal.SIGKILL)
    assert command.ended() == -signal.SIGKILL
    assert last.is_file()
    assert not (tmp_path / "killed" / "run.json").exists()
    evaluate = ["evaluate", "--prepared", str(prepared), "--contenders", f'["{tmp_path}/killed"]', "--out", "m.json"]
    assert main(evaluate) == 1
    assert "did not finish" in capsys.readouterr().err
    resolved = tmp_path / "killed" / "resolved.yaml"
    assert main(["train", "--config", str(resolved), "--resume", "true"]) == 0
    for checkpoint in ("best", "last"):
        one, other = (weights(tmp_path / name, checkpoint) for name in ("whole", "killed"))
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_run_with_its_status_and_how_to_continue(tmp_path, prepared, sent, status):
    config = write_config(tmp_path, prepared, "run", epochs=1000)
    command = Command(["train", "--config", str(config)], tmp_path)
    last = checkpoint_path(tmp_path / "run", "last")
    command.until(last.is_file)
    command.send(sent)
    assert command.ended() == status
    _, said = command.printed
    assert f"stopped by {sent.name} at step" in said
    assert f"{last} is kept; continue with recpo train --config {tmp_path}/run/resolved.yaml --resume true" in said
    assert "Traceback" not in said
    assert not (tmp_path / "run" / "run.json").exists()
    at = torch.load(last, weights_only=True)["global_step"]
    resolved = tmp_path / "run" / "resolved.yaml"
    more = ["--resume", "true", "--trainer.max_steps", str(at + 1)]
    assert main(["train", "--config", str(resolved), *more]) == 0
    assert torch.load(last, weights_only=True)["global_step"] == at + 1


DAY = 86_400_000  # ms


def log_of(items):
    """A log of so many items: 30 users, one after another, so that those of later periods have no history."""
    rows = [
        (user, (user + event) % items, DAY * (18_000 + 2 * user + event)) for user in range(30) for event in range(4)
    ]
    frame = pd.DataFrame(rows, columns=["user_id", "item_id", "timestamp"])
    return frame.assign(watch_time=3.0 + frame.index % 7, duration=10.0)


@pytest.mark.slow
@pytest.mark.parametrize("items", [1, 2])
def test_a_catalog_of_one_or_two_items_is_trained_validated_exported_and_recommended(tmp_path, items):
    data = recpo.prepare(log_of(items), out=tmp_path / "prepared")
    run, bundle, histories = tmp_path / "run", tmp_path / "bundle", data.root / "histories.parquet"
    config = ["train", "--config", "configs/pretrain.yaml", "--data.prepared", str(data.root), "--out", str(run)]
    small = ["--policy.dim", "8", "--policy.heads", "1", "--policy.layers", "1", "--trainer.max_epochs", "1"]
    small += ["--policy.max_history", "4", "--data.layout.init_args.history_length", "4"]  # a user has no more events
    assert main([*config, *small]) == 0
    assert 0 <= Run.open(run).results["val/NDCG@10"] <= 1
    assert main(["export", "--run", str(run), "--out", str(bundle)]) == 0
    for source in (["--source", str(bundle)], ["--source", str(run)]):
        out = tmp_path / f"{source[0][2:]}.parquet"
        assert main(["recommend", *source, "--histories", str(histories), "--out", str(out)]) == 0
        assert set(pd.read_parquet(out)["rank"]) <= set(range(1, items + 1))
    nobody = recpo.load(bundle).recommend(log_of(items).head(0), users=[999])
    assert len(nobody) == items
    assert len(recpo.recommend(run, log_of(items).head(0), users=[999])) == items


@pytest.mark.slow
def test_max_steps_below_an_epoch_with_early_stopping_is_a_whole_run(tmp_path, prepared, capsys):
    options = ["--data.prepared", str(prepared), "--out", str(tmp_path / "run"), "--trainer.max_steps", "1"]
    small = ["--policy.dim", "8", "--policy.layers", "1", "--data.batch_size", "8"]
    assert main(["train", "--config", "configs/pretrain.yaml", *options, *small]) == 0
    run = Run.open(tmp_path / "run")
    assert torch.load(run.checkpoint("best"), weights_only=True)["global_step"] == 1
    assert f"finished, val/NDCG@10 {run.results['val/NDCG@10']:.4f}" in capsys.readouterr().out


PACKAGE = """
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy


class Own(CatalogSoftmaxPolicy):
    pass
"""


@pytest.mark.slow
def test_every_verb_that_opens_a_run_takes_trust(tmp_path, prepared, monkeypatch, capsys):
    (tmp_path / "own_package.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    config, run = write_config(tmp_path, prepared, "run", epochs=1), str(tmp_path / "run")
    assert main(["train", "--config", str(config), "--policy", "own_package.Own"]) == 0
    trusted, histories = ["--trust", '["own_package"]'], str(prepared / "histories.parquet")
    base = ["--data.prepared", str(prepared), "--init_from", run, "--trainer.max_steps", "1"]
    codes = ["--out", str(tmp_path / "codes"), "--levels", "2", "--codebook_size", "8"]
    vectors = ["--vectors", "VectorsFromRun", "--vectors.run", run]
    few = ["--baselines", "false", "--segments", "false", "--off_policy", "null", "--bootstrap_resamples", "5"]
    verbs = [
        (["export", "--run", run, "--out", str(tmp_path / "bundle")], trusted),
        (["recommend", "--source", run, "--histories", histories, "--out", str(tmp_path / "r.parquet")], trusted),
        (
            ["evaluate", "--prepared", str(prepared), "--contenders", f'["{run}"]', "--out", str(tmp_path / "e"), *few],
            trusted,
        ),
        (["train", *base, "--out", str(tmp_path / "next")], trusted),
        (["tokenize", "--prepared", str(prepared), *codes, *vectors], ["--vectors.trust", '["own_package"]']),
    ]
    for arguments, trust in verbs:
        capsys.readouterr()
        assert main(arguments) == 1, arguments
        assert "names own_package.Own, which is not a part of recpo" in capsys.readouterr().err
        status = main([*arguments, *trust])
        assert status == 0, (arguments, capsys.readouterr().err)


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
    assert main(["train", "--config", str(config), *logger, *options, *stopping]) == 0
    assert list((tmp_path / "x").rglob("metrics.csv"))
    assert not (tmp_path / "run" / "logs").exists()
    assert torch.isfinite(weights(tmp_path / "run", "best")["policy.item_table.weight"]).all()


def test_numbers_of_a_range_are_plain_numbers_once_the_options_are_built(prepared):
    """Checkpoints keep options of the data and are read without unpickling, which knows int and float alone."""
    words = ["--config", "configs/gbpo.yaml", "--data.prepared", str(prepared), "--out", "run", "--seed", "3"]
    options = instantiate(parse_arguments(words))
    pending, numbers = [vars(options)], 0
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list | tuple):
            pending += value
        elif isinstance(value, int | float):
            assert type(value) in (int, float, bool), value
            numbers += 1
        elif type(value).__module__.startswith("recpo.") and hasattr(value, "__dict__"):
            pending.append(vars(value))
    assert numbers > 20
