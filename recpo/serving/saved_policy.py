"""A policy class of recpo in a bundle: constructor options in the manifest, weights in safetensors, codes in Parquet.

The torch engine is built from these. No entry can name code: the class is looked up in ``_OWN``, the options are
numbers, booleans and words that its signature allows, or the numbers of a factor model, the base of a tilted policy is
described in the same way, and safetensors contains only tensors.

Vectors of items that a bundle does not know, computed from their features, and the policy with these items added.

The torch engine: such a policy, or that of a run, as a runtime.

Uses torch but no training code: the weights are in safetensors, the features in the manifest.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from recpo.artifacts.documents import as_configuration, write_tensors
from recpo.artifacts.semantic_codes import Codes
from recpo.base.contracts import Policy
from recpo.base.errors import RecpoError, reading
from recpo.base.feature_encoding import FittedFeatures
from recpo.base.features import FeatureArrays
from recpo.base.types import FeedbackBatch, Histories, Slates
from recpo.log.id_map import IdMap
from recpo.policies import baseline
from recpo.policies.blocks import Block, HSTUBlock, SASRecBlock
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.policies.feature_policy import FeaturePolicy
from recpo.policies.grade_factors import GradeFactors, GradeFactorsOptions
from recpo.policies.item_features import BLOCK_ITEMS, FeatureEncoder, ItemFeatures
from recpo.policies.item_table import ItemTable
from recpo.policies.semantic_id import SemanticIdPolicy
from recpo.policies.tilted import PolicyWithBase, ProductPolicy, RerankedPolicy, RerankedProductPolicy, TiltedPolicy
from recpo.serving.histories import EncodedHistories
from recpo.serving.manifest import CODES, ITEM_ENCODERS, WEIGHTS, BundleManifest, ProgramReads, readable
from recpo.serving.runtimes import Runtime, excluded

# constructor arguments that are not options in a bundle: it stores them itself, item features are precomputed, and the
# encoder gives the last four to its blocks
_GIVEN = ("num_items", "codes", "item_features")
_OF_ENCODER = ("dim", "heads", "max_history", "dropout")
_PARTS = ("base", "scored")  # options that are themselves policies
_TILTED = (TiltedPolicy, RerankedPolicy, ProductPolicy, RerankedProductPolicy)
_FACTORS = "factors"  # the option that is itself a group of numbers
_BLOCK = "block"  # the option that is a class, with options of its own


def _name_of(own: type) -> str:
    return f"{own.__module__}.{own.__qualname__}"


_COUNTED = (baseline.SequentialRulesPolicy, baseline.PersonalPopularityPolicy, baseline.SegmentPolicy)
_BASELINES = (baseline.PopularityPolicy, baseline.FactorPolicy, baseline.ImplicitPolicy, baseline.EasePolicy, *_COUNTED)
_BASES = (CatalogSoftmaxPolicy, SemanticIdPolicy, *_BASELINES)
_OWN: dict[str, type[Policy | Block]] = {_name_of(own): own for own in (*_BASES, *_TILTED, SASRecBlock, HSTUBlock)}
#: the options that are entries themselves, and the classes that they may name
_ENTRIES = {
    "base": tuple(map(_name_of, _BASES)),
    "scored": tuple(map(_name_of, _BASELINES)),
    _BLOCK: (_name_of(SASRecBlock), _name_of(HSTUBlock)),
}


def describe_policy(policy: Policy, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The entry ``policy`` of the manifest.

    Args:
        policy: the policy.
        options: its constructor options, if known; missing options have the defaults of the class. The base of a tilted
            policy is given by its ``class_path`` and ``init_args``.

    Returns:
        ``class`` and ``options``. The options are None for classes that are not recpo's own, for blocks that are not,
        and if the options are unknown. The options ``base`` and ``block`` are themselves such entries.

    Raises:
        RecpoError: an option that the class does not have, or of a wrong type.
    """
    name = _name_of(type(policy))
    if name not in _OWN or options is None:
        return {"class": name, "options": None}
    parameters = inspect.signature(_OWN[name]).parameters.values()
    kept = {p.name: p.default for p in parameters if p.default is not p.empty} | dict(options)
    kept = {key: value for key, value in kept.items() if key not in _GIVEN}
    for part in _PARTS:
        if part in kept:
            given = kept[part]
            known = given.get("init_args", {}) if isinstance(given, Mapping) else None
            kept[part] = describe_policy(getattr(policy, part), known)
    if isinstance(policy, FeaturePolicy):
        kept[_BLOCK] = _described_block(policy, kept[_BLOCK])
    if any(kept[key]["options"] is None for key in _ENTRIES if key in kept):
        return {"class": name, "options": None}
    return {"class": name, "options": _validated(name, kept)}


