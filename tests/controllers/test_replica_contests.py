"""Another client that sets a tier's count again and again has a condition; a change by hand has none."""

from __future__ import annotations

import pytest

from plimsoll.api.conditions import ConditionType
from plimsoll.controllers.autoscale.replica_contests import CONTEST_SECONDS, CONTESTED_WRITES, ReplicaContests
from plimsoll.core.autoscaling.inputs import TierSnapshot
from tests.controllers.status_walk import KEY, Walk
from tests.controllers.test_autoscale import NOW_S

HPA = "kube-controller-manager"
CLAUSE = "kube-controller-manager (a HorizontalPodAutoscaler) sets the replica count of serve"


def contest(walk: Walk) -> str:
    """The message of condition ReplicasContested; empty without it."""
    report = walk.scaler.report(KEY)
    assert report is not None
    return next((one.message for one in report.conditions if one.type is ConditionType.REPLICAS_CONTESTED), "")


def test_autoscaler_of_a_tier_is_named() -> None:
    walk = Walk()
    walk.serve(2.0, 10)
    for number in range(CONTESTED_WRITES):
        assert contest(walk) == ""
        walk.order(3 + number, HPA)
        walk.serve(2.0, 2)
        walk.order(1)
        walk.serve(2.0, 13)
    assert contest(walk).startswith(CLAUSE)
    assert "3 times or more within 10 min: Plimsoll sets it back, and the two undo each other" in contest(walk)
    walk.serve(2.0, int(CONTEST_SECONDS))
    assert contest(walk) == ""


@pytest.mark.parametrize("scaling", [{"mode": "Recommend"}, {"paused": True}])
def test_other_writers_of_other_modes_are_no_contest(scaling: dict[str, object]) -> None:
    walk = Walk(scaling=scaling)
    for number in range(2 * CONTESTED_WRITES):
        walk.order(1 + number, HPA)
        walk.serve(2.0, 3)
    assert contest(walk) == ""


def test_writes_that_plimsoll_does_not_undo_are_counted() -> None:
    """An autoscaler whose counts stand for a while; a count that stays is one write."""
    contests = ReplicaContests()
    found = []
    for second, replicas in enumerate((2, 2, 3, 3, 3, 4, 4)):
        found.append(contests.update({"serve": TierSnapshot(replicas, 1, replicas_set_by=HPA)}, NOW_S + second))
    assert found == ["", "", "", "", "", CLAUSE, CLAUSE]


def test_changes_by_hand_that_are_far_apart_are_no_contest() -> None:
    contests = ReplicaContests()
    for number in range(5):
        tier = TierSnapshot(number, 1, replicas_set_by="kubectl-edit")
        assert contests.update({"serve": tier}, NOW_S + number * CONTEST_SECONDS) == ""
