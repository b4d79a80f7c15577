"""Where requests for adapters go, who may send them, and that they share no prefix."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.adapters.kube_client import WatchEvent
from plimsoll.core.routing.endpoint import Endpoint
from plimsoll.core.routing.picker import FALLBACKS, Pick
from plimsoll.core.types import Role
from plimsoll.gateway.adapters import ADAPTER_HEADER, AdapterEntry, prefer_loaded
from plimsoll.gateway.identity import Authenticator, Identity
from plimsoll.gateway.prefix_hash import BLOCK_BYTES, block_hashes
from plimsoll.gateway.settings import ApiKeyMode
from plimsoll.gateway.signals_document import update_metrics
from plimsoll.telemetry import gateway_metrics
from tests.gateway.api_key_secrets import bearer, key_secret
from tests.gateway.kube_objects import Object, build_catalog, pod, service, with_adapters
from tests.gateway.one_queue_harness import Gateways, eventually
from tests.gateway.picker_harness import (
    PickerHarness,
    engine_names,
    picked_engine,
    rejection_of,
    response_headers,
    service_with_slo,
)

PODS = [f"pod-{number}" for number in range(6)]


def endpoint(pod: str, routable: bool = True) -> Endpoint:
    return Endpoint(f"{pod}:8000", pod, Role.SERVE, "r", ready=True, routable=routable)


def rank(one: Endpoint) -> int:
    return PODS.index(one.pod)


@given(st.permutations(PODS), st.sets(st.sampled_from(PODS)), st.sets(st.sampled_from(PODS)), st.integers(0, FALLBACKS))
def test_loaded_engines_come_first(order: list[str], avoided: set[str], away: set[str], fallbacks: int) -> None:
    endpoints = [endpoint(pod, pod not in away) for pod in PODS]
    by_pod = {one.pod: one for one in endpoints}
    chosen = [by_pod[pod] for pod in order if pod not in away][: 1 + fallbacks]
    if not chosen:
        return
    pick = Pick(chosen[0], tuple(chosen[1:]))
    found = prefer_loaded(pick, AdapterEntry("sql", ("sql",), frozenset(avoided)), endpoints, rank)
    usable = {pod for pod in PODS if pod not in away and pod not in avoided}
    targets = [one.pod for one in (found.endpoint, *found.fallbacks)]
    assert len(set(targets)) == len(targets)
    if not usable:
        assert found == pick
    elif avoided & {one.pod for one in chosen}:
        assert set(targets) <= usable
        assert len(targets) == min(1 + FALLBACKS, len(usable))
    else:
        assert found == pick


def test_least_loaded_engine_replaces_one_without_the_adapter() -> None:
    endpoints = [endpoint(pod) for pod in PODS]
    entry = AdapterEntry("sql", ("sql",), frozenset(PODS[:2]))
    found = prefer_loaded(Pick(endpoints[0], (endpoints[1],)), entry, endpoints, rank)
    assert [one.pod for one in (found.endpoint, *found.fallbacks)] == PODS[2:5]


@given(st.text("ab", min_size=1), st.text("ab", min_size=1))
def test_prefix_hashes_differ_by_adapter(one: str, other: str) -> None:
    prompt = b"x" * (3 * BLOCK_BYTES)
    assert len(block_hashes(prompt, one)) == 3
    assert set(block_hashes(prompt, one)).isdisjoint(block_hashes(prompt))
    assert (block_hashes(prompt, one) == block_hashes(prompt, other)) is (one == other)


@pytest.mark.parametrize(
    ("models", "allowed"),
    [
        (None, {"chat", "team/chat", "sql", "team/chat/sql", "law", "team/chat/law"}),
        ({"chat"}, {"chat", "team/chat"}),
        ({"sql"}, {"sql", "team/chat/sql"}),
        ({"team/chat/law", "team/chat"}, {"chat", "team/chat", "law", "team/chat/law"}),
    ],
)
def test_key_for_a_model_is_none_for_its_adapters(models: set[str] | None, allowed: set[str]) -> None:
    catalog = build_catalog([with_adapters(service(), "sql", "law")], [])
    identity = Identity(models=None if models is None else frozenset(models))
    assert {name for name, found in catalog.by_name.items() if identity.may_use(name, found, catalog)} == allowed


def test_entries_have_the_pods_without_them() -> None:
    entry = build_catalog([with_adapters(service(), "sql", "law", sql=["a", "b"])], []).services["team/chat"]
    assert entry.adapters["sql"].not_loaded_on == {"a", "b"}
    assert entry.adapters["law"].not_loaded_on == frozenset()


def test_key_of_an_adapter_has_a_quota_of_its_own() -> None:
    """Keys name models, and an adapter is one: its key has access and limits for it, and takes nothing from others."""
    authenticator = Authenticator(ApiKeyMode.REQUIRED)
    secrets = [key_secret("sql", models="sql", requests_per_minute=2), key_secret("law", models="law,chat")]
    authenticator.keys.apply(WatchEvent("SYNC", objects=tuple(secrets)))
    engines = (pod("10.0.0.1:8000"),)
    harness = PickerHarness(with_adapters(service(), "sql", "law"), pods=engines, authenticator=authenticator)

    def outcome(key: str, model: str) -> str:
        headers = response_headers(harness.send(model, headers=bearer(key)))
        return headers.get("x-plimsoll-reason") or headers[ADAPTER_HEADER]

    assert outcome("sql", "law") == outcome("sql", "chat") == "model_not_allowed"
    assert [outcome("sql", "sql") for _ in range(3)] == ["sql", "sql", "rate_limit_exceeded"]
    assert [outcome("law", "law") for _ in range(3)] == ["law"] * 3
    harness.clock.advance_to(30.0)
    assert [outcome("sql", "sql") for _ in range(2)] == ["sql", "rate_limit_exceeded"]


def busy_service(max_loras: int, **not_loaded_on: list[str]) -> Object:
    made = with_adapters(service_with_slo(batch=8), "sql", "law", **not_loaded_on)
    made["spec"]["engine"] = {"lora": {"maxLoras": max_loras}}
    return made


async def test_request_waits_while_the_engine_has_other_adapters() -> None:
    harness = PickerHarness(busy_service(1), pods=engine_names(1))
    first, model, again = harness.send("sql"), harness.send("chat"), harness.send("sql")
    queued = harness.send_queued("law")
    assert {picked_engine(reply) for reply in (first, model, again)} == {"10.0.0.1:8000"}
    for reply in (first, model):
        assert isinstance(reply, bytes)
        harness.complete(reply)
    assert not queued.done()
    assert isinstance(again, bytes)
    harness.complete(again)
    assert response_headers(queued)[ADAPTER_HEADER] == "law"
    assert harness.outcomes() == {"Admitted": 4, "Queued": 1}


async def test_adapter_without_a_place_is_rejected_with_its_turn() -> None:
    harness = PickerHarness(busy_service(1), pods=engine_names(1))
    harness.send("sql")
    queued = harness.send_queued("law")
    harness.advance(60.0)
    reply = rejection_of(queued)
    assert (reply.status, reply.error["code"], reply.error["type"]) == (429, "adapters_busy", "rate_limit_error")
    assert "Adapter 'law' waits for its turn: the one ready engine runs requests of at most 1 adapters" in str(
        reply.error["message"]
    )
    assert int(reply.headers["retry-after"]) >= 1
    assert harness.service()["requests"]["rejected"] == {"adapters_busy": 1}
    assert harness.outcomes() == {"Admitted": 1, "Queued": 1, "ShedAdapters": 1}


async def test_adapter_without_a_place_or_queue_is_rejected_at_once() -> None:
    obj = busy_service(1)
    obj["spec"]["admission"] = {"whenFull": "Shed"}
    harness = PickerHarness(obj, pods=engine_names(1))
    harness.send("sql")
    reply = rejection_of(harness.send("law"))
    assert (reply.status, reply.error["code"]) == (429, "adapters_busy")
    assert int(reply.headers["retry-after"]) >= 1


async def test_adapters_share_the_engines_of_their_service() -> None:
    harness = PickerHarness(busy_service(1), pods=engine_names(2))
    engines = [{picked_engine(harness.send(name)) for _ in range(3)} for name in ("sql", "law")]
    assert [len(one) for one in engines] == [1, 1]
    assert engines[0] != engines[1]


async def test_engine_without_the_adapter_is_not_chosen_by_admission() -> None:
    pods = engine_names(2)
    harness = PickerHarness(busy_service(2, sql=[pods[0]["metadata"]["name"]]), pods=pods)
    assert {picked_engine(harness.send("sql")) for _ in range(4)} == {"10.0.0.2:8000"}
    assert harness.running_by_engine() == {"10.0.0.1:8000": 0, "10.0.0.2:8000": 4}


async def test_metrics_tell_how_many_adapters_are_active_and_wait() -> None:
    harness = PickerHarness(busy_service(1), pods=engine_names(1))
    harness.send("sql"), harness.send_queued("law")
    update_metrics(harness.picker)
    states = {
        state: gateway_metrics.GATEWAY.get_sample_value(
            "plimsoll_gateway_adapters", {"service": "team/chat", "state": state}
        )
        for state in ("active", "waiting")
    }
    assert states == {"active": 1, "waiting": 1}


@pytest.mark.parametrize("count", [1, 2])
async def test_adapters_of_all_gateways_are_counted_together(tmp_path: Path, count: int) -> None:
    async with Gateways(tmp_path, count, busy_service(1), pods=engine_names(1)) as gateways:
        first, second = gateways.all[0], gateways.all[-1]
        reply = await first.ask("first", "sql")
        queued = second.send("second", "law")
        await eventually(lambda: gateways.owner().signals()["admission"]["queued"] == 1, "it waits at the owner")
        assert picked_engine(await second.ask("third", "sql")) == "10.0.0.1:8000"
        assert not queued.done()
        first.complete(reply)
        assert not queued.done()


async def test_new_owner_knows_the_adapters_that_run(tmp_path: Path) -> None:
    async with Gateways(tmp_path, 2, busy_service(1), pods=engine_names(1)) as gateways:
        (other,), owner = gateways.others(), gateways.owner()
        reply = await other.ask("first", "sql")
        gateways.kill(owner)
        gateways.publish(other)
        await eventually(lambda: gateways.owner() is other, "the other gateway owns the service")
        queued = other.send("second", "law")
        await eventually(lambda: other.signals()["admission"]["queued"] == 1, "it waits at the new owner")
        other.complete(reply)
        assert response_headers(await queued)[ADAPTER_HEADER] == "law"
