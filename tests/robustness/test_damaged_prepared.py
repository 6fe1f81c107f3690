"""No damage to a prepared directory is read as other data, and none ends in a traceback."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from recpo.artifacts.checksums import seal
from recpo.base.errors import RecpoError
from recpo.log.prepare import Preparation
from recpo.log.prepared import MANIFEST, Prepared
from recpo.log.writing import Output, Sources
from tests.refusals import refused

USERS, EVENTS = 12, 30


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    root = tmp_path_factory.mktemp("damaged")
    rng = np.random.default_rng(0)
    rows = USERS * EVENTS
    log = {
        "user_id": np.repeat([f"user {number}" for number in range(USERS)], EVENTS),
        "item_id": rng.integers(100, 140, rows),
        "timestamp": 1_714_500_000_000 + rng.integers(0, 10**9, rows),
        "watch_time": rng.random(rows) * 60,
        "duration": np.full(rows, 60.0),
        "dislike": rng.random(rows) < 0.1,
    }
    pq.write_table(pa.table(log), root / "log.parquet")
    Preparation(rows_per_shard=100).write(Sources(str(root / "log.parquet")), Output(root / "prepared", progress=False))
    return root / "prepared"


def everything(root):
    """All that recpo reads of a prepared directory; as bytes, so that nan equals nan."""
    data = Prepared.open(root)
    read = [json.dumps(data.manifest, sort_keys=True), str(data.feedback), data.num_items, data.catalog_checksum]
    read += [data.item_ids().to_external(range(1, data.num_items + 1)).to_pylist(), data.item_counts().tobytes()]
    read += [data.table(name).to_pydict() for name in ("users.parquet", "quantiles.parquet", "histories.parquet")]
    for period in ("train", "valid", "test"):
        for shard in range(data.num_shards(period)):
            read += [column.tobytes() for column in data.load(period, shard) if column is not None]
            read += [column.tobytes() for column in data.keys(period, shard) if column is not None]
    return read


def refused_or_equal(root, before):
    try:
        after = everything(root)
    except RecpoError as error:
        return str(error)
    assert repr(after) == repr(before)
    return None


@pytest.fixture(scope="module")
def before(original):
    return everything(original)


@pytest.fixture
def copy(original, tmp_path):
    return shutil.copytree(original, tmp_path / "prepared")


FILES = [
    *("items.parquet", "users.parquet", "quantiles.parquet", "histories.parquet"),
    *("train/00000.parquet", "train/00001.parquet", "valid/00000.parquet", "test/00000.parquet"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FILES, "manifest.json", "recpo.json"])
def test_flipped_bits(original, before, tmp_path_factory, name):
    root = shutil.copytree(original, tmp_path_factory.mktemp("flipped") / "prepared")
    content = (root / name).read_bytes()

    @settings(max_examples=15, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, len(content) * 8 - 1))
    def flip(bit):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        (root / name).write_bytes(changed)
        message = refused_or_equal(root, before)
        if name.endswith(".parquet"):
            assert name in message

    flip()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kept", [0, 1, 4, 0.5, -1])
def test_files_that_were_cut_short(copy, before, name, kept):
    content = (copy / name).read_bytes()
    (copy / name).write_bytes(content[: int(len(content) * kept) if isinstance(kept, float) else kept])
    assert name in refused_or_equal(copy, before)


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_missing_files(copy, before, name):
    (copy / name).unlink()
    assert name in refused_or_equal(copy, before)


@pytest.mark.parametrize(("first", "second"), [("train/00000", "train/00001"), ("train/00000", "test/00000")])
def test_shards_that_changed_places(copy, before, first, second):
    (copy / f"{first}.parquet").rename(copy / "aside")
    (copy / f"{second}.parquet").rename(copy / f"{first}.parquet")
    (copy / "aside").rename(copy / f"{second}.parquet")
    assert "parquet" in refused_or_equal(copy, before)


def test_item_ids_in_another_order(copy, before):
    items = pq.read_table(copy / "items.parquet")
    backwards = items.set_column(1, "item_id", items["item_id"].combine_chunks()[::-1])
    pq.write_table(backwards, copy / "items.parquet")
    with refused("damaged", "items.parquet"):
        Prepared.open(copy)


def test_a_file_that_changes_after_it_was_read_is_compared_again(copy):
    data = Prepared.open(copy)
    data.load("train", 0)
    data.load("train", 0)
    file = copy / "train/00000.parquet"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with refused("damaged", "train/00000.parquet"):
        data.load("train", 0)


MANIFESTS = [b"", b"{", b"null", b"[]", b"3", b'"text"', b"\xff\xfe\x00", b"{}", b'{"format_version": 5}', b"[" * 10**5]


@pytest.mark.parametrize("content", MANIFESTS, ids=range(len(MANIFESTS)))
def test_manifests_that_are_none(copy, content):
    (copy / MANIFEST).write_bytes(content)
    with refused(("damaged", "old_format"), ...):
        Prepared.open(copy)


def test_every_key_of_a_manifest_is_guarded(copy, original):
    manifest = json.loads((original / MANIFEST).read_text())
    for key in manifest:
        for changed in (
            {**manifest, key: None},
            {**manifest, key: []},
            {k: v for k, v in manifest.items() if k != key},
        ):
            if changed == manifest:  # a list that is empty in this one
                continue
            (copy / MANIFEST).write_text(json.dumps(changed))
            with refused(("damaged", "old_format"), ...):
                Prepared.open(copy)


@pytest.mark.parametrize(
    "outside", ["../outside.parquet", "{parent}/outside.parquet", "train/../../outside.parquet", ""]
)
@pytest.mark.parametrize("place", ["file", "past", "files"])
def test_a_manifest_that_is_sealed_again_names_no_file_outside(copy, outside, place):
    manifest = json.loads((copy / MANIFEST).read_text())
    shard, named = manifest["shards"]["valid"][0], outside.format(parent=copy.parent)
    shutil.copy2(copy / shard["file"], copy.parent / "outside.parquet")
    if place == "files":
        manifest["files"][named] = manifest["files"]["items.parquet"]
    else:
        shard[place] = named
    manifest.pop("sha256")
    (copy / MANIFEST).write_text(json.dumps(seal(manifest)))
    with refused("untrusted", "manifest.json"):
        Prepared.open(copy)


def test_an_older_format_says_what_to_do(copy):
    manifest = json.loads((copy / MANIFEST).read_text())
    (copy / MANIFEST).write_text(json.dumps(seal({**manifest, "format_version": 1})))
    with refused("old_format", "format_version"):
        Prepared.open(copy)
