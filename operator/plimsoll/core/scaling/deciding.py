"""The one entry: eight steps from what is known to what is set."""

from __future__ import annotations

import math

from plimsoll.core.scaling import limits, pending, wanted
from plimsoll.core.scaling.course import Course
from plimsoll.core.scaling.decision import Decision, Step, TierDecision
from plimsoll.core.scaling.direction import direction
from plimsoll.core.scaling.observation import Observation
from plimsoll.core.scaling.policy import Policy, TierPolicy
from plimsoll.core.scaling.state import State, TierState


def decide(observation: Observation, policy: Policy, now_s: float) -> Decision:
    """Replicas for each tier of a service, with the steps that led there.

    A tier of which nothing was ever observed has the least that the user allows. now_s: seconds since the epoch.
    The same arguments give the same decision; `Decision.state` belongs into the next observation. Raises ValueError
    for a time that is no finite number.
    """
    if not math.isfinite(now_s):
        raise ValueError(f"a decision's time is a finite number of seconds, not {now_s}")
    state = observation.state
    courses = [
        Course(name, seen, allowed, state.tiers.get(name, TierState()), allowed.bounds(now_s, seen.horizon_s))
        for name, allowed in policy.tiers.items()
        if (seen := observation.tiers.get(name)) is not None
    ]
    binding = _run(courses, observation, policy, now_s)
    found = {course.name: _decision(course, policy) for course in courses}
    kept = {name: state.tiers[name] for name in policy.tiers if name in state.tiers}
    return Decision(
        {name: found.get(name) or _unobserved(allowed, kept.get(name)) for name, allowed in policy.tiers.items()},
        binding,
        State(now_s, kept | {course.name: course.state for course in courses}),
    )


def _run(courses: list[Course], observation: Observation, policy: Policy, now_s: float) -> str | None:
    """Steps 1 to 7; returns the binding tier."""
    last_s = observation.state.at_s
    passed_s = 0.0 if last_s is None else max(0.0, now_s - last_s)
    for course in courses:
        wanted.demand(course)
    wanted.reserved(courses, policy)
    for course in courses:
        wanted.need(course, policy, observation.pause)
        wanted.watch(course, now_s)
    for course in courses:
        wanted.feedback(course, courses, policy.slo, passed_s, now_s)
        pending.pending(course, now_s)
    binding = pending.joint(courses, policy.prefill_per_decode)
    direction(courses, policy.miss_cost, now_s)
    limits.limits(courses, observation.gpus_granted, now_s)
    return binding


def _decision(course: Course, policy: Policy) -> TierDecision:
    recommended = limits.mode(course, policy)
    course.keep("replicas", course.count)
    changed = recommended != course.seen.replicas
    return TierDecision(
        replicas=course.count,
        steps=tuple(course.steps),
        before=course.seen.replicas,
        recommended=recommended,
        limits=tuple(course.limits),
        counterfactual=wanted.counterfactual(course, policy.slo) if changed else None,
        held=course.held is not None,
        overdue=course.overdue,
        etas_s=course.etas_s,
    )


def _unobserved(policy: TierPolicy, last: TierState | None) -> TierDecision:
    """The minimum, or what was decided last: that nothing is observed now does not mean that nothing is there."""
    least = policy.min_replicas
    if last is None or last.replicas <= least:
        return TierDecision(least, (Step("limits", least, "minReplicas is {}", (least,)),))
    held = min(last.replicas, policy.max_replicas)
    return TierDecision(held, (Step("demand", held, "not observed: {} held", (held,)),), held=True)
