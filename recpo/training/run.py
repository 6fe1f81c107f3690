"""A run directory: what it holds while training, when it counts as finished, and how its policy is loaded again.

::

    run/resolved.yaml      every option of the run; `recpo train --config run/resolved.yaml` repeats it
    run/checkpoints/       best.ckpt (by validation NDCG) and last.ckpt: plain tensors and numbers, weights_only; of a
                           sharded run directories, which every rank writes its part of
    run/logs/              metrics.csv and TensorBoard events
    run/run.json           written last: the run is finished
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser
from torch import Tensor, nn

from recpo.artifacts import write_json
from recpo.contracts import Policy
from recpo.errors import RecpoError
from recpo.training.checkpoints import saved_tensors

RESOLVED, FINISHED, CHECKPOINTS = "resolved.yaml", "run.json", "checkpoints"

PolicyFactory = Callable[[int], Policy]


def checkpoint_path(run: Path, checkpoint: str = "best") -> Path:
    """Where a run keeps the checkpoint called ``best`` or ``last``."""
    return Path(run) / CHECKPOINTS / f"{checkpoint}.ckpt"


def mark_finished(run: Path, policy: Policy, catalog_checksum: str, results: dict[str, float]) -> None:
    """Writes ``run.json``, after which other verbs take the run for a whole one."""
    value = {"num_items": policy.num_items, "catalog_checksum": catalog_checksum, "results": results}
    write_json(Path(run) / FINISHED, value)


def read_finished(run: Path) -> dict[str, Any]:
    """Reads ``run.json``.

    Raises:
        RecpoError: the run is not there or did not end.
    """
    file = Path(run) / FINISHED
    if not file.is_file():
        if (Path(run) / RESOLVED).is_file():
            raise RecpoError(
                f"{run} did not finish: resume it with `recpo train --config {run}/{RESOLVED} --resume true`"
            )
        raise RecpoError(f"{run} is no run directory: {FINISHED} is missing; make one with `recpo train`")
    finished: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return finished


def refuse_other_items(run: Path, catalog_checksum: str, prepared: object) -> None:
    """Raises where a run was not trained on the items of a prepared directory.

    Args:
        run: the run directory.
        catalog_checksum: of the prepared directory.
        prepared: the directory itself, for the message.

    Raises:
        RecpoError: the items differ, or the run did not finish.
    """
    if read_finished(run)["catalog_checksum"] != catalog_checksum:
        raise RecpoError(
            f"{run} was trained on other items than {prepared} holds (items.parquet differs): name the prepared "
            "directory it was trained on"
        )


def load_policy(run: Path, checkpoint: str = "best") -> Policy:
    """Rebuilds the policy of a finished run, in evaluation mode.

    Args:
        run: the run directory.
        checkpoint: ``best`` or ``last``.

    Raises:
        RecpoError: the run did not finish, or the checkpoint does not fit the resolved configuration.
    """
    finished = read_finished(run)
    factory: PolicyFactory = load_option(run, "policy", PolicyFactory)
    policy = factory(finished["num_items"])
    load_weights(policy, checkpoint_path(run, checkpoint))
    return policy.eval()


def load_option(run: Path, name: str, of_type: Any) -> Any:
    """The option ``name`` of a run, built anew from its resolved configuration."""
    configuration = yaml.safe_load((Path(run) / RESOLVED).read_text(encoding="utf-8"))
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument(f"--{name}", type=of_type)
    return parser.instantiate(parser.parse_object({name: configuration[name]}))[name]


def load_weights(module: nn.Module, checkpoint: Path, prefix: str = "policy.") -> None:
    """Copies the weights of the trained policy in ``checkpoint`` into ``module``; nothing is unpickled.

    Args:
        module: the policy, or another part of what was trained.
        checkpoint: the file, or the directory of a sharded run.
        prefix: where the checkpoint keeps the part.

    Raises:
        RecpoError: the file is missing, or a weight is missing, left over, or of another shape.
    """
    saved = saved_tensors(checkpoint)
    weights = {name.removeprefix(prefix): value for name, value in saved.items() if name.startswith(prefix)}
    own, part = module.state_dict(), prefix.rstrip(".")
    faults = [f"{name}: only in the checkpoint" for name in weights.keys() - own.keys()]
    faults += [f"{name}: only in the {part}" for name in own.keys() - weights.keys()]
    faults += [
        f"{name}: {tuple(weights[name].shape)} in the checkpoint, {tuple(own[name].shape)} in the {part}"
        for name in weights.keys() & own.keys()
        if weights[name].shape != own[name].shape
    ]
    if faults:
        listed = "\n  ".join(sorted(faults)[:10])
        raise RecpoError(
            f"{checkpoint} does not fit the {part} ({len(faults)} faults); use that run's {part} options:\n  {listed}"
        )
    # a table without memory of its own takes what it needs when it is sharded
    whole = {n: w if isinstance(w, Tensor) or own[n].is_meta else w.whole() for n, w in weights.items()}
    module.load_state_dict(whole)
