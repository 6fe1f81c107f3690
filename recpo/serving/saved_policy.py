"""A policy of recpo's own in a bundle: constructor options in the manifest, weights in safetensors, codes in Parquet.

The torch engine is built from these. Nothing here can name code: the class comes out of ``_own_classes``, options are
numbers, booleans and words that its signature allows, and safetensors holds tensors only.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from recpo.contracts import Policy
from recpo.data.id_map import IdMap
from recpo.errors import RecpoError
from recpo.policies.catalog_softmax import CatalogSoftmaxPolicy
from recpo.policies.semantic_id import SemanticIdPolicy
from recpo.semantic_codes import SemanticCodes
from recpo.serving.manifest import CODES, WEIGHTS, BundleManifest

_OWN: dict[str, type[Policy]] = {
    f"{own.__module__}.{own.__qualname__}": own for own in (CatalogSoftmaxPolicy, SemanticIdPolicy)
}
_GIVEN = ("num_items", "codes")  # constructor arguments that are no options of a bundle: it has them itself


def describe_policy(policy: Policy, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The manifest's entry ``policy``.

    Args:
        policy: the policy.
        options: what it was built with, where that is known; left out ones have the class's defaults.

    Returns:
        ``class`` and ``options``; these are None for classes that are not recpo's own and where they are unknown.

    Raises:
        RecpoError: an option that the class does not have, or of a wrong type.
    """
    name = f"{type(policy).__module__}.{type(policy).__qualname__}"
    if name not in _OWN or options is None:
        return {"class": name, "options": None}
    kept = {key: value for key, value in options.items() if key not in _GIVEN}
    return {"class": name, "options": _defaults(_OWN[name]) | _validated(name, kept)}


def save_policy(policy: Policy, items: IdMap, root: Path) -> None:
    """Writes the weights of ``policy``, and its codes where it has any, into the directory of a bundle."""
    save_file({name: value.detach().contiguous() for name, value in policy.state_dict().items()}, root / WEIGHTS)
    if isinstance(policy, SemanticIdPolicy):
        ids = torch.arange(1, policy.num_items + 1, device=policy.trie.device)
        codes = SemanticCodes(
            policy.tokens(ids).cpu().numpy(), policy.trie.codebook_sizes, policy.catalog_checksum or ""
        )
        (root / CODES).mkdir()
        codes.save(root / CODES, items.to_external(ids.cpu().numpy()), {})


def load_policy(root: Path, manifest: BundleManifest) -> Policy:
    """Builds the policy of a bundle whose files are verified already, in evaluation mode.

    Raises:
        RecpoError: the bundle has no policy of recpo's own, an option is none of its class, or the weights do not fit.
    """
    name, options = manifest.policy["class"], manifest.options
    if options is None or name not in _OWN:
        raise RecpoError(
            f"{root} has the ONNX program only: its policy, {name}, is none of recpo's own or was exported without its "
            "options; load it with engine=onnx"
        )
    own, arguments = _OWN[name], _validated(name, options)
    if own is SemanticIdPolicy:
        arguments["codes"] = root / CODES
    try:
        policy = own(manifest.num_items, **arguments)
        weights = load_file(root / WEIGHTS)
        policy.load_state_dict(weights)
    except (SafetensorError, RuntimeError, TypeError, ValueError, ZeroDivisionError, OSError) as error:
        raise RecpoError(f"{root}: weights and options of {name} do not fit ({error}): export it again") from error
    if (policy.max_history, policy.reads_timestamps) != (manifest.max_history, manifest.reads_timestamps):
        raise RecpoError(f"{root}: options of {name} do not fit the manifest: export it again")
    return policy.eval()


def _defaults(own: type[Policy]) -> dict[str, Any]:
    parameters = inspect.signature(own).parameters.values()
    return {p.name: p.default for p in parameters if p.name not in _GIVEN}


def _validated(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, each of the type that the constructor of ``name`` declares."""
    hints = {key: kind for key, kind in get_type_hints(_OWN[name].__init__).items() if key not in (*_GIVEN, "return")}
    for key, value in options.items():
        if key not in hints or not _is_of(value, hints[key]):
            expected = getattr(hints.get(key), "__name__", hints.get(key, "one of " + ", ".join(hints)))
            raise RecpoError(f"{name}: option {key} is {value!r}, expected {expected}")
    return dict(options)


def _is_of(value: object, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return any(type(value) is type(known) and value == known for known in get_args(kind))
    return type(value) is kind or (kind is float and type(value) is int)
