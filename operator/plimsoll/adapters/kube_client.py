"""Client of the API server. Only this and `lease` import the kubernetes package.

Objects are plain dicts as the server sends them, so that builders, caches and tests need no client classes. Writes are
server-side applies with a named field manager: they leave foreign fields alone, and a repeated write changes nothing.
`watch` never ends: it lists, yields `SYNC`, follows the stream, and lists again when the stream stalls or expires.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

from plimsoll.adapters.api_status import raise_for_status
from plimsoll.adapters.normalize import normalize, value_at
from plimsoll.adapters.object_size import bounded
from plimsoll.adapters.object_trim import trimmed
from plimsoll.adapters.response_body import read_body, read_lines
from plimsoll.adapters.shared_parts import with_shared_parts
from plimsoll.api import labels
from plimsoll.core.errors import (
    BackendUnavailable,
    ClusterError,
    Forbidden,
    LeaseLost,
    NotFound,
    cause_of,
    failure_reason,
)
from plimsoll.telemetry import operator_metrics
from plimsoll.telemetry.service_log import ServiceLog

if TYPE_CHECKING:
    from kubernetes.aio import client

Object = dict[str, Any]

log = ServiceLog(__name__)

PAGE_SIZE = 100  # objects per list call, fewer where they are large: a page as Python objects has ten times its bytes
SLICE_SIZE = 10  # objects of a page that are read before other work of the event loop
MAX_PAGE_BYTES = 4 << 20  # of a page with more than one object
WATCH_TIMEOUT_SECONDS = 290  # the server ends the stream, so that a dead stream is not mistaken for a quiet one
WATCH_STALL_SECONDS = 320
SECRET_SILENCE_SECONDS = 90.0  # of a dead watch of Secrets; a live one has a bookmark each minute
MIN_STREAM_SECONDS = 5.0  # a shorter stream counts as a failure of the server
REQUEST_TIMEOUT_SECONDS = 15
MIN_WATCH_PAUSE_SECONDS = 0.5  # after a failed list or watch; doubles with each further one
MAX_WATCH_PAUSE_SECONDS = 8.0  # so that the caches are right soon after an outage
STEADY_STREAM_SECONDS = 20.0  # a stream of this length ends a series of failures
# What a watch survives: a server that fails, and answers that cannot be read, nested too deep among them.
UNREADABLE = (ClusterError, TimeoutError, aiohttp.ClientError, ValueError, LookupError, TypeError, RecursionError)


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
INFERENCESERVICECHECKPOINTS = Resource(labels.GROUP, labels.VERSION, labels.CHECKPOINT_PLURAL, labels.CHECKPOINT_KIND)
INFERENCESERVICEADMISSIONS = Resource(labels.GROUP, labels.VERSION, labels.ADMISSION_PLURAL, labels.ADMISSION_KIND)
PODS = Resource("", "v1", "pods", "Pod")
SERVICES = Resource("", "v1", "services", "Service")
ENDPOINTSLICES = Resource("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice")
SERVICEACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
NAMESPACE_TERMINATING = "because it is being terminated"  # the API server's reason to create nothing in a namespace
EVENTS = Resource("", "v1", "events", "Event")
SECRETS = Resource("", "v1", "secrets", "Secret")
CONFIGMAPS = Resource("", "v1", "configmaps", "ConfigMap")
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
LEADERWORKERSETS = Resource(labels.SET_GROUP, labels.SET_VERSION, labels.SET_PLURAL, labels.SET_KIND)
CONTROLLERREVISIONS = Resource("apps", "v1", "controllerrevisions", "ControllerRevision")
PODDISRUPTIONBUDGETS = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
NETWORKPOLICIES = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
HORIZONTALPODAUTOSCALERS = Resource("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler")
INFERENCEPOOLS = Resource(labels.POOL_GROUP, labels.POOL_VERSION, labels.POOL_PLURAL, labels.POOL_KIND)
INFERENCEOBJECTIVES = Resource(
    labels.OBJECTIVE_GROUP, labels.OBJECTIVE_VERSION, labels.OBJECTIVE_PLURAL, labels.OBJECTIVE_KIND
)
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")

BY_KIND = {
    r.kind: r
    for r in (
        INFERENCESERVICES,
        INFERENCESERVICEADMISSIONS,
        INFERENCESERVICECHECKPOINTS,
        PODS,
        SERVICES,
        SERVICEACCOUNTS,
        EVENTS,
        SECRETS,
        CONFIGMAPS,
        DEPLOYMENTS,
        LEADERWORKERSETS,
        CONTROLLERREVISIONS,
        PODDISRUPTIONBUDGETS,
        NETWORKPOLICIES,
        INFERENCEPOOLS,
        LEASES,
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
        from kubernetes.aio import client, config  # half a second, which programs without a cluster need not wait

        configuration = client.Configuration(connection_pool_maxsize=0)  # no bound: each watch holds a connection
        if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=configuration)
        else:
            await config.load_kube_config(config_file=kubeconfig, client_configuration=configuration)
        return cls(client.ApiClient(configuration))

    async def close(self) -> None:
        await self._api.close()

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Object:
        """Raises NotFound."""
        return received(await self._json("GET", resource.path(namespace, name)))

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        selector: str | None = None,
        *,
        fields: str = "",
        share: bool = False,
    ) -> tuple[list[Object], str]:
        """All objects of a kind, and the resourceVersion to watch from. share: objects of a tier share equal parts."""
        items, last, limit = list[Object](), dict[str | None, Object](), PAGE_SIZE  # last: by tier
        query = {name: text for name, text in (("labelSelector", selector), ("fieldSelector", fields)) if text}
        while True:
            page = await self._page(resource.path(namespace), query | {"limit": str(limit)}, whole=limit == 1)
            if page is None:
                limit = max(1, limit // 4)
                continue
            for number, item in enumerate(page.get("items") or [], 1):
                if number % SLICE_SIZE == 0:
                    await asyncio.sleep(0)
                item.setdefault("kind", resource.kind)
                item.setdefault("apiVersion", resource.api_version)
                found = received(item)
                if share:
                    role = value_at(found, "metadata", "labels", labels.ROLE)
                    found = last[role] = with_shared_parts(found, last.get(role))
                items.append(found)
            meta = page.get("metadata") or {}
            if not meta.get("continue"):
                return items, str(meta.get("resourceVersion", ""))
            query["continue"] = meta["continue"]

    async def watch(
        self, resource: Resource, namespace: str | None = None, selector: str | None = None
    ) -> AsyncIterator[WatchEvent]:
        """List and watch without end: a SYNC event after each list, then single changes. An error leads to a new list.

        A server that fails, or that ends each stream at once, is queried less and less often.
        """
        pause_s = MIN_WATCH_PAUSE_SECONDS
        while True:
            began_s, requested_pause_s = time.monotonic(), 0.0
            try:
                items, version = await self.list(resource, namespace, selector, share=True)
                yield WatchEvent("SYNC", objects=tuple(items))
                async for event in self._follow(resource, namespace, selector, version):
                    yield event
            except UNREADABLE as error:
                operator_metrics.OPERATOR_WATCH_FAILURES.labels(resource.plural).inc()
                requested_pause_s = getattr(error, "retry_after_seconds", None) or 0.0
                message = str(error) or type(error).__name__
                log.warning(None, "watch failed; listing again", resource=resource.plural, error=message)
            if time.monotonic() - began_s > STEADY_STREAM_SECONDS:
                pause_s = MIN_WATCH_PAUSE_SECONDS
            await asyncio.sleep(jittered(max(pause_s, min(requested_pause_s, MAX_WATCH_PAUSE_SECONDS))))
            pause_s = min(pause_s * 2, MAX_WATCH_PAUSE_SECONDS)

    async def _follow(
        self, resource: Resource, namespace: str | None, selector: str | None, version: str
    ) -> AsyncIterator[WatchEvent]:
        """Consecutive watch streams from `version` on; returns when that version has expired on the server.

        Returns also when a stream ends much too early, so that the caller pauses.
        """
        while True:
            began_s = time.monotonic()
            query = {
                "watch": "1",
                "allowWatchBookmarks": "true",
                "resourceVersion": version,
                "timeoutSeconds": str(WATCH_TIMEOUT_SECONDS),
            }
            if selector:
                query["labelSelector"] = selector
            response = await self._send("GET", resource.path(namespace), query, timeout=watch_timeout(resource))
            async with contextlib.aclosing(read_lines(response.response)) as lines:
                async for line in lines:
                    change = json.loads(line)
                    kind, obj = change["type"], received(change["object"])
                    if kind == "ERROR":
                        if obj.get("code") == 410:  # Gone: list again
                            return
                        raise BackendUnavailable(f"the watch ended with an error: {obj.get('message')}")
                    version = obj["metadata"]["resourceVersion"]
                    if kind != "BOOKMARK":
                        yield WatchEvent(kind, obj)
            if time.monotonic() - began_s < MIN_STREAM_SECONDS:
                return

    async def apply(self, obj: Object, manager: str, *, force: bool = True, subresource: str | None = None) -> Object:
        """Server-side apply of one object; returns the live object. Raises ObjectRejected, Conflict or LeaseLost."""
        meta = obj["metadata"]
        path = BY_KIND[obj["kind"]].path(meta.get("namespace"), meta["name"], subresource)
        return received(await self._apply(path, obj, manager, force=force))

    async def scale(self, resource: Resource, namespace: str, name: str, replicas: int, manager: str) -> None:
        """Set spec.replicas of an object through its `scale` subresource, and own that field only.

        The API server cannot apply the Scale of a custom resource, so that is patched.
        """
        path = resource.path(namespace, name, "scale")
        if resource.group != "apps":
            patch = {"spec": {"replicas": replicas}}
            await self._json("PATCH", path, {"fieldManager": manager}, patch, "application/merge-patch+json")
            return
        scale = {
            "apiVersion": "autoscaling/v1",
            "kind": "Scale",
            "metadata": {"namespace": namespace, "name": name},
            "spec": {"replicas": replicas},
        }
        await self._apply(path, scale, manager, force=True)

    async def get_scale(self, resource: Resource, namespace: str, name: str) -> Object:
        """The Scale of an object. Raises NotFound."""
        return received(await self._json("GET", resource.path(namespace, name, "scale")))

    async def discover(self, api_version: str, kind: str) -> tuple[Resource, bool] | None:
        """The resource of a kind, and whether it has a `scale` subresource; None for a kind that is not served."""
        group, _, version = api_version.rpartition("/")
        try:
            listed = await self._json("GET", f"/apis/{group}/{version}" if group else f"/api/{version}")
        except NotFound:
            return None
        served = {str(one.get("name") or ""): one for one in listed.get("resources") or ()}
        for name, one in served.items():
            if name and one.get("kind") == kind and "/" not in name:
                return Resource(group, version, name, kind, bool(one.get("namespaced"))), f"{name}/scale" in served
        return None

    async def _apply(self, path: str, obj: Object, manager: str, *, force: bool) -> Object:
        options = {"fieldManager": manager, "force": "true" if force else "false"}
        return await self._json("PATCH", path, options, obj, "application/apply-patch+yaml")

    async def create(self, obj: Object) -> Object:
        """Create an object. Raises Conflict if one of that name exists."""
        resource = BY_KIND[obj["kind"]]
        path = resource.path(obj["metadata"].get("namespace"))
        return received(await self._json("POST", path, None, obj, "application/json"))

    async def is_terminating(self, namespace: str) -> bool:
        """Whether the namespace is being deleted, so that nothing can be created in it.

        It asks for an Event without storing it, because an operator of some namespaces may not read Namespaces.
        """
        event: Object = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": "plimsoll-namespace-check", "namespace": namespace},
            "involvedObject": {"namespace": namespace},
        }
        try:
            await self._json("POST", EVENTS.path(namespace), {"dryRun": "All"}, event, "application/json")
        except Forbidden as error:
            return NAMESPACE_TERMINATING in str(error)
        except LeaseLost:
            raise
        except ClusterError:  # no answer to the question: a status is not held up by it
            return False
        return False

    async def replace(self, resource: Resource, namespace: str | None, name: str, obj: Object) -> None:
        """Replace a whole object. Raises Conflict if it has changed since it was read."""
        await self._json("PUT", resource.path(namespace, name), None, obj, "application/json")

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

    async def request_pod(
        self,
        namespace: str,
        pod: str,
        port: int,
        path: str,
        document: Object | None = None,
        timeout: float = REQUEST_TIMEOUT_SECONDS,
        max_bytes: int = MAX_PAGE_BYTES,
    ) -> bytes:
        """The body of a pod's answer to a GET, or to a POST of a document, through the API server.

        Requires `get` or `create` on `pods/proxy`. Raises as `get_from_pod`, also for more than `max_bytes`.
        """
        method, content_type = ("GET", None) if document is None else ("POST", "application/json")
        path = PODS.path(namespace, f"{pod}:{port}", f"proxy/{path}")
        response = (await self._send(method, path, None, document, content_type, timeout)).response
        with _body_of(method, path):
            body = await read_body(response, max_bytes)
        if body is None:
            raise BackendUnavailable(f"{method} {path}: answered more than {max_bytes} bytes")
        return body

    async def _page(self, path: str, query: dict[str, str], *, whole: bool) -> Object | None:
        """One page of a list; None if it has more than MAX_PAGE_BYTES, unless it must be read as a whole."""
        response = (await self._send("GET", path, query)).response
        with _body_of("GET", path):
            body = await read_body(response, None if whole else MAX_PAGE_BYTES)
            page: Object | None = None if body is None else json.loads(body)
        return page

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
            operator_metrics.OPERATOR_WRITES.labels(method).inc()
        try:
            response = await self._send(method, path, query, body, content_type)
        except ClusterError as error:
            if method != "GET":
                operator_metrics.OPERATOR_WRITE_FAILURES.labels(method, failure_reason(error)).inc()
            raise
        with _body_of(method, path):
            result: Object = json.loads(await response.read())
        return result

    async def _send(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        body: Object | None = None,
        content_type: str | None = None,
        timeout: float | aiohttp.ClientTimeout = REQUEST_TIMEOUT_SECONDS,
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
            raise BackendUnavailable(f"{method} {path}: {cause_of(error)}") from error
        if response.status >= 400:
            with _body_of(method, path, response.status):
                answer = await read_body(response.response, MAX_PAGE_BYTES)  # a pod's, perhaps
            raise_for_status(response.status, answer or b"", response.headers.get("Retry-After"))
        return response


@contextlib.contextmanager
def _body_of(method: str, path: str, status: int = 0) -> Iterator[None]:
    """Raise BackendUnavailable if the body of a response cannot be read or parsed. status: of a failed response."""
    try:
        yield
    except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as error:
        raise BackendUnavailable(f"{method} {path}: {cause_of(error)}", status) from error


def watch_timeout(resource: Resource) -> aiohttp.ClientTimeout:
    """Returns the limits of one watch stream: on its length, and on its silence where a missed event is a danger."""
    silence_s = SECRET_SILENCE_SECONDS if resource == SECRETS else None
    return aiohttp.ClientTimeout(total=WATCH_STALL_SECONDS, sock_read=silence_s)


def received(obj: Object) -> Object:
    """Return an object as the process stores it: trimmed, without nulls and within the size limits."""
    is_slice = obj.get("kind") == ENDPOINTSLICES.kind  # a large one is within them once it is trimmed
    return normalize(bounded(trimmed(obj)) if is_slice else trimmed(bounded(obj)))


def jittered(seconds: float) -> float:
    """Return a pause of about `seconds`, so that many clients do not retry at the same moment."""
    return seconds * random.uniform(0.8, 1.2)
