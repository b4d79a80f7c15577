"""Targets with a port: gateways send requests to their engines, and report the demand."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll.adapters.kube_client import Resource
from plimsoll.api import labels
from plimsoll.api.conditions import Condition
from plimsoll.controllers.gateway_poller import GatewayView
from plimsoll.controllers.inference_pools.pool_watch import PoolWatch
from plimsoll.controllers.inference_pools.pool_writer import PoolWriter
from plimsoll.core import codec
from plimsoll.core.errors import NotFound
from plimsoll.core.ports import GatewayReading
from plimsoll.core.routing.published_engines import EngineTemplate, PublishedEngines
from plimsoll.resources import object_meta
from plimsoll.resources.inference_pool import match_labels
from plimsoll.resources.platform_config import InferencePoolSettings
from tests import builders
from tests.controllers.adopted_fleet import KEY, AdoptedFleet, service_object
from tests.core.signal_readings import gateway

Object = dict[str, Any]

PORT = {"spec.targets.serve.port": 8000}
REF = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "llm"}


def routed(fleet: AdoptedFleet, endpoints: int = 1) -> AdoptedFleet:
    """The fleet, to whose engines a gateway routes."""
    fleet.gateway_view = GatewayView(1, 1, {KEY: endpoints})
    return fleet


async def serve(fleet: AdoptedFleet, seconds: int, rate: float) -> None:
    """Requests arrive at the gateway."""
    for _ in range(seconds):
        arrived = fleet.gateway_readings[0].services["/".join(KEY)].arrived if fleet.gateway_readings else 0.0
        reading = gateway(arrived + rate, succeeded=arrived + rate)
        fleet.gateway_readings = [GatewayReading("gw-1", fleet.now_s + 1.0, "g", {"/".join(KEY): reading})]
        await fleet.run(1)


def selector(fleet: AdoptedFleet) -> str | None:
    found: str | None = fleet.status["tiers"]["serve"].get("podSelector")
    return found


async def test_routed_target_is_reached_at_the_gateways() -> None:
    fleet = routed(AdoptedFleet(**PORT))
    await fleet.run(2)
    assert selector(fleet) == "app=llm"
    assert fleet.status["url"]
    status, reason, message = fleet.condition("Ready")
    assert (status, reason) == ("True", "Serving")
    assert message == f"clients reach the service at {fleet.status['url']}"


async def test_target_without_port_publishes_no_selector() -> None:
    fleet = routed(AdoptedFleet())
    await fleet.run(2)
    assert selector(fleet) is None
    assert fleet.status["url"] == ""


async def test_demand_of_a_routed_target_comes_from_gateways() -> None:
    """The engines' counters say nothing of requests that the gateway rejects or queues, so they are not the demand."""
    fleet = routed(AdoptedFleet(rate=40.0, **PORT))
    await serve(fleet, 90, 40.0)
    assert fleet.needed() > 1
    assert fleet.writes == []
    metrics = fleet.scaler._entries[KEY].last_metrics
    assert metrics is not None
    assert not metrics[1].is_measured_at_engines
    assert fleet.limits, "gateways get admission limits"
    assert fleet.limits[-1]["limits"]["costModel"]
    assert fleet.spec == fleet.original


async def test_silent_gateways_are_named_not_the_engines_port() -> None:
    fleet = routed(AdoptedFleet(rate=40.0, **PORT))
    await fleet.run(60)
    assert fleet.condition("MetricsDegraded")[2].startswith("no gateway replica has reported request metrics")


async def test_removed_port_returns_the_demand_to_the_engines() -> None:
    fleet = routed(AdoptedFleet(rate=40.0, **PORT))
    await serve(fleet, 60, 40.0)
    fleet.edit(**{"spec.targets.serve": {"scaleTargetRef": REF, "maxReplicas": 9}})
    fleet.gateway_readings = []
    for limits in fleet.limits:
        fleet.cache.put(limits)
    await fleet.run(60)
    assert selector(fleet) is None
    assert fleet.limits == []
    metrics = fleet.scaler._entries[KEY].last_metrics
    assert metrics is not None
    assert metrics[1].is_measured_at_engines
    assert fleet.condition("Ready")[1] == "EnginesReady"


async def test_restarted_operator_keeps_the_selector_until_it_reads() -> None:
    """A gateway that lost it for a moment would drop all engines."""
    fleet = routed(AdoptedFleet(**PORT))
    await fleet.run(2)
    fleet.start_operator()
    await fleet.reconciler.reconcile(KEY)
    assert fleet.condition("Ready")[2] == "the target has not been read yet"
    assert selector(fleet) == "app=llm"
    assert len(fleet.services) == 1
    assert "serve" in codec.decode(PublishedEngines, fleet.limits[-1]["engines"]).current, "its engines still serve"
    fleet.unanswered = {"llm"}
    await fleet.run(2)
    assert fleet.condition("TargetUnusable")[1] == "TargetUnreadable"
    assert selector(fleet) == "app=llm"


