"""Which gateway pods can take over from one that stops."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from plimsoll.adapters.kube_client import Resource, WatchEvent
from plimsoll.gateway.settings import PickerSettings
from plimsoll.gateway.successor import GatewayPods, SuccessorState, successor_state
from tests.gateway.kube_objects import GATEWAY_SELECTOR, SYSTEM, gateway_pod

OWN, OTHER = "gateway-0", "gateway-1"
DELETED = {"deletionTimestamp": "2026-01-02T03:04:05Z"}


def _ended(phase: str) -> dict[str, Any]:
    pod = gateway_pod(OTHER)
    return {**pod, "status": {**pod["status"], "phase": phase}}


@pytest.mark.parametrize(
    ("pods", "state"),
    [
        (None, SuccessorState.UNKNOWN),
        ([], SuccessorState.ABSENT),
        ([gateway_pod(OWN)], SuccessorState.ABSENT),
        ([gateway_pod(OWN, **DELETED), gateway_pod(OTHER, **DELETED)], SuccessorState.ABSENT),
        ([_ended("Failed")], SuccessorState.ABSENT),
        ([_ended("Succeeded")], SuccessorState.ABSENT),
        ([gateway_pod(OTHER, ready=False)], SuccessorState.STARTING),
        ([{"metadata": {"name": OTHER}}], SuccessorState.STARTING),
        ([gateway_pod(OTHER, ready=False), gateway_pod("gateway-2")], SuccessorState.READY),
        ([gateway_pod(OWN, **DELETED), gateway_pod(OTHER)], SuccessorState.READY),
    ],
)
def test_successor_state_ignores_pods_that_end(pods: list[dict[str, Any]] | None, state: SuccessorState) -> None:
    assert successor_state(pods, OWN) is state


class ScriptedSource:
    """Replays watch events, and notes what was asked for and the state after each."""

    def __init__(self, pods: GatewayPods, events: list[WatchEvent]) -> None:
        self._pods, self._events = pods, events
        self.states: list[SuccessorState] = []
        self.ready_counts: list[int] = []
        self.queries: list[tuple[str, str | None, str | None]] = []

    async def watch(
        self, resource: Resource, namespace: str | None = None, selector: str | None = None
    ) -> AsyncIterator[WatchEvent]:
        self.queries.append((resource.plural, namespace, selector))
        for event in self._events:
            yield event
            self.states.append(self._pods.state)
            self.ready_counts.append(self._pods.ready_count)


async def test_gateway_pods_follow_watch_events() -> None:
    pods = GatewayPods(PickerSettings(pod=OWN, namespace=SYSTEM, pod_selector=GATEWAY_SELECTOR))
    source = ScriptedSource(
        pods,
        [
            WatchEvent("SYNC", objects=(gateway_pod(OWN, **DELETED),)),
            WatchEvent("ADDED", gateway_pod(OTHER, ready=False)),
            WatchEvent("MODIFIED", gateway_pod(OTHER)),
            WatchEvent("DELETED", gateway_pod(OTHER)),
            WatchEvent("SYNC", objects=(gateway_pod(OTHER),)),
            WatchEvent("SYNC"),
            WatchEvent("SYNC", objects=(gateway_pod(OWN), gateway_pod(OTHER))),
            WatchEvent("MODIFIED", gateway_pod(OWN, ready=False)),
        ],
    )
    assert pods.ready_count == 1
    assert pods.state is SuccessorState.UNKNOWN
    await pods.follow(source)
    assert source.queries == [("pods", SYSTEM, GATEWAY_SELECTOR)]
    assert source.ready_counts == [1, 1, 2, 1, 2, 1, 2, 2]
    assert source.states == [
        SuccessorState.ABSENT,
        SuccessorState.STARTING,
        SuccessorState.READY,
        SuccessorState.ABSENT,
        SuccessorState.READY,
        SuccessorState.ABSENT,
        SuccessorState.READY,
        SuccessorState.READY,
    ]
