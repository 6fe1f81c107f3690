"""The dependency audit of CI: what it reports and accepts, and that a missing answer is not a clean one."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / ".ci" / "audit.py"


@pytest.fixture(scope="module")
def audit():
    specification = importlib.util.spec_from_file_location("audit", FILE)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def package(name, *faults, **more):
    return {
        "name": name,
        "version": "1",
        "vulns": [{"id": f, "aliases": [], "fix_versions": []} for f in faults],
        **more,
    }


def test_a_vulnerability_is_reported_unless_it_is_accepted_with_a_reason(audit):
    report = {"dependencies": [package("fine"), package("bad", "PYSEC-1", "PYSEC-2")]}
    report["dependencies"][1]["vulns"][1] |= {"aliases": ["CVE-2"], "fix_versions": ["2", "3"]}
    found, reason = audit.judge(report, {})
    assert reason is None
    assert found == ["bad 1: PYSEC-1 (fixed in: no version that fixes it)", "bad 1: PYSEC-2 (fixed in: 2, 3)"]
    known = audit.accepted("# a comment\nCVE-2 it needs a server, recpo has none\n")
    assert audit.judge(report, known)[0] == found[:1]
    with pytest.raises(ValueError, match="PYSEC-1 has no reason"):
        audit.accepted("PYSEC-1\n")


def test_packages_that_the_index_does_not_know_are_not_clean(audit):
    gone = {"name": "a", "skip_reason": "Dependency not found on PyPI"}
    assert audit.judge({"dependencies": [gone, package("b")]}, {}) == (
        [],
        "1 of 2 packages are not in the index that was asked",
    )
    assert audit.judge({"dependencies": []}, {})[1] is not None
    assert audit.judge({"dependencies": [gone, *[package(f"p{n}") for n in range(9)]]}, {}) == ([], None)


def test_without_a_network_it_is_skipped_and_says_why(audit, monkeypatch, capsys):
    def offline(command, **_):
        raise subprocess.CalledProcessError(1, command, stderr="WARNING: retrying\nERROR: no route to host\n")

    monkeypatch.setattr(subprocess, "run", offline)
    assert audit.main() == 0
    said = capsys.readouterr().out
    assert said.startswith("dependency audit SKIPPED, nothing was looked up")
    assert "no route to host" in said


def test_the_accepted_ones_of_this_repository_have_reasons(audit):
    audit.accepted(audit.ACCEPTED.read_text())
