"""Looks the pinned packages up in the database of known vulnerabilities (pip-audit), as a step of ``.ci/run``.

Ends with status 1 where a package has a known vulnerability that ``accepted_vulnerabilities.txt`` does not name. Where
nothing can be looked up (no network, an index without the database) it says so and ends with status 0: a change must
not wait for somebody else's server, and nobody must take that for a clean result.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TOOL = "pip-audit==2.10.1"
LOCKS = ("requirements/cpu.lock", "requirements/gpu.lock", "requirements/docs.lock")
ACCEPTED = Path(__file__).with_name("accepted_vulnerabilities.txt")
_TIMEOUT_S = 300
#: of a lock file; where more packages than that cannot be looked up, the result says nothing
_LARGEST_UNKNOWN_SHARE = 0.2


def accepted(text: str) -> dict[str, str]:
    """Identifier -> reason, of the lines ``IDENTIFIER reason``; ``#`` begins a comment.

    Raises:
        ValueError: a line has no reason.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    parts = {line.partition(" ")[0]: line.partition(" ")[2].strip() for line in lines}
    if lacking := [name for name, reason in parts.items() if not reason]:
        raise ValueError(f"{ACCEPTED.name}: {lacking[0]} has no reason: say why it cannot be used against recpo")
    return parts


def judge(report: Mapping[str, Any], known: Mapping[str, str]) -> tuple[list[str], str | None]:
    """What a report of pip-audit says.

    Args:
        report: its JSON.
        known: accepted vulnerabilities.

    Returns:
        Vulnerabilities that are not accepted, one line each; and why the report says nothing, None if it does.
    """
    packages = report["dependencies"]
    unknown = [package["name"] for package in packages if "skip_reason" in package]
    if not packages or len(unknown) > _LARGEST_UNKNOWN_SHARE * len(packages):
        return [], f"{len(unknown)} of {len(packages)} packages are not in the index that was asked"
    found = []
    for package in packages:
        for fault in package.get("vulns", []):
            if not {fault["id"], *fault.get("aliases", [])} & set(known):
                fix = ", ".join(fault.get("fix_versions", [])) or "no version that fixes it"
                found.append(f"{package['name']} {package['version']}: {fault['id']} (fixed in: {fix})")
    return found, None


def main() -> int:
    """Audits every lock file."""
    known = accepted(ACCEPTED.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="recpo-audit-") as place:
        tool = Path(place) / "bin" / "pip-audit"
        for command in ([sys.executable, "-m", "venv", place], [f"{place}/bin/pip", "install", "--quiet", TOOL]):
            if (reason := _failure(command)) is not None:
                return _skipped(f"{TOOL} cannot be installed: {reason}")
        found, looked_up = [], 0
        for lock in LOCKS:
            report = _report([str(tool), "--requirement", lock, "--no-deps", "--disable-pip", "--format", "json"])
            if isinstance(report, str):
                return _skipped(report)
            faults, reason = judge(report, known)
            if reason is not None:
                return _skipped(f"{lock}: {reason}")
            found += [f"{lock}: {fault}" for fault in faults]
            looked_up += len(report["dependencies"])
    print("\n".join(found) or f"dependency audit: {looked_up} pins, no known vulnerability, {len(known)} accepted")
    return int(bool(found))


def _failure(command: Sequence[str]) -> str | None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        return _last_line(getattr(error, "stderr", None) or str(error))
    return None


def _report(command: Sequence[str]) -> dict[str, Any] | str:
    """The report, or why there is none."""
    try:
        ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_TIMEOUT_S)
        report: dict[str, Any] = json.loads(ended.stdout)
    except subprocess.TimeoutExpired:
        return f"no answer within {_TIMEOUT_S} s"
    except ValueError:
        return _last_line(ended.stderr)
    return report


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no reason given")[:300]


def _skipped(reason: str) -> int:
    print(f"dependency audit SKIPPED, nothing was looked up: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
