"""The scaling tick decides what to set from the caches and from what was heard."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from plimsoll.adapters.kube_client import KubeClient
from plimsoll.api.conditions import ConditionReason, ConditionType
from plimsoll.api.events import Event, EventReason
from plimsoll.controllers.autoscale.autoscaler import Autoscaler
from plimsoll.controllers.autoscale.scale_action import ScaleChange
from plimsoll.controllers.autoscale.signal_sources import SignalSources
from plimsoll.controllers.object_cache import Key, ObjectCache
from plimsoll.core import codec
from plimsoll.core.admission.publication import AdmissionLimits
from plimsoll.core.autoscaling import cadence
from plimsoll.core.ports import (
    BucketCounts,
    EngineInfo,
    EngineReading,
    GatewayReading,
    SelfBenchmark,
    ServiceReading,
    SloCounts,
)
from plimsoll.core.routing.published_engines import PublishedEngines
from plimsoll.core.types import Role
from plimsoll.resources import objects
from plimsoll.telemetry import operator_metrics
from tests import builders

Object = dict[str, Any]
NOW_S = 1.8e9


async def no_event(_: Object, __: Event) -> None:
    return None


INFINITE = float("inf")
ABOUT = EngineInfo(
    "vllm", "0.32.0", "some GPU", 1, 64, 200_000, 2048, 16, 8192, None,
    SelfBenchmark(((128, 0.02), (1024, 0.06)), ((1, 64, 0.0152), (4, 64, 0.0158), (8, 64, 0.0166))),
)  # fmt: skip
PROMISED: Object = {"slo": {"ttft": "2s", "tpot": "50ms"}, "tiers": {"serve": {"minReplicas": 1, "maxReplicas": 9}}}


class World:
    """A store, and what gateways and engines say; `heard` are the services whose report changed."""

    def __init__(self, *parents: Object) -> None:
        self.store = ObjectCache()
        for parent in parents:
            self.store.put(parent)
        self.readings: tuple[GatewayReading, ...] = ()
        self.gateways = ("gw-1",)
        self.about: EngineInfo | None = ABOUT
        self.second_hand: tuple[str, ...] = ()  # tiers
        self.received: list[Key] = []
        self.checkpoint: str | None = None
        sources = SignalSources(
            lambda: (self.readings, self.gateways),
            lambda namespace, pod: self.about,
            lambda namespace, pod: None,
            prometheus_only_tiers=lambda key: self.second_hand,
            checkpoint=lambda parent: self.checkpoint,
        )
        self.scaler = Autoscaler(self.store, KubeClient.__new__(KubeClient), sources, no_event, self.received.append)

    @classmethod
    def with_engine(cls, parent: Object, replicas: int = 1) -> World:
        """The service's tier `serve`, of which one engine is ready."""
        world = cls(parent)
        world.store.put(builders.deployment(parent, "serve", replicas=replicas, ready=1))
        world.store.put(ready(parent, "serve"))
        return world

    def load(self, key: Key, rate: float, seconds: int, start_s: float) -> list[ScaleChange]:
        """So many seconds of ticks, each with its words of one gateway and, every fifth, of the engine."""
        due: list[ScaleChange] = []
        for second in range(seconds):
            now_s = start_s + second
            self.readings = (GatewayReading("gw-1", now_s, "a", {"/".join(key): arrivals(rate * second)}),)
            if second % 5 == 0:
                self.scaler.observe_engine(key, Role.SERVE, engine(rate * second, now_s))
            due = self.scaler.decide(now_s)
            self.settle(due)
        return due

    def settle(self, due: Iterable[ScaleChange]) -> None:
        """What was ordered is ordered."""
        for change in due:
            meta = change.scaled.metadata
            deployment = self.store.get("Deployment", (meta["namespace"], meta["name"]))
            assert deployment is not None
            self.store.put({**deployment, "spec": {"replicas": change.decision.replicas}})


