"""Value of alignment: objectives from one pre-trained policy, with the same number of gradient steps and several seeds.

    python benchmarks/alignment.py --work runs/alignment

Simulates a log, prepares it, fits the reward models of ``--rewards``, and for every seed pre-trains a policy and then
continues it in every way of ``METHODS`` for ``--steps`` optimizer steps: supervised (the likelihood of every exposure,
the pre-training objective, is the baseline), on the log, and on-policy with each of the rewards. Everything runs
through ``recpo train``. What is there already is not made again.

Prints one JSON line per method, reward and seed, and a table: true value and disliked share of the top-10 lists (the
whole catalog is ranked without the user's earlier items) of the users of the test period, the share of the catalog on
any list, the recall of positives in the tail, with the paired difference to continued supervised training and its
Student 95 % interval over the seeds. ``--throughput`` measures what a step costs instead.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.table import Table
from verbs import QUICK_FACTORS, QUICK_TRAINING, call, configurations

from recpo.artifacts.outputs import write_json
from recpo.batches.slates import evaluation_batches
from recpo.evaluation.estimates import estimate_over_seeds
from recpo.evaluation.true_rewards import true_rewards
from recpo.log.prepared import Prepared
from recpo.ops.exposures import held_out_targets
from recpo.ops.ranking import ndcg, ranked_hits, recall
from recpo.training.run import Run
from recpo.training.validation import tail_items
from recpo.verbs.calibrate import calibrate
from recpo.verbs.factorize import factorize
from recpo.verbs.prepare import prepare
from recpo.verbs.simulate import simulate
from recpo.verbs.train import train

K = 10
CONTINUED = "continued supervised"
METHODS = {
    CONTINUED: "pretrain",
    "supervised on positives": "likelihood_positives",
    "GBPO, log": "gbpo",
    "softmax-DPO, log": "softmax_dpo",
    "REINFORCE": "reinforce",
    "PPO": "ppo",
    "GRPO": "grpo",
    "Dr.GRPO": "dr_grpo",
    "DAPO": "dapo",
    "GSPO": "gspo",
    "ASPO": "aspo",
    "ECPO": "ecpo",
    "CISPO": "cispo",
    "iterative DPO": "iterative_dpo",
}
REWARDS = {
    "factors, bound 1": ("variational", 1.0),
    "factors": ("variational", 0.0),
    "als, bound 2": ("als", 2.0),
    "als": ("als", 0.0),
    "learned": None,
}
METRICS = ("true value", "disliked", "coverage", "tail recall", "NDCG")


def world(options):
    log, prepared = options.work / "log", options.work / "prepared"
    if not (prepared / "manifest.json").is_file():
        size = {"users": options.users, "items": options.items, "events": options.events}
        call(simulate, out=log, seed=options.world_seed, **size)
        call(prepare, log=log / "log", out=prepared)
    return prepared, log / "truth"


def start(seed, prepared, options):
    """The pre-trained policy of a seed."""
    pretrained = options.work / f"pretrain-{seed}"
    quick = QUICK_TRAINING if options.quick else {}
    common = {"data__prepared": prepared, "seed": seed, "data__seed": seed, "trainer__enable_progress_bar": "false"}
    if not (pretrained / "run.json").is_file():
        call(train, config=configurations(options.configs, "pretrain"), out=pretrained, **common, **quick)
    return pretrained


def reward_of(name, seed, prepared, options):
    """A reward model as ``recpo train`` takes it."""
    if REWARDS[name] is not None:
        method, bound = REWARDS[name]
        factors = options.work / f"factors-{method}"
        if not factors.is_dir():
            own = QUICK_FACTORS if options.quick else {}
            call(factorize, prepared=prepared, method=method, out=factors, **own)
        return {"class_path": "FactorReward", "init_args": {"factors": str(factors), "lower_bound": bound}}
    run = options.work / f"reward-{seed}"
    if not (run / "calibration.json").is_file():
        own = {"data__prepared": prepared, "seed": seed, "data__seed": seed, "trainer__enable_progress_bar": "false"}
        own |= QUICK_TRAINING if options.quick else {}
        first = start(seed, prepared, options)
        call(train, config=configurations(options.configs, "reward_model"), init_from=first, out=run, **own)
        call(calibrate, rewards=run, prepared=prepared)
    return {"class_path": "LearnedReward", "init_args": {"run": str(run), "grade_weight": 1.0, "dislike_cost": 1.0}}


def reads_reward(name, options):
    """Whether a method learns from a reward model; the others learn from the log."""
    files = configurations(options.configs, METHODS[name])
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    return "\nreward:" in text and "LoggedReward" not in text


def align(name, reward, seed, prepared, truth, options):
    """Continues one policy in one way; returns its metrics and the seconds that training took."""
    kind = METHODS[name] if reward is None else f"{METHODS[name]}-{reward.replace(', ', '-').replace(' ', '')}"
    out = options.work / f"{kind}-{options.steps}-{seed}"
    kept = out.with_suffix(".json")
    if kept.is_file():
        return json.loads(kept.read_text())
    pretrained = start(seed, prepared, options)
    config = configurations(options.configs, METHODS[name])
    arguments = {
        "config": config,
        "data__prepared": prepared,
        "init_from": pretrained,
        "out": out,
        "overwrite": "true",
        "seed": seed,
        "data__seed": seed,
        "trainer__max_steps": options.steps,
        "trainer__max_epochs": -1,
        "trainer__limit_val_batches": 0,
        "trainer__num_sanity_val_steps": 0,
        "trainer__enable_progress_bar": "false",
        "patience": "null",
    }
    if options.learning_rate is not None:
        arguments["optimizer__init_args__lr"] = options.learning_rate
    if reward is not None:
        arguments["reward"] = json.dumps(reward_of(reward, seed, prepared, options))
    started = time.perf_counter()
    call(train, **arguments)
    seconds = time.perf_counter() - started
    metrics = measured(Run.open(out).policy("last"), prepared, truth) | {"seconds": round(seconds, 1)}
    shutil.rmtree(out)
    write_json(kept, metrics)
    return metrics


def measured(policy, prepared, truth):
    """The metrics of the top-10 lists of all users of the test period."""
    data = Prepared.open(prepared)
    judge = true_rewards(truth, data, "test", [K])
    tail = tail_items(torch.from_numpy(data.item_counts()))
    shown, per_user = torch.zeros(data.num_items + 1, dtype=torch.bool), []
    with torch.no_grad():
        for batch in evaluation_batches(prepared, "test", policy.max_history, 512):
            items = policy.recommend(batch.feedback.histories, K, batch.exclude).item_ids
            judged = judge.of_lists(batch.user_ids, items)
            targets = held_out_targets(batch).without(batch.exclude)
            hits = ranked_hits(items, targets.item_ids, targets.positive)
            of_tail = ranked_hits(items, targets.item_ids, targets.positive & tail[targets.item_ids])
            columns = [judged[f"true_reward@{K}"], judged[f"true_dislike@{K}"]]
            per_user.append(torch.stack([*columns, recall(of_tail, [K])[:, 0], ndcg(hits, [K])[:, 0]]))
            shown[items] = True
    value, disliked, tail_recall, ranking = (float(row[~row.isnan()].mean()) for row in torch.cat(per_user, 1))
    coverage = float(shown[1:].double().mean())
    return dict(zip(METRICS, (value, disliked, coverage, tail_recall, ranking), strict=True))


def table(results, seeds, steps):
    """Means over seeds, and paired differences to continued supervised training."""
    shown = Table(title=f"test period, {len(seeds)} seeds, {steps} gradient steps from the same pre-trained policies")
    for column in ("policy", *METRICS, "true value - continued supervised", "coverage / continued supervised"):
        shown.add_column(column, justify="left" if column == "policy" else "right")
    baseline = results.get(CONTINUED)
    for name, by_seed in results.items():
        cells = [f"{np.mean([by_seed[seed][metric] for seed in seeds]):.4f}" for metric in METRICS]
        if baseline is None or name == CONTINUED:
            shown.add_row(name, *cells, "", "")
            continue
        difference = estimate_over_seeds([by_seed[s]["true value"] - baseline[s]["true value"] for s in seeds])
        ratio = np.mean([by_seed[s]["coverage"] / baseline[s]["coverage"] for s in seeds])
        shown.add_row(name, *cells, f"{difference.mean:+.4f} ± {difference.half_width:.4f}", f"{ratio:.2f}")
    Console(width=160).print(shown)


class StepTimes(Callback):
    """Milliseconds from the end of one step to the end of the next, data included, and a profile of them."""

    def __init__(self):
        StepTimes.latest = self
        self.ends, self.positions = [], []
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """Notes the time; profiles eight steps after those that are timed."""
        self.ends.append(time.perf_counter())
        self.positions.append(int(batch.slates.mask.sum()))
        if batch_idx == 23:
            self.profiler.start()
        if batch_idx == 31:
            self.profiler.stop()

    @property
    def milliseconds(self):
        """Of every timed step but the first."""
        return 1000 * np.diff(self.ends[:24])


def throughput(prepared, options):
    """Prints what a step costs: pre-training, GRPO on the log, GRPO with its rollout on first and later visits."""
    pretrained = start(options.seeds[0], prepared, options)
    reward = json.dumps(reward_of(options.rewards[0], options.seeds[0], prepared, options))
    contenders = {
        "pre-training": {"config": configurations(options.configs, "pretrain")},
        "GRPO, log": {"config": configurations(options.configs, "grpo"), "rollout": "null"},
        "GRPO, rollout": {"config": configurations(options.configs, "grpo")},
    }
    for name, arguments in contenders.items():
        out = options.work / "throughput"
        learned = {} if name == "pre-training" else {"reward": reward}
        arguments |= {"data__prepared": prepared, "init_from": pretrained, "out": out, "overwrite": "true", **learned}
        arguments |= {"trainer__max_steps": 33, "trainer__max_epochs": -1, "trainer__limit_val_batches": 0}
        arguments |= {"trainer__num_sanity_val_steps": 0, "trainer__enable_progress_bar": "false"}
        call(train, **arguments, trainer__callbacks=json.dumps([{"class_path": "alignment.StepTimes"}]))
        steps = StepTimes.latest
        line = {"step": name, "median ms": round(float(np.median(steps.milliseconds)), 1)}
        line["logged positions per second"] = round(1000 * np.mean(steps.positions[1:24]) / np.mean(steps.milliseconds))
        if name == "GRPO, rollout":  # a phase is four first visits and four later ones
            first = (np.arange(1, 24) % 8) < 4
            line["ms of first visits"] = round(float(np.median(steps.milliseconds[first])), 1)
            line["ms of later visits"] = round(float(np.median(steps.milliseconds[~first])), 1)
            line["candidates per second"] = round(1000 * 128 * 64 / np.mean(steps.milliseconds))
        print(json.dumps(line), flush=True)
        print(
            steps.profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=10, max_name_column_width=48)
        )
        shutil.rmtree(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/alignment"))
    parser.add_argument("--configs", type=Path, default=Path("configs"))
    parser.add_argument("--users", type=int, default=2000)
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument(
        "--world-seed", type=int, default=0, help="of the simulation; the configurations were made on 0"
    )
    parser.add_argument("--steps", type=int, default=846, help="846 are three epochs of an on-policy file")
    parser.add_argument("--learning-rate", type=float, help="of every method, in place of that of its file")
    parser.add_argument("--rewards", nargs="+", choices=REWARDS, default=[next(iter(REWARDS))])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--throughput", action="store_true", help="measure steps instead of values")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--quick", action="store_true", help="a tiny world and few steps, to see that it runs")
    options = parser.parse_args()
    if options.quick:
        options.users, options.items, options.events = 80, 60, 5000
        options.steps, options.seeds = 4, options.seeds[:2]
    prepared, truth = world(options)
    if options.throughput:
        throughput(prepared, options)
        return
    results = {}
    for name in ["pre-trained", *options.methods]:
        learns = name != "pre-trained" and reads_reward(name, options)
        for reward in options.rewards if learns else [None]:
            shown = name if reward is None else f"{name}, {reward}"
            results[shown] = {}
            for seed in options.seeds:
                if name == "pre-trained":
                    metrics = measured(Run.open(start(seed, prepared, options)).policy(), prepared, truth)
                else:
                    metrics = align(name, reward, seed, prepared, truth, options)
                results[shown][seed] = metrics
                print(json.dumps({"policy": name, "reward": reward, "seed": seed, **metrics}), flush=True)
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), "cores": os.cpu_count()}))
    if len(options.seeds) > 1:
        table(results, options.seeds, options.steps)


if __name__ == "__main__":
    sys.modules["alignment"] = sys.modules["__main__"]  # where the trainer looks for StepTimes
    main()
