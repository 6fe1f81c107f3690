"""``recpo loop``: rounds of serve, prepare, train, evaluate and export on simulated users."""

from __future__ import annotations

from typing import Any

from recpo.cli.verb_results import VerbResult, command
from recpo.verbs.loop import Loop, LoopResult
from recpo.verbs.loop_rounds import Round


def show(verb: Loop, done: LoopResult) -> VerbResult:
    """Prints what each policy was expected to earn and earned; the last bundle is served next."""
    for one in done.outcomes:
        if one.value is not None and one.earned is not None and one.low is not None and one.high is not None:
            print(
                f"policy of round {one.number}: expected {one.value:.4f} ({one.low:.4f} to {one.high:.4f}), "
                f"earned {one.earned:.4f}"
            )
    print(done.report)
    facts = {"outcomes": [one._asdict() for one in done.outcomes]}
    return VerbResult((str(done.root), str(done.report)), command("serve", "--bundle", done.bundle.root), facts)


def watch(verb: Loop) -> dict[str, Any]:
    """Prints a round as soon as it is complete."""
    return {"on_round": _print_round}


def _print_round(one: Round) -> None:
    lists = one.lists
    if (day := one.served) is not None:
        print(
            f"round {one.number}: day {day.day} as served: true value {day.value:.3f} of the oracle's "
            f"{day.oracle_value:.3f} (logging policy {day.logging_value:.3f}), dislikes {day.dislikes:.2%}, "
            f"coverage {day.coverage:.1%}"
        )
    print(
        f"round {one.number}: best lists of the policy{' (warm start)' if one.warm_start else ''}: true value "
        f"{lists.true_reward:.3f} of the oracle's {lists.oracle:.3f}, coverage {lists.coverage:.1%}",
        flush=True,
    )
