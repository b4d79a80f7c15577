"""The picker without Envoy: questions in, answers out."""

from __future__ import annotations

from random import Random
from typing import Any

import orjson
import pytest

from plimsoll.adapters.kube import INFERENCESERVICES, PODS, WatchEvent
from plimsoll.core.buckets import LATENCY_EDGES_S
from plimsoll.gateway.accesslog import Record
from plimsoll.gateway.doors import EnvoyDoor, models
from plimsoll.gateway.endpoints import fleet
from plimsoll.gateway.http1 import Request
from plimsoll.gateway.picker import Picker, Reply
from plimsoll.gateway.replies import from_header
from plimsoll.gateway.retries import claimed, digest
from plimsoll.gateway.settings import Settings
from plimsoll.gateway.signals import signals
from plimsoll.gateway.watch import Objects
from plimsoll.gateway.worker import Worker
from tests.gateway.objects import Object, pod, service

BODY = b'{"model":"chat","messages":[]}'


def picker(*pods: Object, services: tuple[Object, ...] | None = None) -> Picker:
    made = Picker(Random(1))
    known = fleet(services if services is not None else (service(),), pods)
    made.set_fleet(known.with_healthy({key: {e.address for e in s.endpoints} for key, s in known.services.items()}))
    return made


def headers(reply: Reply) -> dict[str, str]:
    assert isinstance(reply, bytes)
    head = reply.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    return {":status": head[0].split(" ")[1]} | dict(line.split(": ", 1) for line in head[1:])


def test_a_pick_names_cluster_endpoints_and_ticket() -> None:
    asked = picker(pod("10.0.0.1:8000"), pod("10.0.0.2:8000"))
    found = headers(asked.check(BODY, {}, 0.0))
    assert found[":status"] == "200"
    assert found["x-plimsoll-cluster"] == "pick/team/chat"
    assert found["x-plimsoll-endpoint"] == "10.0.0.1:8000,10.0.0.2:8000"
    assert "x-plimsoll-prefill" not in found
    again = headers(asked.check(BODY, {}, 0.0))
    assert again["x-plimsoll-endpoint"] == "10.0.0.2:8000,10.0.0.1:8000"
    assert again["x-plimsoll-ticket"] != found["x-plimsoll-ticket"]


def test_a_503_is_a_200_that_sends_the_request_to_the_pickers_own_listener() -> None:
    found = headers(picker().check(BODY, {}, 0.0))
    assert (found[":status"], found["x-plimsoll-cluster"]) == ("200", "picker")
    reply = from_header(found["x-plimsoll-reply"])
    assert (reply.status, reply.error["code"]) == (503, "model_starting")


def test_ready_engines_that_envoy_does_not_reach_are_another_reason() -> None:
    asked = Picker(Random(1))
    asked.set_fleet(fleet([service()], [pod("10.0.0.1:8000")]))
    reply = from_header(headers(asked.check(BODY, {}, 0.0))["x-plimsoll-reply"])
    assert reply.error["code"] == "no_endpoint"


def test_a_record_ends_its_request_and_a_reset_takes_the_engine_out() -> None:
    asked = picker(pod("10.0.0.1:8000"), pod("10.0.0.2:8000"))
    found = headers(asked.check(BODY, {}, 0.0))
    asked.ended(Record(ticket=found["x-plimsoll-ticket"], host="10.0.0.1:8000", code=503, flags="UC"), 1.0)
    for _ in range(3):
        assert headers(asked.check(BODY, {}, 2.0))["x-plimsoll-endpoint"] == "10.0.0.2:8000"
    after = headers(asked.check(BODY, {}, 60.0))["x-plimsoll-endpoint"]
    assert after.startswith("10.0.0.1:8000")
    told = signals(asked, "g", synced=True)["services"]["team/chat"]
    assert (told["requests"]["arrived"], told["requests"]["failed"]) == (5, 1)


