"""Client of the API server; no other module imports the kubernetes package.

Objects are plain dicts as the server sends them, so that builders, caches and tests need no client classes. Writes are
server-side applies with a named field manager: they leave foreign fields alone, and a repeated write changes nothing.
`watch` never ends: it lists, yields `SYNC`, follows the stream, and lists again when the stream stalls or expires.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import aiohttp
from kubernetes.aio import client, config
from kubernetes.aio.leaderelection.electionconfig import Config as ElectionConfig
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

from plimsoll.adapters.normalize import normalize
from plimsoll.api import labels
from plimsoll.core.errors import (
    BackendUnavailable,
    ClusterError,
    Conflict,
    Forbidden,
    LeaseLost,
    NotFound,
    ObjectRejected,
)
from plimsoll.telemetry import metrics
from plimsoll.telemetry.service_log import ServiceLog

Object = dict[str, Any]

log = ServiceLog(__name__)

PAGE_SIZE = 500  # objects per list call
WATCH_TIMEOUT_SECONDS = 290  # the server ends the stream, so that a dead stream is not mistaken for a quiet one
WATCH_STALL_SECONDS = 320
REQUEST_TIMEOUT_SECONDS = 30
UNKNOWN_FIELD_MESSAGE = "failed to create typed patch object"  # for an unknown field the server answers 500


@dataclass(frozen=True)
class Resource:
    """One kind of object and its API path."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        parts = [root]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts += [self.plural, *([name] if name else []), *([subresource] if subresource else [])]
        return "/".join(parts)


INFERENCESERVICES = Resource(labels.GROUP, labels.VERSION, labels.PLURAL, labels.KIND)
PODS = Resource("", "v1", "pods", "Pod")
SERVICES = Resource("", "v1", "services", "Service")
SERVICEACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
EVENTS = Resource("", "v1", "events", "Event")
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
CONTROLLERREVISIONS = Resource("apps", "v1", "controllerrevisions", "ControllerRevision")
PODDISRUPTIONBUDGETS = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
NETWORKPOLICIES = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")

BY_KIND = {
    r.kind: r
    for r in (
        INFERENCESERVICES,
        PODS,
        SERVICES,
        SERVICEACCOUNTS,
        EVENTS,
        DEPLOYMENTS,
        CONTROLLERREVISIONS,
        PODDISRUPTIONBUDGETS,
        NETWORKPOLICIES,
    )
}


@dataclass(frozen=True)
class WatchEvent:
    """An event of a watch. SYNC has all objects of the list (`objects`); the others have one `object`."""

    type: str  # SYNC | ADDED | MODIFIED | DELETED
    object: Object = field(default_factory=dict)
    objects: tuple[Object, ...] = ()


