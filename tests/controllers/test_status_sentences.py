"""Each sentence of a status agrees with the objects and figures of the same snapshot.

The walk changes pods, Deployments and metrics as a cluster does, renders the status with the operator's own code, and
compares the sentences with the objects.
"""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from plimsoll.api import conditions
from plimsoll.api.events import EventReason
from plimsoll.api.starting_pods import parse_starting
from plimsoll.controllers import pod_startup
from plimsoll.controllers.autoscale import scaling_conditions
from plimsoll.controllers.gateway_poller import GatewayView
from plimsoll.controllers.reconcile import service_status
from plimsoll.controllers.reconcile.object_plan import plan_objects
from plimsoll.controllers.reconcile.observe import observe
from plimsoll.controllers.reconcile.status_inputs import collect_status_inputs, desired_replicas, names_of
from plimsoll.core.autoscaling.inputs import ServiceSnapshot
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.demand.service_metrics import ServiceMetrics
from plimsoll.core.ports import BucketCounts, GatewayReading
from plimsoll.core.types import Role, Unavailable
from plimsoll.resources import object_meta
from tests import builders
from tests.controllers.test_autoscale import INFINITE, NOW_S, PROMISED, World, arrivals, engine

Object = dict[str, Any]
KEY = ("team", "chat")


