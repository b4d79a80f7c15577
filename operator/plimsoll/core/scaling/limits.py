"""Steps 7 and 8: what the user, the cluster and the budget allow, and whether it is done.

Problem: limits contradict each other (a minimum above the budget, a rate limit against a need), and the user must be
told which of them stands in the way.

Idea: a fixed order, in which the later ones win: how fast, what fits on the nodes, least and most (with those of the
schedule), and last the GPU budget, which takes from the tier that is left with the largest share of what it wants, and
never goes below a minimum. Every limit that changed the count is named.
"""

from __future__ import annotations

from plimsoll.core.lifecycle import refused
from plimsoll.core.scaling.course import Course
from plimsoll.core.scaling.decision import Limit
from plimsoll.core.scaling.policy import Mode, Policy
from plimsoll.core.scaling.state import MOST_KEPT, NO_BACKOFF, Mark


def limits(courses: list[Course], gpus_granted: int | None, now_s: float) -> None:
    """Step 7 for all tiers."""
    counts: dict[str, int] = {}
    words: dict[str, list[str]] = {}
    for course in courses:
        told = words.setdefault(course.name, [])
        count = _fits(course, _paced(course, course.count, now_s, told), now_s, told)
        counts[course.name] = _bounded(course, count, told)
    if gpus_granted is not None:
        _share(courses, counts, gpus_granted, words)
    for course in courses:
        if words[course.name]:
            course.say("limits", "{}", "; ".join(words[course.name]), count=counts[course.name])
        else:
            course.say("limits", "within {} to {}", *course.bounds, count=counts[course.name])


def _bounded(course: Course, count: int, told: list[str]) -> int:
    least, most = course.bounds
    usual = (course.policy.min_replicas, course.policy.max_replicas)
    scheduled = "" if course.bounds == usual else " by the schedule"
    if count < least:
        course.limited_by(Limit.MIN)
        told.append(f"minReplicas is {least}{scheduled}")
        return least
    if count > most:
        course.limited_by(Limit.MAX)
        told.append(f"{count} wanted, maxReplicas is {most}{scheduled}")
        return most
    return count


def _paced(course: Course, count: int, now_s: float, told: list[str]) -> int:
    """The rate limits: against the least, or most, that was ordered within their time."""
    up, down, before = course.policy.up, course.policy.down, course.seen.replicas
    longest_s = max((limit.per_s for limit in (up, down) if limit is not None), default=0.0)
    if not longest_s:
        course.keep("ordered", ())
        return count
    marks = [Mark(mark.replicas, min(mark.since_s, now_s)) for mark in course.state.ordered]
    if not marks or marks[-1].replicas != before:
        marks.append(Mark(before, now_s))
    begun = [place for place, mark in enumerate(marks) if mark.since_s <= now_s - longest_s]
    marks = marks[begun[-1] if begun else 0 :][-MOST_KEPT:]
    course.keep("ordered", tuple(marks))
    if up is not None and count > (most := max(before, min(_within(marks, now_s - up.per_s)) + up.replicas)):
        course.limited_by(Limit.RATE)
        told.append(f"{count} wanted, at most {up.replicas} more in {up.per_s:.0f} s")
        return most
    if down is not None and count < (least := min(before, max(_within(marks, now_s - down.per_s)) - down.replicas)):
        course.limited_by(Limit.RATE)
        told.append(f"{count} wanted, at most {down.replicas} fewer in {down.per_s:.0f} s")
        return least
    return count


def _within(marks: list[Mark], from_s: float) -> list[int]:
    """Counts in force at some time since then."""
    ends = [mark.since_s for mark in marks[1:]] + [float("inf")]
    return [mark.replicas for mark, end_s in zip(marks, ends, strict=True) if end_s > from_s]


def _fits(course: Course, count: int, now_s: float, told: list[str]) -> int:
    """While pods fit on no node, no more are ordered until the back-off has run out."""
    before = course.seen.replicas
    if not any(pod.refused is not None for pod in course.seen.starting):
        course.keep("backoff", NO_BACKOFF)
        return count
    last = course.state.backoff
    course.keep("backoff", refused(last, now_s))
    first_again = last.tries > 0 and course.state.backoff != last
    course.limited_by(Limit.UNSCHEDULABLE)
    if count <= before or first_again:
        return count
    left_s = course.state.backoff.until_s - now_s
    told.append(f"{count} wanted, but pods fit on no node; no more are ordered for {left_s:.0f} s")
    return before


def _share(courses: list[Course], counts: dict[str, int], granted: int, words: dict[str, list[str]]) -> None:
    """Take from whichever tier is left with most of what it wants, until the GPUs granted are enough; what was taken in
    vain, since a larger replica had to go after it, is given back."""
    wanted = dict(counts)
    gpus = {course.name: course.policy.gpus for course in courses}
    least = {course.name: course.bounds[0] for course in courses}
    one_each = {name: max(least[name], min(1, count)) for name, count in wanted.items()}
    used = sum(gpus[name] * counts[name] for name in counts)
    while used > granted:
        able = [name for name in counts if gpus[name] and counts[name] > one_each[name]]
        if not able:
            counts.update(least)  # a tier alone serves nobody
            break
        taken = max(able, key=lambda name: (counts[name] - 1) / wanted[name])
        counts[taken], used = counts[taken] - 1, used - gpus[taken]
    else:
        for name in sorted(counts, key=lambda name: counts[name] / max(wanted[name], 1)):
            more = min(wanted[name] - counts[name], (granted - used) // gpus[name] if gpus[name] else 0)
            counts[name], used = counts[name] + more, used + gpus[name] * more
    for course in courses:
        if counts[course.name] < wanted[course.name]:
            course.limited_by(Limit.BUDGET)
            words[course.name].append(f"{wanted[course.name]} wanted, the GPU budget grants {granted} GPUs in all")


def mode(course: Course, policy: Policy) -> int:
    """Step 8: whether the count is set. Returns it as recommended."""
    decided, before = course.count, course.seen.replicas
    if policy.paused:
        course.say("mode", "paused: {} stay, {} recommended", before, decided, count=before)
    elif policy.mode is Mode.AUTO and course.held is None:
        course.say("mode", "mode is Auto", count=decided)
    elif policy.mode is Mode.AUTO:
        course.say("mode", "mode is Auto, demand not known: {}", course.held, count=decided)
    else:
        course.say("mode", "mode is {}: {} stay, {} recommended", policy.mode, before, decided, count=before)
    return decided
