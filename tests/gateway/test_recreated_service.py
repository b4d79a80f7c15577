"""Engines of a deleted service answer no request for its successor of the same name, which may have another model."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll.gateway.service_catalog import ServiceCatalog
from tests.gateway.kube_objects import CatalogOfPods, Object, build_catalog, pod, service

CREATED = "2026-01-02T03:04:05Z"  # of the service
BEFORE = "2026-01-02T03:00:00Z"
DELETED = {"deletionTimestamp": "2026-01-02T03:04:06Z"}


def addresses(known: ServiceCatalog) -> list[str]:
    return [endpoint.address for endpoint in known.services["team/chat"].endpoints]


def engine(address: str, created: str, **changes: Any) -> Object:
    return pod(address, creationTimestamp=created, **changes)


@pytest.mark.parametrize("changes", [{}, DELETED], ids=["running", "draining"])
def test_engine_of_an_earlier_service_is_no_endpoint(changes: dict[str, str]) -> None:
    old, new = engine("10.0.0.1:8000", BEFORE, **changes), engine("10.0.0.2:8000", CREATED)
    assert addresses(build_catalog([service()], [old])) == []
    assert addresses(build_catalog([service()], [old, new])) == ["10.0.0.2:8000"]


def test_engine_within_clock_skew_of_its_service_is_an_endpoint() -> None:
    early = "2026-01-02T03:04:03Z"
    assert addresses(build_catalog([service()], [engine("10.0.0.1:8000", early)])) == ["10.0.0.1:8000"]
    assert addresses(build_catalog([service()], [engine("10.0.0.1:8000", early, **DELETED)])) == []


def test_recreated_service_loses_the_engines_of_the_first() -> None:
    catalog, first = CatalogOfPods(), service(creationTimestamp="2026-01-01T00:00:00Z", uid="first")
    old, new = engine("10.0.0.1:8000", BEFORE), engine("10.0.0.2:8000", CREATED)
    assert addresses(catalog.set([first], [old])) == ["10.0.0.1:8000"]
    assert addresses(catalog.builder.update({"team/chat": service()}, {}, {})) == [], "the operator is not there yet"
    assert addresses(catalog.set([service()], [old])) == []
    assert addresses(catalog.set([service()], [old, new])) == ["10.0.0.2:8000"]


def test_lengths_of_an_earlier_service_are_not_its_successors() -> None:
    old, new = engine("10.0.0.1:8000", BEFORE), engine("10.0.0.2:8000", CREATED)
    for one, length in ((old, "8192"), (new, "1024")):
        one["spec"]["containers"][0]["env"] = [{"name": "PLIMSOLL_ARGS", "value": f'["--max-model-len={length}"]'}]
    found = build_catalog([service()], [old, new]).services["team/chat"]
    assert found.max_model_len == 1024


def test_unplaced_pod_of_an_earlier_service_keeps_no_place() -> None:
    waiting = engine("10.0.0.9:8000", BEFORE, ready=False)
    del waiting["status"]["podIP"]
    waiting["status"]["conditions"] = [{"type": "PodScheduled", "status": "False"}]
    leaving = engine("10.0.0.1:8000", CREATED, **DELETED)
    known = build_catalog([service()], [waiting, leaving]).services["team/chat"]
    assert [endpoint.last for endpoint in known.endpoints] == [True]
