"""What `kubectl describe inferenceservice` prints of a status: how many lines, and how long they are.

The lines are counted as kubectl renders an object that it does not know: a map's keys in order, one line for each
scalar and each element of a list, 200 columns wide. The part that only programs read is left out: the
gateways' limits (`admission`). `kubectl plimsoll status` is the short form for people.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from plimsoll.api import conditions
from plimsoll.api.conditions import ConditionType
from plimsoll.api.v1alpha1 import MAX_PAST_DECISIONS
from plimsoll.controllers.isolation import ObjectErrors, Stage
from plimsoll.controllers.reconcile import service_status
from plimsoll.controllers.reconcile.model_names import ModelNames
from plimsoll.controllers.reconcile.service_status import StatusInputs, TierStatusInputs
from plimsoll.core.autoscaling.startup_models import UNKNOWN_VARIANT
from plimsoll.core.ports import GatewayReading
from plimsoll.core.types import Role
from tests import builders
from tests.controllers.test_autoscale import NOW_S, World, arrivals, engine, ready

Object = dict[str, Any]

COLUMNS = 200
INTERNAL = ("admission",)
TIERS = ("prefill", "decode")
PHASES = tuple(
    (name, 12.3) for name in ("schedule", "pull", "launch", "import", "download", "load", "init", "api", "warmup")
)
CONDITION_LINES = 6  # of metav1.Condition with its observedGeneration
MOST_OTHER_LINES = 100  # tiers 37, decisions 31, slo 13, cold start 7, others 9


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
        tuple(
            TierStatusInputs(role, 3, world.store.get("Deployment", ("team", f"chat-{role}")), (), f"chat-{role}-1")
            for role in TIERS
        ),
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
        "modelNameClaim": {"name": "chat", "since": "2026-01-01T00:00:00.000000Z"},
        "tiers": service_status.tiers_status(inputs),
        "conditions": conditions.merge([], service_status.build_conditions(inputs), 1, "2026-01-01T00:00:00Z"),
        **service_status.scaling_fields(inputs, {}),
    }


def test_status_has_every_part_of_a_two_tier_service() -> None:
    found = status()
    kinds = {condition["type"] for condition in found["conditions"]}
    assert kinds == set(ConditionType) - {ConditionType.SERVE_READY}
    assert {"slo", "coldStart", "limitedBy", "lastDecision", "decisions", "cost", *INTERNAL} <= found.keys()
    assert len(found["decisions"]) == MAX_PAST_DECISIONS
    assert found["coldStart"]["decode"]["phases"].startswith("schedule ")


def test_status_messages_fit_one_line_each() -> None:
    shown = {name: value for name, value in status().items() if name not in INTERNAL}
    too_long = [line for line in rendered(shown) if len(line) > COLUMNS]
    assert [line for line in too_long if "phases:" not in line and "variant:" not in line] == []


def test_status_line_count_is_bounded() -> None:
    shown = {name: value for name, value in status().items() if name not in INTERNAL}
    lines = {name: line_count({name: value}) for name, value in shown.items()}
    assert lines["conditions"] <= 1 + CONDITION_LINES * len(shown["conditions"]), lines
    assert sum(lines.values()) - lines["conditions"] <= MOST_OTHER_LINES, lines
