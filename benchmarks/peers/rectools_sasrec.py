"""RecTools (0.19) as a contender: ``SASRecModel`` with its softmax loss. One window per user, as it cuts them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytorch_lightning
from peers.pace import Histories, Pace, Setting
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import SASRecModel

SETTING = Setting.parse()
PACE = Pace(SETTING)  # not in the callback: RecTools copies the trainer, callbacks and all


class Paced(pytorch_lightning.Callback):
    """Stops at the end of a turn."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Counts the positions."""
        if not PACE.stepped(int((batch["y"] > 0).sum())):
            trainer.should_stop = True


def paced_trainer() -> pytorch_lightning.Trainer:
    return pytorch_lightning.Trainer(
        max_epochs=-1,
        callbacks=[Paced()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def dataset_of(histories: Histories, *, training: bool) -> Dataset:
    counts = np.diff(histories.offsets)
    users = np.repeat(np.arange(len(counts)), counts)
    from_end = np.repeat(histories.offsets[1:], counts) - np.arange(len(users))
    interactions = pd.DataFrame(
        {
            Columns.User: users,
            Columns.Item: histories.items,
            Columns.Weight: 1.0,
            Columns.Datetime: pd.Timestamp("2000-01-01") + pd.to_timedelta(np.arange(len(users)), unit="s"),
        }
    )
    return Dataset.construct(interactions[from_end > 1] if training else interactions)


def top_lists(model: SASRecModel, histories: Histories) -> np.ndarray:
    """Ten unseen items for everybody, of a model whose training waits."""
    model.is_fitted = True  # else it does not recommend before the end of its training
    found = model.recommend(np.arange(len(histories)), dataset_of(histories, training=False), k=10, filter_viewed=True)
    model.lightning_model.train()
    lists = np.zeros((len(histories), 10), np.int64)
    lists[found[Columns.User], found[Columns.Rank] - 1] = found[Columns.Item]
    return lists


def main() -> None:
    setting = SETTING
    pytorch_lightning.seed_everything(setting.seed)
    histories = Histories.read(setting.folder)
    model = SASRecModel(
        n_blocks=setting.layers,
        n_heads=setting.heads,
        n_factors=setting.dim,
        dropout_rate=setting.dropout,
        session_max_len=setting.length,
        loss="softmax",
        lr=setting.rate,
        batch_size=setting.batch,
        get_trainer_func=paced_trainer,
    )
    PACE.lists = partial(top_lists, model, histories)
    model.fit(dataset_of(histories, training=True))
    PACE.finish(("RecTools", "torch", "pytorch-lightning"))


if __name__ == "__main__":
    main()
