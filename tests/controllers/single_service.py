"""One service, its operator and the cluster around it, without an API server: the real autoscaler and reconciler.

Each second the gateway and the engines report, the autoscaler ticks, and a service whose report or object changed is
reconciled. Deployments get their pods at once.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

from plimsoll.adapters.kube_client import KubeClient, Resource
from plimsoll.api import labels
from plimsoll.controllers.autoscale.autoscaler import Autoscaler
from plimsoll.controllers.autoscale.checkpoint_store import CheckpointStore
from plimsoll.controllers.autoscale.signal_sources import SignalSources
from plimsoll.controllers.gateway_poller import GatewayView
from plimsoll.controllers.object_cache import Key, ObjectCache, role_of
from plimsoll.controllers.reconcile.drain_reports import DrainReports
from plimsoll.controllers.reconcile.reconciler import Reconciler
from plimsoll.core.errors import NotFound
from plimsoll.core.ports import EngineInfo, GatewayReading, SelfBenchmark
from plimsoll.core.types import Role
from plimsoll.gateway.admission_policy import AdmissionPolicy, _parse_spec, _policy_of
from tests import builders
from tests.controllers.test_autoscale import NOW_S, arrivals, engine, timeless

Object = dict[str, Any]

KEY: Key = ("team", "single")
ABOUT = EngineInfo(
    "vllm", "0.32.0", "some GPU", 1, 64, 200_000, 2048, 16, 8192, None,
    SelfBenchmark(((128, 0.02), (1024, 0.06)), ((1, 64, 0.0152), (4, 64, 0.0158), (8, 64, 0.0166))),
)  # fmt: skip
DELETE = object()  # value of a field to remove


def read_policy(obj: Object) -> AdmissionPolicy | None:
    """What a gateway reads from the object; None without classes."""
    return _policy_of(_parse_spec(obj))


class InMemoryKube(KubeClient):
    """The writes of the operator, straight into its cache."""

    def __init__(self, cache: ObjectCache) -> None:
        self.cache = cache
        self.events: list[Object] = []
        self.terminating: frozenset[str] = frozenset()  # namespaces
        self._version = 100

    async def apply(self, obj: Object, manager: str, *, force: bool = True, subresource: str | None = None) -> Object:
        meta = obj["metadata"]
        live = self.cache.get(obj["kind"], (meta["namespace"], meta["name"]))
        if obj["kind"] == "Pod":
            assert live is not None
            return self._store({**live, "metadata": live["metadata"] | meta})
        if subresource == "status":
            assert live is not None
            return self._store({**live, "status": obj["status"]})
        old = {} if live is None else live
        metadata = {"uid": f"uid-{obj['kind']}-{meta['name']}", **meta}
        metadata["generation"] = int(old.get("metadata", {}).get("generation", 0)) + (
            old.get("spec") != obj.get("spec")
        )
        return self._store({**obj, "metadata": metadata, **({"status": old["status"]} if "status" in old else {})})

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        found = self.cache.get(resource.kind, (namespace or "", name))
        if found is None:
            raise NotFound(f"{resource.kind} {name}")
        return found

    async def create(self, obj: Object) -> Object:
        if obj["kind"] == "Event":
            self.events.append(obj)
            return obj
        return self._store({**obj, "metadata": {"uid": f"uid-{obj['metadata']['name']}", **obj["metadata"]}})

    async def is_terminating(self, namespace: str) -> bool:
        return namespace in self.terminating

    async def delete(self, resource: Resource, namespace: str | None, name: str, uid: str) -> None:
        live = self.cache.get(resource.kind, (namespace or "", name))
        assert live is not None
        self.cache.remove(live)

    async def scale(self, resource: Resource, namespace: str, name: str, replicas: int, manager: str) -> None:
        live = self.cache.get("Deployment", (namespace, name))
        assert live is not None
        self._store({**live, "spec": {**live["spec"], "replicas": replicas}})

    def _store(self, obj: Object) -> Object:
        self._version += 1
        stored = {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(self._version)}}
        self.cache.put(stored)
        return stored


class SingleService:
    """The service team/single. rate: requests per second at its gateway."""

    def __init__(self, rate: float, **spec: Any) -> None:
        self.now_s, self.rate, self.requests = NOW_S, rate, 0.0
        self.cache = ObjectCache()
        self.kube = InMemoryKube(self.cache)
        self.cache.put(builders.service(KEY[1], KEY[0], **spec))
        self.gateway, self.gateways = "gw-1", ("gw-1",)
        self._completed: dict[str, float] = {}  # requests, by pod
        self.engine_infos: dict[str, EngineInfo] = {}  # of pods that announce something else than the others
        self.bypassing = 0.0  # requests in engines that no gateway sent
        self.start_operator()

    def start_operator(self) -> None:
        """A new operator process: it knows what the API server has."""
        self._readings: tuple[GatewayReading, ...] = ()
        self._dirty = True
        checkpoints = CheckpointStore(self.kube)
        stored = self.cache.get(labels.CHECKPOINT_KIND, KEY)
        if stored is not None:
            checkpoints._stored[KEY] = self.object["metadata"]["uid"], stored["state"]["zlib"]
        sources = SignalSources(
            lambda: (self._readings, self.gateways),
            lambda namespace, pod: self.engine_infos.get(pod, ABOUT),
            lambda namespace, pod: None,
            checkpoint=checkpoints.get,
        )
        view = GatewayView(1, 1, {KEY: 1})
        self._reconciler = Reconciler(
            self.kube, self.cache, builders.PLATFORM, lambda: view, lambda key: self.scaler.report(key),
            DrainReports(self.cache), "operator-1", checkpoints=checkpoints,
        )  # fmt: skip
        self.scaler = Autoscaler(
            self.cache, self.kube, sources, self._reconciler.status.record_event, lambda key: self._mark_dirty()
        )

    def restart_gateway(self) -> None:
        """A new gateway pod, whose counters start at zero."""
        self.gateway, self.requests = f"{self.gateway}-next", 0.0
        self.gateways = (self.gateway,)

    @property
    def object(self) -> Object:
        found = self.cache.get(labels.KIND, KEY)
        assert found is not None
        return found

    @property
    def status(self) -> Object:
        return dict(self.object.get("status") or {})

    @property
    def conditions(self) -> dict[str, tuple[str, str]]:
        """Status and reason of each condition."""
        return {one["type"]: (one["status"], one["reason"]) for one in self.status["conditions"]}

    def message(self, kind: str) -> str:
        """The message of a condition; empty without it."""
        return next((str(one["message"]) for one in self.status["conditions"] if one["type"] == kind), "")

    @property
    def policy(self) -> AdmissionPolicy | None:
        """What a gateway reads from the object; without limits."""
        return read_policy(self.object)

    @property
    def limits(self) -> Object | None:
        """What the operator has published to the gateways."""
        found = self.cache.get(labels.ADMISSION_KIND, KEY)
        return None if not (found or {}).get("limits") else dict(found["limits"])

    def deployment(self, tier: str) -> Object:
        found = self.cache.get("Deployment", (KEY[0], f"{KEY[1]}-{tier}"))
        assert found is not None
        return found

    def replicas(self) -> dict[str, int]:
        return {tier: int(self.deployment(tier)["spec"]["replicas"]) for tier in self.object["spec"]["tiers"]}

    def scale(self, tier: str, replicas: int) -> None:
        """As with `kubectl scale`."""
        live = self.deployment(tier)
        self.cache.put({**live, "spec": {**live["spec"], "replicas": replicas}})
        self._start_pods()

    def edit(self, path: str, value: object) -> None:
        """Set or remove a field of the spec, as the API server stores it."""
        changed = copy.deepcopy(self.object)
        *parents, name = path.split(".")
        part = changed["spec"]
        for parent in parents:
            part = part.setdefault(parent, {})
        if value is DELETE:
            del part[name]
        else:
            part[name] = value
        changed["metadata"]["generation"] += 1
        changed["metadata"]["resourceVersion"] = str(int(changed["metadata"]["resourceVersion"]) + 1000)
        self.kube._version += 1000
        self.cache.put(changed)
        self._dirty = True

    async def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            self.requests += self.rate
            reading = GatewayReading(self.gateway, self.now_s, self.gateway, {"/".join(KEY): arrivals(self.requests)})
            self._readings = (reading,)
            self._report_engines()
            self.scaler.tick(self.now_s)
            await self.scaler.finish_writes()
            self._start_pods()
            if self._dirty:
                self._dirty = False
                await self._reconciler.reconcile(KEY)
                self._start_pods()
                await self._reconciler.reconcile(KEY)

    async def delete(self) -> None:
        """The service is gone, and with it its metrics."""
        self.cache.remove(self.object)
        self.scaler.decide(self.now_s + 1.0)
        await self._reconciler.reconcile(KEY)

    def _mark_dirty(self) -> None:
        self._dirty = True

    def _report_engines(self) -> None:
        """Each tier's engines share the requests. They report no times, so the model stays that of their benchmark."""
        pods = self.cache.children("Pod", KEY)
        for pod in pods:
            name, role, is_new = pod["metadata"]["name"], role_of(pod), pod["metadata"]["name"] not in self._completed
            share = sum(role_of(other) == role for other in pods)
            self._completed[name] = self._completed.get(name, 0.0) + self.rate / share
            if is_new or math.fmod(self.now_s - NOW_S, 5.0) == 0.0:
                running = (4.0 if self.rate else 0.0) + self.bypassing
                reading = timeless(engine(self._completed[name], self.now_s))
                reading = replace(reading, pod=name, running=running)
                self.scaler.observe_engine(KEY, Role(role), reading)

    def _start_pods(self) -> None:
        """Make each Deployment's pods ready, and its status up to date."""
        for tier in self.object["spec"]["tiers"]:
            live = self.cache.get("Deployment", (KEY[0], f"{KEY[1]}-{tier}"))
            if live is None:
                continue
            count = int(live["spec"]["replicas"])
            pods = {one["metadata"]["name"]: one for one in self.cache.children("Pod", KEY)}
            names = [f"{tier}-{number}" for number in range(count)]
            for name in [name for name in pods if name.startswith(f"{tier}-") and name not in names]:
                self.cache.remove(pods[name])
            for name in [name for name in names if name not in pods]:
                pod = builders.pod(self.object, tier, name, conditions=[{"type": "Ready", "status": "True"}])
                pod["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
                pod["metadata"]["ownerReferences"] = [{"kind": "ReplicaSet", "name": tier, "uid": tier}]
                self.cache.put(pod)
            status = {
                "observedGeneration": live["metadata"].get("generation", 0), "replicas": count,
                "updatedReplicas": count, "readyReplicas": count,
            }  # fmt: skip
            if live.get("status") != status:
                self.cache.put({**live, "status": status})
                self._dirty = True
