"""``recpo demo``: ``recpo fit`` on a simulated log."""

from __future__ import annotations

import pandas as pd

from recpo.cli.fit import show_decision
from recpo.cli.fit import watch as watch
from recpo.cli.output import console
from recpo.cli.recommend import lists_table
from recpo.cli.verb_results import VerbResult, command
from recpo.verbs.demo import Demo
from recpo.verbs.fit import Decision

_USERS = 3


def show(verb: Demo, done: Decision) -> VerbResult:
    """Prints some lists of the bundle, the leaderboard and the answer; next comes the user's own log."""
    histories = pd.read_parquet(done.root / "prepared" / "histories.parquet")
    some = histories[histories["user_id"].isin(histories["user_id"].unique()[:_USERS])]
    console().print(lists_table(some, done.bundle.recommend(some, k=10), _USERS))
    show_decision(done)
    print(f"everything that the demo wrote is in {verb.out}")
    return VerbResult((str(verb.out), str(done.report)), command("fit", "YOUR_LOG"), {"chosen": done.chosen})
