"""The live table: what it shows, what it shows without a permission, and that a failed read does not end it."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll.cli import main
from plimsoll.cli.cluster import ClusterQueryError
from plimsoll.cli.output import Screen
from plimsoll.cli.top import refresh, top_lines
from plimsoll.core.errors import BackendUnavailable, Forbidden
from tests import builders
from tests.cli import fake_kube

PIPE = Screen()
STATUS: dict[str, Any] = {
    "conditions": [{"type": "Ready", "status": "True"}],
    "tiers": {
        "prefill": {"summary": "1/1", "capacityPerReplica": "9.1 req/s, 30% used"},
        "decode": {"summary": "3/5", "capacityPerReplica": "9.1 req/s, 110% used"},
    },
    "slo": {"ttft": "700ms", "tpot": "38ms", "attainment": "90%"},
}
UNKNOWN = {"unknown": "why"}
DOCUMENT = {
    "metrics": {
        "gateways": {"rate_per_s": 35.21, "queued": 3.0, "rejected_share": 0.02},
        "tiers": {"prefill": {"running": 2.0, "kv_used": UNKNOWN}, "decode": {"running": 131.0, "kv_used": 0.713}},
    }
}
LEASE = {"spec": {"holderIdentity": "plimsoll-operator-a"}}
CHAT = builders.service() | {"status": STATUS}
IDLE = builders.service("idle")
PATHS = {
    fake_kube.services("team"): {"items": [IDLE, CHAT]},
    fake_kube.LEASE: LEASE,
    fake_kube.explanation("plimsoll-operator-a", "team", "chat"): DOCUMENT,
}


async def lines(answers: dict[str, Any]) -> list[list[str]]:
    found = await top_lines(fake_kube.FakeKube(answers), "team", "plimsoll-system", PIPE)
    return [line.split() for line in found]


async def test_top_row_has_load_and_status() -> None:
    head, chat, idle = await lines(PATHS)
    assert len(head) == 12
    assert " ".join(chat) == "chat True 1/1 3/5 35.2 3 133 2% 71% 700ms 38ms 90% 30% 110%"
    assert idle == ["idle", *["-"] * 11]


async def test_top_without_permission_shows_the_status() -> None:
    path = fake_kube.explanation("plimsoll-operator-a", "team", "chat")
    *rows, note = await lines(PATHS | {path: Forbidden("pods is forbidden", 403)})
    assert " ".join(rows[1]) == "chat True 1/1 3/5 - - - - - 700ms 38ms 90% 30% 110%"
    assert " ".join(note).startswith("no figures of the operator: forbidden: needs permission to get pods/proxy in")


async def test_top_without_services_says_so() -> None:
    found = await top_lines(fake_kube.FakeKube({fake_kube.SERVICES: {"items": []}}), None, "plimsoll-system", PIPE)
    assert found == ["no InferenceServices in any namespace"]


async def test_top_reads_a_bounded_number_of_documents() -> None:
    many = {"items": [builders.service(f"s{number}") for number in range(150)]}
    found = await top_lines(
        fake_kube.FakeKube({fake_kube.services("team"): many, fake_kube.LEASE: LEASE}), "team", "plimsoll-system", PIPE
    )
    assert len(found) == 152
    assert found[-1] == "figures of the first 100 of 150 services; choose a namespace with -n"


async def test_top_names_the_missing_permission_of_many_services() -> None:
    many = {"items": [builders.service(f"s{number}") for number in range(150)]}
    found = await top_lines(fake_kube.FakeKube({fake_kube.services("team"): many}), "team", "plimsoll-system", PIPE)
    assert found[-1].startswith("no figures of the operator")


class EndError(Exception):
    """Ends the table."""


async def test_top_refresh_outlives_a_failed_read() -> None:
    tables: list[Any] = [["a"], BackendUnavailable("the API server does not answer"), ["b"]]
    shown: list[str] = []

    async def table() -> Any:
        found = tables.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    async def pause() -> None:
        if not tables:
            raise EndError

    with pytest.raises(EndError):
        await refresh(table, shown.append, pause)
    assert [text.removeprefix("\x1b[H\x1b[J") for text in shown] == ["a\n", "the API server does not answer\n", "b\n"]
    tables[:] = [ClusterQueryError("no CRD")]
    with pytest.raises(ClusterQueryError, match="no CRD"):
        await refresh(table, shown.append, pause)


@pytest.mark.parametrize("interval", ["0", "0.5", "nan", "-1"])
def test_top_interval_too_short_is_a_usage_error(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["top", "-n", "team", f"--interval={interval}"])
    assert "--interval must be at least 1 s" in capsys.readouterr().err
