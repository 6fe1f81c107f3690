"""``recpo loop``: rounds of serve, prepare, train, evaluate and export on simulated users."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from recpo.cli.verb_results import VerbResult, after_loop
from recpo.exploration import Exploration
from recpo.simulation.parameters import WORLDS, World
from recpo.workflows.loop import loop as _loop
from recpo.workflows.loop_rounds import Round


def loop(
    out: Path,
    recipe: list[Path],
    rounds: int = 8,
    world: World = "default",
    exploration: Exploration | None = None,
    trust: list[str] = [],  # noqa: B006  jsonargparse prints it
    progress: bool = True,
    **options: Any,
) -> VerbResult:
    """Closes the loop on simulated users: each round trains a policy on the impressions of earlier policies.

    Round 0 simulates a world, prepares its log, trains, exports and evaluates a policy. In every further round, the
    bundle of the previous round first serves the users for a day. Writes ``out/rounds/NN``, ``out/loop.json`` with all
    numbers and ``out/report.html`` (true value, regret, coverage, and the expected and actual earnings of each policy).
    --resume true continues a killed loop, with the same result (docs/loop.md).

    Args:
        out: output directory.
        recipe: training configurations, ``[configs/pretrain.yaml, configs/mpo.yaml]``. The first one trains from
            scratch, or from its own run of the previous round if there is one; each of the others starts from the run
            of the one before it. A FactorReward reads a factorization of the round's log.
        rounds: number of served days, besides round 0.
        world: preset of the simulation's options, see recpo simulate. Other options override it.
        exploration: how the slates of the served days are drawn; null = the best items in order.
        trust: packages, in addition to recpo, whose classes the configurations may name.
        progress: show progress bars on a terminal.
        **options: those of ``recpo.workflows.loop.loop``.
    """
    done = _loop(
        out,
        recipe=recipe,
        rounds=rounds,
        world=world,
        exploration=exploration,
        trust=trust,
        progress=progress,
        on_round=_print_round,
        **options,
    )
    for one in done.outcomes:
        if one.value is not None and one.earned is not None and one.low is not None and one.high is not None:
            print(
                f"policy of round {one.number}: expected {one.value:.4f} ({one.low:.4f} to {one.high:.4f}), "
                f"earned {one.earned:.4f}"
            )
    print(done.report)
    facts = {"outcomes": [one._asdict() for one in done.outcomes]}
    return after_loop(out, done.bundle.root, facts)


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


def defaults(chosen: Namespace) -> dict[str, Any]:
    """The defaults of the other options in the chosen world."""
    return dict(WORLDS[chosen.world])
