"""What one source counted between two of its readings.

Problem: a counter that went back, a source that began anew, a long silence or a number that is none would each pass
for load, or for its absence, if two readings were just subtracted.

Idea: two readings make an interval or they do not. Where they do not, that interval alone is lost and the newer
reading is the base of the next. A figure that either reading lacks is absent from the interval; it is not 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from operator import lt, sub
from typing import Any, Final, NamedTuple, TypeVar

from plimsoll.core.buckets import difference, merged
from plimsoll.core.ports import Buckets, EngineReading, Judged, ServiceReading

GAP_S: Final = 15.0  # readings further apart say nothing of the time between
CLOCK_S: Final = 60.0  # a clock set back by more is believed
MOST: Final = 1e15  # no count and no sum of seconds comes near: a century of a million tokens a second

UNPROMISED: Final = frozenset({"quota_exceeded", "request_too_large"})  # what is refused for the client's own sake

_COUNTERS: Final = (
    "steps",
    "computed_tokens",
    "generated_tokens",
    "local_prompt_tokens",
    "cached_prompt_tokens",
    "moved_prompt_tokens",
    "preemptions",
    "post_s",
)
_NUMBERS: Final = (*_COUNTERS, "running", "waiting", "kv_used", "transfer_s")
_HISTOGRAMS: Final = ("prompt_tokens", "output_tokens", "tpot_s", "ttft_s", "gaps_s")


class EngineInterval(NamedTuple):
    """One engine over `seconds`; None is not known."""

    seconds: float
    steps: float | None = None
    computed_tokens: float | None = None
    generated_tokens: float | None = None
    local_prompt_tokens: float | None = None
    cached_prompt_tokens: float | None = None
    moved_prompt_tokens: float | None = None
    preemptions: float | None = None
    post_s: float | None = None
    prompt_tokens: Buckets | None = None
    output_tokens: Buckets | None = None
    tpot_s: Buckets | None = None
    ttft_s: Buckets | None = None
    gaps_s: Buckets | None = None


class ServiceInterval(NamedTuple):
    """One service at one gateway over `seconds`; None is not known. refused: for want of room or
    time; a quota that was used up, or a request that no engine could hold, breaks no promise.

    sized: those of `arrived` whose tokens are told. judged, missed, missed_ttft, missed_e2e: as in `Judged`. paced: of
    those judged, how many were promised which time per output token, s.
    """

    seconds: float
    arrived: float
    answered: float
    failed: float
    refused: float
    sized: float | None = None
    arrived_tokens: float | None = None
    ttft_s: Buckets | None = None
    e2e_s: Buckets | None = None
    judged: float | None = None
    missed: float | None = None
    missed_ttft: float | None = None
    missed_e2e: float | None = None
    paced: Mapping[float, float] | None = None


Part = float | Buckets | Mapping[float, float] | None
Sums = TypeVar("Sums", bound=tuple[Part, ...])


def together(a: Sums, b: Sums) -> Sums:
    """Both added, figure by figure; one that is absent from either is the other's."""
    return type(a)._make(map(_added, a, b))  # type: ignore[attr-defined, no-any-return]


def times(a: Sums, factor: float) -> Sums:
    """Every figure times `factor`, 0 or more."""
    return type(a)._make(_scaled(value, factor) for value in a)  # type: ignore[attr-defined, no-any-return]


def is_time(at_s: float) -> bool:
    """Whether it is a point in time at all."""
    return abs(at_s) <= MOST


def is_later(at_s: float, than_s: float) -> bool:
    """Whether a reading is news: later than the last one, or of a clock that was set back since."""
    return at_s > than_s or at_s < than_s - CLOCK_S


def is_fresh(at_s: float, now_s: float, trust_s: float) -> bool:
    """Whether a reading still holds; one from far in the future is of a clock that was set back since."""
    return -CLOCK_S <= now_s - at_s <= trust_s


def answered(reading: EngineReading) -> EngineReading:
    """The reading without what is no answer: NaN, negative values, such as no count reaches, and shares above 1."""
    no_answers = [name for name in _NUMBERS if not _is_number(getattr(reading, name))]
    no_answers += [name for name in _HISTOGRAMS if not _is_histogram(getattr(reading, name))]
    if reading.kv_used is not None and reading.kv_used > 1.0:
        no_answers.append("kv_used")
    nothing: dict[str, Any] = dict.fromkeys(no_answers)
    return replace(reading, **nothing) if nothing else reading


