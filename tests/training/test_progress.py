"""Progress messages of a run without a terminal."""

import re
from functools import partial

from recpo.batches.slates import SequenceLayout
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.training import trainer as trainer_module
from recpo.verbs.train import train

EPOCH_LINE = r"(?=.{,80}$)epoch 0  step 6  train/loss \d+\.\d{4}  val/NDCG@10 0\.\d{4}  .*"


class Clock:
    """Every look at it takes ten seconds."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 10.0
        return self.now


def lines_of(prepared, out, capfd, epochs=1):
    train(
        prepared,
        out=out,
        policy=partial(CatalogSoftmaxPolicy, dim=8, layers=1, heads=1, max_history=12),
        trainer={"max_epochs": epochs, "limit_train_batches": 6, "accelerator": "cpu", "logger": False},
        **{"data.layout": SequenceLayout(12), "data.batch_size": 8, "allocator": False, "progress": True},
    )
    return capfd.readouterr().out.splitlines()


def test_lines_appear_in_mid_epoch_with_the_time_that_is_left(prepared, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(trainer_module.time, "monotonic", Clock())
    *lines, last = lines_of(prepared, tmp_path / "run", capfd)
    assert 1 <= len(lines) < 6  # not one for every batch
    for line in lines:
        assert re.fullmatch(r"epoch 0  batch [1-6]/6  \d+\.\d/s, \d:\d\d:\d\d left  train/loss \d+\.\d{4}", line)
    assert re.fullmatch(EPOCH_LINE, last)


def test_a_short_epoch_has_one_line(prepared, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(trainer_module, "LINE_SECONDS", 1e9)
    (line,) = lines_of(prepared, tmp_path / "run", capfd)
    assert re.fullmatch(EPOCH_LINE, line)


def test_the_rate_of_a_later_epoch_is_its_own(prepared, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(trainer_module.time, "monotonic", Clock())
    lines = lines_of(prepared, tmp_path / "run", capfd, epochs=2)
    rates = [float(re.search(r"  (-?\d+\.\d)/s", line)[1]) for line in lines if line.startswith("epoch 1  batch")]
    assert rates
    assert min(rates) >= 0


def test_the_line_of_an_epoch_shows_the_loss_the_monitor_and_what_else_fits():
    metrics = {f"val/metric_{number}": 0.5 for number in range(8)} | {"val/AUC_other": 0.75, "train/loss": 12.5}
    line = trainer_module.epoch_line(12, 345_678, metrics, "val/AUC_other")
    assert line.startswith("epoch 12  step 345678  train/loss 12.5000  val/AUC_other 0.7500")
    assert len(line) <= 80
    assert trainer_module.epoch_line(0, 1, {"train/loss": 1.0}, "val/AUC_other") == "epoch 0  step 1  train/loss 1.0000"
