"""What the operator as a whole knows of which services there are."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from typing import Any

import grpc
import pytest

from plimsoll.adapters.lease import LeaseTimes
from plimsoll.api import labels
from plimsoll.controllers import operator
from plimsoll.controllers.http_server import HttpEndpoints
from plimsoll.controllers.keda_scaler import messages
from plimsoll.controllers.object_cache import Key
from plimsoll.controllers.operator import OperatorProcess
from plimsoll.controllers.operator_config import OperatorConfig
from plimsoll.core.errors import BackendUnavailable
from plimsoll.resources.platform_config import KedaScalerSettings
from tests import builders

Object = dict[str, Any]


class FakeApiServer:
    """An API server that lists services. added_while_listing: appear while it makes up its answer."""

    def __init__(self, *services: Object) -> None:
        self.services: tuple[Object, ...] | None = services
        self.added_while_listing: list[Object] = []
        self.operator = OperatorProcess(self, OperatorConfig(builders.PLATFORM, "plimsoll-system", "me"), None)  # type: ignore[arg-type]

    async def list(self, resource: object, namespace: str | None = None) -> tuple[list[Object], str]:
        if self.services is None:
            raise BackendUnavailable("away")
        found = list(self.services)
        for service in self.added_while_listing:
            self.operator.cache.put(service)
        return found, "1"

    @property
    def known(self) -> list[str]:
        return [one["metadata"]["name"] for one in self.operator.cache.all(labels.KIND)]


async def test_remove_deleted_services_drops_unseen_deleted_service() -> None:
    """A watch that begins anew with a list does not tell what was deleted between that list and its last word."""
    stays, goes = builders.service("stays"), builders.service("goes")
    world = FakeApiServer(stays, goes)
    for service in (stays, goes):
        world.operator.cache.put(service)
    await world.operator.remove_deleted_services()
    assert world.known == ["stays", "goes"]
    world.services = (stays,)
    await world.operator.remove_deleted_services()
    assert world.known == ["stays"]


async def test_remove_deleted_services_keeps_service_added_during_list() -> None:
    world = FakeApiServer()
    world.added_while_listing = [builders.service("new")]
    await world.operator.remove_deleted_services()
    assert world.known == ["new"]


async def test_remove_deleted_services_keeps_recreated_service() -> None:
    old = builders.service("same")
    new = {**old, "metadata": {**old["metadata"], "uid": "another"}}
    world = FakeApiServer()
    world.operator.cache.put(old)
    world.added_while_listing = [new]
    await world.operator.remove_deleted_services()
    assert [one["metadata"]["uid"] for one in world.operator.cache.all(labels.KIND)] == ["another"]


async def test_leader_serves_keda_only_if_configured() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    platform = builders.PLATFORM.model_copy(update={"keda_scaler": KedaScalerSettings(port=port)})
    operator = OperatorProcess(FakeApiServer(), OperatorConfig(platform, "plimsoll-system", "me"), None)  # type: ignore[arg-type]
    assert "KEDA scaler" not in dict(FakeApiServer().operator._parts())
    task = asyncio.create_task(dict(operator._parts())["KEDA scaler"]())  # type: ignore[arg-type]
    reference = messages.ScaledObjectRef(namespace="team", scalerMetadata={"service": "chat"})
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        is_active = channel.unary_unary(f"/{messages.SERVICE}/IsActive", messages.ScaledObjectRef.SerializeToString)
        with pytest.raises(grpc.aio.AioRpcError, match="does not scale InferenceService team/chat"):
            await is_active(reference, wait_for_ready=True, timeout=60)
    task.cancel()
    await asyncio.wait([task])


async def test_service_says_once_that_another_release_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    api = FakeApiServer()
    operator, key = api.operator, ("team", "chat")
    ready = {"type": "Ready", "status": "True", "reason": "Serving", "message": "", "lastTransitionTime": "t"}
    operator.cache.put({**builders.service(), "status": {"conditions": [ready], "observedGeneration": 1}})
    written, queued, releases = list[Object](), list[Key](), ["evil" * 200]

    async def acquire(namespace: str) -> bool:
        return False

    async def apply(obj: Object, manager: str, **_: Any) -> Object:
        written.append(obj)
        return {**builders.service(), "status": obj["status"]}

    async def create(obj: Object) -> Object:
        written.append(obj)
        return obj

    monkeypatch.setattr(OperatorProcess, "is_synced", True)
    monkeypatch.setattr(operator.namespace_leases, "acquire", acquire)
    monkeypatch.setattr(operator.namespace_leases, "foreign_release", lambda namespace: releases[-1])
    monkeypatch.setattr(operator.queue, "add", queued.append)
    monkeypatch.setattr(api, "apply", apply, raising=False)
    monkeypatch.setattr(api, "create", create, raising=False)
    for _ in range(3):
        await operator._reconcile(key)
    event, status = written
    assert (event["reason"], event["type"], event["involvedObject"]["name"]) == ("OtherRelease", "Warning", "chat")
    kept, stalled = status["status"]["conditions"]
    assert (kept, status["status"]["observedGeneration"]) == (ready, 1)
    assert (stalled["type"], stalled["status"], stalled["reason"]) == ("Stalled", "True", "OtherRelease")
    assert "release evilevil" in stalled["message"]
    assert "holds the Lease plimsoll-release of namespace team" in stalled["message"]
    assert len(stalled["message"]) < 600
    releases.append("another")
    await operator._reconcile(key)
    assert "release another holds" in written[-1]["status"]["conditions"][1]["message"]
    operator._queue_namespace("other")
    operator.namespace_leases._on_foreign("team")
    assert queued == [key]


@pytest.mark.parametrize("is_managed", [True, False])
async def test_service_of_another_release_is_left_alone(is_managed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, key = FakeApiServer().operator, ("team", "chat")
    operator.cache.put(builders.service(tiers={"serve": {"minReplicas": 1}}))
    reconciled, later = list[Key](), list[Key]()

    async def acquire(namespace: str) -> bool:
        return is_managed

    async def reconcile(key: Key) -> None:
        reconciled.append(key)

    monkeypatch.setattr(OperatorProcess, "is_synced", True)
    monkeypatch.setattr(operator.namespace_leases, "acquire", acquire)
    monkeypatch.setattr(operator.namespace_leases, "manages", lambda namespace: is_managed)
    monkeypatch.setattr(operator.reconciler, "reconcile", reconcile)
    monkeypatch.setattr(operator.queue, "add_later", lambda key, seconds: later.append(key))
    await operator._reconcile(key)
    operator.autoscaler.decide(1.8e9)
    assert (reconciled, later) == (([key], []) if is_managed else ([], [key]))
    assert (operator.autoscaler.report(key) is not None) == is_managed


async def test_last_service_of_a_namespace_gives_its_lease_up(monkeypatch: pytest.MonkeyPatch) -> None:
    operator, given_up = FakeApiServer().operator, list[str]()
    operator.cache.put(builders.service("stays"))

    async def acquire(namespace: str) -> bool:
        return True

    async def ignore(key: Key) -> None:
        return None

    async def give_up(namespace: str) -> None:
        given_up.append(namespace)

    monkeypatch.setattr(OperatorProcess, "is_synced", True)
    monkeypatch.setattr(operator.namespace_leases, "acquire", acquire)
    monkeypatch.setattr(operator.namespace_leases, "give_up", give_up)
    monkeypatch.setattr(operator.reconciler, "reconcile", ignore)
    await operator._reconcile(("team", "gone"))
    assert given_up == []
    await operator._reconcile(("other", "gone"))
    assert given_up == ["other"]


async def test_remove_deleted_services_ignores_unavailable_api_server() -> None:
    world = FakeApiServer()
    world.operator.cache.put(builders.service("stays"))
    world.services = None
    await world.operator.remove_deleted_services()
    assert world.known == ["stays"]


async def test_lost_lease_frees_caches_of_the_term(monkeypatch: pytest.MonkeyPatch) -> None:
    terms = list[weakref.ref[OperatorProcess]]()

    async def run_term(self: OperatorProcess) -> None:
        terms.append(weakref.ref(self))

    async def lose(*arguments: Any) -> bool:
        await arguments[4]()
        return False

    monkeypatch.setattr(OperatorProcess, "run", run_term)
    monkeypatch.setattr(operator, "lead_while_leased", lose)
    config = OperatorConfig(builders.PLATFORM, "plimsoll-system", "me")
    gc.disable()
    try:
        await operator._lead_and_run(None, config, None, HttpEndpoints(), LeaseTimes(), no_watch, lambda: None)  # type: ignore[arg-type]
    finally:
        gc.enable()
    assert [term() for term in terms] == [None]


async def no_watch() -> None:
    return None
