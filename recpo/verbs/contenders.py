"""The contenders of ``evaluate``: runs, bundles, factors, lists and baselines, checked before any is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from recpo.artifacts import kind_of
from recpo.base.errors import RecpoError
from recpo.base.features import FeatureArrays, Reads, Side
from recpo.base.types import Features, Histories, Recommendations
from recpo.evaluation.contenders import BASELINES, Baseline, Contender, Loaded, validate_names
from recpo.evaluation.fitted import factors_recommender
from recpo.evaluation.lists import Lists, lists_contender
from recpo.evaluation.measures import Recommender
from recpo.log.prepared import Prepared
from recpo.rewards.factors import Factors
from recpo.serving.bundle import Bundle
from recpo.serving.histories import EncodedHistories
from recpo.training.learned_reward import Checkpoint
from recpo.training.run import FINISHED, RESOLVED, Run
from recpo.training.validation import training_curves

#: A contender: an object, its directory, the name of a baseline, or a ``Contender``, which is used as it is.
Named = Run | Bundle | Factors | Lists | Contender | str | Path


def contenders_of(
    named: Sequence[Named],
    data: Prepared,
    ks: Sequence[int],
    checkpoint: Checkpoint,
    device: torch.device,
    trust: Sequence[str],
    make_baseline: Callable[[Baseline], Contender],
) -> list[Contender]:
    """All contenders, checked before the first one is loaded.

    Raises:
        RecpoError: an entry is not a contender, is unfinished or knows other items; two have the same name; lists
            cannot be read.
    """
    names = _names([path for one in named if (path := directory_of(one)) is not None])
    longest = max(ks)
    found: list[Contender] = []
    for one in named:
        if isinstance(one, Contender):
            found.append(one)
        elif isinstance(one, Lists):
            found.append(lists_contender(one, data, ks))
        elif isinstance(one, Run):
            found.append(_run(names[one.root], one, data, checkpoint, device))
        elif isinstance(one, Factors):
            found.append(_factors("factors", one, "a model in memory", data))
        elif isinstance(one, Bundle):
            found.append(_bundle(names[one.root], one, str(one.root), data, longest))
        elif isinstance(one, str) and one in BASELINES:
            found.append(make_baseline(one))
        else:
            found.append(_from_directory(Path(one), names[Path(one)], data, longest, checkpoint, device, trust))
    validate_names(found)
    if not found:
        raise RecpoError("nothing to evaluate: name at least one run, one bundle or one of the baselines")
    return found


def directory_of(contender: Named) -> Path | None:
    """The directory of a contender; None for a baseline, lists, or a model in memory."""
    if isinstance(contender, Run | Bundle):
        return contender.root
    if isinstance(contender, Lists | Factors | Contender) or contender in BASELINES:
        return None
    return Path(contender)


def _names(paths: Sequence[Path]) -> dict[Path, str]:
    """The last parts of the directories' paths if these differ, else the whole paths."""
    if again := [str(path) for path in paths if paths.count(path) > 1]:
        raise RecpoError(f"the same directory is named twice: {again[0]}")
    names = [path.resolve().name for path in paths]
    return dict(zip(paths, names if len(set(names)) == len(names) else map(str, paths), strict=True))


def _from_directory(
    path: Path,
    name: str,
    data: Prepared,
    longest: int,
    checkpoint: Checkpoint,
    device: torch.device,
    trust: Sequence[str],
) -> Contender:
    kind = kind_of(path)
    if kind in ("run", None) and ((path / FINISHED).is_file() or (path / RESOLVED).is_file()):
        return _run(name, Run.open(path, trust), data, checkpoint, device)
    if kind == "bundle":
        return _bundle(name, Bundle.load(path), str(path), data, longest)
    if kind == "factors":
        return _factors(name, Factors.open(path), str(path), data)
    raise RecpoError(
        f"{path} is neither a run nor a bundle nor a baseline ({', '.join(BASELINES)}): name an output of `recpo "
        "train`, `recpo export` or `recpo factorize`, or a baseline"
    )


def _run(name: str, run: Run, data: Prepared, checkpoint: Checkpoint, device: torch.device) -> Contender:
    run.validate_data(data)
    run.checkpoint(checkpoint)
    facts = {
        "kind": "run",
        "path": str(run.root),
        "checkpoint": checkpoint,
        "weights_sha256": run.weights_checksum(checkpoint) or "",
        "configuration": (run.root / RESOLVED).read_text(encoding="utf-8"),
    }
    return Contender(name, "run", partial(_load_run, name, run, checkpoint, device), facts, training_curves(run.root))


def _load_run(name: str, run: Run, checkpoint: Checkpoint, device: torch.device) -> Loaded:
    policy = run.policy(checkpoint).to(device)
    log_prob = policy.log_prob if policy.has_exact_log_prob else None
    recommender = Recommender(policy.recommend, log_prob, name, scores_are_logp=True)
    return Loaded(recommender, policy.max_history, policy, reads=policy.reads)


