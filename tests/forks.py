"""Processes that are forked from one that has imported recpo: an import takes eight seconds of a core, a fork none."""

from __future__ import annotations

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torchrec", "recpo.cli.main", "recpo.training.fit", "recpo.sharding.strategy"])
