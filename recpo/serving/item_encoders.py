"""Vectors of items that a bundle does not know, computed from their features, and the policy with these items added.

Uses torch but no training code: the weights are in safetensors, the features in the manifest.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from recpo.artifacts import write_tensors
from recpo.base.contracts import Policy
from recpo.base.errors import RecpoError
from recpo.base.feature_encoding import FittedFeatures
from recpo.base.features import FeatureArrays
from recpo.policies.feature_encoder import FeatureEncoder
from recpo.policies.item_features import BLOCK_ITEMS
from recpo.policies.item_table import ItemTable
from recpo.policies.tilted import TiltedPolicy
from recpo.serving.bundle_features import ITEM_ENCODERS
from recpo.serving.manifest import WEIGHTS, BundleManifest
from recpo.serving.saved_policy import policy_of_size

_TOLERANCE: Final = 1e-5  # tolerance between vectors from the same weights and features
_REMEDY: Final = "copy or export the bundle again"


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
        for name, table in _tables(policy)
        if table.features is not None
        for part, value in table.features.encoder.state_dict().items()
    }
    write_tensors(root / ITEM_ENCODERS, weights)
    loaded = load_item_encoders(root, fitted)
    ids = torch.arange(1, min(policy.num_items + 1, BLOCK_ITEMS))
    with torch.no_grad():
        for name, table in _tables(policy):
            if table.features is None:
                continue
            gap = table.features.encoded_by(loaded[name], ids) - table.features(ids)
            if not gap.abs().max() <= _TOLERANCE:
                raise RecpoError(
                    f"the encoder of {name} is not the policy's once it is saved (by {gap.abs().max():.2g})"
                )


def load_item_encoders(root: Path, fitted: FittedFeatures) -> dict[str, FeatureEncoder]:
    """The encoders by the names of their item tables, in evaluation mode. The files are already verified.

    Raises:
        RecpoError: they are missing, damaged, or belong to other features.
    """
    try:
        weights = load_file(root / ITEM_ENCODERS)
        names = sorted({name.rpartition(".output.weight")[0] for name in weights} - {""})
        encoders = {}
        for name in names:
            own = {key.removeprefix(f"{name}."): value for key, value in weights.items() if key.startswith(f"{name}.")}
            dim, hidden = own["output.weight"].shape
            encoders[name] = FeatureEncoder(fitted.features, dim, hidden=hidden).eval()
            encoders[name].load_state_dict(own)
    except (SafetensorError, OSError, RuntimeError, KeyError, ValueError) as error:
        raise RecpoError(f"{root / ITEM_ENCODERS} does not fit its features ({error}): {_REMEDY}") from error
    return encoders


@torch.no_grad()
def grown_policy(root: Path, manifest: BundleManifest, fitted: FittedFeatures, features: FeatureArrays) -> Policy:
    """The policy of a bundle with more items appended, whose vectors come from their features.

    Below a tilted policy, a new item has the factors and bias of an item without events, zero; its grade is the mean.

    Args:
        root: the bundle, whose files are already verified.
        manifest: its manifest.
        fitted: the fitted item features.
        features: features of the new items ``[N]``.

    Raises:
        RecpoError: the bundle's policy cannot take more items.
    """
    encoders, added = load_item_encoders(root, fitted), len(features.codes)
    vectors = {f"{name}.weight": _encoded(encoder, features) for name, encoder in encoders.items()}
    policy = policy_of_size(root, manifest, manifest.num_items + added)
    if isinstance(policy, TiltedPolicy) and policy.factors.rooted:
        raise RecpoError(
            f"{root}: its policy is tilted with a lower bound, which is not known of items without events: train and "
            "tilt with today's items, or tilt with lower_bound 0"
        )
    own, weights = policy.state_dict(), load_file(root / WEIGHTS)
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
    elif name.endswith("factors.factor_variance"):
        rows = saved.amax(0).expand(more, -1)  # as uncertain as the least known item
    elif ".factors." in f".{name}":
        rows = saved.new_zeros(more, *saved.shape[1:])
    elif name.rpartition(".")[2] == "cdf":  # the proposal of training, which never proposes new items
        rows = saved[-1:].expand(more)
    else:
        raise RecpoError(f"refresh: nothing says what {name} is of a new item: train with today's items and export")
    return torch.cat([saved, rows.to(saved.dtype)])


def _encoded(encoder: FeatureEncoder, features: FeatureArrays) -> Tensor:
    tensors = features.tensors()
    blocks = torch.arange(len(tensors.codes)).split(BLOCK_ITEMS)
    return torch.cat([encoder(tensors.rows(block)) for block in blocks])


def _tables(policy: Policy) -> Iterator[tuple[str, ItemTable]]:
    return ((name, part) for name, part in policy.named_modules() if isinstance(part, ItemTable))
