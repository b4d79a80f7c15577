"""Known vulnerabilities of the Python packages that the lock files name.

Problem: a scanner that gets no answer, or one from a mirror without advisories, reports nothing, which reads as "all is
well". Idea: first ask the service for a package that is known to be vulnerable. If it knows that one, pip-audit asks
for each package of each lock file.

    build/tools/bin/python -m release.scan [--service URL]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
SERVICE: Final = "https://api.osv.dev/v1/query"
KNOWN_VULNERABLE: Final = {"package": {"name": "jinja2", "ecosystem": "PyPI"}, "version": "2.4.1"}
_TIMEOUT_S: Final = 30.0
VULNERABLE, NOT_SCANNED = 1, 2


def locks() -> list[Path]:
    """Every lock file of the checkout."""
    return [*sorted((ROOT / "requirements").glob("*.txt")), *sorted((ROOT / "engine-image").glob("*.lock"))]


def fault(service: str) -> str:
    """Why the service's answers mean nothing; empty if they can be believed."""
    request = urllib.request.Request(
        service, data=json.dumps(KNOWN_VULNERABLE).encode(), headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
            answer = json.load(reply)
    except (OSError, ValueError) as error:
        return f"{service} cannot be reached or gave no JSON ({error})"
    if not isinstance(answer, dict) or not answer.get("vulns"):
        return f"{service} knows no vulnerability of jinja2 2.4.1, so it has no advisories"
    return ""


def command(lock: Path, service: str) -> list[str]:
    """pip-audit of one lock file, without resolving or installing. A package without an answer is an error."""
    options = ["--disable-pip", "--strict", "--progress-spinner", "off"]
    return [
        sys.executable,
        "-m",
        "pip_audit",
        *options,
        "--vulnerability-service",
        "osv",
        "--osv-url",
        service,
        "-r",
        str(lock),
    ]


def main(words: list[str]) -> int:
    """The exit status: 1 for a vulnerability or a failed scan of a file, 2 if nothing could be scanned."""
    parser = argparse.ArgumentParser(prog="release.scan", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--service", default=SERVICE, help="the query address of OSV or of a mirror of it")
    service = parser.parse_args(words).service
    if reason := fault(service):
        print(f"Nothing was scanned: {reason}.", file=sys.stderr)
        return NOT_SCANNED
    failed = []
    for lock in locks():
        print(f"{lock.relative_to(ROOT)}:", flush=True)
        if subprocess.run(command(lock, service), check=False).returncode:
            failed.append(str(lock.relative_to(ROOT)))
    if failed:
        print(f"Vulnerable, or not scanned: {', '.join(failed)}.", file=sys.stderr)
    return VULNERABLE if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
