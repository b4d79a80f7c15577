"""The namespaces that have or had a service, whose `NAMESPACE/...` names no other namespace may claim.

Problem: a service that is deleted and created again does not exist in between, and the operator may restart meanwhile.
Idea: a ConfigMap of the release lists each namespace with the time of its first service. The chart creates it, and the
operator adds to it. An entry stays when the services are gone.
"""

from __future__ import annotations

from datetime import UTC, datetime

from plimsoll.adapters.kube_client import CONFIGMAPS, KubeClient
from plimsoll.api import labels
from plimsoll.core.errors import Forbidden, NotFound, ObjectRejected
from plimsoll.telemetry.service_log import ServiceLog

log = ServiceLog(__name__)

CONFIGMAP_NAME = "plimsoll-service-namespaces"


class ServiceNamespaces:
    """The list, read once and then only extended. `namespace` is the one of the ConfigMap."""

    def __init__(self, kube: KubeClient, namespace: str) -> None:
        self._kube = kube
        self._namespace = namespace
        self._since: dict[str, str] = {}

    @property
    def known(self) -> frozenset[str]:
        return frozenset(self._since)

    async def load(self) -> None:
        """Read the list. Without it, namespaces count from their next service on. Raises BackendUnavailable."""
        try:
            found = await self._kube.get(CONFIGMAPS, self._namespace, CONFIGMAP_NAME)
        except (NotFound, Forbidden) as error:
            log.warning(None, "cannot read the list of namespaces with services", error=str(error))
            return
        data = found.get("data")
        self._since |= {str(name): str(since) for name, since in (data if isinstance(data, dict) else {}).items()}

    async def add(self, namespace: str) -> None:
        """Add a namespace. Raises BackendUnavailable if it is worth a retry."""
        if namespace in self._since:
            return
        extended = {**self._since, namespace: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
        body = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"namespace": self._namespace, "name": CONFIGMAP_NAME},
            "data": extended,
        }
        try:
            await self._kube.apply(body, labels.FIELD_MANAGER)
        except (NotFound, Forbidden, ObjectRejected) as error:
            log.warning(None, "cannot record a namespace with services", namespace=namespace, error=str(error))
        self._since |= extended
