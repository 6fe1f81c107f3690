"""``recpo train``: pre-trains or aligns a policy; only the objective differs."""

from __future__ import annotations

from collections.abc import Sequence

from jsonargparse import ArgumentParser

from recpo.cli.verb_results import VerbResult, after_reward_model, after_train
from recpo.training.configuration import parse_arguments, train_parser
from recpo.training.run import Run
from recpo.workflows.train import run_configuration


def train(arguments: Sequence[str]) -> VerbResult:
    """Parses the options, trains, and prints the path of the run."""
    configuration = parse_arguments(arguments)
    run = run_configuration(configuration, trust=configuration.trust)
    reached = None if run.monitor is None else run.results.get(run.monitor)
    print(f"{run.root}: finished" + ("" if reached is None else f", {run.monitor} {reached:.4f}"))
    facts = {"monitor": run.monitor, "results": run.results}
    after = after_reward_model if is_reward_model(run) else after_train
    return after(run.root, str(configuration.data.init_args.prepared), facts)


def is_reward_model(run: Run) -> bool:
    """Whether the policy only scores items and makes no lists."""
    return str(run.configuration["objective"]["class_path"]).endswith(("PointwiseReward", "PairwiseReward"))


def parser() -> ArgumentParser:
    """The parser of the verb."""
    return train_parser()
