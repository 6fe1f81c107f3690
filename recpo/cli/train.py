"""``recpo train``: pre-trains or aligns a policy; only the objective differs."""

from __future__ import annotations

from recpo.cli.verb_results import VerbResult, command, evaluation_of
from recpo.training.run import Run
from recpo.verbs.train import Train


def show(verb: Train, run: Run) -> VerbResult:
    """Prints the path of the run; it is evaluated next, or calibrated if it is a reward model."""
    reached = None if run.monitor is None else run.results.get(run.monitor)
    print(f"{run.root}: finished" + ("" if reached is None else f", {run.monitor} {reached:.4f}"))
    for sentence in run.advice:
        print(f"warning: {sentence}")
    prepared = str(verb.configuration.data.init_args.prepared)
    following = evaluation_of(run.root, prepared)
    if is_reward_model(run):
        following = command("calibrate", "--prepared", prepared, "--rewards", run.root)
    return VerbResult(
        (str(run.root),), following, {"monitor": run.monitor, "results": run.results, "advice": run.advice}
    )


def is_reward_model(run: Run) -> bool:
    """Whether the policy only scores items and makes no lists."""
    return str(run.configuration["objective"]["class_path"]).endswith(("PointwiseReward", "PairwiseReward"))
