"""The facts about a run for the model card of its bundle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from recpo.base.errors import RecpoError
from recpo.evaluation.evaluation import Evaluation
from recpo.log.prepared import Prepared

_METRICS: Final = ("NDCG", "Recall", "HitRate", "MRR", "disliked", "true_reward", "true_dislike")


def data_facts(data: Prepared) -> dict[str, Any]:
    """Period, counts, type of the user ids and column of the item ids of prepared data; ``origin.json`` keeps them."""
    return {
        "boundaries": dict(data.manifest["boundaries"]),
        "splits": dict(data.manifest["counts"]["splits"]),
        "label": data.manifest["label"]["class_path"],
        "time_unit": data.manifest["config"]["columns"]["time_unit"],
        "user_ids": data.user_id_type,
        "item_column": data.item_column,
    }


def card_facts(
    configuration: Mapping[str, Any], facts: Mapping[str, Any], origin: Mapping[str, Any], evaluation: Any = None
) -> dict[str, Any]:
    """The facts of a run.

    Args:
        configuration: its options.
        facts: content of ``run.json``.
        origin: content of ``origin.json``.
        evaluation: what ``evaluation_facts`` found; None = nothing.
    """
    data = configuration.get("data", {}).get("init_args", {})
    said = {
        "objective": _name(configuration.get("objective")),
        "reward": _name(configuration.get("reward")),
        "init_from": _directory(configuration.get("init_from")) or origin.get("tilted", {}).get("run"),
        "seed": configuration.get("seed"),
        "data seed": data.get("seed"),
        "monitor": facts.get("monitor"),
        "results": facts.get("results", {}),
        "data": origin.get("data"),
        "evaluation": evaluation,
    }
    return {name: value for name, value in said.items() if value is not None}


def evaluation_facts(evaluation: Evaluation | Path | str, run: str) -> dict[str, Any]:
    """The metrics of a run, and of the baselines in the same evaluation.

    Args:
        evaluation: the evaluation, or its directory.
        run: name of the run among its contenders.

    Raises:
        RecpoError: not an evaluation, or the run is not among its contenders.
    """
    document = (evaluation if isinstance(evaluation, Evaluation) else Evaluation.open(evaluation)).document
    contenders = {one["name"]: one for one in document["contenders"] if one.get("metrics")}
    if run not in contenders:
        raise RecpoError(
            f"evaluation: {run} is not among its contenders ({', '.join(contenders)}): evaluate the exported run"
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


def _directory(path: Any) -> str | None:
    return None if path is None else Path(str(path)).name