def test_a_record_that_outlives_its_service_is_no_trouble() -> None:
    asked = picker(pod("10.0.0.1:8000"))
    ticket = headers(asked.check(BODY, {}, 0.0))["x-plimsoll-ticket"]
    asked.set_fleet(fleet([], []))
    asked.ended(Record(ticket=ticket, host="10.0.0.1:8000", code=200), 1.0)
    assert signals(asked, "g", synced=True)["services"] == {}


def test_signals_list_endpoints_with_what_they_hold() -> None:
    asked = picker(pod("10.0.0.1:8000", role="decode"), pod("10.0.0.2:8000", role="prefill"))
    asked.check(b'{"model":"chat","prompt":[' + b"1," * 200 + b"1]}", {}, 0.0)
    told = signals(asked, "gateway-0", synced=True, clock=lambda: 12.3456)
    assert list(told) == ["version", "gateway", "born", "at", "synced", "services"]
    assert (told["version"], told["gateway"], told["at"], told["synced"]) == (3, "gateway-0", 12.346, True)
    assert told["born"] == asked.born
    found = told["services"]["team/chat"]
    assert found["models"] == ["chat", "team/chat"]
    assert [(e["address"], e["role"], e["revision"], e["routable"], e["inflight"]) for e in found["endpoints"]] == [
        ("10.0.0.1:8000", "decode", "r1", True, 1),
        ("10.0.0.2:8000", "prefill", "r1", True, 1),
    ]
    assert found["prefill"] == {"remote": 1, "local": 0}


def requests(asked: Picker) -> dict[str, Any]:
    found: dict[str, Any] = signals(asked, "g", synced=True)["services"]["team/chat"]["requests"]
    return found


def test_tokens_arrive_for_each_answer_that_is_wanted() -> None:
    asked = picker(pod("10.0.0.1:8000"))
    asked.check(b'{"model":"chat","n":3,"prompt":[1,2,3,4,5]}', {}, 0.0)
    assert (requests(asked)["arrived"], requests(asked)["arrived_tokens"]) == (1, 15)
    asked.check(b'{"model":"chat","prompt":"%s"}' % (b"x" * 398), {}, 0.0)
    assert (requests(asked)["arrived"], requests(asked)["arrived_tokens"]) == (2, 115)


def test_demand_is_counted_before_it_is_refused_and_once() -> None:
    asked = picker()
    body = b'{"model":"chat","prompt":[1,2,3,4]}'
    for retry_count in (b"0", b"1", b"2"):
        asked.check(body, {b"x-stainless-retry-count": retry_count}, 0.0)
    found = requests(asked)
    assert (found["arrived"], found["arrived_tokens"], found["retried"]) == (1, 4, 2)
    assert found["refused"] == {"model_starting": 3}


ONE = b'{"model":"chat","prompt":[1,2,3,4]}'
SAYS_SO = {b"x-stainless-retry-count": b"1"}


def demand(asked: Picker) -> tuple[int, int]:
    found = requests(asked)
    return found["arrived"], found["retried"]


def test_who_comes_back_without_saying_so_is_one_demand_within_twice_the_time_told() -> None:
    asked = picker()
    told = from_header(headers(asked.check(ONE, {}, 0.0))["x-plimsoll-reply"])
    wait_s = int(told.headers["retry-after"])
    asked.check(ONE, {}, float(2 * wait_s))
    assert demand(asked) == (1, 1)
    asked.check(ONE, {}, 200.0)
    assert demand(asked) == (2, 1)


def test_equal_words_of_more_than_one_clients_attempts_are_more_than_one_demand() -> None:
    asked = picker()
    for _ in range(20):
        asked.check(ONE, {}, 0.0)
    assert demand(asked) == (4, 16)


def test_equal_words_of_two_tenants_are_two_demands() -> None:
    asked = picker()
    for tenant in (b"a", b"b"):
        asked.check(ONE, {b"x-gateway-inference-fairness-id": tenant}, 0.0)
    assert demand(asked) == (2, 0)


