"""What a run keeps of features: schema and behaviors, and the features of its items, where its policy reads them.

::

    run/features.json          the fitted schema, and the behaviors in the order of their bits
    run/item_features.parquet  the features of the items, row v - 1 is item v
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

import pyarrow.parquet as pq

from recpo.artifacts import describe_os_error, read_json, write_json
from recpo.contracts import Policy
from recpo.data.prepared import ITEM_FEATURES, Prepared
from recpo.errors import RecpoError
from recpo.features.arrays import read_features
from recpo.features.schema import FeatureSchema

SCHEMA: Final = "features.json"
FEATURE_FILES: Final = (SCHEMA, ITEM_FEATURES)
_REMEDY: Final = "copy the whole run again, or train it again"


def hand_over(policy: Policy, data: Prepared) -> None:
    """Gives a new policy schema, behaviors and item features of prepared data; before its weights are loaded.

    Raises:
        RecpoError: the policy reads what the data does not have.
    """
    policy.set_schema(data.feature_schema, data.behaviors)
    if policy.reads_item_features:
        policy.set_item_features(data.item_features())


def write_features(root: Path, policy: Policy, data: Prepared) -> None:
    """Keeps in the run directory ``root`` what ``hand_over_kept`` needs; nothing where the policy reads nothing."""
    if not _reads(policy):
        return
    write_json(root / SCHEMA, {"features": data.feature_schema.to_json(), "behaviors": list(data.behaviors)})
    if policy.reads_item_features:
        names = [feature.name for feature in data.feature_schema.item]
        pq.write_table(data.table(ITEM_FEATURES, names), root / ITEM_FEATURES)


def copy_features(base: Path, root: Path) -> None:
    """Copies the features of the run ``base`` into the run directory ``root``."""
    for name in FEATURE_FILES:
        if (base / name).is_file():
            shutil.copy2(base / name, root / name)


def hand_over_kept(policy: Policy, root: Path) -> None:
    """``hand_over`` of what the run ``root`` keeps.

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
