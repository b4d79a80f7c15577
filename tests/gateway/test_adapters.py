"""Where requests for adapters go, who may send them, and that they share no prefix."""

from __future__ import annotations

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
from tests.gateway.api_key_secrets import bearer, key_secret
from tests.gateway.kube_objects import build_catalog, pod, service, with_adapters
from tests.gateway.picker_harness import PickerHarness, response_headers

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


def test_engine_with_the_least_load_replaces_one_without_the_adapter() -> None:
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