def _described_block(policy: FeaturePolicy, block: Any) -> dict[str, Any]:
    """The entry of a block: ``class``, and ``options``, which are None for a block that is not recpo's own."""
    name, given = _name_of(type(policy.encoder.blocks[0])), as_configuration(block)
    options = given.get("init_args") or {} if isinstance(given, dict) else {}
    known = {key: value for key, value in options.items() if key not in _OF_ENCODER}
    return {"class": name, "options": known if name in _ENTRIES[_BLOCK] else None}


def save_policy(policy: Policy, items: IdMap, root: Path) -> None:
    """Writes the weights of ``policy``, and its codes if it has any, into the directory of a bundle."""
    write_tensors(root / WEIGHTS, {name: value.detach().contiguous() for name, value in policy.state_dict().items()})
    policy = policy.base if isinstance(policy, PolicyWithBase) else policy
    if isinstance(policy, SemanticIdPolicy):
        ids = torch.arange(1, policy.num_items + 1, device=policy.trie.device)
        codes = Codes(policy.tokens(ids).cpu().numpy(), policy.trie.codebook_sizes, policy.catalog_checksum or "")
        (root / CODES).mkdir()
        codes.save(root / CODES, items.to_external(ids.cpu().numpy()), {})


def load_policy(root: Path, manifest: BundleManifest) -> Policy:
    """Builds the policy of a bundle whose files are already verified, in evaluation mode.

    Raises:
        RecpoError: the bundle has none of recpo's own policies, an option does not belong to its class, or the weights
            do not fit.
    """
    name = manifest.policy["class"]
    faults = SafetensorError, RuntimeError, TypeError, ValueError, ZeroDivisionError, OSError
    with reading(f"{root}: {name} with its options", *faults, remedy="export it again", field=name):
        policy = policy_of_size(root, manifest, manifest.num_items)
        policy.load_state_dict(load_file(root / WEIGHTS))
    told = manifest.max_history, manifest.reads_timestamps, manifest.reads.batches
    if (policy.max_history, policy.reads_timestamps, policy.reads) != told:
        message = f"{root}: options of {name} do not fit the manifest: export it again"
        raise RecpoError(message, code="mismatch", field=name)
    return policy.eval()


def policy_of_size(root: Path, manifest: BundleManifest, num_items: int) -> Policy:
    """The policy of a bundle for a catalog of ``num_items``, with initial weights.

    Raises:
        RecpoError: see ``load_policy``.
    """
    name, options = manifest.policy["class"], manifest.options
    if options is None or name not in _OWN or name in _ENTRIES[_BLOCK]:
        message = (
            f"{root} has the ONNX program only: its policy, {name}, is not of recpo or was exported without its "
            "options; load it with engine=onnx"
        )
        raise RecpoError(message, code="unsupported", field="engine")
    policy = _factory(name, options, root)(num_items)
    policy.set_schema(manifest.features, manifest.behaviors)
    return policy


def _factory(name: str, options: Mapping[str, Any], root: Path) -> Callable[[int], Policy]:
    """A function that creates the policy of an entry from the number of items."""
    own: Any = _OWN[name]
    arguments = _validated(name, options)
    if own is SemanticIdPolicy:
        arguments["codes"] = root / CODES
    if _BLOCK in arguments:
        arguments[_BLOCK] = partial(_OWN[arguments[_BLOCK]["class"]], **arguments[_BLOCK]["options"])
    if _FACTORS in arguments:
        arguments[_FACTORS] = GradeFactorsOptions(**arguments[_FACTORS])
    for part in _PARTS:
        if part in arguments:
            arguments[part] = _factory(arguments[part]["class"], arguments[part]["options"], root)
    return partial(own, **arguments)


