"""Counter increases of one source between two of its readings.

Problem: a counter reset, a restarted source, a long gap or an invalid number would each look like load, or like no
load, if two readings were simply subtracted.

Idea: two readings either form an interval or they do not. If not, only that interval is lost, and the newer reading is
the base of the next one. A figure that is missing from either reading is absent from the interval; it is not 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from operator import lt, sub
from typing import Any, Final, NamedTuple, TypeVar

from plimsoll.core.histogram import difference, merge
from plimsoll.core.ports import NO_DEMAND_REASONS, BucketCounts, EngineReading, ServiceReading, SloCounts

MAX_READING_GAP_S: Final = 15.0  # readings further apart form no interval
CLOCK_SKEW_S: Final = 60.0  # a larger step back is taken for a corrected clock
MAX_COUNT: Final = 1e15  # above any real count or sum of seconds: 30 years at a million tokens per second

_COUNTER_FIELDS: Final = (
    "steps",
    "computed_tokens",
    "generated_tokens",
    "local_prompt_tokens",
    "cached_prompt_tokens",
    "transferred_prompt_tokens",
    "preemptions",
    "post_s",
    "draft_tokens",
    "accepted_draft_tokens",
    "all_prompt_tokens",
    "decode_s",
    "busy_s",
)
_NUMERIC_FIELDS: Final = (
    *_COUNTER_FIELDS,
    "running",
    "waiting",
    "kv_used",
    "transfer_s",
    "prefill_s",
    "kv_tokens",
    "block_tokens",
)
_HISTOGRAM_FIELDS: Final = ("prompt_tokens", "output_tokens", "tpot_s", "ttft_s", "itl_s")


class EngineInterval(NamedTuple):
    """Counter increases of one engine over `seconds`; None where unknown."""

    seconds: float
    steps: float | None = None
    computed_tokens: float | None = None
    generated_tokens: float | None = None
    local_prompt_tokens: float | None = None
    cached_prompt_tokens: float | None = None
    transferred_prompt_tokens: float | None = None
    preemptions: float | None = None
    post_s: float | None = None
    draft_tokens: float | None = None
    accepted_draft_tokens: float | None = None
    all_prompt_tokens: float | None = None
    decode_s: float | None = None
    busy_s: float | None = None
    prompt_tokens: BucketCounts | None = None
    output_tokens: BucketCounts | None = None
    tpot_s: BucketCounts | None = None
    ttft_s: BucketCounts | None = None
    itl_s: BucketCounts | None = None


class ServiceInterval(NamedTuple):
    """Counter increases of one service at one gateway over `seconds`; None where unknown.

    arrivals: as `arrived` of `ServiceReading`. rejected: rejections for lack of capacity or time. arrivals_with_tokens:
    the arrivals whose tokens are reported. assessed, missed, ttft_missed, e2e_missed: as in `SloCounts`.
    by_tpot_target: assessed responses by their TPOT target in seconds. arrival_media_tokens: those of arrival_tokens
    that are no text, by kind; arrivals_by_class: the arrivals by request class; None without any.
    """

    seconds: float
    arrivals: float
    succeeded: float
    failed: float
    rejected: float
    arrivals_with_tokens: float | None = None
    arrival_tokens: float | None = None
    ttft_s: BucketCounts | None = None
    e2e_s: BucketCounts | None = None
    assessed: float | None = None
    missed: float | None = None
    ttft_missed: float | None = None
    e2e_missed: float | None = None
    by_tpot_target: Mapping[float, float] | None = None
    arrival_media_tokens: Mapping[str, float] | None = None
    arrivals_by_class: Mapping[str, float] | None = None

    def without_slo_counts(self) -> ServiceInterval:
        """The interval without the responses that were counted against targets."""
        if self.assessed is None:
            return self
        return self._replace(assessed=0.0, missed=0.0, ttft_missed=0.0, e2e_missed=0.0, by_tpot_target={})


CounterValue = float | BucketCounts | Mapping[Any, float] | None
KeyT = TypeVar("KeyT")
IntervalT = TypeVar("IntervalT", bound=tuple[CounterValue, ...])


def merge_intervals(first: IntervalT, second: IntervalT) -> IntervalT:
    """Add two intervals field by field; a field that one of them lacks is taken from the other."""
    return type(first)._make(map(_add_values, first, second))  # type: ignore[attr-defined, no-any-return]


def scale_interval(interval: IntervalT, factor: float) -> IntervalT:
    """Multiply every field by `factor`, 0 or more."""
    return type(interval)._make(_scale_value(value, factor) for value in interval)  # type: ignore[attr-defined, no-any-return]


def is_valid_time(at_s: float) -> bool:
    """Whether at_s is a valid point in time."""
    return abs(at_s) <= MAX_COUNT


def is_newer(at_s: float, last_s: float) -> bool:
    """Whether a reading is new: later than the last one, or from a clock that was set back since."""
    return at_s > last_s or at_s < last_s - CLOCK_SKEW_S


def is_fresh(at_s: float, now_s: float, max_age_s: float) -> bool:
    """Whether a reading is still valid at now_s. A reading from far in the future comes from a clock that was set back
    since.
    """
    return -CLOCK_SKEW_S <= now_s - at_s <= max_age_s


def sanitize(reading: EngineReading) -> EngineReading:
    """Return the reading without invalid figures: NaN, negative values, values above MAX_COUNT and shares above 1."""
    invalid_fields = [name for name in _NUMERIC_FIELDS if not _is_valid_count(getattr(reading, name))]
    invalid_fields += [name for name in _HISTOGRAM_FIELDS if not _is_valid_histogram(getattr(reading, name))]
    if reading.kv_used is not None and reading.kv_used > 1.0:
        invalid_fields.append("kv_used")
    cleared: dict[str, Any] = dict.fromkeys(invalid_fields)
    return replace(reading, **cleared) if cleared else reading


def is_valid_reading(reading: ServiceReading) -> bool:
    """Whether all counts of a service are valid counts."""
    counters = (reading.arrived, reading.arrived_tokens, reading.succeeded, reading.failed)
    gauges = (reading.queued, reading.queued_work_s, reading.reserved_work_s, *reading.inflight.values())
    slo_values = *(reading.slo_counts or ()), *(reading.by_tpot_target or {}).values()
    histograms = (reading.ttft_s, reading.e2e_s)
    by_key = *reading.rejected.values(), *reading.arrived_media_tokens.values(), *reading.arrived_by_class.values()
    return all(map(_is_valid_count, (*counters, *gauges, *slo_values, *by_key))) and all(
        map(_is_valid_histogram, histograms)
    )


def demand_rejections(reading: ServiceReading) -> float:
    """Rejections of requests that capacity would have served."""
    return math.fsum(count for reason, count in reading.rejected.items() if reason not in NO_DEMAND_REASONS)


def engine_interval(old: EngineReading, new: EngineReading) -> EngineInterval | None:
    """Counter increases of an engine between two `answered` readings; None where they form no interval."""
    seconds = new.at_s - old.at_s
    if new.instance_id != old.instance_id or not 0.0 < seconds <= MAX_READING_GAP_S:
        return None
    deltas = [_delta(getattr(old, name), getattr(new, name)) for name in _COUNTER_FIELDS]
    if any(change is not None and change < 0.0 for change in deltas):
        return None
    histograms = [(getattr(old, name), getattr(new, name)) for name in _HISTOGRAM_FIELDS]
    if any(_was_reset(before, after) for before, after in histograms):
        return None
    return EngineInterval._make((seconds, *deltas, *(_histogram_delta(before, after) for before, after in histograms)))


def service_interval(
    old: tuple[str, float, ServiceReading], new: tuple[str, float, ServiceReading]
) -> ServiceInterval | None:
    """Counter increases of a service at a gateway between two readings; None where they form no interval.

    Each reading comes with its source's instance id and its time in seconds.
    """
    (old_instance_id, old_s, before), (new_instance_id, new_s, after) = old, new
    seconds = new_s - old_s
    if new_instance_id != old_instance_id or not 0.0 < seconds <= MAX_READING_GAP_S:
        return None
    histograms = [(before.ttft_s, after.ttft_s), (before.e2e_s, after.e2e_s)]
    if any(_was_reset(*pair) for pair in histograms):
        return None
    deltas = (
        after.arrived - before.arrived,
        after.succeeded - before.succeeded,
        after.failed - before.failed,
        demand_rejections(after) - demand_rejections(before),
    )
    arrival_tokens = _delta(before.arrived_tokens, after.arrived_tokens)
    slo_counts, by_tpot_target = (
        _slo_counts_delta(before.slo_counts, after.slo_counts),
        _by_tpot_target_delta(before.by_tpot_target, after.by_tpot_target),
    )
    media_tokens = _by_key_delta(before.arrived_media_tokens, after.arrived_media_tokens)
    by_class = _by_key_delta(before.arrived_by_class, after.arrived_by_class)
    by_key = *(by_tpot_target or {}).values(), *media_tokens.values(), *by_class.values()
    if min(*deltas, arrival_tokens or 0.0, *(slo_counts or ()), *by_key) < 0.0:
        return None
    arrivals_with_tokens = None if arrival_tokens is None else deltas[0]
    counts = (seconds, *deltas, arrivals_with_tokens, arrival_tokens, *(_histogram_delta(*pair) for pair in histograms))
    slo_fields = slo_counts or (None,) * len(SloCounts._fields)
    return ServiceInterval._make((*counts, *slo_fields, by_tpot_target, media_tokens or None, by_class or None))


def _add_values(first: CounterValue, second: CounterValue) -> CounterValue:
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, BucketCounts) or isinstance(second, BucketCounts):
        return merge(part for part in (first, second) if isinstance(part, BucketCounts))
    if isinstance(first, Mapping) or isinstance(second, Mapping):
        parts = [part for part in (first, second) if isinstance(part, Mapping)]
        return {key: math.fsum(part.get(key, 0.0) for part in parts) for part in parts for key in part}
    return first + second


def _scale_value(value: CounterValue, factor: float) -> CounterValue:
    if isinstance(value, BucketCounts):
        return BucketCounts(value.edges, tuple(n * factor for n in value.counts), value.value_sum * factor)
    if isinstance(value, Mapping):
        return {key: count * factor for key, count in value.items()}
    return None if value is None else value * factor


def _is_valid_count(value: float | None) -> bool:
    return value is None or 0.0 <= value <= MAX_COUNT


def _is_valid_histogram(histogram: BucketCounts | None) -> bool:
    if histogram is None:
        return True
    complete = bool(histogram.counts) and len(histogram.counts) == len(histogram.edges)
    return (
        complete
        and min(histogram.counts) >= 0.0
        and _is_valid_count(sum(histogram.counts))
        and _is_valid_count(histogram.value_sum)
    )


def _delta(old: float | None, new: float | None) -> float | None:
    return None if old is None or new is None else new - old


def _slo_counts_delta(old: SloCounts | None, new: SloCounts | None) -> SloCounts | None:
    return None if old is None or new is None else SloCounts._make(map(sub, new, old))


def _by_tpot_target_delta(
    old: Mapping[float, float] | None, new: Mapping[float, float] | None
) -> Mapping[float, float] | None:
    if old is None or new is None:
        return None
    return _by_key_delta(old, new)


def _by_key_delta(old: Mapping[KeyT, float], new: Mapping[KeyT, float]) -> dict[KeyT, float]:
    return {key: count - old.get(key, 0.0) for key, count in new.items()}


def _was_reset(old: BucketCounts | None, new: BucketCounts | None) -> bool:
    """Whether a histogram was reset: its edges changed, or a count decreased."""
    if old is None or new is None:
        return False
    return new.edges != old.edges or new.value_sum < old.value_sum or any(map(lt, new.counts, old.counts))


def _histogram_delta(old: BucketCounts | None, new: BucketCounts | None) -> BucketCounts | None:
    return None if old is None or new is None else difference(new, old)