async def test_forbidden_target_stays_routed_until_its_spec_changes() -> None:
    fleet = routed(AdoptedFleet(**PORT))
    await fleet.run(2)
    fleet.forbidden = {"deployments"}
    await fleet.run(2)
    assert fleet.condition("TargetUnusable")[1] == "TargetForbidden"
    assert selector(fleet) == "app=llm"
    assert len(fleet.services) == 1
    assert "serve" in codec.decode(PublishedEngines, fleet.limits[-1]["engines"]).current, "its engines still serve"
    fleet.edit(**{"spec.targets.serve.podSelector": "app=other"})
    await fleet.run(2)
    assert selector(fleet) is None


async def test_target_of_another_service_is_not_routed() -> None:
    fleet = routed(AdoptedFleet(**PORT))
    await fleet.run(2)
    fleet.cache.put(service_object("first", "2025-01-01T00:00:00Z"))
    await fleet.run(2)
    assert fleet.condition("TargetUnusable")[1] == "TargetTaken"
    assert selector(fleet) is None


async def test_target_without_replicas_is_not_waited_for() -> None:
    """The gateway rejects at once: nothing that it knows starts an engine."""
    fleet = routed(AdoptedFleet(replicas=0, **PORT), endpoints=0)
    await fleet.run(2)
    assert fleet.condition("Ready")[:2] == ("False", "ScaledToZero")
    assert "Deployment llm has 0 replicas" in fleet.condition("Ready")[2]


async def test_ready_engines_without_a_route_are_reported() -> None:
    fleet = routed(AdoptedFleet(**PORT), endpoints=0)
    await fleet.run(2)
    assert fleet.condition("Ready")[:2] == ("False", "NoRoutableEndpoint")
    fleet.gateway_view = GatewayView(1, 0, {}, "its release is another")
    await fleet.reconciler.reconcile(KEY)
    assert fleet.condition("Ready")[1] == "NoGateway"


async def test_too_long_selector_of_a_scale_is_refused() -> None:
    fleet = AdoptedFleet(**PORT)
    fleet.selector = f"app={'x' * 1021}"
    fleet.selected[fleet.selector] = 0
    await fleet.run(1)
    assert fleet.condition("TargetUnusable")[1:] == (
        "TargetNotScalable",
        "status.selector in the scale of Deployment llm has 1025 characters, at most 1024 can be used: set podSelector",
    )


async def test_selector_of_a_scale_without_pairs_is_refused() -> None:
    """No Service can select by it, and neither can an InferencePool."""
    fleet = AdoptedFleet(**PORT)
    fleet.selector = "app in (llm,other)"
    fleet.selected[fleet.selector] = 1
    await fleet.run(1)
    assert fleet.condition("TargetUnusable")[1:] == (
        "TargetNotScalable",
        "a Service selects pods by NAME=VALUE pairs alone, and status.selector in the scale of Deployment llm is app in"
        " (llm,other): set podSelector to such pairs",
    )
    assert fleet.services == []


async def test_service_of_a_routed_target_selects_its_pods() -> None:
    """Kubernetes writes its EndpointSlices, also while the operator is down. Nothing of theirs changes."""
    fleet = routed(AdoptedFleet(**PORT))
    await fleet.run(2)
    (made,) = fleet.services
    assert object_meta.owner_uid(made) == fleet.object["metadata"]["uid"]
    assert made["metadata"]["name"] == f"{KEY[1]}-targets"
    assert made["metadata"]["labels"][labels.ROLE] == "serve"
    port = {"name": "api", "port": 8000, "targetPort": 8000, "protocol": "TCP"}
    assert made["spec"] == {"clusterIP": "None", "selector": {"app": "llm"}, "ports": [port]}
    fleet.start_operator()
    await fleet.reconciler.reconcile(KEY)
    assert [one["spec"] for one in fleet.services] == [made["spec"]], "it stays until the target is read"
    fleet.edit(**{"spec.targets.serve": {"scaleTargetRef": REF, "maxReplicas": 9}})
    await fleet.run(2)
    assert fleet.services == []


async def test_selector_without_pairs_is_not_kept() -> None:
    """Gateways would await the Service of its pods, which cannot be made."""
    fleet = routed(AdoptedFleet(**PORT))
    await fleet.run(2)
    fleet.selector = "app in (llm,other)"
    await fleet.run(2)
    assert fleet.condition("TargetUnusable")[1] == "TargetNotScalable"
    assert selector(fleet) is None


def store_written(fleet: AdoptedFleet) -> None:
    """The cache gets what the operator has written, by its watches."""
    for one in (*fleet.services, *fleet.limits[-1:]):
        fleet.cache.put(one)


