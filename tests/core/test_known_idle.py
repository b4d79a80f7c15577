"""A service without requests, seen as such by all gateways and engines, has a known demand of zero."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plimsoll.core.autoscaling.observations import LATENCY_WINDOW_S, LaggingSignals
from plimsoll.core.autoscaling.scaling_policy import TierPolicy
from plimsoll.core.demand.service_metrics import ServiceMetrics, TierMetrics
from plimsoll.core.types import Role, Unavailable
from tests.core.test_autoscaler import Fleet, scaling_spec

WINDOW_S = round(LATENCY_WINDOW_S)
UNKNOWN_MIX = Unavailable("too few requests have ended to know their lengths: 0")
IDLE_ENGINES = TierMetrics(LaggingSignals(waiting=0.0, kv_used=0.0), 1.0, 1.0, in_flight=0.0)
BUSY_ENGINES = replace(IDLE_ENGINES, in_flight=3.0)


def idle(quiet_s: float = 3600.0, **other: object) -> ServiceMetrics:
    """Metrics right after a restart: everything answers, and no request has ended yet."""
    metrics = ServiceMetrics(
        rate_per_s=0.0,
        has_new_rate=True,
        coverage=1.0,
        workload=UNKNOWN_MIX,
        queued=0.0,
        queued_work_s=0.0,
        reserved_work_s=0.0,
        in_flight=0.0,
        quiet_s=quiet_s,
        tiers={Role.SERVE: IDLE_ENGINES},
    )
    return replace(metrics, **other)  # type: ignore[arg-type]


def restarted(minimum: int = 1, replicas: int = 5, warm: int = 0) -> Fleet:
    """A fleet above its minimum, and an operator that has just started."""
    fleet = Fleet(scaling_spec(tiers={"serve": TierPolicy(minimum, 9, warm_replicas=warm)}))
    fleet.replicas["serve"] = replicas
    return fleet


def startup_s(fleet: Fleet) -> int:
    return round(fleet.service.tiers["serve"].startup_s)


@pytest.mark.parametrize(("minimum", "warm", "expected"), [(1, 0, 1), (2, 0, 2), (1, 3, 3)])
def test_decide_known_idle_shrinks_to_minimum(minimum: int, warm: int, expected: int) -> None:
    fleet = restarted(minimum, warm=warm)
    assert fleet.run(idle(), WINDOW_S).tiers["serve"].replicas == 5, "a full window and the stabilization come first"
    decided = fleet.run(idle(), startup_s(fleet) + 5).tiers["serve"]
    assert (decided.replicas, decided.is_held) == (expected, False)


def test_decide_known_idle_waits_for_stabilization() -> None:
    fleet = restarted()
    counts = [fleet.tick(idle()).tiers["serve"].replicas for _ in range(WINDOW_S + startup_s(fleet) - 5)]
    assert set(counts) == {5}


def test_decide_known_idle_explains_scale_down() -> None:
    fleet = restarted()
    before = 5
    for _ in range(WINDOW_S + 2 * startup_s(fleet)):
        decided = fleet.tick(idle()).tiers["serve"]
        if decided.replicas < before:
            break
    assert decided.previous_replicas == 5
    assert "no request for" in decided.summary


@pytest.mark.parametrize(
    "metrics",
    [
        idle(quiet_s=10.0),
        idle(coverage=0.5),
        idle(rate_per_s=Unavailable("no gateway has answered twice yet")),
        idle(rate_per_s=Unavailable("none of 1 gateways answers"), coverage=0.0, quiet_s=0.0),
        idle(queued=1.0),
        idle(in_flight=1.0),
        idle(reserved_work_s=0.5),
        idle(arrivals=1.0),
        idle(tiers={Role.SERVE: BUSY_ENGINES}),
        idle(tiers={Role.SERVE: replace(IDLE_ENGINES, completed=2.0)}),
        idle(tiers={Role.SERVE: replace(IDLE_ENGINES, in_flight=Unavailable("not reported"))}),
        idle(tiers={Role.SERVE: replace(IDLE_ENGINES, coverage=0.8)}),
        idle(tiers={Role.SERVE: TierMetrics()}),
    ],
    ids=[
        "young_gateway", "partial_gateways", "first_reading", "silent_gateways", "queued", "in_flight", "reserved",
        "arrivals", "bypass_running", "bypass_completed", "engines_without_gauge", "partial_engines", "silent_engines",
    ],
)  # fmt: skip
def test_decide_unproven_idle_keeps_replicas(metrics: ServiceMetrics) -> None:
    fleet = restarted()
    decided = fleet.run(metrics, WINDOW_S + 3 * startup_s(fleet)).tiers["serve"]
    assert decided.replicas >= 5
    assert decided.is_held


def test_decide_known_idle_tells_a_time_that_never_shrinks() -> None:
    """A gateway that has restarted proves less, but the time without a request goes on."""
    fleet = restarted(replicas=1)
    fleet.run(idle(), 2 * WINDOW_S)
    decided = fleet.run(idle(quiet_s=WINDOW_S + 1.0), 1).tiers["serve"]
    need = next(step for step in decided.steps if step.name == "sizing")
    assert need.reason == f"no request for {2 * WINDOW_S} s: minReplicas is 1"


def test_decide_idle_again_after_request_waits_full_window() -> None:
    fleet = restarted()
    fleet.run(idle(), WINDOW_S + startup_s(fleet) - 5)
    fleet.tick(idle(queued=1.0))
    assert fleet.run(idle(), WINDOW_S + startup_s(fleet) - 5).tiers["serve"].replicas == 5


def test_decide_known_idle_pair_shrinks_to_minimum() -> None:
    fleet = Fleet(scaling_spec(tiers={"prefill": TierPolicy(1, 9), "decode": TierPolicy(2, 9)}))
    fleet.replicas = {"prefill": 4, "decode": 5}
    quiet = idle(tiers={Role.PREFILL: IDLE_ENGINES, Role.DECODE: IDLE_ENGINES})
    longest_s = max(round(tier.startup_s) for tier in fleet.service.tiers.values())
    decided = fleet.run(quiet, WINDOW_S + longest_s + 5).tiers
    assert {name: tier.replicas for name, tier in decided.items()} == {"prefill": 1, "decode": 2}


def test_decide_known_idle_goes_to_zero_by_stopping_rule() -> None:
    """The rule for the last replica still decides: with more replicas, the service does not reach zero earlier."""

    def seconds_to_zero(replicas: int) -> int:
        fleet = restarted(minimum=0, replicas=replicas)
        return next(second for second in range(3 * 3600) if not fleet.tick(idle()).tiers["serve"].replicas)

    assert seconds_to_zero(3) >= seconds_to_zero(1) > WINDOW_S
