"""kopf's side of the operator: the services as they change, told to our store. Handlers do no work of their own."""

from __future__ import annotations

from typing import Any

import kopf

from plimsoll.api import labels
from plimsoll.controllers.settings import tune
from plimsoll.controllers.store import Store


def registry(store: Store, *, namespaced: bool) -> kopf.OperatorRegistry:
    """The handlers, bound to one store."""
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
        if event["type"] == "DELETED":
            store.drop(obj)
        else:
            store.put(obj)

    return made


async def watch_services(store: Store, namespaces: tuple[str, ...]) -> None:
    """Feed the store with services until cancelled, or until SIGTERM, which kopf takes over."""
    await kopf.operator(
        registry=registry(store, namespaced=bool(namespaces)),
        clusterwide=not namespaces,
        namespaces=namespaces,
        standalone=True,
    )
