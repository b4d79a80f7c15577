"""Parts of the spec are added, changed and removed on a running service: fleet, status and pods follow each change."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
import pytest

from e2e.lib import simulated_fleet
from e2e.lib.kube import Cluster, Object
from e2e.lib.service import Service
from e2e.lib.wait import wait_until

FOLLOW_S = 45.0  # less than the minute without requests after which an idle fleet shrinks by itself
GONE_S = 240.0  # patience for engines to end, or for a minute to pass, on a busy machine
ANNOTATION = "example.com/spec-changes"
SLO = {"ttft": f"{simulated_fleet.TTFT_S:g}s", "tpot": f"{simulated_fleet.TPOT_S * 1e3:g}ms"}
SLO_CONDITIONS = ("MetricsDegraded", "SLOInfeasible", "SLOMet", "Shedding", "GatewayConfigStale")


@pytest.fixture
def changing(service: Callable[[str], Service], cluster: Cluster) -> Service:
    """A light fleet of 1 to 4 engines, with 3 because of its minimum."""
    found = service("spec-changes")
    manifest = simulated_fleet.fleet_manifest(found.name, {"serve": simulated_fleet.replica_bounds(3, 4)})
    manifest["spec"]["scaling"] = {"horizon": "10s"}
    cluster.apply(manifest, namespace=found.namespace)
    found.wait_ready()
    wait_until("three engines are ready", lambda: len(found.ready_pods()) == 3)
    return found


def test_removed_slo_scales_to_minimum_and_stops_admission(changing: Service) -> None:
    _patch(changing, {"slo": None, "tiers": {"serve": {"minReplicas": None}}})
    _wait_for_engines(changing, 1)
    changing.wait_condition("ScalingInactive", reason="NoSLO")
    wait_until("no admission limits are published", lambda: not changing.limits())
    status = changing.status()
    assert not {"slo", "limitedBy"} & status.keys()
    assert not {one["type"] for one in status["conditions"]} & set(SLO_CONDITIONS)
    events = [one["message"] for one in changing.wait_events("ScaledDown")]
    assert any("spec.slo is not set" in message for message in events), events
    assert _answers(changing), "requests are no longer gated"
    _patch(changing, {"slo": SLO})
    wait_until("the limits are published again", changing.limits, simulated_fleet.PUBLISH_TIMEOUT_S)
    wait_until("it is sized again", lambda: changing.condition("ScalingInactive").get("reason") != "NoSLO")
    wait_until("the condition is back", lambda: changing.condition("SLOMet"))
    assert _answers(changing)
    print(f"slo removed: {events[-1]}; added: {changing.condition('SLOMet')['message']}")


@pytest.mark.extended
def test_changed_and_removed_bounds_are_followed_at_once(changing: Service) -> None:
    _patch(changing, {"tiers": {"serve": {"minReplicas": 2, "maxReplicas": 2}}})
    _wait_for_engines(changing, 2)
    _patch(changing, {"tiers": {"serve": {"minReplicas": None, "maxReplicas": None}}})
    _wait_for_engines(changing, 1)
    changing.wait_ready()
    assert simulated_fleet.desired_replicas(changing) == 1
    # It stays for a minute after the limit last applied.
    changing.wait_condition("ScalingLimited", GONE_S, status="False")


@pytest.mark.extended
def test_removed_pod_overrides_leave_the_pods(changing: Service) -> None:
    for value in ("one", "two", None):
        pod = {"annotations": {ANNOTATION: value}} if value else None
        _patch(changing, {"tiers": {"serve": {"pod": pod}}})
        wait_until(f"all pods have {value}", lambda value=value: _annotations(changing) == {value}, 240)
        changing.wait_ready()
    template = _deployment(changing)["spec"]["template"]
    assert ANNOTATION not in template["metadata"].get("annotations", {})


def _wait_for_engines(service: Service, engines: int) -> None:
    """Waits until so many are wanted, which takes no minute, and no more are there."""
    wait_until(f"{engines} wanted", lambda: simulated_fleet.desired_replicas(service) == engines, FOLLOW_S)
    wait_until(f"{engines} engines are left", lambda: len(service.pods()) == engines, GONE_S)


def _patch(service: Service, spec: Object) -> None:
    service.cluster.patch("inferenceservices", service.name, service.namespace, {"spec": spec})


def _deployment(service: Service) -> Object:
    found = service.cluster.get("deployments", f"{service.name}-serve", service.namespace)
    assert found
    return found


def _annotations(service: Service) -> set[str | None]:
    """The values of the annotation in all pods."""
    return {(pod["metadata"].get("annotations") or {}).get(ANNOTATION) for pod in service.pods()}


def _answers(service: Service) -> bool:
    body = {"model": service.name, "prompt": f"spec changes {time.time()}", "max_tokens": 4}
    return httpx.post(f"{service.url}/v1/completions", json=body, timeout=60, trust_env=False).status_code == 200
