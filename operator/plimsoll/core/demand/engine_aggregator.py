"""Engine readings of one tier, aggregated.

Problem: pods start, stop and miss scrapes, and each counts for itself. The sum or the mean over the pods that answered
is not the tier's, and percentiles of pods cannot be combined.

Idea: a pod keeps only its last reading. Its counter increases go into the tier's last minute, as sums and as one
histogram. Gauges are summed over the existing pods, scaled up from those with a fresh reading.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from plimsoll.core.autoscaling.observations import LaggingSignals, scaled_sum
from plimsoll.core.demand.busy_windows import ObservedStepTiming, OpenWindow
from plimsoll.core.demand.completion_estimator import CompletionEstimator
from plimsoll.core.demand.counter_delta import MAX_READING_GAP_S, EngineInterval, engine_interval, is_fresh, is_newer
from plimsoll.core.demand.derived_windows import DerivedWindow, needs_derivation
from plimsoll.core.demand.histogram_percentile import percentile
from plimsoll.core.demand.service_metrics import TierMetrics
from plimsoll.core.demand.sliding_window import SLIDING_WINDOW_S, DecayingSum, SlidingWindow
from plimsoll.core.engine_model.calibration.counter_window import WindowSums
from plimsoll.core.engine_model.inter_token import ITL_SHARE
from plimsoll.core.engine_model.measured_limits import EngineBatch, KvDeviation
from plimsoll.core.histogram import quantile, total_count
from plimsoll.core.ports import BucketCounts, EngineReading
from plimsoll.core.types import Role, Unavailable

_MAX_WINDOWS: Final = 512  # busy windows kept until `collect`
_DEVIATION_TIME_S: Final = 60.0  # far above a step, whose prompts count at its end; few requests take much longer

_NOT_REPORTED: Final = Unavailable("the engines do not tell")
_NONE_COMPLETED: Final = Unavailable("no request ended in the last minute")
_NO_INTER_TOKEN_TIMES: Final = Unavailable("no answer had a second token in the last minute")
_NONE_READY: Final = Unavailable("no engine of the tier is ready")
_NOTHING_DRAFTED: Final = Unavailable("the engines drafted no token in the last minute")
_PREFILL_ONLY: Final = Unavailable("a prefill engine decodes nothing")
_TTFT_OF_PREFILL_TIER: Final = Unavailable("the time to the first token is that of the prefill tier")


class _MinuteTotals(NamedTuple):
    """Counter increases of the tier's pods, each with the seconds in which it was observed."""

    preemptions: float | None = None
    preemptions_observed_s: float | None = None
    post_s: float | None = None
    post_observed_s: float | None = None
    tpot_s: BucketCounts | None = None
    ttft_s: BucketCounts | None = None
    itl_s: BucketCounts | None = None
    completed: float | None = None
    draft_tokens: float | None = None
    accepted_draft_tokens: float | None = None


class _StepTimingTotals(NamedTuple):
    """Completed requests, the sum of their times per output token, and tokens and steps of running sequences."""

    completed: float
    tpot_s: float
    generated_tokens: float
    sequence_steps: float


@dataclass(slots=True)
class _PodState:
    last_reading: EngineReading
    open_window: OpenWindow = field(default_factory=OpenWindow)
    derived_window: DerivedWindow = field(default_factory=DerivedWindow)
    completions: CompletionEstimator | None = None
    kv_deviation: KvDeviation | None = None

    def reset(self) -> None:
        """Drop what was known before the last reading."""
        self.open_window.restart(self.last_reading)
        self.derived_window = DerivedWindow()
        self.completions = self.kv_deviation = None