def _validated(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, each of the type that the constructor of one of recpo's own policies or blocks declares."""
    without = (*_GIVEN, *(_OF_ENCODER if name in _ENTRIES[_BLOCK] else ()), "return")
    hints = {key: kind for key, kind in get_type_hints(_OWN[name].__init__).items() if key not in without}
    for key, value in options.items():
        expected = _expected(key, value, hints)
        if expected is not None:
            raise RecpoError(f"{name}: option {key} is {value!r}, expected {expected}", code="damaged", field=key)
        if key in _ENTRIES:
            _validated(value["class"], value["options"])
    return dict(options)


def _expected(key: str, value: object, hints: Mapping[str, Any]) -> str | None:
    """What an option should be; None if it is that."""
    if key not in hints:
        return "one of " + ", ".join(hints)
    if key in _ENTRIES:
        is_entry = isinstance(value, Mapping) and value.keys() == {"class", "options"}
        known = is_entry and value["class"] in _ENTRIES[key] and isinstance(value["options"], Mapping)  # type: ignore[index]
        return None if known else f"class and options of {' or '.join(_ENTRIES[key])}"
    if key == _FACTORS:
        numbers = get_type_hints(GradeFactorsOptions)
        fits = isinstance(value, Mapping) and all(k in numbers and _is_of(v, numbers[k]) for k, v in value.items())
        return None if fits else f"a mapping of {', '.join(numbers)}"
    return None if _is_of(value, hints[key]) else str(getattr(hints[key], "__name__", hints[key]))


def _is_of(value: object, kind: Any) -> bool:
    if get_origin(kind) in (Union, UnionType):
        return any(_is_of(value, part) for part in get_args(kind))
    if get_origin(kind) is Literal:
        return any(type(value) is type(known) and value == known for known in get_args(kind))
    kind = getattr(kind, "_type", kind)  # of a range; the constructor validates the range itself
    return type(value) is kind or (kind is float and type(value) is int)


_TOLERANCE: Final = 1e-5  # tolerance between vectors from the same weights and features


def save_item_encoders(policy: Policy, fitted: FittedFeatures, root: Path) -> None:
    """Writes the encoders of item features into the directory of a bundle, then reads and compares them.

    Args:
        policy: with item features, as trained.
        fitted: the fitted features.
        root: the directory.

    Raises:
        RecpoError: the encoders that were read compute other vectors.
    """
    weights = {
        f"{name}.{part}": value.detach().contiguous()
        for name, features in _item_features(policy)
        for part, value in features.encoder.state_dict().items()
    }
    write_tensors(root / ITEM_ENCODERS, weights)
    loaded = load_item_encoders(root, fitted)
    ids = torch.arange(1, min(policy.num_items + 1, BLOCK_ITEMS))
    with torch.no_grad():
        for name, features in _item_features(policy):
            gap = features.encoded_by(loaded[name], ids) - features(ids)
            if not gap.abs().max() <= _TOLERANCE:
                message = f"the encoder of {name} is not the policy's once it is saved (by {gap.abs().max():.2g})"
                raise RecpoError(message, code="mismatch", field=name)


def load_item_encoders(root: Path, fitted: FittedFeatures) -> dict[str, FeatureEncoder]:
    """The encoders by the names of their item tables, in evaluation mode. The files are already verified.

    Raises:
        RecpoError: they are missing, damaged, or belong to other features.
    """
    with readable(root / ITEM_ENCODERS, SafetensorError, OSError, RuntimeError, KeyError, ValueError):
        weights = load_file(root / ITEM_ENCODERS)
        names = sorted({name.rpartition(".output.weight")[0] for name in weights} - {""})
        encoders = {}
        for name in names:
            own = {key.removeprefix(f"{name}."): value for key, value in weights.items() if key.startswith(f"{name}.")}
            dim, hidden = own["output.weight"].shape
            encoders[name] = FeatureEncoder(fitted.features, dim, hidden=hidden).eval()
            encoders[name].load_state_dict(own)
    return encoders


@torch.no_grad()
def grown_policy(root: Path, manifest: BundleManifest, fitted: FittedFeatures, features: FeatureArrays) -> Policy:
    """The policy of a bundle with more items appended, whose vectors come from their features.

    In a model of grades, a new item has the prior mean of its features and the uncertainty of an item without events.

    Args:
        root: the bundle, whose files are already verified.
        manifest: its manifest.
        fitted: the fitted item features.
        features: features of the new items ``[N]``.

    Raises:
        RecpoError: the bundle's policy cannot take more items.
    """
    encoders = load_item_encoders(root, fitted) if ITEM_ENCODERS in manifest.files else {}
    added = len(features.codes)
    vectors = {f"{name}.weight": _encoded(encoder, features) for name, encoder in encoders.items()}
    policy = policy_of_size(root, manifest, manifest.num_items + added)
    weights = load_file(root / WEIGHTS)
    for name, part in policy.named_modules():
        if isinstance(part, GradeFactors):
            vectors |= _of_factors(f"{name}.", part, weights, features)
        if isinstance(part, _COUNTED):  # no rule leads to a new item or from it, and nobody chose it
            vectors |= {
                f"{name}.{one}": value.new_zeros(added, *value.shape[1:]) for one, value in part.named_buffers()
            }
    own = policy.state_dict()
    grown = {name: _grown(name, weights[name], value, vectors.get(name)) for name, value in own.items()}
    policy.load_state_dict(grown)
    return policy.eval()


def _grown(name: str, saved: Tensor, own: Tensor, vectors: Tensor | None) -> Tensor:
    """A saved tensor, extended by rows for the new items if it has one row per item."""
    if saved.shape == own.shape:
        return saved
    more = own.shape[0] - saved.shape[0]
    if vectors is not None:
        rows = vectors
    elif name.rpartition(".")[2] == "cdf":  # the proposal of training, which never proposes new items
        rows = saved[-1:].expand(more)
    else:
        message = f"refresh: nothing says what {name} is of a new item: train with today's items and export"
        raise RecpoError(message, code="unsupported", field=name)
    return torch.cat([saved, rows.to(saved.dtype)])


def _of_factors(
    name: str, own: GradeFactors, weights: Mapping[str, Tensor], features: FeatureArrays
) -> dict[str, Tensor]:
    """The rows of new items in a model of grades, by the names of its tensors in the policy."""
    priors = ("item_prior", "prior_variance", "prior_covariance")
    if any(f"{name}{part}" not in weights for part in priors):
        message = (
            "refresh: an earlier version of recpo wrote this bundle, which does not know the prior means of new items: "
            "fit the factors again and export"
        )
        raise RecpoError(message, code="old_format", field=f"{name}item_prior")
    own.load_state_dict({part: weights[f"{name}{part}"] for part in priors}, strict=False)
    return {f"{name}{part}": rows for part, rows in own.new_item_rows(features.tensors()).items()}


def _encoded(encoder: FeatureEncoder, features: FeatureArrays) -> Tensor:
    tensors = features.tensors()
    blocks = torch.arange(len(tensors.codes)).split(BLOCK_ITEMS)
    return torch.cat([encoder(tensors.rows(block)) for block in blocks])


def _item_features(policy: Policy) -> Iterator[tuple[str, ItemFeatures]]:
    """What the item tables of a policy read of the items, by the names of the tables."""
    tables = ((name, part) for name, part in policy.named_modules() if isinstance(part, ItemTable))
    return ((name, table.features) for name, table in tables if table.features is not None)


class PolicyRuntime(Runtime):
    """A policy in torch, from a run or rebuilt from a bundle. It runs on the device of its parameters.

    Args:
        policy: in evaluation mode.
        like: a bundle or a runtime whose lists it makes; None = lists of any length, from times and whatever else the
            histories contain.
        repeats: whether items of the history may be listed again, where nothing is ``like`` it.
    """

    def __init__(self, policy: Policy, like: BundleManifest | Runtime | None = None, repeats: bool = False) -> None:
        self.policy = policy
        self.num_items, self.max_history = policy.num_items, policy.max_history
        own = ProgramReads(policy.reads_timestamps, repeats=repeats)
        self.reads = own if like is None else replace(like.reads, mask=0)
        self.k = policy.num_items if like is None else like.k

    def _recommend(self, inputs: EncodedHistories, k: int) -> tuple[np.ndarray, np.ndarray]:
        with torch.inference_mode():
            histories = self._histories(inputs)
            exclude = self._tensor(excluded(inputs, self.reads.repeats))
            top = self.policy.recommend(histories, k, exclude)
        return top.item_ids.cpu().numpy(), top.scores.cpu().numpy()

    def _score(self, inputs: EncodedHistories, candidates: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            histories, items = self._histories(inputs), self._tensor(candidates)
            slates = Slates(items, histories.lengths[:, None].expand_as(items), items > 0)
            rows = torch.arange(len(items), device=items.device)
            scores = self.policy.log_prob(FeedbackBatch(histories, slates, rows)).sum(-1)
        return scores.masked_fill(items == 0, torch.nan).cpu().numpy()

    def _histories(self, inputs: EncodedHistories) -> Any:
        item_ids = self._tensor(inputs.item_ids)
        times = self._tensor(inputs.timestamps) if self.reads.timestamps else None
        behaviors = None if inputs.behaviors is None else self._tensor(inputs.behaviors)
        user, context = (
            None if part is None else part.tensors().map(lambda column: column.to(item_ids.device))
            for part in (inputs.user, inputs.context)
        )
        lengths, feedback = (item_ids != 0).sum(1), self._tensor(inputs.feedback)
        return Histories(item_ids, lengths, feedback, times, behaviors, user, context)

    def _tensor(self, values: np.ndarray | None) -> Any:
        device = next((parameter.device for parameter in self.policy.parameters()), torch.device("cpu"))
        return torch.from_numpy(values).to(device)