def _factors(name: str, factors: Factors, where: str, data: Prepared) -> Contender:
    factors.validate_feedback(data.feedback, data.root)
    factors.validate_items(data.catalog_checksum, data.root)
    facts = {"kind": "factors", "path": where, "facts": str(dict(factors.facts))}
    return Contender(name, "factors", lambda: Loaded(factors_recommender(factors, name), factors.max_history), facts)


def _bundle(name: str, bundle: Bundle, where: str, data: Prepared, longest: int) -> Contender:
    """A bundle, run by ONNX Runtime on the CPU. It ranks, but gives no log-probabilities of given items."""
    bundle.feedback.validate_same(data.feedback, where, data.root)
    expected = data.item_ids().to_external(np.arange(1, data.num_items + 1))
    ids = np.arange(1, len(bundle.items) + 1)
    if len(bundle.items) != data.num_items or not bundle.items.to_external(ids).equals(expected):
        raise RecpoError(f"{where} has other items than {data.root}: name the bundle's own prepared data")
    if bundle.k < min(longest, data.num_items):
        raise RecpoError(
            f"{where} serves lists of up to {bundle.k}, and ks asks for {longest}: name smaller ks, or export the "
            f"bundle again with k {longest}"
        )
    _validate_features(bundle, where, data)
    origin = dict(bundle.manifest.origin)
    facts = {"kind": "bundle", "path": where, "k": bundle.k, "origin": str(origin)}
    facts["weights_sha256"] = origin.get("weights") or ""
    return Contender(name, "bundle", partial(_load_bundle, name, bundle), facts)


def _load_bundle(name: str, bundle: Bundle) -> Loaded:
    length = bundle.manifest.max_history
    reads = bundle.manifest.reads.batches

    def recommend(histories: Histories, k: int, exclude: Tensor | None) -> Recommendations:
        if exclude is None and bundle.manifest.repeats:
            exclude = histories.item_ids.new_zeros(len(histories.item_ids), 1)
        if exclude is None:
            raise RecpoError(
                f"{name}: this bundle never lists items of the history; evaluate its run with exclude_past false, or "
                "export with repeats"
            )
        ids, feedback, times = (
            torch.nn.functional.pad(values, (0, length - values.shape[1])).cpu().numpy()
            for values in (
                histories.item_ids,
                *(_or_zeros(v, histories) for v in (histories.feedback, histories.timestamps)),
            )
        )
        excluded = torch.nn.functional.pad(exclude, (0, int(exclude.shape[1] == 0))).cpu().numpy()
        inputs = EncodedHistories(ids, feedback, excluded, times, *_known(histories, length, reads))
        top_items, scores = bundle.runtime.recommend(inputs, k)
        device = histories.item_ids.device
        return Recommendations(
            torch.from_numpy(top_items.copy()).to(device), torch.from_numpy(scores.copy()).to(device)
        )

    recommender = Recommender(recommend, name=name, scores_are_logp=bundle.scores_are_log_probabilities)
    return Loaded(recommender, length, reads=reads)


def _validate_features(bundle: Bundle, where: str, data: Prepared) -> None:
    """Raises if feature codes or behavior bits of the data have another meaning in the bundle."""
    own, sides = bundle.features, cast(tuple[Side, ...], ("user", "context"))
    wrong = [
        f"{side} features" for side in sides if (one := own.of(side)) and not one.agrees(data.fitted_features(side))
    ]
    if own.behaviors != data.behaviors[: len(own.behaviors)]:
        wrong.append("behaviors")
    if wrong:
        raise RecpoError(
            f"{where} reads {' and '.join(wrong)} that are not those of {data.root}: name the bundle's own prepared "
            "data"
        )


def _known(
    histories: Histories, length: int, reads: Reads
) -> tuple[np.ndarray | None, FeatureArrays | None, FeatureArrays | None]:
    """Behaviors, user features and request features, with the widths that a program expects."""
    missing = length - histories.item_ids.shape[1]
    behaviors, user, context = histories.behaviors, histories.user, histories.context
    if context is not None:
        context = context.map(lambda column: _padded(column, missing))
    return (
        None
        if behaviors is None or not reads.behaviors
        else torch.nn.functional.pad(behaviors, (0, missing)).cpu().numpy(),
        None if user is None or not reads.user else _arrays(user),
        None if context is None or not reads.context else _arrays(context),
    )


def _padded(column: Tensor, missing: int) -> Tensor:
    value = torch.nan if column.is_floating_point() else 0
    return torch.nn.functional.pad(column, (0, 0, 0, missing), value=value)


def _arrays(features: Features) -> FeatureArrays:
    on_cpu = features.map(lambda column: column.cpu())
    lists, vectors = (tuple(one.numpy() for one in part) for part in (on_cpu.lists, on_cpu.vectors))
    return FeatureArrays(on_cpu.codes.numpy(), lists, on_cpu.numbers.numpy(), vectors)


def _or_zeros(values: Tensor | None, histories: Histories) -> Tensor:
    return torch.zeros_like(histories.item_ids) if values is None else values
