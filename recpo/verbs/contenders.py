"""The contenders that are runs, bundles, factors, lists and baselines, checked before any is loaded.

They are named for ``evaluate``, re-ranked (every run, bundle and factor model with every method), and served as
runtimes, which rank for frames of histories with the ids and feedback of prepared data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from recpo.artifacts import kind_of, sha256
from recpo.base.contracts import Policy, StatePolicy
from recpo.base.errors import RecpoError
from recpo.base.features import FeatureArrays, Reads, Side
from recpo.base.types import Features, Histories, Recommendations
from recpo.batches.held_out import HeldOutHistories
from recpo.evaluation.baselines import factors_recommender
from recpo.evaluation.candidates import begin_of, has_positions
from recpo.evaluation.contenders import (
    BASELINES,
    Baseline,
    BaselineOptions,
    Contender,
    Lists,
    Loaded,
    baseline,
    lists_contender,
    reranked_contender,
    validate_names,
)
from recpo.evaluation.held_out_pass import HeldOut
from recpo.evaluation.measures import Recommender
from recpo.evaluation.reading import Document
from recpo.lists.reranking import FloatArray, Reranker, RerankOptions
from recpo.log.id_map import IdMap
from recpo.log.prepared import Prepared
from recpo.policies.tilted import RerankedPolicy, TiltedPolicy
from recpo.rewards.factors import Factors
from recpo.serving.bundle import Bundle
from recpo.serving.encoded_histories import EncodedHistories, ProgramReads, ServingCounts
from recpo.serving.histories import ITEM_ID, USER_ID, HistoryReader
from recpo.serving.item_index import bundle_item_vectors
from recpo.serving.manifest import MANIFEST
from recpo.serving.runtimes import Runtime, excluded
from recpo.training.curves import training_curves
from recpo.training.learned_reward import Checkpoint
from recpo.training.run import FINISHED, RESOLVED, Run
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
    make_baseline: Callable[[Baseline], Contender] | None = None,
) -> list[Contender]:
    """All contenders, checked before the first one is loaded.

    Args:
        named: what to compare.
        data: prepared data.
        ks: list lengths.
        options: how runs are loaded.
        make_baseline: makes a baseline; None = with its default options.

    Raises:
        RecpoError: an entry is not a contender, is unfinished or knows other items; two have the same name; lists
            cannot be read.
    """
    if make_baseline is None:
        make_baseline = partial(baseline, data=data, options=BaselineOptions())
    names = _names([path for one in named if (path := directory_of(one)) is not None])
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
            found.append(make_baseline(cast(Baseline, opened)))
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


def _names(paths: Sequence[Path]) -> dict[Path, str]:
    """The last parts of the directories' paths if these differ, else the whole paths."""
    if again := [str(path) for path in paths if paths.count(path) > 1]:
        raise RecpoError(f"the same directory is named twice: {again[0]}", code="duplicate", field=again[0])
    names = [path.resolve().name for path in paths]
    return dict(zip(paths, names if len(set(names)) == len(names) else map(str, paths), strict=True))


def _opened(path: Path, trust: Sequence[str]) -> Run | Bundle | Factors:
    kind = kind_of(path)
    if kind in ("run", None) and ((path / FINISHED).is_file() or (path / RESOLVED).is_file()):
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
        "configuration": (run.root / RESOLVED).read_text(encoding="utf-8"),
    }
    return Contender(name, "run", partial(_load_run, name, run, options), facts, training_curves(run.root))


def _load_run(name: str, run: Run, options: ModelOptions) -> Loaded:
    policy = run.policy(options.checkpoint).to(compute_device(options.device))
    log_prob = policy.log_prob if policy.has_exact_log_prob else None
    recommender = Recommender(policy.recommend, log_prob, name, scores_are_logp=True)
    return Loaded(recommender, policy.max_history, policy, reads=policy.reads)


def _factors(name: str, factors: Factors, where: str, data: Prepared) -> Contender:
    factors.validate_feedback(data.feedback, data.root)
    factors.validate_items(data.catalog_checksum, data.root)
    factors.validate_features(data)
    facts = {"kind": "factors", "path": where, "facts": str(dict(factors.facts))}
    recommender = factors_recommender(factors, name)
    loaded = Loaded(recommender, factors.max_history, reads=factors.reads)
    return Contender(name, "factors", lambda: loaded, facts)


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