class EngineAggregator:
    """Aggregates the engines of one role of one service."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._pods: dict[str, _PodState] = {}
        self._last_minute: SlidingWindow[_MinuteTotals] = SlidingWindow()
        self._step_timing_totals: DecayingSum[_StepTimingTotals] = DecayingSum(SLIDING_WINDOW_S, 0.0)
        self._windows: deque[WindowSums] = deque(maxlen=_MAX_WINDOWS)
        self._batches: deque[tuple[str, EngineBatch]] = deque(maxlen=_MAX_WINDOWS)

    def observe(self, reading: EngineReading) -> EngineInterval | None:
        """Return the engine's counter increases since its last reading; None where unknown or if this reading is not
        new.

        reading: an `answered` reading with a time.
        """
        pod = self._pods.get(reading.pod)
        if pod is None:
            self._evict_stale(reading.at_s, ())
            pod = self._pods[reading.pod] = _PodState(reading)
            pod.reset()
            return None
        if not is_newer(reading.at_s, pod.last_reading.at_s):
            return None
        previous, pod.last_reading = pod.last_reading, reading
        interval = engine_interval(previous, reading)
        if interval is None:
            pod.reset()
        elif self._role is Role.DECODE and (previous.waiting or reading.waiting):
            pod.kv_deviation = None  # requests that wait hold KV that they received, whose tokens do not count yet
        else:
            pod.kv_deviation = _updated_kv_deviation(pod.kv_deviation, interval, previous.kv_used, reading.kv_used)
        if reading.running is not None and reading.waiting is not None:
            batch = EngineBatch(reading.running, reading.waiting, reading.kv_used, pod.kv_deviation)
            self._batches.append((reading.pod, batch))
        if interval is None:
            return None
        self._update_step_timing(interval, previous, reading)
        step_timing = self._step_timing()
        pod.completions = _updated_completions(pod.completions, previous, interval, step_timing)
        if self._role is not Role.PREFILL and needs_derivation(reading):
            window = pod.derived_window.extend(reading, interval)
        else:
            window = pod.open_window.extend(previous, reading, interval, step_timing)
        if window is not None:
            self._windows.append(window)
        self._last_minute.add(reading.at_s, _minute_totals(interval, window))
        return interval

    def completions(self, pod: str) -> CompletionEstimator | None:
        """Completion estimator of an engine; None where its readings lack what the estimator needs."""
        return self._pods[pod].completions

    def _unanswered(self, pods: Collection[str]) -> Unavailable:
        """Why no pod has a fresh reading."""
        if not pods:
            return _NONE_READY
        if not any(name in self._pods for name in pods):
            return Unavailable(f"none of {len(pods)} pods has sent metrics yet")
        return Unavailable(f"none of {len(pods)} pods has answered for {MAX_READING_GAP_S:.0f} s")

    def collect(
        self,
        now_s: float,
        pods: Collection[str],
        share: float,
        clients_ttft_s: float | Unavailable,
        clients_e2e_s: float | Unavailable,
    ) -> TierMetrics:
        """Metrics of the tier at now_s. pods: the existing pods. share: the SLO percentile, 0 to 1.

        Returns each busy window once: the next call returns only newer ones.
        """
        self._evict_stale(now_s, pods)
        windows, batches = tuple(self._windows), tuple(batch for pod, batch in self._batches if pod in pods)
        self._windows.clear()
        self._batches.clear()
        readings = [self._pods[name].last_reading if self._is_fresh(name, now_s) else None for name in pods]
        fresh_readings = [reading for reading in readings if reading is not None]
        if not fresh_readings:
            unavailable = self._unanswered(pods)
            return TierMetrics(
                LaggingSignals(
                    unavailable, unavailable, unavailable, unavailable, unavailable, unavailable, unavailable
                ),
                0.0 if pods else 1.0,
                windows=windows,
                in_flight=unavailable,
                kv_post_share=unavailable,
            )
        totals = self._last_minute.total(now_s) or _MinuteTotals()
        has_tpot, has_itl = (
            any(getattr(reading, name) is not None for reading in fresh_readings) for name in ("tpot_s", "itl_s")
        )
        return TierMetrics(
            LaggingSignals(
                tpot_s=_PREFILL_ONLY if self._role is Role.PREFILL else _percentile(totals.tpot_s, share, has_tpot),
                ttft_s=self._ttft(totals, share, clients_ttft_s),
                waiting=scaled_sum(
                    [_NOT_REPORTED if reading is None else _reported(reading.waiting) for reading in readings]
                )[0],
                kv_used=max(
                    (reading.kv_used for reading in fresh_readings if reading.kv_used is not None),
                    default=_NOT_REPORTED,
                ),
                preemptions_per_s=_tier_rate(totals.preemptions, totals.preemptions_observed_s, len(pods)),
                e2e_s=_PREFILL_ONLY if self._role is Role.PREFILL else clients_e2e_s,
                itl_s=_PREFILL_ONLY if self._role is Role.PREFILL else _itl_percentile(totals.itl_s, has_itl),
            ),
            coverage=len(fresh_readings) / len(readings),
            silent=tuple(sorted(name for name, reading in zip(pods, readings, strict=True) if reading is None)),
            age_s=max(max(0.0, now_s - reading.at_s) for reading in fresh_readings),
            windows=windows,
            batches=batches,
            in_flight=scaled_sum([_requests_in_engine(reading) for reading in fresh_readings])[0],
            kv_post_share=_tier_rate(totals.post_s, totals.post_observed_s),
            tpot_histogram=None if self._role is Role.PREFILL else totals.tpot_s,
            completed=totals.completed or 0.0,
            draft_acceptance=_draft_acceptance(totals),
        )

    def _ttft(self, totals: _MinuteTotals, share: float, clients_ttft_s: float | Unavailable) -> float | Unavailable:
        if self._role is Role.SERVE:
            return clients_ttft_s
        return _percentile(totals.ttft_s, share) if self._role is Role.PREFILL else _TTFT_OF_PREFILL_TIER

    def _update_step_timing(self, interval: EngineInterval, previous: EngineReading, current: EngineReading) -> None:
        if not previous.running or not current.running or interval.steps is None or interval.generated_tokens is None:
            return
        tpot = interval.tpot_s
        running = (previous.running + current.running) / 2.0
        completed, total_s = (0.0, 0.0) if tpot is None else (total_count(tpot), tpot.value_sum)
        timing_totals = _StepTimingTotals(completed, total_s, interval.generated_tokens, running * interval.steps)
        self._step_timing_totals.add(current.at_s, interval.seconds, timing_totals)

    def _step_timing(self) -> ObservedStepTiming:
        totals = self._step_timing_totals.sum
        if totals is None:
            return ObservedStepTiming()
        return ObservedStepTiming(
            totals.tpot_s / totals.completed if totals.completed > 0.0 else None,
            totals.generated_tokens / totals.sequence_steps if totals.sequence_steps > 0.0 else None,
        )

    def _is_fresh(self, pod: str, now_s: float) -> bool:
        state = self._pods.get(pod)
        return state is not None and is_fresh(state.last_reading.at_s, now_s, MAX_READING_GAP_S)

    def _evict_stale(self, now_s: float, pods: Collection[str]) -> None:
        """Drop pods that neither exist nor have a recent reading."""
        for name in [name for name in self._pods if name not in pods and not self._is_fresh(name, now_s)]:
            del self._pods[name]


def _minute_totals(interval: EngineInterval, window: WindowSums | None) -> _MinuteTotals:
    seconds = interval.seconds
    return _MinuteTotals(
        preemptions=interval.preemptions,
        preemptions_observed_s=None if interval.preemptions is None else seconds,
        post_s=interval.post_s,
        post_observed_s=None if interval.post_s is None else seconds,
        tpot_s=interval.tpot_s,
        ttft_s=interval.ttft_s,
        itl_s=interval.itl_s,
        completed=None if interval.output_tokens is None else total_count(interval.output_tokens),
        draft_tokens=interval.draft_tokens,
        accepted_draft_tokens=interval.accepted_draft_tokens,
    )


def _draft_acceptance(totals: _MinuteTotals) -> float | Unavailable:
    """Share of the drafted tokens that verification accepted."""
    if totals.accepted_draft_tokens is None or not totals.draft_tokens:
        return _NOTHING_DRAFTED
    return min(1.0, totals.accepted_draft_tokens / totals.draft_tokens)


def _updated_completions(
    completions: CompletionEstimator | None,
    previous: EngineReading,
    interval: EngineInterval,
    step_timing: ObservedStepTiming,
) -> CompletionEstimator | None:
    """Advance the estimator by an interval, with the engine's steps as the clock. previous: reading before it.

    Returns None where the interval lacks a needed figure.
    """
    if interval.steps is None or previous.steps is None or interval.ttft_s is None or previous.running is None:
        return None
    tokens_per_step = step_timing.tokens_per_sequence_step
    completions = completions or CompletionEstimator(previous.running, previous.steps * tokens_per_step)
    completions.advance(interval.steps * tokens_per_step, total_count(interval.ttft_s))
    return completions


def _updated_kv_deviation(
    deviation: KvDeviation | None, interval: EngineInterval, used_before: float | None, used: float | None
) -> KvDeviation | None:
    """Advance it by an interval: started prompts and generated tokens come, those of completed requests go.

    Returns None where the interval lacks a needed figure or has one in error.
    """
    local, cached, generated = interval.local_prompt_tokens, interval.cached_prompt_tokens, interval.generated_tokens
    prompts, outputs = interval.prompt_tokens, interval.output_tokens
    if local is None or cached is None or generated is None or prompts is None or outputs is None:
        return None
    if used_before is None or used is None:
        return None
    added = local + cached + (interval.transferred_prompt_tokens or 0.0) + generated
    before, kept = deviation or KvDeviation(), math.exp(-interval.seconds / _DEVIATION_TIME_S)
    tokens = kept * before.tokens + added - prompts.value_sum - outputs.value_sum
    found = KvDeviation(tokens, kept * before.used + used - used_before)
    return found if math.isfinite(tokens) and abs(found.used) <= 1.0 else None  # what is in error would stay in it


def _requests_in_engine(reading: EngineReading) -> float | Unavailable:
    return _NOT_REPORTED if reading.running is None else reading.running + (reading.waiting or 0.0)


def _percentile(histogram: BucketCounts | None, share: float, is_reported: bool = False) -> float | Unavailable:
    """Percentile of the last minute. is_reported: whether an engine has the histogram, even if it has not grown."""
    value = None if histogram is None else percentile(histogram, share)
    if value is not None:
        return value
    return _NONE_COMPLETED if is_reported or histogram is not None else _NOT_REPORTED


def _itl_percentile(histogram: BucketCounts | None, is_reported: bool) -> float | Unavailable:
    """Percentile of ITL at ITL_SHARE, the one that an ITL target applies to.

    Steps with and without a prefill form two modes, to which no single distribution fits. Gaps are therefore spread
    evenly inside a bucket. In the first bucket the mean gives a better estimate. is_reported: as for `_percentile`.
    """
    uniform = None if histogram is None else quantile(histogram, ITL_SHARE)
    if histogram is None or uniform is None:
        return _NO_INTER_TOKEN_TIMES if is_reported or histogram is not None else _NOT_REPORTED
    return uniform if uniform > histogram.edges[0] else percentile(histogram, ITL_SHARE) or uniform


def _reported(value: float | None) -> float | Unavailable:
    return _NOT_REPORTED if value is None else value


def _tier_rate(amount: float | None, seconds: float | None, pod_count: int = 1) -> float | Unavailable:
    """Rate of `pod_count` pods, from the pods that reported it."""
    return _NOT_REPORTED if amount is None or not seconds else amount / seconds * pod_count
