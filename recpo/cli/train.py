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
    validated = {name: value for name, value in run.results.items() if name.startswith("val/") and value is not None}
    shown = [f", {name} {value:.4f}" for name, value in validated.items()]
    print(f"{run.root}: finished{''.join(shown[:1])}")


def parser() -> ArgumentParser:
    """The parser of the verb."""
    return train_parser()
