"""The last replica of a service that may sleep: whether it goes, stays or comes.

Problem: any work at all asks for one replica, and the forecast of a service that is asked now and then fades over many
minutes, so that by the need alone the last one hardly ever goes; by a time-out alone it goes just before the next
request of a service that is asked regularly.

Idea: a bet on the next request (`forecast.pauses`). Being without costs a start's worth of GPU time and missCost times
the work of the requests that come within it; the last replica stays while some time of waiting for the next request
takes less than the chance of that cost. It always stays for one start-up after the last request, and while one is
held, runs, has been told to come back, or might do so unseen. It comes back with the first request, never by guess.
"""

from __future__ import annotations

from typing import Final

from plimsoll.core.forecast import Pause, Unknown
from plimsoll.core.scaling.course import Course
from plimsoll.core.scaling.observation import Need

REQUEST_GPU_S: Final = 1.0  # while nothing is known of the requests


def last(course: Course, pause: Pause | Unknown, miss_cost: float) -> str | None:
    """Set `up` and `release` where one replica or none is the question; returns why, None where it is not.

    Where demand is not known the replicas that are there are many or few for no known reason: they go together or stay.
    """
    if course.bounds[0] > 0 or (course.held is None and course.up > 1):
        return None
    if course.seen.replicas == 0:
        return _back(course, pause)
    if isinstance(pause, Unknown):
        _at_least_one(course)
        return f"the last one stays: {pause.why}"
    waiting = course.seen.backlog_gpu_s
    if pause.active or isinstance(waiting, Unknown) or waiting > 0.0 or course.seen.coverage < 1.0:
        _at_least_one(course)
        return None
    if course.policy.warm_replicas:
        return None
    return _bet(course, pause, miss_cost)


def _back(course: Course, pause: Pause | Unknown) -> str | None:
    waiting = course.seen.backlog_gpu_s
    if not isinstance(waiting, Unknown) and waiting > 0.0:
        _at_least_one(course)
        return f"{waiting:.3g} GPU-s of work wait and nothing runs: 1"
    if not isinstance(pause, Unknown) and pause.active:
        _at_least_one(course)
        return "requests come and nothing runs: 1"
    if course.policy.warm_replicas:
        return None
    course.up = course.release = 0
    return "none until a request comes"


def _bet(course: Course, pause: Pause, miss_cost: float) -> str:
    need, start_s = course.seen.need, course.seen.horizon_s
    request_gpu_s = need.request_gpu_s if isinstance(need, Need) else REQUEST_GPU_S
    cold_s = start_s + miss_cost * request_gpu_s * pause.burst
    wait = pause.best(cold_s)
    words = (
        f"no request for {pause.away_s:.0f} s, one within {start_s:.0f} s has a chance of {pause.chance(start_s):.0%}"
        f" and costs {cold_s:.3g} GPU-s if none is there"
    )
    if pause.away_s < start_s or wait.saves_s(cold_s) > 0.0:
        _at_least_one(course)
        return f"the last one stays: {words}"
    course.up = course.release = 0
    course.asleep = True
    return f"none stays: {words}"


def _at_least_one(course: Course) -> None:
    course.up, course.release = max(course.up, 1), max(course.release, 1)
