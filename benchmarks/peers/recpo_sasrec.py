"""recpo as a contender, on the output of ``recpo prepare``.

``--variant`` is one or more of these, joined by ``+``:

``trainer``   the road of ``recpo train``: data module, ``PreferenceModule``, Lightning's Trainer, its loggers
``loop``      the same batches, policy and objective in a plain loop: what Lightning costs
``last``      one window per user, as the other contenders have it
``every``     every window of every user, recpo's default
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from lightning import Callback
from peers.pace import Histories, Pace, Setting
from torch import Tensor

from recpo.base.types import FeedbackBatch, LogProbs, ObjectiveInputs
from recpo.batches.datamodule import FeedbackDataModule
from recpo.batches.slates import SequenceLayout, evaluation_batches
from recpo.objectives.likelihood import Likelihood
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.training.callbacks import tune_allocator
from recpo.training.module import PreferenceModule
from recpo.training.options import LearningOptions
from recpo.training.trainer import TrainerOptions


class Paced(Callback):
    """Stops at the end of a turn."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: FeedbackBatch, batch_idx: int
    ) -> None:
        """Counts the positions."""
        if not self._pace.stepped(positions_of(batch)):
            trainer.should_stop = True


def positions_of(batch: FeedbackBatch) -> int:
    """Scored positions, without first events, which the other contenders do not score."""
    return int((batch.slates.mask & (batch.slates.visible > 0)).sum())


def with_trainer(policy: CatalogSoftmaxPolicy, data: FeedbackDataModule, setting: Setting, pace: Pace) -> None:
    adam = partial(torch.optim.Adam, lr=setting.rate, betas=(0.9, 0.98), fused=True)
    module = PreferenceModule(policy, LearningOptions(objective=Likelihood(), optimizer=adam, seed=setting.seed))
    # validation and checkpoints are off, as they are in the other contenders; the loggers are on
    options = TrainerOptions(
        max_epochs=-1,
        callbacks=[Paced(pace)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        log_every_n_steps=10,
    )
    options.build(setting.folder / "run").fit(module, datamodule=data)


def with_loop(policy: CatalogSoftmaxPolicy, data: FeedbackDataModule, setting: Setting, pace: Pace) -> None:
    adam = torch.optim.Adam(policy.parameters(), lr=setting.rate, betas=(0.9, 0.98), fused=True)
    batches, objective = data.train_dataloader(), Likelihood()
    policy.train()
    while True:
        for batch in batches:
            adam.zero_grad()
            logp = policy.log_prob(batch)
            objective(ObjectiveInputs(LogProbs(logp, batch.slates.mask[..., None]))).loss.backward()
            adam.step()
            if not pace.stepped(positions_of(batch)):
                return


@torch.no_grad()
def top_lists(policy: CatalogSoftmaxPolicy, prepared: Path, histories: Histories, length: int) -> np.ndarray:
    """Ten unseen items for everybody, in external ids and the users' order."""
    policy.eval()
    items = np.append(0, pq.read_table(prepared / "items.parquet").column("item_id").to_numpy())
    users = pq.read_table(prepared / "users.parquet").column("user_id").to_numpy()
    lists = np.zeros((len(histories), 10), np.int64)
    for batch in evaluation_batches(prepared, "test", length, 512):
        ids: Tensor = policy.recommend(batch.feedback.histories, 10, batch.exclude).item_ids
        lists[users[batch.user_ids.numpy()]] = items[ids.numpy()]
    policy.train()
    return lists


def main() -> None:
    setting = Setting.parse()
    pace = Pace(setting)
    tune_allocator()
    torch.manual_seed(setting.seed)
    prepared, traits = setting.folder / "prepared", setting.variant.split("+")
    layout = SequenceLayout(setting.length, last_window_only="last" in traits)
    data = FeedbackDataModule(prepared, setting.batch, layout, seed=setting.seed)
    policy = CatalogSoftmaxPolicy(
        data.prepared.num_items,
        dim=setting.dim,
        layers=setting.layers,
        heads=setting.heads,
        max_history=setting.length,
        dropout=setting.dropout,
        feedback_levels=0,  # every event is a positive: there is nothing to read
    )
    pace.lists = partial(top_lists, policy, prepared, Histories.read(setting.folder), setting.length)
    (with_trainer if "trainer" in traits else with_loop)(policy, data, setting, pace)
    pace.finish(("recpo", "torch", "lightning"))


if __name__ == "__main__":
    main()
