"""Each sentence of a status agrees with the objects and figures of the same snapshot.

The walk changes pods, Deployments and metrics as a cluster does, renders the status with the operator's own code, and
compares the sentences with the objects.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import pytest

from plimsoll.api.starting_pods import parse_starting
from plimsoll.controllers.autoscale import scaling_conditions
from plimsoll.core.autoscaling.inputs import ServiceSnapshot
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.demand.service_metrics import ServiceMetrics
from plimsoll.core.ports import GatewayReading
from plimsoll.core.types import Unavailable
from tests.controllers.status_walk import KEY, Object, Walk, rfc3339
from tests.controllers.test_autoscale import arrivals


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
