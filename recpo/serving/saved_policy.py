"""A policy class of recpo in a bundle: constructor options in the manifest, weights in safetensors, codes in Parquet.

The torch engine is built from these. No entry can name code: the class is looked up in ``_OWN``, the options are
numbers, booleans and words that its signature allows, the base of a tilted policy is described in the same way, and
safetensors contains only tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from recpo.artifacts import write_tensors
from recpo.artifacts.semantic_codes import SemanticCodes
from recpo.base.contracts import Policy
from recpo.base.errors import RecpoError
from recpo.log.id_map import IdMap
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.policies.semantic_id import SemanticIdPolicy
from recpo.policies.tilted import RerankedPolicy, TiltedPolicy
from recpo.serving.manifest import CODES, WEIGHTS, BundleManifest
from recpo.serving.program_inputs import ProgramReads

_OWN: dict[str, type[Policy]] = {
    f"{own.__module__}.{own.__qualname__}": own
    for own in (CatalogSoftmaxPolicy, SemanticIdPolicy, TiltedPolicy, RerankedPolicy)
}
# constructor arguments that are not options in a bundle: it stores them itself, and item features are precomputed
_GIVEN = ("num_items", "codes", "item_features")
_BASE = "base"  # the option that is itself a policy
_TILTED = (TiltedPolicy, RerankedPolicy)


def describe_policy(policy: Policy, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The entry ``policy`` of the manifest.

    Args:
        policy: the policy.
        options: its constructor options, if known; missing options have the defaults of the class. The base of a tilted
            policy is given by its ``class_path`` and ``init_args``.

    Returns:
        ``class`` and ``options``. Both are None for classes that are not recpo's own, and if the options are unknown.
        The option ``base`` is itself such an entry.

    Raises:
        RecpoError: an option that the class does not have, or of a wrong type.
    """
    name = f"{type(policy).__module__}.{type(policy).__qualname__}"
    if name not in _OWN or options is None:
        return {"class": name, "options": None}
    kept = {key: value for key, value in options.items() if key not in _GIVEN}
    if isinstance(policy, _TILTED):
        base = kept.get(_BASE)
        arguments = base.get("init_args", {}) if isinstance(base, Mapping) else None
        kept[_BASE] = describe_policy(policy.base, arguments)
        if kept[_BASE]["options"] is None:
            return {"class": name, "options": None}
    return {"class": name, "options": _defaults(_OWN[name]) | _validated(name, kept)}


def save_policy(policy: Policy, items: IdMap, root: Path) -> None:
    """Writes the weights of ``policy``, and its codes if it has any, into the directory of a bundle."""
    write_tensors(root / WEIGHTS, {name: value.detach().contiguous() for name, value in policy.state_dict().items()})
    policy = policy.base if isinstance(policy, _TILTED) else policy
    if isinstance(policy, SemanticIdPolicy):
        ids = torch.arange(1, policy.num_items + 1, device=policy.trie.device)
        codes = SemanticCodes(
            policy.tokens(ids).cpu().numpy(), policy.trie.codebook_sizes, policy.catalog_checksum or ""
        )
        (root / CODES).mkdir()
        codes.save(root / CODES, items.to_external(ids.cpu().numpy()), {})


def load_policy(root: Path, manifest: BundleManifest) -> Policy:
    """Builds the policy of a bundle whose files are already verified, in evaluation mode.

    Raises:
        RecpoError: the bundle has none of recpo's own policies, an option does not belong to its class, or the weights
            do not fit.
    """
    name = manifest.policy["class"]
    try:
        policy = policy_of_size(root, manifest, manifest.num_items)
        weights = load_file(root / WEIGHTS)
        policy.load_state_dict(weights)
    except (SafetensorError, RuntimeError, TypeError, ValueError, ZeroDivisionError, OSError) as error:
        raise RecpoError(f"{root}: weights and options of {name} do not fit ({error}): export it again") from error
    reads = ProgramReads(policy.reads_timestamps, policy.reads_behaviors)
    told = ProgramReads(manifest.reads.timestamps, manifest.reads.behaviors)
    sides = (policy.reads_user, policy.reads_context) == (bool(manifest.reads.user), bool(manifest.reads.context))
    if policy.max_history != manifest.max_history or reads != told or not sides:
        raise RecpoError(f"{root}: options of {name} do not fit the manifest: export it again")
    return policy.eval()


def policy_of_size(root: Path, manifest: BundleManifest, num_items: int) -> Policy:
    """The policy of a bundle for a catalog of ``num_items``, with initial weights.

    Raises:
        RecpoError: see ``load_policy``.
    """
    name, options = manifest.policy["class"], manifest.options
    if options is None or name not in _OWN:
        raise RecpoError(
            f"{root} has the ONNX program only: its policy, {name}, is none of recpo's own or was exported without its "
            "options; load it with engine=onnx"
        )
    policy = _factory(name, options, root)(num_items)
    policy.set_schema(manifest.features, manifest.behaviors)
    return policy


def _factory(name: str, options: Mapping[str, Any], root: Path) -> Callable[[int], Policy]:
    """A function that creates the policy of an entry from the number of items."""
    own, arguments = _OWN[name], _validated(name, options)
    if own is SemanticIdPolicy:
        arguments["codes"] = root / CODES
    if _BASE in arguments:
        base = arguments[_BASE]
        arguments[_BASE] = _factory(base["class"], base["options"], root)
    return partial(own, **arguments)


def _defaults(own: type[Policy]) -> dict[str, Any]:
    parameters = inspect.signature(own).parameters.values()
    return {p.name: p.default for p in parameters if p.name not in _GIVEN and p.default is not p.empty}


def _validated(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, each of the type that the constructor of ``name`` declares."""
    hints = {key: kind for key, kind in get_type_hints(_OWN[name].__init__).items() if key not in (*_GIVEN, "return")}
    for key, value in options.items():
        if key == _BASE and key in hints:
            _validate_base(name, value)
        elif key not in hints or not _is_of(value, hints[key]):
            expected = getattr(hints.get(key), "__name__", hints.get(key, "one of " + ", ".join(hints)))
            raise RecpoError(f"{name}: option {key} is {value!r}, expected {expected}")
    return dict(options)


def _validate_base(name: str, entry: object) -> None:
    """Raises unless ``entry`` is one of recpo's own policies that can be tilted."""
    untilted = [known for known, own in _OWN.items() if not issubclass(own, _TILTED)]
    known = isinstance(entry, Mapping) and entry.keys() == {"class", "options"} and entry["class"] in untilted
    if not known or not isinstance(entry["options"], Mapping):  # type: ignore[index]  # it is a mapping then
        raise RecpoError(f"{name}: option {_BASE} is {entry!r}, expected class and options of {' or '.join(untilted)}")
    _validated(entry["class"], entry["options"])  # type: ignore[index]


def _is_of(value: object, kind: Any) -> bool:
    if get_origin(kind) in (Union, UnionType):
        return any(_is_of(value, part) for part in get_args(kind))
    if get_origin(kind) is Literal:
        return any(type(value) is type(known) and value == known for known in get_args(kind))
    return type(value) is kind or (kind is float and type(value) is int)
