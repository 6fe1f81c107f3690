"""A sample of ``fuzz.py``: files with changed, missing and added bytes, and their readers."""

import zipfile

import pytest
import torch
from hypothesis import given, settings, strategies as st

from recpo.artifacts.checksums import seal, unseal
from recpo.artifacts.documents import read_json
from recpo.artifacts.outputs import write_json
from recpo.base.errors import RecpoError
from recpo.training.checkpoints import saved_tensors, validate_checkpoint
from tests.refusals import refused
from tests.robustness.fuzz import Fuzzer, make_base

#: inputs of each target that needs no trained model
INPUTS = {
    "codes": 40,
    "evaluation": 60,
    "simulation": 30,
    "checkpoint": 60,
    "manifest names": 40,
    "journal": 25,
    "csv log": 4,
    "parquet log": 4,
    "lists": 20,
    "item table": 20,
    "yaml": 6,
    "options": 40,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory, request):
    place = tmp_path_factory.mktemp("fuzz") / "base"
    place.mkdir()
    make_base(place, request.config.rootpath / "configs", models=False)
    return place


@pytest.mark.slow
@pytest.mark.parametrize("name", INPUTS)
def test_mutated_files_are_refused_or_read_as_what_they_are(base, tmp_path, name):
    fuzzer = Fuzzer(name, base, tmp_path, seed=0)
    outcomes = [fuzzer.attempt(number) for number in range(INPUTS[name])]
    assert [fault for _, fault in outcomes if fault is not None] == []
    if fuzzer.target.sealed:
        assert {"refused"} <= {outcome for outcome, _ in outcomes} <= {"refused", "same"}


@settings(max_examples=100)
@given(st.data())
def test_a_sealed_document_is_read_as_it_was_written_or_refused(tmp_path_factory, data):
    file = tmp_path_factory.getbasetemp() / "sealed.json"
    content = {"scale": 0.5, "names": ["a", None], "deep": {"x": [1, {"y": True}]}}
    write_json(file, seal(content))
    whole = file.read_bytes()
    place = data.draw(st.integers(0, len(whole)))
    token = data.draw(st.sampled_from([b"NaN", b"Infinity", b"-", b"0", b"null", b"[" * 2000, b'"', b"\xff", b" "]))
    removed = data.draw(st.integers(0, 5))
    file.write_bytes(whole[:place] + token + whole[place + removed :])
    try:
        found = unseal(read_json(file, "make it again"), file, "make it again")
    except RecpoError as error:
        found = content if "make it again" in str(error) else {}
    assert found == content


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_json_has_not_are_a_changed_document(tmp_path, value):
    file = tmp_path / "calibration.json"
    write_json(file, seal({"scale": 0.5}))
    file.write_text(file.read_text().replace("0.5", value))
    with refused("damaged", "calibration.json"):
        unseal(read_json(file, "again"), file, "again")


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("record", ["data.pkl", "data/0"])
def test_a_record_that_would_inflate_is_refused_before_it_does(tmp_path, method, record):
    whole, bomb = tmp_path / "whole.ckpt", tmp_path / "last.ckpt"
    torch.save({"state_dict": {"first": torch.arange(9.0)}}, whole)
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(bomb, "w") as out:
        for name in source.namelist():
            entry = zipfile.ZipInfo(name)
            entry.compress_type = method if name.endswith(record) else zipfile.ZIP_STORED
            out.writestr(entry, b"\x80\x02](" + b"N" * (1 << 24) if name.endswith(record) else source.read(name))
        for entry in out.infolist():
            entry.external_attr = 0
    assert bomb.stat().st_size < 1 << 16
    for read in (validate_checkpoint, saved_tensors):
        with refused("damaged", "last.ckpt"):
            read(bomb)


@pytest.mark.parametrize(
    "content", [{"state_dict": [1]}, {"other": {}}, {"state_dict": {"x": torch.eye(2).to_sparse()}}, 5]
)
def test_a_checkpoint_without_weights_is_one_message(tmp_path, content):
    torch.save(content, tmp_path / "last.ckpt")
    for read in (validate_checkpoint, saved_tensors):
        with refused("damaged", "last.ckpt"):
            read(tmp_path / "last.ckpt")


@pytest.mark.parametrize("change", ["name", "directory", "number"])
def test_a_checkpoint_is_refused_whose_records_torch_would_not_read_as_they_were(tmp_path, change):
    file = tmp_path / "last.ckpt"
    torch.save({"state_dict": {"first": torch.arange(9.0), "second": torch.ones(9)}}, file)
    validate_checkpoint(file)
    content = bytearray(file.read_bytes())
    entry = content.rindex(b"last/data/0")  # of the central directory, 46 bytes behind its begin
    if change == "name":
        content[entry + 10 : entry + 11] = b"1"  # two records of one name
    elif change == "directory":
        content[entry - 46 + 38] |= 0x10  # torch would leave the tensor uninitialized
    else:
        content[content.index(torch.arange(9.0).numpy().tobytes()) + 5] ^= 1
    file.write_bytes(content)
    with refused("damaged", "last.ckpt"):
        validate_checkpoint(file)