def arrivals(count: float, late_first: float = 0.0, late_last: float = 0.0) -> ServiceReading:
    """A gateway after so many answers; a share of them late with the first token, others with the last."""
    slo_counts = SloCounts(count, (late_first + late_last) * count, late_first * count, late_last * count)
    ttft = BucketCounts((0.1, 1.0, INFINITE), (0.0, count, 0.0), 0.3 * count)
    e2e = BucketCounts((2.0, 4.0, INFINITE), (0.0, count, 0.0), 2.9 * count)
    return ServiceReading(count, 500.0 * count, 0.0, count, 0.0, 0.0, {}, ttft, e2e_s=e2e, slo_counts=slo_counts)


def engine(ended: float, at_s: float) -> EngineReading:
    """An engine after so many requests of 500 prompt and 100 output tokens."""
    return EngineReading(
        "p", at_s, "a", running=4.0, waiting=0.0, kv_used=0.1, steps=40.0 * ended, computed_tokens=600.0 * ended,
        generated_tokens=100.0 * ended, local_prompt_tokens=500.0 * ended, preemptions=0.0,
        prompt_tokens=BucketCounts((200.0, 1000.0, INFINITE), (0.0, ended, 0.0), 500.0 * ended),
        output_tokens=BucketCounts((50.0, 200.0, INFINITE), (0.0, ended, 0.0), 100.0 * ended),
        tpot_s=BucketCounts((0.01, 0.05, INFINITE), (0.0, ended, 0.0), 0.02 * ended),
        itl_s=BucketCounts((0.01, 0.02, 0.04, INFINITE), (0.0, 95.0 * ended, 4.0 * ended, 0.0), 1.5 * ended),
    )  # fmt: skip


def timeless(reading: EngineReading) -> EngineReading:
    """The reading without any time of a step or a token: from it no step model is learned."""
    return replace(reading, steps=None, computed_tokens=None, tpot_s=None, itl_s=None)


