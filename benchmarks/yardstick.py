"""The practical limit for sequential training: SASRec in 60 lines of plain torch, nothing of recpo.

Pre-norm blocks with fused attention, right padding, cross-entropy on valid positions only, fused Adam, one window per
user. ``python benchmarks/yardstick.py`` prints one JSON line: target positions per second on random sequences of the
shape of MovieLens-1M.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.rate = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        b, h, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, h, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, h, d)
        x = x + F.dropout(self.out(a), self.rate, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.rate, self.training)


class Yardstick(nn.Module):
    """SASRec with a tied output table and full cross-entropy."""

    def __init__(self, items: int, dim: int = 64, layers: int = 2, heads: int = 2, length: int = 50, rate: float = 0.2):
        super().__init__()
        self.items, self.position = nn.Embedding(items + 1, dim, padding_idx=0), nn.Embedding(length, dim)
        nn.init.normal_(self.items.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        self.blocks, self.norm, self.rate = (
            nn.ModuleList(Block(dim, heads, rate) for _ in range(layers)),
            nn.LayerNorm(dim),
            rate,
        )

    def forward(self, ids: Tensor) -> Tensor:  # noqa: D102
        x = F.dropout(self.items(ids) + self.position.weight[: ids.shape[1]], self.rate, self.training)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:  # noqa: D102
        valid = targets > 0
        return F.cross_entropy(self(ids)[valid] @ self.items.weight.T, targets[valid])


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), fused=True)


def sequences(users: int, length: int, items: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Right-padded inputs and next items ``[users, length]``; lengths as in MovieLens-1M (least 18, median 96)."""
    generator = torch.Generator().manual_seed(seed)
    counts = (18 + torch.empty(users).log_normal_(4.4, 1.0, generator=generator)).clamp_max(length).long()
    ids = torch.randint(1, items + 1, (users, length + 1), generator=generator)
    ids = ids * (torch.arange(length + 1) <= counts[:, None])
    return ids[:, :-1] * (ids[:, 1:] > 0), ids[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("steps", 30), ("batch", 128), ("length", 50), ("items", 3416), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = Yardstick(args.items, length=args.length)
    adam = optimizer(model)
    seconds, positions = [], []
    for step in range(args.steps + 3):
        ids, targets = sequences(args.batch, args.length, args.items, step)
        start = time.perf_counter()
        adam.zero_grad()
        model.loss(ids, targets).backward()
        adam.step()
        seconds.append(time.perf_counter() - start)
        positions.append(int((targets > 0).sum()))
    rates = sorted(count / second for count, second in zip(positions[3:], seconds[3:], strict=True))
    print(json.dumps({
        "contender": "yardstick", "torch": torch.__version__, "threads": args.threads,
        "positions_per_s": round(statistics.median(rates)), "min": round(rates[0]), "max": round(rates[-1]),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