def test_who_asks_the_same_once_more_after_an_answer_is_a_new_demand() -> None:
    asked = picker()
    asked.check(ONE, {}, 0.0)
    known = fleet([service()], [pod("10.0.0.1:8000")])
    asked.set_fleet(known.with_healthy({"team/chat": {"10.0.0.1:8000"}}))
    asked.check(ONE, {}, 1.0)
    asked.check(ONE, {}, 1.0)
    assert demand(asked) == (2, 1)


@pytest.mark.parametrize(("code", "counted"), [(503, (1, 1)), (500, (1, 1)), (400, (2, 0)), (200, (2, 0))])
def test_a_failure_of_an_engine_is_one_demand_with_the_next_try_that_says_so(
    code: int, counted: tuple[int, int]
) -> None:
    asked = picker(pod("10.0.0.1:8000"))
    ticket = headers(asked.check(ONE, {}, 0.0))["x-plimsoll-ticket"]
    asked.ended(Record(ticket=ticket, host="10.0.0.1:8000", code=code), 0.1)
    asked.check(ONE, SAYS_SO, 0.6)
    assert demand(asked) == counted


def test_a_failure_of_an_engine_hides_nobody_who_says_nothing() -> None:
    asked = picker(pod("10.0.0.1:8000"))
    ticket = headers(asked.check(ONE, {}, 0.0))["x-plimsoll-ticket"]
    asked.ended(Record(ticket=ticket, host="10.0.0.1:8000", code=503), 0.1)
    asked.check(ONE, {}, 0.6)
    assert demand(asked) == (2, 0)


def test_what_names_no_model_of_ours_is_nobodys_demand() -> None:
    asked = picker()
    asked.check(b'{"model":"other","prompt":[1,2,3,4]}', {}, 0.0)
    asked.check(b"not json", {}, 0.0)
    assert (requests(asked)["arrived"], requests(asked)["arrived_tokens"]) == (0, 0)


def answered(asked: Picker, **record: Any) -> None:
    ticket = headers(asked.check(BODY, {}, 0.0))["x-plimsoll-ticket"]
    asked.ended(Record(ticket=ticket, host="10.0.0.1:8000", **record), 1.0)


def test_latencies_are_counted_by_buckets() -> None:
    asked = picker(pod("10.0.0.1:8000"))
    for ttft_us in (1_000, 1_001, 1_050, 250_000, 2_000_000_000):
        answered(asked, code=200, flags="-", ttft_us=ttft_us)
    told = signals(asked, "g", synced=True)["services"]["team/chat"]["ttft"]
    assert dict(zip(told["buckets"], told["counts"], strict=True)) == {0: 1, 1: 2, 64: 1, 161: 1}
    assert told["sum_s"] == pytest.approx(2000.253051)
    assert LATENCY_EDGES_S[63] < 0.25 <= LATENCY_EDGES_S[64]


@pytest.mark.parametrize(
    "record",
    [
        {"code": 200, "flags": "-", "duration_us": 900},  # no body
        {"code": 400, "flags": "-", "ttft_us": 900},  # the engine's own refusal comes at once
        {"code": 500, "flags": "-", "ttft_us": 900},
        {"code": 200, "flags": "UC", "ttft_us": 900},
        {"code": 200, "flags": "DC", "ttft_us": 900},
    ],
)
def test_only_answers_have_a_latency(record: dict[str, Any]) -> None:
    asked = picker(pod("10.0.0.1:8000"))
    answered(asked, **record)
    found = signals(asked, "g", synced=True)["services"]["team/chat"]
    assert found["ttft"] == found["e2e"] == {"sum_s": 0.0, "buckets": [], "counts": []}
    assert sum(found["requests"][outcome] for outcome in ("answered", "failed", "cancelled")) == 1


def test_a_new_picker_has_a_new_name_for_its_counts() -> None:
    assert picker().born != picker().born


