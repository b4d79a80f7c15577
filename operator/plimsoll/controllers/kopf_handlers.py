"""kopf handlers: they forward changes of InferenceServices and do no other work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kopf

from plimsoll.adapters.normalize import normalize
from plimsoll.api import labels
from plimsoll.controllers.operator_config import configure_kopf

# Called with the current object, or with the last known object and True after its deletion.
OnServiceChange = Callable[[dict[str, Any], bool], None]


def build_registry(on_change: OnServiceChange, *, namespaced: bool) -> kopf.OperatorRegistry:
    """A registry whose handlers call `on_change`."""
    kopf_registry = kopf.OperatorRegistry()

    @kopf.on.startup(registry=kopf_registry)
    async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure_kopf(settings, namespaced=namespaced)

    @kopf.on.login(registry=kopf_registry)
    async def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    @kopf.on.event(labels.GROUP, labels.VERSION, labels.PLURAL, registry=kopf_registry)
    async def on_service_event(event: Any, **_: Any) -> None:
        obj = {"apiVersion": labels.API_VERSION, "kind": labels.KIND, **event["object"]}
        on_change(normalize(obj), event["type"] == "DELETED")

    return kopf_registry


async def watch_services(on_change: OnServiceChange, namespaces: tuple[str, ...]) -> None:
    """Forward changes of services until cancelled, or until SIGTERM, which kopf handles."""
    await kopf.operator(
        registry=build_registry(on_change, namespaced=bool(namespaces)),
        clusterwide=not namespaces,
        namespaces=namespaces,
        standalone=True,
    )
