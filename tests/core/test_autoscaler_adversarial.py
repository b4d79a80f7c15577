"""The autoscaler and what it tells gateways, against news that cannot be, clocks that jump, and clusters that lie.

Whatever is heard: counts stay within their bounds, nothing goes down on what is not known, one service's trouble is no
other's, and what is remembered can be written down.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from plimsoll.core.admission import ClassPolicy
from plimsoll.core.admission.published import MOST_STARTS, from_dict
from plimsoll.core.admission.published import to_dict as as_told
from plimsoll.core.autoscaler import Seen, Service, TierSeen, decide_all, restore, to_dict
from plimsoll.core.autoscaler.gatekeeper import LEAST_S, Gatekeeper
from plimsoll.core.forecast import Unknown
from plimsoll.core.knee import profile
from plimsoll.core.lifecycle import Starting
from plimsoll.core.load_line import slo_rate
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.scaling import Measured, TierPolicy
from plimsoll.core.signals import Heard, TierHeard
from tests.core.test_autoscaler import ABOUT, SLO, Fleet, heard, loaded, need, wish

RATE = 40.0
NORMAL_METRICS = heard(RATE, Role.SERVE)
UNAVAILABLE_METRICS = Unknown("the gateways do not answer")
AMOUNTS = (0.0, 5e-324, 0.5, 40.0, 1e5, 1e9, 1e308, UNAVAILABLE_METRICS)
SHARES = (0.0, 0.3, 0.999, 1.0, UNAVAILABLE_METRICS)
NUMBERS = (math.nan, -1.0, *AMOUNTS)


def random_metrics(rng: random.Random) -> Heard:
    """News of which a part is not as usual."""
    said = NORMAL_METRICS
    if rng.random() < 0.7:
        name = rng.choice(("rate_per_s", "held", "held_work_s", "returning_s", "in_flight", "prompt_tokens"))
        said = replace(said, **{name: rng.choice(AMOUNTS)})
    if rng.random() < 0.4:
        said = replace(said, shed_share=rng.choice(SHARES), arrived=rng.choice((0.0, 1.0, 1e9, 1e308)))
    if rng.random() < 0.4:
        said = replace(said, coverage=rng.choice((0.0, 0.5, 1.0)), fresh=rng.random() < 0.5)
    if rng.random() < 0.5:
        name = rng.choice(("tpot_s", "ttft_s", "waiting", "kv_used", "preemptions_per_s"))
        measured = Measured(**{name: rng.choice(NUMBERS)})
        told = TierHeard(measured, rng.choice((0.0, 0.5, 1.0)), running=rng.choice(AMOUNTS))
        said = replace(said, tiers={Role.SERVE: told})
    return said


def random_clock_jump(rng: random.Random) -> float:
    return rng.choice((-1e6, -100.0, -1.0, 0.0, 1e3, 1e7)) if rng.random() < 0.2 else 0.0


# What is heard


@pytest.mark.parametrize("absurd", [1.1e6, 1e9, 1e308, math.inf])
def test_absurd_rate_is_ignored(absurd: float) -> None:
    """A counter that a broken gateway has told: it orders nothing, and does not blind the forecast for half an hour."""
    fleet, before = loaded(), loaded().replicas["serve"]
    for _ in range(5):
        assert fleet.tick(heard(absurd, Role.SERVE)).tiers["serve"].replicas == before
    after = fleet.run(NORMAL_METRICS, 5).tiers["serve"]
    assert (after.replicas, after.held) == (before, False)
    assert need(fleet).rate_per_s == pytest.approx(need(loaded()).rate_per_s, rel=0.05)


@pytest.mark.parametrize("seed", range(6))
def test_random_metrics_keep_replicas_within_bounds(seed: int) -> None:
    rng, fleet = random.Random(seed), loaded()
    for _ in range(120):
        fleet.now_s += random_clock_jump(rng)
        said, before = random_metrics(rng), fleet.replicas["serve"]
        after = fleet.tick(said).tiers["serve"]
        assert 1 <= after.replicas <= 50
        assert after.why
        if isinstance(said.rate_per_s, Unknown) or said.coverage < 1.0 or said.tiers[Role.SERVE].coverage < 1.0:
            assert after.replicas >= before
    json.dumps(to_dict(fleet.service), allow_nan=False)


@pytest.mark.parametrize("seed", range(3))
def test_service_decision_is_independent_of_other_services(seed: int) -> None:
    rng, alone, other, stranger = random.Random(seed), loaded(), loaded(), loaded()
    for second in range(1, 60):
        now_s, said = alone.now_s + second, heard(RATE * rng.uniform(0.5, 2.0), Role.SERVE)
        seen = Seen(said, {"serve": TierSeen(3, 3, (), ABOUT)})
        odd = Seen(random_metrics(rng), {"serve": TierSeen(rng.randrange(4), rng.randrange(6), (), ABOUT)})
        one = decide_all({"a": (alone.service, seen, alone.wish)}, now_s)["a"]
        both = {"s": (stranger.service, odd, stranger.wish), "a": (other.service, seen, other.wish)}
        assert decide_all(both, now_s)["a"] == one


@pytest.mark.parametrize("jump_s", [-1e7, -3600.0, -5.0, 0.0])
def test_clock_set_back_removes_no_replicas(jump_s: float) -> None:
    fleet, before = loaded(), loaded().replicas["serve"]
    fleet.now_s += jump_s
    counts = [fleet.tick(NORMAL_METRICS).tiers["serve"].replicas for _ in range(120)]
    assert min(counts) >= before
    assert fleet.tick(NORMAL_METRICS).tiers["serve"].held is False
    assert counts[-1] <= before + 1


def test_clock_jump_ahead_freezes_until_new_samples() -> None:
    fleet, before = loaded(), loaded().replicas["serve"]
    fleet.now_s += 1e7
    silent = replace(NORMAL_METRICS, fresh=False)
    assert all(fleet.tick(silent).tiers["serve"].replicas == before for _ in range(20))
    assert fleet.run(NORMAL_METRICS, 60).tiers["serve"].replicas >= before


# What is seen


def test_pod_count_anomalies_do_not_change_required_replicas() -> None:
    fleet = loaded()
    wanted = need(fleet).replicas
    for replicas, ready in ((wanted, 0), (wanted, 1), (0, 0), (0, 9), (wanted, 10 * wanted), (1, 0), (wanted, wanted)):
        fleet.now_s += 1.0
        seen = Seen(NORMAL_METRICS, {"serve": TierSeen(replicas, ready, (), ABOUT)})
        found = decide_all({"one": (fleet.service, seen, fleet.wish)}, fleet.now_s)["one"].tiers["serve"]
        assert need(fleet).replicas == wanted
        assert found.replicas >= wanted


def test_unknown_and_missing_tiers_leave_other_tiers_alone() -> None:
    fleet = loaded()
    before = fleet.replicas["serve"]
    for tiers in ({}, {"other": TierSeen(7, 7)}, {"other": TierSeen(7, 7), "serve": TierSeen(before, before)}):
        fleet.now_s += 1.0
        found = decide_all({"one": (fleet.service, Seen(NORMAL_METRICS, tiers), fleet.wish)}, fleet.now_s)["one"]
        assert found.tiers["serve"].replicas >= before
        assert "other" not in found.tiers


def test_pods_that_never_start_are_replaced_once() -> None:
    fleet, wanted = loaded(), loaded().replicas["serve"]
    counts, born_s = [wanted], [fleet.now_s] * wanted
    for _ in range(200):
        fleet.now_s += 10.0
        pods = tuple(Starting(f"p{n}", since_s, "pull") for n, since_s in enumerate(born_s))
        seen = Seen(NORMAL_METRICS, {"serve": TierSeen(len(pods), 0, pods, ABOUT)})
        found = decide_all({"one": (fleet.service, seen, fleet.wish)}, fleet.now_s)["one"].tiers["serve"]
        counts.append(found.replicas)
        born_s += [fleet.now_s] * (found.replicas - len(born_s))
        del born_s[found.replicas :]
    assert wanted < max(counts) <= 2 * wanted
    assert counts[60:] == sorted(counts[60:], reverse=True), "what the reserve gives back is not ordered again"


def test_invalid_startup_durations_are_not_recorded() -> None:
    service = Service.of(["serve"])
    before = service.tiers["serve"].ledger
    for seconds in (-1.0, math.nan, math.inf, 86400.0, 1e308):
        service.started("serve", [("schedule", 1.0), ("pull", seconds)])
    service.started("serve", [])
    assert service.tiers["serve"].ledger is before
    service.started("serve", [("engine", 0.0)])
    assert service.tiers["serve"].ledger.whole.starts == 1.0


# Against counting by hand


@pytest.mark.parametrize("rate", [3.0, 17.0, 40.0, 90.0])
def test_required_replicas_is_first_count_reaching_forecast(rate: float) -> None:
    fleet = Fleet(wish(tiers={"serve": TierPolicy(1, 200)}))
    fleet.run(heard(rate, Role.SERVE), 90)
    sized = fleet.service.tiers["serve"].sized
    assert sized is not None
    found, one = need(fleet), profile(sized)
    lines = [float(slo_rate(one, count)[0]) for count in range(1, 60)]
    assert found.replicas == 1 + next(n for n, line in enumerate(lines) if line >= found.rate_per_s)
    assert found.rate_per_s >= 0.95 * rate


# What was kept


HOSTILE = (None, math.nan, math.inf, -1, 0, -0.5, 1e308, 9.9e8, "x", [], {}, True, 2**70)


def leaf_paths(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where the parts are, of each list the first and the last."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from leaf_paths(part, (*path, name))
    elif isinstance(value, list) and value:
        for place in {0, len(value) - 1}:
            yield from leaf_paths(value[place], (*path, place))
    yield path


@pytest.mark.parametrize("seed", range(4))
def test_corrupted_status_never_breaks_a_tick(seed: int) -> None:
    rng, known = random.Random(seed), loaded()
    kept = json.dumps(to_dict(known.service))
    places = [path for path in leaf_paths(json.loads(kept)) if path]
    for _ in range(60):
        stored = json.loads(kept)
        path = rng.choice(places)
        at = stored
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = rng.choice(HOSTILE)
        service = Service.of(["serve"])
        restore(service, stored)
        seen = Seen(NORMAL_METRICS, {"serve": TierSeen(3, 3, (), ABOUT)})
        found = decide_all({"one": (service, seen, known.wish)}, known.now_s + 30.0)["one"]
        assert 1 <= found.tiers["serve"].replicas <= 50
        json.dumps(to_dict(service), allow_nan=False)


# What gateways are told


CLASSES = (ClassPolicy("default", 0, SLO),)


@pytest.mark.parametrize("seed", range(3))
def test_published_shares_sum_to_batch_under_churn(seed: int) -> None:
    """Gateways die and come, clocks jump, news are random_metrics: the shares sum to the batch, and what is told is sound."""
    rng, fleet, keeper = random.Random(seed), loaded(), Gatekeeper()
    fleet.wish = replace(fleet.wish, classes=CLASSES)
    changes = 0
    for _ in range(150):
        fleet.now_s += random_clock_jump(rng)
        said = random_metrics(rng)
        fleet.tick(said)
        gateways = rng.sample(["gw-a", "gw-b", "gw-c", "gw-d"], rng.randrange(5))
        count = fleet.replicas["serve"]
        away = rng.randrange(count + 1)
        pods = tuple(Starting(f"p{n}", fleet.now_s - rng.uniform(-10, 400)) for n in range(away))
        seen = Seen(said, {"serve": TierSeen(count, count - away, pods, ABOUT)})
        changes += keeper.tell(fleet.service, seen, fleet.wish, gateways, fleet.now_s)
        told = keeper.told
        assert told is not None
        assert told.limits is not None
        assert sum(told.shares.values()) <= told.limits.batch
        assert all(units >= 0 for units in told.shares.values())
        assert 0.0 <= told.ready_work < math.inf
        assert [at_s for at_s, _ in told.starts] == sorted(at_s for at_s, _ in told.starts)
        assert as_told(from_dict(json.loads(json.dumps(as_told(told), allow_nan=False)))) == as_told(told)
    assert changes > 1


def test_publication_of_many_startups_is_downsampled() -> None:
    fleet, keeper = loaded(), Gatekeeper()
    fleet.service.started("serve", [("pull", 30.0)])
    fleet.wish = replace(fleet.wish, classes=CLASSES)
    pods = tuple(Starting(f"p{n}", fleet.now_s - 0.01 * n) for n in range(3000))
    seen = Seen(NORMAL_METRICS, {"serve": TierSeen(3004, 4, pods, ABOUT)})
    decide_all({"one": (fleet.service, seen, fleet.wish)}, fleet.now_s + 1.0)
    keeper.tell(fleet.service, seen, fleet.wish, ["gw-a"], fleet.now_s + 1.0)
    told = keeper.told
    assert told is not None
    assert len(told.starts) == MOST_STARTS
    assert told.starts[0][0] == told.ready_at_s
    assert told.starts[-1][1] == pytest.approx(told.ready_work)


def test_publications_are_at_least_two_seconds_apart() -> None:
    rng, fleet, keeper = random.Random(1), loaded(), Gatekeeper()
    fleet.wish = replace(fleet.wish, classes=CLASSES)
    told_s = []
    for _ in range(100):
        fleet.tick(random_metrics(rng))
        seen = Seen(NORMAL_METRICS, {"serve": TierSeen(3, rng.randrange(4), (), ABOUT)})
        if keeper.tell(fleet.service, seen, fleet.wish, ["gw-a", "gw-b"][: rng.randrange(3)], fleet.now_s):
            told_s.append(fleet.now_s)
    assert len(told_s) > 5
    assert all(later - sooner >= LEAST_S for sooner, later in pairwise(told_s))