def ready(parent: Object, tier: str) -> Object:
    pod = builders.pod(parent, tier, conditions=[{"type": "Ready", "status": "True"}])
    pod["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    return pod


def changes(store: ObjectCache) -> list[ScaleChange]:
    sources = SignalSources(lambda: ((), ()), lambda namespace, pod: None, lambda namespace, pod: None)
    return Autoscaler(store, KubeClient.__new__(KubeClient), sources, no_event, lambda key: None).decide(NOW_S)


def test_decide_sets_replicas_and_explains_change() -> None:
    store, parent = ObjectCache(), builders.service(tiers={"prefill": {"minReplicas": 2}, "decode": {"minReplicas": 1}})
    for tier, replicas in (("prefill", 1), ("decode", 3)):
        store.put(builders.deployment(parent, tier, replicas=replicas))
    store.put(parent)
    up, down = changes(store)
    assert (up.tier, up.replicas_before, up.decision.replicas) == ("prefill", 1, 2)
    assert (up.event().reason, down.event().reason) == (EventReason.SCALED_UP, EventReason.SCALED_DOWN)
    assert up.event().message == ("prefill 1 -> 2: spec.slo is not set, so the tier is not sized: minReplicas is 2")


def test_decide_skips_invalid_foreign_and_deleted_services() -> None:
    store = ObjectCache()
    well = builders.service("well")
    invalid = builders.service("invalid", tiers={})
    going = builders.service("going")
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    for parent in (well, invalid, going):
        store.put(parent)
        store.put(builders.deployment(parent, "decode", replicas=1 if parent is well else 5))
    foreign = builders.deployment(builders.service("well", namespace="team"), "prefill", replicas=7)
    foreign["metadata"]["ownerReferences"][0]["uid"] = "somebody"
    store.put(foreign)
    assert changes(store) == []


def test_decide_scales_up_under_load_and_reports_it() -> None:
    parent = builders.service(**PROMISED)
    world = World.with_engine(parent)
    world.load(("team", "chat"), 40.0, 120, NOW_S)
    live = world.store.get("Deployment", ("team", "chat-serve"))
    report = world.scaler.report(("team", "chat"))
    assert live is not None
    assert report is not None
    assert live["spec"]["replicas"] == report.desired["serve"] > 1
    assert report.tiers["serve"]["needed"] > 1
    first = world.scaler._entries[("team", "chat")].service_state.decisions[0].decision
    assert first.tiers["serve"].previous_replicas == 1
    assert [c.type.value for c in report.conditions] == ["SLOMet"]
    assert report.is_feasibility_known
    assert world.received.count(("team", "chat")) < 18, "a report is told when it says something new, not at each tick"


def test_report_counts_starting_and_overdue_replicas() -> None:
    def starting(name: str, seconds: float) -> Object:
        pod = builders.pod(parent, "serve", name)
        made = datetime.fromtimestamp(NOW_S - seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        pod["metadata"]["creationTimestamp"] = made
        placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": made}
        pod["status"] = {"conditions": [placed]}
        return pod

    def starting_status() -> Object:
        report = world.scaler.report(("team", "chat"))
        assert report is not None
        return dict(report.tiers["serve"].get("starting", {}))

    parent = builders.service(**PROMISED)
    world = World.with_engine(parent, 3)
    world.load(("team", "chat"), 10.0, 30, NOW_S)
    assert starting_status() == {}
    for pod in (starting("new", 5.0), starting("stuck", 86_400.0)):
        world.store.put(pod)
    world.scaler.decide(NOW_S + 30.0)
    first = starting_status()
    assert (first["count"], first["overdue"]) == (2, 1)
    due_s = datetime.fromisoformat(first["nextReady"]).timestamp()
    assert NOW_S + 30.0 < due_s < NOW_S + 3600.0
    world.store.put(starting("newer", 4.0))
    world.scaler.decide(NOW_S + 31.0)
    assert starting_status() == {"count": 3, "overdue": 1, "nextReady": first["nextReady"]}, (
        "a second more or less is no news"
    )


@pytest.mark.parametrize("scaling", [{"mode": "Recommend"}, {"mode": "Off"}, {"paused": True}])
def test_decide_recommend_off_or_paused_sets_nothing(scaling: Object) -> None:
    parent = builders.service(**PROMISED, scaling=scaling)
    world = World.with_engine(parent, 3)
    assert world.load(("team", "chat"), 40.0, 60, NOW_S) == []
    report = world.scaler.report(("team", "chat"))
    assert report is not None
    assert report.desired == {"serve": 3}


def test_metrics_are_exported_until_service_is_deleted() -> None:
    parent = builders.service(**PROMISED)
    world = World.with_engine(parent)
    world.load(("team", "chat"), 40.0, 30, NOW_S)
    labels = {"service": "team/chat", "tier": "serve"}
    needed = operator_metrics.OPERATOR.get_sample_value("plimsoll_autoscaler_needed_replicas", labels)
    load = operator_metrics.OPERATOR.get_sample_value("plimsoll_autoscaler_load_requests_per_second", labels)
    assert needed is not None
    assert needed > 1
    assert load == pytest.approx(40.0, rel=0.15)
    world.store.remove(parent)
    world.scaler.decide(NOW_S + 31)
    assert operator_metrics.OPERATOR.get_sample_value("plimsoll_autoscaler_needed_replicas", labels) is None


def test_decide_idle_service_is_rare_until_request_arrives() -> None:
    parent = builders.service(**PROMISED)
    world = World.with_engine(parent)
    looked = []
    for second in range(20):
        counted = arrivals(7.0 if second < 15 else 8.0)
        world.readings = (GatewayReading("gw-1", NOW_S + second, "a", {"team/chat": counted}),)
        world.scaler.decide(NOW_S + second)
        document = world.scaler.explain(("team", "chat"))
        assert document is not None
        looked.append(document["decisions"][0]["at"])
    assert len(set(looked[:15])) < 7, "nothing came for a quarter of a minute"
    assert looked[15] != looked[14], "a request came"


def test_busy_services_of_a_large_fleet_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cadence, "LARGE_FLEET", 3)
    services = [builders.service(name, **PROMISED) for name in ("one", "two", "three", "queue")]
    world = World(*services)
    for parent in services:
        world.store.put(builders.deployment(parent, "serve", replicas=1, ready=1))
        world.store.put(ready(parent, "serve"))

    def read_at(now_s: float) -> set[str]:
        counted = {f"team/{name}": arrivals(5.0 * now_s) for name in ("one", "two", "three")}
        counted["team/queue"] = replace(arrivals(5.0 * now_s), queued=1.0)
        world.readings = (GatewayReading("gw-1", NOW_S + now_s, "a", counted),)
        world.scaler.decide(NOW_S + now_s)
        entries = world.scaler._entries.items()
        return {name for (_, name), entry in entries if entry.last_metrics and entry.last_metrics[0] == NOW_S + now_s}

    assert read_at(0.0) == {"one", "two", "three", "queue"}, "their number is known after the first tick"
    pairs = [(read_at(1.0 + 2.0 * n), read_at(2.0 + 2.0 * n)) for n in range(5)]
    for first, second in pairs:
        assert first & second == {"queue"}
        assert first | second == {"one", "two", "three", "queue"}
    name = (read_at(11.0) - {"queue"}).pop()
    world.store.put(builders.service(name, **{**PROMISED, "tiers": {"serve": {"minReplicas": 2, "maxReplicas": 9}}}))
    assert name in read_at(12.0), "a new spec is read at once"


def test_publication_reaches_report_and_survives_restart() -> None:
    parent = builders.service(**PROMISED)
    world = World.with_engine(parent)
    world.load(("team", "chat"), 40.0, 60, NOW_S)
    report = world.scaler.report(("team", "chat"))
    assert report is not None
    assert report.published is not None
    assert report.published.cost_model is not None
    assert report.published.shares == {"gw-1": report.published.cost_model.batch}
    again = World(parent)
    again.store.put(objects.admission(parent, codec.encode(report.published), PublishedEngines({})))
    again.store.put(builders.deployment(parent, "serve", replicas=5, ready=1))
    again.scaler.decide(NOW_S + 100.0)
    after = again.scaler.report(("team", "chat"))
    assert after is not None
    assert after.published is not None
    assert after.published.cost_model == codec.decode(AdmissionLimits, codec.encode(report.published)).cost_model


def test_queued_request_scales_from_zero() -> None:
    asleep = {**PROMISED, "tiers": {"serve": {"minReplicas": 0, "maxReplicas": 9}}}
    parent = builders.service(**asleep)
    world = World(parent)
    world.store.put(builders.deployment(parent, "serve", replicas=0, ready=0))
    world.readings = (GatewayReading("gw-1", NOW_S, "a", {"team/chat": arrivals(0.0)}),)
    assert world.scaler.decide(NOW_S) == []
    held = replace(arrivals(1.0), queued=1.0)
    world.readings = (GatewayReading("gw-1", NOW_S + 1.0, "a", {"team/chat": held}),)
    [woken] = world.scaler.decide(NOW_S + 1.0)
    assert (woken.replicas_before, woken.decision.replicas) == (0, 1)
    assert woken.event().reason is EventReason.SCALED_FROM_ZERO
    assert "no replica runs" in woken.event().message


def test_shedding_condition_begins_and_ends_once() -> None:
    parent = builders.service(**PROMISED)
    world, key = World.with_engine(parent), ("team", "chat")
    shed: list[bool] = []
    for second in range(240):
        arrived, refused = 10.0 * second, 5.0 * min(max(second - 60, 0), 30)
        counted = replace(arrivals(arrived), rejected={"overloaded": refused})
        world.readings = (GatewayReading("gw-1", NOW_S + second, "a", {"/".join(key): counted}),)
        world.scaler.decide(NOW_S + second)
        report = world.scaler.report(key)
        assert report is not None
        found = {c.type: c for c in report.conditions}.get(ConditionType.SHEDDING)
        if found is not None:
            rate = float(found.message.partition("(of ")[2].partition(" req/s)")[0])
            assert rate == pytest.approx(10.0, rel=0.05)
        if not shed or shed[-1] is (found is None):
            shed.append(found is not None)
    assert shed == [False, True, False]


def test_slow_transfer_is_reported_with_reason() -> None:
    tiers = {"prefill": {"minReplicas": 1}, "decode": {"minReplicas": 1}}
    parent = builders.service(**{**PROMISED, "tiers": tiers})
    world, key = World(parent), ("team", "chat")
    for tier in tiers:
        world.store.put(builders.deployment(parent, tier, replicas=1, ready=1))
        world.store.put(ready(parent, tier))
    messages = set()
    for second in range(120):
        now_s, moved = NOW_S + second, 500.0 * second
        world.readings = (GatewayReading("gw-1", now_s, "a", {"team/chat": arrivals(2.0 * second)}),)
        for role in (Role.PREFILL, Role.DECODE):
            reading = replace(
                engine(2.0 * second, now_s), transferred_prompt_tokens=moved, transfer_s=moved, post_s=0.0
            )
            world.scaler.observe_engine(key, role, reading)
        world.scaler.decide(now_s)
        report = world.scaler.report(key)
        if report is not None:
            messages.add(report.slow_transfer_message)
    assert len(messages) == 2, "not known at first, then the same words"
    [words] = messages - {None}
    assert words is not None
    assert "RDMA" in words
    for minute in range(2, 40):  # nothing more is moved, since gates compute in place what is expensive to move
        now_s = NOW_S + 60.0 * minute
        world.scaler.observe_engine(key, Role.DECODE, replace(reading, at_s=now_s))
        world.scaler.decide(now_s)
        report = world.scaler.report(key)
        assert report is not None
        assert report.slow_transfer_message == words, f"forgotten after {minute} minutes"


class FailingConfig(dict[str, object]):
    """A model's configuration whose reading fails: stands for any error that nobody thought of."""

    def get(self, key: str, default: object = None) -> object:
        raise RuntimeError(key)


@pytest.mark.parametrize("place", ["in the pass", "before it"])
def test_decision_error_affects_only_its_service(place: str) -> None:
    well, bad = builders.service("well", **PROMISED), builders.service("bad", **PROMISED)
    world = World(well, bad)
    for parent in (well, bad):
        name = parent["metadata"]["name"]
        world.store.put(builders.deployment(parent, "serve", replicas=1, ready=1))
        world.store.put({**ready(parent, "serve"), "metadata": ready(parent, "serve")["metadata"] | {"name": name}})
    rotten = [True]

    def about(namespace: str, pod: str) -> EngineInfo:
        if pod == "bad" and rotten[0] and place == "before it":
            raise RuntimeError(pod)
        return replace(ABOUT, config=FailingConfig(rotten=True)) if pod == "bad" and rotten[0] else ABOUT

    sources = SignalSources(lambda: (world.readings, ("gw-1",)), about, lambda namespace, pod: None)
    world.scaler = Autoscaler(world.store, KubeClient.__new__(KubeClient), sources, no_event, world.received.append)
    world.load(("team", "well"), 40.0, 60, NOW_S)
    live = [world.store.get("Deployment", ("team", f"{name}-serve")) for name in ("well", "bad")]
    assert [one["spec"]["replicas"] > 1 for one in live if one is not None] == [True, False]
    report = world.scaler.report(("team", "bad"))
    assert report is not None
    [inactive] = [one for one in report.conditions if one.type is ConditionType.SCALING_INACTIVE]
    assert (inactive.holds, inactive.reason) == (True, ConditionReason.DECISION_FAILED)
    assert "RuntimeError" in inactive.message
    rotten[0] = False
    world.load(("team", "bad"), 40.0, 60, NOW_S + 60.0)
    report = world.scaler.report(("team", "bad"))
    assert report is not None
    assert report.desired["serve"] > 1
    assert ConditionReason.DECISION_FAILED not in [one.reason for one in report.conditions]


def test_recreated_service_inherits_no_state() -> None:
    parent = builders.service(**PROMISED)
    world, key = World.with_engine(parent), ("team", "chat")
    world.load(key, 40.0, 60, NOW_S)
    before = world.scaler.explain(key)
    assert before is not None
    assert len(before["decisions"]) > 1
    again = {**parent, "metadata": {**parent["metadata"], "uid": "another"}}
    world.store.put(again)
    world.scaler.decide(NOW_S + 61.0)
    after = world.scaler.explain(key)
    assert after is not None
    assert len(after["decisions"]) == 1
    assert after["tiers"]["serve"]["engine"] is None
