"""Refusals with all ready show the model to be short, by how much, and for how long that is believed."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from plimsoll.core.autoscaler import Seen, TierSeen
from plimsoll.core.autoscaler.shortage import MEMORY_S, MOST, WINDOW_S, Refusals, Shortage
from plimsoll.core.forecast import Unknown
from plimsoll.core.forecast.doubt import deviate
from plimsoll.core.lifecycle import Starting
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.scaling import Demand, Policy, TierPolicy
from plimsoll.core.signals import Heard
from tests.core.test_autoscaler import SLO, Fleet, heard, need, wish


def correction_after(
    short: Shortage,
    seconds: float,
    refused: float,
    whole: bool = True,
    asked: float = 4,
    ready: int = 4,
    arrived: float = 3600.0,
    in_flight: float = 0.0,
    arrival_cv2: float = 1.0,
) -> float:
    start = 0.0 if short._at_s is None else short._at_s
    for second in range(1, int(seconds) + 1):
        refusals = Refusals(refused, arrived, 0.05, in_flight, arrival_cv2)
        short.hear(asked, ready, whole, refusals, start + second)
    return short.factor


def test_correction_waits_for_replicas_that_became_ready() -> None:
    short = Shortage()
    correction_after(short, WINDOW_S - 5, 0.5, asked=8, ready=4)
    assert correction_after(short, WINDOW_S - 5, 0.5, asked=8, ready=8) == 1.0


def test_correction_is_demand_over_admitted_share() -> None:
    assert correction_after(Shortage(), 2 * WINDOW_S, 0.2) == pytest.approx(1.25)
    assert correction_after(Shortage(), 2 * WINDOW_S, 0.2, asked=2, ready=4) == pytest.approx(2.5)


def test_correction_needs_full_window_and_ready_fleet() -> None:
    assert correction_after(Shortage(), 2 * WINDOW_S, 0.05) == 1.0
    assert correction_after(Shortage(), WINDOW_S - 1, 0.5) == 1.0
    assert correction_after(Shortage(), 5 * WINDOW_S, 0.5, whole=False) == 1.0
    mixed = Shortage()
    correction_after(mixed, WINDOW_S - 5, 0.5)
    correction_after(mixed, 1, 0.5, whole=False)
    assert correction_after(mixed, WINDOW_S - 5, 0.5) == 1.0, "the share is still of the time in which they came"


def test_correction_share_within_chance_is_ignored() -> None:
    assert correction_after(Shortage(), 1.5 * WINDOW_S, 0.1, arrived=84.0) == 1.0
    assert correction_after(Shortage(), 1.5 * WINDOW_S, 0.1, arrived=840.0) == pytest.approx(1.0 / 0.9)
    assert correction_after(Shortage(), 2 * WINDOW_S, 0.5, arrived=84.0) == pytest.approx(2.0)
    assert correction_after(Shortage(), 2 * WINDOW_S, 0.5, arrived=0.0) == 1.0


def test_correction_clustered_rejections_need_larger_share() -> None:
    """160 in a minute with 100 in flight, as one engine with answers of 40 s has them."""
    assert correction_after(Shortage(), WINDOW_S + 5, 0.15, arrived=160.0) > 1.0, "as if each were refused by himself"
    assert correction_after(Shortage(), WINDOW_S + 5, 0.15, arrived=160.0, in_flight=100.0) == 1.0
    assert correction_after(Shortage(), WINDOW_S + 5, 0.2, arrived=160.0, in_flight=100.0) == 1.0
    assert correction_after(Shortage(), WINDOW_S + 5, 0.25, arrived=160.0, in_flight=100.0) > 1.0
    assert correction_after(Shortage(), WINDOW_S + 5, 0.25, arrived=160.0, in_flight=100.0, arrival_cv2=4.0) == 1.0, (
        "they come in rows"
    )


def test_correction_uses_demand_at_time_of_rejection() -> None:
    """Load that has ended asks for next to nothing while its refusals are still in the minute's share."""
    short = Shortage()
    assert correction_after(short, 2 * WINDOW_S, 0.05) == 1.0
    assert correction_after(short, 20, 0.3, asked=4, ready=4) == pytest.approx(1.0 / 0.7)
    assert correction_after(short, WINDOW_S - 1, 0.3, asked=0.5, ready=4) == pytest.approx(1.0 / 0.7)


