"""What a tier's workload says of its pods: a Deployment, and a LeaderWorkerSet, whose fields differ."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll.adapters.kube_client import DEPLOYMENTS, LEADERWORKERSETS
from plimsoll.api import labels
from plimsoll.controllers import tier_workload
from tests import builders

Object = dict[str, Any]

PARENT = builders.service(tiers={"serve": {"nodes": 2}})
SINCE, SINCE_S = "2026-01-01T00:00:00Z", 1767225600.0


READY = [{"type": "Ready", "status": "True"}]
ORDERED_S = SINCE_S - 600.0


def leader_worker_set(updating: str | None = "False", *, replicas: int = 2, since: str = SINCE) -> Object:
    """A LeaderWorkerSet. updating: status of its condition UpdateInProgress, None without one."""
    conditions = [
        {"type": "Available", "status": "True", "lastTransitionTime": SINCE},
        {"type": "Progressing", "status": "False", "lastTransitionTime": SINCE},
    ]
    if updating is not None:
        conditions.append({"type": "UpdateInProgress", "status": updating, "lastTransitionTime": since})
    return builders.leader_worker_set(PARENT, replicas=replicas, status={"conditions": conditions})


def leaders(*templates: str) -> list[Object]:
    made = [builders.group_pod(PARENT, f"p{n}", template=one, conditions=READY) for n, one in enumerate(templates)]
    going = builders.group_pod(PARENT, "going", template="old")
    going["metadata"]["deletionTimestamp"] = SINCE
    return [*made, going]


def test_set_is_replaced_once_all_leaders_have_the_template() -> None:
    found = leader_worker_set()
    assert tier_workload.is_replaced(found, leaders("new", "new"))
    assert tier_workload.replaced_s(found, leaders("new", "new"), ORDERED_S) == SINCE_S
    assert tier_workload.is_replaced(leader_worker_set(replicas=3), leaders("new", "new"))


@pytest.mark.parametrize(
    ("found", "engines"),
    [
        (leader_worker_set(), ("old", "old")),
        (leader_worker_set(), ("new", "old")),
        (leader_worker_set(), ()),
        (leader_worker_set("True"), ("new", "new")),
    ],
    ids=["status of the former spec", "one leader is left", "no leader", "a leader is not ready yet"],
)
def test_set_in_a_rollout_is_not_replaced(found: Object, engines: tuple[str, ...]) -> None:
    assert not tier_workload.is_replaced(found, leaders(*engines))
    assert tier_workload.replaced_s(found, leaders(*engines), ORDERED_S) is None


@pytest.mark.parametrize(
    "found",
    [leader_worker_set(None), leader_worker_set(since="2025-01-01T00:00:00Z"), leader_worker_set(None, replicas=0)],
    ids=["never", "an earlier one", "no replicas"],
)
def test_set_without_rollout_counts_from_its_template(found: Object) -> None:
    engines = leaders(*["new"] * tier_workload.ordered_replicas(found))
    assert tier_workload.replaced_s(found, engines, ORDERED_S) == ORDERED_S


@pytest.mark.parametrize(
    ("engines", "replicas", "expected"),
    [
        (("new", "new"), 2, True),
        (("new", "old"), 2, False),
        (("old", "old"), 2, False),
        (("new",), 2, False),
        (("new", "new", "new"), 2, False),
        (("new",), 1, False),
    ],
)
def test_set_runs_exactly_what_its_leaders_show(engines: tuple[str, ...], replicas: int, expected: bool) -> None:
    assert tier_workload.runs_exactly(leader_worker_set(), leaders(*engines), replicas) is expected


def test_set_of_no_replicas_runs_none_once_leaders_go() -> None:
    found = leader_worker_set(replicas=0)
    assert tier_workload.runs_exactly(found, leaders(), 0)
    assert not tier_workload.runs_exactly(found, leaders("new"), 0)


def test_idle_set_does_not_fail() -> None:
    """Its condition Progressing is False once it has nothing to do; that of a Deployment says that it is stuck."""
    assert tier_workload.failure(leader_worker_set()) is None
    stuck = [{"type": "Progressing", "status": "False", "reason": "Deadline", "lastTransitionTime": SINCE}]
    found = tier_workload.failure(builders.deployment(PARENT, "serve", status={"conditions": stuck}))
    assert found == ("Deployment chat-serve does not progress (Deadline)", SINCE)


def test_template_of_engines_is_that_of_leaders() -> None:
    assert tier_workload.pod_template(leader_worker_set())["metadata"]["labels"][labels.ROLE] == "serve"
    assert tier_workload.pod_template(None) == {}


def test_resource_follows_the_kind() -> None:
    assert tier_workload.resource_of(leader_worker_set()) == LEADERWORKERSETS
    assert tier_workload.resource_of(builders.deployment(PARENT, "serve")) == DEPLOYMENTS
