"""What the benchmarks share: verbs called as functions, and the shipped configurations by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

from recpo.cli.main import run

ON_POLICY = ("aspo", "cispo", "dapo", "dr_grpo", "ecpo", "grpo", "gspo", "ppo", "ppo_kl_in_reward", "reinforce")
ON_POLICY += ("semantic_grpo",)
PREFERENCE_LISTS = ("dmpo", "dpo", "margin_listwise_dpo", "pairwise_reward", "semantic_softmax_dpo", "simpo")
PREFERENCE_LISTS += ("softmax_dpo", "value_dpo", "value_dpo_kuairand")


QUICK_FACTORS = {"ranks": "[2]", "consumption": "[0]", "sweeps": 5}
QUICK_TRAINING = {"trainer__max_epochs": 1, "trainer__max_steps": 4}


def configurations(folder: Path, name: str) -> list[Path]:
    """The files of a configuration: its base, if it has one, and its own."""
    bases = {"on_policy": ON_POLICY, "preference_lists": PREFERENCE_LISTS, "pretrain": ("features_pretrain",)}
    own = [base for base, names in bases.items() if name in names]
    return [folder / f"{file}.yaml" for file in [*own, name]]


def call(verb: Callable[..., object], **arguments: object) -> None:
    """Runs a verb as the command line does; ``a__b`` is the option ``a.b``, and a list is the option several times."""
    words = []
    for key, value in arguments.items():
        for one in value if isinstance(value, list) else [value]:
            words += [f"--{key.replace('__', '.')}", str(one)]
    with redirect_stdout(sys.stderr):
        run(verb.__name__, words)