def rfc3339(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Walk(World):
    """One service with a serve tier, whose objects the test changes, and the status that the operator renders."""

    def __init__(self, **spec: Any) -> None:
        self.parent = builders.service(**{**PROMISED, **spec})
        super().__init__(self.parent)
        self.now_s = NOW_S
        self.answered = self.slow = 0.0
        self.routable: int | None = 0
        self.is_namespace_terminating = False
        self.order(1)

    @property
    def deployment(self) -> Object:
        found = self.store.get("Deployment", ("team", "chat-serve"))
        assert found is not None
        return found

    def order(self, ordered: int, manager: str = "plimsoll-scaler", **status: Any) -> None:
        """Set the Deployment's replica count as `manager` does through the scale subresource."""
        made = builders.deployment(self.parent, "serve", replicas=ordered, status=status)
        made["metadata"]["managedFields"] = [
            {
                "manager": manager,
                "operation": "Update",
                "subresource": "scale",
                "time": rfc3339(self.now_s),
                "fieldsV1": {"f:spec": {"f:replicas": {}}},
            }
        ]
        self.store.put(made)

    def pod(self, name: str, state: str, replica_set: str = "", **status: Any) -> None:
        """Add or change a pod. state: ready, starting or terminating."""
        pod = builders.pod(self.parent, "serve", name, **status)
        pod["metadata"]["labels"]["pod-template-hash"] = replica_set
        at = rfc3339(self.now_s)
        pod["metadata"]["creationTimestamp"] = at
        ready = "True" if state == "ready" else "False"
        pod["status"].setdefault("conditions", [{"type": "PodScheduled", "status": "True", "lastTransitionTime": at}])
        pod["status"]["conditions"].append({"type": "Ready", "status": ready, "lastTransitionTime": at})
        if state == "terminating":
            pod["metadata"]["deletionTimestamp"] = at
        self.store.put(pod)

    def remove(self, name: str) -> None:
        self.store.remove(builders.pod(self.parent, "serve", name))

    def serve(self, rate: float, seconds: int, ttft_s: float = 0.3, *, has_engine: bool = True) -> None:
        """Seconds of ticks with requests, each with metrics of one gateway and, if `has_engine`, one engine."""
        for _ in range(seconds):
            self.now_s += 1.0
            self.answered += rate
            counted = arrivals(self.answered)
            self.slow += rate if ttft_s > 1.0 else 0.0
            fast = self.answered - self.slow
            observed = BucketCounts(
                (0.1, 1.0, 4.0, INFINITE), (0.0, fast, self.slow, 0.0), 0.3 * fast + 2.7 * self.slow
            )
            counted = replace(counted, ttft_s=observed)
            self.readings = (GatewayReading("gw-1", self.now_s, "a", {"team/chat": counted}),)
            if has_engine and int(self.now_s) % 5 == 0:
                self.engine_reports()
            self.scaler.decide(self.now_s)

    def engine_reports(self) -> None:
        """Metrics of the one engine that does all the work."""
        reading = replace(engine(self.answered, self.now_s), pod="a")
        self.scaler.observe_engine(KEY, Role.SERVE, reading)

    def render(self) -> Object:
        """The status as the reconciler writes it, checked against the objects."""
        view = GatewayView(1, 1, {KEY: self.routable}) if self.routable is not None else GatewayView(1, 0)
        observed = observe(self.store, view, KEY)
        assert observed is not None
        assert observed.service is not None
        report = self.scaler.report(KEY)
        plan = plan_objects(
            observed, observed.service, desired_replicas(observed, observed.service, report, {}), builders.PLATFORM
        )
        names = names_of(observed, datetime.fromtimestamp(self.now_s, UTC))
        inputs = collect_status_inputs(observed, plan, None, report, builders.PLATFORM, names)
        going = self.is_namespace_terminating
        inputs = replace(inputs, tiers=tuple(replace(one, is_namespace_terminating=going) for one in inputs.tiers))
        stated = service_status.build_conditions(inputs)
        status = {
            "tiers": service_status.tiers_status(inputs),
            "conditions": conditions.merge([], stated, rfc3339(self.now_s)),
            **service_status.scaling_fields(inputs, {}),
        }
        self.check(status)
        return status

    def check(self, status: Object) -> None:
        """Compare every sentence with the pods and with the figures of the status."""
        pods = self.store.tier_pods(KEY)
        leaving = [pod for pod in pods if pod_startup.is_terminating(pod)]
        ready = [pod for pod in pods if pod_startup.is_ready(pod) and pod not in leaving]
        starting = [pod for pod in pods if pod not in ready and pod not in leaving]
        tier = status["tiers"]["serve"]
        ready_count, desired = (int(count) for count in tier["summary"].split("/"))
        assert ready_count == len(ready)
        counts = {
            r"(\d+) of \d+ ready": len(ready),
            r"(\d+) ready, \d+ desired": len(ready),
            r"\d+ of (\d+) ready": desired,
            r"\d+ ready, (\d+) desired": desired,
            r"(\d+) starting": len(starting),
            r"(\d+) terminating": len(leaving),
            r"(\d+) ready (?:engine|serve replica)": len(ready),
        }
        names = [pod["metadata"]["name"] for pod in (*ready, *starting)]
        for one in status["conditions"]:
            message = one["message"]
            for pattern, count in counts.items():
                assert {int(found) for found in re.findall(pattern, message)} <= {count}, message
            assert {*re.findall(r"\bpod ([\w-]+)", message)} <= {*names}, message
            assert {*re.findall(r"next ready at (\S+Z)", message)} <= {
                tier.get("startingPods", "").partition("next at ")[2]
            }
            is_missing = len(ready) < desired
            assert starting or is_missing or "starting" not in f"{message} {one['reason'].lower()}", message
            assert ready or one["reason"] != "NoRoutableEndpoint", message
            assert not ready or "no engine of the tier is ready" not in message, message
        self._check_slo(status)

    def _check_slo(self, status: Object) -> None:
        [met] = [one["message"] for one in status["conditions"] if one["type"] == "SLOMet"] or [""]
        for name, figure in re.findall(r"(\w+) [^,;]*?\(p\d+ ([^)]+)\)", met):
            assert figure.replace(" ", "") == status["slo"][name.lower()], met

    def condition(self, kind: str, status: Object) -> Object:
        return next(one for one in status["conditions"] if one["type"] == kind)

    def kinds(self, status: Object) -> set[str]:
        return {one["type"] for one in status["conditions"]}


def test_sentences_from_start_to_deleted_pod() -> None:
    walk = Walk()
    walk.order(1, replicas=0, updatedReplicas=0)
    walk.serve(0.0, 1)
    status = walk.render()
    assert walk.condition("Reconciling", status)["message"] == "serve: 0 of 1 ready: 1 not created yet"
    walk.order(1)
    walk.pod("a", "starting")
    walk.serve(0.0, 5)
    status = walk.render()
    assert walk.condition("Reconciling", status)["message"] == "serve: 0 of 1 ready: 1 starting"
    walk.pod("a", "ready")
    walk.serve(5.0, 1)
    status = walk.render()
    assert walk.condition("Ready", status)["message"] == "1 ready engine, but no gateway replica routes to it yet"
    walk.routable = 1
    walk.serve(5.0, 90)
    status = walk.render()
    assert walk.condition("SLOMet", status)["reason"] == "SLOMet"
    assert walk.kinds(status) == {"Ready", "SLOMet"}
    walk.pod("a", "terminating")  # the Deployment's status still counts it as ready
    walk.routable = 0
    status = walk.render()
    assert walk.condition("Ready", status)["reason"] == "Starting"
    assert walk.condition("Reconciling", status)["message"] == "serve: 0 of 1 ready: 1 not created yet, 1 terminating"
    walk.pod("b", "starting")
    walk.serve(5.0, 2)
    status = walk.render()
    assert walk.condition("Reconciling", status)["message"] == "serve: 0 of 1 ready: 1 starting, 1 terminating"
    walk.remove("a")
    walk.serve(5.0, 1)
    assert walk.condition("Reconciling", walk.render())["message"] == "serve: 0 of 1 ready: 1 starting"


def test_sentences_all_ready_never_say_starting() -> None:
    walk = Walk()
    walk.routable = 1
    walk.pod("a", "ready")
    walk.order(1, observedGeneration=0)
    assert "starting" not in walk.condition("Reconciling", walk.render())["message"]
    walk.pod("b", "ready")
    walk.order(1, replicas=2, updatedReplicas=2)
    walk.serve(1.0, 1)
    assert (
        walk.condition("Reconciling", walk.render())["message"] == "serve: 2 ready, 1 desired: the surplus is removed"
    )
    walk.order(1, replicas=2, updatedReplicas=1)
    for name in ("a", "b"):
        walk.pod(name, "ready", replica_set=name)
    found = walk.condition("Reconciling", walk.render())
    assert found["message"] == "serve: 2 ready, 1 desired, 1 at the new revision"


def test_sentences_figures_follow_measurements() -> None:
    """The condition has the latency of the table, also where the SLO is met by the same reason for long."""
    walk = Walk(slo={"ttft": "5s", "tpot": "50ms"})
    walk.routable = 1
    walk.pod("a", "ready")
    walk.serve(5.0, 90)
    first = walk.condition("SLOMet", walk.render())
    walk.serve(5.0, 200, ttft_s=2.7)
    later = walk.condition("SLOMet", walk.render())
    assert first["reason"] == later["reason"] == "SLOMet"
    assert first["message"] != later["message"]


def test_sentences_slo_is_measured_with_the_first_responses() -> None:
    """The first responses after an idle time are in the status at once, not with the figures of the next minute."""
    walk = Walk()
    walk.routable = 1
    walk.pod("a", "ready")
    walk.serve(5.0, 90)
    walk.serve(0.0, 75)
    assert walk.condition("SLOMet", walk.render())["reason"] == "NotMeasured"
    walk.serve(3.0, 5)
    assert walk.condition("SLOMet", walk.render())["reason"] != "NotMeasured"


def test_sentences_figures_leave_with_the_load() -> None:
    """Idle engines are read less often than gateways, so the figures of both do not leave in one second."""
    walk = Walk()
    walk.routable = 1
    walk.pod("a", "ready")
    walk.serve(5.0, 90)
    walk.serve(5.0, 5, has_engine=False)
    walk.serve(0.0, 8, has_engine=False)
    assert {"ttft", "tpot"} <= walk.render()["slo"].keys()
    shown = []
    for _ in range(80):
        walk.serve(0.0, 1)
        snapshot = walk.scaler._entries[KEY].last_metrics
        assert snapshot is not None
        measured = any(not isinstance(one.lagging.tpot_s, Unavailable) for one in snapshot[1].tiers.values())
        shown.append((measured, "tpot" in walk.render().get("slo", {})))
    assert (True, True) in shown
    assert (False, False) in shown
    assert (False, True) not in shown


def test_sentences_shedding_follows_replicas() -> None:
    walk = Walk(tiers={"serve": {"minReplicas": 1, "maxReplicas": 3}}, scaling={"mode": "Recommend"})
    walk.routable = 1
    walk.pod("a", "ready")
    walk.serve(10.0, 60)

    def shed(seconds: int) -> Object:
        for _ in range(seconds):
            walk.now_s, walk.answered = walk.now_s + 1.0, walk.answered + 10.0
            refused = walk.answered / 2.0
            counted = replace(arrivals(walk.answered), rejected={"overloaded": refused})
            walk.readings = (GatewayReading("gw-1", walk.now_s, "a", {"team/chat": counted}),)
            if int(walk.now_s) % 5 == 0:
                walk.engine_reports()
            walk.scaler.decide(walk.now_s)
        return walk.condition("Shedding", walk.render())

    assert "with 1 ready serve replica" in shed(30)["message"]
    walk.order(2)
    walk.pod("b", "starting")
    assert "1 starting" in shed(5)["message"]
    walk.pod("b", "ready")
    assert "with 2 ready serve replicas" in shed(65)["message"]


@pytest.mark.parametrize(
    ("arrivals", "share", "text"),
    [
        (9.0, 5 / 9, "5 of the last minute's 9 requests were rejected"),
        (30.0, 1 / 30, "1 of the last minute's 30 requests was rejected"),
        (0.9, 1.0, "the last minute's only request was rejected"),
        (600.0, 0.5, "50% of the last minute's requests were rejected (of 10 req/s)"),
    ],
)
def test_sentences_few_rejections_are_counted(arrivals: float, share: float, text: str) -> None:
    """Nine requests at once are a burst. A rate of 0.15 req/s with a capacity of 1.5 req/s would explain nothing."""
    metrics = ServiceMetrics(0.15, rejected_share=share, arrivals=arrivals)
    found = scaling_conditions.shedding(ServiceState.for_roles(["serve"]), ServiceSnapshot(metrics, {}), (), {})
    assert found is not None
    assert found.message == text


def test_sentences_killed_engine_is_no_overdue_start() -> None:
    """An engine that crashed and restarts in an old pod is expected after a start-up, and its pod is named."""
    walk = Walk()
    walk.routable = 1
    walk.pod("a", "ready")
    walk.serve(5.0, 30)
    made_s, walk.now_s = walk.now_s, walk.now_s + 86_400.0
    at = rfc3339(walk.now_s)
    crashed = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "finishedAt": at}}
    walk.pod(
        "a",
        "starting",
        containerStatuses=[
            {"name": "engine", "ready": False, "state": {"running": {"startedAt": at}}, "lastState": crashed}
        ],
    )
    pod = walk.store.get("Pod", ("team", "a"))
    assert pod is not None
    walk.store.put({**pod, "metadata": {**pod["metadata"], "creationTimestamp": rfc3339(made_s)}})
    walk.routable = 0
    walk.serve(5.0, 3)
    status = walk.render()
    assert walk.condition("Ready", status)["reason"] == "EngineFailing"
    starting = parse_starting(status["tiers"]["serve"]["startingPods"])
    assert starting is not None
    assert not starting.overdue
    assert datetime.fromisoformat(starting.next_ready).timestamp() > walk.now_s