def _load_bundle(name: str, bundle: Bundle) -> Loaded:
    length = bundle.manifest.max_history
    reads = bundle.manifest.reads.batches

    def recommend(histories: Histories, k: int, exclude: Tensor | None) -> Recommendations:
        if exclude is None and bundle.manifest.repeats:
            exclude = histories.item_ids.new_zeros(len(histories.item_ids), 1)
        if exclude is None:
            raise RecpoError(
                f"{name}: this bundle never lists items of the history; evaluate its run with exclude_past false, or "
                "export with repeats",
                code="conflicting_options",
                field="exclude_past",
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
            "data",
            code="mismatch",
            field=wrong[0],
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


class ContenderRuntime(Runtime):
    """A contender of an evaluation that reads items and feedback. Its scores need not be log-probabilities.

    Args:
        contender: factors, their directory, or the name of a baseline, which is fitted on the training events.
        data: the prepared data with its items.

    Raises:
        RecpoError: the contender is none of these, or was fitted on other items.
    """

    def __init__(self, contender: Factors | str | PathLike[str], data: Prepared) -> None:
        named = contender if isinstance(contender, Factors | str) else str(contender)
        (found,) = contenders_of([named], data, [1])
        if found.kind not in ("factors", "baseline"):
            raise RecpoError(
                f"{contender} is a {found.kind}: recommend from it without prepared",
                code="conflicting_options",
                field="prepared",
            )
        loaded = found.load()
        assert loaded.recommender.recommend is not None
        self._lists = loaded.recommender.recommend
        self.num_items, self.max_history, self.k = data.num_items, loaded.max_history, data.num_items
        user = data.fitted_features("user") if loaded.reads.user else None
        self.reads = ProgramReads(user=() if user is None else user.features)
        self.reader = HistoryReader(data.item_ids(), data.feedback, self.max_history, user=user)

    def _recommend(self, inputs: EncodedHistories, k: int) -> tuple[np.ndarray, np.ndarray]:
        ids, feedback = torch.from_numpy(inputs.item_ids), torch.from_numpy(inputs.feedback)
        known = None if inputs.user is None else inputs.user.tensors()
        histories = Histories(ids, (ids != 0).sum(1), feedback, user=known)
        with torch.inference_mode():
            lists = self._lists(histories, k, torch.from_numpy(excluded(inputs, self.reads.repeats)))
        return lists.item_ids.numpy(), lists.scores.numpy()


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
    if options.shortlist < ks[0]:
        raise RecpoError(
            f"rerank_options.shortlist is {options.shortlist}, and lists of {ks[0]} are chosen from it: name more",
            code="out_of_range",
            field="rerank_options.shortlist",
        )
    known = options.read([name for method in methods for name in method.attributes], data.item_ids())
    found = []
    for base in bases:
        shortlist = min(options.shortlist, data.num_items, int(base.facts.get("k", data.num_items)))

        def vectors_of(loaded: Loaded, base: Contender = base) -> FloatArray | None:
            if base.kind == "bundle":
                return bundle_item_vectors(Path(str(base.facts["path"])))
            return None if loaded.policy is None else policy_item_vectors(loaded.policy)

        found += [
            reranked_contender(base, method, known, vectors_of, k=ks[0], shortlist=shortlist) for method in methods
        ]
    return found


def policy_item_vectors(policy: Policy) -> FloatArray | None:
    """The item vectors that the encoder of a policy reads, ``[V + 1, d]``; None if it has no such vectors."""
    base = policy.base if isinstance(policy, TiltedPolicy | RerankedPolicy) else policy
    if not isinstance(base, StatePolicy):
        return None
    device = next((parameter.device for parameter in base.parameters()), torch.device("cpu"))
    with torch.inference_mode():
        vectors = base.item_vectors(torch.arange(base.num_items + 1, device=device))
    found: FloatArray = vectors.float().cpu().numpy()
    return found


@dataclass(frozen=True)
class SharedItems:
    """One numbering of all items: those of the data are 1..V, as in the shards; others of the bundles follow.

    Attributes:
        numbers: for each bundle, ``[V_b + 1]``: the shared number of each of its items; 0 for 0.
        counts: how many items are in both bundles, in one of them, and not in the data.
    """

    numbers: Mapping[str, np.ndarray]
    counts: Mapping[str, int]

    @classmethod
    def of(cls, known: IdMap, bundles: Mapping[str, Bundle]) -> SharedItems:
        """Numbers the items of the data, then those that only bundles know."""
        external = {name: one.items.to_external(np.arange(1, len(one.items) + 1)) for name, one in bundles.items()}
        places = {name: known.to_internal(ids) for name, ids in external.items()}
        strange = [ids.filter(pa.array(places[name] == 0)) for name, ids in external.items()]
        # as Python values, because integers of different widths, or short and long strings, are the same ids
        further = dict.fromkeys(value for ids in strange for value in ids.to_pylist())
        further_numbers = {value: number for number, value in enumerate(further, len(known) + 1)}
        numbers = {}
        for (name, place), ids in zip(places.items(), strange, strict=True):
            place[place == 0] = [further_numbers[value] for value in ids.to_pylist()]
            numbers[name] = np.concatenate([[0], place])
        old, new = (set(one[1:].tolist()) for one in numbers.values())
        counts = {"shared": len(old & new), "only_old": len(old - new), "only_new": len(new - old)}
        counts |= {f"{name}_not_in_data": len(ids) for name, ids in zip(bundles, strange, strict=True)}
        return cls(numbers, counts)


class ServedBundle:
    """A bundle as a contender that reads the raw events of held-out users, as a server does; it keeps its lists.

    Args:
        name: which of the compared bundles it is.
        bundle: the bundle.
        data: prepared data with the logged requests.
        split: held-out period.
        numbers: its items in the shared numbering, see ``SharedItems``.

    Attributes:
        lists: ``[B, k]`` for every batch so far, in the order of users and in the shared numbering.
    """

    def __init__(self, name: str, bundle: Bundle, data: Prepared, split: HeldOut, numbers: np.ndarray) -> None:
        self.lists: list[Tensor] = []
        self._name, self._bundle, self._numbers, self._known = name, bundle, numbers, data.item_ids()
        self._histories, self._served = HeldOutHistories(data, split, bundle.manifest.reads.batches), ServingCounts()
        # when the bundle's items must be available: the start of the period, or the last of the users' first held-out
        # events
        self._at = None if has_positions(data) else int(np.max(begin_of(data, split)))

    @property
    def contender(self) -> Contender:
        """The contender of the evaluation."""
        bundle, name = self._bundle, f"the {self._name} bundle"
        recommender = Recommender(
            recommend_to_users=self._recommend, name=name, scores_are_logp=bundle.scores_are_log_probabilities
        )
        loaded = partial(Loaded, recommender, bundle.manifest.max_history)
        return Contender(self._name, "bundle", loaded, {"kind": "bundle", "path": str(bundle.root)})

    def _recommend(self, users: Tensor, k: int, exclude: Tensor | None) -> Recommendations:
        """The lists as the evaluation reads them. An item that is not in the data leaves an empty place."""
        assert exclude is not None  # the evaluation uses exclude_past
        asked, reader = users.numpy(), self._bundle.reader
        row, column = np.nonzero(exclude.numpy())
        past = pa.table({USER_ID: asked[row], ITEM_ID: self._known.to_external(exclude.numpy()[row, column])})
        events, now = self._histories.events(asked), self._histories.requests(asked)
        people = self._histories.user_features(asked)
        reader.validate_columns(events, people, now)
        read = reader.read(events, exclude=past, users=asked, user_features=people, context=now, at=self._at)
        ((_, inputs),) = read.batches(len(asked))
        top_items, scores = self._bundle.runtime.recommend(inputs, k)
        numbers = torch.from_numpy(self._numbers[top_items])
        self.lists.append(numbers.int())
        self._served += replace(read.counts, short_lists=int((numbers == 0).any(1).sum()))
        known = numbers <= len(self._known)
        found = torch.from_numpy(scores.copy()).masked_fill(~known | (numbers == 0), -torch.inf)
        return Recommendations(numbers * known, found)

    def counts(self) -> dict[str, int]:
        """Counts of served and skipped events so far."""
        # past items outside the bundle's catalog cannot be listed anyway
        counts = {name: value for name, value in self._served.to_dict().items() if not name.startswith("unknown_")}
        strange = sum(int((one > len(self._known)).sum()) for one in self.lists)
        return counts | {"unknown_items": self._served.unknown_items, "places_of_items_not_in_data": strange}

    def warnings(self) -> list[str]:
        """Warnings about events and items that it could not read or list."""
        found, counts = [], self.counts()
        if skipped := counts["unknown_items"]:
            found.append(
                f"{self._name}: skipped {skipped:,} of {counts['events']:,} events, whose items it does not know"
            )
        if strange := counts["places_of_items_not_in_data"]:
            found.append(
                f"{self._name}: {strange:,} places of its lists hold items that the prepared data do not know: they "
                "are compared in the agreement, and earn nothing in ranking and value"
            )
        return found

    def facts(self) -> Document:
        """What identifies the bundle, for the document."""
        bundle = self._bundle
        return {
            "path": str(bundle.root),
            "checksum": sha256(bundle.root / MANIFEST),
            "origin": dict(bundle.manifest.origin),
            "items": len(bundle.items),
            "k": bundle.k,
        }
