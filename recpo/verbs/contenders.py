"""The contenders that are runs, bundles, factors, lists and baselines, checked before any is loaded.

They are named for ``evaluate``, and re-ranked (every run, bundle and factor model with every method). Baselines and
factors as policies, for ``recommend``, ``export`` and ``tilt``.
"""

import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, cast, get_args

import numpy as np
import torch
from torch import Tensor

from recpo.artifacts.checksums import kind_of
from recpo.base.contracts import Policy, StatePolicy
from recpo.base.errors import RecpoError, validate_range
from recpo.base.feature_encoding import FittedFeatures, PolicyFeatures
from recpo.base.features import Reads, Side
from recpo.base.types import Histories, Recommendations
from recpo.evaluation.contenders import (
    BASELINES,
    Baseline,
    BaselineCache,
    BaselineOptions,
    Contender,
    Lists,
    baseline,
    baseline_model,
    lists_contender,
    loaded_model,
    reranked_contender,
    validate_names,
)
from recpo.evaluation.measures import Recommender
from recpo.lists.reranking import FloatArray, Reranker, RerankOptions
from recpo.log.prepared import Prepared
from recpo.policies.baseline import BaselinePolicy, FactorPolicy, options_of
from recpo.policies.tilted import PolicyWithBase
from recpo.rewards.factors import Factors
from recpo.serving.bundle import Bundle, bundle_item_vectors
from recpo.serving.export import grows
from recpo.serving.histories import EncodedHistories, HistoryReader
from recpo.serving.saved_policy import PolicyRuntime
from recpo.training.learned_reward import Checkpoint
from recpo.training.run import Run, training_curves
from recpo.training.tilting import assign_factors
from recpo.verbs.verb import compute_device