def test_a_service_that_came_back_counts_anew() -> None:
    asked = picker(pod("10.0.0.1:8000"))
    asked.check(BODY, {}, 0.0)
    asked.set_fleet(fleet([], []))
    asked.set_fleet(fleet([service()], []))
    assert requests(asked)["arrived"] == 0


async def test_envoys_door_tells_its_questions_apart() -> None:
    door = EnvoyDoor(picker(), Worker())

    def ask(path: bytes, body: bytes = b"", **sent: bytes) -> dict[str, str]:
        asked = {name.replace("_", "-").encode(): value for name, value in sent.items()}
        reply = door(Request(b"POST", path, asked, body))
        assert isinstance(reply, bytes)
        return headers(reply)

    assert ask(b"/healthz")[":status"] == "200"
    assert ask(b"/v1/models?x=y")["content-type"] == "application/json"
    assert ask(b"/other")[":status"] == "404"
    refused = ask(b"/check/v1/completions", BODY)
    written = ask(b"/v1/completions", b"", x_plimsoll_reply=refused["x-plimsoll-reply"].encode())
    assert (written[":status"], written["x-plimsoll-reason"]) == ("503", "model_starting")


def test_models_are_listed_once_and_by_their_preferred_name() -> None:
    asked = picker(services=(service(model="tiny"), service("two", model="tiny", uid="z")))
    assert [part["id"] for part in orjson.loads(models(asked))["data"]] == ["team/two", "tiny"]


def test_a_body_has_its_number_and_a_header_claims_an_earlier_attempt() -> None:
    assert digest(BODY) == digest(bytes(bytearray(BODY))) != digest(BODY + b" ")
    assert [claimed(header) for header in (None, b"", b"0", b"1", b"x")] == [False, False, False, True, True]


def test_objects_are_synced_when_every_scope_has_its_first_list() -> None:
    objects = Objects(("a", "b"))
    listed = service(namespace="a")
    objects.apply(INFERENCESERVICES, "a", WatchEvent("SYNC", objects=(listed,)))
    objects.apply(INFERENCESERVICES, "b", WatchEvent("SYNC"))
    objects.apply(PODS, "a", WatchEvent("SYNC"))
    assert not objects.synced
    objects.apply(PODS, "b", WatchEvent("SYNC"))
    assert objects.synced
    assert objects.of(INFERENCESERVICES) == [listed]


def test_objects_follow_changes_and_a_new_list_replaces_all() -> None:
    objects = Objects()
    one, two = service("one"), service("two")
    objects.apply(INFERENCESERVICES, None, WatchEvent("SYNC", objects=(one,)))
    objects.apply(INFERENCESERVICES, None, WatchEvent("ADDED", two))
    changed = service("one", model="other")
    objects.apply(INFERENCESERVICES, None, WatchEvent("MODIFIED", changed))
    assert objects.of(INFERENCESERVICES) == [changed, two]
    objects.apply(INFERENCESERVICES, None, WatchEvent("DELETED", changed))
    objects.apply(INFERENCESERVICES, None, WatchEvent("DELETED", changed))
    assert objects.of(INFERENCESERVICES) == [two]
    objects.apply(INFERENCESERVICES, None, WatchEvent("SYNC"))
    assert objects.of(INFERENCESERVICES) == []


def test_settings_come_from_the_environment() -> None:
    settings = Settings.from_environment(
        {"PLIMSOLL_GATEWAY_DIR": "/x", "PLIMSOLL_WATCH_NAMESPACES": "a, b,", "PLIMSOLL_DRAIN_SECONDS": "7"}
    )
    assert (str(settings.fifo), settings.namespaces, settings.drain_seconds) == ("/x/access.fifo", ("a", "b"), 7.0)
    named = Settings.from_environment({"PLIMSOLL_CLASS_HEADER": "X-Class", "PLIMSOLL_TENANT_HEADER": "X-Tenant"})
    assert (named.class_header, named.tenant_header) == ("x-class", "x-tenant")
    with pytest.raises(ValueError, match="many"):
        Settings.from_environment({"PLIMSOLL_GATEWAY_PORT": "many"})
