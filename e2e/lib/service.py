"""InferenceServices in scenarios: their manifests, and handles that ask for what belongs to one.

The manifests are what a user would write; only `model.uri` points at the tiny model inside the engine image.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from e2e.lib.client import Target
from e2e.lib.kube import Cluster, Object, condition, is_true
from e2e.lib.metrics import Samples
from e2e.lib.wait import wait_until
from plimsoll.api import labels
from plimsoll.api.conditions import ABNORMAL_TRUE
from plimsoll.api.contract import engine_contract

MODEL_URI = "file:///models/tiny"
START_S = 420.0  # patience for engines to start: seconds on a quiet machine, minutes on a busy one
API_PORT, LAUNCHER_PORT = engine_contract().ports["api"], engine_contract().ports["launcher"]


def make_manifest(
    name: str, tiers: Object, model: Object | None = None, engine: Object | None = None, slo: Object | None = None
) -> Object:
    """An InferenceService; `tiers` as in its spec."""
    spec: Object = {"model": {"uri": MODEL_URI, **(model or {})}, "tiers": tiers}
    spec |= {key: value for key, value in (("engine", engine), ("slo", slo)) if value}
    return {"apiVersion": labels.API_VERSION, "kind": labels.KIND, "metadata": {"name": name}, "spec": spec}


@dataclass(frozen=True)
class Service:
    """A service in the cluster, by name."""

    cluster: Cluster
    namespace: str
    name: str
    url: str  # of the gateway

    @property
    def target(self) -> Target:
        """The service as clients reach it."""
        return Target(self.url, self.name)

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    def get(self) -> Object | None:
        return self.cluster.get(labels.PLURAL, self.name, self.namespace)

    def status(self) -> Object:
        return dict((self.get() or {}).get("status") or {})

    def admission(self) -> Object:
        """The InferenceServiceAdmission; empty if there is none."""
        return self.cluster.get(labels.ADMISSION_PLURAL, self.name, self.namespace) or {}

    def limits(self) -> Object:
        """The admission limits that are published to the gateways; empty if there are none."""
        return dict(self.admission().get("limits") or {})

    def condition(self, kind: str) -> Object:
        return condition(self.get(), kind)

    def pods(self, role: str = "") -> list[Object]:
        """Engine pods, those that are being deleted included."""
        selector = f"{labels.SERVICE}={self.name}" + (f",{labels.ROLE}={role}" if role else "")
        return self.cluster.list("pods", self.namespace, selector)

    def ready_pods(self, role: str = "") -> list[str]:
        pods = self.pods(role)
        return [p["metadata"]["name"] for p in pods if is_true(p, "Ready") and "deletionTimestamp" not in p["metadata"]]

    def events(self) -> list[Object]:
        """Events about the InferenceService itself."""
        items = self.cluster.list("events", self.namespace)
        return [
            e for e in items if e["involvedObject"]["kind"] == labels.KIND and e["involvedObject"]["name"] == self.name
        ]

    def engine_metrics(self, pod: str) -> Samples:
        """The launcher's and vLLM's metrics of one pod."""
        return Samples.parse(self.cluster.in_pod(self.namespace, pod, LAUNCHER_PORT, "/metrics"))

    def metrics(self, role: str) -> Samples:
        """The sum over a tier's ready pods."""
        return Samples.sum(self.engine_metrics(pod) for pod in self.ready_pods(role))

    def ask_engine(self, pod: str, path: str, body: Object) -> Object:
        """POST to one engine's API port, past the gateway."""
        return self.cluster.call(f"/api/v1/namespaces/{self.namespace}/pods/{pod}:{API_PORT}/proxy{path}", body)

    def is_ready(self) -> bool:
        """Ready and not reconciling, both judged on the present generation, and no engine comes or goes any more."""
        obj = self.get()
        if not obj or not is_true(obj, "Ready") or is_true(obj, "Reconciling"):
            return False
        is_current = obj["status"].get("observedGeneration") == obj["metadata"]["generation"]
        return is_current and len(self.pods()) == len(self.ready_pods())

    def wait_condition(self, kind: str, timeout_s: float = 60, **fields: str) -> Object:
        """The condition of that type, once it has these fields (`status`, `reason`).

        One that exists only while it is true counts as False while it is absent.
        """

        def matching_condition() -> Object | None:
            found = self.condition(kind)
            if not found and kind in ABNORMAL_TRUE and self.status().get("conditions"):
                found = {"type": kind, "status": "False"}
            return found if found and fields.items() <= found.items() else None

        return wait_until(f"{self.key}: {kind} has {fields}", matching_condition, timeout_s)

    def wait_events(self, reason: str, timeout_s: float = 60) -> list[Object]:
        """The Events of that reason, once there is one."""
        what = f"{self.key}: an Event tells of {reason}"
        return wait_until(what, lambda: [e for e in self.events() if e["reason"] == reason], timeout_s)

    def wait_ready(self, timeout_s: float = START_S) -> None:
        try:
            wait_until(f"{self.key} is Ready and converged", self.is_ready, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{json.dumps(self.status(), indent=1)}") from None
