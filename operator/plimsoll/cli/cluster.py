"""Queries of the CLI to a cluster, with the permissions of the user.

Errors name the cause and the next action, such as a missing permission, a similar name or the missing leader.
"""

from __future__ import annotations

import asyncio
import difflib
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from plimsoll.adapters.kube_client import INFERENCESERVICES, LEASES, KubeClient
from plimsoll.cli.json_access import get_text
from plimsoll.cli.kubeconfig import ensure_context
from plimsoll.core.errors import BackendUnavailable, ClusterError, Forbidden, NotFound, PlimsollError

KubeObject = dict[str, Any]

LEADER_LEASE: Final = "plimsoll-operator"
OPERATOR_PORT: Final = 8081
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_UNKNOWN_PATH: Final = "404: Not Found"  # body of an HTTP server without this path
_MAX_SUGGESTIONS: Final = 3
MAX_DOCUMENTS: Final = 100
_PARALLEL_READS: Final = 8


class ClusterQueryError(PlimsollError):
    """A query failed; the message has the cause and the next action."""


@asynccontextmanager
async def connect(kubeconfig: str | None) -> AsyncIterator[KubeClient]:
    """Connect with the user's kubeconfig. Raises ClusterQueryError and KubeconfigError."""
    ensure_context(kubeconfig)
    try:
        kube = await KubeClient.connect(kubeconfig)
    except Exception as error:  # the kubeconfig reader and its credential plugins raise any type
        raise ClusterQueryError(f"cannot use the kubeconfig: {error}") from error
    try:
        yield kube
    finally:
        await kube.close()


async def reach(kube: KubeClient) -> None:
    """Raises ClusterQueryError if the API server does not answer or does not know the user."""
    try:
        await kube.discover("v1", "Pod")
    except Forbidden:  # it answers, and other questions may be allowed
        return
    except ClusterError as error:
        raise ClusterQueryError(f"cannot use the cluster: {error}") from error


async def list_services(kube: KubeClient, namespace: str | None) -> list[KubeObject]:
    """Return the services of a namespace, or of all. Raises ClusterQueryError."""
    try:
        return await _list(kube, namespace)
    except Forbidden as error:
        raise _missing_permission(error, "list", "inferenceservices.plimsoll.dev", namespace) from error


async def get_service(kube: KubeClient, namespace: str, name: str) -> KubeObject:
    """Return one service. Raises ClusterQueryError, with similar names if it does not exist."""
    _check_name("namespace", namespace)
    _check_name("service", name)
    try:
        return await kube.get(INFERENCESERVICES, namespace, name)
    except Forbidden as error:
        raise _missing_permission(error, "get", "inferenceservices.plimsoll.dev", namespace) from error
    except NotFound as error:
        near = await _suggest_names(kube, namespace, name)
        raise ClusterQueryError(f"no InferenceService {name} in namespace {namespace}; {near}") from error


async def get_explanation(kube: KubeClient, namespace: str, name: str, operator_namespace: str) -> Any:
    """Return the explanation of one service from the leading operator; any JSON. Raises ClusterQueryError."""
    results = await asyncio.gather(
        get_service(kube, namespace, name), find_leader(kube, operator_namespace), return_exceptions=True
    )
    for error in results:
        if isinstance(error, BaseException):
            raise error
    pod = str(results[1])
    try:
        return await kube.get_from_pod(operator_namespace, pod, OPERATOR_PORT, f"explain/{namespace}/{name}")
    except Forbidden as error:
        raise _missing_permission(error, "get", "pods/proxy", operator_namespace) from error
    except ClusterError as error:
        raise ClusterQueryError(f"operator {operator_namespace}/{pod}: {error}{_hint(error, pod)}") from error