def test_correction_persistent_excess_accumulates() -> None:
    few = {"arrived": 160.0, "in_flight": 100.0}
    assert correction_after(Shortage(), 15 * WINDOW_S, 0.15, **few) == pytest.approx(1.0 / 0.85)
    broken = Shortage()
    for _ in range(5):
        correction_after(broken, 1.2 * WINDOW_S, 0.15, **few)
        assert correction_after(broken, 1, 0.05, **few) == 1.0


def test_correction_repeated_evidence_adds_nothing_and_decays() -> None:
    short = Shortage()
    once = correction_after(short, 2 * WINDOW_S, 0.2)
    assert correction_after(short, 10 * WINDOW_S, 0.2) == pytest.approx(once)
    assert correction_after(short, MEMORY_S, 0.0) == pytest.approx(1.0 + (once - 1.0) / math.e, rel=1e-3)
    assert correction_after(Shortage(), 2 * WINDOW_S, 0.99) == MOST
    assert correction_after(Shortage(), 2 * WINDOW_S, 1.0) == 1.0, "with nobody let in nothing is measured"


def test_fleet_with_rejections_grows_and_explains() -> None:
    policy = Policy({"serve": TierPolicy(1, 50)}, slo=SLO, miss_cost=0.0)  # no reserve
    fleet = Fleet(replace(wish(), policy=policy))
    fleet.run(heard(60.0, Role.SERVE), 600)
    before, asked = fleet.replicas["serve"], need(fleet).replicas
    refusing = replace(heard(60.0, Role.SERVE), arrived=3600.0, shed_share=0.3)
    fleet.run(refusing, 10)
    after = fleet.replicas["serve"]
    assert after >= math.ceil(before / 0.7 - 1e-9) > before
    found = need(fleet)
    assert found.short == pytest.approx(before / 0.7 / asked, rel=0.1)
    words = [step.why for step in fleet.service.decisions[-1].decision.tiers["serve"].steps]
    assert any("refused" in word for word in words)
    counts = [fleet.tick(heard(60.0, Role.SERVE)).tiers["serve"].replicas for _ in range(60)]
    kept = [asked * (1 + (found.short - 1) * math.exp(-(second + 1) / MEMORY_S)) for second in range(60)]
    assert all(have >= least - 1 for have, least in zip(counts, kept, strict=True)), "not at once back to what refused"
    assert all(later <= earlier for earlier, later in pairwise([after, *counts]))


STEADY_METRICS = replace(heard(60.0, Role.SERVE), in_flight=300.0, returning_s=0.0)


@cache
def _settled() -> Fleet:
    fleet = Fleet(wish())
    fleet.run(STEADY_METRICS, 900)
    return fleet


def settled() -> Fleet:
    """A fleet of its own for each who asks, after a quarter of an hour at a steady load."""
    return deepcopy(_settled())


def backlog_gpu_s(gpu_s: float, starting: bool) -> float:
    """GPU-seconds for which a fleet at a steady load has capacity added when so many are correction_after to come back."""
    fleet = settled()
    late = Starting("x", fleet.now_s - 5.0, "load", fleet.now_s - 5.0)
    before = asked(fleet, STEADY_METRICS, (late,) if starting else ())
    return asked(fleet, replace(STEADY_METRICS, returning_s=gpu_s), (late,) if starting else ()) - before


