"""Updates a bundle to a new catalog, from an item table: in seconds, without training."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recpo import __version__
from recpo.artifacts.checksums import sha256
from recpo.artifacts.outputs import output_directory
from recpo.base.errors import RecpoError
from recpo.base.feature_encoding import FittedFeatures
from recpo.base.features import FeatureArrays
from recpo.base.frames import are_seconds, optional_times
from recpo.log.id_map import AVAILABILITY, RETIRED, IdMap
from recpo.serving.bundle import GOLDEN, Bundle, check_golden, load_runtime, write_golden
from recpo.serving.histories import ITEM_ID
from recpo.serving.manifest import CODES, ITEM_ENCODERS, ITEMS, MANIFEST, BundleManifest
from recpo.serving.recommending import ATTRIBUTES, attribute_columns, milliseconds
from recpo.serving.runtimes import IndexOptions


class Refreshed(NamedTuple):
    """A refreshed bundle, and what became of the items.

    Attributes:
        bundle: the new bundle.
        listed: items that may be listed.
        retired: items that are in no list any more.
        left_out: items of the table that the bundle does not know and cannot take: it reads no features of items.
        added: new items, with the vectors that their features say.
        later: items among ``listed`` that are not available yet.
    """

    bundle: Bundle
    listed: int
    retired: int
    left_out: int
    added: int = 0
    later: int = 0


class EncodedItems(NamedTuple):
    """Encoded features of the rows of a table of items, and what they were encoded with."""

    fitted: FittedFeatures
    features: FeatureArrays


@dataclass(frozen=True)
class _Today:
    """The candidates of the new catalog.

    Attributes:
        table: the items that are not retired, one per row.
        rows: their rows in the file.
        found: their internal ids in the bundle; 0 = the bundle does not know the item.
        times: column -> ``[N]`` milliseconds since the epoch, of the columns of ``AVAILABILITY`` that the table has.
    """

    table: pa.Table
    rows: np.ndarray
    found: np.ndarray
    times: Mapping[str, np.ndarray]

    @property
    def new(self) -> np.ndarray:
        """Rows of ``table`` that the bundle does not know."""
        return np.flatnonzero(self.found == 0)

    @classmethod
    def read(cls, file: Path, items: IdMap, columns: Sequence[str], item_column: str) -> Self:
        """Reads the table, of ``columns`` those that it has; ``item_column`` is the user's name of the ids.

        Raises:
            RecpoError: it is no such table, ids are of another type, or times are not times.
        """
        wanted = [ITEM_ID, RETIRED, *AVAILABILITY, *columns]
        try:
            with pq.ParquetFile(file) as source:
                names = set(source.schema_arrow.names)
                ids = item_column if item_column in names else ITEM_ID
                table = source.read([name for name in dict.fromkeys([ids, *wanted[1:]]) if name in names])
            table = table.rename_columns([ITEM_ID if name == ids else name for name in table.column_names])
            table[ITEM_ID]
        except (OSError, KeyError, pa.ArrowException) as error:
            names_of_ids = " or ".join(dict.fromkeys([item_column, ITEM_ID]))
            message = f"items: {file} is no Parquet file with a column {names_of_ids} ({error})"
            raise RecpoError(message, code="wrong_file", field="items") from error
        rows = np.arange(len(table))
        if RETIRED in table.column_names:
            kept = pc.invert(table[RETIRED].combine_chunks().fill_null(False))
            table, rows = table.filter(kept), rows[kept.to_numpy(zero_copy_only=False)]
        found = items.to_internal(table[ITEM_ID].combine_chunks())
        return cls(table, rows, found, _times(table, file))

    def availability(self, items: IdMap, added: int) -> np.ndarray | None:
        """When the items of the bundle, and behind them the new ones, may be listed; see ``IdMap``."""
        if not self.times and items.available is None:
            return None
        size, known = len(items) + added, self.found > 0
        found = np.stack([np.full(size, limit) for limit in AVAILABILITY.values()])
        if items.available is not None:
            found[:, : len(items)] = items.available
        for row, name in zip(found, AVAILABILITY, strict=True):
            if name in self.times:
                row[self.found[known] - 1] = self.times[name][known]
                row[len(items) :] = self.times[name][self.new][:added]
        return found


def _times(table: pa.Table, file: Path) -> dict[str, np.ndarray]:
    """The columns of ``AVAILABILITY`` that a table has."""
    found = {
        name: optional_times(table, name, limit, f"items: {file}")
        for name, limit in AVAILABILITY.items()
        if name in table.column_names
    }
    for name, times in found.items():
        if (wrong := are_seconds(times)).any():
            message = (
                f"items: {file}, column {name}: {int(wrong.sum())} times are no plausible milliseconds since 1970, the "
                f"first is {times[wrong.argmax()]} (seconds?): write times, or milliseconds"
            )
            raise RecpoError(message, code="out_of_range", field=name)
    return found


def refresh_bundle(
    root: Path, items: Path, out: Path, *, encoded: EncodedItems | None = None, overwrite: bool = False
) -> Refreshed:
    """Writes the bundle ``root`` with the candidates of today to ``out``.

    Items of the bundle that ``items`` does not name, or names as retired, are listed no more; they stay in histories.
    The bundle keeps ``available_from`` and ``available_until`` of the items, and lists an item between these times
    only. Without such a column, known items keep the time that they have in the bundle.

    A bundle with an encoder of item features, or of factors whose prior means depend on them, takes new items, behind
    its own: the vector of a new item is what its features say, as of an item without training events. The program is
    then exported again and verified as in an export, which takes torch and no training code. Otherwise new items are
    counted and left out, and program and weights are linked. Either way the bundle answers its golden requests first,
    and gets golden requests and checksums of its own.

    Args:
        root: the bundle.
        items: Parquet file with ``item_id`` (or the user's own name of it), ``retired`` and ``available_from`` as
            ``prepare`` writes them, ``available_until`` (times, or milliseconds since 1970; null = no limit), and,
            where items are new and nothing is ``encoded``, the columns of the features.
        out: bundle directory to make.
        encoded: the features of the rows of ``items``, of a prepared table.
        overwrite: replace a bundle in ``out``.

    Raises:
        RecpoError: no bundle, no such table, no candidate left, a column of the features is missing, semantic ids and
            new items, or ``out`` is in the way.
    """
    bundle = Bundle.open(root)
    check_golden(bundle)
    manifest, known, attributes = bundle.manifest, bundle.items, list(bundle.filters.attributes)
    columns = [one.source for one in manifest.features.item] if encoded is None else []
    today = _Today.read(items, known, [*columns, *attributes], str(manifest.origin.get("item_column") or ITEM_ID))
    grows = len(today.new) > 0 and bool(manifest.features.item)
    if len(today.new) and any(name.startswith(f"{CODES}/") for name in manifest.files):
        message = (
            f"{items}: {len(today.new):,} items are new, and items of a policy of semantic ids need codes: `recpo "
            "tokenize --extends`, `recpo train --init_from` and `recpo export`, or a table without them"
        )
        raise RecpoError(message, code="unsupported", field="items")
    retired = np.union1d(np.setdiff1d(np.arange(1, len(known) + 1), today.found), known.retired)
    if len(retired) == len(known) and not grows:
        message = f"{items}: none of its items is a candidate of {root}: name the table of the same catalog"
        raise RecpoError(message, code="mismatch", field="items")
    origin = {**manifest.origin, "refreshed": {"bundle": root.resolve().name, "manifest": sha256(root / MANIFEST)}}
    manifest = replace(manifest, origin=origin)
    old = known.to_external(np.arange(1, len(known) + 1))
    ids = _new_ids(today, today.new if grows else today.new[:0], known.type, items)
    fresh = IdMap(pa.concat_arrays([old, ids]), retired, today.availability(known, len(ids)))
    with output_directory(out, kind="bundle", overwrite=overwrite, inputs=[root, items]) as working:
        if grows:
            if attributes:
                pq.write_table(_grown_attributes(root, attributes, today, ids, items), working / ATTRIBUTES)
            new = _new_features(bundle, today, encoded, items)
            _write_grown(root, manifest, fresh, new, working)
        else:
            _write_same(root, manifest, fresh, working)
    left_out = len(today.new) - len(ids)
    later = 0
    if fresh.available is not None:
        later = len(np.setdiff1d(np.flatnonzero(fresh.available[0] > milliseconds(None)) + 1, fresh.retired))
    return Refreshed(Bundle.open(out), len(fresh) - len(retired), len(retired), left_out, len(ids), later)


def _write_same(root: Path, manifest: BundleManifest, items: IdMap, working: Path) -> None:
    """The same program and weights with other candidates."""
    for name in manifest.files:
        if name not in (ITEMS, GOLDEN):
            _link(root / name, working / name)
    items.save(working / ITEMS)
    write_golden(Bundle(working, manifest, items, load_runtime(working, manifest, "onnx")))
    replace(manifest, versions={**manifest.versions, "recpo": __version__}).write(working)


def _write_grown(root: Path, manifest: BundleManifest, items: IdMap, new: EncodedItems, working: Path) -> None:
    """The program of the policy with more items, in a directory that has their attributes."""
    try:
        from recpo.serving.export import MODEL_CARD, refreshed_card, versions, write_engines
        from recpo.serving.saved_policy import grown_policy
    except ImportError as error:
        message = f"refresh: items are new, and their vectors take torch ({error}): install torch"
        raise RecpoError(message, code="not_installed", field="torch") from error
    for name in manifest.files:
        if name == ITEM_ENCODERS or name.startswith("vocabularies/"):
            _link(root / name, working / name)
    facts = manifest.index
    index = None if facts is None else IndexOptions(facts["target"], facts["lists"], facts["oversampling"])
    grown = replace(manifest, num_items=len(items), versions=versions(), agreement=None, index=None)
    grown = write_engines(grown_policy(root, manifest, *new), grown, items, working, index)
    (working / MODEL_CARD).write_text(refreshed_card(grown, root), encoding="utf-8")
    grown.write(working)


def _new_ids(today: _Today, rows: np.ndarray, kind: pa.DataType, file: Path) -> pa.Array:
    ids = today.table[ITEM_ID].combine_chunks().take(pa.array(rows))
    if ids.null_count or len(ids.unique()) < len(ids):
        message = f"items: {file} has rows without an item_id, or several rows of an item: give one row for each"
        raise RecpoError(message, code="duplicate", field="item_id")
    try:
        return ids.cast(kind)
    except pa.ArrowInvalid as error:
        message = f"items: {file}: item_id does not fit the bundle's {kind} ({error})"
        raise RecpoError(message, code="wrong_type", field="item_id") from error


def _grown_attributes(root: Path, names: Sequence[str], today: _Today, ids: pa.Array, file: Path) -> pa.Table:
    """The attributes ``names`` of all items, those of the new ones out of the table of today."""
    if missing := [name for name in names if name not in today.table.column_names]:
        message = (
            f"items: {file} names new items and has no column {', '.join(missing)}, by which requests to the bundle "
            "may filter: add it, with nulls where it is not known"
        )
        raise RecpoError(message, code="missing_column", field=missing[0])
    old, table = pq.read_table(root / ATTRIBUTES), today.table.take(pa.array(today.new)).select([ITEM_ID, *names])
    fresh = attribute_columns(table, IdMap(ids), f"items: {file}")
    columns = {name: fresh[name] if name in fresh.column_names else pa.nulls(len(fresh)) for name in old.column_names}
    try:
        return pa.concat_tables([old, pa.table(columns).cast(old.schema)])
    except pa.ArrowInvalid as error:
        message = f"items: {file}: attributes are of other types than the bundle's ({error})"
        raise RecpoError(message, code="wrong_type", field="attributes") from error


def _new_features(bundle: Bundle, today: _Today, encoded: EncodedItems | None, file: Path) -> EncodedItems:
    """The features of the new items."""
    fitted = bundle.features.item
    if encoded is not None:
        if not fitted.agrees(encoded.fitted):
            message = (
                f"items: {file} was prepared with features, vocabularies or means that are not those of {bundle.root}: "
                "name data that `recpo prepare --extends` made of its training data, or the table of items as it was "
                "before"
            )
            raise RecpoError(message, code="mismatch", field="features")
        return EncodedItems(fitted, encoded.features.rows(today.rows[today.new]))
    if missing := [one.source for one in fitted.features if one.source not in today.table.column_names]:
        message = (
            f"items: {file} names {len(today.new):,} new items and has no column {', '.join(missing)}, which the "
            f"bundle reads of them: give the columns {', '.join(one.source for one in fitted.features)}, or leave the "
            "new items out"
        )
        raise RecpoError(message, code="missing_column", field=missing[0])
    return EncodedItems(fitted, fitted.read(today.table.take(pa.array(today.new)), "items"))


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