async def get_documents(
    kube: KubeClient, leader: str, operator_namespace: str, keys: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], Any]:
    """Return the leading operator's documents of several services by key, without those that it does not have.

    At most MAX_DOCUMENTS are read, some at a time. Raises ClusterQueryError for a missing permission.
    """
    turns = asyncio.Semaphore(_PARALLEL_READS)

    async def read(key: tuple[str, str]) -> Any:
        async with turns:
            with suppress(NotFound, BackendUnavailable):
                return await kube.get_from_pod(operator_namespace, leader, OPERATOR_PORT, f"explain/{'/'.join(key)}")

    chosen = keys[:MAX_DOCUMENTS]
    try:
        found = await asyncio.gather(*map(read, chosen))
    except Forbidden as error:
        raise _missing_permission(error, "get", "pods/proxy", operator_namespace) from error
    return {key: document for key, document in zip(chosen, found, strict=True) if document is not None}


async def find_leader(kube: KubeClient, namespace: str) -> str:
    """Return the name of the leading operator pod. Raises ClusterQueryError."""
    _check_name("namespace", namespace)
    lease_name = f"lease {LEADER_LEASE} in namespace {namespace}"
    try:
        lease = await kube.get(LEASES, namespace, LEADER_LEASE)
    except NotFound as error:
        raise ClusterQueryError(
            f"no {lease_name}: set --operator-namespace to the namespace of the operator"
        ) from error
    except Forbidden as error:
        raise _missing_permission(error, "get", "leases.coordination.k8s.io", namespace) from error
    holder = get_text(lease, "spec", "holderIdentity")
    if holder is None:
        raise ClusterQueryError(
            f"the {lease_name} has no holder, so no operator leads; run kubectl -n {namespace} get pods"
        )
    _check_name("leader", holder)
    return holder


def _hint(error: ClusterError, pod: str) -> str:
    message = str(error)
    if isinstance(error, NotFound) and message.startswith(_UNKNOWN_PATH):
        return "; its version is older than this program and does not support explain"
    if isinstance(error, NotFound) and message.startswith("pods "):
        return "; the leading pod no longer exists: try again in a few seconds"
    if isinstance(error, NotFound):
        return "; run plimsoll status to see why the service is not scaled"
    if isinstance(error, BackendUnavailable) and "connection refused" in message:
        return f"; the operator in {pod} does not run at the moment: see its pod's status and its previous log"
    if isinstance(error, BackendUnavailable) and "trying to reach" in message:
        return f"; check that no NetworkPolicy blocks the API server from port {OPERATOR_PORT} of {pod}"
    return ""


def _missing_permission(error: Forbidden, verb: str, resource: str, namespace: str | None) -> ClusterQueryError:
    scope = f"in namespace {namespace}" if namespace else "in all namespaces"
    return ClusterQueryError(f"forbidden: needs permission to {verb} {resource} {scope} ({error})")


async def _list(kube: KubeClient, namespace: str | None) -> list[KubeObject]:
    if namespace is not None:
        _check_name("namespace", namespace)
    try:
        return (await kube.list(INFERENCESERVICES, namespace))[0]
    except NotFound as error:
        raise ClusterQueryError("the cluster has no InferenceService CRD: Plimsoll is not installed") from error


async def _suggest_names(kube: KubeClient, namespace: str, name: str) -> str:
    """Return similar names as the end of a sentence."""
    for search_namespace in (None, namespace):  # many users may not list all namespaces
        with suppress(Forbidden):
            services = await _list(kube, search_namespace)
            keys = {(get_text(one, "metadata", "namespace"), get_text(one, "metadata", "name")) for one in services}
            return _closest_names(keys, namespace, name)
    return "no permission to list similar names"


def _closest_names(keys: set[tuple[str | None, str | None]], namespace: str, name: str) -> str:
    names_here = sorted(short for where, short in keys if where == namespace and short)
    elsewhere = sorted(f"{where}/{short}" for where, short in keys if short == name)
    suggestions = elsewhere or difflib.get_close_matches(name, names_here, _MAX_SUGGESTIONS, 0.5) or names_here
    return f"did you mean {', '.join(suggestions[:_MAX_SUGGESTIONS])}?" if suggestions else "the namespace has none"


def _check_name(kind: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ClusterQueryError(f"{name!r} is not a valid {kind} name")
