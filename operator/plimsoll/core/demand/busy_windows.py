"""Windows in which an engine was never idle, for calibration of the step model.

Problem: step time is busy time over steps, and idle time must not count. Engines do not report busy seconds. A request
that runs at both ends of a window says nothing about the time between.

Idea: completed requests give the step time as the mean time per output token. An engine that took far fewer steps than
this implies was idle in between. For a small batch the two must agree closely. A larger batch does not drain within
seconds, but its steps lengthen as it grows (up to twofold on recorded ramps). There, only a gross contradiction counts.
An engine with many queued requests is not idle either. A prefill engine has no other evidence, because its responses
end with their first token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from plimsoll.core.demand.counter_delta import EngineInterval, merge_intervals
from plimsoll.core.engine_model.calibration.counter_window import MIN_STEPS, WindowSums, validity_error
from plimsoll.core.histogram import total_count
from plimsoll.core.ports import EngineReading

MIN_WINDOW_S: Final = 2.0
MAX_WINDOW_S: Final = (
    30.0  # a large model in prefill takes only a few steps per second, and a window needs enough of them
)
_BUSY_CONCURRENCY: Final = 8.0  # at this mean, the engine is empty in one moment of three thousand (Poisson)
_LIGHT_LOAD_TOLERANCE: Final = (
    1.15  # ratio to the mean step time, recorded at light load without idle time; a fifth idle gives 1.2
)
_HIGH_LOAD_TOLERANCE: Final = 3.0
_MIN_SPECULATIVE_TOKENS: Final = (
    1.5  # more tokens per sequence and step than this, over a minute, are not noise of the gauge
)
_MIN_COMPLETED: Final = 3.0  # requests; fewer give no mean


@dataclass(frozen=True, slots=True)
class ObservedStepTiming:
    """Step timing that a tier's completed requests imply; None where unknown.

    tpot_s: mean time per output token, seconds. tokens_per_step: tokens of one sequence per step.
    """

    tpot_s: float | None = None
    tokens_per_step: float | None = None

    @property
    def step_s(self) -> float | None:
        """Step time in seconds as requests see it, None where unknown."""
        if not self.tpot_s:
            return None
        return self.tpot_s * self.tokens_per_sequence_step

    @property
    def tokens_per_sequence_step(self) -> float:
        """Tokens that one step adds to a sequence: 1 unless the engine speculates."""
        tokens = self.tokens_per_step or 1.0
        return tokens if tokens > _MIN_SPECULATIVE_TOKENS else 1.0


@dataclass(slots=True)
class OpenWindow:
    """A window that has not ended. first_reading: its first reading; None while nothing runs."""

    first_reading: EngineReading | None = None
    totals: EngineInterval | None = None
    request_s: float = 0.0  # running requests, integrated
    min_requests: float = 0.0  # smallest number at any reading, queued ones included: they keep the engine busy too

    def restart(self, reading: EngineReading) -> None:
        """Start a new window at a reading, if any request runs."""
        running = reading.running or 0.0
        self.first_reading, self.totals, self.request_s = (reading if running else None), None, 0.0
        self.min_requests = running + (reading.waiting or 0.0)

    def extend(
        self, previous: EngineReading, current: EngineReading, interval: EngineInterval, step_timing: ObservedStepTiming
    ) -> WindowSums | None:
        """Extend the window by an interval, from `previous` to `current`.

        Returns the sums of the window if it ends here and the engine was never idle in it; else None.
        """
        if self.first_reading is None or not previous.running or not current.running:
            self.restart(current)
            return None
        self.totals = interval if self.totals is None else merge_intervals(self.totals, interval)
        self.request_s += (previous.running + current.running) / 2.0 * interval.seconds
        self.min_requests = min(self.min_requests, current.running + (current.waiting or 0.0))
        too_few_steps = (self.totals.steps or 0.0) < MIN_STEPS and self.totals.seconds < MAX_WINDOW_S
        if self.totals.seconds < MIN_WINDOW_S or too_few_steps:
            return None
        window = _window_sums(current, self.totals, self.request_s, self.min_requests, step_timing)
        self.restart(current)
        return window


def _window_sums(
    end_reading: EngineReading,
    totals: EngineInterval,
    request_s: float,
    min_requests: float,
    step_timing: ObservedStepTiming,
) -> WindowSums | None:
    steps, computed_tokens, output_tokens = totals.steps, totals.computed_tokens, totals.generated_tokens
    if steps is None or computed_tokens is None or output_tokens is None or steps <= 0.0:
        return None
    prompt_tokens = totals.local_prompt_tokens
    window = WindowSums(
        end_s=end_reading.at_s,
        busy_s=totals.seconds,
        steps=steps,
        computed_tokens=computed_tokens,
        output_tokens=output_tokens,
        prompt_tokens=max(0.0, computed_tokens - output_tokens) if prompt_tokens is None else prompt_tokens,
        mean_running=request_s / totals.seconds,
        replica=end_reading.pod,
    )
    return (
        window if _is_always_busy(totals, steps, min_requests, step_timing) and validity_error(window) is None else None
    )


def _is_always_busy(totals: EngineInterval, steps: float, min_requests: float, step_timing: ObservedStepTiming) -> bool:
    tpot = totals.tpot_s
    if tpot is not None and total_count(tpot) >= _MIN_COMPLETED and tpot.value_sum > 0.0:
        step_timing = ObservedStepTiming(tpot.value_sum / total_count(tpot), step_timing.tokens_per_step)
    if step_timing.step_s is None:
        return min_requests >= _BUSY_CONCURRENCY
    return totals.seconds <= steps * step_timing.step_s * (
        _LIGHT_LOAD_TOLERANCE if min_requests < _BUSY_CONCURRENCY else _HIGH_LOAD_TOLERANCE
    )
