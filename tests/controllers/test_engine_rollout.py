"""The platform's rollout of engines: which service gets its turn, what stops it, and what it says."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from typing import Any

import pytest

from plimsoll.api import labels
from plimsoll.controllers.engine_rollout.rollout_controller import SLICE_SIZE, EngineRollout
from plimsoll.controllers.engine_rollout.rollout_plan import Phase, RolloutPlan, plan_rollout
from plimsoll.controllers.engine_rollout.rollout_state import RolloutState, rollout_state
from plimsoll.controllers.isolation import ObjectErrors
from plimsoll.controllers.object_cache import Key, ObjectCache
from plimsoll.resources.platform_config import EngineRolloutSettings
from plimsoll.telemetry import operator_metrics
from tests import builders

Object = dict[str, Any]

NOW_S = 1_800_000_000.0
SETTINGS = EngineRolloutSettings(generation=2)
BEFORE, ROLLED, AFTER = "2027-01-15T07:00:00Z", "2027-01-15T07:30:00Z", "2027-01-15T07:40:00Z"  # NOW_S is 08:00
ROLLED_S = NOW_S - 1800.0
NO_SLO, WITH_SLO = (False, 20.0), (True, 20.0)


def waiting(name: str, importance: tuple[bool, float] = WITH_SLO, **changes: Any) -> RolloutState:
    return replace(RolloutState(("t", name), importance, is_current=False, is_settled=False), **changes)


def rolled(name: str, **changes: Any) -> RolloutState:
    """A service that the rollout has reached, in order and watched for long enough."""
    return replace(RolloutState(("t", name), WITH_SLO, is_current=True, rolled_at_s=ROLLED_S), **changes)


def plan(*states: RolloutState, granted: frozenset[Key] = frozenset(), **settings: Any) -> RolloutPlan:
    return plan_rollout(states, SETTINGS.model_copy(update=settings), granted, NOW_S)


def turns(found: RolloutPlan) -> list[str]:
    return sorted(name for _, name in found.turns)


def reason(found: RolloutPlan, name: str) -> tuple[str, str]:
    condition = found.conditions["t", name]
    return condition.reason.value, condition.message


def order(*states: RolloutState) -> list[str]:
    """The services in the order of their turns, each rolled out at once."""
    left, found = list(states), list[str]()
    while left:
        [name] = turns(plan(*left))
        found.append(name)
        left = [one for one in left if one.key[1] != name]
    return found


def test_order_is_least_important_first_and_failing_last() -> None:
    assert order(
        waiting("failing", NO_SLO, was_failing=True),
        waiting("precious", (True, 900.0)),
        waiting("b"),
        waiting("a"),
        waiting("cheap", (True, 1.0)),
        waiting("no-slo", NO_SLO),
        waiting("victim", (True, 900.0), failure="its engines fail"),
    ) == ["victim", "no-slo", "cheap", "a", "b", "precious", "failing"]


@pytest.mark.parametrize(("limit", "started"), [(1, ["a"]), (2, ["a", "b"]), (9, ["a", "b", "c"])])
def test_turns_start_at_most_max_unavailable_services(limit: int, started: list[str]) -> None:
    found = plan(waiting("c"), waiting("b"), waiting("a"), max_unavailable_services=limit)
    assert turns(found) == started
    assert [reason(found, name)[0] for name in started] == ["RollingOut"] * len(started)


def test_turns_count_services_that_are_not_settled() -> None:
    busy = rolled("busy", is_settled=False)
    assert turns(plan(busy, waiting("a"), waiting("b"))) == []
    assert turns(plan(busy, waiting("a"), waiting("b"), max_unavailable_services=2)) == ["a"]
    assert turns(plan(rolled("done"), waiting("a"))) == ["a"]


def test_turn_is_kept_until_the_objects_show_it() -> None:
    """A less important service that comes meanwhile does not get a second turn."""
    found = plan(waiting("a"), waiting("new", NO_SLO), granted=frozenset({("t", "a")}))
    assert turns(found) == ["a"]


def test_turn_goes_on_while_one_tier_has_the_former_templates() -> None:
    half = rolled("half", is_current=False, is_settled=False)
    assert turns(plan(half, waiting("a"))) == ["half"]
    assert turns(plan(half, waiting("a"), paused=True)) == ["half"]


def test_service_that_failed_before_holds_no_turn_for_ever() -> None:
    ill = rolled("ill", is_settled=False, was_failing=True)
    assert turns(plan(ill, waiting("a"))) == ["a"]
    assert turns(plan(replace(ill, rolled_at_s=NOW_S - 60.0), waiting("a"))) == []


def test_failure_stops_all_and_every_service_says_why() -> None:
    failed = rolled("bad", failure="condition SLOMet is False (SLOViolated)")
    found = plan(failed, waiting("a"), waiting("b"), max_unavailable_services=3)
    assert turns(found) == []
    assert found.phases == {("t", "bad"): Phase.FAILED, ("t", "a"): Phase.WAITING, ("t", "b"): Phase.WAITING}
    assert reason(found, "bad") == (
        "RolloutFailed",
        "condition SLOMet is False (SLOViolated), and was not before the service got engines of generation 2; no other "
        "service gets them until this ends: fix it, or undo the change of engine.rollout.generation",
    )
    assert reason(found, "b") == (
        "RolloutStopped",
        "engines of generation 2 (engine.rollout.generation) wait, because a service that has them fails: t/bad, "
        "condition SLOMet is False (SLOViolated)",
    )
    assert turns(plan(replace(failed, failure=""), waiting("a"))) == ["a"]


def test_failure_after_the_rollout_is_not_its_failure() -> None:
    assert plan(rolled("bad", failure="condition SLOMet is False")).conditions == {}
    found = plan(rolled("last", failure="its engines fail", is_settled=False))
    assert found.phases == {("t", "last"): Phase.FAILED}


def test_paused_rollout_starts_none_and_says_so() -> None:
    found = plan(waiting("a"), paused=True)
    assert turns(found) == []
    assert reason(found, "a") == (
        "RolloutPaused",
        "engines of generation 2 (engine.rollout.generation) wait until engine.rollout.paused is false",
    )


def test_waiting_services_name_the_one_ahead() -> None:
    found = plan(waiting("a"), waiting("b"), waiting("c"), waiting("d", obstacle="Deployment d is no longer paused"))
    expected = "engines of generation 2 (engine.rollout.generation)"
    assert reason(found, "b") == ("RolloutWaiting", f"{expected} come after service t/a")
    assert reason(found, "c") == ("RolloutWaiting", f"{expected} come after service t/b")
    assert reason(found, "d") == ("RolloutWaiting", f"{expected} wait until Deployment d is no longer paused")


# -- From objects


def deployment(service: Object, role: str, generation: int, *, progressing: str = "True", **spec: Any) -> Object:
    made = builders.deployment(service, role)
    made["metadata"]["labels"] |= {labels.TEMPLATE_GENERATION: str(generation)} if generation else {}
    made["spec"] |= spec
    replaced = {
        "type": "Progressing",
        "status": progressing,
        "reason": "NewReplicaSetAvailable" if progressing == "True" else "ProgressDeadlineExceeded",
        "lastUpdateTime": AFTER,
        "lastTransitionTime": AFTER,
    }
    return {**made, "status": {**made["status"], "conditions": [replaced]}}


def revision(service: Object, role: str, generation: int) -> Object:
    made = builders.deployment(service, role)
    own = {labels.ROLLED_OUT: "true", labels.TEMPLATE_GENERATION: str(generation)}
    meta = {**made["metadata"], "name": f"{role}-{generation}", "creationTimestamp": ROLLED}
    return {"kind": "ControllerRevision", "metadata": {**meta, "labels": meta["labels"] | own}, "data": {"x": 1}}


def condition(kind: str, status: str, reason: str, since: str) -> Object:
    return {"type": kind, "status": status, "reason": reason, "message": "", "lastTransitionTime": since}


def state(*children: Object, conditions: tuple[Object, ...] = (), **spec: Any) -> RolloutState:
    cache = ObjectCache()
    service = {**builders.service(**{"tiers": {"serve": {}}, **spec}), "status": {"conditions": list(conditions)}}
    for obj in (service, *children):
        cache.put(obj)
    found = rollout_state(cache, service, SETTINGS, NOW_S)
    assert found is not None
    return found


SERVICE = builders.service(tiers={"serve": {}})
DONE = (deployment(SERVICE, "serve", 2), revision(SERVICE, "serve", 2))


def test_state_of_untouched_service_waits() -> None:
    found = state(deployment(SERVICE, "serve", 0))
    assert (found.is_current, found.rolled_at_s, found.failure) == (False, None, "")
    assert state(deployment(SERVICE, "serve", 2)).is_current
    assert not state(deployment(SERVICE, "serve", 0), revision(SERVICE, "serve", 2)).is_current


def test_state_is_settled_after_min_ready_seconds() -> None:
    assert state(*DONE).is_settled
    assert state(*DONE).rolled_at_s == ROLLED_S
    for changed in ({"updatedReplicas": 0}, {"observedGeneration": 0}, {"conditions": []}):
        child = copy.deepcopy(DONE[0])
        child["status"] |= changed
        assert not state(child, DONE[1]).is_settled
    young = copy.deepcopy(DONE[0])
    young["status"]["conditions"][0]["lastUpdateTime"] = "2027-01-15T07:59:00Z"
    assert not state(young, DONE[1]).is_settled


def test_state_of_a_set_follows_its_leaders() -> None:
    """Released LeaderWorkerSets do not say which spec their status is of."""
    service = builders.service(tiers={"serve": {"nodes": 2}})

    def found(templates: tuple[str, ...], updating: str, since: str, replicas: int = 2) -> RolloutState:
        updates = {"type": "UpdateInProgress", "status": updating, "lastTransitionTime": since}
        stale = {"type": "Available", "status": "True", "lastTransitionTime": BEFORE}
        made = builders.leader_worker_set(service, replicas=replicas, status={"conditions": [stale, updates]})
        made["metadata"]["labels"][labels.TEMPLATE_GENERATION] = "2"
        pods = [builders.group_pod(service, f"p{n}", template=one) for n, one in enumerate(templates)]
        worker = builders.group_pod(service, "w", template="old", is_worker=True)
        return state(made, revision(service, "serve", 2), *pods, worker, tiers={"serve": {"nodes": 2}})

    assert not found(("old", "old"), "False", BEFORE).is_settled
    assert not found(("new", "old"), "True", AFTER).is_settled
    assert not found(("new", "new"), "True", AFTER).is_settled
    assert not found(("new", "new"), "False", "2027-01-15T07:59:00Z").is_settled
    assert found(("new", "new"), "False", AFTER).is_settled
    assert found((), "False", BEFORE, replicas=0).is_settled


@pytest.mark.parametrize(
    ("one", "is_failure"),
    [
        (condition("SLOMet", "False", "SLOViolated", AFTER), True),
        (condition("SLOMet", "Unknown", "NotMeasured", AFTER), False),
        (condition("ServeDegraded", "True", "ImageUnavailable", AFTER), True),
        (condition("PrefillDegraded", "True", "TransferSlow", AFTER), False),
        (condition("Stalled", "True", "ApplyRejected", AFTER), True),
        (condition("Ready", "False", "NoRoutableEndpoint", AFTER), True),
        (condition("Ready", "False", "ScaledToZero", AFTER), False),
        (condition("Ready", "False", "NoGateway", AFTER), False),
        (condition("ScalingLimited", "True", "AtMaxReplicas", AFTER), False),
    ],
    ids=lambda value: f"{value['type']} {value['reason']}" if isinstance(value, dict) else "",
)
def test_state_fails_by_conditions_that_began_after_it(one: Object, is_failure: bool) -> None:
    found = state(*DONE, conditions=(one,))
    assert (bool(found.failure), found.was_failing) == (is_failure, False)
    earlier = state(*DONE, conditions=({**one, "lastTransitionTime": BEFORE},))
    assert (earlier.failure, earlier.was_failing) == ("", is_failure)


def test_state_fails_by_a_deployment_that_does_not_progress() -> None:
    stuck = deployment(SERVICE, "serve", 2, progressing="False")
    found = state(stuck, DONE[1])
    assert found.failure == "Deployment chat-serve does not progress (ProgressDeadlineExceeded)"
    assert not found.is_settled


def test_state_of_victim_of_an_earlier_generation() -> None:
    violated = condition("SLOMet", "False", "SLOViolated", AFTER)
    found = state(deployment(SERVICE, "serve", 1), revision(SERVICE, "serve", 1), conditions=(violated,))
    assert (found.is_current, found.rolled_at_s, found.failure) == (
        False,
        None,
        "condition SLOMet is False (SLOViolated)",
    )


def test_state_names_the_obstacle() -> None:
    paused = deployment(SERVICE, "serve", 0, paused=True)
    assert state(paused).obstacle == "Deployment chat-serve is no longer paused (kubectl rollout resume)"
    stalled = condition("Stalled", "True", "ApplyRejected", BEFORE)
    assert state(deployment(SERVICE, "serve", 0), conditions=(stalled,)).obstacle == "its condition Stalled ends"
    assert state(deployment(SERVICE, "serve", 0), tiers={}).obstacle == "its spec is valid"


def test_state_importance_is_slo_and_miss_cost() -> None:
    slo = {"ttft": "2s", "tpot": "80ms"}
    child = deployment(SERVICE, "serve", 0)
    assert state(child).importance < state(child, slo=slo, scaling={"sloMissCost": 1}).importance
    assert state(child, slo=slo, scaling={"sloMissCost": 1}).importance < state(child, slo=slo).importance


def test_state_of_targets_and_new_services_is_none() -> None:
    cache = ObjectCache()
    assert rollout_state(cache, SERVICE, SETTINGS, NOW_S) is None
    cache.put(deployment(SERVICE, "serve", 0))
    leaving = {**SERVICE, "metadata": {**SERVICE["metadata"], "deletionTimestamp": AFTER}}
    assert rollout_state(cache, leaving, SETTINGS, NOW_S) is None


# -- The controller


def fleet(generation: int, *names: str) -> ObjectCache:
    cache = ObjectCache()
    for name in names:
        service = builders.service(name, tiers={"serve": {}})
        cache.put(service)
        cache.put(deployment(service, "serve", generation))
    return cache


def phases() -> dict[str, float]:
    [family] = operator_metrics.OPERATOR_ENGINE_ROLLOUT.collect()
    return {sample.labels["phase"]: sample.value for sample in family.samples}


async def test_first_plan_of_many_services_lets_others_run() -> None:
    names = [f"s-{number}" for number in range(4 * SLICE_SIZE)]
    rollout = EngineRollout(fleet(0, *names), EngineRolloutSettings(), lambda key: None, clock=lambda: NOW_S)
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(take_turns())
    await asyncio.gather(rollout.wait_planned(), rollout.wait_planned())  # of two workers: one of them plans
    other.cancel()
    assert turns >= 4
    assert phases()["updated"] == len(names)


def test_controller_restart_and_upgrade_change_nothing() -> None:
    """No change of the generation: no turn, no condition, and nothing is reconciled."""
    changed = list[Key]()
    rollout = EngineRollout(fleet(0, "a", "b"), EngineRolloutSettings(), changed.append, clock=lambda: NOW_S)
    rollout.plan()
    assert (changed, rollout.of(("team", "a")).has_turn, rollout.of(("team", "a")).condition) == ([], False, None)
    assert phases() == {"updated": 2, "updating": 0, "waiting": 0, "failed": 0}


def test_controller_goes_on_when_one_service_cannot_be_read() -> None:
    cache, errors = fleet(0, "a", "b"), ObjectErrors()
    broken = cache.get("Deployment", ("team", "a-serve"))
    assert broken is not None
    del broken["spec"]
    rollout = EngineRollout(cache, SETTINGS, lambda key: None, clock=lambda: NOW_S, errors=errors)
    assert rollout.of(("team", "b")).has_turn
    assert errors.condition(("team", "a")) is not None


def test_controller_reconciles_what_changes_and_exports_phases() -> None:
    changed, cache = list[Key](), fleet(0, "a", "b", "c")
    rollout = EngineRollout(cache, SETTINGS, changed.append, lambda key: key[1] == "c", clock=lambda: NOW_S)
    assert rollout.of(("team", "a")).has_turn
    assert sorted(changed) == [("team", "a"), ("team", "b")]
    assert phases() == {"updated": 0, "updating": 1, "waiting": 1, "failed": 0}
    changed.clear()
    rollout.plan()
    assert changed == []
    service = builders.service("a", tiers={"serve": {}})
    for child in (deployment(service, "serve", 2), revision(service, "serve", 2)):
        cache.put({**child, "metadata": {**child["metadata"], "resourceVersion": "20"}})
    rollout.plan()
    assert sorted(changed) == [("team", "a"), ("team", "b")]
    assert (rollout.of(("team", "a")).condition, rollout.of(("team", "b")).has_turn) == (None, True)
