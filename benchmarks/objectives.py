"""True value before and after alignment from the log, for every objective that has a configuration.

    recpo simulate --out demo/log && recpo prepare --log demo/log/log --out demo/fit/prepared
    for s in 0 1 2; do
        recpo train --config configs/pretrain.yaml --data.prepared demo/fit/prepared --seed $s --data.seed $s \
            --out runs/pretrain-$s
    done
    python benchmarks/objectives.py --prepared demo/fit/prepared --truth demo/log/truth --pretrained runs/pretrain-

Prints one JSON line per objective and seed: the true expected reward and true dislike probability of the top-10 lists
(the whole catalog is ranked, the user's earlier items are left out) over the users of the test period, for the policy
that training started from and for the one after ``--steps`` optimizer steps of ``configs/<name>.yaml``. ``half_width``
is that of the paired 95 % interval of the difference over users.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path

import numpy as np
import torch
from verbs import call, configurations

from recpo.batches.slates import evaluation_batches
from recpo.evaluation.true_rewards import true_rewards
from recpo.log.prepared import Prepared
from recpo.training.run import Run
from recpo.verbs.train import train

K = 10


def values(policy, prepared, truth):
    """True reward and dislike probability of every test user's list, ``[2, users]``."""
    rewards = true_rewards(truth, Prepared.open(prepared), "test", [K])
    found = []
    with torch.no_grad():
        for batch in evaluation_batches(prepared, "test", policy.max_history, 512):
            items = policy.recommend(batch.feedback.histories, K, batch.exclude).item_ids
            judged = rewards.of_lists(batch.user_ids, items)
            found.append(torch.stack([judged[f"true_reward@{K}"], judged[f"true_dislike@{K}"]]))
    return torch.cat(found, 1).numpy()


def is_on_policy(files):
    return any("\nrollout:" in file.read_text() for file in files)


def align(name, seed, options):
    """Trains one configuration from one pre-trained policy; returns the JSON line."""
    out = options.out / f"{name}-{seed}"
    shutil.rmtree(out, ignore_errors=True)
    pretrained = Path(f"{options.pretrained}{seed}")
    before = values(Run.open(pretrained).policy(), options.prepared, options.truth)
    started = time.perf_counter()
    arguments = {
        "config": configurations(options.configs, name),
        "data.prepared": options.prepared,
        "init_from": pretrained,
        "out": out,
        "seed": seed,
        "data.seed": seed,
        "trainer.max_steps": options.steps,
        "trainer.max_epochs": -1,
        "trainer.limit_val_batches": 1,
        "trainer.enable_progress_bar": "false",
    }
    if is_on_policy(arguments["config"]):
        arguments |= {"rollout": "null", "reward": "LoggedReward"}
    call(train, **{key.replace(".", "__"): value for key, value in arguments.items()})
    seconds = time.perf_counter() - started
    after = values(Run.open(out).policy("last"), options.prepared, options.truth)
    difference = after[0] - before[0]
    return {
        "objective": name,
        "seed": seed,
        "steps": options.steps,
        "seconds": round(seconds, 1),
        "before": round(float(before[0].mean()), 4),
        "after": round(float(after[0].mean()), 4),
        "difference": round(float(difference.mean()), 4),
        "half_width": round(float(1.96 * difference.std(ddof=1) / np.sqrt(len(difference))), 4),
        "dislike_before": round(float(before[1].mean()), 4),
        "dislike_after": round(float(after[1].mean()), 4),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepared", type=Path, default=Path("demo/fit/prepared"))
    parser.add_argument("--truth", type=Path, default=Path("demo/log/truth"))
    parser.add_argument("--pretrained", default="runs/pretrain-", help="run directories, without their seeds")
    parser.add_argument("--configs", type=Path, default=Path("configs"))
    parser.add_argument("--out", type=Path, default=Path("runs/objectives"))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--objectives", nargs="+", help="names of configurations; default: all but pretrain")
    options = parser.parse_args()
    aligned = [file for file in options.configs.glob("*.yaml") if "--init_from" in file.read_text()]
    listed = sorted(file.stem for file in aligned if "preference:" not in file.read_text())  # lists want candidates
    for seed in options.seeds:
        for name in options.objectives or listed:
            print(json.dumps(align(name, seed, options)), flush=True)


if __name__ == "__main__":
    main()
