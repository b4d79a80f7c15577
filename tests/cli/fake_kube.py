"""An API server that answers as told, at the one place where all calls to it pass."""

from __future__ import annotations

import copy
from typing import Any

from plimsoll.adapters.kube_client import KubeClient
from plimsoll.core.errors import NotFound

Object = dict[str, Any]

SERVICES = "/apis/plimsoll.dev/v1alpha1/inferenceservices"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/plimsoll-system/leases/plimsoll-operator"


def services(namespace: str, name: str | None = None) -> str:
    """Path of a namespace's services, or of one."""
    path = f"/apis/plimsoll.dev/v1alpha1/namespaces/{namespace}/inferenceservices"
    return path if name is None else f"{path}/{name}"


def explanation(pod: str, namespace: str, name: str) -> str:
    """Path at which an operator's pod explains a service."""
    return f"/api/v1/namespaces/plimsoll-system/pods/{pod}:8081/proxy/explain/{namespace}/{name}"


class FakeKube(KubeClient):
    """answers: by path, an object or the error to raise; any other path is not found."""

    def __init__(self, answers: dict[str, Any]) -> None:
        super().__init__(None)
        self.answers = answers

    async def _json(self, method: str, path: str, *_: Any) -> Any:
        assert method == "GET", "questions change nothing"
        found = self.answers.get(path, NotFound(f'"{path}" not found', 404))
        if isinstance(found, Exception):
            raise found
        return copy.deepcopy(found)

    async def _page(self, path: str, query: dict[str, str], *, whole: bool) -> Any:
        return await self._json("GET", path, query)
