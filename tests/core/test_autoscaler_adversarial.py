"""The autoscaler and what it tells gateways, against news that cannot be, clocks that jump, and clusters that lie.

Whatever is reported: counts stay within their bounds, nothing goes down on what is unknown, one service's trouble is no
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

from plimsoll.core import codec
from plimsoll.core.admission.cost_model import ClassPolicy
from plimsoll.core.admission.publication import MAX_CAPACITY_STEPS, AdmissionLimits
from plimsoll.core.autoscaling.admission_publisher import MIN_PUBLISH_INTERVAL_S, AdmissionPublisher
from plimsoll.core.autoscaling.fleet_decisions import decide_all
from plimsoll.core.autoscaling.inputs import ServiceSnapshot, TierSnapshot
from plimsoll.core.autoscaling.observations import LaggingSignals
from plimsoll.core.autoscaling.scaling_policy import TierPolicy
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.autoscaling.startup_time import StartingPod
from plimsoll.core.autoscaling.state_checkpoint import dump_service_state, restore_service_state
from plimsoll.core.capacity.slo_capacity import slo_capacity_per_s
from plimsoll.core.capacity.tier_model import build_profile
from plimsoll.core.demand.service_metrics import ServiceMetrics, TierMetrics
from plimsoll.core.types import Role, Unavailable
from tests.core.test_autoscaler import ABOUT, SLO, Fleet, loaded, need, scaling_spec, service_metrics

RATE = 40.0
NORMAL_METRICS = service_metrics(RATE, Role.SERVE)
UNAVAILABLE_METRICS = Unavailable("the gateways do not answer")
AMOUNTS = (0.0, 5e-324, 0.5, 40.0, 1e5, 1e9, 1e308, UNAVAILABLE_METRICS)
SHARES = (0.0, 0.3, 0.999, 1.0, UNAVAILABLE_METRICS)
NUMBERS = (math.nan, -1.0, *AMOUNTS)


def random_metrics(rng: random.Random) -> ServiceMetrics:
    """News of which a part is not as usual."""
    said = NORMAL_METRICS
    if rng.random() < 0.7:
        name = rng.choice(
            ("rate_per_s", "queued", "queued_work_s", "reserved_work_s", "in_flight", "mean_prompt_tokens")
        )
        said = replace(said, **{name: rng.choice(AMOUNTS)})
    if rng.random() < 0.4:
        said = replace(said, rejected_share=rng.choice(SHARES), arrivals=rng.choice((0.0, 1.0, 1e9, 1e308)))
    if rng.random() < 0.4:
        said = replace(said, coverage=rng.choice((0.0, 0.5, 1.0)), has_new_rate=rng.random() < 0.5)
    if rng.random() < 0.5:
        name = rng.choice(("tpot_s", "ttft_s", "waiting", "kv_used", "preemptions_per_s"))
        measured = LaggingSignals(**{name: rng.choice(NUMBERS)})
        reported = TierMetrics(measured, rng.choice((0.0, 0.5, 1.0)), in_flight=rng.choice(AMOUNTS))
        said = replace(said, tiers={Role.SERVE: reported})
    return said


def random_clock_jump(rng: random.Random) -> float:
    return rng.choice((-1e6, -100.0, -1.0, 0.0, 1e3, 1e7)) if rng.random() < 0.2 else 0.0


# What is heard


@pytest.mark.parametrize("absurd", [1.1e6, 1e9, 1e308, math.inf])
def test_absurd_rate_is_ignored(absurd: float) -> None:
    """A counter that a broken gateway has told: it orders nothing, and does not blind the forecast for half an hour."""
    fleet, before = loaded(), loaded().replicas["serve"]
    for _ in range(5):
        assert fleet.tick(service_metrics(absurd, Role.SERVE)).tiers["serve"].replicas == before
    after = fleet.run(NORMAL_METRICS, 5).tiers["serve"]
    assert (after.replicas, after.is_held) == (before, False)
    assert need(fleet).rate_per_s == pytest.approx(need(loaded()).rate_per_s, rel=0.05)


@pytest.mark.parametrize("seed", range(6))
def test_random_metrics_keep_replicas_within_bounds(seed: int) -> None:
    rng, fleet = random.Random(seed), loaded()
    for _ in range(120):
        fleet.now_s += random_clock_jump(rng)
        said, before = random_metrics(rng), fleet.replicas["serve"]
        after = fleet.tick(said).tiers["serve"]
        assert 1 <= after.replicas <= 50
        assert after.summary
        if isinstance(said.rate_per_s, Unavailable) or said.coverage < 1.0 or said.tiers[Role.SERVE].coverage < 1.0:
            assert after.replicas >= before
    json.dumps(dump_service_state(fleet.service), allow_nan=False)


@pytest.mark.parametrize("seed", range(3))
def test_service_decision_is_independent_of_other_services(seed: int) -> None:
    rng, alone, other, stranger = random.Random(seed), loaded(), loaded(), loaded()
    for second in range(1, 60):
        now_s, said = alone.now_s + second, service_metrics(RATE * rng.uniform(0.5, 2.0), Role.SERVE)
        observed = ServiceSnapshot(said, {"serve": TierSnapshot(3, 3, (), ABOUT)})
        odd = ServiceSnapshot(
            random_metrics(rng), {"serve": TierSnapshot(rng.randrange(4), rng.randrange(6), (), ABOUT)}
        )
        one = decide_all({"a": (alone.service, observed, alone.scaling_spec)}, now_s)["a"]
        both = {"s": (stranger.service, odd, stranger.scaling_spec), "a": (other.service, observed, other.scaling_spec)}
        assert decide_all(both, now_s)["a"] == one


@pytest.mark.parametrize("jump_s", [-1e7, -3600.0, -5.0, 0.0])
def test_clock_set_back_removes_no_replicas(jump_s: float) -> None:
    fleet, before = loaded(), loaded().replicas["serve"]
    fleet.now_s += jump_s
    counts = [fleet.tick(NORMAL_METRICS).tiers["serve"].replicas for _ in range(120)]
    assert min(counts) >= before
    assert fleet.tick(NORMAL_METRICS).tiers["serve"].is_held is False
    assert counts[-1] <= before + 1


def test_clock_jump_ahead_freezes_until_new_samples() -> None:
    fleet, before = loaded(), loaded().replicas["serve"]
    fleet.now_s += 1e7
    silent = replace(NORMAL_METRICS, has_new_rate=False)
    assert all(fleet.tick(silent).tiers["serve"].replicas == before for _ in range(20))
    assert fleet.run(NORMAL_METRICS, 60).tiers["serve"].replicas >= before


# What is seen


def test_pod_count_anomalies_do_not_change_required_replicas() -> None:
    fleet = loaded()
    desired = need(fleet).replicas
    for replicas, ready in (
        (desired, 0),
        (desired, 1),
        (0, 0),
        (0, 9),
        (desired, 10 * desired),
        (1, 0),
        (desired, desired),
    ):
        fleet.now_s += 1.0
        observed = ServiceSnapshot(NORMAL_METRICS, {"serve": TierSnapshot(replicas, ready, (), ABOUT)})
        found = decide_all({"one": (fleet.service, observed, fleet.scaling_spec)}, fleet.now_s)["one"].tiers["serve"]
        assert need(fleet).replicas == desired
        assert found.replicas >= desired


def test_unknown_and_missing_tiers_leave_other_tiers_alone() -> None:
    fleet = loaded()
    before = fleet.replicas["serve"]
    for tiers in (
        {},
        {"other": TierSnapshot(7, 7)},
        {"other": TierSnapshot(7, 7), "serve": TierSnapshot(before, before)},
    ):
        fleet.now_s += 1.0
        found = decide_all(
            {"one": (fleet.service, ServiceSnapshot(NORMAL_METRICS, tiers), fleet.scaling_spec)}, fleet.now_s
        )["one"]
        assert found.tiers["serve"].replicas >= before
        assert "other" not in found.tiers


def test_pods_that_never_start_are_replaced_once() -> None:
    fleet, desired = loaded(), loaded().replicas["serve"]
    counts, created_s = [desired], [fleet.now_s] * desired
    for _ in range(200):
        fleet.now_s += 10.0
        pods = tuple(StartingPod(f"p{n}", since_s, "pull") for n, since_s in enumerate(created_s))
        observed = ServiceSnapshot(NORMAL_METRICS, {"serve": TierSnapshot(len(pods), 0, pods, ABOUT)})
        found = decide_all({"one": (fleet.service, observed, fleet.scaling_spec)}, fleet.now_s)["one"].tiers["serve"]
        counts.append(found.replicas)
        created_s += [fleet.now_s] * (found.replicas - len(created_s))
        del created_s[found.replicas :]
    assert desired < max(counts) <= 2 * desired
    assert counts[60:] == sorted(counts[60:], reverse=True), "what the reserve gives back is not ordered again"


def test_invalid_startup_durations_are_not_recorded() -> None:
    service = ServiceState.for_roles(["serve"])
    before = service.tiers["serve"].startup_model
    for seconds in (-1.0, math.nan, math.inf, 86400.0, 1e308):
        service.record_startup("serve", [("schedule", 1.0), ("pull", seconds)])
    service.record_startup("serve", [])
    assert service.tiers["serve"].startup_model is before
    service.record_startup("serve", [("engine", 0.0)])
    assert service.tiers["serve"].startup_model.total.startups == 1.0


# Against counting by hand


@pytest.mark.parametrize("rate", [3.0, 17.0, 40.0, 90.0])
def test_required_replicas_is_first_count_reaching_forecast(rate: float) -> None:
    fleet = Fleet(scaling_spec(tiers={"serve": TierPolicy(1, 200)}))
    fleet.run(service_metrics(rate, Role.SERVE), 90)
    sized = fleet.service.tiers["serve"].capacity_state.tier_spec
    assert sized is not None
    found, one = need(fleet), build_profile(sized)
    lines = [float(slo_capacity_per_s(one, count)[0]) for count in range(1, 60)]
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
    kept = json.dumps(dump_service_state(known.service))
    places = [path for path in leaf_paths(json.loads(kept)) if path]
    for _ in range(60):
        stored = json.loads(kept)
        path = rng.choice(places)
        at = stored
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = rng.choice(HOSTILE)
        service = ServiceState.for_roles(["serve"])
        restore_service_state(service, stored)
        observed = ServiceSnapshot(NORMAL_METRICS, {"serve": TierSnapshot(3, 3, (), ABOUT)})
        found = decide_all({"one": (service, observed, known.scaling_spec)}, known.now_s + 30.0)["one"]
        assert 1 <= found.tiers["serve"].replicas <= 50
        json.dumps(dump_service_state(service), allow_nan=False)


# What gateways are told


CLASSES = (ClassPolicy("default", 0, SLO),)


@pytest.mark.parametrize("seed", range(3))
def test_published_shares_sum_to_batch_under_churn(seed: int) -> None:
    """Gateways die and come, clocks jump, news are strange: the shares sum to the batch, and what is told is sound."""
    rng, fleet, keeper = random.Random(seed), loaded(), AdmissionPublisher()
    fleet.scaling_spec = replace(fleet.scaling_spec, classes=CLASSES)
    changes = 0
    for _ in range(150):
        fleet.now_s += random_clock_jump(rng)
        said = random_metrics(rng)
        fleet.tick(said)
        gateways = rng.sample(["gw-a", "gw-b", "gw-c", "gw-d"], rng.randrange(5))
        count = fleet.replicas["serve"]
        away = rng.randrange(count + 1)
        pods = tuple(StartingPod(f"p{n}", fleet.now_s - rng.uniform(-10, 400)) for n in range(away))
        observed = ServiceSnapshot(said, {"serve": TierSnapshot(count, count - away, pods, ABOUT)})
        changes += keeper.publish(fleet.service, observed, fleet.scaling_spec, gateways, fleet.now_s)
        limits = keeper.published
        assert limits is not None
        assert limits.cost_model is not None
        assert sum(limits.shares.values()) <= limits.cost_model.batch
        assert all(units >= 0 for units in limits.shares.values())
        assert 0.0 <= limits.ready_capacity < math.inf
        assert [at_s for at_s, _ in limits.capacity_steps] == sorted(at_s for at_s, _ in limits.capacity_steps)
        assert codec.encode(
            codec.decode(AdmissionLimits, json.loads(json.dumps(codec.encode(limits), allow_nan=False))),
        ) == codec.encode(limits)
    assert changes > 1


def test_publication_of_many_startups_is_downsampled() -> None:
    fleet, keeper = loaded(), AdmissionPublisher()
    fleet.service.record_startup("serve", [("pull", 30.0)])
    fleet.scaling_spec = replace(fleet.scaling_spec, classes=CLASSES)
    pods = tuple(StartingPod(f"p{n}", fleet.now_s - 0.01 * n) for n in range(3000))
    observed = ServiceSnapshot(NORMAL_METRICS, {"serve": TierSnapshot(3004, 4, pods, ABOUT)})
    decide_all({"one": (fleet.service, observed, fleet.scaling_spec)}, fleet.now_s + 1.0)
    keeper.publish(fleet.service, observed, fleet.scaling_spec, ["gw-a"], fleet.now_s + 1.0)
    limits = keeper.published
    assert limits is not None
    assert len(limits.capacity_steps) == MAX_CAPACITY_STEPS
    assert limits.capacity_steps[0][0] == limits.ready_at_s
    assert limits.capacity_steps[-1][1] == pytest.approx(limits.ready_capacity)


def test_publications_are_at_least_two_seconds_apart() -> None:
    rng, fleet, keeper = random.Random(1), loaded(), AdmissionPublisher()
    fleet.scaling_spec = replace(fleet.scaling_spec, classes=CLASSES)
    published_s = []
    for _ in range(100):
        fleet.tick(random_metrics(rng))
        observed = ServiceSnapshot(NORMAL_METRICS, {"serve": TierSnapshot(3, rng.randrange(4), (), ABOUT)})
        if keeper.publish(
            fleet.service, observed, fleet.scaling_spec, ["gw-a", "gw-b"][: rng.randrange(3)], fleet.now_s
        ):
            published_s.append(fleet.now_s)
    assert len(published_s) > 5
    assert all(later - sooner >= MIN_PUBLISH_INTERVAL_S for sooner, later in pairwise(published_s))
