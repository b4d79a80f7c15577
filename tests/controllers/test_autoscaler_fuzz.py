"""Any manifest that is accepted, under any mess of readings: never an error, never a count beyond its limits.

The whole way of a tick: manifest, readings, decision, status, gauges, what gateways are told, `explain`.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from plimsoll.adapters.kube_client import KubeClient
from plimsoll.api.conditions import ConditionReason
from plimsoll.api.v1alpha1 import parse
from plimsoll.api.v1alpha1.status import InferenceServiceStatus
from plimsoll.cli import explain
from plimsoll.cli.output import Screen
from plimsoll.controllers.autoscale.autoscaler import Autoscaler
from plimsoll.controllers.autoscale.signal_sources import SignalSources
from plimsoll.controllers.reconcile.service_status import StatusInputs, scaling_fields
from plimsoll.core.errors import InvalidSpec
from plimsoll.core.ports import EngineInfo, EngineReading, GatewayReading, ServiceReading
from plimsoll.core.types import Role
from plimsoll.telemetry import operator_metrics
from tests import builders
from tests.controllers.single_service import read_policy
from tests.controllers.test_autoscale import ABOUT, NOW_S, World, arrivals, engine, no_event, ready

Object = dict[str, Any]

KEY = ("team", "chat")
TICKS = 120
INVALID_FIGURES = (None, math.nan, math.inf, -1.0, 0.0, 1e15, 1e300)


def manifest(draw: Random) -> Object:
    """A service as somebody might write it, sensible or not."""
    while True:
        parent = builders.service(**_spec(draw))
        try:
            parse(parent)
        except InvalidSpec:
            continue
        return parent


def _spec(draw: Random) -> Object:
    roles = draw.choice([("serve",), ("prefill", "decode")])
    spec: Object = {"tiers": {role: _tier(draw) for role in roles}}
    odd = draw.random() < 0.2
    targets = {"ttft": (1e-6, 3e3) if odd else (0.1, 9.0), "tpot": (1e-6, 3e3) if odd else (0.01, 0.5)}
    slo = {name: _duration(draw, *within) for name, within in targets.items() if draw.random() < 0.8}
    slo |= {name: _duration(draw, 0.01, 3e3) for name in ("e2e", "itl") if slo and draw.random() < 0.3}
    if "ttft" in slo and draw.random() < 0.4:
        slo["ttftPerKToken"] = _duration(draw, 1e-3, 9.0)
    if slo:
        spec["slo"] = {**slo, "percentile": draw.choice([1, 50, 95, 99])}
        spec |= draw.choice([{}, {"admission": _admission(draw)}])
    spec["scaling"] = {name: value for name, value in _scaling(draw, roles).items() if draw.random() < 0.25}
    return spec


def _tier(draw: Random) -> Object:
    least = draw.choice([0, 1, 1, 2, 5])
    return {
        "minReplicas": least,
        "maxReplicas": max(1, least + draw.choice([0, 1, 9, 900])),
        "gpus": draw.choice([0, 1, 8]),
    }


def _duration(draw: Random, low_s: float, high_s: float) -> str:
    return f"{math.exp(draw.uniform(math.log(low_s), math.log(high_s))) * 1e6:.0f}us"


def _admission(draw: Random) -> Object:
    classes = [
        {"name": f"c{n}", "priority": draw.randint(-9, 9), "guaranteedShare": f"{draw.randint(0, 30)}%",
         **draw.choice([{}, {"slo": {"ttft": "1h"}}, {"slo": {"tpot": "1us"}}, {"slo": {"e2e": "30s"}}])}
        for n in range(draw.randint(1, 3))
    ]  # fmt: skip
    return {"whenFull": draw.choice(["Queue", "Shed"]), "classes": classes}


def _scaling(draw: Random, roles: tuple[str, ...]) -> Object:
    hours = {"from": f"{draw.randint(0, 23):02}:00", "until": f"{draw.randint(0, 23):02}:30"}
    found: Object = {
        "mode": draw.choice(["Auto", "Recommend", "Off"]),
        "headroom": f"{draw.randint(0, 90)}%",
        "sloMissCost": draw.choice([0, 1, 100_000]),
        "warmReplicas": draw.choice([1, 1000]),
        "scaleUp": {"replicas": draw.choice([1, 1000]), "per": _duration(draw, 1e-5, 8e4)},
        "scaleDown": {"replicas": draw.choice([1, 1000]), "per": _duration(draw, 1e-5, 8e4)},
        "horizon": _duration(draw, 1.1, 7e3),
        "schedule": [{**hours, **draw.choice([{"minReplicas": 7}, {"maxReplicas": 2}])}],
    }
    if len(roles) > 1:
        found["prefillPerDecode"] = draw.choice([{"min": "0.5"}, {"max": "0.001"}, {"min": 1, "max": 1}])
    return found


def bounds(parent: Object, tier: str) -> tuple[int, int]:
    """The widest that its hours allow."""
    spec = parse(parent).spec
    least, most = dict(spec.tiers.items())[tier].replica_bounds  # type: ignore[index]
    hours = [(one.min_replicas, one.max_replicas) for one in spec.scaling.schedule]
    highest = max([most, *(up for _, up in hours if up is not None)])
    lowest = min([least, *(low for low, _ in hours if low is not None), *(up for _, up in hours if up is not None)])
    return lowest, highest


def corrupted(draw: Random, reading: Any, share: float) -> Any:
    """The reading with some figures that are none."""
    names = [
        name for name in reading.__dataclass_fields__ if isinstance(getattr(reading, name), float) and name != "at_s"
    ]
    return replace(reading, **{name: draw.choice(INVALID_FIGURES[1:]) for name in names if draw.random() < share})


class FuzzWorld(World):
    """One service, its load, and pods that are ready at once, some with engines that say odd things."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = Random(seed)
        self.parent = manifest(draw)
        super().__init__(self.parent)
        self.roles = list(self.parent["spec"]["tiers"])
        self.rate, self.tokens, self.count = draw.choice([0.0, 1.0, 30.0, 900.0]), draw.choice([0.01, 1.0, 9.0]), 0.0
        self.about = draw.choice(
            [ABOUT, replace(ABOUT, self_benchmark=None), replace(ABOUT, max_sequences=1, kv_tokens=1)]
        )
        self.scaler = self._scaler()
        for role in self.roles:
            least, _ = bounds(self.parent, role)
            self.store.put(builders.deployment(self.parent, role, replicas=least))

    def _scaler(self) -> Autoscaler:
        sources = SignalSources(lambda: (self.readings, ("gw-1", "gw-2")), self._about, lambda namespace, pod: None)
        return Autoscaler(self.store, KubeClient.__new__(KubeClient), sources, no_event, lambda key: None)

    def _about(self, namespace: str, pod: str) -> EngineInfo:
        return self.about

    def tick(self, now_s: float) -> None:
        draw = self.draw
        self.rate *= draw.choice([1.0] * 20 + [0.0, 5.0])
        self.count = 0.0 if draw.random() < 0.01 else self.count + self.rate
        gateway_reading: ServiceReading = corrupted(draw, arrivals(self.count), 0.01)
        gateway_reading = replace(
            gateway_reading, queued=draw.choice([0.0, 0.0, 3.0]), queued_work_s=draw.choice([0.0, 2.0])
        )
        names = [name for name in ("gw-1", "gw-2") if draw.random() < 0.9]
        self.readings = tuple(GatewayReading(name, now_s, "a", {"/".join(KEY): gateway_reading}) for name in names)
        for role in self.roles:
            self.store.put(ready(self.parent, role))
            reading: EngineReading = corrupted(draw, engine(self.tokens * self.count, now_s), 0.02)
            moved = {"transferred_prompt_tokens": 9e3 * self.count, "transfer_s": self.count, "post_s": self.count / 2}
            self.scaler.observe_engine(KEY, Role(role), corrupted(draw, replace(reading, **moved), 0.02))  # type: ignore[arg-type]
        due = self.scaler.decide(now_s)
        for change in due:
            least, most = bounds(self.parent, change.tier)
            assert least <= change.decision.replicas <= most, change
            assert change.event().message
        self.settle(due)

    def look(self) -> None:
        """Whatever shows it can show it; then the operator starts anew, now and then."""
        document = self.scaler.explain(KEY)
        json.dumps(document, allow_nan=False)
        assert explain.render_document(document, Screen())
        report = self.scaler.report(KEY)
        if report is None:
            return
        assert ConditionReason.DECISION_FAILED not in [condition.reason for condition in report.conditions]
        status = json.loads(
            json.dumps(
                scaling_fields(StatusInputs(service_object=self.parent, scaling_report=report), {}), allow_nan=False
            )
        )
        InferenceServiceStatus.model_validate(status, by_name=False)
        there = read_policy({**self.parent, "status": status})
        assert (there is None) == ("slo" not in self.parent["spec"])
        shown = [
            s
            for family in operator_metrics.OPERATOR.collect()
            for s in family.samples
            if s.labels.get("service") == "team/chat"
        ]
        assert all(math.isfinite(sample.value) for sample in shown), shown
        if self.draw.random() < 0.2:
            self.parent = {**self.parent, "status": status}
            self.store.put(self.parent)
            self.scaler = self._scaler()


@example(2103)  # an engine so odd that its load line is 0, and nobody asks anything of it
@given(st.integers(0, 2**32 - 1))
@example(7614)  # a tier whose replicas carry nothing within the nearest promise that can be kept
@settings(max_examples=5, deadline=None)
def test_autoscaler_any_manifest_and_readings_stay_in_limits(seed: int) -> None:
    world, now_s = FuzzWorld(seed), NOW_S
    for tick in range(TICKS):
        now_s += world.draw.choice([1.0] * 18 + [0.1, 40.0])
        world.tick(now_s)
        if tick % 20 == 19:
            world.look()