@pytest.mark.parametrize(
    ("name", "record", "expected"),
    [
        ("other/young", None, "the name is the NAMESPACE/NAME of service other/young;"),
        ("shared", None, None),
        ("shared", "2026-07-01T08:00:00.123456Z", "service other/young holds the name since 2026-07-01T08:00:00Z;"),
    ],
)
def test_sentences_name_holder_and_since_when(name: str, record: str | None, expected: str | None) -> None:
    walk = Walk(model={"uri": "file:///models/tiny", "name": name})
    other = builders.service("young", "other", model={"uri": "file:///models/tiny", "name": "shared"})
    other["metadata"]["creationTimestamp"] = "2026-06-01T00:00:00Z"
    other["status"] = {"nameClaim": f"shared since {record}"} if record else {}
    walk.store.put(other)
    status = walk.render()
    assert ("ModelNameRejected" in walk.kinds(status)) is (expected is not None)
    if expected is not None:
        found = walk.condition("ModelNameRejected", status)
        assert found["message"].startswith(f"spec.model.name {name}: {expected}")


def test_sentences_count_set_by_hand_names_who() -> None:
    walk = Walk(tiers={"serve": {"minReplicas": 3, "maxReplicas": 9}})
    walk.routable = 3
    for name in ("a", "b", "c"):
        walk.pod(name, "ready")
    walk.order(3)
    walk.serve(5.0, 90)
    walk.order(1, manager="kubectl")
    for name in ("b", "c"):
        walk.pod(name, "terminating")
    walk.now_s += 1.0
    [change] = walk.scaler.decide(walk.now_s)
    event = change.event()
    assert event.message.startswith("serve 1 -> 3: kubectl set the replica count to 1")
    assert "spec.tiers.serve.minReplicas" in event.message
    assert "ScalingInactive" not in walk.kinds(walk.render())


