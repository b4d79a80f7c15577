"""Pods whose volumes cannot be attached or mounted: their Events have the words, and are listed only for such pods."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll.adapters.kube_client import EVENTS, KubeClient
from plimsoll.adapters.normalize import epoch_s
from plimsoll.api.conditions import ConditionReason
from plimsoll.controllers.reconcile.tier_health import TierStatusInputs, tier_health
from plimsoll.controllers.reconcile.volume_problems import LIST_AGAIN_S, WAIT_S, with_volume_problems
from plimsoll.core.errors import ClusterError, LeaseLost
from tests import builders
from tests.controllers.status_inputs import PARENT, tier

SCHEDULED = "2026-01-01T00:00:00Z"
NOW_S = (epoch_s(SCHEDULED) or 0.0) + WAIT_S
MULTI_ATTACH = (
    'Multi-Attach error for volume "pvc-7a81d56f" Volume is already exclusively attached to one node and can\'t be'
    " attached to another"
)
NOT_ATTACHED = (
    "Unable to attach or mount volumes: unmounted volumes=[model-cache], unattached volumes=[], failed to process\n"
    "volumes=[]: timed out waiting for the condition"
)
NO_SECRET = 'MountVolume.SetUp failed for volume "token" : secret "hub" not found'


class FakeKube(KubeClient):
    """An API server with Events, or with an error in their place."""

    def __init__(self, *events: Any, error: Exception | None = None) -> None:
        self._events, self._error = events, error
        self.requests: list[str] = []

    async def list(self, resource: Any, namespace: Any = None, *_: Any, fields: str = "", **__: Any) -> Any:
        assert (resource, namespace) == (EVENTS, "team")
        self.requests.append(fields)
        if self._error is not None:
            raise self._error
        return list(self._events), "1"


def event(reason: str, message: str, at: str) -> dict[str, Any]:
    return {"reason": reason, "message": message, "lastTimestamp": at}


def pod(name: str = "decode-0", starts: str = "False", at: str = SCHEDULED) -> Any:
    conditions = [
        {"type": "PodScheduled", "status": "True", "lastTransitionTime": at},
        {"type": "PodReadyToStartContainers", "status": starts},
    ]
    return builders.pod(PARENT, "decode", name, phase="Pending", conditions=conditions)


async def ask(kube: KubeClient, *pods: Any, now_s: float = NOW_S) -> tuple[TierStatusInputs, float | None]:
    (found,), next_s = await with_volume_problems(kube, "team", [tier("decode", ready=0, pods=pods)], now_s)
    return found, next_s


@pytest.mark.parametrize(
    ("reason", "message"),
    [("FailedAttachVolume", MULTI_ATTACH), ("FailedMount", NOT_ATTACHED), ("FailedMount", NO_SECRET)],
)
async def test_volume_that_is_missing_is_told_by_its_event(reason: str, message: str) -> None:
    waiting = pod()
    kube = FakeKube(event(reason, message, SCHEDULED))
    found, next_s = await ask(kube, waiting)
    assert kube.requests == [f"involvedObject.uid={waiting['metadata']['uid']},type=Warning"]
    assert next_s == LIST_AGAIN_S
    health = tier_health(found, None)
    assert health.problem is ConditionReason.VOLUME_UNAVAILABLE
    words = " ".join(message.split())
    assert health.message == f"0 of 1 ready: pod decode-0 waits for a volume ({reason}): {words}"


async def test_newest_warning_about_a_volume_is_quoted() -> None:
    events = (
        event("FailedMount", NO_SECRET, "2026-01-01T00:00:20Z"),
        event("FailedAttachVolume", MULTI_ATTACH, "2026-01-01T00:00:10Z"),
        event("FailedScheduling", "0/1 nodes", "2026-01-01T00:00:30Z"),
    )
    found, _ = await ask(FakeKube(*events), pod())
    assert found.volume_problem is not None
    assert NO_SECRET in found.volume_problem.message


async def test_events_are_listed_only_for_pods_that_wait_long() -> None:
    kube = FakeKube(event("FailedMount", NO_SECRET, SCHEDULED))
    found, next_s = await ask(kube, pod(), now_s=NOW_S - 10.0)
    assert (found.volume_problem, next_s, kube.requests) == (None, pytest.approx(10.0), [])
    found, next_s = await ask(kube, pod(starts="True"))
    assert (found.volume_problem, next_s, kube.requests) == (None, None, [])


async def test_events_of_the_longest_waiting_pod_are_listed() -> None:
    older = pod("decode-1", at="2025-12-31T23:00:00Z")
    older["metadata"]["uid"] = "older"
    kube = FakeKube()
    await ask(kube, pod(), older)
    assert kube.requests == ["involvedObject.uid=older,type=Warning"]


async def test_unreadable_events_hide_no_status() -> None:
    found, next_s = await ask(FakeKube(error=ClusterError("events is forbidden")), pod())
    assert (found.volume_problem, next_s) == (None, LIST_AGAIN_S)
    with pytest.raises(LeaseLost):
        await ask(FakeKube(error=LeaseLost("another operator leads")), pod())