def is_answer(reading: ServiceReading) -> bool:
    """Whether all counts of a service are numbers that can be counts."""
    counts = (reading.arrived, reading.arrived_tokens, reading.answered, reading.failed)
    now = (reading.waiting, reading.held_work_s, reading.ticket_work_s, *reading.inflight.values())
    judged = *(reading.judged or ()), *(reading.paced or {}).values()
    times = (reading.ttft_s, reading.e2e_s)
    return all(map(_is_number, (*counts, *now, *judged, *reading.refused.values()))) and all(map(_is_histogram, times))


def engine_interval(old: EngineReading, new: EngineReading) -> EngineInterval | None:
    """What an engine counted between two readings (both `answered`); None where they cannot be subtracted."""
    seconds = new.at_s - old.at_s
    if new.born != old.born or not 0.0 < seconds <= GAP_S:
        return None
    changes = [_change(getattr(old, name), getattr(new, name)) for name in _COUNTERS]
    if any(change is not None and change < 0.0 for change in changes):
        return None
    pairs = [(getattr(old, name), getattr(new, name)) for name in _HISTOGRAMS]
    if any(_fell(before, after) for before, after in pairs):
        return None
    return EngineInterval._make((seconds, *changes, *(_between(before, after) for before, after in pairs)))


def service_interval(
    old: tuple[str, float, ServiceReading], new: tuple[str, float, ServiceReading]
) -> ServiceInterval | None:
    """What a gateway counted of a service between two readings (each with its source's start and its time, s)."""
    (old_born, old_s, before), (new_born, new_s, after) = old, new
    seconds = new_s - old_s
    if new_born != old_born or not 0.0 < seconds <= GAP_S:
        return None
    times = [(before.ttft_s, after.ttft_s), (before.e2e_s, after.e2e_s)]
    if any(_fell(*pair) for pair in times):
        return None
    changes = (
        after.arrived - before.arrived,
        after.answered - before.answered,
        after.failed - before.failed,
        _shed(after) - _shed(before),
    )
    tokens = _change(before.arrived_tokens, after.arrived_tokens)
    judged, paced = _judged(before.judged, after.judged), _paced(before.paced, after.paced)
    if min(*changes, tokens or 0.0, *(judged or ()), *(paced or {}).values()) < 0.0:
        return None
    sized = None if tokens is None else changes[0]
    counts = (seconds, *changes, sized, tokens, *(_between(*pair) for pair in times))
    return ServiceInterval._make((*counts, *(judged or (None,) * len(Judged._fields)), paced))


def _added(a: Part, b: Part) -> Part:
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, Buckets) or isinstance(b, Buckets):
        return merged(part for part in (a, b) if isinstance(part, Buckets))
    if isinstance(a, Mapping) or isinstance(b, Mapping):
        parts = [part for part in (a, b) if isinstance(part, Mapping)]
        return {key: math.fsum(part.get(key, 0.0) for part in parts) for part in parts for key in part}
    return a + b


def _scaled(value: Part, factor: float) -> Part:
    if isinstance(value, Buckets):
        return Buckets(value.edges, tuple(n * factor for n in value.counts), value.total * factor)
    if isinstance(value, Mapping):
        return {key: count * factor for key, count in value.items()}
    return None if value is None else value * factor


def _is_number(value: float | None) -> bool:
    return value is None or 0.0 <= value <= MOST


def _is_histogram(b: Buckets | None) -> bool:
    if b is None:
        return True
    whole = bool(b.counts) and len(b.counts) == len(b.edges)
    return whole and min(b.counts) >= 0.0 and _is_number(sum(b.counts)) and _is_number(b.total)


def _change(old: float | None, new: float | None) -> float | None:
    return None if old is None or new is None else new - old


def _judged(old: Judged | None, new: Judged | None) -> Judged | None:
    return None if old is None or new is None else Judged._make(map(sub, new, old))


def _paced(old: Mapping[float, float] | None, new: Mapping[float, float] | None) -> Mapping[float, float] | None:
    if old is None or new is None:
        return None
    return {target_s: count - old.get(target_s, 0.0) for target_s, count in new.items()}


def _fell(old: Buckets | None, new: Buckets | None) -> bool:
    """Whether a histogram is of another source than before: it has other edges, or a count went back."""
    if old is None or new is None:
        return False
    return new.edges != old.edges or new.total < old.total or any(map(lt, new.counts, old.counts))


def _between(old: Buckets | None, new: Buckets | None) -> Buckets | None:
    return None if old is None or new is None else difference(new, old)


def _shed(reading: ServiceReading) -> float:
    return math.fsum(count for reason, count in reading.refused.items() if reason not in UNPROMISED)
