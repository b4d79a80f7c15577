"""A fleet that exists, and the operator's parts: a Deployment with its pods, and its other autoscalers.

The cluster answers as an API server does: each write of the count takes the field's ownership.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from plimsoll.adapters.kube_client import DEPLOYMENTS, HORIZONTALPODAUTOSCALERS, PODS, KubeClient, Resource
from plimsoll.api import labels
from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.controllers.autoscale.autoscaler import Autoscaler
from plimsoll.controllers.autoscale.checkpoint_store import CheckpointStore
from plimsoll.controllers.autoscale.signal_sources import SignalSources
from plimsoll.controllers.gateway_poller import GatewayView
from plimsoll.controllers.object_cache import Key, ObjectCache
from plimsoll.controllers.reconcile.drain_reports import DrainReports
from plimsoll.controllers.reconcile.reconciler import Reconciler
from plimsoll.controllers.targets.target_poller import TargetPoller
from plimsoll.core.errors import ClusterError, Forbidden, NotFound
from plimsoll.core.ports import BucketCounts, EngineInfo, GatewayReading, SelfBenchmark
from plimsoll.core.types import Role
from tests import builders
from tests.api.manifests import adopted, edited
from tests.controllers.test_autoscale import INFINITE, NOW_S, engine

Object = dict[str, Any]

KEY: Key = ("team", "llm-slo")
ABOUT = EngineInfo(
    "vllm", "0.32.0", "some GPU", 1, 64, 200_000, 2048, 16, 8192, None,
    SelfBenchmark(((128, 0.02), (1024, 0.06)), ((1, 64, 0.0152), (4, 64, 0.0158), (8, 64, 0.0166))),
)  # fmt: skip


def service_object(name: str = KEY[1], created: str = "2026-01-01T00:00:00Z", **edits: Any) -> Object:
    """The InferenceService as the API server has it."""
    manifest = edited(adopted(), {"spec.slo": {"ttft": "1s", "tpot": "50ms"}, "spec.targets.serve.maxReplicas": 9})
    meta = {
        "name": name, "namespace": KEY[0], "uid": f"uid-{name}", "generation": 1, "resourceVersion": "1",
        "creationTimestamp": created,
    }  # fmt: skip
    return edited({**manifest, "metadata": meta}, edits)


class AdoptedFleet(KubeClient):
    """The Deployment `llm` with `replicas` ready pods. rate: requests per second at its engines."""

    def __init__(self, rate: float = 0.0, replicas: int = 1, **edits: Any) -> None:
        self.now_s, self.rate = NOW_S, rate
        self.autoscalers: list[Object] = []
        self.forbidden: set[str] = set()  # plural names
        self.kinds = {"Deployment": (DEPLOYMENTS, True), "Model": (DEPLOYMENTS, True)}
        self.kinds |= dict.fromkeys(("ReplicationThing", "RayCluster"), (DEPLOYMENTS, False))
        self.events: list[Object] = []
        self.writes: list[tuple[str, int]] = []  # field manager, and count
        self.selector: str | None = "app=llm"
        self.deployments = {"llm"}
        self.gateway_readings: list[GatewayReading] = []  # of the next tick
        self.gateway_view = GatewayView(1, 1, {})
        self.limits: list[Object] = []  # InferenceServiceAdmissions as applied
        self.services: list[Object] = []  # the Service that selects the pods, as applied
        self.unanswered: set[str] = set()  # names for which the API server fails
        self.selected: dict[str, int] = {}  # pods of other selectors
        self.labels: dict[str, str] = {}
        self.pod_labels: dict[str, str] = {}
        self.uid = "uid-llm"
        self.checkpoint: str | None = None  # what a new operator process restores
        self._version = 10
        self._counts: dict[str, float] = {}
        self.managers = [{"manager": "kubectl-client-side-apply", "operation": "Update"}]
        self.spec: Object = {"replicas": replicas, "template": {"spec": {"containers": [{"name": "vllm"}]}}}
        self.original = copy.deepcopy(self.spec)
        self.cache = ObjectCache()
        self.cache.put(service_object(**edits))
        self.start_operator()

    def start_operator(self) -> None:
        """A new operator process."""
        self.dirty = True
        self.targets = TargetPoller(self, self.cache, lambda key: self._mark_dirty())
        sources = SignalSources(
            lambda: (self.gateway_readings, ("gw-1",)),
            lambda namespace, pod: ABOUT,
            lambda namespace, pod: None,
            checkpoint=lambda _: self.checkpoint,
            targets=self.targets.states,
            on_target_written=self.targets.record_write,
        )
        self.reconciler = Reconciler(
            self, self.cache, builders.PLATFORM, lambda: self.gateway_view, lambda key: self.scaler.report(key),
            DrainReports(self.cache), "operator-1", checkpoints=CheckpointStore(self), targets=self.targets.states,
        )  # fmt: skip
        self.scaler = Autoscaler(
            self.cache, self, sources, self.reconciler.status.record_event, lambda key: self._mark_dirty()
        )

    def write(self, manager: str, replicas: int, operation: str = "Update") -> None:
        """Somebody sets the count, and owns the field alone."""
        self._version += 1
        self.managers = [{"manager": manager, "operation": operation}] if replicas else []
        self.spec["replicas"] = replicas

    def edit(self, **edits: Any) -> None:
        """Change the InferenceService as a user does."""
        changed = edited(self.object, edits)
        changed["metadata"]["generation"] += 1
        self._store(changed)

    async def run(self, seconds: int) -> None:
        """Time passes: the target is read, engines report every two seconds, decisions are made and written."""
        for _ in range(seconds):
            self.now_s += 1.0
            await self.targets.poll()
            self._report_engines()
            self.scaler.tick(self.now_s)
            await self.scaler.finish_writes()
            if self.dirty:
                self.dirty = False
                await self.reconciler.reconcile(KEY)

    @property
    def replicas(self) -> int:
        return int(self.spec["replicas"])

    @property
    def object(self) -> Object:
        found = self.cache.get(labels.KIND, KEY)
        assert found is not None
        return found

    @property
    def status(self) -> Object:
        return dict(self.object.get("status") or {})

    def condition(self, kind: str) -> tuple[str, str, str]:
        """Status, reason and message; empty for one that does not exist."""
        for one in self.status.get("conditions", ()):
            if one["type"] == kind:
                return one["status"], one["reason"], one["message"]
        return "", "", ""

    def needed(self) -> int:
        """The replicas that the last decision recommends."""
        tier = self.status["tiers"]["serve"]
        return int(tier.get("needed") or tier["summary"].partition("/")[2])

    async def discover(self, api_version: str, kind: str) -> tuple[Resource, bool] | None:
        return self.kinds.get(kind)

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        if resource.plural in self.forbidden:
            raise Forbidden(f"{resource.plural} is forbidden", 403)
        if resource.kind == labels.KIND:
            return self.object
        if name in self.unanswered:
            raise ClusterError(f"{name}: no answer", 503)
        if name not in self.deployments:
            raise NotFound(name, 404)
        fields = [{**one, "fieldsV1": {"f:spec": {"f:replicas": {}}}} for one in self.managers]
        meta = {
            "namespace": namespace, "name": name, "uid": self.uid, "resourceVersion": str(self._version),
            "labels": self.labels, "managedFields": fields,
        }  # fmt: skip
        return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": self.spec}

    async def get_scale(self, resource: Resource, namespace: str, name: str) -> Object:
        status = {"replicas": self.replicas} | ({} if self.selector is None else {"selector": self.selector})
        return {"kind": "Scale", "metadata": {}, "spec": {"replicas": self.replicas}, "status": status}

    async def list(
        self, resource: Resource, namespace: str | None = None, selector: str | None = None
    ) -> tuple[list[Object], str]:
        if resource is HORIZONTALPODAUTOSCALERS:
            return self.autoscalers, "1"
        assert resource is PODS
        assert selector is not None
        count = self.replicas if selector == "app=llm" else self.selected[selector]
        return [self._pod(number) for number in range(count)], "1"

    async def scale(self, resource: Resource, namespace: str, name: str, replicas: int, manager: str) -> None:
        assert (resource, namespace, name) == (DEPLOYMENTS, KEY[0], "llm")
        self.writes.append((manager, replicas))
        self.write(manager, replicas, "Apply")

    async def create(self, obj: Object) -> Object:
        if obj["kind"] == "Event":
            self.events.append(obj)
            return obj
        assert obj["kind"] == labels.CHECKPOINT_KIND, "nothing is created for a service with targets"
        return obj

    async def apply(self, obj: Object, manager: str, *, force: bool = True, subresource: str | None = None) -> Object:
        if obj["kind"] == labels.ADMISSION_KIND:
            assert obj["metadata"]["name"] == KEY[1]
            self._version += 1
            live = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(self._version), "uid": "uid-limits"}}
            self.limits.append(live)
            return live
        if obj["kind"] == "Service":
            self._version += 1
            live = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(self._version), "uid": "uid-service"}}
            self.services = [live]
            return live
        if obj["kind"] == labels.CHECKPOINT_KIND or obj["metadata"]["namespace"] == "plimsoll-system":
            return obj
        assert (obj["kind"], subresource) == (labels.KIND, "status"), "nothing but the own status is written"
        return self._store({**self.object, "status": obj["status"]})

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str | None = None) -> None:
        objects = self.services if resource.kind == "Service" else self.limits
        assert (resource.kind, name) in ((labels.ADMISSION_KIND, KEY[1]), ("Service", f"{KEY[1]}-targets"))
        for one in objects:
            self.cache.remove(one)
        objects.clear()

    async def is_terminating(self, namespace: str) -> bool:
        return False

    def parsed(self) -> InferenceService:
        found = self.cache.parsed(self.object)
        assert isinstance(found, InferenceService)
        return found

    def _store(self, obj: Object) -> Object:
        self._version += 1
        stored = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(self._version)}}
        self.cache.put(stored)
        self.dirty = True
        return stored

    def _mark_dirty(self) -> None:
        self.dirty = True

    def _pod(self, number: int) -> Object:
        return {
            "kind": "Pod",
            "metadata": {
                "namespace": KEY[0], "name": f"llm-{number}", "uid": f"uid-pod-{number}", "resourceVersion": "5",
                "labels": {"app": "llm", **self.pod_labels}, "creationTimestamp": "2026-01-01T00:00:00Z",
            },
            "spec": self.spec["template"]["spec"],
            "status": {"podIP": f"10.0.0.{number}", "conditions": [{"type": "Ready", "status": "True"}]},
        }  # fmt: skip

    def _report_engines(self) -> None:
        for number in range(self.replicas):
            name = f"llm-{number}"
            count = self._counts[name] = self._counts.get(name, 0.0) + self.rate / self.replicas
            if int(self.now_s - NOW_S) % 2 == 0:
                ttft = BucketCounts((0.1, 1.0, INFINITE), (0.0, count, 0.0), 0.3 * count)
                counted = replace(engine(count, self.now_s), pod=name, ttft_s=ttft, steps=None, computed_tokens=None)
                self.scaler.observe_engine(KEY, Role.SERVE, replace(counted, running=4.0 if self.rate else 0.0))