class KubeClient:
    """A connection to the API server. `may_write` is called before every write; False means the lease is lost."""

    def __init__(self, api: client.ApiClient, may_write: Callable[[], bool] = lambda: True) -> None:
        self._api = api
        self.may_write = may_write

    @classmethod
    async def connect(cls, kubeconfig: str | None = None) -> KubeClient:
        """Connect with the given file, else in a pod with its service account, else with the user's kubeconfig."""
        configuration = client.Configuration()
        if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=configuration)
        else:
            await config.load_kube_config(config_file=kubeconfig, client_configuration=configuration)
        return cls(client.ApiClient(configuration))

    async def close(self) -> None:
        await self._api.close()

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        """Raises NotFound."""
        return normalize(await self._json("GET", resource.path(namespace, name)))

    async def list(
        self, resource: Resource, namespace: str | None = None, selector: str | None = None
    ) -> tuple[list[Object], str]:
        """All objects of a kind, and the resourceVersion to watch from."""
        items: list[Object] = []
        query: dict[str, str] = {"limit": str(PAGE_SIZE)}
        if selector:
            query["labelSelector"] = selector
        while True:
            page = await self._json("GET", resource.path(namespace), query)
            for item in page.get("items") or []:
                item.setdefault("kind", resource.kind)
                item.setdefault("apiVersion", resource.api_version)
                items.append(normalize(item))
            meta = page.get("metadata") or {}
            if not meta.get("continue"):
                return items, str(meta.get("resourceVersion", ""))
            query["continue"] = meta["continue"]

    async def watch(
        self, resource: Resource, namespace: str | None = None, selector: str | None = None
    ) -> AsyncIterator[WatchEvent]:
        """Endless list and watch: a SYNC event after each list, then single changes. An error leads to a new list."""
        delay = 0.5
        while True:
            try:
                items, version = await self.list(resource, namespace, selector)
                yield WatchEvent("SYNC", objects=tuple(items))
                delay = 0.5
                async for event in self._follow(resource, namespace, selector, version):
                    yield event
            except (ClusterError, TimeoutError, aiohttp.ClientError, ValueError, LookupError, TypeError) as error:
                log.warning(None, "watch failed; listing again", resource=resource.plural, error=str(error))
                await asyncio.sleep(delay)
                delay = min(delay * 2, 30.0)

    async def _follow(
        self, resource: Resource, namespace: str | None, selector: str | None, version: str
    ) -> AsyncIterator[WatchEvent]:
        """Consecutive watch streams from `version` on; returns when that version has expired on the server."""
        while True:
            query = {
                "watch": "1",
                "allowWatchBookmarks": "true",
                "resourceVersion": version,
                "timeoutSeconds": str(WATCH_TIMEOUT_SECONDS),
            }
            if selector:
                query["labelSelector"] = selector
            response = await self._send("GET", resource.path(namespace), query, timeout=WATCH_STALL_SECONDS)
            async with contextlib.aclosing(_read_lines(response.response)) as lines:
                async for line in lines:
                    change = json.loads(line)
                    kind, obj = change["type"], normalize(change["object"])
                    if kind == "ERROR":
                        return
                    version = obj["metadata"]["resourceVersion"]
                    if kind != "BOOKMARK":
                        yield WatchEvent(kind, obj)

    async def apply(self, obj: Object, manager: str, *, force: bool = True, subresource: str | None = None) -> Object:
        """Server-side apply of one object; returns the live object. Raises ObjectRejected, Conflict or LeaseLost."""
        resource = BY_KIND[obj["kind"]] if subresource != "scale" else DEPLOYMENTS
        meta = obj["metadata"]
        live = await self._json(
            "PATCH",
            resource.path(meta.get("namespace"), meta["name"], subresource),
            {"fieldManager": manager, "force": "true" if force else "false"},
            obj,
            "application/apply-patch+yaml",
        )
        return normalize(live)

    async def scale(self, namespace: str, deployment: str, replicas: int, manager: str) -> None:
        """Set spec.replicas of a Deployment, and own that field only."""
        scale = {
            "apiVersion": "autoscaling/v1",
            "kind": "Scale",
            "metadata": {"namespace": namespace, "name": deployment},
            "spec": {"replicas": replicas},
        }
        await self.apply(scale, manager, subresource="scale")

    async def create(self, obj: Object) -> Object:
        """Create an object. Raises Conflict if one of that name exists."""
        resource = BY_KIND[obj["kind"]]
        path = resource.path(obj["metadata"].get("namespace"))
        return normalize(await self._json("POST", path, None, obj, "application/json"))

    async def delete(self, resource: Resource, namespace: str | None, name: str, uid: str) -> None:
        """Delete the object with this uid. An object that does not exist is not an error."""
        body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        with contextlib.suppress(NotFound):
            await self._json("DELETE", resource.path(namespace, name), None, body, "application/json")

    async def get_from_pod(self, namespace: str, pod: str, port: int, path: str) -> Object:
        """GET JSON from a pod through the API server; requires `get` on `pods/proxy`.

        Raises NotFound if the pod or the path does not exist, BackendUnavailable if the pod does not answer.
        """
        return await self._json("GET", PODS.path(namespace, f"{pod}:{port}", f"proxy/{path}"))

    async def _json(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        body: Object | None = None,
        content_type: str | None = None,
    ) -> Object:
        if method != "GET":
            if not self.may_write():
                raise LeaseLost("this process no longer holds the lease")
            metrics.OPERATOR_WRITES.labels(method).inc()
        response = await self._send(method, path, query, body, content_type)
        try:
            result: Object = json.loads(await response.read())
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise BackendUnavailable(f"{method} {path}: {error or type(error).__name__}") from error
        return result

    async def _send(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        body: Object | None = None,
        content_type: str | None = None,
        timeout: float = REQUEST_TIMEOUT_SECONDS,
    ) -> Any:
        headers = {"Accept": "application/json"}
        if content_type:
            headers["Content-Type"] = content_type
        method, url, headers, _, _ = await self._api.param_serialize(
            method, path, query_params=list((query or {}).items()), header_params=headers, auth_settings=["BearerToken"]
        )
        try:
            response = await self._api.rest_client.request(
                method, url, headers=headers, body=body, _request_timeout=timeout
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise BackendUnavailable(f"{method} {path}: {error or type(error).__name__}") from error
        if response.status >= 400:
            _raise_for_status(response.status, await response.read(), response.headers.get("Retry-After"))
        return response


async def _read_lines(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    """Newline-terminated documents of a chunked response, of any size."""
    pending = b""
    try:
        async for chunk in response.content.iter_any():
            *complete, pending = (pending + chunk).split(b"\n")
            for line in complete:
                if line:
                    yield line
    finally:
        response.close()


def _raise_for_status(status: int, body: bytes, retry_after: str | None) -> NoReturn:
    try:
        message = json.loads(body)["message"]
    except (ValueError, KeyError, TypeError):
        message = body.decode(errors="replace")[:500]
    if status == 404:
        raise NotFound(message, status)
    if status == 409:
        raise Conflict(message, status)
    if status == 403:
        raise Forbidden(message, status)
    if status in (400, 405, 413, 415, 422) or message.startswith(UNKNOWN_FIELD_MESSAGE):
        raise ObjectRejected(message, status)
    if status == 401 or status == 429 or status >= 500:
        seconds = float(retry_after) if retry_after and retry_after.isdigit() else None
        raise BackendUnavailable(message, status, seconds)
    raise ClusterError(message, status)


class _RenewalLeaseLock(LeaseLock):  # type: ignore[misc]
    """The client's lease lock, which records its last successful renewal to fence every write."""

    renewed_at = float("-inf")

    async def get(self, name: str, namespace: str) -> tuple[bool, Any]:
        """The election record. A lease that cannot be parsed is retried like a failed request."""
        try:
            found: tuple[bool, Any] = await super().get(name, namespace)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, TypeError) as error:
            return False, client.ApiException(status=0, reason=f"{type(error).__name__}: {error}")
        return found

    async def create(self, name: str, namespace: str, election_record: Any) -> bool:
        return await self._record_renewal(self._create(name, namespace, election_record))

    async def _create(self, name: str, namespace: str, record: Any) -> bool:
        """Create the lease; the client's own `create` passes pretty=True, which its argument check rejects (37.0.2)."""
        lease = client.V1Lease(metadata=client.V1ObjectMeta(name=name), spec=self.update_lease(record))
        try:
            await self.api_instance.create_namespaced_lease(namespace, lease)
        except client.ApiException:
            return False
        return True

    async def update(self, name: str, namespace: str, updated_record: Any) -> bool:
        return await self._record_renewal(super().update(name, namespace, updated_record))

    async def _record_renewal(self, write: Awaitable[bool]) -> bool:
        sent_at = time.monotonic()
        is_renewed = await write
        if is_renewed:
            self.renewed_at = sent_at
        return is_renewed


@dataclass(frozen=True)
class LeaseTimes:
    """Whole seconds. A lease expires `duration` after its renewal; its holder stops writing after `renew_deadline`."""

    duration: int = 15
    renew_deadline: int = 10
    retry_period: int = 2


async def lead_while_leased(
    kube: KubeClient, namespace: str, name: str, identity: str, work: Callable[[], Awaitable[None]], times: LeaseTimes
) -> None:
    """Wait for the lease, then run `work` while holding it. Returns when work ends or the lease is lost.

    Writes through `kube` are blocked once another process may hold the lease. A holder that ends by itself releases the
    lease, so that its successor does not wait for the expiry.
    """
    lock = _RenewalLeaseLock(name, namespace, identity, kube._api)
    kube.may_write = lambda: time.monotonic() - lock.renewed_at < times.renew_deadline
    finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    tasks: list[asyncio.Task[Any]] = []

    async def started() -> None:
        tasks.extend(filter(None, [asyncio.current_task()]))
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - carried to the caller below
            finished.set_exception(error)
        else:
            finished.set_result(None)

    async def stopped() -> None:
        if not finished.done():
            finished.set_result(None)

    election = LeaderElection(
        ElectionConfig(lock, times.duration, times.renew_deadline, times.retry_period, started, stopped)
    )
    election_task = asyncio.create_task(election.run())
    tasks.append(election_task)
    try:
        await asyncio.wait((election_task, finished), return_when=asyncio.FIRST_COMPLETED)
        if election_task.done():
            election_task.result()
        if finished.done():
            finished.result()
    finally:
        await _cancel(tasks)
        if kube.may_write():
            await _release(kube, namespace, name, identity)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _release(kube: KubeClient, namespace: str, name: str, identity: str) -> None:
    with contextlib.suppress(ClusterError):
        lease = await kube.get(LEASES, namespace, name)
        if lease["spec"].get("holderIdentity") == identity:
            lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
            await kube._json("PUT", LEASES.path(namespace, name), None, lease, "application/json")
