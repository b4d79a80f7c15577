"""The operator's own parts over one engine, without Kubernetes: what they learn, and the limits that they publish.

    python -m bench.hardware.admission.local_operator SERVICE.json OBJECTS.json --picker-port 8081 --log FILE

Problem: admission control is as good as the limits that the operator publishes, and those follow from an engine's
counters tick by tick. A second loop that does the same would test itself, not the operator.

Idea: the controllers themselves, wired as by `plimsoll.controllers.operator`: `Engines` scrapes the launcher,
`Gateways` polls the picker, `Autoscaler` decides each second, and its report has the admission limits. Only the API
server is missing: its objects are created here (one service, one ready pod, one Deployment, one gateway), and writes go
to OBJECTS.json, where the picker's watch reads them. Nothing is scaled. The log has every change of the limits, and
sometimes their inputs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiohttp

from plimsoll.adapters import pod_http
from plimsoll.adapters.engine_metrics import HttpGet
from plimsoll.adapters.kube_client import KubeClient, WatchEvent
from plimsoll.api import labels
from plimsoll.api.events import Event
from plimsoll.controllers.autoscale.autoscaler import Autoscaler
from plimsoll.controllers.autoscale.signal_sources import SignalSources
from plimsoll.controllers.engine_poller import EnginePoller
from plimsoll.controllers.gateway_poller import POLL_INTERVAL_SECONDS, GatewayPoller
from plimsoll.controllers.object_cache import Key, ObjectCache, key_of
from plimsoll.controllers.reconcile.name_claims import FIELD as NAME_CLAIM
from plimsoll.controllers.reconcile.service_status import StatusInputs, scaling_fields
from plimsoll.core import codec
from plimsoll.core.ports import EngineReading
from plimsoll.core.routing.model_names import claimed_name, format_record
from plimsoll.core.types import Role
from plimsoll.gateway.atomic_write import write_if_changed
from plimsoll.resources import object_meta
from plimsoll.resources.objects import admission
from plimsoll.resources.platform_config import GatewaySettings

Object = dict[str, Any]

GATEWAY: Final = "gateway-0"
API_PORT: Final = 8000
NAMESPACE: Final = "team"
CREATED_AT: Final = "2026-01-01T00:00:00Z"
_TIER: Final = "serve"
_EXPLAIN_S: Final = 10.0


def service_object(manifest: Object) -> Object:
    """A manifest as the API server has it, with the model name granted."""
    given = {"namespace": NAMESPACE, "uid": "uid-service", "generation": 1, "resourceVersion": "1"}
    found = {**manifest, "metadata": {**given, "creationTimestamp": CREATED_AT, **manifest["metadata"]}}
    return {**found, "status": {NAME_CLAIM: format_record(claimed_name(found), CREATED_AT)}}


def pod_object(parent: Object, started_at: str) -> Object:
    """Return the single engine pod, ready. started_at: RFC 3339 time."""
    name = parent["metadata"]["name"]
    annotations = object_meta.tier_labels(name, _TIER) | {labels.REVISION: "r1"}
    conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": started_at} for kind in ("PodScheduled", "Ready")
    ]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{name}-{_TIER}-0",
            "namespace": NAMESPACE,
            "uid": "uid-pod",
            "resourceVersion": "1",
            "labels": annotations,
            "creationTimestamp": started_at,
        },
        "spec": {"containers": [{"name": "engine", "ports": [{"name": "api", "containerPort": API_PORT}]}]},
        "status": {
            "phase": "Running",
            "podIP": "127.0.0.1",
            "conditions": conditions,
            "containerStatuses": [{"name": "engine", "state": {"running": {"startedAt": started_at}}}],
        },
    }


def deployment_object(parent: Object) -> Object:
    """Of the one tier: a replica, as ordered."""
    name = parent["metadata"]["name"]
    labels_of_tier = object_meta.child_metadata(
        parent, object_meta.tier_name(name, _TIER), object_meta.tier_labels(name, _TIER)
    )
    given = {"uid": "uid-deployment", "generation": 1, "resourceVersion": "1"}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": labels_of_tier | given, "spec": {"replicas": 1}}


def gateway_pod() -> Object:
    """The pod of the one gateway."""
    return {
        "metadata": {"name": GATEWAY, "uid": "uid-gateway", "resourceVersion": "1"},
        "status": {"phase": "Running", "podIP": "127.0.0.1"},
    }


class LocalOperator:
    """The parts of the operator. objects: folder from which the picker reads objects instead of from the API server.
    fetch: HTTP client that answers for the pods.
    """

    def __init__(self, manifest: Object, objects: Path, picker_port: int, log: Path, fetch: HttpGet) -> None:
        self._objects, self._log = objects, log
        self._store = ObjectCache()
        raw, started_at = service_object(manifest), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._key = key_of(raw)
        for each in (raw, deployment_object(raw), pod_object(raw, started_at)):
            self._store.put(each)
        settings = GatewaySettings(namespace="plimsoll-system", picker_port=picker_port)
        self._kube = KubeClient.__new__(KubeClient)  # nothing is asked of it: there is no API server
        self._gateways = GatewayPoller(self._kube, settings, fetch, lambda key: None)
        self._gateways.on_pod_event(WatchEvent("SYNC", objects=(gateway_pod(),)))
        self._engines = EnginePoller(self._store, fetch, self._on_reading)
        sources = SignalSources(
            self._gateways.readings,
            self._engines.engine_info,
            self._engines.startup_progress,
            self._engines.running_requests,
            self._engines.mark_active,
        )
        self._autoscaler = Autoscaler(self._store, self._kube, sources, _ignore_event, self._on_report)
        self._written_limits: Object | None = None
        self._write()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._engines.run())
            group.create_task(self._poll())
            group.create_task(self._tick())

    async def _poll(self) -> None:
        while True:
            await self._gateways.poll_round()
            await asyncio.sleep(POLL_INTERVAL_SECONDS)

    async def _tick(self) -> None:
        explained_s = 0.0
        while True:
            now_s = time.time()
            changes = self._autoscaler.decide(now_s)
            if changes:
                self._append_log(
                    scale=[f"{one.tier} {one.replicas_before} -> {one.decision.replicas}" for one in changes]
                )
            if now_s - explained_s >= _EXPLAIN_S:
                explained_s = now_s
                self._append_log(explain=self._autoscaler.explain(self._key))
            await self._gateways.wait_for_round()

    def _on_reading(self, key: Key, role: Role, reading: EngineReading) -> None:
        self._autoscaler.observe_engine(key, role, reading)

    def _on_report(self, key: Key) -> None:
        """The report says something new: what the reconciler would write is written, and seen by all."""
        raw = self._store.get(labels.KIND, key)
        assert raw is not None
        report = self._autoscaler.report(key)
        inputs = StatusInputs(service_object=raw, scaling_report=report)
        version = str(int(raw["metadata"]["resourceVersion"]) + 1)
        status = {NAME_CLAIM: raw["status"][NAME_CLAIM], **scaling_fields(inputs, raw["status"])}
        self._store.put({**raw, "metadata": {**raw["metadata"], "resourceVersion": version}, "status": status})
        published = None if report is None else report.published
        if published is not None:
            made = admission(raw, published)
            made["metadata"] |= {"uid": "uid-admission", "resourceVersion": version}
            self._store.put(made)
        self._write()
        limits = None if published is None else codec.encode(published)
        if limits != self._written_limits:
            self._written_limits = limits
            self._append_log(admission=limits)

    def _write(self) -> None:
        kinds = {labels.PLURAL: labels.KIND, labels.ADMISSION_PLURAL: labels.ADMISSION_KIND, "pods": "Pod"}
        objects = {name: list(self._store.all(kind)) for name, kind in kinds.items()}
        write_if_changed(self._objects, json.dumps(objects).encode())

    def _append_log(self, **what: Any) -> None:
        line = {"unix_s": round(time.time(), 3), "monotonic_s": round(time.monotonic(), 3), **what}
        with self._log.open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")


async def _ignore_event(_: Object, __: Event) -> None:
    """Events have nobody to read them here."""


async def _run(given: argparse.Namespace) -> None:
    manifest = json.loads(given.service.read_text())
    async with aiohttp.ClientSession() as http:
        await LocalOperator(
            manifest, given.objects, given.picker_port, given.log, partial(pod_http.get_page, http)
        ).run()


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware.admission.local_operator", description=__doc__)
    parser.add_argument("service", type=Path)
    parser.add_argument("objects", type=Path)
    parser.add_argument("--picker-port", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    given = parser.parse_args(words)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_run(given))
    return 0


if __name__ == "__main__":
    sys.exit(main())
