"""What the operator's own server answers, leading or not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import jsonschema
import pytest
from aiohttp.test_utils import TestClient, TestServer, make_mocked_request

from plimsoll.adapters.connection_guard import ConnectionGuard
from plimsoll.api.recommendation import json_schema
from plimsoll.controllers import http_server
from plimsoll.controllers.autoscale.recommendations import Recommendations
from plimsoll.controllers.http_server import HttpEndpoints, build_app
from plimsoll.controllers.reconcile_progress import ReconcileProblems
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.telemetry import operator_metrics
from tests.ports import free_port

DOCUMENTS = {("team", "chat"): {"version": 1, "service": "team/chat"}}


@asynccontextmanager
async def client(answers: HttpEndpoints) -> AsyncIterator[TestClient]:  # type: ignore[type-arg]
    async with TestClient(TestServer(build_app(answers))) as made:
        yield made


@pytest.mark.parametrize("answers", [HttpEndpoints(), HttpEndpoints(DOCUMENTS.get)])
async def test_probes_are_ok_for_standby_and_leader(answers: HttpEndpoints) -> None:
    async with client(answers) as http:
        for path in ("/healthz", "/readyz"):
            assert await (await http.get(path)).text() == "ok\n"
        assert "plimsoll_operator" in await (await http.get("/metrics")).text()


@pytest.mark.parametrize(
    ("problems", "failing"),
    [(ReconcileProblems(stalled="no reconcile has ended"), "/healthz"), (ReconcileProblems("", "pods"), "/readyz")],
)
async def test_probe_of_a_leader_that_does_not_reconcile_fails(problems: ReconcileProblems, failing: str) -> None:
    async with client(HttpEndpoints(progress=lambda: problems)) as http:
        replies = {path: await http.get(path) for path in ("/healthz", "/readyz")}
        assert {path for path, reply in replies.items() if reply.status == 503} == {failing}
        assert await replies[failing].text() == f"{''.join(problems)}\n"


async def test_metrics_lets_others_run_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "PAGE_STEP_BYTES", 1)
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(take_turns())
    page = (await http_server._metrics(make_mocked_request("GET", "/metrics"))).body
    other.cancel()
    assert isinstance(page, bytes)
    assert page.count(b"# TYPE ") >= len(list(operator_metrics.OPERATOR.collect())) <= turns


async def test_explain_returns_document() -> None:
    async with client(HttpEndpoints(DOCUMENTS.get)) as http:
        reply = await http.get("/explain/team/chat")
        assert reply.status == 200
        assert await reply.json() == DOCUMENTS["team", "chat"]


@pytest.mark.parametrize("path", ["team/absent", "absent/chat", "team%2Fchat/x", "team/..%2Fchat", "%00/%1b%5b2J"])
async def test_explain_unknown_service_is_json_404(path: str) -> None:
    async with client(HttpEndpoints(DOCUMENTS.get)) as http:
        reply = await http.get(f"/explain/{path}")
        assert reply.status == 404
        assert (await reply.json())["reason"] == "UnknownService"


async def test_explain_standby_is_503() -> None:
    answers = HttpEndpoints()
    async with client(answers) as http:
        for explain, status in ((None, 503), (DOCUMENTS.get, 200), (None, 503)):
            answers.explain = explain
            reply = await http.get("/explain/team/chat")
            assert reply.status == status
        assert (await reply.json())["message"] == "this operator replica does not lead; query the leader"


@pytest.mark.parametrize("path", ["/explain", "/explain/team", "/explain/team/", "/explain/team/chat/x"])
async def test_explain_other_paths_are_404(path: str) -> None:
    async with client(HttpEndpoints(DOCUMENTS.get)) as http:
        assert (await http.get(path)).status == 404


async def test_explain_post_is_405() -> None:
    async with client(HttpEndpoints(DOCUMENTS.get)) as http:
        assert (await http.post("/explain/team/chat")).status == 405


def undecided() -> Recommendations:
    """Two services without a decision."""
    states = {("team", name): ServiceState.for_roles(["serve"]) for name in ("chat", "auto")}
    return Recommendations(states.keys, states.get)


async def test_recommendations_are_listed_by_name() -> None:
    async with client(HttpEndpoints(recommendations=undecided())) as http:
        reply = await http.get("/v1/recommendations")
        assert (reply.status, reply.content_type) == (200, "application/json")
        listed = await reply.json()
        one = await (await http.get("/v1/recommendations/team/chat")).json()
    jsonschema.validate(listed, json_schema())
    assert [item["name"] for item in listed["items"]] == ["auto", "chat"]
    assert listed["items"][1] == one
    assert (one["stale"], one["staleReason"]) == (True, "the operator has not decided about the service yet")


async def test_recommendation_of_unknown_service_is_json_404() -> None:
    async with client(HttpEndpoints(recommendations=undecided())) as http:
        for path in ("team/absent", "absent/chat", "%00/%1b%5b2J"):
            reply = await http.get(f"/v1/recommendations/{path}")
            assert (reply.status, (await reply.json())["reason"]) == (404, "UnknownService")


@pytest.mark.parametrize("path", ["", "/team/chat"])
async def test_recommendations_of_standby_close_connection(path: str) -> None:
    """Through a Service, the next connection may reach the leader."""
    async with client(HttpEndpoints()) as http:
        reply = await http.get(f"/v1/recommendations{path}")
        assert reply.status == 503
        assert json.loads(await reply.text())["reason"] == "NotLeading"
        assert reply.headers["Connection"] == "close"


async def test_recommendations_are_read_only() -> None:
    async with client(HttpEndpoints(recommendations=undecided())) as http:
        for path in ("", "/team/chat"):
            assert (await http.post(f"/v1/recommendations{path}")).status == 405


async def test_server_cuts_silent_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "ConnectionGuard", partial(ConnectionGuard, head_seconds=0.1))
    ports = free_port(), free_port()
    runner = await http_server.serve(*ports)
    before = _cut()
    for port in ports:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b""
        writer.close()
    assert _cut() == before + 2
    await runner.cleanup()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", ports[0])


def _cut() -> float:
    name = "plimsoll_operator_connections_cut_total"
    return operator_metrics.OPERATOR.get_sample_value(name, {"reason": "slow_request"}) or 0.0
