"""What `kubectl describe inferenceservice` prints: how many lines, and how long they are.

The lines are counted as kubectl renders an object that it does not know: a map's keys in order, one line for each
scalar and each element of a list, 200 columns wide. `tests/crds/test_describe.py` compares the count with kubectl's
own. `kubectl plimsoll status` is the short form for people.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import yaml

from e2e.demo import engines, fleet
from plimsoll.api import conditions, crd
from plimsoll.api.conditions import ConditionType
from plimsoll.controllers.isolation import ObjectErrors, Stage
from plimsoll.controllers.reconcile import service_status
from plimsoll.controllers.reconcile.model_names import ModelNames
from plimsoll.controllers.reconcile.service_status import StatusInputs
from plimsoll.controllers.reconcile.tier_health import TierStatusInputs
from plimsoll.core.autoscaling.startup_models import UNKNOWN_VARIANT
from plimsoll.core.ports import GatewayReading
from plimsoll.core.types import Role
from tests import builders
from tests.api.manifests import EXAMPLES
from tests.controllers.single_service import KEY, SingleService
from tests.controllers.test_autoscale import NOW_S, World, arrivals, engine, ready

Object = dict[str, Any]

COLUMNS = 200
TIERS = ("prefill", "decode")
PHASES = tuple(
    (name, 12.3) for name in ("schedule", "pull", "launch", "import", "download", "load", "init", "api", "warmup")
)
SINGLE = yaml.safe_load((EXAMPLES / "aggregated.yaml").read_text())
CONDITION_LINES = 5  # of metav1.Condition without an observedGeneration of its own
MAX_OTHER_LINES = 47  # of a service with every field set: tiers 25, slo 8, last decision 4, cost 3, others 7


def rendered(value: Any, key: str = "", indent: int = 0) -> Iterator[str]:
    """The lines of `kubectl describe`."""
    head = f"{' ' * indent}{key}:"
    if isinstance(value, dict):
        if key:
            yield head
        for name in sorted(value):
            yield from rendered(value[name], name, indent + (2 if key else 0))
    elif isinstance(value, list | tuple):
        yield head
        for element in value:
            yield from (
                rendered(element, "", indent + 2) if isinstance(element, dict) else [f"{' ' * indent}  {element}"]
            )
    else:
        yield f"{head}  {value}"


def line_count(value: Any) -> int:
    return sum(-(-len(line) // COLUMNS) for line in rendered(value))


@cache
def status() -> Object:
    """A service of two tiers with every condition, after some minutes of load, start-ups and decisions."""
    parent = builders.service(
        slo={"ttft": "2s", "tpot": "50ms", "itl": "80ms", "e2e": "30s"},
        tiers={role: {"minReplicas": 1, "maxReplicas": 9} for role in TIERS},
        cost={"gpuHour": "2.5", "currency": "USD"},
    )
    key, world = ("team", "chat"), World(parent)
    for role in TIERS:
        world.store.put(builders.deployment(parent, role, replicas=1, ready=1))
        pod = ready(parent, role)
        pod["metadata"] |= {"name": f"{role}-a", "uid": role}
        world.store.put(pod)
    count = 0.0
    for second in range(241):
        now_s = NOW_S + second
        count += (10.0, 40.0, 80.0)[min(second // 80, 2)]
        world.readings = (GatewayReading("gw-1", now_s, "a", {"team/chat": arrivals(count)}),)
        for role in (Role.PREFILL, Role.DECODE) if second % 5 == 0 else ():
            world.scaler.observe_engine(key, role, replace(engine(count, now_s), pod=f"{role}-a"))
        world.settle(world.scaler.decide(now_s))
        if second == 200:
            for role in TIERS:
                world.scaler._entries[key].service_state.record_startup(role, PHASES, UNKNOWN_VARIANT)
    report = world.scaler.report(key)
    assert report is not None
    errors = ObjectErrors()
    errors.record(Stage.RECONCILE, key, "InferenceService team/chat", ValueError("unexpected"))
    inputs = StatusInputs(
        parent,
        tuple(TierStatusInputs(role, 3, world.store.get("Deployment", ("team", f"chat-{role}")), ()) for role in TIERS),
        gateway_replicas=3,
        routable_endpoints=3,
        model_names=ModelNames(("chat", "team/chat")),
        url="http://plimsoll-gateway.plimsoll-system/v1",
        scaling_report=report,
        fallback=("team/small", ""),
        internal_error=errors.condition(key),
    )
    return {
        "observedGeneration": 1,
        "url": inputs.url,
        "modelNames": list(inputs.model_names.listed),
        "nameClaim": "chat since 2026-01-01T00:00:00.000000Z",
        "tiers": service_status.tiers_status(inputs),
        "conditions": conditions.merge([], service_status.build_conditions(inputs), "2026-01-01T00:00:00Z"),
        **service_status.scaling_fields(inputs, {}),
    }


def test_status_has_every_part_of_a_two_tier_service() -> None:
    found = status()
    kinds = {condition["type"] for condition in found["conditions"]}
    assert {ConditionType.READY, ConditionType.SLO_MET, ConditionType.INTERNAL_ERROR} <= kinds
    assert {"slo", "limitedBy", "recovery", "cost"} <= found.keys()


def test_status_messages_fit_one_line_each() -> None:
    assert [line for line in rendered(status()) if len(line) > COLUMNS] == []


def test_status_line_count_is_bounded() -> None:
    lines = {name: line_count({name: value}) for name, value in status().items()}
    assert lines["conditions"] <= 1 + CONDITION_LINES * len(status()["conditions"]), lines
    assert sum(lines.values()) - lines["conditions"] <= MAX_OTHER_LINES, lines


def defaulted(value: Object, schema: Object) -> Object:
    """The object as the API server stores it: with the constant defaults of the definition."""
    fields = schema.get("properties", {})
    given = {name: field["default"] for name, field in fields.items() if "default" in field} | value
    return {
        name: defaulted(part, fields.get(name, {})) if isinstance(part, dict) else part for name, part in given.items()
    }


async def settled(manifest: Object, rate: float) -> Object:
    """The service of a manifest with settled replicas and measured start-ups, under an even load.

    rate: requests per second.
    """
    service = SingleService(rate, **manifest["spec"])
    try:
        await service.run(5)
        for tier in manifest["spec"]["tiers"]:
            service.scaler._entries[KEY].service_state.record_startup(tier, PHASES, UNKNOWN_VARIANT)
        await service.run(85)
        assert service.conditions.keys() == ({"Ready", "SLOMet"} if "slo" in manifest["spec"] else {"Ready"})
        return service.object
    finally:
        await service.delete()


def described(found: Object) -> list[str]:
    """The lines of `kubectl describe` for a stored service that has no Event."""
    names = ("creationTimestamp", "generation", "resourceVersion", "uid")
    metadata = {name: found["metadata"][name] for name in names}
    top = ["Name:", "Namespace:", "Labels:", "Annotations:", "API Version:", "Kind:"]
    return [*top, *rendered({"metadata": metadata, "spec": found["spec"], "status": found["status"]}), "Events:"]


SLO = {"ttft": "500ms", "tpot": "50ms"}
SINGLE_WITH_SLO = {**SINGLE, "spec": {**SINGLE["spec"], "slo": SLO}}
SINGLE_THAT_SCALES = {**SINGLE, "spec": {**SINGLE["spec"], "slo": SLO, "tiers": {"serve": {"maxReplicas": 16}}}}
EXAMPLE_PAIR = yaml.safe_load((EXAMPLES / "prefill-decode.yaml").read_text())
# Manifest, requests per second and the most lines. The higher rate makes the tiers scale up. With standby replicas the
# status then has `needed`.
SETTLED = {
    "one tier without SLO": (SINGLE, 5.0, 35),
    "one tier": (SINGLE_WITH_SLO, 5.0, 49),
    "one tier that has scaled": (SINGLE_THAT_SCALES, 40.0, 51),
    "two tiers": (EXAMPLE_PAIR, 5.0, 60),
    "two tiers that have scaled": (EXAMPLE_PAIR, 40.0, 61),
    "two tiers of the demo": (engines.engines_manifest(), 5.0, 60),
    "fleet of the demo": (fleet.fleet_manifest(), 5.0, 66),  # 24 of which are its spec
}


@pytest.mark.parametrize(("manifest", "rate", "limit"), SETTLED.values(), ids=SETTLED)
async def test_describe_of_settled_service_fits_a_screen(manifest: Object, rate: float, limit: int) -> None:
    found = await settled(manifest, rate)
    lines = described({**found, "spec": defaulted({"spec": found["spec"]}, crd.schema())["spec"]})
    assert [line for line in lines if len(line) > COLUMNS] == []
    assert len(lines) <= limit, f"{len(lines)}\n" + "\n".join(lines)