def test_sentences_scale_to_zero_by_hand_names_another_client() -> None:
    """The scale subresource omits a count of 0, so that no field manager owns it."""
    walk = Walk(tiers={"serve": {"minReplicas": 1, "maxReplicas": 3}}, scaling={"mode": "Auto"})
    walk.pod("a", "ready")
    walk.serve(0.0, 90)
    walk.order(0)
    deployment = walk.deployment
    deployment["metadata"]["managedFields"][0]["fieldsV1"] = {"f:metadata": {}}
    walk.store.put(deployment)
    walk.remove("a")
    walk.now_s += 1.0
    walk.readings = tuple(replace(reading, at_s=walk.now_s) for reading in walk.readings)
    (change,) = walk.scaler.decide(walk.now_s)
    event = change.event()
    assert event.reason is EventReason.SCALED_UP
    assert event.message.startswith(
        "serve 0 -> 1: another client (such as kubectl scale) set the replica count to 0; to keep a count,"
    )
    assert "needs 1" not in event.message
    assert walk.condition("Ready", walk.render())["message"].endswith(
        "; another client (such as kubectl scale) set the replica count to 0, and Plimsoll sets it to 1"
    )


def test_sentences_terminating_namespace_promises_nothing() -> None:
    walk = Walk()
    walk.routable = 1
    walk.pod("a", "ready")
    walk.serve(5.0, 30)
    walk.pod("a", "terminating")
    walk.routable = 0
    walk.order(1, replicas=0, updatedReplicas=0)
    walk.is_namespace_terminating = True
    walk.serve(5.0, 1)
    found = walk.condition("Ready", walk.render())
    assert (found["status"], found["reason"]) == ("False", "NamespaceTerminating")
    assert "starting" not in found["message"]


