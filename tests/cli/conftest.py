"""Shared fixtures of the verbs' tests: a simulated log, prepared data, two short runs and a bundle."""

from __future__ import annotations

import pytest

SMALL = ["--policy.init_args.dim", "16", "--policy.init_args.layers", "1", "--policy.init_args.max_history", "20"]
SMALL += ["--data.layout.init_args.history_length", "20", "--trainer.max_epochs", "1"]


@pytest.fixture(scope="session")
def road(tmp_path_factory, request):
    """A directory with ``log/``, ``prepared/``, ``run-0/``, ``run-1/`` and ``bundle/``."""
    from recpo.cli.main import main

    root, config = tmp_path_factory.mktemp("road"), request.config.rootpath / "configs" / "pretrain.yaml"
    log, prepared = str(root / "log"), str(root / "prepared")
    sizes = ["--users", "60", "--items", "80", "--events", "3000"]
    assert main(["simulate", "--out", log, *sizes]) == 0
    assert main(["prepare", "--log", f"{log}/log", "--out", prepared]) == 0
    for seed in ("0", "1"):
        options = ["--data.prepared", prepared, "--out", str(root / f"run-{seed}"), "--seed", seed]
        assert main(["train", "--config", str(config), *options, *SMALL]) == 0
    export = ["export", "--run", str(root / "run-0"), "--out", str(root / "bundle")]
    assert main(export) == 0
    return root
