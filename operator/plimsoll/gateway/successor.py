"""Whether another gateway pod can take over from this one, which is to stop.

Problem: a deleted pod ends long before its replacement is ready. With one replica no gateway is left meanwhile.

Idea: a pod that is being deleted still gets connections while no other endpoint of the Service is ready (KEP-1669), if
it is ready itself. So it serves on until another pod of the Deployment is ready. If none exists, as after an
uninstallation, none will come: the wait is then short. It is also short if the API server does not answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any

from plimsoll.adapters.kube_client import PODS
from plimsoll.gateway.settings import PickerSettings
from plimsoll.gateway.watch_cache import WatchSource

log = logging.getLogger(__name__)

Object = Mapping[str, Any]

POLL_SECONDS = 0.2


class SuccessorState(StrEnum):
    """The other gateway pods that are not being deleted."""

    UNKNOWN = "the API server has not listed the gateway pods"
    ABSENT = "no other gateway pod exists"
    STARTING = "no other gateway pod is ready yet"
    READY = "another gateway pod is ready"


def successor_state(pods: Iterable[Object] | None, own_name: str) -> SuccessorState:
    """Returns the state of the pods of a gateway's Deployment, None if they are unknown, without the pod `own_name`."""
    if pods is None:
        return SuccessorState.UNKNOWN
    others = _lasting_others(pods, own_name)
    if any(_is_ready(pod) for pod in others):
        return SuccessorState.READY
    return SuccessorState.STARTING if others else SuccessorState.ABSENT


def _lasting_others(pods: Iterable[Object], own_name: str) -> list[Object]:
    return [pod for pod in pods if pod["metadata"]["name"] != own_name and _is_lasting(pod)]


def _is_lasting(pod: Object) -> bool:
    phase = pod.get("status", {}).get("phase")
    return not pod["metadata"].get("deletionTimestamp") and phase not in ("Succeeded", "Failed")


def _is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions") or ()
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)


class GatewayPods:
    """The pods of this gateway's Deployment, None until the first list."""

    def __init__(self, settings: PickerSettings) -> None:
        self._settings = settings
        self._by_name: dict[str, Object] | None = None

    @property
    def state(self) -> SuccessorState:
        return successor_state(None if self._by_name is None else self._by_name.values(), self._settings.pod)

    @property
    def ready_count(self) -> int:
        """How many pods share the load: this one, and the others that are ready and stay."""
        return 1 + len(self.ready.keys() - {self._settings.pod})

    @property
    def ready(self) -> dict[str, str]:
        """The addresses of the pods that are ready and stay, by name. "" for one without an address."""
        pods = (self._by_name or {}).items()
        return {
            name: pod.get("status", {}).get("podIP") or "" for name, pod in pods if _is_lasting(pod) and _is_ready(pod)
        }

    @property
    def names(self) -> frozenset[str] | None:
        """The names of all pods, None before the first list."""
        return None if self._by_name is None else frozenset(self._by_name)

    async def follow(self, source: WatchSource, on_change: Callable[[], None] = lambda: None) -> None:
        """Keep the pods in sync with the API server. Never returns."""
        async for event in source.watch(PODS, self._settings.namespace, self._settings.pod_selector):
            if event.type == "SYNC" or self._by_name is None:
                self._by_name = {}
            for pod in event.objects or (event.object,):
                if not pod:
                    continue
                name = pod["metadata"]["name"]
                if event.type == "DELETED":
                    self._by_name.pop(name, None)
                else:
                    self._by_name[name] = pod
            on_change()


async def wait_for_successor(source: WatchSource, settings: PickerSettings) -> None:
    """Wait until another gateway pod is ready, for at most `drain_seconds`.

    The wait ends after `successor_seconds` if no other pod exists, or if the API server has listed none by then. A
    gateway that does not know its pods (no `pod_selector`) does not wait.
    """
    if not settings.pod_selector:
        return
    pods = GatewayPods(settings)
    following = asyncio.create_task(pods.follow(source))
    started_s = time.monotonic()
    is_announced = False
    try:
        while (elapsed_s := time.monotonic() - started_s) < settings.drain_seconds:
            state = pods.state
            if state is SuccessorState.READY:
                return
            if state is not SuccessorState.STARTING and elapsed_s >= settings.successor_seconds:
                log.warning("%s after %.0f s: draining", state, elapsed_s)
                return
            if state is SuccessorState.STARTING and not is_announced:
                is_announced = True
                log.info("waiting for another gateway pod to be ready")
            await asyncio.sleep(POLL_SECONDS)
        log.warning("no other gateway pod was ready in %.0f s: stopping", settings.drain_seconds)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
