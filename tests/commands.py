"""Runs the commands of a document in this process, where everything is imported."""

import shlex

from recpo.cli.main import main


def run_commands(text):
    """Runs every ``recpo VERB ...`` of a block of shell, which has nothing else."""
    lines = [shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines()]
    for program, *words in filter(None, lines):
        assert program == "recpo"
        assert main(words) == 0, words
