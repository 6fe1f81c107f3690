"""The features that a run keeps: schema and behaviors, and the features of its items, if its policy reads them.

::

    run/features.json          the fitted schema, and the behaviors in the order of their bits
    run/item_features.parquet  the features of the items; row v - 1 is item v
    run/vocabularies/          of the categories, for raw features in serving
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from recpo.artifacts import describe_os_error, read_json, write_json
from recpo.base.contracts import Policy
from recpo.base.errors import RecpoError
from recpo.base.feature_encoding import FittedFeatures, of_side
from recpo.base.features import Categories, Category, Feature, FeatureSchema, Side, read_features
from recpo.log.prepared import ITEM_FEATURES, Prepared, vocabulary_file
from recpo.serving.manifest import BundleFeatures

SCHEMA: Final = "features.json"
FEATURE_FILES: Final = (SCHEMA, ITEM_FEATURES)
VOCABULARIES: Final = "vocabularies"
_REMEDY: Final = "copy the whole run again, or train it again"


def hand_over(policy: Policy, data: Prepared) -> None:
    """Gives a new policy the schema, behaviors and item features of prepared data, before its weights are loaded.

    Raises:
        RecpoError: the policy reads something that the data does not have.
    """
    policy.set_schema(data.feature_schema, data.behaviors)
    if policy.reads_item_features:
        policy.set_item_features(data.item_features())


def write_features(root: Path, policy: Policy, data: Prepared) -> None:
    """Stores in the run directory ``root`` what ``hand_over_kept`` needs; nothing if the policy reads no features."""
    if not _reads(policy):
        return
    write_json(root / SCHEMA, {"features": data.feature_schema.to_json(), "behaviors": list(data.behaviors)})
    if policy.reads_item_features:
        names = [feature.name for feature in data.feature_schema.item]
        pq.write_table(data.table(ITEM_FEATURES, names), root / ITEM_FEATURES)
    for side in _sides(policy):
        for name in _coded(data.feature_schema.of(side)):
            (root / VOCABULARIES).mkdir(exist_ok=True)
            values = data.vocabulary(side, name)
            pq.write_table(pa.table({"value": values}), root / vocabulary_file(side, name))


def kept_features(policy: Policy, root: Path) -> BundleFeatures:
    """The fitted features that a policy reads, and its behaviors, from its run ``root``.

    Raises:
        RecpoError: a file is missing or damaged.
    """
    if not _reads(policy):
        return BundleFeatures()
    content = read_json(root / SCHEMA, _REMEDY)
    schema = FeatureSchema.from_json(content.get("features"), str(root / SCHEMA))
    found: dict[Side, FittedFeatures] = {}
    for side in _sides(policy):
        files = {name: root / vocabulary_file(side, name) for name in _coded(schema.of(side))}
        found[side] = of_side(schema.of(side), {name: _vocabulary(file) for name, file in files.items()})
    behaviors = tuple(content.get("behaviors", ())) if policy.reads_behaviors else ()
    return BundleFeatures(found.get("item"), found.get("user"), found.get("context"), behaviors)


def _vocabulary(file: Path) -> pa.Array:
    try:
        return pq.read_table(file, columns=["value"]).column(0).combine_chunks()
    except (OSError, pa.ArrowException) as error:
        raise RecpoError(f"{file} cannot be read ({error}); {_REMEDY}") from error


def _sides(policy: Policy) -> list[Side]:
    """Whose features it reads: those of items make the vectors of new ones."""
    reads: dict[Side, bool] = {
        "item": policy.reads_item_features,
        "user": policy.reads_user,
        "context": policy.reads_context,
    }
    return [side for side, read in reads.items() if read]


def _coded(features: Iterable[Feature]) -> list[str]:
    return [feature.name for feature in features if isinstance(feature, Category | Categories)]


def features_that_differ(policy: Policy, root: Path, data: Prepared) -> list[str]:
    """The fitted features of ``data`` that differ from those of the run ``root``; empty if the run keeps none."""
    if not (_reads(policy) and (root / SCHEMA).is_file()):
        return []
    content = read_json(root / SCHEMA, _REMEDY)
    kept, now = FeatureSchema.from_json(content.get("features"), str(root / SCHEMA)), data.feature_schema
    sides: list[Side] = ["item"] if policy.reads_item_features else []
    found = []
    for side in [*sides, *_sides(policy)]:
        files = {name: root / vocabulary_file(side, name) for name in _coded(kept.of(side))}
        same = kept.of(side) == now.of(side) and all(
            _vocabulary(file).equals(data.vocabulary(side, name)) for name, file in files.items() if file.is_file()
        )
        found += [] if same else [f"features of {'requests' if side == 'context' else side + 's'}"]
    if policy.reads_behaviors and tuple(content.get("behaviors", ())) != data.behaviors:
        found.append("behaviors")
    return found


def copy_features(base: Path, root: Path) -> None:
    """Copies the features of the run ``base`` into the run directory ``root``."""
    if (base / VOCABULARIES).is_dir():
        shutil.copytree(base / VOCABULARIES, root / VOCABULARIES, dirs_exist_ok=True)
    for name in FEATURE_FILES:
        if (base / name).is_file():
            shutil.copy2(base / name, root / name)


def hand_over_kept(policy: Policy, root: Path) -> None:
    """``hand_over`` with the features of the run ``root``.

    Raises:
        RecpoError: a file is missing or damaged.
    """
    if not _reads(policy):
        return
    content = read_json(root / SCHEMA, _REMEDY)
    schema = FeatureSchema.from_json(content.get("features"), str(root / SCHEMA))
    policy.set_schema(schema, tuple(content.get("behaviors", ())))
    if policy.reads_item_features:
        try:
            table = pq.read_table(root / ITEM_FEATURES)
        except OSError as error:
            raise RecpoError(f"{describe_os_error(error, str(root / ITEM_FEATURES))}; {_REMEDY}") from error
        policy.set_item_features(read_features(schema.item, table, first_missing=True).tensors())


def _reads(policy: Policy) -> bool:
    return policy.reads_item_features or policy.reads_user or policy.reads_context or policy.reads_behaviors
