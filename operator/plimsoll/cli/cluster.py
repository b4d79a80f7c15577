"""What the questions ask of a cluster, with the user's own rights, and what to do when it does not answer.

An error names what is missing and the next thing to try: a right, a name near the one typed, a leader.
"""

from __future__ import annotations

import asyncio
import difflib
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from plimsoll.adapters.kube import INFERENCESERVICES, LEASES, Kube
from plimsoll.cli.reading import text
from plimsoll.core.errors import ClusterError, Forbidden, NotFound, PlimsollError, Unavailable

Object = dict[str, Any]

LEASE: Final = "plimsoll-operator"
PORT: Final = 8081
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_NO_ROUTE: Final = "404: Not Found"  # of an HTTP server that does not know the path; ours has more to say
_MOST_NEAR: Final = 3


class Unanswered(PlimsollError):
    """The question cannot be answered; the message says why, and what to try."""


@asynccontextmanager
async def connected(kubeconfig: str | None) -> AsyncIterator[Kube]:
    """A connection with the user's rights. Raises Unanswered."""
    try:
        kube = await Kube.connect(kubeconfig)
    except Exception as error:  # the client's reader of kubeconfigs, and the plugins that it runs
        raise Unanswered(f"the kubeconfig cannot be used: {error}") from error
    try:
        yield kube
    finally:
        await kube.close()


async def services(kube: Kube, namespace: str | None) -> list[Object]:
    """Every service of a namespace, or of all. Raises Unanswered."""
    try:
        return await _list(kube, namespace)
    except Forbidden as error:
        raise _right_missing(error, "list", "inferenceservices.plimsoll.dev", namespace) from error


async def service(kube: Kube, namespace: str, name: str) -> Object:
    """One service. Raises Unanswered, with names near it if there is none."""
    _check("namespace", namespace)
    _check("service", name)
    try:
        return await kube.get(INFERENCESERVICES, namespace, name)
    except Forbidden as error:
        raise _right_missing(error, "get", "inferenceservices.plimsoll.dev", namespace) from error
    except NotFound as error:
        near = await _near(kube, namespace, name)
        raise Unanswered(f"no InferenceService {name} in namespace {namespace}; {near}") from error


async def explanation(kube: Kube, namespace: str, name: str, operator_namespace: str) -> Any:
    """The document of one service, from the operator that leads; any JSON. Raises Unanswered."""
    found = await asyncio.gather(
        service(kube, namespace, name), leader(kube, operator_namespace), return_exceptions=True
    )
    for error in found:
        if isinstance(error, BaseException):
            raise error
    pod = str(found[1])
    try:
        return await kube.ask_pod(operator_namespace, pod, PORT, f"explain/{namespace}/{name}")
    except Forbidden as error:
        raise _right_missing(error, "get", "pods/proxy", operator_namespace) from error
    except ClusterError as error:
        raise Unanswered(f"operator {operator_namespace}/{pod}: {error}{_advice(error, pod)}") from error


async def leader(kube: Kube, namespace: str) -> str:
    """Name of the operator's pod that leads. Raises Unanswered."""
    _check("namespace", namespace)
    where = f"lease {LEASE} in namespace {namespace}"
    try:
        lease = await kube.get(LEASES, namespace, LEASE)
    except NotFound as error:
        raise Unanswered(f"no {where}: --operator-namespace says where the operator runs") from error
    except Forbidden as error:
        raise _right_missing(error, "get", "leases.coordination.k8s.io", namespace) from error
    holder = text(lease, "spec", "holderIdentity")
    if holder is None:
        raise Unanswered(f"nobody holds the {where}: no operator leads; see kubectl -n {namespace} get pods")
    _check("leader", holder)
    return holder


def _advice(error: ClusterError, pod: str) -> str:
    message = str(error)
    if isinstance(error, NotFound) and message.startswith(_NO_ROUTE):
        return "; it is older than this program and cannot explain"
    if isinstance(error, NotFound) and message.startswith("pods "):
        return "; the pod that led is gone, another one leads within seconds: try again"
    if isinstance(error, NotFound):
        return "; plimsoll status says what keeps it from being scaled"
    if isinstance(error, Unavailable) and "trying to reach" in message:
        return f"; does a NetworkPolicy keep the API server from port {PORT} of {pod}?"
    return ""


def _right_missing(error: Forbidden, verb: str, resource: str, namespace: str | None) -> Unanswered:
    where = f"in namespace {namespace}" if namespace else "in all namespaces"
    return Unanswered(f"forbidden: this takes the right to {verb} {resource} {where} ({error})")


async def _list(kube: Kube, namespace: str | None) -> list[Object]:
    if namespace is not None:
        _check("namespace", namespace)
    try:
        return (await kube.list(INFERENCESERVICES, namespace))[0]
    except NotFound as error:
        raise Unanswered("this cluster knows no InferenceServices: Plimsoll is not installed in it") from error


async def _near(kube: Kube, namespace: str, name: str) -> str:
    """What the typed name may have meant, in words."""
    for where in (None, namespace):  # few people may list all namespaces
        with suppress(Forbidden):
            found = await _list(kube, where)
            keys = {(text(one, "metadata", "namespace"), text(one, "metadata", "name")) for one in found}
            return _nearest(keys, namespace, name)
    return "and names near it may not be listed"


def _nearest(keys: set[tuple[str | None, str | None]], namespace: str, name: str) -> str:
    own = sorted(short for where, short in keys if where == namespace and short)
    elsewhere = sorted(f"{where}/{short}" for where, short in keys if short == name)
    near = elsewhere or difflib.get_close_matches(name, own, _MOST_NEAR, 0.5) or own
    return f"there is {', '.join(near[:_MOST_NEAR])}" if near else "there is none"


def _check(what: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise Unanswered(f"{name!r} is not the name of a {what}")
