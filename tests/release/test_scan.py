"""The scan believes only a service that knows a known vulnerability, and leaves out no lock file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from release.scan import NOT_SCANNED, command, fault, locks, main
from tests.release.loopback import Handler, serving


class Service(Handler):
    """OSV's query at /v1/query; elsewhere a mirror that knows nothing, or no JSON."""

    def do_POST(self) -> None:
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        known = query == {"package": {"name": "jinja2", "ecosystem": "PyPI"}, "version": "2.4.1"}
        body = {"/v1/query": b'{"vulns": [{"id": "GHSA-1"}]}' if known else b"{}", "/empty": b"{}"}.get(
            self.path, b"<p>"
        )
        self.answer(body)


@pytest.fixture
def address() -> Iterator[str]:
    with serving(Service) as host:
        yield f"http://{host}"


def test_service_that_knows_a_vulnerability_is_believed(address: str) -> None:
    assert fault(f"{address}/v1/query") == ""


@pytest.mark.parametrize(("path", "reason"), [("/empty", "so it has no advisories"), ("/page", "gave no JSON")])
def test_service_without_advisories_is_not_believed(address: str, path: str, reason: str) -> None:
    assert reason in fault(f"{address}{path}")


def test_unreachable_service_is_said_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--service", "http://127.0.0.1:1/v1/query"]) == NOT_SCANNED
    assert "Nothing was scanned: http://127.0.0.1:1/v1/query cannot be reached" in capsys.readouterr().err


def test_locks_are_all_lock_files_of_the_checkout() -> None:
    names = {path.name for path in locks()}
    assert {"dev.txt", "operator.txt", "clients.txt", "tools.txt", "cpu.lock", "torch.lock", "simulated.lock"} <= names


def test_command_fails_for_packages_without_an_answer() -> None:
    words = command(Path("a.txt"), "http://here/v1/query")
    assert "--strict" in words
    assert words[words.index("--osv-url") + 1] == "http://here/v1/query"
    assert words[-2:] == ["-r", "a.txt"]
