"""What serving makes of a trained run: its lists, its scores, and what its bundle says about where it comes from.

A run knows its policy, its items and its features (``recpo.training.run``); this module reads them, so that training
needs nothing of serving.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from recpo.base.contracts import Policy
from recpo.base.errors import RecpoError
from recpo.base.frames import Frame
from recpo.serving.export import PolicyFacts
from recpo.serving.histories import HistoryReader
from recpo.serving.recommending import score_candidates
from recpo.serving.runtimes import PolicyRuntime
from recpo.training.run import Run, kept_features

if TYPE_CHECKING:
    import pandas as pd

_METRICS: Final = ("NDCG", "Recall", "HitRate", "MRR", "disliked", "true_reward", "true_dislike")


def runtime_of(run: Run) -> tuple[PolicyRuntime, HistoryReader]:
    """What ranks and scores with the best checkpoint of a run, and reads the histories for it."""
    policy = run.policy()
    features = kept_features(policy, run.root)
    reader = HistoryReader(run.items, run.feedback, policy.max_history, policy.reads_timestamps, features)
    return PolicyRuntime(policy), reader


def score(
    run: Run | Path | str,
    histories: Frame,
    candidates: Frame,
    *,
    user_features: Frame | None = None,
    context: Frame | None = None,
    trust: Sequence[str] = (),
) -> pd.DataFrame:
    """Log-probabilities of given items under the best checkpoint of a run. Of a bundle: ``Bundle.score``.

    Args:
        run: the run, or its directory.
        histories: raw events, one per row, as in ``recpo.recommend``.
        candidates: ``user_id`` and ``item_id``.
        user_features: ``user_id`` and columns as in the prepared user table, if the policy reads it.
        context: ``user_id`` and the features of the current requests, if the policy reads them.
        trust: packages, in addition to recpo, whose classes the configuration of the run may name.

    Returns:
        ``user_id``, ``item_id``, ``score``, in the order of the candidates; nan for unknown items.
    """
    runtime, reader = runtime_of(Run.open(run, trust))
    return score_candidates(
        runtime, reader, histories, candidates, user_features=user_features, context=context
    ).to_pandas()


def facts_of(run: Run, policy: Policy, checkpoint: str, measured: Mapping[str, Any] | None = None) -> PolicyFacts:
    """What a bundle keeps of a run.

    Args:
        run: the run.
        policy: its policy.
        checkpoint: which of its checkpoints.
        measured: what ``evaluation_facts`` found, for the model card; None = nothing.
    """
    data = run.origin.get("data", {})
    origin = {
        "run": run.root.resolve().name,
        "checkpoint": checkpoint,
        "weights": run.weights_checksum(checkpoint),
        "catalog_checksum": run.catalog_checksum,
        "user_ids": data.get("user_ids"),
        "item_column": data.get("item_column"),
    }
    return PolicyFacts(
        run.feedback,
        kept_features(policy, run.root),
        run.configuration["policy"].get("init_args", {}),
        origin,
        card_facts(run.configuration, run.origin, run.results, run.monitor, measured),
    )


def card_facts(
    configuration: Mapping[str, Any],
    origin: Mapping[str, Any],
    results: Mapping[str, float | None],
    monitor: str | None,
    evaluation: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The facts about a run for the model card of its bundle.

    Args:
        configuration: its options.
        origin: content of ``origin.json``.
        results: its last metrics.
        monitor: the metric that selected its best checkpoint.
        evaluation: what ``evaluation_facts`` found; None = nothing.
    """
    data, base = configuration.get("data", {}).get("init_args", {}), configuration.get("init_from")
    said = {
        "objective": _name(configuration.get("objective")),
        "reward": _name(configuration.get("reward")),
        "init_from": Path(str(base)).name if base is not None else origin.get("tilted", {}).get("run"),
        "seed": configuration.get("seed"),
        "data seed": data.get("seed"),
        "monitor": monitor,
        "results": results,
        "data": origin.get("data"),
        "evaluation": evaluation,
    }
    return {name: value for name, value in said.items() if value is not None}


def evaluation_facts(document: Mapping[str, Any], run: str) -> dict[str, Any]:
    """The metrics of a run, and of the baselines in the same evaluation.

    Args:
        document: ``Evaluation.document``.
        run: name of the run among its contenders.

    Raises:
        RecpoError: the run is not among its contenders.
    """
    contenders = {one["name"]: one for one in document["contenders"] if one.get("metrics")}
    if run not in contenders:
        raise RecpoError(
            f"evaluation: {run} is not among its contenders ({', '.join(contenders)}): evaluate the exported run",
            code="unknown_name",
            field="evaluation",
        )
    k = document["setting"]["ks"][0]
    names = [f"{name}@{k}" for name in _METRICS if f"{name}@{k}" in contenders[run]["metrics"]]
    baselines = [name for name, one in contenders.items() if one.get("kind") == "baseline" and name != run]
    return {
        "split": document["setting"]["split"],
        "users": contenders[run]["counts"]["users"],
        "names": names,
        "metrics": {name: {key: contenders[name]["metrics"].get(key) for key in names} for name in (run, *baselines)},
    }


def _name(part: Any) -> str | None:
    path = part.get("class_path") if isinstance(part, Mapping) else None
    return None if path is None else str(path).rpartition(".")[2]
