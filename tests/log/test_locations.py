"""Logs and prepared directories in an object store: the same content, complete or not at all."""

import hashlib
import pickle
import uuid
from pathlib import Path

import fsspec
import pyarrow.parquet as pq
import pytest
import torch

from recpo.batches.datamodule import FeedbackDataModule, ResumableLoader, TrainBatches
from recpo.batches.preference_lists import PreferenceListLayout
from recpo.batches.slates import Rank, SequenceLayout, evaluation_batches
from recpo.log import writing as publishing
from recpo.log.engine import EngineOptions, start_engine
from recpo.log.locations import Location, locate
from recpo.log.prepare import Preparation
from recpo.log.prepared import Prepared
from recpo.log.writing import Output, Sources
from tests.log.conftest import make_log, write_log
from tests.refusals import refused

ENGINE = EngineOptions(memory_limit="512MB", threads=1)


@pytest.fixture(params=["file", "memory"])
def store(request, tmp_path):
    """An address in a store of its own: a directory by its URI, and fsspec's store in memory."""
    if request.param == "file":
        return f"file://{tmp_path}/store"
    return f"memory://bucket-{uuid.uuid4().hex}"


def put(address, content):
    target = locate(address)
    with target.open_output() as sink:
        sink.write(content)


def put_log(store, table, name, tmp_path):
    put(f"{store}/{name}", Path(write_log(tmp_path / "log.parquet", table)).read_bytes())


def run(log, out, **choice):
    overwrite = choice.pop("overwrite", False)
    return Preparation(**choice).write(Sources(log), Output(out, progress=False, engine=ENGINE, overwrite=overwrite))


def contents(directory):
    return {str(file.inside): hashlib.sha256(file.read_bytes()).hexdigest() for file in locate(directory).files()}


