"""Deadlines and limits of single requests at the picker, in virtual time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

import pytest

from plimsoll.core.admission.request_limits import RequestLimits
from plimsoll.gateway.api_routes import ROUTES
from plimsoll.gateway.deadlines import NO_DEADLINE, RequestDeadline, read_deadline
from plimsoll.gateway.envoy.access_log import AccessRecord, RequestOutcome
from plimsoll.gateway.errors import Rejection
from tests.gateway.kube_objects import Object, pod, service
from tests.gateway.picker_harness import (
    PickerHarness,
    engine_names,
    picked_engine,
    rejection_of,
    response_headers,
    service_with_slo,
)

TIMEOUT, PYTHON, NODE = "x-request-timeout", "x-stainless-read-timeout", "x-stainless-timeout"
UPSTREAM, SECONDS = "x-envoy-upstream-stream-duration-ms", "x-plimsoll-deadline-seconds"
IDLE, MAX_OUTPUT = "x-plimsoll-idle-timeout", "x-plimsoll-max-output-tokens"
STARTS_S = 20.0


def limited(limits: Mapping[str, Any], obj: Object | None = None) -> Object:
    """A service with these `requestLimits`; by default one without an SLO."""
    made = service() if obj is None else obj
    made["spec"]["requestLimits"] = dict(limits)
    made["spec"].setdefault("tiers", {"serve": {}})
    return made


def deadline(headers: Mapping[str, str], *, stream: bool = False, limit_s: float = math.inf) -> RequestDeadline:
    found = read_deadline(
        {name.encode(): value.encode() for name, value in headers.items()},
        RequestLimits(max_duration_s=limit_s),
        stream=stream,
        now=100.0,
    )
    assert isinstance(found, RequestDeadline)
    return found


@pytest.mark.parametrize(
    ("headers", "stream", "first_s", "complete_s"),
    [
        ({TIMEOUT: "30"}, False, math.inf, 130.0),
        ({TIMEOUT: "2.5"}, True, math.inf, 102.5),
        ({TIMEOUT: "900000"}, False, math.inf, 7300.0),  # at most two hours
        ({PYTHON: "600"}, False, math.inf, 700.0),
        ({PYTHON: "600.0"}, True, 700.0, math.inf),  # the time until the next byte bounds no stream
        ({NODE: "20"}, True, 120.0, math.inf),
        ({PYTHON: "30", NODE: "20"}, False, math.inf, 120.0),
        ({TIMEOUT: "30", PYTHON: "20"}, True, 120.0, 130.0),
        ({TIMEOUT: "30", PYTHON: "600"}, True, math.inf, 130.0),
    ],
)
def test_read_deadline_of_header_is_first_or_last_token(
    headers: Mapping[str, str], stream: bool, first_s: float, complete_s: float
) -> None:
    found = deadline(headers, stream=stream)
    assert (found.first_token_s, found.complete_s) == (first_s, complete_s)
    assert found.timeout_s == min(first_s, complete_s) - 100.0
    assert found.source in headers


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0", "0.0", "1e99", "1_0", "", " ", "5,7", "30s", "+5", "٣"])
def test_nonsense_timeout_is_400_but_not_of_an_sdk(value: str) -> None:
    found = read_deadline({TIMEOUT.encode(): value.encode()}, RequestLimits(), stream=False, now=0.0)
    assert isinstance(found, Rejection)
    assert found.reason == "invalid_timeout"
    assert f"'{TIMEOUT}'" in found.message
    for name in (PYTHON, NODE):
        assert deadline({name: value}) is NO_DEADLINE


def test_max_duration_bounds_the_clients_deadline() -> None:
    assert deadline({}, limit_s=60.0) == (math.inf, 160.0, 60.0, "requestLimits.maxDuration")
    assert deadline({TIMEOUT: "90"}, limit_s=60.0).source == "requestLimits.maxDuration"
    assert deadline({TIMEOUT: "30"}, limit_s=60.0) == (math.inf, 130.0, 30.0, TIMEOUT)
    assert deadline({PYTHON: "600"}, limit_s=60.0, stream=True) == (math.inf, 160.0, 60.0, "requestLimits.maxDuration")


@pytest.mark.parametrize("made", [service(), service_with_slo(batch=4)], ids=["without slo", "with slo"])
def test_admitted_request_tells_envoy_the_rest_of_its_time(made: Object) -> None:
    world = PickerHarness(made, pods=engine_names(1))
    sent = response_headers(world.send(headers={TIMEOUT: "30"}))
    assert (sent[UPSTREAM], sent[SECONDS]) == ("30000", "30")
    for headers in ({}, {PYTHON: "nan"}):
        assert not {UPSTREAM, SECONDS} & response_headers(world.send(headers=headers, max_tokens=5)).keys()


def test_sdk_read_timeout_ends_only_what_is_not_streamed() -> None:
    world = PickerHarness(service(), pods=engine_names(1))
    assert response_headers(world.send(headers={PYTHON: "600"}))[UPSTREAM] == "600000"
    assert UPSTREAM not in response_headers(world.send(headers={PYTHON: "600"}, stream=True))


async def test_queued_time_counts_towards_the_deadline() -> None:
    world = PickerHarness(service_with_slo(batch=1), pods=engine_names(1))
    running = world.send()
    waiting = world.send_queued(headers={TIMEOUT: "30"})
    world.advance(4.0)
    assert isinstance(running, bytes)
    world.complete(running)
    sent = response_headers(await waiting)
    assert (sent[UPSTREAM], sent[SECONDS]) == ("26000", "30")


async def test_queued_request_leaves_when_its_deadline_passes() -> None:
    world = PickerHarness(service_with_slo(ready_at_s=STARTS_S, slo={"tpot": "50ms"}), pods=())
    waiting = world.send_queued(headers={PYTHON: "60"}, stream=True)
    shed = rejection_of(world.send(headers={TIMEOUT: "15"}))
    assert (shed.status, shed.error["code"], shed.headers["retry-after"]) == (503, "model_starting", "20")
    assert not waiting.done()
    world.set_objects(service_with_slo(slo={"tpot": "50ms"}))
    short = world.send_queued(headers={TIMEOUT: "9"})
    world.advance(9.5)
    late = rejection_of(short)
    assert (late.status, late.error["code"], late.headers["x-should-retry"]) == (504, "deadline_exceeded", "false")
    assert str(late.error["message"]).endswith(
        "9 s (x-request-timeout). Model 'chat' is starting: none of its engines is ready yet."
    )
    assert world.service()["admission"]["queued"] == len(world.picker.queue) == 1
    assert world.service()["requests"]["rejected"] == {"model_starting": 1, "deadline_exceeded": 1}


def test_deadline_shorter_than_an_idle_engine_needs_is_400() -> None:
    world = PickerHarness(service_with_slo(), pods=engine_names(1))
    reply = rejection_of(world.send(headers={TIMEOUT: "0.3"}))
    assert (reply.status, reply.error["code"], reply.headers["x-should-retry"]) == (400, "deadline_too_short", "false")
    assert "0.3 s (x-request-timeout)" in str(reply.error["message"])
    assert world.service()["requests"]["arrived"] == 0  # no capacity would serve it
    assert response_headers(world.send(headers={TIMEOUT: "0.3"}, max_tokens=1))[":status"] == "200"


DOWNGRADE = {"whenFull": "Downgrade", "fallback": {"name": "small"}}


@pytest.mark.parametrize("is_faster", [True, False])
async def test_deadline_too_short_for_the_model_tries_its_fallback(is_faster: bool) -> None:
    small = service("small") if is_faster else service_with_slo("small")
    pods = (*engine_names(1), pod("10.0.1.1:8000", service="small"))
    world = PickerHarness(service_with_slo(admission=DOWNGRADE), small, pods=pods)
    reply = world.send(headers={TIMEOUT: "0.3"})
    if is_faster:
        assert picked_engine(reply) == "10.0.1.1:8000"
    else:
        found = rejection_of(reply)
        assert (found.status, found.error["code"]) == (400, "deadline_too_short")
    assert world.service()["requests"]["arrived"] == 0


async def test_sdk_default_timeout_changes_no_decision() -> None:
    replies = []
    for headers in ({}, {PYTHON: "600"}):
        world = PickerHarness(service_with_slo(batch=2, slo={"tpot": "50ms"}), pods=engine_names(1))
        sent = [world.send(headers=headers) for _ in range(6)]
        world.advance(31.0)
        replies.append([rejection_of(r).error["code"] if isinstance(r, asyncio.Future) else "sent" for r in sent])
        assert world.outcomes() == {"Admitted": 2, "Queued": 4, "ShedSaturated": 4}
    assert replies[0] == replies[1] == ["sent", "sent", *["overloaded"] * 4]


@pytest.mark.parametrize(
    ("flags", "outcome", "signal"),
    [
        ("UMSDR", RequestOutcome.DEADLINE_EXCEEDED, "cancelled"),
        ("SI", RequestOutcome.IDLE_TIMEOUT, "failed"),
        ("DC,UMSDR", RequestOutcome.CANCELLED, "cancelled"),
    ],
)
def test_request_ended_by_envoy_gives_capacity_back(flags: str, outcome: RequestOutcome, signal: str) -> None:
    assert AccessRecord(status=504, flags=flags).outcome is outcome
    world = PickerHarness(service_with_slo(), pods=engine_names(1))
    reply = world.send(headers={TIMEOUT: "30"})
    assert isinstance(reply, bytes)
    assert world.running_by_engine() == {"10.0.0.1:8000": 1}
    world.complete(reply, status=504, flags=flags)
    assert world.running_by_engine() == {"10.0.0.1:8000": 0}
    assert world.picker.stats("team/chat").completed == {outcome: 1}
    assert world.service()["requests"][signal] == 1


def test_output_limit_refuses_more_and_sets_the_default() -> None:
    world = PickerHarness(limited({"maxOutputTokens": 100}), pods=engine_names(1))
    assert response_headers(world.send(max_tokens=100))[MAX_OUTPUT] == "100"
    assert response_headers(world.send())[MAX_OUTPUT] == "100"
    for fields in ({"max_tokens": 101}, {"max_tokens": 5, "max_completion_tokens": 10**9}):
        reply = rejection_of(world.send(**fields))
        assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "request_too_large", [*fields][-1])
        assert "from 1 to 100" in str(reply.error["message"])
        assert "requestLimits.maxOutputTokens" in str(reply.error["message"])
    for value in ("1000", 50.0, -1, 0, True, [1], 1 << 70):  # an engine may read some of them as numbers
        assert rejection_of(world.send(max_completion_tokens=value)).error["param"] == "max_completion_tokens"


def test_output_limit_of_responses_api_has_its_own_field() -> None:
    world = PickerHarness(limited({"maxOutputTokens": 100}), pods=engine_names(1))
    body, route = b'{"model":"chat","input":"hi","max_output_tokens":101}', ROUTES["/v1/responses"]
    assert rejection_of(world.picker.check(body, {}, 0.0, route)).error["param"] == "max_output_tokens"
    fits = body.replace(b"101", b"100")
    assert response_headers(world.picker.check(fits, {}, 0.0, route))[":status"] == "200"
    tokens = ROUTES["/tokenize"]
    sent = response_headers(world.picker.check(b'{"model":"chat","prompt":"a","max_tokens":900}', {}, 0.0, tokens))
    assert MAX_OUTPUT not in sent


def test_output_limit_bounds_the_estimate_of_the_gate() -> None:
    made = limited({"maxOutputTokens": 10}, service_with_slo())
    world = PickerHarness(made, pods=engine_names(1))
    assert response_headers(world.send(headers={TIMEOUT: "0.3"}))[":status"] == "200"


def test_class_limits_replace_those_of_the_service_each() -> None:
    classes = [{"name": "default"}, {"name": "chat", "requestLimits": {"maxOutputTokens": 500, "idleTimeout": "30s"}}]
    made = service_with_slo(admission={"classes": classes}, classes=("default", "chat"))
    world = PickerHarness(limited({"maxOutputTokens": 100, "maxDuration": "60s"}, made), pods=engine_names(2))
    chat = {"x-gateway-inference-objective": "chat"}
    plain = response_headers(world.send(stream=True))
    assert (plain[MAX_OUTPUT], plain[UPSTREAM]) == ("100", "60000")
    assert IDLE not in plain
    of_class = response_headers(world.send(stream=True, max_tokens=400, headers=chat))
    assert (of_class[MAX_OUTPUT], of_class[UPSTREAM], of_class[IDLE]) == ("500", "60000", "30")
    assert IDLE not in response_headers(world.send(headers=chat))  # not a stream
    assert rejection_of(world.send(max_tokens=400)).status == 400


def test_limits_stay_while_the_spec_cannot_be_parsed() -> None:
    made = limited({"maxOutputTokens": 100})
    world = PickerHarness(made, pods=engine_names(1))
    broken = {**made, "spec": {**made["spec"], "fromTheFuture": 1}}
    world.set_objects(broken, pods=engine_names(1))
    assert rejection_of(world.send(max_tokens=400)).status == 400
