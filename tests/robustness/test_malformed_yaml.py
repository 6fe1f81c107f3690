"""Configuration files that are not YAML, or YAML that breaks PyYAML itself: one message, no traceback."""

import pytest
from hypothesis import given, strategies as st

from recpo.artifacts.documents import read_yaml, validate_configuration_files
from recpo.base.errors import RecpoError
from recpo.cli.main import main

HOSTILE = {
    "bytes": b"\xff\xfe\x00",
    "date": b"seed: 2024-13-45\n",
    "digits": b"seed: " + b"9" * 5000,
    "itself": b"trainer: &x {y: *x}\n",
    "deep": b"[" * 3000,
    "tag int": b"seed: !!int x\n",
    "tag time": b"out: !!timestamp x\n",
    "object": b"out: !!python/object/apply:os.system [id]\n",
    "list": b"- 1\n",
    "text": b"hello",
}


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["train", "simulate"])
@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_one_message(tmp_path, capsys, verb, content):
    (tmp_path / "options.yaml").write_bytes(content)
    assert main([verb, "--config", str(tmp_path / "options.yaml"), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path}/options.yaml")
    assert "expected a YAML mapping of options" in said
    assert [path.name for path in tmp_path.iterdir()] == ["options.yaml"]


@given(st.one_of(st.binary(max_size=40), st.text(alphabet="ab1:-&*![]{}?|>#%@`'\" \n.,~<=eE+_", max_size=40)))
def test_any_content_is_a_mapping_or_a_message(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    try:
        found = read_yaml(file, "write it again")
    except RecpoError as error:
        found = {"said": str(error)}
    assert isinstance(found, dict)


def test_text_that_is_not_a_file_is_left_to_the_parser(tmp_path):
    validate_configuration_files(["--config", '{"seed": 1}', "--config=nowhere.yaml", "--config"])


GROUPS = {
    "train": ["rollout: 3", "rollout: []", "critic: yes", "adaptive_kl: 0.5", "weight_averaging: 0.99"],
    "prepare": ["columns: 3", "columns: [user_id]", "features: [a]", "feedback: 3", "csv: comma"],
    "evaluate": ["rerank_options: 3", "baseline_options: 3", "off_policy: [1]", "item_features: tags"],
    "serve": ["rerank_options: 3", "exploration: 0.1"],
}


@pytest.mark.parametrize(("verb", "line"), [(verb, line) for verb, lines in GROUPS.items() for line in lines])
def test_a_group_that_is_no_mapping_is_one_message_with_its_line(tmp_path, capsys, verb, line):
    file = tmp_path / "options.yaml"
    file.write_text(f"# a comment\n{line}\n", encoding="utf-8")
    assert main([verb, "--config", str(file)]) == 2
    said = capsys.readouterr().err
    name = line.partition(":")[0]
    assert said.startswith(f"error: {file}, line 2: {name}: ")
    assert "is no mapping; expected one with the keys " in said