def asked(fleet: Fleet, said: Heard, starting: tuple[Starting, ...], more: int = 0) -> float:
    """Work of those correction_after to come back for which capacity is asked, GPU-seconds, with so many replicas more ordered."""
    count = fleet.replicas["serve"] + more
    seen = Seen(said, {"serve": TierSeen(count, count - len(starting), starting, fleet.about)})
    demand: dict[str, Demand | Unknown] = fleet.service.demand(seen, fleet.wish, fleet.now_s)
    return fleet.service.asks(seen, fleet.wish, demand, fleet.now_s)["serve"].returning_gpu_s


def test_retry_backlog_sizes_for_full_uncertainty() -> None:
    fleet = settled()
    nobody, some = (replace(STEADY_METRICS, returning_s=gpu_s) for gpu_s in (0.0, 5.0))
    tiers = {"serve": TierSeen(fleet.replicas["serve"], fleet.replicas["serve"], (), fleet.about)}
    found = [fleet.service.demand(Seen(said, tiers), fleet.wish, fleet.now_s)["serve"] for said in (nobody, some)]
    priced, whole = (one.forecast for one in found if isinstance(one, Demand))
    assert fleet.service.risk is not None
    assert whole.doubt == pytest.approx(deviate(fleet.service.risk.quantile) * whole.error)
    assert priced.doubt < 0.5 * whole.doubt


def test_retry_backlog_within_chance_adds_no_load() -> None:
    """Of 60 requests a second some hundreds are within chance in a start-up; what they take is of the order of 50 s."""
    assert backlog_gpu_s(2.0, starting=False) == 0.0
    assert backlog_gpu_s(4000.0, starting=False) == pytest.approx(4000.0)
    assert 0.0 < backlog_gpu_s(4000.0, starting=True) < 4000.0, "but for what the others serve until it is there"


def test_retry_backlog_is_reduced_by_starting_replicas() -> None:
    """What is left for that one is what they do not serve in a start-up, beside what comes anyway."""
    fleet = settled()
    found, correction_after = need(fleet), replace(STEADY_METRICS, returning_s=4000.0)
    horizon_s = fleet.service.horizon_s("serve", fleet.wish)
    spare = 0.9 * found.replica_work * fleet.replicas["serve"] - found.rate_per_s * found.request_gpu_s

    def left(ages_s: list[float], **differing: str) -> float:
        pods = tuple(Starting(f"{n}", fleet.now_s - age_s, **differing) for n, age_s in enumerate(ages_s))
        return asked(fleet, correction_after, pods, more=len(pods))

    one, more, sooner, far = left([0.0]), left([0.0] * 8), left([0.9 * horizon_s] * 8), left([0.0], refused="no room")
    assert far == pytest.approx(4000.0 - max(0.0, spare) * horizon_s, rel=0.02), "who fits nowhere serves nobody"
    assert sooner < more <= one <= far
    assert sooner == pytest.approx(far - 0.9 * found.replica_work * 8 * 0.9 * horizon_s, rel=0.3)
    assert asked(fleet, replace(correction_after, returning_s=1.0), (Starting("x", fleet.now_s),), more=8) == 0.0


@pytest.mark.parametrize("many", [3.0, 6.0, 10.0])
def test_retry_backlog_keeps_starting_replicas(many: float) -> None:
    """Else it goes, is missed at the next tick, and is ordered anew: its start begins again each time."""
    fleet = Fleet(replace(wish(), policy=replace(wish().policy, miss_cost=0.0)))  # nothing in reserve
    fleet.run(STEADY_METRICS, 300)
    before, horizon_s = fleet.replicas["serve"], fleet.service.horizon_s("serve", fleet.wish)
    correction_after = replace(STEADY_METRICS, returning_s=many * need(fleet).replica_work * horizon_s)
    pods: tuple[Starting, ...] = ()
    counts = []
    for second in range(int(0.9 * horizon_s)):
        counts.append(fleet.tick(correction_after, serve=pods).tiers["serve"].replicas)
        pods += tuple(Starting(f"{second}-{n}", fleet.now_s) for n in range(counts[-1] - before - len(pods)))
    assert set(counts) == {before + many}
    assert fleet.run(STEADY_METRICS, 300).tiers["serve"].replicas == before, "once nobody is left to come back"
