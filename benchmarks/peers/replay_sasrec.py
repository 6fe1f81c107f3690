"""RePlay (replay-rec 0.22) as a contender: ``SasRec`` with its cross-entropy, ``ParquetModule``, Lightning's Trainer.

One window per user, as RePlay's examples have it: a row of the file is a user's last ``length + 1`` events.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning
import numpy as np
import pandas as pd
import torch
from peers.pace import Histories, Pace, Setting
from replay.data import FeatureHint, FeatureSource, FeatureType
from replay.data.nn import ParquetModule, TensorFeatureInfo, TensorFeatureSource, TensorSchema
from replay.nn.lightning import LightningModule
from replay.nn.lightning.optimizer import OptimizerFactory
from replay.nn.sequential import SasRec
from replay.nn.transform.template import make_default_sasrec_transforms


class Paced(lightning.Callback):
    """Stops at the end of a turn."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Counts the positions that the loss counts and that have an event before them."""
        scored = batch["target_padding_mask"].squeeze(-1) & batch["padding_mask"]
        if not self._pace.stepped(int(scored.sum())):
            trainer.should_stop = True


def schema_of(num_items: int, dim: int) -> TensorSchema:
    return TensorSchema(
        [
            TensorFeatureInfo(
                "item_id",
                is_seq=True,
                feature_type=FeatureType.CATEGORICAL,
                embedding_dim=dim,
                padding_value=num_items,
                cardinality=num_items,
                feature_hint=FeatureHint.ITEM_ID,
                feature_sources=[TensorFeatureSource(FeatureSource.INTERACTIONS, "item_id")],
            )
        ]
    )


@torch.no_grad()
def top_lists(model: SasRec, histories: Histories, length: int) -> np.ndarray:
    """Ten unseen items for everybody."""
    model.eval()
    lists, padding = [], histories.num_items
    for users in torch.arange(len(histories)).split(512):
        ids = torch.full((len(users), length), padding)
        for row, user in enumerate(users.tolist()):
            events = torch.from_numpy(histories.whole(user)[-length:] - 1)
            ids[row, -len(events) :] = events
        scores = model(feature_tensors={"item_id": ids}, padding_mask=ids != padding)["logits"]
        for row, user in enumerate(users.tolist()):
            scores[row, torch.from_numpy(histories.whole(user) - 1)] = -torch.inf
        lists.append(scores[:, :padding].topk(10, 1).indices + 1)
    model.train()
    return torch.cat(lists).numpy()


def main() -> None:
    setting = Setting.parse()
    pace = Pace(setting)
    lightning.seed_everything(setting.seed)
    histories = Histories.read(setting.folder)
    rows = [histories.training(user)[-setting.length - 1 :] - 1 for user in range(len(histories))]
    file = setting.folder / "train.parquet"
    pd.DataFrame({"item_id": rows}).to_parquet(file)
    schema = schema_of(histories.num_items, setting.dim)
    data = ParquetModule(
        batch_size=setting.batch,
        metadata={"train": {"item_id": {"shape": setting.length + 1, "padding": histories.num_items}}},
        transforms=make_default_sasrec_transforms(schema),
        train_path=str(file),
    )
    model = SasRec.from_params(
        schema,
        embedding_dim=setting.dim,
        num_heads=setting.heads,
        num_blocks=setting.layers,
        max_sequence_length=setting.length,
        dropout=setting.dropout,
    )
    pace.lists = partial(top_lists, model, histories, setting.length)
    trainer = lightning.Trainer(
        max_epochs=-1,
        callbacks=[Paced(pace)],
        logger=lightning.pytorch.loggers.CSVLogger(setting.folder / "logs"),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        log_every_n_steps=10,
    )
    module = LightningModule(model, OptimizerFactory(learning_rate=setting.rate))
    trainer.fit(module, datamodule=data)
    pace.finish(("replay-rec", "torch", "lightning"))


if __name__ == "__main__":
    main()