def test_sentences_without_metrics_blame_no_engine_that_is_away() -> None:
    walk = Walk()
    walk.routable = 1
    walk.pod("a", "ready")
    walk.serve(5.0, 60)
    walk.readings, walk.gateways = (), ()
    for _ in range(60):
        walk.now_s += 1.0
        walk.scaler.decide(walk.now_s)
    walk.routable = None
    status = walk.render()
    assert walk.condition("MetricsDegraded", status)["reason"] == "MetricsMissing"
    assert walk.condition("Ready", status)["status"] == "Unknown"


def test_sentences_zero_and_back() -> None:
    walk = Walk(tiers={"serve": {"minReplicas": 0, "maxReplicas": 3}})
    walk.routable = 1
    walk.pod("a", "ready")
    walk.serve(5.0, 60)
    walk.order(0, replicas=1, updatedReplicas=1)
    report = walk.scaler.report(KEY)
    assert report is not None
    zero = Walk(tiers={"serve": {"minReplicas": 0, "maxReplicas": 3}})
    zero.order(0)
    zero.pod("a", "ready")
    zero.order(0, replicas=1, updatedReplicas=1)
    found = zero.condition("Reconciling", zero.render())
    assert found["message"] == "serve: 1 ready, 0 desired: the surplus is removed"
    zero.remove("a")
    zero.order(0)
    assert "Reconciling" not in zero.kinds(zero.render())
    zero.order(1)
    zero.pod("b", "starting")
    assert zero.condition("Reconciling", zero.render())["message"] == "serve: 0 of 1 ready: 1 starting"
    assert object_meta.owner_uid(zero.deployment) == "uid-of-team-chat"
