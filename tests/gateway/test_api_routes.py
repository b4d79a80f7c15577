"""Routes at the picker: by the task of the model, with the gate that each needs, and errors of its API."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from plimsoll.core.types import Task
from plimsoll.gateway.api_routes import ROUTES, paths_of, route_of
from plimsoll.gateway.errors import ErrorShape, from_header
from plimsoll.gateway.gateway_limit import GatewayLimit
from plimsoll.gateway.picker import Reply
from plimsoll.gateway.unbooked import MAX_CLIENT_PER_ENGINE, MAX_PER_ENGINE
from tests.gateway.kube_objects import Object, pod, service
from tests.gateway.picker_harness import (
    PickerHarness,
    engine_names,
    picked_engine,
    response_headers,
    service_with_slo,
    times_reached,
)

MESSAGES, EMBEDDINGS, TOKENIZE = "/v1/messages", "/v1/embeddings", "/tokenize"


def of_task(task: str, **changes: Any) -> Object:
    obj = service_with_slo("chat", **changes)
    obj["spec"]["model"]["task"] = task
    return obj


def stopped(obj: Object) -> Object:
    return obj | {"status": {"conditions": [{"type": "Ready", "status": "False", "reason": "ScaledToZero"}]}}


def check_request(harness: PickerHarness, path: str, source: str = "10.0.0.9", **fields: Any) -> Reply:
    harness.requests += 1
    body = json.dumps({"model": "chat", "input": f"hi {harness.requests}", **fields}).encode()
    headers = {b"x-plimsoll-request-id": b"t%d" % harness.requests, b"x-forwarded-for": source.encode()}
    return harness.picker.check(body, headers, harness.clock.now(), ROUTES[path])


def error_of(reply: Reply) -> tuple[int, Any]:
    """Status and body that the client gets."""
    sent = response_headers(reply)
    if (value := sent.get("x-plimsoll-error-response")) is not None:
        found = from_header(value)
        return found.status, json.loads(found.body)
    assert isinstance(reply, bytes)
    return int(sent[":status"]), json.loads(reply.partition(b"\r\n\r\n")[2])


def test_path_with_query_has_its_route() -> None:
    assert route_of(b"/v1/messages?beta=true") is ROUTES[MESSAGES]
    assert {route.shape for path, route in ROUTES.items() if path.startswith(MESSAGES)} == {ErrorShape.ANTHROPIC}


@pytest.mark.parametrize("task", list(Task))
def test_service_serves_the_routes_of_its_task_only(task: Task) -> None:
    harness = PickerHarness(of_task(task.value), pods=engine_names(1))
    served = set(paths_of(task))
    for path, route in ROUTES.items():
        if route.form == "audio":
            continue
        reply = check_request(harness, path)
        if path in served:
            assert response_headers(reply)["x-plimsoll-cluster"] == "pick/team/chat", path
            harness.complete(reply)  # type: ignore[arg-type]
            continue
        status, body = error_of(reply)
        assert status == 404
        assert "'chat'" in body["error"]["message"]
        assert path in body["error"]["message"]
        assert all(one in body["error"]["message"] for one in served)
    assert harness.service()["requests"]["rejected"].keys() <= {"route_not_served"}


def test_service_without_task_generates() -> None:
    harness = PickerHarness(service_with_slo("chat"), pods=engine_names(1))
    assert harness.picker.catalog.by_name["chat"].task is Task.GENERATE


def test_embedding_takes_a_place_until_it_ends() -> None:
    harness = PickerHarness(of_task("embed", batch=4, admission={"whenFull": "Shed"}), pods=engine_names(1))
    replies = [check_request(harness, EMBEDDINGS, input=["a", "b"]) for _ in range(2)]
    assert [response_headers(one)[":status"] for one in replies] == ["200", "200"]
    status, body = error_of(check_request(harness, EMBEDDINGS, input=["a", "b"]))
    assert (status, body["error"]["code"]) == (429, "overloaded")
    harness.complete(replies[0])  # type: ignore[arg-type]
    assert (
        response_headers(check_request(harness, EMBEDDINGS, input=["c", "d"]))["x-plimsoll-cluster"] == "pick/team/chat"
    )


def test_batch_beyond_the_queue_names_its_field() -> None:
    harness = PickerHarness(of_task("embed"), pods=engine_names(1))
    status, body = error_of(check_request(harness, EMBEDDINGS, input=["a"] * 5000))
    assert (status, body["error"]["param"]) == (400, "input")
    assert "5000 items" in body["error"]["message"]


def test_prefill_only_answer_has_no_tpot_target() -> None:
    harness = PickerHarness(of_task("embed"), pods=engine_names(1))
    harness.complete(check_request(harness, EMBEDDINGS), ttft_us=1000, duration_us=1000)  # type: ignore[arg-type]
    slo = harness.service()["slo"]
    assert (slo["assessed"], slo["missed"], slo["tpot"]["targets_s"]) == (1, 0, [])


def test_token_route_books_nothing_and_counts_nothing() -> None:
    harness = PickerHarness(service_with_slo("chat", {"whenFull": "Shed"}, batch=1), pods=engine_names(1))
    assert isinstance(harness.send(), bytes)  # the only place is taken
    reply = check_request(harness, TOKENIZE, prompt="a")
    assert response_headers(reply)["x-plimsoll-cluster"] == "pick/team/chat"
    assert sum(harness.running_by_engine().values()) == 1
    harness.complete(reply)  # type: ignore[arg-type]
    requests = harness.service()["requests"]
    assert (requests["arrived"], requests["succeeded"]) == (1, 0)


@pytest.mark.parametrize("engines", [2, 5])
def test_token_requests_are_bounded_per_engine(engines: int) -> None:
    pods = (*engine_names(engines), pod("10.0.1.1:8000", ready=False))
    harness = PickerHarness(service_with_slo("chat"), pods=pods)
    sources = itertools.count()

    def ask() -> Reply:
        return check_request(harness, TOKENIZE, f"10.9.0.{next(sources) % 200}", prompt="a")

    before = times_reached(GatewayLimit.TOKEN_REQUESTS)
    replies = [ask() for _ in range(engines * MAX_PER_ENGINE)]
    assert {response_headers(one)[":status"] for one in replies} == {"200"}
    status, body = error_of(ask())
    assert (status, body["error"]["code"]) == (429, "gateway_full")
    assert times_reached(GatewayLimit.TOKEN_REQUESTS) == before + 1
    harness.complete(replies[0])  # type: ignore[arg-type]
    assert response_headers(ask())[":status"] == "200"
    assert harness.service()["requests"]["arrived"] == 0


def test_token_requests_of_one_client_leave_room() -> None:
    harness = PickerHarness(service_with_slo("chat"), pods=engine_names(1))
    hostile = "10.0.0.1"

    def ask(source: str) -> Reply:
        return check_request(harness, TOKENIZE, source, prompt="a")

    before = times_reached(GatewayLimit.CLIENT_TOKEN_REQUESTS)
    replies = [ask(hostile) for _ in range(MAX_CLIENT_PER_ENGINE)]
    status, body = error_of(ask(hostile))
    assert (status, body["error"]["code"]) == (429, "gateway_full")
    assert times_reached(GatewayLimit.CLIENT_TOKEN_REQUESTS) == before + 1
    assert "48 requests like /tokenize of this client each" in body["error"]["message"]
    assert response_headers(ask("10.0.0.2"))[":status"] == "200"
    harness.complete(replies[0])  # type: ignore[arg-type]
    assert response_headers(ask(hostile))[":status"] == "200"


def test_reset_token_request_suspends_its_engine() -> None:
    harness = PickerHarness(service_with_slo("chat"), pods=engine_names(2))
    first = check_request(harness, TOKENIZE, prompt="a")
    assert isinstance(first, bytes)
    reset = picked_engine(first)
    harness.complete(first, status=503, flags="UC")
    assert reset not in {picked_engine(check_request(harness, TOKENIZE, prompt="a")) for _ in range(4)}
    assert reset not in {picked_engine(harness.send()) for _ in range(2)}
    assert harness.service()["requests"]["failed"] == 0


@pytest.mark.parametrize(("task", "path"), [("generate", "/v1/chat/completions"), ("embed", EMBEDDINGS)])
def test_token_request_at_zero_says_what_starts_an_engine(task: str, path: str) -> None:
    harness = PickerHarness(of_task(task))
    reply = check_request(harness, TOKENIZE, prompt="a")
    status, body = error_of(reply)
    assert (status, body["error"]["code"]) == (503, "no_endpoint")
    assert (
        body["error"]["message"]
        == f"No engine of model 'chat' is ready. A request to {path} starts one, unless one starts already."
    )
    headers = from_header(response_headers(reply)["x-plimsoll-error-response"]).headers
    assert (headers.get("retry-after"), headers["x-should-retry"]) == (None, "false")
    assert harness.service()["requests"]["rejected"] == {}


@pytest.mark.parametrize("obj", [service(), stopped(of_task("generate"))])
def test_token_request_names_no_start_that_does_not_come(obj: Object) -> None:
    """Without an SLO, or with the scaling paused, no request starts an engine."""
    _, body = error_of(check_request(PickerHarness(obj), TOKENIZE, prompt="a"))
    assert "starts one" not in body["error"]["message"]


@pytest.mark.parametrize("pods", [(), (pod("10.0.0.1:8000", ready=False),)])
def test_token_request_waits_for_an_engine_that_starts(pods: tuple[Object, ...]) -> None:
    harness = PickerHarness(service_with_slo("chat", ready_at_s=None if pods else 20.0), pods=pods)
    reply = check_request(harness, "/v1/messages/count_tokens", messages=[])
    status, body = error_of(reply)
    assert (status, body["error"]["type"]) == (503, "overloaded_error")
    assert "is starting" in body["error"]["message"]
    assert "retry-after" in from_header(response_headers(reply)["x-plimsoll-error-response"]).headers
    assert harness.service()["requests"]["rejected"] == {}


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"model": "nobody"}, 404, "not_found_error"),
        ({"model": None}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": "x" * 40}]}, 429, "overloaded_error"),
    ],
)
def test_message_errors_have_anthropic_shape(fields: dict[str, Any], status: int, kind: str) -> None:
    harness = PickerHarness(service_with_slo("chat", {"whenFull": "Shed"}, batch=1), pods=engine_names(1))
    harness.send()
    reply = check_request(harness, MESSAGES, max_tokens=5, **fields)
    found, body = error_of(reply)
    assert (found, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert body["error"].keys() == {"type", "message"}
    assert "x-plimsoll-reason" in response_headers(reply)


def test_starting_message_service_answers_overloaded() -> None:
    harness = PickerHarness(service_with_slo("chat", {"whenFull": "Shed"}))
    found, body = error_of(check_request(harness, MESSAGES, messages=[], max_tokens=5))
    assert (found, body["error"]["type"]) == (503, "overloaded_error")


async def test_fallback_of_another_task_is_not_used() -> None:
    other = service_with_slo("other")
    other["spec"]["model"]["task"] = "embed"
    chat = service_with_slo("chat", {"whenFull": "Downgrade", "fallback": {"name": "other"}}, batch=1)
    pods = (*engine_names(1), *engine_names(2, service="other")[1:])
    harness = PickerHarness(chat, other, pods=pods)
    assert isinstance(harness.send(), bytes)
    harness.send_queued().cancel()
    other["spec"]["model"]["task"] = "generate"
    harness.set_objects(chat, other, pods=pods)
    assert response_headers(harness.send())["x-plimsoll-cluster"] == "pick/team/other"
