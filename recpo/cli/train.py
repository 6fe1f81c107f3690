"""``recpo train``: pre-training and alignment are the same verb with another objective."""

from __future__ import annotations

from collections.abc import Sequence

from jsonargparse import ArgumentParser

from recpo.training.configuration import parse_arguments, train_parser
from recpo.workflows.train import run_configuration


def train(arguments: Sequence[str]) -> None:
    """Parses the options, trains, and says where the run lies."""
    configuration = parse_arguments(arguments)
    run = run_configuration(configuration, trust=configuration.trust)
    reached = None if run.monitor is None else run.results.get(run.monitor)
    print(f"{run.root}: finished" + ("" if reached is None else f", {run.monitor} {reached:.4f}"))


def parser() -> ArgumentParser:
    """The parser of the verb."""
    return train_parser()
