"""Cost of item features in training: steps with five categories and a vector of 64 against steps without, in pairs.

    python benchmarks/item_features.py
    python benchmarks/item_features.py --items 1000000 --normalizer sampled --steps 10
    python benchmarks/item_features.py --items 1000000 --normalizer sampled --steps 4 --alone features    # and: ids

Both policies are those of configs/pretrain.yaml, trained by AdamW on the same random histories of a made-up catalog.
They take turns, one step each, so that whatever else the machine does falls on both. One JSON line per normalizer:
median CPU seconds of a step, and the speed with features as a share of that without (median and quartiles of pairs).
With ``--alone`` one of the two is trained by itself, and the line has the peak resident size of the process.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time

import torch

from recpo.base.features import Category, Feature, FeatureSchema, Vector
from recpo.base.feedback import HIGHEST
from recpo.base.types import Features, FeedbackBatch, Histories, Slates
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.policies.item_features import ItemFeatureOptions

CODES = (20, 200, 2000, 50, 8)
WIDTH, LENGTH, BATCH = 64, 50, 128


def policy_of(items: int, normalizer: str, *, features: bool) -> CatalogSoftmaxPolicy:
    """A policy as in configs/pretrain.yaml, with made-up item features or without."""
    torch.manual_seed(0)
    policy = CatalogSoftmaxPolicy(
        items,
        max_history=200,
        attention_length=LENGTH,
        profile=True,
        fold_in=16,
        normalizer=normalizer,  # type: ignore[arg-type]  # argparse has checked it
        sparse=normalizer == "sampled",
        item_features=ItemFeatureOptions() if features else None,
    )
    named: list[Feature] = [Category(f"category_{size}", num_codes=size) for size in CODES]
    policy.set_schema(FeatureSchema(item=(*named, Vector("text", width=WIDTH))))
    if features:
        codes = torch.stack([torch.randint(0, size, (items + 1,)) for size in CODES], 1)
        policy.set_item_features(Features(codes, (), torch.zeros(items + 1, 0), (torch.randn(items + 1, WIDTH),)))
    return policy.train()


class Trainer:
    """A policy and its optimizers; a call is one step."""

    def __init__(self, policy: CatalogSoftmaxPolicy) -> None:
        self.policy, self.steps = policy, 0
        sparse = [table.weight for table in policy.item_tables() if table.sparse]
        dense = [weight for weight in policy.parameters() if not any(weight is other for other in sparse)]
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(dense, lr=1e-3, fused=True)]
        if sparse:
            self.optimizers.append(torch.optim.SparseAdam(sparse, lr=1e-3))

    def __call__(self, batch: FeedbackBatch) -> float:
        """CPU seconds of a step."""
        begin = time.process_time()
        self.steps += 1
        self.policy.begin_step(self.steps)
        loss = -self.policy.log_prob(batch).mean()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return time.process_time() - begin


def batch_of(items: int, size: int) -> FeedbackBatch:
    """Full histories whose every event is scored after the events before it."""
    ids, feedback = torch.randint(1, items + 1, (size, LENGTH)), torch.randint(1, HIGHEST + 1, (size, LENGTH))
    histories = Histories(ids, torch.full((size,), LENGTH), feedback)
    slates = Slates(ids, torch.arange(LENGTH).expand(ids.shape), torch.ones_like(ids, dtype=torch.bool))
    return FeedbackBatch(histories, slates, torch.arange(size))


def measure(items: int, normalizer: str, steps: int, size: int) -> dict[str, object]:
    """Steps in pairs, the first of which do not count."""
    trainers = [Trainer(policy_of(items, normalizer, features=features)) for features in (False, True)]
    pairs = []
    for _ in range(steps + 2):
        batch = batch_of(items, size)
        pairs.append([trainer(batch) for trainer in trainers])
    plain, featured = zip(*pairs[2:], strict=True)
    low, median, high = statistics.quantiles([one / other for one, other in pairs[2:]], n=4)
    return {
        "normalizer": normalizer,
        "items": items,
        "steps": steps,
        "cpu_s_without": round(statistics.median(plain), 4),
        "cpu_s_with": round(statistics.median(featured), 4),
        "relative_speed": round(median, 3),
        "quartiles": [round(low, 3), round(high, 3)],
    }


def alone(items: int, normalizer: str, steps: int, size: int, *, features: bool) -> dict[str, object]:
    """The memory of one policy in training."""
    trainer = Trainer(policy_of(items, normalizer, features=features))
    for _ in range(steps):
        trainer(batch_of(items, size))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return {"normalizer": normalizer, "items": items, "features": features, "peak_mb": round(peak)}


def main() -> None:
    """Parses, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=5000)
    parser.add_argument("--normalizer", choices=["full", "sampled"], nargs="+", default=["full", "sampled"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--alone", choices=["ids", "features"], help="train one, and print its memory")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    items, steps, size = (200, 3, 4) if options.quick else (options.items, options.steps, BATCH)
    for normalizer in options.normalizer:
        if options.alone is None:
            line = measure(items, normalizer, steps, size)
        else:
            line = alone(items, normalizer, steps, size, features=options.alone == "features")
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