@pytest.mark.slow
def test_a_log_in_a_store_prepares_into_the_store_to_the_same_bytes(store, tmp_path):
    log = make_log()
    half = len(log) // 2
    put_log(store, log.slice(0, half), "log/day=1/a.parquet", tmp_path)
    put_log(store, log.slice(half), "log/day=2/b.parquet", tmp_path)
    put(f"{store}/log/_SUCCESS", b"")
    put(f"{store}/log/.hidden/c.parquet", b"not a file of the log")
    for name in ("a", "b"):
        (tmp_path / "local").mkdir(exist_ok=True)
        part = log.slice(0, half) if name == "a" else log.slice(half)
        write_log(tmp_path / "local" / f"{name}.parquet", part)
    expected = run(str(tmp_path / "local"), tmp_path / "out", rows_per_shard=300)
    local = {
        str(file.relative_to(tmp_path / "out")): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in (tmp_path / "out").rglob("*.*")
        if file.is_file()
    }
    for number, address in enumerate([f"{store}/log", f"{store}/log/*/*.parquet", f"{store}/log/**/[ab].parquet"]):
        manifest = run(address, f"{store}/out-{number}", rows_per_shard=300)
        assert manifest == expected
        assert contents(f"{store}/out-{number}") == local
    Prepared.open(f"{store}/out-0").verify()
    assert not list(tmp_path.glob("out.*"))


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_csv_in_a_store_and_its_faults(store, tmp_path):
    log = make_log(events=300)
    put(f"{store}/log.csv", log.to_pandas().to_csv(index=False).encode())
    log.to_pandas().to_csv(tmp_path / "log.csv", index=False)
    there, here = run(f"{store}/log.csv", tmp_path / "a"), run(str(tmp_path / "log.csv"), tmp_path / "b")
    assert there == here
    put(f"{store}/bad/empty.parquet", b"")
    put(f"{store}/bad/text.parquet", b"user_id,item_id\n")
    with refused("empty"):
        run(f"{store}/bad", tmp_path / "c")
    broken = log.set_column(1, "item_id", [[None, *log["item_id"].to_pylist()[1:]]])
    put_log(store, broken, "null.parquet", tmp_path)
    with refused("bad_value", "item_id"):
        run(f"{store}/null.parquet", tmp_path / "c")
    with refused("missing_file", "log"):
        run(f"{store}/nothing/*.parquet", tmp_path / "c")


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_an_interrupted_upload_is_not_a_prepared_directory(store, tmp_path, monkeypatch):
    put_log(store, make_log(seed=1), "log.parquet", tmp_path)
    out = f"{store}/out"
    run(f"{store}/log.parquet", out, rows_per_shard=200)
    before = set(contents(out))
    with refused("exists", "out"):
        run(f"{store}/log.parquet", out)

    def interrupted(location, file):
        if location.name == "users.parquet":
            raise KeyboardInterrupt
        put(str(location), file.read_bytes())

    with monkeypatch.context() as patched:
        patched.setattr(publishing.Location, "upload", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(f"{store}/log.parquet", out, rows_per_shard=200, overwrite=True)
    with refused("wrong_file", "manifest.json"):
        Prepared.open(out)
    # What is left is written over, and what the last whole directory had more of goes after the new manifest.
    run(f"{store}/log.parquet", out, rows_per_shard=200)
    assert set(contents(out)) == before
    run(f"{store}/log.parquet", out, overwrite=True)
    Prepared.open(out).verify()
    assert set(contents(out)) < before
    assert "train/00001.parquet" not in contents(out)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_training_reads_from_a_store_what_it_reads_from_disk(store, tmp_path):
    put_log(store, make_log(), "log.parquet", tmp_path)
    run(f"{store}/log.parquet", f"{store}/out", rows_per_shard=300)
    run(f"{store}/log.parquet", tmp_path / "out", rows_per_shard=300)
    layout = SequenceLayout(history_length=6)
    there, here = (FeedbackDataModule(root, 8, layout) for root in (f"{store}/out", tmp_path / "out"))
    for loader in ("train_dataloader", "val_dataloader"):
        batches = zip(getattr(there, loader)(), getattr(here, loader)(), strict=True)
        for remote, local in batches:
            feedback = [getattr(batch, "feedback", batch) for batch in (remote, local)]
            assert torch.equal(feedback[0].slates.item_ids, feedback[1].slates.item_ids)
            assert torch.equal(feedback[0].histories.item_ids, feedback[1].histories.item_ids)
    assert len(list(evaluation_batches(f"{store}/out", "test", 6, 16))) > 1
    assert there.prepared.item_ids().type == here.prepared.item_ids().type
    assert (there.prepared.item_counts() == here.prepared.item_counts()).all()
    (locate(f"{store}/out") / "train/00001.parquet").unlink()
    with refused("missing_file", "train/00001.parquet"):
        Prepared.open(f"{store}/out")


@pytest.mark.slow
def test_workers_of_a_store_are_spawned_and_give_the_same_batches(tmp_path):
    layout = PreferenceListLayout(6, uniform=2)
    write_log(tmp_path / "log.parquet", make_log())
    run(str(tmp_path / "log.parquet"), tmp_path / "out", rows_per_shard=300)

    def rows(root, workers):
        loader = ResumableLoader(TrainBatches(Prepared.open(root), layout, 8, 1, Rank()), workers)
        return [batch.slates.item_ids.tolist() for batch in loader]

    assert rows(f"file://{tmp_path}/out", 1) == rows(tmp_path / "out", 0)


def test_names_of_places(tmp_path):
    assert locate("logs/a.parquet") == Path("logs/a.parquet")
    assert locate(tmp_path) == tmp_path
    assert locate("s3a://bucket/a") == locate("s3://bucket/a") == Location("s3://bucket/a")
    place = locate("s3://bucket/a/?region=eu-west-1&endpoint_override=localhost") / "train" / "0.parquet"
    assert str(place) == "s3://bucket/a/train/0.parquet"
    assert place.name == "0.parquet"
    assert pickle.loads(pickle.dumps(place)) == place
    with refused("not_local", "s3:/bucket/a"):
        locate(Path("s3://bucket/a"))
    with refused("failed", "nostore://bucket/a"):
        Prepared.open("nostore://bucket/a")


def test_a_store_that_does_not_answer_is_one_clear_error(tmp_path, monkeypatch):
    def unreachable(*arguments, **options):
        raise OSError("AWS Error ACCESS_DENIED during HeadObject operation\nwith a second line")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "info", unreachable)
    with refused("failed", "manifest.json"):
        Prepared.open(f"memory://bucket-{uuid.uuid4().hex}/out")


def test_a_store_that_cannot_be_written_to_is_found_before_the_work(tmp_path, monkeypatch):
    path = write_log(tmp_path / "log.parquet", make_log(events=200))

    def denied(*arguments, **options):
        raise PermissionError("no right to write here")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "_open", denied)
    monkeypatch.setattr(publishing, "start_engine", lambda *arguments: pytest.fail("the engine was started"))
    with refused("failed", "out"):
        run(path, f"memory://bucket-{uuid.uuid4().hex}/out")


def test_columns_that_are_not_used_are_not_copied(tmp_path):
    log = make_log(events=200)
    wide = log.append_column("padding", [["x" * 1000] * len(log)])
    write_log(tmp_path / "log.parquet", wide)
    work = tmp_path / "work"
    work.mkdir()
    with start_engine(ENGINE, work) as engine:
        engine.read_parquet([locate(f"file://{tmp_path}/log.parquet")], log.schema.names)
        assert pq.read_schema(work / "copy-0.parquet").names == log.schema.names
