"""kopf's side of the operator: it tells of services as they change. Handlers do no work of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kopf

from plimsoll.adapters.normalize import normalize
from plimsoll.api import labels
from plimsoll.controllers.settings import tune

# Told of a service as it now is, or of its last state and that it is gone.
Changed = Callable[[dict[str, Any], bool], None]


def registry(changed: Changed, *, namespaced: bool) -> kopf.OperatorRegistry:
    """The handlers, bound to who wants to know."""
    made = kopf.OperatorRegistry()

    @kopf.on.startup(registry=made)
    async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        tune(settings, namespaced=namespaced)

    @kopf.on.login(registry=made)
    async def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    @kopf.on.event(labels.GROUP, labels.VERSION, labels.PLURAL, registry=made)
    async def service(event: Any, **_: Any) -> None:
        obj = {"apiVersion": labels.API_VERSION, "kind": labels.KIND, **event["object"]}
        changed(normalize(obj), event["type"] == "DELETED")

    return made


async def watch_services(changed: Changed, namespaces: tuple[str, ...]) -> None:
    """Tell of services as they change until cancelled, or until SIGTERM, which kopf takes over."""
    await kopf.operator(
        registry=registry(changed, namespaced=bool(namespaces)),
        clusterwide=not namespaces,
        namespaces=namespaces,
        standalone=True,
    )