@pytest.mark.parametrize("changed", ["podSelector", "scaleTargetRef"])
async def test_service_of_an_unread_target_stays(changed: str) -> None:
    """Without it all engines would leave the gateways until the next reading."""
    fleet = routed(AdoptedFleet(**PORT))
    await fleet.run(2)
    store_written(fleet)
    edit = {"podSelector": "app=other"} if changed == "podSelector" else {"scaleTargetRef": {**REF, "name": "next"}}
    fleet.edit(**{f"spec.targets.serve.{name}": value for name, value in edit.items()})
    fleet.start_operator()
    await fleet.reconciler.reconcile(KEY)
    assert len(fleet.services) == 1, "not read yet"
    fleet.unanswered = {"llm", "next"}
    await fleet.run(2)
    assert fleet.condition("TargetUnusable")[1] == "TargetUnreadable"
    assert len(fleet.services) == 1
    fleet.unanswered = set()
    fleet.labels = {labels.MANAGED_BY: "plimsoll", labels.SERVICE: "other"}
    fleet.deployments |= {"next"}
    await fleet.run(2)
    assert fleet.condition("TargetUnusable")[1] == "TargetTaken"
    assert fleet.services == []


async def test_restarted_operator_keeps_engines_of_an_unread_target() -> None:
    fleet = routed(AdoptedFleet(**PORT))
    fleet.spec["template"]["spec"]["containers"][0]["args"] = ["--max-model-len=4096"]
    await fleet.run(2)
    store_written(fleet)
    before = fleet.limits[-1]["engines"]
    assert before != codec.encode(PublishedEngines({"serve": EngineTemplate()}))
    fleet.start_operator()
    for one in list(fleet.cache.children(labels.ADOPTED_POD_KIND, KEY)):
        fleet.cache.remove(one)
    await fleet.reconciler.reconcile(KEY)
    assert fleet.limits[-1]["engines"] == before
    await fleet.run(2)
    assert fleet.limits[-1]["engines"] == before


async def test_target_that_selects_an_engine_of_a_tier_is_refused() -> None:
    fleet = routed(AdoptedFleet(**PORT))
    fleet.pod_labels = {labels.MANAGED_BY: "plimsoll", labels.SERVICE: "other", labels.ROLE: "serve"}
    await fleet.run(2)
    assert fleet.condition("TargetUnusable")[1] == "TargetOverlaps"
    assert fleet.services == []


class PooledFleet(AdoptedFleet):
    """A fleet in the namespace of a picker, whose cluster has the kind InferencePool."""

    def __init__(self, **edits: Any) -> None:
        super().__init__(**edits)
        gateway_of_team = builders.PLATFORM.gateway.model_copy(update={"namespace": KEY[0]})
        settings = {"gateway": gateway_of_team, "inference_pools": InferencePoolSettings(picker_service="picker")}
        platform = builders.PLATFORM.model_copy(update=settings)
        watch = PoolWatch(self, self.cache, KEY[0], lambda key: None)
        watch.problem = None
        self.pools: list[Object] = []
        self._writer = PoolWriter(self, self.cache, platform, watch, lambda key, seconds: None)

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        if resource.kind == labels.POOL_KIND:
            raise NotFound(name, 404)
        return await super().get(resource, namespace, name)

    async def apply(self, obj: Object, manager: str, *, force: bool = True, subresource: str | None = None) -> Object:
        if obj["kind"] != labels.POOL_KIND:
            return await super().apply(obj, manager, force=force, subresource=subresource)
        self.pools.append(obj)
        return obj

    async def reconcile_pool(self) -> Condition | None:
        return await self._writer.reconcile(self.object, self.parsed(), self.targets.states(KEY).get("serve"))


async def test_pool_of_a_target_selects_its_pods_and_port() -> None:
    fleet = PooledFleet(**{"spec.targets.serve.port": 9000})
    assert await fleet.reconcile_pool() is None
    assert fleet.pools == [], "not before the target is read"
    await fleet.targets.poll()
    assert await fleet.reconcile_pool() is None
    (pool,) = fleet.pools
    assert pool["metadata"]["name"] == KEY[1]
    assert pool["spec"]["selector"] == {"matchLabels": {"app": "llm"}}
    assert pool["spec"]["targetPorts"] == [{"number": 9000}]
    assert pool["spec"]["endpointPickerRef"]["name"] == "picker"


async def test_target_without_port_has_no_pool() -> None:
    fleet = PooledFleet()
    await fleet.targets.poll()
    assert await fleet.reconcile_pool() is None
    assert fleet.pools == []


@pytest.mark.parametrize(
    ("selector", "pairs"),
    [
        ("app=llm", {"app": "llm"}),
        ("app == llm, example.com/tier=", {"app": "llm", "example.com/tier": ""}),
        ("app=llm,app=llm", {"app": "llm"}),
        ("app=llm,app=other", None),
        ("app!=llm", None),
        ("app", None),
        ("app=llm,tier notin (a)", None),
        ("app in (a,b)", None),
    ],
)
def test_pairs_of_selectors(selector: str, pairs: dict[str, str] | None) -> None:
    assert match_labels(selector) == pairs
