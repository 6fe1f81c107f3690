"""Cold start: policies with item features against ids alone, in a world with a growing catalog.

    python benchmarks/cold_start.py --work runs/cold_start                # larger than the run of docs/evaluation.md
    python benchmarks/cold_start.py --work runs/cold_start --quick        # a few steps, to see that it runs

For every seed: simulates a world that lives for 15 days and prepares its log twice, with the days before day 13 and
with the days up to day 13 as the training period. Four policies are trained, with ids alone and with the features of
the items beside them (category, author, tags, content), on either; nothing else differs; the last checkpoint counts.

The items that are born on day 13 are new to the first pair; the second pair has had a day of their exposures. At the
start of day 14 every policy ranks these items alone for every user who comes on that day, after the same history,
without items that the user has had. Prints the true value of the best k of them, of the oracle, and of a random choice.
"""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import recpo
from recpo.batches.slates import evaluation_batches
from recpo.evaluation.estimates import estimate
from recpo.log.feature_columns import FeatureColumns
from recpo.policies.item_features import ItemFeatureOptions
from recpo.worlds.log import Simulation
from recpo.worlds.parameters import MILLISECONDS_PER_DAY

BIRTH_DAY = 13  # birth day of the ranked items; lists are made at the start of the next day
CONTENDERS = ("ids", "features")


class Asked(NamedTuple):
    """Users of day 14 in the numbers of the data of one training period, with the items that may be listed."""

    histories: recpo.base.types.Histories
    exclude: torch.Tensor


def iso(parameters, day):
    moment = (parameters.start_ms + day * MILLISECONDS_PER_DAY) / 1000
    return datetime.fromtimestamp(moment, UTC).isoformat()


def world_of(root, seed, options):
    if (root / "world" / "log").is_dir():
        return Simulation.open(root / "world")
    size = {"users": options.users, "items": options.items, "events": options.events}
    return recpo.simulate(root / "world", world="living", days=BIRTH_DAY + 2, seed=seed, overwrite=True, **size)


def prepared(root, world, train_days):
    """The log with ``train_days`` days of training; the validation period begins after them."""
    out, parameters = root / f"prepared-{train_days}", world.truth.preferences.parameters
    if (out / "manifest.json").is_file():
        return recpo.Prepared.open(out)
    test = parameters.start_ms + train_days * MILLISECONDS_PER_DAY + MILLISECONDS_PER_DAY // 2
    split = recpo.TemporalSplit(
        valid_start=iso(parameters, train_days), test_start=datetime.fromtimestamp(test / 1000, UTC).isoformat()
    )
    features = FeatureColumns(available_from="available_from")
    return recpo.prepare(world.log, out, items=world.items, catalog="items", features=features, split=split)


def trained(root, name, data, train_days, seed, options):
    out = root / f"{name}-{train_days}"
    if (out / "run.json").is_file():
        return recpo.Run.open(out)
    policy = partial(
        recpo.CatalogSoftmaxPolicy,
        dim=options.dim,
        layers=1,
        heads=2,
        max_history=50,
        item_features=ItemFeatureOptions(id_dropout=options.id_dropout) if name == "features" else None,
    )
    return recpo.train(
        data,
        policy=policy,
        objective=recpo.Likelihood(positive_only=True),
        advantage=recpo.TernaryAdvantage(positive_fraction=0.25),
        out=out,
        overwrite=True,
        seed=seed,
        **{
            "data.batch_size": 64,
            "data.layout.class_path": "SequenceLayout",
            "data.layout.init_args.history_length": 50,
            "optimizer.class_path": "torch.optim.AdamW",
            "optimizer.init_args.lr": 0.003,
            "optimizer.init_args.weight_decay": 0.01,
            "trainer.max_epochs": options.epochs,
            "trainer.accelerator": "cpu",
        },
    )


def numbers_in(data, items):
    """Internal ids of external ones."""
    return torch.from_numpy(data.item_ids().to_internal(items).astype(np.int64))


def values(root, seed, options):
    """The true value ``[users]`` of the best new items of everybody."""
    world = world_of(root, seed, options)
    truth, day = world.truth, float(BIRTH_DAY + 1)
    data = {days: prepared(root, world, days) for days in (BIRTH_DAY, BIRTH_DAY + 1)}
    born = truth.preferences.items.born
    new = truth.item_ids[born == BIRTH_DAY]
    asking = list(evaluation_batches(data[BIRTH_DAY + 1].root, "valid", 50, 512))
    ids = data[BIRTH_DAY + 1].table("users.parquet", ["user_id"]).column(0).to_numpy()
    users = ids[np.concatenate([batch.user_ids.numpy() for batch in asking])]
    found = {}
    for days, one in data.items():
        known = one.item_ids()
        here = data[BIRTH_DAY + 1].item_ids().to_external(np.arange(1, one.num_items + 1))
        number = torch.cat([torch.zeros(1, dtype=torch.long), numbers_in(one, here)])
        others = numbers_in(one, truth.item_ids[(born <= BIRTH_DAY + 1) & (born != BIRTH_DAY)])
        for name in CONTENDERS:
            policy = trained(root, name, one, days, seed, options).policy("last")
            lists = []
            for batch in asking:
                histories = batch.feedback.histories._replace(item_ids=number[batch.feedback.histories.item_ids])
                past = number[batch.exclude]
                exclude = torch.cat([others.expand(len(past), -1), past], 1)
                with torch.inference_mode():
                    lists.append(policy.recommend(histories, options.k, exclude).item_ids.numpy())
            shown = np.concatenate(lists)
            assert (shown > 0).all(), "every user has k new items left"
            listed = known.to_external(shown.ravel()).to_numpy().reshape(shown.shape)
            assert np.isin(listed, new).all()
            found[name, "never seen" if days == BIRTH_DAY else "after a day"] = truth.top_k_value(users, listed, day)
    worth = truth.expected_reward(users, np.tile(new, (len(users), 1)), day)
    found["random", ""] = worth.mean(axis=1)
    found["oracle", ""] = -np.sort(-worth, axis=1)[:, : options.k].mean(axis=1)
    exposures = world.to_pandas().item_id.isin(new)
    return found, {"seed": seed, "new_items": len(new), "users": len(users), "exposures": int(exposures.sum())}


def shares(found):
    """Of what the policy with features reaches after a day: the value itself, and what it has above random items."""
    mean = {name: float(value.mean()) for name, value in found.items()}
    before, after, random = mean["features", "never seen"], mean["features", "after a day"], mean["random", ""]
    return {"share": before / after, "share_above_random": (before - random) / (after - random)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--users", type=int, default=1000)
    parser.add_argument("--items", type=int, default=1500)
    parser.add_argument("--events", type=int, default=120_000)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--id-dropout", type=float, default=0.2)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.users, options.items, options.events, options.epochs = 80, 300, 6000, 1
    torch.set_num_threads(1)
    for seed in options.seeds:
        found, facts = values(options.work / str(seed), seed, options)
        print(json.dumps(facts | shares(found) | {" ".join(k): float(v.mean()) for k, v in found.items()}), flush=True)
        table = Table(
            title=f"true value of the best {options.k} of {facts['new_items']} new items, {facts['users']} users"
        )
        for column in ("policy", "new items", "true value"):
            table.add_column(column)
        for (name, seen), value in found.items():
            one = estimate(torch.from_numpy(value))
            table.add_row(name, seen, f"{one.mean:.3f} ± {one.half_width:.3f}")
        Console().print(table)


if __name__ == "__main__":
    main()
