"""A service that isolates tenants: its engines get a salt for each, and prefixes of one are no other's."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from plimsoll.gateway.settings import TrustedHeaders
from plimsoll.gateway.tenant_cache import salt_of
from tests.gateway.kube_objects import Object, pod, service
from tests.gateway.picker_harness import PickerHarness, engine_names, picked_engine, response_headers, service_with_slo

SALT = "x-plimsoll-cache-salt"
TENANT_HEADER = TrustedHeaders().tenant.decode()
LONG = "the same long system prompt " * 200


def isolated(obj: Object) -> Object:
    obj["spec"]["engine"] = {"prefixCache": "PerTenant"}
    obj["spec"].setdefault("tiers", {"serve": {}})
    return obj


def tenant(name: str) -> Mapping[str, str]:
    return {TENANT_HEADER: name}


@pytest.mark.parametrize("made", [service(), service_with_slo(batch=4)], ids=["without slo", "with slo"])
def test_engine_gets_the_salt_of_the_tenant(made: Object) -> None:
    world = PickerHarness(isolated(made), pods=engine_names(1))
    salts = [response_headers(world.send(headers=headers))[SALT] for headers in (tenant("a"), tenant("b"), {})]
    assert salts == [salt_of("a"), salt_of("b"), salt_of("")]
    assert len(set(salts)) == 3
    assert all(len(salt) == 32 and salt.isalnum() for salt in salts)


def test_shared_cache_names_no_salt() -> None:
    world = PickerHarness(service(), pods=engine_names(1))
    assert SALT not in response_headers(world.send(headers=tenant("a")))


def test_spec_that_cannot_be_read_still_isolates() -> None:
    broken = isolated(service())
    broken["spec"]["slo"] = "fast"
    world = PickerHarness(broken, pods=engine_names(1))
    assert response_headers(world.send(headers=tenant("a")))[SALT] == salt_of("a")


@pytest.mark.parametrize("isolates", [False, True])
def test_prefix_of_another_tenant_is_not_sought(isolates: bool) -> None:
    """The second tenant's request goes to the idle engine, unless the first one's blocks are its own."""
    made = service_with_slo(batch=8)
    world = PickerHarness(isolated(made) if isolates else made, pods=engine_names(2))
    first = picked_engine(world.send(headers=tenant("a"), prompt=LONG))
    own = picked_engine(world.send(headers=tenant("a"), prompt=LONG))
    assert own == first
    other = picked_engine(world.send(headers=tenant("b"), prompt=LONG))
    assert (other == first) is not isolates


def test_fallback_that_isolates_gets_the_salt() -> None:
    admission = {"whenFull": "Downgrade", "fallback": {"name": "small"}}
    made = service_with_slo(admission=admission, batch=1)
    small = isolated(service_with_slo("small", batch=4))
    world = PickerHarness(made, small, pods=(*engine_names(1), pod("10.0.1.1:8000", service="small")))
    sent = [response_headers(world.send(headers=tenant("a"))) for _ in range(2)]
    assert SALT not in sent[0]
    assert sent[1][SALT] == salt_of("a")
    assert json.dumps(sent[1]["x-plimsoll-response-model"]) == '"small"'
