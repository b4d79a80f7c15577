"""Windows of an engine that does not report step times, from the times that its requests had.

Problem: vLLM counts its steps, and tells of completed requests how long a token took, so that busy time shows. Other
engines lack one of the two, and their gauges may be old or change with completed requests only.

Idea: every decoding request gets one token per step. So the mean inter-token latency is the step time that requests
saw, with the prefills that ran in between, and tokens times that latency are the mean number of decoding requests
(Little 1961). A window is then the time in which at least one request decoded:

- where the engine counts steps, their number times the step time, and at most the window;
- else the window's share 1 - exp(-n) for a mean of n decoding requests (Poisson: no request in exp(-n) of the time).
  As many steps ran as fit into it, and that share of the prompts arrived in it;
- an engine that counts the seconds of its steps has all of it measured.

No gauge is used. Where tokens are counted with the request that ends, tokens and latencies are of the same requests,
and a window is long enough for several of them. Such sums are less certain than counted steps: `WindowSums.weight`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from plimsoll.core.demand.busy_windows import MAX_WINDOW_S, MIN_WINDOW_S
from plimsoll.core.demand.counter_delta import EngineInterval, merge_intervals
from plimsoll.core.engine_model.calibration.counter_window import MIN_STEPS, WindowSums, validity_error
from plimsoll.core.histogram import total_count
from plimsoll.core.ports import BucketCounts, EngineReading

DERIVED_WEIGHT: Final = 0.5  # of a window with live latencies, next to one with counted steps
COMPLETED_WEIGHT: Final = 0.25  # of one whose latencies and tokens are those of requests that ended in it


class _StepTime(NamedTuple):
    """Mean step time as requests saw it, seconds. is_live: whether each token counted at once."""

    seconds: float
    is_live: bool


class _BusyTime(NamedTuple):
    """Seconds in which steps ran, their number, and the share of the prompts in them."""

    seconds: float
    steps: float
    prompt_share: float = 1.0


def needs_derivation(reading: EngineReading) -> bool:
    """Whether an engine's windows have to be derived: it reports no steps, or no time per token of completed requests,
    but other times.
    """
    if reading.busy_s is not None:
        return True
    has_times = any(one is not None for one in (reading.itl_s, reading.decode_s, reading.tpot_s))
    return has_times and (reading.steps is None or reading.tpot_s is None)


@dataclass(slots=True)
class DerivedWindow:
    """A window that has not ended. totals: since its start, None without any."""

    totals: EngineInterval | None = None

    def extend(self, current: EngineReading, interval: EngineInterval) -> WindowSums | None:
        """Extend the window by an interval, which ends with `current`. Returns its sums if it ends here, else None."""
        self.totals = interval if self.totals is None else merge_intervals(self.totals, interval)
        if not generated_tokens(self.totals):  # a window begins with tokens, so that no idle time comes before them
            self.totals = None
            return None
        totals, step_time = self.totals, step_time_of(self.totals)
        is_live = totals.busy_s is not None or (step_time is not None and step_time.is_live)
        if totals.seconds < (MIN_WINDOW_S if is_live else MAX_WINDOW_S):
            return None
        window = _window_sums(current, totals, step_time, DERIVED_WEIGHT if is_live else COMPLETED_WEIGHT)
        if totals.seconds < MAX_WINDOW_S and (window is None or window.steps < MIN_STEPS):
            return None
        self.totals = None
        return window if window is not None and validity_error(window) is None else None


def step_time_of(totals: EngineInterval) -> _StepTime | None:
    """The mean time per token, the best source first: every token, decoding seconds, means of completed requests."""
    if (seconds := _mean(totals.itl_s)) is not None:
        return _StepTime(seconds, is_live=True)
    if totals.decode_s and totals.generated_tokens:
        return _StepTime(totals.decode_s / totals.generated_tokens, is_live=False)
    seconds = _mean(totals.tpot_s)
    return None if seconds is None else _StepTime(seconds, is_live=False)


def _window_sums(
    end_reading: EngineReading, totals: EngineInterval, step_time: _StepTime | None, weight: float
) -> WindowSums | None:
    output, prompt = generated_tokens(totals), prompt_tokens(totals)
    if not output or prompt is None or (busy := _busy_time(totals, step_time, output)) is None:
        return None
    prompt *= busy.prompt_share
    return WindowSums(
        end_s=end_reading.at_s,
        busy_s=busy.seconds,
        steps=busy.steps,
        computed_tokens=prompt + output,
        output_tokens=output,
        prompt_tokens=prompt,
        mean_running=max(1.0, output / busy.steps),
        replica=end_reading.pod,
        weight=weight,
    )


def _busy_time(totals: EngineInterval, step_time: _StepTime | None, output: float) -> _BusyTime | None:
    if totals.busy_s is not None:
        return _BusyTime(totals.busy_s, totals.steps) if totals.steps else None
    if step_time is None:
        return None
    if totals.steps:
        return _BusyTime(min(totals.seconds, totals.steps * step_time.seconds), totals.steps)
    share = -math.expm1(-output * step_time.seconds / totals.seconds)
    return _BusyTime(share * totals.seconds, share * totals.seconds / step_time.seconds, share)


def generated_tokens(interval: EngineInterval) -> float | None:
    """Output tokens: as generated, else of the requests that completed."""
    if interval.generated_tokens is not None:
        return interval.generated_tokens
    return None if interval.output_tokens is None else interval.output_tokens.value_sum


def prompt_tokens(interval: EngineInterval) -> float | None:
    """Computed prompt tokens. Where an engine does not separate cached ones, all count: what is learned is then the
    mean cost of both.
    """
    for tokens in (interval.local_prompt_tokens, interval.all_prompt_tokens):
        if tokens is not None:
            return tokens
    return None if interval.prompt_tokens is None else interval.prompt_tokens.value_sum


def _mean(histogram: BucketCounts | None) -> float | None:
    size = 0.0 if histogram is None else total_count(histogram)
    return None if histogram is None or size <= 0.0 or histogram.value_sum <= 0.0 else histogram.value_sum / size