#: A contender: an object, its directory, the name of a baseline, or a ``Contender``, which is used as it is.
Named = Run | Bundle | Factors | Lists | Contender | str | Path


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How runs are loaded, and where models run."""

    checkpoint: Checkpoint = "best"
    """which checkpoint of the runs"""
    device: str = "auto"
    """where models run: auto (a GPU if there is one), cpu, cuda, cuda:1 and so on"""
    trust: Sequence[str] = ()
    """packages, in addition to recpo, whose classes the configurations of the runs may name"""


def contenders_of(
    named: Sequence[Named],
    data: Prepared,
    ks: Sequence[int],
    options: ModelOptions = ModelOptions(device="cpu"),
    baseline_options: BaselineOptions = BaselineOptions(),  # noqa: B008  frozen
    cache: BaselineCache = BaselineCache(),  # noqa: B008  frozen
    progress: bool = False,
) -> list[Contender]:
    """All contenders, checked before the first one is loaded.

    Args:
        named: what to compare.
        data: prepared data.
        ks: list lengths.
        options: how runs are loaded.
        baseline_options: options of the baselines.
        cache: where fitted baselines are kept.
        progress: show a progress bar on a terminal, for baselines that are fitted.

    Raises:
        RecpoError: an entry is not a contender, is unfinished or knows other items; two have the same name; lists
            cannot be read.
    """
    names = directory_names([path for one in named if (path := directory_of(one)) is not None])
    found: list[Contender] = []
    for one in named:
        path = directory_of(one)
        name, where = ("factors", "a model in memory") if path is None else (names[path], str(path))
        opened = _opened(path, options.trust) if isinstance(one, str | Path) and path is not None else one
        if isinstance(opened, Contender):
            found.append(opened)
        elif isinstance(opened, Lists):
            found.append(lists_contender(opened, data, ks))
        elif isinstance(opened, Run):
            found.append(_run(name, opened, data, options))
        elif isinstance(opened, Bundle):
            found.append(_bundle(name, opened, where, data, max(ks)))
        elif isinstance(opened, Factors):
            found.append(_factors(name, opened, where, data))
        else:
            found.append(baseline(cast(Baseline, opened), data, baseline_options, cache, progress))
    validate_names(found)
    if not found:
        raise RecpoError(
            "nothing to evaluate: name at least one run, one bundle or one of the baselines",
            code="empty",
            field="contenders",
        )
    return found


def directory_of(contender: Named) -> Path | None:
    """The directory of a contender; None for a baseline, lists, or a model in memory."""
    if isinstance(contender, Run | Bundle):
        return contender.root
    if isinstance(contender, Lists | Factors | Contender) or contender in BASELINES:
        return None
    return Path(contender)


def directory_names(paths: Sequence[Path]) -> dict[Path, str]:
    """The last parts of the directories' paths if these differ, else the whole paths.

    Raises:
        RecpoError: a directory is named twice.
    """
    if again := [str(path) for path in paths if paths.count(path) > 1]:
        raise RecpoError(f"the same directory is named twice: {again[0]}", code="duplicate", field=again[0])
    names = [path.resolve().name for path in paths]
    return dict(zip(paths, names if len(set(names)) == len(names) else map(str, paths), strict=True))


def _opened(path: Path, trust: Sequence[str]) -> Run | Bundle | Factors:
    kind = kind_of(path)
    if kind in ("run", None) and ((path / Run.FINISHED).is_file() or (path / Run.RESOLVED).is_file()):
        return Run.open(path, trust)
    if kind == "bundle":
        return Bundle.open(path)
    if kind == "factors":
        return Factors.open(path)
    raise RecpoError(
        f"{path} is neither a run nor a bundle nor a baseline ({', '.join(BASELINES)}): name an output of `recpo "
        "train`, `recpo export` or `recpo factorize`, or a baseline",
        code="wrong_file",
        field=str(path),
    )


def _run(name: str, run: Run, data: Prepared, options: ModelOptions) -> Contender:
    run.validate_data(data)
    run.checkpoint(options.checkpoint)
    facts = {
        "kind": "run",
        "path": str(run.root),
        "checkpoint": options.checkpoint,
        "weights_sha256": run.weights_checksum(options.checkpoint) or "",
        "configuration": (run.root / Run.RESOLVED).read_text(encoding="utf-8"),
    }
    return Contender(name, "run", partial(_load_run, name, run, options), facts, training_curves(run.root))


def _load_run(name: str, run: Run, options: ModelOptions) -> Recommender:
    policy = run.policy(options.checkpoint).to(compute_device(options.device))
    log_prob = policy.log_prob if policy.has_exact_log_prob else None
    return Recommender(
        policy.recommend,
        log_prob,
        name,
        scores_are_logp=True,
        max_history=policy.max_history,
        reads=policy.reads,
        policy=policy,
    )


def _factors(name: str, factors: Factors, where: str, data: Prepared) -> Contender:
    validate_factors(factors, data)
    facts = {"kind": "factors", "path": where, "facts": str(dict(factors.facts))}
    return Contender(name, "factors", partial(loaded_model, factors, name), facts)


def validate_factors(factors: Factors, data: Prepared, sides: Sequence[Side] = ("user",)) -> None:
    """Raises ``RecpoError`` if factors have other grades, items or features of these ``sides`` than the data."""
    factors.validate_feedback(data.feedback, data.root)
    factors.validate_items(data.catalog_checksum, data.root)
    factors.validate_features(data, sides)


def _bundle(name: str, bundle: Bundle, where: str, data: Prepared, longest: int) -> Contender:
    """A bundle, run by ONNX Runtime on the CPU. It ranks, but gives no log-probabilities of given items."""
    bundle.feedback.validate_same(data.feedback, where, data.root)
    expected = data.item_ids().to_external(np.arange(1, data.num_items + 1))
    ids = np.arange(1, len(bundle.items) + 1)
    if len(bundle.items) != data.num_items or not bundle.items.to_external(ids).equals(expected):
        raise RecpoError(
            f"{where} has other items than {data.root}: name the bundle's own prepared data",
            code="mismatch",
            field=name,
        )
    if bundle.k < min(longest, data.num_items):
        raise RecpoError(
            f"{where} serves lists of up to {bundle.k}, and ks asks for {longest}: name smaller ks, or export the "
            f"bundle again with k {longest}",
            code="out_of_range",
            field="ks",
        )
    _validate_features(bundle, where, data)
    origin = dict(bundle.manifest.origin)
    facts = {"kind": "bundle", "path": where, "k": bundle.k, "origin": str(origin)}
    facts["weights_sha256"] = origin.get("weights") or ""
    return Contender(name, "bundle", partial(_load_bundle, name, bundle), facts)


def _load_bundle(name: str, bundle: Bundle) -> Recommender:
    length = bundle.manifest.max_history
    reads = bundle.manifest.reads.batches

    def recommend(histories: Histories, k: int, exclude: Tensor | None) -> Recommendations:
        assert exclude is not None  # an evaluation always says what must not be listed
        inputs = _encoded(histories, exclude, length, reads)
        lists = (torch.from_numpy(one.copy()) for one in bundle.runtime.recommend(inputs, k))
        return Recommendations(*(one.to(histories.item_ids.device) for one in lists))

    are_logp = bundle.scores_are_log_probabilities
    return Recommender(recommend, name=name, scores_are_logp=are_logp, max_history=length, reads=reads)


def _validate_features(bundle: Bundle, where: str, data: Prepared) -> None:
    """Raises if feature codes or behavior bits of the data have another meaning in the bundle."""
    own, sides = bundle.features, cast(tuple[Side, ...], ("user", "context"))
    wrong = [
        f"{side} features" for side in sides if own.of(side) and not own.of(side).agrees(data.fitted_features(side))
    ]
    if own.behaviors != data.behaviors[: len(own.behaviors)]:
        wrong.append("behaviors")
    if wrong:
        raise RecpoError(
            f"{where} reads {' and '.join(wrong)} that are not those of {data.root}: name the bundle's own prepared "
            "data",
            code="mismatch",
            field=wrong[0],
        )


def _encoded(histories: Histories, exclude: Tensor, length: int, reads: Reads) -> EncodedHistories:
    """A batch as the arrays that a program expects, with ``length`` events."""
    missing = length - histories.item_ids.shape[1]

    def padded(values: Tensor | None) -> np.ndarray:
        values = torch.zeros_like(histories.item_ids) if values is None else values
        return torch.nn.functional.pad(values, (0, missing)).cpu().numpy()

    def padded_column(column: Tensor) -> Tensor:
        value = torch.nan if column.is_floating_point() else 0
        return torch.nn.functional.pad(column, (0, 0, 0, missing), value=value)

    user, context, array = histories.user, histories.context, operator.methodcaller("numpy", force=True)
    return EncodedHistories(
        padded(histories.item_ids),
        padded(histories.feedback),
        torch.nn.functional.pad(exclude, (0, int(exclude.shape[1] == 0))).cpu().numpy(),
        padded(histories.timestamps),
        None if histories.behaviors is None or not reads.behaviors else padded(histories.behaviors),
        None if user is None or not reads.user else user.map(array),
        None if context is None or not reads.context else context.map(padded_column).map(array),
    )


_RERANKED = ("run", "bundle", "factors")


def reranked_contenders(
    contenders: Sequence[Contender],
    methods: Sequence[Reranker],
    options: RerankOptions,
    data: Prepared,
    ks: Sequence[int],
) -> list[Contender]:
    """Every run, bundle and factor model among the contenders, re-ranked by every method: slates of the first k.

    Raises:
        RecpoError: nothing can be re-ranked; an attribute or the file of attributes is missing; a shortlist below k.
    """
    if not methods:
        return []
    bases = [one for one in contenders if one.kind in _RERANKED]
    if not bases:
        raise RecpoError(
            "rerank: no run, bundle or factor model is given whose lists can be re-ranked; name one",
            code="unused_option",
            field="rerank",
        )
    rule = f"must be at least {ks[0]}, the length of the lists that are chosen from it"
    validate_range(options.shortlist >= ks[0], "rerank_options.shortlist", rule, options.shortlist)
    known = options.read([name for method in methods for name in method.attributes], data.item_ids())
    found = []
    for base in bases:
        shortlist = min(options.shortlist, data.num_items, int(base.facts.get("k", data.num_items)))

        def vectors_of(loaded: Recommender, base: Contender = base) -> FloatArray | None:
            if base.kind == "bundle":
                return bundle_item_vectors(Path(str(base.facts["path"])))
            return None if loaded.policy is None else policy_item_vectors(loaded.policy)

        found += [
            reranked_contender(base, method, known, vectors_of, k=ks[0], shortlist=shortlist) for method in methods
        ]
    return found


def policy_item_vectors(policy: Policy) -> FloatArray | None:
    """The item vectors that the encoder of a policy reads, ``[V + 1, d]``; None if it has no such vectors."""
    base = policy.base if isinstance(policy, PolicyWithBase) else policy
    if not isinstance(base, StatePolicy):
        return None
    device = next((parameter.device for parameter in base.parameters()), torch.device("cpu"))
    with torch.inference_mode():
        vectors = base.item_vectors(torch.arange(base.num_items + 1, device=device))
    found: FloatArray = vectors.float().cpu().numpy()
    return found


#: Names of the baselines that are policies: what a bundle can serve and ``recpo tilt`` can tilt.
SERVED: Final[tuple[Baseline, ...]] = tuple(name for name in get_args(Baseline) if name != "random")


class ServedBaseline(NamedTuple):
    """A baseline as a policy: its name, the policy, and the options that rebuild it."""

    name: str
    policy: BaselinePolicy
    options: dict[str, Any]

    def features(self, data: Prepared) -> PolicyFeatures:
        """The fitted features that the policy reads, of the data that it was fitted on."""
        return PolicyFeatures(
            data.fitted_features("item") if grows(self.policy) else FittedFeatures(),
            data.fitted_features("user") if self.policy.reads.user else FittedFeatures(),
        )

    def runtime(self, data: Prepared) -> tuple[PolicyRuntime, HistoryReader]:
        """What ranks with the policy, and reads the histories for it, of the data that it was fitted on."""
        known, features = (data.item_ids(), data.feedback), self.features(data)
        reader = HistoryReader(*known, self.policy.max_history, features=features, repeats=data.repeats)
        return PolicyRuntime(self.policy, repeats=data.repeats), reader

    @property
    def configuration(self) -> dict[str, Any]:
        """``class_path`` and ``init_args`` of the policy."""
        own = type(self.policy)
        return {"class_path": f"{own.__module__}.{own.__qualname__}", "init_args": self.options}


def is_baseline(named: object) -> bool:
    """Whether this names a baseline or factors instead of a run."""
    return isinstance(named, Factors) or str(named) in get_args(Baseline) or kind_of(Path(str(named))) == "factors"


def served_baseline(
    named: Factors | Baseline | Path | str,
    data: Prepared,
    cache: Path | str | None = None,
    options: BaselineOptions = BaselineOptions(),  # noqa: B008  frozen
) -> ServedBaseline:
    """A baseline, fitted on the training period of ``data``, or a factor model, as a policy.

    Args:
        named: name of a baseline, factors, or their directory.
        data: the prepared data.
        cache: directory of fitted ones; None = they are not kept.
        options: options of the baselines.

    Raises:
        RecpoError: a baseline that cannot be served, or factors of other items or feedback.
    """
    if str(named) == "random":
        raise RecpoError(
            f"{named} is a yardstick of evaluations and no policy; name one of {', '.join(SERVED)}, factors or a run",
            code="unsupported",
            field="run",
        )
    if str(named) in SERVED:
        kept = None if cache is None else Path(cache)
        model = baseline_model(cast(Baseline, str(named)), data, options, BaselineCache(kept, kept))
        if isinstance(model, Factors):
            return _of_factors(str(named), model)
        assert isinstance(model, BaselinePolicy)
        return ServedBaseline(str(named), model, options_of(model))
    factors = Factors.open(named)
    validate_factors(factors, data, ("item", "user"))
    return _of_factors("factors" if isinstance(named, Factors) else Path(named).resolve().name, factors)


def _of_factors(name: str, factors: Factors) -> ServedBaseline:
    policy = FactorPolicy(factors.num_items, factors=factors.options)
    assign_factors(policy.factors, factors)
    return ServedBaseline(name, policy, {"factors": asdict(factors.options)})
