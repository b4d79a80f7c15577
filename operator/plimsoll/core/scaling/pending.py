"""Steps 4 and 5: what is on its way, and what two tiers owe each other.

Problem: a pod that hangs must not pass for capacity, nor may replacing it order the whole cluster; and a prefill tier
without a decode tier, or at an odd ratio to it, serves nobody. Yet no tier may wait for the other's pods.

Idea: starting replicas are part of the count that is ordered, each with its time of arrival. One that is overdue is
ordered once more, and only while it is missing, so each missing replica is ordered twice at most. Joint rules look at
what the tiers need, never at which pods are up.
"""

from __future__ import annotations

import math

from plimsoll.core.forecast import Unknown
from plimsoll.core.lifecycle import Eta, Overdue, eta
from plimsoll.core.scaling.course import Course
from plimsoll.core.scaling.observation import Demand

PREFILL, DECODE = "prefill", "decode"


def pending(course: Course, now_s: float) -> None:
    """Step 4: credit for those that start, none for those overdue."""
    seen = course.seen
    if not seen.starting:
        course.say("pending", "{} ready, none starting", seen.ready)
        return
    refused = [pod for pod in seen.starting if pod.refused is not None]
    found = [(pod, eta(seen.ledger, pod, now_s)) for pod in seen.starting if pod.refused is None]
    etas = course.etas_s = tuple(sorted(expected.likely_s for _, expected in found if isinstance(expected, Eta)))
    late = {pod.pod: expected for pod, expected in found if isinstance(expected, Overdue)}
    course.overdue = tuple(late)
    words = [f"{seen.ready} ready"]
    if etas:
        words.append(f"{len(etas)} starting, the next in {etas[0]:.0f} s, the last in {etas[-1]:.0f} s")
    if late:
        longest = max(late.values(), key=lambda one: one.elapsed_s)
        words.append(f"{len(late)} overdue for {longest.elapsed_s - longest.limit_s:.0f} s and not counted on")
        words[-1] += f" (a start takes {longest.limit_s:.0f} s at most)"
        again = 0 if course.held else min(len(late), max(0, course.up - seen.ready))
        if again:
            course.up, course.release = course.up + again, max(course.release, course.up + again)
            words.append(f"{again} ordered once more")
    if refused:
        words.append(f"{len(refused)} fit on no node: {refused[0].refused}")
    course.say("pending", "{}", ", ".join(words))


def _load(course: Course) -> float | None:
    """Forecast work over the load line of what is ordered; None if not known, infinite where nothing is ordered."""
    demand, need = course.seen.demand, course.seen.need
    if course.held or not isinstance(demand, Demand) or isinstance(need, Unknown):
        return None
    line = course.seen.replicas * need.replica_work
    return demand.forecast.work / line if line else (math.inf if demand.forecast.work else 0.0)


def joint(courses: list[Course], ratio: tuple[float, float]) -> str | None:
    """Step 5: the ratio is kept by raising the smaller, and none goes to zero alone.

    Returns the binding tier: the one nearest to its load line, or furthest beyond it; None if none is known.
    """
    by_name = {course.name: course for course in courses}
    loads = {course.name: share for course in courses if (share := _load(course)) is not None}
    binds = max(loads, key=loads.__getitem__) if loads else None
    notes: dict[str, str] = {}
    for course in courses:
        if course.up == 0 and any(other.aim or other.bounds[0] for other in courses if other is not course):
            course.up, course.release = 1, max(1, course.release)
            notes[course.name] = "at least 1, since the other tier serves"
    if PREFILL in by_name and DECODE in by_name:
        _keep_ratio(by_name[PREFILL], by_name[DECODE], ratio, notes)
    for course in courses:
        share = loads.get(course.name)
        note = f"; {notes[course.name]}" if course.name in notes else ""
        if share == math.inf:
            course.say("joint", "nothing ordered yet{}", note)
        elif share is None:
            course.say("joint", "load not known; {} binds{}", binds or "no tier", note)
        else:
            course.say("joint", "{:.0%} of its load line is used; {} binds{}", share, binds, note)
    return binds


def _keep_ratio(prefill: Course, decode: Course, ratio: tuple[float, float], notes: dict[str, str]) -> None:
    """Raise what is too few for the other. A held tier stands for itself and may be raised as well."""
    least, most = ratio
    for rise, other, factor, bound_words in (
        (prefill, decode, least, ("at least", least)),
        (decode, prefill, 1.0 / most, ("at most", most)),
    ):
        for bound in ("up", "release"):
            wanted = math.ceil(factor * getattr(other, bound) - 1e-9)
            if wanted > getattr(rise, bound):
                setattr(rise, bound, wanted)
                notes[rise.name] = "{} {:g} prefill replicas for each decode replica".format(*bound_words)
        rise.release = max(rise.release, rise.up)
