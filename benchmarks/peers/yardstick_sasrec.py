"""The yardstick as a contender: ``benchmarks/yardstick.py`` in a plain loop, one window per user.

``--variant allocator`` lets recpo tell the C library to keep freed memory, as ``recpo train`` does: what is left of a
difference then is not the allocator's.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from peers.pace import Histories, Pace, Setting
from torch import Tensor
from yardstick import Yardstick


def windows(histories: Histories, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and next items ``[U, length]`` of everybody's last ``length + 1`` training events, padded right."""
    ids = torch.zeros(len(histories), length, dtype=torch.long)
    targets = torch.zeros_like(ids)
    for user in range(len(histories)):
        events = torch.from_numpy(histories.training(user)[-length - 1 :])
        ids[user, : len(events) - 1], targets[user, : len(events) - 1] = events[:-1], events[1:]
    return ids, targets


@torch.no_grad()
def top_lists(model: Yardstick, histories: Histories, length: int) -> np.ndarray:
    """Ten unseen items for everybody."""
    model.eval()
    lists = []
    for users in torch.arange(len(histories)).split(512):
        ids, last = torch.zeros(len(users), length, dtype=torch.long), []
        for row, user in enumerate(users.tolist()):
            events = torch.from_numpy(histories.whole(user)[-length:])
            ids[row, : len(events)] = events
            last.append(len(events) - 1)
        scores = model(ids)[torch.arange(len(users)), last] @ model.items.weight.T
        scores[:, 0] = -torch.inf
        for row, user in enumerate(users.tolist()):
            scores[row, torch.from_numpy(histories.whole(user))] = -torch.inf
        lists.append(scores.topk(10, 1).indices)
    model.train()
    return torch.cat(lists).numpy()


def main() -> None:
    setting = Setting.parse()
    pace = Pace(setting)
    if setting.variant == "allocator":
        from recpo.training.callbacks import tune_allocator

        tune_allocator()
    torch.manual_seed(setting.seed)
    histories = Histories.read(setting.folder)
    ids, targets = windows(histories, setting.length)
    model = Yardstick(histories.num_items, setting.dim, setting.layers, setting.heads, setting.length, setting.dropout)
    adam = torch.optim.Adam(model.parameters(), lr=setting.rate, betas=(0.9, 0.98), fused=True)
    pace.lists = partial(top_lists, model, histories, setting.length)
    going = True
    while going:
        for rows in torch.randperm(len(ids)).split(setting.batch):
            adam.zero_grad()
            model.loss(ids[rows], targets[rows]).backward()
            adam.step()
            going = pace.stepped(int((targets[rows] > 0).sum()))
            if not going:
                break
    pace.finish(("torch",))


if __name__ == "__main__":
    main()
