"""A service that walks through its states, with each sentence of its status checked."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from plimsoll.api import conditions
from plimsoll.controllers import pod_startup
from plimsoll.controllers.gateway_poller import GatewayView
from plimsoll.controllers.reconcile import service_status
from plimsoll.controllers.reconcile.object_plan import plan_objects
from plimsoll.controllers.reconcile.observe import observe
from plimsoll.controllers.reconcile.status_inputs import collect_status_inputs, desired_replicas, names_of
from plimsoll.core.ports import BucketCounts, GatewayReading
from plimsoll.core.types import Role
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
