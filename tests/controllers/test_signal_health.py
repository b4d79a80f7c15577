"""Who is not heard is told when it is news, with what it means; what has just begun is no silence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plimsoll.api.conditions import Condition, ConditionReason, ConditionType
from plimsoll.api.v1alpha1 import parse
from plimsoll.controllers.autoscale.autoscaler import scaling_spec
from plimsoll.controllers.autoscale.scaling_conditions import _CHECK_PODS, scaling_inactive
from plimsoll.controllers.autoscale.signal_health import (
    BYPASS_SECONDS,
    ENGINE_SILENCE_SECONDS,
    STALE_CONFIG_SECONDS,
    UNSELECTED_SECONDS,
)
from plimsoll.core import codec
from plimsoll.core.admission.publication import AdmissionLimits
from plimsoll.core.demand.counter_delta import MAX_READING_GAP_S
from plimsoll.core.ports import GatewayConfigState, GatewayReading
from plimsoll.core.routing.published_engines import PublishedEngines
from plimsoll.core.types import Role
from plimsoll.resources import objects
from tests import builders
from tests.controllers.test_autoscale import NOW_S, PROMISED, World, arrivals, engine, ready

KEY = ("team", "chat")
Object = dict[str, Any]


def ready_world(**spec: Any) -> tuple[World, Object]:
    """One replica, ready."""
    parent = builders.service(**{**PROMISED, **spec})
    world = World.with_engine(parent)
    return world, parent


def run_tick(
    world: World, at: float, gateway: bool = True, answers: bool = True, taken: GatewayConfigState | None = None
) -> list[Condition]:
    """One tick, with a word of the gateway and, every fifth, of the engine; returns the conditions."""
    if gateway:
        reading = replace(arrivals(2.0 * at), config_state=taken)
        world.readings = (GatewayReading("gw-1", NOW_S + at, "a", {"/".join(KEY): reading}),)
    if answers and at % 5 == 0:
        world.scaler.observe_engine(KEY, Role.SERVE, engine(2.0 * at, NOW_S + at))
    world.settle(world.scaler.decide(NOW_S + at))
    report = world.scaler.report(KEY)
    return [] if report is None else list(report.conditions)


def found_condition(world: World, kind: ConditionType) -> Condition | None:
    report = world.scaler.report(KEY)
    assert report is not None
    return next((c for c in report.conditions if c.type is kind), None)


def condition_of(world: World, kind: ConditionType) -> Condition:
    found = found_condition(world, kind)
    assert found is not None
    return found


def test_newly_ready_engine_is_not_reported_silent() -> None:
    """After a restart of the operator, an idle engine is read for the first time within 10 s."""
    world, _ = ready_world()
    for at in range(1, 15):
        run_tick(world, at, answers=False)
        assert found_condition(world, ConditionType.METRICS_DEGRADED) is None, f"lost after {at} s"


def test_engine_never_answering_is_reported() -> None:
    world, _ = ready_world()
    for at in range(1, 20):
        run_tick(world, at, answers=False)
    assert condition_of(world, ConditionType.METRICS_DEGRADED).reason is ConditionReason.METRICS_MISSING


def test_engine_silence_and_recovery_are_reported() -> None:
    world, _ = ready_world()
    for at in range(120):
        run_tick(world, at)
    assert found_condition(world, ConditionType.METRICS_DEGRADED) is None
    lost_s = None
    for at in range(120, 180):
        run_tick(world, at, answers=False)
        if found_condition(world, ConditionType.METRICS_DEGRADED) is not None and lost_s is None:
            lost_s = at - 115.0
    for at in range(180, 186):
        run_tick(world, at)
    assert found_condition(world, ConditionType.METRICS_DEGRADED) is None
    assert lost_s is not None
    assert lost_s <= MAX_READING_GAP_S + ENGINE_SILENCE_SECONDS + 2.0


def test_engines_read_through_prometheus_are_reported_at_once() -> None:
    world, _ = ready_world()
    for at in range(60):
        run_tick(world, at)
    assert found_condition(world, ConditionType.METRICS_DEGRADED) is None
    world.second_hand = ("serve",)
    run_tick(world, 60)
    found = condition_of(world, ConditionType.METRICS_DEGRADED)
    assert (found.holds, found.reason) == (True, ConditionReason.METRICS_DELAYED)
    assert found.message.startswith(
        "gateways answer; engines of serve do not answer the operator, and their metrics come from"
    )
    world.second_hand = ()
    run_tick(world, 61)
    assert found_condition(world, ConditionType.METRICS_DEGRADED) is None


def test_partial_metrics_name_silent_sources() -> None:
    world, parent = ready_world()
    names = [f"chat-serve-{letter}" for letter in "bcdef"]
    for name in names:
        pod = ready(parent, "serve")
        pod["metadata"] |= {"name": name, "uid": name}
        world.store.put(pod)
    world.store.put(builders.deployment(parent, "serve", replicas=6, ready=6))
    for at in range(60):
        run_tick(world, at)
    found = condition_of(world, ConditionType.METRICS_DEGRADED)
    assert found.reason is ConditionReason.METRICS_PARTIAL
    silent = "5 serve engines (chat-serve-b, chat-serve-c, chat-serve-d and 2 more)"
    assert found.message == f"no metrics from {silent}: tiers can scale up, but not down. {_CHECK_PODS}"
    world, _ = ready_world()
    world.gateways = ("gw-1", "gw-2")
    for at in range(60):
        run_tick(world, at)
    assert condition_of(world, ConditionType.METRICS_DEGRADED).message == (
        f"no metrics from 1 gateway (gw-2): tiers can scale up, but not down. {_CHECK_PODS}"
    )


def bypass_tick(world: World, at: float, sent: float, running: float) -> None:
    """A tick in which gateways have sent so many requests since the start, and the engine runs others."""
    world.readings = (GatewayReading("gw-1", NOW_S + at, "a", {"/".join(KEY): arrivals(sent)}),)
    world.scaler.observe_engine(KEY, Role.SERVE, replace(engine(40.0 + at, NOW_S + at), running=running))
    world.settle(world.scaler.decide(NOW_S + at))


def test_requests_that_no_gateway_sent_are_reported() -> None:
    world, _ = ready_world()
    for at in range(20):
        bypass_tick(world, at, 2.0 * at, 4.0)
    for at in range(20, 20 + int(BYPASS_SECONDS)):
        bypass_tick(world, at, 38.0, 4.0)
        assert found_condition(world, ConditionType.METRICS_DEGRADED) is None, "gateways may have been replaced"
    for at in range(20 + int(BYPASS_SECONDS), 30 + int(BYPASS_SECONDS)):
        bypass_tick(world, at, 38.0, 4.0)
    found = condition_of(world, ConditionType.METRICS_DEGRADED)
    assert found.reason is ConditionReason.GATEWAYS_BYPASSED
    assert found.message.startswith("engines run 4 requests, and for 120 s no gateway has sent one: demand is not seen")
    bypass_tick(world, at + 1, 40.0, 4.0)
    bypass_tick(world, at + 2, 42.0, 4.0)
    assert found_condition(world, ConditionType.METRICS_DEGRADED) is None


def test_idle_engines_behind_idle_gateways_are_well() -> None:
    world, _ = ready_world()
    for at in range(30 + int(BYPASS_SECONDS)):
        bypass_tick(world, at, 2.0 * min(at, 10), 0.0)
    assert found_condition(world, ConditionType.METRICS_DEGRADED) is None


def test_gateway_silence_sets_scaling_inactive() -> None:
    world, _ = ready_world()
    for at in range(120):
        run_tick(world, at)
    assert found_condition(world, ConditionType.SCALING_INACTIVE) is None
    for at in range(120, 165):
        run_tick(world, at, gateway=False)
    inactive = condition_of(world, ConditionType.SCALING_INACTIVE)
    assert (inactive.holds, inactive.reason) == (True, ConditionReason.DEMAND_UNKNOWN)
    assert "the last sample is" in inactive.message
    assert condition_of(world, ConditionType.METRICS_DEGRADED).reason is ConditionReason.METRICS_MISSING


def test_engine_without_launcher_grows_by_its_queue_and_says_so() -> None:
    engine_spec = {"runtime": "llama-cpp", "image": "example.com/x:1"}
    world, _ = ready_world(engine=engine_spec, tiers={"serve": {"minReplicas": 1, "maxReplicas": 3}})
    world.about = None
    for at in range(120):
        run_tick(world, at, answers=False)
        queue = replace(engine(2.0 * at, NOW_S + at), running=4.0, waiting=3.0)
        world.scaler.observe_engine(KEY, Role.SERVE, queue)
    inactive = condition_of(world, ConditionType.SCALING_INACTIVE)
    assert inactive.reason is ConditionReason.DEMAND_UNKNOWN
    assert inactive.message.startswith(
        "serve is not sized (no engine of the tier has reported its configuration yet): "
    )
    assert world.store.children("Deployment", KEY)[0]["spec"]["replicas"] > 1


@pytest.mark.parametrize(
    ("metrics", "missing"),
    [
        (
            None,
            "output tokens, no prompt tokens, no inter-token latency or time per output token, no time to first token",
        ),
        ({"running": "r", "generatedTokens": "g", "promptTokens": "p", "itl": "i"}, "time to first token"),
        ({"running": "r", "generatedTokens": "g", "promptTokens": "p", "tpot": "t", "ttft": "f"}, ""),
    ],
)
def test_missing_signals_of_unknown_server_are_named(metrics: Object | None, missing: str) -> None:
    engine_spec = {"runtime": "openai", "image": "example.com/x:1", **({} if metrics is None else {"metrics": metrics})}
    service = parse(builders.service(engine=engine_spec, **{**PROMISED, "slo": {"ttft": "2s"}}))
    found = service.spec.engine.missing_for_sizing
    assert ", no ".join(found) == missing
    contract, spec = service.spec.engine.contract, scaling_spec(service, 0.0)
    inactive = scaling_inactive(spec, contract, {"serve": "why"}, missing_signals=found)
    assert inactive is not None
    cause = f"engine openai reports no {missing}, so serve is not sized: " if missing else "serve is not sized (why): "
    assert inactive.message.startswith(cause + "replicas are added when requests wait")


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({}, "the load of serve is unknown, no tier scales down: name the engine's metrics in spec.engine.metrics"),
        ({"metrics": {"running": "r", "port": 9100}}, "Check that the operator can reach port 9100 of its pods"),
    ],
)
def test_silent_engine_of_unknown_server_says_what_to_do(metrics: Object, words: str) -> None:
    world, _ = ready_world(engine={"runtime": "openai", "image": "example.com/x:1", **metrics})
    world.about = None
    for at in range(20):
        run_tick(world, at, answers=False)
    degraded = condition_of(world, ConditionType.METRICS_DEGRADED)
    assert degraded.reason is ConditionReason.METRICS_MISSING
    assert words in degraded.message


def test_unschedulable_pod_limits_scaling_with_scheduler_message() -> None:
    words = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
    world, parent = ready_world()
    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
    pod = builders.pod(parent, "serve", "q", conditions=[refused])
    pod["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    world.store.put(builders.deployment(parent, "serve", replicas=2, ready=1))
    world.store.put(pod)
    for at in range(30):
        run_tick(world, at)
    found = condition_of(world, ConditionType.SCALING_LIMITED)
    assert (found.holds, found.reason) == (True, ConditionReason.UNSCHEDULABLE)
    assert found.message.startswith("serve: ")
    assert words in found.message


# ---------------------------------------------------------------- gateways that do not go by what they are told

CONFIG_APPLIED, CONFIG_UNREADABLE = (
    GatewayConfigState("7", True, "", "8"),
    GatewayConfigState("7", False, "InferenceServiceAdmission: version 4 is not supported", "8"),
)


def config_stale(world: World, start: int, seconds: int, taken: GatewayConfigState | None) -> Condition | None:
    """What the condition is after so many seconds in which the gateway goes by this."""
    for at in range(start, start + seconds):
        run_tick(world, at, taken=taken)
    return found_condition(world, ConditionType.GATEWAY_CONFIG_STALE)


def stale_message(world: World, start: int, seconds: int, taken: GatewayConfigState | None) -> str:
    """The message of the condition."""
    found = config_stale(world, start, seconds, taken)
    assert found is not None
    return found.message


def world_with_version(version: str = "7") -> World:
    world, parent = ready_world()
    world.store.put({**parent, "metadata": {**parent["metadata"], "resourceVersion": version}})
    published = objects.admission(parent, codec.encode(AdmissionLimits(("default",))), PublishedEngines({}))
    published["metadata"] |= {"uid": "a", "resourceVersion": "8"}
    world.store.put(published)
    return world


def test_unreadable_gateway_config_is_reported_until_fixed() -> None:
    world = world_with_version()
    assert config_stale(world, 0, 60, CONFIG_APPLIED) is None
    assert config_stale(world, 60, int(STALE_CONFIG_SECONDS), CONFIG_UNREADABLE) is None
    found = config_stale(world, 60 + int(STALE_CONFIG_SECONDS), 2, CONFIG_UNREADABLE)
    assert found is not None
    assert found.holds
    assert found.message == (
        "1 of 1 gateways: they cannot read InferenceServiceAdmission: version 4 is not supported, and admit all"
        " requests. Run gateways and operator at the same release (helm upgrade)"
    )
    assert config_stale(world, 100, 2, CONFIG_APPLIED) is None


def test_gateway_without_admission_is_tolerated_at_first() -> None:
    """Engines tell what they are after a while; from then on a gateway has its time."""
    world = world_with_version()
    none = GatewayConfigState("7", False, "", "8")
    assert config_stale(world, 0, 30, none) is None
    found = stale_message(world, 30, 200, none)
    assert found.startswith("1 of 1 gateways: admission limits are published but not enforced")


def test_gateway_of_release_before_limits_object_is_reported() -> None:
    world = world_with_version()
    old = GatewayConfigState("7", False)
    assert config_stale(world, 0, 30, old) is None
    found = stale_message(world, 30, 200, old)
    assert found.startswith("1 of 1 gateways: their release does not read InferenceServiceAdmission, and admits all")


def test_gateway_that_keeps_earlier_limits_is_reported() -> None:
    """It enforces what it could read last, while the operator has published something else."""
    world = world_with_version()
    keeping = CONFIG_UNREADABLE._replace(admission_enabled=True)
    assert config_stale(world, 0, int(STALE_CONFIG_SECONDS), keeping) is None
    found = stale_message(world, int(STALE_CONFIG_SECONDS), 5, keeping)
    assert "version 4 is not supported, and keep earlier limits. Run gateways and operator" in found


@pytest.mark.parametrize("held", ["", "7"])
def test_gateway_with_stale_limits_is_reported(held: str) -> None:
    """Its watch of the limits is behind, or it never had them, while its watch of services works."""
    world = world_with_version()
    state = GatewayConfigState("7", True, "", held)
    assert config_stale(world, 0, int(STALE_CONFIG_SECONDS), state) is None
    found = stale_message(world, int(STALE_CONFIG_SECONDS), 5, state)
    assert "their version of its admission limits is outdated" in found
    assert "can watch inferenceserviceadmissions" in found
    assert config_stale(world, 100, 5, GatewayConfigState("7", True, "", "9")) is None


def test_gateway_with_stale_config_is_reported() -> None:
    world = world_with_version("9")
    for at in range(120):
        now = run_tick(
            world, at, taken=GatewayConfigState(str(at // 20), True, "", "8")
        )  # always some versions behind, yet coming after
    assert ConditionType.GATEWAY_CONFIG_STALE not in [c.type for c in now]
    stuck = stale_message(world, 120, int(STALE_CONFIG_SECONDS) + 2, GatewayConfigState("6", True, "", "8"))
    assert "their version of this service is outdated" in stuck
    assert config_stale(world, 200, 60, GatewayConfigState("12", True, "", "8")) is None


def test_deleted_or_older_gateways_are_not_reported_stale() -> None:
    world = world_with_version()
    assert config_stale(world, 0, 120, None) is None
    assert config_stale(world, 120, 40, CONFIG_UNREADABLE) is not None
    for at in range(160, 164):
        world.readings = ()
        world.gateways = ("gw-2",)
        now = run_tick(world, at, gateway=False)
    assert ConditionType.GATEWAY_CONFIG_STALE not in [c.type for c in now]


def test_pods_without_labels_of_the_service_are_reported() -> None:
    """The Deployment counts a pod that the operator does not find by its labels."""
    world, parent = ready_world()
    for at in range(20):
        run_tick(world, at)
    (pod,) = world.store.tier_pods(KEY)
    world.store.remove(pod)
    for at in range(20, 21 + int(UNSELECTED_SECONDS)):
        run_tick(world, at, answers=False)
        assert found_condition(world, ConditionType.METRICS_DEGRADED) is None, "a watch may be late"
    run_tick(world, 21 + UNSELECTED_SECONDS, answers=False)
    found = condition_of(world, ConditionType.METRICS_DEGRADED)
    assert found.reason is ConditionReason.LABELS_MATCH_NOTHING
    assert "counts 1 replica of serve" in found.message
    assert "label plimsoll.dev/service" in found.message
    world.store.put(ready(parent, "serve"))
    run_tick(world, 22 + UNSELECTED_SECONDS)
    assert found_condition(world, ConditionType.METRICS_DEGRADED) is None
