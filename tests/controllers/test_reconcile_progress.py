"""A leader that reconciles nothing says why, in its probes and in its metrics."""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.controllers.http_server import HttpEndpoints
from plimsoll.controllers.reconcile_progress import (
    MAX_STALLED_S,
    MAX_UNSYNCED_S,
    ReconcileProblems,
    ReconcileProgress,
)
from plimsoll.telemetry.operator_metrics import OPERATOR


@dataclass
class Ages:
    age_s: float = 0.0
    stalled_s: float = 0.0


class Leader:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.ages = Ages()
        self.unsynced = {"pods", "gateways"}
        self.progress = ReconcileProgress(self.ages, lambda: self.unsynced, lambda: self.now_s)


def sample(name: str) -> float | None:
    return OPERATOR.get_sample_value(f"plimsoll_operator_{name}")


def test_lists_have_their_time_before_they_are_a_problem() -> None:
    leader = Leader()
    leader.now_s += MAX_UNSYNCED_S
    assert leader.progress.problems() == ReconcileProblems()
    leader.now_s += 1.0
    problems = leader.progress.problems()
    assert problems.unsynced == "nothing is reconciled: not listed yet: gateways, pods; the log says why"
    assert problems.stalled == ""
    leader.unsynced.clear()
    assert leader.progress.problems() == ReconcileProblems()


def test_only_reconciles_that_never_end_are_a_problem() -> None:
    leader = Leader()
    leader.unsynced.clear()
    leader.ages.age_s = 10 * MAX_STALLED_S  # a slow API server: others end
    assert leader.progress.problems() == ReconcileProblems()
    leader.ages.stalled_s = MAX_STALLED_S + 1.0
    assert "no reconcile has ended" in leader.progress.problems().stalled


def test_metrics_and_probes_are_those_of_the_leader_only() -> None:
    leader, endpoints = Leader(), HttpEndpoints()
    leader.ages.age_s, leader.now_s = 42.0, 2000.0
    assert endpoints.progress() == ReconcileProblems()
    with endpoints.leading(lambda _: None, None, leader.progress):  # type: ignore[arg-type]
        assert (sample("queue_age_seconds"), sample("unsynced_lists")) == (42.0, 2.0)
        assert endpoints.progress().unsynced
    assert (sample("queue_age_seconds"), sample("unsynced_lists")) == (0.0, 0.0)
    assert endpoints.progress() == ReconcileProblems()
    assert endpoints.explain is None
