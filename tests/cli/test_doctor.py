from __future__ import annotations

import subprocess
import sys

import pytest

from recpo.cli.main import main
from recpo.verbs import doctor as module
from recpo.verbs.doctor import Doctor, Finding, Part, advice


def finding(name, works, words="", version="1.0"):
    return Finding(Part(name, (name,), "", False), version, works, words)


@pytest.mark.parametrize(
    ("fbgemm", "torchrec", "expected"),
    [
        (finding("fbgemm", True), finding("torchrec", True), "can be used"),
        (finding("fbgemm", False, version=None), finding("torchrec", False, version=None), "not installed"),
        (
            finding("fbgemm", False, "OSError: libnvidia-ml.so.1: cannot open shared object file"),
            finding("torchrec", False),
            "pip uninstall fbgemm-gpu",
        ),
        (finding("fbgemm", False, "undefined symbol"), finding("torchrec", False), "one torch version"),
    ],
)
def test_advice_says_what_to_do(fbgemm, torchrec, expected):
    assert expected in advice([fbgemm, torchrec])


def test_a_broken_core_library_fails_and_a_broken_extra_does_not(monkeypatch, capsys):
    works, broken = "pass", "raise OSError('libnvidia-ml.so.1: cannot open shared object file')"
    parts = [Part("torch", ("pip",), works, True), Part("fbgemm", ("pip",), broken, False)]
    parts += [Part("torchrec", ("no-such-distribution",), works, False)]
    monkeypatch.setattr(module, "PARTS", parts)
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "works" in printed
    assert "pip uninstall fbgemm-gpu" in printed
    monkeypatch.setattr(module, "PARTS", [parts[0]._replace(program=broken), *parts[1:]])
    assert main(["doctor"]) == 1
    assert "torch must work" in capsys.readouterr().err


def test_a_library_that_ends_its_process_or_never_answers_hides_no_other(monkeypatch):
    programs = {
        "before": "print('ready')",
        "crashes": "import os; os.abort()",
        "says": "import os, sys; print('no driver', file=sys.stderr); sys.stderr.flush(); os._exit(3)",
        "hangs": "import time; time.sleep(60)",
        "exits": "raise SystemExit('not for this machine')",
        "missing": "import no_such_library",
        "after": "print('first'); print('second')",
    }
    monkeypatch.setattr(module, "PARTS", [Part(name, ("pip",), program, False) for name, program in programs.items()])
    monkeypatch.setattr(module, "_TIMEOUT_SECONDS", 1)
    found = {finding.part.name: (finding.works, finding.words) for finding in Doctor().execute()}
    assert found == {
        "before": (True, "ready"),
        "crashes": (False, "ended with status -6"),
        "says": (False, "no driver"),
        "hangs": (False, "no answer within 1 s"),
        "exits": (False, "SystemExit: not for this machine"),
        "missing": (False, "ModuleNotFoundError: No module named 'no_such_library'"),
        "after": (True, "second"),
    }


@pytest.mark.parametrize(("given", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_wait_passively_unless_the_user_says_otherwise(monkeypatch, given, expected):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    code = "import sys, os, recpo; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == [expected, "False"]
