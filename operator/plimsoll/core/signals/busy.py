"""Windows in which an engine was never idle, for its calibration.

Problem: what a step costs is time over steps, and time in which nothing ran is not the steps'. Engines count no busy
seconds; that some request ran at either end of a window says nothing of its middle.

Idea: requests tell how long a step takes: the mean time per output token of those that ended. An engine that took far
fewer steps than that was idle in between. While the batch is small the two must agree closely; a larger one does not
run empty within seconds, but its steps stretch as it grows (up to twofold on recorded ramps), so that only a gross
contradiction counts. Nor does an engine before which many wait; of one that prefills for others, whose answers end with
their first token, nothing else tells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from plimsoll.core.buckets import count
from plimsoll.core.calibration.window import MIN_STEPS, WindowSums, fault
from plimsoll.core.ports import EngineReading
from plimsoll.core.signals.intervals import EngineInterval, together

SHORTEST_S: Final = 2.0
LONGEST_S: Final = 30.0  # a large model that prefills takes a step or a few a second, and a window needs enough of them
_FEW_RUNNING: Final = 8.0  # with a mean of as many, none at all is one moment in three thousand (Poisson)
_SLACK: Final = 1.15  # of a step's mean time, as recorded under light load without a gap; a fifth idle makes 1.2
_RAMP: Final = 3.0
_SPECULATES: Final = 1.5  # more tokens than this for each sequence and step, over a minute, are no noise of the gauge
_ENDED: Final = 3.0  # fewer requests make no mean


@dataclass(frozen=True, slots=True)
class Pace:
    """What a tier's requests say of its steps; None is not known.

    tpot_s: mean time per output token. tokens_per_step: of one sequence.
    """

    tpot_s: float | None = None
    tokens_per_step: float | None = None

    @property
    def step_s(self) -> float | None:
        """How long a step takes as requests see it."""
        if not self.tpot_s:
            return None
        return self.tpot_s * self.step_tokens

    @property
    def step_tokens(self) -> float:
        """Tokens that a step gives a sequence: 1 but where it speculates."""
        tokens = self.tokens_per_step or 1.0
        return tokens if tokens > _SPECULATES else 1.0


@dataclass(slots=True)
class Open:
    """A window that is not over yet. start: the reading that it begins with; None while nothing runs."""

    start: EngineReading | None = None
    sums: EngineInterval | None = None
    request_s: float = 0.0  # running requests, integrated
    least: float = 0.0  # requests there at any reading: those that wait keep an engine busy as well

    def begin(self, reading: EngineReading) -> None:
        """Start anew with a reading, if anything runs."""
        running = reading.running or 0.0
        self.start, self.sums, self.request_s = (reading if running else None), None, 0.0
        self.least = running + (reading.waiting or 0.0)

    def add(self, last: EngineReading, new: EngineReading, interval: EngineInterval, pace: Pace) -> WindowSums | None:
        """The window that ends with this interval (from `last` to `new`), if it does and was never idle."""
        if self.start is None or not last.running or not new.running:
            self.begin(new)
            return None
        self.sums = interval if self.sums is None else together(self.sums, interval)
        self.request_s += (last.running + new.running) / 2.0 * interval.seconds
        self.least = min(self.least, new.running + (new.waiting or 0.0))
        few = (self.sums.steps or 0.0) < MIN_STEPS and self.sums.seconds < LONGEST_S
        if self.sums.seconds < SHORTEST_S or few:
            return None
        window = _window(new, self.sums, self.request_s, self.least, pace)
        self.begin(new)
        return window


def _window(last: EngineReading, sums: EngineInterval, request_s: float, least: float, pace: Pace) -> WindowSums | None:
    steps, computed, output = sums.steps, sums.computed_tokens, sums.generated_tokens
    if steps is None or computed is None or output is None or steps <= 0.0:
        return None
    prompt = sums.local_prompt_tokens
    window = WindowSums(
        end_s=last.at_s,
        busy_s=sums.seconds,
        steps=steps,
        computed_tokens=computed,
        output_tokens=output,
        prompt_tokens=max(0.0, computed - output) if prompt is None else prompt,
        mean_running=request_s / sums.seconds,
        replica=last.pod,
    )
    return window if _never_idle(sums, steps, least, pace) and fault(window) is None else None


def _never_idle(sums: EngineInterval, steps: float, least: float, pace: Pace) -> bool:
    tpot = sums.tpot_s
    if tpot is not None and count(tpot) >= _ENDED and tpot.total > 0.0:
        pace = Pace(tpot.total / count(tpot), pace.tokens_per_step)
    if pace.step_s is None:
        return least >= _FEW_RUNNING
    return sums.seconds <= steps * pace.step_s * (_SLACK if least < _FEW_RUNNING else _RAMP)
